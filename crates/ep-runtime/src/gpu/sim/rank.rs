//! A rank on a simulated GPU: what stands in the place of driver and transport.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUstream;
use ep_kernels::cuda::moe::{MoeLaunch, MoeWork};
use ep_kernels::cuda::{CudaError, Device, DeviceMemory, DeviceProperties, PointerPlace};
use ep_transport::{
    Beside, Deadline, Group, Link, Mapping, Memory, Pacing, Put, Queue, Reach, StreamSide,
    ThreadTransport, Transport, TransportError, WindowSpec,
};
use parking_lot::Mutex;

use super::device::{Devices, Op};
use super::effects::Effect;
use super::turns::{How, Mutant, Shared};
use crate::ep::Inner;
use crate::gpu::build::{Parts, Sizes};
use crate::gpu::machine::{Machine, Point};
use crate::gpu::{Gpu, Tuning};
use crate::node::{Across, Hierarchy, Nodes};
use crate::{Ep, MoeShape};

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

    fn reach(&self, peer: usize) -> Reach {
        Reach::Direct(window(peer, self.spec.bytes))
    }

    fn put(&self, _: &Queue, _: Put) -> ep_transport::Result<()> {
        let detail = "windows have no memory".into();
        Err(TransportError::Unsupported { op: "put", detail })
    }

    fn flush(&self, _: &Queue, _: Deadline) -> ep_transport::Result<()> {
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

fn window(rank: usize, bytes: usize) -> Mapping {
    let base = std::ptr::without_provenance_mut((rank + 1) << 44);
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
}

impl Layer {
    /// Streams for the lanes of a rank.
    pub fn streams(&self, shared: &Shared, rank: usize) -> Vec<usize> {
        (0..self.lanes).map(|_| shared.with(|d| d.stream(rank % self.gpus))).collect()
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
        let shape = self.shape.resolve(world, sizes, None).expect("a valid shape");
        let window = shape.window(false).expect("a window");
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
        let link = SimulatedLink { shared: shared.clone(), group, spec, ordinal, pacing };
        let (side, group) = (link.stream_side().expect("just said"), link.group.clone());
        let across = Across::new(Nodes::new(&vec![0; world]), Hierarchy::Flat, rank);
        let mut inner = Inner::new(group, (Arc::new(link), across), shape, window, limit);
        let sizes = Sizes::new(&inner.shape, 16, self.sms);
        let mut properties = DeviceProperties::h200();
        properties.ordinal = ordinal;
        properties.uuid[15] = ordinal as u8;
        let pinned = vec![0u64; sizes.pinned.div_ceil(8)];
        let memory = ((rank as u64 + 1) << 40, pinned.as_ptr() as u64);
        let log = Arc::<Mutex<Vec<MoeLaunch>>>::default();
        let streams = streams.into_iter().map(handle).collect();
        let machine = Simulated { shared, properties, log: log.clone(), _pinned: pinned };
        let gpu = Gpu::of(Parts {
            machine: Box::new(machine),
            streams,
            sizes,
            memory,
            side,
            sms: self.sms,
            tuning: self.tuning,
            me: (inner.id, rank),
            shape: &inner.shape,
            window: &inner.window,
        });
        inner.gpu = Some(gpu);
        (Ep { inner: Arc::new(inner) }, log)
    }
}
