//! The kernels of dispatch and combine on GPUs.
//!
//! They are the host kernels' twins ([`crate::host`] is the reference, bit for bit) and know as little
//! of transports: addresses come in parameter structs. No kernel waits for another block or rank, so
//! any subset of a grid's blocks may be resident, in any order.

mod params;

pub(crate) use params::SHARED;
pub use params::{
    MoeExpertFormat, MoeHandleHeader, MoeHeader, MoeLane, MoeOp, MoeOutFormat, MoeReport,
    MoeRouting, MoeRowFormat, MoeShape, verdict,
};
