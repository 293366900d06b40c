//! A rank and what runs beside it on its GPU.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUstream;
use ep_kernels::cuda::{Compiler, Event, EventPool, SmTools, Stream};
use ep_runtime::sched::ComputeStream;

use super::hold::Holder;
use super::load::Load;
use super::multiply::{Multiply, Products};
use super::points::Beside;
use crate::case::Operation;
use crate::nvlink::rank::{Call, Rank};
use crate::nvlink::raw::{await_event, failed};
use crate::nvlink::reference::failed as refused;
use crate::stats::Summary;
use crate::{BenchError, Result};

/// Events made ahead: launches of compute in a part of a measurement.
const EVENTS: usize = 256;
/// Launches after which compute counts as running evenly.
pub const WARM_LAUNCHES: usize = 4;
/// What the host needs between two timed calls, at the most expected.
const HOST: f64 = 800.0;
/// Calls beside one holder.
const PER_HOLD: usize = 4;

/// How an SM count came out.
#[derive(Clone, Debug, Default)]
pub struct Sms {
    /// Asked for.
    pub asked: u32,
    /// Taken from compute.
    pub taken: u32,
    /// Blocks of communication's kernels.
    pub blocks: u32,
    /// Compute's.
    pub compute: u32,
    /// The device's.
    pub all: u32,
    /// Why another policy than asked for is in force.
    pub why: Option<String>,
}

/// One call beside compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beheld {
    /// Its time.
    pub us: f64,
    /// Compute ran from before it until after it.
    pub inside: bool,
    /// It did not end before what held the SMs did.
    pub blocked: bool,
}

/// A product on all SMs and on compute's.
pub struct Pair<'m> {
    kind: Beside,
    all: Rc<dyn Multiply + 'm>,
    own: Rc<dyn Multiply + 'm>,
    /// Microseconds of a launch on compute's SMs, about; the same on every rank.
    pub launch_us: f64,
}

/// Which SMs compute runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// All of the device.
    All,
    /// Those that communication leaves it.
    Own,
}

/// A rank with its compute streams. Dropped before the rank.
pub struct Seat<'r, 'a, 'm> {
    /// The rank.
    pub rank: &'r mut Rank<'a>,
    /// What its SMs came to.
    pub sms: Sms,
    /// Dropped before the stream that it is started on.
    holder: Holder,
    /// On the SMs that are left.
    own: ComputeStream,
    /// On all SMs.
    all: Stream,
    /// For launches of compute.
    pub events: Arc<EventPool>,
    pairs: Vec<Pair<'m>>,
}

impl<'r, 'a, 'm> Seat<'r, 'a, 'm> {
    /// Makes compute's streams; products are added by [`Seat::add`].
    ///
    /// # Errors
    /// The library's and the driver's.
    pub fn new(rank: &'r mut Rank<'a>) -> Result<Self> {
        let (least, _) = rank.device.priorities().map_err(failed)?;
        let own = rank.ep.compute_stream(least).map_err(refused(rank.rank, "compute_stream"))?;
        let all = rank.device.stream(least).map_err(failed)?;
        let report = rank.ep.sm_report();
        let compiler = Compiler::get().map_err(failed)?;
        let tools = SmTools::load(&rank.device, compiler).map_err(failed)?;
        let mut holder = Holder::new(tools);
        let sms = Sms {
            asked: report.asked.sms(),
            taken: report.reserved,
            blocks: report.blocks,
            compute: report.compute_sms.min(own.sms()),
            all: report.device_sms,
            why: report.why,
        };
        // The first launch on a stream of a partition loads the kernel there.
        // SAFETY: the stream lives as long as the holder.
        unsafe { holder.start(own.raw(), sms.compute, Duration::from_micros(100))? };
        holder.finish()?;
        let events = EventPool::new(&rank.device, EVENTS, true).map_err(failed)?;
        Ok(Self { rank, sms, own, all, holder, events, pairs: Vec::new() })
    }

    /// Makes a product ready and finds how long it takes. Collective. False where it is not there, or
    /// where cuBLASLt's cannot run on these streams, which is told.
    ///
    /// # Errors
    /// As the measurements.
    pub fn add(&mut self, kind: Beside, products: &Products<'m>) -> Result<bool> {
        if self.pairs.iter().any(|pair| pair.kind == kind) {
            return Ok(true);
        }
        let tried = self.try_out(kind, products);
        // Either all ranks have it or none.
        let us = self.largest(match &tried {
            Ok(Some(us)) => *us,
            _ => f64::INFINITY,
        })?;
        match (tried, self.pairs.last_mut()) {
            (Ok(Some(_)), Some(pair)) if us.is_finite() => {
                pair.launch_us = us;
                return Ok(true);
            }
            (Err(error), _) if kind == Beside::Gemm => return Err(error),
            (Err(error), _) => eprintln!("{} is left out: {error}", kind.name()),
            _ => {}
        }
        self.pairs.retain(|pair| pair.kind != kind);
        Ok(false)
    }

    /// Launches a product for the first time, which loads kernels on both streams: nothing may wait
    /// meanwhile. Microseconds of a launch on compute's SMs.
    fn try_out(&mut self, kind: Beside, products: &Products<'m>) -> Result<Option<f64>> {
        self.rank.barrier()?;
        let (all, own) = (self.sms.all, self.sms.compute);
        let (Some(all), Some(own)) = (products.on(kind, all)?, products.on(kind, own)?) else {
            return Ok(None);
        };
        self.pairs.push(Pair { kind, all, own, launch_us: 0.0 });
        self.compute_now(kind, Where::All, (1, 1))?;
        self.compute_now(kind, Where::Own, (1, 2)).map(Some)
    }

    /// The largest of the ranks' values, on all of them.
    ///
    /// # Errors
    /// A rank that failed.
    pub fn largest(&self, value: f64) -> Result<f64> {
        self.rank.largest(value)
    }

    /// Compute's stream on the SMs that are left.
    pub fn own_stream(&self) -> &ComputeStream {
        &self.own
    }

    /// A product of [`Seat::add`].
    ///
    /// # Errors
    /// It was not added.
    pub fn pair(&self, kind: Beside) -> Result<&Pair<'m>> {
        let missing = || BenchError::Tool { op: "compute", detail: format!("no {}", kind.name()) };
        self.pairs.iter().find(|pair| pair.kind == kind).ok_or_else(missing)
    }

    /// A product to be kept running.
    ///
    /// # Errors
    /// It was not added.
    pub fn load(&self, kind: Beside, place: Where) -> Result<Load<'m>> {
        let pair = self.pair(kind)?;
        let (product, stream): (_, CUstream) = match place {
            Where::All => (pair.all.clone(), self.all.raw()),
            Where::Own => (pair.own.clone(), self.own.raw()),
        };
        // SAFETY: loads are made and dropped within calls on this seat, whose streams live longer.
        Ok(unsafe { Load::new(product, stream, &self.events) })
    }

    /// Compute alone: microseconds per launch. Collective.
    ///
    /// # Errors
    /// The driver's.
    pub fn compute(
        &self,
        kind: Beside,
        place: Where,
        (warm_ups, launches): (usize, usize),
    ) -> Result<f64> {
        self.rank.barrier()?;
        self.compute_now(kind, place, (warm_ups, launches))
    }

    fn compute_now(
        &self,
        kind: Beside,
        place: Where,
        (warm_ups, launches): (usize, usize),
    ) -> Result<f64> {
        let mut load = self.load(kind, place)?;
        load.launch(warm_ups + launches)?;
        load.finish()?;
        load.micros_after(warm_ups - 1)
    }

    /// An operation alone: microseconds of each of `runs` calls after `warm_ups`. Collective.
    ///
    /// # Errors
    /// As [`Rank::measure_beside`].
    pub fn alone(
        &mut self,
        operation: Operation,
        (warm_ups, runs): (usize, usize),
    ) -> Result<Vec<f64>> {
        let mut times = Vec::with_capacity(runs);
        for run in 0..warm_ups + runs {
            let us = self.rank.measure_beside(operation, true)?;
            times.extend(us.into_iter().filter(|_| run >= warm_ups));
        }
        Ok(times)
    }

    /// About how long an operation takes alone, the same on every rank. Collective.
    ///
    /// # Errors
    /// As [`Seat::alone`].
    pub fn expected(&mut self, operation: Operation) -> Result<f64> {
        let times = self.alone(operation, (3, 5))?;
        self.largest(Summary::of(&times).map_or(0.0, |time| time.p50_us))
    }

    /// An operation alone, but in the clocks that compute leaves: each of `runs` calls of about
    /// `expected` microseconds comes right behind as many launches of compute as precede a call beside
    /// it, whose end all ranks await. Collective.
    ///
    /// # Errors
    /// As the measurements.
    pub fn behind(
        &mut self,
        operation: Operation,
        kind: Beside,
        (runs, expected): (usize, f64),
    ) -> Result<Vec<f64>> {
        let ahead = self.ahead(kind, expected)?;
        self.rank.barrier()?;
        let mut times = Vec::with_capacity(runs);
        for run in 0..runs {
            let mut load = self.load(kind, Where::Own)?;
            load.launch(if run == 0 { ahead + WARM_LAUNCHES } else { ahead })?;
            times.extend(self.rank.measure_after(operation, true, &|| load.finish())?);
        }
        Ok(times)
    }

    /// How many launches have to be ahead so that a call of about `us` ends before they do. Where
    /// nothing is set aside, the call first waits for those that run.
    pub fn ahead(&self, kind: Beside, us: f64) -> Result<usize> {
        let launch = self.pair(kind)?.launch_us.max(1.0);
        Ok(4 + ((4.0 * us + HOST) / launch).ceil() as usize)
    }

    /// Calls of about `expected` microseconds beside compute that does not end meanwhile. Collective.
    ///
    /// # Errors
    /// As the measurements.
    pub fn beside(
        &mut self,
        operation: Operation,
        kind: Beside,
        (runs, expected): (usize, f64),
    ) -> Result<Vec<Beheld>> {
        if kind == Beside::Holder {
            return self.beside_holder(operation, (runs, expected));
        }
        let ahead = self.ahead(kind, expected)?;
        self.rank.barrier()?;
        let mut load = self.load(kind, Where::Own)?;
        load.keep(ahead + WARM_LAUNCHES)?;
        load.await_launch(WARM_LAUNCHES - 1)?;
        let mut seen = Vec::with_capacity(runs);
        for _ in 0..runs {
            load.keep(ahead)?;
            let us = self.rank.measure_beside(operation, true)?;
            let inside = load.is_busy()?;
            seen.extend(us.into_iter().map(|us| Beheld { us, inside, blocked: false }));
        }
        load.finish()?;
        Ok(seen)
    }

    /// The same beside a holder on all of compute's SMs.
    fn beside_holder(
        &mut self,
        operation: Operation,
        (runs, expected): (usize, f64),
    ) -> Result<Vec<Beheld>> {
        let mut seen = Vec::with_capacity(runs);
        while seen.len() < runs {
            let calls = PER_HOLD.min(runs - seen.len());
            seen.extend(self.one_hold(operation, (calls, expected), self.sms.compute)?);
        }
        Ok(seen)
    }

    /// `calls` calls beside one holder on `held` SMs of compute's stream. Collective.
    ///
    /// # Errors
    /// As the measurements.
    pub fn one_hold(
        &mut self,
        operation: Operation,
        (calls, expected): (usize, f64),
        held: u32,
    ) -> Result<Vec<Beheld>> {
        let hold = hold_for(calls, expected);
        self.rank.barrier()?;
        let raw = self.own.raw();
        // SAFETY: the stream lives as long as this seat, and so longer than the holder's blocks.
        unsafe { self.holder.start(raw, held, hold)? };
        let mut seen = Vec::with_capacity(calls);
        for _ in 0..calls {
            let us = self.rank.measure_beside(operation, true)?;
            let inside = self.holder.is_holding();
            let judge = |us| Beheld { us, inside, blocked: !inside && is_blocked(us, expected) };
            seen.extend(us.into_iter().map(judge));
        }
        self.holder.finish()?;
        Ok(seen)
    }

    /// Submits `count` calls back to back, two ahead, while `tick` runs in between; the events at
    /// their beginning and end. Collective.
    ///
    /// # Errors
    /// As the measurements.
    pub fn back_to_back(
        &mut self,
        count: usize,
        mut submit: impl FnMut(&mut Rank<'a>) -> Result<()>,
        mut tick: impl FnMut() -> Result<()>,
    ) -> Result<(Event, Event)> {
        self.rank.barrier()?;
        let record = |rank: &Rank<'_>| {
            // SAFETY: the rank's live stream.
            unsafe { rank.events.record(rank.stream.raw()) }.map_err(failed)
        };
        let start = record(self.rank)?;
        let mut ends: Vec<Event> = Vec::with_capacity(count);
        for i in 0..count {
            submit(self.rank)?;
            ends.push(record(self.rank)?);
            tick()?;
            if i >= 2 {
                await_event(&ends[i - 2], "calls back to back")?;
            }
        }
        let Some(end) = ends.pop() else {
            return Err(BenchError::Tool { op: "compute", detail: "no calls".into() });
        };
        await_event(&end, "calls back to back")?;
        Ok((start, end))
    }
}

/// One call of an operation in stream order.
///
/// # Errors
/// The library's.
pub fn submit(rank: &mut Rank<'_>, operation: Operation) -> Result<()> {
    match operation {
        Operation::Combine => {
            let mut held = rank.slot()?;
            rank.rows_of(&mut held)?;
            rank.combine(held)
        }
        _ => {
            let held = rank.dispatch(Call::default())?;
            held.release(&rank.queue);
            Ok(())
        }
    }
}

/// How long SMs are held for `calls` calls of about `expected` microseconds.
pub fn hold_for(calls: usize, expected: f64) -> Duration {
    let us = calls as f64 * (2.0 * expected + HOST) + 4.0 * HOST;
    Duration::from_nanos((us * 1e3) as u64).min(super::hold::LONGEST)
}

/// Whether a call that ended after its holder had waited for it: then it took far longer than alone.
/// Otherwise the host was late.
pub fn is_blocked(us: f64, expected: f64) -> bool {
    us > 2.0 * expected + HOST
}
