//! Garbage in, a model out: nothing panics, hangs or grows without bound.

use crate::tree::{TreeDir, change, hgx, nvml, uuid};
use ep_topology::{
    Answer, CpuSet, Host, Machine, NicPolicy, NvmlOutcome, PciAddress, ProxyPolicy, Recording,
    Refusal, render_svg, render_tree,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Text that resembles what sysfs holds, and some that does not.
fn garbage() -> impl Strategy<Value = Vec<u8>> {
    let likely = prop::sample::select(vec![
        "",
        "-1",
        "0",
        "-",
        "0-",
        "-5",
        "3-1",
        "0-4294967295",
        "0x",
        "0xffffffffffff",
        "0xzz",
        "NaN GT/s PCIe",
        "inf Gb/sec",
        "0 Gb/sec (1X SDR)",
        "-400 Gb/sec",
        "1e400 Gb/sec",
        "9: NONSENSE",
        "4:",
        ":",
        "::::::::",
        "999999999999999999999",
        "Unknown",
        "0,0,0,,",
        "Node 0 MemTotal: 99999999999999999999 kB",
        "MemTotal:",
        "400 Gb/sec (4X NDR)",
        "4: ACTIVE",
    ]);
    let words = likely.prop_map(|t| t.as_bytes().to_vec());
    prop_oneof![3 => words, 1 => prop::collection::vec(any::<u8>(), 0..64)]
}

/// The fields of an HGX tree that are worth spoiling.
fn fields() -> Vec<String> {
    let mut fields: Vec<String> = [
        "sys/devices/system/cpu/online",
        "sys/devices/system/cpu/cpu3/topology/core_cpus_list",
        "sys/devices/system/cpu/cpu3/topology/physical_package_id",
        "sys/devices/system/node/node0/cpulist",
        "sys/devices/system/node/node0/meminfo",
        "sys/devices/system/node/node1/distance",
        "sys/class/infiniband_verbs/uverbs2/ibdev",
        "proc/cpuinfo",
    ]
    .map(str::to_owned)
    .into();
    let pci =
        ["class", "vendor", "device", "numa_node", "current_link_speed", "current_link_width"];
    for field in pci {
        let gpu = "sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0";
        fields.push(format!("{gpu}/{field}"));
    }
    for field in ["state", "phys_state", "rate", "link_layer", "gids/0", "gid_attrs/types/0"] {
        fields.push(format!("sys/class/infiniband/mlx5_7/ports/1/{field}"));
    }
    fields
}

/// Everything that reads a machine.
fn use_all(machine: &Machine) -> Result<(), TestCaseError> {
    let choices = machine.nics(&NicPolicy::default()).expect("a policy that names nothing");
    let cores = machine.proxy_cores(&choices, &ProxyPolicy::default());
    let any_nic = choices.iter().any(|c| !c.nics.is_empty());
    if any_nic && !machine.host().cpus.is_empty() {
        prop_assert!(!cores.expect("cores are there").is_empty());
    }
    let tree = render_tree(machine);
    prop_assert!(tree.lines().all(|l| l.chars().count() <= 80), "{}", tree);
    prop_assert!(render_svg(machine).ends_with("</svg>\n"));
    let back = Machine::from_json(&machine.to_json().expect("writable")).expect("readable");
    prop_assert_eq!(&back, machine);
    Ok(())
}

fn runner(cases: u32) -> TestRunner {
    TestRunner::new(Config { cases, max_shrink_iters: 64, ..Config::default() })
}

#[test]
fn garbled_fields_become_warnings_or_gaps() {
    let (dir, gpus) = hgx();
    let gpus: Vec<&str> = gpus.iter().map(String::as_str).collect();
    let fields = fields();
    let read = |field: &String| std::fs::read(dir.path(field)).expect("the tree has the field");
    let originals: Vec<Vec<u8>> = fields.iter().map(read).collect();
    let spoiled = prop::collection::vec((0..fields.len(), garbage()), 1..6);
    let case = |spoiled: Vec<(usize, Vec<u8>)>| {
        spoiled.iter().for_each(|(field, text)| dir.file(&fields[*field], text));
        let machine = dir.machine(&gpus);
        spoiled.iter().for_each(|(field, _)| dir.file(&fields[*field], &originals[*field]));
        prop_assert!(machine.host().cpus.len() <= 1 << 16);
        prop_assert_eq!(machine.gpus().gpus.len(), 8);
        prop_assert!(machine.host().nics.iter().all(|n| n.rate_mbps() != Some(0)));
        use_all(&machine)
    };
    runner(200).run(&spoiled, case).expect("no garbage breaks it");
    assert_eq!(dir.host().warnings, [], "all fields are as they were");
}

#[test]
fn garbled_answers_of_nvml_never_panic() {
    let (dir, gpus) = hgx();
    let host = dir.host();
    let gpus: Vec<&str> = gpus.iter().map(String::as_str).collect();
    let numbers = (any::<u64>(), any::<[u32; 4]>(), any::<i32>(), any::<bool>());
    let mask = prop::collection::vec(any::<u64>(), 0..6);
    let case = |(name, pci, mask, numbers): (String, String, Vec<u64>, _)| {
        let (speed, [kind, mode, node, state], cuda, lost) = numbers;
        let mut record = nvml(&gpus);
        record.cuda = Answer::Value(cuda);
        change(&mut record, 2, |f| {
            f.name = Answer::Value(name.clone());
            f.pci = Answer::Value(pci.clone());
            f.numa_node = Answer::Value(node);
            f.cpu_affinity = Answer::Value(mask);
            f.mig_mode = Answer::Value((mode, 0));
            f.links[0].speed = Answer::Value(speed);
            f.links[1].remote_kind = Answer::Value(kind);
            f.links[2].remote_pci = Answer::Value(pci);
            if let Answer::Value(fabric) = &mut f.fabric {
                fabric.state = state;
            }
            if lost {
                f.uuid = Answer::Refused(Refusal::Other(name));
            }
        });
        record.p2p[5].from = kind;
        let nvml = NvmlOutcome::Read(record);
        let machine = Machine::replay(Recording { host: host.clone(), nvml, devices: Vec::new() });
        prop_assert_eq!(machine.gpus().lost.len(), usize::from(lost));
        let links = machine.gpus().gpus.iter().flat_map(|g| &g.links);
        prop_assert!(links.into_iter().all(|l| l.speed_mbytes != Some(0)));
        use_all(&machine)
    };
    let strategy = (".{0,120}", ".{0,30}", mask, numbers);
    runner(200).run(&strategy, case).expect("no garbage breaks it");
}

proptest! {
    #[test]
    fn addresses_and_cpu_sets_read_what_they_write(
        domain: u32, bus: u8, device in 0u8..32, function in 0u8..8,
        cpus in prop::collection::btree_set(0u32..300, 0..60),
    ) {
        let address = PciAddress { domain, bus, device, function };
        prop_assert_eq!(address.to_string().parse(), Ok(address));
        let nvml = format!("{domain:08X}:{bus:02X}:{device:02X}.{function}");
        prop_assert_eq!(nvml.parse(), Ok(address));
        let set: CpuSet = cpus.iter().copied().collect();
        prop_assert_eq!(set.to_string().parse(), Ok(set.clone()));
        let mut mask = [0u64; 5];
        cpus.iter().for_each(|c| mask[*c as usize / 64] |= 1 << (c % 64));
        prop_assert_eq!(CpuSet::from_mask(&mask), set);
    }

    #[test]
    fn parsers_take_any_text(text in ".{0,40}") {
        let _ = text.parse::<PciAddress>();
        if let Ok(set) = text.parse::<CpuSet>() {
            prop_assert!(set.len() <= 1 << 16);
        }
    }
}

#[test]
fn addresses_out_of_range_are_refused() {
    for text in ["", ":", "00:20.0", "100:00.0", "00:00.8", "1:2:3:4.0", "0000:00:+1.0", "é:00.0"]
    {
        assert!(text.parse::<PciAddress>().is_err(), "{text:?}");
    }
    assert!("5-4".parse::<CpuSet>().is_err());
    assert!("0-70000".parse::<CpuSet>().is_err());
    assert_eq!("".parse::<CpuSet>().map(|s| s.len()), Ok(0));
}

#[test]
fn special_files_are_not_waited_for() {
    let dir = TreeDir::new();
    dir.cpus(1, 2);
    // A link to itself, a folder and a device where files should be.
    dir.link("sys/devices/system/node/node1/cpulist", "cpulist");
    std::fs::create_dir_all(dir.path("sys/devices/system/node/node2/cpulist")).expect("a folder");
    dir.link("sys/devices/system/node/node3/cpulist", "/dev/zero");
    let host: Host = dir.host();
    assert_eq!(host.nodes.len(), 4);
    assert!(host.nodes[1..].iter().all(|n| n.cpus.is_empty()));
    assert_eq!(host.warnings.len(), 2, "{:?}", host.warnings);
    assert!(host.warnings.iter().all(|w| w.detail == "not a file"));
    let machine = dir.machine(&[]);
    assert!(machine.gpu(&uuid(0)).is_err());
}
