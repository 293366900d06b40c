//! Hand-made sysfs trees and NVML records of the machines they belong to.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs, os::unix::fs::symlink};

use ep_topology::{
    Answer, DeviceFacts, DeviceRecord, FabricRecord, Host, LinkRecord, Machine, NvmlOutcome,
    NvmlRecord, P2pRecord, P2pStatus, Recording, Refusal,
};

/// A folder with `sys`, `proc` and `dev` that goes when it is dropped.
pub struct TreeDir {
    root: PathBuf,
}

impl TreeDir {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ep-topology-{}-{number}", std::process::id());
        let root = std::env::temp_dir().join(name);
        for part in ["sys", "proc", "dev"] {
            fs::create_dir_all(root.join(part)).expect("a folder for the test");
        }
        Self { root }
    }

    pub fn path(&self, part: &str) -> PathBuf {
        self.root.join(part)
    }

    /// Writes a file, with a line break as sysfs has it; folders are made.
    pub fn file(&self, path: &str, text: impl AsRef<[u8]>) {
        let full = self.root.join(path);
        fs::create_dir_all(full.parent().expect("a folder")).expect("folders");
        let mut bytes = text.as_ref().to_vec();
        bytes.push(b'\n');
        fs::write(full, bytes).expect("a file");
    }

    pub fn link(&self, path: &str, target: &str) {
        let full = self.root.join(path);
        fs::create_dir_all(full.parent().expect("a folder")).expect("folders");
        symlink(target, full).expect("a link");
    }

    /// NUMA nodes with `cores` cores of two threads each; threads of a core are numbered apart.
    pub fn cpus(&self, nodes: u32, cores: u32) {
        let total = nodes * cores;
        let cpu = "sys/devices/system/cpu";
        self.file(&format!("{cpu}/online"), format!("0-{}", 2 * total - 1));
        for core in 0..total {
            for thread in [core, core + total] {
                let at = format!("{cpu}/cpu{thread}/topology");
                self.file(&format!("{at}/core_cpus_list"), format!("{core},{}", core + total));
                self.file(&format!("{at}/physical_package_id"), (core / cores).to_string());
            }
        }
        for node in 0..nodes {
            let at = format!("sys/devices/system/node/node{node}");
            let (first, last) = (node * cores, (node + 1) * cores - 1);
            let list = format!("{first}-{last},{}-{}", first + total, last + total);
            self.file(&format!("{at}/cpulist"), list);
            self.file(&format!("{at}/meminfo"), format!("Node {node} MemTotal:   1048576 kB"));
            let distance = |to: u32| if to == node { "10" } else { "21" };
            let row: Vec<&str> = (0..nodes).map(distance).collect();
            self.file(&format!("{at}/distance"), row.join(" "));
        }
        self.file("proc/cpuinfo", "processor\t: 0\nmodel name\t: Test CPU 9000");
    }

    /// A PCI device below the given bridges, `pci0000:00` first.
    pub fn pci(&self, address: &str, bridges: &str, class: &str, vendor: &str, node: i32) {
        let home = format!("sys/devices/{bridges}/{address}");
        self.file(&format!("{home}/class"), class);
        self.file(&format!("{home}/vendor"), vendor);
        self.file(&format!("{home}/device"), "0x2335");
        self.file(&format!("{home}/numa_node"), node.to_string());
        self.file(&format!("{home}/current_link_speed"), "32.0 GT/s PCIe");
        self.file(&format!("{home}/current_link_width"), "16");
        let link = format!("sys/bus/pci/devices/{address}");
        self.link(&link, &format!("../../../devices/{bridges}/{address}"));
    }

    pub fn gpu(&self, address: &str, bridges: &str, node: i32) {
        self.pci(address, bridges, "0x030200", "0x10de", node);
    }

    /// An RDMA device on a PCI device of its own, with a device node and an active 400 Gb/s port.
    pub fn nic(&self, index: u32, address: &str, bridges: &str, node: i32) {
        self.pci(address, bridges, "0x020700", "0x15b3", node);
        let name = format!("mlx5_{index}");
        let at = format!("sys/class/infiniband/{name}");
        self.link(&format!("{at}/device"), &format!("../../../devices/{bridges}/{address}"));
        self.file(&format!("{at}/node_guid"), "0000:0000:0000:0001");
        self.file(&format!("{at}/fw_ver"), "28.39.1002");
        let port = format!("{at}/ports/1");
        self.file(&format!("{port}/state"), "4: ACTIVE");
        self.file(&format!("{port}/phys_state"), "5: LinkUp");
        self.file(&format!("{port}/rate"), "400 Gb/sec (4X NDR)");
        self.file(&format!("{port}/link_layer"), "InfiniBand");
        self.file(&format!("{port}/gids/0"), "fe80:0000:0000:0000:0000:0000:0000:0001");
        self.file(&format!("{port}/gids/1"), "0000:0000:0000:0000:0000:0000:0000:0000");
        self.file(&format!("{port}/gid_attrs/types/0"), "IB/RoCE v1");
        let verbs = format!("uverbs{index}");
        self.file(&format!("sys/class/infiniband_verbs/{verbs}/ibdev"), &name);
        self.file(&format!("dev/infiniband/{verbs}"), "");
    }

    pub fn host(&self) -> Host {
        Host::observe(&self.path("sys"), &self.path("proc"), &self.path("dev"))
    }

    /// The machine of this tree with GPUs as NVML shows them.
    pub fn machine(&self, gpus: &[&str]) -> Machine {
        let nvml = NvmlOutcome::Read(nvml(gpus));
        Machine::replay(Recording { host: self.host(), nvml, devices: Vec::new() })
    }
}

impl Drop for TreeDir {
    fn drop(&mut self) {
        // Best effort: a folder left behind in the temporary folder harms nothing.
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// UUID of the GPU at an NVML index.
pub fn uuid(index: usize) -> String {
    format!("GPU-00000000-0000-0000-0000-{index:012}")
}

/// What NVML would say of GPUs at these addresses, all joined by NVSwitches.
pub fn nvml(gpus: &[&str]) -> NvmlRecord {
    let device = |(index, pci): (usize, &&str)| DeviceRecord {
        index: index as u32,
        facts: Answer::Value(facts(index, pci)),
    };
    let pairs = (0..gpus.len()).flat_map(|a| (0..gpus.len()).map(move |b| (a as u32, b as u32)));
    let ok = || Answer::Value(P2pStatus::Ok);
    let p2p =
        |(from, to)| P2pRecord { from, to, read: ok(), write: ok(), nvlink: ok(), atomics: ok() };
    NvmlRecord {
        driver: Answer::Value("580.159".to_owned()),
        library: Answer::Value("13.580.159".to_owned()),
        cuda: Answer::Value(13000),
        devices: gpus.iter().enumerate().map(device).collect(),
        p2p: pairs.filter(|(a, b)| a != b).map(p2p).collect(),
    }
}

pub fn facts(index: usize, pci: &str) -> DeviceFacts {
    DeviceFacts {
        uuid: Answer::Value(uuid(index)),
        name: Answer::Value("NVIDIA H200".to_owned()),
        pci: Answer::Value(format!("0000{}", pci.to_uppercase())),
        memory_bytes: Answer::Value(150_754_820_096),
        numa_node: Answer::Refused(Refusal::Unsupported),
        cpu_affinity: Answer::Value(vec![0xff]),
        mig_mode: Answer::Value((0, 0)),
        mig_devices: Vec::new(),
        links: (0..18).map(link).collect(),
        fabric: Answer::Value(FabricRecord { state: 3, status: 0, cluster: [0; 16], clique: 0 }),
    }
}

pub fn link(index: u32) -> LinkRecord {
    LinkRecord {
        index,
        active: Answer::Value(true),
        version: Answer::Value(7),
        speed: Answer::Value(26_562),
        remote_kind: Answer::Value(2),
        remote_pci: Answer::Value("00000000:06:00.0".to_owned()),
    }
}

/// Changes the facts of one device of a record.
pub fn change(record: &mut NvmlRecord, index: usize, how: impl FnOnce(&mut DeviceFacts)) {
    match &mut record.devices[index].facts {
        Answer::Value(facts) => how(facts),
        Answer::Refused(why) => panic!("no facts: {why:?}"),
    }
}

/// Eight GPUs and eight NICs, each pair below a PCIe switch of its own, four pairs a socket; the
/// NICs' names run against the bus order. Returns the GPUs' addresses.
pub fn hgx() -> (TreeDir, Vec<String>) {
    let dir = TreeDir::new();
    dir.cpus(2, 8);
    let mut gpus = Vec::new();
    for pair in 0..8u32 {
        let node = (pair / 4) as i32;
        let root = 0x10 * (pair + 1);
        let switch = format!("pci0000:{root:02x}/0000:{root:02x}:01.0/0000:{:02x}:00.0", root + 1);
        let gpu = format!("0000:{:02x}:00.0", root + 3);
        let nic = format!("0000:{:02x}:00.0", root + 5);
        dir.gpu(&gpu, &format!("{switch}/0000:{:02x}:00.0", root + 2), node);
        dir.nic(7 - pair, &nic, &format!("{switch}/0000:{:02x}:01.0", root + 2), node);
        gpus.push(gpu);
    }
    dir.pci("0000:06:00.0", "pci0000:00/0000:00:01.0", "0x068000", "0x10de", 0);
    (dir, gpus)
}
