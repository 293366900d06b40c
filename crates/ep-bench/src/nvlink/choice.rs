//! The plan that a layer launches by, which ships or was searched for, against the best of a sweep.
//!
//! The best of many points is in part the luckiest, so both are timed again, in turns.

use std::fmt::Write as _;

use ep_kernels::cuda::DeviceProperties;
use ep_runtime::sched::tune::{rows_plans, sums_plans};
use ep_runtime::{CopyPath, MovePlan, PlanInForce, Tuning};
use serde_json::{Value, json};

use super::overlap::judge::{Bound, median};
use super::overlap::put_bounds;
use super::rank::Call;
use super::rows::{Limits, note_plan, row};
use super::{Job, slowest};
use crate::Result;
use crate::case::{Case, Operation};
use crate::report::Row;

/// Which of two plans is timed when: neither is favoured by what gets slower or faster with time.
pub const TURNS: [usize; 8] = [0, 1, 1, 0, 0, 1, 1, 0];

/// A plan in words, SMs aside: `ldst u4 w16`, `tma 2x14336 w5`.
pub fn plan_text(plan: &MovePlan) -> String {
    match plan.path {
        CopyPath::Tma { stages, chunk } => format!("tma {stages}x{chunk} w{}", plan.warps),
        CopyPath::LdSt { unroll } => format!("ldst u{unroll} w{}", plan.warps),
        other => format!("{other:?} w{}", plan.warps),
    }
}

/// A plan for one operation alone.
pub fn tuning(operation: Operation, plan: MovePlan) -> Tuning {
    let mut tuning = Tuning::default();
    match operation {
        Operation::Combine => tuning.combine = Some(plan),
        _ => tuning.dispatch = Some(plan),
    }
    tuning
}

/// All plans on `sms` SMs that the tuner chooses among and that can be launched: one that cannot ends
/// the group.
pub fn candidates(
    case: &Case,
    operation: Operation,
    device: &DeviceProperties,
    sms: u32,
) -> Vec<MovePlan> {
    let ranks = case.shape.ranks;
    let bytes = case.dtype.payload_bytes(case.shape.hidden) as u32;
    let (plans, sums) = match operation {
        Operation::Combine => (sums_plans(), true),
        _ => (rows_plans(bytes), false),
    };
    let plan = |(warps, path)| MovePlan::new(sms, warps, path);
    let fits = |plan: &MovePlan| match sums {
        true => plan.check_sums(ranks, device).is_ok(),
        false => plan.check_rows(ranks, device).is_ok(),
    };
    plans.into_iter().map(plan).filter(fits).collect()
}

/// The plan in force for an operation.
pub fn in_force(plans: &[PlanInForce], operation: Operation) -> Option<PlanInForce> {
    plans.iter().find(|plan| plan.kernel == operation.name()).copied()
}

/// Times of two plans on one rank, in turns. Collective.
///
/// # Errors
/// Those of `time`, which launches by a plan.
pub fn in_turns<R>(
    on: &mut R,
    plans: [MovePlan; 2],
    mut time: impl FnMut(&mut R, MovePlan) -> Result<Vec<f64>>,
) -> Result<[Vec<f64>; 2]> {
    let mut times = [Vec::new(), Vec::new()];
    for which in TURNS {
        times[which].extend(time(on, plans[which])?);
    }
    Ok(times)
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Choice {
    /// What is timed.
    pub operation: Operation,
    /// The plan in force.
    pub chosen: PlanInForce,
    /// The best of the sweep.
    pub best: MovePlan,
    /// How many points the sweep had.
    pub points: usize,
    /// What both were timed beside, or `alone`.
    pub beside: &'static str,
    /// Times of the plan in force and of the best, by rank.
    pub times: Vec<[Vec<f64>; 2]>,
}

impl Choice {
    /// Whether the plan in force is the best.
    pub fn is_best(&self) -> bool {
        self.chosen.plan == self.best
    }

    /// Every run of the plan in force and of the best, the slowest rank's time.
    fn runs(&self) -> [Vec<f64>; 2] {
        [0, 1]
            .map(|which| slowest(&self.times.iter().map(|t| t[which].clone()).collect::<Vec<_>>()))
    }

    /// By how much the plan in force is slower than the best: at most 5 %.
    pub fn bound(&self) -> Bound {
        let found = match self.is_best() {
            true => Some(0.0),
            false => {
                let [chosen, best] = self.runs().map(|runs| median(&runs));
                chosen.zip(best).map(|(chosen, best)| chosen / best - 1.0)
            }
        };
        Bound { what: "chosen against the best plan", found, must: 0.05, goal: 0.01 }
    }

    /// The row of a report. `what` names the layer.
    pub fn row(&self, job: &Job, what: &str, sms: u32) -> Row {
        let [chosen, best] = self.runs();
        let medians = (median(&chosen), median(&best));
        let timed = (self.operation, chosen);
        let mut row = row(job, timed, sms, Call::default(), &Limits::default());
        note_plan(&mut row, &[self.chosen]);
        let bound = self.bound();
        let mut put = |name: &str, value: Value| {
            row.metrics.insert(name.into(), value);
        };
        put("table", json!("choice"));
        put("how", json!(format!("choice {what} {}", self.operation.name())));
        put("beside", json!(self.beside));
        put("points", json!(self.points));
        put("chosen_us", json!(medians.0));
        put("best_us", json!(medians.1));
        put("best_plan", json!(plan_text(&self.best)));
        put("above_best", json!(bound.found));
        put("within_5_percent", json!(bound.found.is_some_and(|found| found <= 0.05)));
        put_bounds(&mut row, &[bound]);
        row
    }
}

/// A line per comparison: which plan is in force, how it compares, and the verdict.
pub fn table(rows: &[Row]) -> String {
    let mut out = String::new();
    let text = |row: &Row, name: &str| {
        row.metrics.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let percent = |row: &Row| {
        let above = row.metrics.get("above_best").and_then(Value::as_f64);
        above.map_or("not measured".into(), |above| format!("{:+.1} %", 100.0 * above))
    };
    for row in rows.iter().filter(|r| r.metrics.get("table") == Some(&"choice".into())) {
        let verdict = match text(row, "verdict").as_str() {
            "missed" => "MISS".to_owned(),
            verdict => verdict.to_owned(),
        };
        let _ = writeln!(
            out,
            "{} on {} SMs: {} {}, {}\n  {} of the best, {} {verdict}",
            text(row, "how"),
            row.sms,
            text(row, "plan_origin"),
            text(row, "plan"),
            text(row, "beside"),
            percent(row),
            text(row, "best_plan"),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use ep_runtime::PlanOrigin;

    use super::*;
    use crate::case::{Dtype, Layout, Shape};
    use crate::nvlink::{job, standard};
    use crate::workload::Workload;

    fn choice(best: MovePlan, chosen_us: f64, best_us: f64) -> Choice {
        let plan = MovePlan::new(16, 24, CopyPath::LdSt { unroll: 4 });
        Choice {
            operation: Operation::Combine,
            chosen: PlanInForce { kernel: "combine", plan, origin: PlanOrigin::Searched },
            best,
            points: 7,
            beside: "gemm",
            // Of two ranks the slower counts, run by run.
            times: vec![
                [vec![chosen_us, 1.0], vec![1.0, best_us]],
                [vec![1.0, chosen_us], vec![best_us, 1.0]],
            ],
        }
    }

    fn other() -> MovePlan {
        MovePlan::new(16, 16, CopyPath::LdSt { unroll: 2 })
    }

    #[test]
    fn a_plan_may_be_five_percent_slower_than_the_best() {
        let verdict = |us| choice(other(), us, 100.0).bound().verdict();
        assert_eq!([verdict(100.9), verdict(104.9), verdict(105.1)], ["goal", "must", "missed"]);
        // One that is faster the second time than what was the best the first time is as good.
        assert_eq!(verdict(90.0), "goal");
        let same = choice(choice(other(), 0.0, 0.0).chosen.plan, 130.0, 100.0);
        assert_eq!((same.bound().found, same.is_best()), (Some(0.0), true));
        let unmeasured = Choice { times: Vec::new(), ..choice(other(), 0.0, 0.0) };
        assert_eq!(unmeasured.bound().verdict(), "missed");
    }

    #[test]
    fn rows_and_lines_say_which_plan_is_how_far_from_which() {
        let mut case =
            standard(Operation::Dispatch, Workload::Decode, 2, Dtype::Bf16, Layout::RankMajor);
        case.shape = Shape { ranks: 2, tokens: 9, hidden: 64, topk: 2, experts: 6 };
        let job = job(case, false, &[]).unwrap();
        let row = choice(other(), 106.0, 100.0).row(&job, "partition 16", 16);
        let is = |name: &str, value: Value| assert_eq!(row.metrics[name], value, "{name}");
        is("within_5_percent", json!(false));
        is("verdict", json!("missed"));
        is("plan", json!("ldst u4 w24"));
        is("plan_origin", json!("searched"));
        is("best_plan", json!("ldst u2 w16"));
        is("chosen_us", json!(106.0));
        is("best_us", json!(100.0));
        assert_eq!((row.bench.as_str(), row.p50_us), ("combine", 106.0));
        let good = choice(other(), 104.0, 100.0).row(&job, "partition 16", 16);
        assert_eq!(good.metrics["within_5_percent"], json!(true));
        let text = table(&[row, good]);
        assert!(text.contains("choice partition 16 combine on 16 SMs: searched ldst u4 w24, gemm"));
        assert!(text.contains("+6.0 % of the best, ldst u2 w16 MISS"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert_eq!(text.matches("MISS").count(), 1);
    }

    #[test]
    fn plans_take_turns_that_favour_neither() {
        let plans = [other(), MovePlan { warps: 8, ..other() }];
        let mut order = Vec::new();
        let times = in_turns(&mut order, plans, |order, plan| {
            order.push(plan.warps);
            Ok(vec![order.len() as f64])
        });
        assert_eq!(order, [16, 8, 8, 16, 16, 8, 8, 16]);
        assert_eq!(times.unwrap(), [[1.0, 4.0, 5.0, 8.0], [2.0, 3.0, 6.0, 7.0]]);
    }

    #[test]
    fn only_plans_that_can_be_launched_are_candidates() {
        let case = standard(Operation::Dispatch, Workload::Train, 2, Dtype::Fp8, Layout::RankMajor);
        let device = DeviceProperties::h200();
        for operation in [Operation::Dispatch, Operation::Combine] {
            let all = candidates(&case, operation, &device, 12);
            let distinct: BTreeSet<String> = all.iter().map(plan_text).collect();
            assert!(all.len() >= 12 && distinct.len() == all.len());
            assert!(all.iter().all(|plan| plan.blocks == 12));
        }
    }
}
