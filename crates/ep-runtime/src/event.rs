//! Completion of an operation.

#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::time::Duration;

use ep_transport::Queue;

#[cfg(feature = "cuda")]
use crate::EpError;
use crate::Result;
#[cfg(feature = "cuda")]
use crate::ep::Inner;
#[cfg(feature = "cuda")]
use crate::gpu::{Point, Ticket};

/// The point at which an operation's results are there and its inputs may be reused.
///
/// On the host queue operations are complete when their call returns, so the event has happened. On
/// a stream it happens when the stream gets there.
#[derive(Clone, Debug)]
pub struct Event(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Done,
    #[cfg(feature = "cuda")]
    Stream(Arc<OnStream>),
}

#[cfg(feature = "cuda")]
#[derive(Debug)]
struct OnStream {
    ep: Arc<Inner>,
    point: Arc<dyn Point>,
    /// The operation whose verdict the event tells, and its lane.
    operation: Option<(&'static str, usize, Ticket)>,
    captured: bool,
}

#[cfg(feature = "cuda")]
const CAPTURED: &str = "the operation was captured into a graph: wait for the graph's launch";

impl Event {
    pub(crate) fn done() -> Self {
        Self(Kind::Done)
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn on_stream(
        ep: Arc<Inner>,
        point: Arc<dyn Point>,
        operation: Option<(&'static str, usize, Ticket)>,
        captured: bool,
    ) -> Self {
        Self(Kind::Stream(Arc::new(OnStream { ep, point, operation, captured })))
    }

    /// Whether it has happened, or never will because the group failed. Never true for an operation
    /// that was captured into a graph.
    pub fn ready(&self) -> bool {
        match &self.0 {
            Kind::Done => true,
            #[cfg(feature = "cuda")]
            Kind::Stream(on) => {
                !on.captured
                    && (on.point.is_done().unwrap_or(true) || on.ep.usable("event").is_err())
            }
        }
    }

    /// Waits for it on the calling thread.
    ///
    /// # Errors
    /// When it has not happened within `timeout`, or never will because the group failed; when the
    /// ranks refused the operation, which only then is known to the host; for an operation that was
    /// captured into a graph.
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        match &self.0 {
            Kind::Done => {
                let _ = timeout;
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Kind::Stream(on) => on.wait(timeout),
        }
    }

    /// Makes everything submitted to `queue` from now on happen after it.
    ///
    /// # Errors
    /// When the queue belongs to another device, or is the host and the wait fails.
    pub fn order(&self, queue: &Queue) -> Result<()> {
        match &self.0 {
            Kind::Done => {
                let _ = queue;
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Kind::Stream(on) => match queue.raw() {
                // SAFETY: a queue's stream is live.
                Some((stream, _)) => unsafe { on.point.order(stream) }.map_err(EpError::from),
                None => on.wait(on.ep.timeout()),
            },
        }
    }
}

#[cfg(feature = "cuda")]
impl OnStream {
    fn wait(&self, timeout: Duration) -> Result<()> {
        const OP: &str = "Event::wait";
        if self.captured {
            return Err(EpError::argument(OP, CAPTURED));
        }
        let Some(gpu) = &self.ep.gpu else { return Ok(()) };
        let deadline = ep_transport::Deadline::after(timeout);
        gpu.await_point(&self.ep, OP, &*self.point, deadline)?;
        match self.operation {
            Some((op, lane, ticket)) => gpu.verdict(&self.ep, op, lane, ticket).unwrap_or(Ok(())),
            None => Ok(()),
        }
    }
}
