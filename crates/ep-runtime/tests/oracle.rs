//! Every odd shape against the naive oracle, bit by bit, on mapped peers, bulk peers and both.

mod common;

use std::collections::BTreeMap;

use common::Nodes;
use common::exercise::{How, check};
use common::ground::Hosts;
use ep_bench::oracle::{Float, JobSpec, Mode, Payload, PlacementSpec, Routing, job_specs};
use ep_runtime::Hierarchy;
use proptest::prelude::*;

fn how() -> impl Strategy<Value = How> {
    let modes = prop_oneof![
        2 => Just(Mode::RankMajor),
        2 => Just(Mode::ExpertExact),
        1 => Just(Mode::ExpertReduced),
    ];
    let float = prop::sample::select(Float::ALL.to_vec());
    let nodes = prop_oneof![
        1 => Just(Nodes::Mapped),
        1 => Just(Nodes::Bulk),
        2 => any::<u64>().prop_map(Nodes::Cut),
    ];
    let nodes = (nodes, prop::sample::select(HIERARCHIES.to_vec()), any::<bool>());
    let flags = (any::<bool>(), any::<bool>(), nodes, any::<bool>());
    (modes, float, 0..=2usize, flags).prop_map(
        |(mode, float, biases, (weighted, capacity, (nodes, hierarchy, reduce), narrow_ids))| How {
            mode,
            float,
            weighted: weighted && mode != Mode::RankMajor,
            biases,
            capacity,
            nodes,
            hierarchy,
            node_reduced: reduce && may_reduce_nodes(mode, hierarchy),
            narrow_ids,
        },
    )
}

fn cases(default: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(2500)))]

    #[test]
    fn every_shape_equals_the_oracle(spec in job_specs(), how in how(), seed in any::<u64>()) {
        check(&spec.build(), how, seed, &Hosts);
    }
}

/// What has to be so for rows to be reduced per node.
fn may_reduce_nodes(mode: Mode, hierarchy: Hierarchy) -> bool {
    mode != Mode::ExpertReduced && hierarchy == Hierarchy::Node
}

const HIERARCHIES: [Hierarchy; 2] = [Hierarchy::Flat, Hierarchy::Node];
const NODES: [Nodes; 4] = [Nodes::Mapped, Nodes::Bulk, Nodes::Cut(0b101_0100), Nodes::Cut(0b1)];

/// The random cases reach every mode, payload and transport, so that none is left to luck.
#[test]
fn fixed_cases_cover_every_mode() {
    let mut covered = BTreeMap::new();
    for seed in 0..144u64 {
        let job = JobSpec::random(seed).build();
        let mode = [Mode::RankMajor, Mode::ExpertExact, Mode::ExpertReduced][seed as usize % 3];
        let hierarchy = HIERARCHIES[(seed / 12) as usize % 2];
        let bit = |n: u64| (seed / 3) >> n & 1 == 1;
        let how = How {
            mode,
            float: Float::ALL[(seed / 3) as usize % 3],
            weighted: bit(0) && mode != Mode::RankMajor,
            biases: (seed % 3) as usize,
            capacity: bit(1),
            nodes: NODES[(seed / 3) as usize % 4],
            hierarchy,
            node_reduced: seed % 5 < 2 && may_reduce_nodes(mode, hierarchy),
            narrow_ids: bit(3),
        };
        check(&job, how, seed, &Hosts);
        let precision = if how.node_reduced { "per node" } else { "" };
        let key = format!("{mode:?} {:?} {hierarchy:?} {precision}", how.nodes);
        *covered.entry(key).or_insert(0) += 1;
    }
    assert_eq!(covered.len(), 32, "{covered:?}");
}

/// Groups of nodes as they are in clusters, and uneven ones.
#[test]
fn nodes_equal_the_oracle() {
    for (sizes, seeds) in ARRANGEMENTS {
        for seed in 0..seeds {
            let ranks = sizes.iter().sum();
            let spec = JobSpec { ranks, ..JobSpec::random(seed) };
            let mode = [Mode::RankMajor, Mode::ExpertExact, Mode::ExpertReduced][seed as usize % 3];
            let hierarchy = HIERARCHIES[(seed / 3) as usize % 2];
            let how = How {
                mode,
                float: Float::ALL[(seed / 3) as usize % 3],
                weighted: seed % 2 == 0 && mode != Mode::RankMajor,
                biases: 1,
                capacity: false,
                nodes: Nodes::Sizes(sizes),
                hierarchy,
                node_reduced: seed % 7 < 4 && may_reduce_nodes(mode, hierarchy),
                narrow_ids: false,
            };
            check(&spec.build(), how, seed, &Hosts);
        }
    }
}

/// Node sizes, and how many random jobs.
const ARRANGEMENTS: [(&[usize], u64); 5] =
    [(&[2, 2], 30), (&[4, 4], 20), (&[2, 2, 2, 2], 20), (&[1, 3], 30), (&[1, 2, 3], 30)];

/// Rows so large that the blocks between nodes travel in several writes.
#[test]
fn large_blocks_equal_the_oracle() {
    for (seed, mode) in [(1, Mode::RankMajor), (2, Mode::ExpertExact), (3, Mode::ExpertExact)] {
        let spec = JobSpec {
            ranks: 4,
            experts: 8,
            topk: 3,
            units: 512,
            payload: Payload::F32,
            placement: PlacementSpec::Contiguous,
            physical_ids: false,
            alignment: 4,
            tokens: vec![37, 40, 0, 31],
            masked_percent: 10,
            routing: Routing::Uniform,
            weights: true,
            seed,
        };
        let how = How {
            mode,
            float: Float::F32,
            weighted: mode != Mode::RankMajor,
            biases: 1,
            capacity: false,
            nodes: Nodes::Sizes(if seed == 3 { &[1, 3] } else { &[2, 2] }),
            hierarchy: Hierarchy::Node,
            node_reduced: true,
            narrow_ids: false,
        };
        check(&spec.build(), how, seed, &Hosts);
        check(&spec.build(), How { node_reduced: false, ..how }, seed, &Hosts);
    }
}
