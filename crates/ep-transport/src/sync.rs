//! The words that ranks share, and the futex behind them.
//!
//! Under `--cfg loom` the same flag code runs on loom's atomics, and the futex becomes a mutex and
//! a condition variable that never time out: a lost wake-up is then a deadlock that loom reports.

pub(crate) use imp::Words;

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::Ordering;

#[cfg(loom)]
pub(crate) use loom::sync::atomic::Ordering;

/// Every word has a cache line of its own, so that sources do not disturb each other.
pub(crate) const LINE: usize = 64;

#[cfg(not(loom))]
mod imp {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    use rustix::thread::futex;

    use super::LINE;
    use crate::host_link::Region;

    /// Atomic words in shared memory, one per line. Word 0 is the one to park on.
    #[derive(Clone, Debug)]
    pub(crate) struct Words {
        region: Arc<dyn Region>,
        offset: usize,
        count: usize,
    }

    impl Words {
        /// The `count` words that start `offset` bytes into `region`; none if they do not fit
        /// there or are not aligned.
        pub(crate) fn new(region: Arc<dyn Region>, offset: usize, count: usize) -> Option<Self> {
            let end = count.checked_mul(LINE)?.checked_add(offset)?;
            let aligned =
                (region.base().as_ptr() as usize).checked_add(offset)?.is_multiple_of(LINE);
            (count > 0 && end <= region.bytes() && aligned).then_some(Self {
                region,
                offset,
                count,
            })
        }

        pub(crate) fn get(&self, index: usize) -> &AtomicU32 {
            assert!(index < self.count, "word {index} of {}", self.count);
            // SAFETY: `new` checked that `count` aligned lines lie inside the region, which stays
            // mapped while `self.region` is held; these bytes are only ever used as atomics.
            unsafe {
                let word = self.region.base().as_ptr().add(self.offset + index * LINE);
                AtomicU32::from_ptr(word.cast())
            }
        }

        /// Sleeps while word 0 is `seen`, for `bound` at most. May return early.
        pub(crate) fn park(&self, seen: u32, bound: Duration) {
            let bound = futex::Timespec {
                tv_sec: bound.as_secs().min(3600) as i64,
                tv_nsec: bound.subsec_nanos().into(),
            };
            // Not the private kind: the waker may be another process. Whatever the outcome, the
            // caller looks at its flags again.
            let _ = futex::wait(self.get(0), futex::Flags::empty(), seen, Some(&bound));
        }

        /// Wakes everyone who sleeps on word 0.
        pub(crate) fn unpark(&self) {
            let _ = futex::wake(self.get(0), futex::Flags::empty(), i32::MAX as u32);
        }
    }
}

#[cfg(loom)]
mod imp {
    use std::sync::Arc;
    use std::time::Duration;

    use loom::sync::atomic::{AtomicU32, Ordering};
    use loom::sync::{Condvar, Mutex};

    #[derive(Clone, Debug)]
    pub(crate) struct Words(Arc<Shared>);

    #[derive(Debug)]
    struct Shared {
        words: Vec<AtomicU32>,
        sleep: Mutex<()>,
        wake: Condvar,
    }

    impl Words {
        pub(crate) fn model(count: usize) -> Self {
            let words = (0..count).map(|_| AtomicU32::new(0)).collect();
            Self(Arc::new(Shared { words, sleep: Mutex::new(()), wake: Condvar::new() }))
        }

        pub(crate) fn get(&self, index: usize) -> &AtomicU32 {
            &self.0.words[index]
        }

        // As in the kernel: compare and go to sleep are one step under the lock that wakers take.
        // The comparison is Relaxed, the weakest that a futex could promise.
        pub(crate) fn park(&self, seen: u32, _bound: Duration) {
            let guard = self.0.sleep.lock().expect("not poisoned");
            if self.get(0).load(Ordering::Relaxed) == seen {
                drop(self.0.wake.wait(guard).expect("not poisoned"));
            }
        }

        pub(crate) fn unpark(&self) {
            let _guard = self.0.sleep.lock().expect("not poisoned");
            self.0.wake.notify_all();
        }
    }
}
