//! `suite`: the table of what this transport must show, in one call.

use std::path::Path;

use ep_kernels::cuda::Device;
use serde_json::json;

use super::rank::{Call, Job};
use super::rows::{Limits, expert_major_floor, note_plan, row, table};
use super::{job, standard, time, tuning_mode};
use crate::case::{Dtype, Layout, Operation};
use crate::cli::Args;
use crate::report::{Report, Row, write};
use crate::workload::Workload;
use crate::{BenchError, Result};

/// What a row is measured against.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// Microseconds.
    Micros {
        /// At most.
        must: f64,
        /// Wanted.
        goal: f64,
    },
    /// Microseconds above the cached dispatch on as many SMs.
    AboveCached {
        /// At most.
        must: f64,
        /// Wanted.
        goal: f64,
    },
    /// Multiples of the time that wire and SMs need at the least.
    Floor {
        /// At most.
        must: f64,
        /// Wanted.
        goal: f64,
    },
}

/// A line of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Item {
    /// The workload.
    pub workload: Workload,
    /// What is timed.
    pub operation: Operation,
    /// The dispatched rows.
    pub dtype: Dtype,
    /// Their arrangement.
    pub layout: Layout,
    /// SMs.
    pub sms: u32,
    /// How it is called.
    pub call: Call,
    /// What it is measured against, where the table says.
    pub target: Option<Target>,
}

const CACHED: Call = Call { uncached: false, capacity: false, graph: false, chain: false };
const CAPACITY: Call = Call { uncached: true, capacity: true, graph: false, chain: false };
const GRAPH: Call = Call { graph: true, ..CACHED };
const UNCACHED_GRAPH: Call = Call { graph: true, ..CAPACITY };
const CHAIN: Call = Call { chain: true, ..GRAPH };
const UNCACHED_CHAIN: Call = Call { chain: true, ..UNCACHED_GRAPH };

const fn train(operation: Operation, dtype: Dtype, sms: u32, must: f64, goal: f64) -> Item {
    Item {
        workload: Workload::Train,
        operation,
        dtype,
        layout: Layout::RankMajor,
        sms,
        call: CACHED,
        target: Some(Target::Micros { must, goal }),
    }
}

const EXPERTS: Item = Item {
    workload: Workload::Train,
    operation: Operation::Dispatch,
    dtype: Dtype::Bf16,
    layout: Layout::ExpertMajor,
    sms: 16,
    call: CACHED,
    target: Some(Target::Floor { must: 1.35, goal: 1.15 }),
};

const DECODE: Item = Item {
    workload: Workload::Decode,
    operation: Operation::Roundtrip,
    dtype: Dtype::Bf16,
    layout: Layout::RankMajor,
    sms: 16,
    call: GRAPH,
    target: None,
};

/// The table. A round trip by graph gives two rows.
pub const ITEMS: [Item; 12] = [
    train(Operation::Dispatch, Dtype::Bf16, 16, 415.0, 360.0),
    train(Operation::Dispatch, Dtype::Bf16, 8, 640.0, 600.0),
    Item {
        call: CAPACITY,
        target: Some(Target::AboveCached { must: 60.0, goal: 35.0 }),
        ..train(Operation::Dispatch, Dtype::Bf16, 16, 0.0, 0.0)
    },
    train(Operation::Combine, Dtype::Bf16, 16, 395.0, 365.0),
    train(Operation::Combine, Dtype::Bf16, 8, 530.0, 490.0),
    train(Operation::Dispatch, Dtype::Fp8, 16, 240.0, 195.0),
    EXPERTS,
    Item { operation: Operation::Combine, ..EXPERTS },
    DECODE,
    Item { call: UNCACHED_GRAPH, ..DECODE },
    Item { call: CHAIN, ..DECODE },
    Item { call: UNCACHED_CHAIN, ..DECODE },
];

/// Runs the table and writes `train.json` and `decode.json` if a folder is given.
///
/// # Errors
/// As the measurements.
pub fn run(args: &Args, devices: &[Device], report: &mut Report) -> Result<()> {
    let ranks = devices.len();
    if ranks < 2 {
        return Err(BenchError::Usage("suite needs two GPUs or more".into()));
    }
    let mut made: Option<(Job, Limits)> = None;
    for item in ITEMS {
        let case = standard(item.operation, item.workload, ranks, item.dtype, item.layout);
        let reduced = item.layout == Layout::ExpertMajor;
        // The next line may be the same job by other means.
        let reusable = made.take().filter(|(job, _)| {
            let mut same = job.case.clone();
            same.operation = case.operation;
            same == case
        });
        let (mut job, limits) = match reusable {
            Some(made) => made,
            None => {
                let mut job = job(case.clone(), reduced, devices)?;
                job.tune = tuning_mode(args);
                let limits = Limits::measure(&job)?;
                (job, limits)
            }
        };
        job.case = case;
        for timed in time(&job, item.sms, item.call)? {
            let mut row = row(&job, timed, item.sms, item.call, &limits);
            note_plan(&mut row, &job.plans());
            judge(&mut row, &item, &job, &limits, report);
            eprintln!(
                "{:<10} {:<4} {:>3} SMs {:>8.1} µs",
                row.bench, row.dtype, row.sms, row.p50_us
            );
            report.results.push(row);
        }
        made = Some((job, limits));
    }
    if let Some(folder) = &args.gpu.out {
        save(folder, report)?;
    }
    let missed =
        report.results.iter().filter(|r| r.metrics.get("verdict") == Some(&json!("missed")));
    println!("musts missed: {}", missed.count());
    Ok(())
}

/// Says what a row had to reach, and whether it did.
fn judge(row: &mut Row, item: &Item, job: &Job, limits: &Limits, report: &Report) {
    let operation = if row.bench == "combine" { Operation::Combine } else { Operation::Dispatch };
    // Graphs are asked for with a routing of an earlier call.
    let target = match (item.target, item.call.graph && !item.call.uncached, operation) {
        (Some(target), ..) => Some(target),
        (None, true, Operation::Combine) => Some(Target::Micros { must: 40.0, goal: 20.0 }),
        (None, true, _) => Some(Target::Micros { must: 45.0, goal: 28.0 }),
        _ => None,
    };
    let cached = report.results.iter().find(|other| {
        other.bench == row.bench && other.dtype == row.dtype && other.sms == row.sms && other.cached
    });
    let bounds = match target {
        Some(Target::Micros { must, goal }) => Some((must, goal)),
        Some(Target::AboveCached { must, goal }) => {
            cached.map(|cached| (cached.p50_us + must, cached.p50_us + goal))
        }
        Some(Target::Floor { must, goal }) => limits.copy_rate().map(|rate| {
            let floor = expert_major_floor(job, operation, item.sms, rate);
            row.metrics.insert("floor_us".into(), json!(floor));
            (must * floor, goal * floor)
        }),
        None => None,
    };
    if let Some((must, goal)) = bounds {
        row.metrics.insert("must_us".into(), json!(must));
        row.metrics.insert("goal_us".into(), json!(goal));
        row.metrics.insert("verdict".into(), json!(verdict(row.p50_us, must, goal)));
    }
}

/// In words.
pub(crate) fn verdict(us: f64, must: f64, goal: f64) -> &'static str {
    match us {
        us if us <= goal => "goal",
        us if us <= must => "must",
        _ => "missed",
    }
}

fn save(folder: &Path, report: &Report) -> Result<()> {
    for workload in [Workload::Train, Workload::Decode] {
        let mut part = report.clone();
        part.results.retain(|row| row.workload == workload.name());
        write(&folder.join(format!("{}.json", workload.name())), &part.json())?;
    }
    write(&folder.join("suite.txt"), &table(report))
}
