//! The kernels of dispatch and combine on GPUs.
//!
//! They are the host kernels' twins ([`crate::host`] is the reference, bit for bit) and know as little
//! of transports: addresses come in parameter structs. No kernel waits for another block or rank, so
//! any subset of a grid's blocks may be resident, in any order.

use std::sync::OnceLock;

use sha2::{Digest, Sha256};

mod args;
mod cast;
mod fixed;
mod layout;
mod move_plan;
mod moves;
mod nodes;
mod params;
mod work;

pub use args::{
    AnnounceArgs, CombineArgs, DispatchArgs, ExpandArgs, ExpandPlaces, IdsKind, JudgeArgs,
    LayoutArgs, MAX_BIASES, PlanArgs, ReduceArgs, TailArgs,
};
pub(crate) use cast::CAST;
pub use cast::{CastArgs, CastKernels};
pub(crate) use fixed::FIXED;
pub use fixed::{FixedArgs, FixedKernels, FixedLimits, FixedRows};
pub(crate) use layout::{LAYOUT, PLACES, PLAN};
pub use layout::{LayoutKernels, layout_scratch_bytes};
pub use move_plan::{CopyPath, MovePlan, SUM_SHAPES, UNROLLS};
pub use moves::MoveKernels;
pub(crate) use moves::{ROWS, SUMS};
pub use nodes::{BlockArgs, ForwardArgs, MoeCrossing, NodeKernels, SplitArgs};
pub(crate) use nodes::{FORWARD, NODES};
pub use params::{
    MoeExpertFormat, MoeHandleHeader, MoeHeader, MoeLane, MoeOp, MoeOutFormat, MoeReport,
    MoeRouting, MoeRowFormat, MoeShape, PIECES, block_tokens, verdict,
};
pub use work::{MoeKernels, MoeLaunch, MoeWork, NodeSum};

/// Names the kernels of this build that move rows: another build's may be fastest launched otherwise.
/// Hexadecimal digits.
pub fn fingerprint() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| {
        let mut hash = Sha256::new();
        [&ROWS, &SUMS].iter().for_each(|source| hash.update(source.assemble()));
        hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    })
}
