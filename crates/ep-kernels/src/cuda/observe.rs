//! Which SMs there are, and which of them can hold a cluster together.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::compile::Compiler;
use super::device::{Device, DeviceProperties};
use super::error::CudaError;
use super::launch::{LARGEST_CLUSTER, LaunchAttributes};
use super::memory::MappedHost;
use super::probe::{ProbeRecord, ProbeSpec, SmTools, inconsistent};
use super::stream::Stream;

/// `CUDA_ERROR_INVALID_CLUSTER_SIZE`.
const INVALID_CLUSTER_SIZE: i32 = 912;
/// Cluster sizes asked for. Beyond the powers of two, sizes that fill a domain of 16 or 18 SMs
/// differently.
const SIZES: [u32; 8] = [1, 2, 4, 8, 10, 12, 14, 16];

impl SmTools {
    /// Observes which SMs there are and which share clusters. Takes some tens of milliseconds on a
    /// GPU that is otherwise idle; beside other work it sees less.
    ///
    /// # Errors
    /// Not done within `options.limit`, records that contradict the launch, or the driver's.
    pub fn observe(&self, options: &ObserveOptions) -> Result<SmObservations, CudaError> {
        let start = Instant::now();
        let properties = self.device.properties();
        let stream = self.device.stream(0)?;
        let mut run = Observing {
            tools: self,
            stream: &stream,
            until: start + options.limit,
            records: Some(MappedHost::zeroed(&self.device, properties.sms as usize)?),
            seen: Seen::default(),
        };
        let mut sizes = Vec::new();
        for (size, max_active) in self.cluster_sizes()? {
            let launches = if max_active == 0 { 0 } else { options.launches };
            let clusters = run.clusters(size, max_active, launches)?;
            sizes.push(ClusterObservation { size, max_active, clusters });
        }
        let left_free = (1..=options.margins.min(properties.sms.saturating_sub(1)))
            .map(|margin| run.left_free(properties.sms - margin))
            .collect::<Result<_, _>>()?;
        Ok(SmObservations {
            device: properties.clone(),
            sm_ids: run.seen.sm_ids.into_iter().collect(),
            sizes,
            left_free,
            launches: run.seen.launches,
            disturbed: run.seen.disturbed,
            elapsed: start.elapsed(),
        })
    }

    /// Sizes to launch, with how many such clusters fit at once; 0 for sizes this device does not
    /// have.
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
}

/// An observation under way.
struct Observing<'a> {
    tools: &'a SmTools,
    stream: &'a Stream,
    until: Instant,
    // Gone after a launch that did not end: the GPU may still write them.
    records: Option<MappedHost<ProbeRecord>>,
    seen: Seen,
}

impl Observing<'_> {
    /// The distinct clusters of this size that `launches` launches of as many as fit show.
    fn clusters(
        &mut self,
        size: u32,
        max_active: u32,
        launches: u32,
    ) -> Result<Vec<Vec<u32>>, CudaError> {
        let attributes = match size {
            1 => LaunchAttributes::plain(),
            _ => LaunchAttributes::plain().with_cluster(size),
        };
        let mut clusters = BTreeSet::new();
        for _ in 0..launches {
            let list = self.launch(&ProbeSpec::one_per_sm(max_active * size, attributes))?;
            clusters.extend(group(&list, size)?);
        }
        // A cluster of one says nothing about its neighbours.
        Ok(if size == 1 { Vec::new() } else { clusters.into_iter().collect() })
    }

    /// The SMs that a plain launch of so many blocks leaves free, of those seen so far.
    fn left_free(&mut self, blocks: u32) -> Result<Vec<u32>, CudaError> {
        let list = self.launch(&ProbeSpec::one_per_sm(blocks, LaunchAttributes::plain()))?;
        let used: BTreeSet<u32> = list.iter().map(|record| record.smid).collect();
        Ok(self.seen.sm_ids.difference(&used).copied().collect())
    }

    fn launch(&mut self, spec: &ProbeSpec) -> Result<Vec<ProbeRecord>, CudaError> {
        let Some(records) = self.records.take() else {
            return inconsistent("an earlier launch did not end".into());
        };
        records.clear();
        self.tools.launch_probe(
            self.stream,
            &self.tools.probe_config(spec),
            spec.hold,
            (records.device_address(), records.len()),
        )?;
        let left = self.until.saturating_duration_since(Instant::now());
        if let Err(error) = self.stream.wait("observe", left) {
            records.leak();
            // Its code must stay loaded too.
            std::mem::forget(self.tools.probe.clone());
            return Err(error);
        }
        let list: Vec<_> =
            (0..spec.blocks as usize).filter_map(|block| records.read(block)).collect();
        self.records = Some(records);
        self.seen.add(&list);
        Ok(list)
    }
}

/// How [`SmTools::observe`] works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObserveOptions {
    /// Launches per cluster size. More of them show more of the pairs of SMs that may share a
    /// cluster.
    pub launches: u32,
    /// Launches of fewer blocks than SMs are made for every margin from 1 to this.
    pub margins: u32,
    /// For all launches together.
    pub limit: Duration,
}

impl Default for ObserveOptions {
    fn default() -> Self {
        ObserveOptions { launches: 32, margins: 64, limit: Duration::from_secs(2) }
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
    /// The SMs that a plain launch of one block per SM left free, for margins of 1, 2, … SMs: where
    /// this device leaves room when nothing tells it to.
    pub left_free: Vec<Vec<u32>>,
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
        type Spoil = fn(&mut [ProbeRecord; 2]);
        let cases: [(Spoil, &str); 5] = [
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
                // Two blocks of a cluster on one SM are no contradiction: that is what `disturbed`
                // counts.
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
