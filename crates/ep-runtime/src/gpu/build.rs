//! Building a layer on a GPU: kernels first, since peers must not wait for a compiler; memory once.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUstream;
use ep_kernels::Placement;
use ep_kernels::cuda::moe::{
    FixedKernels, LayoutKernels, MoeHeader, MoeKernels, MoeLane, MoeReport, MoeShape, MoveKernels,
    NodeKernels, layout_scratch_bytes,
};
use ep_kernels::cuda::{Compiler, Device, DeviceMemory, EventPool, MappedHost, Stream};
use ep_transport::{Link, Memory, Queue, StreamSide, TransportError};
use parking_lot::Mutex;

use crate::node::Across;
use crate::sched::{CudaReservation, SmPolicy, reserve_on_gpu};
use crate::shape::Resolved;
use crate::window::Window;
use crate::{Ep, EpError, Result};

use super::fixed::Fixed;
use super::machine::{Driven, Machine};
use super::memory::{Counted, HandleSizes, Handles};
use super::nodes::{Crossings, NodeSizes};
use super::report::REPORTS;
use super::{Gpu, GpuLane, Plans, SlotStates, Tuning};

const ALIGN: usize = 256;
/// Events made ahead: a few per operation in flight.
const EVENTS: usize = 64;
/// The longest that anything takes when a layer is built, kernels aside.
pub(super) const SETUP: Duration = Duration::from_secs(60);

/// A GPU with its kernels loaded.
#[derive(Debug)]
pub(crate) struct Prepared {
    device: Device,
    kernels: MoeKernels,
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
        shape: Option<&Resolved>,
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
        let nodes = shape.and_then(NodeSizes::new);
        let columns = nodes.map_or(world, |nodes| nodes.columns);
        tuning.check(columns, device.properties())?;
        let nodes = nodes.map(|_| NodeKernels::load(&device, Compiler::get()?)).transpose()?;
        let fixed = shape.and_then(|shape| shape.blocks);
        let fixed = fixed.map(|_| FixedKernels::load(&device, Compiler::get()?)).transpose()?;
        let reserved = choice.reserve(&device, &tuning)?;
        let Loaded { layout, moves, .. } = loaded;
        let kernels = MoeKernels { layout, moves, nodes, fixed };
        Ok(Self { device, kernels, sms, reserved, tuning, handles })
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
    /// The most a rank sends.
    pub tokens: usize,
    tables: [usize; 6],
    lane: usize,
    scratch: usize,
    pub handle: HandleSizes,
    handles: usize,
    lanes: usize,
    /// Bytes of one report.
    pub report: usize,
    lanes_at: usize,
    handles_at: usize,
    /// Where what is for nodes is.
    nodes_at: usize,
    /// Bytes of device memory, the window aside.
    pub device: usize,
    summaries_at: usize,
    /// Bytes of page-locked memory, flags aside.
    pub pinned: usize,
}

impl Sizes {
    /// `staging`: ranks may not be mapped.
    pub fn new(shape: &Resolved, handles: usize, sms: u32, staging: bool) -> Self {
        let placement = &shape.placement;
        let local = (0..shape.world).map(|r| placement.local_experts(r)).max().unwrap_or(0);
        let up = |bytes: usize| bytes.next_multiple_of(ALIGN);
        let tables = [
            up(8 * shape.world),
            up(4 * placement.physical()),
            up(4 * (shape.world + 1)),
            up(4 * (placement.experts() + 1)),
            up(4 * placement.physical()),
            up(4 * shape.world),
        ];
        let lanes_at: usize = tables.iter().sum();
        let nodes = NodeSizes::new(shape);
        let columns = nodes.map_or(shape.world, |nodes| nodes.columns);
        let probe = MoeShape { world: columns as u32, ..moe_shape(shape, 0) };
        let tokens =
            shape.max_tokens.max(shape.max_rows * usize::from(shape.expert_alignment.is_some()));
        let scratch = up(layout_scratch_bytes(&probe, tokens, sms));
        let lane = up(size_of::<MoeLane>()) + scratch;
        let handles_at = lanes_at + shape.lanes * lane;
        let crossing = nodes.map_or((0, 0), |_| (shape.nodes, shape.sources));
        let handle = HandleSizes::new(shape, counted(shape, local, staging, crossing));
        let nodes_at = handles_at + handles * handle.device;
        let report = size_of::<MoeReport>() + shape.world * size_of::<MoeHeader>();
        let summaries_at = shape.lanes * REPORTS * report;
        Self {
            tokens: shape.max_tokens,
            tables,
            lane,
            scratch,
            handle,
            handles,
            lanes: shape.lanes,
            report,
            lanes_at,
            handles_at,
            nodes_at,
            device: nodes_at + nodes.map_or(0, |nodes| nodes.device),
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

/// What a layer on a GPU is put together from, wherever its memory is.
pub(super) struct Parts<'a> {
    pub machine: Box<dyn Machine>,
    /// One per lane, kept by the machine.
    pub streams: Vec<CUstream>,
    pub far: FarParts,
    pub sizes: Sizes,
    /// Addresses of device memory and of page-locked memory, as large as `sizes` says.
    pub memory: (u64, u64),
    pub side: StreamSide,
    pub sms: u32,
    /// Whether compute is meant to run at the same time.
    pub beside_compute: bool,
    pub tuning: Tuning,
    /// The layer and this rank.
    pub me: (u64, usize),
    pub shape: &'a Resolved,
    pub window: &'a Window,
    pub across: &'a Across,
}

/// What a layer has for ranks that are not mapped.
#[derive(Debug)]
pub(super) struct FarParts {
    /// How many they are.
    pub ranks: usize,
    /// Whether what goes to them can be captured.
    pub captures: bool,
    /// One stream per lane, if there are some, kept by the machine.
    pub carriers: Vec<CUstream>,
    /// Payloads of so many bytes are sent in parts.
    pub in_parts_from: usize,
}

/// What a block must have to be worth a launch and a transfer of its own: at a link's 400 GB/s a part
/// of it takes some 5 us, which a launch takes too.
const FAR: FarParts =
    FarParts { ranks: 0, captures: false, carriers: Vec::new(), in_parts_from: 8 << 20 };

impl Sizes {
    /// Where the tables are in device memory: windows, owners, first experts, first replicas,
    /// replicas, nodes.
    fn tables_at(&self) -> [usize; 6] {
        let mut at = 0;
        self.tables.map(|bytes| {
            let start = at;
            at += bytes;
            start
        })
    }

    fn lane_at(&self, lane: usize) -> usize {
        self.lanes_at + lane * self.lane
    }
}

impl Gpu {
    /// Takes all memory and fills the tables. `windows` are the addresses of all ranks' windows.
    pub fn new(
        prepared: Prepared,
        me: (u64, usize),
        link: &Arc<dyn Link>,
        (shape, window): (&Resolved, &Window),
        across: &Across,
        windows: &[u64],
    ) -> Result<Self> {
        let Prepared { device, kernels, sms, reserved, tuning, handles } = prepared;
        let ordinal = device.properties().ordinal;
        let unfit = |detail: String| TransportError::Unsupported { op: "build", detail };
        if link.memory() != (Memory::Cuda { ordinal }) {
            let detail =
                format!("the transport's windows are in {:?}, not on GPU {ordinal}", link.memory());
            return Err(unfit(detail).into());
        }
        let side = link.stream_side().ok_or_else(|| {
            let detail = "the transport cannot signal and wait on streams; those of NVLink, NCCL and \
                          RDMA can";
            unfit(detail.into())
        })?;
        let sizes = Sizes::new(shape, handles, sms, window.has_staging());
        let (_, greatest) = device.priorities()?;
        // What the host waits for is no part of communication, so not of its partition.
        let copies = device.stream(greatest)?;
        let memory = DeviceMemory::zeroed(&copies, sizes.device, SETUP)?;
        let pinned = MappedHost::<u8>::zeroed(&device, sizes.pinned)?;
        fill_tables((&memory, &copies), &sizes, &shape.placement, windows, across)?;
        if let Some(tables) = NodeSizes::new(shape) {
            let to = (&memory, sizes.nodes_at, &copies);
            tables.fill(to, &shape.placement, across, (windows, me.1))?;
        }
        let fresh = MoeLane { bad_choice: u64::MAX, ..MoeLane::default() };
        let lane = |lane| {
            memory.upload(&copies, sizes.lane_at(lane), &[fresh], SETUP)?;
            reserved.stream(greatest)
        };
        let mut streams = (0..sizes.lanes).map(lane).collect::<Result<Vec<_>, _>>()?;
        let far = windows.iter().filter(|&&window| window == 0).count();
        let carriers = if far > 0 { sizes.lanes } else { 0 };
        let carriers: Vec<_> =
            (0..carriers).map(|_| reserved.stream(greatest)).collect::<Result<_, _>>()?;
        // A partition loads kernels for itself; behind a pending wait that might never end.
        if let Some(stream) = streams.first() {
            kernels.prepare(stream)?;
        }
        let raw = |streams: &[Stream]| streams.iter().map(Stream::raw).collect();
        let captures = link.captures();
        let (lanes, far) =
            (raw(&streams), FarParts { ranks: far, captures, carriers: raw(&carriers), ..FAR });
        streams.extend(carriers);
        let addresses = (memory.address(), pinned.device_address());
        let events = EventPool::new(&device, EVENTS, false)?;
        let (memory, pinned) = (Some(memory), Some(pinned));
        let machine = Driven { device, kernels, events, streams, copies, memory, pinned };
        Ok(Self::of(Parts {
            machine: Box::new(machine),
            streams: lanes,
            far,
            sizes,
            memory: addresses,
            side,
            sms,
            beside_compute: reserved.report().in_force != SmPolicy::Shared,
            tuning,
            me,
            shape,
            window,
            across,
        }))
    }

    /// A layer over memory that has been taken and filled.
    pub(super) fn of(parts: Parts<'_>) -> Self {
        let Parts { machine, streams, far, sizes, side, shape, window, across, .. } = parts;
        let (base, reports) = parts.memory;
        let ordinal = machine.properties().ordinal;
        let (id, rank) = parts.me;
        let tables = sizes.tables_at().map(|at| base + at as u64);
        let lane = |(lane, stream): (usize, CUstream)| {
            let state = base + sizes.lane_at(lane) as u64;
            // SAFETY: the machine keeps the streams, and lives as long as the queues are used.
            let queue =
                |stream: CUstream| unsafe { Queue::from_raw(stream.cast::<c_void>(), ordinal) };
            GpuLane {
                queue: queue(stream),
                carrier: far.carriers.get(lane).map(|&carrier| queue(carrier)),
                blocks: Mutex::default(),
                state,
                scratch: state + (sizes.lane - sizes.scratch) as u64,
                reports: reports + (lane * REPORTS * sizes.report) as u64,
                verdicts: Mutex::default(),
            }
        };
        let moe = with_addresses(moe_shape(shape, rank), tables, side.poisoned, window);
        let fixed = Fixed::new(shape, window, (tables[5], far.ranks, far.captures));
        let moe = MoeShape { far: far.ranks as u32, ..moe };
        let crossings = crossings(&moe, shape, across, base + sizes.nodes_at as u64);
        let crossing = match crossings {
            Some(_) => (across.nodes.count(), across.sources.len()),
            None => (0, 0),
        };
        let experts = shape.placement.local_experts(rank);
        let handles = Handles::new(
            sizes.handles,
            (id, rank),
            &sizes.handle,
            (base + sizes.handles_at as u64, reports + sizes.summaries_at as u64),
            counted(shape, experts, window.has_staging(), crossing),
        );
        let slots = SlotStates {
            free_at: (0..shape.slots).map(|_| None).collect(),
            ..SlotStates::default()
        };
        Self {
            ordinal,
            shape: moe,
            crossings,
            fixed,
            in_parts_from: far.in_parts_from,
            plans: Mutex::new(Plans { given: parts.tuning, ..Plans::default() }),
            sms: parts.sms,
            beside_compute: parts.beside_compute,
            lanes: streams.into_iter().enumerate().map(lane).collect(),
            handles,
            slots: Mutex::new(slots),
            side,
            sizes,
            machine,
        }
    }
}

/// What a handle tells the host, on a rank of so many experts.
fn counted(shape: &Resolved, experts: usize, far: bool, nodes: (usize, usize)) -> Counted {
    let (ranks, physical) = (shape.world, shape.placement.physical());
    Counted { experts, ranks, physical, far, nodes }
}

/// What a layer has for nodes in memory at `base`, if tokens cross some.
fn crossings(moe: &MoeShape, shape: &Resolved, across: &Across, base: u64) -> Option<Crossings> {
    let sizes = NodeSizes::new(shape).filter(|_| moe.far > 0)?;
    let nodes = (across.nodes.count(), across.nodes.of(moe.rank as usize), across.sources.len());
    let most = (shape.max_tokens, shape.max_forward_rows);
    let lanes: Vec<u64> = (0..shape.lanes).map(|lane| sizes.lane(base, lane)).collect();
    let splits = lanes.iter().map(|&lane| sizes.split(lane)).collect();
    Some(Crossings::new(moe, sizes.tables(base), nodes, most, (lanes, splits)))
}

fn with_addresses(
    moe: MoeShape,
    [windows, rank_of, base, replica_offsets, replicas, _]: [u64; 6],
    poisoned: u64,
    window: &Window,
) -> MoeShape {
    MoeShape {
        windows,
        rank_of,
        base,
        replica_offsets,
        replicas,
        poisoned,
        message: window.message as u64,
        slots_at: window.rank_rows(0) as u64,
        slot_bytes: window.slot_bytes() as u64,
        expert_region: (window.expert_rows(0) - window.rank_rows(0)) as u64,
        ..moe
    }
}

fn fill_tables(
    (memory, stream): (&DeviceMemory, &Stream),
    sizes: &Sizes,
    placement: &Placement,
    windows: &[u64],
    across: &Across,
) -> Result<()> {
    let [windows_at, rank_of, base, replica_offsets, replicas_at, nodes_at] = sizes.tables_at();
    let (physical, ranks) = (placement.physical(), windows.len());
    let owners: Vec<u32> = (0..physical).map(|p| placement.owner(p).0 as u32).collect();
    let mut bases: Vec<u32> = (0..ranks).map(|r| placement.physical_base(r) as u32).collect();
    bases.push(physical as u32);
    let mut replicas = Vec::with_capacity(physical);
    let mut offsets = vec![0u32];
    for expert in 0..placement.experts() {
        replicas.extend_from_slice(placement.replicas(expert));
        offsets.push(replicas.len() as u32);
    }
    let nodes: Vec<u32> = across.nodes.all().iter().map(|&node| node as u32).collect();
    memory.upload(stream, windows_at, windows, SETUP)?;
    for (at, table) in [
        (rank_of, &owners),
        (base, &bases),
        (replica_offsets, &offsets),
        (replicas_at, &replicas),
        (nodes_at, &nodes),
    ] {
        memory.upload(stream, at, table, SETUP)?;
    }
    Ok(())
}
