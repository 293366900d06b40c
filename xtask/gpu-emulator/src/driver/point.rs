//! Points in streams.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// A point that a stream gets to once.
#[derive(Debug, Default)]
pub struct Point {
    /// Nanoseconds of the monotonic clock, 1 at least, once it happened.
    at: AtomicU64,
    lock: Mutex<()>,
    bell: Condvar,
}

/// Nanoseconds of the monotonic clock.
fn now() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64 + 1
}

impl Point {
    /// One that has happened.
    pub fn past() -> Self {
        let point = Self::default();
        point.complete();
        point
    }

    pub fn complete(&self) {
        let _guard = self.lock.lock();
        self.at.store(now(), Ordering::Release);
        self.bell.notify_all();
    }

    pub fn is_done(&self) -> bool {
        self.at.load(Ordering::Acquire) != 0
    }

    /// When it happened, nanoseconds.
    pub fn at(&self) -> u64 {
        self.at.load(Ordering::Acquire)
    }

    pub fn wait(&self) {
        while !self.wait_for(Duration::from_secs(3600)) {}
    }

    /// Whether it happens within `limit`.
    pub fn wait_for(&self, limit: Duration) -> bool {
        if self.is_done() {
            return true;
        }
        let mut guard = self.lock.lock();
        let until = Instant::now() + limit;
        while !self.is_done() {
            if self.bell.wait_until(&mut guard, until).timed_out() {
                return self.is_done();
            }
        }
        true
    }
}
