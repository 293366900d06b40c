//! `overlap`: dispatch and combine beside compute, and compute beside them.
//!
//! In one process and in an order of the seed: calls alone, compute alone on all SMs and on those that
//! are left to it, calls while compute runs, and compute while calls run back to back; then launches
//! that must not block, one that does, and the pipeline helper.

mod clocks;
mod hold;
pub(super) mod judge;
mod load;
pub(super) mod multiply;
mod pipeline;
mod point;
pub(super) mod points;
pub(super) mod seat;
mod table;
mod tries;

use std::path::Path;
use std::time::{Duration, Instant};

use ep_kernels::cuda::Device;
use ep_runtime::Tuning;
use serde_json::json;

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

/// No further layer is started after so long: GPUs are shared.
const TIME: Duration = Duration::from_secs(170);

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
    let (start, mut failures) = (Instant::now(), Vec::new());
    let mut number = 0;
    for (config, points) in points::configs(&scope, case.seed) {
        if start.elapsed() > TIME {
            println!("left out after {} s: {config:?}", TIME.as_secs());
            continue;
        }
        eprintln!("{:>5.1} s: {config:?}", start.elapsed().as_secs_f64());
        match layer(&job, &matrices, &config, &points, (&scope, case.seed, number)) {
            Ok(rows) => report.results.extend(rows),
            Err(error) => {
                eprintln!("{config:?}: {error}");
                failures.push((format!("{config:?}"), error));
            }
        }
        number += points.len();
    }
    sort(&mut report.results);
    save(args, report)?;
    eprintln!("{:>5.1} s: tries", start.elapsed().as_secs_f64());
    match tries::run(&job, &scope, case.seed) {
        Ok(seen) => report.results.extend(seen.iter().map(|(one, seen)| tried(&job, one, seen))),
        Err(error) => failures.push(("tries".into(), error)),
    }
    save(args, report)?;
    if scope.wants(pipeline::NAME) {
        eprintln!("{:>5.1} s: pipeline", start.elapsed().as_secs_f64());
        match pipeline::run(&job, &matrices, &scope) {
            Ok(samples) => report.results.push(pipelined(args, &job, &samples)?),
            Err(error) => failures.push(("pipeline".into(), error)),
        }
    }
    save(args, report)?;
    eprintln!("{:>5.1} s: done", start.elapsed().as_secs_f64());
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
        Ok((seat.sms.clone(), samples))
    })?;
    let mut rows = Vec::new();
    for (i, point) in points.iter().enumerate() {
        let samples: Option<Vec<point::Sample>> =
            ranks.iter().map(|(_, samples)| samples[i].clone()).collect();
        let Some(samples) = samples else { continue };
        let mut row = result(job, point, (ranks[0].0.clone(), samples));
        note_plan(&mut row, &job.plans());
        rows.push(row);
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
    put("beside_us", json!(figures.beside_us));
    put("slowdown", json!(figures.slowdown()));
    put("blocked", json!(figures.blocked));
    put("outside", json!(figures.outside));
    put("tflops_all", json!(figures.tflops_all));
    put("tflops_own", json!(figures.tflops_own));
    put("tflops_beside", json!(figures.tflops_beside));
    put("loss", json!(figures.loss));
    put("loss_own", json!(figures.loss_own));
    put("back_to_back_us", json!(figures.back_to_back_us));
    put("clock_alone_mhz", json!(figures.clock_alone));
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
    let (dispatch, experts, combine) = outcome.stages;
    let ratio = outcome.ratio;
    let mut put = |name: &str, value: serde_json::Value| {
        row.metrics.insert(name.into(), value);
    };
    put("table", json!("pipeline"));
    put("how", json!(pipeline::NAME));
    put("batches", json!(pipeline::BATCHES));
    put("gemms_per_batch", json!(samples.first().map(|s| s.launches)));
    put("dispatch_us", json!(dispatch));
    put("experts_us", json!(experts));
    put("combine_us", json!(combine));
    put("ideal_us", json!(outcome.ideal_us));
    put("serial_us", json!(outcome.serial_us));
    put("ratio", json!(ratio));
    // Rates of a pipeline are not those of one round trip.
    (row.wire_gbps, row.logical_gbps) = (0.0, 0.0);
    put_bounds(&mut row, &[Bound { what: "pipeline", found: ratio, must: 1.08, goal: 1.0 }]);
    Ok(row)
}

/// By operation, what runs beside, policy and SMs, whatever the order they were measured in.
fn sort(rows: &mut [Row]) {
    rows.sort_by_key(|row| {
        let text = |name: &str| row.metrics[name].as_str().unwrap_or_default().to_owned();
        let asked = row.metrics["sms_asked"].as_u64();
        (text("policy"), text("beside"), row.bench.clone(), asked)
    });
}

#[cfg(test)]
mod tests;
