//! What a machine is: GPUs, links, NICs, SM domains, and the margin arithmetic over them.

mod error;
mod explain;
pub mod margin;
mod sm_map;

pub use error::TopologyError;
pub use margin::{Basis, Calibration, Fit, Launch, Margin, MarginPlan, MarginPlanner, Verdict};
pub use sm_map::{Capacity, SmDomain, SmMap, SmObservation};
