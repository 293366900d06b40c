//! Windows on a GPU: in its own memory where NICs can reach that (a dma-buf), else in page-locked
//! memory of the host that the GPU has mapped.
//!
//! # Flushing
//! A NIC's writes to a GPU's memory and its report of them to the host's go to different places, so
//! that the report says nothing of when the GPU sees the bytes. Whether somebody has to ask for that,
//! and how, the GPU says of itself (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`, 118, and
//! `..._FLUSH_WRITES_OPTIONS`, 117):
//!
//! * ordered for the GPU's own consumers or for all: nobody has to;
//! * else by a call, `cuFlushGPUDirectRDMAWrites`. It goes into [`Link::wait`](crate::Link::wait) on
//!   the host, behind the flag and before the wait returns: who waits may call the driver, and the
//!   bytes are of interest only then. The proxy, which knows sooner, makes no call of CUDA's, since
//!   one that waits for a stream would hold up the flag that the stream waits for;
//! * where only streams can flush (`CU_STREAM_WAIT_VALUE_FLUSH`), waits of the host cannot, so the
//!   window is in the host's memory.

mod held;

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use libloading::os::unix::Library;

use super::OP;
use super::areas::{DmaBuf, Refused, Source};
use crate::host_link::Region;
use crate::nvlink::Buried;
use crate::{Result, TransportError};
use held::{Allocation, Locked};

/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`, `..._WRITES_ORDERING`,
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const FLUSH_OPTIONS: c_int = 117;
const WRITES_ORDERING: c_int = 118;
const DMA_BUF_SUPPORTED: c_int = 124;
/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: for consumers on the GPU that is written to.
const ORDERED_FOR_OWNER: c_int = 100;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST`.
const FLUSH_BY_CALL: c_int = 1;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`, `..._TO_OWNER`.
const CURRENT: c_int = 0;
const TO_OWNER: c_int = 100;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF_FD: c_int = 1;
/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
const SYNC_MEMOPS: c_int = 6;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`.
const MAPPED: c_uint = 3;
/// What a dma-buf begins and ends at; no host of ours has larger pages.
const PAGE: usize = 64 << 10;

macro_rules! functions {
    ($($name:ident: $symbol:literal ($($arg:ty),*);)* ? $($optional:ident: $osymbol:literal ($($oarg:ty),*);)*) => {
        /// The functions of CUDA's driver that windows take, some of which older ones lack.
        pub(super) struct Driver {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> c_int,)*
            $(pub $optional: Option<unsafe extern "C" fn($($oarg),*) -> c_int>,)*
            /// None where functions are a test's own.
            _library: Option<Library>,
        }

        impl Driver {
            fn look_up(library: Library) -> Result<Self, String> {
                // SAFETY: the signatures are those of cuda.h for these exact symbols, and the
                // addresses are used only while `_library` keeps them loaded.
                unsafe {
                    Ok(Self {
                        $($name: *library
                            .get(concat!($symbol, "\0").as_bytes())
                            .map_err(|_| format!("libcuda.so.1 has no {}", $symbol))?,)*
                        $($optional: library
                            .get(concat!($osymbol, "\0").as_bytes())
                            .ok()
                            .map(|symbol| *symbol),)*
                        _library: Some(library),
                    })
                }
            }

            /// Functions that nobody may call, for tests to replace.
            #[cfg(test)]
            pub(super) fn unused() -> Self {
                Self {
                    $($name: {
                        unsafe extern "C" fn $name($(_: $arg),*) -> c_int {
                            panic!("a test has no {}", $symbol);
                        }
                        $name
                    },)*
                    $($optional: None,)*
                    _library: None,
                }
            }
        }
    };
}

functions! {
    init: "cuInit" (c_uint);
    error_name: "cuGetErrorName" (c_int, *mut *const c_char);
    device_get: "cuDeviceGet" (*mut c_int, c_int);
    attribute: "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    retain: "cuDevicePrimaryCtxRetain" (*mut *mut c_void, c_int);
    release: "cuDevicePrimaryCtxRelease_v2" (c_int);
    push: "cuCtxPushCurrent_v2" (*mut c_void);
    pop: "cuCtxPopCurrent_v2" (*mut *mut c_void);
    alloc: "cuMemAlloc_v2" (*mut u64, usize);
    free: "cuMemFree_v2" (u64);
    host_register: "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    host_unregister: "cuMemHostUnregister" (*mut c_void);
    host_pointer: "cuMemHostGetDevicePointer_v2" (*mut u64, *mut c_void, c_uint);
    ? set: "cuMemsetD8_v2" (u64, u8, usize);
    set_attribute: "cuPointerSetAttribute" (*const c_void, c_int, u64);
    range_handle: "cuMemGetHandleForAddressRange" (*mut c_void, u64, usize, c_int, u64);
    flush: "cuFlushGPUDirectRDMAWrites" (c_int, c_int);
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Driver")
    }
}

impl Driver {
    /// The driver of this process.
    ///
    /// # Errors
    /// [`TransportError::Unsupported`] where it is not there.
    pub(super) fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        let driver = DRIVER.get_or_init(|| {
            // SAFETY: NVIDIA's library, whose initialisers have no preconditions.
            let library = unsafe { Library::new("libcuda.so.1") };
            let library = library.map_err(|e| {
                format!("libcuda.so.1 cannot be opened: {e}; install the NVIDIA driver")
            })?;
            let driver = Self::look_up(library)?;
            // SAFETY: may be called any number of times, from any thread.
            match unsafe { (driver.init)(0) } {
                0 => Ok(driver),
                code => Err(format!("cuInit failed with code {code}: {}", driver.name(code))),
            }
        });
        let unsupported =
            |detail: &String| TransportError::Unsupported { op: OP, detail: detail.clone() };
        driver.as_ref().map_err(unsupported)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        match code {
            0 => Ok(()),
            _ => Err(TransportError::Device { op: OP, call, code, detail: self.name(code) }),
        }
    }

    fn name(&self, code: c_int) -> String {
        let mut text = std::ptr::null();
        // SAFETY: the driver stores a pointer to a static string, or null.
        let status = unsafe { (self.error_name)(code, &mut text) };
        if status != 0 || text.is_null() {
            return "unknown error".into();
        }
        // SAFETY: not null, hence a static string of the driver.
        unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// A GPU whose primary context this process holds.
#[derive(Debug)]
pub(super) struct Gpu {
    driver: &'static Driver,
    device: c_int,
    ordinal: usize,
    context: *mut c_void,
}

// SAFETY: handles of the driver, which may be used from any thread and never change.
unsafe impl Send for Gpu {}
// SAFETY: the handles never change, and the driver's functions may be called from several threads.
unsafe impl Sync for Gpu {}

impl Gpu {
    pub(super) fn open(driver: &'static Driver, ordinal: usize) -> Result<Arc<Self>> {
        let (mut device, mut context) = (0, std::ptr::null_mut());
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: outputs are valid for the calls.
        unsafe {
            driver.check("cuDeviceGet", (driver.device_get)(&mut device, number))?;
            let code = (driver.retain)(&mut context, device);
            driver.check("cuDevicePrimaryCtxRetain", code)?;
        }
        Ok(Arc::new(Self { driver, device, ordinal, context }))
    }

    fn attribute(&self, which: c_int) -> c_int {
        let mut value = 0;
        // SAFETY: `value` is valid for the call.
        match unsafe { (self.driver.attribute)(&mut value, which, self.device) } {
            0 => value,
            // One that the driver does not know of is one that the GPU lacks.
            _ => 0,
        }
    }

    /// Calls `f` with the GPU's context current.
    fn with<T>(&self, f: impl FnOnce(&Driver) -> Result<T>) -> Result<T> {
        struct Pop<'a>(&'a Driver);
        impl Drop for Pop<'_> {
            fn drop(&mut self) {
                let mut popped = std::ptr::null_mut();
                // SAFETY: pushed below on this thread.
                unsafe { (self.0.pop)(&mut popped) };
            }
        }
        // SAFETY: the context is retained while this value lives.
        self.driver.check("cuCtxPushCurrent", unsafe { (self.driver.push)(self.context) })?;
        let _pop = Pop(self.driver);
        f(self.driver)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: retained once by `open`.
        unsafe { (self.driver.release)(self.device) };
    }
}

/// What has to be done before the GPU sees what a NIC has reported to the host as written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flush {
    Needless,
    /// `cuFlushGPUDirectRDMAWrites`.
    Call,
}

impl Flush {
    /// What a GPU with these attributes needs; none if the host cannot do it.
    fn of(ordering: c_int, options: c_int, has_call: bool) -> Option<Self> {
        match () {
            () if ordering >= ORDERED_FOR_OWNER => Some(Self::Needless),
            () if options & FLUSH_BY_CALL != 0 && has_call => Some(Self::Call),
            () => None,
        }
    }
}

/// A window for a GPU.
#[derive(Debug)]
pub(super) struct GpuWindow {
    // The first to be dropped: who gives the memory back is the last to let go of the context.
    gpu: Arc<Gpu>,
    base: NonNull<u8>,
    flush: Flush,
    /// What the NIC is given: none where that is pages of the host.
    buf: Option<Arc<DmaBuf>>,
    _locked: Option<Buried<Locked>>,
}

// SAFETY: an address of memory that the value holds; whoever uses it answers for the access.
unsafe impl Send for GpuWindow {}
// SAFETY: an address of memory that the value holds; whoever uses it answers for the access.
unsafe impl Sync for GpuWindow {}

impl GpuWindow {
    /// In the GPU's own memory.
    ///
    /// # Errors
    /// [`Refused::Unreachable`] saying why NICs cannot reach that memory.
    pub(super) fn on_device(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, Refused> {
        let driver = gpu.driver;
        let unable = |detail: String| Err(Refused::Unreachable(detail));
        let exports = gpu.attribute(DMA_BUF_SUPPORTED) != 0;
        let functions = (driver.range_handle.filter(|_| exports), driver.set, driver.set_attribute);
        let (Some(export), Some(set), Some(set_attribute)) = functions else {
            return unable(format!(
                "GPU {} exports no dma-buf (driver 515 or newer with open kernel modules does)",
                gpu.ordinal
            ));
        };
        let (ordering, options) = (gpu.attribute(WRITES_ORDERING), gpu.attribute(FLUSH_OPTIONS));
        let Some(flush) = Flush::of(ordering, options, driver.flush.is_some()) else {
            return unable(format!(
                "GPU {} neither orders writes of NICs ({ordering}) nor lets the host flush them \
                 ({options})",
                gpu.ordinal
            ));
        };
        let Some(bytes) = bytes.max(1).checked_next_multiple_of(PAGE) else {
            let detail = format!("a window of {bytes} bytes");
            return Err(TransportError::Argument { op: OP, detail }.into());
        };
        let (memory, address) = allocate(gpu, bytes)?;
        zero(&memory, (address, bytes), set, set_attribute)?;
        let mut fd: c_int = -1;
        let to: *mut c_void = (&raw mut fd).cast();
        // SAFETY: a range of live memory of this GPU; a descriptor is an int.
        let code = |_: &Driver| unsafe { export(to, address, bytes, DMA_BUF_FD, 0) };
        gpu.with(|driver| driver.check("cuMemGetHandleForAddressRange", code(driver)))?;
        // SAFETY: the driver gave a new descriptor, which nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let base = pointer(address)?;
        let buf = Some(Arc::new(DmaBuf { fd, address, bytes, _memory: Box::new(memory) }));
        Ok(Self { gpu: gpu.clone(), base, flush, buf, _locked: None })
    }

    /// In `region`, which the GPU reaches over its bus: the way where NICs do not reach the GPU's
    /// memory. Nothing has to be flushed there.
    pub(super) fn on_host(gpu: &Arc<Gpu>, region: &Arc<dyn Region>) -> Result<Self> {
        let at: *mut c_void = region.base().as_ptr().cast();
        let bytes = region.bytes();
        // SAFETY: pages that stay mapped while the region is held, by `Locked` from here on.
        let code = |driver: &Driver| unsafe { (driver.host_register)(at, bytes, MAPPED) };
        gpu.with(|driver| driver.check("cuMemHostRegister", code(driver)))?;
        let locked = Buried::new(Locked { gpu: gpu.clone(), region: region.clone() });
        let mut address = 0;
        gpu.with(|driver| {
            // SAFETY: registered just now; `address` is valid for the call.
            let code = unsafe { (driver.host_pointer)(&mut address, at, 0) };
            driver.check("cuMemHostGetDevicePointer", code)
        })?;
        let base = pointer(address)?;
        let flush = Flush::Needless;
        Ok(Self { gpu: gpu.clone(), base, flush, buf: None, _locked: Some(locked) })
    }

    /// Where the GPU has it.
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn ordinal(&self) -> usize {
        self.gpu.ordinal
    }

    /// Makes the GPU see what NICs have reported as written. May wait for the GPU.
    pub(super) fn flush(&self) -> Result<()> {
        let Some(flush) = self.gpu.driver.flush.filter(|_| self.flush == Flush::Call) else {
            return Ok(());
        };
        // SAFETY: takes numbers; the context is current.
        let code = |_: &Driver| unsafe { flush(CURRENT, TO_OWNER) };
        self.gpu.with(|driver| driver.check("cuFlushGPUDirectRDMAWrites", code(driver)))
    }
}

/// Memory of which `bytes` begin at a page, and where.
fn allocate(gpu: &Arc<Gpu>, bytes: usize) -> Result<(Buried<Allocation>, u64)> {
    let mut raw = 0;
    gpu.with(|driver| {
        // SAFETY: `raw` is valid for the call.
        let code = unsafe { (driver.alloc)(&mut raw, bytes + PAGE) };
        driver.check("cuMemAlloc", code)
    })?;
    let memory = Buried::new(Allocation { gpu: gpu.clone(), raw });
    Ok((memory, raw.next_multiple_of(PAGE as u64)))
}

/// Zeroes `bytes` from `address` on, which are in `memory`.
fn zero(
    memory: &Allocation,
    (address, bytes): (u64, usize),
    set: unsafe extern "C" fn(u64, u8, usize) -> c_int,
    set_attribute: unsafe extern "C" fn(*const c_void, c_int, u64) -> c_int,
) -> Result<()> {
    memory.gpu.with(|driver| {
        let on: c_uint = 1;
        // SAFETY: memory that was allocated just now; the attribute is an unsigned int.
        unsafe {
            // From here on, calls that do not say that they are asynchronous are not, zeroing neither.
            let code = set_attribute((&raw const on).cast(), SYNC_MEMOPS, memory.raw);
            driver.check("cuPointerSetAttribute", code)?;
            driver.check("cuMemsetD8", set(address, 0, bytes))
        }
    })
}

fn pointer(address: u64) -> Result<NonNull<u8>> {
    NonNull::new(address as *mut u8).ok_or_else(|| TransportError::Device {
        op: OP,
        call: "cuMemAlloc",
        code: 0,
        detail: "the driver gave memory at 0".into(),
    })
}

/// Puts a window where `open` can do with it: in the GPU's memory, or in `own` if NICs do not reach
/// that; any other failure is one. `open` gets what NICs
/// have to register, each with the offset in the rank's memory at which it begins; `words` is where
/// in `own` that begins which is on the host in any case.
pub(super) fn place<T>(
    gpu: &Arc<Gpu>,
    (own, words): (&Arc<dyn Region>, usize),
    bytes: usize,
    open: impl Fn(&[(usize, Source)]) -> Result<T, Refused>,
) -> Result<(GpuWindow, T)> {
    let pages = |from| (from, Source::Pages { region: own.clone(), from });
    let on_device = || {
        let window = GpuWindow::on_device(gpu, bytes)?;
        let buf = window.buf.clone().expect("a window on the device is exported");
        let opened = open(&[(0, Source::DmaBuf(buf)), pages(words)])?;
        Ok::<_, Refused>((window, opened))
    };
    match on_device() {
        Err(Refused::Unreachable(detail)) => {
            tracing::warn!(
                gpu = gpu.ordinal,
                why = %detail,
                "a window is in the host's memory, which the GPU reaches over its bus"
            );
            let window = GpuWindow::on_host(gpu, own)?;
            let opened = open(&[pages(0)])?;
            Ok((window, opened))
        }
        Err(Refused::Failed(error)) => Err(error),
        Ok(placed) => Ok(placed),
    }
}

#[cfg(test)]
pub(super) mod tests;
