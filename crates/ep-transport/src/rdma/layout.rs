//! What stands behind the window in a rank's region, and its words that two sides share.
//!
//! Behind the window and the flags, one [`BLOCK`] for each (peer, NIC): the records of the epochs
//! that the peer's signals end, copies of this rank's own records while they are being written, what
//! the peer says it has room for, and a copy of what this rank tells it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::OP;
use super::arrivals::{RECORD, Record, WINDOW};
use super::sender::Credit;
use crate::host_link::{HostLink, Region};
use crate::rdma_plan::{BLOCK, LINE};
use crate::{Result, TransportError, WindowSpec};

const RECORDS: usize = WINDOW as usize * RECORD;
const OUT: usize = RECORDS;
const ROOM: usize = 2 * RECORDS;
const TELL: usize = ROOM + LINE;
const _: () = assert!(BLOCK == TELL + LINE);
/// Bytes of a [`Credit`] on its way, with a word that says whether its sender has closed the link.
pub(super) const CREDIT: usize = 12;

/// Where things are in a region, the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    blocks: usize,
    nics: usize,
    pub bytes: usize,
}

impl Layout {
    pub(super) fn new(spec: WindowSpec, world: usize, nics: usize) -> Result<Self> {
        let blocks = HostLink::region_bytes(spec, world)?;
        let bytes = world.checked_mul(nics).and_then(|n| n.checked_mul(BLOCK));
        let bytes =
            bytes.and_then(|n| n.checked_add(blocks)).filter(|n| isize::try_from(*n).is_ok());
        let bytes = bytes.ok_or_else(|| TransportError::Argument {
            op: OP,
            detail: format!("{spec:?} for {world} ranks is beyond the address space"),
        })?;
        Ok(Self { blocks, nics, bytes: bytes.next_multiple_of(4096) })
    }

    /// Where windows are on GPUs: what is behind them begins at [`Layout::words`], in memory of its own.
    #[cfg(feature = "cuda")]
    pub(super) fn apart(spec: WindowSpec, world: usize, nics: usize) -> Result<Self> {
        Self::new(WindowSpec { flags: 0, ..spec }, world, nics)
    }

    /// Where that begins which is behind window and flags, and is the NICs' alone.
    #[cfg(feature = "cuda")]
    pub(super) fn words(&self) -> usize {
        self.blocks
    }

    fn block(&self, peer: usize, nic: usize) -> usize {
        self.blocks + (peer * self.nics + nic) * BLOCK
    }

    /// Where `source` puts the record that ends `epoch`.
    pub(super) fn record_in(&self, source: usize, nic: usize, epoch: u32) -> usize {
        self.block(source, nic) + (epoch % WINDOW) as usize * RECORD
    }

    /// This rank's copy of the record it sends to `peer`.
    pub(super) fn record_out(&self, peer: usize, nic: usize, epoch: u32) -> usize {
        self.block(peer, nic) + OUT + (epoch % WINDOW) as usize * RECORD
    }

    /// Where `peer` says what it has room for.
    pub(super) fn credit_in(&self, peer: usize, nic: usize) -> usize {
        self.block(peer, nic) + ROOM
    }

    /// This rank's copy of what it tells `peer`.
    pub(super) fn credit_out(&self, peer: usize, nic: usize) -> usize {
        self.block(peer, nic) + TELL
    }
}

/// The words of this rank's region that the device reads or writes. Everything is accessed as
/// atomics, since the device may be writing.
#[derive(Clone, Debug)]
pub(super) struct Words {
    region: Arc<dyn Region>,
    /// What the region begins with.
    from: usize,
}

impl Words {
    /// In a region that begins `from` bytes into what the rank has.
    pub(super) fn behind(region: Arc<dyn Region>, from: usize) -> Self {
        Self { region, from }
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        let at = at.wrapping_sub(self.from);
        let inside = at.checked_add(4).is_some_and(|end| end <= self.region.bytes());
        assert!(at.is_multiple_of(4) && inside, "a word at {at}");
        // SAFETY: inside the region, which is aligned to a page and stays mapped while it is held;
        // these bytes are accessed as atomics only.
        unsafe { AtomicU32::from_ptr(self.region.base().as_ptr().add(at).cast()) }
    }

    /// A record whose immediate has arrived.
    pub(super) fn record(&self, at: usize) -> Record {
        let [flag, writes, epoch, parts] =
            [0, 4, 8, 12].map(|part| self.word(at + part).load(Ordering::Acquire));
        Record { flag, writes, epoch, parts }
    }

    pub(super) fn set_record(&self, at: usize, record: &Record) {
        let words = [record.flag, record.writes, record.epoch, record.parts];
        for (i, word) in words.into_iter().enumerate() {
            self.word(at + 4 * i).store(word, Ordering::Relaxed);
        }
    }

    /// Each number is right by itself, whenever it is read.
    pub(super) fn credit(&self, at: usize) -> Credit {
        let [immediates, epochs] = [0, 4].map(|part| self.word(at + part).load(Ordering::Acquire));
        Credit { immediates, epochs }
    }

    /// Whether who wrote the credit there has closed its link.
    pub(super) fn closed(&self, at: usize) -> bool {
        self.word(at + 8).load(Ordering::Acquire) != 0
    }

    pub(super) fn set_credit(&self, at: usize, credit: Credit, closed: bool) {
        self.word(at).store(credit.immediates, Ordering::Relaxed);
        self.word(at + 4).store(credit.epochs, Ordering::Relaxed);
        self.word(at + 8).store(closed.into(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        let spec = WindowSpec { bytes: 10_000, flags: 3 };
        let layout = Layout::new(spec, 3, 2).unwrap();
        let mut taken = vec![(0, HostLink::region_bytes(spec, 3).unwrap())];
        for (peer, nic) in (0..3).flat_map(|peer| [(peer, 0), (peer, 1)]) {
            for epoch in 0..WINDOW {
                taken.push((layout.record_in(peer, nic, epoch), RECORD));
                taken.push((layout.record_out(peer, nic, epoch), RECORD));
            }
            taken.push((layout.credit_in(peer, nic), CREDIT));
            taken.push((layout.credit_out(peer, nic), CREDIT));
        }
        taken.sort_unstable();
        assert!(taken.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0));
        assert!(taken.last().is_some_and(|(at, bytes)| at + bytes <= layout.bytes));
        assert_eq!(layout.record_in(1, 0, 5), layout.record_in(1, 0, 5 + WINDOW));
        assert!(Layout::new(WindowSpec { bytes: usize::MAX, flags: 1 }, 2, 1).is_err());
    }
}
