//! Timing operations of ranks on GPUs, by events, from a start that all ranks have together.

use ep_kernels::cuda::Event;
use ep_runtime::Dispatched;

use super::rank::{Call, Rank};
use super::raw::failed as cuda;
use super::raw::{Graph, await_event};
use crate::case::Operation;
use crate::stats::{RUNS, WARM_UPS};
use crate::{BenchError, Result};

impl Rank<'_> {
    fn record(&self) -> Result<Event> {
        // SAFETY: this rank's live stream.
        unsafe { self.events.record(self.stream.raw()) }.map_err(cuda)
    }

    /// The largest of the ranks' values, on all of them. Collective.
    ///
    /// # Errors
    /// A rank that failed.
    pub fn largest(&self, value: f64) -> Result<f64> {
        let all = self.group.all_gather(&value.to_le_bytes()).map_err(|e| BenchError::Rank {
            rank: self.rank,
            op: "all_gather",
            blames: e.peer().or(Some(0)),
            detail: e.to_string(),
        })?;
        let values = all.iter().filter_map(|bytes| bytes.as_slice().try_into().ok());
        Ok(values.map(f64::from_le_bytes).fold(value, f64::max))
    }

    /// After a failure, opens the gate: what this rank drops next may wait for streams that wait there.
    pub fn gate_opened<T>(&self, done: Result<T>) -> Result<T> {
        if done.is_err() {
            self.gate.open(i32::MAX as u32);
        }
        done
    }

    /// Times what `work` submits, from a start that all ranks have together. `early`: all of it is
    /// submitted before that start.
    ///
    /// # Errors
    /// Those of `work`; the driver's.
    pub fn timed<T>(
        &mut self,
        early: bool,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<(f64, T)> {
        self.timed_after(early, &|| Ok(()), work)
    }

    /// As [`Rank::timed`]; the start is not before `ready` has come back on all ranks.
    fn timed_after<T>(
        &mut self,
        early: bool,
        ready: &dyn Fn() -> Result<()>,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<(f64, T)> {
        self.round += 1;
        self.barrier()?;
        // SAFETY: this rank's live stream; it is drained before the gate goes.
        unsafe { self.gate.hold(&self.device, self.stream.raw(), self.round)? };
        let start = self.record()?;
        let open = |rank: &Self| -> Result<()> {
            rank.gate_opened(ready())?;
            rank.barrier()?;
            if rank.rank == 0 {
                rank.gate.open(rank.round);
            }
            Ok(())
        };
        if !early {
            open(self)?;
        }
        let submitted = work(self).and_then(|done| Ok((done, self.record()?)));
        let (done, end) = self.gate_opened(submitted)?;
        if early {
            open(self)?;
        }
        await_event(&end, "a timed operation")?;
        Ok((end.micros_since(&start).map_err(cuda)?, done))
    }

    /// Times `runs` runs after `warm_ups`; microseconds each. With `check`, the last run is
    /// compared, which takes far longer than the runs.
    ///
    /// # Errors
    /// A difference; what the library and the driver say.
    pub fn measure(
        &mut self,
        operation: Operation,
        call: Call,
        (warm_ups, runs): (usize, usize),
        check: bool,
    ) -> Result<Vec<f64>> {
        // A host that waits for counts, or for verdicts, cannot submit everything ahead.
        let far = self.job.way.is_far();
        let early = !far && (!call.uncached || call.capacity);
        let mut times = Vec::with_capacity(runs);
        for run in 1..=warm_ups + runs {
            let last = check && run == warm_ups + runs;
            let us = match operation {
                Operation::Combine => {
                    let mut held = self.slot()?;
                    let rows = self.rows_of(&mut held)?;
                    if last {
                        self.poison(rows)?;
                    }
                    self.write_outputs(rows)?;
                    let (us, ()) = self.timed(!far, |rank| rank.combine(held))?;
                    if last {
                        self.check_combined()?;
                    }
                    us
                }
                Operation::Dispatch => {
                    if last {
                        let mut held = self.slot()?;
                        let rows = self.rows_of(&mut held)?;
                        self.poison(rows)?;
                        held.release(&self.queue);
                        self.drain()?;
                    }
                    let (us, held) = self.timed(early, |rank| rank.dispatch(call))?;
                    if last {
                        self.check_rows(&held)?;
                    }
                    held.release(&self.queue);
                    us
                }
                Operation::Roundtrip => {
                    let work = |rank: &mut Self| {
                        let mut held = rank.dispatch(call)?;
                        if !rank.job.case.dtype.reducible() {
                            // What comes back has a type that can be summed; values do not matter.
                            rank.rows_of(&mut held)?;
                        }
                        rank.combine(held)
                    };
                    self.timed(early, work)?.0
                }
            };
            if run > warm_ups {
                times.push(us);
            }
        }
        Ok(times)
    }

    /// One timed run beside whatever else runs on the GPU, without waiting for that. `early` as in
    /// [`Rank::timed`].
    ///
    /// # Errors
    /// As [`Rank::measure`].
    pub fn measure_beside(&mut self, operation: Operation, early: bool) -> Result<Vec<f64>> {
        self.measure_after(operation, early, &|| Ok(()))
    }

    /// As [`Rank::measure_beside`], right after `ready` has come back on all ranks.
    ///
    /// # Errors
    /// As [`Rank::measure`]; those of `ready`.
    pub fn measure_after(
        &mut self,
        operation: Operation,
        early: bool,
        ready: &dyn Fn() -> Result<()>,
    ) -> Result<Vec<f64>> {
        match operation {
            Operation::Combine => {
                let mut held = self.slot()?;
                self.rows_of(&mut held)?;
                Ok(vec![self.timed_after(early, ready, |rank| rank.combine(held))?.0])
            }
            _ => {
                let work = |rank: &mut Self| rank.dispatch(Call::default());
                let (us, held) = self.timed_after(early, ready, work)?;
                held.release(&self.queue);
                Ok(vec![us])
            }
        }
    }

    /// Captures as many dispatches as a graph of this call has; the last one's result is kept.
    fn capture_dispatches(&self, call: Call) -> Result<(Graph, Dispatched)> {
        // SAFETY: this rank's stream; its layer outlives the graphs.
        unsafe {
            Graph::capture(&self.device, self.stream.raw(), || {
                for _ in 1..operations(call) {
                    self.dispatch(call)?.release(&self.queue);
                }
                self.dispatch(call)
            })
        }
    }

    /// Captures as many combines, all of the rows of `held`'s slot.
    fn capture_combines(&self, call: Call, held: Dispatched) -> Result<Graph> {
        let raw = self.stream.raw();
        // SAFETY: this rank's stream; its layer outlives the graphs.
        let captured = unsafe {
            Graph::capture(&self.device, raw, || {
                self.combine(held)?;
                // The slot is free again, and the only one that graphs use.
                (1..operations(call)).try_for_each(|_| {
                    let mut held = self.slot()?;
                    self.rows_of(&mut held)?;
                    self.combine(held)
                })
            })
        };
        Ok(captured?.0)
    }

    /// Times replays of captured dispatches and of captured combines, per operation.
    ///
    /// # Errors
    /// As [`Rank::measure`].
    pub fn measure_graphs(&mut self, call: Call) -> Result<(Vec<f64>, Vec<f64>)> {
        let raw = self.stream.raw();
        self.drain()?;
        self.barrier()?;
        let (dispatch, mut held) = self.capture_dispatches(call)?;
        let rows = self.rows_of(&mut held)?;
        self.poison(rows)?;
        self.barrier()?;
        // SAFETY: this rank's stream; its layer outlives the graphs.
        unsafe { dispatch.launch(raw)? };
        self.drain()?;
        self.check_rows(&held)?;
        self.barrier()?;
        let combine = self.capture_combines(call, held)?;
        let count = operations(call) as f64;
        let (mut dispatched, mut combined) = (Vec::new(), Vec::new());
        for run in 1..=WARM_UPS + RUNS {
            // SAFETY: this rank's stream; its layer outlives the graphs.
            let (us, ()) = self.timed(true, |_| unsafe { dispatch.launch(raw) })?;
            if run == WARM_UPS + RUNS {
                self.poison(rows)?;
            }
            self.write_outputs(rows)?;
            // SAFETY: this rank's stream; its layer outlives the graphs.
            let (back, ()) = self.timed(true, |_| unsafe { combine.launch(raw) })?;
            if run > WARM_UPS {
                dispatched.push(us / count);
                combined.push(back / count);
            }
        }
        self.check_combined()?;
        self.drain()?;
        self.barrier()?;
        Ok((dispatched, combined))
    }
}

/// Operations in a graph of several: as a model captures its layers.
pub const CHAIN: usize = 8;

fn operations(call: Call) -> usize {
    if call.chain { CHAIN } else { 1 }
}
