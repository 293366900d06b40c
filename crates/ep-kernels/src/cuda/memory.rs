use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;

use super::device::Device;
use super::error::{CudaError, invalid};

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`; not write-combined, since hosts read it.
const PORTABLE_MAPPED: u32 = 1 | 2;

/// Types of which every bit pattern is a value and which GPUs and hosts lay out alike.
///
/// # Safety
/// `repr(C)`, no padding, no pointer or niche: any bytes are a valid value.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}

macro_rules! plain_integers {
    ($($name:ty),*) => {
        $(
            // SAFETY: an integer, of which any bytes are a value.
            unsafe impl Plain for $name {}
        )*
    };
}
plain_integers!(u8, i32, u32, i64, u64);

/// Page-locked host memory that kernels of any GPU write through the same address.
pub struct MappedHost<T: Plain> {
    at: NonNull<T>,
    len: usize,
    device: Device,
}

// SAFETY: `T` is plain data, and host accesses go through raw reads of memory that never moves.
unsafe impl<T: Plain> Send for MappedHost<T> {}
// SAFETY: `T` is plain data, and host accesses go through raw reads of memory that never moves.
unsafe impl<T: Plain> Sync for MappedHost<T> {}

impl<T: Plain> MappedHost<T> {
    /// `len` zeroed elements.
    ///
    /// # Errors
    /// No elements, a size that overflows, or the driver's.
    pub fn zeroed(device: &Device, len: usize) -> Result<Self, CudaError> {
        let bytes = match size_of::<T>().checked_mul(len) {
            Some(bytes) if bytes > 0 => bytes,
            _ => return invalid("MappedHost::zeroed", format!("{len} elements")),
        };
        let mut raw: *mut c_void = std::ptr::null_mut();
        let _current = device.make_current()?;
        // SAFETY: the device's context is current; `raw` is valid for the call.
        device.check("cuMemHostAlloc", unsafe {
            (device.driver().f.host_alloc)(&mut raw, bytes, PORTABLE_MAPPED)
        })?;
        let Some(at) = NonNull::new(raw.cast::<T>()) else {
            return invalid("cuMemHostAlloc", "the driver returned no address");
        };
        let memory = MappedHost { at, len, device: device.clone() };
        memory.clear();
        Ok(memory)
    }

    /// Zeroes it. Call this only while no kernel writes to it.
    pub fn clear(&self) {
        // SAFETY: `len` elements were allocated at `at`, page-aligned; zero is a value of `T`.
        unsafe { std::ptr::write_bytes(self.at.as_ptr(), 0, self.len) }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: an empty one cannot be made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address kernels use. With unified addressing it is the host's.
    pub fn device_address(&self) -> u64 {
        self.at.as_ptr() as u64
    }

    /// The address of one element, for atomic access while a kernel runs.
    pub(crate) fn pointer(&self, index: usize) -> Option<*mut T> {
        // SAFETY: in bounds.
        (index < self.len).then(|| unsafe { self.at.as_ptr().add(index) })
    }

    /// A copy of one element, read volatile: a kernel may have written it. `None` past the end.
    pub fn read(&self, index: usize) -> Option<T> {
        // SAFETY: in bounds and aligned; any bytes are a value of `T`.
        self.pointer(index).map(|at| unsafe { at.read_volatile() })
    }

    /// Gives the memory up for good, for when a kernel that may still write it did not end in time.
    pub fn leak(self) {
        std::mem::forget(self);
    }
}

impl<T: Plain> Drop for MappedHost<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `cuMemHostAlloc`, freed once.
        let code = unsafe { (self.device.driver().f.host_free)(self.at.as_ptr().cast()) };
        if code != 0 {
            tracing::warn!(code, "cuMemFreeHost failed");
        }
    }
}

impl<T: Plain> fmt::Debug for MappedHost<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedHost").field("at", &self.at).field("len", &self.len).finish()
    }
}

/// Memory allocated ahead and used again: allocating or freeing page-locked memory may wait for
/// the kernels that run meanwhile, which are what is being observed.
#[derive(Debug)]
pub(crate) struct Pool<T: Plain> {
    free: Mutex<Vec<MappedHost<T>>>,
    device: Device,
}

impl<T: Plain> Pool<T> {
    /// A pool with `ahead` pieces of `len` elements.
    pub(crate) fn new(device: &Device, ahead: usize, len: usize) -> Result<Arc<Self>, CudaError> {
        let free = (0..ahead).map(|_| MappedHost::zeroed(device, len)).collect::<Result<_, _>>()?;
        Ok(Arc::new(Pool { free: Mutex::new(free), device: device.clone() }))
    }

    /// `len` zeroed elements, allocated only where no free piece is large enough.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Result<Lease<T>, CudaError> {
        let found = {
            let mut free = self.free.lock();
            let at = free.iter().position(|memory| memory.len() >= len);
            at.map(|at| free.swap_remove(at))
        };
        let memory = match found {
            Some(memory) => memory,
            None => MappedHost::zeroed(&self.device, len)?,
        };
        memory.clear();
        Ok(Lease { memory: Some(memory), len, pool: self.clone() })
    }
}

/// A piece of a [`Pool`], which gets it back when this drops.
#[derive(Debug)]
pub(crate) struct Lease<T: Plain> {
    // Absent only while dropping.
    memory: Option<MappedHost<T>>,
    len: usize,
    pool: Arc<Pool<T>>,
}

impl<T: Plain> Lease<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn device_address(&self) -> u64 {
        self.memory.as_ref().map_or(0, MappedHost::device_address)
    }

    pub(crate) fn pointer(&self, index: usize) -> Option<*mut T> {
        self.memory.as_ref().filter(|_| index < self.len)?.pointer(index)
    }

    pub(crate) fn read(&self, index: usize) -> Option<T> {
        self.memory.as_ref().filter(|_| index < self.len)?.read(index)
    }
}

impl<T: Plain> Drop for Lease<T> {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.free.lock().push(memory);
        }
    }
}
