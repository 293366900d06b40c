//! `copy`: which way through an SM, with how many warps, is best on how many SMs, and how the plan that
//! a layer launches by compares.

use ep_kernels::cuda::{Device, DeviceProperties};
use ep_runtime::{MovePlan, PlanInForce, Tuning};
use serde_json::json;

use super::budget::Budget;
use super::choice::{Choice, candidates, in_force, in_turns, plan_text, tuning};
use super::overlap::points::{OPERATIONS, shuffle};
use super::rank::{Call, Rank, on_ranks};
use super::rows::{Limits, row};
use super::{Job, job, slowest, tuning_mode};
use crate::Result;
use crate::case::{Case, Operation};
use crate::cli::Args;
use crate::report::Row;

/// Numbers of SMs.
pub const SMS: [u32; 6] = [4, 8, 12, 16, 24, 32];
const RUNS: (usize, usize) = (3, 11);

type Point = (Operation, MovePlan);

/// The plans in force on a number of SMs.
type Chosen = Vec<(u32, Vec<PlanInForce>)>;

/// Times every plan; one row each, best first per number of SMs. Compares the results of the best, and
/// its times with those of the plan in force.
///
/// # Errors
/// As the measurements.
pub fn run(args: &Args, case: &Case, devices: &[Device]) -> Result<Vec<Row>> {
    let budget = Budget::of(args);
    let mut job = job(case.clone(), false, devices)?;
    let chosen = chosen(args, &mut job)?;
    let points = points(case, devices[0].properties(), &chosen);
    eprintln!("{} points", points.len());
    let times = sweep(&job, &points, &budget)?;
    let mut results = Vec::new();
    for (&(operation, plan), runs) in points.iter().zip(times) {
        let mut row =
            row(&job, (operation, runs), plan.blocks, Call::default(), &Limits::default());
        row.metrics.insert("how".into(), json!(plan_text(&plan)));
        row.metrics.insert("warps".into(), json!(plan.warps));
        results.push(((operation, plan), row));
    }
    if results.len() < points.len() {
        println!(
            "left out (--budget): {} of {} points",
            points.len() - results.len(),
            points.len()
        );
    }
    let best = mark(&mut results);
    let choices = compare(&job, &best, &chosen, &results)?;
    let mut rows: Vec<Row> = results.into_iter().map(|(_, row)| row).collect();
    rows.extend(choices.iter().map(|c| c.row(&job, "alone", c.best.blocks)));
    Ok(rows)
}

/// By which plans layers are launched: those that ship or, with `--tune`, that a search finds.
fn chosen(args: &Args, job: &mut Job) -> Result<Chosen> {
    job.tune = tuning_mode(args);
    let of = |sms| {
        on_ranks(job, (sms, Tuning::default()), false, &|_| Ok(()))?;
        Ok((sms, job.plans()))
    };
    let chosen = SMS.into_iter().map(of).collect();
    // What is swept is given.
    job.tune = ep_runtime::Tune::Off;
    chosen
}

/// All candidates and what is in force, in an order of the seed: what a budget leaves out is then no
/// kind of plan.
fn points(case: &Case, device: &DeviceProperties, chosen: &Chosen) -> Vec<Point> {
    let mut points = Vec::new();
    for operation in OPERATIONS {
        for (sms, plans) in chosen {
            let all = candidates(case, operation, device, *sms);
            points.extend(all.into_iter().map(|plan| (operation, plan)));
            let extra = in_force(plans, operation).map(|found| (operation, found.plan));
            points.extend(extra.filter(|extra| !points.contains(extra)));
        }
    }
    shuffle(&mut points, case.seed, 4000);
    points
}

/// Times of the first points, as many as there is time for; the slowest rank's.
fn sweep(job: &Job, points: &[Point], budget: &Budget) -> Result<Vec<Vec<f64>>> {
    let all = on_ranks(job, (32, Tuning::default()), false, &|rank| {
        rank.verify(Call::default())?;
        let mut times = Vec::with_capacity(points.len());
        for &(operation, plan) in points {
            if budget.is_spent_for_any(rank)? {
                break;
            }
            rank.retune(tuning(operation, plan))?;
            times.push(rank.measure(operation, Call::default(), RUNS, false)?);
        }
        Ok(times)
    })?;
    let measured = all.iter().map(Vec::len).min().unwrap_or(0);
    let of = |i: usize| slowest(&all.iter().map(|rank| rank[i].clone()).collect::<Vec<_>>());
    Ok((0..measured).map(of).collect())
}

/// Sorts, and marks the best of each operation and number of SMs, so that a report says it without
/// being sorted; only these are compared.
fn mark(results: &mut [(Point, Row)]) -> Vec<Point> {
    results.sort_by(|(_, a), (_, b)| {
        (&b.bench, a.sms).cmp(&(&a.bench, b.sms)).then(a.p50_us.total_cmp(&b.p50_us))
    });
    let mut last = (String::new(), 0);
    let mut best = Vec::new();
    for (point, row) in results {
        let group = (row.bench.clone(), row.sms);
        row.verified = group != last;
        row.metrics.insert("best".into(), json!(row.verified));
        if row.verified {
            best.push(*point);
        }
        last = group;
    }
    best
}

/// Compares what the best plans give with the host backend, and their times with those in force.
fn compare(
    job: &Job,
    best: &[Point],
    chosen: &Chosen,
    results: &[(Point, Row)],
) -> Result<Vec<Choice>> {
    let pairs: Vec<(Point, PlanInForce)> = best
        .iter()
        .filter_map(|&(operation, plan)| {
            let (_, plans) = chosen.iter().find(|(sms, _)| *sms == plan.blocks)?;
            Some(((operation, plan), in_force(plans, operation)?))
        })
        .collect();
    let all = on_ranks(job, (32, Tuning::default()), false, &|rank| {
        let chosen = pairs.iter().map(|((operation, _), chosen)| (*operation, chosen.plan));
        for (operation, plan) in best.iter().copied().chain(chosen) {
            rank.retune(tuning(operation, plan))?;
            rank.verify(Call::default())?;
        }
        pairs.iter().map(|pair| in_turn(rank, pair)).collect::<Result<Vec<_>>>()
    })?;
    let choice = |(i, &((operation, best), chosen)): (usize, &(Point, PlanInForce))| Choice {
        operation,
        chosen,
        best,
        points: results
            .iter()
            .filter(|((op, plan), _)| *op == operation && plan.blocks == best.blocks)
            .count(),
        beside: "alone",
        times: all.iter().map(|rank| rank[i].clone()).collect(),
    };
    Ok(pairs.iter().enumerate().map(choice).collect())
}

fn in_turn(
    rank: &mut Rank<'_>,
    &((operation, best), chosen): &(Point, PlanInForce),
) -> Result<[Vec<f64>; 2]> {
    in_turns(rank, [chosen.plan, best], |rank, plan| {
        rank.retune(tuning(operation, plan))?;
        rank.measure(operation, Call::default(), RUNS, false)
    })
}
