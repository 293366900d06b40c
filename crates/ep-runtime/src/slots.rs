//! Result slots: which of them are owned, and what their unused rows hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::ep::Inner;
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
    /// The payload and layout codes in whose format rows from `marked_from` on have source -1.
    pub format: Option<(u64, u64)>,
    pub marked_from: usize,
}

impl Slots {
    pub fn new(count: usize) -> Self {
        let free = if count == 64 { u64::MAX } else { (1 << count) - 1 };
        let tails = (0..count).map(|_| Mutex::default()).collect();
        Self { count, free: AtomicU64::new(free), tails }
    }

    fn take(&self) -> Option<usize> {
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
}

impl Slot {
    pub fn take(ep: &Arc<Inner>, op: &'static str) -> Result<Self> {
        match ep.slots.take() {
            Some(index) => Ok(Self { ep: ep.clone(), index }),
            None => Err(EpError::NoFreeSlot { op, slots: ep.slots.count }),
        }
    }

    pub fn index(&self) -> usize {
        self.index
    }

    /// Takes the slot out of its guard; the caller gives it back.
    pub fn detach(self) -> usize {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so its reference is moved out once.
        drop(unsafe { std::ptr::read(&this.ep) });
        this.index
    }

    pub fn tail(&self) -> &Mutex<Tail> {
        &self.ep.slots.tails[self.index]
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.ep.slots.give_back(self.index);
    }
}
