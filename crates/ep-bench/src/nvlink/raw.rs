//! What measuring needs of the driver beyond ep-kernels: gated starts, graphs, copies between GPUs.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult, CUstream, CUstreamCaptureMode};
use ep_kernels::cuda::{CudaError, Device, Event, MappedHost};

use crate::{BenchError, Result};

/// Bound of every wait for a GPU.
pub const LIMIT: Duration = Duration::from_secs(20);

/// An error of the driver, in this program's terms.
pub fn failed(error: CudaError) -> BenchError {
    BenchError::Tool { op: "nvlink", detail: error.to_string() }
}

fn check(op: &'static str, code: CUresult) -> Result<()> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(BenchError::Tool { op, detail: format!("{code:?}") }),
    }
}

/// A flag that streams of all GPUs wait for, so that they start together.
#[derive(Debug)]
pub struct Gate(MappedHost<u32>);

impl Gate {
    /// A shut gate.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(device: &Device) -> Result<Self> {
        MappedHost::zeroed(device, 1).map(Self).map_err(failed)
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: one aligned word of page-locked memory, whose address is the host's, alive as
        // long as `self` and accessed by the host only here.
        unsafe { AtomicU32::from_ptr(self.0.device_address() as *mut u32) }
    }

    /// Opens it for the waits of `round` and of those before.
    pub fn open(&self, round: u32) {
        self.word().store(round, Ordering::Release);
    }

    /// Holds `stream` until the gate is open for `round`.
    ///
    /// # Safety
    /// `stream` is a live stream of `device`, and its work ends before the gate is dropped.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn hold(&self, device: &Device, stream: CUstream, round: u32) -> Result<()> {
        let _current = device.make_current().map_err(failed)?;
        // SAFETY: the caller's promise; flag 0 waits for a value not less than `round`.
        check("cuStreamWaitValue32", unsafe {
            sys::cuStreamWaitValue32_v2(stream, self.0.device_address(), round, 0)
        })
    }
}

/// A captured piece of work.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    exec: sys::CUgraphExec,
}

impl Graph {
    /// Captures what `work` submits to `stream`.
    ///
    /// # Safety
    /// `stream` is a live stream of `device`; what `work` uses lives as long as the graph.
    ///
    /// # Errors
    /// The driver's, or those of `work`.
    pub unsafe fn capture<T>(
        device: &Device,
        stream: CUstream,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<(Self, T)> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let begin = || {
            let _current = device.make_current().map_err(failed)?;
            // SAFETY: the caller's promise.
            check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream, mode) })
        };
        begin()?;
        let done = work();
        let _current = device.make_current().map_err(failed)?;
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: ends the capture begun above; `graph` is valid for the call.
        let ended = unsafe { sys::cuStreamEndCapture(stream, &mut graph) };
        let done = done?;
        check("cuStreamEndCapture", ended)?;
        // SAFETY: a graph just captured; the executable one does not need it afterwards.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) };
        // SAFETY: as above; destroyed once.
        let destroyed = unsafe { sys::cuGraphDestroy(graph) };
        check("cuGraphInstantiate", made)?;
        check("cuGraphDestroy", destroyed)?;
        Ok((Self { device: device.clone(), exec }, done))
    }

    /// Replays it on `stream`.
    ///
    /// # Safety
    /// As [`Graph::capture`].
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn launch(&self, stream: CUstream) -> Result<()> {
        let _current = self.device.make_current().map_err(failed)?;
        // SAFETY: the caller's promise; the graph is live.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: destroyed once; the driver keeps what still runs.
        let code = unsafe { sys::cuGraphExecDestroy(self.exec) };
        if code != CUresult::CUDA_SUCCESS {
            eprintln!("cuGraphExecDestroy: {code:?}");
        }
    }
}

/// Lets each of `devices` access the others' memory.
///
/// # Errors
/// The driver's.
pub fn enable_peers(devices: &[Device]) -> Result<()> {
    for device in devices {
        let _current = device.make_current().map_err(failed)?;
        for other in devices.iter().filter(|o| o.context() != device.context()) {
            // SAFETY: both contexts are retained by their devices.
            let code = unsafe { sys::cuCtxEnablePeerAccess(other.context().cu_ctx(), 0) };
            if code != CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
                check("cuCtxEnablePeerAccess", code)?;
            }
        }
    }
    Ok(())
}

/// Copies between two GPUs on a stream of the source's.
///
/// # Safety
/// Both ranges are valid until the copy is done; `stream` is a live stream of `source`.
///
/// # Errors
/// The driver's.
pub unsafe fn copy_to_peer(
    (dest, to): (&Device, u64),
    (source, from): (&Device, u64),
    bytes: usize,
    stream: CUstream,
) -> Result<()> {
    let _current = source.make_current().map_err(failed)?;
    let (there, here) = (dest.context().cu_ctx(), source.context().cu_ctx());
    // SAFETY: the caller's promise.
    check("cuMemcpyPeerAsync", unsafe {
        sys::cuMemcpyPeerAsync(to, there, from, here, bytes, stream)
    })
}

/// Waits, bounded, for an event.
///
/// # Errors
/// The driver's, or a wait of more than [`LIMIT`].
pub fn await_event(event: &Event, what: &'static str) -> Result<()> {
    let start = Instant::now();
    while !event.is_done().map_err(failed)? {
        if start.elapsed() > LIMIT {
            return Err(BenchError::Tool { op: what, detail: format!("no end within {LIMIT:?}") });
        }
        std::hint::spin_loop();
    }
    Ok(())
}
