//! How the checks reach into windows, wherever they are, and where their operations take their turn.
//!
//! Windows in host memory are loaded from and stored to. Those on a GPU are reached by copies of the
//! driver: on the host queue each is waited for; on a stream they are submitted, between the signals
//! and waits they belong between, and only what the checks look at is waited for.

use std::fmt::Debug;
use std::sync::Arc;

use super::Queues;
use crate::{Deadline, Link, Memory, Queue, Result, TransportError};

/// One thread's way into windows. Ranges are those of mapped windows, checked by who calls.
pub(super) trait Access: Debug + Send + Sync {
    fn queue(&self) -> Queue;

    /// Stores `data` at `to`.
    fn write(&self, to: *mut u8, data: &[u8], deadline: Deadline) -> Result<()>;

    /// Copies from one window to another.
    fn copy(&self, to: *mut u8, from: *const u8, bytes: usize, deadline: Deadline) -> Result<()>;

    /// Loads what is at `from` once everything on the queue has happened.
    fn read(&self, from: *const u8, into: &mut [u8], deadline: Deadline) -> Result<()>;

    /// The same with a queue of its own.
    fn another(&self) -> Result<Arc<dyn Access>>;
}

/// The way into the windows of `link`, in the order of queues of a kind.
pub(super) fn access(link: &dyn Link, queues: Queues) -> Result<Arc<dyn Access>> {
    match (link.memory(), queues) {
        (Memory::Host, Queues::Host) => Ok(Arc::new(OnHost)),
        #[cfg(feature = "cuda")]
        (Memory::Cuda { ordinal }, Queues::Host) => device::access(ordinal, false),
        #[cfg(feature = "cuda")]
        (Memory::Cuda { ordinal }, Queues::Streams) if link.stream_side().is_some() => {
            device::access(ordinal, true)
        }
        (memory, queues) => {
            let detail = format!("no way into windows in {memory:?} in the order of {queues:?}");
            Err(TransportError::Unsupported { op: "open", detail })
        }
    }
}

#[derive(Debug)]
struct OnHost;

impl Access for OnHost {
    fn queue(&self) -> Queue {
        Queue::host()
    }

    fn write(&self, to: *mut u8, data: &[u8], _: Deadline) -> Result<()> {
        // SAFETY: in a mapped window, as who calls checked; by the check's protocol nobody else
        // accesses the range meanwhile.
        unsafe { std::ptr::copy(data.as_ptr(), to, data.len()) };
        Ok(())
    }

    fn copy(&self, to: *mut u8, from: *const u8, bytes: usize, _: Deadline) -> Result<()> {
        // SAFETY: both ranges are in mapped windows, as who calls checked; by the check's protocol
        // nobody else writes them meanwhile.
        unsafe { std::ptr::copy(from, to, bytes) };
        Ok(())
    }

    fn read(&self, from: *const u8, into: &mut [u8], _: Deadline) -> Result<()> {
        for (i, byte) in into.iter_mut().enumerate() {
            // SAFETY: in a mapped window. A transport that breaks its promises may race here; that
            // is what checks are about, and a byte read wrong is reported.
            *byte = unsafe { from.add(i).read_volatile() };
        }
        Ok(())
    }

    fn another(&self) -> Result<Arc<dyn Access>> {
        Ok(Arc::new(OnHost))
    }
}

#[cfg(feature = "cuda")]
mod device {
    use super::*;
    use crate::nvlink::Hand;

    #[derive(Debug)]
    struct OnDevice {
        hand: Hand,
        ordinal: usize,
        /// Signals and waits are on the hand's stream too.
        streams: bool,
    }

    pub(super) fn access(ordinal: usize, streams: bool) -> Result<Arc<dyn Access>> {
        Ok(Arc::new(OnDevice { hand: Hand::take(ordinal)?, ordinal, streams }))
    }

    impl OnDevice {
        /// On the host queue everything has happened when a call returns.
        fn settle_on_host(&self, deadline: Deadline) -> Result<()> {
            if self.streams { Ok(()) } else { self.hand.settle(deadline) }
        }
    }

    impl Access for OnDevice {
        fn queue(&self) -> Queue {
            if self.streams { self.hand.queue() } else { Queue::host() }
        }

        fn write(&self, to: *mut u8, data: &[u8], deadline: Deadline) -> Result<()> {
            // SAFETY: in a window, as who calls checked; the link is dropped after this value.
            unsafe { self.hand.write(to as u64, data, deadline) }?;
            self.settle_on_host(deadline)
        }

        fn copy(&self, to: *mut u8, from: *const u8, bytes: usize, by: Deadline) -> Result<()> {
            // SAFETY: both ranges are in windows, as who calls checked; the link is dropped after this
            // value.
            unsafe { self.hand.copy(to as u64, from as u64, bytes) }?;
            self.settle_on_host(by)
        }

        fn read(&self, from: *const u8, into: &mut [u8], deadline: Deadline) -> Result<()> {
            // SAFETY: in a window, as who calls checked.
            unsafe { self.hand.read(from as u64, into, deadline) }
        }

        fn another(&self) -> Result<Arc<dyn Access>> {
            access(self.ordinal, self.streams)
        }
    }
}
