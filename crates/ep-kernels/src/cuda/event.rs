use std::ffi::c_int;
use std::sync::Arc;

use cudarc::driver::sys::{CUevent, CUstream};
use parking_lot::Mutex;

use super::device::Device;
use super::error::CudaError;

/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: u32 = 2;
const NOT_READY: c_int = 600;

/// Events made ahead and used again: a dispatch makes none.
#[derive(Debug)]
pub struct EventPool {
    device: Device,
    free: Mutex<Vec<Raw>>,
    timed: bool,
}

#[derive(Debug)]
struct Raw(CUevent);

// SAFETY: the driver's event functions may be called from any thread.
unsafe impl Send for Raw {}

impl EventPool {
    /// A pool with `ahead` events; more are made when they run out. `timed` events measure time,
    /// others only order.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(device: &Device, ahead: usize, timed: bool) -> Result<Arc<Self>, CudaError> {
        let pool = Arc::new(Self { device: device.clone(), free: Mutex::default(), timed });
        let made = (0..ahead).map(|_| pool.make()).collect::<Result<Vec<_>, _>>()?;
        pool.free.lock().extend(made);
        Ok(pool)
    }

    fn make(&self) -> Result<Raw, CudaError> {
        let mut raw = std::ptr::null_mut();
        let _current = self.device.make_current()?;
        let flags = if self.timed { 0 } else { NO_TIMING };
        // SAFETY: a context is current; `raw` is valid for the call.
        self.device.check("cuEventCreate", unsafe {
            (self.device.driver().f.event_create)(&mut raw, flags)
        })?;
        Ok(Raw(raw))
    }

    /// An event recorded on `stream`: it happens when all work submitted to it so far is done.
    ///
    /// # Safety
    /// `stream` is a live stream of this pool's device.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn record(self: &Arc<Self>, stream: CUstream) -> Result<Event, CudaError> {
        let free = self.free.lock().pop();
        let raw = free.map_or_else(|| self.make(), Ok)?;
        let event = Event { raw, pool: self.clone() };
        let _current = self.device.make_current()?;
        // SAFETY: the caller's promise; the event belongs to this value alone.
        self.device.check("cuEventRecord", unsafe {
            (self.device.driver().f.event_record)(event.raw.0, stream)
        })?;
        Ok(event)
    }
}

impl Drop for EventPool {
    fn drop(&mut self) {
        for raw in self.free.lock().drain(..) {
            // SAFETY: made by this pool and owned by nobody else.
            let code = unsafe { (self.device.driver().f.event_destroy)(raw.0) };
            if code != 0 {
                tracing::warn!(code, "cuEventDestroy failed");
            }
        }
    }
}

/// A point in a stream. Goes back to its pool when dropped; what waits for it keeps waiting.
#[derive(Debug)]
pub struct Event {
    raw: Raw,
    pool: Arc<EventPool>,
}

// SAFETY: the handle never changes, and the driver's event functions may be called from any thread.
unsafe impl Sync for Event {}

impl Event {
    /// Whether it has happened.
    ///
    /// # Errors
    /// A failure of earlier work on the device.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the event is live and was recorded.
        let code = unsafe { (self.pool.device.driver().f.event_query)(self.raw.0) };
        if code == NOT_READY {
            return Ok(false);
        }
        self.pool.device.check("cuEventQuery", code)?;
        Ok(true)
    }

    /// Makes work submitted to `stream` from now on happen after it.
    ///
    /// # Safety
    /// `stream` is a live stream.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn order(&self, stream: CUstream) -> Result<(), CudaError> {
        let device = &self.pool.device;
        let _current = device.make_current()?;
        // SAFETY: the caller's promise; the event is live.
        device.check("cuStreamWaitEvent", unsafe {
            (device.driver().f.stream_wait_event)(stream, self.raw.0, 0)
        })
    }

    /// Microseconds from `start` to this event, both of a timed pool and done.
    ///
    /// # Errors
    /// Events that are not done or not timed.
    pub fn micros_since(&self, start: &Event) -> Result<f64, CudaError> {
        let mut millis = 0.0;
        // SAFETY: both events are live; `millis` is valid for the call.
        self.pool.device.check("cuEventElapsedTime", unsafe {
            (self.pool.device.driver().f.event_elapsed)(&mut millis, start.raw.0, self.raw.0)
        })?;
        Ok(f64::from(millis) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let raw = std::mem::replace(&mut self.raw, Raw(std::ptr::null_mut()));
        self.pool.free.lock().push(raw);
    }
}

/// While this lives, the thread may ask about events although some stream is being captured.
#[derive(Debug)]
pub struct CaptureRelaxed<'a> {
    device: &'a Device,
    before: c_int,
}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;

impl<'a> CaptureRelaxed<'a> {
    /// Relaxes the mode of this thread.
    ///
    /// # Errors
    /// The driver's.
    pub fn enter(device: &'a Device) -> Result<Self, CudaError> {
        let mut mode = RELAXED;
        // SAFETY: `mode` is valid for the call, which swaps it with the thread's.
        device.check("cuThreadExchangeStreamCaptureMode", unsafe {
            (device.driver().f.capture_mode)(&mut mode)
        })?;
        Ok(Self { device, before: mode })
    }
}

impl Drop for CaptureRelaxed<'_> {
    fn drop(&mut self) {
        let mut mode = self.before;
        // SAFETY: as in `enter`; puts back what was there.
        unsafe { (self.device.driver().f.capture_mode)(&mut mode) };
    }
}
