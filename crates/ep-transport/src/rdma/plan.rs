//! What a rank's RDMA link takes, before it is opened: for planning, also where RDMA is not built.

use crate::host_link::{HostLink, board_offset};
use crate::{Result, TransportError, WindowSpec};

/// How many epochs may be under way at once. The sender opens epoch `e` only once the receiver has
/// said that epoch `e - WINDOW` is complete, so a place is never taken twice.
pub(crate) const WINDOW: u32 = 64;
/// Bytes of the record that ends an epoch.
pub(crate) const RECORD: usize = 16;
/// A line of the processor's.
pub(crate) const LINE: usize = 64;
/// Bytes for one (peer, NIC): records in and out, and credit in and out.
pub(crate) const BLOCK: usize = 2 * (WINDOW as usize * RECORD) + 2 * LINE;
/// Sends queued per queue pair, besides one for credit.
pub(crate) const SEND_QUEUE: usize = 64;
/// Streams that may have puts and signals under way at once where windows are on GPUs.
#[cfg(feature = "cuda")]
pub(crate) const LANES: usize = 64;
/// In what GPUs give out memory for windows.
#[cfg(feature = "cuda")]
const GPU_PAGE: usize = 2 << 20;
/// Commands that fit a NIC's ring.
pub(crate) const RING: usize = 1024;

const PAGE: usize = 4096;

/// What one rank's `RdmaTransport` link takes of memory that NICs see and of its NICs: exact numbers of bytes, and of entries where their size is the NIC driver's choice.
///
/// Not in it: what a proxy keeps of each peer on the heap, and the driver's own memory of a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaPlan {
    /// Bytes of the window, in whole pages.
    pub window: usize,
    /// Bytes of the flags of all ranks.
    pub flags: usize,
    /// Bytes behind them in which NICs write: what signals carry and what peers have room for, for
    /// each rank and NIC.
    pub mailboxes: usize,
    /// Bytes that each NIC registers: the sum of those or, with the window on a GPU, of window and
    /// mailboxes.
    pub registered: usize,
    /// Bytes of the command rings, which no NIC sees.
    pub rings: usize,
    /// Queue pairs on all NICs.
    pub queue_pairs: usize,
    /// Entries of their send queues.
    pub sends: usize,
    /// Entries of their receive queues, which have no memory of their own: only immediates come.
    pub receives: usize,
    /// Entries of the NICs' completion queues.
    pub completions: usize,
}

impl RdmaPlan {
    /// For windows of `spec` on `world` ranks, of which a rank reaches `bulk` by writes (those of
    /// other nodes), with so many NICs per rank, queue pairs per peer and NIC, and writes under way
    /// per peer and NIC (`RdmaTransport`'s `nics`, `queue_pairs` and `depth`, by default 1, 1 and 128).
    ///
    /// # Errors
    /// An argument error if that is beyond the address space or there are fewer ranks than peers.
    pub fn new(
        spec: WindowSpec,
        world: usize,
        bulk: usize,
        (nics, queue_pairs, depth): (usize, usize, usize),
    ) -> Result<Self> {
        let beyond = || TransportError::Argument {
            op: "open",
            detail: format!("{spec:?} for {world} ranks, {bulk} on other nodes, is beyond reach"),
        };
        if bulk >= world.max(1) {
            return Err(beyond());
        }
        let window = board_offset(spec).ok_or_else(beyond)?;
        let before = HostLink::region_bytes(spec, world)?;
        let registered = world
            .checked_mul(nics)
            .and_then(|n| n.checked_mul(BLOCK)?.checked_add(before))
            .and_then(|bytes| bytes.checked_next_multiple_of(PAGE))
            .filter(|bytes| isize::try_from(*bytes).is_ok())
            .ok_or_else(beyond)?;
        // A rank whose peers are all mapped opens no NIC.
        let used = if bulk == 0 { 0 } else { nics };
        let pairs = [bulk, queue_pairs, used].into_iter().try_fold(1, usize::checked_mul);
        let pairs = pairs.ok_or_else(beyond)?;
        let all = |entries: usize| pairs.checked_mul(entries).ok_or_else(beyond);
        let (sends, receives) = (all(SEND_QUEUE + 1)?, all(depth)?);
        Ok(Self {
            window,
            flags: before - window,
            mailboxes: registered - before,
            registered,
            rings: used * ring_bytes(RING),
            queue_pairs: pairs,
            sends,
            receives,
            completions: sends + receives,
        })
    }

    /// [`RdmaPlan::new`] with windows in the memory of GPUs (`RdmaTransport::cuda`), which NICs reach:
    /// `window` is there, in pages of 2 MiB, and only `flags` (for GPUs, those of all ranks) and
    /// `mailboxes` are locked memory of the host. Where NICs do not reach it the window is that too.
    ///
    /// # Errors
    /// As [`RdmaPlan::new`].
    #[cfg(feature = "cuda")]
    pub fn on_gpus(
        spec: WindowSpec,
        world: usize,
        bulk: usize,
        nics: (usize, usize, usize),
    ) -> Result<Self> {
        let host = Self::new(WindowSpec { flags: 0, ..spec }, world, bulk, nics)?;
        let window = spec.bytes.max(1).next_multiple_of(GPU_PAGE);
        let streams = if bulk == 0 { 0 } else { LANES };
        let flags = crate::nvlink::board_bytes(spec.flags, world, world - bulk, streams)?;
        Ok(Self { window, flags, registered: window + host.mailboxes, ..host })
    }
}

/// Bytes of a ring in pages of its own.
fn ring_bytes(capacity: usize) -> usize {
    crate::ring::Ring::bytes(capacity).map_or(0, |bytes| bytes.next_multiple_of(PAGE))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: what grows with the ranks, and what does not.
    #[test]
    fn a_plan_for_many_ranks() {
        let spec = WindowSpec { bytes: 1 << 30, flags: 6 };
        let plan = |world: usize, bulk| RdmaPlan::new(spec, world, bulk, (1, 1, 128)).unwrap();
        let large = plan(1024, 1016);
        assert_eq!((large.queue_pairs, large.sends, large.receives), (1016, 66_040, 130_048));
        assert_eq!(large.completions, 196_088);
        assert_eq!(large.mailboxes, 1024 * 2176);
        assert_eq!(large.rings, 69_632);
        assert_eq!(large.registered, large.window + large.flags + large.mailboxes);
        let alone = plan(8, 0);
        assert_eq!((alone.queue_pairs, alone.completions, alone.rings), (0, 0, 0));
        assert!(RdmaPlan::new(spec, 8, 8, (1, 1, 128)).is_err());
        #[cfg(feature = "cuda")]
        {
            let small = WindowSpec { bytes: 3 << 20, flags: 6 };
            let gpus = RdmaPlan::on_gpus(small, 16, 8, (2, 1, 128)).unwrap();
            let mailboxes = (16 * 2 * 2176usize).next_multiple_of(4096);
            assert_eq!((gpus.window, gpus.mailboxes), (4 << 20, mailboxes));
            assert_eq!(gpus.registered, gpus.window + gpus.mailboxes);
            // A line for each flag and its mark, and two for each stream.
            assert!(gpus.flags >= 6 * 16 * 64 + 2 * 64 * 64 && gpus.flags < 64 << 10);
            let lone = RdmaPlan::on_gpus(small, 8, 0, (1, 1, 128)).unwrap();
            assert!(lone.flags < gpus.flags && lone.queue_pairs == 0);
        }
        let endless = WindowSpec { bytes: usize::MAX, flags: 1 };
        assert!(RdmaPlan::new(endless, 8, 7, (1, 1, 128)).is_err());
    }
}
