//! Links over a simulated fabric that delivers in any order.
//!
//! Writes reach the peer's memory whenever chance says, piece by piece, those of one queue pair
//! among each other too; an immediate is reported when its own write is whole, whatever is missing
//! of others; a peer can stop answering. That is less than any fabric promises.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::areas::{self, Area, Source};
use super::device::{Completion, Device, Id, Kind};
use super::events::Event;
use super::layout::Layout;
use super::link::{Opened, RdmaLink};
use super::nodes::Nodes;
use super::options::Options;
use super::pair::Write;
use crate::conformance::{Member, run, run_members};
use crate::{Deadline, ErrorKind, Group, Link, Put, Queue, Result, Transport, WindowSpec};

/// A write that its sender's device has not reported as done.
struct Flying {
    from: usize,
    id: Id,
    write: Write,
    /// Bytes that have arrived.
    done: usize,
    whole: bool,
}

/// What the devices of one NIC number share.
#[derive(Default)]
pub(super) struct Fabric {
    /// In the order of posting.
    flying: Vec<Flying>,
    /// What each rank's device will report.
    pub reports: HashMap<usize, Vec<Completion>>,
    /// Room for immediates, by (rank, peer, pair).
    room: HashMap<(usize, usize, usize), usize>,
    /// The memory of ranks whose devices exist.
    memory: HashMap<usize, Vec<Area>>,
    /// What is written there is not seen before somebody flushes it.
    #[cfg(feature = "cuda")]
    pub hidden: Vec<(std::ops::Range<u64>, super::on_gpus::Posted)>,
    /// What will befall each rank's device.
    pub events: HashMap<usize, Vec<Event>>,
    /// Ranks that answer nothing any more.
    pub dead: Vec<usize>,
    /// Nothing moves.
    pub held: bool,
    random: u64,
    /// An immediate came for which there was no room.
    overrun: bool,
}

impl Fabric {
    fn random(&mut self, n: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
        (self.random >> 33) as usize % n
    }

    /// Lets chance move something.
    fn step(&mut self) {
        let moving: Vec<usize> =
            (0..self.flying.len()).filter(|&i| !self.flying[i].whole).collect();
        if moving.is_empty() || self.held {
            return;
        }
        let index = moving[self.random(moving.len())];
        let piece = 1 + self.random(40_000);
        let Flying { from, id, write, done, .. } = self.flying[index];
        if self.dead.contains(&id.peer) || !self.memory.contains_key(&id.peer) {
            self.flying.remove(index);
            let (status, detail) = (12, "nobody answers".to_owned());
            self.report(from, Completion::Failed { id, status, detail });
            return;
        }
        let bytes = piece.min(write.bytes as usize - done);
        let source = (write.local as usize + done) as *const u8;
        let target = (write.remote as usize + done) as *mut u8;
        // SAFETY: both regions are mapped while their devices exist, which `memory` tells of one and
        // a flying write of the other; a device ends under the fabric's lock.
        unsafe { self.deliver(source, target, bytes) };
        self.flying[index].done += bytes;
        if done + bytes == write.bytes as usize {
            self.flying[index].whole = true;
            self.arrived(from, id, write.immediate);
            self.settle();
        }
    }

    /// # Safety
    /// Both ranges are mapped, and nobody else accesses them.
    unsafe fn deliver(&self, source: *const u8, target: *mut u8, bytes: usize) {
        #[cfg(feature = "cuda")]
        let hidden = self.hidden.iter().find(|(range, _)| range.contains(&(target as u64)));
        #[cfg(feature = "cuda")]
        if let Some((_, posted)) = hidden {
            // SAFETY: by this function's contract.
            let bytes = unsafe { std::slice::from_raw_parts(source, bytes) }.to_vec();
            posted.lock().push((target as usize, bytes));
            return;
        }
        // SAFETY: by this function's contract.
        unsafe { std::ptr::copy_nonoverlapping(source, target, bytes) };
    }

    fn arrived(&mut self, from: usize, id: Id, immediate: Option<u32>) {
        if immediate.is_none() {
            return;
        }
        let room = self.room.entry((id.peer, from, id.pair)).or_default();
        match room.checked_sub(1) {
            Some(left) => *room = left,
            None => self.overrun = true,
        }
        let receive = Id { kind: Kind::Receive, peer: from, pair: id.pair };
        self.report(id.peer, Completion::Arrived { id: receive, immediate });
    }

    /// Reports to senders, in the order of posting on each queue pair.
    fn settle(&mut self) {
        let mut held: Vec<(usize, usize, usize)> = Vec::new();
        for flying in std::mem::take(&mut self.flying) {
            let pair = (flying.from, flying.id.peer, flying.id.pair);
            if !flying.whole || held.contains(&pair) {
                held.push(pair);
                self.flying.push(flying);
            } else if flying.write.signalled {
                self.report(flying.from, Completion::Written(flying.id));
            }
        }
    }

    fn report(&mut self, rank: usize, completion: Completion) {
        self.reports.entry(rank).or_default().push(completion);
    }
}

impl std::fmt::Debug for SimulatedDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimulatedDevice({})", self.rank)
    }
}

pub(super) struct SimulatedDevice {
    rank: usize,
    fabric: Arc<Mutex<Fabric>>,
    /// What it knows stays where it is.
    _memory: Vec<(usize, Source)>,
}

impl Device for SimulatedDevice {
    unsafe fn write(&mut self, peer: usize, pair: usize, write: &Write) -> Result<()> {
        let id = Id::decode(write.id);
        assert_eq!((id.peer, id.pair), (peer, pair));
        let flying = Flying { from: self.rank, id, write: *write, done: 0, whole: false };
        self.fabric.lock().flying.push(flying);
        Ok(())
    }

    fn receive(&mut self, peer: usize, pair: usize) -> Result<()> {
        *self.fabric.lock().room.entry((self.rank, peer, pair)).or_default() += 1;
        Ok(())
    }

    fn poll(&mut self, into: &mut Vec<Completion>) -> Result<bool> {
        let mut fabric = self.fabric.lock();
        (0..4).for_each(|_| fabric.step());
        assert!(!fabric.overrun, "more immediates than there is room for");
        into.append(fabric.reports.entry(self.rank).or_default());
        Ok(true)
    }

    fn sleep(&mut self, _bell: BorrowedFd<'_>, _bound: Duration) -> Result<bool> {
        std::thread::yield_now();
        Ok(true)
    }

    fn events(&mut self, into: &mut Vec<Event>) -> Result<()> {
        into.append(self.fabric.lock().events.entry(self.rank).or_default());
        Ok(())
    }

    fn arm(&mut self) -> Result<()> {
        Ok(())
    }

    fn number(&self, peer: usize, pair: usize) -> u32 {
        (peer * 100 + pair) as u32
    }

    fn remote(&self, peer: usize, at: usize) -> (u64, u32) {
        self.fabric.lock().memory.get(&peer).map_or((0, 0), |areas| areas::find(areas, at))
    }

    fn local(&self, at: usize) -> (u64, u32) {
        areas::find(&self.fabric.lock().memory[&self.rank], at)
    }
}

impl Drop for SimulatedDevice {
    fn drop(&mut self) {
        let mut fabric = self.fabric.lock();
        fabric.memory.remove(&self.rank);
        let rank = self.rank;
        fabric.flying.retain(|flying| flying.from != rank);
    }
}

pub(super) type Fabrics = Arc<Mutex<HashMap<(usize, usize), Arc<Mutex<Fabric>>>>>;

/// One rank's transport over fabrics that all ranks share, one for each window and NIC.
#[derive(Debug)]
pub(super) struct Simulated {
    fabrics: Shared,
    pub options: Options,
    opened: AtomicUsize,
    seed: u64,
    /// Windows are on a GPU.
    #[cfg(feature = "cuda")]
    pub gpu: Option<super::on_gpus::OnGpu>,
}

#[derive(Clone, Default)]
pub(super) struct Shared(pub Fabrics);

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("fabrics")
    }
}

impl Simulated {
    pub(super) fn fabric(&self, window: usize, nic: usize) -> Arc<Mutex<Fabric>> {
        let mut all = self.fabrics.0.lock();
        let random = self.seed + (window * 8 + nic) as u64;
        let new = || Arc::new(Mutex::new(Fabric { random, ..Fabric::default() }));
        all.entry((window, nic)).or_insert_with(new).clone()
    }
}

impl Simulated {
    /// The devices of a rank over window `number`, which know some memory.
    pub(super) fn devices(
        &self,
        rank: usize,
        number: usize,
        nodes: &Nodes,
        memory: &[(usize, Source)],
    ) -> Vec<(SimulatedDevice, Vec<u32>)> {
        let options = &self.options;
        let device = |nic| {
            let fabric = self.fabric(number, nic);
            let mut locked = fabric.lock();
            locked.memory.insert(rank, memory.iter().map(area).collect());
            for &peer in nodes.bulk() {
                for pair in 0..options.queue_pairs {
                    locked.room.insert((rank, peer, pair), options.depth);
                }
            }
            drop(locked);
            (SimulatedDevice { rank, fabric, _memory: memory.to_vec() }, Vec::new())
        };
        (0..options.nics).map(device).collect()
    }
}

fn area((from, source): &(usize, Source)) -> Area {
    Area { from: *from, address: source.address(), key: 0 }
}

impl Transport for Simulated {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn open(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Arc<dyn Link>> {
        spec.agree(group, self.name(), deadline)?;
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        let (rank, options) = (group.rank(), &self.options);
        let nodes = Nodes::meet(group, options.node, deadline)?;
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            return Ok(gpu.open(self, (group, number), spec, nodes, deadline)?);
        }
        let layout = Layout::new(spec, group.world(), options.nics)?;
        let regions = nodes.share(group, layout.bytes, deadline)?;
        let region = regions[rank].clone().expect("a window");
        let known = [(0, Source::Pages { region, from: 0 })];
        let devices = self.devices(rank, number, &nodes, &known);
        group.all_gather_within("open", &[], deadline)?;
        let opened = Opened { group: group.clone(), spec, layout, regions, nodes };
        let link = RdmaLink::start(opened, devices, options)?;
        Ok(link)
    }
}

fn members(world: usize, shape: (usize, usize, usize), seed: u64) -> (Vec<Member>, Shared) {
    let (ranks, fabrics) = ranks(world, shape, seed);
    (ranks.into_iter().map(|(group, one)| -> Member { (group, Box::new(one)) }).collect(), fabrics)
}

/// Ranks in nodes of `per_node`, with small queues so that bounds are met.
pub(super) fn ranks(
    world: usize,
    (nics, queue_pairs, per_node): (usize, usize, usize),
    seed: u64,
) -> (Vec<(Group, Simulated)>, Shared) {
    let fabrics = Shared::default();
    let groups = Group::local(world).unwrap().into_iter();
    let member = |group: Group| {
        let node = Some((group.rank() / per_node) as u64);
        let small =
            Options { depth: 8, piece: 4096, stripe: 512, in_flight: 16_384, ..Options::default() };
        let options = Options { nics, queue_pairs, node, ..small };
        let fabrics = fabrics.clone();
        let simulated = Simulated {
            fabrics,
            options,
            opened: AtomicUsize::new(0),
            seed,
            #[cfg(feature = "cuda")]
            gpu: None,
        };
        (group, simulated)
    };
    (groups.map(member).collect(), fabrics)
}

mod one_nic {
    crate::conformance_suite!(|world| super::members(world, (1, 1, 1), 11).0);
}

mod two_nics_three_queue_pairs {
    crate::conformance_suite!(|world| super::members(world, (2, 3, 1), 12).0);
}

mod nodes_of_two {
    crate::conformance_suite!(|world| super::members(world, (2, 1, 2), 13).0);
}

/// Many orders of delivery, each with its own seed.
#[test]
fn data_is_there_whatever_the_order() {
    for seed in 0..30 {
        let make =
            |world| members(world, (1 + seed as usize % 2, 1 + seed as usize % 3, 1), seed).0;
        run_members("data_before_signal_is_visible", make(3), Duration::from_secs(20)).unwrap();
    }
    run("sources_may_change_after_flush", |world| members(world, (2, 2, 1), 5).0).unwrap();
}

/// A peer that answers nothing any more is named to everyone, with the queue pair.
#[test]
fn a_dead_peer_is_everyones_error() {
    let (members, fabrics) = members(3, (1, 1, 1), 3);
    let spec = WindowSpec { bytes: 1 << 16, flags: 1 };
    let limit = Duration::from_secs(40);
    std::thread::scope(|scope| {
        for (group, transport) in members {
            let fabrics = fabrics.clone();
            scope.spawn(move || {
                let (rank, queue) = (group.rank(), Queue::host());
                let link = transport.open(&group, spec, Deadline::after(limit)).unwrap();
                group.barrier().unwrap();
                if rank == 0 {
                    fabrics.0.lock()[&(0, 0)].lock().dead.push(2);
                    let put = Put { peer: 2, from: 0, to: 0, bytes: 1 << 16 };
                    link.put(&queue, put).unwrap();
                    link.signal(&queue, 2, 0).unwrap();
                    let flushed = link.flush(&queue, Deadline::after(limit)).unwrap_err();
                    assert_eq!((flushed.kind(), flushed.peer()), (ErrorKind::PeerLost, Some(2)));
                    let text = flushed.to_string();
                    assert!(text.contains("queue pair 200 to rank 2: nobody answers"), "{text}");
                    let refused = link.put(&queue, put).unwrap_err();
                    assert_eq!(refused.peer(), Some(2), "{refused}");
                }
                let start = std::time::Instant::now();
                let waited =
                    link.wait(&queue, "wait", &[(rank + 1) % 3], 0, Deadline::after(limit));
                let error = waited.unwrap_err();
                assert_eq!(error.peer(), Some(2), "rank {rank}: {error}");
                assert!(start.elapsed() < limit / 2, "{:?}", start.elapsed());
            });
        }
    });
}

/// A link that is dropped while a peer still sends to it, its rank staying in the group, is no dead
/// peer: nobody waits there any more.
#[test]
fn a_closed_link_is_no_dead_peer() {
    let (members, _) = members(2, (2, 1, 1), 4);
    let spec = WindowSpec { bytes: 1 << 16, flags: 1 };
    let deadline = || Deadline::after(Duration::from_secs(20));
    std::thread::scope(|scope| {
        for (group, transport) in members {
            scope.spawn(move || {
                let (rank, queue) = (group.rank(), Queue::host());
                let link = transport.open(&group, spec, deadline()).unwrap();
                if rank == 1 {
                    drop(link);
                    group.barrier().unwrap();
                } else {
                    group.barrier().unwrap();
                    for _ in 0..100 {
                        link.put(&queue, Put { peer: 1, from: 0, to: 0, bytes: 1 << 14 }).unwrap();
                        link.signal(&queue, 1, 0).unwrap();
                    }
                    link.flush(&queue, deadline()).unwrap();
                    drop(link);
                }
                group.barrier().unwrap();
                let link = transport.open(&group, spec, deadline()).unwrap();
                link.signal(&queue, 1 - rank, 0).unwrap();
                link.wait(&queue, "again", &[1 - rank], 0, deadline()).unwrap();
            });
        }
    });
}
