//! Result slots: which of them are owned, and what their unused rows hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ep_transport::Queue;
use parking_lot::Mutex;

use crate::ep::Inner;
use crate::lane::LaneGuard;
use crate::{EpError, Result};

/// The slots of one rank.
#[derive(Debug)]
pub(crate) struct Slots {
    count: usize,
    /// A set bit is a free slot.
    free: AtomicU64,
    tails: Vec<Mutex<Tail>>,
}

/// What is known of the rows behind a slot's last result.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tail {
    /// The payload and layout codes in whose format rows from `marked_from` on are marked as empty.
    format: Option<(u64, u64)>,
    stride: usize,
    rows: usize,
    marked_from: usize,
}

impl Tail {
    /// `rows` rows of a format were received. Returns those behind them that may not be marked.
    pub fn received(
        &mut self,
        format: (u64, u64),
        stride: usize,
        rows: usize,
        capacity: usize,
    ) -> std::ops::Range<usize> {
        if self.format != Some(format) {
            *self = Self { format: Some(format), stride, rows, marked_from: capacity };
        }
        self.rows = rows;
        self.marked_from = self.marked_from.max(rows).min(capacity.max(rows));
        rows..self.marked_from
    }

    /// All rows behind those received were marked.
    pub fn marked(&mut self) {
        self.marked_from = self.rows;
    }

    /// The first `bytes` were written over in another format.
    pub fn overwritten(&mut self, bytes: usize) {
        if self.stride > 0 {
            self.marked_from = self.marked_from.max(bytes.div_ceil(self.stride));
        }
    }
}

impl Slots {
    pub fn new(count: usize) -> Self {
        let free = if count == 64 { u64::MAX } else { (1 << count) - 1 };
        let tails = (0..count).map(|_| Mutex::default()).collect();
        Self { count, free: AtomicU64::new(free), tails }
    }

    pub fn take(&self) -> Option<usize> {
        // Acquire pairs with the Release of the slot's last owner: its accesses to the rows come
        // before those of peers, whom this rank tells of the slot by a later flag.
        self.free
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |free| match free {
                0 => None,
                _ => Some(free & (free - 1)),
            })
            .ok()
            .map(|free| free.trailing_zeros() as usize)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Frees a slot that was taken out of its [`Slot`] by [`Slot::detach`].
    pub fn give_back(&self, slot: usize) {
        self.free.fetch_or(1 << slot, Ordering::Release);
    }

    /// How many are free.
    pub fn free(&self) -> usize {
        self.free.load(Ordering::Relaxed).count_ones() as usize
    }
}

/// Ownership of one slot of one rank; gives it back when dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    ep: Arc<Inner>,
    index: usize,
    /// Where the slot was used last, if that is a stream: peers may have it only after that.
    last: Option<Queue>,
}

impl Slot {
    /// A slot that was taken out of its guard, or picked otherwise.
    #[cfg(feature = "cuda")]
    pub fn adopt(ep: &Arc<Inner>, index: usize) -> Self {
        Self { ep: ep.clone(), index, last: None }
    }

    /// Says that work submitted to `queue` so far, or soon, uses the slot. The host's queue takes no
    /// stream's place.
    pub fn used_on(&mut self, queue: &Queue) {
        if !queue.is_host() {
            self.last = Some(queue.clone());
        }
    }

    /// Says that the slot's users have been told to the device already.
    #[cfg(feature = "cuda")]
    pub fn unused(&mut self) {
        self.last = None;
    }

    pub fn take(ep: &Arc<Inner>, op: &'static str) -> Result<Self> {
        let taken = ep.slots.take().or_else(|| {
            // Slots of dropped dispatches are free once the peers have written what they promised.
            LaneGuard::sweep(ep);
            ep.slots.take()
        });
        let Some(index) = taken else {
            return Err(EpError::NoFreeSlot { op, slots: ep.slots.count() });
        };
        let slot = Self { ep: ep.clone(), index, last: None };
        // A failure gives slots back that peers may still write or read. It is told to `Health`
        // before that, so whoever gets such a slot sees it here.
        ep.usable(op)?;
        Ok(slot)
    }

    pub fn index(&self) -> usize {
        self.index
    }

    /// Takes the slot out of its guard; the caller gives it back.
    pub fn detach(self) -> usize {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so its fields are moved out once.
        drop(unsafe { (std::ptr::read(&this.ep), std::ptr::read(&this.last)) });
        this.index
    }

    pub fn tail(&self) -> &Mutex<Tail> {
        &self.ep.slots.tails[self.index]
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.ep.gpu {
            return gpu.give_back(&self.ep, self.index, self.last.take());
        }
        self.ep.slots.give_back(self.index);
    }
}
