//! Where memory of links that were dropped goes until it can be given back.
//!
//! Unmapping memory of a GPU or unlocking that of the host may wait for whatever was submitted to the
//! GPUs of this process, waits for flags among it. Whoever drops a link may be the one that others wait
//! for, so it is a thread of its own that gives memory back, when no stream of a link of this process is
//! seen waiting.

use std::ops::Deref;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::watchdog::Shared;
use crate::Deadline;

/// How often streams are looked at while some wait.
const LOOKING: Duration = Duration::from_millis(1);

struct Graveyard {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// The links of this process.
    links: Mutex<Vec<Weak<Shared>>>,
}

struct Queue {
    waiting: Vec<Box<dyn Send>>,
    /// A thread is there to see to them.
    thread: bool,
}

static GRAVEYARD: Graveyard = Graveyard {
    queue: Mutex::new(Queue { waiting: Vec::new(), thread: false }),
    changed: Condvar::new(),
    links: Mutex::new(Vec::new()),
};

/// Something that is given back by a thread of its own after it was dropped.
#[derive(Debug)]
pub(crate) struct Buried<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> Buried<T> {
    pub fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Send + 'static> Deref for Buried<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("there until it is dropped")
    }
}

impl<T: Send + 'static> Drop for Buried<T> {
    fn drop(&mut self) {
        if let Some(value) = self.0.take() {
            GRAVEYARD.take(Box::new(value));
        }
    }
}

/// Drops memory of a GPU, or what else a driver frees only when its work is done, on a thread of its own
/// when no stream of a link of this process is seen waiting for a flag: whoever frees it at once may wait
/// for streams that wait for its own next call. A link that is opened waits for that.
pub fn drop_when_quiet(value: impl Send + 'static) {
    drop(Buried::new(value));
}

/// Streams of this link are looked at from now on.
pub(super) fn watch(link: &Arc<Shared>) {
    let mut links = GRAVEYARD.links.lock();
    links.retain(|link| link.strong_count() > 0);
    links.push(Arc::downgrade(link));
}

/// Waits, bounded, until everything that was dropped before has been given back.
pub(super) fn settle(limit: Duration) {
    let deadline = Deadline::after(limit);
    let mut queue = GRAVEYARD.queue.lock();
    while queue.thread && !deadline.expired() {
        GRAVEYARD.changed.wait_for(&mut queue, deadline.remaining());
    }
}

impl Graveyard {
    fn take(&'static self, value: Box<dyn Send>) {
        let mut queue = self.queue.lock();
        queue.waiting.push(value);
        if queue.thread {
            return;
        }
        let thread = std::thread::Builder::new().name("ep-reaper".into());
        queue.thread = thread.spawn(|| self.run()).is_ok();
        if !queue.thread {
            // Better late than never.
            let values = std::mem::take(&mut queue.waiting);
            drop(queue);
            drop(values);
        }
    }

    fn run(&self) {
        loop {
            if !self.quiet() {
                std::thread::sleep(LOOKING);
                continue;
            }
            let mut queue = self.queue.lock();
            let values = std::mem::take(&mut queue.waiting);
            if values.is_empty() {
                queue.thread = false;
                self.changed.notify_all();
                return;
            }
            drop(queue);
            drop(values);
        }
    }

    /// Whether no stream of this process is seen waiting for a flag, or for its sources to be free.
    fn quiet(&self) -> bool {
        let links: Vec<_> = self.links.lock().iter().filter_map(Weak::upgrade).collect();
        links.iter().all(|link| !link.board.is_awaited())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tells(Arc<Mutex<Vec<(u32, bool)>>>, u32);

    impl Drop for Tells {
        fn drop(&mut self) {
            let reaper = std::thread::current().name() == Some("ep-reaper");
            self.0.lock().push((self.1, reaper));
        }
    }

    #[test]
    fn what_is_dropped_is_given_back_by_another_thread_in_order() {
        let told = Arc::new(Mutex::new(Vec::new()));
        for round in 0..50 {
            let things = [0, 1].map(|i| Buried::new(Tells(told.clone(), 2 * round + i)));
            assert_eq!(things[1].1, 2 * round + 1);
            drop(things);
            if round % 7 == 0 {
                settle(Duration::from_secs(20));
                assert_eq!(told.lock().len() as u32, 2 * round + 2);
            }
        }
        settle(Duration::from_secs(20));
        let all: Vec<(u32, bool)> = (0..100).map(|i| (i, true)).collect();
        assert_eq!(*told.lock(), all);
    }
}
