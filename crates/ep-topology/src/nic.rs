//! RDMA devices.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::PciAddress;
use crate::host::numa_node;
use crate::sysfs::{Tree, numbered};

/// GIDs read of one port.
const MAX_GIDS: usize = 256;

/// An RDMA device (`/sys/class/infiniband/NAME`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nic {
    /// The kernel's name, `mlx5_0`.
    pub name: String,
    /// Where it sits; `None` for devices in software.
    pub pci: Option<PciAddress>,
    /// NUMA node; `None` where the firmware does not say.
    pub numa_node: Option<u32>,
    /// Firmware version.
    pub firmware: Option<String>,
    /// Node GUID.
    pub guid: Option<String>,
    /// Its verbs device, `uverbs0`.
    pub verbs: Option<String>,
    /// Whether the verbs device's node is there to open; containers often hide it.
    pub accessible: bool,
    /// Ports, from 1.
    pub ports: Vec<NicPort>,
}

impl Nic {
    /// Whether traffic can go through it: its node is there and a port is active.
    pub fn usable(&self) -> bool {
        self.accessible && self.ports.iter().any(|p| p.state == PortState::Active)
    }

    /// Rate of its fastest active port in megabits per second; `None` if no port tells.
    pub fn rate_mbps(&self) -> Option<u64> {
        let active = self.ports.iter().filter(|p| p.state == PortState::Active);
        active.filter_map(|p| p.rate_mbps).max()
    }
}

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicPort {
    /// Number, from 1.
    pub number: u32,
    /// Logical state.
    pub state: PortState,
    /// Physical state as the kernel words it, `LinkUp`.
    pub physical: Option<String>,
    /// Megabits per second; `None` if the port gives none or nonsense.
    pub rate_mbps: Option<u64>,
    /// What runs below the verbs.
    pub link_layer: LinkLayer,
    /// Addresses that are set.
    pub gids: Vec<Gid>,
}

/// Logical state of a port (`ibv_port_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortState {
    /// No link.
    Down,
    /// Link, not configured.
    Init,
    /// Configured, not yet active.
    Armed,
    /// Carries traffic.
    Active,
    /// Not told, or another state.
    Unknown,
}

/// Link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet (RoCE, iWARP).
    Ethernet,
    /// Not told, or another.
    Unknown,
}

/// An address of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gid {
    /// Index in the port's table.
    pub index: u32,
    /// Eight groups of four hexadecimal digits.
    pub gid: String,
    /// `IB/RoCE v1` or `RoCE v2`, as the kernel words it.
    pub kind: Option<String>,
    /// The network interface behind it.
    pub interface: Option<String>,
}

/// All RDMA devices of a sysfs tree; `dev` holds the device nodes.
pub(crate) fn nics(tree: &Tree<'_>, dev: &Path) -> Vec<Nic> {
    let verbs: Vec<(String, String)> = tree
        .names("class/infiniband_verbs")
        .into_iter()
        .filter_map(|v| Some((tree.text(&format!("class/infiniband_verbs/{v}/ibdev"))?, v)))
        .collect();
    let names = tree.names("class/infiniband").into_iter();
    names.map(|name| nic(tree, dev, &verbs, name)).collect()
}

fn nic(tree: &Tree<'_>, dev: &Path, verbs: &[(String, String)], name: String) -> Nic {
    let file = |field: &str| format!("class/infiniband/{name}/{field}");
    let target = tree.link(&file("device"));
    let last = target.as_deref().and_then(Path::file_name).and_then(|n| n.to_str());
    let verbs = verbs.iter().find(|(device, _)| *device == name).map(|(_, v)| v.clone());
    let node = verbs.as_ref().map(|v| dev.join("infiniband").join(v));
    let ports = tree.names(&file("ports"));
    Nic {
        pci: last.and_then(|n| n.parse().ok()),
        numa_node: numa_node(tree, &file("device/numa_node")),
        firmware: tree.text(&file("fw_ver")),
        guid: tree.text(&file("node_guid")),
        accessible: node.is_some_and(|n| n.exists()),
        verbs,
        ports: ports.iter().filter_map(|p| numbered(p, "")).map(|p| port(tree, &name, p)).collect(),
        name,
    }
}

fn port(tree: &Tree<'_>, nic: &str, number: u32) -> NicPort {
    let file = |field: &str| format!("class/infiniband/{nic}/ports/{number}/{field}");
    let physical = tree.text(&file("phys_state"));
    NicPort {
        number,
        state: tree.value(&file("state"), state).unwrap_or(PortState::Unknown),
        physical: physical.map(|t| t.split_once(": ").map_or(t.clone(), |(_, s)| s.to_owned())),
        rate_mbps: tree.value(&file("rate"), rate),
        link_layer: tree.value(&file("link_layer"), link_layer).unwrap_or(LinkLayer::Unknown),
        gids: gids(tree, nic, number),
    }
}

/// `4: ACTIVE`.
fn state(text: &str) -> Option<PortState> {
    match text.split_once(':')?.0 {
        "0" => Some(PortState::Unknown),
        "1" => Some(PortState::Down),
        "2" => Some(PortState::Init),
        "3" => Some(PortState::Armed),
        "4" | "5" => Some(PortState::Active),
        _ => None,
    }
}

/// `400 Gb/sec (4X NDR)` in megabits; a rate of 0 says nothing.
fn rate(text: &str) -> Option<u64> {
    let (number, _) = text.split_once(" Gb/sec")?;
    let gigabits: f64 = number.parse().ok()?;
    (gigabits > 0.0 && gigabits < 100_000.0).then(|| (gigabits * 1000.0).round() as u64)
}

fn link_layer(text: &str) -> Option<LinkLayer> {
    match text {
        "InfiniBand" => Some(LinkLayer::InfiniBand),
        "Ethernet" => Some(LinkLayer::Ethernet),
        _ => None,
    }
}

fn gids(tree: &Tree<'_>, nic: &str, port: u32) -> Vec<Gid> {
    let base = format!("class/infiniband/{nic}/ports/{port}");
    let names = tree.names(&format!("{base}/gids"));
    let gid = |index: u32| {
        let gid = tree.value(&format!("{base}/gids/{index}"), address)?;
        // Reading the attributes of an entry that is not set is an error of the kernel's.
        (!gid.chars().all(|c| matches!(c, '0' | ':'))).then(|| Gid {
            kind: tree.text(&format!("{base}/gid_attrs/types/{index}")),
            interface: tree.text(&format!("{base}/gid_attrs/ndevs/{index}")),
            index,
            gid,
        })
    };
    names.iter().take(MAX_GIDS).filter_map(|n| numbered(n, "")).filter_map(gid).collect()
}

fn address(text: &str) -> Option<String> {
    let groups = || text.split(':');
    let group = |g: &str| g.len() == 4 && g.bytes().all(|b| b.is_ascii_hexdigit());
    (groups().count() == 8 && groups().all(group)).then(|| text.to_owned())
}
