//! Which SMs can share a thread-block cluster, from observations alone.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::TopologyError;

/// Largest number of SMs (and largest `%smid` plus one) that is believed.
const MAX_SMS: u32 = 4096;

/// What a probe saw on one GPU: which SMs (`%smid`) ran blocks of one cluster, and how many
/// clusters the occupancy query allows.
///
/// The probe's blocks must fill an SM each (by shared memory), so that clusters count SMs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmObservation {
    /// SMs of the device, from its driver attribute.
    pub sm_count: u32,
    /// Cluster size in blocks → the clusters seen at that size, each as the SMs it ran on.
    #[serde(default)]
    pub clusters: BTreeMap<u32, Vec<Vec<u32>>>,
    /// Cluster size → `cuOccupancyMaxActiveClusters` at that size. Size 1 is optional; 0 says that
    /// the size cannot run.
    #[serde(default)]
    pub max_active_clusters: BTreeMap<u32, u32>,
    /// SMs known to share clusters where the size at which they did was not kept.
    #[serde(default)]
    pub together: Vec<Vec<u32>>,
    /// The SMs that a kernel of fewer one-per-SM blocks than SMs left free, one set a launch; the
    /// launches should cover the margins of interest. Evidence of how this device fills its SMs.
    #[serde(default)]
    pub left_free: Vec<Vec<u32>>,
}

/// A set of SMs within which clusters are placed; no cluster spans two domains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmDomain {
    /// `%smid`s, ascending.
    pub sms: Vec<u32>,
    /// Largest cluster size seen here; `None` where sizes were not kept.
    pub largest_seen: Option<u32>,
}

/// How many clusters of one size a device holds at once, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Cluster size in blocks.
    pub cluster: u32,
    /// Clusters active at once on the whole device, every SM free; a lower bound if not `observed`.
    pub clusters: u32,
    /// Clusters that each domain holds by its size, in the order of [`SmMap::domains`]; 0 for
    /// domains that are known to hold none of this size.
    pub per_domain: Vec<u32>,
    /// Clusters of `per_domain` that the device does not hold although the sizes of the domains
    /// would allow it, and that no domain can be blamed for.
    pub unattributed: u32,
    /// Whether the number of active clusters was observed at this very size.
    pub observed: bool,
}

/// Domains of SMs and their cluster capacity, derived from an [`SmObservation`].
///
/// Serialised as its observation, so reading it back checks it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "SmObservation", into = "SmObservation")]
pub struct SmMap {
    observation: SmObservation,
    domains: Vec<SmDomain>,
    unseen: u32,
}

impl From<SmMap> for SmObservation {
    fn from(map: SmMap) -> Self {
        map.observation
    }
}

impl TryFrom<SmObservation> for SmMap {
    type Error = TopologyError;

    fn try_from(observation: SmObservation) -> Result<Self, TopologyError> {
        Self::new(observation)
    }
}

impl SmMap {
    /// Derives the domains: SMs that ever shared a cluster are of one domain (transitively).
    ///
    /// # Errors
    /// [`TopologyError::Observation`] if the observation contradicts itself.
    pub fn new(observation: SmObservation) -> Result<Self, TopologyError> {
        check(&observation)?;
        let mut sets = Sets::default();
        let mut largest = BTreeMap::<u32, u32>::new();
        for (&size, clusters) in &observation.clusters {
            for cluster in clusters {
                sets.join(cluster);
                for &sm in cluster {
                    let seen = largest.entry(sm).or_default();
                    *seen = (*seen).max(size);
                }
            }
        }
        observation.together.iter().for_each(|group| sets.join(group));
        observation.left_free.iter().flatten().for_each(|sm| sets.join(&[*sm]));
        let mut domains: Vec<SmDomain> = sets
            .groups()
            .into_iter()
            .map(|sms| {
                let largest_seen = sms.iter().filter_map(|sm| largest.get(sm)).copied().max();
                SmDomain { sms, largest_seen }
            })
            .collect();
        domains.sort_by_key(|d| (std::cmp::Reverse(d.sms.len()), d.sms.first().copied()));
        let seen: usize = domains.iter().map(|d| d.sms.len()).sum();
        let unseen = observation.sm_count.checked_sub(seen as u32).ok_or_else(|| {
            contradiction(format!(
                "{seen} different SM ids, but the device has {} SMs",
                observation.sm_count
            ))
        })?;
        Ok(Self { observation, domains, unseen })
    }

    /// SMs of the device.
    pub fn sm_count(&self) -> u32 {
        self.observation.sm_count
    }

    /// The domains, largest first, then by lowest SM id.
    pub fn domains(&self) -> &[SmDomain] {
        &self.domains
    }

    /// SMs that no observation named: each is taken for a domain of its own.
    pub fn unseen(&self) -> u32 {
        self.unseen
    }

    /// What the map was derived from.
    pub fn observation(&self) -> &SmObservation {
        &self.observation
    }

    /// Cluster sizes known to run, ascending; always begins with 1.
    pub fn cluster_sizes(&self) -> Vec<u32> {
        let active = self.observation.max_active_clusters.iter();
        let mut sizes: BTreeSet<u32> = active.filter(|(_, n)| **n > 0).map(|(s, _)| *s).collect();
        sizes.insert(1);
        sizes.into_iter().collect()
    }

    /// Sizes at which more clusters were active than the domains hold: clusters were launched too
    /// seldom to see every domain whole. Margins stay safe, but are larger than need be.
    pub fn incomplete_sizes(&self) -> Vec<u32> {
        let held = |size: u32| -> u32 { self.by_size(size).iter().sum() };
        let active = self.observation.max_active_clusters.iter();
        active.filter(|(s, n)| **s > 1 && **n > held(**s)).map(|(s, _)| *s).collect()
    }

    /// How many clusters of `cluster` blocks the device holds, and in which domains.
    ///
    /// At a size that was not observed the number is the best lower bound that larger observed
    /// sizes give; 0 for sizes above all observed ones.
    pub fn capacity(&self, cluster: u32) -> Capacity {
        let active = &self.observation.max_active_clusters;
        let (clusters, observed) = match (cluster, active.get(&cluster)) {
            (0, _) => (0, false),
            (_, Some(&clusters)) => (clusters, true),
            (1, None) => (self.sm_count(), false),
            (_, None) => {
                let larger = active.range(cluster..);
                (larger.map(|(size, n)| size / cluster * n).max().unwrap_or(0), false)
            }
        };
        let (per_domain, held) = self.attribute(cluster, clusters, observed);
        let unattributed = held.saturating_sub(clusters);
        Capacity { cluster, clusters, per_domain, unattributed, observed }
    }

    /// Per-domain clusters and their sum (SMs that were never seen included, at size 1).
    fn attribute(&self, cluster: u32, clusters: u32, observed: bool) -> (Vec<u32>, u32) {
        let by_size = self.by_size(cluster);
        let held: u32 = by_size.iter().sum();
        if cluster == 1 {
            return (by_size, held + self.unseen);
        }
        if observed && held > clusters && self.observation.clusters.contains_key(&cluster) {
            // Domains that showed only smaller clusters may be what is missing.
            let proven: Vec<u32> = self.domains.iter().zip(&by_size).map(proven(cluster)).collect();
            let sum = proven.iter().sum();
            if sum >= clusters {
                return (proven, sum);
            }
        }
        (by_size, held)
    }

    fn by_size(&self, cluster: u32) -> Vec<u32> {
        let of = |d: &SmDomain| (d.sms.len() as u32).checked_div(cluster).unwrap_or(0);
        self.domains.iter().map(of).collect()
    }
}

/// Keeps a domain's count only where clusters of the size, or larger ones, were seen.
fn proven(cluster: u32) -> impl Fn((&SmDomain, &u32)) -> u32 {
    move |(domain, &count)| match domain.largest_seen {
        Some(seen) if seen < cluster => 0,
        _ => count,
    }
}

fn contradiction(detail: String) -> TopologyError {
    TopologyError::Observation { op: "SM map", detail }
}

fn check(seen: &SmObservation) -> Result<(), TopologyError> {
    if seen.sm_count == 0 || seen.sm_count > MAX_SMS {
        return Err(contradiction(format!("a device of {} SMs", seen.sm_count)));
    }
    for (&size, clusters) in &seen.clusters {
        for cluster in clusters {
            if size == 0 || cluster.len() != size as usize {
                let len = cluster.len();
                return Err(contradiction(format!("a cluster of {size} blocks ran on {len} SMs")));
            }
        }
    }
    let sets = seen.clusters.values().flatten().chain(&seen.together).chain(&seen.left_free);
    for set in sets {
        let distinct: BTreeSet<_> = set.iter().collect();
        if distinct.len() != set.len() {
            let detail = format!("an SM is named twice in {set:?}: probe blocks must fill an SM");
            return Err(contradiction(detail));
        }
        if let Some(sm) = set.iter().find(|sm| **sm >= MAX_SMS) {
            return Err(contradiction(format!("SM id {sm}")));
        }
    }
    for (&size, &count) in &seen.max_active_clusters {
        if size == 0 || u64::from(size) * u64::from(count) > u64::from(seen.sm_count) {
            return Err(contradiction(format!(
                "{count} active clusters of {size} on {} SMs: probe blocks must fill an SM",
                seen.sm_count
            )));
        }
    }
    Ok(())
}

/// Disjoint sets over SM ids.
#[derive(Default)]
struct Sets {
    parent: BTreeMap<u32, u32>,
}

impl Sets {
    fn root(&mut self, sm: u32) -> u32 {
        let mut at = sm;
        while let Some(&up) = self.parent.get(&at)
            && up != at
        {
            at = up;
        }
        self.parent.insert(sm, at);
        at
    }

    fn join(&mut self, sms: &[u32]) {
        let Some((&first, rest)) = sms.split_first() else { return };
        let mut root = self.root(first);
        for &sm in rest {
            let other = self.root(sm);
            let low = root.min(other);
            self.parent.insert(root, low);
            self.parent.insert(other, low);
            root = low;
        }
    }

    fn groups(mut self) -> Vec<Vec<u32>> {
        let sms: Vec<u32> = self.parent.keys().copied().collect();
        let mut groups = BTreeMap::<u32, Vec<u32>>::new();
        for sm in sms {
            let root = self.root(sm);
            groups.entry(root).or_default().push(sm);
        }
        groups.into_values().collect()
    }
}
