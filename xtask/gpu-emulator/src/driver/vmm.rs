//! Virtual memory management: memory as files, mapped where callers reserved addresses.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create, readlink};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect};

use super::code::{Code, Result};
use super::config::config;
use super::memory::{self, Place, Range};
use super::table::{Handle, Table, new_handle};

/// Granularity of an H200.
pub const UNIT: usize = 2 << 20;
/// Fresh memory is ones as far as this; what is behind would cost too much time.
const POISONED: usize = 8 << 20;
/// Names of the files, by which another process knows them.
const NAME: &str = "ep-gpu-emulator:";

/// `CUmemLocation` of a device, `CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_HANDLE_TYPE_...`.
const PINNED: i32 = 1;
const ON_DEVICE: i32 = 1;
const POSIX_FD: i32 = 1;
const FABRIC: i32 = 8;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Properties {
    pub kind: i32,
    pub handle_kinds: i32,
    pub location: Location,
    pub win32: usize,
    pub flags: [u8; 8],
}
const _: () = assert!(size_of::<Properties>() == 32);

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Location {
    pub kind: i32,
    pub id: i32,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Access {
    pub location: Location,
    pub flags: i32,
}

/// Memory of a device, here or of another process.
pub struct Physical {
    file: OwnedFd,
    bytes: usize,
    device: usize,
    imported: bool,
    exportable: bool,
}

impl Drop for Physical {
    fn drop(&mut self) {
        if !self.imported {
            memory::refund(self.device, self.bytes);
        }
    }
}

static HANDLES: Table<Physical> = Table::new();
/// What callers reserved, and what is mapped with what it is.
static RESERVED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());
static MAPPED: Mutex<BTreeMap<usize, Arc<Physical>>> = Mutex::new(BTreeMap::new());

impl Properties {
    fn check(&self, devices: usize) -> Result<()> {
        let device = usize::try_from(self.location.id).is_ok_and(|id| id < devices);
        if self.kind != PINNED || self.location.kind != ON_DEVICE || !device {
            return Err(Code::INVALID_VALUE);
        }
        match self.handle_kinds {
            0 | POSIX_FD => Ok(()),
            // No fabric manager gives leave.
            kinds if kinds & !(POSIX_FD | FABRIC) == 0 => Err(Code::NOT_PERMITTED),
            _ => Err(Code::NOT_SUPPORTED),
        }
    }
}

pub fn granularity(properties: &Properties, devices: usize) -> Result<usize> {
    Properties { handle_kinds: 0, ..*properties }.check(devices).map(|()| UNIT)
}

pub fn create(bytes: usize, properties: &Properties, devices: usize) -> Result<Handle> {
    properties.check(devices)?;
    if bytes == 0 || !bytes.is_multiple_of(UNIT) {
        return Err(Code::INVALID_VALUE);
    }
    let device = properties.location.id as usize;
    memory::charge(device, bytes)?;
    let made = file(device, bytes).inspect_err(|_| memory::refund(device, bytes))?;
    let exportable = properties.handle_kinds & POSIX_FD != 0;
    let physical = Physical { file: made, bytes, device, imported: false, exportable };
    Ok(keep(physical))
}

fn keep(physical: Physical) -> Handle {
    let handle = new_handle();
    HANDLES.insert(handle, Arc::new(physical));
    handle
}

fn file(device: usize, bytes: usize) -> Result<OwnedFd> {
    let oom = |_| Code::OUT_OF_MEMORY;
    let file = memfd_create(format!("{NAME}{device}"), MemfdFlags::CLOEXEC).map_err(oom)?;
    ftruncate(&file, bytes as u64).map_err(oom)?;
    let ones = vec![0xff; 1 << 20];
    for at in (0..bytes.min(POISONED)).step_by(ones.len()) {
        rustix::io::pwrite(&file, &ones, at as u64).map_err(oom)?;
    }
    Ok(file)
}

pub fn release(handle: Handle) -> Result<()> {
    HANDLES.remove(handle).map(drop).map_err(|_| Code::INVALID_VALUE)
}

/// A descriptor of the memory, which belongs to the caller.
pub fn export(handle: Handle, kind: i32) -> Result<i32> {
    let physical = HANDLES.get(handle).map_err(|_| Code::INVALID_VALUE)?;
    match kind {
        POSIX_FD if physical.exportable => {}
        POSIX_FD => return Err(Code::INVALID_VALUE),
        _ => return Err(Code::NOT_SUPPORTED),
    }
    let copy = rustix::io::fcntl_dupfd_cloexec(&physical.file, 3).map_err(|_| Code::UNKNOWN)?;
    Ok(copy.into_raw_fd())
}

/// Memory by its descriptor, which stays the caller's.
pub fn import(fd: i32, kind: i32, devices: usize) -> Result<Handle> {
    if kind != POSIX_FD || fd < 0 {
        return Err(if kind == POSIX_FD { Code::INVALID_VALUE } else { Code::NOT_SUPPORTED });
    }
    // SAFETY: the caller says that the descriptor is open; if it is not, the calls below fail.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let device = device_of(fd).filter(|device| *device < devices).ok_or(Code::INVALID_VALUE)?;
    let bytes = fstat(fd).map_err(|_| Code::INVALID_VALUE)?.st_size as usize;
    let file = rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(|_| Code::INVALID_VALUE)?;
    Ok(keep(Physical { file, bytes, device, imported: true, exportable: true }))
}

/// The device whose memory a descriptor is of.
fn device_of(fd: BorrowedFd<'_>) -> Option<usize> {
    let link = readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new()).ok()?;
    let name = link.to_str().ok()?.strip_prefix("/memfd:")?.strip_prefix(NAME)?;
    name.split(' ').next()?.parse().ok()
}

pub fn reserve(bytes: usize, align: usize) -> Result<usize> {
    if bytes == 0 || !bytes.is_multiple_of(UNIT) || !(align == 0 || align.is_power_of_two()) {
        return Err(Code::INVALID_VALUE);
    }
    let at = memory::addresses(bytes, align.max(UNIT))?;
    RESERVED.lock().insert(at, bytes);
    Ok(at)
}

pub fn unreserve(at: usize, bytes: usize) -> Result<()> {
    let mut reserved = RESERVED.lock();
    if reserved.get(&at) != Some(&bytes) || !memory::ranges_in(at, bytes).is_empty() {
        return Err(Code::INVALID_VALUE);
    }
    reserved.remove(&at);
    Ok(())
}

/// Maps memory, for nobody to use before [`set_access`].
pub fn map(at: usize, bytes: usize, offset: usize, handle: Handle) -> Result<()> {
    let physical = HANDLES.get(handle).map_err(|_| Code::INVALID_VALUE)?;
    let reserved = RESERVED.lock();
    let inside = (reserved.range(..=at).next_back())
        .is_some_and(|(start, length)| at + bytes <= start + length);
    let whole = bytes > 0 && at.is_multiple_of(UNIT) && bytes.is_multiple_of(UNIT);
    if !inside || !whole || offset != 0 || bytes > physical.bytes {
        return Err(Code::INVALID_VALUE);
    }
    if !memory::ranges_in(at, bytes).is_empty() {
        return Err(Code::INVALID_VALUE);
    }
    let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: addresses of the arena that the caller reserved and that nothing is mapped at.
    unsafe { mmap(at as *mut c_void, bytes, ProtFlags::empty(), flags, &physical.file, 0) }
        .map_err(|_| Code::OUT_OF_MEMORY)?;
    let place = Place::Mapped(physical.device);
    memory::insert(Range { start: at, bytes, place, context: 0, access: 0 });
    MAPPED.lock().insert(at, physical);
    Ok(())
}

pub fn set_access(at: usize, bytes: usize, wanted: &[Access], devices: usize) -> Result<()> {
    let mapped = memory::ranges_in(at, bytes);
    let covered: usize = mapped.iter().map(|range| range.bytes).sum();
    if covered != bytes || !mapped.iter().all(|range| range.start >= at) || wanted.is_empty() {
        return Err(Code::INVALID_VALUE);
    }
    for range in mapped {
        let mut access = range.access;
        let owner = match range.place {
            Place::Mapped(device) => device,
            _ => return Err(Code::INVALID_VALUE),
        };
        for Access { location, flags } in wanted {
            let device = usize::try_from(location.id).ok().filter(|id| *id < devices);
            match (device, location.kind, flags) {
                (Some(device), ON_DEVICE, 3) if device != owner && !config()?.has("peer") => {
                    return Err(Code::PEER_ACCESS_UNSUPPORTED);
                }
                (Some(device), ON_DEVICE, 3) => access |= 1 << device,
                (Some(device), ON_DEVICE, 0) => access &= !(1 << device),
                (Some(_), ON_DEVICE, _) => return Err(Code::NOT_SUPPORTED),
                _ => return Err(Code::INVALID_VALUE),
            }
        }
        memory::set_access(range.start, access)?;
        let open = MprotectFlags::READ | MprotectFlags::WRITE;
        let flags = if access == 0 { MprotectFlags::empty() } else { open };
        // SAFETY: a mapping of ours; who loses it was told by the caller.
        unsafe { mprotect(range.start as *mut c_void, range.bytes, flags) }
            .map_err(|_| Code::UNKNOWN)?;
    }
    Ok(())
}

pub fn unmap(at: usize, bytes: usize) -> Result<()> {
    let mapped = memory::ranges_in(at, bytes);
    let covered: usize = mapped.iter().map(|range| range.bytes).sum();
    let ours = mapped.iter().all(|r| r.start >= at && matches!(r.place, Place::Mapped(_)));
    if covered != bytes || !ours {
        return Err(Code::INVALID_VALUE);
    }
    for range in mapped {
        memory::remove(range.start, |place| matches!(place, Place::Mapped(_)))?;
        memory::close(range.start, range.bytes);
        MAPPED.lock().remove(&range.start);
    }
    Ok(())
}
