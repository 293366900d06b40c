//! Bounds for waits.

use std::time::{Duration, Instant};

/// The moment at which a wait gives up. Every wait of this crate takes one.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    start: Instant,
    after: Duration,
}

impl Deadline {
    /// A deadline `after` from now.
    pub fn after(after: Duration) -> Self {
        Self { start: Instant::now(), after }
    }

    /// The time left, zero once it has passed.
    pub fn remaining(&self) -> Duration {
        self.after.saturating_sub(self.start.elapsed())
    }

    /// Whether the moment has passed.
    pub fn expired(&self) -> bool {
        self.remaining().is_zero()
    }

    /// The whole length of the wait, for messages.
    pub fn length(&self) -> Duration {
        self.after
    }
}
