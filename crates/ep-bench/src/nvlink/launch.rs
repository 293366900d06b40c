//! `launch`: the same kernels with and without cooperative and cluster attributes, alone and beside
//! a kernel that holds all other SMs.

use std::time::Duration;

use ep_kernels::cuda::{Compiler, Device, HoldSpec, SmTools};
use ep_runtime::{CopyPath, LaunchAttributes, MovePlan, Tuning};
use serde_json::json;

use super::budget::Budget;
use super::choice::tuning;
use super::rank::{Call, Rank, on_ranks};
use super::raw::{LIMIT, failed};
use super::rows::{Limits, row};
use super::{job, slowest};
use crate::Result;
use crate::case::{Case, Operation};
use crate::cli::Args;
use crate::report::Row;
use crate::rng::{Purpose, Rng};

/// How a kernel is launched.
const LAUNCHES: [&str; 4] = ["plain", "cooperative", "cluster2", "cluster2-cooperative"];
/// SMs left free beyond those of the kernel; `None`: nothing is held.
const MARGINS: [Option<u32>; 5] = [None, Some(0), Some(2), Some(4), Some(8)];
const RUNS: usize = 8;
/// Long beside any of the operations.
const HOLD: Duration = Duration::from_millis(8);

#[derive(Clone, Copy, Debug)]
struct Point {
    operation: Operation,
    sms: u32,
    launch: usize,
    margin: Option<u32>,
}

fn points(seed: u64) -> Vec<Point> {
    let mut points = Vec::new();
    for operation in [Operation::Dispatch, Operation::Combine] {
        for sms in [16, 8] {
            for launch in 0..LAUNCHES.len() {
                points.extend(MARGINS.map(|margin| Point { operation, sms, launch, margin }));
            }
        }
    }
    let mut rng = Rng::new(seed, Purpose::Outputs, usize::MAX);
    for i in (1..points.len()).rev() {
        let mut bytes = [0u8; 8];
        rng.fill(&mut bytes);
        points.swap(i, (u64::from_le_bytes(bytes) % (i as u64 + 1)) as usize);
    }
    points
}

fn attributes(launch: usize) -> LaunchAttributes {
    let plain = LaunchAttributes::plain();
    match launch {
        0 => plain,
        1 => plain.with_cooperative(),
        2 => plain.with_cluster(2),
        _ => plain.with_cluster(2).with_cooperative(),
    }
}

fn plan(point: &Point, row_bytes: u32) -> MovePlan {
    plan_with(point.operation, point.sms, attributes(point.launch), row_bytes)
}

/// The plan whose attributes are varied: one block per SM, by its shared memory.
pub(super) fn plan_with(
    operation: Operation,
    sms: u32,
    attributes: LaunchAttributes,
    row_bytes: u32,
) -> MovePlan {
    let path = match operation {
        Operation::Combine => CopyPath::Tma { stages: 3, chunk: 3584 },
        _ => CopyPath::Tma { stages: 3, chunk: row_bytes.clamp(16, 16 << 10) },
    };
    let warps = if operation == Operation::Combine { 16 } else { 5 };
    MovePlan { attributes, ..MovePlan::new(sms, warps, path) }
}

/// Runs the study.
///
/// # Errors
/// As the measurements.
pub fn run(args: &Args, case: &Case, devices: &[Device]) -> Result<Vec<Row>> {
    let budget = Budget::of(args);
    let job = job(case.clone(), false, devices)?;
    let bytes = case.dtype.payload_bytes(case.shape.hidden) as u32;
    let points = points(case.seed);
    let all = on_ranks(&job, (16, Tuning::default()), false, &|rank| {
        rank.verify(Call::default())?;
        let tools =
            SmTools::load(&rank.device, Compiler::get().map_err(failed)?).map_err(failed)?;
        let mut seen = Vec::with_capacity(points.len());
        for point in &points {
            if budget.is_spent_for_any(rank)? {
                break;
            }
            seen.push(one(rank, &tools, point, bytes)?);
        }
        Ok(seen)
    })?;
    let measured = all.iter().map(Vec::len).min().unwrap_or(0);
    if measured < points.len() {
        println!("left out (--budget): {} of {} launches", points.len() - measured, points.len());
    }
    let mut results = Vec::new();
    for (i, point) in points.iter().take(measured).enumerate() {
        let times: Vec<Vec<f64>> = all.iter().map(|rank| rank[i].0.clone()).collect();
        let blocked = (0..RUNS).filter(|&run| all.iter().any(|rank| rank[i].1[run])).count();
        let timed = (point.operation, slowest(&times));
        let mut row = row(&job, timed, point.sms, Call::default(), &Limits::default());
        let beside = point.margin.map_or("alone".into(), |m| format!("{} free", point.sms + m));
        row.launch = LAUNCHES[point.launch].into();
        let name = row.launch.replace("cooperative", "coop");
        let mark = if blocked > 0 { format!(" BLOCKED {blocked}") } else { String::new() };
        row.metrics.insert("how".into(), json!(format!("{name} {beside}{mark}")));
        row.metrics.insert("free_sms".into(), json!(point.margin.map(|m| point.sms + m)));
        row.metrics.insert("blocked".into(), json!(blocked));
        results.push(row);
    }
    results.sort_by_key(|row| {
        let free = row.metrics["free_sms"].as_u64().unwrap_or(0);
        (row.bench.clone(), row.sms, row.launch.clone(), free)
    });
    Ok(results)
}

/// The times of a point, and for each run whether it outlasted the holder.
fn one(
    rank: &mut Rank<'_>,
    tools: &SmTools,
    point: &Point,
    row_bytes: u32,
) -> Result<(Vec<f64>, Vec<bool>)> {
    rank.retune(tuning(point.operation, plan(point, row_bytes)))?;
    let (mut times, mut blocked) = (Vec::new(), Vec::new());
    let (least, _) = rank.device.priorities().map_err(failed)?;
    let beside = rank.device.stream(least).map_err(failed)?;
    // The first launch with an attribute may make the driver wait for the GPU, which waits for the
    // start: so that comes first here.
    for _ in 0..2 {
        rank.measure_beside(point.operation, false)?;
    }
    // Results do not depend on what else runs: each launch is compared once.
    rank.measure(point.operation, Call::default(), (2, 0), point.margin.is_none())?;
    for _ in 0..RUNS {
        let holder = match point.margin {
            None => None,
            Some(margin) => {
                let sms = rank.device.properties().sms - point.sms - margin;
                rank.barrier()?;
                let holder = tools.hold(&beside, &HoldSpec::anywhere(sms, HOLD)).map_err(failed)?;
                holder.wait_holding(LIMIT).map_err(failed)?;
                Some(holder)
            }
        };
        times.extend(rank.measure_beside(point.operation, true)?);
        blocked.push(holder.as_ref().is_some_and(|holder| !holder.is_holding()));
        if let Some(holder) = holder {
            holder.finish(LIMIT).map_err(failed)?;
        }
    }
    Ok((times, blocked))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_launch_is_tried_once_in_an_order_of_the_seed() {
        let text = |seed| points(seed).iter().map(|p| format!("{p:?}")).collect::<Vec<_>>();
        let (one, other) = (text(1), text(2));
        assert_eq!(one, text(1));
        assert_ne!(one, other);
        let distinct: std::collections::BTreeSet<_> = one.iter().collect();
        assert_eq!((one.len(), distinct.len()), (80, 80));
        assert_eq!(distinct, other.iter().collect());
    }
}
