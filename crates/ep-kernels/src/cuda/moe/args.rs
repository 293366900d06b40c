//! What the kernels that move rows are told. Addresses are device addresses.

use super::move_plan::MovePlan;
use super::params::{MoeExpertFormat, MoeOp, MoeOutFormat, MoeRouting, MoeRowFormat, MoeShape};
use crate::DType;
use crate::cuda::device::DeviceProperties;

/// Biases that one combine can add.
pub const MAX_BIASES: usize = 8;

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
