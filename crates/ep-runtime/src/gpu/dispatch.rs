//! Dispatch on streams: *post* lays out and announces, *advance* moves rows once the peers' flags
//! are up, *settle* tells the host what it must know, *recv* awaits the peers' rows.

use std::sync::Arc;

use ep_kernels::PayloadKind;
use ep_kernels::cuda::moe::{DispatchArgs, IdsKind, LayoutArgs, MoeWork, PlanArgs};
use ep_transport::Queue;

use crate::dispatch::{CAPACITY, FIXED, OP, PHYSICAL_IDS};
use crate::ep::Inner;
use crate::handle::HandleInner;
use crate::lane::LaneGuard;
use crate::notify::{self, Header, Phase};
use crate::payload::{self, DispatchOpts, IdKind, Payload, Route};
use crate::result::Dispatched;
use crate::slots::Slot;
use crate::{Ep, EpError, Handle, Layout, Result};

use super::far::Parts;
use super::memory::HandleMemory;
use super::plans::Moving;
use super::{Gpu, Turn};

/// Bulk copies need it.
const ROW_ALIGN: u64 = 16;

/// A dispatch that was submitted up to its own rows.
#[derive(Debug)]
pub(crate) struct Sending {
    lane: LaneGuard,
    slot: Option<Slot>,
    handle: Option<Arc<HandleInner>>,
    cached: bool,
    kind: PayloadKind,
    capacity: bool,
    joined: Joined,
    turn: Turn,
    /// The caller's, which may reuse the payload once the operation is over.
    queue: Queue,
    /// Where the stream has packed which part for ranks that are not mapped.
    parts: Parts,
}

/// Which flags of a dispatch are raised only where they are awaited, in one step with that.
#[derive(Clone, Copy, Debug, Default)]
struct Joined {
    posted: bool,
    done: bool,
}

impl Sending {
    fn gpu(&self) -> &Gpu {
        gpu(&self.lane.ep)
    }

    fn memory(&self) -> &HandleMemory {
        memory(self.handle.as_ref().expect("held until it becomes a Handle"))
    }

    pub fn lane(&self) -> &LaneGuard {
        &self.lane
    }

    /// Everything up to this rank's rows, and in exact mode the host's knowledge of the peers'. `whole`:
    /// the second half follows at once.
    pub fn new(
        ep: &Arc<Inner>,
        queue: &Queue,
        payload: &Payload<'_>,
        route: &Route<'_>,
        opts: &DispatchOpts,
        whole: bool,
    ) -> Result<Self> {
        // A host that has to learn how many rows come does not let the peers wait for that.
        let counts_known = opts.capacity || matches!(route, Route::Cached(_));
        let joined = Joined { posted: true, done: whole && counts_known };
        let mut sending = Self::post(ep, queue, payload, route, opts, joined)?;
        sending.advance(payload)?;
        match sending.settle() {
            Ok(()) => {
                sending.forward()?;
                Ok(sending)
            }
            Err(error) => Err(sending.refuse(error)),
        }
    }

    /// Lays the routing out and announces it.
    fn post(
        ep: &Arc<Inner>,
        queue: &Queue,
        payload: &Payload<'_>,
        route: &Route<'_>,
        opts: &DispatchOpts,
        joined: Joined,
    ) -> Result<Self> {
        ep.usable(OP)?;
        payload::check(OP, ep, payload, route, opts)?;
        let gpu = gpu(ep);
        gpu.check_dispatch(payload, route)?;
        let lane = LaneGuard::take(ep, OP, opts.lane, ep.deadline())?;
        let turn = gpu.begin(OP, opts.lane, queue)?;
        let taken = Self::take(ep, &turn, route, payload.rows.len(), opts);
        let (slot, handle, cached) = taken.map_err(|e| gpu.leave(OP, &turn, queue, e))?;
        let header = Header {
            slot: slot.index() as u32,
            payload: payload.kind.code(),
            options: u64::from(opts.capacity) * CAPACITY
                + u64::from(opts.physical_ids) * PHYSICAL_IDS
                + u64::from(memory(&handle).fixed) * FIXED,
            ..Header::default()
        };
        let kind = payload.kind;
        let capacity = opts.capacity;
        let (slot, handle) = (Some(slot), Some(handle));
        let queue = queue.clone();
        let joined = if gpu.is_far() { Joined::default() } else { joined };
        let parts = Parts::default();
        let sending =
            Self { lane, slot, handle, cached, kind, capacity, joined, turn, queue, parts };
        // From here on peers may count on this rank.
        let announced = sending.announce(header, route, opts);
        announced.map_err(|e| ep.give_up(OP, e))?;
        Ok(sending)
    }

    /// The slot and the handle of a dispatch, and whether the handle is an earlier one's.
    fn take(
        ep: &Arc<Inner>,
        turn: &Turn,
        route: &Route<'_>,
        tokens: usize,
        opts: &DispatchOpts,
    ) -> Result<(Slot, Arc<HandleInner>, bool)> {
        let gpu = gpu(ep);
        if turn.capturing && !opts.capacity && !matches!(route, Route::Cached(_)) {
            let detail = "while a stream is captured the host cannot learn how many rows come: \
                          set DispatchOpts::capacity, or use a cached handle";
            return Err(EpError::argument(OP, detail));
        }
        if let (true, Route::Cached(handle)) = (turn.capturing, route) {
            gpu.check_captured_handle(OP, memory(&handle.routing))?;
        }
        let slot = gpu.take_slot(ep, OP, turn)?;
        Ok(match route {
            Route::Cached(handle) => (slot, handle.routing.clone(), true),
            _ => {
                let fixed = opts.capacity && gpu.has_fixed();
                (slot, gpu.new_handle(ep, turn, (opts.layout, fixed), tokens)?, false)
            }
        })
    }

    fn announce(&self, header: Header, route: &Route<'_>, opts: &DispatchOpts) -> Result<()> {
        let (ep, gpu) = (&self.lane.ep, self.gpu());
        let handle = self.handle.as_ref().expect("just made");
        let memory = memory(handle);
        match route {
            Route::Device { ids, weights } => {
                let header =
                    Header { op: notify::OP_DISPATCH, layout: opts.layout.code(), ..header };
                let args = LayoutArgs {
                    shape: gpu.shape,
                    routing: memory.routing,
                    op: gpu.op(ep, &self.turn, self.joined.posted),
                    header: super::moe(header),
                    ids: ids.address,
                    ids_kind: match ids.kind {
                        IdKind::U32 => IdsKind::U32,
                        IdKind::I32 => IdsKind::I32,
                        IdKind::I64 => IdsKind::I64,
                    },
                    weights: weights.as_ref().map_or(0, |w| w.as_ptr() as u64),
                    physical_ids: opts.physical_ids,
                    scratch: gpu.lane(self.turn.lane).scratch,
                    blocks: gpu.sms,
                    crossing: 0,
                    nodes: 0,
                };
                let args = gpu.lay_out_nodes(&self.turn, memory, args)?;
                // SAFETY: ids and weights are where the caller says (checked), everything else is
                // memory of this layer.
                unsafe { gpu.submit(&self.turn, &MoeWork::Layout(&args))? };
            }
            _ => {
                if self.turn.capturing {
                    memory.capture();
                }
                gpu.after_filling(memory, &self.turn)?;
                let header =
                    Header { op: notify::OP_CACHED, layout: handle.layout.code(), ..header };
                let marks = self.joined.posted;
                gpu.announce(ep, &self.turn, header, memory.header(), marks)?;
            }
        }
        if self.joined.posted {
            return Ok(());
        }
        gpu.tell(ep, &self.turn)?;
        gpu.signal(ep, &self.turn, Phase::Posted, &ep.flagged)
    }

    /// Waits, on the stream, for all announcements; then rows move.
    fn advance(&mut self, payload: &Payload<'_>) -> Result<()> {
        let moved = self.move_rows(payload);
        self.parts = moved.map_err(|e| self.lane.ep.give_up(OP, e))?;
        Ok(())
    }

    fn move_rows(&self, payload: &Payload<'_>) -> Result<Parts> {
        let (ep, gpu, turn) = (&self.lane.ep, self.gpu(), &self.turn);
        gpu.gather(ep, turn, "dispatch, announcements", self.joined.posted)?;
        let memory = self.memory();
        let op = gpu.op_with(ep, turn, memory, self.joined.done);
        if !self.cached {
            let alignment = match self.layout() {
                Layout::RankMajor => 0,
                Layout::ExpertMajor { alignment } => alignment as u32,
            };
            let (shape, routing, summary) = (gpu.shape, memory.routing, memory.summary);
            let scratch = gpu.lane(turn.lane).scratch;
            let (crossing, limits) = (gpu.crossing(memory), gpu.limits(memory));
            let args =
                PlanArgs { shape, routing, op, alignment, crossing, limits, summary, scratch };
            // SAFETY: all addresses are of this layer's memory.
            unsafe { gpu.submit(turn, &MoeWork::Plan(&args))? };
        } else {
            gpu.judge(ep, turn)?;
        }
        let format = gpu.row_format(ep, self.kind);
        let (shape, routing) = gpu.outward(memory);
        let args = DispatchArgs {
            shape,
            routing,
            op,
            format,
            payload: payload.rows.as_ptr() as u64,
            payload_stride: payload.rows.stride() as u64,
            scales: payload.scales.map_or(0, |s| s.as_ptr() as u64),
            scales_stride: payload.scales.map_or(0, |s| s.stride() as u64),
            check: self.cached && !gpu.is_far(),
            first: 0,
        };
        let plan = gpu.plan(Moving::Dispatch, format.payload_bytes);
        // SAFETY: the payload is as many rows as the routing has tokens (checked on entry), on this
        // GPU; the targets are slots their owners offered for this operation, or this lane's staging.
        let parts = unsafe { gpu.move_in_parts(ep, turn, &plan, &args)? };
        if memory.fixed {
            gpu.send_fixed_rows(ep, turn, format.stride as usize)?;
        }
        // Where ranks are not mapped, all are told at once, when what is for others has been sent.
        if !self.joined.done && (memory.fixed || !gpu.is_far()) {
            gpu.signal(ep, turn, Phase::Done, &ep.flagged)?;
        }
        Ok(parts)
    }

    fn layout(&self) -> Layout {
        self.handle.as_ref().expect("held until it becomes a Handle").layout
    }

    /// In exact mode, or where ranks are not mapped and blocks have no fixed size, waits on the host until
    /// it is known how many rows come; and sends those that do not go by stores.
    fn settle(&mut self) -> Result<()> {
        let ep = self.lane.ep.clone();
        let far = self.gpu().is_far() && !self.memory().fixed;
        if (self.cached || self.capacity) && !far {
            return Ok(());
        }
        let gpu = gpu(&ep);
        let verdict = gpu.await_verdict(&ep, OP, self.turn.lane, self.turn.ticket);
        match verdict {
            Err(error) if gpu.ends(&ep, &error) => return Err(ep.give_up(OP, error)),
            Err(error) if error.group_usable() && far => {
                // Who combines waits for a word of all that they have sent.
                if error.of_operations() {
                    gpu.tell_sent(&ep, &self.turn)?;
                    gpu.await_sent(&ep, &self.turn, "dispatch, refused")?;
                }
                gpu.signal(&ep, &self.turn, Phase::Done, &ep.flagged)?;
                return Err(error);
            }
            other => other?,
        }
        if !self.cached {
            let handle = self.handle.as_mut().and_then(Arc::get_mut);
            if let Some(memory) = handle.and_then(|handle| handle.gpu.as_mut()) {
                memory.learn();
            }
        }
        if far {
            let slot = self.slot.as_ref().expect("held until it becomes a result").index();
            let stride = gpu.row_format(&ep, self.kind).stride as usize;
            let (turn, memory) = (&self.turn, self.memory());
            let sent = match gpu.crosses() {
                true => gpu.send_blocks(&ep, turn, memory.told()?, stride),
                false => gpu.send_rows(&ep, turn, memory, &self.parts, (slot, stride)),
            };
            sent.map_err(|e| ep.give_up(OP, e))?;
        }
        Ok(())
    }

    /// Where tokens cross nodes once, passes those of others on.
    fn forward(&self) -> Result<()> {
        let (ep, gpu) = (&self.lane.ep, self.gpu());
        if !gpu.crosses() {
            return Ok(());
        }
        let forwarded = gpu.forward(ep, &self.turn, self.memory(), (self.kind, self.cached));
        forwarded.map_err(|e| ep.give_up(OP, e))
    }

    /// Ends a dispatch that all ranks refused.
    fn refuse(mut self, error: EpError) -> EpError {
        match self.close() {
            Ok(()) => error,
            Err(worse) if error.group_usable() => worse,
            Err(_) => error,
        }
    }

    /// Lets the lane's stream wait for the peers' rows and the caller's queue for that, so that the
    /// payload is not written while it is read and a capture ends where it began. Frees what this
    /// dispatch held.
    fn close(&mut self) -> Result<()> {
        let ep = self.lane.ep.clone();
        let gpu = gpu(&ep);
        let rows = ("dispatch, rows", Phase::Done);
        gpu.meet(&ep, &self.turn, rows, &ep.flagged, self.joined.done)?;
        gpu.flush(&ep, &self.turn)?;
        let point = gpu.finish(OP, &self.turn, &self.queue)?;
        if let Some(mut slot) = self.slot.take() {
            gpu.free_after(&mut slot, &point, &self.turn);
        }
        if let Some(handle) = self.handle.take() {
            memory(&handle).used_until(&point, &self.turn);
            if !self.cached {
                gpu.keep_handle(&handle);
            }
        }
        Ok(())
    }

    /// The second half: `queue` waits for the peers' rows.
    pub fn recv(mut self, queue: &Queue) -> Result<Dispatched> {
        let received = self.receive(queue);
        if let Err(e) = received {
            return Err(self.lane.ep.give_up(OP, e));
        }
        let (ep, lane) = (self.lane.ep.clone(), self.lane.index);
        let routing = self.handle.take().expect("taken once");
        let mut slot = self.slot.take().expect("taken with the handle");
        slot.used_on(queue);
        let handle = Handle { routing };
        let result = Dispatched::new(ep, slot, handle, Some(self.kind), self.capacity, lane);
        // What the host waited for it need not ask for.
        let later = self.cached || self.capacity;
        Ok(Dispatched { ticket: later.then_some((lane, self.turn.ticket)), ..result })
    }

    fn receive(&mut self, queue: &Queue) -> Result<()> {
        let ep = self.lane.ep.clone();
        let (gpu, turn) = (gpu(&ep), &self.turn);
        gpu.follow(OP, turn, queue)?;
        gpu.meet(&ep, turn, ("dispatch, rows", Phase::Done), &ep.flagged, self.joined.done)?;
        gpu.flush(&ep, turn)?;
        let handle = self.handle.as_ref().expect("taken once");
        let memory = memory(handle);
        if memory.fixed {
            let slot = self.slot.as_ref().expect("taken with the handle").index();
            gpu.take_fixed_rows(&ep, turn, memory, (slot, self.kind))?;
        }
        if let Layout::ExpertMajor { .. } = handle.layout {
            gpu.expand(&ep, turn, memory, self.kind, self.cached)?;
        }
        if self.capacity {
            gpu.mark_tail(&ep, turn, memory, self.kind, handle.layout)?;
        }
        let point = gpu.finish(OP, turn, queue)?;
        memory.used_until(&point, turn);
        if !self.cached {
            memory.complete_at(&point, turn);
            gpu.keep_handle(handle);
        }
        Ok(())
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        // Received, or refused.
        if self.handle.is_none() {
            return;
        }
        if let Err(e) = self.close() {
            let e = self.lane.ep.give_up(OP, e);
            tracing::warn!("a dropped dispatch could not be brought to its end: {e}");
        }
    }
}

fn gpu(ep: &Inner) -> &Gpu {
    ep.gpu.as_ref().expect("a dispatch on a GPU comes from a layer on a GPU")
}

fn memory(handle: &HandleInner) -> &HandleMemory {
    handle.gpu.as_ref().expect("handles of a layer on a GPU have device memory")
}

impl Gpu {
    fn check_dispatch(&self, payload: &Payload<'_>, route: &Route<'_>) -> Result<()> {
        let rows = &payload.rows;
        let view = (rows.as_ptr() as u64, rows.stride(), rows.len());
        self.check_rows(OP, "rows", view, ROW_ALIGN)?;
        if let Some(s) = payload.scales.filter(|s| !s.is_empty()) {
            self.check_address(OP, "scales", s.as_ptr() as u64, s.dtype().size() as u64)?;
        }
        let Route::Device { ids, weights } = route else { return Ok(()) };
        let align = if ids.kind == IdKind::I64 { 8 } else { 4 };
        if ids.len > 0 {
            self.check_address(OP, "ids", ids.address, align)?;
        }
        match weights.filter(|w| !w.is_empty()) {
            Some(w) => self.check_address(OP, "weights", w.as_ptr() as u64, 4),
            None => Ok(()),
        }
    }

    fn new_handle(
        &self,
        ep: &Arc<Inner>,
        turn: &Turn,
        (layout, fixed): (Layout, bool),
        tokens: usize,
    ) -> Result<Arc<HandleInner>> {
        let mut handle = self.take_handle(OP, turn)?;
        let inner = Arc::get_mut(&mut handle).expect("nobody else has it");
        inner.layout = layout;
        inner.lane = turn.lane;
        inner.send.tokens = tokens;
        if let Some(memory) = &mut inner.gpu {
            memory.filled_by(ep, turn, tokens, fixed);
        }
        Ok(handle)
    }
}

/// [`Ep::dispatch`] for several ranks driven by one thread, phase by phase: everything ranks tell
/// each other is submitted before anything that waits for it, so it also works where all their
/// streams share one hardware queue.
pub(crate) fn dispatch_all(
    queues: &[&Queue],
    calls: &[(&Ep, Payload<'_>, Route<'_>)],
    opts: &DispatchOpts,
) -> Result<Vec<Dispatched>> {
    let mut sending: Vec<Sending> = Vec::with_capacity(calls.len());
    for (i, (ep, payload, route)) in calls.iter().enumerate() {
        let queue = queues[i % queues.len()];
        let one = Sending::post(&ep.inner, queue, payload, route, opts, Joined::default());
        // Ranks that have announced the operation cannot take it back.
        let first = sending.is_empty();
        sending.push(one.map_err(|e| if first { e } else { ep.inner.give_up(OP, e) })?);
    }
    for (one, (_, payload, _)) in sending.iter_mut().zip(calls) {
        one.advance(payload)?;
    }
    let verdicts: Vec<_> = sending.iter_mut().map(Sending::settle).collect();
    if let Some(error) = verdicts.into_iter().find_map(Result::err) {
        // A bad verdict is everyone's.
        return Err(sending.into_iter().fold(error, |error, one| one.refuse(error)));
    }
    sending.iter().try_for_each(Sending::forward)?;
    let with_queue = sending.into_iter().enumerate();
    with_queue.map(|(i, one)| one.recv(queues[i % queues.len()])).collect()
}
