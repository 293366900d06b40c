//! What a layer does on a stream, one piece of work at a time: the seam between protocol and driver.

use cudarc::driver::sys::CUstream;

use super::args::{
    AnnounceArgs, CombineArgs, DispatchArgs, ExpandArgs, ExpandPlaces, JudgeArgs, LayoutArgs,
    PlanArgs, ReduceArgs, TailArgs,
};
use super::fixed::{FIXED, FixedArgs, FixedKernels, FixedRows};
use super::layout::{LAYOUT, LayoutKernels, PLACES, PLAN, counting, marking, one_block};
use super::move_plan::{CopyPath, MovePlan, Mover};
use super::moves::{MoveKernels, ROWS, SUMS, config};
use super::nodes::{BlockArgs, FORWARD, ForwardArgs, NODES, NodeKernels, SplitArgs, reading};
use crate::cuda::device::DeviceProperties;
use crate::cuda::error::{CudaError, invalid};
use crate::cuda::launch::LaunchConfig;
use crate::cuda::source::KernelSource;
use crate::cuda::stream::Stream;

/// One piece of a layer's work. All of it is launched on one stream, in order.
#[derive(Clone, Copy, Debug)]
pub enum MoeWork<'a> {
    /// [`LayoutKernels::layout`]: lays out and announces.
    Layout(&'a LayoutArgs),
    /// [`LayoutKernels::layout`] for a layer whose ranks are not told: where tokens go that cross nodes.
    Cross(&'a LayoutArgs),
    /// [`NodeKernels::read`], then [`LayoutKernels::layout`] of what was read.
    Relay(&'a BlockArgs, &'a LayoutArgs),
    /// [`NodeKernels::forward`].
    Forward(&'a MovePlan, &'a ForwardArgs),
    /// [`NodeKernels::split`].
    Split(&'a SplitArgs),
    /// [`MoveKernels::combine`], nodes first.
    NodeSum(NodeSum, &'a MovePlan, &'a CombineArgs),
    /// [`LayoutKernels::announce`].
    Announce(&'a AnnounceArgs),
    /// [`LayoutKernels::judge`].
    Judge(&'a JudgeArgs),
    /// [`LayoutKernels::plan`].
    Plan(&'a PlanArgs),
    /// [`LayoutKernels::expand_places`].
    Places(&'a ExpandPlaces),
    /// [`LayoutKernels::mark_tail`].
    Tail(&'a TailArgs),
    /// [`MoveKernels::dispatch`].
    Dispatch(&'a MovePlan, &'a DispatchArgs),
    /// [`MoveKernels::expand`].
    Expand(&'a MovePlan, &'a ExpandArgs),
    /// [`MoveKernels::reduce`].
    Reduce(&'a MovePlan, &'a ReduceArgs),
    /// [`MoveKernels::combine`].
    Combine(&'a MovePlan, &'a CombineArgs),
    /// [`FixedKernels::submit`].
    Fixed(FixedRows, &'a FixedArgs),
}

/// The kernels of a layer.
#[derive(Clone, Debug)]
pub struct MoeKernels {
    /// Those that lay out, announce and plan.
    pub layout: LayoutKernels,
    /// Those that move rows.
    pub moves: MoveKernels,
    /// Where tokens cross nodes once.
    pub nodes: Option<NodeKernels>,
    /// Where blocks have a fixed size.
    pub fixed: Option<FixedKernels>,
}

impl MoeKernels {
    /// Loads them into the partition of `stream` too, if that launches into one.
    ///
    /// # Errors
    /// The driver's.
    pub fn prepare(&self, stream: &Stream) -> Result<(), CudaError> {
        self.layout.prepare(stream)?;
        self.moves.prepare(stream)?;
        self.nodes.iter().try_for_each(|nodes| nodes.prepare(stream))?;
        self.fixed.iter().try_for_each(|fixed| fixed.prepare(stream))
    }
}

/// What is summed where nodes are summed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeSum {
    /// Rows of tokens that this rank has forwarded, over the ranks of its node.
    Block,
    /// Rows of this rank's tokens over the ranks of its node.
    Own,
    /// The sums of all nodes.
    All,
}

/// A kernel and how it is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeLaunch {
    /// Its name in the source.
    pub kernel: &'static str,
    /// Grid, block, shared memory and attributes.
    pub config: LaunchConfig,
}

impl MoeWork<'_> {
    /// Launches it.
    ///
    /// # Safety
    /// As [`LayoutKernels::layout`] and [`MoveKernels::dispatch`].
    ///
    /// # Errors
    /// A plan that does not fit, kernels that are needed and not there, or the driver's.
    pub unsafe fn submit(&self, stream: CUstream, kernels: &MoeKernels) -> Result<(), CudaError> {
        let MoeKernels { layout, moves, nodes, fixed } = kernels;
        let rails = || match nodes {
            Some(nodes) => Ok(nodes),
            None => invalid("node kernels", "they were not loaded"),
        };
        let blocks = || match fixed {
            Some(fixed) => Ok(fixed),
            None => invalid("kernels of fixed blocks", "they were not loaded"),
        };
        // SAFETY: the caller's promise is that of each of these.
        unsafe {
            match self {
                Self::Layout(args) | Self::Cross(args) => layout.layout(stream, args),
                Self::Relay(block, args) => {
                    rails()?.read(stream, block)?;
                    layout.layout(stream, args)
                }
                Self::Forward(plan, args) => rails()?.forward(stream, moves, plan, args),
                Self::Split(args) => rails()?.split(stream, args),
                Self::NodeSum(_, plan, args) => moves.combine(stream, plan, args),
                Self::Announce(args) => layout.announce(stream, args),
                Self::Judge(args) => layout.judge(stream, args),
                Self::Plan(args) => layout.plan(stream, args),
                Self::Places(args) => layout.expand_places(stream, args),
                Self::Tail(args) => layout.mark_tail(stream, args),
                Self::Dispatch(plan, args) => moves.dispatch(stream, plan, args),
                Self::Expand(plan, args) => moves.expand(stream, plan, args),
                Self::Reduce(plan, args) => moves.reduce(stream, plan, args),
                Self::Combine(plan, args) => moves.combine(stream, plan, args),
                Self::Fixed(rows, args) => blocks()?.submit(stream, *rows, args),
            }
        }
    }

    /// The kernels that [`MoeWork::submit`] launches on such a device, in order. Needs no GPU.
    ///
    /// # Errors
    /// A plan that does not fit, as when it is submitted.
    pub fn launches(&self, device: &DeviceProperties) -> Result<Vec<MoeLaunch>, CudaError> {
        let ranks = |world: u32| world as usize;
        let all = |source: &KernelSource, config: LaunchConfig| {
            source.kernels.iter().map(|kernel| MoeLaunch { kernel, config }).collect()
        };
        let moved = |prefix, (mover, source), plan: &MovePlan, world| {
            plan.validate(mover, ranks(world), device)?;
            let kernel = named(source, prefix, plan.path)?;
            Ok(vec![MoeLaunch { kernel, config: config(plan, ranks(world)) }])
        };
        let (rows, sums) = ((Mover::Rows, &ROWS), (Mover::Sums, &SUMS));
        let laid_out = |&LayoutArgs { shape, blocks, .. }: &LayoutArgs| -> Vec<MoeLaunch> {
            let columns = (shape.physical + shape.world) as usize;
            all(&LAYOUT, counting(columns, blocks).0)
        };
        match *self {
            Self::Layout(args) | Self::Cross(args) => Ok(laid_out(args)),
            Self::Relay(block, args) => {
                let kernel = find(&NODES, "moe_read_block")?;
                let read = MoeLaunch { kernel, config: reading(block.blocks) };
                Ok(std::iter::once(read).chain(laid_out(args)).collect())
            }
            Self::Forward(plan, args) => {
                let forward = (Mover::Rows, &FORWARD);
                moved("moe_forward", forward, plan, args.rows.shape.world)
            }
            Self::Places(ExpandPlaces { shape, blocks, .. }) => {
                Ok(all(&PLACES, counting(shape.local_experts as usize, *blocks).0))
            }
            Self::Split(args) => {
                let kernel = find(&NODES, "moe_split_nodes")?;
                Ok(vec![MoeLaunch { kernel, config: reading(args.blocks) }])
            }
            Self::NodeSum(_, plan, args) => moved("moe_sum", sums, plan, args.shape.world),
            Self::Announce(args) => one("moe_announce", one_block(args.shape.world)),
            Self::Judge(args) => one("moe_judge", one_block(args.shape.world)),
            Self::Plan(PlanArgs { shape, .. }) => {
                one("moe_plan", one_block(shape.physical + shape.world))
            }
            Self::Tail(args) => one("moe_mark_tail", marking(args.blocks)),
            Self::Dispatch(plan, args) => moved("moe_dispatch", rows, plan, args.shape.world),
            Self::Expand(plan, args) => moved("moe_expand", rows, plan, args.shape.world),
            Self::Reduce(plan, args) => moved("moe_sum", sums, plan, args.shape.world),
            Self::Combine(plan, args) => moved("moe_sum", sums, plan, args.shape.world),
            Self::Fixed(rows, args) => {
                let kernel = find(&FIXED, rows.kernel())?;
                Ok(vec![MoeLaunch { kernel, config: reading(args.blocks) }])
            }
        }
    }
}

/// A kernel of `plan.cu`.
fn one(kernel: &str, config: LaunchConfig) -> Result<Vec<MoeLaunch>, CudaError> {
    Ok(vec![MoeLaunch { kernel: find(&PLAN, kernel)?, config }])
}

/// The kernel for a path, by the names under which [`MoveKernels::load`] finds them.
fn named(source: &KernelSource, prefix: &str, path: CopyPath) -> Result<&'static str, CudaError> {
    let name = match path {
        CopyPath::Tma { stages, .. } if prefix != "moe_sum" => format!("{prefix}_tma{stages}"),
        CopyPath::Tma { stages, chunk } => format!("{prefix}_tma{}x{stages}", chunk / 512),
        CopyPath::LdSt { unroll } => format!("{prefix}_ld{unroll}"),
    };
    find(source, &name)
}

fn find(source: &KernelSource, name: &str) -> Result<&'static str, CudaError> {
    match source.kernels.iter().find(|kernel| **kernel == name) {
        Some(kernel) => Ok(kernel),
        None => invalid("move plan", format!("there is no kernel {name}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::move_plan::{ROW_STAGES, SUM_SHAPES, UNROLLS};
    use super::*;

    /// Every kernel that moves rows is launched by some plan, and every plan has its kernel.
    #[test]
    fn plans_and_kernels_match() {
        let unrolls = UNROLLS.map(|unroll| CopyPath::LdSt { unroll });
        let stages = ROW_STAGES.map(|stages| CopyPath::Tma { stages, chunk: 4096 });
        let shapes = SUM_SHAPES.map(|(v, stages)| CopyPath::Tma { stages, chunk: 512 * v });
        let rows: Vec<_> = stages.into_iter().chain(unrolls).collect();
        let sums: Vec<_> = shapes.into_iter().chain(unrolls).collect();
        for (source, movers) in [
            (&ROWS, vec![("moe_dispatch", &rows), ("moe_expand", &rows)]),
            (&SUMS, vec![("moe_sum", &sums)]),
        ] {
            let mut found: Vec<_> = movers
                .iter()
                .flat_map(|(prefix, paths)| paths.iter().map(|path| named(source, prefix, *path)))
                .collect::<Result<_, _>>()
                .unwrap();
            let mut all = source.kernels.to_vec();
            found.sort_unstable();
            all.sort_unstable();
            assert_eq!(found, all);
        }
        let missing = CopyPath::LdSt { unroll: 3 };
        assert!(named(&ROWS, "moe_dispatch", missing).is_err());
    }
}
