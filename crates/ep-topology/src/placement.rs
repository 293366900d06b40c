//! How near devices are, and which NIC serves which GPU.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::assign::assign;
use crate::{Gpu, Host, Nic, PciAddress, TopologyError};

/// How far two PCI devices are from each other; nearer is less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distance {
    /// Functions of one device.
    SameDevice,
    /// Below a common PCIe switch or bridge; bridges on the way, the common one left out.
    Switch {
        /// Bridges passed.
        bridges: u32,
    },
    /// Below one host bridge.
    HostBridge,
    /// On one NUMA node (or the machine has a single one).
    Node,
    /// On different NUMA nodes.
    System,
    /// Nothing is known about one of them.
    Unknown,
}

impl Distance {
    /// Between two devices by their common PCI ancestor, else by their NUMA nodes.
    pub fn between(host: &Host, a: PciAddress, b: PciAddress) -> Self {
        if (a.domain, a.bus, a.device) == (b.domain, b.bus, b.device) {
            return Self::SameDevice;
        }
        let (Some(a), Some(b)) = (host.pci_device(a), host.pci_device(b)) else {
            return Self::Unknown;
        };
        let common = a.path.iter().zip(&b.path).take_while(|(x, y)| x == y).count();
        if common > 1 {
            let bridges = (a.path.len() - common) + (b.path.len() - common);
            return Self::Switch { bridges: bridges as u32 };
        }
        match (a.numa_node, b.numa_node) {
            // Virtual machines put all devices below one emulated host bridge.
            (Some(x), Some(y)) if x != y => Self::System,
            _ if common == 1 => Self::HostBridge,
            (Some(_), Some(_)) => Self::Node,
            _ if host.nodes.len() == 1 => Self::Node,
            _ => Self::Unknown,
        }
    }

    fn cost(self) -> i64 {
        match self {
            Self::SameDevice => 0,
            Self::Switch { bridges } => 1 + i64::from(bridges.min(60)),
            Self::HostBridge => 100,
            Self::Node => 200,
            Self::System => 1000,
            Self::Unknown => 1000,
        }
    }
}

/// Which NICs may be used, and what overrides the automatic choice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicPolicy {
    /// Only these devices, by name; all usable ones if empty.
    pub only: Vec<String>,
    /// Not these.
    pub exclude: Vec<String>,
    /// Devices slower than this (megabits per second) are left out; unknown rates stay.
    pub min_rate_mbps: u64,
    /// GPU UUID → the devices it uses, whatever is nearest.
    pub pin: BTreeMap<String, Vec<String>>,
}

/// The NICs of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicChoice {
    /// The GPU's UUID.
    pub gpu: String,
    /// Its NICs with their distances, nearest first; empty if the machine has none to use.
    pub nics: Vec<(String, Distance)>,
}

/// Chooses NICs for all GPUs at once: every usable NIC serves a GPU, the load is even (two GPUs'
/// NICs, or two NICs' GPUs, differ by one at most), and within that the distances are least.
///
/// Pinned GPUs take no part in the balance, nor do the NICs they are pinned to.
///
/// # Errors
/// [`TopologyError::Argument`] if the policy names a GPU or NIC that is not there, or pins a GPU to
/// nothing.
pub fn choose_nics(
    host: &Host,
    gpus: &[Gpu],
    policy: &NicPolicy,
) -> Result<Vec<NicChoice>, TopologyError> {
    check(host, gpus, policy)?;
    let pinned: Vec<&String> = policy.pin.values().flatten().collect();
    let free: Vec<&Nic> = host
        .nics
        .iter()
        .filter(|n| n.usable() && (policy.only.is_empty() || policy.only.contains(&n.name)))
        .filter(|n| !policy.exclude.contains(&n.name) && !pinned.contains(&&n.name))
        .filter(|n| n.rate_mbps().is_none_or(|rate| rate >= policy.min_rate_mbps))
        .collect();
    let automatic: Vec<&Gpu> = gpus.iter().filter(|g| !policy.pin.contains_key(&g.uuid)).collect();
    let mut chosen = balance(host, &automatic, &free);
    let mut choices = Vec::new();
    for gpu in gpus {
        let names = match policy.pin.get(&gpu.uuid) {
            Some(names) => names.clone(),
            None => chosen.remove(&gpu.uuid).unwrap_or_default(),
        };
        let nic = |name: &String| host.nics.iter().find(|n| n.name == *name);
        let mut nics: Vec<_> = names
            .iter()
            .filter_map(|name| nic(name).map(|n| (name.clone(), distance(host, gpu, n))))
            .collect();
        nics.sort_by_key(|(_, distance)| *distance);
        choices.push(NicChoice { gpu: gpu.uuid.clone(), nics });
    }
    Ok(choices)
}

/// Distance of a GPU and a NIC; by NUMA nodes where an address is not known.
pub fn distance(host: &Host, gpu: &Gpu, nic: &Nic) -> Distance {
    let by_pci = gpu.pci.zip(nic.pci).map(|(a, b)| Distance::between(host, a, b));
    match by_pci.unwrap_or(Distance::Unknown) {
        Distance::Unknown => match (gpu.numa_node, nic.numa_node) {
            (Some(a), Some(b)) if a == b => Distance::Node,
            (Some(_), Some(_)) => Distance::System,
            _ if host.nodes.len() == 1 => Distance::Node,
            _ => Distance::Unknown,
        },
        known => known,
    }
}

fn check(host: &Host, gpus: &[Gpu], policy: &NicPolicy) -> Result<(), TopologyError> {
    let error = |detail| Err(TopologyError::Argument { op: "choose NICs", detail });
    let named = policy.only.iter().chain(&policy.exclude).chain(policy.pin.values().flatten());
    if let Some(name) = named.clone().find(|name| !host.nics.iter().any(|n| n.name == **name)) {
        let there: Vec<&str> = host.nics.iter().map(|n| n.name.as_str()).collect();
        return error(format!("no NIC is called {name:?}; there are {there:?}"));
    }
    for (uuid, names) in &policy.pin {
        if !gpus.iter().any(|g| g.uuid == *uuid) {
            return error(format!("no GPU has the UUID {uuid:?}"));
        }
        if names.is_empty() {
            return error(format!("GPU {uuid} is pinned to no NIC"));
        }
    }
    Ok(())
}

/// Balanced choice: the scarcer side is offered in as many copies as the other side needs.
fn balance(host: &Host, gpus: &[&Gpu], nics: &[&Nic]) -> BTreeMap<String, Vec<String>> {
    let mut chosen = BTreeMap::<String, Vec<String>>::new();
    if gpus.is_empty() || nics.is_empty() {
        return chosen;
    }
    let gpus_scarce = gpus.len() < nics.len();
    let (many, few) = if gpus_scarce { (nics.len(), gpus.len()) } else { (gpus.len(), nics.len()) };
    let copies = many.div_ceil(few);
    let even = many / few;
    // The last copy is used only once all others are taken: that is what balances the load.
    const EXTRA: i64 = 1 << 40;
    let cost = |row: usize, column: usize| {
        let (item, copy) = (column % few, column / few);
        let (gpu, nic) = if gpus_scarce { (item, row) } else { (row, item) };
        let near = distance(host, gpus[gpu], nics[nic]).cost() << 20;
        // Of equally near ones, keep the machine's order: rank 0 with the first NIC.
        let order = (row * few / many).abs_diff(item).pow(2).min(1 << 12) as i64;
        near + order + if copy >= even { EXTRA } else { 0 }
    };
    for (row, column) in assign(many, few * copies, cost).into_iter().enumerate() {
        let item = column % few;
        let (gpu, nic) = if gpus_scarce { (item, row) } else { (row, item) };
        chosen.entry(gpus[gpu].uuid.clone()).or_default().push(nics[nic].name.clone());
    }
    chosen
}
