//! Finding the fastest of several ways to do the same, and remembering it.
//!
//! [`search`] measures candidates within a bounded time; [`TuneCache`] keeps what it found on disk, by
//! [`TuneKey`]. Both are for whatever can be compared and written down; none of it changes results.
//!
//! With GPUs, a layer uses them when it is built: `Tune` says how. What is tried are `rows_plans` and
//! `sums_plans`.

mod cache;
#[cfg(feature = "cuda")]
mod candidates;
#[cfg(feature = "cuda")]
mod mode;
#[cfg(feature = "cuda")]
mod plan;
mod search;

pub use cache::{TUNE_CACHE_VARIABLE, TuneCache, TuneKey};
#[cfg(feature = "cuda")]
pub use candidates::{rows_plans, sums_plans};
#[cfg(feature = "cuda")]
pub use mode::{TUNE_VARIABLE, Tune};
#[cfg(feature = "cuda")]
pub use plan::StoredPlan;
pub use search::{Best, Limits, Sample, search};
