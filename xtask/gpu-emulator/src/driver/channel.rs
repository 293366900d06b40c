//! Hardware queues: what streams submit is done in the order in which it was submitted to their queue.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::config::config;
use super::context::Core;
use super::point::Point;
use super::work::Work;

/// Something submitted.
pub struct Op {
    pub work: Work,
    pub core: Arc<Core>,
    pub done: Arc<Point>,
}

/// A hardware queue, with a thread once something was submitted.
pub struct Channel {
    queue: Mutex<Queue>,
    bell: Condvar,
    seed: u64,
}

struct Queue {
    ops: VecDeque<Op>,
    thread: bool,
    closed: bool,
    last: Arc<Point>,
}

/// Draws, for delays.
pub struct Draws(u64);

impl Draws {
    pub fn new(seed: u64) -> Self {
        // Any seed but 0 will do for what follows.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `most` (xorshift64, Marsaglia 2003).
    pub fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % most.max(1)
    }

    /// Lets some time go by, now and then.
    pub fn delay(&mut self) {
        let longest = config().map_or(0, |config| config.delay_us);
        if longest == 0 {
            return;
        }
        match self.below(16) {
            0 => std::thread::sleep(Duration::from_micros(self.below(longest) + 1)),
            1..=4 => std::thread::yield_now(),
            _ => {}
        }
    }
}

impl Channel {
    pub fn new(seed: u64) -> Arc<Self> {
        let last = Arc::new(Point::past());
        let queue = Queue { ops: VecDeque::new(), thread: false, closed: false, last };
        Arc::new(Self { queue: Mutex::new(queue), bell: Condvar::new(), seed })
    }

    /// Submits operations, one directly behind the other.
    pub fn submit(self: &Arc<Self>, ops: impl IntoIterator<Item = Op>) {
        let mut queue = self.queue.lock();
        queue.ops.extend(ops);
        if let Some(last) = queue.ops.back() {
            queue.last = last.done.clone();
        }
        if !queue.thread {
            queue.thread = true;
            let channel = self.clone();
            let thread = std::thread::Builder::new().name("gpu-queue".into());
            thread.spawn(move || channel.run()).expect("a thread");
        }
        self.bell.notify_one();
    }

    /// The end of what was submitted so far.
    pub fn last(&self) -> Arc<Point> {
        self.queue.lock().last.clone()
    }

    /// Nothing more will be submitted.
    pub fn close(&self) {
        self.queue.lock().closed = true;
        self.bell.notify_one();
    }

    fn next(&self) -> Option<Op> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(op) = queue.ops.pop_front() {
                return Some(op);
            }
            if queue.closed {
                queue.thread = false;
                return None;
            }
            self.bell.wait(&mut queue);
        }
    }

    fn run(&self) {
        let mut draws = Draws::new(self.seed);
        while let Some(Op { work, core, done }) = self.next() {
            if core.check().is_ok() {
                draws.delay();
                work.run(&core);
            }
            // What the work kept is let go before anybody hears that it is done.
            drop(work);
            done.complete();
        }
    }
}
