//! Copies of results, which the host waits for.

use ep_transport::Queue;

use crate::ep::Inner;
use crate::result::Dispatched;
use crate::{Owned, Result};

use super::{Gpu, Point, cuda};

impl Gpu {
    pub fn download(&self, from: &Dispatched, queue: &Queue) -> Result<Owned> {
        const OP: &str = "to_host";
        let (raw, _) = self.raw(OP, queue)?;
        let deadline = from.ep.deadline();
        // SAFETY: the queue's stream is live.
        let point = unsafe { self.machine.record(raw)? };
        self.await_point(&from.ep, OP, &*point, deadline)?;
        Owned::download(from, |to, at, bytes| {
            let (to, at, limit) = (to as u64, at as u64, deadline.remaining());
            // SAFETY: the rows are in the slot that `from` owns, and `to` has so many bytes.
            cuda(unsafe { self.machine.copy(OP, (to, at, bytes), limit) })
        })
    }

    pub fn duplicate(&self, from: &Dispatched, queue: &Queue) -> Result<Owned> {
        const OP: &str = "into_owned";
        let (raw, _) = self.raw(OP, queue)?;
        let deadline = from.ep.deadline();
        // SAFETY: the queue's stream is live.
        let point = unsafe { self.machine.record(raw)? };
        self.await_point(&from.ep, OP, &*point, deadline)?;
        Owned::duplicate(from, |at, bytes| {
            // SAFETY: the rows are in the slot that `from` owns.
            cuda(unsafe { self.machine.duplicate(OP, (at as u64, bytes), deadline) })
        })
    }

    /// Waits, bounded, on the host for a point in a stream.
    pub fn await_point(
        &self,
        ep: &Inner,
        op: &'static str,
        point: &dyn Point,
        deadline: ep_transport::Deadline,
    ) -> Result<()> {
        let mut spins = 0u32;
        while !point.is_done()? {
            if deadline.expired() {
                let mut peers: Vec<usize> =
                    (0..self.lanes.len()).flat_map(|lane| self.absent(ep, lane)).collect();
                peers.sort_unstable();
                peers.dedup();
                let hint = " (work on the stream did not end)".into();
                let after = deadline.length();
                return Err(ep_transport::TransportError::Timeout { op, peers, after, hint }.into());
            }
            self.machine.pause(&mut spins);
        }
        ep.usable(op)
    }
}
