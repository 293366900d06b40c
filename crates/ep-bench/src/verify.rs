//! Comparing what was received and combined with the naive oracle, bit by bit.

use std::hash::{DefaultHasher, Hasher as _};

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
    /// Whether `case` has all tokens of the case that is timed.
    pub whole: bool,
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
        // A dispatch is only compared, not summed.
        let dispatch = case.operation == Operation::Dispatch;
        Self::within(case, if dispatch { 16 * MOST_SUMMED } else { MOST_SUMMED })
    }

    /// As [`Expected::new`], with so few tokens that at most `most` elements are received.
    pub(crate) fn within(case: &Case, most: usize) -> Result<Self> {
        let (traffic, tokens) = (Traffic::of(case)?, case.shape.tokens);
        let (case, verified) = affordable(case, &traffic, most)?;
        let whole = case.shape.tokens == tokens;
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
        Ok(Self { case, traffic, whole, verified, router, job })
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

/// `case` with so few tokens that at most `most` elements are received, and what that moves.
fn affordable(case: &Case, traffic: &Traffic, most: usize) -> Result<(Case, Traffic)> {
    let (mut case, mut traffic) = (case.clone(), traffic.clone());
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

    /// Runs the case once on this rank, the way it is timed, and compares: the dispatched rows,
    /// the rows of a cached dispatch if the case has one, and the combined rows if the case
    /// combines. A combine alone takes its rows from [`Engine::reserve`].
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
        if case.operation == Operation::Combine {
            engine.release()?;
            engine.reserve()?;
        }
        engine.fill(&outputs(case, rank, engine.rows()))?;
        engine.combine(input.routes.tokens)?;
        self.check_combined(rank, engine.combined())
    }

    fn check_combined(&self, rank: usize, rows: &[u8]) -> Result<()> {
        let (back, hidden) = (self.expected.case.dtype.back(), self.expected.case.shape.hidden);
        let got: Vec<&[u8]> = rows.chunks_exact(back.payload_bytes(hidden)).collect();
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

/// What the last timed run of a rank is compared with: the oracle's answers, or where those are
/// for fewer tokens, the first run of all tokens, by a 64-bit digest of its rows.
#[derive(Debug)]
pub struct Later<'a> {
    answers: &'a Answers<'a>,
    rank: usize,
    rows: Option<u64>,
    combined: Option<u64>,
}

impl<'a> Later<'a> {
    /// Before any run of all tokens.
    pub fn new(answers: &'a Answers<'a>, rank: usize) -> Self {
        Self { answers, rank, rows: None, combined: None }
    }

    /// Keeps what the first run received.
    pub fn first_rows(&mut self, held: &Held) {
        if !self.answers.expected.whole {
            self.rows = Some(digest_of_held(held));
        }
    }

    /// Keeps what the first run combined.
    pub fn first_combined(&mut self, rows: &[u8]) {
        if !self.answers.expected.whole {
            self.combined = Some(digest_of_bytes(rows));
        }
    }

    /// Compares what the last run received.
    ///
    /// # Errors
    /// [`BenchError::Verification`].
    pub fn check_rows(&self, held: &Held) -> Result<()> {
        if self.answers.expected.whole {
            return self.answers.check_held(self.rank, held).map_err(after_the_runs);
        }
        self.same("received", self.rows, digest_of_held(held))
    }

    /// Compares what the last run combined.
    ///
    /// # Errors
    /// [`BenchError::Verification`].
    pub fn check_combined(&self, rows: &[u8]) -> Result<()> {
        if self.answers.expected.whole {
            return self.answers.check_combined(self.rank, rows).map_err(after_the_runs);
        }
        self.same("combined", self.combined, digest_of_bytes(rows))
    }

    fn same(&self, what: &str, first: Option<u64>, last: u64) -> Result<()> {
        let differ = || format!("the {what} rows are not those of the first run");
        let compared = if first == Some(last) { Ok(()) } else { Err(differ()) };
        self.answers.verdict(self.rank, compared).map_err(after_the_runs)
    }
}

fn after_the_runs(mut e: BenchError) -> BenchError {
    if let BenchError::Verification { detail, .. } = &mut e {
        detail.insert_str(0, "after the timed runs: ");
    }
    e
}

fn digest_of_bytes(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

fn digest_of_held(held: &Held) -> u64 {
    let mut hasher = DefaultHasher::new();
    match held {
        Held::Rank(rows) => {
            for row in rows {
                hasher.write(row.payload);
                hasher.write(row.scales);
                row.ids.iter().for_each(|&id| hasher.write_i32(id));
                row.weights.iter().for_each(|w| hasher.write_u32(w.to_bits()));
                hasher.write_usize(row.source_rank);
                hasher.write_usize(row.source_token);
            }
        }
        Held::Expert { offsets, counts, rows } => {
            offsets.iter().for_each(|&n| hasher.write_i32(n));
            counts.iter().for_each(|&n| hasher.write_u32(n));
            for row in rows {
                hasher.write(&row.payload);
                hasher.write(&row.scales);
                hasher.write_u32(row.weight.to_bits());
                let (rank, token) = row.source.unwrap_or((usize::MAX, usize::MAX));
                hasher.write_usize(rank);
                hasher.write_usize(token);
            }
        }
    }
    hasher.finish()
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
