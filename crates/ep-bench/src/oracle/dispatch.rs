//! What every rank holds after dispatch.

use super::job::{Job, Verdict};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// A row of the rank-major layout.
#[derive(Clone, Debug, PartialEq)]
pub struct RankRow<'a> {
    /// As sent.
    pub payload: &'a [u8],
    /// As sent; empty if the payload has none.
    pub scales: &'a [u8],
    /// `[topk]` local expert on this rank, -1 where the token's k-th expert is elsewhere.
    pub ids: Cow<'a, [i32]>,
    /// `[topk]`, 0 where the id is -1.
    pub weights: Cow<'a, [f32]>,
    /// The rank the token is from.
    pub source_rank: usize,
    /// Its index there.
    pub source_token: usize,
}

/// A row of the expert-major layout.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertRow<'a> {
    /// As sent; zeros in padding.
    pub payload: Cow<'a, [u8]>,
    /// As sent; zeros in padding.
    pub scales: Cow<'a, [u8]>,
    /// The token's weight for this expert; 0 in padding.
    pub weight: f32,
    /// The rank-major row it is a copy of; `None` in padding.
    pub row: Option<usize>,
}

/// The expert-major layout of one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExpertMajor<'a> {
    /// `[local experts + 1]` first row of each expert, and the number of rows.
    pub offsets: Vec<i32>,
    /// `[local experts]` rows without padding.
    pub counts: Vec<u32>,
    /// By local expert, inside an expert by rank-major row, then padding.
    pub rows: Vec<ExpertRow<'a>>,
}

/// What one rank holds after dispatch.
#[derive(Clone, Debug, Default)]
pub struct Dispatched<'a> {
    /// One row per (token, rank), by source rank, then token.
    pub rank_major: Vec<RankRow<'a>>,
    /// The same rows per expert.
    pub expert_major: ExpertMajor<'a>,
    /// (source rank, source token) to rank-major row.
    pub(super) row_of: BTreeMap<(usize, usize), usize>,
    /// (rank-major row, local expert) to expert-major row.
    pub(super) position_of: BTreeMap<(usize, usize), usize>,
}

/// The results of a job.
#[derive(Clone, Debug)]
pub struct Oracle<'a> {
    /// What was asked.
    pub job: &'a Job,
    /// `[ranks]` what each holds after dispatch.
    pub ranks: Vec<Dispatched<'a>>,
}

impl<'a> Oracle<'a> {
    /// Dispatches `job`.
    ///
    /// # Errors
    /// The verdict on a job that cannot be dispatched: shape, then placement, then ids.
    pub fn new(job: &'a Job) -> Result<Self, Verdict> {
        job.check_shape()?;
        let local = job.local_experts()?;
        let routes = job.routes(&local)?;
        let mut ranks = Vec::new();
        for (rank, experts) in local.iter().enumerate() {
            let mut result = Dispatched::default();
            for (source, input) in job.inputs.iter().enumerate() {
                for token in 0..input.tokens {
                    let entries = token * job.topk..(token + 1) * job.topk;
                    let here = |k: usize| routes[source][k].filter(|(owner, _)| *owner == rank);
                    let ids: Vec<i32> =
                        entries.clone().map(|k| here(k).map_or(-1, |(_, l)| l as i32)).collect();
                    if ids.iter().all(|id| *id == -1) {
                        continue;
                    }
                    let weight = |k| input.weights.as_ref().map_or(1.0, |w| w[k]);
                    let weights: Vec<f32> =
                        entries.map(|k| here(k).map_or(0.0, |_| weight(k))).collect();
                    result.row_of.insert((source, token), result.rank_major.len());
                    result.rank_major.push(RankRow {
                        payload: &input.payload[token],
                        scales: &input.scales[token],
                        ids: ids.into(),
                        weights: weights.into(),
                        source_rank: source,
                        source_token: token,
                    });
                }
            }
            result.expand(job, experts.len());
            ranks.push(result);
        }
        Ok(Oracle { job, ranks })
    }

    /// Whether every rank's rows fit.
    ///
    /// # Errors
    /// [`Verdict::TooManyRows`] and then [`Verdict::TooManyExpertRows`], each with the largest
    /// need of any rank and the lowest rank that has it.
    pub fn check_capacity(
        &self,
        max_rows: Option<usize>,
        max_expert_rows: Option<usize>,
    ) -> Result<(), Verdict> {
        let most = |rows: &dyn Fn(&Dispatched) -> usize| {
            let needs = self.ranks.iter().map(rows).enumerate();
            needs.rev().max_by_key(|(_, needed)| *needed).unwrap_or((0, 0))
        };
        let (rank, needed) = most(&|r| r.rank_major.len());
        if let Some(max) = max_rows.filter(|max| needed > *max) {
            return Err(Verdict::TooManyRows { rank, needed, max });
        }
        let (rank, needed) = most(&|r| r.expert_major.rows.len());
        if let Some(max) = max_expert_rows.filter(|max| needed > *max) {
            return Err(Verdict::TooManyExpertRows { rank, needed, max });
        }
        Ok(())
    }
}

impl Dispatched<'_> {
    fn expand(&mut self, job: &Job, experts: usize) {
        let layout = &mut self.expert_major;
        for expert in 0..experts {
            layout.offsets.push(layout.rows.len() as i32);
            let mut count = 0;
            for (index, row) in self.rank_major.iter().enumerate() {
                let Some(k) = row.ids.iter().position(|id| *id == expert as i32) else { continue };
                self.position_of.insert((index, expert), layout.rows.len());
                layout.rows.push(ExpertRow {
                    payload: row.payload.into(),
                    scales: row.scales.into(),
                    weight: row.weights[k],
                    row: Some(index),
                });
                count += 1;
            }
            layout.counts.push(count);
            while !layout.rows.len().is_multiple_of(job.alignment) {
                layout.rows.push(ExpertRow {
                    payload: vec![0; job.payload.payload_bytes(job.hidden)].into(),
                    scales: vec![0; job.payload.scale_bytes(job.hidden)].into(),
                    weight: 0.0,
                    row: None,
                });
            }
        }
        layout.offsets.push(layout.rows.len() as i32);
    }
}
