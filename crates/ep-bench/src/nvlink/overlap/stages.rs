//! What the stages of the pipeline take: each alone, and all of them kept busy.

use cudarc::driver::sys::CUstream;
use ep_kernels::cuda::{Event, Stream};
use ep_runtime::{Dispatched, Handle, Queue};

use super::bound::Stages;
use super::judge::median;
use super::points::{Beside, Scope};
use super::seat::{Seat, WARM_LAUNCHES, Where};
use crate::case::Operation;
use crate::nvlink::rank::{Call, Rank};
use crate::nvlink::raw::{await_event, failed};
use crate::nvlink::reference::failed as refused;
use crate::{BenchError, Result};

/// Dispatches, and as many combines, whose times are compared: what they take more is the others' time.
const PAIRS: [usize; 2] = [2, 8];
/// Calls before those that count.
const WARM_UPS: usize = 2;

/// Times of stages on one rank, microseconds.
#[derive(Clone, Debug, Default)]
pub struct Runs {
    /// Dispatches.
    pub dispatch: Vec<f64>,
    /// A micro-batch's experts.
    pub experts: Vec<f64>,
    /// Combines.
    pub combine: Vec<f64>,
    /// A dispatch and a combine, where many run at once.
    pub pair: Vec<f64>,
}

impl Runs {
    fn each(&self, of: impl Fn(&[f64]) -> Option<f64>) -> Option<Stages> {
        Some(Stages {
            dispatch: of(&self.dispatch)?,
            experts: of(&self.experts)?,
            combine: of(&self.combine)?,
            pair: of(&self.pair)?,
        })
    }

    /// The least of each; `None` where one was never measured.
    pub fn least(&self) -> Option<Stages> {
        self.each(|runs| runs.iter().copied().reduce(f64::min))
    }

    /// The median of each; `None` where one was never measured.
    pub fn medians(&self) -> Option<Stages> {
        self.each(median)
    }
}

/// Each stage while no other runs, in the clocks that the experts' GEMMs leave: nothing in a pipeline is
/// faster. Collective.
///
/// # Errors
/// As the measurements.
pub fn alone(
    seat: &mut Seat<'_, '_, '_>,
    (side, launches): (&Stream, usize),
    scope: &Scope,
) -> Result<Runs> {
    let mut runs = Runs::default();
    let [dispatch, combine] = [Operation::Dispatch, Operation::Combine];
    let expected = [seat.expected(dispatch)?, seat.expected(combine)?];
    runs.dispatch = seat.behind(dispatch, Beside::Gemm, (scope.runs(), expected[0]))?;
    runs.combine = seat.behind(combine, Beside::Gemm, (scope.runs(), expected[1]))?;
    for _ in 0..scope.runs() {
        let us = seat.compute(Beside::Gemm, Where::Own, (WARM_LAUNCHES, 2 * launches))?;
        runs.experts.push(us * launches as f64);
        let mut took = [0.0; 2];
        for (us, count) in took.iter_mut().zip(PAIRS) {
            *us = pairs(seat, side, count)?;
        }
        runs.pair.push(((took[1] - took[0]) / (PAIRS[1] - PAIRS[0]) as f64).max(0.0));
    }
    Ok(runs)
}

/// So many dispatches on one stream and combines on another, right behind a GEMM: until the last ends.
fn pairs(seat: &mut Seat<'_, '_, '_>, side: &Stream, count: usize) -> Result<f64> {
    let other = queue(seat.rank, side);
    let mut load = seat.load(Beside::Gemm, Where::Own)?;
    seat.rank.barrier()?;
    load.launch(WARM_LAUNCHES)?;
    let rank = &mut *seat.rank;
    let streams = [rank.stream.raw(), side.raw()];
    let ready = || load.finish();
    let times = gated(rank, (streams, &ready), "dispatches and combines at once", |rank| {
        for _ in 0..count {
            let slot = slot_on(rank, &other)?;
            rank.dispatch(Call::default())?.release(&rank.queue);
            rank.combine_on(&other, slot, Some(1))?;
        }
        Ok([record(rank, streams[0])?, record(rank, streams[1])?])
    })?;
    Ok(times[0].max(times[1]))
}

/// Each stage while both others are kept busy. Collective.
///
/// # Errors
/// As the measurements.
pub fn busy(
    seat: &mut Seat<'_, '_, '_>,
    (side, launches): (&Stream, usize),
    scope: &Scope,
) -> Result<Runs> {
    let mut runs = Runs::default();
    let other = queue(seat.rank, side);
    let expected = seat.expected(Operation::Dispatch)? + seat.expected(Operation::Combine)?;
    let ahead = seat.ahead(Beside::Gemm, expected)?;
    let mut load = seat.load(Beside::Gemm, Where::Own)?;
    load.keep(ahead + WARM_LAUNCHES)?;
    load.await_launch(WARM_LAUNCHES - 1)?;
    for run in 0..WARM_UPS + scope.runs() {
        load.keep(ahead)?;
        let [dispatch, combine] = both(seat.rank, side, &other)?;
        if load.is_busy()? && run >= WARM_UPS {
            runs.dispatch.push(dispatch);
            runs.combine.push(combine);
        }
    }
    load.finish()?;
    let launch_us = seat.pair(Beside::Gemm)?.launch_us;
    let count = 4 + (16.0 * launch_us / expected.max(1.0)).ceil() as usize;
    let mut load = seat.load(Beside::Gemm, Where::Own)?;
    load.keep(ahead + WARM_LAUNCHES)?;
    load.await_launch(WARM_LAUNCHES - 1)?;
    let submit = |rank: &mut Rank<'_>| {
        let slot = slot_on(rank, &other)?;
        rank.dispatch(Call::default())?.release(&rank.queue);
        rank.combine_on(&other, slot, Some(1))?;
        // The next pair follows both.
        // SAFETY: both streams are live.
        unsafe { record(rank, side.raw())?.order(rank.stream.raw()) }.map_err(failed)
    };
    let (start, end) = seat.back_to_back(count, submit, || load.keep(ahead))?;
    load.finish()?;
    let us = load.micros_within(&start, &end)?;
    runs.experts.extend(us.map(|us| us * launches as f64));
    runs.pair.push(end.micros_since(&start).map_err(failed)? / count as f64);
    Ok(runs)
}

/// One dispatch and one combine at the same time: microseconds of each.
fn both(rank: &mut Rank<'_>, side: &Stream, other: &Queue) -> Result<[f64; 2]> {
    let slot = slot_on(rank, other)?;
    let streams = [rank.stream.raw(), side.raw()];
    let mut held = None;
    let what = "a dispatch and a combine at once";
    let times = gated(rank, (streams, &|| Ok(())), what, |rank| {
        held = Some(rank.dispatch(Call::default())?);
        let dispatched = record(rank, streams[0])?;
        rank.combine_on(other, slot, Some(1))?;
        Ok([dispatched, record(rank, streams[1])?])
    });
    if let Some(held) = held {
        held.release(&rank.queue);
    }
    times
}

/// Times what `submit` submits to `streams`, from a start that all ranks have together, which is not
/// before `ready` has come back on all of them: microseconds from there to the event that it gives back
/// for each stream. Collective.
///
/// # Errors
/// Those of `submit` and `ready`; the driver's. Nothing waits for the start any more then.
pub fn gated<'a, const N: usize>(
    rank: &mut Rank<'a>,
    (streams, ready): ([CUstream; N], &dyn Fn() -> Result<()>),
    what: &'static str,
    submit: impl FnOnce(&mut Rank<'a>) -> Result<[Event; N]>,
) -> Result<[f64; N]> {
    rank.round += 1;
    rank.barrier()?;
    let held = |rank: &mut Rank<'a>| {
        let mut starts = Vec::with_capacity(N);
        for stream in streams {
            // SAFETY: live streams of this rank, whose work is waited for below or when it is dropped.
            unsafe { rank.gate.hold(&rank.device, stream, rank.round)? };
            starts.push(record(rank, stream)?);
        }
        Ok(starts)
    };
    let done = held(rank).and_then(|starts| {
        let ends = submit(rank)?;
        ready()?;
        rank.barrier()?;
        if rank.rank == 0 {
            rank.gate.open(rank.round);
        }
        Ok((starts, ends))
    });
    let (starts, ends) = rank.gate_opened(done)?;
    ends.iter().try_for_each(|end| await_event(end, what))?;
    let mut times = [0.0; N];
    for (us, (start, end)) in times.iter_mut().zip(starts.iter().zip(&ends)) {
        *us = end.micros_since(start).map_err(failed)?;
    }
    Ok(times)
}

/// A queue of `stream`, which outlives all work on it: whoever submits any waits for it.
fn queue(rank: &Rank<'_>, stream: &Stream) -> Queue {
    let ordinal = rank.device.properties().ordinal;
    // SAFETY: by this function's contract.
    unsafe { Queue::from_raw(stream.raw().cast(), ordinal) }
}

/// A slot to combine from. Taken before the dispatch that runs beside: it follows those before.
fn slot_on(rank: &Rank<'_>, queue: &Queue) -> Result<Dispatched> {
    let slot = rank.ep.combine_slot(handle(rank)?, queue);
    let mut slot = slot.map_err(refused(rank.rank, "combine_slot"))?;
    // Which type its rows have is said here; what they are does not matter.
    rank.rows_of(&mut slot)?;
    Ok(slot)
}

/// The routing of the first dispatch.
///
/// # Errors
/// There was none.
pub fn handle<'r>(rank: &'r Rank<'_>) -> Result<&'r Handle> {
    let missing = || BenchError::Tool { op: "pipeline", detail: "nothing was dispatched".into() };
    rank.handle.as_ref().ok_or_else(missing)
}

/// An event behind what is on a stream. Called with live streams of this rank's GPU only.
pub fn record(rank: &Rank<'_>, stream: CUstream) -> Result<Event> {
    // SAFETY: by this function's contract.
    unsafe { rank.events.record(stream) }.map_err(failed)
}
