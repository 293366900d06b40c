//! Completion of an operation.

use std::time::Duration;

use ep_transport::Queue;

use crate::Result;

/// The point at which an operation's results are there and its inputs may be reused.
///
/// On the host queue operations are complete when their call returns, so the event has happened.
#[derive(Clone, Debug)]
pub struct Event(());

impl Event {
    pub(crate) fn done() -> Self {
        Self(())
    }

    /// Whether it has happened.
    pub fn ready(&self) -> bool {
        true
    }

    /// Waits for it on the calling thread.
    ///
    /// # Errors
    /// When it has not happened within `timeout`, or never will because the group failed.
    pub fn wait(&self, _timeout: Duration) -> Result<()> {
        Ok(())
    }

    /// Makes everything submitted to `queue` from now on happen after it.
    ///
    /// # Errors
    /// When the queue belongs to another device.
    pub fn order(&self, _queue: &Queue) -> Result<()> {
        Ok(())
    }
}
