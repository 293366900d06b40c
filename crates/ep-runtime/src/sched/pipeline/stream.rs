//! On streams: the calling thread submits, two streams carry what communication waits for.
//!
//! ```text
//! dispatch's   after the caller's start | dispatch 0 | dispatch 1 | …
//! the caller's after dispatch i | experts i | …
//! combine's    after experts i  | combine i | …                     then the caller's waits for it
//! ```
//!
//! If the caller's own stream were what dispatch and combine are submitted against, each would wait for
//! all experts submitted before it.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys::CUstream;
use ep_kernels::cuda::{Event as Point, EventPool, Stream};

use super::{Failed, Finished, MicroBatch, Panicking, Pipeline, PipelineError};
use crate::sched::timeline::{Pending, Stage};
use crate::{Combined, Dispatched, Ep, EpError, Event, Payload, Queue, Result, Route};

/// Events made ahead.
const EVENTS: usize = 16;

/// What a pipeline on a GPU has of its own.
#[derive(Debug)]
pub(super) struct Streams {
    dispatch: Stream,
    combine: Stream,
    /// Order only.
    marks: Arc<EventPool>,
    /// Measure time; made when a timeline is first asked for.
    times: Arc<EventPool>,
    ordinal: usize,
}

impl Streams {
    /// Nothing for a layer on the host.
    pub fn new(ep: &Ep) -> Result<Option<Self>> {
        let (Some(gpu), Some(sms)) = (&ep.inner.gpu, &ep.inner.sms.reservation) else {
            return Ok(None);
        };
        let (_, greatest) = gpu.device(super::OP)?.priorities()?;
        Ok(Some(Self {
            dispatch: sms.stream(greatest)?,
            combine: sms.stream(greatest)?,
            marks: EventPool::new(gpu.device(super::OP)?, EVENTS, false)?,
            times: EventPool::new(gpu.device(super::OP)?, EVENTS, true)?,
            ordinal: gpu.ordinal,
        }))
    }

    fn queue(&self, stream: &Stream) -> Queue {
        // SAFETY: the streams live as long as the pipeline, whose queues do not leave a run; the
        // driver keeps a destroyed stream until its work is done.
        unsafe { Queue::from_raw(stream.raw().cast(), self.ordinal) }
    }

    /// `later` continues once `earlier` has done what it has now.
    fn order(&self, earlier: CUstream, later: CUstream) -> Result<()> {
        // SAFETY: both are streams of this pipeline or its layer, or the caller's queue's: all live.
        unsafe { self.marks.record(earlier)?.order(later)? };
        Ok(())
    }
}

/// A run's view of its streams.
struct Run<'p> {
    pipeline: &'p Pipeline,
    streams: &'p Streams,
    compute: CUstream,
    dispatch: Queue,
    combine: Queue,
    /// When it began, where a timeline is kept.
    origin: Option<(Instant, Arc<Point>)>,
}

impl Pipeline {
    pub(super) fn run_on_streams<'a, E: Display>(
        &self,
        streams: &Streams,
        queue: &Queue,
        batches: Vec<MicroBatch<'a>>,
        mut experts: impl FnMut(usize, &mut Dispatched) -> Result<(), E>,
    ) -> Result<Finished, PipelineError<E>> {
        if batches.is_empty() {
            return Ok(Finished::default());
        }
        let run = Run::new(self, streams, queue).map_err(PipelineError::Start)?;
        let mut finished = Finished::default();
        let sends: Vec<(Payload<'a>, Route<'a>)> =
            batches.iter().map(|batch| (batch.payload, batch.route)).collect();
        let mut next = Some(run.dispatch(0, &sends)?);
        for (batch, MicroBatch { out, .. }) in batches.into_iter().enumerate() {
            let Some(mut rows) = next.take() else { break };
            run.submit_experts(batch, &mut rows, queue, &mut experts)?;
            // Submitted behind the experts: where the host waits to learn how many rows come, they run.
            if batch + 1 < sends.len() {
                next = Some(run.dispatch(batch + 1, &sends)?);
            }
            finished.events.push(run.combine(batch, rows, out)?);
        }
        run.end().map_err(|error| self.failed(Stage::Combine, sends.len() - 1, error))?;
        Ok(finished)
    }
}

impl<'p> Run<'p> {
    fn new(pipeline: &'p Pipeline, streams: &'p Streams, queue: &Queue) -> Result<Self> {
        let Some((compute, _)) = queue.raw() else {
            return Err(EpError::argument(super::OP, "the layer works on a GPU: pass a stream"));
        };
        streams.order(compute, streams.dispatch.raw())?;
        streams.order(compute, streams.combine.raw())?;
        let mut run = Self {
            pipeline,
            streams,
            compute,
            dispatch: streams.queue(&streams.dispatch),
            combine: streams.queue(&streams.combine),
            origin: None,
        };
        // SAFETY: the queue's stream is live.
        let capturing = unsafe { run.gpu().device(super::OP)?.is_capturing(compute)? };
        if pipeline.timeline.is_some() && !capturing {
            run.origin = Some((Instant::now(), Arc::new(run.time(compute)?)));
        }
        Ok(run)
    }

    fn gpu(&self) -> &crate::gpu::Gpu {
        self.pipeline.ep.inner.gpu.as_ref().expect("a pipeline with streams is on a GPU")
    }

    fn time(&self, stream: CUstream) -> Result<Point> {
        // SAFETY: a live stream: see `Streams::order`.
        Ok(unsafe { self.streams.times.record(stream)? })
    }

    /// The start of a stage on `stream`, which first waits for `after`.
    fn start(&self, after: CUstream, stream: CUstream) -> Result<Option<Point>> {
        if self.origin.is_none() {
            return Ok(None);
        }
        if after != stream {
            self.streams.order(after, stream)?;
        }
        self.time(stream).map(Some)
    }

    /// The end of a stage that began with `start`.
    fn note(
        &self,
        (stage, batch): (Stage, usize),
        start: Option<Point>,
        stream: CUstream,
    ) -> Result<()> {
        let (Some(start), Some(timeline), Some(origin)) =
            (start, &self.pipeline.timeline, &self.origin)
        else {
            return Ok(());
        };
        let end = self.time(stream)?;
        let (rank, origin) = (self.pipeline.ep.rank(), origin.clone());
        timeline.defer(Pending { rank, stage, batch, origin, start, end });
        Ok(())
    }

    /// Rows that the caller's stream may use.
    fn dispatch(
        &self,
        batch: usize,
        sends: &[(Payload<'_>, Route<'_>)],
    ) -> Result<Dispatched, Failed> {
        let submit = || {
            let opts = &self.pipeline.dispatch;
            let (side, lane) = (self.streams.dispatch.raw(), self.gpu().lane_stream(opts.lane));
            let start = self.start(side, lane)?;
            let (payload, route) = sends[batch];
            let send = self.pipeline.ep.dispatch_send(&self.dispatch, payload, route, opts)?;
            let rows = send.recv(&self.dispatch)?;
            self.note((Stage::Dispatch, batch), start, lane)?;
            Ok(rows)
        };
        submit().map_err(|error| self.pipeline.failed(Stage::Dispatch, batch, error))
    }

    fn submit_experts<E: Display>(
        &self,
        batch: usize,
        rows: &mut Dispatched,
        queue: &Queue,
        experts: &mut impl FnMut(usize, &mut Dispatched) -> Result<(), E>,
    ) -> Result<(), PipelineError<E>> {
        let failed = |error| self.pipeline.failed(Stage::Experts, batch, error);
        // Peers may have the slot only after the experts, should combine not be reached.
        rows.slot.used_on(queue);
        self.streams.order(self.streams.dispatch.raw(), self.compute).map_err(failed)?;
        let start = self.start(self.compute, self.compute).map_err(failed)?;
        let panicking = Panicking(&self.pipeline.ep);
        let outcome = experts(batch, rows);
        drop(panicking);
        outcome.map_err(|error| self.pipeline.experts_failed(batch, error))?;
        self.note((Stage::Experts, batch), start, self.compute).map_err(failed)?;
        self.streams.order(self.compute, self.streams.combine.raw()).map_err(failed)?;
        Ok(())
    }

    fn combine(&self, batch: usize, rows: Dispatched, out: Combined<'_>) -> Result<Event, Failed> {
        let submit = || {
            let opts = &self.pipeline.combine;
            let lane = self.gpu().lane_stream(opts.lane.unwrap_or(1));
            let start = self.start(self.streams.combine.raw(), lane)?;
            let event = rows.combine(&self.combine, out, opts)?;
            self.note((Stage::Combine, batch), start, lane)?;
            Ok(event)
        };
        submit().map_err(|error| self.pipeline.failed(Stage::Combine, batch, error))
    }

    /// The caller's stream waits for all sums.
    fn end(&self) -> Result<()> {
        self.streams.order(self.streams.combine.raw(), self.compute)
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        // However the run ends: what it has submitted uses the caller's memory, and a capture that
        // spread to the side streams has to come back.
        for side in [&self.streams.dispatch, &self.streams.combine] {
            if let Err(error) = self.streams.order(side.raw(), self.compute) {
                tracing::warn!("the caller's stream does not wait for the pipeline: {error}");
            }
        }
    }
}
