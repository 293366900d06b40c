//! Tests of the functions as callers meet them.

mod capture;
mod device;
mod launch;
mod memory;
mod stream;

use std::time::{Duration, Instant};

use super::api::*;
use super::arg::{In, Out, Text};
use super::code::Code;
use super::context;
use super::table::Handle;

/// The kernel that the transport loads.
const PTX: &str =
    concat!(include_str!("../../../../../crates/ep-transport/src/nvlink/words.ptx"), "\0");

#[track_caller]
fn ok(code: Code) {
    assert_eq!(code, Code::SUCCESS);
}

/// What a function writes.
#[track_caller]
fn made<T: Default>(call: impl FnOnce(Out<T>) -> Code) -> T {
    let mut value = T::default();
    ok(call(Out::to(&mut value)));
    value
}

/// A context of its own, current on this thread, with so many hardware queues.
struct Here(Handle);

impl Here {
    fn new(device: usize, connections: usize) -> Self {
        ok(cuInit(0));
        Self(context::create(device, connections).unwrap())
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        ok(cuCtxDestroy_v2(self.0));
    }
}

fn stream() -> Handle {
    made(|to| cuStreamCreate(to, 1))
}

fn event() -> Handle {
    made(|to| cuEventCreate(to, 0))
}

/// Page-locked words, zeroed.
fn words(count: usize) -> usize {
    let at: usize = made(|to| cuMemHostAlloc(to, 4 * count, 3));
    (0..count).for_each(|i| store(at + 4 * i, 0));
    at
}

fn word(at: usize) -> &'static std::sync::atomic::AtomicU32 {
    // SAFETY: page-locked words of the test, which outlive it or what it does with them.
    unsafe { std::sync::atomic::AtomicU32::from_ptr(at as *mut u32) }
}

fn store(at: usize, value: u32) {
    word(at).store(value, std::sync::atomic::Ordering::SeqCst);
}

fn load(at: usize) -> u32 {
    word(at).load(std::sync::atomic::Ordering::SeqCst)
}

/// Waits, bounded, for something.
#[track_caller]
fn soon(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}: not within 20 s");
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// As long as something that must not happen gets.
fn a_while() {
    std::thread::sleep(Duration::from_millis(30));
}
