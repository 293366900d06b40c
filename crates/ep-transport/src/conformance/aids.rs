//! What the checks share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Outcome;
use crate::{Deadline, Group, Link, Put, Queue, Reach, Transport, TransportError, WindowSpec};

/// Fails the check unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}
pub(super) use ensure;

pub(super) const QUEUE: Queue = Queue::host();

/// One rank of a check.
pub(super) struct Rank<'a> {
    pub group: Group,
    pub transport: &'a dyn Transport,
    pub limit: Duration,
}

impl Rank<'_> {
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    pub fn world(&self) -> usize {
        self.group.world()
    }

    pub fn last(&self) -> usize {
        self.world() - 1
    }

    pub fn all(&self) -> Vec<usize> {
        (0..self.world()).collect()
    }

    pub fn deadline(&self) -> Deadline {
        Deadline::after(self.limit)
    }

    pub fn open(&self, bytes: usize, flags: u32) -> Result<End, String> {
        self.open_in(&self.group, bytes, flags)
    }

    pub fn open_in(&self, group: &Group, bytes: usize, flags: u32) -> Result<End, String> {
        let link = self.transport.open(group, WindowSpec { bytes, flags }, self.deadline());
        let link = link.map_err(|e| format!("open: {e}"))?;
        Ok(End { link, limit: self.limit })
    }

    /// Runs `count` rounds or, where a transport is slow, as many as fit a few seconds; as many on
    /// every rank.
    pub fn paced(&self, count: usize, round: impl FnMut(usize) -> Outcome) -> Outcome {
        const FIRST: usize = 20;
        const TIME: Duration = Duration::from_secs(3);
        let mut round = round;
        let first = count.min(FIRST);
        let start = Instant::now();
        (0..first).try_for_each(&mut round)?;
        let took = (start.elapsed().as_nanos() as u64).to_le_bytes();
        let all = self.group.all_gather_within("check", &took, self.deadline());
        let all = all.map_err(|e| format!("pace: {e}"))?;
        let nanos = |bytes: &Vec<u8>| Some(u64::from_le_bytes(bytes.as_slice().try_into().ok()?));
        let slowest = all.iter().filter_map(nanos).max().unwrap_or(0).max(1);
        let fit = TIME.as_nanos() as u64 * first as u64 / slowest;
        (first..count.min(fit as usize)).try_for_each(round)
    }

    /// All ranks come here. Checks use it where its ordering cannot hide what they look for.
    pub fn barrier(&self) -> Outcome {
        let met = self.group.all_gather_within("check", &[], self.deadline());
        met.map(drop).map_err(|e| format!("barrier: {e}"))
    }
}

/// A rank's end of an open link.
#[derive(Clone)]
pub(super) struct End {
    pub link: Arc<dyn Link>,
    pub limit: Duration,
}

impl End {
    pub fn signal(&self, peer: usize, flag: u32) -> Outcome {
        let set = self.link.signal(&QUEUE, peer, flag);
        set.map_err(|e| format!("signal {flag} to rank {peer}: {e}"))
    }

    pub fn signal_all(&self, peers: &[usize], flag: u32) -> Outcome {
        peers.iter().try_for_each(|&peer| self.signal(peer, flag))
    }

    pub fn wait(&self, peers: &[usize], flag: u32) -> Outcome {
        self.try_wait(peers, flag, self.limit).map_err(|e| format!("flag {flag}: {e}"))
    }

    pub fn try_wait(
        &self,
        peers: &[usize],
        flag: u32,
        limit: Duration,
    ) -> Result<(), TransportError> {
        self.link.wait(&QUEUE, "check", peers, flag, Deadline::after(limit))
    }

    /// Brings bytes of the own window to a peer's, by whatever way reaches it.
    pub fn send(&self, peer: usize, from: usize, to: usize, bytes: usize) -> Outcome {
        match self.link.reach(peer) {
            Reach::Direct(theirs) => {
                let own = self.link.window();
                if from + bytes > own.bytes || to + bytes > theirs.bytes {
                    return Err("a window is smaller than was asked for".into());
                }
                // SAFETY: both ranges were just checked to lie in mapped windows; nobody else
                // writes them meanwhile by the check's protocol.
                unsafe {
                    let (from, to) = (own.base.as_ptr().add(from), theirs.base.as_ptr().add(to));
                    std::ptr::copy(from, to, bytes);
                }
                Ok(())
            }
            Reach::Bulk | Reach::Paired => self.put(peer, from, to, bytes),
        }
    }

    pub fn put(&self, peer: usize, from: usize, to: usize, bytes: usize) -> Outcome {
        let put = Put { peer, from, to, bytes };
        self.link.put(&QUEUE, put).map_err(|e| format!("{put:?}: {e}"))
    }

    pub fn flush(&self) -> Outcome {
        let done = self.link.flush(&QUEUE, Deadline::after(self.limit));
        done.map_err(|e| format!("flush: {e}"))
    }

    /// Fills a piece of the own window with what `seed` gives.
    pub fn fill(&self, at: usize, bytes: usize, seed: u64) {
        let own = self.link.window();
        assert!(at + bytes <= own.bytes, "a check leaves its window");
        for i in 0..bytes {
            // SAFETY: inside the mapped window, checked above; by the check's protocol nobody
            // else accesses the piece meanwhile.
            unsafe { own.base.as_ptr().add(at + i).write(pattern(seed, i)) };
        }
    }

    /// Compares a piece of the own window with what `seed` gives.
    pub fn expect(&self, at: usize, bytes: usize, seed: u64, what: &str) -> Outcome {
        expect_at(&self.link.window(), at, bytes, seed, what)
    }
}

/// Compares a piece of a mapped window with what `seed` gives.
pub(super) fn expect_at(
    window: &crate::Mapping,
    at: usize,
    bytes: usize,
    seed: u64,
    what: &str,
) -> Outcome {
    ensure!(at + bytes <= window.bytes, "{what}: a window is smaller than was asked for");
    for i in 0..bytes {
        // SAFETY: inside a mapped window, checked above. A transport that breaks its promises may
        // race here; that is what the check is about, and a byte read wrong is reported.
        let found = unsafe { window.base.as_ptr().add(at + i).read_volatile() };
        let expected = pattern(seed, i);
        ensure!(found == expected, "{what}: byte {i} is {found}, should be {expected}");
    }
    Ok(())
}

/// Byte `i` of the pattern of `seed`; never 0, so that a window's initial state is told apart.
pub(super) fn pattern(seed: u64, i: usize) -> u8 {
    let word = (seed ^ (i as u64 / 8)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word.rotate_left(31).to_le_bytes()[i % 8] | 1).max(1)
}

/// A seed for what `source` sends to `target` in `round`.
pub(super) fn seed(round: usize, source: usize, target: usize) -> u64 {
    (round as u64) << 32 | (source as u64) << 16 | target as u64
}
