//! One order for operations that several threads submit.
//!
//! Under test the lock and the condition variable are loom's, which never time out: a lost wake-up
//! is then a deadlock that loom reports.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(test)]
use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(test))]
use std::sync::{Condvar, Mutex, MutexGuard};

use crate::{EpError, Result};

/// Operations in one order, whichever threads submit them. Clones are the same order.
///
/// Take the tickets where the order is decided, the same on all ranks; each is then redeemed by the
/// thread that submits the operation:
///
/// ```
/// use std::time::Duration;
/// use ep_runtime::sched::SubmitOrder;
///
/// let order = SubmitOrder::new();
/// let tickets: Vec<_> = (0..4).map(|layer| (layer, order.ticket())).collect();
/// let submitted = std::sync::Mutex::new(Vec::new());
/// std::thread::scope(|threads| {
///     for (layer, ticket) in tickets.into_iter().rev() {
///         let submitted = &submitted;
///         threads.spawn(move || {
///             let turn = ticket.wait(Duration::from_secs(10)).expect("in time");
///             submitted.lock().unwrap().push(layer); // ep.dispatch_send(..)
///             drop(turn);
///         });
///     }
/// });
/// assert_eq!(submitted.into_inner().unwrap(), [0, 1, 2, 3]);
/// ```
#[derive(Clone)]
pub struct SubmitOrder {
    queue: Arc<Queue>,
}

struct Queue {
    places: Mutex<Places>,
    moved: Condvar,
}

#[derive(Debug, Default)]
struct Places {
    /// The number of the next ticket.
    next: u64,
    /// Whose turn it is.
    serving: u64,
    /// Tickets behind it that were given up.
    skipped: BTreeSet<u64>,
}

impl Places {
    /// `number` is done or given up.
    fn leave(&mut self, number: u64) {
        self.skipped.insert(number);
        while self.skipped.remove(&self.serving) {
            self.serving += 1;
        }
    }
}

impl Queue {
    // A panic elsewhere leaves the places as they were before or after a step, both of which are
    // whole.
    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn leave(&self, number: u64) {
        self.places().leave(number);
        self.moved.notify_all();
    }
}

impl Default for SubmitOrder {
    fn default() -> Self {
        Self::new()
    }
}

impl SubmitOrder {
    /// An order of its own. Those of devices are [`SmBudget::order`](super::SmBudget::order).
    pub fn new() -> Self {
        let places = Mutex::new(Places::default());
        Self { queue: Arc::new(Queue { places, moved: Condvar::new() }) }
    }

    /// The next place.
    pub fn ticket(&self) -> Ticket {
        let mut places = self.queue.places();
        let number = places.next;
        places.next += 1;
        Ticket { queue: self.queue.clone(), number, redeemed: false }
    }

    /// Tickets that have neither been used up nor given up.
    pub fn pending(&self) -> u64 {
        let places = self.queue.places();
        places.next - places.serving - places.skipped.len() as u64
    }
}

impl fmt::Debug for SubmitOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SubmitOrder").finish_non_exhaustive()
    }
}

/// A place in a [`SubmitOrder`]. Dropping it gives the place up; those behind do not wait for it.
#[must_use = "dropping it gives the place up"]
pub struct Ticket {
    queue: Arc<Queue>,
    number: u64,
    redeemed: bool,
}

impl Ticket {
    /// Waits until all before have had their turn.
    ///
    /// # Errors
    /// [`EpError::OutOfTurn`] when they have not within `timeout`; the place is then given up.
    pub fn wait(mut self, timeout: Duration) -> Result<Turn> {
        let start = Instant::now();
        let mut places = self.queue.places();
        while places.serving != self.number {
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                let ahead = self.number - places.serving;
                return Err(EpError::OutOfTurn { op: "submit order", ahead, after: timeout });
            }
            let woken = self.queue.moved.wait_timeout(places, left);
            places = woken.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        drop(places);
        self.redeemed = true;
        Ok(Turn { queue: self.queue.clone(), number: self.number })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.redeemed {
            self.queue.leave(self.number);
        }
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("number", &self.number).finish_non_exhaustive()
    }
}

/// The right to submit. Drop it once the operation is submitted, before waiting for any peer.
#[must_use = "dropping it lets the next one submit"]
pub struct Turn {
    queue: Arc<Queue>,
    number: u64,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.queue.leave(self.number);
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn").field("number", &self.number).finish_non_exhaustive()
    }
}
