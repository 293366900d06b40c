//! Slots on streams: who may have one, and from when on.

use std::sync::Arc;

use ep_transport::Queue;

use crate::ep::Inner;
use crate::slots::Slot;
use crate::{EpError, Event, Result};

use super::{Gpu, Point, Turn};

impl Gpu {
    /// A slot for rows that the caller writes in the order of `queue`.
    pub fn slot_for(
        &self,
        ep: &Arc<Inner>,
        op: &'static str,
        lane: usize,
        queue: &Queue,
    ) -> Result<Slot> {
        let turn = self.enter(op, lane, queue)?;
        let taken = self.take_slot(ep, op, &turn);
        let mut slot = taken.map_err(|e| self.leave(op, &turn, queue, e))?;
        self.finish(op, &turn, queue)?;
        slot.used_on(queue);
        Ok(slot)
    }

    /// A slot that peers may have once the lane's stream gets there.
    pub(super) fn take_slot(&self, ep: &Arc<Inner>, op: &'static str, turn: &Turn) -> Result<Slot> {
        let index = match turn.capturing {
            true => self.take_captured(ep, op)?,
            false => ep.slots.take().ok_or(EpError::NoFreeSlot { op, slots: ep.slots.count() })?,
        };
        let slot = Slot::adopt(ep, index);
        let free_at = self.slots.lock().free_at[index].clone();
        if let Some(point) = free_at.filter(|_| !turn.capturing) {
            // SAFETY: the lane's stream is live.
            unsafe { point.order(self.lane(turn.lane).stream())? };
            // Not sooner: whoever gets the slot if that fails has to wait too.
            self.slots.lock().free_at[index] = None;
        }
        Ok(slot)
    }

    /// A slot for a graph: one that graphs use already, else one whose last user has finished.
    fn take_captured(&self, ep: &Inner, op: &'static str) -> Result<usize> {
        let none = EpError::NoFreeSlot { op, slots: ep.slots.count() };
        let mut states = self.slots.lock();
        if states.captured_free != 0 {
            let index = states.captured_free.trailing_zeros() as usize;
            states.captured_free &= states.captured_free - 1;
            return Ok(index);
        }
        let index = ep.slots.take().ok_or(none)?;
        let busy = match &states.free_at[index] {
            Some(point) => !self.machine.is_done_in_capture(&**point)?,
            None => false,
        };
        if busy {
            ep.slots.give_back(index);
            let detail = "the free slot is still read by work submitted before the capture; \
                          synchronise before capturing";
            return Err(EpError::argument(op, detail));
        }
        states.free_at[index] = None;
        states.captured |= 1 << index;
        Ok(index)
    }

    /// A slot that an eager call filled is used by a graph from now on.
    pub(super) fn capture_slot(&self, index: usize) {
        self.slots.lock().captured |= 1 << index;
    }

    /// The slot's owner is done with it, on `last` if it was used on a stream.
    pub fn give_back(&self, ep: &Inner, index: usize, last: Option<Queue>) {
        let mut states = self.slots.lock();
        if states.captured & 1 << index != 0 {
            states.captured_free |= 1 << index;
            return;
        }
        if let Some((raw, _)) = last.and_then(|queue| queue.raw()) {
            // SAFETY: a queue's stream is live as long as what was submitted to it.
            if unsafe { self.machine.is_capturing(raw) }.unwrap_or(false) {
                // What was captured may use it whenever the graph is launched, and what was submitted
                // before may be using it still: no other call gets it.
                states.captured |= 1 << index;
                tracing::debug!("slot {index} stays with a graph: it was dropped during a capture");
                return;
            }
            // SAFETY: as above.
            match unsafe { self.machine.record(raw) } {
                Ok(point) => states.free_at[index] = Some(point),
                Err(error) => {
                    // Never offered to peers again, rather than while it may be read.
                    tracing::warn!("slot {index} is given up: {error}");
                    return;
                }
            }
        }
        drop(states);
        ep.slots.give_back(index);
    }

    /// The slot may be offered after `point`.
    pub(super) fn free_after(&self, slot: &mut Slot, point: &Arc<dyn Point>, turn: &Turn) {
        slot.unused();
        if !turn.capturing {
            self.slots.lock().free_at[slot.index()] = Some(point.clone());
        }
    }

    /// The event of a release: everything on `queue` so far.
    pub fn released(&self, ep: &Arc<Inner>, queue: &Queue) -> Event {
        let raw = match self.raw("release", queue) {
            Ok((raw, _)) => raw,
            Err(error) => return Event::failed(error),
        };
        // SAFETY: the queue's stream is live.
        match unsafe {
            self.machine.is_capturing(raw).and_then(|c| Ok((self.machine.record(raw)?, c)))
        } {
            Ok((point, captured)) => Event::on_stream(ep.clone(), point, [None; 2], captured),
            // Nothing tells when the queue gets there.
            Err(error) => Event::failed(error.into()),
        }
    }
}
