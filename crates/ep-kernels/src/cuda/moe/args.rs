//! What kernels are told. Addresses are device addresses.

use super::fixed::FixedLimits;
use super::move_plan::MovePlan;
use super::nodes::MoeCrossing;
use super::params::{
    MoeExpertFormat, MoeHeader, MoeOp, MoeOutFormat, MoeRouting, MoeRowFormat, MoeShape,
};
use crate::DType;
use crate::cuda::device::DeviceProperties;

/// Biases that one combine can add.
pub const MAX_BIASES: usize = 8;

/// The type of expert ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum IdsKind {
    /// `u32`; `u32::MAX` for none.
    U32 = 0,
    /// `i32`; −1 for none.
    I32 = 1,
    /// `i64`; −1 for none.
    I64 = 2,
}

/// Laying out this rank's tokens and announcing it. Addresses are device addresses.
#[derive(Clone, Copy, Debug)]
pub struct LayoutArgs {
    /// The layer.
    pub shape: MoeShape,
    /// The routing that is made.
    pub routing: MoeRouting,
    /// The operation.
    pub op: MoeOp,
    /// The announcement, as far as the host knows it.
    pub header: MoeHeader,
    /// `[T * K]` ids.
    pub ids: u64,
    /// Their type.
    pub ids_kind: IdsKind,
    /// `f32 [T * K]`; 0 for weights of 1.
    pub weights: u64,
    /// Ids name physical experts.
    pub physical_ids: bool,
    /// [`layout_scratch_bytes`](super::layout_scratch_bytes) of this lane.
    pub scratch: u64,
    /// Blocks.
    pub blocks: u32,
    /// `u32 [nodes]`: how many tokens cross to each node, which is announced too.
    pub crossing: u64,
    /// Nodes, where tokens cross them once; else 0.
    pub nodes: u32,
}

/// Announcing an operation whose counts are known.
#[derive(Clone, Copy, Debug)]
pub struct AnnounceArgs {
    /// The layer.
    pub shape: MoeShape,
    /// The operation.
    pub op: MoeOp,
    /// The announcement, as far as the host knows it.
    pub header: MoeHeader,
    /// The [`super::MoeHandleHeader`] of the handle it refers to, or 0.
    pub handle: u64,
}

/// Deciding on an operation whose counts are known, for the host. Addresses are device addresses.
#[derive(Clone, Copy, Debug)]
pub struct JudgeArgs {
    /// The layer.
    pub shape: MoeShape,
    /// The operation.
    pub op: MoeOp,
}

/// Deciding on an uncached dispatch.
#[derive(Clone, Copy, Debug)]
pub struct PlanArgs {
    /// The layer.
    pub shape: MoeShape,
    /// The routing that is completed.
    pub routing: MoeRouting,
    /// The operation.
    pub op: MoeOp,
    /// Rows of experts are padded to multiples of it; 0 for rank-major rows.
    pub alignment: u32,
    /// Where tokens cross nodes once; else nothing.
    pub crossing: MoeCrossing,
    /// What blocks of fixed size hold, where there are some ([`MoeOp::block`]).
    pub limits: FixedLimits,
    /// `i32 [2 + E + E + 1 + 2 R]` in host memory, E local experts: rows, expert-major rows, counts,
    /// offsets, rows from and to each rank. Where ranks are not mapped, `i32 [3 R + R E + P + PIECES R]`
    /// follow: where this rank's rows start at each rank, and in its staging when they go home, one per
    /// token and one per expert; rows from each rank for each local expert; this rank's rows for each
    /// expert; [`MoeRouting::pieces`]. Where tokens cross nodes once, `i32 [2 N + 3 S]` follow: by node,
    /// where this rank's block starts in its rail's staging and its rows; by source that this rank
    /// forwards, its rows, where they start in this rank's staging, and where those of this node start
    /// among the rows that come home to the source, one per (token, node).
    pub summary: u64,
    /// [`layout_scratch_bytes`](super::layout_scratch_bytes) of this lane.
    pub scratch: u64,
}

/// Numbering received rows by expert.
#[derive(Clone, Copy, Debug)]
pub struct ExpandPlaces {
    /// The layer.
    pub shape: MoeShape,
    /// The routing that is completed.
    pub routing: MoeRouting,
    /// The operation.
    pub op: MoeOp,
    /// Received rows.
    pub format: MoeRowFormat,
    /// [`layout_scratch_bytes`](super::layout_scratch_bytes) of this lane.
    pub scratch: u64,
    /// Blocks.
    pub blocks: u32,
}

/// Marking the rows behind the last.
#[derive(Clone, Copy, Debug)]
pub struct TailArgs {
    /// The layer.
    pub shape: MoeShape,
    /// The routing.
    pub routing: MoeRouting,
    /// The operation.
    pub op: MoeOp,
    /// Expert-major rows, else rank-major ones.
    pub expert_major: bool,
    /// Rank-major rows.
    pub row: MoeRowFormat,
    /// Experts' rows.
    pub expert: MoeExpertFormat,
    /// Blocks.
    pub blocks: u32,
}

/// A dispatch's move. Addresses are device addresses.
#[derive(Clone, Copy, Debug)]
pub struct DispatchArgs {
    /// The layer.
    pub shape: MoeShape,
    /// The routing.
    pub routing: MoeRouting,
    /// The operation.
    pub op: MoeOp,
    /// Rows at their destinations.
    pub format: MoeRowFormat,
    /// Row 0 of the payload, aligned to 16.
    pub payload: u64,
    /// Bytes from row to row, a multiple of 16.
    pub payload_stride: u64,
    /// Row 0 of the scales; 0 if there are none.
    pub scales: u64,
    /// Bytes from row to row.
    pub scales_stride: u64,
    /// The announcements decide (a cached routing); else the handle's status does.
    pub check: bool,
    /// The number of row 0 of the payload among this rank's tokens, where only some of them move
    /// ([`MoeRouting::of_tokens`]).
    pub first: u32,
}

/// Copying received rows to their experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpandArgs {
    /// The layer.
    pub shape: MoeShape,
    /// The routing.
    pub routing: MoeRouting,
    /// The operation.
    pub op: MoeOp,
    /// Received rows.
    pub row: MoeRowFormat,
    /// Experts' rows.
    pub expert: MoeExpertFormat,
}

/// Summing the rows of each received token over this rank's experts.
#[derive(Clone, Copy, Debug)]
pub struct ReduceArgs {
    /// The layer.
    pub shape: MoeShape,
    /// The routing.
    pub routing: MoeRouting,
    /// The slot both are in.
    pub slot: u32,
    /// The elements.
    pub dtype: DType,
    /// Elements of a row.
    pub hidden: u32,
    /// Experts' rows.
    pub from: MoeOutFormat,
    /// Rank-major rows.
    pub to: MoeOutFormat,
    /// Multiply with the gate weights.
    pub weighted: bool,
}

/// Summing the rows of each token at home.
#[derive(Clone, Copy, Debug)]
pub struct CombineArgs {
    /// The layer.
    pub shape: MoeShape,
    /// The routing.
    pub routing: MoeRouting,
    /// The operation.
    pub op: MoeOp,
    /// The elements.
    pub dtype: DType,
    /// Elements of a row.
    pub hidden: u32,
    /// Rows at their owners.
    pub format: MoeOutFormat,
    /// One row per (token, rank), else one per (token, expert).
    pub per_rank: bool,
    /// Multiply with the gate weights.
    pub weighted: bool,
    /// Row 0 of the sums, aligned to 16.
    pub out: u64,
    /// Bytes from row to row, a multiple of 16.
    pub out_stride: u64,
    /// Address and stride of each bias.
    pub biases: [(u64, u64); MAX_BIASES],
    /// How many biases there are.
    pub bias_count: u32,
    /// `f32 [T * K]` for the weights that rows carry; 0 for none.
    pub weights_home: u64,
    /// Where in a sum the weights that its rows carry go instead, `f32 [K]`; 0 for `weights_home`.
    pub carried_at: u32,
    /// The announcements decide whether rows are read.
    pub check: bool,
}

impl MovePlan {
    /// What suits a dispatch.
    pub fn dispatch(args: &DispatchArgs, sms: u32, device: &DeviceProperties) -> Self {
        Self::rows(args.format.payload_bytes, args.routing.tokens as usize, sms, device)
    }

    /// What suits expanding.
    pub fn expand(args: &ExpandArgs, sms: u32, device: &DeviceProperties) -> Self {
        Self::rows(args.row.payload_bytes, args.shape.max_rows as usize, sms, device)
    }

    /// What suits reducing at an owner.
    pub fn reduce(args: &ReduceArgs, sms: u32, device: &DeviceProperties) -> Self {
        Self::sums(args.hidden * args.dtype.size() as u32, sms, device)
    }

    /// What suits a combine.
    pub fn combine(args: &CombineArgs, sms: u32, device: &DeviceProperties) -> Self {
        Self::sums(args.hidden * args.dtype.size() as u32, sms, device)
    }
}
