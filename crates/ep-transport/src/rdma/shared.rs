//! What a link and its proxies share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::layout::{Layout, Words};
use crate::ring::Command;
use crate::{Deadline, Group, Result, TransportError};

/// What proxies are at.
pub(super) const OP: &str = "rdma";
/// The longest that proxies are waited for before a peer counts as gone.
const SETTLE: Duration = Duration::from_secs(2);

/// A command, as it goes through the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Put { peer: usize, from: usize, to: usize, bytes: usize },
    Signal { peer: usize, flag: u32, parts: u32 },
}

impl Order {
    pub(super) fn peer(&self) -> usize {
        match self {
            Self::Put { peer, .. } | Self::Signal { peer, .. } => *peer,
        }
    }

    pub(super) fn encode(self) -> Command {
        match self {
            Self::Put { peer, from, to, bytes } => {
                [0, peer as u64, from as u64, to as u64, bytes as u64, 0, 0]
            }
            Self::Signal { peer, flag, parts } => {
                [1, peer as u64, flag.into(), parts.into(), 0, 0, 0]
            }
        }
    }

    pub(super) fn decode(command: &Command) -> Self {
        let [kind, peer, a, b, c, ..] = *command;
        let peer = peer as usize;
        if kind == 0 {
            Self::Put { peer, from: a as usize, to: b as usize, bytes: c as usize }
        } else {
            Self::Signal { peer, flag: a as u32, parts: b as u32 }
        }
    }
}

/// Raises a flag of a source here, the source second: what is due of a peer.
pub(super) type Raise = Box<dyn Fn(u32, usize) + Send + Sync>;

pub(super) struct Shared {
    pub group: Group,
    flags: u32,
    raise: Raise,
    pub layout: Layout,
    pub words: Words,
    /// Parts of a signal that have come, by flag and source: one NIC each.
    parts: Vec<AtomicU32>,
    /// Up to which command each NIC's are done.
    retired: Vec<AtomicU64>,
    /// How often each NIC's proxy has looked at everything.
    passes: Vec<AtomicU64>,
    /// Peers for which a NIC has something left to send, by NIC and peer; told before sleeps.
    unsent: Vec<AtomicBool>,
    waiters: Mutex<()>,
    progress: Condvar,
    waiting: AtomicU32,
    /// The failure of each peer, if it has failed.
    failures: Mutex<Vec<Option<TransportError>>>,
    any_failure: AtomicBool,
    pub stopping: AtomicBool,
    spin: bool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("Shared");
        out.field("rank", &self.rank()).field("retired", &self.retired).finish_non_exhaustive()
    }
}

impl Shared {
    /// `flags` are how many there are, and how one is raised.
    pub(super) fn new(
        group: Group,
        (flags, raise): (u32, Raise),
        layout: Layout,
        words: Words,
        nics: usize,
        spin: bool,
    ) -> Arc<Self> {
        let world = group.world();
        let parts = (0..world * flags as usize).map(|_| AtomicU32::new(0)).collect();
        Arc::new(Self {
            failures: Mutex::new(vec![None; world]),
            group,
            flags,
            raise,
            layout,
            words,
            parts,
            retired: (0..nics).map(|_| AtomicU64::new(0)).collect(),
            unsent: (0..nics * world).map(|_| AtomicBool::new(false)).collect(),
            passes: (0..nics).map(|_| AtomicU64::new(0)).collect(),
            waiters: Mutex::new(()),
            progress: Condvar::new(),
            waiting: AtomicU32::new(0),
            any_failure: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            spin,
        })
    }

    pub(super) fn rank(&self) -> usize {
        self.group.rank()
    }

    pub(super) fn world(&self) -> usize {
        self.group.world()
    }

    /// Whether there are cores for proxies that poll.
    pub(super) fn spins(&self) -> bool {
        self.spin
    }

    pub(super) fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Whether `peer` does nothing more: it has closed its link or left, after everything it had to do
    /// unless the group has a [fault](Shared::fault).
    pub(super) fn closed(&self, peer: usize, nic: usize) -> bool {
        self.words.closed(self.layout.credit_in(peer, nic)) || self.group.health().has_left(peer)
    }

    /// What is wrong with the group, as far as this rank has heard or found itself.
    pub(super) fn fault(&self) -> Option<TransportError> {
        self.check().and_then(|()| self.group.health().check(OP)).err()
    }

    pub(super) fn is_lost(&self, peer: usize) -> bool {
        self.group.health().is_lost(peer)
    }

    /// One NIC's part of a signal of `source` is due; raises the flag once all are. False if there
    /// is no such flag.
    pub(super) fn part_came(&self, source: usize, flag: u32, parts: u32) -> bool {
        if flag >= self.flags || parts == 0 || parts as usize > self.retired.len() {
            return false;
        }
        if parts > 1 {
            let count = &self.parts[flag as usize * self.world() + source];
            // AcqRel: whoever brings the last part has seen what came with the others.
            if count.fetch_add(1, Ordering::AcqRel) + 1 < parts {
                return true;
            }
            // The source raises a flag again only after it was consumed.
            count.store(0, Ordering::Relaxed);
        }
        (self.raise)(flag, source);
        true
    }

    /// Whether `nic` has something left to send to `peer`.
    pub(super) fn set_unsent(&self, nic: usize, peer: usize, unsent: bool) {
        self.unsent[nic * self.world() + peer].store(unsent, Ordering::Relaxed);
    }

    /// The proxy of `nic` has looked at everything once more.
    pub(super) fn passed(&self, nic: usize) {
        self.passes[nic].fetch_add(1, Ordering::Release);
    }

    /// The proxy of `nic` has ended: nobody need wait for it.
    pub(super) fn end(&self, nic: usize) {
        self.passes[nic].store(u64::MAX, Ordering::Release);
        self.retire(nic, u64::MAX);
    }

    /// Waits, not for long, until every proxy has taken whatever the NICs had to report by now.
    pub(super) fn settle(&self, wake: impl Fn()) {
        // The pass under way may have looked already.
        let of = |pass: &AtomicU64| pass.load(Ordering::Acquire).saturating_add(2);
        let goals: Vec<u64> = self.passes.iter().map(of).collect();
        let deadline = Deadline::after(SETTLE);
        let behind = || self.passes.iter().zip(&goals).any(|(p, &g)| p.load(Ordering::Acquire) < g);
        while behind() && !deadline.expired() {
            wake();
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// All commands of `nic` before `ticket` are done.
    pub(super) fn retire(&self, nic: usize, ticket: u64) {
        if self.retired[nic].swap(ticket, Ordering::SeqCst) != ticket
            && self.waiting.load(Ordering::SeqCst) > 0
        {
            // Taking the lock orders this after a waiter's look and before its sleep, or before
            // that look.
            drop(self.waiters.lock());
            self.progress.notify_all();
        }
    }

    /// Whether each NIC's commands before the given ticket are done.
    pub(super) fn are_retired(&self, tickets: &[u64]) -> bool {
        let mut all = tickets.iter().zip(&self.retired);
        all.all(|(&ticket, retired)| retired.load(Ordering::SeqCst) >= ticket)
    }

    /// The error of commands that were not done within `after`.
    pub(super) fn unanswered(&self, op: &'static str, after: Duration) -> TransportError {
        let unsent = |peer: &usize| {
            let nics = 0..self.retired.len();
            let at = |nic| &self.unsent[nic * self.world() + peer];
            nics.map(at).any(|unsent| unsent.load(Ordering::Relaxed))
        };
        let peers: Vec<usize> = (0..self.world()).filter(unsent).collect();
        TransportError::Timeout { op, peers, after, hint: " to all that was sent".into() }
    }

    /// Waits until each NIC's commands before the given ticket are done.
    pub(super) fn wait_retired(
        &self,
        op: &'static str,
        tickets: &[u64],
        deadline: Deadline,
    ) -> Result<()> {
        // What this rank saw itself says more than what it told the group of it. What is done may be
        // so because its peer is gone, which is fine in a group that is well.
        let health = || self.check().and_then(|()| self.group.health().check(op));
        let done = || self.are_retired(tickets);
        if done() {
            return health();
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let outcome = loop {
            let mut guard = self.waiters.lock();
            let health = health();
            if done() || health.is_err() {
                break health;
            }
            if deadline.expired() {
                break Err(self.unanswered(op, deadline.length()));
            }
            let slice = deadline.remaining().min(Duration::from_millis(50));
            self.progress.wait_for(&mut guard, slice);
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        outcome
    }

    /// Fails if a peer has failed.
    pub(super) fn check(&self) -> Result<()> {
        if !self.any_failure.load(Ordering::Acquire) {
            return Ok(());
        }
        match self.failures.lock().iter().flatten().next() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Records that `peer` cannot be reached and tells everyone.
    pub(super) fn fail(&self, peer: usize, error: &TransportError) {
        self.failures.lock()[peer].get_or_insert_with(|| error.clone());
        self.any_failure.store(true, Ordering::Release);
        self.group.report(error);
    }

    /// Records that nothing works any more and tells everyone.
    pub(super) fn fail_all(&self, error: &TransportError) {
        self.fail(self.rank(), error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_come_back() {
        let orders = [
            Order::Put { peer: 5, from: 1 << 40, to: 7, bytes: 123 },
            Order::Signal { peer: 1023, flag: 9, parts: 2 },
        ];
        for order in orders {
            assert_eq!(Order::decode(&order.encode()), order);
        }
    }
}
