//! Expert parallelism for mixture-of-experts models: dispatch sends each token to the ranks that
//! own its top-k experts, combine brings the experts' outputs back and sums them per token.
//!
//! An engine depends on this crate alone. It makes a [`Group`] of ranks, builds an [`Ep`] for the
//! shape of its layer ([`MoeShape`]), and calls [`Ep::dispatch`] and [`Dispatched::combine`]:
//!
//! ```
//! use ep_runtime::{
//!     CombineOpts, DispatchOpts, EpBuilder, EpError, Group, Ids, MoeShape, Payload, PayloadKind,
//!     Queue, Route, Rows, RowsMut,
//! };
//!
//! const HIDDEN: usize = 64;
//!
//! fn rank(group: Group) -> Result<Vec<f32>, EpError> {
//!     // 8 experts, of which each token takes 2; rows of f32.
//!     let shape = MoeShape::new(HIDDEN, 2, 8).max_tokens(16).payload(PayloadKind::F32);
//!     let ep = EpBuilder::new(shape).build(&group)?;
//!     let queue = Queue::host();
//!
//!     let tokens = vec![1.0f32; 3 * HIDDEN];
//!     let ids = [0, 7, 3, -1, 5, 2];
//!     let route = Route::Topk { ids: Ids::I32(&ids), weights: None };
//!     let payload = Payload::new(Rows::new(&tokens, HIDDEN)?)?;
//!     let mut received = ep.dispatch(&queue, payload, route, &DispatchOpts::default())?;
//!
//!     // The experts of this rank: here each doubles its tokens.
//!     let experts: Vec<usize> = (0..received.num_rows())
//!         .map(|i| received.rows().topk_ids().expect("rank-major").get(i).iter().filter(|&&id| id >= 0).count())
//!         .collect();
//!     let mut outputs = received.rows_mut(PayloadKind::F32)?;
//!     for (i, count) in experts.into_iter().enumerate() {
//!         outputs.payload().row_mut::<f32>(i).iter_mut().for_each(|x| *x *= 2.0 * count as f32);
//!     }
//!
//!     let mut out = vec![0.0f32; 3 * HIDDEN];
//!     received.combine(&queue, RowsMut::new(&mut out, HIDDEN)?, &CombineOpts::default())?;
//!     Ok(out)
//! }
//!
//! let ranks = Group::local(4)?.into_iter().map(|group| std::thread::spawn(move || rank(group)));
//! for rank in ranks.collect::<Vec<_>>() {
//!     let out = rank.join().expect("no panic")?;
//!     assert_eq!((out[0], out[HIDDEN], out[2 * HIDDEN]), (4.0, 2.0, 4.0));
//! }
//! # Ok::<(), EpError>(())
//! ```
//!
//! Ranks are threads here; as processes (`Group::from_env`) they make the same calls. What runs beside
//! compute, on which SMs and in which order, is what [`sched`] is about: a [`Pipeline`] hides the
//! communication of micro-batches behind their experts.
// Matches have one arm where there are no GPUs.
#![cfg_attr(not(feature = "cuda"), allow(clippy::infallible_destructuring_match))]
#![warn(missing_debug_implementations)]

#[cfg(feature = "cuda")]
mod casts;
mod combine;
mod config;
mod connect;
mod dispatch;
mod ep;
mod error;
mod event;
mod fold;
#[cfg(feature = "cuda")]
mod gpu;
mod handle;
mod lane;
mod layer;
mod node;
mod notify;
mod payload;
mod preflight;
mod received;
mod result;
mod routing;
pub mod sched;
mod shape;
mod slots;
mod views;
mod window;
pub mod wire;

pub use combine::{CombineError, CombineOpts, CombineSend, Combined, Precision, combine_all};
pub use dispatch::{DispatchSend, dispatch_all};
pub use ep::{Ep, EpBuilder, Place};
pub use ep_kernels::{
    DType, Element, Fp8E4M3, Ids, KernelError, PayloadKind, Placement, SCALE_BLOCK, ScaleKind,
    bf16, f16,
};
/// Conversions of rows: what an engine needs to send fp8, or to look into rows.
pub mod cast {
    pub use ep_kernels::Real;
    pub use ep_kernels::host::{dequantize_fp8, narrow, quantize_fp8, widen};

    #[cfg(feature = "cuda")]
    pub use crate::casts::DeviceCasts;
}
/// The version of cudarc whose streams this crate takes and gives.
#[cfg(feature = "cuda")]
pub use cudarc;
/// Where the machine's description is read from: [`PreflightOptions::machine`].
pub use ep_topology::Options as MachineOptions;
/// The transport between hosts by NCCL, for rows on GPUs.
#[cfg(feature = "nccl")]
pub use ep_transport::NcclTransport;
/// The transport between hosts.
#[cfg(feature = "rdma")]
pub use ep_transport::RdmaTransport;
pub use ep_transport::{
    AllGather, Deadline, ErrorKind, Fault, Group, Health, Link, Mapping, Memory, ProcessTransport,
    Put, Queue, RdmaPlan, Reach, Receive, Rendezvous, ThreadTransport, Transport, TransportError,
    WindowSpec,
};
pub use error::EpError;
pub use event::Event;
#[cfg(feature = "cuda")]
pub use gpu::{PlanInForce, PlanOrigin, Tuning};
pub use handle::Handle;
pub use node::Hierarchy;
#[cfg(feature = "cuda")]
pub use payload::{DeviceIds, IdKind};
pub use payload::{DispatchOpts, Payload, Route};
pub use preflight::{
    Ability, Check, Finding, Library, PeerTrial, Preflight, PreflightOptions, Severity, Verdict,
};
pub use received::{Column, Outputs, Owned, Received, SourceToken};
pub use result::Dispatched;
#[cfg(feature = "cuda")]
pub use sched::tune::Tune;
pub use sched::{
    MicroBatch, Pipeline, PipelineError, SmBudget, SmLease, SmPolicy, SmReport, Timeline,
};
pub use shape::{Layout, MoeShape};
pub use views::{Rows, RowsMut};
pub use window::Plan;
/// What GPUs need beyond what hosts do: kernels' launch plans, and the transport over NVLink.
#[cfg(feature = "cuda")]
pub use {
    ep_kernels::cuda::moe::{CopyPath, MovePlan},
    ep_kernels::cuda::{CudaError, LaunchAttributes},
    ep_transport::{Meeting, NvlinkHandles, NvlinkSignals, NvlinkTransport, StreamSide},
};

/// The result of this crate's operations.
pub type Result<T, E = EpError> = std::result::Result<T, E>;

/// Everything an engine keeps may move between threads and be shared by them.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Ep>();
    shared::<EpBuilder>();
    shared::<Group>();
    shared::<Dispatched>();
    shared::<DispatchSend>();
    shared::<CombineSend>();
    shared::<Handle>();
    shared::<Owned>();
    shared::<Event>();
    shared::<EpError>();
    shared::<SmLease>();
    shared::<Pipeline>();
    shared::<Timeline>();
};

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
