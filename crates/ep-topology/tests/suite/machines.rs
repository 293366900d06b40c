//! Hosts, NICs and placement on hand-made machines.

use crate::tree::{TreeDir, hgx, nvml, uuid};
use ep_topology::{
    Distance, LinkLayer, Machine, NicPolicy, NvmlOutcome, Options, PciKind, PortState, ProxyPolicy,
    Recording,
};

fn refs(gpus: &[String]) -> Vec<&str> {
    gpus.iter().map(String::as_str).collect()
}

/// (GPU index, its NICs' names).
fn chosen(machine: &Machine, policy: &NicPolicy) -> Vec<Vec<String>> {
    let choices = machine.nics(policy).expect("a sound policy");
    choices.into_iter().map(|c| c.nics.into_iter().map(|(name, _)| name).collect()).collect()
}

#[test]
fn hgx_host() {
    let (dir, gpus) = hgx();
    let host = dir.host();
    assert_eq!(host.warnings, []);
    assert_eq!(host.cpu_model.as_deref(), Some("Test CPU 9000"));
    assert_eq!((host.cpus.len(), host.cores.len(), host.nodes.len()), (32, 16, 2));
    assert_eq!(host.nodes[1].cpus.to_string(), "8-15,24-31");
    assert_eq!(host.nodes[1].distances, [21, 10]);
    assert_eq!(host.nodes[0].memory_bytes, Some(1 << 30));
    assert_eq!(host.cores[9].cpus.to_string(), "9,25");
    assert_eq!((host.cores[9].package, host.cores[9].node), (Some(1), Some(1)));
    assert_eq!(host.pci.iter().filter(|d| d.kind == PciKind::Gpu).count(), 8);
    assert_eq!(host.pci.iter().filter(|d| d.kind == PciKind::NvSwitch).count(), 1);
    let gpu = host.pci_device(gpus[0].parse().expect("an address")).expect("it is there");
    assert_eq!(gpu.path, ["pci0000:10", "0000:10:01.0", "0000:11:00.0", "0000:12:00.0"]);
    let link = gpu.link.expect("a link");
    assert_eq!((link.mega_transfers, link.lanes), (32_000, 16));
    let nic = &host.nics[0];
    assert!(nic.usable());
    assert_eq!((nic.name.as_str(), nic.rate_mbps()), ("mlx5_0", Some(400_000)));
    assert_eq!(nic.ports[0].state, PortState::Active);
    assert_eq!(nic.ports[0].link_layer, LinkLayer::InfiniBand);
    assert_eq!(nic.ports[0].physical.as_deref(), Some("LinkUp"));
    // The second GID is all zeros: not set.
    assert_eq!(nic.ports[0].gids.len(), 1);
    assert_eq!(nic.ports[0].gids[0].kind.as_deref(), Some("IB/RoCE v1"));
}

#[test]
fn hgx_gives_each_gpu_the_nic_below_its_switch() {
    let (dir, gpus) = hgx();
    let machine = dir.machine(&refs(&gpus));
    let distances = machine.distances();
    assert_eq!(distances[0][7], Distance::Switch { bridges: 2 });
    assert_eq!(distances[0][0], Distance::System);
    assert_eq!(distances[0][6], Distance::Node);
    let expected: Vec<Vec<String>> = (0..8).rev().map(|n| vec![format!("mlx5_{n}")]).collect();
    assert_eq!(chosen(&machine, &NicPolicy::default()), expected);
}

#[test]
fn two_nics_per_gpu_are_both_used() {
    let dir = TreeDir::new();
    dir.cpus(2, 4);
    let mut gpus = Vec::new();
    for g in 0..4u32 {
        let switch = format!("pci0000:{g}0/0000:{g}0:01.0");
        let gpu = format!("0000:{g}1:00.0");
        dir.gpu(&gpu, &switch, (g / 2) as i32);
        for n in 0..2 {
            dir.nic(2 * g + n, &format!("0000:{g}{}:00.0", n + 2), &switch, (g / 2) as i32);
        }
        gpus.push(gpu);
    }
    let pairs = chosen(&dir.machine(&refs(&gpus)), &NicPolicy::default());
    for (gpu, nics) in pairs.iter().enumerate() {
        assert_eq!(*nics, [format!("mlx5_{}", 2 * gpu), format!("mlx5_{}", 2 * gpu + 1)]);
    }
}

#[test]
fn eight_gpus_share_four_nics_evenly_even_where_one_is_nearest_to_most() {
    let dir = TreeDir::new();
    dir.cpus(1, 4);
    let mut gpus = Vec::new();
    // Six GPUs sit with the first NIC, two with the last; the other NICs have none.
    for g in 0..8u32 {
        let switch = if g < 6 { "pci0000:00/0000:00:01.0" } else { "pci0000:30/0000:30:01.0" };
        let gpu = format!("0000:8{g}:00.0");
        dir.gpu(&gpu, switch, 0);
        gpus.push(gpu);
    }
    for n in 0..4u32 {
        let at = format!("pci0000:{n}0/0000:{n}0:01.0");
        dir.nic(n, &format!("0000:9{n}:00.0"), &at, 0);
    }
    let pairs = chosen(&dir.machine(&refs(&gpus)), &NicPolicy::default());
    let mut load = std::collections::BTreeMap::new();
    pairs.iter().flatten().for_each(|nic| *load.entry(nic.clone()).or_insert(0) += 1);
    assert_eq!(load.values().copied().collect::<Vec<u32>>(), [2, 2, 2, 2]);
    assert_eq!(pairs[6..], [["mlx5_3"], ["mlx5_3"]]);
    assert_eq!(pairs[..6].iter().filter(|n| n[0] == "mlx5_0").count(), 2);
}

#[test]
fn pcie_only_machines_go_by_host_bridge_and_node() {
    let dir = TreeDir::new();
    dir.cpus(2, 4);
    dir.gpu("0000:01:00.0", "pci0000:00/0000:00:01.0", 0);
    dir.gpu("0000:81:00.0", "pci0000:80/0000:80:01.0", 1);
    dir.nic(0, "0000:82:00.0", "pci0000:80/0000:80:02.0", 1);
    dir.nic(1, "0000:21:00.0", "pci0000:20/0000:20:01.0", 0);
    let machine = dir.machine(&["0000:01:00.0", "0000:81:00.0"]);
    assert_eq!(
        machine.distances(),
        [[Distance::System, Distance::Node], [Distance::HostBridge, Distance::System]]
    );
    assert_eq!(chosen(&machine, &NicPolicy::default()), [["mlx5_1"], ["mlx5_0"]]);
}

#[test]
fn a_cloud_vm_without_numa_or_nic() {
    let dir = TreeDir::new();
    dir.file("sys/devices/system/cpu/online", "0-7");
    for cpu in 0..8 {
        let at = format!("sys/devices/system/cpu/cpu{cpu}/topology");
        dir.file(&format!("{at}/thread_siblings_list"), cpu.to_string());
    }
    dir.gpu("0000:00:05.0", "pci0000:00", -1);
    dir.gpu("0000:00:06.0", "pci0000:00", -1);
    let machine = dir.machine(&["0000:00:05.0", "0000:00:06.0"]);
    assert_eq!(machine.host().warnings, []);
    assert!(machine.gpus().gpus.iter().all(|g| g.numa_node.is_none()));
    assert!(machine.host().nodes.is_empty());
    let choices = machine.nics(&NicPolicy::default()).expect("no NIC is no error");
    assert!(choices.iter().all(|c| c.nics.is_empty()));
    assert_eq!(machine.proxy_cores(&choices, &ProxyPolicy::default()), Ok(vec![]));
    assert_eq!(machine.can_access(&uuid(0), &uuid(1)), Ok(true));
}

#[test]
fn nics_without_numa_are_still_shared_out() {
    let dir = TreeDir::new();
    dir.cpus(1, 2);
    dir.gpu("0000:00:05.0", "pci0000:00", -1);
    dir.gpu("0000:00:06.0", "pci0000:00", -1);
    dir.nic(0, "0000:00:07.0", "pci0000:00", -1);
    dir.nic(1, "0000:00:08.0", "pci0000:00", -1);
    let machine = dir.machine(&["0000:00:05.0", "0000:00:06.0"]);
    assert_eq!(machine.distances()[0], [Distance::HostBridge, Distance::HostBridge]);
    assert_eq!(chosen(&machine, &NicPolicy::default()), [["mlx5_0"], ["mlx5_1"]]);
}

#[test]
fn no_gpu_no_nic_no_sysfs() {
    let dir = TreeDir::new();
    let options = Options {
        sysfs: dir.path("nowhere"),
        proc: dir.path("nowhere"),
        dev: dir.path("nowhere"),
        nvml: Some("libno-such-nvml.so.9".to_owned()),
    };
    let machine = Machine::observe(&options);
    assert!(machine.host().warnings[0].detail.contains("is no sysfs tree"));
    let problem = machine.gpus().problem.as_deref().expect("no library");
    assert!(problem.starts_with("libno-such-nvml.so.9: cannot be opened"), "{problem}");
    assert!(problem.contains("NVIDIA driver"), "{problem}");
    assert!(machine.gpus().gpus.is_empty());
    let off = Machine::observe(&Options { nvml: None, ..options });
    assert_eq!(off.gpus().problem, None);
}

#[test]
fn the_machine_this_runs_on_can_be_observed() {
    let machine = Machine::observe(&Options::default());
    assert!(!machine.host().cpus.is_empty());
    let text = machine.to_json().expect("writable");
    assert_eq!(Machine::from_json(&text), Ok(machine));
}

#[test]
fn a_container_that_hides_half_the_devices() {
    let (dir, gpus) = hgx();
    for n in 0..4 {
        std::fs::remove_file(dir.path(&format!("dev/infiniband/uverbs{n}"))).expect("it was there");
    }
    let shown: Vec<&str> = refs(&gpus)[..4].to_vec();
    let machine = dir.machine(&shown);
    let hidden: Vec<String> = machine.gpus().hidden.iter().map(|p| p.to_string()).collect();
    assert_eq!(hidden, gpus[4..]);
    assert!(!machine.host().nics[0].usable() && machine.host().nics[4].usable());
    // mlx5_7 … mlx5_4 belong to the first four GPUs, and these alone are used.
    let expected: Vec<Vec<String>> = (4..8).rev().map(|n| vec![format!("mlx5_{n}")]).collect();
    assert_eq!(chosen(&machine, &NicPolicy::default()), expected);
}

#[test]
fn the_choice_of_nics_can_be_overridden() {
    let (dir, gpus) = hgx();
    let machine = dir.machine(&refs(&gpus));
    let names = |list: &[&str]| list.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
    let only = NicPolicy { only: names(&["mlx5_0", "mlx5_7"]), ..NicPolicy::default() };
    let pairs = chosen(&machine, &only);
    assert_eq!(pairs[..4], [["mlx5_7"], ["mlx5_7"], ["mlx5_7"], ["mlx5_7"]]);
    assert_eq!(pairs[4..], [["mlx5_0"], ["mlx5_0"], ["mlx5_0"], ["mlx5_0"]]);
    let exclude = NicPolicy { exclude: names(&["mlx5_7"]), ..NicPolicy::default() };
    assert!(chosen(&machine, &exclude).iter().flatten().all(|n| n != "mlx5_7"));
    let pin = [(uuid(0), names(&["mlx5_0"]))].into();
    let pairs = chosen(&machine, &NicPolicy { pin, ..NicPolicy::default() });
    assert_eq!(pairs[0], ["mlx5_0"]);
    assert!(pairs[1..].iter().flatten().all(|n| n != "mlx5_0"));
    assert_eq!(pairs[1..].iter().filter(|n| n.is_empty()).count(), 0);
    let slow = NicPolicy { min_rate_mbps: 800_000, ..NicPolicy::default() };
    assert!(chosen(&machine, &slow).iter().all(Vec::is_empty));
}

#[test]
fn an_override_that_names_nothing_is_an_error() {
    let (dir, gpus) = hgx();
    let machine = dir.machine(&refs(&gpus));
    let wrong = NicPolicy { only: vec!["mlx5_9".to_owned()], ..NicPolicy::default() };
    let error = machine.nics(&wrong).expect_err("no such NIC").to_string();
    assert!(error.contains("\"mlx5_9\"") && error.contains("mlx5_0"), "{error}");
    for (gpu, nics) in [("GPU-none", vec!["mlx5_0".to_owned()]), (&uuid(0), vec![])] {
        let pin = [(gpu.to_owned(), nics)].into();
        assert!(machine.nics(&NicPolicy { pin, ..NicPolicy::default() }).is_err());
    }
}

#[test]
fn proxies_get_cores_of_their_own_beside_their_nics() {
    let (dir, gpus) = hgx();
    let machine = dir.machine(&refs(&gpus));
    let choices = machine.nics(&NicPolicy::default()).expect("sound");
    let policy = ProxyPolicy { threads: 2, ..ProxyPolicy::default() };
    let cores = machine.proxy_cores(&choices, &policy).expect("enough cores");
    assert_eq!(cores.len(), 16);
    let mut used: Vec<String> = cores.iter().map(|c| c.cpus.to_string()).collect();
    used.sort();
    used.dedup();
    assert_eq!(used.len(), 16, "sixteen cores for sixteen threads");
    for core in &cores {
        let near = if core.gpu < uuid(4) { 0 } else { 1 };
        let node = machine.host().node_cpus(near);
        assert!(core.cpus.iter().all(|cpu| node.contains(cpu)), "{core:?}");
        assert!(!core.shared);
    }
    // One thread each leaves the first core of the machine alone.
    let cores = machine.proxy_cores(&choices, &ProxyPolicy::default()).expect("enough cores");
    assert!(cores.iter().all(|c| !c.cpus.contains(0)));
}

#[test]
fn proxies_share_cores_only_for_want_of_others() {
    let (dir, gpus) = hgx();
    let machine = dir.machine(&refs(&gpus));
    let choices = machine.nics(&NicPolicy::default()).expect("sound");
    let allowed = Some("0-2,8".parse().expect("a list"));
    let policy = ProxyPolicy { allowed, avoid: "2".parse().expect("a list"), threads: 1 };
    let cores = machine.proxy_cores(&choices, &policy).expect("some cores");
    assert_eq!(cores.iter().filter(|c| !c.shared).count(), 3);
    let load = |cpu| cores.iter().filter(|c| c.cpus.contains(cpu)).count();
    // The first three threads get a core each, the third a far one; the rest share near ones.
    assert_eq!(load(8), 1 + 4);
    assert_eq!((load(0).max(load(1)), load(0).min(load(1))), (2, 1));
    let none = ProxyPolicy { allowed: Some("99".parse().expect("a list")), ..policy.clone() };
    assert!(machine.proxy_cores(&choices, &none).is_err());
    let zero = ProxyPolicy { threads: 0, ..policy };
    assert!(machine.proxy_cores(&choices, &zero).is_err());
}

#[test]
fn a_device_in_software_has_no_address() {
    let dir = TreeDir::new();
    dir.cpus(1, 2);
    dir.file("sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE");
    dir.file("sys/class/infiniband/rxe0/ports/1/link_layer", "Ethernet");
    dir.file("sys/class/infiniband_verbs/uverbs0/ibdev", "rxe0");
    dir.file("dev/infiniband/uverbs0", "");
    dir.gpu("0000:01:00.0", "pci0000:00/0000:00:01.0", 0);
    let machine = dir.machine(&["0000:01:00.0"]);
    let nic = &machine.host().nics[0];
    assert_eq!((nic.pci, nic.usable(), nic.rate_mbps()), (None, true, None));
    assert_eq!(machine.distances(), [[Distance::Node]]);
    assert_eq!(chosen(&machine, &NicPolicy::default()), [["rxe0"]]);
}

#[test]
fn a_replayed_machine_is_the_machine() {
    let (dir, gpus) = hgx();
    let machine = dir.machine(&refs(&gpus));
    let text = machine.to_json().expect("writable");
    let back = Machine::from_json(&text).expect("readable");
    assert_eq!(back, machine);
    let recording = Recording {
        host: dir.host(),
        nvml: NvmlOutcome::Read(nvml(&refs(&gpus))),
        devices: Vec::new(),
    };
    assert_eq!(Machine::replay(recording), machine);
    let newer = text.replacen("\"schema\": 1", "\"schema\": 2", 1);
    let error = Machine::from_json(&newer).expect_err("another version").to_string();
    assert!(error.contains("schema 2"), "{error}");
    assert!(Machine::from_json("{").is_err());
}
