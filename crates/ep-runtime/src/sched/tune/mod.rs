//! Finding the fastest of several ways to do the same, and remembering it.
//!
//! [`search`] measures candidates within a bounded time; [`TuneCache`] keeps what it found on disk, by
//! [`TuneKey`]. Both are for whatever can be compared and written down; none of it changes results.

mod cache;
#[cfg(feature = "cuda")]
mod plan;
mod search;

pub use cache::{TuneCache, TuneKey};
#[cfg(feature = "cuda")]
pub use plan::StoredPlan;
pub use search::{Best, Limits, Sample, search};
