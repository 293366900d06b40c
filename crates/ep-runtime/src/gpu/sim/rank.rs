//! A rank on a simulated GPU: what stands in the place of driver and transport.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUstream;
use ep_kernels::cuda::moe::{MoeLaunch, MoeWork};
use ep_kernels::cuda::{CudaError, Device, DeviceMemory, DeviceProperties, PointerPlace};
use ep_transport::{
    Beside, Deadline, Group, Link, Mapping, Memory, Pacing, Put, Queue, Reach, Receive, StreamSide,
    ThreadTransport, Transport, WindowSpec,
};
use parking_lot::Mutex;

use super::device::{Devices, Op};
use super::effects::Effect;
use super::far::{Block, Map, Places};
use super::memory::Place;
use super::turns::{How, Mutant, Shared};
use crate::ep::Inner;
use crate::gpu::build::{FarParts, Parts, Sizes};
use crate::gpu::machine::{Machine, Point};
use crate::gpu::{Gpu, Tuning};
use crate::node::{Across, Hierarchy, Nodes};
use crate::{Ep, MoeShape, PayloadKind};

type Driver<T> = Result<T, CudaError>;

/// Streams by number, as handles of the driver.
pub fn handle(stream: usize) -> CUstream {
    (stream + 1) as CUstream
}

fn number(stream: CUstream) -> usize {
    stream as usize - 1
}

/// A caller's stream.
pub fn queue(stream: usize, ordinal: usize) -> Queue {
    // SAFETY: nothing but the simulated machine and link look at the handle.
    unsafe { Queue::from_raw(handle(stream).cast(), ordinal) }
}

#[derive(Debug)]
pub struct Simulated {
    shared: Arc<Shared>,
    properties: DeviceProperties,
    /// What was launched.
    pub log: Arc<Mutex<Vec<MoeLaunch>>>,
    /// Page-locked memory.
    _pinned: Vec<u64>,
}

#[derive(Debug)]
struct Moment {
    shared: Arc<Shared>,
    point: usize,
}

impl Point for Moment {
    fn is_done(&self) -> Driver<bool> {
        Ok(self.shared.with(|devices| devices.is_done(self.point)))
    }

    unsafe fn order(&self, stream: CUstream) -> Driver<()> {
        self.shared.submit(number(stream), Op::Order(self.point));
        Ok(())
    }
}

impl Machine for Simulated {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn device(&self) -> Option<&Device> {
        None
    }

    unsafe fn check_stream(&self, _: &'static str, _: CUstream) -> Driver<()> {
        Ok(())
    }

    unsafe fn is_capturing(&self, _: CUstream) -> Driver<bool> {
        Ok(false)
    }

    fn place_of(&self, _: u64) -> Driver<PointerPlace> {
        Ok(PointerPlace::Device(self.properties.ordinal))
    }

    unsafe fn record(&self, stream: CUstream) -> Driver<Arc<dyn Point>> {
        if !self.shared.with(|devices| devices.has(number(stream))) {
            let reason = "there is no such stream".into();
            return Err(CudaError::Unsupported { operation: "record", reason });
        }
        let point = self.shared.with(Devices::point);
        self.shared.submit(number(stream), Op::Record(point));
        Ok(Arc::new(Moment { shared: self.shared.clone(), point }))
    }

    unsafe fn chain(&self, before: CUstream, stream: CUstream) -> Driver<()> {
        self.shared.chain(number(before), number(stream));
        Ok(())
    }

    unsafe fn submit(&self, stream: CUstream, work: &MoeWork<'_>) -> Driver<()> {
        self.log.lock().extend(work.launches(&self.properties)?);
        self.shared.submit(number(stream), Op::Work(Effect::of(work)));
        Ok(())
    }

    fn is_done_in_capture(&self, point: &dyn Point) -> Driver<bool> {
        point.is_done()
    }

    fn pause(&self, spins: &mut u32) {
        // Every look is followed by one at the group's health.
        *spins = 63;
        self.shared.turn(How::Look);
    }

    unsafe fn copy(
        &self,
        operation: &'static str,
        _: (u64, u64, usize),
        _: Duration,
    ) -> Driver<()> {
        Err(CudaError::Unsupported { operation, reason: "simulated memory has no bytes".into() })
    }

    unsafe fn duplicate(
        &self,
        operation: &'static str,
        _: (u64, usize),
        _: Deadline,
    ) -> Driver<DeviceMemory> {
        Err(CudaError::Unsupported { operation, reason: "simulated memory has no bytes".into() })
    }
}

/// Windows without memory, and flags of the simulated GPUs.
#[derive(Debug)]
struct SimulatedLink {
    shared: Arc<Shared>,
    group: Group,
    spec: WindowSpec,
    ordinal: usize,
    pacing: Pacing,
    map: Map,
    nodes: Vec<usize>,
    paired: bool,
    /// Exchanges so far, by number.
    exchanges: Mutex<Vec<u32>>,
    /// Sources of what was put by a stream since it was flushed.
    unflushed: Mutex<HashMap<usize, Vec<Places>>>,
}

impl SimulatedLink {
    fn is_far(&self, peer: usize) -> bool {
        self.nodes.get(peer) != self.nodes.get(self.group.rank())
    }

    /// What a block of a window is; anything else is a fault of the protocol.
    fn places(&self, block: Block) -> Places {
        self.map.places(block).unwrap_or_else(|| {
            self.shared.with(|d| d.memory.fault(|| format!("{block:?} is nothing")));
            Places::default()
        })
    }

    fn carry(&self, queue: &Queue, from: Places, to: Places) {
        let (stream, _) = queue.raw().expect("windows are carried by streams");
        self.shared.submit(number(stream), Op::Work(Effect::Carry { from, to }));
    }
}

/// An exchange is a block on the wire, a flag that is raised once, and its receipt.
impl SimulatedLink {
    fn wire(&self, from: usize, to: usize, flag: u32, index: usize) -> Places {
        [Some(Place::Wire { from, to, number: flag, index }), None, None, None]
    }

    fn meet(&self, queue: &Queue, flag: u32, (sends, receives): (&[Put], &[Receive])) {
        let (stream, me) = (number(queue.raw().expect("a stream").0), self.group.rank());
        for (index, put) in sends.iter().enumerate() {
            let index = index - sends.iter().position(|s| s.peer == put.peer).unwrap_or(0);
            let block = Block { rank: me, other: put.peer, at: put.from, bytes: put.bytes };
            let wire = self.wire(me, put.peer, flag, index);
            self.carry(queue, self.places(block), wire);
        }
        let mut peers: Vec<usize> = sends.iter().map(|put| put.peer).collect();
        peers.dedup();
        for to in peers {
            self.shared.submit(stream, Op::Signal { to, flag, from: me });
        }
        let mut sources: Vec<usize> = receives.iter().map(|receive| receive.peer).collect();
        sources.dedup();
        self.shared.submit(stream, Op::Wait { rank: me, flag, sources });
        for (index, receive) in receives.iter().enumerate() {
            let index = index - receives.iter().position(|r| r.peer == receive.peer).unwrap_or(0);
            let (other, bytes) = (receive.peer, receive.bytes);
            let block = Block { rank: me, other, at: receive.to, bytes };
            self.carry(queue, self.wire(other, me, flag, index), self.places(block));
        }
    }
}

// SAFETY: nobody looks at the windows: whatever uses their addresses is simulated.
unsafe impl Link for SimulatedLink {
    fn window(&self) -> Mapping {
        window(self.group.rank(), self.spec.bytes)
    }

    fn memory(&self) -> Memory {
        Memory::Cuda { ordinal: self.ordinal }
    }

    fn stream_side(&self) -> Option<StreamSide> {
        Some(StreamSide { poisoned: 64, awaited: 128 })
    }

    fn captures(&self) -> bool {
        true
    }

    fn is_beside(&self, peer: usize) -> bool {
        self.pacing.concerns(&[peer])
    }

    fn reach(&self, peer: usize) -> Reach {
        match (self.is_far(peer), self.paired) {
            (true, true) => Reach::Paired,
            (true, false) => Reach::Bulk,
            (false, _) => Reach::Direct(window(peer, self.spec.bytes)),
        }
    }

    fn put(&self, queue: &Queue, put: Put) -> ep_transport::Result<()> {
        let stream = number(queue.raw().expect("puts are made by streams").0);
        let (rank, Put { peer, from, to, bytes }) = (self.group.rank(), put);
        let from = self.places(Block { rank, other: peer, at: from, bytes });
        let to = self.places(Block { rank: peer, other: rank, at: to, bytes });
        self.unflushed.lock().entry(stream).or_default().push(from);
        self.carry(queue, from, to);
        Ok(())
    }

    fn exchange(
        &self,
        queue: &Queue,
        _: &'static str,
        number: u32,
        blocks: (&[Put], &[Receive]),
        _: Deadline,
    ) -> ep_transport::Result<()> {
        let mut exchanges = self.exchanges.lock();
        let count = &mut exchanges[number as usize];
        *count += 1;
        let flag = self.spec.flags * *count + number;
        drop(exchanges);
        self.meet(queue, flag, blocks);
        Ok(())
    }

    /// Whoever reads sources may do so until the stream has got here.
    fn flush(&self, queue: &Queue, _: Deadline) -> ep_transport::Result<()> {
        let stream = number(queue.raw().expect("puts are made by streams").0);
        let put = self.unflushed.lock().remove(&stream).unwrap_or_default();
        let waits = self.shared.mutant != Mutant::Unflushed;
        let reader = if waits { stream } else { self.shared.with(|d| d.beside(stream)) };
        put.into_iter().for_each(|from| {
            self.shared.submit(reader, Op::Work(Effect::Free { from }));
        });
        Ok(())
    }

    fn signal(&self, queue: &Queue, peer: usize, flag: u32) -> ep_transport::Result<()> {
        let (stream, _) = queue.raw().expect("flags are raised by streams");
        let from = self.group.rank();
        self.shared.submit(number(stream), Op::Signal { to: peer, flag, from });
        self.pacing.signalled(peer, flag, false);
        self.shared.news();
        Ok(())
    }

    fn wait(
        &self,
        queue: &Queue,
        _: &'static str,
        peers: &[usize],
        flag: u32,
        _: Deadline,
    ) -> ep_transport::Result<()> {
        let (stream, _) = queue.raw().expect("flags are awaited by streams");
        let owing = || self.pacing.owing(peers, flag).next().is_some();
        while self.shared.mutant != Mutant::Unpaced && owing() && !self.shared.turn(How::Hold) {
            if self.group.health().check("wait").is_err() {
                break;
            }
        }
        self.pacing.awaited(peers, flag, false);
        let (rank, sources) = (self.group.rank(), peers.to_vec());
        self.shared.submit(number(stream), Op::Wait { rank, flag, sources });
        Ok(())
    }

    fn ready(&self, peers: &[usize], flag: u32) -> bool {
        let me = self.group.rank();
        self.shared.with(|d| peers.iter().all(|&peer| d.flags.contains_key(&(me, flag, peer))))
    }
}

/// Whose window an address is in.
pub fn window_of(address: u64) -> u32 {
    (address >> WINDOW) as u32 - 1
}

const WINDOW: u32 = 44;

fn window(rank: usize, bytes: usize) -> Mapping {
    let base = std::ptr::without_provenance_mut((rank + 1) << WINDOW);
    Mapping { base: NonNull::new(base).expect("not null"), bytes }
}

/// How layers on simulated GPUs are built.
#[derive(Clone, Debug)]
pub struct Layer {
    pub shape: MoeShape,
    pub slots: usize,
    pub lanes: usize,
    pub sms: u32,
    pub tuning: Tuning,
    pub gpus: usize,
    /// By rank; ranks of different ones are not mapped. All are if there are none.
    pub nodes: Vec<usize>,
    /// Those that are not mapped exchange rows.
    pub paired: bool,
    /// Rows for them go in parts.
    pub in_parts: bool,
    /// Tokens cross nodes once.
    pub once: bool,
}

impl Layer {
    /// Streams for the lanes of a rank, then, where some ranks are not mapped, as many again.
    pub fn streams(&self, shared: &Shared, rank: usize) -> Vec<usize> {
        let count = if self.nodes.is_empty() { self.lanes } else { 2 * self.lanes };
        (0..count).map(|_| shared.with(|d| d.stream(rank % self.gpus))).collect()
    }

    /// This rank's layer, with its streams. All ranks call it at once.
    pub fn build(
        &self,
        shared: &Arc<Shared>,
        group: &Group,
        streams: Vec<usize>,
    ) -> (Ep, Arc<Mutex<Vec<MoeLaunch>>>) {
        let limit = Duration::from_secs(30);
        let (rank, world) = (group.rank(), group.world());
        let gpu = |rank: usize| rank % self.gpus;
        let sizes = (self.slots, self.lanes);
        let nodes = if self.nodes.is_empty() { vec![0; world] } else { self.nodes.clone() };
        let nodes = Nodes::new(&nodes);
        let rails = self.once.then(|| nodes.rails());
        let shape = self.shape.resolve(world, sizes, rails).expect("a valid shape");
        let window = shape.window(!self.nodes.is_empty()).expect("a window");
        let flags = crate::notify::flags(self.lanes);
        let words = Pacing::bytes(flags, world).next_multiple_of(4096);
        let board = ThreadTransport::new()
            .open(group, WindowSpec { bytes: words, flags: 1 }, Deadline::after(limit))
            .expect("threads share memory");
        let beside = |peer| match peer != rank && gpu(peer) == gpu(rank) {
            true => Beside::Thread,
            false => Beside::No,
        };
        let beside = (0..world).map(beside).collect();
        let pacing = Pacing::new(board, 0, rank, flags, beside).expect("words fit");
        let spec = WindowSpec { bytes: window.bytes, flags };
        let (shared, ordinal) = (shared.clone(), gpu(rank));
        let group = group.clone();
        let map = Map {
            window,
            world,
            lanes: self.lanes,
            slots: self.slots,
            stride: shape.formats(PayloadKind::Bf16).0.stride,
            nodes: self.once.then(|| nodes.clone()),
        };
        let hierarchy = if self.once { Hierarchy::Node } else { Hierarchy::Flat };
        let across = Across::new(nodes, hierarchy, rank);
        let (nodes, paired) = (self.nodes.clone(), self.paired);
        let exchanges = Mutex::new(vec![0; flags as usize]);
        let link = SimulatedLink {
            shared: shared.clone(),
            group,
            spec,
            ordinal,
            pacing,
            map,
            nodes,
            paired,
            exchanges,
            unflushed: Mutex::default(),
        };
        let far = (0..world).filter(|&peer| link.is_far(peer)).count();
        let (side, group) = (link.stream_side().expect("just said"), link.group.clone());
        let mut inner = Inner::new(group, (Arc::new(link), across), shape, window, limit);
        let sizes = Sizes::new(&inner.shape, 16, self.sms, !self.nodes.is_empty());
        let mut properties = DeviceProperties::h200();
        properties.ordinal = ordinal;
        properties.uuid[15] = ordinal as u8;
        let pinned = vec![0u64; sizes.pinned.div_ceil(8)];
        let memory = ((rank as u64 + 1) << 40, pinned.as_ptr() as u64);
        let log = Arc::<Mutex<Vec<MoeLaunch>>>::default();
        let mut streams: Vec<_> = streams.into_iter().map(handle).collect();
        let carriers = streams.split_off(self.lanes);
        let in_parts_from = if self.in_parts { 0 } else { usize::MAX };
        let far = FarParts { ranks: far, captures: true, carriers, in_parts_from };
        let machine = Simulated { shared, properties, log: log.clone(), _pinned: pinned };
        let gpu = Gpu::of(Parts {
            machine: Box::new(machine),
            streams,
            far,
            sizes,
            memory,
            side,
            sms: self.sms,
            beside_compute: false,
            tuning: self.tuning,
            me: (inner.id, rank),
            shape: &inner.shape,
            window: &inner.window,
            across: &inner.across,
        });
        inner.gpu = Some(gpu);
        (Ep { inner: Arc::new(inner) }, log)
    }
}
