//! How the host reaches into memory of GPUs: a stream, and page-locked memory that copies go through
//! so that none of them makes the caller wait.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::driver::{Gpu, OP};
use super::memory::Setup;
use crate::{Deadline, Queue, Result};

/// Page-locked bytes of a hand.
const ROOM: usize = 4 << 20;
/// How long a hand that is put away waits for what was submitted to its stream.
const LAST: Duration = Duration::from_secs(30);

/// A stream of a GPU with page-locked memory. Put away, it waits for its stream and is used again:
/// taking memory and giving it back may wait for whatever runs on a GPU.
#[derive(Debug)]
pub(crate) struct Hand(Option<Parts>);

struct Parts {
    setup: Setup,
    /// Its page-locked memory, and how much of that copies under way may use.
    room: Mutex<(Locked, usize)>,
}

/// Page-locked memory.
struct Locked(Arc<Gpu>, *mut u8);

// SAFETY: an address that the value owns; who writes there holds the lock around it.
unsafe impl Send for Locked {}

impl Drop for Locked {
    fn drop(&mut self) {
        let Ok(_current) = self.0.current("close") else { return };
        // SAFETY: allocated once by `Parts::new`; copies that use it have ended.
        unsafe { (self.0.driver.host_free)(self.1.cast()) };
    }
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts").field("gpu", &self.setup.gpu.ordinal).finish_non_exhaustive()
    }
}

/// Hands that were put away.
static IDLE: Mutex<Vec<Parts>> = Mutex::new(Vec::new());

impl Parts {
    fn new(ordinal: usize) -> Result<Self> {
        /// `CU_MEMHOSTALLOC_PORTABLE`.
        const PORTABLE: u32 = 1;
        let gpu = Arc::new(Gpu::open(ordinal)?);
        let setup = Setup::new(&gpu)?;
        let mut at: *mut c_void = std::ptr::null_mut();
        let _current = gpu.current(OP)?;
        // SAFETY: a context is current; `at` is valid for the call.
        let code = unsafe { (gpu.driver.host_alloc)(&mut at, ROOM, PORTABLE) };
        gpu.check(OP, "cuMemHostAlloc", code)?;
        Ok(Self { setup, room: Mutex::new((Locked(gpu.clone(), at.cast()), 0)) })
    }
}

impl Hand {
    /// One for the GPU with this ordinal.
    pub fn take(ordinal: usize) -> Result<Self> {
        let mut idle = IDLE.lock();
        let known = idle.iter().position(|parts| parts.setup.gpu.ordinal == ordinal);
        let known = known.map(|at| idle.swap_remove(at));
        drop(idle);
        Ok(Self(Some(known.map_or_else(|| Parts::new(ordinal), Ok)?)))
    }

    /// Gives back those that were put away. Streams get hardware queues in turn, so that those made one after
    /// the other have different ones; an old one may share that of a new one.
    #[cfg(all(test, feature = "rdma"))]
    pub fn none_idle() {
        IDLE.lock().clear();
    }

    fn parts(&self) -> &Parts {
        self.0.as_ref().expect("a hand has its parts until it drops")
    }

    /// Its stream. The caller uses it no longer than the hand.
    pub fn queue(&self) -> Queue {
        let setup = &self.parts().setup;
        // SAFETY: the stream lives as long as the hand, which waits for it when it drops.
        unsafe { Queue::from_raw(setup.raw.cast(), setup.gpu.ordinal) }
    }

    /// Waits, bounded, for everything submitted to the stream.
    pub fn settle(&self, deadline: Deadline) -> Result<()> {
        self.parts().setup.wait("what was submitted", deadline)
    }

    /// Page-locked room for `bytes`, not more than there is, until the stream has been waited for.
    fn room(&self, bytes: usize, deadline: Deadline) -> Result<*mut u8> {
        let mut room = self.parts().room.lock();
        if room.1 + bytes > ROOM {
            self.settle(deadline)?;
            room.1 = 0;
        }
        let at = room.1;
        room.1 = (at + bytes).next_multiple_of(256);
        // SAFETY: inside the allocation: what does not fit starts at 0, and callers split the rest.
        Ok(unsafe { room.0.1.add(at) })
    }

    /// Copies `data` to `to` in the order of the stream.
    ///
    /// # Safety
    /// The range is of memory that the GPU may write until the hand drops.
    pub unsafe fn write(&self, to: u64, data: &[u8], deadline: Deadline) -> Result<()> {
        for (i, part) in data.chunks(ROOM / 4).enumerate() {
            let room = self.room(part.len(), deadline)?;
            // SAFETY: room that nobody else uses before the stream has been waited for.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), room, part.len()) };
            let to = to + (i * (ROOM / 4)) as u64;
            self.parts().setup.submit_copy(to, room as u64, part.len())?;
        }
        Ok(())
    }

    /// Copies from `from` in the order of the stream, and waits.
    ///
    /// # Safety
    /// The range is of memory that the GPU may read.
    pub unsafe fn read(&self, from: u64, into: &mut [u8], deadline: Deadline) -> Result<()> {
        for (i, part) in into.chunks_mut(ROOM / 4).enumerate() {
            let room = self.room(part.len(), deadline)?;
            let from = from + (i * (ROOM / 4)) as u64;
            self.parts().setup.submit_copy(room as u64, from, part.len())?;
            self.settle(deadline)?;
            // SAFETY: the copy into this room is done, and nobody else uses it.
            unsafe { std::ptr::copy_nonoverlapping(room, part.as_mut_ptr(), part.len()) };
        }
        Ok(())
    }

    /// Copies between two places of GPUs in the order of the stream.
    ///
    /// # Safety
    /// Both ranges are of memory that the GPU may use so until the hand drops.
    pub unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        if bytes == 0 { Ok(()) } else { self.parts().setup.submit_copy(to, from, bytes) }
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        let settled = self.settle(Deadline::after(LAST));
        let Some(parts) = self.0.take() else { return };
        match settled {
            Ok(()) => IDLE.lock().push(parts),
            Err(error) => {
                tracing::warn!(%error, "a stream does not end; it is left as it is");
                std::mem::forget(parts);
            }
        }
    }
}
