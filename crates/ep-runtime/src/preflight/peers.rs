//! Peer access, tried: one GPU maps another one's memory, writes it and reads it back.
//!
//! The structs of the driver's virtual memory management are declared here, since bindings of them differ
//! between CUDA versions while the ABI does not.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::time::Duration;

use ep_kernels::cuda::Device;
use libloading::os::unix::Library;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_LOCATION_TYPE_DEVICE`, `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const PINNED: c_uint = 1;
const ON_DEVICE: c_uint = 1;
const READ_WRITE: c_uint = 3;
/// Bytes that are moved.
const BYTES: usize = 64 << 10;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: c_uint,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
struct Properties {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    win32: *mut c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct Access {
    location: Location,
    flags: c_uint,
}

const _: () = assert!(size_of::<Properties>() == 32 && size_of::<Access>() == 12);
const _: () = assert!(std::mem::offset_of!(Properties, win32) == 16);

type Ptr = c_ulonglong;

macro_rules! functions {
    ($($name:ident: $symbol:literal ($($arg:ty),*);)*) => {
        /// The driver's functions for virtual memory.
        pub(super) struct Memory {
            $($name: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Memory {
            /// Looks the functions up.
            pub(super) fn open() -> Result<Self, String> {
                // SAFETY: the driver's initialiser has no preconditions.
                let library = unsafe { Library::new("libcuda.so.1") }.map_err(|e| e.to_string())?;
                let memory = Self {
                    $($name: {
                        // SAFETY: the signature is that of cuda.h for this exact symbol.
                        unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> c_int>($symbol.as_bytes()) }
                            .map(|found| *found)
                            .map_err(|_| format!("libcuda.so.1 has no function {}", $symbol))?
                    },)*
                };
                // The pointers must stay valid: never closed.
                std::mem::forget(library);
                Ok(memory)
            }
        }
    };
}

functions! {
    set_context: "cuCtxSetCurrent" (*mut c_void);
    device: "cuDeviceGet" (*mut c_int, c_int);
    granularity: "cuMemGetAllocationGranularity" (*mut usize, *const Properties, c_uint);
    create: "cuMemCreate" (*mut c_ulonglong, usize, *const Properties, c_ulonglong);
    release: "cuMemRelease" (c_ulonglong);
    reserve: "cuMemAddressReserve" (*mut Ptr, usize, usize, Ptr, c_ulonglong);
    free: "cuMemAddressFree" (Ptr, usize);
    map: "cuMemMap" (Ptr, usize, usize, c_ulonglong, c_ulonglong);
    unmap: "cuMemUnmap" (Ptr, usize);
    set_access: "cuMemSetAccess" (Ptr, usize, *const Access, usize);
    to_device: "cuMemcpyHtoDAsync_v2" (Ptr, *const c_void, usize, *mut c_void);
    to_host: "cuMemcpyDtoHAsync_v2" (*mut c_void, Ptr, usize, *mut c_void);
    between: "cuMemcpyDtoDAsync_v2" (Ptr, Ptr, usize, *mut c_void);
}

fn check(operation: &str, code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{operation} failed with CUresult {code}")) }
}

/// A block of device memory at an address, taken apart when dropped.
struct Block<'a> {
    memory: &'a Memory,
    handle: Option<c_ulonglong>,
    at: Option<Ptr>,
    mapped: bool,
    size: usize,
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        if let Some(at) = self.at {
            if self.mapped {
                // SAFETY: mapped once at `at` with this size; every copy to or from it has completed, or the
                // context is broken and the driver refuses.
                unsafe { (self.memory.unmap)(at, self.size) };
            }
            // SAFETY: reserved once with this size, and no longer mapped.
            unsafe { (self.memory.free)(at, self.size) };
        }
        if let Some(handle) = self.handle {
            // SAFETY: created once, released once.
            unsafe { (self.memory.release)(handle) };
        }
    }
}

impl Memory {
    /// `from` writes a pattern into memory of `to` and reads it back. Gives the bytes moved. Changes which
    /// context is current on the calling thread.
    pub(super) fn try_pair(
        &self,
        from: &Device,
        to: &Device,
        limit: Duration,
    ) -> Result<usize, String> {
        // SAFETY: the handle is of a primary context that `from` keeps alive.
        check("cuCtxSetCurrent", unsafe { (self.set_context)(from.context().cu_ctx().cast()) })?;
        let (a, b) = (self.id(from)?, self.id(to)?);
        let here = self.block(a, &[a])?;
        let there = self.block(b, &[a, b])?;
        let (here, there) = (here.at.unwrap_or_default(), there.at.unwrap_or_default());
        // Differs from word to word and from pair to pair, so that nothing left over looks right.
        let seed = 0x9e37_79b9u32.wrapping_mul(1 + a as u32 * 64 + b as u32);
        let sent: Vec<u32> =
            (0..BYTES as u32 / 4).map(|i| seed.wrapping_add(i.wrapping_mul(0x85eb_ca6b))).collect();
        let zeros = vec![0u32; sent.len()];
        let mut back = zeros.clone();
        let stream = from.stream(0).map_err(|e| e.to_string())?;
        let on: *mut c_void = stream.raw().cast();
        // All on one stream: a synchronous copy from pageable memory may return before it has reached
        // the device, and no other stream waits for it.
        // SAFETY: both blocks are mapped with at least BYTES bytes, accessible to the device of the
        // stream, the vectors have as many, and all live until the wait below has ended or failed.
        unsafe {
            check("cuMemcpyHtoDAsync", (self.to_device)(here, sent.as_ptr().cast(), BYTES, on))?;
            check("cuMemcpyDtoDAsync", (self.between)(there, here, BYTES, on))?;
            check("cuMemcpyHtoDAsync", (self.to_device)(here, zeros.as_ptr().cast(), BYTES, on))?;
            check("cuMemcpyDtoDAsync", (self.between)(here, there, BYTES, on))?;
            check("cuMemcpyDtoHAsync", (self.to_host)(back.as_mut_ptr().cast(), here, BYTES, on))?;
        }
        stream.wait("peer copy", limit).map_err(|e| e.to_string())?;
        let wrong = back.iter().zip(&sent).filter(|(a, b)| a != b).count();
        if wrong > 0 {
            return Err(format!("{wrong} of {} words came back different", sent.len()));
        }
        Ok(BYTES)
    }

    fn id(&self, device: &Device) -> Result<c_int, String> {
        let mut id = 0;
        // SAFETY: `id` is valid for the call; the driver is initialised, since a device is open.
        check("cuDeviceGet", unsafe {
            (self.device)(&mut id, device.properties().ordinal as c_int)
        })?;
        Ok(id)
    }

    /// Memory of device `on`, mapped for `devices`.
    fn block(&self, on: c_int, devices: &[c_int]) -> Result<Block<'_>, String> {
        let location = Location { kind: ON_DEVICE, id: on };
        let properties = Properties {
            kind: PINNED,
            handle_types: 0,
            location,
            win32: std::ptr::null_mut(),
            flags: [0; 8],
        };
        let mut unit = 0;
        // SAFETY: both pointers are valid for the call.
        check("cuMemGetAllocationGranularity", unsafe {
            (self.granularity)(&mut unit, &properties, 0)
        })?;
        let size = BYTES.next_multiple_of(unit.max(1));
        let mut block = Block { memory: self, handle: None, at: None, mapped: false, size };
        let mut handle = 0;
        // SAFETY: as above; `size` is a multiple of the granularity.
        check("cuMemCreate", unsafe { (self.create)(&mut handle, size, &properties, 0) })?;
        block.handle = Some(handle);
        let mut at = 0;
        // SAFETY: `at` is valid for the call; no address is asked for.
        check("cuMemAddressReserve", unsafe { (self.reserve)(&mut at, size, 0, 0, 0) })?;
        block.at = Some(at);
        // SAFETY: the range was just reserved and the block has its size.
        check("cuMemMap", unsafe { (self.map)(at, size, 0, handle, 0) })?;
        block.mapped = true;
        let access: Vec<Access> = devices
            .iter()
            .map(|&id| Access { location: Location { kind: ON_DEVICE, id }, flags: READ_WRITE })
            .collect();
        // SAFETY: as many descriptions as announced; the range is mapped.
        let code = unsafe { (self.set_access)(at, size, access.as_ptr(), access.len()) };
        check("cuMemSetAccess", code)?;
        Ok(block)
    }
}
