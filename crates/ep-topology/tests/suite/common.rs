//! What several tests build.

use std::collections::BTreeMap;

use ep_topology::{SmMap, SmObservation};

/// Reads `fixtures/h200-sm-domains.txt`.
pub fn h200() -> SmObservation {
    let text = include_str!("../../fixtures/h200-sm-domains.txt");
    let mut seen = SmObservation { sm_count: 132, ..SmObservation::default() };
    for line in text.lines().filter(|l| !l.starts_with('#') && !l.is_empty()) {
        let (head, rest) = line.split_once(": ").expect("KEY: VALUES");
        if head == "active" {
            let pair = |p: &str| {
                let (size, count) = p.split_once(':').expect("size:count");
                (size.parse().expect("size"), count.parse().expect("count"))
            };
            seen.max_active_clusters = rest.split(' ').map(pair).collect();
        } else {
            let sms: Vec<u32> = rest.split(' ').map(|s| s.parse().expect("SM id")).collect();
            assert_eq!(sms.len(), head.parse::<usize>().expect("length"));
            seen.together.push(sms);
        }
    }
    seen
}

/// Domains of the given sizes with consecutive SM ids, `active` clusters as the sizes allow.
pub fn synthetic(sizes: &[u32], cluster_sizes: &[u32]) -> SmObservation {
    let mut next = 0;
    let mut together = Vec::new();
    for &size in sizes {
        together.push((next..next + size).collect());
        next += size;
    }
    let active = |c: &u32| (*c, sizes.iter().map(|s| s / c).sum());
    let max_active_clusters: BTreeMap<u32, u32> = cluster_sizes.iter().map(active).collect();
    SmObservation { sm_count: next, max_active_clusters, together, ..SmObservation::default() }
}

/// The map of an observation that is known to be good.
pub fn map(seen: SmObservation) -> SmMap {
    SmMap::new(seen).expect("a consistent observation")
}
