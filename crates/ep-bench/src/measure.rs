//! One rank's part of a measurement, and the row that all parts make together.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::case::{Case, Operation};
use crate::cli::{Plan, Transport};
use crate::copy::Copier;
use crate::data::{Input, outputs};
use crate::engine::{Engine, Seat};
use crate::host::Carrier;
use crate::report::Row;
use crate::routing::Router;
use crate::stats::{Summary, counts, now_ns, slowest};
use crate::trace::Span;
use crate::verify::{Answers, Expected, Later};
use crate::{BenchError, Result};

/// Start and end in nanoseconds of the shared clock.
type Interval = (u64, u64);

/// How a case is measured.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Time for its runs.
    pub budget: Duration,
    /// Whether phases are kept.
    pub trace: bool,
    /// Whether ranks are processes.
    pub processes: bool,
    /// How bytes reach a peer,
    pub transport: Transport,
    /// between how many nodes, where that is not one.
    pub nodes: Option<usize>,
}

impl Options {
    /// Those of a plan.
    pub fn of(plan: &Plan) -> Self {
        let Plan { budget, trace, processes, transport, nodes, .. } = *plan;
        Self { budget, trace, processes, transport, nodes }
    }

    /// What ranks are connected by.
    pub fn carrier(&self) -> Carrier {
        Carrier::new(self.transport, self.nodes)
    }
}

/// A row and, if asked for, the phases behind it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// The row of the report.
    pub row: Row,
    /// Phases of all ranks.
    pub spans: Vec<Span>,
}

/// What one rank saw.
#[derive(Default, Serialize, Deserialize)]
struct Times {
    dispatch: Vec<Interval>,
    combine: Vec<Interval>,
    copied_out: Vec<Interval>,
    copy: Vec<Interval>,
    spans: Vec<Span>,
    /// Whether the last run was compared and found equal.
    verified: bool,
}

/// Runs of the operation, then as many of the copy, in turn: both meet the same machine.
const BLOCK: usize = 5;

/// Verifies and then times `case` on this rank, and compares what the last run gave. All ranks
/// call it; each gets the outcome.
///
/// # Errors
/// A result that differs from the oracle's, or from the first run's; what the library says.
pub fn measure(
    seat: &dyn Seat,
    case: &Case,
    expected: &Expected,
    answers: &Answers<'_>,
    options: Options,
) -> Result<Outcome> {
    let traffic = &expected.traffic;
    let mut engine = seat.engine(case, expected.capacity())?;
    answers.check(seat, engine.as_mut())?;
    seat.barrier()?;
    let rank = seat.rank();
    let input = Input::of(case, &Router::new(case)?, rank);
    let later = Later::new(answers, rank);
    let (outputs, times) = (Vec::new(), Times::default());
    let mut runner = Runner { seat, case, engine, input, outputs, later, last: false, times };
    runner.prepare()?;
    let (warm_ups, runs) = runner.agree(options.budget)?;
    for _ in 0..warm_ups {
        runner.once()?;
    }
    runner.times = Times::default();
    let mut copier = Copier::new(traffic.copy_bytes(case)[rank] as usize);
    copier.run();
    let mut left = runs;
    while left > 0 {
        let block = left.min(BLOCK);
        for run in 1..=block {
            if run == left {
                runner.scrub()?;
                runner.last = true;
            }
            runner.once()?;
        }
        for _ in 0..block {
            let copy = runner.timed("copy", |_| {
                copier.run();
                Ok(())
            })?;
            runner.times.copy.push(copy);
        }
        left -= block;
    }
    if case.operation == Operation::Dispatch {
        for _ in 0..runs.min(BLOCK) {
            runner.copied_out()?;
        }
    }
    if !options.trace {
        runner.times.spans.clear();
    }
    let all = gather(seat, &runner.times)?;
    let row = row(case, expected, &all, options)?;
    let spans = all.into_iter().flat_map(|times| times.spans).collect();
    Ok(Outcome { row, spans })
}

struct Runner<'a> {
    seat: &'a dyn Seat,
    case: &'a Case,
    engine: Box<dyn Engine>,
    input: Input,
    outputs: Vec<u8>,
    later: Later<'a>,
    /// Whether what comes is compared.
    last: bool,
    times: Times,
}

impl Runner<'_> {
    /// One dispatch, which routes what is cached and combined later and says how many rows come.
    fn prepare(&mut self) -> Result<()> {
        self.engine.dispatch(&self.input, false)?;
        self.later.first_rows(&self.engine.held()?);
        if self.case.operation != Operation::Dispatch {
            self.outputs = outputs(self.case, self.seat.rank(), self.engine.rows());
        }
        self.engine.release()
    }

    /// Warm-ups and runs that fit, by the slowest rank's first run: the same on all ranks.
    fn agree(&mut self, budget: Duration) -> Result<(usize, usize)> {
        let start = now_ns();
        self.once()?;
        let mine = now_ns() - start;
        if self.case.operation != Operation::Dispatch {
            self.later.first_combined(self.engine.combined());
        }
        let all = self.seat.all_gather(&mine.to_le_bytes())?;
        let slowest =
            all.iter().filter_map(|b| b.as_slice().try_into().ok()).map(u64::from_le_bytes);
        // Copies take about as long again.
        Ok(counts(Duration::from_nanos(2 * slowest.max().unwrap_or(mine)), budget))
    }

    /// Makes sure that the next run's result is the next run's: no other wrote it.
    fn scrub(&mut self) -> Result<()> {
        self.engine.dispatch(&self.input, self.case.cached)?;
        self.engine.scrub()?;
        self.engine.release()
    }

    /// Waits for all ranks, then times `work`.
    fn timed(
        &mut self,
        name: &'static str,
        work: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<Interval> {
        self.seat.barrier()?;
        let start = now_ns();
        work(self)?;
        let end = now_ns();
        let rank = self.seat.rank();
        self.times.spans.push(Span { name: name.into(), rank, start_ns: start, end_ns: end });
        Ok((start, end))
    }

    fn once(&mut self) -> Result<()> {
        match self.case.operation {
            Operation::Dispatch => {
                self.dispatch()?;
                self.engine.release()
            }
            Operation::Combine => {
                self.engine.reserve()?;
                self.combine()
            }
            Operation::Roundtrip => {
                self.dispatch()?;
                self.combine()
            }
        }
    }

    fn dispatch(&mut self) -> Result<()> {
        let cached = self.case.cached;
        let time = self.timed("dispatch", |r| r.engine.dispatch(&r.input, cached))?;
        self.times.dispatch.push(time);
        if self.last {
            self.later.check_rows(&self.engine.held()?)?;
            self.times.verified = true;
        }
        Ok(())
    }

    /// The outputs are written first and are not timed: experts write them where they are.
    fn combine(&mut self) -> Result<()> {
        self.engine.fill(&self.outputs)?;
        let tokens = self.input.routes.tokens;
        let time = self.timed("combine", |r| r.engine.combine(tokens))?;
        self.times.combine.push(time);
        if self.last {
            self.later.check_combined(self.engine.combined())?;
            self.times.verified = true;
        }
        Ok(())
    }

    fn copied_out(&mut self) -> Result<()> {
        let cached = self.case.cached;
        let time = self.timed("dispatch and copy out", |r| {
            r.engine.dispatch(&r.input, cached)?;
            r.engine.copy_out()
        })?;
        self.times.copied_out.push(time);
        self.engine.release()
    }
}

fn gather(seat: &dyn Seat, times: &Times) -> Result<Vec<Times>> {
    let mine = serde_json::to_vec(times).expect("times are plain data");
    let all = seat.all_gather(&mine)?;
    let parse = |(rank, bytes): (usize, &Vec<u8>)| {
        serde_json::from_slice(bytes).map_err(|e| BenchError::Rank {
            rank,
            op: "gathering times",
            blames: None,
            detail: e.to_string(),
        })
    };
    all.iter().enumerate().map(parse).collect()
}

/// The times of all ranks as those of the slowest.
fn of(all: &[Times], pick: fn(&Times) -> &Vec<Interval>) -> Vec<f64> {
    slowest(&all.iter().map(|times| pick(times).clone()).collect::<Vec<_>>())
}

fn row(case: &Case, expected: &Expected, all: &[Times], options: Options) -> Result<Row> {
    let (dispatch, combine) = (of(all, |t| &t.dispatch), of(all, |t| &t.combine));
    let total = match case.operation {
        Operation::Dispatch => dispatch,
        Operation::Combine => combine,
        Operation::Roundtrip => dispatch.iter().zip(&combine).map(|(d, c)| d + c).collect(),
    };
    let none = || BenchError::Usage(format!("{}: nothing was timed", case.title()));
    let time = Summary::of(&total).ok_or_else(none)?;
    let copy = Summary::of(&of(all, |t| &t.copy)).ok_or_else(none)?;
    let (shape, hidden) = (case.shape, case.shape.hidden);
    let (out, back) =
        (case.dtype.row_bytes(hidden) as f64, case.dtype.back().payload_bytes(hidden) as f64);
    let per_row = match case.operation {
        Operation::Dispatch => out,
        Operation::Combine => back,
        Operation::Roundtrip => out + back,
    };
    // Bytes of the dispatch, in the rows this operation moves; microseconds to 10⁹ bytes a second.
    let rate = |bytes: u64| bytes as f64 / out * per_row / time.p50_us / 1e3;
    Ok(Row {
        bench: case.operation.name().into(),
        transport: options.transport.name().into(),
        workload: case.workload.clone(),
        dtype: case.dtype.name().into(),
        layout: case.layout.name().into(),
        ranks: shape.ranks,
        tokens: shape.tokens,
        hidden,
        topk: shape.topk,
        experts: shape.experts,
        sms: 0,
        launch: "plain".into(),
        cached: case.cached,
        verified: all.iter().all(|times| times.verified),
        p50_us: time.p50_us,
        p90_us: time.p90_us,
        min_us: time.min_us,
        wire_gbps: rate(expected.traffic.wire_bytes(case)),
        logical_gbps: rate(expected.traffic.logical_bytes(case)),
        limit_us: Some(copy.p50_us),
        limit_kind: Some("in-run copy".into()),
        wire_share: Some(copy.p50_us / time.p50_us),
        metrics: metrics(case, expected, all, &copy, options),
    })
}

fn metrics(
    case: &Case,
    expected: &Expected,
    all: &[Times],
    copy: &Summary,
    options: Options,
) -> BTreeMap<String, Value> {
    let rows = &expected.traffic.rows;
    let copied = expected.traffic.copy_bytes(case).iter().sum::<u64>() as f64;
    let mut metrics = BTreeMap::<String, Value>::from([
        ("routing".into(), json!(case.routing.to_string())),
        ("seed".into(), json!(case.seed)),
        ("processes".into(), json!(options.processes)),
        ("unequal_tokens".into(), json!(case.unequal)),
        ("runs".into(), json!(copy.runs)),
        ("copy_p90_us".into(), json!(copy.p90_us)),
        ("copy_min_us".into(), json!(copy.min_us)),
        ("copy_gbps".into(), json!(copied / copy.p50_us / 1e3)),
        ("rows_most".into(), json!(rows.iter().max())),
        ("rows_total".into(), json!(rows.iter().sum::<usize>())),
        ("verified_tokens".into(), json!(expected.case.shape.tokens)),
    ]);
    if options.transport.has_nodes() {
        let nodes = options.nodes.unwrap_or(case.shape.ranks);
        metrics.insert("nodes".into(), json!(nodes));
    }
    let mut add = |name: &str, us: Vec<f64>| {
        if let Some(s) = Summary::of(&us) {
            metrics.insert(name.into(), json!(s.p50_us));
        }
    };
    add("copied_out_p50_us", of(all, |t| &t.copied_out));
    if case.operation == Operation::Roundtrip {
        add("dispatch_p50_us", of(all, |t| &t.dispatch));
        add("combine_p50_us", of(all, |t| &t.combine));
    }
    metrics
}
