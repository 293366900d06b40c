//! Rows of the report, and their table.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ep_runtime::{PlanInForce, PlanOrigin};
use serde_json::{Value, json};

use super::choice::plan_text;
use super::known::Job;
use super::peers::{copy_engines, nccl_all_to_all};
use super::rank::Call;
use super::suite::verdict;
use super::way::Way;
use crate::Result;
use crate::case::{Case, Layout, Operation};
use crate::plan::Traffic;
use crate::report::{Report, Row};
use crate::stats::Summary;

/// What the same GPUs do with as many bytes by other means, in the same run.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Bytes each way.
    pub bytes: u64,
    /// Copy engines, all directions at once, and streams per direction.
    pub copy: Option<(Summary, usize)>,
    /// NCCL's all-to-all, and NCCL's version.
    pub nccl: Option<(Summary, i32)>,
    /// That with no more blocks than the transport by NCCL may take.
    pub nccl_within: Option<Summary>,
    /// What could not be measured, and why.
    pub notes: Vec<String>,
}

/// Bytes of one row as the operation moves it.
fn row_bytes(case: &Case, operation: Operation) -> u64 {
    let hidden = case.shape.hidden;
    let (out, back) = (case.dtype.row_bytes(hidden), case.dtype.back().payload_bytes(hidden));
    (match operation {
        Operation::Dispatch => out,
        Operation::Combine => back,
        Operation::Roundtrip => out + back,
    }) as u64
}

/// Bytes between different ranks, of the busiest one.
pub fn wire_bytes(job: &Job, operation: Operation) -> u64 {
    let Job { case, traffic, reduced, .. } = job;
    let remote = traffic.remote_rows.iter().chain(&traffic.sent_remote).max().copied();
    let exact = operation == Operation::Combine && case.layout == Layout::ExpertMajor && !reduced;
    // Without summing first, every expert's row travels: those of remote tokens.
    let rows = match exact {
        true => {
            traffic.expert_rows.iter().max().copied().unwrap_or(0) as u64
                * (case.shape.ranks as u64 - 1)
                / case.shape.ranks as u64
        }
        false => remote.unwrap_or(0) as u64,
    };
    rows * row_bytes(case, operation)
}

impl Limits {
    /// Measures copy engines and NCCL with the bytes that `job` moves between GPUs.
    ///
    /// # Errors
    /// The driver's; without NCCL there is a note.
    pub fn measure(job: &Job) -> Result<Self> {
        let mut limits = Self { bytes: wire_bytes(job, job.case.operation), ..Self::default() };
        let gpus = job.devices.len();
        if gpus != job.case.shape.ranks || gpus < 2 || limits.bytes == 0 {
            let note = "copy engines and NCCL: measured with one rank per GPU on two or more only";
            limits.notes.push(note.into());
            return Ok(limits);
        }
        limits.copy = Some(copy_engines(&job.devices, limits.bytes as usize)?);
        let block = limits.bytes as usize / (gpus - 1);
        match nccl_all_to_all(&job.devices, block, None) {
            Ok(nccl) => limits.nccl = Some(nccl),
            Err(e) => limits.notes.push(format!("left out: {e}")),
        }
        if let Way::Nccl { ctas, .. } = &job.way {
            limits.nccl_within = Some(nccl_all_to_all(&job.devices, block, Some(*ctas))?.0);
        }
        Ok(limits)
    }

    /// Bytes per microsecond each way.
    pub fn copy_rate(&self) -> Option<f64> {
        self.copy.map(|(time, _)| self.bytes as f64 / time.p50_us)
    }
}

/// The least time by the table's formula for expert-major rows: the wire at the copy engines' rate,
/// or the SMs at 50 GB/s each, whichever is longer.
pub fn expert_major_floor(job: &Job, operation: Operation, sms: u32, rate: f64) -> f64 {
    let Traffic { tokens, rows, sent_remote, remote_rows, expert_rows } = &job.traffic;
    let size = row_bytes(&job.case, operation) as f64;
    let most = (0..tokens.len()).map(|r| {
        // Received rows and own rows sent: as many as the rank's tokens have destinations.
        let sent = sent_remote[r] + rows[r] - remote_rows[r];
        match operation {
            Operation::Dispatch => (tokens[r] + rows[r]).max(sent + expert_rows[r]),
            _ => (expert_rows[r] + sent).max(rows[r] + tokens[r]),
        }
    });
    let sm_time = most.max().unwrap_or(0) as f64 * size / (f64::from(sms) * 50e3);
    (wire_bytes(job, operation) as f64 / rate).max(sm_time)
}

/// The row of a measured operation.
pub fn row(
    job: &Job,
    (operation, times): (Operation, Vec<f64>),
    sms: u32,
    call: Call,
    limits: &Limits,
) -> Row {
    let case = &job.case;
    let zero = Summary { p50_us: 0.0, p90_us: 0.0, min_us: 0.0, runs: 0 };
    let time = Summary::of(&times).unwrap_or(zero);
    let (wire, size) = (wire_bytes(job, operation), row_bytes(case, operation));
    let logical = job.traffic.rows.iter().max().copied().unwrap_or(0) as u64 * size;
    let limit = limits.copy_rate().map(|rate| wire as f64 / rate);
    let mut metrics = BTreeMap::<String, Value>::from([
        ("runs".into(), json!(time.runs)),
        ("gpus".into(), json!(job.devices.len())),
        ("capacity".into(), json!(call.capacity)),
        ("graph".into(), json!(call.graph)),
        ("chain".into(), json!(call.chain)),
        ("reduced".into(), json!(job.reduced)),
        ("wire_bytes".into(), json!(wire)),
        ("seed".into(), json!(case.seed)),
        ("routing".into(), json!(case.routing.to_string())),
    ]);
    if let (Some((copy, streams)), Some(rate)) = (limits.copy, limits.copy_rate()) {
        metrics.insert("copy_engine_gbps".into(), json!(rate / 1e3));
        metrics.insert("copy_engine_us".into(), json!(copy.p50_us));
        metrics.insert("copy_engine_streams".into(), json!(streams));
    }
    if let Some((nccl, version)) = limits.nccl.filter(|_| limits.bytes == wire) {
        metrics.insert("nccl_us".into(), json!(nccl.p50_us));
        metrics.insert("nccl_version".into(), json!(version));
        metrics.insert("nccl_ratio".into(), json!(time.p50_us / nccl.p50_us));
    }
    if let Some(nodes) = job.way.nodes() {
        metrics.insert("nodes".into(), json!(nodes.last().map(|last| last + 1)));
    }
    if let Way::Nccl { ctas, .. } = &job.way {
        metrics.insert("nccl_ctas".into(), json!(ctas));
        if let Some(nccl) = limits.nccl_within.filter(|_| limits.bytes == wire) {
            metrics.insert("nccl_within_us".into(), json!(nccl.p50_us));
            metrics.insert("nccl_within_ratio".into(), json!(time.p50_us / nccl.p50_us));
        }
    }
    for note in &limits.notes {
        metrics.insert("note".into(), json!(note));
    }
    Row {
        bench: operation.name().into(),
        transport: job.way.name().into(),
        workload: case.workload.clone(),
        dtype: match operation {
            // Rows come back in a type that can be summed.
            Operation::Combine => case.dtype.back().name().into(),
            _ => case.dtype.name().into(),
        },
        layout: case.layout.name().into(),
        ranks: case.shape.ranks,
        tokens: case.shape.tokens,
        hidden: case.shape.hidden,
        topk: case.shape.topk,
        experts: case.shape.experts,
        sms,
        launch: "plain".into(),
        cached: !call.uncached,
        // Differences end the program before there is a row.
        verified: true,
        p50_us: time.p50_us,
        p90_us: time.p90_us,
        min_us: time.min_us,
        wire_gbps: wire as f64 / time.p50_us / 1e3,
        logical_gbps: logical as f64 / time.p50_us / 1e3,
        limit_us: limit,
        limit_kind: limit.map(|_| "copy engine".into()),
        wire_share: limit.map(|us| us / time.p50_us),
        metrics,
    }
}

/// Judges a transport by NCCL against NCCL's own all-to-all of as many bytes in the same run, where
/// that is asked: training's bf16 dispatch.
pub fn judge_nccl(row: &mut Row) {
    const MUST: f64 = 1.35;
    const GOAL: f64 = 1.15;
    let asked = row.transport == "nccl"
        && (row.bench.as_str(), row.dtype.as_str()) == ("dispatch", "bf16")
        && (row.workload.as_str(), row.layout.as_str()) == ("train", "rank-major");
    let nccl = row.metrics.get("nccl_us").and_then(Value::as_f64);
    let Some(nccl) = nccl.filter(|_| asked) else { return };
    let (must, goal) = (MUST * nccl, GOAL * nccl);
    row.metrics.insert("must_us".into(), json!(must));
    row.metrics.insert("goal_us".into(), json!(goal));
    row.metrics.insert("verdict".into(), json!(verdict(row.p50_us, must, goal)));
}

/// Says in a row by which plan its kernel was launched, and where that came from.
pub fn note_plan(row: &mut Row, plans: &[PlanInForce]) {
    let Some(in_force) = plans.iter().find(|plan| plan.kernel == row.bench) else { return };
    let origin = match in_force.origin {
        PlanOrigin::Given => "given",
        PlanOrigin::Searched => "searched",
        PlanOrigin::Cached => "cached",
        PlanOrigin::Shipped => "shipped",
        _ => "unknown",
    };
    row.metrics.insert("plan".into(), json!(plan_text(&in_force.plan)));
    row.metrics.insert("plan_origin".into(), json!(origin));
}

/// The results as a table of at most 80 columns.
pub fn table(report: &Report) -> String {
    let mut out = format!(
        "{:<10} {:<5} {:<22} {:>3} {:>8} {:>8} {:>6} {:>5} {:>5}\n",
        "bench", "dtype", "how", "SMs", "p50 µs", "p90 µs", "GB/s", "link", "NCCL"
    );
    for row in &report.results {
        let flag = |name: &str| row.metrics.get(name).and_then(Value::as_bool) == Some(true);
        let text = |name: &str| row.metrics.get(name).and_then(Value::as_str);
        // Points that are not the best, and what has a table of its own.
        if row.metrics.get("best") == Some(&json!(false)) || row.metrics.contains_key("table") {
            continue;
        }
        let mut how = text("how").map_or_else(Vec::new, |how| vec![how]);
        if how.is_empty() {
            how.push(if row.layout == "expert-major" { "expert" } else { "rank" });
            let marks = [
                (!row.cached, "uncached"),
                (flag("reduced"), "reduced"),
                (flag("graph"), "graph"),
                (flag("chain"), "of 8"),
                (matches!(text("plan_origin"), Some("searched" | "cached")), "tuned"),
            ];
            how.extend(marks.into_iter().filter(|(on, _)| *on).map(|(_, name)| name));
        }
        let percent =
            |share: Option<f64>| share.map_or("-".into(), |s| format!("{:.0}%", 100.0 * s));
        let ratio = row.metrics.get("nccl_ratio").and_then(Value::as_f64);
        let _ = write!(
            out,
            "{:<10} {:<5} {:<22} {:>3} {:>8.1} {:>8.1} {:>6.1} {:>5} {:>5}",
            row.bench,
            row.dtype,
            how.join(" "),
            row.sms,
            row.p50_us,
            row.p90_us,
            row.wire_gbps,
            percent(row.wire_share),
            ratio.map_or("-".into(), |r| format!("{r:.2}")),
        );
        if let (Some(must), Some(verdict)) =
            (row.metrics.get("must_us").and_then(Value::as_f64), text("verdict"))
        {
            let goal = row.metrics.get("goal_us").and_then(Value::as_f64).unwrap_or(0.0);
            let _ = write!(out, "\n{:>40} must {must:.0}, goal {goal:.0}: {verdict}", "");
        }
        out.push('\n');
    }
    out
}
