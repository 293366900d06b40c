//! Launching the kernels that lay out, announce and plan.

use cudarc::driver::sys::CUstream;

use super::args::{AnnounceArgs, ExpandPlaces, JudgeArgs, LayoutArgs, PlanArgs, TailArgs};
use super::moves::MOE_HEADER;
use super::nodes::MoeCrossing;
use super::params::{MoeExpertFormat, MoeHeader, MoeOp, MoeRouting, MoeRowFormat, MoeShape};
use crate::cuda::compile::{Arch, Compiler};
use crate::cuda::device::Device;
use crate::cuda::error::CudaError;
use crate::cuda::launch::{LaunchAttributes, LaunchConfig};
use crate::cuda::memory::Plain;
use crate::cuda::module::{Kernel, KernelParams, Module};
use crate::cuda::source::{KernelSource, Layout, layout};
use crate::cuda::stream::Stream;

const TILE_HEADER: (&str, &str, &[Layout]) =
    ("tile.cuh", include_str!("../../../kernels/tile.cuh"), &[]);

pub(crate) static LAYOUT: KernelSource = KernelSource {
    name: "layout.cu",
    kernels: &["moe_layout_count", "moe_layout_place"],
    shared: &[MOE_HEADER, TILE_HEADER],
    text: include_str!("../../../kernels/layout.cu"),
    layouts: &[layout!(MoeLayoutParams {
        shape,
        routing,
        op,
        header,
        ids,
        weights,
        scratch,
        crossing,
        kind,
        physical_ids,
        shared_words,
        nodes
    })],
};

pub(crate) static PLACES: KernelSource = KernelSource {
    name: "places.cu",
    kernels: &["moe_places_count", "moe_places_place"],
    shared: &[MOE_HEADER, TILE_HEADER],
    text: include_str!("../../../kernels/places.cu"),
    layouts: &[layout!(MoePlacesParams {
        shape,
        routing,
        op,
        row,
        scratch,
        shared_words,
        reserved
    })],
};

pub(crate) static PLAN: KernelSource = KernelSource {
    name: "plan.cu",
    kernels: &["moe_announce", "moe_judge", "moe_plan", "moe_mark_tail"],
    shared: &[MOE_HEADER],
    text: include_str!("../../../kernels/plan.cu"),
    layouts: &[
        layout!(MoeAnnounceParams { shape, op, header, handle }),
        layout!(MoeJudgeParams { shape, op }),
        layout!(MoeCrossing {
            node_of,
            rails,
            sources,
            counts,
            sent_base,
            staged,
            places,
            expert_places,
            nodes,
            incoming,
            max_rows,
            reserved
        }),
        layout!(MoePlanParams {
            shape,
            routing,
            op,
            crossing,
            summary,
            scratch,
            node_of,
            alignment,
            block_rows,
            block_expert_rows,
            reserved
        }),
        layout!(MoeTailParams { shape, routing, op, row, expert, expert_major, reserved }),
    ],
};

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MoeLayoutParams {
    shape: MoeShape,
    routing: MoeRouting,
    op: MoeOp,
    header: MoeHeader,
    ids: u64,
    weights: u64,
    scratch: u64,
    crossing: u64,
    kind: u32,
    physical_ids: u32,
    shared_words: u32,
    nodes: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MoePlacesParams {
    shape: MoeShape,
    routing: MoeRouting,
    op: MoeOp,
    row: MoeRowFormat,
    scratch: u64,
    shared_words: u32,
    reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MoeAnnounceParams {
    shape: MoeShape,
    op: MoeOp,
    header: MoeHeader,
    handle: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MoeJudgeParams {
    shape: MoeShape,
    op: MoeOp,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MoePlanParams {
    shape: MoeShape,
    routing: MoeRouting,
    op: MoeOp,
    crossing: MoeCrossing,
    summary: u64,
    scratch: u64,
    node_of: u64,
    alignment: u32,
    block_rows: u32,
    block_expert_rows: u32,
    reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MoeTailParams {
    shape: MoeShape,
    routing: MoeRouting,
    op: MoeOp,
    row: MoeRowFormat,
    expert: MoeExpertFormat,
    expert_major: u32,
    reserved: u32,
}

macro_rules! params {
    ($($name:ident = $bytes:expr;)*) => {
        $(
            // SAFETY: repr(C), integers only, no padding: the size adds up.
            unsafe impl Plain for $name {}
            // SAFETY: the struct of a kernel whose layout checks are compiled against this one's.
            unsafe impl KernelParams for $name {}
            const _: () = assert!(size_of::<$name>() == $bytes);
        )*
    };
}
params! {
    MoeLayoutParams = 128 + 176 + 72 + 72 + 4 * 8 + 4 * 4;
    MoePlacesParams = 128 + 176 + 72 + 32 + 8 + 2 * 4;
    MoeAnnounceParams = 128 + 72 + 72 + 8;
    MoeJudgeParams = 128 + 72;
    MoePlanParams = 128 + 176 + 72 + 80 + 3 * 8 + 4 * 4;
    MoeTailParams = 128 + 176 + 72 + 32 + 24 + 2 * 4;
}

/// Shared memory that counting may take.
const SHARED_WORDS: usize = 40 * 1024 / 4;

/// Warps per block of a counting kernel with so many columns: as many as shared memory holds masks
/// and counts for, at most 16.
fn warps(columns: usize) -> usize {
    (SHARED_WORDS / (2 * columns.max(1))).clamp(1, 16)
}

/// Bytes of scratch that a lane needs for up to `tokens` tokens or received rows on `blocks` blocks.
pub fn layout_scratch_bytes(shape: &MoeShape, _tokens: usize, blocks: u32) -> usize {
    let (physical, world) = (shape.physical as usize, shape.world as usize);
    let columns = physical + world;
    let (warps, blocks) = (warps(columns).max(16), blocks as usize);
    // Totals, prefixes, and masks and counts where shared memory is too small.
    let counting = 4 * blocks * columns * (1 + warps + 2 * warps);
    let planning = 8 * (physical + 2 * world);
    counting.max(planning)
}

/// The kernels that lay out, announce and plan, loaded on a device.
#[derive(Clone, Debug)]
pub struct LayoutKernels {
    count: Kernel,
    place: Kernel,
    places_count: Kernel,
    places_place: Kernel,
    announce: Kernel,
    judge: Kernel,
    plan: Kernel,
    mark_tail: Kernel,
}

impl LayoutKernels {
    /// Compiles them, or takes them from the cache, and loads them.
    ///
    /// # Errors
    /// A device older than compute capability 8.0, or a failure of compiler or driver.
    pub fn load(device: &Device, compiler: &Compiler) -> Result<Self, CudaError> {
        let arch = Arch::of(device.properties())?;
        let load = |source: &KernelSource| Module::load(device, &compiler.cubin(source, arch)?);
        let (layout, places, plan) = (load(&LAYOUT)?, load(&PLACES)?, load(&PLAN)?);
        Ok(Self {
            count: layout.kernel("moe_layout_count")?,
            place: layout.kernel("moe_layout_place")?,
            places_count: places.kernel("moe_places_count")?,
            places_place: places.kernel("moe_places_place")?,
            announce: plan.kernel("moe_announce")?,
            judge: plan.kernel("moe_judge")?,
            plan: plan.kernel("moe_plan")?,
            mark_tail: plan.kernel("moe_mark_tail")?,
        })
    }

    /// Loads them into the partition of `stream` too, if that launches into one.
    ///
    /// # Errors
    /// The driver's.
    pub fn prepare(&self, stream: &Stream) -> Result<(), CudaError> {
        let all = [&self.count, &self.place, &self.places_count, &self.places_place];
        let rest = [&self.announce, &self.judge, &self.plan, &self.mark_tail];
        all.into_iter().chain(rest).try_for_each(|kernel| kernel.prepare(stream))
    }

    /// Lays out and announces: two launches.
    ///
    /// # Safety
    /// All addresses are valid on the device for what is done with them, until the kernels have
    /// ended; `stream` is a live stream of this device.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn layout(&self, stream: CUstream, args: &LayoutArgs) -> Result<(), CudaError> {
        let columns = (args.shape.physical + args.shape.world) as usize;
        let (config, shared_words) = counting(columns, args.blocks);
        let params = MoeLayoutParams {
            shape: args.shape,
            routing: args.routing,
            op: args.op,
            header: args.header,
            ids: args.ids,
            weights: args.weights,
            scratch: args.scratch,
            crossing: args.crossing,
            kind: args.ids_kind as u32,
            physical_ids: u32::from(args.physical_ids),
            shared_words,
            nodes: args.nodes,
        };
        // SAFETY: the caller's promise; the kernels take these parameters.
        unsafe {
            self.count.launch(stream, &config, &params)?;
            self.place.launch(stream, &config, &params)
        }
    }

    /// Announces an operation to all ranks.
    ///
    /// # Safety
    /// As [`LayoutKernels::layout`].
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn announce(&self, stream: CUstream, args: &AnnounceArgs) -> Result<(), CudaError> {
        let &AnnounceArgs { shape, op, header, handle } = args;
        let params = MoeAnnounceParams { shape, op, header, handle };
        // SAFETY: the caller's promise; the kernel takes these parameters.
        unsafe { self.announce.launch(stream, &one_block(shape.world), &params) }
    }

    /// Decides on an operation whose counts are known.
    ///
    /// # Safety
    /// As [`LayoutKernels::layout`].
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn judge(&self, stream: CUstream, args: &JudgeArgs) -> Result<(), CudaError> {
        let &JudgeArgs { shape, op } = args;
        // SAFETY: the caller's promise; the kernel takes these parameters.
        unsafe { self.judge.launch(stream, &one_block(shape.world), &MoeJudgeParams { shape, op }) }
    }

    /// Decides on an uncached dispatch and completes its routing.
    ///
    /// # Safety
    /// As [`LayoutKernels::layout`].
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn plan(&self, stream: CUstream, args: &PlanArgs) -> Result<(), CudaError> {
        let &PlanArgs { shape, routing, op, alignment, crossing, limits, summary, scratch } = args;
        let columns = shape.physical + shape.world;
        let params = MoePlanParams {
            shape,
            routing,
            op,
            crossing,
            summary,
            scratch,
            node_of: limits.node_of,
            alignment,
            block_rows: limits.rows,
            block_expert_rows: limits.expert_rows,
            reserved: 0,
        };
        // SAFETY: the caller's promise; the kernel takes these parameters.
        unsafe { self.plan.launch(stream, &one_block(columns), &params) }
    }

    /// Numbers received rows by expert: two launches.
    ///
    /// # Safety
    /// As [`LayoutKernels::layout`].
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn expand_places(
        &self,
        stream: CUstream,
        args: &ExpandPlaces,
    ) -> Result<(), CudaError> {
        let &ExpandPlaces { shape, routing, op, format, scratch, blocks } = args;
        let (config, shared_words) = counting(shape.local_experts as usize, blocks);
        let params =
            MoePlacesParams { shape, routing, op, row: format, scratch, shared_words, reserved: 0 };
        // SAFETY: the caller's promise; the kernels take these parameters.
        unsafe {
            self.places_count.launch(stream, &config, &params)?;
            self.places_place.launch(stream, &config, &params)
        }
    }

    /// Marks the rows behind the last as rows without ids and source.
    ///
    /// # Safety
    /// As [`LayoutKernels::layout`].
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn mark_tail(&self, stream: CUstream, args: &TailArgs) -> Result<(), CudaError> {
        let &TailArgs { shape, routing, op, expert_major, row, expert, blocks } = args;
        let expert_major = u32::from(expert_major);
        let params = MoeTailParams { shape, routing, op, row, expert, expert_major, reserved: 0 };
        // SAFETY: the caller's promise; the kernel takes these parameters.
        unsafe { self.mark_tail.launch(stream, &marking(blocks), &params) }
    }
}

fn plain(grid: u32, block: u32, shared_bytes: u32) -> LaunchConfig {
    LaunchConfig { grid, block, shared_bytes, attributes: LaunchAttributes::plain() }
}

/// The launch of a kernel of one block with work for so many threads.
pub(super) fn one_block(threads: u32) -> LaunchConfig {
    plain(1, threads.next_multiple_of(32).clamp(32, 1024), 0)
}

/// The launch of the kernel that marks rows.
pub(super) fn marking(blocks: u32) -> LaunchConfig {
    plain(blocks, 512, 0)
}

/// The launch of a counting kernel, and the words of shared memory it has.
pub(super) fn counting(columns: usize, blocks: u32) -> (LaunchConfig, u32) {
    let warps = warps(columns);
    let words = 2 * columns * warps;
    let words = if words <= SHARED_WORDS { words } else { 0 };
    (plain(blocks, 32 * warps as u32, 4 * words as u32), words as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counting_takes_what_fits() {
        let of = |columns| {
            let (config, words) = counting(columns, 16);
            (config.grid, config.block, config.shared_bytes, words)
        };
        assert_eq!(of(1), (16, 512, 128, 32));
        assert_eq!(of(258), (16, 512, 33_024, 8_256));
        assert_eq!(of(1_026), (16, 128, 32_832, 8_208));
        // Too large for shared memory even with one warp: masks go to scratch.
        assert_eq!(of(9_000), (16, 32, 0, 0));
    }
}
