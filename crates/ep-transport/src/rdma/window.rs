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
            let deadline = crate::Deadline::after(crate::DEFAULT_TIMEOUT);
            return hand.settle(deadline).map_err(|error| unsettled(error, deadline));
        }
        // SAFETY: by this function's contract; the ranges may overlap, which `copy` allows.
        unsafe { std::ptr::copy(from, to, bytes) };
        Ok(())
    }
}

/// The error of a copy that was started: one that does not end in time is no lack of support, after
/// which the group would be as good as before.
#[cfg(feature = "cuda")]
fn unsettled(error: TransportError, deadline: crate::Deadline) -> TransportError {
    match error {
        TransportError::Unsupported { detail, .. } => TransportError::Timeout {
            op: "put",
            peers: Vec::new(),
            after: deadline.length(),
            hint: format!("; {detail}"),
        },
        other => other,
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

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_does_not_end_is_a_timeout() {
        let deadline = crate::Deadline::after(std::time::Duration::from_secs(3));
        let detail = "a copy did not end within 3s".to_owned();
        let error = unsettled(TransportError::Unsupported { op: "open", detail }, deadline);
        assert_eq!(error.kind(), crate::ErrorKind::Timeout);
        assert!(!error.group_usable());
        assert_eq!(error.to_string(), "put: no answer within 3s; a copy did not end within 3s");
        let (call, detail) = ("cuStreamQuery", "an illegal address".to_owned());
        let device = TransportError::Device { op: "open", call, code: 700, detail };
        assert_eq!(unsettled(device, deadline).kind(), crate::ErrorKind::Device);
    }
}
