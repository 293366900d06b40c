//! Cores for the threads that drive NICs on behalf of GPUs.

use serde::{Deserialize, Serialize};

use crate::{CpuSet, Gpu, Host, NicChoice, TopologyError};

/// How many proxy threads there are and where they may run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxyPolicy {
    /// Threads per pair of GPU and NIC; at least 1.
    pub threads: u32,
    /// CPUs that this process may use (its affinity mask); all online ones if `None`.
    pub allowed: Option<CpuSet>,
    /// CPUs to stay away from, say those of other services.
    pub avoid: CpuSet,
}

impl Default for ProxyPolicy {
    fn default() -> Self {
        Self { threads: 1, allowed: None, avoid: CpuSet::default() }
    }
}

/// Where one proxy thread runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxyCores {
    /// UUID of the GPU it serves.
    pub gpu: String,
    /// The NIC it drives.
    pub nic: String,
    /// Which of the pair's threads it is, from 0.
    pub thread: u32,
    /// All hardware threads of its core that it may use.
    pub cpus: CpuSet,
    /// Whether another proxy thread has the same core, for want of cores.
    pub shared: bool,
}

/// Gives each proxy thread a physical core near its NIC, else near its GPU, else anywhere; no core
/// twice while there are others. The first core of the machine, where interrupts land, goes last.
///
/// # Errors
/// [`TopologyError::Argument`] for no threads, or if nothing remains of the CPUs.
pub fn proxy_cores(
    host: &Host,
    gpus: &[Gpu],
    choices: &[NicChoice],
    policy: &ProxyPolicy,
) -> Result<Vec<ProxyCores>, TopologyError> {
    let error = |detail: &str| TopologyError::Argument { op: "proxy cores", detail: detail.into() };
    if policy.threads == 0 {
        return Err(error("a pair of GPU and NIC needs a thread at least"));
    }
    let allowed = policy.allowed.as_ref().map_or(host.cpus.clone(), |a| {
        // A host whose CPUs could not be read still knows the process's own mask.
        if host.cpus.is_empty() { a.clone() } else { a.intersection(&host.cpus) }
    });
    let allowed = allowed.difference(&policy.avoid);
    let pairs = choices.iter().flat_map(|c| c.nics.iter().map(|(nic, _)| (&c.gpu, nic)));
    let threads: Vec<_> =
        pairs.flat_map(|(g, n)| (0..policy.threads).map(move |t| (g, n, t))).collect();
    if threads.is_empty() {
        return Ok(Vec::new());
    }
    let mut cores = Cores::new(host, &allowed);
    if cores.free.is_empty() {
        return Err(error("no CPU is both online and allowed"));
    }
    let take = |(gpu, nic, thread): (&String, &String, u32)| {
        let nic_node = host.nics.iter().find(|n| n.name == *nic).and_then(|n| n.numa_node);
        let owner = gpus.iter().find(|g| g.uuid == *gpu);
        let near = [
            nic_node.map(|n| host.node_cpus(n)),
            owner.and_then(|g| g.numa_node).map(|n| host.node_cpus(n)),
            owner.map(|g| g.cpu_affinity.clone()),
        ];
        let (cpus, shared) = cores.take(&near);
        ProxyCores { gpu: gpu.clone(), nic: nic.clone(), thread, cpus, shared }
    };
    Ok(threads.into_iter().map(take).collect())
}

/// Physical cores by how often they were given away.
struct Cores {
    free: Vec<(CpuSet, u32)>,
}

impl Cores {
    fn new(host: &Host, allowed: &CpuSet) -> Self {
        let known = host.cores.iter().map(|c| c.cpus.intersection(allowed));
        let mut free: Vec<_> = known.filter(|c| !c.is_empty()).map(|c| (c, 0)).collect();
        if free.is_empty() {
            free = allowed.iter().map(|cpu| (CpuSet::from_iter([cpu]), 0)).collect();
        }
        if free.len() > 1 {
            free.rotate_left(1);
        }
        Self { free }
    }

    /// The least used core of the first set that has one unused, else the least used of the first
    /// set that has any.
    fn take(&mut self, near: &[Option<CpuSet>]) -> (CpuSet, bool) {
        let sets: Vec<&CpuSet> = near.iter().flatten().collect();
        let least = |set: Option<&CpuSet>, limit: u32| {
            let inside = |c: &CpuSet| set.is_none_or(|s| c.iter().any(|cpu| s.contains(cpu)));
            let cores = self.free.iter().enumerate();
            let fit = cores.filter(|(_, (c, used))| *used <= limit && inside(c));
            fit.min_by_key(|(index, (_, used))| (*used, *index)).map(|(index, _)| index)
        };
        let near_and = |limit: u32| sets.iter().find_map(|set| least(Some(set), limit));
        let found = near_and(0)
            .or_else(|| least(None, 0))
            .or_else(|| near_and(u32::MAX))
            .or_else(|| least(None, u32::MAX));
        let Some(index) = found else { return (CpuSet::default(), true) };
        let (cpus, used) = &mut self.free[index];
        *used += 1;
        (cpus.clone(), *used > 1)
    }
}
