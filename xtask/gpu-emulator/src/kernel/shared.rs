//! Shared memory of a block, with nothing mapped on either side.

use std::ptr::null_mut;

use parking_lot::Mutex;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};

/// The most a block has, bytes.
pub(super) const MOST_SHARED: u32 = 256 << 10;
/// What static and dynamic shared memory are aligned to, bytes.
pub(super) const ALIGNMENT: u32 = 128;
/// What is there before anybody wrote.
const GARBAGE: u8 = 0xa5;
const GUARD: usize = 64 << 10;

static POOL: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// Shared memory of one block: its end is the end of what is mapped.
#[derive(Debug)]
pub(super) struct SharedMemory {
    region: usize,
    start: usize,
    bytes: u32,
}

impl SharedMemory {
    /// `bytes` of garbage, at most [`MOST_SHARED`].
    pub(super) fn take(bytes: u32) -> Result<SharedMemory, String> {
        let region = POOL.lock().pop();
        let region = match region {
            Some(region) => region,
            None => map_region().map_err(|error| format!("no shared memory: {error}"))?,
        };
        let length = bytes.next_multiple_of(ALIGNMENT) as usize;
        let start = region + MOST_SHARED as usize - length;
        let memory = SharedMemory { region, start, bytes };
        // SAFETY: the last `length` bytes of a region that this value alone holds.
        unsafe { memory.at().write_bytes(GARBAGE, length) };
        Ok(memory)
    }

    /// Its first byte.
    pub(super) fn at(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.start)
    }

    /// Bytes that were asked for.
    pub(super) fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Whether the few bytes between its end and the end of the mapping are as they were.
    pub(super) fn end_is_whole(&self) -> bool {
        let gap = self.bytes.next_multiple_of(ALIGNMENT) - self.bytes;
        (0..gap as usize).all(|i| {
            // SAFETY: behind `bytes`, before the end of the region that this value alone holds.
            unsafe { self.at().add(self.bytes as usize + i).read() == GARBAGE }
        })
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        POOL.lock().push(self.region);
    }
}

fn map_region() -> rustix::io::Result<usize> {
    let length = GUARD + MOST_SHARED as usize + GUARD;
    // SAFETY: a new mapping at no given place.
    let at = unsafe {
        mmap_anonymous(
            null_mut(),
            length,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )?
    };
    let region = at.expose_provenance() + GUARD;
    let inner = std::ptr::with_exposed_provenance_mut(region);
    // SAFETY: the middle of the mapping just made, which nobody uses yet.
    unsafe { mprotect(inner, MOST_SHARED as usize, MprotectFlags::READ | MprotectFlags::WRITE)? };
    Ok(region)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_garbage_each_time_and_its_end_is_watched() {
        for _ in 0..2 {
            let memory = SharedMemory::take(100).unwrap();
            assert_eq!(memory.at().addr() % ALIGNMENT as usize, 0);
            // SAFETY: 100 bytes and the 28 behind them are this value's.
            unsafe {
                assert!((0..100).all(|i| memory.at().add(i).read() == GARBAGE));
                assert!(memory.end_is_whole());
                memory.at().write_bytes(1, 100);
                assert!(memory.end_is_whole());
                memory.at().add(100).write(1);
            }
            assert!(!memory.end_is_whole());
        }
    }
}
