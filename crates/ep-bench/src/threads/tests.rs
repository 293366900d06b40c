//! The runner against an implementation that asks the oracle, with faults on demand.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::*;
use crate::case::{Case, Dtype, Layout, Operation, Shape};
use crate::data::{Input, outputs};
use crate::engine::{Capacity, Engine, Held, HeldRow};
use crate::routing::Routing;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    WrongPayload,
    WrongSum,
    /// Only rows of a reserved slot are combined wrongly.
    WrongReserved,
    /// As the wrong ones, but only from the fourth call on: after verification and warm-up.
    LatePayload,
    LateSum,
    /// From the fourth call on, combine leaves what is there.
    LateNothing,
    Panic,
    Error,
}

#[derive(Default)]
struct Meeting {
    round: usize,
    parts: Vec<Option<Vec<u8>>>,
    last: Vec<Vec<u8>>,
    aborted: Option<usize>,
}

struct FakeSeat {
    rank: usize,
    ranks: usize,
    /// The rank that fails, and how.
    fault: (usize, Fault),
    meeting: Arc<(Mutex<Meeting>, Condvar)>,
}

impl Drop for FakeSeat {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort("panicked");
        }
    }
}

fn seats(ranks: usize, fault: (usize, Fault)) -> Vec<FakeSeat> {
    let meeting = Meeting { parts: vec![None; ranks], ..Meeting::default() };
    let meeting = Arc::new((Mutex::new(meeting), Condvar::new()));
    (0..ranks).map(|rank| FakeSeat { rank, ranks, fault, meeting: meeting.clone() }).collect()
}

impl Seat for FakeSeat {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (lock, changed) = &*self.meeting;
        let mut meeting = lock.lock().unwrap();
        let round = meeting.round;
        meeting.parts[self.rank] = Some(bytes.to_vec());
        if meeting.parts.iter().all(Option::is_some) {
            meeting.last = meeting.parts.iter_mut().filter_map(Option::take).collect();
            meeting.round += 1;
            changed.notify_all();
        }
        let limit = Duration::from_secs(20);
        let over = |m: &mut Meeting| m.round == round && m.aborted.is_none();
        let (meeting, waited) = changed.wait_timeout_while(meeting, limit, over).unwrap();
        assert!(!waited.timed_out(), "a rank is missing");
        if meeting.round == round {
            return Err(BenchError::Rank {
                rank: self.rank,
                op: "all_gather",
                blames: meeting.aborted,
                detail: "a rank gave up".into(),
            });
        }
        Ok(meeting.last.clone())
    }

    fn barrier(&self) -> Result<()> {
        self.all_gather(&[]).map(drop)
    }

    fn abort(&self, _why: &str) {
        let (lock, changed) = &*self.meeting;
        lock.lock().unwrap().aborted.get_or_insert(self.rank);
        changed.notify_all();
    }

    fn engine(&self, case: &Case, capacity: Capacity) -> Result<Box<dyn Engine>> {
        assert!(capacity.tokens > 0 && capacity.rows > 0);
        let fault = if self.fault.0 == self.rank { self.fault.1 } else { Fault::None };
        let mut half = case.clone();
        half.shape.tokens /= 2;
        let sizes = [Expected::new(case)?, Expected::new(&half)?];
        Ok(Box::new(FakeEngine {
            rank: self.rank,
            fault,
            sizes,
            size: 0,
            out: Vec::new(),
            held: 0,
            reserved: false,
            dispatches: 0,
            combines: 0,
        }))
    }
}

struct FakeEngine {
    rank: usize,
    fault: Fault,
    /// With all tokens, and with half of them.
    sizes: [Expected; 2],
    /// Which of them the last dispatch was.
    size: usize,
    out: Vec<u8>,
    held: usize,
    reserved: bool,
    dispatches: usize,
    combines: usize,
}

/// Calls that late faults leave alone.
const EARLY: usize = 3;

impl FakeEngine {
    fn expected(&self) -> &Expected {
        &self.sizes[self.size]
    }

    fn take(&mut self) -> Result<()> {
        self.held = match self.held()? {
            Held::Rank(rows) => rows.len(),
            Held::Expert { rows, .. } => rows.len(),
        };
        Ok(())
    }
}

impl Engine for FakeEngine {
    fn dispatch(&mut self, input: &Input, _: bool) -> Result<()> {
        assert_eq!(self.held, 0, "a result was not released");
        let same = |e: &Expected| e.traffic.tokens[self.rank] == input.routes.tokens;
        self.size = self.sizes.iter().position(same).unwrap();
        self.dispatches += 1;
        self.reserved = false;
        match self.fault {
            Fault::Panic => panic!("a fault on demand"),
            Fault::Error => {
                let detail = "a fault on demand".into();
                Err(BenchError::Rank { rank: self.rank, op: "dispatch", blames: None, detail })
            }
            _ => self.take(),
        }
    }

    fn reserve(&mut self) -> Result<()> {
        assert_eq!(self.held, 0, "a result was not released");
        self.reserved = true;
        self.take()
    }

    fn held(&self) -> Result<Held<'_>> {
        let answers = self.expected().answers()?;
        let answer = answers.of(self.rank);
        if self.expected().case.layout == Layout::ExpertMajor {
            let rows = &answer.rank_major;
            let source = |row: usize| (rows[row].source_rank, rows[row].source_token);
            return Ok(Held::Expert {
                offsets: answer.expert_major.offsets.clone(),
                counts: answer.expert_major.counts.clone(),
                rows: (answer.expert_major.rows.iter())
                    .map(|row| HeldRow {
                        payload: row.payload.to_vec().into(),
                        scales: row.scales.to_vec().into(),
                        weight: row.weight,
                        source: row.row.map(source),
                    })
                    .collect(),
            });
        }
        let mut rows = answer.rank_major.clone();
        let wrong = match self.fault {
            Fault::WrongPayload => true,
            Fault::LatePayload => self.dispatches > EARLY,
            _ => false,
        };
        if wrong && rows.len() > 1 {
            rows[0].payload = rows[1].payload;
        }
        Ok(Held::Rank(rows))
    }

    fn rows(&self) -> usize {
        self.held
    }

    fn copy_out(&mut self) -> Result<()> {
        Ok(())
    }

    fn fill(&mut self, rows: &[u8]) -> Result<()> {
        assert_eq!(rows, outputs(&self.expected().case, self.rank, self.held));
        Ok(())
    }

    fn combine(&mut self, tokens: usize) -> Result<()> {
        self.combines += 1;
        let late = self.combines > EARLY;
        let wrong = match self.fault {
            Fault::WrongSum => true,
            Fault::WrongReserved => self.reserved,
            Fault::LateSum => late,
            Fault::LateNothing if late => return self.release(),
            _ => false,
        };
        let answers = self.expected().answers()?;
        let mut out = answers.combined(self.rank).concat();
        assert_eq!(answers.combined(self.rank).len(), tokens);
        if wrong {
            out[0] ^= 1;
        }
        self.out = out;
        self.release()
    }

    fn scrub(&mut self) -> Result<()> {
        self.out.fill(0xa5);
        Ok(())
    }

    fn combined(&self) -> &[u8] {
        &self.out
    }

    fn release(&mut self) -> Result<()> {
        self.held = 0;
        Ok(())
    }
}

fn case(operation: Operation, dtype: Dtype) -> Case {
    Case {
        operation,
        workload: "custom".into(),
        shape: Shape { ranks: 3, tokens: 6, hidden: 32, topk: 2, experts: 6 },
        dtype,
        layout: Layout::RankMajor,
        alignment: 1,
        routing: Routing::Uniform,
        seed: 2,
        cached: false,
        unequal: false,
    }
}

const OPTIONS: Options = Options {
    budget: Duration::from_millis(50),
    trace: true,
    processes: false,
    transport: crate::cli::Transport::Host,
    nodes: None,
};

#[test]
fn every_operation_gives_a_verified_row() {
    for (operation, dtype) in [
        (Operation::Dispatch, Dtype::Bf16),
        (Operation::Dispatch, Dtype::Fp8),
        (Operation::Combine, Dtype::F32),
        (Operation::Roundtrip, Dtype::Fp8Ue8m0),
    ] {
        let case = case(operation, dtype);
        let outcome = run(seats(3, (0, Fault::None)), &case, OPTIONS).unwrap();
        let row = &outcome.row;
        assert_eq!((row.bench.as_str(), row.dtype.as_str()), (operation.name(), dtype.name()));
        assert!(row.verified && row.p50_us > 0.0 && row.min_us <= row.p50_us);
        assert!(row.p50_us <= row.p90_us && row.limit_us.unwrap() > 0.0);
        assert_eq!(row.limit_kind.as_deref(), Some("in-run copy"));
        let share = row.wire_share.unwrap() * row.p50_us / row.limit_us.unwrap();
        assert!((share - 1.0).abs() < 1e-9);
        assert_eq!(row.metrics.contains_key("copied_out_p50_us"), operation == Operation::Dispatch);
        assert!((0..3).all(|rank| outcome.spans.iter().any(|span| span.rank == rank)));
        let total = row.metrics["rows_total"].as_u64().unwrap();
        assert!((18..=36).contains(&total), "{total}");
    }
}

#[test]
fn rates_are_bytes_of_the_busiest_rank_per_median() {
    let mut case = case(Operation::Dispatch, Dtype::Bf16);
    case.routing = Routing::OneRank(1);
    let row = run(seats(3, (0, Fault::None)), &case, OPTIONS).unwrap().row;
    assert!((row.logical_gbps * row.p50_us * 1e3 - 18.0 * 64.0).abs() < 1e-6);
    assert!((row.wire_gbps * row.p50_us * 1e3 - 12.0 * 64.0).abs() < 1e-6);
}

#[test]
fn expert_major_and_cached_and_unequal_work() {
    let mut case = case(Operation::Roundtrip, Dtype::Bf16);
    case.layout = Layout::ExpertMajor;
    case.alignment = 8;
    case.cached = true;
    case.unequal = true;
    let row = run(seats(3, (0, Fault::None)), &case, OPTIONS).unwrap().row;
    assert!(row.cached && row.verified);
    assert_eq!(row.layout, "expert-major");
}

#[test]
fn a_wrong_row_is_found_and_its_rank_named() {
    let case = case(Operation::Dispatch, Dtype::Bf16);
    let error = run(seats(3, (2, Fault::WrongPayload)), &case, OPTIONS).unwrap_err();
    assert!(matches!(error, BenchError::Verification { rank: 2, .. }), "{error}");
    assert!(error.to_string().contains("row 0 payload"), "{error}");
}

#[test]
fn a_wrong_sum_is_found() {
    let case = case(Operation::Combine, Dtype::Bf16);
    let error = run(seats(3, (1, Fault::WrongSum)), &case, OPTIONS).unwrap_err();
    assert!(matches!(error, BenchError::Verification { rank: 1, .. }), "{error}");
    assert_eq!(error.exit_code(), 1);
}

#[test]
fn a_wrong_sum_of_reserved_rows_is_found_before_timing() {
    let case = case(Operation::Combine, Dtype::Bf16);
    let error = run(seats(3, (1, Fault::WrongReserved)), &case, OPTIONS).unwrap_err();
    assert!(matches!(error, BenchError::Verification { rank: 1, .. }), "{error}");
    assert!(!error.to_string().contains("after the timed runs"), "{error}");
}

/// Half of the tokens of `case` can be verified.
fn half(case: &Case) -> Expected {
    // Three ranks' three tokens go to two experts each, on at most as many ranks.
    let rows = if case.layout == Layout::ExpertMajor { 2 * 18 } else { 18 };
    let expected = Expected::within(case, rows * case.shape.hidden).unwrap();
    assert_eq!((expected.case.shape.tokens, expected.whole), (3, false));
    expected
}

#[test]
fn what_goes_wrong_in_later_runs_is_found() {
    for (operation, fault) in [
        (Operation::Dispatch, Fault::LatePayload),
        (Operation::Roundtrip, Fault::LatePayload),
        (Operation::Combine, Fault::LateSum),
        (Operation::Roundtrip, Fault::LateSum),
        (Operation::Combine, Fault::LateNothing),
    ] {
        let case = case(operation, Dtype::Bf16);
        for expected in [Expected::new(&case).unwrap(), half(&case)] {
            let error = run_against(seats(3, (2, fault)), &case, &expected, OPTIONS).unwrap_err();
            assert!(matches!(error, BenchError::Verification { rank: 2, .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("after the timed runs"), "{text}");
            assert_eq!(text.contains("those of the first run"), !expected.whole, "{text}");
        }
    }
}

#[test]
fn a_partial_verification_is_flagged() {
    for layout in [Layout::RankMajor, Layout::ExpertMajor] {
        for operation in [Operation::Dispatch, Operation::Combine, Operation::Roundtrip] {
            let mut case = case(operation, Dtype::Bf16);
            case.layout = layout;
            let expected = half(&case);
            assert_eq!(expected.traffic.tokens, [6, 6, 6]);
            let row = run_against(seats(3, (0, Fault::None)), &case, &expected, OPTIONS);
            let row = row.unwrap().row;
            assert!(row.verified && row.partial());
            assert_eq!((row.tokens, &row.metrics["verified_tokens"]), (6, &3.into()));
            let whole = run(seats(3, (0, Fault::None)), &case, OPTIONS).unwrap().row;
            assert!(whole.verified && !whole.partial());
        }
    }
}

#[test]
fn a_failing_rank_is_named_and_not_its_victims() {
    let case = case(Operation::Dispatch, Dtype::Bf16);
    let error = run(seats(3, (1, Fault::Error)), &case, OPTIONS).unwrap_err();
    assert!(matches!(error, BenchError::Rank { rank: 1, blames: None, .. }), "{error}");
    let error = run(seats(3, (1, Fault::Panic)), &case, OPTIONS).unwrap_err();
    assert!(matches!(error, BenchError::RankDied { rank: 1, .. }), "{error}");
    assert!(error.to_string().contains("a fault on demand"), "{error}");
}
