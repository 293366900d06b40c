//! What follows from what all ranks found: the same on each of them.

use std::collections::BTreeMap;

use ep_transport::{Group, TransportError};
use serde::{Deserialize, Serialize};

use super::{Check, Preflight, SCHEMA, Severity};
use crate::Result;

/// What a group of ranks can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Ability {
    /// Ranks on hosts.
    Host,
    /// A GPU on every rank's host, with a driver and the run-time compiler.
    Gpu,
    /// Every GPU reaches every other one of its host.
    GpuPeers,
    /// NCCL on every rank.
    Nccl,
    /// RDMA devices and libibverbs on every rank.
    Rdma,
}

/// A check's result, and on which ranks it was so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Ranks, ascending.
    pub ranks: Vec<usize>,
    /// The check.
    pub check: Check,
}

/// What all ranks together can do. A pure function of what they found, so every rank has the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// Whether no rank has a failure.
    pub ready: bool,
    /// What every rank can use.
    pub abilities: Vec<Ability>,
    /// Everything that is not as it should be, the most serious first.
    pub findings: Vec<Finding>,
}

impl Verdict {
    /// The verdict over what ranks found, by rank.
    pub fn of(ranks: &[Preflight]) -> Self {
        let mut grouped: BTreeMap<(String, String, String), (Check, Vec<usize>)> = BTreeMap::new();
        for (rank, found) in ranks.iter().enumerate() {
            for check in found.checks.iter().filter(|check| check.severity > Severity::Ok) {
                let key = (check.area.clone(), check.name.clone(), check.found.clone());
                grouped.entry(key).or_insert_with(|| (check.clone(), Vec::new())).1.push(rank);
            }
        }
        let mut findings: Vec<Finding> = grouped
            .into_values()
            .map(|(check, mut ranks)| {
                ranks.dedup();
                Finding { ranks, check }
            })
            .collect();
        findings.extend(disagreements(ranks));
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.check.severity));
        let ready = findings.first().is_none_or(|f| f.check.severity < Severity::Failure);
        Self { ready, abilities: abilities(ranks), findings }
    }
}

impl Preflight {
    /// Exchanges what the ranks of `group` found. Every rank calls this and gets the same verdict.
    ///
    /// # Errors
    /// Those of [`Group::all_gather`]; a peer whose build records another form.
    pub fn agree(&self, group: &Group) -> Result<Verdict> {
        const OP: &str = "preflight";
        let gathered = group.all_gather(self.to_json().as_bytes())?;
        let mut ranks = Vec::with_capacity(gathered.len());
        for (rank, bytes) in gathered.iter().enumerate() {
            let theirs: Option<Self> = serde_json::from_slice(bytes).ok();
            match theirs.filter(|found| found.schema == SCHEMA) {
                Some(found) => ranks.push(found),
                None => {
                    return Err(TransportError::Mismatch {
                        op: OP,
                        field: "form".into(),
                        ranks: vec![rank],
                        detail: format!("rank {rank} runs another version of this library"),
                    }
                    .into());
                }
            }
        }
        Ok(Verdict::of(&ranks))
    }
}

fn abilities(ranks: &[Preflight]) -> Vec<Ability> {
    let has = |found: &Preflight, name: &str| {
        found.libraries.iter().any(|library| library.name == name && library.file.is_some())
    };
    let fails = |found: &Preflight, area: &str| {
        found.checks.iter().any(|c| c.area == area && c.severity == Severity::Failure)
    };
    let gpu = |found: &Preflight| {
        found.gpus > 0
            && ["libcuda", "libnvrtc"].iter().all(|name| has(found, name))
            && !fails(found, "driver")
            && !fails(found, "gpu")
    };
    let peers = |found: &Preflight| {
        let pairs = found.gpus.saturating_mul(found.gpus.saturating_sub(1));
        gpu(found)
            && found.peers.len() as u64 == u64::from(pairs)
            && found.peers.iter().all(|pair| pair.failure.is_none())
            && !fails(found, "fabric")
    };
    type Has<'a> = &'a dyn Fn(&Preflight) -> bool;
    let all: [(Ability, Has<'_>); 5] = [
        (Ability::Host, &|found| !fails(found, "host") || found.nics > 0),
        (Ability::Gpu, &gpu),
        (Ability::GpuPeers, &peers),
        (Ability::Nccl, &|found| gpu(found) && has(found, "libnccl")),
        (Ability::Rdma, &|found| found.nics > 0 && has(found, "libibverbs")),
    ];
    let everywhere = |able: &Has<'_>| !ranks.is_empty() && ranks.iter().all(able);
    all.iter().filter(|(_, able)| everywhere(able)).map(|(ability, _)| *ability).collect()
}

/// Versions that differ between ranks.
fn disagreements(ranks: &[Preflight]) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut compare = |name: &str, of: &dyn Fn(&Preflight) -> Option<String>| {
        let values: Vec<Option<String>> = ranks.iter().map(of).collect();
        let Some(first) = values.first() else { return };
        let differ: Vec<usize> = (0..values.len()).filter(|&r| values[r] != *first).collect();
        if let Some(&rank) = differ.first() {
            let say = |v: &Option<String>| v.clone().unwrap_or_else(|| "none".into());
            let text = format!("rank 0 has {}, rank {rank} {}", say(first), say(&values[rank]));
            let check = Check::new("ranks", name, Severity::Warning, text);
            let check = check.remedy("run the same versions on every host");
            found.push(Finding { ranks: differ, check });
        }
    };
    compare("driver", &|found| found.driver.clone());
    for name in ["libcuda", "libnvrtc", "libnccl"] {
        compare(name, &|found| {
            found.libraries.iter().find(|library| library.name == name)?.version.clone()
        });
    }
    compare("GPUs", &|found| Some(found.gpus.to_string()));
    found
}
