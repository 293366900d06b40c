//! Keeps SMs of a compute stream busy without touching memory.

use std::time::Duration;

use cudarc::driver::sys::CUstream;
use ep_kernels::cuda::{HoldSpec, SmTools};

use crate::nvlink::raw::{LIMIT, failed};
use crate::{BenchError, Result};

/// The longest that SMs are held at once.
pub const LONGEST: Duration = Duration::from_secs(2);

/// Holds SMs again and again.
#[derive(Debug)]
pub struct Holder {
    tools: SmTools,
    /// On a stream that outlives it, by the contract of [`Holder::start`].
    held: Option<ep_kernels::cuda::Holder<'static>>,
}

impl Holder {
    /// Nothing held yet.
    pub fn new(tools: SmTools) -> Self {
        Self { tools, held: None }
    }

    /// Launches `blocks` blocks, one per SM, that stay for `hold` by the GPU's timer, and waits until
    /// all are there.
    ///
    /// # Safety
    /// `stream` is a live stream of the tools' device and is not destroyed before this holder.
    ///
    /// # Errors
    /// More blocks than SMs, too long a hold, blocks that do not start in time, the driver's.
    pub unsafe fn start(&mut self, stream: CUstream, blocks: u32, hold: Duration) -> Result<()> {
        if self.held.is_some() || hold > LONGEST {
            let detail = format!("SMs are held already, or would be for {hold:?}");
            return Err(BenchError::Tool { op: "holder", detail });
        }
        let spec = HoldSpec::anywhere(blocks, hold);
        // SAFETY: by this function's contract.
        let held = unsafe { self.tools.hold_raw(stream, &spec) }.map_err(failed)?;
        let there = held.wait_holding(LIMIT).map_err(failed);
        self.held = Some(held);
        there.map(drop)
    }

    /// Whether no block has left yet.
    pub fn is_holding(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.is_holding())
    }

    /// Waits until all have left.
    ///
    /// # Errors
    /// They do not within the time they may stay and some.
    pub fn finish(&mut self) -> Result<()> {
        match self.held.take() {
            Some(held) => held.finish(LIMIT).map(drop).map_err(failed),
            None => Ok(()),
        }
    }
}
