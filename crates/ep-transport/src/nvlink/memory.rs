//! Windows in device memory that can be mapped by other devices and processes.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys::CUstream;

use super::board::Registered;
use super::driver::{AccessDesc, AllocationProp, Gpu, Location, OP};
use super::words::{FABRIC, Handles, POSIX_FD};
use crate::process::Shared;
use crate::{Deadline, Result, TransportError};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_LOCATION_TYPE_DEVICE`,
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const PINNED: c_int = 1;
const ON_DEVICE: c_int = 1;
const READ_WRITE: c_int = 3;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`.
const RECOMMENDED: c_int = 1;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`,
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED`.
const RDMA_CAPABLE: c_int = 110;
const FABRIC_CAPABLE: c_int = 128;
/// `CU_STREAM_NON_BLOCKING`, `CUDA_ERROR_NOT_READY`.
const NON_BLOCKING: u32 = 1;
const NOT_READY: c_int = 600;

/// Physical memory of a GPU.
#[derive(Debug)]
pub(crate) struct Allocation {
    gpu: Arc<Gpu>,
    handle: u64,
    bytes: usize,
    /// `CUmemFabricHandle`, if it has one.
    pub fabric: Option<[u8; 64]>,
}

impl Allocation {
    /// At least `bytes`, rounded up as the device demands, to be handed over as `handles` says.
    /// Whether there are fabric handles shows when memory is made with one and it is exported.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize, handles: Handles) -> Result<Arc<Self>> {
        let with_fabric = || {
            let mut memory = Self::make(gpu, bytes, handles.kinds())?;
            memory.fabric = Some(memory.export_fabric()?);
            Ok(Arc::new(memory))
        };
        match handles {
            Handles::Fabric => return with_fabric(),
            Handles::Auto if gpu.attribute(FABRIC_CAPABLE) != 0 => match with_fabric() {
                Ok(memory) => return Ok(memory),
                Err(why) => tracing::debug!(%why, "no fabric handle for a window"),
            },
            Handles::Auto => {
                tracing::debug!(gpu = gpu.ordinal, "no fabric handles: the GPU has none");
            }
            Handles::Fd => {}
        }
        Ok(Arc::new(Self::make(gpu, bytes, POSIX_FD)?))
    }

    fn make(gpu: &Arc<Gpu>, bytes: usize, handle_kinds: c_int) -> Result<Self> {
        let _current = gpu.current(OP)?;
        let prop = AllocationProp {
            kind: PINNED,
            handle_kinds,
            location: Location { kind: ON_DEVICE, id: gpu.ordinal as c_int },
            win32: std::ptr::null_mut(),
            compression: 0,
            // What RDMA needs has to be asked for when memory is made.
            gpu_direct_rdma: u8::from(gpu.attribute(RDMA_CAPABLE) != 0),
            usage: 0,
            reserved: [0; 4],
        };
        let (mut unit, mut handle) = (0, 0);
        let driver = gpu.driver;
        // SAFETY: outputs and `prop` are valid for the calls.
        unsafe {
            let code = (driver.granularity)(&mut unit, &prop, RECOMMENDED);
            gpu.check(OP, "cuMemGetAllocationGranularity", code)?;
            let rounded = bytes.max(1).checked_next_multiple_of(unit.max(1)).ok_or_else(|| {
                TransportError::Argument { op: OP, detail: format!("a window of {bytes} bytes") }
            })?;
            let code = (driver.create)(&mut handle, rounded, &prop, 0);
            gpu.check(OP, "cuMemCreate", code).map_err(|e| of_size(e, rounded))?;
            Ok(Self { gpu: gpu.clone(), handle, bytes: rounded, fabric: None })
        }
    }

    fn export_fabric(&self) -> Result<[u8; 64]> {
        let mut handle = [0u8; 64];
        let to: *mut c_void = handle.as_mut_ptr().cast();
        // SAFETY: the handle is live; a fabric handle is 64 bytes.
        let code = unsafe { (self.gpu.driver.export)(to, self.handle, FABRIC, 0) };
        self.gpu.check(OP, "cuMemExportToShareableHandle", code)?;
        Ok(handle)
    }

    /// Memory of another process by its fabric handle, of the same size as this.
    pub fn import_fabric(&self, theirs: &[u8]) -> Result<Arc<Self>> {
        let Ok(mut theirs) = <[u8; 64]>::try_from(theirs) else {
            let detail = format!("a fabric handle of {} bytes", theirs.len());
            return Err(TransportError::Unsupported { op: OP, detail });
        };
        // SAFETY: 64 bytes; the driver refuses what is no handle.
        unsafe { Self::import_from(&self.gpu, theirs.as_mut_ptr().cast(), FABRIC, self.bytes) }
    }

    fn export(&self) -> Result<OwnedFd> {
        let mut fd: c_int = -1;
        let to: *mut c_void = (&raw mut fd).cast();
        // SAFETY: the handle is live; a descriptor is an int.
        let code = unsafe { (self.gpu.driver.export)(to, self.handle, POSIX_FD, 0) };
        self.gpu.check(OP, "cuMemExportToShareableHandle", code)?;
        // SAFETY: the driver gave a new descriptor, which nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn import(gpu: &Arc<Gpu>, fd: &OwnedFd, bytes: usize) -> Result<Arc<Self>> {
        let from = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the descriptor is open; the driver refuses one that is not of such memory.
        unsafe { Self::import_from(gpu, from, POSIX_FD, bytes) }
    }

    /// # Safety
    /// `from` is what the driver takes for this kind of handle.
    unsafe fn import_from(
        gpu: &Arc<Gpu>,
        from: *mut c_void,
        kind: c_int,
        bytes: usize,
    ) -> Result<Arc<Self>> {
        let _current = gpu.current(OP)?;
        let mut handle = 0;
        // SAFETY: `handle` is valid for the call; for `from` see above.
        let code = unsafe { (gpu.driver.import)(&mut handle, from, kind) };
        gpu.check(OP, "cuMemImportFromShareableHandle", code)?;
        Ok(Arc::new(Self { gpu: gpu.clone(), handle, bytes, fabric: None }))
    }
}

fn of_size(error: TransportError, bytes: usize) -> TransportError {
    match error {
        TransportError::Device { op, call, code, detail } => {
            let detail = format!("{detail}, for a window of {bytes} bytes");
            TransportError::Device { op, call, code, detail }
        }
        other => other,
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: created or imported once; mappings keep the memory by themselves.
        unsafe { (self.gpu.driver.release)(self.handle) };
    }
}

/// Memory of some GPU, mapped for kernels of `gpu`.
#[derive(Debug)]
pub(crate) struct Mapped {
    gpu: Arc<Gpu>,
    pub base: u64,
    pub bytes: usize,
    _memory: Arc<Allocation>,
}

impl Mapped {
    pub fn new(gpu: &Arc<Gpu>, memory: &Arc<Allocation>) -> Result<Self> {
        let _current = gpu.current(OP)?;
        let (driver, bytes) = (gpu.driver, memory.bytes);
        let mut base = 0;
        // SAFETY: `base` is valid for the call; no address is asked for.
        let code = unsafe { (driver.reserve)(&mut base, bytes, 0, 0, 0) };
        gpu.check(OP, "cuMemAddressReserve", code)?;
        // SAFETY: the range was just reserved, the handle is live and has so many bytes.
        let code = unsafe { (driver.map)(base, bytes, 0, memory.handle, 0) };
        if code != 0 {
            // SAFETY: reserved above and not mapped.
            unsafe { (driver.free)(base, bytes) };
            return Err(gpu.check(OP, "cuMemMap", code).expect_err("code is not 0"));
        }
        let mapped = Self { gpu: gpu.clone(), base, bytes, _memory: memory.clone() };
        let location = Location { kind: ON_DEVICE, id: gpu.ordinal as c_int };
        let access = AccessDesc { location, flags: READ_WRITE };
        // SAFETY: the range is mapped; `access` is valid for the call.
        let code = unsafe { (driver.set_access)(base, bytes, &access, 1) };
        gpu.check(OP, "cuMemSetAccess", code)?;
        Ok(mapped)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let Ok(_current) = self.gpu.current("close") else { return };
        // SAFETY: mapped once by `new`; whoever used it has ended, by the contract of a link.
        unsafe {
            (self.gpu.driver.unmap)(self.base, self.bytes);
            (self.gpu.driver.free)(self.base, self.bytes);
        }
    }
}

/// A window as this rank's GPU sees it.
#[derive(Debug)]
pub(super) enum Seen {
    /// In the memory of some GPU.
    Device(Mapped),
    /// In memory of the host, of so many bytes.
    Host(Arc<Registered>, usize),
}

impl Seen {
    pub fn base(&self) -> u64 {
        match self {
            Self::Device(mapped) => mapped.base,
            Self::Host(registered, _) => registered.device,
        }
    }

    pub fn bytes(&self) -> usize {
        match self {
            Self::Device(mapped) => mapped.bytes,
            Self::Host(_, bytes) => *bytes,
        }
    }
}

/// A rank's window, as processes share it.
pub(super) struct Window<'a> {
    gpu: Arc<Gpu>,
    memory: Arc<Allocation>,
    fd: OwnedFd,
    /// What the processes' ranks are called.
    numbers: &'a [usize],
}

impl<'a> Window<'a> {
    pub fn new(gpu: &Arc<Gpu>, memory: Arc<Allocation>, numbers: &'a [usize]) -> Result<Self> {
        let fd = memory.export()?;
        Ok(Self { gpu: gpu.clone(), memory, fd, numbers })
    }
}

impl Shared for Window<'_> {
    type Mapped = Mapped;

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn map(&self) -> Result<Mapped> {
        Mapped::new(&self.gpu, &self.memory)
    }

    fn map_foreign(&self, peer: usize, fd: OwnedFd) -> Result<Mapped> {
        // All ranks' windows are of one size; a smaller one cannot be mapped to its whole length.
        let memory = Allocation::import(&self.gpu, &fd, self.memory.bytes);
        let mapped = memory.and_then(|memory| Mapped::new(&self.gpu, &memory));
        mapped.map_err(|e| refused(self.numbers[peer], &e))
    }
}

/// Why a peer's window cannot be had.
pub(super) fn refused(peer: usize, error: &TransportError) -> TransportError {
    let detail = format!(
        "the window of rank {peer} cannot be mapped by this rank's GPU ({error}); use a transport \
         that does not map peers, such as nccl or rdma"
    );
    TransportError::Unsupported { op: OP, detail }
}

/// A stream of this transport's own, for what the host does to memory of a GPU.
pub(super) struct Setup {
    pub gpu: Arc<Gpu>,
    pub raw: CUstream,
}

// SAFETY: a handle of the driver, which may be used from any thread and never changes.
unsafe impl Send for Setup {}
// SAFETY: the handle never changes, and the driver's stream functions may be called from several threads.
unsafe impl Sync for Setup {}

impl Setup {
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let _current = gpu.current(OP)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a context is current; `raw` is valid for the call.
        let code = unsafe { (gpu.driver.stream_create)(&mut raw, NON_BLOCKING) };
        gpu.check(OP, "cuStreamCreate", code)?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// Waits, bounded, for everything submitted.
    pub fn wait(&self, what: &str, deadline: Deadline) -> Result<()> {
        let start = Instant::now();
        loop {
            // SAFETY: the stream is live.
            match unsafe { (self.gpu.driver.stream_query)(self.raw) } {
                NOT_READY if deadline.expired() => {
                    let detail = format!("{what} did not end within {:?}", start.elapsed());
                    return Err(TransportError::Unsupported { op: OP, detail });
                }
                NOT_READY => std::thread::sleep(std::time::Duration::from_micros(20)),
                code => return self.gpu.check(OP, "cuStreamQuery", code),
            }
        }
    }

    pub fn zero(&self, at: u64, bytes: usize) -> Result<()> {
        let _current = self.gpu.current(OP)?;
        // SAFETY: memory of the caller's own mapping.
        let code = unsafe { (self.gpu.driver.set)(at, 0, bytes, self.raw) };
        self.gpu.check(OP, "cuMemsetD8Async", code)
    }

    /// Submits a copy between any two places.
    pub fn submit_copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        let _current = self.gpu.current(OP)?;
        // SAFETY: both ranges are the caller's, until the stream has got there.
        let code = unsafe { (self.gpu.driver.copy)(to, from, bytes, self.raw) };
        self.gpu.check(OP, "cuMemcpyAsync", code)
    }

    /// Copies between any two places and waits.
    pub fn copy(&self, to: u64, from: u64, bytes: usize, deadline: Deadline) -> Result<()> {
        self.submit_copy(to, from, bytes)?;
        self.wait("a copy", deadline)
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        unsafe { (self.gpu.driver.stream_destroy)(self.raw) };
    }
}
