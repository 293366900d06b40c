//! The margin arithmetic against brute force, and against what an H200 was seen to do.

use crate::common::{h200, map, synthetic};
use ep_topology::{Basis, Calibration, Launch, MarginPlan, MarginPlanner, SmMap, Verdict};
use proptest::prelude::*;

fn plan(map: &SmMap, blocks: u32, cluster: u32, cooperative: bool) -> MarginPlan {
    let launch = Launch::new(blocks, cluster, cooperative);
    MarginPlanner::new(map).plan(launch).expect("a sound launch")
}

/// All partitions of `total` into parts, largest first.
fn partitions(total: u32, largest: u32) -> Vec<Vec<u32>> {
    if total == 0 {
        return vec![vec![]];
    }
    let parts = (1..=total.min(largest)).flat_map(|first| {
        let rest = partitions(total - first, first);
        rest.into_iter().map(move |mut tail| {
            tail.insert(0, first);
            tail
        })
    });
    parts.collect()
}

/// For every set of free SMs (as a bit mask): its size and the clusters it hosts.
fn brute_force(sizes: &[u32], cluster: u32) -> Vec<(u32, u32)> {
    let total: u32 = sizes.iter().sum();
    let hosts = |free: u32| {
        let mut at = 0;
        let mut clusters = 0;
        for &size in sizes {
            let domain = ((1u32 << size) - 1) << at;
            clusters += (free & domain).count_ones() / cluster;
            at += size;
        }
        (free.count_ones(), clusters)
    };
    (0..1u32 << total).map(hosts).collect()
}

#[test]
fn worst_case_is_exact_and_within_the_bound_on_every_small_map() {
    let mut checked = 0;
    for total in 1..=12 {
        for sizes in partitions(total, total) {
            let all: Vec<u32> = (1..=total).collect();
            let map = map(synthetic(&sizes, &all));
            for cluster in 1..=total {
                let sets = brute_force(&sizes, cluster);
                for clusters in 1..=map.capacity(cluster).clusters {
                    let refused = sets.iter().filter(|(_, hosted)| *hosted < clusters);
                    let needed = refused.map(|(free, _)| free + 1).max().expect("the empty set");
                    let plan = plan(&map, clusters * cluster, cluster, true);
                    let margin = plan.starts.expect("it fits");
                    assert_eq!(margin.worst_case, needed, "{sizes:?} {cluster} {clusters}");
                    assert!(margin.bound >= u64::from(needed));
                    // The closed form of the documentation.
                    let lost: u32 = sizes.iter().map(|s| (*s).min(cluster - 1)).sum();
                    let n = clusters * cluster;
                    assert_eq!(margin.bound, u64::from(n - cluster + 1 + lost));
                    assert_eq!(plan.all_resident, plan.starts);
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 3000, "only {checked} combinations");
}

#[test]
fn the_bound_is_reached_while_domains_can_hide_that_much() {
    let map = map(h200());
    for (blocks, cluster) in [(8, 2), (16, 2), (32, 2), (24, 4), (8, 8)] {
        let margin = plan(&map, blocks, cluster, true).starts.expect("it fits");
        assert_eq!(margin.bound, u64::from(margin.worst_case), "{blocks} {cluster}");
    }
    // 112 blocks in clusters of 16 need every domain of 16 whole: the form exceeds the device.
    let all = plan(&map, 112, 16, true).starts.expect("it fits");
    assert_eq!(all.worst_case, 132);
    assert!(all.bound > 132);
}

#[test]
fn h200_margins_cover_what_was_measured() {
    let map = map(h200());
    // Cluster 2 + cooperative, the margin at which the launch was seen to start (#526).
    for (blocks, started) in [(8, 16), (12, 16), (16, 18), (24, 28)] {
        let margin = plan(&map, blocks, 2, true).starts.expect("it fits");
        assert_eq!(margin.bound, u64::from(blocks - 2 + 1 + 12));
        assert!(margin.worst_case >= started, "{blocks}: {margin:?}");
        assert_eq!(margin.practice, None, "no evidence was recorded");
        assert_eq!(margin.on(Basis::Practice), margin.worst_case);
    }
    // Plain and cooperative launches without clusters cost exactly their blocks.
    for blocks in [4, 8, 12, 16, 20, 24, 32] {
        let plain = plan(&map, blocks, 1, false);
        assert_eq!(plain.starts.expect("one block").worst_case, 1);
        let all = plain.all_resident.expect("it fits");
        assert_eq!((all.worst_case, all.practice), (blocks, Some(blocks)));
        assert_eq!(plan(&map, blocks, 1, true).starts, Some(all));
    }
    // Not cooperative: the first cluster of 2 starts once the 12 domains cannot hide it.
    let waves = plan(&map, 16, 2, false);
    assert_eq!(waves.starts.expect("a cluster").worst_case, 13);
    assert_eq!(waves.all_resident.expect("it fits").worst_case, 27);
}

#[test]
fn what_cannot_run_says_so() {
    let map = map(h200());
    let large = plan(&map, 128, 16, true);
    assert_eq!((large.verdict, large.starts), (Verdict::TooLarge, None));
    assert!(large.explanation.contains("never runs"), "{}", large.explanation);
    let waves = plan(&map, 128, 16, false);
    assert_eq!(waves.verdict, Verdict::Waves(2));
    assert!(waves.starts.is_some() && waves.all_resident.is_none());
    assert!(waves.explanation.contains("2 waves"), "{}", waves.explanation);
    let huge = plan(&map, 32, 32, false);
    assert_eq!((huge.verdict, huge.starts), (Verdict::NoSuchCluster, None));
    let max = plan(&map, u32::MAX, 1, false);
    assert!(matches!(max.verdict, Verdict::Waves(_)));
    let planner = MarginPlanner::new(&map);
    for (blocks, cluster) in [(0, 1), (4, 0), (3, 2), (0, 0)] {
        let error = planner.plan(Launch::new(blocks, cluster, true)).expect_err("unsound");
        assert!(error.to_string().contains("positive multiple"), "{error}");
    }
}

#[test]
fn the_explanation_names_the_numbers() {
    let map = map(h200());
    let text = plan(&map, 16, 2, true).explanation;
    for part in ["cooperative launch of 16 blocks in clusters of 2", "27 SMs free", "11 SMs beyond"]
    {
        assert!(text.contains(part), "{text} lacks {part}");
    }
    assert!(text.contains("12 domains"), "{text}");
    let plain = plan(&map, 16, 1, false).explanation;
    assert!(plain.contains("first block starts with 1 SM free"), "{plain}");
    assert!(plain.contains("All blocks are resident at once with 16 SMs free"), "{plain}");
    let four = plan(&map, 16, 4, false).explanation;
    assert!(four.contains("4 hold none of this size"), "{four}");
}

/// Free sets as a device leaves them that fills its two domains of 6 in turn.
fn two_domains() -> SmMap {
    let mut seen = synthetic(&[6, 6], &[1, 2, 3, 6]);
    let order = [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11];
    seen.left_free = (1..=12).map(|free| order[12 - free..].to_vec()).collect();
    map(seen)
}

#[test]
fn practice_follows_the_recorded_free_sets() {
    let map = two_domains();
    // Three free SMs are two in one domain and one in the other: one cluster of 2; four are two.
    let margin = plan(&map, 4, 2, true).starts.expect("it fits");
    assert_eq!((margin.worst_case, margin.practice), (5, Some(4)));
    let margin = plan(&map, 3, 3, true).starts.expect("it fits");
    assert_eq!((margin.worst_case, margin.practice), (5, Some(5)));
    let best = MarginPlanner::new(&map).best(4, Basis::Practice);
    assert_eq!(best.iter().map(|f| (f.cluster, f.blocks)).collect::<Vec<_>>(), [(1, 4), (2, 4)]);
    let best = MarginPlanner::new(&map).best(4, Basis::WorstCase);
    assert_eq!(best.iter().map(|f| (f.cluster, f.blocks)).collect::<Vec<_>>(), [(1, 4), (2, 2)]);
    assert!(MarginPlanner::new(&map).best(0, Basis::Practice).is_empty());
}

#[test]
fn one_bad_record_raises_the_margin_above_it() {
    let mut seen = two_domains().observation().clone();
    // Once, four SMs were left as three and one: one cluster of 2 only.
    seen.left_free.push(vec![0, 1, 2, 6]);
    let map = map(seen);
    let margin = plan(&map, 4, 2, true).starts.expect("it fits");
    assert_eq!(margin.practice, Some(5));
}

#[test]
fn calibrations_add_what_the_device_needed_beyond_its_free_sets() {
    let map = two_domains();
    let cooperative = |blocks, cluster| Launch::new(blocks, cluster, true);
    let measured = [Calibration { launch: cooperative(2, 2), starts_at: 4 }];
    let planner = MarginPlanner::new(&map).calibrated(&measured).expect("it starts here");
    let margin = |l| planner.plan(l).expect("sound").starts.expect("it fits");
    // Predicted 3, needed 4: one more for every launch in clusters of 2, at most the worst case.
    assert_eq!(margin(cooperative(2, 2)).practice, Some(3));
    assert_eq!(margin(cooperative(4, 2)).practice, Some(5));
    assert_eq!(margin(cooperative(3, 3)).practice, Some(5));
    let never = [Calibration { launch: cooperative(14, 2), starts_at: 4 }];
    assert!(MarginPlanner::new(&map).calibrated(&never).is_err());
    // What was measured for a launch's own need is believed, below the recorded sets too, and never
    // above the worst case; launches with another need do not follow it downwards.
    let plan = |starts_at, launch| {
        let measured = [Calibration { launch: Launch::new(4, 2, true), starts_at }];
        let planner = MarginPlanner::new(&map).calibrated(&measured).expect("it starts here");
        planner.plan(launch).expect("well formed").starts.expect("it starts here")
    };
    let plain = |launch| {
        MarginPlanner::new(&map).plan(launch).expect("well formed").starts.expect("it starts here")
    };
    let (same, other) = (Launch::new(4, 2, true), Launch::new(2, 2, true));
    assert_eq!(plan(4, same).practice, Some(4));
    assert_eq!(plan(1000, same).practice, Some(plain(same).worst_case));
    assert_eq!(plan(4, other).practice, plain(other).practice);
}

proptest! {
    /// Adversarial sets on uneven maps: the worst case hosts, whatever is free.
    #[test]
    fn any_set_of_the_worst_case_size_hosts_the_launch(
        sizes in prop::collection::vec(1u32..24, 1..12),
        cluster in 1u32..17,
        share in 0.0f64..1.0,
        seed in prop::collection::vec(0u32..1000, 300),
    ) {
        let largest = sizes.iter().copied().max().unwrap_or(1);
        let all: Vec<u32> = (1..=largest).collect();
        let map = map(synthetic(&sizes, &all));
        let capacity = map.capacity(cluster);
        prop_assume!(capacity.clusters > 0);
        let clusters = 1 + (share * f64::from(capacity.clusters - 1)) as u32;
        let margin = plan(&map, clusters * cluster, cluster, true).starts.expect("it fits");
        let mut sms: Vec<u32> = (0..map.sm_count()).collect();
        sms.sort_by_key(|sm| seed[*sm as usize]);
        sms.truncate(margin.worst_case as usize);
        let in_domain = |d: &[u32]| sms.iter().filter(|sm| d.contains(sm)).count() as u32;
        let hosted: u32 = map.domains().iter().map(|d| in_domain(&d.sms) / cluster).sum();
        prop_assert!(hosted >= clusters);
    }

    /// More blocks never need fewer SMs, and `best` gives launches that fit its margin.
    #[test]
    fn margins_grow_with_blocks_and_best_fits(
        sizes in prop::collection::vec(1u32..20, 1..10), margin in 0u32..120,
    ) {
        let map = map(synthetic(&sizes, &[1, 2, 4, 8]));
        let planner = MarginPlanner::new(&map);
        for cluster in map.cluster_sizes() {
            let mut last = 0;
            for k in 1..=map.capacity(cluster).clusters {
                let starts = plan(&map, k * cluster, cluster, true).starts.expect("it fits");
                prop_assert!(starts.worst_case >= last.max(k * cluster));
                last = starts.worst_case;
            }
        }
        for fit in planner.best(margin, Basis::WorstCase) {
            let needed = plan(&map, fit.blocks, fit.cluster, true).starts.expect("it fits");
            prop_assert!(needed.worst_case <= margin);
            let more = plan(&map, fit.blocks + fit.cluster, fit.cluster, true);
            prop_assert!(more.starts.is_none_or(|m| m.worst_case > margin));
        }
    }
}
