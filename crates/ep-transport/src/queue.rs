//! Where operations are ordered.

#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use cudarc::driver::CudaStream;
#[cfg(feature = "cuda")]
use cudarc::driver::sys::CUstream;

/// The place in which an operation takes its turn.
///
/// Work submitted to one queue happens in the order of submission. On the host queue it has
/// happened when the call returns; on a stream when the stream gets there. The type is opaque, so
/// that code which only passes queues on is the same for both.
#[derive(Clone, Debug)]
pub struct Queue(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Host,
    #[cfg(feature = "cuda")]
    Stream {
        raw: Raw,
        ordinal: usize,
        _keep: Option<Arc<CudaStream>>,
    },
}

#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
struct Raw(CUstream);

// SAFETY: a handle of the driver, whose functions take it from any thread.
#[cfg(feature = "cuda")]
unsafe impl Send for Raw {}
// SAFETY: as above; the handle itself never changes.
#[cfg(feature = "cuda")]
unsafe impl Sync for Raw {}

impl Queue {
    /// The calling thread itself.
    pub const fn host() -> Self {
        Queue(Kind::Host)
    }

    /// Whether this is the host queue.
    pub const fn is_host(&self) -> bool {
        matches!(self.0, Kind::Host)
    }

    /// A stream of a GPU, kept alive by this value.
    #[cfg(feature = "cuda")]
    pub fn stream(stream: &Arc<CudaStream>) -> Self {
        let (raw, ordinal) = (Raw(stream.cu_stream()), stream.context().ordinal());
        Queue(Kind::Stream { raw, ordinal, _keep: Some(stream.clone()) })
    }

    /// A stream of the GPU `ordinal` by its driver handle (`CUstream`).
    ///
    /// # Safety
    /// The stream lives as long as this value and its clones, and until everything submitted to it
    /// is done.
    #[cfg(feature = "cuda")]
    pub unsafe fn from_raw(stream: *mut std::ffi::c_void, ordinal: usize) -> Self {
        Queue(Kind::Stream { raw: Raw(stream.cast()), ordinal, _keep: None })
    }

    /// The stream's driver handle and the ordinal of its GPU; `None` for the host.
    #[cfg(feature = "cuda")]
    pub fn raw(&self) -> Option<(CUstream, usize)> {
        match &self.0 {
            Kind::Host => None,
            Kind::Stream { raw, ordinal, .. } => Some((raw.0, *ordinal)),
        }
    }
}
