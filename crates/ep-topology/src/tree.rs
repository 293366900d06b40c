//! A machine as a tree of text.

use std::fmt::Write as _;

use crate::{
    Fabric, Gpu, LinkEnd, LinkLayer, Machine, Mig, Nic, NicPolicy, P2pStatus, PortState, SmMap,
};

/// Columns that no line exceeds.
const WIDTH: usize = 80;

/// A line with the lines below it.
struct Node {
    text: String,
    children: Vec<Node>,
}

fn node(text: impl Into<String>, children: Vec<Node>) -> Node {
    Node { text: text.into(), children }
}

fn leaf(text: impl Into<String>) -> Node {
    node(text, Vec::new())
}

/// The machine as a tree of at most 80 columns, plain characters only where the text of the
/// machine itself is plain; ends in a line break.
pub fn render_tree(machine: &Machine) -> String {
    let mut roots = vec![host(machine)];
    roots.extend(gpus(machine));
    roots.push(nics(machine));
    let warnings = &machine.host().warnings;
    if !warnings.is_empty() {
        let shown = warnings.iter().take(8).map(|w| leaf(format!("{}: {}", w.path, w.detail)));
        let mut children: Vec<Node> = shown.collect();
        if warnings.len() > 8 {
            children.push(leaf(format!("and {} more", warnings.len() - 8)));
        }
        roots.push(node("could not be read", children));
    }
    let mut text = String::from("machine\n");
    draw(&mut text, "", &roots);
    text
}

fn draw(text: &mut String, indent: &str, nodes: &[Node]) {
    for (index, node) in nodes.iter().enumerate() {
        let last = index + 1 == nodes.len();
        let (branch, stem) = if last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        let deeper = format!("{indent}{stem}");
        let room = WIDTH - indent.chars().count() - 3;
        for (number, line) in wrap(&node.text, room).into_iter().enumerate() {
            let before = if number == 0 { format!("{indent}{branch}") } else { deeper.clone() };
            let _ = writeln!(text, "{}", format!("{before}{line}").trim_end());
        }
        draw(text, &deeper, &node.children);
    }
}

/// Lines of at most `room` characters, broken at spaces where there are any; control characters
/// of garbled names are replaced.
fn wrap(text: &str, room: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let clean: String = text.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    for word in clean.split(' ').filter(|w| !w.is_empty()) {
        let mut word: Vec<char> = word.chars().collect();
        loop {
            let line = lines.last_mut().map_or(0, |l| l.chars().count());
            let gap = usize::from(line > 0);
            let Some(current) = lines.last_mut() else { break };
            if line + gap + word.len() <= room {
                current.extend(std::iter::repeat_n(' ', gap).chain(word));
                break;
            }
            if line == 0 {
                current.extend(word.drain(..room));
            }
            lines.push(String::new());
        }
    }
    lines
}

fn host(machine: &Machine) -> Node {
    let host = machine.host();
    let model = host.cpu_model.as_deref().unwrap_or("processor not known");
    let (cpus, cores) = (host.cpus.len(), host.cores.len());
    let node_line = |n: &crate::NumaNode| {
        let memory = n.memory_bytes.map_or(String::new(), |m| format!(", {}", gib(m)));
        leaf(format!("NUMA node {}: CPUs {}{memory}", n.id, n.cpus))
    };
    let nodes = host.nodes.iter().map(node_line).collect();
    node(format!("host: {model}, {cores} cores, {cpus} CPUs"), nodes)
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

fn gpus(machine: &Machine) -> Vec<Node> {
    let inventory = machine.gpus();
    let version = |v: &Option<String>| v.as_deref().unwrap_or("not known").to_owned();
    let mut nodes = Vec::new();
    match &inventory.problem {
        Some(problem) => nodes.push(leaf(format!("no GPU could be asked for: {problem}"))),
        None if inventory.gpus.is_empty() => nodes.push(leaf("no GPU that works")),
        None => {
            let cuda = inventory.cuda.map_or(String::new(), |(a, b)| format!(", CUDA {a}.{b}"));
            let count = inventory.gpus.len();
            let title = format!("{count} GPUs, driver {}{cuda}", version(&inventory.driver));
            nodes.push(node(title, inventory.gpus.iter().map(|g| gpu(machine, g)).collect()));
            nodes.extend(peers(machine));
        }
    }
    let lost = inventory.lost.iter().map(|l| {
        let at = l.pci.map_or(String::new(), |p| format!(" at {p}"));
        leaf(format!("GPU {}{at} does not work: {}", l.index, l.reason))
    });
    nodes.extend(lost);
    if !inventory.hidden.is_empty() {
        let list: Vec<String> = inventory.hidden.iter().map(|p| p.to_string()).collect();
        nodes.push(leaf(format!("on the bus but not usable here: {}", list.join(", "))));
    }
    nodes
}

fn gpu(machine: &Machine, gpu: &Gpu) -> Node {
    let name = gpu.name.as_deref().unwrap_or("GPU");
    let mut place = Vec::new();
    place.extend(gpu.memory_bytes.map(gib));
    place.extend(gpu.pci.map(|p| format!("PCI {p}")));
    place.push(gpu.numa_node.map_or("NUMA not known".to_owned(), |n| format!("NUMA {n}")));
    let mut children = vec![leaf(&gpu.uuid)];
    match &gpu.mig {
        Mig::Off => {}
        Mig::On { devices } => {
            children.push(leaf(format!("MIG is on: {} devices, no peer access", devices.len())));
        }
        Mig::Unknown => children.push(leaf("MIG: not known")),
    }
    if !gpu.links.is_empty() {
        children.push(leaf(links(gpu)));
    }
    match &gpu.fabric {
        Fabric::Member { clique, .. } => children.push(leaf(format!("fabric clique {clique}"))),
        Fabric::Failed(status) => {
            children.push(leaf(format!("fabric registration failed (NVML {status})")));
        }
        Fabric::Pending => children.push(leaf("fabric registration is not complete")),
        Fabric::Unsupported | Fabric::Unknown => {}
    }
    if let Some(device) = machine.device_of(gpu) {
        let a = &device.attributes;
        let (major, minor) = a.capability;
        children.push(leaf(format!(
            "CUDA {}: {} SMs, {} KiB shared each, {} MiB L2, capability {major}.{minor}",
            a.ordinal,
            a.sm_count,
            a.shared_per_sm >> 10,
            a.l2_bytes >> 20
        )));
        children.extend(device.sms.as_ref().map(|map| leaf(domains(map))));
    }
    node(format!("{}: {name}, {}", gpu.index, place.join(", ")), children)
}

fn links(gpu: &Gpu) -> String {
    let up: Vec<_> = gpu.active_links().collect();
    let kind = |f: fn(&LinkEnd) -> bool| up.iter().filter(|l| f(&l.remote)).count();
    let ends = [
        (kind(|e| matches!(e, LinkEnd::Gpu(_))), "to GPUs"),
        (kind(|e| matches!(e, LinkEnd::Switch(_))), "to NVSwitches"),
        (kind(|e| matches!(e, LinkEnd::Cpu)), "to processors"),
        (kind(|e| matches!(e, LinkEnd::Unknown)), "to ends not known"),
    ];
    let ends: Vec<String> =
        ends.iter().filter(|(n, _)| *n > 0).map(|(n, to)| format!("{n} {to}")).collect();
    let speed = gpu.link_mbytes().map_or("speed not known".to_owned(), |m| {
        format!("{:.0} GB/s per direction", m as f64 / 1000.0)
    });
    let total = gpu.links.len();
    match up.len() {
        0 => format!("NVLink: none of {total} links is up"),
        n => format!("NVLink: {n} of {total} links up ({}), {speed}", ends.join(", ")),
    }
}

/// Domains of equal size together, and active clusters.
fn domains(map: &SmMap) -> String {
    let mut sizes: Vec<(usize, usize)> = Vec::new();
    let lone = std::iter::repeat_n(1, map.unseen() as usize);
    for size in map.domains().iter().map(|d| d.sms.len()).chain(lone) {
        match sizes.last_mut() {
            Some((last, count)) if *last == size => *count += 1,
            _ => sizes.push((size, 1)),
        }
    }
    let sizes: Vec<String> = sizes.iter().map(|(size, n)| format!("{n}×{size}")).collect();
    let active = |c: u32| format!("{c}:{}", map.capacity(c).clusters);
    let active: Vec<String> = map.cluster_sizes().into_iter().map(active).collect();
    format!("SM domains {}; active clusters {}", sizes.join(" "), active.join(" "))
}

/// The pairs without peer access, or that all have it.
fn peers(machine: &Machine) -> Option<Node> {
    let gpus = machine.gpus();
    if gpus.p2p.is_empty() {
        return None;
    }
    let index = |uuid: &str| gpus.gpus.iter().find(|g| g.uuid == uuid).map_or(0, |g| g.index);
    let bad = gpus.p2p.iter().filter(|p| p.read != P2pStatus::Ok || p.write != P2pStatus::Ok);
    let mut lines: Vec<Node> = bad
        .map(|p| leaf(format!("no access {} → {}: {:?}", index(&p.from), index(&p.to), p.write)))
        .collect();
    let nvlink = gpus.p2p.iter().filter(|p| p.nvlink == P2pStatus::Ok).count();
    let total = gpus.p2p.len();
    let title = match lines.len() {
        0 => format!("peer access: all {total} directed pairs, {nvlink} over NVLink"),
        n => format!("peer access: {} of {total} directed pairs, {nvlink} over NVLink", total - n),
    };
    if lines.len() > 8 {
        let rest = lines.len() - 8;
        lines.truncate(8);
        lines.push(leaf(format!("and {rest} more")));
    }
    Some(node(title, lines))
}

fn nics(machine: &Machine) -> Node {
    let host = machine.host();
    if host.nics.is_empty() {
        return leaf("no RDMA device");
    }
    // The default policy names nothing, so it cannot be wrong.
    let choices = machine.nics(&NicPolicy::default()).unwrap_or_default();
    let line = |nic: &Nic| {
        let serves = choices.iter().enumerate().filter_map(|(gpu, choice)| {
            let (_, distance) = choice.nics.iter().find(|(name, _)| *name == nic.name)?;
            let index = machine.gpus().gpus.get(gpu).map_or(0, |g| g.index);
            Some(leaf(format!("serves GPU {index} ({})", near(*distance))))
        });
        node(nic_line(nic), serves.collect())
    };
    let count = host.nics.len();
    node(format!("{count} RDMA devices"), host.nics.iter().map(line).collect())
}

fn nic_line(nic: &Nic) -> String {
    let mut parts = Vec::new();
    parts.extend(nic.pci.map(|p| format!("PCI {p}")));
    parts.extend(nic.numa_node.map(|n| format!("NUMA {n}")));
    for port in &nic.ports {
        let layer = match port.link_layer {
            LinkLayer::InfiniBand => "InfiniBand",
            LinkLayer::Ethernet => "Ethernet",
            LinkLayer::Unknown => "link layer not known",
        };
        let state = match port.state {
            PortState::Active => "active",
            PortState::Down => "down",
            PortState::Init | PortState::Armed => "not yet active",
            PortState::Unknown => "state not known",
        };
        let rate = port
            .rate_mbps
            .map_or("rate not known".to_owned(), |r| format!("{} Gb/s", r as f64 / 1000.0));
        parts.push(format!("port {} {state}, {layer}, {rate}", port.number));
    }
    if !nic.accessible {
        parts.push("no device node here".to_owned());
    }
    format!("{}: {}", nic.name, parts.join(", "))
}

fn near(distance: crate::Distance) -> String {
    match distance {
        crate::Distance::SameDevice => "same device".to_owned(),
        crate::Distance::Switch { .. } => "same PCIe switch".to_owned(),
        crate::Distance::HostBridge => "same host bridge".to_owned(),
        crate::Distance::Node => "same NUMA node".to_owned(),
        crate::Distance::System => "another NUMA node".to_owned(),
        crate::Distance::Unknown => "distance not known".to_owned(),
    }
}
