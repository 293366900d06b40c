//! `overlap`: dispatch and combine beside compute, and compute beside them.
//!
//! In one process and in an order of the seed: calls alone, right behind compute and while it runs,
//! compute alone on all SMs and on those that are left to it, and while calls run back to back; which
//! plan is in force and which is the best; launches that must not block, one that does, and the pipeline
//! helper.

mod bound;
pub(super) mod choose;
mod clocks;
mod hold;
pub(super) mod judge;
mod load;
pub(super) mod multiply;
mod pipeline;
mod point;
pub(super) mod points;
pub(super) mod seat;
mod stages;
mod table;
mod tries;

use std::path::Path;

use ep_kernels::cuda::Device;
use ep_runtime::Tuning;
use serde_json::json;

use super::budget::Budget;
use super::rank::{Call, Setup, on_ranks_with};
use super::rows::{Limits, note_plan, row};
use super::{Job, job, tuning_mode};
use crate::case::{Case, Operation};
use crate::cli::Args;
use crate::report::{Report, Row, write};
use crate::{BenchError, Result};
use judge::Bound;
use multiply::{Matrices, Products};
use points::{Beside, Config, OPERATIONS, Point, Policy, Scope};
use seat::{Seat, Sms};
pub(super) use table::table;

/// What ranks gave for one point: its SMs and the samples.
type Seen = (Sms, Vec<point::Sample>);

/// Runs it and writes `overlap.json` if a folder is given.
///
/// # Errors
/// The first of the measurements; the others are made and written nevertheless.
pub(super) fn run(args: &Args, case: &Case, devices: &[Device], report: &mut Report) -> Result<()> {
    let scope = scope(args, devices)?;
    let mut job = job(case.clone(), false, devices)?;
    job.tune = tuning_mode(args);
    let matrices = matrices(devices)?;
    let (budget, mut failures) = (Budget::of(args), Vec::new());
    // What there is one of comes first: layers take what time is left.
    if scope.wants(pipeline::NAME) && budget.begins(pipeline::NAME) {
        match pipeline::run(&job, &matrices, &scope) {
            Ok(samples) => report.results.push(pipelined(args, &job, &samples)?),
            Err(error) => failures.push(("pipeline".into(), error)),
        }
        save(args, report)?;
    }
    match tries::run(&job, &scope, (case.seed, &budget)) {
        Ok(seen) => report.results.extend(seen.iter().map(|(one, seen)| tried(&job, one, seen))),
        Err(error) => failures.push(("tries".into(), error)),
    }
    save(args, report)?;
    let mut number = 0;
    for (config, points) in points::configs(&scope, case.seed) {
        if budget.begins(&config.to_string()) {
            match layer(&job, &matrices, &config, &points, (&scope, case.seed, number)) {
                Ok(rows) => report.results.extend(rows),
                Err(error) => {
                    eprintln!("{config}: {error}");
                    failures.push((config.to_string(), error));
                }
            }
        }
        number += points.len();
    }
    sort(&mut report.results);
    save(args, report)?;
    first(failures)
}

/// What is to be run, if these GPUs can.
pub(super) fn scope(args: &Args, devices: &[Device]) -> Result<Scope> {
    if devices.len() < 2 || args.ranks.is_some_and(|ranks| ranks > devices.len()) {
        let text = "overlap and unroll need two GPUs or more, and one for each rank";
        return Err(BenchError::Usage(text.into()));
    }
    Ok(Scope { quick: args.gpu.quick, only: args.gpu.only.clone() })
}

/// The factors on each GPU.
pub(super) fn matrices(devices: &[Device]) -> Result<Vec<Matrices>> {
    devices.iter().map(Matrices::new).collect()
}

/// Tells of all failures and gives back the first that counts most.
pub(super) fn first(failures: Vec<(String, BenchError)>) -> Result<()> {
    for (what, error) in &failures {
        eprintln!("{what}: {error}");
    }
    let different = |e: &BenchError| matches!(e, BenchError::Verification { .. });
    let mut errors: Vec<BenchError> = failures.into_iter().map(|(_, error)| error).collect();
    errors.sort_by_key(|e| !different(e));
    errors.into_iter().next().map_or(Ok(()), Err)
}

fn save(args: &Args, report: &Report) -> Result<()> {
    match &args.gpu.out {
        Some(folder) => write(&Path::new(folder).join("overlap.json"), &report.json()),
        None => Ok(()),
    }
}

/// All points of one layer.
fn layer(
    job: &Job,
    matrices: &[Matrices],
    config: &Config,
    points: &[Point],
    (scope, seed, number): (&Scope, u64, usize),
) -> Result<Vec<Row>> {
    let Config { policy, sms } = *config;
    let choices = choose::wanted(config, scope);
    let setup = Setup { policy: policy.of(sms), ..Setup::new(sms, Tuning::default()) };
    let ranks = on_ranks_with(job, &setup, &|rank| {
        rank.verify(Call::default())?;
        let products = Products::load(&rank.device, &matrices[rank.rank])?;
        let mut seat = Seat::new(rank)?;
        let expected: Vec<f64> =
            OPERATIONS.into_iter().map(|op| seat.expected(op)).collect::<Result<_>>()?;
        let mut samples = Vec::with_capacity(points.len());
        for (i, point) in points.iter().enumerate() {
            if point.beside != Beside::Holder && !seat.add(point.beside, &products)? {
                samples.push(None);
                continue;
            }
            let expected = expected[usize::from(point.operation == Operation::Combine)];
            let order = (scope, seed, number + i);
            samples.push(Some(point::measure(&mut seat, point, order, expected)?));
        }
        if seat.rank.rank == 0
            && let Some(why) = products.missing()
        {
            eprintln!("cuBLASLt is left out: {why}");
        }
        if !choices.is_empty() {
            seat.add(Beside::Gemm, &products)?;
        }
        let swept = choices.iter().enumerate();
        let swept = swept.map(|(i, &op)| choose::measure(&mut seat, job, op, (config, number + i)));
        let swept = swept.collect::<Result<Vec<_>>>()?;
        Ok((seat.sms.clone(), samples, swept))
    })?;
    let mut rows = Vec::new();
    for (i, point) in points.iter().enumerate() {
        let samples: Option<Vec<point::Sample>> =
            ranks.iter().map(|(_, samples, _)| samples[i].clone()).collect();
        let Some(samples) = samples else { continue };
        let mut row = result(job, point, (ranks[0].0.clone(), samples));
        note_plan(&mut row, &job.plans());
        rows.push(row);
    }
    for i in 0..choices.len() {
        let swept: Option<Vec<_>> = ranks.iter().map(|(_, _, swept)| swept[i].clone()).collect();
        let choice = swept.and_then(choose::merge);
        rows.extend(choice.map(|choice| choice.row(job, &config.to_string(), ranks[0].0.blocks)));
    }
    Ok(rows)
}

/// The row of a point.
fn result(job: &Job, point: &Point, (sms, samples): Seen) -> Row {
    let (alone, beside, figures) = point::merge(&samples);
    let timed = (point.operation, beside.clone());
    let mut row = row(job, timed, sms.blocks, Call::default(), &Limits::default());
    let bounds = judge::bounds(point.config.policy, point.beside, &sms, &figures);
    let mut put = |name: &str, value: serde_json::Value| {
        row.metrics.insert(name.into(), value);
    };
    put("table", json!("overlap"));
    put("how", json!(point.to_string()));
    put("policy", json!(point.config.policy.name()));
    put("beside", json!(point.beside.name()));
    put("sms_asked", json!(sms.asked.max(sms.blocks)));
    put("sms_taken", json!(sms.taken));
    put("compute_sms", json!(sms.compute));
    put("device_sms", json!(sms.all));
    put("instead", json!(sms.why));
    put("alone_us", json!(figures.alone_us));
    put("alone_warm_us", json!(figures.warm_us));
    put("beside_us", json!(figures.beside_us));
    put("slowdown", json!(figures.slowdown()));
    put("slowdown_by_clocks", json!(figures.by_clocks()));
    put("slowdown_by_contention", json!(figures.by_contention()));
    put("blocked", json!(figures.blocked));
    put("outside", json!(figures.outside));
    put("tflops_all", json!(figures.tflops_all));
    put("tflops_own", json!(figures.tflops_own));
    put("tflops_beside", json!(figures.tflops_beside));
    put("loss", json!(figures.loss));
    put("loss_own", json!(figures.loss_own));
    put("back_to_back_us", json!(figures.back_to_back_us));
    put("clock_alone_mhz", json!(figures.clock_alone));
    put("clock_alone_warm_mhz", json!(figures.clock_warm));
    put("clock_beside_mhz", json!(figures.clock_beside));
    put("alone_runs", json!(alone));
    put("beside_runs", json!(beside));
    put_bounds(&mut row, &bounds);
    row
}

/// What was asked of a row, and whether it came to that.
pub(super) fn put_bounds(row: &mut Row, bounds: &[Bound]) {
    let list = |bound: &Bound| {
        // JSON has no infinity: a bound that cannot be missed is none.
        let must = bound.must.is_finite().then_some(bound.must);
        json!({"what": bound.what, "found": bound.found, "must": must, "goal": bound.goal,
            "verdict": bound.verdict()})
    };
    row.metrics.insert("bounds".into(), bounds.iter().map(list).collect());
    row.metrics.insert("verdict".into(), json!(judge::worst(bounds)));
}

/// The row of a launch that was tried many times.
fn tried(job: &Job, one: &tries::Try, seen: &[tries::Tried]) -> Row {
    let refused = seen.iter().find_map(|s| s.refused.clone());
    let sample = |tried: &tries::Tried| point::Sample {
        alone: tried.alone.clone(),
        beside: tried.calls.clone(),
        ..point::Sample::default()
    };
    let (_, beside, figures) = point::merge(&seen.iter().map(sample).collect::<Vec<_>>());
    let tries = beside.len() + figures.blocked;
    let mut row = row(job, (one.operation, beside), one.sms, Call::default(), &Limits::default());
    row.launch = one.launch().into();
    let mut put = |name: &str, value: serde_json::Value| {
        row.metrics.insert(name.into(), value);
    };
    put("table", json!("tries"));
    put("how", json!(one.name()));
    put("policy", json!(one.policy.name()));
    put("tries", json!(tries));
    put("blocked", json!(figures.blocked));
    put("outside", json!(figures.outside));
    put("alone_us", json!(figures.alone_us));
    put("beside_us", json!(figures.beside_us));
    put("slowdown", json!(figures.slowdown()));
    put("refused", json!(refused));
    let fits = one.policy != Policy::Shared && refused.is_none();
    let blocked = Some(figures.blocked as f64).filter(|_| tries > 0);
    let bound = Bound { what: "blocked", found: blocked, must: 0.0, goal: 0.0 };
    put_bounds(&mut row, if fits { std::slice::from_ref(&bound) } else { &[] });
    row
}

/// The row of the pipeline.
fn pipelined(args: &Args, job: &Job, samples: &[pipeline::Sample]) -> Result<Row> {
    let outcome = pipeline::merge(samples).unwrap_or_default();
    if let (Some(path), Some(sample)) = (&args.trace, samples.first()) {
        write(path, &sample.trace)?;
    }
    let timed = (Operation::Roundtrip, outcome.runs.clone());
    let mut row = row(job, timed, pipeline::SMS, Call::default(), &Limits::default());
    let ratio = outcome.ratio;
    let mut put = |name: &str, value: serde_json::Value| {
        row.metrics.insert(name.into(), value);
    };
    put("table", json!("pipeline"));
    put("how", json!(pipeline::NAME));
    put("batches", json!(pipeline::BATCHES));
    put("gemms_per_batch", json!(samples.first().map(|s| s.launches)));
    for (of, stages) in [("", &outcome.alone), ("_busy", &outcome.busy)] {
        put(&format!("dispatch{of}_us"), json!(stages.dispatch));
        put(&format!("experts{of}_us"), json!(stages.experts));
        put(&format!("combine{of}_us"), json!(stages.combine));
        put(&format!("pair{of}_us"), json!(stages.pair));
    }
    put("ideal_us", json!(outcome.ideal_us));
    put("busy_us", json!(outcome.busy_us));
    put("serial_us", json!(outcome.serial_us));
    put("ratio", json!(ratio));
    // Rates of a pipeline are not those of one round trip.
    (row.wire_gbps, row.logical_gbps) = (0.0, 0.0);
    put_bounds(&mut row, &[Bound { what: "pipeline", found: ratio, must: 1.08, goal: 1.0 }]);
    Ok(row)
}

/// By table, then by operation, what runs beside, policy and SMs, whatever the order they were measured
/// in.
fn sort(rows: &mut [Row]) {
    let text = |row: &Row, name: &str| {
        row.metrics.get(name).and_then(|value| value.as_str()).unwrap_or_default().to_owned()
    };
    rows.sort_by_key(|row| {
        let table = ["overlap", "choice", "tries", "pipeline"]
            .into_iter()
            .position(|name| text(row, "table") == name);
        let asked = row.metrics.get("sms_asked").and_then(|value| value.as_u64());
        (table, text(row, "policy"), text(row, "beside"), row.bench.clone(), asked, row.sms)
    });
}

#[cfg(test)]
mod tests;
