//! The pipeline helper: dispatch, GEMM and combine of micro-batches that overlap, against what no
//! schedule of its stages is shorter than ([`lower_bound`]).

use ep_kernels::cuda::{DeviceMemory, Stream};
use ep_runtime::{MicroBatch, Pipeline, Queue, Route, Timeline, Tuning};

use super::bound::{Stages, line, lower_bound};
use super::judge::median;
use super::load::Load;
use super::multiply::{Matrices, Products};
use super::points::{Beside, Policy, Scope};
use super::seat::{Seat, Where};
use super::stages::{self, Runs, gated, handle, record};
use crate::case::Operation;
use crate::nvlink::Job;
use crate::nvlink::rank::{Call, Rank, Setup, on_ranks_with};
use crate::nvlink::raw::{LIMIT, failed};
use crate::nvlink::reference::failed as refused;
use crate::{BenchError, Result};

/// Micro-batches of a run.
pub const BATCHES: usize = 8;
/// SMs of communication's partition.
pub const SMS: u32 = 16;
/// The name for `--only`.
pub const NAME: &str = "pipeline partition 16 gemm";
/// Runs before those that count.
const WARM_UPS: usize = 2;
/// Experts take at least so many times what communication takes: where they take less, nothing hides it.
const EXPERTS: f64 = 1.2;

/// Rows, columns and depth of the experts' GEMM: as many rows as tokens, hidden 7168 to 2048, as
/// DeepSeek-V3's experts have it.
const SIZES: (u32, u32, u32) = (8192, 2048, 7168);

/// What one rank saw.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Launches of the GEMM per micro-batch.
    pub launches: usize,
    /// Stages while no other runs.
    pub alone: Runs,
    /// Stages while both others are kept busy.
    pub busy: Runs,
    /// Whole runs of the pipeline.
    pub pipeline: Vec<f64>,
    /// Whole runs, one micro-batch after the other.
    pub serial: Vec<f64>,
    /// One run as a Chrome trace.
    pub trace: String,
}

/// Measures it. Gives back what each rank saw.
///
/// # Errors
/// A difference between the pipeline's sums and those of one micro-batch alone; as the measurements.
pub fn run(job: &Job, matrices: &[Matrices], scope: &Scope) -> Result<Vec<Sample>> {
    let setup = Setup {
        policy: Policy::Partition.of(SMS),
        slots: 3,
        lanes: 2,
        ..Setup::new(SMS, Tuning::default())
    };
    on_ranks_with(job, &setup, &|rank| {
        rank.verify(Call::default())?;
        let products = Products::load(&rank.device, &matrices[rank.rank])?.sized(SIZES);
        let mut seat = Seat::new(rank)?;
        seat.add(Beside::Gemm, &products)?;
        measure(&mut seat, scope)
    })
}

fn measure(seat: &mut Seat<'_, '_, '_>, scope: &Scope) -> Result<Sample> {
    let mut sample = Sample::default();
    let moved = seat.expected(Operation::Dispatch)? + seat.expected(Operation::Combine)?;
    let launch_us = seat.pair(Beside::Gemm)?.launch_us;
    sample.launches = (EXPERTS * moved / launch_us.max(1.0)).ceil().max(1.0) as usize;
    let side = seat.rank.device.stream(0).map_err(failed)?;
    sample.alone = stages::alone(seat, (&side, sample.launches), scope)?;
    sample.busy = stages::busy(seat, (&side, sample.launches), scope)?;
    let device = seat.rank.device.clone();
    let bytes = seat.rank.out_bytes();
    let sums = DeviceMemory::zeroed(&side, BATCHES * bytes, LIMIT).map_err(failed)?;
    let want = one_alone(seat.rank)?;
    let runs = WARM_UPS + scope.runs();
    for run in 0..runs {
        let (last, trace) = (run + 1 == runs, (run == 0).then(Timeline::new));
        if last {
            // SAFETY: this rank's memory, which nothing uses now; the stream is live.
            unsafe { device.fill(side.raw(), sums.address(), 0xff, BATCHES * bytes) }
                .map_err(failed)?;
            side.wait("poisoning sums", LIMIT).map_err(failed)?;
        }
        let us = one_run(seat, sample.launches, &sums, trace.as_ref())?;
        if let Some(trace) = trace {
            sample.trace = trace.chrome_trace();
        }
        let serial = serial_run(seat, sample.launches)?;
        if run >= WARM_UPS {
            sample.pipeline.push(us);
            sample.serial.push(serial);
        }
    }
    compare(seat.rank, &side, &sums, &want)?;
    Ok(sample)
}

/// The sums of a micro-batch whose rows come back as they were received.
fn one_alone(rank: &mut Rank<'_>) -> Result<Vec<u8>> {
    let held = rank.dispatch(Call::default())?;
    rank.combine(held)?;
    rank.drain()?;
    rank.sums()
}

fn compare(rank: &Rank<'_>, side: &Stream, sums: &DeviceMemory, want: &[u8]) -> Result<()> {
    let mut got = vec![0u8; want.len()];
    for batch in 0..BATCHES {
        sums.download(side, batch * want.len(), &mut got, LIMIT).map_err(failed)?;
        let same = match got == want {
            true => Ok(()),
            false => Err(format!("sums of micro-batch {batch} differ from those of one alone")),
        };
        rank.verdict("pipeline", same)?;
    }
    Ok(())
}

/// One run of the pipeline, from a start that all ranks have together to the last sum: microseconds.
fn one_run(
    seat: &mut Seat<'_, '_, '_>,
    launches: usize,
    sums: &DeviceMemory,
    trace: Option<&Timeline>,
) -> Result<f64> {
    let mut pipeline = Pipeline::new(&seat.rank.ep).map_err(refused(seat.rank.rank, "pipeline"))?;
    if let Some(trace) = trace {
        pipeline = pipeline.timeline(trace);
    }
    let mut finished = None;
    let us = on_compute(seat, "a pipeline", |rank, queue, load| {
        let batches = micro_batches(rank, sums)?;
        let run = pipeline.run(queue, batches, |_, _| load.launch(launches));
        let failed = |e| BenchError::Tool { op: "pipeline", detail: format!("{e}") };
        finished = Some(run.map_err(failed)?);
        Ok(())
    })?;
    if let Some(finished) = finished {
        finished.wait(LIMIT).map_err(refused(seat.rank.rank, "pipeline"))?;
    }
    Ok(us)
}

/// The same work one after the other, on the same SMs.
fn serial_run(seat: &mut Seat<'_, '_, '_>, launches: usize) -> Result<f64> {
    on_compute(seat, "micro-batches one by one", |rank, queue, load| {
        for _ in 0..BATCHES {
            let held = rank.dispatch_on(queue, Call::default())?;
            load.launch(launches)?;
            rank.combine_on(queue, held, None)?;
        }
        Ok(())
    })
}

/// Times what `submit` submits in the order of compute's stream, from a start that all ranks have
/// together: microseconds.
fn on_compute<'a, 'm>(
    seat: &mut Seat<'_, 'a, 'm>,
    what: &'static str,
    submit: impl FnOnce(&mut Rank<'a>, &Queue, &mut Load<'m>) -> Result<()>,
) -> Result<f64> {
    let compute = seat.own_stream().raw();
    // SAFETY: the stream lives as long as the seat; what is submitted is waited for below.
    let queue = unsafe { seat.own_stream().queue() };
    let mut load = seat.load(Beside::Gemm, Where::Own)?;
    let [us] = gated(seat.rank, ([compute], &|| Ok(())), what, |rank| {
        submit(rank, &queue, &mut load)?;
        Ok([record(rank, compute)?])
    })?;
    Ok(us)
}

fn micro_batches<'r>(rank: &'r Rank<'_>, sums: &DeviceMemory) -> Result<Vec<MicroBatch<'r>>> {
    let handle = handle(rank)?;
    let batch = |i: usize| {
        let at = sums.address() + (i * rank.out_bytes()) as u64;
        // SAFETY: a part of `sums` for each micro-batch, used by nothing else.
        let out = unsafe { rank.sums_at(at) };
        Ok(MicroBatch::new(rank.payload()?, Route::Cached(handle), out))
    };
    (0..BATCHES).map(batch).collect()
}

/// What all ranks' samples come to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Every run, the slowest rank's time.
    pub runs: Vec<f64>,
    /// Medians of stages alone, of the slowest rank.
    pub alone: Stages,
    /// Medians of stages while the others are kept busy, of the slowest rank.
    pub busy: Stages,
    /// What no schedule is shorter than, by each rank's least times of stages alone: the largest of the
    /// ranks'.
    pub ideal_us: f64,
    /// Median run over that.
    pub ratio: Option<f64>,
    /// The line of stages that are kept busy: what a run would take if they always were.
    pub busy_us: f64,
    /// Median run one after the other.
    pub serial_us: Option<f64>,
}

/// Makes one result of what all ranks saw. `None` where a stage was never measured.
pub fn merge(samples: &[Sample]) -> Option<Outcome> {
    let worst = |of: fn(&Sample) -> Option<Stages>| {
        samples.iter().map(of).reduce(|a, b| Some(a?.each_larger(&b?))).flatten()
    };
    let alone = worst(|sample| sample.alone.medians())?;
    let busy = worst(|sample| sample.busy.medians())?;
    let bound = |sample: &Sample| Some(lower_bound(BATCHES, &sample.alone.least()?));
    let ideal_us = samples.iter().filter_map(bound).fold(0.0, f64::max);
    let busy_us = line(BATCHES, (busy.dispatch, busy.experts, busy.combine));
    let all = |of: fn(&Sample) -> &Vec<f64>| {
        crate::nvlink::slowest(&samples.iter().map(|s| of(s).clone()).collect::<Vec<_>>())
    };
    let runs = all(|s| &s.pipeline);
    let ratio = median(&runs).map(|us| us / ideal_us);
    let serial_us = median(&all(|s| &s.serial));
    Some(Outcome { runs, alone, busy, ideal_us, ratio, busy_us, serial_us })
}
