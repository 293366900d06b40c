//! A job run through the library, on the host or on GPUs, compared with the oracle.

use super::ground::{Ground, Grounds};
use super::{Matrix, Nodes, Tokens, builder, float_kind, node_oracle, ranks};
use ep_bench::oracle::{
    Combine, Float, Job, Mode, Oracle, WeightRows, compare_combined, random_rows,
};
use ep_runtime::{
    CombineOpts, Combined, DispatchOpts, Dispatched, Ep, EpError, Group, Hierarchy, Layout,
    MoeShape, Precision, Received, Route, Rows, SourceToken,
};

/// How a job is run.
#[derive(Clone, Copy, Debug)]
pub struct How {
    pub mode: Mode,
    pub float: Float,
    pub weighted: bool,
    pub biases: usize,
    pub capacity: bool,
    pub nodes: Nodes,
    pub hierarchy: Hierarchy,
    /// Combine by `Precision::NodeReduced`.
    pub node_reduced: bool,
    pub narrow_ids: bool,
}

/// Whether blocks between ranks that are not mapped have a fixed size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    Exact,
    /// They hold whatever there can be,
    Whole,
    /// or what there is in this job at the most.
    Tight,
}

impl How {
    /// One of the ways, by seed, on mapped ranks.
    pub fn of(seed: u64) -> Self {
        let mode = [Mode::RankMajor, Mode::ExpertExact, Mode::ExpertReduced][seed as usize % 3];
        let bit = |n: u64| (seed / 3) >> n & 1 == 1;
        Self {
            mode,
            float: Float::ALL[(seed / 9) as usize % 3],
            weighted: bit(0) && mode != Mode::RankMajor,
            biases: (seed % 3) as usize,
            capacity: bit(1),
            nodes: Nodes::Mapped,
            hierarchy: ep_runtime::Hierarchy::Flat,
            node_reduced: false,
            narrow_ids: bit(2),
        }
    }
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
            _ if self.node_reduced => Precision::NodeReduced,
            Mode::ExpertReduced => Precision::Reduced,
            _ => Precision::Exact,
        };
        CombineOpts { precision, weighted: self.weighted, ..CombineOpts::default() }
    }
}

impl Blocks {
    fn of(self, shape: MoeShape, oracle: &Oracle<'_>) -> MoeShape {
        match self {
            Self::Exact => shape,
            Self::Whole => shape.fixed_blocks(),
            Self::Tight => {
                let most = |of: &dyn Fn(&ep_bench::oracle::Dispatched<'_>, usize) -> usize| {
                    let pairs = oracle.ranks.iter().flat_map(|rank| {
                        (0..oracle.ranks.len()).map(move |source| of(rank, source))
                    });
                    pairs.max().unwrap_or(0).max(1)
                };
                let rows = most(&|rank, source| {
                    rank.rank_major.iter().filter(|row| row.source_rank == source).count()
                });
                let expert_rows = most(&|rank, source| {
                    let rows = rank.expert_major.rows.iter().filter_map(|row| row.row);
                    rows.filter(|&row| rank.rank_major[row].source_rank == source).count()
                });
                shape.fixed_blocks().max_block_rows(rows).max_block_expert_rows(expert_rows)
            }
        }
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

fn check_received(
    oracle: &Oracle<'_>,
    rank: usize,
    how: How,
    got: &Dispatched,
    rows: Received<'_>,
) {
    let expected = &oracle.ranks[rank];
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

fn run_rank(
    ep: &Ep,
    ground: &dyn Ground,
    oracle: &Oracle<'_>,
    how: How,
    outputs: &Outputs,
) -> Result<Got, EpError> {
    let (job, rank, queue) = (oracle.job, ep.rank(), ground.queue());
    let tokens = Tokens::new(job, rank);
    let opts = how.dispatch(job);
    let payload = ground.payload(&tokens)?;
    let route = ground.route(&tokens, how.narrow_ids);
    let first = ep.dispatch(&queue, payload, route, &opts)?;
    let look = |got: &Dispatched| -> Result<(), EpError> {
        let rows = got.to_host(&queue)?;
        check_received(oracle, rank, how, got, rows.rows());
        Ok(())
    };
    look(&first)?;
    let handle = first.handle().clone();
    if ground.owns() {
        let shown = first.rows().len();
        assert_eq!(first.into_owned(&queue)?.rows().len(), shown);
    } else {
        first.release(&queue);
    }

    let mut cached = ep.dispatch(&queue, payload, Route::Cached(&handle), &opts)?;
    look(&cached)?;
    ground.write(&mut cached, float_kind(how.float), &outputs.rows[rank], &outputs.weights[rank]);
    let got = combine(ep, ground, oracle, how, outputs, cached)?;

    // A slot that received nothing gives the same sums: the way of gradients.
    let mut slot = ep.combine_slot(&handle, &queue)?;
    ground.write(&mut slot, float_kind(how.float), &outputs.rows[rank], &outputs.weights[rank]);
    let again = combine(ep, ground, oracle, how, outputs, slot)?;
    assert_eq!(again.combined, got.combined, "rank {rank}");
    assert_eq!(bits(&again.weights), bits(&got.weights), "rank {rank}");
    assert_eq!(ep.free_slots(), 2);
    Ok(got)
}

fn combine(
    ep: &Ep,
    ground: &dyn Ground,
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
    let biases: Vec<Rows<'_>> = biases.iter().map(|b| ground.rows(b, dtype)).collect();
    let mut out = Matrix::zeroed(tokens, row_bytes);
    let mut weights = Matrix::zeroed(tokens, job.topk * 4);
    let queue = ground.queue();
    let mut rows = Some(rows);
    ground.with_outputs(&mut out, dtype, &mut weights, &mut |rows_out, weights_out| {
        let into = Combined::new(rows_out).biases(&biases).weight_rows(weights_out);
        let rows = rows.take().expect("called once");
        let event = rows.combine(&queue, into, &how.combine())?;
        event.wait(std::time::Duration::from_secs(30))
    })?;
    let weights = weights.bytes()[..tokens * job.topk * 4].chunks(4);
    let weights = weights.map(|w| f32::from_ne_bytes(w.try_into().expect("4 bytes"))).collect();
    Ok(Got { combined: out.to_rows(), weights })
}

/// Runs `job` on `grounds` and compares all it gives with the oracle.
pub fn check(job: &Job, how: How, seed: u64, grounds: &dyn Grounds) {
    check_in(Blocks::Exact, job, how, seed, grounds);
}

/// As [`check`], in such blocks.
pub fn check_in(blocks: Blocks, job: &Job, how: How, seed: u64, grounds: &dyn Grounds) {
    let oracle = Oracle::new(job).expect("a valid job");
    let outputs = outputs(&oracle, how, seed);
    let got = ranks(job.ranks, |group| one_rank(&group, &oracle, (how, blocks), &outputs, grounds));
    compare(&oracle, how, &outputs, got.iter().enumerate());
}

/// As [`check`] for this rank of a group of as many ranks as the job has. A digest of what it got.
pub fn check_rank(group: &Group, job: &Job, how: How, seed: u64, grounds: &dyn Grounds) -> u64 {
    let oracle = Oracle::new(job).expect("a valid job");
    let outputs = outputs(&oracle, how, seed);
    let got = one_rank(group, &oracle, (how, Blocks::Exact), &outputs, grounds);
    compare(&oracle, how, &outputs, std::iter::once((group.rank(), &got)));
    let weights = got.weights.iter().map(|w| w.to_le_bytes().to_vec());
    let bytes = got.combined.iter().cloned().chain(weights).flatten();
    // FNV-1a, 64 bits.
    bytes.fold(0xcbf2_9ce4_8422_2325, |digest: u64, byte| {
        (digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

fn one_rank(
    group: &Group,
    oracle: &Oracle<'_>,
    (how, blocks): (How, Blocks),
    outputs: &Outputs,
    grounds: &dyn Grounds,
) -> Got {
    let (job, rank) = (oracle.job, group.rank());
    let builder = builder(job, how.float, how.nodes, |shape| blocks.of(shape, oracle));
    let builder = builder.hierarchy(how.hierarchy);
    let ep = grounds.place(rank, job.ranks, builder).build(group).expect("build");
    let ground = grounds.ground(rank, job.ranks);
    run_rank(&ep, &*ground, oracle, how, outputs).expect("dispatch and combine")
}

fn compare<'a>(
    oracle: &Oracle<'_>,
    how: How,
    outputs: &Outputs,
    got: impl Iterator<Item = (usize, &'a Got)>,
) {
    let combine = Combine {
        mode: how.mode,
        dtype: how.float,
        weighted: how.weighted,
        outputs: &outputs.rows,
        biases: &outputs.biases,
    };
    let expected = match how.node_reduced {
        false => oracle.combine(&combine).expect("fitting outputs"),
        true => node_oracle::combine(oracle, &combine, &how.nodes.of(oracle.job.ranks)),
    };
    let carried = match how.mode {
        Mode::RankMajor => WeightRows::RankMajor(&outputs.weights),
        _ => WeightRows::ExpertMajor(&outputs.weights),
    };
    let weights = oracle.combine_weights(carried).expect("fitting weights");
    for (rank, got) in got {
        compare_combined(rank, how.float, &expected[rank], &got.combined).expect("equal sums");
        assert_eq!(bits(&got.weights), bits(&weights[rank]), "weights of rank {rank}");
    }
}
