//! What kernels call: the table that src/shim/cuda.hpp knows as `EpHost`.

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::block::{Block, Step, Wait};
use super::thread::{Thread, suspend};

/// The table.
#[repr(C)]
pub(super) struct Host {
    block: unsafe extern "C" fn(*mut Thread, u32, u32) -> u32,
    warp: unsafe extern "C" fn(*mut Thread, u32, u32, u64, u32) -> u64,
    fault: unsafe extern "C" fn(*mut Thread, *const c_char, u64) -> !,
    special: unsafe extern "C" fn(*mut Thread, u32) -> u64,
    hold_until: unsafe extern "C" fn(*mut Thread, u64),
    pause: unsafe extern "C" fn(*mut Thread),
    barrier_init: unsafe extern "C" fn(*mut Thread, u32),
    barriers_ready: unsafe extern "C" fn(*mut Thread),
    barrier_wait: unsafe extern "C" fn(*mut Thread, u32, u32),
    bulk_load: unsafe extern "C" fn(*mut Thread, u32, u64, u32, u32),
    bulk_store: unsafe extern "C" fn(*mut Thread, u64, u32, u32),
    bulk_commit: unsafe extern "C" fn(*mut Thread),
    bulk_wait: unsafe extern "C" fn(*mut Thread, u32, u32),
}

pub(super) static HOST: Host = Host {
    block,
    warp,
    fault,
    special,
    hold_until,
    pause,
    barrier_init,
    barriers_ready,
    barrier_wait,
    bulk_load,
    bulk_store,
    bulk_commit,
    bulk_wait,
};

/// Nanoseconds of the clock that stands for `%globaltimer`.
pub(super) fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Asks the block on behalf of a thread, which waits or goes on as it is told.
///
/// # Safety
/// Called on the fiber of `thread`, whose block runs.
unsafe fn ask(thread: *mut Thread, question: impl FnMut(&mut Block, u32) -> Step) -> u64 {
    // SAFETY: the thread's own control block; the handler that reads the field runs on this thread too.
    let set = |asking: bool| unsafe { (&raw mut (*thread).asking).write_volatile(asking) };
    set(true);
    // SAFETY: the caller's promise.
    let answer = unsafe { ask_on(thread, question) };
    set(false);
    answer
}

/// As [`ask`].
///
/// # Safety
/// As [`ask`].
unsafe fn ask_on(thread: *mut Thread, mut question: impl FnMut(&mut Block, u32) -> Step) -> u64 {
    loop {
        // SAFETY: the block outlives its fibers, of which this is the only one that runs; the executor
        // holds no reference meanwhile.
        let (block, me) = unsafe { (&mut *(*thread).owner, (*thread).linear) };
        let step = catch_unwind(AssertUnwindSafe(|| question(block, me)))
            .unwrap_or_else(|_| Step::Fault("the emulator itself failed".into()));
        let again = match step {
            Step::Go(answer) => return answer,
            Step::Wait(wait) => {
                block.wait(me, wait);
                false
            }
            Step::Again(wait) => {
                block.wait(me, wait);
                true
            }
            Step::Fault(report) => {
                block.fault = Some(report);
                // The executor never resumes a block with a fault.
                true
            }
        };
        // SAFETY: as above; no reference is used behind this line.
        unsafe { suspend(thread) };
        if !again {
            // SAFETY: as above.
            return unsafe { (*thread).answer };
        }
    }
}

unsafe extern "C" fn block(thread: *mut Thread, kind: u32, value: u32) -> u32 {
    // SAFETY: called by a kernel, on its thread's fiber.
    unsafe { ask(thread, |block, me| block.sync(me, kind, value)) as u32 }
}

unsafe extern "C" fn warp(
    thread: *mut Thread,
    kind: u32,
    mask: u32,
    value: u64,
    argument: u32,
) -> u64 {
    // SAFETY: called by a kernel, on its thread's fiber.
    unsafe { ask(thread, |block, me| block.warp(me, kind, mask, value, argument)) }
}

unsafe extern "C" fn fault(thread: *mut Thread, what: *const c_char, value: u64) -> ! {
    // SAFETY: a string literal of the shim's.
    let what = unsafe { CStr::from_ptr(what) }.to_string_lossy();
    loop {
        // SAFETY: called by a kernel, on its thread's fiber.
        unsafe { ask(thread, |_, me| Step::Fault(format!("thread {me}: {what}: {value:#x}"))) };
    }
}

unsafe extern "C" fn special(thread: *mut Thread, which: u32) -> u64 {
    if which == 0 {
        return now();
    }
    // SAFETY: called by a kernel, on its thread's fiber.
    unsafe { ask(thread, |block, _| Step::Go(block.special(which))) }
}

unsafe extern "C" fn hold_until(thread: *mut Thread, deadline: u64) {
    let hold = |_: &mut Block, _| match now() >= deadline {
        true => Step::Go(0),
        false => Step::Again(Wait::Until(deadline)),
    };
    // SAFETY: called by a kernel, on its thread's fiber.
    unsafe { ask(thread, hold) };
}

unsafe extern "C" fn pause(thread: *mut Thread) {
    let pause = |block: &mut Block, _| match block.random.once_in(16) {
        true => Step::Wait(Wait::Nothing),
        false => Step::Go(0),
    };
    // SAFETY: called by a kernel, on its thread's fiber.
    unsafe { ask(thread, pause) };
}

unsafe extern "C" fn barrier_init(thread: *mut Thread, barrier: u32) {
    // SAFETY: called by a kernel, on its thread's fiber.
    unsafe { ask(thread, |block, me| block.barrier_init(me, barrier)) };
}

unsafe extern "C" fn barriers_ready(thread: *mut Thread) {
    // SAFETY: called by a kernel, on its thread's fiber.
    unsafe { ask(thread, |block, me| block.barriers_ready(me)) };
}

unsafe extern "C" fn barrier_wait(thread: *mut Thread, barrier: u32, parity: u32) {
    // SAFETY: called by a kernel, on its thread's fiber.
    unsafe { ask(thread, |block, me| block.barrier_wait(me, barrier, parity)) };
}

unsafe extern "C" fn bulk_load(thread: *mut Thread, to: u32, from: u64, bytes: u32, barrier: u32) {
    // SAFETY: called by a kernel, on its thread's fiber.
    unsafe { ask(thread, |block, me| block.bulk_load(me, to, from, bytes, barrier)) };
}

unsafe extern "C" fn bulk_store(thread: *mut Thread, to: u64, from: u32, bytes: u32) {
    // SAFETY: called by a kernel, on its thread's fiber.
    unsafe { ask(thread, |block, me| block.bulk_store(me, to, from, bytes)) };
}

unsafe extern "C" fn bulk_commit(thread: *mut Thread) {
    // SAFETY: called by a kernel, on its thread's fiber.
    unsafe { ask(thread, |block, me| block.bulk_commit(me)) };
}

unsafe extern "C" fn bulk_wait(thread: *mut Thread, newest: u32, written: u32) {
    // SAFETY: called by a kernel, on its thread's fiber.
    unsafe { ask(thread, |block, me| block.bulk_wait(me, newest, written != 0)) };
}
