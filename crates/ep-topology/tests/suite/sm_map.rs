//! From observations to domains and their capacity.

use std::collections::BTreeMap;

use crate::common::{h200, map, synthetic};
use ep_topology::{SmMap, SmObservation, TopologyError};

#[test]
fn h200_domains_and_active_clusters() {
    let map = map(h200());
    let sizes: Vec<usize> = map.domains().iter().map(|d| d.sms.len()).collect();
    assert_eq!(sizes, [18, 18, 16, 16, 16, 16, 16, 8, 2, 2, 2, 2]);
    assert_eq!(map.unseen(), 0);
    assert!(map.incomplete_sizes().is_empty());
    for (size, clusters) in [(1, 132), (2, 66), (4, 30), (8, 15), (10, 7), (12, 7), (16, 7)] {
        let capacity = map.capacity(size);
        assert!(capacity.observed);
        assert_eq!(capacity.clusters, clusters, "size {size}");
        // The domains explain the device's number exactly.
        assert_eq!(capacity.per_domain.iter().sum::<u32>(), clusters, "size {size}");
        assert_eq!(capacity.unattributed, 0, "size {size}");
    }
    // The lone pairs hold clusters of two and nothing larger.
    assert_eq!(map.capacity(2).per_domain[8..], [1, 1, 1, 1]);
    assert_eq!(map.capacity(4).per_domain[7..], [2, 0, 0, 0, 0]);
    assert_eq!(map.cluster_sizes(), [1, 2, 4, 8, 10, 12, 14, 16]);
}

#[test]
fn sizes_between_observed_ones_are_bounded_from_below() {
    let map = map(h200());
    // 15 clusters of 8 hold 15 of 6; the domains' sizes would allow 17.
    let six = map.capacity(6);
    assert_eq!((six.clusters, six.observed, six.unattributed), (15, false, 2));
    // Seven clusters of 16 hold five of 3 each; better than one per cluster of 4.
    assert_eq!(map.capacity(3).clusters, 35);
    assert_eq!(map.capacity(17).clusters, 0);
    assert_eq!(map.capacity(0).clusters, 0);
}

#[test]
fn full_and_uneven_parts() {
    let full = map(synthetic(&[18; 8], &[1, 2, 4, 8, 16]));
    assert_eq!(full.sm_count(), 144);
    assert_eq!(full.capacity(16).clusters, 8);
    let uneven = map(synthetic(&[18, 16, 14, 10, 6], &[1, 2, 4, 8, 16]));
    assert_eq!(uneven.capacity(16).per_domain, [1, 1, 0, 0, 0]);
    assert_eq!(uneven.capacity(8).clusters, 2 + 2 + 1 + 1);
}

#[test]
fn a_mig_slice_is_a_small_map() {
    let slice = map(synthetic(&[14, 2], &[1, 2, 4, 8]));
    assert_eq!(slice.sm_count(), 16);
    assert_eq!(slice.capacity(8).clusters, 1);
    assert_eq!(slice.capacity(16).clusters, 0);
}

#[test]
fn a_part_without_clusters_has_only_lone_sms() {
    let mut seen = SmObservation { sm_count: 108, ..SmObservation::default() };
    seen.max_active_clusters.insert(1, 108);
    let map = map(seen);
    assert!(map.domains().is_empty());
    assert_eq!(map.unseen(), 108);
    assert_eq!(map.cluster_sizes(), [1]);
    assert_eq!(map.capacity(1).clusters, 108);
    assert_eq!(map.capacity(2).clusters, 0);
}

#[test]
fn clusters_join_transitively_over_sizes() {
    let clusters = BTreeMap::from([
        (2, vec![vec![0, 1], vec![2, 3], vec![4, 5], vec![6, 7]]),
        (4, vec![vec![3, 1, 2, 0]]),
    ]);
    let max_active_clusters = BTreeMap::from([(1, 9), (2, 4), (4, 1)]);
    let seen =
        SmObservation { sm_count: 9, clusters, max_active_clusters, ..SmObservation::default() };
    let map = map(seen);
    let domains: Vec<_> = map.domains().iter().map(|d| (d.sms.clone(), d.largest_seen)).collect();
    let pair = |a, b| (vec![a, b], Some(2));
    assert_eq!(domains, [(vec![0, 1, 2, 3], Some(4)), pair(4, 5), pair(6, 7)]);
    assert_eq!(map.unseen(), 1);
    assert_eq!(map.capacity(1).clusters, 9);
}

#[test]
fn a_part_that_showed_only_small_clusters_is_blamed_for_missing_large_ones() {
    // Two domains of 4, but clusters of 4 ran in the first alone and the device holds one.
    let clusters = BTreeMap::from([
        (2, vec![vec![0, 1], vec![1, 2], vec![2, 3], vec![4, 5], vec![5, 6], vec![6, 7]]),
        (4, vec![vec![0, 1, 2, 3]]),
    ]);
    let mut seen = SmObservation { sm_count: 8, clusters, ..SmObservation::default() };
    seen.max_active_clusters = BTreeMap::from([(2, 4), (4, 1)]);
    let capacity = map(seen.clone()).capacity(4);
    assert_eq!((capacity.per_domain, capacity.unattributed), (vec![1, 0], 0));
    // If neither domain can be blamed, the missing cluster stays unattributed.
    seen.clusters.entry(4).or_default().push(vec![4, 5, 6, 7]);
    let capacity = map(seen).capacity(4);
    assert_eq!((capacity.per_domain, capacity.unattributed), (vec![1, 1], 1));
}

#[test]
fn too_few_launches_are_noticed() {
    let mut seen = synthetic(&[4, 4], &[2, 4]);
    seen.together[1] = vec![4, 5];
    seen.together.push(vec![6, 7]);
    assert_eq!(map(seen).incomplete_sizes(), [4]);
}

#[test]
fn contradictions_are_errors() {
    let good = || synthetic(&[4, 4], &[1, 2, 4]);
    let mut cases: Vec<(&str, SmObservation)> = Vec::new();
    let mut case = |what, change: fn(&mut SmObservation)| {
        let mut seen = good();
        change(&mut seen);
        cases.push((what, seen));
    };
    case("of 0 SMs", |s| s.sm_count = 0);
    case("8 different SM ids, but the device has 7", |s| {
        s.sm_count = 7;
        s.max_active_clusters.clear();
    });
    case("probe blocks must fill an SM", |s| s.together.push(vec![1, 1]));
    case("SM id 4294967295", |s| s.together.push(vec![u32::MAX]));
    case("ran on 3 SMs", |s| drop(s.clusters.insert(2, vec![vec![0, 1, 2]])));
    case("a cluster of 0 blocks", |s| drop(s.clusters.insert(0, vec![vec![]])));
    case("9 active clusters of 1 on 8 SMs", |s| s.max_active_clusters = BTreeMap::from([(1, 9)]));
    case("active clusters of 0", |s| s.max_active_clusters = BTreeMap::from([(0, 1)]));
    for (what, seen) in cases {
        match SmMap::new(seen) {
            Err(error @ TopologyError::Observation { .. }) => {
                assert!(error.to_string().contains(what), "{error} lacks {what}");
            }
            other => panic!("{what}: {other:?}"),
        }
    }
}

#[test]
fn reading_a_map_back_checks_it() {
    let original = map(h200());
    let text = serde_json::to_string(&original).expect("serialisable");
    let back: SmMap = serde_json::from_str(&text).expect("the same");
    assert_eq!(back, original);
    let broken = text.replace("\"sm_count\":132", "\"sm_count\":100");
    assert!(serde_json::from_str::<SmMap>(&broken).is_err());
}
