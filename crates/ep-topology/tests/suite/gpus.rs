//! What NVML's answers mean, replayed.

use crate::common::{h200, synthetic};
use crate::tree::{change, facts, hgx, nvml, uuid};
use ep_topology::{
    Answer, CudaDevice, DeviceAttributes, DeviceRecord, Fabric, Host, LinkEnd, Machine, Mig,
    NvmlOutcome, NvmlRecord, P2pStatus, Recording, Refusal, TopologyError, read_nvml,
};

const TWO: [&str; 2] = ["0000:1b:00.0", "0000:2c:00.0"];

fn machine(record: NvmlRecord) -> Machine {
    let nvml = NvmlOutcome::Read(record);
    Machine::replay(Recording { host: Host::default(), nvml, devices: Vec::new() })
}

fn attributes(ordinal: u32, uuid: &str, pci: &str) -> DeviceAttributes {
    DeviceAttributes {
        ordinal,
        uuid: uuid.to_owned(),
        pci: Some(pci.parse().expect("an address")),
        sm_count: 132,
        shared_per_sm: 233_472,
        shared_per_block: 232_448,
        l2_bytes: 62_914_560,
        capability: (9, 0),
    }
}

#[test]
fn two_gpus_behind_switches() {
    let machine = machine(nvml(&TWO));
    let gpus = machine.gpus();
    assert_eq!((gpus.driver.as_deref(), gpus.cuda), (Some("580.159"), Some((13, 0))));
    let gpu = machine.gpu(&uuid(1)).expect("it is there");
    assert_eq!(gpu.pci.map(|p| p.to_string()).as_deref(), Some(TWO[1]));
    assert_eq!(gpu.cpu_affinity.to_string(), "0-7");
    assert_eq!(gpu.mig, Mig::Off);
    assert_eq!((gpu.links.len(), gpu.link_mbytes()), (18, Some(18 * 26_562)));
    assert!(matches!(gpu.links[0].remote, LinkEnd::Switch(Some(_))));
    assert!(matches!(gpu.fabric, Fabric::Member { clique: 0, .. }));
    assert_eq!(gpus.p2p.len(), 2);
    assert_eq!(machine.can_access(&uuid(0), &uuid(1)), Ok(true));
    assert_eq!(machine.can_access(&uuid(0), &uuid(0)), Ok(true));
}

#[test]
fn a_link_speed_of_zero_or_nonsense_is_unknown() {
    for speed in [0, 1, u64::MAX, 4_294_967_295] {
        let mut record = nvml(&TWO);
        change(&mut record, 0, |f| f.links[3].speed = Answer::Value(speed));
        let machine = machine(record);
        let gpu = &machine.gpus().gpus[0];
        assert_eq!(gpu.links[3].speed_mbytes, None, "{speed}");
        assert_eq!(gpu.link_mbytes(), None);
        assert!(machine.gpus().gpus[1].link_mbytes().is_some());
    }
}

#[test]
fn the_other_end_of_a_link_follows_its_kind_then_its_address() {
    let mut record = nvml(&TWO);
    change(&mut record, 0, |f| {
        f.links.truncate(5);
        f.links[0].remote_kind = Answer::Value(0);
        f.links[1].remote_kind = Answer::Refused(Refusal::MissingSymbol);
        f.links[1].remote_pci = Answer::Value("00000000:2C:00.0".to_owned());
        f.links[2].remote_kind = Answer::Value(255);
        f.links[3].remote_kind = Answer::Value(2);
        f.links[3].remote_pci = Answer::Value("garbage".to_owned());
        f.links[4].active = Answer::Value(false);
    });
    let machine = machine(record);
    let links = &machine.gpus().gpus[0].links;
    let at = |text: &str| Some(text.parse().expect("an address"));
    assert_eq!(links[0].remote, LinkEnd::Gpu(at("0000:06:00.0")));
    assert_eq!(links[1].remote, LinkEnd::Gpu(at(TWO[1])));
    assert_eq!(links[2].remote, LinkEnd::Unknown);
    assert_eq!(links[3].remote, LinkEnd::Switch(None));
    assert_eq!(machine.gpus().gpus[0].active_links().count(), 4);
}

#[test]
fn an_unnamed_end_at_a_switch_of_the_bus_is_a_switch() {
    let (dir, gpus) = hgx();
    let gpus: Vec<&str> = gpus.iter().map(String::as_str).collect();
    let mut record = nvml(&gpus);
    change(&mut record, 0, |f| f.links[0].remote_kind = Answer::Value(255));
    let nvml = NvmlOutcome::Read(record);
    let machine = Machine::replay(Recording { host: dir.host(), nvml, devices: Vec::new() });
    assert!(matches!(machine.gpus().gpus[0].links[0].remote, LinkEnd::Switch(Some(_))));
    assert_eq!(machine.gpus().gpus[7].numa_node, Some(1), "the node is sysfs's");
}

#[test]
fn a_gpu_off_the_bus_is_listed_as_lost() {
    // Either the device cannot be opened, or any later call is the first to notice.
    let mut unopened = nvml(&TWO);
    unopened.devices[1] = DeviceRecord { index: 1, facts: Answer::Refused(Refusal::GpuLost) };
    let mut noticed = nvml(&TWO);
    change(&mut noticed, 1, |f| f.memory_bytes = Answer::Refused(Refusal::GpuLost));
    let mut link = nvml(&TWO);
    change(&mut link, 1, |f| f.links[2].active = Answer::Refused(Refusal::GpuLost));
    let mut reset = nvml(&TWO);
    change(&mut reset, 1, |f| f.fabric = Answer::Refused(Refusal::ResetRequired));
    for (record, reason) in [
        (unopened, "off the bus"),
        (noticed, "off the bus"),
        (link, "off the bus"),
        (reset, "needs a reset"),
    ] {
        let machine = machine(record);
        assert_eq!(machine.gpus().gpus.len(), 1);
        let lost = &machine.gpus().lost[0];
        assert_eq!(lost.index, 1);
        assert!(lost.reason.contains(reason), "{}", lost.reason);
        assert!(machine.gpus().p2p.is_empty(), "no verdicts on pairs with a lost GPU");
        let error = machine.can_access(&uuid(0), &uuid(1)).expect_err("lost");
        assert!(matches!(error, TopologyError::Gpu { .. }));
        if lost.uuid.is_some() {
            assert!(error.to_string().contains(reason), "{error}");
        }
    }
}

#[test]
fn mig_is_a_state_and_forbids_peer_access() {
    let mut record = nvml(&TWO);
    change(&mut record, 0, |f| {
        f.mig_mode = Answer::Value((1, 1));
        f.mig_devices = vec![Answer::Value("MIG-1".to_owned())];
    });
    let mut machine = machine(record);
    assert_eq!(machine.gpus().gpus[0].mig, Mig::On { devices: vec!["MIG-1".to_owned()] });
    let error = machine.can_access(&uuid(0), &uuid(1)).expect_err("MIG").to_string();
    assert!(error.contains("MIG is on"), "{error}");
    // A slice has a UUID and SMs of its own and belongs to its GPU by PCI address.
    let slice = DeviceAttributes { sm_count: 16, ..attributes(0, "MIG-1", TWO[0]) };
    let sms = synthetic(&[14, 2], &[1, 2, 4, 8]);
    machine.attach(CudaDevice::new(slice, Some(sms)).expect("sound")).expect("it belongs there");
    assert_eq!(machine.gpu_of(&machine.devices()[0]).map(|g| g.index), Some(0));
}

#[test]
fn an_old_library_leaves_gaps_but_no_error() {
    let mut record = nvml(&TWO);
    let missing = || Refusal::MissingSymbol;
    change(&mut record, 0, |f| {
        f.fabric = Answer::Refused(missing());
        f.mig_mode = Answer::Refused(missing());
        f.numa_node = Answer::Refused(missing());
        f.links.iter_mut().for_each(|l| l.speed = Answer::Refused(missing()));
        f.name = Answer::Refused(Refusal::Other("garbled".to_owned()));
    });
    record.cuda = Answer::Value(-3);
    let machine = machine(record);
    let gpu = &machine.gpus().gpus[0];
    assert_eq!((&gpu.fabric, &gpu.mig, &gpu.name), (&Fabric::Unsupported, &Mig::Off, &None));
    assert_eq!((gpu.link_mbytes(), machine.gpus().cuda), (None, None));
}

#[test]
fn fabric_states() {
    let state = |state, status| {
        let mut record = nvml(&TWO);
        change(&mut record, 0, |f| {
            if let Answer::Value(fabric) = &mut f.fabric {
                (fabric.state, fabric.status) = (state, status);
            }
        });
        machine(record).gpus().gpus[0].fabric.clone()
    };
    assert_eq!(state(0, 0), Fabric::Unsupported);
    assert_eq!(state(2, 0), Fabric::Pending);
    assert_eq!(state(3, 999), Fabric::Failed(999));
    assert_eq!(state(77, 0), Fabric::Unknown);
}

#[test]
fn peers_are_judged_by_uuid_whatever_cuda_shows() {
    let mut record = nvml(&["0000:1b:00.0", "0000:2c:00.0", "0000:3d:00.0"]);
    record.p2p[0].write = Answer::Value(P2pStatus::Topology);
    record.p2p[1].read = Answer::Refused(Refusal::Other("unknown error".to_owned()));
    let mut machine = machine(record);
    assert_eq!(machine.can_access(&uuid(0), &uuid(1)), Ok(false));
    assert_eq!(machine.can_access(&uuid(1), &uuid(0)), Ok(true), "the matrix is directed");
    assert_eq!(machine.p2p(&uuid(0), &uuid(2)).map(|p| p.read), Some(P2pStatus::Unknown));
    // This process sees the last GPU alone, as CUDA's ordinal 0.
    let only = attributes(0, &uuid(2), "0000:3d:00.0");
    machine.attach(CudaDevice::new(only, Some(h200())).expect("sound")).expect("NVML shows it");
    assert_eq!(machine.gpu_of(&machine.devices()[0]).map(|g| g.index), Some(2));
    assert!(machine.device_of(&machine.gpus().gpus[0]).is_none());
    assert_eq!(machine.can_access(&uuid(2), &uuid(0)), Ok(true), "also to hidden peers");
    let stranger = CudaDevice::new(attributes(1, "GPU-x", "0000:99:00.0"), None).expect("sound");
    assert!(matches!(machine.attach(stranger), Err(TopologyError::Gpu { .. })));
    assert_eq!(machine.devices().len(), 1);
}

#[test]
fn a_map_of_another_device_is_refused() {
    let wrong = synthetic(&[16, 16], &[1, 2]);
    let error = CudaDevice::new(attributes(0, "GPU-0", TWO[0]), Some(wrong)).expect_err("32 SMs");
    assert!(error.to_string().contains("32 SMs"), "{error}");
}

#[test]
fn attached_devices_survive_recording() {
    let mut machine = machine(nvml(&TWO));
    let device = CudaDevice::new(attributes(0, &uuid(0), TWO[0]), Some(h200())).expect("sound");
    machine.attach(device).expect("NVML shows it");
    let back = Machine::from_json(&machine.to_json().expect("writable")).expect("readable");
    assert_eq!(back, machine);
    let sms = back.devices()[0].sms.as_ref().expect("its map");
    assert_eq!(sms.capacity(16).clusters, 7);
}

#[test]
fn missing_and_foreign_libraries_are_errors_with_a_remedy() {
    let cases =
        [("libno-such-nvml.so.9", "cannot be opened"), ("libc.so.6", "too old or is not NVML")];
    for (library, detail) in cases {
        match read_nvml(library) {
            Err(error @ TopologyError::Library { .. }) => {
                let text = error.to_string();
                assert!(text.contains(library) && text.contains(detail), "{text}");
                assert!(text.contains("driver"), "the remedy: {text}");
            }
            other => panic!("{library}: {other:?}"),
        }
    }
}

#[test]
fn records_survive_json() {
    let mut record = nvml(&TWO);
    record.devices[0].facts = Answer::Value(facts(0, TWO[0]));
    record.devices[1].facts = Answer::Refused(Refusal::Other("odd".to_owned()));
    let text = serde_json::to_string(&record).expect("writable");
    assert_eq!(serde_json::from_str::<NvmlRecord>(&text).expect("readable"), record);
}
