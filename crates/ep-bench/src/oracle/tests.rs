//! Small cases computed by hand, and properties of odd jobs.

use super::*;
use proptest::prelude::*;

/// Two ranks, four experts (0 and 1 on rank 0), top-2, rows of 8 bf16.
fn small() -> Job {
    let row = |value: f32| Float::Bf16.row(&[value; 8]);
    let input = |ids: &[i64], weights: &[f32], values: &[f32]| RankInput {
        tokens: values.len(),
        ids: ids.to_vec(),
        weights: Some(weights.to_vec()),
        payload: values.iter().map(|v| row(*v)).collect(),
        scales: vec![vec![]; values.len()],
    };
    Job {
        ranks: 2,
        experts: 4,
        hidden: 8,
        topk: 2,
        payload: Payload::Bf16,
        placement: Placement::Contiguous,
        physical_ids: false,
        alignment: 2,
        inputs: vec![
            // Both ranks; one rank twice, in reverse; nowhere.
            input(&[2, 0, 1, 0, -1, -1], &[0.5, 0.25, 2.0, 4.0, 8.0, 8.0], &[1.0, 2.0, 3.0]),
            input(&[-1, 3], &[9.0, 0.125], &[4.0]),
        ],
    }
}

#[test]
fn dispatch_by_hand() {
    let job = small();
    let oracle = Oracle::new(&job).unwrap();
    let row = |rank: usize, index: usize| &oracle.ranks[rank].rank_major[index];
    let source = |rank: usize| -> Vec<(usize, usize)> {
        oracle.ranks[rank].rank_major.iter().map(|r| (r.source_rank, r.source_token)).collect()
    };
    assert_eq!(source(0), [(0, 0), (0, 1)]);
    assert_eq!(source(1), [(0, 0), (1, 0)]);
    assert_eq!((&*row(0, 0).ids, &*row(0, 0).weights), (&[-1, 0][..], &[0.0, 0.25][..]));
    assert_eq!((&*row(0, 1).ids, &*row(0, 1).weights), (&[1, 0][..], &[2.0, 4.0][..]));
    assert_eq!((&*row(1, 0).ids, &*row(1, 0).weights), (&[0, -1][..], &[0.5, 0.0][..]));
    assert_eq!((&*row(1, 1).ids, &*row(1, 1).weights), (&[-1, 1][..], &[0.0, 0.125][..]));
    assert_eq!(row(1, 1).payload, Float::Bf16.row(&[4.0; 8]));
}

#[test]
fn expert_major_by_hand() {
    let mut job = small();
    let oracle = Oracle::new(&job).unwrap();
    let layout = &oracle.ranks[0].expert_major;
    assert_eq!((&layout.offsets[..], &layout.counts[..]), (&[0, 2, 4][..], &[2, 1][..]));
    let rows: Vec<_> = layout.rows.iter().map(|r| (r.row, r.weight)).collect();
    assert_eq!(rows, [(Some(0), 0.25), (Some(1), 4.0), (Some(1), 2.0), (None, 0.0)]);
    assert_eq!(layout.rows[3].payload, vec![0; 16]);
    job.alignment = 1;
    let oracle = Oracle::new(&job).unwrap();
    assert_eq!(oracle.ranks[0].expert_major.offsets, [0, 2, 3]);
    assert_eq!(oracle.ranks[1].expert_major.offsets, [0, 1, 2]);
}

#[test]
fn absent_weights_are_one_and_scales_travel() {
    let mut job = small();
    job.payload = Payload::Fp8F32;
    job.hidden = 16;
    for input in &mut job.inputs {
        input.weights = None;
        input.scales = (0..input.tokens).map(|t| vec![t as u8 + 1; 4]).collect();
    }
    let oracle = Oracle::new(&job).unwrap();
    assert_eq!(*oracle.ranks[0].rank_major[0].weights, [0.0, 1.0]);
    assert_eq!(oracle.ranks[0].rank_major[1].scales, [2; 4]);
    assert_eq!(oracle.ranks[0].expert_major.rows[3].scales, vec![0; 4]);
}

/// Outputs whose rows each repeat one number.
fn constant_rows(dtype: Float, hidden: usize, values: &[&[f32]]) -> Vec<Vec<Vec<u8>>> {
    let row = |v: &f32| dtype.row(&vec![*v; hidden]);
    values.iter().map(|rank| rank.iter().map(row).collect()).collect()
}

fn first_elements(dtype: Float, result: &[Vec<Vec<u8>>]) -> Vec<Vec<f32>> {
    let first = |row: &Vec<u8>| dtype.load(row, 0);
    result.iter().map(|rank| rank.iter().map(first).collect()).collect()
}

#[test]
fn combine_by_hand() {
    let job = small();
    let oracle = Oracle::new(&job).unwrap();
    let outputs = constant_rows(Float::F32, 8, &[&[1.0, 2.0], &[10.0, 20.0]]);
    let mut combine = Combine {
        mode: Mode::RankMajor,
        dtype: Float::F32,
        weighted: false,
        outputs: &outputs,
        biases: &[],
    };
    let result = oracle.combine(&combine).unwrap();
    assert_eq!(first_elements(Float::F32, &result), [vec![11.0, 2.0, 0.0], vec![20.0]]);

    let bias = constant_rows(Float::F32, 8, &[&[0.5, 0.5, -0.0], &[1.0]]);
    let biases = [bias.clone(), bias];
    combine.biases = &biases;
    let result = oracle.combine(&combine).unwrap();
    assert_eq!(first_elements(Float::F32, &result), [vec![12.0, 3.0, 0.0], vec![22.0]]);
    assert!(Float::F32.load(&result[0][2], 0).is_sign_positive(), "+0 + -0 + -0 is +0");

    // Rank 0: expert 0 has tokens 0 and 1, expert 1 token 1 and padding, whose content is ignored.
    let outputs = constant_rows(Float::F32, 8, &[&[1.0, 2.0, 3.0, 1e9], &[10.0, 7e7, 20.0, 7e7]]);
    for mode in [Mode::ExpertExact, Mode::ExpertReduced] {
        let plain =
            Combine { mode, outputs: &outputs, biases: &[], weighted: false, dtype: Float::F32 };
        let result = oracle.combine(&plain).unwrap();
        assert_eq!(first_elements(Float::F32, &result), [vec![11.0, 5.0, 0.0], vec![20.0]]);
        let result = oracle.combine(&Combine { weighted: true, ..plain }).unwrap();
        assert_eq!(first_elements(Float::F32, &result), [vec![5.25, 14.0, 0.0], vec![2.5]]);
    }
}

/// One token to all of four experts on two ranks, in the order 3, 1, 2, 0.
fn one_token() -> Job {
    let mut job = small();
    job.topk = 4;
    job.alignment = 1;
    job.inputs[0] = RankInput {
        tokens: 1,
        ids: vec![3, 1, 2, 0],
        weights: None,
        payload: vec![vec![0; 16]],
        scales: vec![vec![]],
    };
    job.inputs[1] = RankInput::default();
    job
}

fn combine_one(mode: Mode, dtype: Float, weights: Option<Vec<f32>>, values: [f32; 4]) -> f32 {
    let mut job = one_token();
    let weighted = weights.is_some();
    job.inputs[0].weights = weights;
    let oracle = Oracle::new(&job).unwrap();
    let outputs = constant_rows(dtype, 8, &[&values[..2], &values[2..]]);
    let result =
        oracle.combine(&Combine { mode, dtype, weighted, outputs: &outputs, biases: &[] }).unwrap();
    dtype.load(&result[0][0], 7)
}

#[test]
fn order_and_rounding_of_the_fold() {
    // In f32, 2^24 + 1 ties down to 2^24. In the order of ids, 3, 1, 2, 0, this would give 1.
    let big = 16_777_216.0;
    assert_eq!(combine_one(Mode::ExpertExact, Float::F32, None, [1.0, big, -big, 0.0]), 0.0);
    // Inside the second rank too: -2^24 comes before 1.
    assert_eq!(combine_one(Mode::ExpertExact, Float::F32, None, [big, 0.0, -big, 1.0]), 1.0);
    // Reduced has the second rank's 1 + 1 first.
    assert_eq!(combine_one(Mode::ExpertExact, Float::F32, None, [big, 0.0, 1.0, 1.0]), big);
    assert_eq!(combine_one(Mode::ExpertReduced, Float::F32, None, [big, 0.0, 1.0, 1.0]), big + 2.0);

    // In bf16, 256 + 1 ties to 256: exact keeps the f32 sum of 258, reduced rounds each rank's.
    let values = [256.0, 1.0, 1.0, 0.0];
    assert_eq!(combine_one(Mode::ExpertExact, Float::Bf16, None, values), 258.0);
    assert_eq!(combine_one(Mode::ExpertReduced, Float::Bf16, None, values), 256.0);
    // And f16 at 2048.
    let values = [2048.0, 1.0, 1.0, 0.0];
    assert_eq!(combine_one(Mode::ExpertExact, Float::F16, None, values), 2050.0);
    assert_eq!(combine_one(Mode::ExpertReduced, Float::F16, None, values), 2048.0);
}

#[test]
fn products_are_rounded_before_they_are_added() {
    // (1 + e)^2 = 1 + 2e + e^2 with e = 2^-12; rounded to f32, 2^-24 ties down. A fused
    // multiply-add would keep it and give 2^-24 instead of 0.
    let e = 2f32.powi(-12);
    // Weights are in the order of ids, 3, 1, 2, 0.
    let weights = Some(vec![0.0, 1.0 + e, 0.0, -1.0]);
    let values = [1.0 + 2.0 * e, 1.0 + e, 5.0, 5.0];
    assert_eq!(combine_one(Mode::ExpertExact, Float::F32, weights, values), 0.0);
}

#[test]
fn special_values() {
    let nan = combine_one(Mode::ExpertExact, Float::Bf16, None, [f32::NAN, 1.0, 1.0, 1.0]);
    assert!(nan.is_nan());
    let (inf, max) = (f32::INFINITY, f32::MAX);
    assert!(combine_one(Mode::ExpertExact, Float::F16, None, [inf, -inf, 0.0, 0.0]).is_nan());
    assert_eq!(combine_one(Mode::ExpertExact, Float::F32, None, [max, max, -max, -max]), inf);
    let zero = combine_one(Mode::ExpertExact, Float::F32, None, [-0.0, -0.0, -0.0, -0.0]);
    assert!(zero == 0.0 && zero.is_sign_negative(), "the fold starts from the first row, not +0");
}

#[test]
fn weights_come_home_by_hand() {
    let job = small();
    let oracle = Oracle::new(&job).unwrap();
    let rank_major = [vec![99.0, 1.0, 2.0, 3.0], vec![4.0, 99.0, 99.0, 5.0]];
    let home = oracle.combine_weights(WeightRows::RankMajor(&rank_major)).unwrap();
    assert_eq!(home, [vec![4.0, 1.0, 2.0, 3.0, 0.0, 0.0], vec![0.0, 5.0]]);
    let expert_major = [vec![1.0, 3.0, 2.0, 99.0], vec![4.0, 99.0, 5.0, 99.0]];
    let home = oracle.combine_weights(WeightRows::ExpertMajor(&expert_major)).unwrap();
    assert_eq!(home, [vec![4.0, 1.0, 2.0, 3.0, 0.0, 0.0], vec![0.0, 5.0]]);
    let short = [vec![1.0], vec![]];
    assert!(oracle.combine_weights(WeightRows::ExpertMajor(&short)).is_err());
}

#[test]
fn placements_by_hand() {
    let mut job = small();
    (job.ranks, job.experts) = (3, 8);
    let held = |job: &Job| job.local_experts().unwrap();
    assert_eq!(held(&job), [vec![0, 1, 2], vec![3, 4, 5], vec![6, 7]]);
    job.experts = 3;
    job.placement = Placement::Explicit(vec![vec![2, 0], vec![0], vec![0, 2]]);
    assert_eq!(held(&job), [vec![0, 1, 2], vec![], vec![0, 2]]);
    for bad in [vec![vec![0], vec![]], vec![vec![0], vec![3]], vec![vec![0], vec![1, 1]]] {
        job.placement = Placement::Explicit(bad);
        job.experts = 2;
        assert!(matches!(job.local_experts(), Err(Verdict::Placement(_))));
    }
    job.placement = Placement::Contiguous;
    assert!(matches!(job.local_experts(), Err(Verdict::Placement(_))));
}

#[test]
fn replicas_and_physical_ids_by_hand() {
    let mut job = small();
    job.experts = 2;
    job.placement = Placement::Explicit(vec![vec![1, 0], vec![1]]);
    job.topk = 1;
    job.inputs[0].ids = vec![0, 0, 1];
    job.inputs[1].ids = vec![0];
    job.inputs.iter_mut().for_each(|input| input.weights = None);
    let sources = |job: &Job| -> Vec<Vec<(usize, usize, i32)>> {
        let oracle = Oracle::new(job).unwrap();
        let row = |r: &RankRow| (r.source_rank, r.source_token, r.ids[0]);
        oracle.ranks.iter().map(|rank| rank.rank_major.iter().map(row).collect()).collect()
    };
    // Rank 0's token 0 takes replica 0, on rank 1; token 1, and rank 1's token 0, replica 1.
    assert_eq!(sources(&job), [vec![(0, 1, 0), (1, 0, 0)], vec![(0, 0, 0), (0, 2, 1)]]);
    // Physical: 0 is rank 0's only one, 1 and 2 are rank 1's.
    job.physical_ids = true;
    job.inputs[0].ids = vec![0, 1, 2];
    job.inputs[1].ids = vec![0];
    assert_eq!(sources(&job), [vec![(0, 0, 0), (1, 0, 0)], vec![(0, 1, 0), (0, 2, 1)]]);
    job.inputs[1].ids = vec![3];
    let verdict = Verdict::OutOfRange { rank: 1, token: 0, k: 0, id: 3, limit: 3 };
    assert_eq!(Oracle::new(&job).unwrap_err(), verdict);
}

#[test]
fn verdicts_by_hand() {
    let verdict = |change: &dyn Fn(&mut Job)| {
        let mut job = small();
        change(&mut job);
        Oracle::new(&job).map(|_| ()).unwrap_err()
    };
    let range = |id, k| Verdict::OutOfRange { rank: 0, token: 1, k, id, limit: 4 };
    assert_eq!(verdict(&|job| job.inputs[0].ids[3] = 4), range(4, 1));
    assert_eq!(verdict(&|job| job.inputs[0].ids[2] = -2), range(-2, 0));
    let twice = Verdict::Duplicate { rank: 0, token: 0, id: 2 };
    assert_eq!(verdict(&|job| job.inputs[0].ids[1] = 2), twice);
    let shapes: [&dyn Fn(&mut Job); 7] = [
        &|job| job.topk = 0,
        &|job| job.topk = 5,
        &|job| job.hidden = 7,
        &|job| job.alignment = 0,
        &|job| job.inputs[1].ids.truncate(1),
        &|job| job.inputs[0].weights = Some(vec![]),
        &|job| job.inputs.truncate(1),
    ];
    for change in shapes {
        assert!(matches!(verdict(change), Verdict::Shape(_)));
    }
    let job = small();
    let oracle = Oracle::new(&job).unwrap();
    assert_eq!(oracle.check_capacity(Some(2), Some(4)), Ok(()));
    let rows = Verdict::TooManyRows { rank: 0, needed: 2, max: 1 };
    assert_eq!(oracle.check_capacity(Some(1), None), Err(rows));
    let rows = Verdict::TooManyExpertRows { rank: 0, needed: 4, max: 3 };
    assert_eq!(oracle.check_capacity(None, Some(3)), Err(rows));
}

#[test]
fn combine_refuses_what_does_not_fit() {
    let job = small();
    let oracle = Oracle::new(&job).unwrap();
    let outputs = constant_rows(Float::F16, 8, &[&[1.0, 2.0], &[1.0, 2.0]]);
    let good = Combine {
        mode: Mode::RankMajor,
        dtype: Float::F16,
        weighted: false,
        outputs: &outputs,
        biases: &[],
    };
    assert!(oracle.combine(&good).is_ok());
    let biases = vec![constant_rows(Float::F16, 8, &[&[1.0; 3], &[1.0]]); 3];
    let short = constant_rows(Float::F16, 8, &[&[1.0; 2], &[1.0]]);
    for bad in [
        Combine { weighted: true, ..good },
        Combine { dtype: Float::F32, ..good },
        Combine { mode: Mode::ExpertExact, ..good },
        Combine { outputs: &outputs[..1], ..good },
        Combine { biases: &biases, ..good },
        Combine { biases: std::slice::from_ref(&short), ..good },
    ] {
        assert!(matches!(oracle.combine(&bad), Err(Verdict::Shape(_))));
    }
}

#[test]
fn differences_name_the_place() {
    let job = small();
    let oracle = Oracle::new(&job).unwrap();
    let expected = &oracle.ranks[0];
    assert_eq!(compare_rank_major(0, &expected.rank_major, &expected.rank_major), Ok(()));
    let mut got = expected.rank_major.clone();
    let wrong = Float::Bf16.row(&[2.0, 2.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0]);
    got[1].payload = &wrong;
    got[0].weights.to_mut()[0] = -0.0;
    let found = compare_rank_major(0, &expected.rank_major, &got).unwrap_err();
    assert_eq!(found.found, 2);
    assert_eq!(
        found.to_string(),
        "2 differences\n  \
         rank 0 row 0 weights: element 0 of 2: expected 0.0 (0x00000000), got -0.0 (0x80000000) \
         (1 differ)\n  \
         rank 0 row 1 payload: element 4 of 16: expected 0, got 64 (1 differ)\n"
    );
    let mut layout = expected.expert_major.clone();
    assert_eq!(compare_expert_major(0, &expected.expert_major, &layout), Ok(()));
    layout.rows[3].row = Some(1);
    layout.counts[1] = 2;
    let found = compare_expert_major(0, &expected.expert_major, &layout).unwrap_err();
    assert_eq!(found.found, 2);

    let quiet = |bits: u16| vec![bits.to_le_bytes().to_vec()];
    assert_eq!(compare_combined(3, Float::Bf16, &quiet(0x7fc0), &quiet(0xffc1)), Ok(()));
    let found = compare_combined(3, Float::Bf16, &quiet(0x3f80), &quiet(0x3f81)).unwrap_err();
    assert_eq!(
        found.shown,
        [
            "rank 3 token 0: element 0 of 1: expected 1.0 (0x3f80), got 1.0078125 (0x3f81) (1 differ)"
        ]
    );
    assert!(compare_combined(3, Float::Bf16, &quiet(0), &quiet(0x8000)).is_err(), "zeros' signs");
    assert!(compare_combined(3, Float::Bf16, &quiet(0), &[vec![0; 4]]).is_err(), "lengths");
    assert!(compare_combined(3, Float::Bf16, &quiet(0), &[]).is_err(), "missing tokens");
    let many = vec![vec![0, 0]; 100];
    let found = compare_combined(0, Float::Bf16, &many, &vec![vec![1, 0]; 100]).unwrap_err();
    assert_eq!((found.shown.len(), found.found), (8, 100));
    assert!(found.to_string().ends_with("  and 92 more\n"));
}

/// What must hold of any dispatch, counted another way than the oracle does.
fn check_dispatch(job: &Job) {
    let oracle = Oracle::new(job).unwrap();
    let wanted = job.inputs.iter().flat_map(|i| &i.ids).filter(|id| **id != -1).count();
    let listed: usize = (oracle.ranks.iter().flat_map(|r| &r.rank_major))
        .map(|row| row.ids.iter().filter(|id| **id != -1).count())
        .sum();
    assert_eq!(wanted, listed, "every id is in exactly one row");
    for rank in &oracle.ranks {
        let order: Vec<_> =
            rank.rank_major.iter().map(|r| (r.source_rank, r.source_token)).collect();
        assert!(order.is_sorted_by(|a, b| a < b));
        let layout = &rank.expert_major;
        for (expert, count) in layout.counts.iter().enumerate() {
            let (start, end) =
                (layout.offsets[expert] as usize, layout.offsets[expert + 1] as usize);
            let rows = &layout.rows[start..end];
            assert_eq!(rows.len(), (*count as usize).next_multiple_of(job.alignment));
            let real: Vec<_> = rows[..*count as usize].iter().map(|r| r.row.unwrap()).collect();
            assert!(real.is_sorted_by(|a, b| a < b));
            assert!(real.iter().all(|r| rank.rank_major[*r].ids.contains(&(expert as i32))));
            assert!(rows[*count as usize..].iter().all(|r| r.row.is_none()));
        }
        let rows: u32 = layout.counts.iter().sum();
        let ids = rank.rank_major.iter().flat_map(|r| r.ids.iter()).filter(|id| **id != -1);
        assert_eq!(rows as usize, ids.count());
    }
}

/// Weights survive the way out and home; all-ones rows count ranks and experts.
fn check_combine(job: &Job) {
    let oracle = Oracle::new(job).unwrap();
    let rank_major: Vec<Vec<f32>> = (oracle.ranks.iter())
        .map(|r| r.rank_major.iter().flat_map(|row| row.weights.to_vec()).collect())
        .collect();
    let expert_major: Vec<Vec<f32>> = (oracle.ranks.iter())
        .map(|r| r.expert_major.rows.iter().map(|row| row.weight).collect())
        .collect();
    let home = oracle.combine_weights(WeightRows::RankMajor(&rank_major)).unwrap();
    assert_eq!(home, oracle.combine_weights(WeightRows::ExpertMajor(&expert_major)).unwrap());
    for (input, home) in job.inputs.iter().zip(&home) {
        for (at, id) in input.ids.iter().enumerate() {
            let sent = input.weights.as_ref().map_or(1.0, |w| w[at]);
            assert_eq!(home[at], if *id == -1 { 0.0 } else { sent });
        }
    }
    let ones = |rows: usize| vec![Float::F16.row(&vec![1.0; job.hidden]); rows];
    for mode in [Mode::ExpertExact, Mode::ExpertReduced] {
        let outputs: Vec<_> =
            oracle.ranks.iter().map(|r| ones(r.expert_major.rows.len())).collect();
        let dtype = Float::F16;
        let combine = Combine { mode, dtype, weighted: false, outputs: &outputs, biases: &[] };
        let result = first_elements(dtype, &oracle.combine(&combine).unwrap());
        for (input, result) in job.inputs.iter().zip(result) {
            let experts = |ids: &[i64]| ids.iter().filter(|id| **id != -1).count() as f32;
            assert!(input.ids.chunks(job.topk).map(experts).eq(result));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn odd_jobs_dispatch_and_combine(spec in job_specs()) {
        let job = spec.build();
        check_dispatch(&job);
        check_combine(&job);
        prop_assert_eq!(&job, &spec.build(), "the same numbers give the same job");
    }

    #[test]
    fn one_fault_is_the_verdict(spec in job_specs(), seed in any::<u64>()) {
        for fault in [Spoil::TooLarge, Spoil::TooSmall, Spoil::Duplicate] {
            let mut job = spec.build();
            match spoil(&mut job, fault, seed) {
                Some(verdict) => prop_assert_eq!(Oracle::new(&job).unwrap_err(), verdict),
                None => prop_assert!(Oracle::new(&job).is_ok()),
            }
        }
    }
}

#[test]
fn random_jobs_reach_the_corners() {
    let specs: Vec<JobSpec> = (0..2000).map(JobSpec::random).collect();
    let seen = |what: &dyn Fn(&JobSpec) -> bool| specs.iter().filter(|s| what(s)).count() >= 20;
    assert!((1..=9).all(|ranks| seen(&|s| s.ranks == ranks)));
    assert!(seen(&|s| s.tokens.iter().all(|t| *t == 0)));
    assert!(seen(&|s| s.tokens.contains(&0) && s.tokens.iter().any(|t| *t > 5)));
    assert!(seen(&|s| s.topk == 1) && seen(&|s| s.topk == s.experts && s.topk > 1));
    assert!(seen(&|s| s.placement == PlacementSpec::Explicit { replicas: 3 } && s.physical_ids));
    assert!(seen(&|s| s.payload == Payload::Fp8F32 && s.units > 8), "partial scale blocks");
    let jobs: Vec<Job> = specs[..500].iter().map(JobSpec::build).collect();
    let seen = |what: &dyn Fn(&Job) -> bool| jobs.iter().filter(|j| what(j)).count() >= 5;
    assert!(seen(&|j| j.local_experts().unwrap().contains(&vec![])), "a rank without experts");
    assert!(seen(&|j| j.inputs.iter().any(|i| i.ids.contains(&-1))));
    assert!(seen(&|j| j.experts % j.ranks != 0 && j.placement == Placement::Contiguous));
    assert!(seen(&|j| j.ranks > 1 && j.experts < j.ranks), "fewer experts than ranks");
    assert!(jobs.iter().all(|j| Oracle::new(j).is_ok()));
}
