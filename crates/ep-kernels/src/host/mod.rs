//! The host kernels: the reference for every other implementation, and fast in their own right.
//!
//! All work on the calling thread and allocate nothing once the reusable structs have grown.
//! Vector instructions are chosen at run time and never change a bit of a result.

mod cast;
mod copy;
mod expand;
mod pack;
mod reduce;
#[cfg(target_arch = "x86_64")]
mod reduce_avx2;
mod scatter;

pub use cast::{dequantize_fp8, narrow, quantize_fp8, widen};
pub use copy::{copy_rows, gather, prefetch, store_fence};
pub use expand::{Expander, ExpertRows};
pub use pack::{Crossing, pack};
pub use reduce::{Stores, reduce_row, reduce_row_with};
pub use scatter::{Source, Target, scatter, scatter_only, scatter_relayed};
