//! Comparing what was received and combined with the naive oracle, bit by bit.

use crate::case::{Case, Dtype, Layout, Operation};
use crate::data::{Input, outputs};
use crate::engine::{Capacity, Engine, Held, Seat};
use crate::oracle::{
    Combine, Dispatched, ExpertMajor, ExpertRow, Float, Job, Mode, Oracle, Payload, Placement,
    RankInput, compare_combined, compare_expert_major, compare_rank_major,
};
use crate::plan::Traffic;
use crate::routing::Router;
use crate::{BenchError, Result};

/// The oracle sums one element after the other. Jobs with more received elements than this are
/// verified with fewer tokens, which the report says.
pub const MOST_SUMMED: usize = 1 << 27;

/// What a case has to give, on all ranks.
#[derive(Debug)]
pub struct Expected {
    /// The case as it is verified: possibly with fewer tokens.
    pub case: Case,
    /// What the case moves as it is timed.
    pub traffic: Traffic,
    verified: Traffic,
    router: Router,
    job: Job,
}

impl Expected {
    /// Makes the whole job that `case` is verified with.
    ///
    /// # Errors
    /// As [`Router::new`].
    pub fn new(case: &Case) -> Result<Self> {
        let traffic = Traffic::of(case)?;
        let (case, verified) = affordable(case, &traffic)?;
        let router = Router::new(&case)?;
        let shape = case.shape;
        let (row, scale) =
            (case.dtype.payload_bytes(shape.hidden), case.dtype.scale_bytes(shape.hidden));
        let inputs = (0..shape.ranks).map(|rank| {
            let input = Input::of(&case, &router, rank);
            let tokens = input.routes.tokens;
            let rows = |bytes: &[u8], size: usize| -> Vec<Vec<u8>> {
                (0..tokens).map(|t| bytes[t * size..(t + 1) * size].to_vec()).collect()
            };
            RankInput {
                tokens,
                payload: rows(&input.payload, row),
                scales: rows(&input.scales, scale),
                ids: input.routes.ids,
                weights: Some(input.routes.weights),
            }
        });
        let job = Job {
            ranks: shape.ranks,
            experts: shape.experts,
            hidden: shape.hidden,
            topk: shape.topk,
            payload: payload(case.dtype),
            placement: Placement::Contiguous,
            physical_ids: false,
            alignment: case.alignment,
            inputs: inputs.collect(),
        };
        Ok(Self { case, traffic, verified, router, job })
    }

    /// What has to fit on every rank, for verifying and for timing.
    pub fn capacity(&self) -> Capacity {
        let most = |pick: fn(&Traffic) -> &Vec<usize>| {
            let all = pick(&self.traffic).iter().chain(pick(&self.verified));
            all.copied().max().unwrap_or(0).max(1)
        };
        Capacity {
            tokens: most(|t| &t.tokens),
            rows: most(|t| &t.rows),
            expert_rows: most(|t| &t.expert_rows),
        }
    }

    /// Runs the oracle.
    ///
    /// # Errors
    /// When the oracle refuses the job, which routes made here never give it reason to.
    pub fn answers(&self) -> Result<Answers<'_>> {
        let refused = |e| BenchError::Usage(format!("{}: {e}", self.case.title()));
        let oracle = Oracle::new(&self.job).map_err(refused)?;
        if self.case.operation == Operation::Dispatch {
            return Ok(Answers { expected: self, oracle, combined: Vec::new() });
        }
        let size = self.case.dtype.back().payload_bytes(self.case.shape.hidden);
        let rows: Vec<Vec<Vec<u8>>> = (oracle.ranks.iter().enumerate())
            .map(|(rank, held)| {
                let rows = match self.case.layout {
                    Layout::RankMajor => held.rank_major.len(),
                    Layout::ExpertMajor => held.expert_major.rows.len(),
                };
                outputs(&self.case, rank, rows).chunks_exact(size).map(<[u8]>::to_vec).collect()
            })
            .collect();
        let mode = match self.case.layout {
            Layout::RankMajor => Mode::RankMajor,
            Layout::ExpertMajor => Mode::ExpertExact,
        };
        let combine = Combine {
            mode,
            dtype: float(self.case.dtype.back()),
            weighted: weighted(&self.case),
            outputs: &rows,
            biases: &[],
        };
        let combined = oracle.combine(&combine).map_err(refused)?;
        Ok(Answers { expected: self, oracle, combined })
    }
}

/// Whether combine multiplies rows by their gate weights: expert-major rows are one expert's.
pub fn weighted(case: &Case) -> bool {
    case.layout == Layout::ExpertMajor
}

/// `case` with as many tokens as the oracle can do in seconds, and what that moves.
fn affordable(case: &Case, traffic: &Traffic) -> Result<(Case, Traffic)> {
    let (mut case, mut traffic) = (case.clone(), traffic.clone());
    // A dispatch is only compared, not summed.
    let most = if case.operation == Operation::Dispatch { 16 * MOST_SUMMED } else { MOST_SUMMED };
    loop {
        let rows: usize = traffic.rows.iter().chain(&traffic.expert_rows).sum();
        if rows.saturating_mul(case.shape.hidden) <= most || case.shape.tokens <= 1 {
            return Ok((case, traffic));
        }
        case.shape.tokens /= 2;
        traffic = Traffic::of(&case)?;
    }
}

/// The oracle's answers.
#[derive(Debug)]
pub struct Answers<'a> {
    expected: &'a Expected,
    oracle: Oracle<'a>,
    combined: Vec<Vec<Vec<u8>>>,
}

impl<'a> Answers<'a> {
    /// What `rank` must hold after dispatch.
    pub fn of(&self, rank: usize) -> &Dispatched<'a> {
        &self.oracle.ranks[rank]
    }

    /// What `rank` must hold after combine, a row per token; nothing where the case only
    /// dispatches.
    pub fn combined(&self, rank: usize) -> &[Vec<u8>] {
        self.combined.get(rank).map_or(&[], Vec::as_slice)
    }

    /// Runs the case once on this rank and compares: the dispatched rows, the rows of a cached
    /// dispatch if the case has one, and the combined rows if the case combines.
    ///
    /// # Errors
    /// [`BenchError::Verification`] with the first differences; what the library says.
    pub fn check(&self, seat: &dyn Seat, engine: &mut dyn Engine) -> Result<()> {
        let (case, rank) = (&self.expected.case, seat.rank());
        let input = Input::of(case, &self.expected.router, rank);
        engine.dispatch(&input, false)?;
        self.check_held(rank, &engine.held()?)?;
        if case.cached {
            engine.release()?;
            engine.dispatch(&input, true)?;
            self.check_held(rank, &engine.held()?)?;
        }
        if case.operation == Operation::Dispatch {
            return engine.release();
        }
        engine.fill(&outputs(case, rank, engine.rows()))?;
        engine.combine(input.routes.tokens)?;
        let back = case.dtype.back();
        let got: Vec<&[u8]> =
            engine.combined().chunks_exact(back.payload_bytes(case.shape.hidden)).collect();
        let expected: Vec<&[u8]> = self.combined(rank).iter().map(Vec::as_slice).collect();
        self.verdict(rank, compare_combined(rank, float(back), &expected, &got))
    }

    fn check_held(&self, rank: usize, held: &Held) -> Result<()> {
        let answer = self.of(rank);
        let compared = match held {
            Held::Rank(rows) => compare_rank_major(rank, &answer.rank_major, rows),
            Held::Expert { offsets, counts, rows } => {
                let row_of = |source: (usize, usize)| {
                    answer
                        .rank_major
                        .binary_search_by_key(&source, |r| (r.source_rank, r.source_token))
                        // A source that sent nothing here differs from every row there is.
                        .unwrap_or(usize::MAX)
                };
                let got = ExpertMajor {
                    offsets: offsets.clone(),
                    counts: counts.clone(),
                    rows: (rows.iter())
                        .map(|row| ExpertRow {
                            payload: row.payload.clone(),
                            scales: row.scales.clone(),
                            weight: row.weight,
                            row: row.source.map(row_of),
                        })
                        .collect(),
                };
                compare_expert_major(rank, &answer.expert_major, &got)
            }
        };
        self.verdict(rank, compared)
    }

    fn verdict<E: std::fmt::Display>(&self, rank: usize, compared: Result<(), E>) -> Result<()> {
        compared.map_err(|e| BenchError::Verification {
            rank,
            bench: self.expected.case.title(),
            detail: e.to_string().trim_end().to_owned(),
        })
    }
}

fn payload(dtype: Dtype) -> Payload {
    match dtype {
        Dtype::Bf16 => Payload::Bf16,
        Dtype::F16 => Payload::F16,
        Dtype::F32 => Payload::F32,
        Dtype::Fp8 => Payload::Fp8F32,
        Dtype::Fp8Ue8m0 => Payload::Fp8Ue8m0,
    }
}

fn float(dtype: Dtype) -> Float {
    match dtype {
        Dtype::F16 => Float::F16,
        Dtype::F32 => Float::F32,
        _ => Float::Bf16,
    }
}
