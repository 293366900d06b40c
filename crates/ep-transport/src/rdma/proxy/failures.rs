//! What a proxy makes of failures: whose they are, and who hears of them.

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::device::{Device, Id, Kind};
use super::super::events::Event;
use super::{OP, Proxy, Remote};
use crate::{Deadline, Result, TransportError};

/// Rounds between looks at what befalls the NIC, each of which takes a system call.
const ROUNDS: u32 = 1024;
/// The longest sleep of a proxy without a NIC.
const SLICE: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// The status of what was flushed because something before it failed.
const FLUSHED: i32 = 5;
/// The status of what nobody answered.
const UNANSWERED: i32 = 12;
/// How long a failed write waits for the news that its peer has left in good order.
pub(super) const NEWS: std::time::Duration = std::time::Duration::from_millis(300);

impl<D: Device> Proxy<D> {
    pub(super) fn error(&self, id: Id, status: i32, detail: &str) -> TransportError {
        let pair = self.device.number(id.peer, id.pair);
        TransportError::Completion {
            op: OP,
            peer: id.peer,
            queue_pair: pair,
            status,
            detail: detail.to_owned(),
        }
    }

    /// A request has failed. What a peer that has left cannot be the cause of is decided at once: a
    /// request that is wrong here, or one that was refused, which takes a peer that is there.
    pub(super) fn failed(&mut self, id: Id, status: i32, detail: &str) {
        if matches!(status, FLUSHED | UNANSWERED) {
            return self.doubt(id, status, detail);
        }
        let Some(remote) = self.remotes[id.peer].as_mut() else { return };
        remote.broken = true;
        if !remote.gone {
            self.lose(id.peer, self.error(id, status, detail));
        }
    }

    /// A queue pair is broken. That is a failure if there was something to be done on it, unless
    /// the peer has left: then it wanted nothing more, and its last answers went with it.
    fn doubt(&mut self, id: Id, status: i32, detail: &str) {
        let Some(remote) = self.remotes[id.peer].as_mut() else { return };
        remote.broken = true;
        if remote.gone {
            return;
        }
        let error = self.error(id, status, detail);
        match self.doubtful.iter_mut().find(|(peer, ..)| *peer == id.peer) {
            None => self.doubtful.push((id.peer, error, Deadline::after(NEWS))),
            // What was merely flushed says nothing of the cause.
            Some((_, known, _)) if known.code() == Some(FLUSHED) => *known = error,
            Some(_) => {}
        }
    }

    /// Has the next [`Proxy::watch`] look.
    pub(super) fn look_next_round(&mut self) {
        self.rounds = 1;
    }

    /// Looks now and then at what befalls the NIC. A port that is soon back is no failure: packets
    /// are sent again meanwhile; nor is anything one once nobody is reached through the NIC any more.
    /// False if the NIC is of no more use then.
    pub(super) fn watch(&mut self) -> Result<bool> {
        self.rounds = self.rounds.checked_sub(1).unwrap_or(ROUNDS);
        if self.rounds == 0 {
            let mut events = Vec::new();
            self.device.events(&mut events)?;
            for event in events {
                match event {
                    // Whoever asked for what broke it hears the cause, and says it.
                    Event::Pair { id, status, detail } => self.doubt(id, status, &detail),
                    Event::PortDown { port } => {
                        self.down.get_or_insert((port, Deadline::after(self.setup.grace)));
                    }
                    Event::PortUp => self.down = None,
                    Event::Dead(_) if !self.reaches() => return Ok(false),
                    Event::Dead(error) => return Err(error),
                }
            }
        }
        let open = |(peer, ..): &(usize, _, _)| !self.shared.closed(*peer, self.setup.nic);
        match &self.down {
            // Connections that broke meanwhile broke for that, unless their peers have left.
            Some((port, until))
                if (until.expired() || self.doubtful.iter().any(open)) && self.reaches() =>
            {
                let detail = format!("{port} is down");
                let (call, code) = ("ibv_get_async_event", libc::ENETDOWN);
                Err(TransportError::Device { op: OP, call, code, detail })
            }
            _ => Ok(true),
        }
    }

    /// Whether there is a peer still that is reached through this NIC.
    fn reaches(&self) -> bool {
        let here = |(peer, remote): (usize, &Option<Remote>)| {
            let wanted = remote.as_ref().is_some_and(|remote| !remote.gone);
            wanted && !self.shared.closed(peer, self.setup.nic)
        };
        self.remotes.iter().enumerate().any(here)
    }

    /// Goes on without the NIC, through which nobody is reached any more: what is still asked for is
    /// done with at once.
    pub(super) fn outlast(&mut self) -> Result<()> {
        for peer in 0..self.remotes.len() {
            let id = Id { kind: Kind::Write, peer, pair: 0 };
            if self.remotes[peer].is_some() {
                self.leave(peer, self.error(id, libc::ENODEV, "the NIC has failed"));
            }
        }
        while !self.shared.stopping() {
            while self.take() {}
            self.shared.retire(self.setup.nic, self.tickets.retire());
            self.shared.passed(self.setup.nic);
            if self.commands.prepare_sleep() {
                let bell = PollFd::new(&*self.bell, PollFlags::IN);
                match poll(&mut [bell], Some(&SLICE)) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(e) => return Err(TransportError::os(OP, "sleeping without a NIC", e)),
                }
            }
            self.commands.awake();
            // Nothing to read is fine: the descriptor does not block.
            let _ = rustix::io::read(&*self.bell, &mut [0u8; 8]);
        }
        Ok(())
    }

    /// Decides about failures whose peers may have left, and about peers that are gone while there
    /// is something to send to them.
    pub(super) fn judge(&mut self) {
        let nic = self.setup.nic;
        for peer in 0..self.remotes.len() {
            let waits = |remote: &Remote| remote.sender.waiting() && !remote.broken;
            if !self.remotes[peer].as_ref().is_some_and(waits) {
                continue;
            }
            let id = Id { kind: Kind::Write, peer, pair: 0 };
            if self.shared.closed(peer, nic) {
                self.leave(peer, self.error(id, libc::ECONNRESET, "the peer has left"));
            } else if self.shared.is_lost(peer) {
                self.lose(peer, self.error(id, libc::ECONNRESET, "the peer has died"));
            }
        }
        for (peer, error, until) in std::mem::take(&mut self.doubtful) {
            if self.shared.closed(peer, nic) {
                self.leave(peer, error);
            } else if until.expired() || self.shared.is_lost(peer) {
                self.lose(peer, error);
            } else {
                self.doubtful.push((peer, error, until));
            }
        }
    }

    /// The peer is there no more, and something for it was not done, for which `error` stands. It
    /// wanted nothing more, unless something is wrong with the group: then that may be why it went.
    fn leave(&mut self, peer: usize, error: TransportError) {
        let ends = [Some(peer), Some(self.shared.rank())];
        match self.shared.fault() {
            None => self.forget(peer),
            // What others have done to each other says more than that the peer went for it.
            Some(fault) if !ends.contains(&fault.peer()) => self.lose(peer, fault),
            Some(_) => self.lose(peer, error),
        }
    }

    /// The peer cannot be reached any more: an error for everyone.
    pub(super) fn lose(&mut self, peer: usize, error: TransportError) {
        self.shared.fail(peer, &error);
        self.forget(peer);
    }

    /// Nothing more is done for `peer`, and what was under way is done with.
    fn forget(&mut self, peer: usize) {
        let Some(remote) = self.remotes[peer].as_mut() else { return };
        remote.gone = true;
        let (tickets, in_flight) = (&mut self.tickets, &mut self.in_flight);
        let mut dropped = Vec::new();
        remote.sender.clear(
            |done| {
                tickets.done(done.ticket);
                *in_flight -= done.bytes;
            },
            |ticket| dropped.push(ticket),
        );
        dropped.into_iter().for_each(|ticket| self.tickets.close(ticket));
    }
}
