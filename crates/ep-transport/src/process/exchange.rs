//! Every rank gets every other's memory.
//!
//! A rank calls those below it, one at a time, with its descriptor, and gets theirs in the answer;
//! meanwhile it answers whoever calls. Nobody waits without answering, so all get through, with a
//! handful of descriptors open at a time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::memfd::{Memfd, map_foreign, os};
use super::socket::{Listener, PACKET, call, receive, send, user};
use super::{Card, OP};
use crate::host_link::Region;
use crate::{Deadline, Group, Result, TransportError};

/// The group's health is looked at this often.
const SLICE: Duration = Duration::from_millis(10);
/// So many callers beyond the ranks may be silent; then the oldest is dropped.
const STRANGERS: usize = 64;

/// Memory whose descriptor can be sent, and what mapping it gives.
pub(crate) trait Shared {
    type Mapped;
    fn fd(&self) -> BorrowedFd<'_>;
    /// Maps this rank's own.
    fn map(&self) -> Result<Self::Mapped>;
    /// Maps that of `peer`, after checking that it is what a peer sends.
    fn map_foreign(&self, peer: usize, fd: OwnedFd) -> Result<Self::Mapped>;
}

impl Shared for Memfd {
    type Mapped = Arc<dyn Region>;

    fn fd(&self) -> BorrowedFd<'_> {
        Memfd::fd(self)
    }

    fn map(&self) -> Result<Arc<dyn Region>> {
        Memfd::map(self)
    }

    fn map_foreign(&self, _peer: usize, fd: OwnedFd) -> Result<Arc<dyn Region>> {
        map_foreign(fd.as_fd(), self.bytes())
    }
}

pub(crate) struct Exchange<'a, S: Shared> {
    group: &'a Group,
    cards: &'a [Card],
    own: S,
    listener: Listener,
    deadline: Deadline,
    regions: Vec<Option<S::Mapped>>,
    /// The rank being called.
    host: Option<(usize, OwnedFd)>,
    /// Those who call and have not said who they are.
    guests: Vec<OwnedFd>,
}

impl<'a, S: Shared> Exchange<'a, S> {
    pub(crate) fn new(
        group: &'a Group,
        cards: &'a [Card],
        own: S,
        listener: Listener,
        deadline: Deadline,
    ) -> Self {
        let regions = cards.iter().map(|_| None).collect();
        Self { group, cards, own, listener, deadline, regions, host: None, guests: Vec::new() }
    }

    /// All regions, by rank.
    pub(crate) fn run(&mut self) -> Result<Vec<S::Mapped>> {
        self.regions[self.group.rank()] = Some(self.own.map()?);
        loop {
            self.call_next()?;
            if self.regions.iter().all(Option::is_some) {
                return Ok(self.regions.iter_mut().filter_map(Option::take).collect());
            }
            let absent: Vec<usize> =
                (0..self.regions.len()).filter(|&rank| self.regions[rank].is_none()).collect();
            self.group.health().check_waiting(OP, &absent)?;
            if self.deadline.expired() {
                let (after, hint) = (self.deadline.length(), ": its window did not come".into());
                return Err(TransportError::Timeout { op: OP, peers: absent, after, hint });
            }
            self.poll();
            while let Some(guest) = self.listener.accept()? {
                self.welcome(guest);
            }
            self.serve()?;
            self.hear()?;
        }
    }

    /// Waits until something may have happened.
    fn poll(&self) {
        let mut fds = vec![PollFd::from_borrowed_fd(self.listener.fd(), PollFlags::IN)];
        fds.extend(self.host.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)));
        fds.extend(self.guests.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let slice = SLICE.min(self.deadline.remaining());
        let slice = Timespec { tv_sec: 0, tv_nsec: slice.subsec_nanos().into() };
        // Whatever it says, the caller looks everywhere.
        let _ = poll(&mut fds, Some(&slice));
    }

    fn packet(&self, token: &[u8; 16]) -> [u8; PACKET] {
        let mut packet = [0; PACKET];
        packet[..16].copy_from_slice(token);
        packet[16..].copy_from_slice(&(self.group.rank() as u32).to_le_bytes());
        packet
    }

    /// Calls the next rank below this one.
    fn call_next(&mut self) -> Result<()> {
        if self.host.is_some() {
            return Ok(());
        }
        let mut below = 0..self.group.rank();
        let Some(peer) = below.find(|&rank| self.regions[rank].is_none()) else { return Ok(()) };
        let card = &self.cards[peer];
        let called = call(&card.name).and_then(|called| {
            let Some(fd) = called else { return Ok(None) };
            if user(fd.as_fd()) != Some(card.user) {
                return Err(Errno::ACCESS);
            }
            send(&fd, &self.packet(&card.token), self.own.fd())?;
            Ok(Some(fd))
        });
        self.host = called.map_err(|e| self.failed(peer, e))?.map(|fd| (peer, fd));
        Ok(())
    }

    /// An error of the connection to `peer`; if the peer is known to be gone, that.
    fn failed(&self, peer: usize, e: Errno) -> TransportError {
        if matches!(e, Errno::CONNRESET | Errno::CONNREFUSED | Errno::PIPE) {
            // The news that it died may be on its way.
            std::thread::sleep(SLICE * 5);
            if let Err(known) = self.group.health().check_waiting(OP, &[peer]) {
                return known;
            }
        }
        match os(&format!("exchanging windows with rank {}", self.group.number(peer)), e) {
            TransportError::Os { op, code, detail, .. } => {
                TransportError::Os { op, peer: Some(peer), code, detail }
            }
            other => other,
        }
    }

    fn welcome(&mut self, guest: OwnedFd) {
        if user(guest.as_fd()) != Some(self.cards[self.group.rank()].user) {
            tracing::warn!("another user called while windows were exchanged; hung up");
            return;
        }
        if self.guests.len() >= self.cards.len() + STRANGERS {
            self.guests.remove(0);
        }
        self.guests.push(guest);
    }

    /// Answers the callers who have spoken.
    fn serve(&mut self) -> Result<()> {
        let mut index = 0;
        while index < self.guests.len() {
            match receive(&self.guests[index]) {
                Ok(None) => index += 1,
                Ok(Some((packet, fd))) => {
                    let guest = self.guests.swap_remove(index);
                    self.answer(&guest, &packet, fd)?;
                }
                Err(e @ (Errno::MFILE | Errno::NFILE)) => {
                    return Err(os("receiving a peer's window", e));
                }
                Err(_) => {
                    self.guests.swap_remove(index);
                }
            }
        }
        Ok(())
    }

    fn answer(&mut self, guest: &OwnedFd, packet: &[u8; PACKET], fd: OwnedFd) -> Result<()> {
        let (token, peer) = (&packet[..16], rank_of(packet));
        let mine = &self.cards[self.group.rank()];
        let expected = peer > self.group.rank()
            && self.regions.get(peer).is_some_and(Option::is_none)
            && token == mine.token;
        if !expected {
            tracing::warn!("a stranger called while windows were exchanged; hung up");
            return Ok(());
        }
        send(guest, &self.packet(&self.cards[peer].token), self.own.fd())
            .map_err(|e| self.failed(peer, e))?;
        self.regions[peer] = Some(self.own.map_foreign(peer, fd)?);
        Ok(())
    }

    /// Takes the answer of the rank that was called.
    fn hear(&mut self) -> Result<()> {
        let Some((peer, fd)) = &self.host else { return Ok(()) };
        let peer = *peer;
        let Some((packet, fd)) = receive(fd).map_err(|e| self.failed(peer, e))? else {
            return Ok(());
        };
        let mine = &self.cards[self.group.rank()];
        if packet[..16] != mine.token || rank_of(&packet) != peer {
            return Err(self.failed(peer, Errno::BADMSG));
        }
        self.regions[peer] = Some(self.own.map_foreign(peer, fd)?);
        self.host = None;
        Ok(())
    }
}

fn rank_of(packet: &[u8; PACKET]) -> usize {
    u32::from_le_bytes([packet[16], packet[17], packet[18], packet[19]]) as usize
}
