//! The naive oracle: dispatch and combine of a whole job at once, slow and obviously right.
//!
//! Every backend is compared with this module bit by bit, so it shares no code with the kernels
//! or the runtime: it works on plain byte rows and does its own conversions. Nothing here is fast.
//!
//! ```
//! use ep_bench::oracle::{Combine, Float, JobSpec, Mode, Oracle, random_rows};
//!
//! let job = JobSpec::random(7).build();
//! let oracle = Oracle::new(&job).unwrap();
//! // What each rank must hold after dispatch:
//! let rows = &oracle.ranks[0].rank_major;
//! assert!(rows.iter().all(|row| row.payload.len() == job.payload.payload_bytes(job.hidden)));
//! // What each rank must hold after combining these expert outputs:
//! let outputs: Vec<_> = (oracle.ranks.iter().enumerate())
//!     .map(|(rank, r)| random_rows(rank as u64, r.rank_major.len(), job.hidden, Float::Bf16))
//!     .collect();
//! let combine = Combine {
//!     mode: Mode::RankMajor,
//!     dtype: Float::Bf16,
//!     weighted: false,
//!     outputs: &outputs,
//!     biases: &[],
//! };
//! assert_eq!(oracle.combine(&combine).unwrap().len(), job.ranks);
//! ```

mod combine;
mod compare;
mod dispatch;
mod float;
mod job;
mod random;
#[cfg(any(test, feature = "proptest"))]
mod strategy;
#[cfg(test)]
mod tests;

pub use combine::{Combine, Mode, WeightRows};
pub use compare::{
    Differences, Mismatch, compare_combined, compare_expert_major, compare_rank_major,
};
pub use dispatch::{Dispatched, ExpertMajor, ExpertRow, Oracle, RankRow};
pub use float::{Float, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
pub use job::{Job, Payload, Placement, RankInput, Verdict};
pub use random::{JobSpec, PlacementSpec, Routing, Spoil, random_rows, spoil};
#[cfg(any(test, feature = "proptest"))]
pub use strategy::job_specs;
