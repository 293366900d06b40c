//! Kernels of expert parallelism: the host reference.
//!
//! The crate knows the *shapes* of expert parallelism (payload kinds, row records, placements,
//! layouts and count matrices) and the kernels that move and reduce rows. It knows nothing of
//! transports or of ranks' memory: it is handed pointers and slices.
//!
//! The kernels in [`host`] are the reference: other implementations must give the same bits.

mod counts;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dtype;
mod error;
mod fp8;
pub mod host;
mod layout;
mod placement;
mod record;

pub use counts::CountMatrix;
pub use dtype::{DType, Element, Real, bf16, f16};
pub use error::{IdError, KernelError, PlacementFault};
pub use fp8::{Fp8E4M3, SCALE_BLOCK, ScaleKind};
pub use layout::{Ids, Layout};
pub use placement::Placement;
pub use record::{ExpertFormat, PayloadKind, RecordFormat, align_row, align16};
