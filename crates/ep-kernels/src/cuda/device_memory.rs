use std::ffi::{c_int, c_void};
use std::time::Duration;

use cudarc::driver::sys::CUstream;

use super::device::Device;
use super::error::{CudaError, invalid};
use super::memory::Plain;
use super::stream::Stream;

/// Memory of a GPU, by `cuMemAlloc`.
#[derive(Debug)]
pub struct DeviceMemory {
    at: u64,
    bytes: usize,
    device: Device,
}

impl DeviceMemory {
    /// `bytes` zeroed bytes, aligned to 256. Waits, bounded, until they are zero.
    ///
    /// # Errors
    /// No bytes, or the driver's: out of memory among them.
    pub fn zeroed(stream: &Stream, bytes: usize, limit: Duration) -> Result<Self, CudaError> {
        let device = stream.device().clone();
        if bytes == 0 {
            return invalid("DeviceMemory::zeroed", "no bytes");
        }
        let _current = device.make_current()?;
        let mut at = 0;
        // SAFETY: a context is current; `at` is valid for the call.
        let code = unsafe { (device.driver().f.mem_alloc)(&mut at, bytes) };
        device.check("cuMemAlloc", code).map_err(|e| of_size(e, bytes))?;
        let memory = Self { at, bytes, device };
        let f = &memory.device.driver().f;
        // SAFETY: the whole allocation, which nobody else knows yet.
        let code = unsafe { (f.mem_set)(at, 0, bytes, stream.raw()) };
        memory.device.check("cuMemsetD8Async", code)?;
        stream.wait("zeroing device memory", limit)?;
        Ok(memory)
    }

    /// Its first byte.
    pub fn address(&self) -> u64 {
        self.at
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `data` to `offset` and waits, bounded, until it is there.
    ///
    /// # Errors
    /// Data that does not fit, or the driver's.
    pub fn upload<T: Plain>(
        &self,
        stream: &Stream,
        offset: usize,
        data: &[T],
        limit: Duration,
    ) -> Result<(), CudaError> {
        let bytes = size_of_val(data);
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return invalid("upload", format!("{bytes} bytes at {offset} of {}", self.bytes));
        }
        // SAFETY: in bounds on both sides; `data` stays until the copy is done.
        unsafe {
            self.device.copy(stream.raw(), self.at + offset as u64, data.as_ptr() as u64, bytes)?
        };
        stream.wait("an upload", limit)
    }

    /// Copies from `offset` into `data` and waits, bounded.
    ///
    /// # Errors
    /// As [`DeviceMemory::upload`].
    pub fn download<T: Plain>(
        &self,
        stream: &Stream,
        offset: usize,
        data: &mut [T],
        limit: Duration,
    ) -> Result<(), CudaError> {
        let bytes = size_of_val(data);
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return invalid("download", format!("{bytes} bytes at {offset} of {}", self.bytes));
        }
        let to = data.as_mut_ptr() as u64;
        // SAFETY: in bounds on both sides; any bytes are a `T`; `data` stays until the copy is done.
        unsafe { self.device.copy(stream.raw(), to, self.at + offset as u64, bytes)? };
        stream.wait("a download", limit)
    }

    /// Gives the memory up for good, for when kernels that may still touch it did not end in time.
    pub fn leak(self) {
        std::mem::forget(self);
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let Ok(_current) = self.device.make_current() else { return };
        // SAFETY: allocated once, freed once; the driver waits for work that uses it.
        let code = unsafe { (self.device.driver().f.mem_free)(self.at) };
        if code != 0 {
            tracing::warn!(code, "cuMemFree failed");
        }
    }
}

fn of_size(error: CudaError, bytes: usize) -> CudaError {
    match error {
        CudaError::Driver { operation, code, name, detail } => {
            let detail = format!("{detail} (asked for {bytes} bytes)");
            CudaError::Driver { operation, code, name, detail }
        }
        other => other,
    }
}

/// Where an address lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PointerPlace {
    /// In host memory that the driver knows nothing of.
    Host,
    /// In page-locked host memory.
    Pinned,
    /// On the GPU with this ordinal.
    Device(usize),
}

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`, `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`; `CU_MEMORYTYPE_DEVICE`.
const MEMORY_TYPE: c_int = 2;
const DEVICE_ORDINAL: c_int = 9;
const TYPE_DEVICE: u32 = 2;

impl Device {
    /// Where `address` lies.
    ///
    /// # Errors
    /// The driver's.
    pub fn place_of(&self, address: u64) -> Result<PointerPlace, CudaError> {
        let mut kind = 0u32;
        let f = &self.driver().f;
        let to: *mut c_void = (&raw mut kind).cast();
        // SAFETY: the attribute is a u32; any address may be asked about.
        if unsafe { (f.pointer_attribute)(to, MEMORY_TYPE, address) } != 0 {
            // The driver knows no such memory.
            return Ok(PointerPlace::Host);
        }
        if kind != TYPE_DEVICE {
            return Ok(PointerPlace::Pinned);
        }
        let mut ordinal: c_int = 0;
        // SAFETY: the attribute is an int.
        self.check("cuPointerGetAttribute", unsafe {
            (f.pointer_attribute)((&raw mut ordinal).cast(), DEVICE_ORDINAL, address)
        })?;
        Ok(PointerPlace::Device(ordinal.max(0) as usize))
    }

    /// Copies `bytes` between any two places, in the order of `stream`.
    ///
    /// # Safety
    /// Both ranges stay valid until the copy has happened, and `stream` is live.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn copy(
        &self,
        stream: CUstream,
        to: u64,
        from: u64,
        bytes: usize,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.make_current()?;
        // SAFETY: the caller's promise.
        self.check("cuMemcpyAsync", unsafe { (self.driver().f.mem_copy)(to, from, bytes, stream) })
    }

    /// Sets `bytes` bytes, in the order of `stream`.
    ///
    /// # Safety
    /// As [`Device::copy`].
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn fill(
        &self,
        stream: CUstream,
        to: u64,
        value: u8,
        bytes: usize,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.make_current()?;
        // SAFETY: the caller's promise.
        self.check("cuMemsetD8Async", unsafe {
            (self.driver().f.mem_set)(to, value, bytes, stream)
        })
    }

    /// Fails unless `stream` launches into this device's primary context or into a partition of the
    /// device.
    ///
    /// # Safety
    /// `stream` is a live stream, or null for the legacy default stream.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] naming `operation`, or the driver's.
    pub unsafe fn check_stream(
        &self,
        operation: &'static str,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        let f = &self.driver().f;
        let _current = self.make_current()?;
        let (mut context, mut green) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the caller's promise; the outputs are valid for the call.
        let code = unsafe {
            match f.stream_contexts {
                Some(both) => both(stream, &mut context, &mut green),
                None => (f.stream_context)(stream, &mut context),
            }
        };
        self.check("cuStreamGetCtx", code)?;
        if context == self.context().cu_ctx() {
            return Ok(());
        }
        let reason = "the stream belongs to another context or device";
        if green.is_null() {
            return invalid(operation, reason);
        }
        let mut green_context = std::ptr::null_mut();
        if let Some(convert) = f.green_context {
            // SAFETY: `green` is the live partition of a live stream.
            self.check("cuCtxFromGreenCtx", unsafe { convert(&mut green_context, green) })?;
        }
        let _there = super::device::Current::push(self.driver(), green_context)?;
        let device = cudarc::driver::result::ctx::get_current();
        match device {
            Ok(Some(_)) if self.same_device() => Ok(()),
            _ => invalid(operation, reason),
        }
    }

    /// Whether the current context is one of this device.
    fn same_device(&self) -> bool {
        let mut device = 0;
        // SAFETY: a context is current; `device` is valid for the call.
        let code = unsafe { cudarc::driver::sys::cuCtxGetDevice(&mut device) };
        code == cudarc::driver::sys::CUresult::CUDA_SUCCESS && device == self.cu_device()
    }

    /// Whether `stream` is being captured into a graph.
    ///
    /// # Safety
    /// As [`Device::check_stream`].
    ///
    /// # Errors
    /// The driver's, among them a capture that has failed.
    pub unsafe fn is_capturing(&self, stream: CUstream) -> Result<bool, CudaError> {
        let mut status = 0;
        // SAFETY: the caller's promise; `status` is valid for the call.
        self.check("cuStreamIsCapturing", unsafe {
            (self.driver().f.stream_capturing)(stream, &mut status)
        })?;
        match status {
            0 => Ok(false),
            1 => Ok(true),
            _ => {
                invalid("capture", "the capture of this stream was invalidated by an earlier call")
            }
        }
    }
}
