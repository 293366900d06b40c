//! Where a rank's own window is.

use std::ptr::NonNull;

#[cfg(feature = "cuda")]
use super::gpu::GpuWindow;
use crate::{Memory, Queue, Result, TransportError};

/// The window, where it is not simply the beginning of the rank's region.
#[derive(Debug, Default)]
pub(super) struct Window {
    #[cfg(feature = "cuda")]
    pub gpu: Option<GpuWindow>,
}

impl Window {
    /// Its first byte, if it is a GPU's.
    pub(super) fn base(&self) -> Option<NonNull<u8>> {
        #[cfg(feature = "cuda")]
        return self.gpu.as_ref().map(GpuWindow::base);
        #[cfg(not(feature = "cuda"))]
        None
    }

    pub(super) fn memory(&self) -> Memory {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            return Memory::Cuda { ordinal: gpu.ordinal() };
        }
        Memory::Host
    }

    /// Makes what NICs have reported as written visible to whoever uses the window.
    pub(super) fn arrived(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            return gpu.flush();
        }
        Ok(())
    }

    /// Copies between two windows or within one.
    ///
    /// # Safety
    /// Both ranges are of windows that this rank has mapped, in this window's kind of memory, and no
    /// other rank accesses them meanwhile.
    pub(super) unsafe fn copy(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            let hand = crate::nvlink::Hand::take(gpu.ordinal())?;
            // SAFETY: by this function's contract.
            unsafe { hand.copy(to as u64, from as u64, bytes)? };
            return hand.settle(crate::Deadline::after(crate::DEFAULT_TIMEOUT));
        }
        // SAFETY: by this function's contract; the ranges may overlap, which `copy` allows.
        unsafe { std::ptr::copy(from, to, bytes) };
        Ok(())
    }
}

/// Fails for queues other than the host's: what a stream waits for or raises is no business of a
/// proxy's yet.
pub(super) fn on_host(op: &'static str, queue: &Queue) -> Result<()> {
    if queue.is_host() {
        return Ok(());
    }
    let detail =
        "streams are no queues of RDMA links: wait for the stream, then use the host queue";
    Err(TransportError::Unsupported { op, detail: detail.into() })
}
