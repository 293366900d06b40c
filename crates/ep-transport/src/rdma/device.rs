//! What a proxy needs of a NIC, so that it runs on a simulated one too.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::events::Event;
use super::pair::Write;
use crate::Result;

/// What a NIC reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Completion {
    /// The write with this number, and all before it on its queue pair, are done.
    Written(Id),
    /// A peer's write with an immediate is in memory.
    Arrived { id: Id, immediate: Option<u32> },
    /// A write or a receive of this number failed, and its queue pair is of no more use.
    Failed { id: Id, status: i32, detail: String },
}

/// What a work request is about, within its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Id {
    pub kind: Kind,
    pub peer: usize,
    pub pair: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Receive,
    /// A piece of a put, or a record.
    Write,
    /// News of this rank's credit for the peer.
    Tell,
}

impl Id {
    pub(super) fn encode(self) -> u64 {
        let kind = match self.kind {
            Kind::Receive => 0,
            Kind::Write => 1,
            Kind::Tell => 2,
        };
        kind | (self.pair as u64) << 8 | (self.peer as u64) << 32
    }

    pub(super) fn decode(number: u64) -> Self {
        let kind = match number & 0xff {
            0 => Kind::Receive,
            1 => Kind::Write,
            _ => Kind::Tell,
        };
        Self { kind, peer: (number >> 32) as usize, pair: (number >> 8 & 0xff_ffff) as usize }
    }
}

/// One NIC of this rank, connected to its peers.
pub(super) trait Device: Send {
    /// Starts a write to `peer` on one of its queue pairs.
    ///
    /// # Safety
    /// The local bytes stay as they are until the write is done, or else what arrives is anything.
    unsafe fn write(&mut self, peer: usize, pair: usize, write: &Write) -> Result<()>;

    /// Makes room for one more immediate from `peer` on that queue pair.
    fn receive(&mut self, peer: usize, pair: usize) -> Result<()>;

    /// Adds what has been completed since to `into`; whether that was all there is.
    fn poll(&mut self, into: &mut Vec<Completion>) -> Result<bool>;

    /// Sleeps until there may be something to poll, `bell` can be read or the time has passed.
    /// There may have been something before it was called: [`Device::arm`] comes first.
    /// Whether something may have befallen the NIC, so that [`Device::events`] is worth a call.
    fn sleep(&mut self, bell: BorrowedFd<'_>, bound: Duration) -> Result<bool>;

    /// From here on, what completes ends a [`Device::sleep`].
    fn arm(&mut self) -> Result<()>;

    /// The number of the queue pair, for messages.
    fn number(&self, peer: usize, pair: usize) -> u32;

    /// The address of a byte of `peer`'s memory and the key to it.
    fn remote(&self, peer: usize, at: usize) -> (u64, u32);

    /// The address of a byte of this rank's memory, as the NIC is told it, and the key to it.
    fn local(&self, at: usize) -> (u64, u32);

    /// Takes what has happened to the NIC that is no completion.
    fn events(&mut self, into: &mut Vec<Event>) -> Result<()> {
        let _ = into;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back() {
        for kind in [Kind::Receive, Kind::Write, Kind::Tell] {
            let id = Id { kind, peer: 1023, pair: 15 };
            assert_eq!(Id::decode(id.encode()), id);
        }
    }
}
