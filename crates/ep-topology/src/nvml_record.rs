//! What NVML answered, call by call, so that any machine can be replayed anywhere.

use serde::{Deserialize, Serialize};

/// One call's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer<T> {
    /// What the call returned.
    Value(T),
    /// Why it returned nothing.
    Refused(Refusal),
}

impl<T> Answer<T> {
    /// The value, if there is one.
    pub fn value(&self) -> Option<&T> {
        match self {
            Self::Value(value) => Some(value),
            Self::Refused(_) => None,
        }
    }

    /// The refusal, if it was one.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Value(_) => None,
            Self::Refused(refusal) => Some(refusal),
        }
    }
}

/// Why a call returned nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Refusal {
    /// The device or driver does not offer it.
    Unsupported,
    /// The library is too old to have it.
    MissingSymbol,
    /// This user or container may not ask.
    NoPermission,
    /// The GPU fell off the bus.
    GpuLost,
    /// The GPU works again only after a reset.
    ResetRequired,
    /// Anything else, in the library's words.
    Other(String),
}

/// How asking NVML went.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NvmlOutcome {
    /// It was not asked.
    #[default]
    Off,
    /// The library is missing, too old, or refuses to start.
    Unavailable {
        /// Its file name.
        library: String,
        /// What went wrong.
        detail: String,
        /// How to get a working one.
        remedy: String,
    },
    /// It answered.
    Read(NvmlRecord),
}

/// Everything that was asked of NVML.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmlRecord {
    /// Kernel driver version, `580.159`.
    pub driver: Answer<String>,
    /// Library version.
    pub library: Answer<String>,
    /// CUDA version of the driver, 1000 × major + 10 × minor.
    pub cuda: Answer<i32>,
    /// One record per NVML index.
    pub devices: Vec<DeviceRecord>,
    /// All ordered pairs of devices that could be opened.
    pub p2p: Vec<P2pRecord>,
}

/// One NVML index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub struct DeviceRecord {
    /// NVML's index: PCI order, whatever `CUDA_VISIBLE_DEVICES` says.
    pub index: u32,
    /// What the device says, or why it could not be opened.
    pub facts: Answer<DeviceFacts>,
}

/// What one device says about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// UUID, `GPU-…`.
    pub uuid: Answer<String>,
    /// Product name.
    pub name: Answer<String>,
    /// PCI address as NVML writes it.
    pub pci: Answer<String>,
    /// Memory in bytes.
    pub memory_bytes: Answer<u64>,
    /// NUMA node.
    pub numa_node: Answer<u32>,
    /// CPU affinity mask in 64-bit words.
    pub cpu_affinity: Answer<Vec<u64>>,
    /// MIG mode: 1 is on; present and after the next reset.
    pub mig_mode: Answer<(u32, u32)>,
    /// UUIDs of the MIG devices.
    pub mig_devices: Vec<Answer<String>>,
    /// NVLinks that NVML knows of.
    pub links: Vec<LinkRecord>,
    /// Fabric registration.
    pub fabric: Answer<FabricRecord>,
}

/// One NVLink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkRecord {
    /// Number of the link on its device.
    pub index: u32,
    /// Whether it is up.
    pub active: Answer<bool>,
    /// NVLink version in NVML's numbering.
    pub version: Answer<u32>,
    /// Megabytes per second and direction, as NVML says, plausible or not.
    pub speed: Answer<u64>,
    /// `nvmlIntNvLinkDeviceType_t`: 0 GPU, 1 IBM NPU, 2 switch.
    pub remote_kind: Answer<u32>,
    /// PCI address of the other end.
    pub remote_pci: Answer<String>,
}

/// `nvmlGpuFabricInfo`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricRecord {
    /// 0 unsupported, 1 not started, 2 in progress, 3 completed.
    pub state: u32,
    /// NVML status of the registration; 0 is success.
    pub status: u32,
    /// Cluster UUID.
    pub cluster: [u8; 16],
    /// Clique within the cluster.
    pub clique: u32,
}

/// `nvmlDeviceGetP2PStatus` of one ordered pair, one answer per capability.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct P2pRecord {
    /// Index of the accessing device.
    pub from: u32,
    /// Index of the accessed device.
    pub to: u32,
    /// Reads.
    pub read: Answer<P2pStatus>,
    /// Writes.
    pub write: Answer<P2pStatus>,
    /// Over NVLink.
    pub nvlink: Answer<P2pStatus>,
    /// Native atomics.
    pub atomics: Answer<P2pStatus>,
}

/// NVML's verdict on one peer-to-peer capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum P2pStatus {
    /// It works.
    Ok,
    /// The chipset does not support it.
    Chipset,
    /// A GPU does not support it.
    Gpu,
    /// The PCIe topology does not support it.
    Topology,
    /// Disabled by the driver's configuration.
    Disabled,
    /// Not supported.
    Unsupported,
    /// Not known.
    Unknown,
}
