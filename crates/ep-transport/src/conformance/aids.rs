//! What the checks share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::access::{Access, access};
use super::{Outcome, Queues};
use crate::{
    Deadline, Group, Link, Mapping, Memory, Put, Queue, Reach, Transport, TransportError,
    WindowSpec,
};

/// Fails the check unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}
pub(super) use ensure;

/// One rank of a check.
pub(super) struct Rank<'a> {
    pub group: Group,
    pub transport: &'a dyn Transport,
    pub limit: Duration,
    pub queues: Queues,
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
        let access = access(&*link, self.queues).map_err(|e| e.to_string())?;
        if link.memory() != Memory::Host {
            // Taking memory may wait for what others' streams wait for: all do it first.
            let met = group.all_gather_within("check", &[], self.deadline());
            met.map_err(|e| format!("open: {e}"))?;
        }
        let group = (self.queues == Queues::Streams).then(|| group.clone());
        Ok(End { access, link, limit: self.limit, group })
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
    // Dropped before the link: it waits for what was submitted to a stream.
    access: Arc<dyn Access>,
    pub link: Arc<dyn Link>,
    pub limit: Duration,
    /// Who knows why a stream was released.
    group: Option<Group>,
}

impl End {
    /// The same with a queue of its own.
    pub fn beside(&self) -> Result<Self, String> {
        let access = self.access.another().map_err(|e| e.to_string())?;
        Ok(Self { access, ..self.clone() })
    }

    pub fn queue(&self) -> Queue {
        self.access.queue()
    }

    /// Whether operations are on a stream.
    pub fn streams(&self) -> bool {
        self.group.is_some()
    }

    fn deadline(&self) -> Deadline {
        Deadline::after(self.limit)
    }

    pub fn signal(&self, peer: usize, flag: u32) -> Outcome {
        let set = self.link.signal(&self.queue(), peer, flag);
        set.map_err(|e| format!("signal {flag} to rank {peer}: {e}"))
    }

    pub fn signal_all(&self, peers: &[usize], flag: u32) -> Outcome {
        peers.iter().try_for_each(|&peer| self.signal(peer, flag))
    }

    /// Puts a wait on the queue: what comes after happens after it. On the host queue that is a
    /// wait; on a stream whether it failed is seen by the next [`End::wait`].
    pub fn order(&self, peers: &[usize], flag: u32) -> Outcome {
        self.submit_wait(peers, flag, self.limit).map_err(|e| format!("flag {flag}: {e}"))
    }

    fn submit_wait(
        &self,
        peers: &[usize],
        flag: u32,
        limit: Duration,
    ) -> Result<(), TransportError> {
        self.link.wait(&self.queue(), "check", peers, flag, Deadline::after(limit))
    }

    /// Waits, and has waited when it returns.
    pub fn wait(&self, peers: &[usize], flag: u32) -> Outcome {
        self.try_wait(peers, flag, self.limit).map_err(|e| format!("flag {flag}: {e}"))
    }

    pub fn try_wait(
        &self,
        peers: &[usize],
        flag: u32,
        limit: Duration,
    ) -> Result<(), TransportError> {
        self.submit_wait(peers, flag, limit)?;
        self.released(peers)
    }

    /// Waits until everything on the queue has happened; fails with the group's error if waits were
    /// released because it failed.
    #[cfg(feature = "cuda")]
    fn released(&self, peers: &[usize]) -> Result<(), TransportError> {
        let (Some(group), Some(side)) = (&self.group, self.link.stream_side()) else {
            return Ok(());
        };
        let mut poisoned = [0; 4];
        // The watchdog of the link ends what cannot end within the limit.
        let deadline = Deadline::after(self.limit * 2);
        self.access.read(side.poisoned as *const u8, &mut poisoned, deadline)?;
        if poisoned == [0; 4] {
            return Ok(());
        }
        group.health().check_waiting("check", peers)?;
        let detail = "a stream was released, but the group has not failed".into();
        Err(TransportError::Unsupported { op: "check", detail })
    }

    #[cfg(not(feature = "cuda"))]
    fn released(&self, _peers: &[usize]) -> Result<(), TransportError> {
        Ok(())
    }

    /// Brings bytes of the own window to a peer's, by whatever way reaches it.
    pub fn send(&self, peer: usize, from: usize, to: usize, bytes: usize) -> Outcome {
        match self.link.reach(peer) {
            Reach::Direct(theirs) => {
                let own = self.link.window();
                if from + bytes > own.bytes || to + bytes > theirs.bytes {
                    return Err("a window is smaller than was asked for".into());
                }
                let from = own.base.as_ptr().wrapping_add(from);
                let to = theirs.base.as_ptr().wrapping_add(to);
                let sent = self.access.copy(to, from, bytes, self.deadline());
                sent.map_err(|e| format!("a copy into the window of rank {peer}: {e}"))
            }
            Reach::Bulk | Reach::Paired => self.put(peer, from, to, bytes),
        }
    }

    pub fn put(&self, peer: usize, from: usize, to: usize, bytes: usize) -> Outcome {
        let put = Put { peer, from, to, bytes };
        self.link.put(&self.queue(), put).map_err(|e| format!("{put:?}: {e}"))
    }

    pub fn flush(&self) -> Outcome {
        let done = self.link.flush(&self.queue(), self.deadline());
        done.map_err(|e| format!("flush: {e}"))
    }

    /// Fills a piece of the own window with what `seed` gives.
    pub fn fill(&self, at: usize, bytes: usize, seed: u64) -> Outcome {
        let own = self.link.window();
        ensure!(at + bytes <= own.bytes, "a window is smaller than was asked for");
        let data: Vec<u8> = (0..bytes).map(|i| pattern(seed, i)).collect();
        let done = self.access.write(own.base.as_ptr().wrapping_add(at), &data, self.deadline());
        done.map_err(|e| format!("writing the own window: {e}"))
    }

    /// What is in a piece of a mapped window, once everything on the queue has happened.
    pub fn read(&self, window: &Mapping, at: usize, bytes: usize) -> Result<Vec<u8>, String> {
        ensure!(at + bytes <= window.bytes, "a window is smaller than was asked for");
        let mut data = vec![0; bytes];
        let from = window.base.as_ptr().wrapping_add(at);
        let done = self.access.read(from, &mut data, self.deadline());
        done.map_err(|e| format!("reading a window: {e}"))?;
        Ok(data)
    }

    /// Compares a piece of the own window with what `seed` gives.
    pub fn expect(&self, at: usize, bytes: usize, seed: u64, what: &str) -> Outcome {
        self.expect_at(&self.link.window(), at, bytes, seed, what)
    }

    /// Compares a piece of a mapped window with what `seed` gives.
    pub fn expect_at(
        &self,
        window: &Mapping,
        at: usize,
        bytes: usize,
        seed: u64,
        what: &str,
    ) -> Outcome {
        let found = self.read(window, at, bytes).map_err(|e| format!("{what}: {e}"))?;
        for (i, found) in found.into_iter().enumerate() {
            let expected = pattern(seed, i);
            if found != expected {
                // Waits on a stream that did not wait would be the cause.
                self.released(&[]).map_err(|e| format!("{what}: {e}"))?;
            }
            ensure!(found == expected, "{what}: byte {i} is {found}, should be {expected}");
        }
        Ok(())
    }
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
