//! Stacks of fibers: aligned to their size, so that code on one finds what belongs to it.

use std::num::NonZeroUsize;
use std::ptr::null_mut;

use corosensei::stack::{Stack, StackPointer};
use parking_lot::Mutex;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};

use super::thread::Thread;

/// Size of a stack and what its address is a multiple of, bytes.
pub const STACK_BYTES: usize = 64 << 10;
/// Stacks start at as many different places of theirs, so that they do not share cache sets.
pub const STACK_COLOURS: usize = 32;
/// Distance between those places: room for what a thread is, bytes.
pub const STACK_SPAN: usize = 256;

const PAGE: usize = 4096;
/// Stacks that are mapped together: a warp's.
const GROUP: usize = 32;
/// Each stack is two mappings, of which a process has 65530 by default.
const MOST_GROUPS: usize = 768;

const _: () = assert!(size_of::<Thread>() <= STACK_SPAN);
const _: () = assert!(STACK_SPAN.is_multiple_of(corosensei::stack::STACK_ALIGNMENT));

/// Groups that nobody uses, and how many there are.
static POOL: Mutex<(Vec<usize>, usize)> = Mutex::new((Vec::new(), 0));

/// Stacks of a block.
#[derive(Debug)]
pub(super) struct Stacks {
    groups: Vec<usize>,
}

impl Stacks {
    /// Stacks for `threads` threads. `None` if there are no more, which `must` overrules.
    pub(super) fn take(threads: u32, must: bool) -> Result<Option<Stacks>, String> {
        let count = (threads as usize).div_ceil(GROUP);
        let mut stacks = Stacks { groups: Vec::with_capacity(count) };
        let mut pool = POOL.lock();
        if !must && pool.1 + count > MOST_GROUPS + pool.0.len() {
            return Ok(None);
        }
        for _ in 0..count {
            let group = match pool.0.pop() {
                Some(group) => group,
                None => {
                    pool.1 += 1;
                    map_group().map_err(|error| format!("no stacks: {error}"))?
                }
            };
            stacks.groups.push(group);
        }
        Ok(Some(stacks))
    }

    /// Where thread `linear` of the block has its control block: the stack ends below it.
    pub(super) fn thread(&self, linear: u32) -> *mut Thread {
        let group = self.groups[linear as usize / GROUP];
        let base = group + linear as usize % GROUP * STACK_BYTES;
        let colour = base / STACK_BYTES % STACK_COLOURS;
        std::ptr::with_exposed_provenance_mut(base + STACK_BYTES - STACK_SPAN * (colour + 1))
    }
}

impl Drop for Stacks {
    fn drop(&mut self) {
        let mut pool = POOL.lock();
        // The same stacks for the same warps next time: they are in the caches.
        pool.0.extend(self.groups.drain(..).rev());
    }
}

/// Maps a group, the lowest page of each stack out of reach.
fn map_group() -> rustix::io::Result<usize> {
    let length = (GROUP + 1) * STACK_BYTES;
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at no given place.
    let at = unsafe {
        mmap_anonymous(null_mut(), length, rights, MapFlags::PRIVATE | MapFlags::NORESERVE)?
    };
    let first = at.expose_provenance().next_multiple_of(STACK_BYTES);
    for stack in 0..GROUP {
        let lowest = std::ptr::with_exposed_provenance_mut(first + stack * STACK_BYTES);
        // SAFETY: a page of the mapping just made, which nobody uses yet.
        unsafe { mprotect(lowest, PAGE, MprotectFlags::empty())? };
    }
    Ok(first)
}

/// One stack, as its fiber knows it.
#[derive(Debug)]
pub(super) struct Slot {
    base: NonZeroUsize,
    limit: NonZeroUsize,
}

impl Slot {
    /// The stack below a control block.
    ///
    /// # Safety
    /// `thread` is [`Stacks::thread`]'s; the stacks outlive the fiber, and no other uses this one.
    pub(super) unsafe fn below(thread: *mut Thread) -> Slot {
        let base = thread.addr();
        let limit = base & !(STACK_BYTES - 1);
        // No mapping is at 0.
        let end = |address| NonZeroUsize::new(address).unwrap_or(NonZeroUsize::MIN);
        Slot { base: end(base), limit: end(limit) }
    }
}

// SAFETY: `map_group` mapped the range and put a guard page at its lowest end; it is at least
// `STACK_BYTES - STACK_COLOURS * STACK_SPAN` long and aligned as its control block is.
unsafe impl Stack for Slot {
    fn base(&self) -> StackPointer {
        self.base
    }

    fn limit(&self) -> StackPointer {
        self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_have_stacks_of_their_own_and_their_place_follows_from_the_stack() {
        let stacks = Stacks::take(70, true).unwrap().unwrap();
        let mut places: Vec<usize> = (0..70).map(|t| stacks.thread(t).addr()).collect();
        for &place in &places {
            let base = place & !(STACK_BYTES - 1);
            let colour = base / STACK_BYTES % STACK_COLOURS;
            assert_eq!(place, base + STACK_BYTES - STACK_SPAN * (colour + 1));
        }
        places.sort_unstable();
        assert!(places.windows(2).all(|two| two[1] - two[0] > STACK_BYTES / 2));
    }
}
