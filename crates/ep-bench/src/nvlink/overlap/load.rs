//! Compute that is kept running.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;
use ep_kernels::cuda::{Event, EventPool};

use super::multiply::Multiply;
use crate::nvlink::raw::{LIMIT, await_event, failed};
use crate::{BenchError, Result};

/// A product launched back to back on one stream; every launch's end is an event. Dropping it waits,
/// bounded, until all have ended.
pub struct Load<'m> {
    product: Rc<dyn Multiply + 'm>,
    stream: CUstream,
    events: Arc<EventPool>,
    ends: Vec<Event>,
    done: usize,
}

impl<'m> Load<'m> {
    /// Nothing launched yet.
    ///
    /// # Safety
    /// `stream` is a stream of the device that product and events are of, and lives longer than this.
    pub unsafe fn new(
        product: Rc<dyn Multiply + 'm>,
        stream: CUstream,
        events: &Arc<EventPool>,
    ) -> Self {
        Self { product, stream, events: events.clone(), ends: Vec::new(), done: 0 }
    }

    /// Launches it `times` times.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch(&mut self, times: usize) -> Result<()> {
        for _ in 0..times {
            // SAFETY: the stream is live by the contract of `new`; dropping waits for the end.
            unsafe { self.product.launch(self.stream) }.map_err(failed)?;
            // SAFETY: the stream is live by the contract of `new`.
            let end = unsafe { self.events.record(self.stream) }.map_err(failed)?;
            self.ends.push(end);
        }
        Ok(())
    }

    /// Launches as many as `ahead` need to be waiting or running.
    ///
    /// # Errors
    /// The driver's.
    pub fn keep(&mut self, ahead: usize) -> Result<()> {
        while self.done < self.ends.len() && self.ends[self.done].is_done().map_err(failed)? {
            self.done += 1;
        }
        let waiting = self.ends.len() - self.done;
        self.launch(ahead.saturating_sub(waiting))
    }

    /// Whether what was launched last has not ended.
    ///
    /// # Errors
    /// The driver's.
    pub fn is_busy(&self) -> Result<bool> {
        match self.ends.last() {
            Some(end) => Ok(!end.is_done().map_err(failed)?),
            None => Ok(false),
        }
    }

    /// Waits until the launch with this number has ended.
    ///
    /// # Errors
    /// It does not within the limit of every wait.
    pub fn await_launch(&self, number: usize) -> Result<()> {
        self.ends.get(number).map_or(Ok(()), |end| await_event(end, "compute"))
    }

    /// Waits until all have ended.
    ///
    /// # Errors
    /// They do not within the limit of every wait.
    pub fn finish(&self) -> Result<()> {
        self.ends.last().map_or(Ok(()), |end| await_event(end, "compute"))
    }

    /// Microseconds per launch between the first end in `[from, until]` and the last; `None` with
    /// fewer than two ends there. All have ended.
    ///
    /// # Errors
    /// The driver's.
    pub fn micros_within(&self, from: &Event, until: &Event) -> Result<Option<f64>> {
        let length = until.micros_since(from).map_err(failed)?;
        let at = |end: &Event| end.micros_since(from).map_err(failed);
        let ends = self.ends.iter().map(at).collect::<Result<Vec<f64>>>()?;
        Ok(interval(&ends, length))
    }

    /// Microseconds per launch, without the first `warm_ups`. All have ended.
    ///
    /// # Errors
    /// The driver's; too few launches.
    pub fn micros_after(&self, warm_ups: usize) -> Result<f64> {
        let (Some(first), Some(last)) = (self.ends.get(warm_ups), self.ends.last()) else {
            return Err(BenchError::Tool { op: "compute", detail: "too few launches".into() });
        };
        let launches = self.ends.len() - 1 - warm_ups;
        Ok(last.micros_since(first).map_err(failed)? / launches.max(1) as f64)
    }
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        let start = Instant::now();
        while self.is_busy().unwrap_or(false) && start.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// The mean distance of those of `ends` that are in `[0, length]`, ascending.
pub fn interval(ends: &[f64], length: f64) -> Option<f64> {
    let mut inside = ends.iter().copied().filter(|&end| (0.0..=length).contains(&end));
    let first = inside.next()?;
    let (count, last) = inside.fold((0usize, first), |(count, _), end| (count + 1, end));
    (count > 0).then(|| (last - first) / count as f64)
}
