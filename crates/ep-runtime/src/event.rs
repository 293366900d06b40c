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
use crate::gpu::{CAPTURED, Point, Ticket};

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
    /// Nothing will tell of it.
    #[cfg(feature = "cuda")]
    Failed(Arc<EpError>),
}

/// An operation on a stream with a verdict, and its lane.
#[cfg(feature = "cuda")]
pub(crate) type Judged = (&'static str, usize, Ticket);

#[cfg(feature = "cuda")]
#[derive(Debug)]
struct OnStream {
    ep: Arc<Inner>,
    point: Arc<dyn Point>,
    /// The operations whose verdicts the event tells: a combine's, and before it that of the dispatch whose
    /// rows it combines, which need not be any if the combine is good by itself.
    operations: [Option<Judged>; 2],
    captured: bool,
}

impl Event {
    pub(crate) fn done() -> Self {
        Self(Kind::Done)
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn on_stream(
        ep: Arc<Inner>,
        point: Arc<dyn Point>,
        operations: [Option<Judged>; 2],
        captured: bool,
    ) -> Self {
        Self(Kind::Stream(Arc::new(OnStream { ep, point, operations, captured })))
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn failed(error: EpError) -> Self {
        Self(Kind::Failed(Arc::new(error)))
    }

    /// Whether it has happened, or never will because the group or the stream failed. Never true for an operation
    /// that was captured into a graph.
    pub fn ready(&self) -> bool {
        match &self.0 {
            Kind::Done => true,
            #[cfg(feature = "cuda")]
            Kind::Stream(on) => {
                !on.captured
                    && (on.point.is_done().unwrap_or(true) || on.ep.usable("event").is_err())
            }
            #[cfg(feature = "cuda")]
            Kind::Failed(_) => true,
        }
    }

    /// Waits for it on the calling thread.
    ///
    /// # Errors
    /// When it has not happened within `timeout`, or never will because the group or the stream failed;
    /// when the ranks refused the operation, or the dispatch whose rows it combined, which only then is
    /// known to the host, and is told however late and often it is asked for; but
    /// [`EpError::Forgotten`](crate::EpError::Forgotten) where nobody looked at the lane for too long; for
    /// an operation that was captured into a graph.
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        match &self.0 {
            Kind::Done => {
                let _ = timeout;
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Kind::Stream(on) => on.wait(timeout),
            #[cfg(feature = "cuda")]
            Kind::Failed(error) => Err(EpError::clone(error)),
        }
    }

    /// Makes everything submitted to `queue` from now on happen after it.
    ///
    /// # Errors
    /// When the queue belongs to another device, or is the host and the wait fails; when it never happens
    /// because the stream failed.
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
            #[cfg(feature = "cuda")]
            Kind::Failed(error) => Err(EpError::clone(error)),
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
        self.operations.iter().flatten().try_for_each(|&(op, lane, ticket)| {
            let silent = || Err(self.ep.corrupt(op, "the GPU ended it without a verdict".into()));
            gpu.verdict(&self.ep, op, lane, ticket).unwrap_or_else(silent)
        })
    }
}
