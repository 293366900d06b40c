//! A machine as a drawing.

use std::fmt::Write as _;

use crate::{Distance, Gpu, LinkEnd, Machine, NicPolicy, P2pStatus, SmMap};

/// Pixels: a GPU's box, the gap between boxes, the height of a NIC's box, an SM's square.
const BOX: usize = 210;
const GAP: usize = 24;
const NIC: usize = 44;
const SM: usize = 9;
/// Drawn below each other: title, links, GPUs, NICs.
const TOP: usize = 150;
/// Colours of SM domains, told apart also in grey.
const COLOURS: [&str; 8] =
    ["#1b6ca8", "#e07a1f", "#3a8f4d", "#b5384f", "#7a5bb5", "#8c6d46", "#c86fa6", "#6b6b6b"];

/// GPUs with their SM domains, the NVLinks between them, and the NICs that serve them, as a
/// self-contained SVG document.
pub fn render_svg(machine: &Machine) -> String {
    let gpus = &machine.gpus().gpus;
    let nics = &machine.host().nics;
    let columns = gpus.len().max(nics.len()).max(2);
    let width = GAP + columns * (BOX + GAP);
    let tallest = gpus.iter().map(|g| gpu_height(machine, g)).max().unwrap_or(NIC);
    let nic_top = TOP + tallest + 60;
    let height = nic_top + NIC + GAP;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    text(&mut svg, GAP, 24, &title(machine));
    links(&mut svg, machine);
    for (column, gpu) in gpus.iter().enumerate() {
        draw_gpu(&mut svg, machine, gpu, left(column));
    }
    for (column, nic) in nics.iter().enumerate() {
        let x = left(column);
        rect(&mut svg, x, nic_top, BOX, NIC, if nic.usable() { "#eef5ec" } else { "#f0f0f0" });
        text(&mut svg, x + 8, nic_top + 18, &nic.name);
        let rate = nic
            .rate_mbps()
            .map_or("no active port".to_owned(), |r| format!("{} Gb/s", r as f64 / 1000.0));
        text(&mut svg, x + 8, nic_top + 36, &rate);
    }
    serving(&mut svg, machine, nic_top);
    svg.push_str("</svg>\n");
    svg
}

fn title(machine: &Machine) -> String {
    let gpus = machine.gpus();
    let host = machine.host().cpu_model.as_deref().unwrap_or("host");
    match &gpus.problem {
        Some(_) => format!("{host}: no GPU could be asked for"),
        None => {
            format!("{host}: {} GPUs, {} RDMA devices", gpus.gpus.len(), machine.host().nics.len())
        }
    }
}

fn left(column: usize) -> usize {
    GAP + column * (BOX + GAP)
}

fn gpu_height(machine: &Machine, gpu: &Gpu) -> usize {
    let map = machine.device_of(gpu).and_then(|d| d.sms.as_ref());
    60 + map.map_or(0, |m| 20 + rows(m) * (SM + 3))
}

/// SMs side by side in a box.
const PER_ROW: usize = (BOX - 16) / (SM + 1);

fn rows(map: &SmMap) -> usize {
    let domains: usize = map.domains().iter().map(|d| d.sms.len().div_ceil(PER_ROW)).sum();
    domains + (map.unseen() as usize).div_ceil(PER_ROW)
}

fn draw_gpu(svg: &mut String, machine: &Machine, gpu: &Gpu, x: usize) {
    rect(svg, x, TOP, BOX, gpu_height(machine, gpu), "#f5f8fc");
    let name = gpu.name.as_deref().unwrap_or("GPU");
    text(svg, x + 8, TOP + 18, &format!("{}: {name}", gpu.index));
    let place = gpu.pci.map_or("PCI not known".to_owned(), |p| p.to_string());
    let node = gpu.numa_node.map_or(String::new(), |n| format!(", NUMA {n}"));
    text(svg, x + 8, TOP + 36, &format!("{place}{node}"));
    let Some(map) = machine.device_of(gpu).and_then(|d| d.sms.as_ref()) else { return };
    text(svg, x + 8, TOP + 56, &format!("{} SMs, one row per domain", map.sm_count()));
    let mut y = TOP + 66;
    let sizes = map.domains().iter().map(|d| d.sms.len());
    let lone = (map.unseen() > 0).then_some(map.unseen() as usize);
    for (domain, size) in sizes.chain(lone).enumerate() {
        for sm in 0..size {
            let (row, column) = (sm / PER_ROW, sm % PER_ROW);
            let _ = writeln!(
                svg,
                "<rect class=\"sm\" x=\"{}\" y=\"{}\" width=\"{SM}\" height=\"{SM}\" fill=\"{}\"/>",
                x + 8 + column * (SM + 1),
                y + row * (SM + 3),
                COLOURS[domain % COLOURS.len()]
            );
        }
        y += size.div_ceil(PER_ROW) * (SM + 3);
    }
}

/// Arcs above the GPUs: direct links with their number, or a bar for NVSwitches.
fn links(svg: &mut String, machine: &Machine) {
    let gpus = &machine.gpus().gpus;
    let centre = |column: usize| left(column) + BOX / 2;
    for (a, gpu) in gpus.iter().enumerate() {
        let switched =
            gpu.active_links().filter(|l| matches!(l.remote, LinkEnd::Switch(_))).count();
        if switched > 0 {
            line(svg, (centre(a), TOP), (centre(a), 70), "#1b6ca8", 2);
            text(svg, centre(a) + 6, 110, &format!("{switched} links"));
        }
        for (b, peer) in gpus.iter().enumerate().skip(a + 1) {
            let to = |l: &&crate::NvLink| matches!(l.remote, LinkEnd::Gpu(Some(p)) if Some(p) == peer.pci);
            let count = gpu.active_links().filter(to).count();
            let access = machine.p2p(&gpu.uuid, &peer.uuid);
            let works = access.is_some_and(|p| p.write == P2pStatus::Ok);
            if count > 0 {
                let lift = TOP - 20 - (b - a).min(6) * 12;
                arc(svg, centre(a), centre(b), lift);
                let access = if works { "" } else { ", no peer access" };
                text(svg, (centre(a) + centre(b)) / 2, lift - 4, &format!("{count} links{access}"));
            }
        }
    }
    let switched = |g: &Gpu| g.active_links().any(|l| matches!(l.remote, LinkEnd::Switch(_)));
    if gpus.iter().any(switched) {
        rect(svg, GAP, 46, gpus.len() * (BOX + GAP) - GAP, 24, "#dce8f4");
        text(svg, GAP + 8, 62, "NVSwitch");
    }
}

/// Lines from GPUs to the NICs that serve them.
fn serving(svg: &mut String, machine: &Machine, nic_top: usize) {
    let choices = machine.nics(&NicPolicy::default()).unwrap_or_default();
    let nics = &machine.host().nics;
    for (column, choice) in choices.iter().enumerate() {
        let gpu = machine.gpus().gpus.get(column);
        let bottom = TOP + gpu.map_or(0, |g| gpu_height(machine, g));
        for (name, distance) in &choice.nics {
            let Some(nic) = nics.iter().position(|n| n.name == *name) else { continue };
            let near = *distance <= Distance::HostBridge;
            let colour = if near { "#3a8f4d" } else { "#b5384f" };
            let (from, to) = (left(column) + BOX / 2, left(nic) + BOX / 2);
            line(svg, (from, bottom), (to, nic_top), colour, 2);
        }
    }
}

fn rect(svg: &mut String, x: usize, y: usize, width: usize, height: usize, fill: &str) {
    let _ = writeln!(
        svg,
        "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"6\" fill=\"{fill}\" \
         stroke=\"#556070\"/>"
    );
}

fn line(svg: &mut String, from: (usize, usize), to: (usize, usize), colour: &str, width: usize) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ = writeln!(
        svg,
        "<line x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\" stroke=\"{colour}\" \
         stroke-width=\"{width}\"/>"
    );
}

fn arc(svg: &mut String, from: usize, to: usize, top: usize) {
    let _ = writeln!(
        svg,
        "<path d=\"M {from} {TOP} C {from} {top}, {to} {top}, {to} {TOP}\" fill=\"none\" \
         stroke=\"#1b6ca8\" stroke-width=\"2\"/>"
    );
}

/// Text that fits a box, with what XML reserves escaped.
fn text(svg: &mut String, x: usize, y: usize, content: &str) {
    let mut safe = String::new();
    for c in content.chars().take(160) {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            c if c.is_control() => safe.push('?'),
            // Not characters of XML.
            '\u{fffe}' | '\u{ffff}' => safe.push('?'),
            c => safe.push(c),
        }
    }
    let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\">{safe}</text>");
}
