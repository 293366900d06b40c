//! A simulated GPU for tests. It is no evidence about any real one.
//!
//! - A plain grid of one-per-SM blocks fills the domains in turn, a block each, the largest domain first and
//!   SMs ascending; with `jitter`, every launch begins at another domain.
//! - A cluster runs on any `cluster` free SMs of one domain; domains named in `no_clusters` host none.
//! - A launch starts as many clusters as fit; a cooperative one all or none. `reserve` more SMs must be free
//!   for a cooperative launch with clusters: a device that needs more than its domains explain.

use std::collections::BTreeSet;

use ep_topology::{Launch, SmObservation};

use super::lab::{Held, Lab, Trial};
use crate::Result;

pub struct Sim {
    pub domains: Vec<Vec<u32>>,
    pub no_clusters: Vec<usize>,
    pub jitter: bool,
    pub reserve: u32,
    pub sizes: Vec<u32>,
    pub trials: u32,
}

impl Sim {
    /// Domains of these sizes; neighbouring SM ids lie in pairs of one domain.
    pub fn new(sizes: &[usize]) -> Self {
        let mut domains = vec![Vec::new(); sizes.len()];
        let mut next = 0;
        while domains.iter().zip(sizes).any(|(d, &n)| d.len() < n) {
            for (domain, &size) in domains.iter_mut().zip(sizes) {
                for _ in 0..2.min(size - domain.len()) {
                    domain.push(next);
                    next += 1;
                }
            }
        }
        Self {
            domains,
            no_clusters: vec![],
            jitter: false,
            reserve: 0,
            sizes: vec![1, 2, 4],
            trials: 0,
        }
    }

    pub fn sms(&self) -> u32 {
        self.domains.iter().map(Vec::len).sum::<usize>() as u32
    }

    fn fill(&self, blocks: u32, first: usize) -> BTreeSet<u32> {
        let mut left: Vec<_> = self.domains.iter().map(|d| d.iter().copied()).collect();
        let mut used = BTreeSet::new();
        let mut at = first;
        while used.len() < blocks as usize {
            let count = left.len();
            used.extend(left[at % count].next());
            at += 1;
        }
        used
    }

    fn free(&self, held: &Held) -> BTreeSet<u32> {
        match held {
            Held::AllBut(free) => free.iter().copied().collect(),
            Held::AllButSome(free) => {
                let first = if self.jitter { self.trials as usize } else { 0 };
                let used = self.fill(self.sms() - free, first);
                (0..self.sms()).filter(|sm| !used.contains(sm)).collect()
            }
        }
    }

    fn hosts(&self, free: &BTreeSet<u32>, cluster: u32) -> u32 {
        let domains = self.domains.iter().enumerate();
        let able = domains.filter(|(i, _)| cluster == 1 || !self.no_clusters.contains(i));
        able.map(|(_, d)| d.iter().filter(|sm| free.contains(sm)).count() as u32 / cluster).sum()
    }
}

impl Lab for Sim {
    fn name(&self) -> String {
        "simulated".into()
    }

    fn observe(&mut self) -> Result<SmObservation> {
        let all: BTreeSet<u32> = (0..self.sms()).collect();
        let mut seen = SmObservation { sm_count: self.sms(), ..SmObservation::default() };
        for &size in &self.sizes {
            seen.max_active_clusters.insert(size, self.hosts(&all, size));
            let mut clusters = Vec::new();
            for (i, domain) in self.domains.iter().enumerate() {
                if size > 1 && !self.no_clusters.contains(&i) {
                    clusters.extend(domain.windows(size as usize).map(<[u32]>::to_vec));
                }
            }
            seen.clusters.insert(size, clusters);
        }
        Ok(seen)
    }

    fn left_free(&mut self, free: u32) -> Result<Vec<u32>> {
        self.trials += 1;
        Ok(self.free(&Held::AllButSome(free)).into_iter().collect())
    }

    fn trial(&mut self, held: &Held, launch: Launch) -> Result<Trial> {
        self.trials += 1;
        let free = self.free(held);
        let needed = launch.blocks / launch.cluster;
        let hosted = self.hosts(&free, launch.cluster).min(needed);
        let spare = free.len() as u32 >= launch.blocks + self.reserve;
        let started = match launch.cooperative {
            false => hosted,
            true if hosted == needed && (launch.cluster == 1 || spare) => hosted,
            true => 0,
        };
        Ok(Trial { started: started * launch.cluster, blocks: launch.blocks })
    }
}
