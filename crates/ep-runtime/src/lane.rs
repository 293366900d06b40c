//! Lanes: operations on one are strictly ordered, operations on several are in flight together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ep_kernels::host::{Expander, Target};
use ep_transport::{Deadline, Queue, Reach, TransportError};
use parking_lot::{Mutex, MutexGuard};

use crate::ep::Inner;
use crate::notify::{self, Counts, Header, Phase};
use crate::{EpError, Result};

/// One lane of one rank.
#[derive(Debug)]
pub(crate) struct Lane {
    busy: AtomicBool,
    state: Mutex<LaneState>,
}

/// What a lane remembers between operations, and the buffers they share.
#[derive(Debug, Default)]
pub(crate) struct LaneState {
    sequence: u64,
    /// The slot of an operation whose second half was dropped, and who raises its `Done` yet, which
    /// the lane's next operation consumes first.
    abandoned: Option<(usize, Owing)>,
    pub headers: Vec<Header>,
    pub targets: Vec<Target>,
    pub expander: Expander,
    pub scratch: Scratch,
}

/// Whose `Done` an operation waits for yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owing {
    /// All peers'.
    All,
    /// Direct peers'; that of others was consumed.
    Direct,
}

// SAFETY: the pointers in it are scratch of one call; they are written before they are read in it.
unsafe impl Send for LaneState {}

/// Buffers of a combine.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub rows: Vec<*const u8>,
    pub biases: Vec<*const u8>,
    pub weights: Vec<f32>,
    pub order: Vec<(i32, u32)>,
    pub sources: Vec<RowSource>,
    /// Where nodes are reduced: the sum of one, the next row of each, and the rows of a token.
    pub partial: Vec<u8>,
    pub next: Vec<usize>,
    pub sums: Vec<*const u8>,
}

/// Where a home rank finds the rows of one owner.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowSource {
    pub base: *const u8,
    /// Rows that lie before this rank's (direct owners), or have been taken so far (blocks).
    pub first: usize,
    /// Rows come as one block in the order in which they are needed.
    pub block: bool,
}

impl Lane {
    pub fn new() -> Self {
        Self { busy: AtomicBool::new(false), state: Mutex::default() }
    }
}

/// The right to run the one operation a lane has in flight.
#[derive(Debug)]
pub(crate) struct LaneGuard {
    pub ep: Arc<Inner>,
    pub index: usize,
}

impl Drop for LaneGuard {
    fn drop(&mut self) {
        self.ep.lanes[self.index].busy.store(false, Ordering::Release);
    }
}

impl LaneGuard {
    /// Takes the lane and brings what was abandoned on it to its end.
    pub fn take(
        ep: &Arc<Inner>,
        op: &'static str,
        index: usize,
        deadline: Deadline,
    ) -> Result<Self> {
        let lanes = ep.lanes.len();
        let Some(lane) = ep.lanes.get(index) else {
            return Err(EpError::argument(op, format!("there is no lane {index}, only {lanes}")));
        };
        if lane.busy.swap(true, Ordering::Acquire) {
            return Err(EpError::LaneBusy { op, lane: index, lanes });
        }
        let guard = Self { ep: ep.clone(), index };
        guard.finish_abandoned(deadline)?;
        ep.usable(op)?;
        Ok(guard)
    }

    /// Brings a dispatch whose second half was dropped to its end.
    fn finish_abandoned(&self, deadline: Deadline) -> Result<()> {
        let abandoned = self.state().abandoned.take();
        if let Some((slot, owing)) = abandoned {
            let op = "the end of a dropped dispatch";
            self.wait(op, self.ep.owing(owing), Phase::Done, deadline)?;
            self.flush(deadline)?;
            self.ep.slots.give_back(slot);
        }
        Ok(())
    }

    /// Frees the slots of dropped dispatches on idle lanes, as far as that takes no wait.
    pub fn sweep(ep: &Arc<Inner>) {
        for index in 0..ep.lanes.len() {
            if ep.lanes[index].busy.swap(true, Ordering::Acquire) {
                continue;
            }
            let guard = Self { ep: ep.clone(), index };
            let abandoned = guard.state().abandoned;
            if abandoned.is_some_and(|(_, owing)| guard.ready_from(owing, Phase::Done)) {
                // An error has been told to the group, where the caller finds it.
                let _ = guard.finish_abandoned(ep.deadline());
            }
        }
    }

    /// The lane's buffers. Uncontended: the guard is the only user.
    pub fn state(&self) -> MutexGuard<'_, LaneState> {
        self.ep.lanes[self.index].state.lock()
    }

    /// Leaves the peers' `Done` to the lane's next operation, with the slot it guards.
    pub fn abandon(&self, slot: usize, owing: Owing) {
        self.state().abandoned = Some((slot, owing));
    }

    /// Sends this rank's announcement to every rank, itself included. Returns the operation's
    /// number on this lane.
    pub fn announce(&self, header: Header, counts: &Counts<'_>) -> Result<u64> {
        let ep = &*self.ep;
        let sequence = {
            let mut state = self.state();
            state.sequence += 1;
            state.sequence
        };
        let header = Header { sequence, ..header };
        let outbox = ep.window.outbox(self.index);
        let mailbox = ep.window.mailbox(self.index, ep.rank());
        // SAFETY: an outbox and a mailbox are inside the window and hold a whole message; this
        // rank's outbox and its mailbox for itself are used by the lane's one operation only.
        unsafe {
            notify::write(ep.local(outbox), &header, counts);
            notify::write(ep.local(mailbox), &header, counts);
        }
        let bytes = notify::bytes(counts.len());
        for &peer in &ep.peers {
            self.write_block(peer, outbox, mailbox, bytes)?;
            self.signal(peer, Phase::Posted)?;
        }
        Ok(sequence)
    }

    /// Waits for every peer's announcement and reads the fixed parts of all into the lane's state.
    pub fn collect(&self, op: &'static str, deadline: Deadline) -> Result<()> {
        let ep = &*self.ep;
        self.wait(op, &ep.peers, Phase::Posted, deadline)?;
        let headers = &mut self.state().headers;
        headers.clear();
        for source in 0..ep.shape.world {
            // SAFETY: the source's announcement is whole (its flag was consumed) and stays until
            // this rank raises Done.
            let header = unsafe { notify::read(ep.local(ep.window.mailbox(self.index, source))) };
            // A number that becomes an address is never believed.
            if header.slot as usize >= ep.shape.slots {
                let detail = format!("rank {source} announced slot {}", header.slot);
                ep.group.abort(&format!("{op}: {detail}"));
                return Err(EpError::Corrupt { op, detail });
            }
            headers.push(header);
        }
        Ok(())
    }

    /// Ends an operation on which the verdict was bad: everyone has read everyone's announcement.
    pub fn close(&self, op: &'static str, deadline: Deadline) -> Result<()> {
        self.done(&self.ep.peers)?;
        self.wait(op, &self.ep.peers, Phase::Done, deadline)?;
        self.flush(deadline)
    }

    /// Raises `Done` at `peers`.
    pub fn done(&self, peers: &[usize]) -> Result<()> {
        peers.iter().try_for_each(|&peer| self.signal(peer, Phase::Done))
    }

    /// Copies a block of this rank's window to the same or another place in a peer's.
    pub fn write_block(&self, peer: usize, from: usize, to: usize, bytes: usize) -> Result<()> {
        let ep = &*self.ep;
        match ep.reach[peer] {
            // SAFETY: both blocks are inside the windows, which have the same layout; the protocol
            // gives this rank the peer's block until it signals.
            Some(window) => unsafe {
                window.base.add(to).as_ptr().copy_from_nonoverlapping(ep.local(from), bytes);
                Ok(())
            },
            None => {
                let put = ep_transport::Put { peer, from, to, bytes };
                ep.check("put", ep.link.put(&Queue::host(), put))
            }
        }
    }

    fn signal(&self, peer: usize, phase: Phase) -> Result<()> {
        let signalled = self.ep.link.signal(&Queue::host(), peer, phase.flag(self.index));
        self.ep.check("signal", signalled)
    }

    /// Waits until the sources of all puts may be reused.
    pub fn flush(&self, deadline: Deadline) -> Result<()> {
        if self.ep.bulk.is_empty() {
            return Ok(());
        }
        self.ep.check("flush", self.ep.link.flush(&Queue::host(), deadline))
    }

    /// Waits for and consumes a flag of each of `peers`.
    pub fn wait(
        &self,
        op: &'static str,
        peers: &[usize],
        phase: Phase,
        deadline: Deadline,
    ) -> Result<()> {
        let flag = phase.flag(self.index);
        let waited = self.ep.link.wait(&Queue::host(), op, peers, flag, deadline);
        self.ep.check(op, waited.map_err(|e| self.explain(e)))
    }

    /// Adds to a time-out what the absent peers are doing instead, if it can be seen.
    fn explain(&self, error: TransportError) -> TransportError {
        let TransportError::Timeout { op, peers, after, .. } = error else { return error };
        let operation = self.state().sequence;
        let elsewhere = peers.iter().find_map(|&peer| {
            let posted = |lane: &usize| self.ep.link.ready(&[peer], Phase::Posted.flag(*lane));
            let idle = |&l: &usize| !self.ep.lanes[l].busy.load(Ordering::Relaxed);
            let lane = (0..self.ep.lanes.len()).filter(idle).find(posted)?;
            Some(format!(
                "; rank {peer} has announced an operation on lane {lane} that this rank has not \
                 submitted, while this rank waits on lane {}; operations have to be submitted in \
                 the same order on all ranks",
                self.index
            ))
        });
        let elsewhere = elsewhere.unwrap_or_default();
        let hint = format!(" (lane {}, operation {operation}){elsewhere}", self.index);
        TransportError::Timeout { op, peers, after, hint }
    }

    /// Whether every peer has raised `phase`.
    pub fn ready(&self, phase: Phase) -> bool {
        self.ready_from(Owing::All, phase)
    }

    /// Whether all of these have raised `phase`.
    pub fn ready_from(&self, owing: Owing, phase: Phase) -> bool {
        self.ep.link.ready(self.ep.owing(owing), phase.flag(self.index))
    }
}

impl Inner {
    /// These peers.
    pub fn owing(&self, owing: Owing) -> &[usize] {
        match owing {
            Owing::All => &self.flagged,
            Owing::Direct => &self.direct,
        }
    }

    /// Who raises `Done` for a dispatch whose rows were sent, and forwarded where they are.
    pub fn owing_rows(&self) -> Owing {
        if self.across.hierarchical { Owing::Direct } else { Owing::All }
    }
}

/// The mapped window of a rank, if it is mapped.
pub(crate) fn mapped(reach: Reach) -> Option<ep_transport::Mapping> {
    match reach {
        Reach::Direct(mapping) => Some(mapping),
        _ => None,
    }
}
