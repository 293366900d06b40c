//! The part of the CUDA driver that this transport calls: opened at run time, declared by us where
//! structs differ between versions of the headers.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{CUcontext, CUstream};
use libloading::os::unix::Library;

use crate::{Result, TransportError};

pub(super) const OP: &str = "open";

/// `CUmemAllocationProp`.
#[repr(C)]
pub(crate) struct AllocationProp {
    pub kind: c_int,
    pub handle_kinds: c_int,
    pub location: Location,
    pub win32: *mut c_void,
    pub compression: u8,
    pub gpu_direct_rdma: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}
const _: () = assert!(size_of::<AllocationProp>() == 32);

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    pub kind: c_int,
    pub id: c_int,
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(crate) struct AccessDesc {
    pub location: Location,
    pub flags: c_int,
}

/// `CUstreamBatchMemOpParams` as far as 32-bit waits and writes use it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemOp {
    pub operation: u64,
    pub address: u64,
    pub value: u64,
    pub flags: u64,
    pub alias: u64,
    pub pad: u64,
}
const _: () = assert!(size_of::<MemOp>() == 48);

macro_rules! functions {
    ($($name:ident: $symbol:literal ($($arg:ty),*);)* ? $($optional:ident: $osymbol:literal ($($oarg:ty),*);)*) => {
        pub(crate) struct Driver {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> c_int,)*
            // What older drivers lack.
            $(#[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "for NICs"))]
            pub $optional: Option<unsafe extern "C" fn($($oarg),*) -> c_int>,)*
            // The pointers above are valid while this is open.
            _library: Library,
        }

        impl Driver {
            fn look_up(library: Library) -> std::result::Result<Self, String> {
                Ok(Driver {
                    $($name: {
                        // SAFETY: the signature is that of cuda.h for this exact symbol.
                        unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> c_int>($symbol.as_bytes()) }
                            .map(|found| *found)
                            .map_err(|_| format!("libcuda.so.1 has no {}; install driver 525 or newer", $symbol))?
                    },)*
                    $($optional: {
                        // SAFETY: the signature is that of cuda.h for this exact symbol.
                        unsafe { library.get::<unsafe extern "C" fn($($oarg),*) -> c_int>($osymbol.as_bytes()) }
                            .map(|found| *found)
                            .ok()
                    },)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    init: "cuInit" (c_uint);
    error_name: "cuGetErrorName" (c_int, *mut *const c_char);
    device_count: "cuDeviceGetCount" (*mut c_int);
    device_get: "cuDeviceGet" (*mut c_int, c_int);
    device_uuid: "cuDeviceGetUuid" (*mut [u8; 16], c_int);
    device_attribute: "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    can_access_peer: "cuDeviceCanAccessPeer" (*mut c_int, c_int, c_int);
    primary_retain: "cuDevicePrimaryCtxRetain" (*mut CUcontext, c_int);
    primary_release: "cuDevicePrimaryCtxRelease_v2" (c_int);
    ctx_get: "cuCtxGetCurrent" (*mut CUcontext);
    ctx_push: "cuCtxPushCurrent_v2" (CUcontext);
    ctx_pop: "cuCtxPopCurrent_v2" (*mut CUcontext);
    granularity: "cuMemGetAllocationGranularity" (*mut usize, *const AllocationProp, c_int);
    create: "cuMemCreate" (*mut u64, usize, *const AllocationProp, u64);
    release: "cuMemRelease" (u64);
    export: "cuMemExportToShareableHandle" (*mut c_void, u64, c_int, u64);
    import: "cuMemImportFromShareableHandle" (*mut u64, *mut c_void, c_int);
    reserve: "cuMemAddressReserve" (*mut u64, usize, usize, u64, u64);
    free: "cuMemAddressFree" (u64, usize);
    map: "cuMemMap" (u64, usize, usize, u64, u64);
    unmap: "cuMemUnmap" (u64, usize);
    set_access: "cuMemSetAccess" (u64, usize, *const AccessDesc, usize);
    host_register: "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    host_unregister: "cuMemHostUnregister" (*mut c_void);
    host_pointer: "cuMemHostGetDevicePointer_v2" (*mut u64, *mut c_void, c_uint);
    host_alloc: "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    host_free: "cuMemFreeHost" (*mut c_void);
    stream_create: "cuStreamCreate" (*mut CUstream, c_uint);
    stream_destroy: "cuStreamDestroy_v2" (CUstream);
    stream_query: "cuStreamQuery" (CUstream);
    stream_capturing: "cuStreamIsCapturing" (CUstream, *mut c_int);
    copy: "cuMemcpyAsync" (u64, u64, usize, CUstream);
    set: "cuMemsetD8Async" (u64, u8, usize, CUstream);
    write_value: "cuStreamWriteValue32_v2" (CUstream, u64, u32, c_uint);
    batch: "cuStreamBatchMemOp_v2" (CUstream, c_uint, *mut MemOp, c_uint);
    library_load: "cuLibraryLoadData" (
        *mut *mut c_void, *const c_void,
        *mut c_uint, *mut *mut c_void, c_uint,
        *mut c_uint, *mut *mut c_void, c_uint
    );
    library_unload: "cuLibraryUnload" (*mut c_void);
    library_kernel: "cuLibraryGetKernel" (*mut *mut c_void, *mut c_void, *const c_char);
    launch: "cuLaunchKernel" (
        *mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint,
        CUstream, *mut *mut c_void, *mut *mut c_void
    );
    ? range_handle: "cuMemGetHandleForAddressRange" (*mut c_void, u64, usize, c_int, u64);
    flush_rdma: "cuFlushGPUDirectRDMAWrites" (c_int, c_int);
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Driver")
    }
}

impl Driver {
    /// The driver, opened by the first call.
    pub fn get() -> Result<&'static Driver> {
        static DRIVER: OnceLock<std::result::Result<Driver, String>> = OnceLock::new();
        let opened = DRIVER.get_or_init(|| {
            // SAFETY: NVIDIA's library, whose initialisers have no preconditions.
            let library = unsafe { Library::new("libcuda.so.1") }.map_err(|e| {
                // The loader's own words, which libloading keeps as the source of its error.
                let why =
                    std::error::Error::source(&e).map_or_else(|| e.to_string(), |s| s.to_string());
                format!(
                    "libcuda.so.1: {why}: install the NVIDIA driver, or use the host transports"
                )
            })?;
            let driver = Driver::look_up(library)?;
            // SAFETY: may be called any number of times, from any thread.
            match unsafe { (driver.init)(0) } {
                0 => Ok(driver),
                code => Err(format!("cuInit failed with code {code}: {}", driver.name(code))),
            }
        });
        opened
            .as_ref()
            .map_err(|detail| TransportError::Unsupported { op: OP, detail: detail.clone() })
    }

    pub fn check(&self, op: &'static str, call: &'static str, code: c_int) -> Result<()> {
        match code {
            0 => Ok(()),
            _ => Err(TransportError::Device { op, call, code, detail: self.name(code) }),
        }
    }

    fn name(&self, code: c_int) -> String {
        let mut text = std::ptr::null();
        // SAFETY: the driver stores a pointer to a static string, or null.
        let status = unsafe { (self.error_name)(code, &mut text) };
        if status != 0 || text.is_null() {
            return "unknown error".into();
        }
        // SAFETY: not null, hence a static NUL-terminated string of the driver.
        unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// A GPU's primary context, retained.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub driver: &'static Driver,
    pub device: c_int,
    pub ordinal: usize,
    pub uuid: [u8; 16],
    context: CUcontext,
}

// SAFETY: handles of the driver, which may be used from any thread and never change.
unsafe impl Send for Gpu {}
// SAFETY: the handles never change, and the driver's functions may be called from several threads.
unsafe impl Sync for Gpu {}

impl Gpu {
    pub fn open(ordinal: usize) -> Result<Self> {
        let driver = Driver::get()?;
        let mut count = 0;
        // SAFETY: `count` is valid for the call.
        driver.check(OP, "cuDeviceGetCount", unsafe { (driver.device_count)(&mut count) })?;
        if ordinal >= count.max(0) as usize {
            let detail = format!("there is no GPU {ordinal}; {count} are visible");
            return Err(TransportError::Argument { op: OP, detail });
        }
        let (mut device, mut uuid, mut context) = (0, [0; 16], std::ptr::null_mut());
        // SAFETY: the outputs are valid for the calls; the ordinal is one of a GPU.
        unsafe {
            driver.check(OP, "cuDeviceGet", (driver.device_get)(&mut device, ordinal as c_int))?;
            driver.check(OP, "cuDeviceGetUuid", (driver.device_uuid)(&mut uuid, device))?;
            let retained = (driver.primary_retain)(&mut context, device);
            driver.check(OP, "cuDevicePrimaryCtxRetain", retained)?;
        }
        Ok(Self { driver, device, ordinal, uuid, context })
    }

    /// The ordinal of the visible GPU with this UUID.
    pub fn visible(&self, uuid: &[u8; 16]) -> Option<c_int> {
        let mut count = 0;
        // SAFETY: `count` is valid for the call.
        if unsafe { (self.driver.device_count)(&mut count) } != 0 {
            return None;
        }
        (0..count).find_map(|ordinal| {
            let (mut device, mut found) = (0, [0; 16]);
            // SAFETY: the outputs are valid for the calls; the ordinal is one of a GPU.
            let code = unsafe {
                (self.driver.device_get)(&mut device, ordinal)
                    | (self.driver.device_uuid)(&mut found, device)
            };
            (code == 0 && found == *uuid).then_some(device)
        })
    }

    pub fn attribute(&self, which: c_int) -> c_int {
        let mut value = 0;
        // SAFETY: `value` is valid for the call.
        match unsafe { (self.driver.device_attribute)(&mut value, which, self.device) } {
            0 => value,
            _ => 0,
        }
    }

    pub fn check(&self, op: &'static str, call: &'static str, code: c_int) -> Result<()> {
        self.driver.check(op, call, code)
    }

    /// Makes the context current until the guard drops.
    pub fn current(&self, op: &'static str) -> Result<Current> {
        let mut now = std::ptr::null_mut();
        // SAFETY: `now` is valid for the call.
        self.check(op, "cuCtxGetCurrent", unsafe { (self.driver.ctx_get)(&mut now) })?;
        if now == self.context {
            return Ok(Current(None));
        }
        // SAFETY: the context is retained while this value lives.
        self.check(op, "cuCtxPushCurrent", unsafe { (self.driver.ctx_push)(self.context) })?;
        Ok(Current(Some(self.driver)))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: retained once by `open`.
        unsafe { (self.driver.primary_release)(self.device) };
    }
}

/// A context made current on this thread.
pub(crate) struct Current(Option<&'static Driver>);

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(driver) = self.0 {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pushed by `Gpu::current` on this thread.
            unsafe { (driver.ctx_pop)(&mut popped) };
        }
    }
}
