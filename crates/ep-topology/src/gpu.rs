//! GPUs and their links, as NVML's answers mean them.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::nvml_record::{
    Answer, DeviceFacts, DeviceRecord, FabricRecord, LinkRecord, NvmlOutcome, NvmlRecord,
    P2pStatus, Refusal,
};
use crate::{CpuSet, Host, PciAddress, PciKind, host::NVIDIA};

/// Megabytes per second and direction of an NVLink that are believed. NVLink 1 gives 20,000, NVLink
/// 5 about 53,000; drivers are known to report 0 or other nonsense.
const LINK_SPEEDS: std::ops::RangeInclusive<u64> = 1_000..=1_000_000;

/// All GPUs of a machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuInventory {
    /// Kernel driver version.
    pub driver: Option<String>,
    /// CUDA version of the driver, major and minor.
    pub cuda: Option<(u32, u32)>,
    /// Why no GPU could be asked for, and the remedy; `None` if NVML answered or was not asked.
    pub problem: Option<String>,
    /// GPUs that work, by NVML index.
    pub gpus: Vec<Gpu>,
    /// GPUs that NVML counts but that do not work.
    pub lost: Vec<LostGpu>,
    /// NVIDIA GPUs on the PCI bus that NVML does not show: hidden from this container, bound to
    /// another driver, or lost.
    pub hidden: Vec<PciAddress>,
    /// Peer-to-peer verdicts, one per ordered pair of working GPUs.
    pub p2p: Vec<P2p>,
}

/// A GPU that works.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// NVML's index. It is *not* CUDA's ordinal, which obeys `CUDA_VISIBLE_DEVICES` and
    /// `CUDA_DEVICE_ORDER`: match by UUID or PCI address.
    pub index: u32,
    /// UUID.
    pub uuid: String,
    /// Product name.
    pub name: Option<String>,
    /// Where it sits.
    pub pci: Option<PciAddress>,
    /// Memory in bytes.
    pub memory_bytes: Option<u64>,
    /// NUMA node by sysfs, else by NVML; `None` where neither knows.
    pub numa_node: Option<u32>,
    /// CPUs that NVML calls near.
    pub cpu_affinity: CpuSet,
    /// MIG.
    pub mig: Mig,
    /// NVLinks.
    pub links: Vec<NvLink>,
    /// Fabric registration.
    pub fabric: Fabric,
}

/// Whether a GPU is cut into MIG devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mig {
    /// Off, or the GPU has no such mode.
    Off,
    /// On; MIG devices have no peer access, and the GPU as a whole runs nothing.
    On {
        /// UUIDs of its MIG devices.
        devices: Vec<String>,
    },
    /// Not known.
    Unknown,
}

/// An NVLink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvLink {
    /// Number on its GPU.
    pub index: u32,
    /// Whether it is up.
    pub active: bool,
    /// Version in NVML's numbering.
    pub version: Option<u32>,
    /// Megabytes per second and direction; `None` where NVML says 0 or nonsense. Never 0.
    pub speed_mbytes: Option<u64>,
    /// The other end.
    pub remote: LinkEnd,
}

/// The other end of an NVLink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkEnd {
    /// Another GPU.
    Gpu(Option<PciAddress>),
    /// An NVSwitch.
    Switch(Option<PciAddress>),
    /// A processor.
    Cpu,
    /// Not known.
    Unknown,
}

/// Registration with an NVLink fabric (multi-node NVLink, NVSwitch).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fabric {
    /// The GPU or driver knows no fabric.
    Unsupported,
    /// Registration has not started or is in progress.
    Pending,
    /// Registered; GPUs of one cluster and clique reach each other.
    Member {
        /// Cluster UUID in hexadecimal; all zeros on a single node without a fabric manager's id.
        cluster: String,
        /// Clique.
        clique: u32,
    },
    /// Registration failed with this NVML status.
    Failed(u32),
    /// Not known.
    Unknown,
}

/// A GPU that NVML counts but that does not work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostGpu {
    /// NVML's index.
    pub index: u32,
    /// UUID, if it still says.
    pub uuid: Option<String>,
    /// PCI address, if it still says.
    pub pci: Option<PciAddress>,
    /// What is wrong, in words.
    pub reason: String,
}

/// Peer access from one GPU to another by NVML, whatever CUDA shows to this process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct P2p {
    /// UUID of the accessing GPU.
    pub from: String,
    /// UUID of the accessed GPU.
    pub to: String,
    /// Reads.
    pub read: P2pStatus,
    /// Writes.
    pub write: P2pStatus,
    /// Over NVLink.
    pub nvlink: P2pStatus,
    /// Native atomics.
    pub atomics: P2pStatus,
}

impl Gpu {
    /// Links that are up.
    pub fn active_links(&self) -> impl Iterator<Item = &NvLink> {
        self.links.iter().filter(|l| l.active)
    }

    /// Megabytes per second and direction over all links that are up; `None` if any is unknown or
    /// there is none.
    pub fn link_mbytes(&self) -> Option<u64> {
        let total: Option<u64> = self.active_links().map(|l| l.speed_mbytes).sum();
        total.filter(|sum| *sum > 0)
    }
}

impl GpuInventory {
    /// What NVML's answers mean, beside what sysfs shows.
    pub fn new(outcome: &NvmlOutcome, host: &Host) -> Self {
        let mut inventory = match outcome {
            NvmlOutcome::Off => Self::default(),
            NvmlOutcome::Unavailable { library, detail, remedy } => {
                let problem = Some(format!("{library}: {detail}; {remedy}"));
                Self { problem, ..Self::default() }
            }
            NvmlOutcome::Read(record) => Self::read(record, host),
        };
        let shown: BTreeSet<_> = inventory.gpus.iter().filter_map(|g| g.pci).collect();
        let nvidia = |d: &&crate::PciDevice| d.kind == PciKind::Gpu && d.vendor == Some(NVIDIA);
        let on_bus = host.pci.iter().filter(nvidia).map(|d| d.address);
        inventory.hidden = on_bus.filter(|a| !shown.contains(a)).collect();
        inventory
    }

    fn read(record: &NvmlRecord, host: &Host) -> Self {
        let mut inventory = Self {
            driver: record.driver.value().cloned(),
            cuda: record.cuda.value().and_then(|v| cuda_version(*v)),
            ..Self::default()
        };
        let facts = record.devices.iter().filter_map(|d| d.facts.value());
        let known: BTreeSet<_> = facts.filter_map(address).collect();
        for device in &record.devices {
            match gpu(device, &known, host) {
                Ok(gpu) => inventory.gpus.push(gpu),
                Err(lost) => inventory.lost.push(lost),
            }
        }
        let uuid = |index: u32| inventory.gpus.iter().find(|g| g.index == index).map(|g| &g.uuid);
        let verdict = |answer: &Answer<P2pStatus>| match answer {
            Answer::Value(status) => *status,
            Answer::Refused(Refusal::Unsupported) => P2pStatus::Unsupported,
            Answer::Refused(_) => P2pStatus::Unknown,
        };
        let pair = |p: &crate::P2pRecord| {
            Some(P2p {
                from: uuid(p.from)?.clone(),
                to: uuid(p.to)?.clone(),
                read: verdict(&p.read),
                write: verdict(&p.write),
                nvlink: verdict(&p.nvlink),
                atomics: verdict(&p.atomics),
            })
        };
        let p2p = record.p2p.iter().filter_map(pair).collect();
        Self { p2p, ..inventory }
    }
}

fn cuda_version(version: i32) -> Option<(u32, u32)> {
    let version = u32::try_from(version).ok().filter(|v| *v > 0)?;
    Some((version / 1000, version % 1000 / 10))
}

fn address(facts: &DeviceFacts) -> Option<PciAddress> {
    facts.pci.value().and_then(|p| p.parse().ok())
}

fn gpu(device: &DeviceRecord, known: &BTreeSet<PciAddress>, host: &Host) -> Result<Gpu, LostGpu> {
    let index = device.index;
    let lost = |uuid: Option<&String>, pci: Option<PciAddress>, why: &Refusal| LostGpu {
        index,
        uuid: uuid.cloned(),
        pci,
        reason: in_words(why),
    };
    let facts = match &device.facts {
        Answer::Value(facts) => facts,
        Answer::Refused(why) => return Err(lost(None, None, why)),
    };
    let pci = address(facts);
    if let Some(why) = broken(facts) {
        return Err(lost(facts.uuid.value(), pci, why));
    }
    let uuid = match &facts.uuid {
        Answer::Value(uuid) => uuid.clone(),
        Answer::Refused(why) => return Err(lost(None, pci, why)),
    };
    let by_sysfs = pci.and_then(|p| host.pci_device(p)).and_then(|d| d.numa_node);
    // NVML's node is the GPU's own memory's on machines where that is a node; only without sysfs
    // does it stand for the processors nearby.
    let numa_node = by_sysfs.or(facts.numa_node.value().copied().filter(|n| *n < 4096));
    Ok(Gpu {
        index,
        uuid,
        name: facts.name.value().cloned(),
        pci,
        memory_bytes: facts.memory_bytes.value().copied(),
        numa_node,
        cpu_affinity: facts.cpu_affinity.value().map(|m| CpuSet::from_mask(m)).unwrap_or_default(),
        mig: mig(facts),
        links: facts.links.iter().map(|l| link(l, known, host)).collect(),
        fabric: fabric(&facts.fabric),
    })
}

/// A refusal that says the GPU itself does not work; any call may be the first to notice.
fn broken(facts: &DeviceFacts) -> Option<&Refusal> {
    let links = facts.links.iter().filter_map(|l| l.active.refusal());
    let all = [
        facts.uuid.refusal(),
        facts.name.refusal(),
        facts.pci.refusal(),
        facts.memory_bytes.refusal(),
        facts.cpu_affinity.refusal(),
        facts.mig_mode.refusal(),
        facts.fabric.refusal(),
    ];
    let lost = |why: &&Refusal| matches!(why, Refusal::GpuLost | Refusal::ResetRequired);
    all.into_iter().flatten().chain(links).find(lost)
}

fn in_words(why: &Refusal) -> String {
    match why {
        Refusal::GpuLost => "fell off the bus; reset it or reboot".to_owned(),
        Refusal::ResetRequired => "needs a reset (nvidia-smi --gpu-reset)".to_owned(),
        Refusal::NoPermission => "no permission to open it".to_owned(),
        Refusal::Unsupported | Refusal::MissingSymbol => "does not say what it is".to_owned(),
        Refusal::Other(detail) => detail.clone(),
    }
}

fn mig(facts: &DeviceFacts) -> Mig {
    match &facts.mig_mode {
        Answer::Value((0, _)) | Answer::Refused(Refusal::Unsupported | Refusal::MissingSymbol) => {
            Mig::Off
        }
        Answer::Value((1, _)) => Mig::On {
            devices: facts.mig_devices.iter().filter_map(|d| d.value().cloned()).collect(),
        },
        _ => Mig::Unknown,
    }
}

fn link(record: &LinkRecord, known: &BTreeSet<PciAddress>, host: &Host) -> NvLink {
    NvLink {
        index: record.index,
        active: record.active.value() == Some(&true),
        version: record.version.value().copied().filter(|v| (1..100).contains(v)),
        speed_mbytes: record.speed.value().copied().filter(|s| LINK_SPEEDS.contains(s)),
        remote: remote(record, known, host),
    }
}

/// The other end by its kind; where NVML does not tell that, by what is known at its address.
fn remote(record: &LinkRecord, known: &BTreeSet<PciAddress>, host: &Host) -> LinkEnd {
    let pci: Option<PciAddress> = record.remote_pci.value().and_then(|p| p.parse().ok());
    let on_bus = pci.and_then(|p| host.pci_device(p)).map(|d| d.kind);
    match (record.remote_kind.value(), pci, on_bus) {
        (Some(0), ..) => LinkEnd::Gpu(pci),
        (Some(1), ..) => LinkEnd::Cpu,
        (Some(2), ..) => LinkEnd::Switch(pci),
        (_, Some(at), _) if known.contains(&at) => LinkEnd::Gpu(pci),
        (.., Some(PciKind::Gpu)) => LinkEnd::Gpu(pci),
        (.., Some(PciKind::NvSwitch)) => LinkEnd::Switch(pci),
        _ => LinkEnd::Unknown,
    }
}

fn fabric(answer: &Answer<FabricRecord>) -> Fabric {
    match answer {
        Answer::Value(FabricRecord { state: 0, .. })
        | Answer::Refused(Refusal::Unsupported | Refusal::MissingSymbol) => Fabric::Unsupported,
        Answer::Value(FabricRecord { state: 1 | 2, .. }) => Fabric::Pending,
        Answer::Value(FabricRecord { state: 3, status: 0, cluster, clique }) => Fabric::Member {
            cluster: cluster.iter().map(|b| format!("{b:02x}")).collect(),
            clique: *clique,
        },
        Answer::Value(FabricRecord { state: 3, status, .. }) => Fabric::Failed(*status),
        _ => Fabric::Unknown,
    }
}
