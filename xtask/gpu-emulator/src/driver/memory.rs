//! Memory that addresses of the driver lie in: of devices, page-locked, registered, mapped.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, RwLock};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};

use super::code::{Code, Result};
use super::config::config;
use super::table::Handle;

const PAGE: usize = 4096;
/// Alignment that CUDA promises, and not more.
const ALIGN: usize = 256;
/// Addresses of which none is used twice.
const ARENA: usize = 8 << 40;
/// As much poison as one file holds.
const POISON: usize = 16 << 20;
/// From so many bytes on, zeroes are fresh pages.
const FRESH: usize = 1 << 20;
/// The most devices.
pub const DEVICES: usize = 16;

/// What a range of addresses is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// `cuMemAlloc` on a device.
    Device(usize),
    /// `cuMemMap`, memory of a device.
    Mapped(usize),
    /// `cuMemHostAlloc`.
    Pinned,
    /// `cuMemHostRegister`.
    Registered,
}

/// Addresses that the driver knows.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub start: usize,
    pub bytes: usize,
    pub place: Place,
    /// The context it goes with, or 0.
    pub context: Handle,
    /// Devices that may use it, a bit each.
    pub access: u32,
}

static RANGES: RwLock<BTreeMap<usize, Range>> = RwLock::new(BTreeMap::new());
static USED: [AtomicUsize; DEVICES] = [const { AtomicUsize::new(0) }; DEVICES];

struct Arena {
    base: usize,
    next: Mutex<usize>,
}

fn no_access() -> ProtFlags {
    ProtFlags::empty()
}

fn read_write() -> ProtFlags {
    ProtFlags::READ | ProtFlags::WRITE
}

fn arena() -> &'static Arena {
    static ARENA_AT: OnceLock<Arena> = OnceLock::new();
    ARENA_AT.get_or_init(|| {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: new addresses, of the kernel's choice.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), ARENA, no_access(), flags) };
        let base = base.expect("terabytes of addresses") as usize;
        Arena { base, next: Mutex::new(base.next_multiple_of(2 << 20)) }
    })
}

/// New addresses, followed by some that fault.
pub fn addresses(bytes: usize, align: usize) -> Result<usize> {
    let arena = arena();
    let mut next = arena.next.lock();
    let start = next.next_multiple_of(align);
    let end = start.checked_add(bytes).filter(|end| end + align < arena.base + ARENA);
    *next = end.ok_or(Code::OUT_OF_MEMORY)? + align;
    Ok(start)
}

/// Whether the driver gave this address at some time.
fn is_ours(address: usize) -> bool {
    let arena = arena();
    (arena.base..arena.base + ARENA).contains(&address)
}

/// From now on whoever touches these addresses of the arena faults.
pub fn close(start: usize, bytes: usize) {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: addresses of the arena, which nobody may use any more.
    let closed = unsafe { mmap_anonymous(start as *mut c_void, bytes, no_access(), flags) };
    closed.expect("a mapping in place of another");
}

/// A file of ones, which fresh memory is a private copy of.
fn poison() -> &'static OwnedFd {
    static FILE: OnceLock<OwnedFd> = OnceLock::new();
    FILE.get_or_init(|| {
        let file = memfd_create("ep-gpu-emulator-poison", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&file, POISON as u64).expect("room");
        let flags = MapFlags::SHARED;
        // SAFETY: new addresses, of the kernel's choice; as long as the file.
        let at = unsafe { mmap(std::ptr::null_mut(), POISON, read_write(), flags, &file, 0) };
        let at = at.expect("a mapping");
        // SAFETY: just mapped, so long, and unmapped once.
        unsafe {
            std::ptr::write_bytes(at.cast::<u8>(), 0xff, POISON);
            rustix::mm::munmap(at, POISON).expect("it was mapped");
        }
        file
    })
}

/// Maps memory of ones at addresses of the arena.
fn open_poisoned(start: usize, bytes: usize) -> Result<()> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    for at in (start..start + bytes).step_by(POISON) {
        let part = POISON.min(start + bytes - at);
        // SAFETY: addresses of the arena that nobody knows yet.
        unsafe { mmap(at as *mut c_void, part, read_write(), flags, poison(), 0) }
            .map_err(|_| Code::OUT_OF_MEMORY)?;
    }
    Ok(())
}

/// Takes bytes off what a device has.
pub fn charge(device: usize, bytes: usize) -> Result<()> {
    let most = config()?.bytes;
    let more = |used: usize| used.checked_add(bytes).filter(|used| *used <= most);
    let charged = USED[device].fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
    charged.map(drop).map_err(|_| Code::OUT_OF_MEMORY)
}

/// Gives them back.
pub fn refund(device: usize, bytes: usize) {
    USED[device].fetch_sub(bytes, Ordering::AcqRel);
}

/// Free and all bytes of a device.
pub fn info(device: usize) -> Result<(usize, usize)> {
    let all = config()?.bytes;
    Ok((all - USED[device].load(Ordering::Acquire), all))
}

/// Memory of ones that ends right before addresses that fault, as far as its alignment allows.
pub fn allocate(place: Place, bytes: usize, context: Handle) -> Result<usize> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let whole = bytes.checked_next_multiple_of(PAGE).ok_or(Code::OUT_OF_MEMORY)?;
    if let Place::Device(device) = place {
        charge(device, whole)?;
    }
    let made = addresses(whole, PAGE).and_then(|at| open_poisoned(at, whole).map(|()| at));
    let Ok(at) = made else {
        if let Place::Device(device) = place {
            refund(device, whole);
        }
        return Err(Code::OUT_OF_MEMORY);
    };
    let start = at + whole - bytes.next_multiple_of(ALIGN).min(whole);
    insert(Range { start, bytes, place, context, access: u32::MAX });
    Ok(start)
}

/// Frees what [`allocate`] gave for such a place.
pub fn free(start: usize, is: impl Fn(Place) -> bool) -> Result<()> {
    let range = remove(start, is)?;
    let page = start / PAGE * PAGE;
    let whole = range.bytes.next_multiple_of(PAGE);
    close(page, whole);
    if let Place::Device(device) = range.place {
        refund(device, whole);
    }
    Ok(())
}

pub fn insert(range: Range) {
    RANGES.write().insert(range.start, range);
}

/// Forgets the range that starts here, if it is such a place.
pub fn remove(start: usize, is: impl Fn(Place) -> bool) -> Result<Range> {
    let mut ranges = RANGES.write();
    match ranges.get(&start) {
        Some(range) if is(range.place) => Ok(ranges.remove(&start).expect("just seen")),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Lets these devices alone use a range.
pub fn set_access(start: usize, access: u32) -> Result<()> {
    let mut ranges = RANGES.write();
    ranges.get_mut(&start).ok_or(Code::INVALID_VALUE)?.access = access;
    Ok(())
}

/// The ranges that touch these addresses.
pub fn ranges_in(start: usize, bytes: usize) -> Vec<Range> {
    let ranges = RANGES.read();
    let touching = |range: &&Range| range.start + range.bytes > start;
    ranges
        .range(..start + bytes)
        .rev()
        .map(|(_, range)| range)
        .take_while(touching)
        .copied()
        .collect()
}

/// The range that an address lies in.
pub fn range_of(address: usize) -> Option<Range> {
    ranges_in(address, 1).first().copied()
}

/// What goes with a context.
pub fn ranges_of(context: Handle) -> Vec<Range> {
    RANGES.read().values().filter(|range| range.context == context).copied().collect()
}

/// That a copy or fill may name these addresses: memory that the driver knows from end to end, or
/// memory of the host that it does not know at all.
pub fn check(start: usize, bytes: usize) -> Result<Option<Range>> {
    match range_of(start) {
        Some(range) if start + bytes <= range.start + range.bytes => Ok(Some(range)),
        Some(range) if range.place == Place::Registered => Ok(Some(range)),
        None if !is_ours(start) => Ok(None),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// That a device may use these addresses now.
pub fn check_access(start: usize, bytes: usize, device: usize) -> Result<()> {
    match check(start, bytes) {
        Ok(None) => Ok(()),
        Ok(Some(range)) if range.access & (1 << device) != 0 => Ok(()),
        _ => Err(Code::ILLEGAL_ADDRESS),
    }
}

/// Zeroes memory of a range; much of it by taking its pages away.
pub fn zero(start: usize, bytes: usize) {
    let range = range_of(start).filter(|_| bytes >= FRESH);
    let (first, last) = (start.next_multiple_of(PAGE), (start + bytes) / PAGE * PAGE);
    let fresh = match range.map(|range| range.place) {
        Some(Place::Device(_)) => {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
            // SAFETY: whole pages of an allocation, of which new ones are zero.
            unsafe { mmap_anonymous(first as *mut c_void, last - first, read_write(), flags) }
                .is_ok()
        }
        // SAFETY: whole pages of a mapped memfd; a hole in it reads as zero.
        Some(Place::Mapped(_)) => unsafe {
            madvise(first as *mut c_void, last - first, Advice::LinuxRemove).is_ok()
        },
        _ => false,
    };
    let parts =
        if fresh { [(start, first), (last, start + bytes)] } else { [(start, start + bytes); 2] };
    for (from, to) in parts.into_iter().take(if fresh { 2 } else { 1 }) {
        // SAFETY: inside what the caller of the driver said is valid, checked as far as it is known.
        unsafe { std::ptr::write_bytes(from as *mut u8, 0, to - from) };
    }
}
