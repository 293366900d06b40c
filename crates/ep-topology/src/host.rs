//! Processors, NUMA nodes and PCI devices of a host.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::nic::{self, Nic};
use crate::sysfs::{Tree, hex_u32, numbered};
use crate::{CpuSet, PciAddress, Warning};

/// Highest NUMA node number that is believed.
const MAX_NODE: u32 = 4096;

/// What sysfs says about a host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// Name of the first processor's model.
    pub cpu_model: Option<String>,
    /// Online logical CPUs.
    pub cpus: CpuSet,
    /// NUMA nodes by id; empty where the kernel has no notion of them.
    pub nodes: Vec<NumaNode>,
    /// Physical cores by their first logical CPU.
    pub cores: Vec<Core>,
    /// GPUs, NVSwitches and network devices on the PCI bus, by address.
    pub pci: Vec<PciDevice>,
    /// RDMA devices by name.
    pub nics: Vec<Nic>,
    /// What could not be read or understood.
    pub warnings: Vec<Warning>,
}

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaNode {
    /// The kernel's number.
    pub id: u32,
    /// Its logical CPUs; none on nodes of memory only.
    pub cpus: CpuSet,
    /// Its memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Relative access cost of every node from this one (10 = local); empty if unknown.
    pub distances: Vec<u32>,
}

/// A physical core.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Core {
    /// Its hardware threads.
    pub cpus: CpuSet,
    /// The socket it is in.
    pub package: Option<u32>,
    /// The NUMA node it is in.
    pub node: Option<u32>,
}

/// What a PCI device is to this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PciKind {
    /// A display or 3D controller.
    Gpu,
    /// An NVIDIA bridge device: an NVSwitch.
    NvSwitch,
    /// A network or InfiniBand controller.
    Network,
}

/// A device on the PCI bus.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PciDevice {
    /// Its address.
    pub address: PciAddress,
    /// What it is.
    pub kind: PciKind,
    /// Vendor id; 0x10de is NVIDIA, 0x15b3 Mellanox.
    pub vendor: Option<u32>,
    /// Device id.
    pub device: Option<u32>,
    /// From the host bridge (`pci0000:15`) down to the parent bridge; empty if unknown.
    pub path: Vec<String>,
    /// NUMA node; `None` where the firmware does not say.
    pub numa_node: Option<u32>,
    /// Present link speed in mega-transfers per second per lane, and lanes.
    pub link: Option<PcieLink>,
}

/// A PCIe link as trained at the moment; idle devices may have lowered it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PcieLink {
    /// Mega-transfers per second and lane.
    pub mega_transfers: u32,
    /// Lanes.
    pub lanes: u32,
}

/// NVIDIA's PCI vendor id.
pub(crate) const NVIDIA: u32 = 0x10de;

impl Host {
    /// Reads a host. Absent files leave fields empty; garbled ones add [`Host::warnings`].
    ///
    /// `sysfs`, `proc` and `dev` are the roots, `/sys`, `/proc` and `/dev` on a live host.
    pub fn observe(sysfs: &Path, proc: &Path, dev: &Path) -> Self {
        let tree = Tree::new(sysfs);
        if !tree.exists("devices") && !tree.exists("class") && !tree.exists("bus") {
            tree.warn("", format!("{} is no sysfs tree", sysfs.display()));
        }
        let nodes = nodes(&tree);
        let cores = cores(&tree, &nodes);
        let online = tree.value("devices/system/cpu/online", |t| t.parse().ok());
        let cpus = online.unwrap_or_else(|| cores.iter().flat_map(|c| c.cpus.iter()).collect());
        let pci = pci_devices(&tree);
        let nics = nic::nics(&tree, dev);
        let procfs = Tree::new(proc);
        let cpu_model = procfs.text("cpuinfo").and_then(|t| model(&t));
        let mut warnings = tree.into_warnings();
        warnings.extend(procfs.into_warnings());
        Self { cpu_model, cpus, nodes, cores, pci, nics, warnings }
    }

    /// The PCI device at an address.
    pub fn pci_device(&self, address: PciAddress) -> Option<&PciDevice> {
        self.pci.iter().find(|d| d.address == address)
    }

    /// The CPUs of a NUMA node; empty if it has none or is unknown.
    pub fn node_cpus(&self, node: u32) -> CpuSet {
        let found = self.nodes.iter().find(|n| n.id == node);
        found.map(|n| n.cpus.clone()).unwrap_or_default()
    }
}

fn model(cpuinfo: &str) -> Option<String> {
    let value = |l: &str| l.strip_prefix("model name")?.split_once(':').map(|(_, v)| v.to_owned());
    cpuinfo.lines().find_map(value).map(|v| v.trim().to_owned())
}

fn nodes(tree: &Tree<'_>) -> Vec<NumaNode> {
    let folder = "devices/system/node";
    let ids = tree.names(folder).into_iter().filter_map(|n| numbered(&n, "node"));
    let node = |id: u32| NumaNode {
        id,
        cpus: tree
            .value(&format!("{folder}/node{id}/cpulist"), |t| t.parse().ok())
            .unwrap_or_default(),
        memory_bytes: tree.value(&format!("{folder}/node{id}/meminfo"), mem_total),
        distances: tree
            .value(&format!("{folder}/node{id}/distance"), distances)
            .unwrap_or_default(),
    };
    ids.filter(|id| *id < MAX_NODE).map(node).collect()
}

/// Bytes from `Node 0 MemTotal:       1056 kB`.
fn mem_total(text: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.contains("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().rev().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

fn distances(text: &str) -> Option<Vec<u32>> {
    text.split_whitespace().map(|d| d.parse().ok()).collect()
}

fn cores(tree: &Tree<'_>, nodes: &[NumaNode]) -> Vec<Core> {
    let folder = "devices/system/cpu";
    let mut cores = BTreeMap::<u32, Core>::new();
    for cpu in tree.names(folder).into_iter().filter_map(|n| numbered(&n, "cpu")) {
        let topology = format!("{folder}/cpu{cpu}/topology");
        if !tree.exists(&topology) {
            continue; // Offline.
        }
        let list = |name: &str| tree.value(&format!("{topology}/{name}"), |t| t.parse().ok());
        // The older name is the same set; it stands in on kernels before 5.3.
        let siblings: Option<CpuSet> =
            list("core_cpus_list").or_else(|| list("thread_siblings_list"));
        let mut cpus = siblings.unwrap_or_default();
        cpus.extend([cpu]);
        let first = cpus.iter().next().unwrap_or(cpu);
        cores.entry(first).or_insert_with(|| Core {
            package: tree.value(&format!("{topology}/physical_package_id"), |t| t.parse().ok()),
            node: nodes.iter().find(|n| n.cpus.contains(first)).map(|n| n.id),
            cpus,
        });
    }
    cores.into_values().collect()
}

fn pci_devices(tree: &Tree<'_>) -> Vec<PciDevice> {
    let names = tree.names("bus/pci/devices");
    let mut devices: Vec<_> = names.iter().filter_map(|name| pci_device(tree, name)).collect();
    devices.sort_by_key(|d| d.address);
    devices
}

fn pci_device(tree: &Tree<'_>, name: &str) -> Option<PciDevice> {
    let address: PciAddress = name.parse().ok()?;
    let file = |field: &str| format!("bus/pci/devices/{name}/{field}");
    let vendor = tree.value(&file("vendor"), hex_u32);
    let class = tree.value(&file("class"), hex_u32)?;
    let kind = match (class >> 16, class >> 8, vendor) {
        (0x03, _, _) => PciKind::Gpu,
        (0x02, _, _) | (_, 0x0c06, _) => PciKind::Network,
        (_, 0x0680, Some(NVIDIA)) => PciKind::NvSwitch,
        _ => return None,
    };
    let speed = tree.value(&file("current_link_speed"), transfers);
    let lanes = tree.value(&file("current_link_width"), |t| t.parse().ok());
    Some(PciDevice {
        address,
        kind,
        vendor,
        device: tree.value(&file("device"), hex_u32),
        path: bridges(tree, name),
        numa_node: numa_node(tree, &file("numa_node")),
        // A width of 0 or 255 stands for "no link" and "not known".
        link: speed
            .flatten()
            .zip(lanes.filter(|l| (1..=64).contains(l)))
            .map(|(mega_transfers, lanes)| PcieLink { mega_transfers, lanes }),
    })
}

/// The host bridge and bridges above a device, from where its link in `bus/pci/devices` points.
fn bridges(tree: &Tree<'_>, name: &str) -> Vec<String> {
    let Some(target) = tree.link(&format!("bus/pci/devices/{name}")) else { return Vec::new() };
    let parts = target.components().filter_map(|c| c.as_os_str().to_str());
    let bridge = |p: &&str| {
        p.strip_prefix("pci").is_some_and(|r| r.contains(':')) || p.parse::<PciAddress>().is_ok()
    };
    parts.filter(bridge).filter(|p| *p != name).map(str::to_owned).collect()
}

/// A node number; `None` for the -1 that stands for "not known".
pub(crate) fn numa_node(tree: &Tree<'_>, path: &str) -> Option<u32> {
    let node: i64 = tree.value(path, |t| t.parse().ok().filter(|n| *n < i64::from(MAX_NODE)))?;
    u32::try_from(node).ok()
}

/// `32.0 GT/s PCIe` in mega-transfers; `Some(None)` for the kernel's "Unknown".
fn transfers(text: &str) -> Option<Option<u32>> {
    if text.starts_with("Unknown") {
        return Some(None);
    }
    let (number, _) = text.split_once(" GT/s")?;
    let speed: f64 = number.parse().ok()?;
    (speed > 0.0 && speed <= 1024.0).then(|| Some((speed * 1000.0).round() as u32))
}
