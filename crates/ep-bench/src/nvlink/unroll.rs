//! `unroll`: ways through an SM, alone and beside compute: what unrolling is worth, and what tuning
//! beside compute is. And how the plan in force compares with the best beside the GEMM.

use std::path::Path;

use ep_kernels::cuda::moe::{SUM_SHAPES, UNROLLS};
use ep_kernels::cuda::{Device, DeviceProperties};
use ep_runtime::{CopyPath, MovePlan, PlanInForce, Tuning};
use serde_json::{Value, json};

use super::budget::Budget;
use super::choice::{Choice, in_force, plan_text, tuning};
use super::overlap::choose;
use super::overlap::judge::{Bound, median};
use super::overlap::multiply::{Matrices, Products};
use super::overlap::points::{Beside, OPERATIONS, Policy, Scope, shuffle};
use super::overlap::seat::{Beheld, Seat};
use super::overlap::{first, matrices, put_bounds, scope};
use super::rank::{Call, Setup, on_ranks_with};
use super::rows::{Limits, row};
use super::{Job, job, slowest, tuning_mode};
use crate::Result;
use crate::case::{Case, Operation};
use crate::cli::Args;
use crate::report::{Report, Row, write};

/// SMs of the table.
pub const SMS: [u32; 3] = [12, 18, 24];
/// Beside what.
const LOADS: [Beside; 2] = [Beside::Holder, Beside::Gemm];

/// One way of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// What is timed.
    pub operation: Operation,
    /// How.
    pub plan: MovePlan,
}

impl Point {
    /// `ldst u4 w16`, `tma 2x14336 w5`.
    pub fn how(&self) -> String {
        plan_text(&self.plan)
    }

    fn tuning(&self) -> Tuning {
        tuning(self.operation, self.plan)
    }

    fn is_tma(&self) -> bool {
        matches!(self.plan.path, CopyPath::Tma { .. })
    }
}

/// All points on `sms` SMs that fit `device`, in an order of the seed.
pub fn points(
    scope: &Scope,
    (sms, seed): (u32, u64),
    case: &Case,
    device: &DeviceProperties,
) -> Vec<Point> {
    let row = case.dtype.payload_bytes(case.shape.hidden) as u32;
    let warps: &[u32] = if scope.quick { &[16, 24] } else { &[8, 12, 16, 20, 24, 32] };
    let mut points = Vec::new();
    for operation in OPERATIONS {
        let mut paths = Vec::new();
        for unroll in UNROLLS {
            paths.extend(warps.iter().map(|&warps| (warps, CopyPath::LdSt { unroll })));
        }
        let bulk = match operation {
            Operation::Combine => sums(scope),
            _ => rows(scope, row),
        };
        paths.extend(bulk);
        let plan = |(warps, path)| Point { operation, plan: MovePlan::new(sms, warps, path) };
        points.extend(paths.into_iter().map(plan));
    }
    let ranks = case.shape.ranks;
    points.retain(|point| match point.operation {
        Operation::Combine => point.plan.check_sums(ranks, device).is_ok(),
        _ => point.plan.check_rows(ranks, device).is_ok(),
    });
    points.retain(|p| scope.wants(&format!("{} {sms} {}", p.operation.name(), p.how())));
    shuffle(&mut points, seed, 2000 + sms as usize);
    points
}

/// Bulk copies of whole and of half rows.
fn rows(scope: &Scope, row: u32) -> Vec<(u32, CopyPath)> {
    let stages: &[u32] = if scope.quick { &[2] } else { &[2, 3] };
    let mut all = Vec::new();
    for &stages in stages {
        for (divisor, warps) in [(1, [4, 5, 7]), (2, [8, 10, 14])] {
            let chunk = (row / divisor).next_multiple_of(16);
            all.extend(warps.map(|warps| (warps, CopyPath::Tma { stages, chunk })));
        }
    }
    all
}

fn sums(scope: &Scope) -> Vec<(u32, CopyPath)> {
    let warps: &[u32] = if scope.quick { &[16] } else { &[8, 12, 16] };
    let shape = |(vectors, stages)| {
        let path = CopyPath::Tma { stages, chunk: 512 * vectors };
        warps.iter().map(move |&warps| (warps, path))
    };
    SUM_SHAPES.into_iter().flat_map(shape).collect()
}

/// What all ranks came to at one point: medians of the slowest rank, microseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Times {
    /// Every run alone.
    pub runs: Vec<f64>,
    /// Alone.
    pub alone: Option<f64>,
    /// Beside each of the loads.
    pub beside: [Option<f64>; 2],
}

/// The best of a set of points, by index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Best {
    /// Alone.
    pub alone: Option<usize>,
    /// Beside each of the loads.
    pub beside: [Option<usize>; 2],
    /// Beside the first load, by bulk copies and by loads and stores.
    pub paths: [Option<usize>; 2],
}

/// Finds them among the points of `operation`.
pub fn best(points: &[(Point, Times)], operation: Operation) -> Best {
    let least = |of: &dyn Fn(&Times) -> Option<f64>, wanted: &dyn Fn(&Point) -> bool| {
        let candidates = points.iter().enumerate().filter_map(|(i, (point, times))| {
            Some((i, of(times).filter(|_| point.operation == operation && wanted(point))?))
        });
        candidates.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(i, _)| i)
    };
    let any = |_: &Point| true;
    Best {
        alone: least(&|t| t.alone, &any),
        beside: [least(&|t| t.beside[0], &any), least(&|t| t.beside[1], &any)],
        paths: [least(&|t| t.beside[0], &Point::is_tma), least(&|t| t.beside[0], &|p| !p.is_tma())],
    }
}

/// Runs it and writes `unroll.json` if a folder is given.
///
/// # Errors
/// The first of the measurements; the others are made and written nevertheless.
pub(super) fn run(args: &Args, case: &Case, devices: &[Device], report: &mut Report) -> Result<()> {
    let scope = scope(args, devices)?;
    let mut job = job(case.clone(), false, devices)?;
    job.tune = tuning_mode(args);
    let matrices = matrices(devices)?;
    let (budget, mut failures) = (Budget::of(args), Vec::new());
    let mut layers = SMS.to_vec();
    shuffle(&mut layers, case.seed, 3000);
    if scope.quick {
        layers = vec![SMS[SMS.len() - 1]];
    }
    for sms in layers {
        let points = points(&scope, (sms, case.seed), case, devices[0].properties());
        if points.is_empty() || !budget.begins(&format!("{sms} SMs, {} points", points.len())) {
            continue;
        }
        match layer(&job, &matrices, (sms, &points), &scope) {
            Ok(rows) => report.results.extend(rows),
            Err(error) => failures.push((format!("{sms} SMs"), error)),
        }
    }
    sort(&mut report.results);
    if let Some(folder) = &args.gpu.out {
        write(&Path::new(folder).join("unroll.json"), &report.json())?;
    }
    first(failures)
}

/// Summaries and plans in force first, then points from the fastest on.
fn sort(rows: &mut [Row]) {
    rows.sort_by_key(|row| {
        let point = row.metrics.contains_key("path");
        let alone = row.metrics.get("alone_us").and_then(Value::as_f64).unwrap_or(0.0);
        (point, std::cmp::Reverse(row.bench.clone()), row.sms, (1e3 * alone) as u64)
    });
}

/// What one rank saw of a point.
type Sample = (Vec<f64>, [Vec<Beheld>; 2]);

fn layer(
    job: &Job,
    matrices: &[Matrices],
    (sms, points): (u32, &[Point]),
    scope: &Scope,
) -> Result<Vec<Row>> {
    let policy = Policy::Partition.of(sms);
    let setup = Setup { policy, ..Setup::new(sms, Tuning::default()) };
    let ranks = on_ranks_with(job, &setup, &|rank| {
        rank.verify(Call::default())?;
        let products = Products::load(&rank.device, &matrices[rank.rank])?;
        let mut seat = Seat::new(rank)?;
        seat.add(Beside::Gemm, &products)?;
        let all = points.iter().map(|point| measure(&mut seat, point, scope));
        let all = all.collect::<Result<Vec<Sample>>>()?;
        Ok((seat.sms.clone(), all))
    })?;
    let timed: Vec<(Point, Times)> = points
        .iter()
        .enumerate()
        .map(|(i, &point)| (point, merge(ranks.iter().map(|(_, all)| &all[i]))))
        .collect();
    let bests = OPERATIONS.map(|operation| (operation, best(&timed, operation)));
    let taken = ranks[0].0.taken;
    let mut rows: Vec<Row> = compare(job, (&setup, matrices), &timed, &bests)?
        .iter()
        .map(|choice| choice.row(job, &format!("partition {sms}"), sms))
        .collect();
    for (operation, best) in &bests {
        rows.extend(summaries(job, (sms, taken), &timed, (*operation, best)));
    }
    for (i, (point, times)) in timed.iter().enumerate() {
        let best = &bests[usize::from(point.operation == Operation::Combine)].1;
        rows.push(result(job, (sms, taken), (i, point, times), best));
    }
    Ok(rows)
}

fn measure(seat: &mut Seat<'_, '_, '_>, point: &Point, scope: &Scope) -> Result<Sample> {
    seat.rank.retune(point.tuning())?;
    let expected = seat.expected(point.operation)?;
    let alone = seat.alone(point.operation, (1, scope.runs()))?;
    let holder = seat.beside(point.operation, Beside::Holder, (scope.runs(), expected))?;
    let gemm = seat.beside(point.operation, Beside::Gemm, (1 + scope.runs(), expected))?;
    Ok((alone, [holder, gemm[1..].to_vec()]))
}

/// The slowest rank counts, run by run; a call counts where all ranks saw it inside.
fn merge<'s>(samples: impl Iterator<Item = &'s Sample>) -> Times {
    let samples: Vec<&Sample> = samples.collect();
    let runs = slowest(&samples.iter().map(|(alone, _)| alone.clone()).collect::<Vec<_>>());
    let beside = [0, 1].map(|load| {
        let seen: Vec<&Vec<Beheld>> = samples.iter().map(|(_, beside)| &beside[load]).collect();
        let runs = seen.iter().map(|list| list.len()).min().unwrap_or(0);
        let inside = (0..runs).filter(|&run| seen.iter().all(|list| list[run].inside));
        let times: Vec<f64> =
            inside.map(|run| seen.iter().map(|list| list[run].us).fold(0.0, f64::max)).collect();
        median(&times)
    });
    Times { alone: median(&runs), runs, beside }
}

/// Compares what the best points of each operation give with the host backend, and the plans in force
/// with the best beside the GEMM, for which layers are tuned.
fn compare(
    job: &Job,
    (setup, matrices): (&Setup, &[Matrices]),
    timed: &[(Point, Times)],
    bests: &[(Operation, Best)],
) -> Result<Vec<Choice>> {
    let plans = job.plans();
    let pair = |(operation, best): &(Operation, Best)| {
        let chosen = in_force(&plans, *operation)?;
        Some((*operation, chosen, timed[best.beside[1]?].0.plan))
    };
    let pairs: Vec<_> = bests.iter().filter_map(pair).collect();
    let all = on_ranks_with(job, setup, &|rank| {
        rank.verify(Call::default())?;
        for (_, best) in bests {
            for at in chosen(best) {
                let point = timed[at].0;
                rank.retune(point.tuning())?;
                rank.measure(point.operation, Call::default(), (0, 1), true)?;
            }
        }
        let products = Products::load(&rank.device, &matrices[rank.rank])?;
        let mut seat = Seat::new(rank)?;
        seat.add(Beside::Gemm, &products)?;
        let load = Some(Beside::Gemm);
        let duel = |&(operation, chosen, best): &(_, PlanInForce, _)| {
            choose::duel(&mut seat, (operation, load), [chosen.plan, best])
        };
        pairs.iter().map(duel).collect::<Result<Vec<_>>>()
    })?;
    let choice = |(i, &(operation, chosen, best)): (usize, &(Operation, PlanInForce, MovePlan))| {
        let points = timed.iter().filter(|(point, _)| point.operation == operation).count();
        let times = all.iter().map(|rank| rank[i].clone()).collect();
        Choice { operation, chosen, best, points, beside: Beside::Gemm.name(), times }
    };
    Ok(pairs.iter().enumerate().map(choice).collect())
}

/// All points that are the best of something, once each.
pub fn chosen(best: &Best) -> Vec<usize> {
    let mut all: Vec<usize> =
        std::iter::once(best.alone).chain(best.beside).chain(best.paths).flatten().collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn slowdown(alone: Option<f64>, beside: Option<f64>) -> Option<f64> {
    Some(beside? / alone? - 1.0)
}

/// The table's lines: the best alone, the same beside compute, and the best beside compute.
fn summaries(
    job: &Job,
    (sms, taken): (u32, u32),
    timed: &[(Point, Times)],
    (operation, best): (Operation, &Best),
) -> Vec<Row> {
    let Some(alone) = best.alone else { return Vec::new() };
    let mut rows = Vec::new();
    for (load, beside) in LOADS.into_iter().enumerate() {
        let (alone, (plan, times)) = (timed[alone].1.alone, &timed[alone]);
        let tuned = best.beside[load].map(|at| &timed[at]);
        let tuned_us = tuned.and_then(|(_, times)| times.beside[load]);
        let mut row = summary_row(job, (operation, times), sms);
        let mut put = |name: &str, value: Value| {
            row.metrics.insert(name.into(), value);
        };
        let text = format!("{} {sms} SMs beside {}", operation.name(), beside.name());
        put("table", json!("unroll summary"));
        put("how", json!(text));
        put("beside", json!(beside.name()));
        put("sms_taken", json!(taken));
        put("alone_us", json!(alone));
        put("alone_how", json!(plan.how()));
        put("overlapped_us", json!(times.beside[load]));
        put("overlapped", json!(slowdown(alone, times.beside[load])));
        put("tuned_us", json!(tuned_us));
        put("tuned_how", json!(tuned.map(|(point, _)| point.how())));
        let found = slowdown(alone, tuned_us);
        put("tuned", json!(found));
        let bound = Bound { what: "slowdown, tuned", found, must: 0.03, goal: 0.01 };
        let asked = beside == Beside::Holder;
        put_bounds(&mut row, if asked { std::slice::from_ref(&bound) } else { &[] });
        rows.push(row);
    }
    rows
}

fn summary_row(job: &Job, (operation, times): (Operation, &Times), sms: u32) -> Row {
    row(job, (operation, times.runs.clone()), sms, Call::default(), &Limits::default())
}

fn result(
    job: &Job,
    (sms, taken): (u32, u32),
    (at, point, times): (usize, &Point, &Times),
    best: &Best,
) -> Row {
    let mut row = summary_row(job, (point.operation, times), sms);
    row.verified = chosen(best).contains(&at);
    let mut put = |name: &str, value: Value| {
        row.metrics.insert(name.into(), value);
    };
    put("table", json!("unroll"));
    put("how", json!(point.how()));
    put("path", json!(if point.is_tma() { "tma" } else { "ldst" }));
    put("warps", json!(point.plan.warps));
    put("sms_taken", json!(taken));
    if let CopyPath::LdSt { unroll } = point.plan.path {
        put("unroll", json!(unroll));
    }
    put("alone_us", json!(times.alone));
    for (load, beside) in LOADS.into_iter().enumerate() {
        put(&format!("{}_us", beside.name()), json!(times.beside[load]));
        let slower = slowdown(times.alone, times.beside[load]);
        put(&format!("{}_slowdown", beside.name()), json!(slower));
        let is_best = best.beside[load] == Some(at);
        put(&format!("best_{}", beside.name()), json!(is_best));
    }
    put("best_alone", json!(best.alone == Some(at)));
    put("best", json!(chosen(best).contains(&at)));
    row
}

#[cfg(test)]
mod tests;
