//! What a machine is: GPUs, links, NICs, SM domains, and the margin arithmetic over them.
//!
//! This crate launches no kernel and links no native library. It turns observations into a model:
//! NVML (opened at run time), sysfs (below a root that the caller may choose), and records of which
//! streaming multiprocessors (SMs) shared a thread-block cluster. Each kind of observation is data
//! that can be stored as JSON and replayed on any machine.
//!
//! - [`Machine::observe`] looks at the machine; it works without a GPU, a NIC or NVML and says
//!   what is missing. [`Machine::to_json`] records it, [`Machine::from_json`] replays it.
//! - [`Machine::nics`] and [`Machine::proxy_cores`] place NICs and threads.
//! - [`SmMap`] finds the domains within which clusters run; [`MarginPlanner`] says how many SMs
//!   compute must leave free so that a launch starts. [`SmCache`] keeps maps on disk.
//! - [`render_tree`] and [`render_svg`] draw a machine.
//!
//! ```
//! use ep_topology::{Launch, MarginPlanner, SmMap, SmObservation};
//!
//! // Two domains of four SMs, as a probe saw them.
//! let map = SmMap::new(SmObservation {
//!     sm_count: 8,
//!     together: vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7]],
//!     max_active_clusters: [(1, 8), (2, 4), (4, 2)].into(),
//!     ..SmObservation::default()
//! })?;
//! let plan = MarginPlanner::new(&map).plan(Launch::new(4, 2, true))?;
//! // Four blocks, but five SMs must be free: three and one would host one cluster only.
//! assert_eq!(plan.starts.map(|margin| margin.worst_case), Some(5));
//! # Ok::<(), ep_topology::TopologyError>(())
//! ```

mod assign;
mod attributes;
mod cpu_set;
mod error;
mod explain;
mod file_cache;
mod gpu;
mod host;
mod machine;
pub mod margin;
mod nic;
mod nvml;
mod nvml_record;
mod pci;
mod placement;
mod proxy;
mod sm_cache;
mod sm_map;
mod svg;
mod sysfs;
mod tree;

pub use attributes::{CudaDevice, DeviceAttributes};
pub use cpu_set::CpuSet;
pub use error::TopologyError;
pub use file_cache::FileCache;
pub use gpu::{Fabric, Gpu, GpuInventory, LinkEnd, LostGpu, Mig, NvLink, P2p};
pub use host::{Core, Host, NumaNode, PciDevice, PciKind, PcieLink};
pub use machine::{Machine, Options, Recording};
pub use margin::{Basis, Calibration, Fit, Launch, Margin, MarginPlan, MarginPlanner, Verdict};
pub use nic::{Gid, LinkLayer, Nic, NicPort, PortState};
pub use nvml::{NVML_LIBRARY, read_nvml};
pub use nvml_record::{
    Answer, DeviceFacts, DeviceRecord, FabricRecord, LinkRecord, NvmlOutcome, NvmlRecord,
    P2pRecord, P2pStatus, Refusal,
};
pub use pci::PciAddress;
pub use placement::{Distance, NicChoice, NicPolicy, choose_nics, distance};
pub use proxy::{ProxyCores, ProxyPolicy, proxy_cores};
pub use sm_cache::SmCache;
pub use sm_map::{Capacity, SmDomain, SmMap, SmObservation};
pub use svg::render_svg;
pub use sysfs::Warning;
pub use tree::render_tree;
