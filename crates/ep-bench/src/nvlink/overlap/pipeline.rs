//! The pipeline helper: dispatch, GEMM and combine of micro-batches that overlap, against the ideal
//! schedule of its stages.

use ep_kernels::cuda::{DeviceMemory, Event, Stream};
use ep_runtime::{Dispatched, Handle, MicroBatch, Pipeline, Queue, Route, Timeline, Tuning};

use super::judge::{ideal_schedule, median};
use super::load::Load;
use super::multiply::{Matrices, Products};
use super::points::{Beside, Policy, Scope};
use super::seat::{Seat, WARM_LAUNCHES, Where};
use crate::case::Operation;
use crate::nvlink::Job;
use crate::nvlink::rank::{Call, Rank, Setup, on_ranks_with};
use crate::nvlink::raw::{LIMIT, await_event, failed};
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
    /// Dispatches beside a combine and the GEMM, microseconds.
    pub dispatch: Vec<f64>,
    /// Combines beside a dispatch and the GEMM.
    pub combine: Vec<f64>,
    /// A micro-batch's GEMMs beside both.
    pub experts: Vec<f64>,
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
    stages(seat, &side, scope, &mut sample)?;
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
    let us = gated_run(seat, launches, sums, trace);
    seat.rank.gate_opened(us)
}

fn gated_run(
    seat: &mut Seat<'_, '_, '_>,
    launches: usize,
    sums: &DeviceMemory,
    trace: Option<&Timeline>,
) -> Result<f64> {
    let mut pipeline = Pipeline::new(&seat.rank.ep).map_err(refused(seat.rank.rank, "pipeline"))?;
    if let Some(trace) = trace {
        pipeline = pipeline.timeline(trace);
    }
    let compute = seat.own_stream().raw();
    // SAFETY: the stream lives as long as the seat; the run is waited for below.
    let queue = unsafe { seat.own_stream().queue() };
    let mut load = seat.load(Beside::Gemm, Where::Own)?;
    let rank = &mut *seat.rank;
    rank.round += 1;
    rank.barrier()?;
    // SAFETY: compute's live stream, whose work ends before this function does.
    unsafe { rank.gate.hold(&rank.device, compute, rank.round)? };
    let start = record(rank, compute)?;
    let batches = micro_batches(rank, sums)?;
    let finished = pipeline
        .run(&queue, batches, |_, _| load.launch(launches))
        .map_err(|e| BenchError::Tool { op: "pipeline", detail: e.to_string() })?;
    let end = record(rank, compute)?;
    open(rank)?;
    await_event(&end, "a pipeline")?;
    finished.wait(LIMIT).map_err(refused(rank.rank, "pipeline"))?;
    end.micros_since(&start).map_err(failed)
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

/// The same work one after the other, on the same SMs.
fn serial_run(seat: &mut Seat<'_, '_, '_>, launches: usize) -> Result<f64> {
    let us = gated_serial_run(seat, launches);
    seat.rank.gate_opened(us)
}

fn gated_serial_run(seat: &mut Seat<'_, '_, '_>, launches: usize) -> Result<f64> {
    let compute = seat.own_stream().raw();
    // SAFETY: the stream lives as long as the seat; the run is waited for below.
    let queue = unsafe { seat.own_stream().queue() };
    let mut load = seat.load(Beside::Gemm, Where::Own)?;
    let rank = &mut *seat.rank;
    rank.round += 1;
    rank.barrier()?;
    // SAFETY: compute's live stream, whose work ends before this function does.
    unsafe { rank.gate.hold(&rank.device, compute, rank.round)? };
    let start = record(rank, compute)?;
    for _ in 0..BATCHES {
        let held = rank.dispatch_on(&queue, Call::default())?;
        load.launch(launches)?;
        rank.combine_on(&queue, held, None)?;
    }
    let end = record(rank, compute)?;
    open(rank)?;
    await_event(&end, "micro-batches one by one")?;
    end.micros_since(&start).map_err(failed)
}

/// The time of each stage while both others run.
fn stages(
    seat: &mut Seat<'_, '_, '_>,
    side: &Stream,
    scope: &Scope,
    sample: &mut Sample,
) -> Result<()> {
    let ordinal = seat.rank.device.properties().ordinal;
    // SAFETY: the stream outlives all work on it, which is waited for below.
    let other = unsafe { Queue::from_raw(side.raw().cast(), ordinal) };
    let expected = seat.expected(Operation::Dispatch)? + seat.expected(Operation::Combine)?;
    let ahead = seat.ahead(Beside::Gemm, expected)?;
    let mut load = seat.load(Beside::Gemm, Where::Own)?;
    load.keep(ahead + WARM_LAUNCHES)?;
    load.await_launch(WARM_LAUNCHES - 1)?;
    for _ in 0..WARM_UPS + scope.runs() {
        load.keep(ahead)?;
        let (dispatch, combine) = both(seat.rank, side, &other)?;
        if load.is_busy()? {
            sample.dispatch.push(dispatch);
            sample.combine.push(combine);
        }
    }
    sample.dispatch.drain(..WARM_UPS.min(sample.dispatch.len()));
    sample.combine.drain(..WARM_UPS.min(sample.combine.len()));
    load.finish()?;
    experts(seat, (side, &other), (ahead, expected), sample)
}

/// A micro-batch's GEMMs while dispatches and combines run back to back.
fn experts(
    seat: &mut Seat<'_, '_, '_>,
    (side, other): (&Stream, &Queue),
    (ahead, expected): (usize, f64),
    sample: &mut Sample,
) -> Result<()> {
    let launch_us = seat.pair(Beside::Gemm)?.launch_us;
    let count = 4 + (16.0 * launch_us / expected.max(1.0)).ceil() as usize;
    let mut load: Load<'_> = seat.load(Beside::Gemm, Where::Own)?;
    load.keep(ahead + WARM_LAUNCHES)?;
    load.await_launch(WARM_LAUNCHES - 1)?;
    let submit = |rank: &mut Rank<'_>| {
        let slot = slot_on(rank, other)?;
        let held = rank.dispatch(Call::default())?;
        held.release(&rank.queue);
        rank.combine_on(other, slot, Some(1))?;
        // The next pair follows both.
        // SAFETY: both streams are live.
        unsafe { record(rank, side.raw())?.order(rank.stream.raw()) }.map_err(failed)
    };
    let (start, end) = seat.back_to_back(count, submit, || load.keep(ahead))?;
    load.finish()?;
    let us = load.micros_within(&start, &end)?;
    sample.experts.extend(us.map(|us| us * sample.launches as f64));
    Ok(())
}

/// One dispatch and one combine at the same time: microseconds of each.
fn both(rank: &mut Rank<'_>, side: &Stream, other: &Queue) -> Result<(f64, f64)> {
    let times = gated_both(rank, side, other);
    rank.gate_opened(times)
}

fn gated_both(rank: &mut Rank<'_>, side: &Stream, other: &Queue) -> Result<(f64, f64)> {
    let slot = slot_on(rank, other)?;
    rank.round += 1;
    rank.barrier()?;
    for stream in [rank.stream.raw(), side.raw()] {
        // SAFETY: live streams of this rank, whose work is waited for below.
        unsafe { rank.gate.hold(&rank.device, stream, rank.round)? };
    }
    let starts = (record(rank, rank.stream.raw())?, record(rank, side.raw())?);
    let held = rank.dispatch(Call::default())?;
    let dispatched = record(rank, rank.stream.raw())?;
    rank.combine_on(other, slot, Some(1))?;
    let combined = record(rank, side.raw())?;
    open(rank)?;
    await_event(&dispatched, "a dispatch beside a combine")?;
    await_event(&combined, "a combine beside a dispatch")?;
    held.release(&rank.queue);
    let dispatch = dispatched.micros_since(&starts.0).map_err(failed)?;
    Ok((dispatch, combined.micros_since(&starts.1).map_err(failed)?))
}

/// A slot to combine from. Taken before the dispatch that runs beside: it follows those before.
fn slot_on(rank: &Rank<'_>, queue: &Queue) -> Result<Dispatched> {
    let slot = rank.ep.combine_slot(handle(rank)?, queue);
    let mut slot = slot.map_err(refused(rank.rank, "combine_slot"))?;
    // Which type its rows have is said here; what they are does not matter.
    rank.rows_of(&mut slot)?;
    Ok(slot)
}

fn handle<'r>(rank: &'r Rank<'_>) -> Result<&'r Handle> {
    let missing = || BenchError::Tool { op: "pipeline", detail: "nothing was dispatched".into() };
    rank.handle.as_ref().ok_or_else(missing)
}

fn record(rank: &Rank<'_>, stream: cudarc::driver::sys::CUstream) -> Result<Event> {
    // SAFETY: called with live streams of this rank's GPU only.
    unsafe { rank.events.record(stream) }.map_err(failed)
}

fn open(rank: &Rank<'_>) -> Result<()> {
    rank.barrier()?;
    if rank.rank == 0 {
        rank.gate.open(rank.round);
    }
    Ok(())
}

/// What all ranks' samples come to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Every run, the slowest rank's time.
    pub runs: Vec<f64>,
    /// Stage times: dispatch, experts, combine, of the slowest rank.
    pub stages: (f64, f64, f64),
    /// The ideal schedule of these stages.
    pub ideal_us: f64,
    /// Median run over that.
    pub ratio: Option<f64>,
    /// Median run one after the other.
    pub serial_us: Option<f64>,
}

/// Makes one result of what all ranks saw. `None` where a stage was never measured.
pub fn merge(samples: &[Sample]) -> Option<Outcome> {
    let worst = |of: fn(&Sample) -> &Vec<f64>| {
        samples.iter().map(|sample| median(of(sample))).reduce(|a, b| Some(a?.max(b?))).flatten()
    };
    let stages = (worst(|s| &s.dispatch)?, worst(|s| &s.experts)?, worst(|s| &s.combine)?);
    let ideal_us = ideal_schedule(BATCHES, stages);
    let all = |of: fn(&Sample) -> &Vec<f64>| {
        crate::nvlink::slowest(&samples.iter().map(|s| of(s).clone()).collect::<Vec<_>>())
    };
    let runs = all(|s| &s.pipeline);
    let ratio = median(&runs).map(|us| us / ideal_us);
    Some(Outcome { runs, stages, ideal_us, ratio, serial_us: median(&all(|s| &s.serial)) })
}
