//! What layout and counts cost one rank of a large job, simulated in one process.
//!
//! One rank computes the layout of its tokens, writes its counts to every peer's mailbox, and
//! gathers the counts of all peers into the matrix of which every row address follows. No payload
//! moves, so a thousand ranks fit on a laptop.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ep_kernels::{CountMatrix, Ids, Layout, Placement};
use serde_json::json;

use crate::case::{Case, Dtype, Layout as Rows, Operation, Shape};
use crate::plan::Traffic;
use crate::report::Row;
use crate::routing::{Router, Routing};
use crate::stats::Summary;
use crate::{BenchError, Result};

/// Simulated ranks.
pub const RANKS: [usize; 3] = [64, 256, 1024];

const WARM_UPS: usize = 3;
const RUNS: usize = 15;

/// The job whose layout is computed: decode-sized, the same experts for every number of ranks.
pub fn case(ranks: usize, seed: u64) -> Case {
    Case {
        operation: Operation::Dispatch,
        workload: "layout".into(),
        shape: Shape { ranks, tokens: 128, hidden: 7168, topk: 8, experts: 1024 },
        dtype: Dtype::Bf16,
        layout: Rows::RankMajor,
        alignment: 1,
        routing: Routing::Uniform,
        seed,
        cached: false,
        unequal: false,
    }
}

struct Job {
    placement: Placement,
    layout: Layout,
    matrix: CountMatrix,
    /// `[ranks]`, each the expert counts and then the rank counts of one source.
    mailboxes: Vec<Vec<u32>>,
    /// Where this rank's counts go, one per peer.
    outboxes: Vec<Vec<u32>>,
}

/// Verifies and times `case`.
///
/// # Errors
/// Counts that differ from a plain count of the routes.
pub fn measure(case: &Case) -> Result<Row> {
    let router = Router::new(case)?;
    let mut job = Job::new(case, &router)?;
    let mine = router.routes(0).ids;
    job.run(&mine, case)?;
    job.check(case)?;
    let mut times = [const { Vec::new() }; 4];
    for run in 0..WARM_UPS + RUNS {
        let spent = job.run(&mine, case)?;
        if run >= WARM_UPS {
            let us = spent.map(|d| d.as_secs_f64() * 1e6);
            times[0].push(us.iter().sum());
            times[1..].iter_mut().zip(us).for_each(|(all, us)| all.push(us));
        }
    }
    let summary = |i: usize| Summary::of(&times[i]).ok_or_else(|| failed("nothing was timed"));
    let (total, shape) = (summary(0)?, case.shape);
    let cells = (shape.ranks * shape.experts) as f64;
    Ok(Row {
        bench: "layout".into(),
        transport: "host".into(),
        workload: case.workload.clone(),
        dtype: case.dtype.name().into(),
        layout: case.layout.name().into(),
        ranks: shape.ranks,
        tokens: shape.tokens,
        hidden: shape.hidden,
        topk: shape.topk,
        experts: shape.experts,
        launch: "plain".into(),
        verified: true,
        p50_us: total.p50_us,
        p90_us: total.p90_us,
        min_us: total.min_us,
        metrics: BTreeMap::from([
            ("simulated".into(), json!(true)),
            ("seed".into(), json!(case.seed)),
            ("layout_p50_us".into(), json!(summary(1)?.p50_us)),
            ("notify_p50_us".into(), json!(summary(2)?.p50_us)),
            ("matrix_p50_us".into(), json!(summary(3)?.p50_us)),
            ("ns_per_rank_and_expert".into(), json!(total.p50_us * 1e3 / cells)),
        ]),
        ..Row::default()
    })
}

fn failed(detail: impl ToString) -> BenchError {
    BenchError::Verification { rank: 0, bench: "layout".into(), detail: detail.to_string() }
}

impl Job {
    fn new(case: &Case, router: &Router) -> Result<Self> {
        let shape = case.shape;
        let placement = Placement::contiguous(shape.experts, shape.ranks).map_err(failed)?;
        let mut layout = Layout::new();
        let mut mailboxes = Vec::with_capacity(shape.ranks);
        for source in 0..shape.ranks {
            let ids = router.routes(source).ids;
            layout
                .compute(Ids::I64(&ids), shape.topk, &placement, source, false)
                .map_err(failed)?;
            mailboxes.push([layout.expert_counts.as_slice(), &layout.rank_counts].concat());
        }
        let outboxes = vec![vec![0; shape.experts + shape.ranks]; shape.ranks];
        Ok(Self { placement, layout, matrix: CountMatrix::new(), mailboxes, outboxes })
    }

    /// Layout, notify and matrix of rank 0, and what each took.
    fn run(&mut self, ids: &[i64], case: &Case) -> Result<[Duration; 3]> {
        let (experts, start) = (case.shape.experts, Instant::now());
        self.layout
            .compute(Ids::I64(ids), case.shape.topk, &self.placement, 0, false)
            .map_err(failed)?;
        let layout = Instant::now();
        for outbox in &mut self.outboxes {
            let (expert, rank) = outbox.split_at_mut(experts);
            expert.copy_from_slice(&self.layout.expert_counts);
            rank.copy_from_slice(&self.layout.rank_counts);
        }
        let notify = Instant::now();
        self.matrix.reset(&self.placement, 0);
        for counts in &self.mailboxes {
            let (expert, rank) = counts.split_at(experts);
            self.matrix.add(expert, rank).map_err(failed)?;
        }
        self.matrix.finish().map_err(failed)?;
        let end = Instant::now();
        Ok([layout - start, notify - layout, end - notify])
    }

    fn check(&self, case: &Case) -> Result<()> {
        let traffic = Traffic::of(case)?;
        for (rank, &rows) in traffic.rows.iter().enumerate() {
            let got = self.matrix.rows_at(rank);
            if got != rows {
                return Err(failed(format!("rank {rank} receives {rows} rows, not {got}")));
            }
        }
        let own = self.outboxes.iter().all(|outbox| *outbox == self.mailboxes[0]);
        if own { Ok(()) } else { Err(failed("rank 0 announced other counts than it has")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_for_many_ranks() {
        let row = measure(&case(64, 1)).unwrap();
        assert_eq!((row.bench.as_str(), row.ranks, row.verified), ("layout", 64, true));
        assert!(row.p50_us > 0.0 && row.min_us <= row.p50_us && row.p50_us <= row.p90_us);
    }

    #[test]
    fn wrong_counts_are_found() {
        let case = case(64, 1);
        let router = Router::new(&case).unwrap();
        let mut job = Job::new(&case, &router).unwrap();
        job.mailboxes[5][1024] += 1;
        job.run(&router.routes(0).ids, &case).unwrap();
        assert!(job.check(&case).unwrap_err().to_string().contains("rank 0 receives"));
    }
}
