//! The seam between the protocol and the driver: all that a layer asks of its GPU once it is built.
//!
//! [`Driven`] is a GPU. Tests put a simulated one in its place, which checks every order that the
//! protocol relies on.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUstream;
use ep_kernels::cuda::moe::{MoeKernels, MoeWork};
use ep_kernels::cuda::{
    CaptureRelaxed, CudaError, Device, DeviceMemory, DeviceProperties, Event, EventPool,
    MappedHost, PointerPlace, Stream,
};
use ep_transport::{Deadline, drop_when_quiet};

type Driver<T> = std::result::Result<T, CudaError>;

/// A point in a stream.
pub(crate) trait Point: Debug + Send + Sync {
    /// Whether the stream has got there.
    fn is_done(&self) -> Driver<bool>;

    /// Makes work submitted to `stream` from now on happen after it.
    ///
    /// # Safety
    /// `stream` is a live stream.
    unsafe fn order(&self, stream: CUstream) -> Driver<()>;
}

/// A GPU with the streams of a layer. Nothing here waits, unless it says so.
///
/// # Safety of its functions
/// Streams are live and of this GPU.
pub(crate) trait Machine: Debug + Send + Sync {
    fn properties(&self) -> &DeviceProperties;

    /// The GPU by its driver, if it is one.
    fn device(&self) -> Option<&Device>;

    /// Fails unless `stream` is one of this GPU.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn check_stream(&self, op: &'static str, stream: CUstream) -> Driver<()>;

    /// Whether `stream` is being captured into a graph.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn is_capturing(&self, stream: CUstream) -> Driver<bool>;

    fn place_of(&self, address: u64) -> Driver<PointerPlace>;

    /// What `stream` has got to do so far.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn record(&self, stream: CUstream) -> Driver<Arc<dyn Point>>;

    /// Makes work submitted to `stream` from now on happen after all that `before` has now.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn chain(&self, before: CUstream, stream: CUstream) -> Driver<()>;

    /// Launches kernels.
    ///
    /// # Safety
    /// See the trait; and that of [`MoeWork::submit`].
    unsafe fn submit(&self, stream: CUstream, work: &MoeWork<'_>) -> Driver<()>;

    /// [`Point::is_done`] while a stream of this thread is being captured.
    fn is_done_in_capture(&self, point: &dyn Point) -> Driver<bool>;

    /// Lets some time go by for a host that waits; `spins` counts its calls.
    fn pause(&self, spins: &mut u32);

    /// Copies so many bytes to one address from another, and waits for that.
    ///
    /// # Safety
    /// Both ranges are valid for the copy.
    unsafe fn copy(
        &self,
        op: &'static str,
        to_from_bytes: (u64, u64, usize),
        limit: Duration,
    ) -> Driver<()>;

    /// A copy of so many bytes at an address, in new memory of this GPU; waits for it.
    ///
    /// # Safety
    /// As [`Machine::copy`].
    unsafe fn duplicate(
        &self,
        op: &'static str,
        from_bytes: (u64, usize),
        deadline: Deadline,
    ) -> Driver<DeviceMemory>;
}

/// A GPU by its driver, with the memory of a layer.
#[derive(Debug)]
pub(super) struct Driven {
    pub device: Device,
    pub kernels: MoeKernels,
    pub events: Arc<EventPool>,
    /// Those of lanes.
    pub streams: Vec<Stream>,
    /// For copies that the host waits for.
    pub copies: Stream,
    /// Tables, lanes, scratch and handles.
    pub memory: Option<DeviceMemory>,
    /// Reports and what handles tell.
    pub pinned: Option<MappedHost<u8>>,
}

impl Point for Event {
    fn is_done(&self) -> Driver<bool> {
        Event::is_done(self)
    }

    unsafe fn order(&self, stream: CUstream) -> Driver<()> {
        // SAFETY: by this function's contract.
        unsafe { Event::order(self, stream) }
    }
}

impl Machine for Driven {
    fn properties(&self) -> &DeviceProperties {
        self.device.properties()
    }

    fn device(&self) -> Option<&Device> {
        Some(&self.device)
    }

    unsafe fn check_stream(&self, op: &'static str, stream: CUstream) -> Driver<()> {
        // SAFETY: by this function's contract.
        unsafe { self.device.check_stream(op, stream) }
    }

    unsafe fn is_capturing(&self, stream: CUstream) -> Driver<bool> {
        // SAFETY: by this function's contract.
        unsafe { self.device.is_capturing(stream) }
    }

    fn place_of(&self, address: u64) -> Driver<PointerPlace> {
        self.device.place_of(address)
    }

    unsafe fn record(&self, stream: CUstream) -> Driver<Arc<dyn Point>> {
        // SAFETY: by this function's contract.
        Ok(Arc::new(unsafe { self.events.record(stream)? }))
    }

    unsafe fn chain(&self, before: CUstream, stream: CUstream) -> Driver<()> {
        // SAFETY: by this function's contract.
        unsafe { self.events.record(before)?.order(stream) }
    }

    unsafe fn submit(&self, stream: CUstream, work: &MoeWork<'_>) -> Driver<()> {
        // SAFETY: by this function's contract.
        unsafe { work.submit(stream, &self.kernels) }
    }

    fn is_done_in_capture(&self, point: &dyn Point) -> Driver<bool> {
        let _relaxed = CaptureRelaxed::enter(&self.device)?;
        point.is_done()
    }

    /// Spins first, since most waits are short, then sleeps.
    fn pause(&self, spins: &mut u32) {
        *spins = spins.saturating_add(1);
        if *spins < 20_000 {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    unsafe fn copy(
        &self,
        op: &'static str,
        (to, from, bytes): (u64, u64, usize),
        limit: Duration,
    ) -> Driver<()> {
        // SAFETY: by this function's contract; the wait keeps both until the copy is done.
        unsafe { self.device.copy(self.copies.raw(), to, from, bytes)? };
        self.copies.wait(op, limit)
    }

    unsafe fn duplicate(
        &self,
        op: &'static str,
        (from, bytes): (u64, usize),
        deadline: Deadline,
    ) -> Driver<DeviceMemory> {
        let memory = DeviceMemory::zeroed(&self.copies, bytes, deadline.remaining())?;
        // SAFETY: by this function's contract; the copy is as long as the memory.
        unsafe { self.copy(op, (memory.address(), from, bytes), deadline.remaining())? };
        Ok(memory)
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        // Nothing is freed under the feet of a kernel: after a failure waits are released, so
        // streams end; should one not, its memory is left to it.
        let limit = Duration::from_secs(20);
        let idle = self.streams.iter().all(|stream| {
            stream
                .wait("the end of a lane's work", limit)
                .inspect_err(|e| tracing::warn!("{e}"))
                .is_ok()
        });
        if !idle {
            if let Some(memory) = self.memory.take() {
                memory.leak();
            }
            if let Some(pinned) = self.pinned.take() {
                pinned.leak();
            }
            // So are the streams, whose partition goes with the last of them.
            std::mem::take(&mut self.streams).into_iter().for_each(std::mem::forget);
        }
        // Other layers' streams may wait for what this thread does next.
        drop_when_quiet((self.memory.take(), self.pinned.take()));
    }
}
