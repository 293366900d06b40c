//! Every odd shape against the naive oracle, bit by bit, on mapped and on bulk peers.

mod common;

use std::collections::BTreeMap;

use common::exercise::{How, check};
use common::ground::Hosts;
use ep_bench::oracle::{Float, JobSpec, Mode, job_specs};
use proptest::prelude::*;

fn how() -> impl Strategy<Value = How> {
    let modes = prop_oneof![
        2 => Just(Mode::RankMajor),
        2 => Just(Mode::ExpertExact),
        1 => Just(Mode::ExpertReduced),
    ];
    let float = prop::sample::select(Float::ALL.to_vec());
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (modes, float, 0..=2usize, flags).prop_map(
        |(mode, float, biases, (weighted, capacity, bulk, narrow_ids))| How {
            mode,
            float,
            weighted: weighted && mode != Mode::RankMajor,
            biases,
            capacity,
            bulk,
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

/// The random cases reach every mode, payload and transport, so that none is left to luck.
#[test]
fn fixed_cases_cover_every_mode() {
    let mut covered = BTreeMap::new();
    for seed in 0..120u64 {
        let job = JobSpec::random(seed).build();
        let mode = [Mode::RankMajor, Mode::ExpertExact, Mode::ExpertReduced][seed as usize % 3];
        let bit = |n: u64| (seed / 3) >> n & 1 == 1;
        let how = How {
            mode,
            float: Float::ALL[(seed / 3) as usize % 3],
            weighted: bit(0) && mode != Mode::RankMajor,
            biases: (seed % 3) as usize,
            capacity: bit(1),
            bulk: bit(2),
            narrow_ids: bit(3),
        };
        check(&job, how, seed, &Hosts);
        *covered.entry((format!("{mode:?}"), how.bulk)).or_insert(0) += 1;
    }
    assert_eq!(covered.len(), 6, "{covered:?}");
}
