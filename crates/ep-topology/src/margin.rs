//! How many SMs compute must leave free so that a communication launch starts.
//!
//! # The worst-case bound
//!
//! A launch of `n` blocks in clusters of `c` has `k = n / c` clusters; one block fills an SM. Let
//! `F` be the SMs that are free, `f_d` those of them in domain `d`. A cluster runs within one
//! domain, so domain `d` hosts `⌊f_d / c⌋` clusters (assumption A: any `c` free SMs of a domain
//! that holds such clusters host one).
//!
//! **Claim.** If `|F| ≥ n − c + 1 + Σ_d min(c − 1, |d|)`, all `k` clusters are resident at once,
//! wherever the free SMs are.
//!
//! *Proof.* Write `f_d = c·q_d + r_d` with `q_d = ⌊f_d / c⌋` and `r_d ≤ c − 1`; also `r_d ≤ f_d ≤
//! |d|`. Suppose fewer than `k` clusters fit: `Σ q_d ≤ k − 1`. Then `|F| = c·Σ q_d + Σ r_d ≤
//! c·(k − 1) + Σ min(c − 1, |d|) = n − c + Σ min(c − 1, |d|)`, one less than assumed. ∎
//!
//! Two amendments keep it true on devices that hold fewer clusters than their domains' sizes say
//! ([`Capacity`]): a domain known to host no cluster of this size may be free as a
//! whole and counts `|d|` instead of `min(c − 1, |d|)`; and each of the `u` clusters that are missing
//! without a known place may be the one that was counted on: `k + u` stands for `k` in the proof,
//! which adds `c·u`.
//!
//! The bound is not always reached: a domain holds at most `|d|` free SMs. With `q` hosted clusters
//! it can hide `h_d(q) = min(|d|, c·q + c − 1)` free SMs; `h_d` is concave in `q`, so giving the
//! `k + u − 1` hosted clusters greedily to the largest increments maximises `Σ h_d`. One SM more is
//! [`Margin::worst_case`], the smallest margin that is safe against every placement. For `c = 1` both
//! are `n`.
//!
//! # The device in practice
//!
//! A holder of one-per-SM blocks does not leave the most awkward SMs free. From
//! [`SmObservation::left_free`](crate::SmObservation::left_free) follows the smallest margin from which
//! every recorded set hosts the launch; [`Calibration`]s add what a device needed beyond that. Which
//! SMs a holder leaves depends on what ran before it, so a launch repeated by itself may meet other
//! sets than those recorded: where a launch with the same need (cluster size, cooperative or not,
//! clusters that must be resident to start) was measured, its margin in practice is what was
//! measured. What holds whatever ran before is [`Margin::worst_case`].

use serde::{Deserialize, Serialize};

use crate::{Capacity, SmMap, TopologyError};

/// A launch: its blocks, its cluster size, and whether all must be resident at once to start.
///
/// One block fills an SM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Launch {
    /// Thread blocks in the grid; a multiple of `cluster`.
    pub blocks: u32,
    /// Blocks per cluster; 1 for a launch without clusters.
    pub cluster: u32,
    /// Cooperative: the device starts no block before all of them fit.
    pub cooperative: bool,
}

impl Launch {
    /// A launch of `blocks` blocks in clusters of `cluster`.
    pub fn new(blocks: u32, cluster: u32, cooperative: bool) -> Self {
        Self { blocks, cluster, cooperative }
    }

    /// Clusters in the grid.
    fn clusters(&self) -> u32 {
        self.blocks / self.cluster.max(1)
    }

    /// Clusters that must be resident for it to start.
    fn first(&self) -> u32 {
        if self.cooperative { self.clusters() } else { 1 }
    }
}

/// SMs that must be free, whichever kernels hold the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Margin {
    /// The proved bound in closed form (module documentation); may exceed the device.
    pub bound: u64,
    /// Smallest margin that is enough wherever the free SMs are; at most `bound` and the device.
    pub worst_case: u32,
    /// Smallest margin that is enough on this device in practice; `None` without evidence.
    pub practice: Option<u32>,
}

impl Margin {
    /// The margin on one basis; without evidence of practice the worst case.
    pub fn on(&self, basis: Basis) -> u32 {
        match basis {
            Basis::WorstCase => self.worst_case,
            Basis::Practice => self.practice.unwrap_or(self.worst_case),
        }
    }
}

/// Which margin to rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Basis {
    /// Safe against every placement of the other kernels' blocks.
    WorstCase,
    /// What the device was seen to need; the worst case where that is unknown.
    Practice,
}

/// Whether a launch can run at all on an otherwise idle device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// All blocks at once.
    AtOnce,
    /// Not all at once: in this many waves at least.
    Waves(u32),
    /// Never: cooperative, and the device does not hold all blocks at once.
    TooLarge,
    /// Never: no cluster of this size was seen to run here.
    NoSuchCluster,
}

/// The margins of one launch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MarginPlan {
    /// The launch.
    pub launch: Launch,
    /// Whether it can run.
    pub verdict: Verdict,
    /// SMs at which its first block starts; `None` if it never does.
    pub starts: Option<Margin>,
    /// SMs at which all its blocks are resident at once; `None` if they never are.
    pub all_resident: Option<Margin>,
    /// The same in words.
    pub explanation: String,
}

/// A margin that was measured: with `starts_at` SMs free the launch started in every trial, with
/// fewer not in every one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calibration {
    /// The launch that was tried.
    pub launch: Launch,
    /// SMs that were free.
    pub starts_at: u32,
}

/// The largest launch of one cluster size that a margin can host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fit {
    /// Cluster size.
    pub cluster: u32,
    /// Blocks, all resident at once.
    pub blocks: u32,
}

/// Answers for one device: which margin a launch costs, which launch a margin hosts.
#[derive(Clone, Debug)]
pub struct MarginPlanner<'a> {
    map: &'a SmMap,
    calibrations: Vec<Calibration>,
}

impl<'a> MarginPlanner<'a> {
    /// A planner over the domains of one device.
    pub fn new(map: &'a SmMap) -> Self {
        Self { map, calibrations: Vec::new() }
    }

    /// Makes the margins in practice follow what was measured: exactly for launches with the need
    /// of a measured one, for others of its cluster size raised by the largest shortfall.
    ///
    /// # Errors
    /// [`TopologyError::Argument`] for a launch that is malformed or never starts here.
    pub fn calibrated(mut self, measured: &[Calibration]) -> Result<Self, TopologyError> {
        for calibration in measured {
            if self.plan(calibration.launch)?.starts.is_none() {
                return Err(argument(format!("{:?} never starts here", calibration.launch)));
            }
        }
        self.calibrations.extend_from_slice(measured);
        Ok(self)
    }

    /// The margins of one launch, beside kernels that hold the other SMs.
    ///
    /// # Errors
    /// [`TopologyError::Argument`] if blocks or cluster are 0 or do not divide.
    pub fn plan(&self, launch: Launch) -> Result<MarginPlan, TopologyError> {
        let Launch { blocks, cluster, cooperative } = launch;
        if blocks == 0 || cluster == 0 || !blocks.is_multiple_of(cluster) {
            return Err(argument(format!(
                "{blocks} blocks in clusters of {cluster}: blocks must be a positive multiple"
            )));
        }
        let capacity = self.map.capacity(cluster);
        let clusters = launch.clusters();
        let verdict = match capacity.clusters {
            0 => Verdict::NoSuchCluster,
            held if clusters <= held => Verdict::AtOnce,
            _ if cooperative => Verdict::TooLarge,
            held => Verdict::Waves(clusters.div_ceil(held)),
        };
        let first = launch.first();
        let measured = self.measured(launch);
        let known = |margin: Margin, measured: Option<u32>| Margin {
            practice: measured.map(|m| m.min(margin.worst_case)).or(margin.practice),
            ..margin
        };
        let starts = self.margin(&capacity, first).map(|m| known(m, measured));
        // A cooperative launch starts when all of it fits.
        let all = measured.filter(|_| cooperative);
        let all_resident = self.margin(&capacity, clusters).map(|m| known(m, all));
        let mut plan =
            MarginPlan { launch, verdict, starts, all_resident, explanation: String::new() };
        plan.explanation = crate::explain::explain(self.map, &capacity, &plan);
        Ok(plan)
    }

    /// For every cluster size that runs here, the most blocks that are resident at once within
    /// `margin` free SMs; most blocks first, then smaller clusters. Sizes that host none are left out.
    pub fn best(&self, margin: u32, basis: Basis) -> Vec<Fit> {
        let fit = |cluster: u32| {
            let capacity = self.map.capacity(cluster);
            let hosted = |k: &u32| {
                self.margin(&capacity, *k).is_some_and(|needed| needed.on(basis) <= margin)
            };
            let clusters = (1..=capacity.clusters).take_while(hosted).last()?;
            Some(Fit { cluster, blocks: clusters * cluster })
        };
        let mut fits: Vec<Fit> = self.map.cluster_sizes().into_iter().filter_map(fit).collect();
        fits.sort_by_key(|f| (std::cmp::Reverse(f.blocks), f.cluster));
        fits
    }

    /// The margin measured for launches with the same need, the largest if there are several.
    fn measured(&self, launch: Launch) -> Option<u32> {
        let need = |l: &Launch| (l.cluster, l.cooperative, l.first());
        let same = |c: &&Calibration| need(&c.launch) == need(&launch);
        self.calibrations.iter().filter(same).map(|c| c.starts_at).max()
    }

    /// SMs to leave for `clusters` clusters to be resident at once; `None` if they never are.
    fn margin(&self, capacity: &Capacity, clusters: u32) -> Option<Margin> {
        if clusters == 0 || clusters > capacity.clusters {
            return None;
        }
        let worst_case = worst_case(self.map, capacity, clusters);
        let practice = match capacity.cluster {
            1 if self.slack(capacity) == 0 => Some(worst_case),
            _ => self.seen(capacity, clusters).map(|m| (m + self.slack(capacity)).min(worst_case)),
        };
        Some(Margin { bound: bound(self.map, capacity, clusters), worst_case, practice })
    }

    /// Smallest margin from which every recorded set of free SMs hosts `clusters` clusters.
    fn seen(&self, capacity: &Capacity, clusters: u32) -> Option<u32> {
        let sets = &self.map.observation().left_free;
        if sets.is_empty() {
            return None;
        }
        let refused = |set: &&Vec<u32>| hosted(self.map, capacity, set) < clusters;
        let largest_refused = sets.iter().filter(refused).map(Vec::len).max().unwrap_or(0);
        let enough = sets.iter().map(Vec::len).filter(|len| *len > largest_refused).min();
        Some(enough.map_or(self.map.sm_count(), |len| len as u32))
    }

    /// The largest shortfall of the recorded sets against calibrations of this cluster size.
    fn slack(&self, capacity: &Capacity) -> u32 {
        let of = |c: &Calibration| {
            let clusters = c.launch.first();
            let predicted = match capacity.cluster {
                1 => Some(clusters),
                _ => self.seen(capacity, clusters),
            };
            predicted.map_or(0, |p| c.starts_at.saturating_sub(p))
        };
        let same = |c: &&Calibration| c.launch.cluster == capacity.cluster;
        self.calibrations.iter().filter(same).map(of).max().unwrap_or(0)
    }
}

fn argument(detail: String) -> TopologyError {
    TopologyError::Argument { op: "margin plan", detail }
}

/// Free SMs that domain `size` can hide while hosting nothing.
fn hidden(size: u64, cluster: u64, per_domain: u32) -> u64 {
    if per_domain == 0 { size } else { size.min(cluster - 1) }
}

/// Sizes of all domains with their cluster counts; SMs never seen are domains of one.
fn domains(map: &SmMap, capacity: &Capacity) -> Vec<(u64, u32)> {
    let lone = (1, u32::from(capacity.cluster == 1));
    let sizes = map.domains().iter().map(|d| d.sms.len() as u64);
    let mut all: Vec<_> = sizes.zip(capacity.per_domain.iter().copied()).collect();
    all.extend(std::iter::repeat_n(lone, map.unseen() as usize));
    all
}

/// n − c + 1 + Σ min(c − 1, |d|), amended as in the module documentation.
fn bound(map: &SmMap, capacity: &Capacity, clusters: u32) -> u64 {
    let cluster = u64::from(capacity.cluster);
    let lost: u64 =
        domains(map, capacity).into_iter().map(|(size, n)| hidden(size, cluster, n)).sum();
    cluster * (u64::from(clusters) - 1 + u64::from(capacity.unattributed)) + 1 + lost
}

/// One more than the most free SMs that do not host `clusters` clusters.
fn worst_case(map: &SmMap, capacity: &Capacity, clusters: u32) -> u32 {
    let cluster = u64::from(capacity.cluster);
    let mut free = 0;
    let mut steps = Vec::new();
    for (size, count) in domains(map, capacity) {
        let none = hidden(size, cluster, count);
        free += none;
        let rest = size - none;
        steps.extend(std::iter::repeat_n(cluster, (rest / cluster) as usize));
        steps.extend((!rest.is_multiple_of(cluster)).then_some(rest % cluster));
    }
    steps.sort_unstable_by(|a, b| b.cmp(a));
    let hosted = (u64::from(clusters) - 1 + u64::from(capacity.unattributed)) as usize;
    free += steps.into_iter().take(hosted).sum::<u64>();
    (free + 1).min(u64::from(map.sm_count())) as u32
}

/// Clusters that a set of free SMs hosts.
fn hosted(map: &SmMap, capacity: &Capacity, free: &[u32]) -> u32 {
    let cluster = capacity.cluster.max(1);
    let in_domain = |sms: &[u32]| free.iter().filter(|sm| sms.binary_search(sm).is_ok()).count();
    let domains = map.domains().iter().zip(&capacity.per_domain);
    let hosts: u32 = domains
        .filter(|(_, count)| **count > 0)
        .map(|(domain, _)| in_domain(&domain.sms) as u32 / cluster)
        .sum();
    hosts.saturating_sub(capacity.unattributed).min(capacity.clusters)
}
