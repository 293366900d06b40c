//! Tokens that cross nodes once: what kernels are told of nodes, and those that only such layers launch.
//!
//! A token's other nodes count as ranks: [`MoeShape`] of such a layer has as many ranks as there are, one
//! that nobody is, and one per node, in this order. So one layout says where tokens go, and one dispatch
//! moves them: to the ranks of this node, and to a block per other node in this rank's staging.

use cudarc::driver::sys::CUstream;

use super::args::DispatchArgs;
use super::move_plan::MovePlan;
use super::moves::{MOE_HEADER, MoveKernels, Movers, ROWS, TMA_HEADER, rows_of};
use super::params::{MoeRouting, MoeRowFormat, MoeShape};
use crate::cuda::compile::{Arch, Compiler};
use crate::cuda::device::Device;
use crate::cuda::error::CudaError;
use crate::cuda::launch::{LaunchAttributes, LaunchConfig};
use crate::cuda::memory::Plain;
use crate::cuda::module::{Kernel, KernelParams, Module};
use crate::cuda::source::{KernelSource, Layout, layout};
use crate::cuda::stream::Stream;

const FORWARD_HEADER: (&str, &str, &[Layout]) =
    ("forward.cuh", include_str!("../../../kernels/forward.cuh"), &[]);

/// The dispatch of [`ROWS`] for rows that other ranks sent here to be forwarded.
pub(crate) static FORWARD: KernelSource = KernelSource {
    name: "rows.cu",
    kernels: &[
        "moe_forward_tma2",
        "moe_forward_tma3",
        "moe_forward_tma4",
        "moe_forward_ld1",
        "moe_forward_ld2",
        "moe_forward_ld4",
        "moe_forward_ld7",
        "moe_forward_ld14",
    ],
    shared: &[MOE_HEADER, TMA_HEADER, FORWARD_HEADER],
    text: ROWS.text,
    layouts: ROWS.layouts,
};

pub(crate) static NODES: KernelSource = KernelSource {
    name: "nodes.cu",
    kernels: &["moe_read_block", "moe_split_nodes"],
    shared: &[MOE_HEADER],
    text: include_str!("../../../kernels/nodes.cu"),
    layouts: &[
        layout!(MoeBlockParams {
            shape,
            row,
            lane,
            records,
            physical,
            weights,
            numbers,
            rows,
            offset
        }),
        layout!(MoeSplitParams {
            shape,
            routing,
            near_rank,
            near_index,
            near_order,
            node_rank,
            node_index,
            own,
            reserved
        }),
    ],
};

/// What a plan knows of nodes, and what it finds. R ranks in N nodes, P physical experts; S ranks of
/// other nodes whose tokens this rank forwards. Addresses are device addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MoeCrossing {
    /// `u32 [R]`: the node of every rank.
    pub node_of: u64,
    /// `u32 [R * N]`: the rank that forwards what a rank sends to a node.
    pub rails: u64,
    /// `u32 [S]`: the ranks whose tokens this rank forwards, ascending.
    pub sources: u64,
    /// `u32 [R + 1 + N]`: this rank's rows for the ranks of this node, and for other nodes.
    pub counts: u64,
    /// Found, `u32 [R + 1 + N]`: where this rank's rows start at each rank; 0 for nodes.
    pub sent_base: u64,
    /// Found, `u32 [R + 1 + N]`: where rows for each node are packed, in rows.
    pub staged: u64,
    /// Found, `u32 [S * R]`: where the rows of each source start at each rank.
    pub places: u64,
    /// Found for expert-major rows, `u32 [S * P]`: where they start among those of each expert.
    pub expert_places: u64,
    /// N; 0 where tokens go to each of their ranks.
    pub nodes: u32,
    /// S.
    pub incoming: u32,
    /// The most rows that a rank forwards.
    pub max_rows: u32,
    /// 0.
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MoeBlockParams {
    shape: MoeShape,
    row: MoeRowFormat,
    lane: u64,
    records: u64,
    physical: u64,
    weights: u64,
    numbers: u64,
    rows: u32,
    offset: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MoeSplitParams {
    shape: MoeShape,
    routing: MoeRouting,
    near_rank: u64,
    near_index: u64,
    near_order: u64,
    node_rank: u64,
    node_index: u64,
    own: u32,
    reserved: u32,
}

// SAFETY: repr(C), integers only, no padding: the size adds up.
unsafe impl Plain for MoeSplitParams {}
// SAFETY: the struct of a kernel whose layout checks are compiled against this one's.
unsafe impl KernelParams for MoeSplitParams {}
const _: () = assert!(size_of::<MoeSplitParams>() == 128 + 176 + 5 * 8 + 2 * 4);
// SAFETY: repr(C), integers only, no padding: the size adds up.
unsafe impl Plain for MoeCrossing {}
// SAFETY: repr(C), integers only, no padding: the size adds up.
unsafe impl Plain for MoeBlockParams {}
// SAFETY: the struct of a kernel whose layout checks are compiled against this one's.
unsafe impl KernelParams for MoeBlockParams {}
const _: () = assert!(size_of::<MoeCrossing>() == 8 * 8 + 4 * 4);
const _: () = assert!(size_of::<MoeBlockParams>() == 128 + 32 + 5 * 8 + 2 * 4);

/// Reading the records of a block that another node's rank sent here. Addresses are device addresses.
#[derive(Clone, Copy, Debug)]
pub struct BlockArgs {
    /// The layer.
    pub shape: MoeShape,
    /// The `MoeLane` of the layout that follows: it starts without a bad choice.
    pub lane: u64,
    /// The records.
    pub format: MoeRowFormat,
    /// The first of them.
    pub records: u64,
    /// How many there are.
    pub rows: u32,
    /// What was added to their ids.
    pub offset: u32,
    /// Found, `i32 [rows * K]`: physical experts of this node; -1 for others.
    pub physical: u64,
    /// Found, `f32 [rows * K]`: their weights.
    pub weights: u64,
    /// Found, `u32 [rows]`: the tokens' numbers at their source.
    pub numbers: u64,
    /// Blocks.
    pub blocks: u32,
}

/// Moving the rows of a block to the ranks of this node. Addresses are device addresses.
#[derive(Clone, Copy, Debug)]
pub struct ForwardArgs {
    /// The rows as this rank's tokens, but for their rank: `shape.rank` is their source.
    pub rows: DispatchArgs,
    /// `u32 [rows]`: the tokens' numbers at their source.
    pub numbers: u64,
}

/// Finding where rows are on the way home, if nodes are summed first. Addresses are device addresses; T
/// tokens, K choices and F destinations each.
#[derive(Clone, Copy, Debug)]
pub struct SplitArgs {
    /// The layer.
    pub shape: MoeShape,
    /// The routing with nodes behind the ranks.
    pub routing: MoeRouting,
    /// This rank's node.
    pub own: u32,
    /// Found, `i32 [T * F]` and `u32 [T * F]`: destinations in this node.
    pub near_rank: u64,
    /// See `near_rank`.
    pub near_index: u64,
    /// Found, `i32 [T * K]`: choices in this node, in the order of experts.
    pub near_order: u64,
    /// Found, `i32 [T * F]` and `u32 [T * F]`: nodes, ascending, and which of the sums that come from
    /// there is the token's; of this node's it has the token's own number.
    pub node_rank: u64,
    /// See `node_rank`.
    pub node_index: u64,
    /// Blocks.
    pub blocks: u32,
}

/// The kernels of nodes, loaded on a device.
#[derive(Clone, Debug)]
pub struct NodeKernels {
    read: Kernel,
    split: Kernel,
    forward: Movers,
}

impl NodeKernels {
    /// Compiles them, or takes them from the cache, and loads them.
    ///
    /// # Errors
    /// A device older than compute capability 8.0, or a failure of compiler or driver.
    pub fn load(device: &Device, compiler: &Compiler) -> Result<Self, CudaError> {
        let arch = Arch::of(device.properties())?;
        let module = Module::load(device, &compiler.cubin(&NODES, arch)?)?;
        let forward = Module::load(device, &compiler.cubin(&FORWARD, arch)?)?;
        let (read, split) = (module.kernel("moe_read_block")?, module.kernel("moe_split_nodes")?);
        Ok(Self { read, split, forward: rows_of(&forward, "moe_forward")? })
    }

    /// Loads them into the partition of `stream` too, if that launches into one.
    ///
    /// # Errors
    /// The driver's.
    pub fn prepare(&self, stream: &Stream) -> Result<(), CudaError> {
        self.read.prepare(stream)?;
        self.split.prepare(stream)?;
        let (tma, ldst) = &self.forward;
        tma.iter().chain(ldst).try_for_each(|kernel| kernel.prepare(stream))
    }

    /// Reads which token of a block has which experts.
    ///
    /// # Safety
    /// All addresses are valid on the device for what is done with them, until the kernel has ended;
    /// `stream` is a live stream of this device.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn read(&self, stream: CUstream, args: &BlockArgs) -> Result<(), CudaError> {
        let &BlockArgs { shape, format, records, rows, offset, physical, weights, .. } = args;
        let (lane, numbers) = (args.lane, args.numbers);
        let params = MoeBlockParams {
            shape,
            row: format,
            lane,
            records,
            physical,
            weights,
            numbers,
            rows,
            offset,
        };
        // SAFETY: the caller's promise; the kernel takes these parameters.
        unsafe { self.read.launch(stream, &reading(args.blocks), &params) }
    }

    /// Finds where rows are on the way home.
    ///
    /// # Safety
    /// As [`NodeKernels::read`].
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn split(&self, stream: CUstream, args: &SplitArgs) -> Result<(), CudaError> {
        let params = MoeSplitParams {
            shape: args.shape,
            routing: args.routing,
            near_rank: args.near_rank,
            near_index: args.near_index,
            near_order: args.near_order,
            node_rank: args.node_rank,
            node_index: args.node_index,
            own: args.own,
            reserved: 0,
        };
        // SAFETY: the caller's promise; the kernel takes these parameters.
        unsafe { self.split.launch(stream, &reading(args.blocks), &params) }
    }

    /// Moves the rows of a block to the ranks of this node.
    ///
    /// # Safety
    /// As [`NodeKernels::read`].
    ///
    /// # Errors
    /// A plan that does not fit, or the driver's.
    pub unsafe fn forward(
        &self,
        stream: CUstream,
        moves: &MoveKernels,
        plan: &MovePlan,
        args: &ForwardArgs,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { moves.forward(stream, plan, &self.forward, args) }
    }
}

/// The launch of a kernel of `nodes.cu`.
pub(super) fn reading(blocks: u32) -> LaunchConfig {
    let attributes = LaunchAttributes::plain();
    LaunchConfig { grid: blocks, block: 512, shared_bytes: 0, attributes }
}
