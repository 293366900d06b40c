//! Every odd shape against the naive oracle, bit by bit, on mapped and on bulk peers.

mod common;

use std::collections::BTreeMap;

use common::{Matrix, Tokens, builder, eps, float_kind};
use ep_bench::oracle::{
    Combine, Float, Job, JobSpec, Mode, Oracle, WeightRows, compare_combined, job_specs,
    random_rows,
};
use ep_runtime::{
    CombineOpts, Combined, DispatchOpts, Dispatched, Ep, EpError, Ids, Layout, Precision, Queue,
    Route, Rows, SourceToken,
};
use proptest::prelude::*;

/// How a job is run.
#[derive(Clone, Copy, Debug)]
struct How {
    mode: Mode,
    float: Float,
    weighted: bool,
    biases: usize,
    capacity: bool,
    bulk: bool,
    narrow_ids: bool,
}

impl How {
    fn layout(&self, job: &Job) -> Layout {
        match self.mode {
            Mode::RankMajor => Layout::RankMajor,
            _ => Layout::ExpertMajor { alignment: job.alignment },
        }
    }

    fn dispatch(&self, job: &Job) -> DispatchOpts {
        DispatchOpts {
            layout: self.layout(job),
            capacity: self.capacity,
            physical_ids: job.physical_ids,
            ..DispatchOpts::default()
        }
    }

    fn combine(&self) -> CombineOpts {
        let precision = match self.mode {
            Mode::ExpertReduced => Precision::Reduced,
            _ => Precision::Exact,
        };
        CombineOpts { precision, weighted: self.weighted, ..CombineOpts::default() }
    }
}

/// What one rank got.
struct Got {
    combined: Vec<Vec<u8>>,
    weights: Vec<f32>,
}

/// The rows every rank writes and the weights they carry, by rank.
struct Outputs {
    rows: Vec<Vec<Vec<u8>>>,
    weights: Vec<Vec<f32>>,
    biases: Vec<Vec<Vec<Vec<u8>>>>,
}

fn outputs(oracle: &Oracle<'_>, how: How, seed: u64) -> Outputs {
    let job = oracle.job;
    let (mut rows, mut weights) = (Vec::new(), Vec::new());
    for (rank, result) in (0u64..).zip(&oracle.ranks) {
        let (count, per_row) = match how.mode {
            Mode::RankMajor => (result.rank_major.len(), job.topk),
            _ => (result.expert_major.rows.len(), 1),
        };
        rows.push(random_rows(seed ^ (rank << 32), count, job.hidden, how.float));
        let carried = (0..count * per_row).map(|i| (i as f32).mul_add(0.5, rank as f32));
        weights.push(carried.collect());
    }
    let biases = (0..how.biases as u64).map(|bias| {
        let ranks = (0u64..).zip(&job.inputs);
        let rows = ranks.map(|(rank, input)| {
            random_rows(!seed ^ (rank << 32) ^ bias, input.tokens, job.hidden, how.float)
        });
        rows.collect()
    });
    Outputs { rows, weights, biases: biases.collect() }
}

fn check_received(oracle: &Oracle<'_>, rank: usize, how: How, got: &Dispatched) {
    let expected = &oracle.ranks[rank];
    let rows = got.rows();
    let sources: Vec<SourceToken> = expected
        .rank_major
        .iter()
        .map(|r| SourceToken { rank: r.source_rank, token: r.source_token })
        .collect();
    let scales = |i: usize| rows.scales().map_or(&[][..], |s| s.bytes(i));
    let count = if how.mode == Mode::RankMajor {
        for (i, row) in expected.rank_major.iter().enumerate() {
            assert_eq!(rows.payload().bytes(i), row.payload, "rank {rank} row {i} payload");
            assert_eq!(scales(i), row.scales, "rank {rank} row {i} scales");
            let ids = rows.topk_ids().expect("rank-major rows have ids").get(i);
            assert_eq!(ids, &row.ids[..], "rank {rank} row {i} ids");
            assert_eq!(bits(rows.weights().get(i)), bits(&row.weights), "rank {rank} row {i}");
            assert_eq!(rows.source(i), Some(sources[i]), "rank {rank} row {i} source");
        }
        expected.rank_major.len()
    } else {
        let layout = &expected.expert_major;
        assert_eq!(got.offsets(), layout.offsets, "rank {rank} offsets");
        let counts: Vec<u32> = got.counts().iter().map(|&n| n as u32).collect();
        assert_eq!(counts, layout.counts, "rank {rank} counts");
        for (i, row) in layout.rows.iter().enumerate() {
            assert_eq!(rows.payload().bytes(i), &row.payload[..], "rank {rank} row {i} payload");
            assert_eq!(scales(i), &row.scales[..], "rank {rank} row {i} scales");
            assert_eq!(bits(rows.weights().get(i)), bits(&[row.weight]), "rank {rank} row {i}");
            assert_eq!(rows.source(i), row.row.map(|r| sources[r]), "rank {rank} row {i} source");
        }
        layout.rows.len()
    };
    assert_eq!(got.num_rows(), count, "rank {rank} rows");
    assert!(how.capacity || rows.len() == count);
    for behind in count..rows.len() {
        assert_eq!(rows.source(behind), None, "rank {rank} row {behind} is behind the last");
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn write(result: &mut Dispatched, how: How, rows: &[Vec<u8>], weights: &[f32]) {
    let mut outputs = result.rows_mut(float_kind(how.float)).expect("combinable");
    let per_row = weights.len() / rows.len().max(1);
    for (i, row) in rows.iter().enumerate() {
        outputs.payload().bytes_mut(i).copy_from_slice(row);
        outputs.weights(i).copy_from_slice(&weights[i * per_row..][..per_row]);
    }
}

fn run_rank(ep: &Ep, oracle: &Oracle<'_>, how: How, outputs: &Outputs) -> Result<Got, EpError> {
    let (job, rank, queue) = (oracle.job, ep.rank(), Queue::host());
    let tokens = Tokens::new(job, rank);
    let narrow: Vec<i32> = tokens.ids.iter().map(|&id| id as i32).collect();
    let ids = if how.narrow_ids { Ids::I32(&narrow) } else { tokens.ids() };
    let route = Route::Topk { ids, weights: tokens.weights.as_deref() };
    let opts = how.dispatch(job);
    let first = ep.dispatch(&queue, tokens.payload()?, route, &opts)?;
    check_received(oracle, rank, how, &first);
    let handle = first.handle().clone();
    let owned = first.into_owned(&queue).unwrap();
    assert_eq!(
        owned.rows().len(),
        if how.capacity { owned.rows().len() } else { handle.num_rows() }
    );

    let mut cached = ep.dispatch(&queue, tokens.payload()?, Route::Cached(&handle), &opts)?;
    check_received(oracle, rank, how, &cached);
    write(&mut cached, how, &outputs.rows[rank], &outputs.weights[rank]);
    let got = combine(ep, oracle, how, outputs, cached)?;

    // A slot that received nothing gives the same sums: the way of gradients.
    let mut slot = ep.combine_slot(&handle, &queue)?;
    write(&mut slot, how, &outputs.rows[rank], &outputs.weights[rank]);
    let again = combine(ep, oracle, how, outputs, slot)?;
    assert_eq!(again.combined, got.combined, "rank {rank}");
    assert_eq!(bits(&again.weights), bits(&got.weights), "rank {rank}");
    assert_eq!(ep.free_slots(), 2);
    Ok(got)
}

fn combine(
    ep: &Ep,
    oracle: &Oracle<'_>,
    how: How,
    outputs: &Outputs,
    rows: Dispatched,
) -> Result<Got, EpError> {
    let (job, rank) = (oracle.job, ep.rank());
    let row_bytes = job.hidden * how.float.size();
    let dtype = float_kind(how.float).dtype();
    let tokens = job.inputs[rank].tokens;
    let biases: Vec<Matrix> =
        outputs.biases.iter().map(|b| Matrix::new(&b[rank], row_bytes)).collect();
    let biases: Vec<Rows<'_>> = biases.iter().map(|b| b.rows(dtype)).collect();
    let mut out = Matrix::zeroed(tokens, row_bytes);
    let mut weights = vec![f32::NAN; tokens * job.topk];
    let into = Combined::new(out.rows_mut(dtype)).biases(&biases).weights(&mut weights);
    rows.combine(&Queue::host(), into, &how.combine())?;
    Ok(Got { combined: out.to_rows(), weights })
}

fn check(job: &Job, how: How, seed: u64) {
    let oracle = Oracle::new(job).expect("a valid job");
    let outputs = outputs(&oracle, how, seed);
    let combine = Combine {
        mode: how.mode,
        dtype: how.float,
        weighted: how.weighted,
        outputs: &outputs.rows,
        biases: &outputs.biases,
    };
    let expected = oracle.combine(&combine).expect("fitting outputs");
    let carried = match how.mode {
        Mode::RankMajor => WeightRows::RankMajor(&outputs.weights),
        _ => WeightRows::ExpertMajor(&outputs.weights),
    };
    let weights = oracle.combine_weights(carried).expect("fitting weights");
    let got = eps(job.ranks, &builder(job, how.float, how.bulk), |ep| {
        run_rank(&ep, &oracle, how, &outputs).expect("dispatch and combine")
    });
    for (rank, got) in got.iter().enumerate() {
        compare_combined(rank, how.float, &expected[rank], &got.combined).expect("equal sums");
        assert_eq!(bits(&got.weights), bits(&weights[rank]), "weights of rank {rank}");
    }
}

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
        check(&spec.build(), how, seed);
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
        check(&job, how, seed);
        *covered.entry((format!("{mode:?}"), how.bulk)).or_insert(0) += 1;
    }
    assert_eq!(covered.len(), 6, "{covered:?}");
}
