//! A CUDA thread: its control block and its fiber.

use std::ffi::c_void;
use std::ptr::null;

use corosensei::{Coroutine, Yielder};

use super::block::Block;
use super::stack::Slot;

/// What a thread is. Its first part is `EpThread` of src/shim/cuda.hpp; it lies above the thread's stack,
/// where the kernel's code finds it.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Thread {
    pub thread: [u32; 3],
    pub block: [u32; 3],
    pub block_size: [u32; 3],
    pub grid_size: [u32; 3],
    pub shared: *mut u8,
    pub shared_bytes: u32,
    pub static_bytes: u32,
    /// The block; alive as long as its fibers are.
    pub owner: *mut Block,
    /// Set while the fiber runs.
    pub yielder: *const Yielder<(), ()>,
    /// Number of the thread in its block.
    pub linear: u32,
    /// What it gets when it goes on.
    pub answer: u64,
    /// Whether it is in the emulator's own code, which is not interrupted.
    pub asking: bool,
}

/// How a fiber ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The kernel returned.
    Returned,
    /// A memory fault at an address.
    Fault(u64),
    /// The launch had taken too long.
    Endless,
}

/// A thread's fiber.
pub(super) type Fiber = Coroutine<(), (), End, Slot>;

/// A kernel's entry in its image.
pub(super) type Entry = unsafe extern "C" fn(*const *const c_void);

/// A fiber that runs `entry` once.
///
/// # Safety
/// `thread` is written, and its stack, the parameters and the image outlive the fiber, which is
/// reset before it is dropped unless it has ended.
pub(super) unsafe fn fiber(
    thread: *mut Thread,
    entry: Entry,
    params: *const *const c_void,
) -> Fiber {
    // SAFETY: the caller's promise.
    let slot = unsafe { Slot::below(thread) };
    Coroutine::with_stack(slot, move |yielder: &Yielder<(), ()>, ()| {
        // SAFETY: the caller's promise; the yielder lives until this closure returns.
        unsafe {
            (*thread).yielder = yielder;
            entry(params);
            (*thread).yielder = null();
        }
        End::Returned
    })
}

/// Lets others go on, until the executor resumes this fiber.
///
/// # Safety
/// Called on the thread's own fiber, with no reference into the block held.
pub(super) unsafe fn suspend(thread: *mut Thread) {
    // SAFETY: set for as long as the fiber runs.
    unsafe { (*(*thread).yielder).suspend(()) };
}
