//! How bytes reach a peer.
//!
//! A [`Group`] is a set of ranks that can find each other: threads of one process
//! ([`Group::local`]), processes started by a launcher ([`Group::from_env`]) or ranks of an engine
//! that already has collectives of its own ([`Group::with_allgather`]). A [`Transport`] opens one
//! symmetric window per rank over such a group and gives back a [`Link`]: mapped or bulk access to
//! the windows of the peers, and binary flags with bounded waits.
//!
//! Any crate can implement [`Transport`]; [`conformance`] is the suite it has to pass.
#![warn(missing_debug_implementations)]

mod agree;
#[cfg(not(loom))]
pub mod conformance;
mod control;
mod deadline;
mod error;
#[cfg(not(loom))]
mod faulty;
pub mod flags;
mod forward;
mod group;
mod health;
#[cfg(not(loom))]
mod host_link;
mod link;
mod local;
#[cfg(all(feature = "cuda", not(loom)))]
mod nvlink;
#[cfg(all(feature = "cuda", not(loom)))]
mod pacing;
#[cfg(not(loom))]
mod process;
mod queue;
#[cfg(all(feature = "rdma", not(loom)))]
mod rdma;
#[cfg(not(loom))]
#[path = "rdma/plan.rs"]
mod rdma_plan;
#[cfg(not(loom))]
mod rendezvous;
pub mod ring;
mod sync;
#[cfg(not(loom))]
mod tcp;
#[cfg(not(loom))]
mod thread;

pub use deadline::Deadline;
pub use error::{ErrorKind, TransportError};
#[cfg(not(loom))]
pub use faulty::{Failure, FaultyTransport};
pub use forward::ForwardLink;
pub use group::{DEFAULT_TIMEOUT, Group};
pub use health::{Fault, Health};
#[cfg(not(loom))]
pub use host_link::{HostLink, Region};
pub use link::{Link, Mapping, Memory, Put, Reach, Receive, Transport, WindowSpec};
#[cfg(feature = "cuda")]
pub use link::{Meeting, StreamSide};
#[cfg(all(feature = "nccl", not(loom)))]
pub use nvlink::NcclTransport;
#[cfg(all(feature = "cuda", not(loom)))]
pub use nvlink::{
    Handles as NvlinkHandles, NvlinkTransport, Signals as NvlinkSignals, drop_when_quiet,
};
#[cfg(all(feature = "cuda", not(loom)))]
pub use pacing::{Beside, Pacing};
#[cfg(not(loom))]
pub use process::ProcessTransport;
pub use queue::Queue;
#[cfg(all(feature = "rdma", not(loom)))]
pub use rdma::RdmaTransport;
#[cfg(not(loom))]
pub use rdma_plan::RdmaPlan;
#[cfg(not(loom))]
pub use rendezvous::{AllGather, Rendezvous};
#[cfg(not(loom))]
pub use thread::ThreadTransport;

/// The result of this crate's operations.
pub type Result<T, E = TransportError> = std::result::Result<T, E>;
