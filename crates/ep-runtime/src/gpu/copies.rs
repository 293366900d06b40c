//! Copies of results, which the host waits for.

use ep_kernels::cuda::{DeviceMemory, Event as Point};
use ep_transport::Queue;

use crate::ep::Inner;
use crate::result::Dispatched;
use crate::{Owned, Result};

use super::{Gpu, pause};

impl Gpu {
    pub fn download(&self, from: &Dispatched, queue: &Queue) -> Result<Owned> {
        const OP: &str = "to_host";
        let (raw, _) = self.raw(OP, queue)?;
        let deadline = from.ep.deadline();
        let point = unsafe {
            // SAFETY: the queue's stream is live.
            self.events.record(raw)?
        };
        self.await_point(&from.ep, OP, &point, deadline)?;
        let staging = &self.copies;
        Owned::download(from, |to, at, bytes| {
            // SAFETY: the rows are in the slot that `from` owns, `to` has so many bytes, and the
            // wait below keeps both until the copy is done.
            unsafe { self.device.copy(staging.raw(), to as u64, at as u64, bytes)? };
            Ok(staging.wait(OP, deadline.remaining())?)
        })
    }

    pub fn duplicate(&self, from: &Dispatched, queue: &Queue) -> Result<Owned> {
        const OP: &str = "into_owned";
        let (raw, _) = self.raw(OP, queue)?;
        let deadline = from.ep.deadline();
        let staging = &self.copies;
        // SAFETY: the queue's stream is live.
        let point = unsafe { self.events.record(raw)? };
        self.await_point(&from.ep, OP, &point, deadline)?;
        Owned::duplicate(from, |at, bytes| {
            let memory = DeviceMemory::zeroed(staging, bytes, deadline.remaining())?;
            // SAFETY: the rows are in the slot that `from` owns; the wait keeps both until the copy
            // is done.
            unsafe { self.device.copy(staging.raw(), memory.address(), at as u64, bytes)? };
            staging.wait(OP, deadline.remaining())?;
            Ok(memory)
        })
    }

    /// Waits, bounded, on the host for a point in a stream.
    pub fn await_point(
        &self,
        ep: &Inner,
        op: &'static str,
        point: &Point,
        deadline: ep_transport::Deadline,
    ) -> Result<()> {
        let mut spins = 0u32;
        while !point.is_done()? {
            if deadline.expired() {
                let (peers, hint) = (Vec::new(), " (work on the stream did not end)".into());
                let after = deadline.length();
                return Err(ep_transport::TransportError::Timeout { op, peers, after, hint }.into());
            }
            pause(&mut spins);
        }
        ep.usable(op)
    }
}
