//! `copy`: which way through an SM, with how many warps, is best on how many SMs.

use ep_kernels::cuda::Device;
use ep_runtime::sched::tune::{rows_plans, sums_plans};
use ep_runtime::{CopyPath, MovePlan, Tuning};
use serde_json::json;

use super::rank::{Call, on_ranks};
use super::rows::{Limits, row};
use super::{job, slowest};
use crate::Result;
use crate::case::{Case, Operation};
use crate::report::Row;

/// Numbers of SMs.
pub const SMS: [u32; 6] = [4, 8, 12, 16, 24, 32];
const RUNS: (usize, usize) = (3, 11);

/// A plan in words, SMs aside.
pub fn plan_text(plan: &MovePlan) -> String {
    match plan.path {
        CopyPath::Tma { stages, chunk } => format!("tma {stages}x{chunk} w{}", plan.warps),
        CopyPath::LdSt { unroll } => format!("ldst u{unroll} w{}", plan.warps),
        other => format!("{other:?} w{}", plan.warps),
    }
}

/// Times every plan; one row each, best first per number of SMs, and compares the best.
///
/// # Errors
/// As the measurements.
pub fn run(case: &Case, devices: &[Device]) -> Result<Vec<Row>> {
    let job = job(case.clone(), false, devices)?;
    let limits = Limits::default();
    let bytes = case.dtype.payload_bytes(case.shape.hidden) as u32;
    let properties = devices[0].properties();
    // A plan that cannot be launched ends the group: such are left out before.
    let fits = |operation, warps, path| {
        let (plan, ranks) = (MovePlan::new(1, warps, path), case.shape.ranks);
        match operation {
            Operation::Combine => plan.check_sums(ranks, properties).is_ok(),
            _ => plan.check_rows(ranks, properties).is_ok(),
        }
    };
    let mut points = Vec::new();
    for (operation, plans) in
        [(Operation::Dispatch, rows_plans(bytes)), (Operation::Combine, sums_plans())]
    {
        for (warps, path) in plans.into_iter().filter(|&(warps, path)| fits(operation, warps, path))
        {
            points.extend(SMS.map(|sms| (operation, MovePlan::new(sms, warps, path))));
        }
    }
    let all = on_ranks(&job, (32, Tuning::default()), false, &|rank| {
        rank.verify(Call::default())?;
        points
            .iter()
            .map(|(operation, plan)| {
                rank.retune(tuning(*operation, *plan))?;
                rank.measure(*operation, Call::default(), RUNS, false)
            })
            .collect::<Result<Vec<_>>>()
    })?;
    let mut results = Vec::new();
    for (i, (operation, plan)) in points.iter().enumerate() {
        let ranks: Vec<Vec<f64>> = all.iter().map(|rank| rank[i].clone()).collect();
        let timed = (*operation, slowest(&ranks));
        let mut row = row(&job, timed, plan.blocks, Call::default(), &limits);
        let how = plan_text(plan);
        row.metrics.insert("how".into(), json!(how));
        row.metrics.insert("warps".into(), json!(plan.warps));
        results.push((i, row));
    }
    results.sort_by(|(_, a), (_, b)| {
        (&b.bench, a.sms).cmp(&(&a.bench, b.sms)).then(a.p50_us.total_cmp(&b.p50_us))
    });
    // The best of each is marked, so that a report says it without being sorted; only these were
    // compared.
    let mut last = (String::new(), 0);
    let mut best = Vec::new();
    for (point, row) in &mut results {
        let group = (row.bench.clone(), row.sms);
        row.verified = group != last;
        row.metrics.insert("best".into(), json!(row.verified));
        if row.verified {
            best.push(points[*point]);
        }
        last = group;
    }
    on_ranks(&job, (32, Tuning::default()), false, &|rank| {
        best.iter().try_for_each(|(operation, plan)| {
            rank.retune(tuning(*operation, *plan))?;
            rank.verify(Call::default())
        })
    })?;
    Ok(results.into_iter().map(|(_, row)| row).collect())
}

fn tuning(operation: Operation, plan: MovePlan) -> Tuning {
    let mut tuning = Tuning::default();
    match operation {
        Operation::Combine => tuning.combine = Some(plan),
        _ => tuning.dispatch = Some(plan),
    }
    tuning
}
