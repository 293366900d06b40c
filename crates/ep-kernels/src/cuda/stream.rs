use std::ffi::c_int;
use std::fmt;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;

use super::device::Device;
use super::error::CudaError;
use super::green::GreenContext;

/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const NON_BLOCKING: u32 = 1;
const NOT_READY: c_int = 600;

/// A stream of a device, or of a part of its SMs. Never synchronises with the default stream.
pub struct Stream {
    raw: CUstream,
    device: Device,
    // Destroyed after the stream: the stream belongs to it.
    green: Option<GreenContext>,
}

// SAFETY: the driver's stream functions may be called from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the handle itself never changes.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn create(device: &Device, priority: i32) -> Result<Stream, CudaError> {
        let mut raw = std::ptr::null_mut();
        let _current = device.make_current()?;
        // SAFETY: the device's context is current; `raw` is valid for the call.
        device.check("cuStreamCreateWithPriority", unsafe {
            (device.driver().f.stream_create)(&mut raw, NON_BLOCKING, priority)
        })?;
        Ok(Stream { raw, device: device.clone(), green: None })
    }

    pub(crate) fn of_green(raw: CUstream, device: Device, green: GreenContext) -> Stream {
        Stream { raw, device, green: Some(green) }
    }

    /// The driver's handle, valid while this lives.
    pub fn raw(&self) -> CUstream {
        self.raw
    }

    /// The device it belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The partition it launches into, if it is not the whole device.
    pub fn green_context(&self) -> Option<&GreenContext> {
        self.green.as_ref()
    }

    /// Whether everything submitted so far has completed.
    ///
    /// # Errors
    /// A failure of earlier work on the device.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        // SAFETY: the handle is valid while `self` lives.
        let code = unsafe { (self.device.driver().f.stream_query)(self.raw) };
        if code == NOT_READY {
            return Ok(false);
        }
        self.device.check("cuStreamQuery", code)?;
        Ok(true)
    }

    /// Waits until everything submitted so far has completed.
    ///
    /// # Errors
    /// [`CudaError::TimedOut`] naming `operation`, or a failure of earlier work.
    pub fn wait(&self, operation: &'static str, limit: Duration) -> Result<(), CudaError> {
        poll(operation, limit, || self.is_idle().map(|idle| idle.then_some(())))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by us, destroyed once; the driver keeps it until its work has completed.
        let code = unsafe { (self.device.driver().f.stream_destroy)(self.raw) };
        if code != 0 {
            tracing::warn!(code, "cuStreamDestroy failed");
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("raw", &self.raw).field("green", &self.green).finish()
    }
}

/// Polls until `ready` has a value: spins first, since most waits are for kernels of microseconds.
pub(crate) fn poll<T>(
    operation: &'static str,
    limit: Duration,
    mut ready: impl FnMut() -> Result<Option<T>, CudaError>,
) -> Result<T, CudaError> {
    let start = Instant::now();
    loop {
        if let Some(value) = ready()? {
            return Ok(value);
        }
        let waited = start.elapsed();
        if waited >= limit {
            return Err(CudaError::TimedOut { operation, waited });
        }
        if waited < Duration::from_millis(2) {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_ends_at_the_limit_and_names_the_operation() {
        let start = Instant::now();
        let limit = Duration::from_millis(5);
        let error = poll::<()>("the probe", limit, || Ok(None)).unwrap_err();
        assert!(error.to_string().starts_with("the probe did not finish"), "{error}");
        assert!(start.elapsed() >= limit);
    }

    #[test]
    fn polling_returns_the_value_or_the_first_error() {
        let mut calls = 0;
        let value = poll("x", Duration::from_secs(5), || {
            calls += 1;
            Ok((calls == 4).then_some(calls))
        });
        assert_eq!(value, Ok(4));
        let failure = CudaError::InvalidArgument { operation: "y", reason: String::new() };
        assert_eq!(poll::<()>("x", Duration::from_secs(5), || Err(failure.clone())), Err(failure));
    }
}
