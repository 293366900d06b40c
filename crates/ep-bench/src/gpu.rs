//! GPUs of this process: opened, described, probed.

use std::time::{Duration, Instant};

use ep_kernels::cuda::{
    Compiler, CudaError, Device, DeviceProperties, Driver, ObserveOptions, SmTools,
};
use ep_runtime::sched::sm_observation;
use ep_topology::{
    CudaDevice, DeviceAttributes, Machine, PciAddress, SmCache, SmMap, SmObservation,
};

/// Longest that looking at one GPU's SMs may take.
const PROBE_LIMIT: Duration = Duration::from_secs(2);

/// What the driver says, in ep-topology's terms.
pub fn attributes(p: &DeviceProperties) -> DeviceAttributes {
    let (domain, bus, device) = p.pci;
    DeviceAttributes {
        ordinal: p.ordinal as u32,
        uuid: p.uuid_text(),
        pci: format!("{domain:08x}:{bus:02x}:{device:02x}.0").parse::<PciAddress>().ok(),
        sm_count: p.sms,
        shared_per_sm: p.shared_per_sm,
        shared_per_block: p.shared_per_block,
        l2_bytes: u64::from(p.l2_bytes),
        capability: p.capability,
    }
}

/// Adds every visible GPU to `machine`, its SMs from the cache unless `fresh`. With `repeat`, probes each so
/// many times and compares. Gives notes, and whether repeated probes were equal and in time.
pub fn attach(machine: &mut Machine, fresh: bool, repeat: Option<u32>) -> (Vec<String>, bool) {
    let (mut notes, mut good) = (Vec::new(), true);
    let driver = match Driver::get() {
        Ok(driver) => driver,
        Err(error) => return (vec![format!("GPUs: {error}")], repeat.is_none()),
    };
    let count = driver.device_count().unwrap_or(0);
    for ordinal in 0..count {
        if let Err(error) = one(machine, ordinal, fresh, repeat, &mut notes, &mut good) {
            notes.push(format!("GPU {ordinal}: {error}"));
            good &= repeat.is_none();
        }
    }
    (notes, good)
}

fn one(
    machine: &mut Machine,
    ordinal: usize,
    fresh: bool,
    repeat: Option<u32>,
    notes: &mut Vec<String>,
    good: &mut bool,
) -> Result<(), String> {
    let device = Device::open(ordinal).map_err(|e| e.to_string())?;
    let attributes = attributes(device.properties());
    let driver = match &machine.gpus().driver {
        Some(version) => version.clone(),
        None => format!("cuda-{}", device.properties().driver),
    };
    let cache = SmCache::of_user();
    let cached = cache.as_ref().filter(|_| !fresh && repeat.is_none());
    let cached = cached.and_then(|cache| cache.load(&attributes.uuid, &driver));
    let map = match cached {
        Some(map) if map.sm_count() == attributes.sm_count => map,
        _ => {
            let start = Instant::now();
            let probed = probe(&device, repeat.unwrap_or(1));
            let (map, times, equal) = match probed {
                Ok(probed) => probed,
                Err(why) => {
                    let attached = CudaDevice::new(attributes, None).map_err(|e| e.to_string())?;
                    machine.attach(attached).map_err(|e| e.to_string())?;
                    return Err(format!("SM domains: {why}"));
                }
            };
            let slowest = times.iter().max().copied().unwrap_or_default();
            *good &= equal && slowest <= PROBE_LIMIT;
            notes.push(format!(
                "GPU {ordinal}: {} domains, {} probes{} in {:.0} to {:.0} ms, {:.0} ms with loading",
                map.domains().len(),
                times.len(),
                if equal { ", all equal," } else { " that DIFFER," },
                millis(times.iter().min().copied().unwrap_or_default()),
                millis(slowest),
                millis(start.elapsed()),
            ));
            if let Some(Err(error)) = cache.map(|c| c.store(&attributes.uuid, &driver, &map)) {
                notes.push(format!("GPU {ordinal}: not cached: {error}"));
            }
            map
        }
    };
    let observation = SmObservation::from(map);
    let attached = CudaDevice::new(attributes, Some(observation)).map_err(|e| e.to_string())?;
    machine.attach(attached).map_err(|e| e.to_string())
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Probes `times` times: the first map, how long each took, and whether all found the same domains and
/// active clusters.
fn probe(device: &Device, times: u32) -> Result<(SmMap, Vec<Duration>, bool), String> {
    let compiler = Compiler::get().map_err(|e| e.to_string())?;
    let tools = SmTools::load(device, compiler).map_err(|e| e.to_string())?;
    let (mut first, mut took, mut equal): (Option<SmMap>, _, _) = (None, Vec::new(), true);
    for _ in 0..times {
        let start = Instant::now();
        let map = look(&tools).map_err(|e| e.to_string())?;
        took.push(start.elapsed());
        match &first {
            None => first = Some(map),
            Some(first) => equal &= same(first, &map),
        }
    }
    first.map(|map| (map, took, equal)).ok_or_else(|| "not probed".into())
}

fn look(tools: &SmTools) -> Result<SmMap, CudaError> {
    let seen = tools.observe(&ObserveOptions::default())?;
    SmMap::new(sm_observation(&seen))
        .map_err(|error| CudaError::Inconsistent { operation: "SM map", reason: error.to_string() })
}

/// Same SMs in the same domains, as many active clusters. Which sets of SMs clusters ran on, and what a launch
/// left free, vary from launch to launch.
fn same(a: &SmMap, b: &SmMap) -> bool {
    let domains = |map: &SmMap| map.domains().iter().map(|d| d.sms.clone()).collect::<Vec<_>>();
    domains(a) == domains(b)
        && a.unseen() == b.unseen()
        && a.observation().max_active_clusters == b.observation().max_active_clusters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_probes_are_compared_by_domain() {
        let map = |together: &[&[u32]], left: &[u32]| {
            SmMap::new(SmObservation {
                sm_count: 4,
                together: together.iter().map(|sms| sms.to_vec()).collect(),
                left_free: vec![left.to_vec()],
                max_active_clusters: [(2, 2)].into(),
                ..SmObservation::default()
            })
            .unwrap()
        };
        let pairs: [&[u32]; 2] = [&[0, 1], &[2, 3]];
        assert!(same(&map(&pairs, &[0]), &map(&pairs, &[3])));
        assert!(!same(&map(&pairs, &[0]), &map(&[&[0, 2], &[1, 3]], &[0])));
    }

    #[test]
    fn without_a_driver_the_note_names_it() {
        if Driver::get().is_ok() {
            return;
        }
        let mut machine = Machine::replay(ep_topology::Recording::default());
        let (notes, good) = attach(&mut machine, false, None);
        assert!(good && notes.len() == 1 && notes[0].contains("libcuda"), "{notes:?}");
        assert!(!attach(&mut machine, false, Some(2)).1);
    }
}
