//! Building a layer on a GPU: kernels first, since peers must not wait for a compiler; memory once.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use ep_kernels::cuda::moe::{
    LayoutKernels, MoeHeader, MoeLane, MoeReport, MoeShape, MoveKernels, layout_scratch_bytes,
};
use ep_kernels::cuda::{Compiler, Device, DeviceMemory, EventPool, MappedHost};
use ep_transport::{Link, Memory, Queue, TransportError};
use parking_lot::Mutex;

use crate::sched::{CudaReservation, SmPolicy, reserve_on_gpu};
use crate::shape::{Resolved, Window};
use crate::{Ep, EpError, Result};

use super::memory::{HandleSizes, Handles};
use super::report::REPORTS;
use super::{Gpu, GpuLane, SlotStates, Tuning};

const ALIGN: usize = 256;
/// Events made ahead: a few per operation in flight.
const EVENTS: usize = 64;

/// A GPU with its kernels loaded.
#[derive(Debug)]
pub(crate) struct Prepared {
    device: Device,
    layout: LayoutKernels,
    moves: MoveKernels,
    sms: u32,
    reserved: Arc<CudaReservation>,
    tuning: Tuning,
    handles: usize,
}

/// How a layer's kernels get their SMs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SmChoice<'a> {
    /// The most blocks of a kernel.
    pub blocks: u32,
    pub policy: SmPolicy,
    /// Who has the SMs, for errors of others.
    pub holder: &'a str,
    /// A layer whose SMs are used instead.
    pub shared: Option<&'a Ep>,
}

impl SmChoice<'_> {
    fn reserve(&self, device: &Device, tuning: &Tuning) -> Result<Arc<CudaReservation>> {
        let launches = tuning.launches(self.blocks);
        let Some(layer) = self.shared else {
            let (holder, policy, blocks) = (self.holder, self.policy, self.blocks);
            return Ok(Arc::new(reserve_on_gpu(device, holder, policy, blocks, &launches)?));
        };
        match &layer.inner.sms.reservation {
            Some(theirs) if theirs.is_on(device) => {
                theirs.check(&launches)?;
                Ok(theirs.clone())
            }
            _ => {
                let ordinal = device.properties().ordinal;
                let detail = format!("the layer to share SMs with is not on GPU {ordinal}");
                Err(EpError::argument("build", detail))
            }
        }
    }
}

impl Prepared {
    pub fn new(
        ordinal: usize,
        choice: SmChoice<'_>,
        (handles, world): (usize, usize),
        tuning: Tuning,
    ) -> Result<Self> {
        let loaded = Loaded::on(ordinal)?;
        let device = loaded.device.clone();
        let (sms, available) = (choice.blocks, device.properties().sms);
        if sms == 0 || sms > available {
            let detail = format!("{sms} SMs for communication; the device has {available}");
            return Err(EpError::argument("build", detail));
        }
        if handles == 0 {
            return Err(EpError::argument("build", "no handles; at least 1 is needed"));
        }
        tuning.check(world, &device)?;
        let reserved = choice.reserve(&device, &tuning)?;
        let Loaded { layout, moves, .. } = loaded;
        Ok(Self { device, layout, moves, sms, reserved, tuning, handles })
    }

    /// The SMs set aside.
    pub fn sms(&self) -> Arc<CudaReservation> {
        self.reserved.clone()
    }
}

/// The kernels on a device, which all layers of the process share.
#[derive(Clone)]
struct Loaded {
    device: Device,
    layout: LayoutKernels,
    moves: MoveKernels,
}

impl Loaded {
    fn on(ordinal: usize) -> Result<Self> {
        static ALL: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());
        // Held while compiling: other ranks of the process need the same kernels.
        let mut all = ALL.lock();
        if let Some(known) = all.iter().find(|l| l.device.properties().ordinal == ordinal) {
            return Ok(known.clone());
        }
        let device = Device::open(ordinal)?;
        let compiler = Compiler::get()?;
        let layout = LayoutKernels::load(&device, compiler)?;
        let moves = MoveKernels::load(&device, compiler)?;
        let loaded = Self { device, layout, moves };
        all.push(loaded.clone());
        Ok(loaded)
    }
}

/// How a layer's private memory is divided.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    tables: [usize; 5],
    lane: usize,
    scratch: usize,
    pub handle: HandleSizes,
    handles: usize,
    lanes: usize,
    /// Bytes of one report.
    pub report: usize,
    lanes_at: usize,
    handles_at: usize,
    /// Bytes of device memory, the window aside.
    pub device: usize,
    summaries_at: usize,
    /// Bytes of page-locked memory, flags aside.
    pub pinned: usize,
}

impl Sizes {
    pub fn new(shape: &Resolved, handles: usize, sms: u32) -> Self {
        let placement = &shape.placement;
        let local = (0..shape.world).map(|r| placement.local_experts(r)).max().unwrap_or(0);
        let up = |bytes: usize| bytes.next_multiple_of(ALIGN);
        let tables = [
            up(8 * shape.world),
            up(4 * placement.physical()),
            up(4 * (shape.world + 1)),
            up(4 * (placement.experts() + 1)),
            up(4 * placement.physical()),
        ];
        let lanes_at: usize = tables.iter().sum();
        let probe = moe_shape(shape, 0);
        let tokens =
            shape.max_tokens.max(shape.max_rows * usize::from(shape.expert_alignment.is_some()));
        let scratch = up(layout_scratch_bytes(&probe, tokens, sms));
        let lane = up(size_of::<MoeLane>()) + scratch;
        let handles_at = lanes_at + shape.lanes * lane;
        let handle = HandleSizes::new(shape, local);
        let report = size_of::<MoeReport>() + shape.world * size_of::<MoeHeader>();
        let summaries_at = shape.lanes * REPORTS * report;
        Self {
            tables,
            lane,
            scratch,
            handle,
            handles,
            lanes: shape.lanes,
            report,
            lanes_at,
            handles_at,
            device: handles_at + handles * handle.device,
            summaries_at: summaries_at.next_multiple_of(64),
            pinned: summaries_at.next_multiple_of(64) + handles * handle.pinned,
        }
    }
}

fn moe_shape(shape: &Resolved, rank: usize) -> MoeShape {
    MoeShape {
        rank: rank as u32,
        world: shape.world as u32,
        topk: shape.topk as u32,
        fan_out: shape.topk.min(shape.world) as u32,
        physical: shape.placement.physical() as u32,
        experts: shape.placement.experts() as u32,
        local_experts: shape.placement.local_experts(rank) as u32,
        slots: shape.slots as u32,
        max_rows: shape.max_rows as u32,
        max_expert_rows: shape.max_expert_rows as u32,
        ..MoeShape::default()
    }
}

impl Gpu {
    /// Takes all memory and fills the tables. `windows` are the addresses of all ranks' windows.
    pub fn new(
        prepared: Prepared,
        (id, rank): (u64, usize),
        link: &Arc<dyn Link>,
        shape: &Resolved,
        window: &Window,
        windows: &[u64],
    ) -> Result<Self> {
        let Prepared { device, layout, moves, sms, reserved, tuning, handles } = prepared;
        let ordinal = device.properties().ordinal;
        let unfit = |detail: String| TransportError::Unsupported { op: "build", detail };
        if link.memory() != (Memory::Cuda { ordinal }) {
            let detail =
                format!("the transport's windows are in {:?}, not on GPU {ordinal}", link.memory());
            return Err(unfit(detail).into());
        }
        let side = link
            .stream_side()
            .ok_or_else(|| unfit("the transport cannot signal and wait on streams".into()))?;
        let sizes = Sizes::new(shape, handles, sms);
        let limit = Duration::from_secs(60);
        let (_, greatest) = device.priorities()?;
        let setup = reserved.stream(greatest)?;
        let memory = DeviceMemory::zeroed(&setup, sizes.device, limit)?;
        let pinned = MappedHost::<u8>::zeroed(&device, sizes.pinned)?;
        let (base, reports) = (memory.address(), pinned.device_address());
        let mut moe = moe_shape(shape, rank);
        let mut at = 0;
        let mut place = |bytes: usize| {
            let start = at;
            at += bytes;
            (start, base + start as u64)
        };
        let [w, r, b, o, l] = sizes.tables.map(&mut place);
        memory.upload(&setup, w.0, windows, limit)?;
        let placement = &shape.placement;
        let physical = placement.physical();
        let owners: Vec<u32> = (0..physical).map(|p| placement.owner(p).0 as u32).collect();
        memory.upload(&setup, r.0, &owners, limit)?;
        let mut bases: Vec<u32> =
            (0..shape.world).map(|r| placement.physical_base(r) as u32).collect();
        bases.push(physical as u32);
        memory.upload(&setup, b.0, &bases, limit)?;
        let mut replicas = Vec::with_capacity(physical);
        let mut offsets = vec![0u32];
        for expert in 0..placement.experts() {
            replicas.extend_from_slice(placement.replicas(expert));
            offsets.push(replicas.len() as u32);
        }
        memory.upload(&setup, o.0, &offsets, limit)?;
        memory.upload(&setup, l.0, &replicas, limit)?;
        (moe.windows, moe.rank_of, moe.base) = (w.1, r.1, b.1);
        (moe.replica_offsets, moe.replicas) = (o.1, l.1);
        moe.poisoned = side.poisoned;
        moe.message = window.message as u64;
        moe.slots_at = window.rank_rows(0) as u64;
        moe.slot_bytes = window.slot_bytes() as u64;
        moe.expert_region = (window.expert_rows(0) - window.rank_rows(0)) as u64;
        let lanes = (0..sizes.lanes)
            .map(|lane| {
                let state = base + (sizes.lanes_at + lane * sizes.lane) as u64;
                let fresh = MoeLane { bad_choice: u64::MAX, ..MoeLane::default() };
                memory.upload(&setup, sizes.lanes_at + lane * sizes.lane, &[fresh], limit)?;
                let stream = reserved.stream(greatest)?;
                // SAFETY: the stream lives in the lane beside its queue, and work on it ends before
                // the layer is dropped.
                let queue = unsafe { Queue::from_raw(stream.raw().cast::<c_void>(), ordinal) };
                Ok(GpuLane {
                    queue,
                    stream,
                    state,
                    scratch: state + (sizes.lane - sizes.scratch) as u64,
                    reports: reports + (lane * REPORTS * sizes.report) as u64,
                    tickets: AtomicU64::new(0),
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let local = placement.local_experts(rank);
        let handles = Handles::new(
            sizes.handles,
            (id, rank),
            &sizes.handle,
            (base + sizes.handles_at as u64, reports + sizes.summaries_at as u64),
            (local, shape.world),
        );
        let slots = SlotStates {
            free_at: (0..shape.slots).map(|_| None).collect(),
            ..SlotStates::default()
        };
        Ok(Self {
            events: EventPool::new(&device, EVENTS, false)?,
            copies: setup,
            device,
            ordinal,
            layout,
            moves,
            shape: moe,
            tuning: Mutex::new(tuning),
            sms,
            lanes,
            handles,
            slots: Mutex::new(slots),
            side,
            memory: Some(memory),
            pinned: Some(pinned),
            sizes,
        })
    }
}
