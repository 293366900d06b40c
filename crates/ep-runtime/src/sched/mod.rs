//! Beside compute: which SMs communication has, in which order operations are submitted, and how
//! micro-batches overlap.
//!
//! - [`SmPolicy`] says how communication gets its SMs, [`SmReport`] what became of it.
//! - [`SmBudget`] is the account of a device's SMs in this process; an [`SmLease`] is what one holder
//!   has of it. What communicates beside this crate can take its SMs from the same account.
//! - [`SubmitOrder`] keeps operations in one order on every rank, whichever threads submit them.
//! - [`Pipeline`] runs dispatch of micro-batch *i* + 1, experts of *i* and combine of *i* − 1 at
//!   the same time; a [`Timeline`] records when.
//!
//! # Which order, and why
//!
//! Streams of one device may share a hardware queue, where an operation that waits for a peer holds up
//! all behind it. That costs overlap but never progress as long as every rank submits the operations
//! of all its groups in the same order. Within one thread that is the order of its calls; threads that
//! share a device take a [`Ticket`] each, in an order that all ranks agree on, and submit when it is
//! their turn.
//!
//! A lease never waits at all. A [`Turn`] is for the call that submits, which in exact mode includes the
//! wait for the announcements of the other ranks: so threads of different ranks never share an order.

#[cfg(any(test, feature = "cuda"))]
mod carve;
#[cfg(feature = "cuda")]
mod cuda;
mod layer;
mod lease;
mod order;
mod pipeline;
mod policy;
#[cfg(any(test, feature = "cuda"))]
mod reserve;
#[cfg(test)]
mod tests;
mod timeline;
pub mod tune;

#[cfg(feature = "cuda")]
pub use cuda::{ComputeStream, sm_observation};
#[cfg(feature = "cuda")]
pub(crate) use cuda::{CudaReservation, reserve_on_gpu};
pub(crate) use layer::{SmSettings, Sms};
pub use lease::{SmBudget, SmLease};
pub use order::{SubmitOrder, Ticket, Turn};
pub use pipeline::{Finished, MicroBatch, Pipeline, PipelineError};
pub use policy::{SmPolicy, SmReport};
pub use timeline::{Span, Stage, Timeline};
/// What [`sm_observation`] takes and gives: which SMs were seen to share a domain.
#[cfg(feature = "cuda")]
pub use {ep_kernels::cuda::SmObservations, ep_topology::SmObservation};
