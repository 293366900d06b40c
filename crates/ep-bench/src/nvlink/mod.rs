//! `--transport nvlink`, `copy` and `nccl`: ranks on GPUs.
//!
//! Ranks are threads, rank `r` on GPU `r % gpus`. Everything is compared with the host backend on
//! the same job before it is timed, and the last timed run again. Times are between events on each
//! rank's own stream, from a start that all ranks have together; the slowest rank counts.

mod budget;
mod choice;
mod known;
mod launch;
mod overlap;
mod peers;
mod rank;
mod raw;
mod reference;
mod rows;
mod suite;
mod timing;
mod tune;
mod unroll;
mod way;

pub use rank::{Call, Job};
pub use suite::{ITEMS, Item};

use ep_kernels::cuda::{Device, Driver};
use ep_runtime::sched::tune::TUNE_VARIABLE;
use ep_runtime::{Tune, Tuning};

use crate::case::{Case, Operation, Shape};
use crate::cli::{Args, Bench};
use crate::html::page;
use crate::machine::{Machine, commit};
use crate::plan::Traffic;
use crate::report::{Report, write};
use crate::routing::Routing;
use crate::stats::{RUNS, WARM_UPS};
use crate::workload::Workload;
use crate::{BenchError, Result};
use way::Way;

/// Runs what `args` ask for on GPUs. Gives back the report.
///
/// # Errors
/// No GPUs, options that do not fit, a difference from the host backend, files that cannot be
/// written; a table whose musts were missed is not an error.
pub fn run(args: &Args) -> Result<Report> {
    args.check_transport()?;
    let cases = match args.bench {
        Some(Bench::Suite) => Vec::new(),
        _ => cases(args)?,
    };
    let devices = devices(args.gpu.gpus, args.transport.name())?;
    let mut report = Report::new(commit(args.commit.as_deref()), Machine::here());
    report.machine.gpus = devices.iter().map(|d| d.properties().name.clone()).collect();
    let mut outcome = Ok(());
    match args.bench {
        Some(Bench::Suite) => suite::run(args, &devices, &mut report)?,
        Some(Bench::Overlap) => outcome = overlap::run(args, &cases[0], &devices, &mut report),
        Some(Bench::Unroll) => outcome = unroll::run(args, &cases[0], &devices, &mut report),
        Some(Bench::Copy) => report.results = tune::run(args, &cases[0], &devices)?,
        Some(Bench::Launch) => report.results = launch::run(args, &cases[0], &devices)?,
        _ => {
            for case in cases {
                measure(args, case, &devices, &mut report)?;
            }
        }
    }
    let table = match args.bench {
        Some(Bench::Overlap | Bench::Unroll) => overlap::table(&report),
        _ => rows::table(&report),
    };
    print!("{table}{}", choice::table(&report.results));
    for (path, text) in [(&args.json, Report::json as fn(&Report) -> String), (&args.html, page)] {
        if let Some(path) = path {
            write(path, &text(&report))?;
            println!("wrote {}", path.display());
        }
    }
    outcome.map(|()| report)
}

fn measure(args: &Args, case: Case, devices: &[Device], report: &mut Report) -> Result<()> {
    let gpu = &args.gpu;
    let call = Call {
        uncached: gpu.uncached || gpu.capacity,
        capacity: gpu.capacity,
        graph: gpu.graph,
        chain: false,
    };
    let way = Way::of(args, case.shape.ranks, devices.len())?;
    let mut job = job(case, gpu.reduced, devices)?;
    (job.tune, job.way) = (tuning_mode(args), way);
    let limits = rows::Limits::measure(&job)?;
    for note in &limits.notes {
        println!("{note}");
    }
    for timed in time(&job, gpu.sms(), call)? {
        let mut row = rows::row(&job, timed, gpu.sms(), call, &limits);
        rows::note_plan(&mut row, &job.plans());
        rows::judge_nccl(&mut row);
        report.results.push(row);
    }
    Ok(())
}

/// Verifies, then times the case's operation, or both of a graph; the slowest rank counts.
pub(crate) fn time(job: &Job, sms: u32, call: Call) -> Result<Vec<(Operation, Vec<f64>)>> {
    let operation = job.case.operation;
    if call.graph {
        let all = rank::on_ranks(job, (sms, Tuning::default()), true, &|rank| {
            rank.verify(call)?;
            rank.measure_graphs(call)
        })?;
        let (dispatch, combine): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let both =
            [(Operation::Dispatch, slowest(&dispatch)), (Operation::Combine, slowest(&combine))];
        let wanted = |op| operation == Operation::Roundtrip || operation == op;
        return Ok(both.into_iter().filter(|(op, _)| wanted(*op)).collect());
    }
    let all = rank::on_ranks(job, (sms, Tuning::default()), false, &|rank| {
        rank.verify(call)?;
        rank.measure(operation, call, (WARM_UPS, RUNS), true)
    })?;
    Ok(vec![(operation, slowest(&all))])
}

/// Whether launch plans are searched for before anything is measured.
pub(crate) fn tuning_mode(args: &Args) -> Tune {
    args.gpu.search().map_or(Tune::Off, |limit| Tune::Search { limit })
}

/// For every run, the time of the slowest rank.
pub(crate) fn slowest(ranks: &[Vec<f64>]) -> Vec<f64> {
    let runs = ranks.iter().map(Vec::len).min().unwrap_or(0);
    (0..runs).map(|run| ranks.iter().map(|r| r[run]).fold(0.0, f64::max)).collect()
}

/// The job of a case, with its answers.
pub(crate) fn job(case: Case, reduced: bool, devices: &[Device]) -> Result<Job> {
    let traffic = Traffic::of(&case)?;
    let references = reference::references(&case, &traffic, reduced)?;
    Ok(Job::new(case, traffic, reduced, references, devices))
}

/// The first `count` GPUs, or all up to two.
fn devices(count: Option<usize>, transport: &'static str) -> Result<Vec<Device>> {
    // Ranks that share a GPU wait for each other on it: their streams need queues of their own.
    if std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
        // SAFETY: no other thread of this program has been started yet.
        unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
    }
    // Multicast is not what is compared, and can harm others' work.
    // SAFETY: no other thread of this program has been started yet.
    unsafe { std::env::set_var("NCCL_NVLS_ENABLE", "0") };
    // What is tuned is what the options say.
    // SAFETY: no other thread of this program has been started yet.
    unsafe { std::env::remove_var(TUNE_VARIABLE) };
    let there = Driver::get()
        .and_then(|driver| driver.device_count())
        .map_err(|e| BenchError::Tool { op: transport, detail: e.to_string() })?;
    let count = count.unwrap_or(there.clamp(1, 2));
    if count > there {
        return Err(BenchError::Usage(format!("--gpus {count}: this process sees {there} GPUs")));
    }
    (0..count).map(|ordinal| Device::open(ordinal).map_err(raw::failed)).collect()
}

/// What `args` ask for: one case, or dispatch and combine.
fn cases(args: &Args) -> Result<Vec<Case>> {
    let operations: &[Operation] = match args.bench {
        Some(Bench::Dispatch | Bench::Copy | Bench::Launch | Bench::Overlap | Bench::Unroll) => {
            &[Operation::Dispatch]
        }
        Some(Bench::Combine) => &[Operation::Combine],
        Some(Bench::Roundtrip) => &[Operation::Roundtrip],
        _ => &[Operation::Dispatch, Operation::Combine],
    };
    let workload = args.workload.unwrap_or(Workload::Train);
    let base = workload.shape(args.ranks.or(args.gpu.gpus).unwrap_or(2));
    let shape = Shape {
        ranks: base.ranks,
        tokens: args.tokens.unwrap_or(base.tokens),
        hidden: args.hidden.unwrap_or(base.hidden),
        topk: args.topk.unwrap_or(base.topk),
        experts: args.experts.unwrap_or(base.experts.next_multiple_of(base.ranks)),
    };
    let dtype = args.dtype.unwrap_or(crate::case::Dtype::Bf16);
    let case = |&operation: &Operation| {
        let row = dtype.payload_bytes(shape.hidden);
        if !row.is_multiple_of(16) {
            return Err(BenchError::Usage(format!(
                "rows of {row} bytes; a multiple of 16 is needed"
            )));
        }
        Ok(Case {
            operation,
            workload: if shape == base { workload.name() } else { "custom" }.into(),
            shape,
            dtype,
            layout: args.layout,
            alignment: args.alignment,
            routing: args.routing.clone(),
            seed: args.seed,
            cached: !args.gpu.uncached && !args.gpu.capacity,
            unequal: args.unequal,
        })
    };
    operations.iter().map(case).collect()
}

/// A standard case: uniform routing, seed 1.
pub(crate) fn standard(
    operation: Operation,
    workload: Workload,
    ranks: usize,
    dtype: crate::case::Dtype,
    layout: crate::case::Layout,
) -> Case {
    Case {
        operation,
        workload: workload.name().into(),
        shape: workload.shape(ranks),
        dtype,
        layout,
        alignment: 1,
        routing: Routing::Uniform,
        seed: 1,
        cached: true,
        unequal: false,
    }
}

#[cfg(test)]
mod tests;
