//! Runs calls on simulated ranks.

use std::collections::HashMap;
use std::sync::Arc;

use ep_transport::{Group, Queue};

use super::device::{Devices, Op, Rng};
use super::effects::{BAD, Effect, Ranks};
use super::program::{Call, LANES, SLOTS, Sent};
use super::rank::{Layer, queue};
use super::turns::{How, Mutant, Outcome, Shared};
use crate::gpu::Tuning;
use crate::{
    CombineOpts, CombineSend, DType, DeviceIds, DispatchOpts, DispatchSend, Dispatched, Ep,
    EpError, Handle, IdKind, Layout, MoeShape, Payload, PayloadKind, Precision, Route, Rows,
    RowsMut, combine_all, dispatch_all,
};

pub const TOKENS: usize = 512;
const HIDDEN: usize = 64;
/// As many as ranks, so that a token may go to all.
const TOPK: usize = 5;

/// A group to be simulated.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub world: usize,
    pub gpus: usize,
    /// Hardware queues per GPU.
    pub queues: usize,
    pub mutant: Mutant,
    pub seed: u64,
    pub far: Far,
}

/// Which ranks are not mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Far {
    #[default]
    None,
    /// Ranks of so many nodes, dealt by a seed, are put to.
    Bulk { nodes: usize, in_parts: bool, once: bool },
    /// As that, but rows are exchanged.
    Paired { nodes: usize, in_parts: bool, once: bool },
    /// One or the other, in blocks of fixed size where sizes need not be known.
    Fixed { nodes: usize, paired: bool },
}

impl Setting {
    /// Whether some rank forwards rows to another one of its node.
    pub fn forwards(&self) -> bool {
        let Layer { nodes, once, .. } = self.layer();
        let size = |node| nodes.iter().filter(|&of| of == node).count();
        once && nodes.iter().any(|node| (2..nodes.len()).contains(&size(node)))
    }

    fn layer(&self) -> Layer {
        let ((nodes, in_parts, once), paired) = match self.far {
            Far::None => return layer(self.gpus),
            Far::Bulk { nodes, in_parts, once } => ((nodes, in_parts, once), false),
            Far::Paired { nodes, in_parts, once } => ((nodes, in_parts, once), true),
            Far::Fixed { nodes, paired } => ((nodes, false, false), paired),
        };
        let mut rng = Rng::new(!self.seed);
        let nodes = (0..self.world).map(|_| rng.below(nodes)).collect();
        let mut layer = layer(self.gpus);
        if let Far::Fixed { .. } = self.far {
            layer.shape = layer.shape.fixed_blocks();
        }
        Layer { nodes, paired, in_parts, once, ..layer }
    }
}

pub fn layer(gpus: usize) -> Layer {
    let shape = MoeShape::new(HIDDEN, TOPK, 8)
        .max_tokens(TOKENS)
        .expert_major(8)
        .payload(PayloadKind::Bf16);
    let (tuning, nodes) = (Tuning::default(), Vec::new());
    let (slots, lanes, sms) = (SLOTS, LANES, 16);
    let (paired, in_parts, once) = (false, false, false);
    Layer { shape, slots, lanes, sms, tuning, gpus, nodes, paired, in_parts, once }
}

/// A rank with what it has in flight.
pub struct Rank {
    pub ep: Ep,
    shared: Arc<Shared>,
    ordinal: usize,
    /// Its caller's streams.
    streams: [usize; 2],
    sending: [Option<(u64, Sent, DispatchSend)>; LANES],
    combining: [Option<(u64, CombineSend)>; LANES],
    /// With the stream that it is used on.
    results: HashMap<u64, (Dispatched, usize)>,
    handles: HashMap<u64, Handle>,
}

/// Where a caller keeps things of a kind, by number.
fn user(rank: usize, kind: u64, number: u64) -> u64 {
    (rank as u64 + 1) << 50 | kind << 44 | number << 24
}

impl Rank {
    pub fn new(ep: Ep, shared: Arc<Shared>, ordinal: usize, streams: [usize; 2]) -> Self {
        let (results, handles) = (HashMap::new(), HashMap::new());
        let (sending, combining) = (Default::default(), Default::default());
        Self { ep, shared, ordinal, streams, sending, combining, results, handles }
    }

    fn queue(&self, stream: usize) -> Queue {
        queue(stream, self.ordinal)
    }

    fn caller(&self, stream: usize, effect: Effect) {
        self.shared.submit(stream, Op::Work(effect));
    }

    fn payload(&self, place: u64) -> Payload<'static> {
        let (at, bytes) = (user(self.ep.rank(), 1, place), 2 * HIDDEN);
        // SAFETY: whatever uses the address is simulated.
        let rows =
            unsafe { Rows::from_device(self.ordinal, at, TOKENS, bytes, bytes, DType::Bf16) };
        Payload::new(rows).expect("bf16 rows")
    }

    fn ids(&self, place: u64, wrong: bool) -> u64 {
        user(self.ep.rank(), 2, place) | if wrong { BAD } else { 0 }
    }

    fn out(&self, number: u64) -> RowsMut<'static> {
        let (at, bytes) = (user(self.ep.rank(), 3, number), 2 * HIDDEN);
        // SAFETY: whatever uses the address is simulated.
        unsafe { RowsMut::from_device(self.ordinal, at, TOKENS, bytes, bytes, DType::Bf16) }
    }

    /// What the caller's kernels do before a dispatch, and its arguments.
    fn prepare(&self, number: u64, sent: &Sent) -> (Payload<'static>, Route<'_>, DispatchOpts) {
        let stream = self.streams[sent.queue];
        // A caller fills the same memory again once an operation is over on its stream.
        let place = (2 * sent.lane + sent.queue) as u64;
        let wrong = sent.bad && self.ep.rank() == number as usize % self.ep.world();
        let (payload, ids) = (self.payload(place), self.ids(place, wrong));
        self.caller(stream, Effect::Fill { at: payload.rows.as_ptr() as u64 });
        let route = match sent.cached {
            Some(handle) => Route::Cached(&self.handles[&handle]),
            None => {
                self.caller(stream, Effect::Fill { at: ids });
                // SAFETY: whatever uses the address is simulated.
                let ids =
                    unsafe { DeviceIds::from_raw(self.ordinal, ids, TOKENS * TOPK, IdKind::I32) };
                Route::Device { ids, weights: None }
            }
        };
        let opts = DispatchOpts {
            lane: sent.lane,
            layout: sent.layout,
            capacity: sent.capacity,
            ..DispatchOpts::default()
        };
        (payload, route, opts)
    }

    /// A result has come: the caller's experts work on it.
    fn arrived(&mut self, number: u64, stream: usize, mut result: Dispatched, keep: bool) {
        if keep {
            self.handles.insert(number, result.handle().clone());
        }
        let received = result.received.is_some();
        result.rows_mut(PayloadKind::Bf16).expect("bf16 rows");
        let experts = result.handle().layout() != Layout::RankMajor;
        let (rank, slot) = (self.ep.rank(), result.slot.index());
        let number_of = Some(number);
        let effect = Effect::Experts { rank, slot, experts, received, number: number_of };
        self.caller(stream, effect);
        self.results.insert(number, (result, stream));
    }

    fn collect(&self, stream: usize, number: u64) {
        let at = user(self.ep.rank(), 3, number);
        self.caller(stream, Effect::Collect { at, number });
    }

    fn combine_opts(&self, lane: usize, number: u64, reduced: bool) -> CombineOpts {
        let precision = match reduced {
            true => Precision::Reduced,
            false if self.ep.inner.across.hierarchical && number % 2 == 1 => Precision::NodeReduced,
            false => Precision::Exact,
        };
        CombineOpts { lane: Some(lane), precision, ..CombineOpts::default() }
    }

    pub fn call(&mut self, call: Call) -> Result<(), EpError> {
        match call {
            Call::Dispatch { number, sent, halves } => self.dispatch(number, sent, halves)?,
            Call::Receive { lane } => {
                let (number, sent, send) = self.sending[lane].take().expect("in flight");
                let stream = self.streams[sent.queue];
                let result = send.recv(&self.queue(stream))?;
                self.arrived(number, stream, result, sent.cached.is_none());
            }
            Call::DropSend { lane } => drop(self.sending[lane].take()),
            Call::Slot { number, handle, queue } => {
                let stream = self.streams[queue];
                let result = self.ep.combine_slot(&self.handles[&handle], &self.queue(stream))?;
                self.arrived(number, stream, result, false);
            }
            Call::Combine { number, lane, reduced, halves } => {
                let (result, stream) = self.results.remove(&number).expect("alive");
                let (queue, opts) = (self.queue(stream), self.combine_opts(lane, number, reduced));
                let send = result.combine_send(&queue, &opts)?;
                if halves {
                    self.combining[lane] = Some((number, send));
                    return Ok(());
                }
                send.recv(&queue, self.out(number))?;
                self.collect(stream, number);
            }
            Call::CombineReceive { lane } => {
                let (number, send) = self.combining[lane].take().expect("in flight");
                // Sums may be asked for on any stream.
                let stream = self.streams[number as usize % 2];
                send.recv(&self.queue(stream), self.out(number))?;
                self.collect(stream, number);
            }
            Call::DropCombine { lane } => drop(self.combining[lane].take()),
            Call::Release { number, dropped } => {
                let (result, stream) = self.results.remove(&number).expect("alive");
                if !dropped {
                    result.release(&self.queue(stream));
                }
            }
        }
        Ok(())
    }

    fn dispatch(&mut self, number: u64, sent: Sent, halves: bool) -> Result<(), EpError> {
        let stream = self.streams[sent.queue];
        let (payload, route, opts) = self.prepare(number, &sent);
        let send = match self.ep.dispatch_send(&self.queue(stream), payload, route, &opts) {
            Err(EpError::Capacity { .. }) if sent.bad => return Ok(()),
            other => other?,
        };
        assert!(!sent.bad, "a dispatch with a wrong id went through");
        if halves {
            self.sending[sent.lane] = Some((number, sent, send));
            return Ok(());
        }
        let result = send.recv(&self.queue(stream))?;
        self.arrived(number, stream, result, sent.cached.is_none());
        Ok(())
    }
}

/// Builds the ranks of a group.
pub fn build(setting: &Setting, layer: &Layer) -> (Arc<Shared>, Vec<Rank>) {
    let mut rng = Rng::new(setting.seed);
    let ranks = Ranks::new(setting.world, layer.lanes).apart(&layer.nodes, layer.once);
    let seed = rng.below(1 << 30) as u64;
    let devices = Devices::new(ranks, setting.gpus, setting.queues, Rng::new(seed));
    let shared = Arc::new(Shared::new(devices, setting.mutant, rng));
    let start = |group: Group| {
        shared.join_group(&group);
        let (shared, layer) = (shared.clone(), layer.clone());
        let streams = layer.streams(&shared, group.rank());
        std::thread::spawn(move || layer.build(&shared, &group, streams).0)
    };
    let groups = Group::local(setting.world).expect("ranks");
    let started: Vec<_> = groups.into_iter().map(start).collect();
    let eps = started.into_iter().map(|rank| rank.join().expect("a layer"));
    let rank = |ep: Ep| {
        let ordinal = ep.rank() % setting.gpus;
        let streams = [0; 2].map(|_| shared.with(|devices| devices.stream(ordinal)));
        Rank::new(ep, shared.clone(), ordinal, streams)
    };
    let ranks = eps.map(rank).collect();
    (shared, ranks)
}

/// Makes the calls on every rank, each a thread of its own.
pub fn as_threads(setting: &Setting, calls: &[Call]) -> Outcome {
    let (shared, mut ranks) = build(setting, &setting.layer());
    shared.expect(setting.world);
    std::thread::scope(|scope| {
        for rank in &mut ranks {
            let shared = &shared;
            scope.spawn(move || {
                let _part = shared.enter(rank.ep.rank());
                let made = calls.iter().try_for_each(|&call| rank.call(call));
                // Whatever is left comes to its end, on all ranks in the same order.
                rank.sending.iter_mut().for_each(|send| drop(send.take()));
                rank.combining.iter_mut().for_each(|send| drop(send.take()));
                let mut left: Vec<_> = rank.results.drain().collect();
                left.sort_by_key(|left| left.0);
                drop(left);
                if let Err(e) = made
                    && rank.ep.inner.usable("simulated").is_ok()
                {
                    shared.with(|d| d.memory.fault(|| format!("a call failed: {e}")));
                }
            });
        }
    });
    finish(&shared, &ranks)
}

/// Makes the calls for all ranks on one thread, phase by phase, on one stream.
pub fn phase_by_phase(setting: &Setting, calls: &[Call]) -> Outcome {
    let (shared, mut ranks) = build(setting, &setting.layer());
    let stream = ranks[0].streams[0];
    ranks.iter_mut().for_each(|rank| rank.streams = [stream; 2]);
    shared.expect(1);
    let part = shared.enter(0);
    for &call in calls {
        let made = all_at_once(&mut ranks, stream, call);
        if let Err(e) = made {
            shared.with(|d| d.memory.fault(|| format!("{call:?} failed: {e}")));
            break;
        }
        shared.turn(How::Go);
    }
    ranks.iter_mut().for_each(|rank| rank.results.clear());
    drop(part);
    finish(&shared, &ranks)
}

fn all_at_once(ranks: &mut [Rank], stream: usize, call: Call) -> Result<(), EpError> {
    let queue = queue(stream, 0);
    match call {
        Call::Dispatch { number, sent, .. } => {
            let prepared: Vec<_> = ranks.iter().map(|rank| rank.prepare(number, &sent)).collect();
            let opts = prepared[0].2;
            let calls: Vec<_> =
                ranks.iter().zip(prepared).map(|(rank, p)| (&rank.ep, p.0, p.1)).collect();
            match dispatch_all(&queue, &calls, &opts) {
                Err(EpError::Capacity { .. }) if sent.bad => {}
                results => {
                    for (rank, result) in ranks.iter_mut().zip(results?) {
                        rank.arrived(number, stream, result, sent.cached.is_none());
                    }
                }
            }
        }
        Call::Combine { number, lane, reduced, .. } => {
            let one = |rank: &mut Rank| {
                let (result, _) = rank.results.remove(&number).expect("alive");
                (result, rank.out(number).into())
            };
            let opts = ranks[0].combine_opts(lane, number, reduced);
            let calls = ranks.iter_mut().map(one).collect();
            combine_all(&queue, calls, &opts)?;
            ranks.iter().for_each(|rank| rank.collect(stream, number));
        }
        other => {
            for rank in ranks {
                rank.call(other)?;
            }
        }
    }
    Ok(())
}

fn finish(shared: &Shared, ranks: &[Rank]) -> Outcome {
    let mut outcome = shared.outcome();
    let held = ranks.iter().filter(|rank| rank.ep.free_slots() != SLOTS).count();
    if held > 0 && !outcome.deadlock {
        outcome.faults.push(format!("{held} ranks have not all their slots back"));
    }
    outcome
}
