//! Workloads, verification, measurement and reports for ep-runtime.
//!
//! The program `ep-bench` measures dispatch and combine between ranks. Everything it does is a
//! module here: which experts tokens go to ([`routing`]), what is sent ([`data`]), the naive
//! oracle every result is compared with, timing ([`stats`], [`copy`]), and how results are
//! written down ([`report`], [`html`], [`trace`]).

pub mod case;
pub mod cli;
pub mod copy;
pub mod crossing;
pub mod data;
pub mod engine;
mod error;
pub mod format;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod host;
pub mod html;
pub mod kernels;
pub mod layout_cost;
pub mod machine;
pub mod margin;
pub mod measure;
#[cfg(feature = "cuda")]
pub mod nvlink;
pub mod oracle;
pub mod plan;
pub mod preflight;
pub mod processes;
pub mod report;
mod rng;
pub mod routing;
pub mod run;
pub mod scale;
pub mod stats;
pub mod threads;
pub mod tools;
pub mod topo;
pub mod trace;
pub mod verify;
pub mod workload;

pub use error::{BenchError, Result};
