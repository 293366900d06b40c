//! Windows on a GPU that is a table of functions: no GPU and no NIC takes part.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::super::mock::pages;
use super::*;

/// What the mock GPU is, and what was asked of it.
#[derive(Debug)]
struct State {
    ordering: AtomicI32,
    options: AtomicI32,
    dma_buf: AtomicI32,
    flushes: AtomicU32,
    pushed: AtomicI32,
    allocated: AtomicI32,
    locked: AtomicI32,
    /// Calls that give something back, from threads that others may wait for.
    freed_by_others: AtomicU32,
    exported: Mutex<Vec<(u64, usize, c_int, u64)>>,
}

static GPU: State = State {
    ordering: AtomicI32::new(0),
    options: AtomicI32::new(0),
    dma_buf: AtomicI32::new(0),
    flushes: AtomicU32::new(0),
    pushed: AtomicI32::new(0),
    allocated: AtomicI32::new(0),
    locked: AtomicI32::new(0),
    freed_by_others: AtomicU32::new(0),
    exported: Mutex::new(Vec::new()),
};
/// Tests that use the mock GPU take turns.
static TURN: Mutex<()> = Mutex::new(());
/// Writes of a NIC that have not become visible.
pub(in super::super) static POSTED: Mutex<Vec<(usize, Vec<u8>)>> = Mutex::new(Vec::new());

/// How the next test's GPU orders a NIC's writes, lets them be flushed, and exports memory.
pub(in super::super) fn gpu_with(
    (ordering, options, dma_buf): (i32, i32, i32),
    change: impl FnOnce(&mut Driver),
) -> (MutexGuard<'static, ()>, Arc<Gpu>) {
    let turn = TURN.lock();
    given_back();
    GPU.ordering.store(ordering, SeqCst);
    GPU.options.store(options, SeqCst);
    GPU.dma_buf.store(dma_buf, SeqCst);
    GPU.flushes.store(0, SeqCst);
    GPU.exported.lock().clear();
    POSTED.lock().clear();
    let mut driver = mock();
    change(&mut driver);
    (turn, Gpu::open(Box::leak(Box::new(driver)), 3).unwrap())
}

/// Waits until nothing is allocated or locked any more.
fn given_back() {
    let start = Instant::now();
    while [&GPU.allocated, &GPU.locked, &GPU.pushed].iter().any(|n| n.load(SeqCst) != 0) {
        assert!(start.elapsed() < Duration::from_secs(20), "memory is not given back: {GPU:?}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Only a thread that nobody waits for may make calls that wait for the GPU.
fn by_nobody_else() {
    let thread = std::thread::current();
    if thread.name() != Some("ep-reaper") {
        GPU.freed_by_others.fetch_add(1, SeqCst);
    }
}

fn mock() -> Driver {
    unsafe extern "C" fn error_name(_: c_int, into: *mut *const c_char) -> c_int {
        // SAFETY: the caller gives a place for a pointer.
        unsafe { into.write(c"CUDA_ERROR_OF_THE_TEST".as_ptr()) };
        0
    }
    unsafe extern "C" fn device_get(into: *mut c_int, ordinal: c_int) -> c_int {
        // SAFETY: the caller gives a place for a number.
        unsafe { into.write(ordinal + 100) };
        0
    }
    unsafe extern "C" fn attribute(into: *mut c_int, which: c_int, device: c_int) -> c_int {
        assert_eq!(device, 103);
        let value = match which {
            117 => &GPU.options,
            118 => &GPU.ordering,
            124 => &GPU.dma_buf,
            _ => return 1,
        };
        // SAFETY: the caller gives a place for a number.
        unsafe { into.write(value.load(SeqCst)) };
        0
    }
    unsafe extern "C" fn retain(into: *mut *mut c_void, _: c_int) -> c_int {
        // SAFETY: the caller gives a place for a handle.
        unsafe { into.write(std::ptr::without_provenance_mut(4096)) };
        0
    }
    unsafe extern "C" fn release(_: c_int) -> c_int {
        0
    }
    unsafe extern "C" fn push(_: *mut c_void) -> c_int {
        GPU.pushed.fetch_add(1, SeqCst);
        0
    }
    unsafe extern "C" fn pop(_: *mut *mut c_void) -> c_int {
        GPU.pushed.fetch_sub(1, SeqCst);
        0
    }
    unsafe extern "C" fn alloc(into: *mut u64, bytes: usize) -> c_int {
        // Not at a page, as small allocations of the driver are not.
        let layout = std::alloc::Layout::from_size_align(bytes + 4096, 4096).unwrap();
        // SAFETY: the size is not 0; the caller gives a place for an address.
        unsafe { into.write(std::alloc::alloc(layout) as u64 + 512) };
        GPU.allocated.fetch_add(1, SeqCst);
        0
    }
    unsafe extern "C" fn free(_: u64) -> c_int {
        by_nobody_else();
        // Tests are short: what they allocated stays.
        GPU.allocated.fetch_sub(1, SeqCst);
        0
    }
    unsafe extern "C" fn set(at: u64, value: u8, bytes: usize) -> c_int {
        // SAFETY: the caller owns the range, which `alloc` gave.
        unsafe { std::ptr::write_bytes(at as *mut u8, value, bytes) };
        0
    }
    unsafe extern "C" fn set_attribute(value: *const c_void, which: c_int, _: u64) -> c_int {
        // SAFETY: the attribute's value is an unsigned int.
        c_int::from(which != 6 || unsafe { *value.cast::<c_uint>() } != 1)
    }
    unsafe extern "C" fn host_register(_: *mut c_void, _: usize, flags: c_uint) -> c_int {
        GPU.locked.fetch_add(1, SeqCst);
        c_int::from(flags != 3)
    }
    unsafe extern "C" fn host_unregister(_: *mut c_void) -> c_int {
        by_nobody_else();
        GPU.locked.fetch_sub(1, SeqCst);
        0
    }
    unsafe extern "C" fn host_pointer(into: *mut u64, at: *mut c_void, _: c_uint) -> c_int {
        // SAFETY: the caller gives a place for an address.
        unsafe { into.write(at as u64) };
        0
    }
    unsafe extern "C" fn range_handle(
        into: *mut c_void,
        at: u64,
        bytes: usize,
        kind: c_int,
        flags: u64,
    ) -> c_int {
        GPU.exported.lock().push((at, bytes, kind, flags));
        let fd = rustix::fs::memfd_create("dma-buf", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        // SAFETY: the caller gives a place for a descriptor.
        unsafe { into.cast::<c_int>().write(fd.into_raw_fd()) };
        0
    }
    unsafe extern "C" fn flush(target: c_int, scope: c_int) -> c_int {
        assert_eq!((target, scope), (0, 100));
        assert!(GPU.pushed.load(SeqCst) > 0, "a context is current");
        GPU.flushes.fetch_add(1, SeqCst);
        for (at, bytes) in POSTED.lock().drain(..) {
            // SAFETY: a NIC of the test was asked to write there, and nobody else does.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
        }
        0
    }
    let mut driver = Driver::unused();
    driver.error_name = error_name;
    driver.device_get = device_get;
    driver.attribute = attribute;
    (driver.retain, driver.release) = (retain, release);
    (driver.push, driver.pop) = (push, pop);
    (driver.alloc, driver.free) = (alloc, free);
    driver.set = Some(set);
    driver.set_attribute = Some(set_attribute);
    driver.host_register = host_register;
    driver.host_unregister = host_unregister;
    driver.host_pointer = host_pointer;
    driver.range_handle = Some(range_handle);
    driver.flush = Some(flush);
    driver
}

type Registered = Vec<(usize, u64, usize)>;

/// Places a window of 100,000 bytes; what a NIC would register.
fn placed(gpu: &Arc<Gpu>, takes_dma_buf: bool) -> Result<(GpuWindow, Registered)> {
    let own = pages(200_704);
    place(gpu, (&own, 102_400), 100_000, |memory| {
        if !takes_dma_buf && memory.len() > 1 {
            return Err(Refused::Unreachable("takes no dma-buf".into()));
        }
        let of = |(from, source): &(usize, Source)| (*from, source.address(), source.bytes());
        Ok(memory.iter().map(of).collect())
    })
}

#[test]
fn a_window_on_the_device_is_exported_in_whole_pages() {
    let (_turn, gpu) = gpu_with((0, 1, 1), |_| {});
    let (window, memory) = placed(&gpu, true).unwrap();
    let base = window.base().as_ptr() as u64;
    assert_eq!(*GPU.exported.lock(), [(base, 2 << 16, 1, 0)], "a dma-buf, of what is the window");
    assert!(base.is_multiple_of(1 << 16));
    assert_eq!(memory[0], (0, base, 2 << 16));
    assert_eq!((memory[1].0, memory[1].2), (102_400, 98_304), "words are on the host");
    // SAFETY: memory of the mock GPU, which is this process's.
    let zeroed = unsafe { std::slice::from_raw_parts(window.base().as_ptr(), 100_000) };
    assert!(zeroed.iter().all(|&byte| byte == 0));
    assert_eq!(GPU.allocated.load(SeqCst), 1);
    drop(window);
    given_back();
    assert_eq!(GPU.freed_by_others.load(SeqCst), 0);
}

#[test]
fn who_flushes_is_what_the_gpu_says() {
    let flushes = |ordering, options| {
        let (_turn, gpu) = gpu_with((ordering, options, 1), |_| {});
        let (window, memory) = placed(&gpu, true).unwrap();
        window.flush().unwrap();
        (memory.len(), GPU.flushes.load(SeqCst))
    };
    assert_eq!(flushes(0, 1), (2, 1), "by a call");
    assert_eq!(flushes(0, 3), (2, 1), "by a call, though streams could");
    assert_eq!(flushes(100, 1), (2, 0), "ordered for the GPU itself");
    assert_eq!(flushes(200, 0), (2, 0), "ordered for all");
    // One area: the window is in the host's memory.
    assert_eq!(flushes(0, 2), (1, 0), "only streams can");
    assert_eq!(flushes(0, 0), (1, 0), "nobody can");
}

#[test]
fn without_dma_buf_the_window_is_in_locked_memory_of_the_host() {
    let on_host = |gpu: Arc<Gpu>, takes| {
        let (window, memory) = placed(&gpu, takes).unwrap();
        assert_eq!(memory.len(), 1);
        assert_eq!((memory[0].0, memory[0].2), (0, 200_704));
        assert_eq!(window.base().as_ptr() as u64, memory[0].1);
        assert_eq!(GPU.locked.load(SeqCst), 1);
        drop(window);
        given_back();
        assert_eq!(GPU.freed_by_others.load(SeqCst), 0);
    };
    let (turn, gpu) = gpu_with((100, 1, 0), |_| {});
    on_host(gpu, true);
    drop(turn);
    let (turn, gpu) = gpu_with((100, 1, 1), |driver| driver.range_handle = None);
    on_host(gpu, true);
    drop(turn);
    let (turn, gpu) = gpu_with((0, 1, 1), |driver| driver.flush = None);
    on_host(gpu, true);
    drop(turn);
    // The GPU could, the NIC cannot.
    let (_turn, gpu) = gpu_with((100, 1, 1), |_| {});
    on_host(gpu, false);
}

/// That something is not supported says nothing of where the window should be.
#[test]
fn what_a_nic_lacks_besides_is_an_error_and_no_other_window() {
    let (_turn, gpu) = gpu_with((100, 1, 1), |_| {});
    let own = pages(200_704);
    let opened = place(&gpu, (&own, 102_400), 100_000, |_| -> Result<(), Refused> {
        let detail = "the NIC has too few queue pairs".into();
        Err(TransportError::Unsupported { op: OP, detail }.into())
    });
    let text = opened.unwrap_err().to_string();
    assert!(text.contains("too few queue pairs"), "{text}");
    given_back();
}

#[test]
fn what_the_driver_refuses_is_an_error_and_no_other_window() {
    unsafe extern "C" fn none(_: *mut u64, _: usize) -> c_int {
        2
    }
    let (_turn, gpu) = gpu_with((100, 1, 1), |driver| driver.alloc = none);
    let text = placed(&gpu, true).unwrap_err().to_string();
    assert!(text.contains("cuMemAlloc failed with code 2: CUDA_ERROR_OF_THE_TEST"), "{text}");
    assert_eq!(GPU.pushed.load(SeqCst), 0);
}
