//! On the host: one thread communicates, the caller's runs the experts.

use std::fmt::Display;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::Instant;

use super::{Failed, Finished, MicroBatch, Panicking, Pipeline, PipelineError};
use crate::sched::timeline::Stage;
use crate::{Combined, DispatchSend, Dispatched, EpError, Payload, Queue, Result, Route};

/// What the communicating thread came to.
enum Ended {
    /// All is combined.
    Well,
    /// The experts ended the run.
    Stopped,
    Badly(Failed),
}

impl From<Failed> for Ended {
    fn from(failed: Failed) -> Self {
        Self::Badly(failed)
    }
}

/// The communicating thread's side.
struct Comm<'p, 'a> {
    pipeline: &'p Pipeline,
    sends: Vec<(Payload<'a>, Route<'a>)>,
    /// Taken one by one, in order.
    outs: std::vec::IntoIter<Combined<'a>>,
    /// To the experts, in order, and back from them.
    received: Sender<Dispatched>,
    done: Receiver<Dispatched>,
}

/// A dispatch between its halves.
struct Under {
    batch: usize,
    start: Instant,
    send: DispatchSend,
}

impl Pipeline {
    pub(super) fn run_on_host<'a, E: Display>(
        &self,
        batches: Vec<MicroBatch<'a>>,
        experts: impl FnMut(usize, &mut Dispatched) -> Result<(), E>,
    ) -> Result<Finished, PipelineError<E>> {
        let count = batches.len();
        let (to_experts, received) = channel();
        let (to_comm, done) = channel();
        let mut sends = Vec::with_capacity(count);
        let mut outs = Vec::with_capacity(count);
        for MicroBatch { payload, route, out } in batches {
            sends.push((payload, route));
            outs.push(out);
        }
        let outs = outs.into_iter();
        let comm = Comm { pipeline: self, sends, outs, received: to_experts, done };
        if count < 2 {
            // Nothing to overlap.
            return self.alone(comm, (received, to_comm), experts);
        }
        let (failed, ended) = std::thread::scope(|scope| {
            let comm = scope.spawn(move || comm.run());
            // Ends of channels are moved so that they go before the thread is waited for.
            let failed = self.experts(count, received, to_comm, experts);
            let ended = comm.join();
            (failed, ended)
        });
        match (failed, ended) {
            (_, Err(panic)) => {
                self.ep.group().abort("the communicating thread of a pipeline panicked");
                std::panic::resume_unwind(panic)
            }
            (Some(error), _) => Err(error),
            (None, Ok(Ended::Badly(failed))) => Err(failed.into()),
            (None, Ok(Ended::Well | Ended::Stopped)) => Ok(Finished::default()),
        }
    }

    /// The experts of all micro-batches, until communication ends.
    fn experts<E: Display>(
        &self,
        count: usize,
        received: Receiver<Dispatched>,
        done: Sender<Dispatched>,
        mut experts: impl FnMut(usize, &mut Dispatched) -> Result<(), E>,
    ) -> Option<PipelineError<E>> {
        for batch in 0..count {
            // Communication says itself why it ended.
            let mut rows = received.recv().ok()?;
            if let Err(error) = self.expert(batch, &mut rows, &mut experts) {
                return Some(error);
            }
            done.send(rows).ok()?;
        }
        None
    }

    fn expert<E: Display>(
        &self,
        batch: usize,
        rows: &mut Dispatched,
        experts: &mut impl FnMut(usize, &mut Dispatched) -> Result<(), E>,
    ) -> Result<(), PipelineError<E>> {
        let start = Instant::now();
        let panicking = Panicking(&self.ep);
        let outcome = experts(batch, rows);
        drop(panicking);
        self.record(Stage::Experts, batch, start);
        outcome.map_err(|error| self.experts_failed(batch, error))
    }

    /// At most one micro-batch, on this thread.
    fn alone<E: Display>(
        &self,
        mut comm: Comm<'_, '_>,
        (received, done): (Receiver<Dispatched>, Sender<Dispatched>),
        mut experts: impl FnMut(usize, &mut Dispatched) -> Result<(), E>,
    ) -> Result<Finished, PipelineError<E>> {
        drop((received, done));
        if comm.sends.is_empty() {
            return Ok(Finished::default());
        }
        let under = comm.send(0)?;
        let mut rows = comm.recv(under)?;
        self.expert(0, &mut rows, &mut experts)?;
        comm.combine(0, rows)?;
        Ok(Finished::default())
    }
}

impl Comm<'_, '_> {
    fn run(mut self) -> Ended {
        match self.all() {
            Ok(()) => Ended::Well,
            Err(ended) => ended,
        }
    }

    /// In an order that is the same on every rank, as far as ranks can see it: dispatch `i + 1` is
    /// announced before combine `i − 1`.
    fn all(&mut self) -> Result<(), Ended> {
        let count = self.sends.len();
        let first = self.send(0)?;
        self.deliver(first)?;
        for i in 0..count {
            // Experts have i, and perhaps still i - 1.
            let mut next = if i + 1 < count { Some(self.send(i + 1)?) } else { None };
            if i > 0 {
                let rows = match self.done.try_recv() {
                    Ok(rows) => rows,
                    Err(TryRecvError::Disconnected) => return self.give_up(next, Ended::Stopped),
                    // Nothing to combine yet: receive first.
                    Err(TryRecvError::Empty) => {
                        next.take().map_or(Ok(()), |next| self.deliver(next))?;
                        self.done.recv().map_err(|_| Ended::Stopped)?
                    }
                };
                if let Err(failed) = self.combine(i - 1, rows) {
                    return self.give_up(next, failed.into());
                }
            }
            next.map_or(Ok(()), |next| self.deliver(next))?;
        }
        let rows = self.done.recv().map_err(|_| Ended::Stopped)?;
        Ok(self.combine(count - 1, rows)?)
    }

    /// Ends a dispatch that nobody will use, so that its slot is free.
    fn give_up(&mut self, under: Option<Under>, ended: Ended) -> Result<(), Ended> {
        if let Some(under) = under {
            let unused = under.send.recv(&Queue::host());
            tracing::debug!("a dispatch that no experts get: {:?}", unused.map(drop));
        }
        Err(ended)
    }

    /// The first half of a dispatch.
    fn send(&mut self, batch: usize) -> Result<Under, Failed> {
        let start = Instant::now();
        let (payload, route) = self.sends[batch];
        let Pipeline { ep, dispatch, .. } = self.pipeline;
        let sent = ep.dispatch_send(&Queue::host(), payload, route, dispatch);
        match sent {
            Ok(send) => Ok(Under { batch, start, send }),
            Err(error) => Err(self.pipeline.failed(Stage::Dispatch, batch, error)),
        }
    }

    /// The second half.
    fn recv(&mut self, under: Under) -> Result<Dispatched, Failed> {
        let Under { batch, start, send } = under;
        let received = send.recv(&Queue::host());
        self.pipeline.record(Stage::Dispatch, batch, start);
        received.map_err(|error| self.pipeline.failed(Stage::Dispatch, batch, error))
    }

    fn deliver(&mut self, under: Under) -> Result<(), Ended> {
        let rows = self.recv(under)?;
        self.received.send(rows).map_err(|_| Ended::Stopped)
    }

    fn combine(&mut self, batch: usize, rows: Dispatched) -> Result<(), Failed> {
        let start = Instant::now();
        let pipeline = self.pipeline;
        let out = self.outs.next().expect("one for each micro-batch");
        let combined: Result<_, EpError> =
            rows.combine(&Queue::host(), out, &pipeline.combine).map_err(EpError::from);
        pipeline.record(Stage::Combine, batch, start);
        combined.map(drop).map_err(|error| pipeline.failed(Stage::Combine, batch, error))
    }
}
