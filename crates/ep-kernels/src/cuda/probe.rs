//! Which SMs there are, and which of them can hold a cluster together.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::compile::{Arch, Compiler};
use super::device::{Device, DeviceProperties};
use super::error::{CudaError, invalid};
use super::holder::HOLDER;
use super::launch::{LARGEST_CLUSTER, LaunchAttributes, LaunchConfig};
use super::memory::{MappedHost, Plain};
use super::module::{Kernel, KernelParams, Module};
use super::source::{KernelSource, layout};
use super::stream::Stream;

pub(crate) static SM_PROBE: KernelSource = KernelSource {
    name: "sm_probe.cu",
    kernels: &["sm_probe"],
    text: include_str!("../../kernels/sm_probe.cu"),
    layouts: &[
        layout!(ProbeRecord {
            start_ns,
            smid,
            nsmid,
            cluster,
            cluster_size,
            cluster_rank,
            written
        }),
        layout!(ProbeParams { records, hold_ns, record_count, reserved }),
    ],
};

/// Where one block of the probe ran.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProbeRecord {
    /// The GPU's global timer when the block started, nanoseconds.
    pub start_ns: u64,
    /// `%smid`.
    pub smid: u32,
    /// `%nsmid`: ids are below it, but need not be contiguous.
    pub nsmid: u32,
    /// The cluster's number in the grid; the block's own where there are no clusters.
    pub cluster: u32,
    /// Blocks in that cluster.
    pub cluster_size: u32,
    /// The block's number in its cluster.
    pub cluster_rank: u32,
    /// 1 once the block has run.
    pub written: u32,
}

// SAFETY: repr(C), integers only, no padding (8 + 6 * 4).
unsafe impl Plain for ProbeRecord {}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct ProbeParams {
    records: u64,
    hold_ns: u64,
    record_count: u32,
    reserved: u32,
}

// SAFETY: repr(C), integers only, no padding (8 + 8 + 4 + 4).
unsafe impl Plain for ProbeParams {}
// SAFETY: the struct of kernels/sm_probe.cu, whose layout checks are compiled against this one's.
unsafe impl KernelParams for ProbeParams {}

const _: () = assert!(size_of::<ProbeRecord>() == 32 && size_of::<ProbeParams>() == 24);
const _: () = assert!(std::mem::offset_of!(ProbeRecord, written) == 28);
const _: () = assert!(std::mem::offset_of!(ProbeParams, record_count) == 16);

/// Longest a probe's blocks may be told to stay.
const LONGEST_PROBE: Duration = Duration::from_secs(1);
/// `CUDA_ERROR_INVALID_CLUSTER_SIZE`.
const INVALID_CLUSTER_SIZE: i32 = 912;
/// Cluster sizes asked for. Beyond the powers of two, sizes that fill a domain of 16 or 18 SMs differently.
const SIZES: [u32; 8] = [1, 2, 4, 8, 10, 12, 14, 16];

/// A launch of the SM probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeSpec {
    /// Blocks of 32 threads.
    pub blocks: u32,
    /// Attributes of the launch.
    pub attributes: LaunchAttributes,
    /// How long each block stays after its start; at most a second.
    pub hold: Duration,
    /// Dynamic shared memory per block, bytes. `None`: all there is, so that an SM holds one block.
    pub shared_bytes: Option<u32>,
}

impl ProbeSpec {
    /// `blocks` blocks, one per SM, which stay 100 µs: longer than it takes to place a grid.
    pub fn one_per_sm(blocks: u32, attributes: LaunchAttributes) -> Self {
        ProbeSpec { blocks, attributes, hold: Duration::from_micros(100), shared_bytes: None }
    }
}

/// The kernels that observe and occupy SMs, loaded on a device.
#[derive(Debug, Clone)]
pub struct SmTools {
    pub(crate) device: Device,
    pub(crate) probe: Kernel,
    pub(crate) holder: Kernel,
}

impl SmTools {
    /// Compiles them, or takes them from the cache, and loads them.
    ///
    /// # Errors
    /// A device older than compute capability 8.0, or a failure of compiler or driver.
    pub fn load(device: &Device, compiler: &Compiler) -> Result<SmTools, CudaError> {
        let arch = Arch::of(device.properties())?;
        let load = |source: &KernelSource| -> Result<Kernel, CudaError> {
            Module::load(device, &compiler.cubin(source, arch)?)?.kernel(source.kernels[0])
        };
        Ok(SmTools { device: device.clone(), probe: load(&SM_PROBE)?, holder: load(&HOLDER)? })
    }

    /// The device they are loaded on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The probe's kernel, for occupancy queries.
    pub fn probe_kernel(&self) -> &Kernel {
        &self.probe
    }

    /// The holder's kernel, for occupancy queries.
    pub fn holder_kernel(&self) -> &Kernel {
        &self.holder
    }

    /// The launch that `spec` stands for.
    pub fn probe_config(&self, spec: &ProbeSpec) -> LaunchConfig {
        let shared_bytes =
            spec.shared_bytes.unwrap_or(whole_sm(self.device.properties(), &self.probe));
        LaunchConfig { grid: spec.blocks, block: 32, shared_bytes, attributes: spec.attributes }
    }

    /// Launches the probe and returns at once.
    ///
    /// # Errors
    /// A hold of more than a second, those of [`LaunchConfig::validate`], or the driver's.
    pub fn start_probe<'s>(
        &self,
        stream: &'s Stream,
        spec: &ProbeSpec,
    ) -> Result<ProbeRun<'s>, CudaError> {
        if spec.hold > LONGEST_PROBE {
            return invalid(
                "start_probe",
                format!("a hold of {:?}; at most {LONGEST_PROBE:?}", spec.hold),
            );
        }
        let config = self.probe_config(spec);
        config.validate(self.device.properties())?;
        let records = MappedHost::<ProbeRecord>::zeroed(&self.device, spec.blocks as usize)?;
        self.launch_probe(stream, &config, spec.hold, &records)?;
        Ok(ProbeRun { stream, records: Some(records) })
    }

    fn launch_probe(
        &self,
        stream: &Stream,
        config: &LaunchConfig,
        hold: Duration,
        records: &MappedHost<ProbeRecord>,
    ) -> Result<(), CudaError> {
        let params = ProbeParams {
            records: records.device_address(),
            hold_ns: hold.as_nanos() as u64,
            record_count: records.len() as u32,
            reserved: 0,
        };
        // SAFETY: `records` holds `record_count` records and is freed only after the stream has completed (or
        // never); the kernel writes nothing else.
        unsafe { self.probe.launch(stream.raw(), config, &params) }
    }

    /// Observes which SMs there are and which share clusters. Takes some tens of milliseconds on a GPU that is
    /// otherwise idle; beside other work it sees less.
    ///
    /// # Errors
    /// Not done within `options.limit`, records that contradict the launch, or the driver's.
    pub fn observe(&self, options: &ObserveOptions) -> Result<SmObservations, CudaError> {
        let start = Instant::now();
        let properties = self.device.properties();
        let stream = self.device.stream(0)?;
        let mut records = MappedHost::zeroed(&self.device, properties.sms as usize)?;
        let mut seen = Seen::default();
        let mut sizes = Vec::new();
        for (size, max_active) in self.cluster_sizes()? {
            let mut clusters = BTreeSet::new();
            for _ in 0..if max_active == 0 { 0 } else { options.launches } {
                let left = options.limit.saturating_sub(start.elapsed());
                let launched =
                    self.probe_once(&stream, size, max_active, records, left, &mut seen)?;
                records = launched.0;
                clusters.extend(launched.1);
            }
            // A cluster of one says nothing about its neighbours.
            let clusters = if size == 1 { Vec::new() } else { clusters.into_iter().collect() };
            sizes.push(ClusterObservation { size, max_active, clusters });
        }
        Ok(SmObservations {
            device: properties.clone(),
            sm_ids: seen.sm_ids.into_iter().collect(),
            sizes,
            launches: seen.launches,
            disturbed: seen.disturbed,
            elapsed: start.elapsed(),
        })
    }

    /// Sizes to launch, with how many such clusters fit at once; 0 for sizes this device does not have.
    fn cluster_sizes(&self) -> Result<Vec<(u32, u32)>, CudaError> {
        let properties = self.device.properties();
        if !properties.clusters {
            return Ok(vec![(1, properties.sms)]);
        }
        let free = ProbeSpec::one_per_sm(LARGEST_CLUSTER, LaunchAttributes::plain());
        let largest = self.probe.max_cluster_size(&self.probe_config(&free), None)?;
        let mut sizes = Vec::new();
        for size in SIZES.into_iter().filter(|size| *size <= largest) {
            let spec = ProbeSpec::one_per_sm(size, LaunchAttributes::plain().with_cluster(size));
            let max_active = match self.probe.max_active_clusters(&self.probe_config(&spec), None) {
                Err(CudaError::Driver { code: INVALID_CLUSTER_SIZE, .. }) => 0,
                other => other?,
            };
            sizes.push((size, max_active.min(properties.sms / size)));
        }
        Ok(sizes)
    }

    /// One launch as wide as fits. Takes the records and gives them back, unless the launch did not end.
    fn probe_once(
        &self,
        stream: &Stream,
        size: u32,
        max_active: u32,
        records: MappedHost<ProbeRecord>,
        left: Duration,
        seen: &mut Seen,
    ) -> Result<(MappedHost<ProbeRecord>, Vec<Vec<u32>>), CudaError> {
        let attributes = match size {
            1 => LaunchAttributes::plain(),
            _ => LaunchAttributes::plain().with_cluster(size),
        };
        let spec = ProbeSpec::one_per_sm(max_active * size, attributes);
        records.clear();
        self.launch_probe(stream, &self.probe_config(&spec), spec.hold, &records)?;
        if let Err(error) = stream.wait("observe", left) {
            records.leak();
            return Err(error);
        }
        let list: Vec<_> =
            (0..spec.blocks as usize).filter_map(|block| records.read(block)).collect();
        let clusters = group(&list, size)?;
        seen.add(&list);
        Ok((records, clusters))
    }
}

/// All the shared memory a block of this kernel may have, so that an SM holds no second block of any kernel that
/// needs some too.
pub(crate) fn whole_sm(properties: &DeviceProperties, kernel: &Kernel) -> u32 {
    properties.shared_per_block.saturating_sub(kernel.resources().shared_bytes)
}

/// A probe that was launched. Dropping it waits a little; what the GPU may still write is never freed.
#[derive(Debug)]
pub struct ProbeRun<'s> {
    stream: &'s Stream,
    records: Option<MappedHost<ProbeRecord>>,
}

impl ProbeRun<'_> {
    /// Whether the stream has completed.
    ///
    /// # Errors
    /// A failure on the device.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.stream.is_idle()
    }

    /// Waits for the stream and returns a record per block.
    ///
    /// # Errors
    /// Not done in time, a failure on the device, or a block that did not run.
    pub fn finish(mut self, limit: Duration) -> Result<Vec<ProbeRecord>, CudaError> {
        self.stream.wait("SM probe", limit)?;
        let Some(records) = self.records.take() else { return Ok(Vec::new()) };
        let list: Vec<_> = (0..records.len()).filter_map(|block| records.read(block)).collect();
        if let Some(block) = list.iter().position(|record| record.written != 1) {
            return inconsistent(format!("block {block} of {} left no record", list.len()));
        }
        Ok(list)
    }
}

impl Drop for ProbeRun<'_> {
    fn drop(&mut self) {
        let Some(records) = self.records.take() else { return };
        if self.stream.wait("SM probe", LONGEST_PROBE + LONGEST_PROBE).is_err() {
            records.leak();
        }
    }
}

/// How [`SmTools::observe`] works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObserveOptions {
    /// Launches per cluster size. More of them show more of the pairs of SMs that may share a cluster.
    pub launches: u32,
    /// For all launches together.
    pub limit: Duration,
}

impl Default for ObserveOptions {
    fn default() -> Self {
        ObserveOptions { launches: 32, limit: Duration::from_secs(2) }
    }
}

/// Which SM ids were seen in one cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterObservation {
    /// Blocks per cluster.
    pub size: u32,
    /// How many such clusters fit at once, one block per SM, as the driver says.
    pub max_active: u32,
    /// Each distinct set of SM ids that held one, ascending. Empty for size 1.
    pub clusters: Vec<Vec<u32>>,
}

/// What was observed of a device's SMs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SmObservations {
    /// The device, whose UUID and driver version the observation belongs to.
    pub device: DeviceProperties,
    /// Every SM id seen, ascending.
    pub sm_ids: Vec<u32>,
    /// By cluster size, ascending.
    pub sizes: Vec<ClusterObservation>,
    /// Launches made.
    pub launches: u32,
    /// Launches in which an SM ran two blocks, as happens beside other work.
    pub disturbed: u32,
    /// How long it took.
    pub elapsed: Duration,
}

/// Loads the probe with the process's compiler and observes a device.
///
/// # Errors
/// Those of [`Compiler::get`], [`SmTools::load`] and [`SmTools::observe`].
pub fn observe_sms(device: &Device) -> Result<SmObservations, CudaError> {
    SmTools::load(device, Compiler::get()?)?.observe(&ObserveOptions::default())
}

#[derive(Default)]
struct Seen {
    sm_ids: BTreeSet<u32>,
    launches: u32,
    disturbed: u32,
}

impl Seen {
    fn add(&mut self, records: &[ProbeRecord]) {
        let of_launch: BTreeSet<u32> = records.iter().map(|record| record.smid).collect();
        self.launches += 1;
        self.disturbed += u32::from(of_launch.len() < records.len());
        self.sm_ids.extend(of_launch);
    }
}

/// The SM ids of each cluster of a launch, ascending.
fn group(records: &[ProbeRecord], size: u32) -> Result<Vec<Vec<u32>>, CudaError> {
    let mut clusters =
        vec![Vec::with_capacity(size as usize); records.len() / size.max(1) as usize];
    for (block, record) in records.iter().enumerate() {
        if record.written != 1 {
            return inconsistent(format!("block {block} of {} left no record", records.len()));
        }
        if record.cluster_size != size {
            let found = record.cluster_size;
            return inconsistent(format!(
                "block {block} ran in a cluster of {found}, launched {size}"
            ));
        }
        if record.smid >= record.nsmid {
            return inconsistent(format!("SM {} of {}", record.smid, record.nsmid));
        }
        match clusters.get_mut(record.cluster as usize) {
            Some(cluster) => cluster.push(record.smid),
            None => {
                return inconsistent(format!("block {block} ran in cluster {}", record.cluster));
            }
        }
    }
    for cluster in &mut clusters {
        if cluster.len() != size as usize {
            return inconsistent(format!("a cluster of {} blocks, launched {size}", cluster.len()));
        }
        cluster.sort_unstable();
    }
    Ok(clusters)
}

fn inconsistent<T>(reason: String) -> Result<T, CudaError> {
    Err(CudaError::Inconsistent { operation: "SM probe", reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(cluster: u32, cluster_rank: u32, smid: u32) -> ProbeRecord {
        ProbeRecord {
            start_ns: 1,
            smid,
            nsmid: 132,
            cluster,
            cluster_size: 2,
            cluster_rank,
            written: 1,
        }
    }

    #[test]
    fn clusters_are_grouped_and_sorted() {
        let records = [record(1, 0, 7), record(0, 0, 3), record(1, 1, 6), record(0, 1, 9)];
        assert_eq!(group(&records, 2), Ok(vec![vec![3, 9], vec![6, 7]]));
    }

    #[test]
    fn contradictions_are_errors() {
        let good = [record(0, 0, 3), record(0, 1, 9)];
        let cases: [(fn(&mut [ProbeRecord; 2]), &str); 5] = [
            (|r| r[1].written = 0, "block 1 of 2 left no record"),
            (|r| r[0].cluster_size = 4, "cluster of 4, launched 2"),
            (|r| r[0].smid = 132, "SM 132 of 132"),
            (|r| r[1].cluster = 1, "ran in cluster 1"),
            (|r| *r = [record(0, 0, 3); 2], ""),
        ];
        for (spoil, expected) in cases {
            let mut records = good;
            spoil(&mut records);
            match group(&records, 2) {
                Err(error) => assert!(error.to_string().contains(expected), "{error}"),
                // Two blocks of a cluster on one SM are no contradiction: that is what `disturbed` counts.
                Ok(_) => assert!(expected.is_empty()),
            }
        }
    }

    #[test]
    fn an_sm_that_ran_twice_disturbs_a_launch() {
        let mut seen = Seen::default();
        seen.add(&[record(0, 0, 3), record(0, 1, 9)]);
        seen.add(&[record(0, 0, 3), record(0, 1, 3)]);
        assert_eq!((seen.launches, seen.disturbed), (2, 1));
        assert_eq!(seen.sm_ids.into_iter().collect::<Vec<_>>(), [3, 9]);
    }
}
