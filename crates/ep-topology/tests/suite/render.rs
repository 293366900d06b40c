//! Drawings of a machine.

use crate::common::h200;
use crate::tree::{TreeDir, change, hgx, nvml, uuid};
use ep_topology::{
    Answer, CudaDevice, DeviceAttributes, Machine, NvmlOutcome, Options, Recording, Refusal,
    render_svg, render_tree,
};

fn h200_attributes() -> DeviceAttributes {
    DeviceAttributes {
        ordinal: 0,
        uuid: uuid(0),
        pci: None,
        sm_count: 132,
        shared_per_sm: 233_472,
        shared_per_block: 232_448,
        l2_bytes: 62_914_560,
        capability: (9, 0),
    }
}

fn full_machine() -> Machine {
    let (dir, gpus) = hgx();
    let gpus: Vec<&str> = gpus.iter().map(String::as_str).collect();
    let mut record = nvml(&gpus);
    record.p2p[0].write = Answer::Refused(Refusal::Unsupported);
    change(&mut record, 1, |f| f.links[0].speed = Answer::Value(0));
    change(&mut record, 2, |f| f.mig_mode = Answer::Value((1, 1)));
    change(&mut record, 3, |f| f.uuid = Answer::Refused(Refusal::GpuLost));
    let nvml = NvmlOutcome::Read(record);
    let mut machine = Machine::replay(Recording { host: dir.host(), nvml, devices: Vec::new() });
    let device = CudaDevice::new(h200_attributes(), Some(h200())).expect("sound");
    machine.attach(device).expect("NVML shows it");
    machine
}

#[test]
fn the_tree_tells_what_matters_within_80_columns() {
    let text = render_tree(&full_machine());
    assert!(text.lines().all(|l| l.chars().count() <= 80 && l.trim_end() == l), "{text}");
    // Wrapped lines are joined again to be searched.
    let joined = text.replace(['│', '├', '└', '─', '\n'], " ");
    let words: Vec<&str> = joined.split_whitespace().collect();
    let joined = words.join(" ");
    for part in [
        "Test CPU 9000, 16 cores, 32 CPUs",
        "NUMA node 1: CPUs 8-15,24-31, 1.0 GiB",
        "7 GPUs, driver 580.159, CUDA 13.0",
        "NVLink: 18 of 18 links up (18 to NVSwitches), 478 GB/s per direction",
        "speed not known",
        "MIG is on",
        "SM domains 2×18 5×16 1×8 4×2; active clusters 1:132 2:66 4:30 8:15",
        "no access 0 → 1: Unsupported",
        "GPU 3 at 0000:43:00.0 does not work: fell off the bus",
        "on the bus but not usable here: 0000:43:00.0",
        "mlx5_7: PCI 0000:15:00.0, NUMA 0, port 1 active, InfiniBand, 400 Gb/s",
        "serves GPU 0 (same PCIe switch)",
    ] {
        assert!(joined.contains(part), "lacks {part:?}:\n{text}");
    }
}

#[test]
fn without_a_gpu_the_tree_says_what_is_missing() {
    let dir = TreeDir::new();
    dir.cpus(1, 2);
    let options = Options {
        sysfs: dir.path("sys"),
        proc: dir.path("proc"),
        dev: dir.path("dev"),
        nvml: Some("libno-such-nvml.so.9".to_owned()),
    };
    let text = render_tree(&Machine::observe(&options));
    assert!(text.contains("no GPU could be asked for: libno-such-nvml.so.9"), "{text}");
    assert!(text.contains("no RDMA device"), "{text}");
}

#[test]
fn the_svg_draws_every_sm_link_and_nic() {
    let machine = full_machine();
    let svg = render_svg(&machine);
    assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("class=\"sm\"").count(), 132);
    assert!(svg.contains(">NVSwitch<") && svg.contains(">18 links<"));
    for nic in 0..8 {
        assert!(svg.contains(&format!(">mlx5_{nic}<")));
    }
    // One line per GPU to its switch, one per GPU or NIC to its partner.
    assert_eq!(svg.matches("<line ").count(), 7 + 8);
}

#[test]
fn direct_links_are_arcs_and_names_are_escaped() {
    let mut record = nvml(&["0000:1b:00.0", "0000:2c:00.0"]);
    for (from, to) in [(0, "0000:2c:00.0"), (1, "0000:1b:00.0")] {
        change(&mut record, from, |f| {
            f.name = Answer::Value("a<b>&\u{1}".to_owned());
            for link in &mut f.links {
                link.remote_kind = Answer::Value(0);
                link.remote_pci = Answer::Value(to.to_owned());
            }
        });
    }
    let nvml = NvmlOutcome::Read(record);
    let machine = Machine::replay(Recording { nvml, ..Recording::default() });
    let svg = render_svg(&machine);
    assert_eq!(svg.matches("<path ").count(), 1);
    assert!(svg.contains(">18 links<") && svg.contains("a&lt;b&gt;&amp;?"), "{svg}");
}
