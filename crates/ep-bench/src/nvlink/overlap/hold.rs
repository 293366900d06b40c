//! Keeps SMs of a compute stream busy without touching memory.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;
use ep_kernels::cuda::{
    Device, Kernel, KernelParams, LaunchAttributes, LaunchConfig, MappedHost, Plain, SmSet, SmTools,
};

use crate::nvlink::raw::{LIMIT, failed};
use crate::{BenchError, Result};

/// A block's record, as in kernels/holder.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct HoldRecord {
    start_ns: u64,
    end_ns: u64,
    smid: u32,
    state: u32,
}

/// The parameters, as in kernels/holder.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct HoldParams {
    records: u64,
    hold_ns: u64,
    deadline_ns: u64,
    settle_ns: u64,
    record_count: u32,
    reserved: u32,
    chosen: SmSet,
}

// SAFETY: repr(C), integers only, no padding (8 + 8 + 4 + 4).
unsafe impl Plain for HoldRecord {}
// SAFETY: repr(C), integers only, no padding (4 * 8 + 2 * 4 + 128).
unsafe impl Plain for HoldParams {}
// SAFETY: the struct of kernels/holder.cu; a test compares it with the layout that source is
// compiled against.
unsafe impl KernelParams for HoldParams {}

// States of a block, as in holder.cu.
const HOLDING: u32 = 2;
const ENDED: u32 = 3;

/// The longest that SMs are held at once.
pub const LONGEST: Duration = Duration::from_secs(2);

/// Holds SMs again and again: nothing is allocated in between.
#[derive(Debug)]
pub struct Holder {
    kernel: Kernel,
    shared_bytes: u32,
    /// Gone after a launch that did not end: the GPU may still write them.
    records: Option<MappedHost<HoldRecord>>,
    blocks: usize,
}

impl Holder {
    /// One for up to as many blocks as the device has SMs.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(device: &Device, tools: &SmTools) -> Result<Self> {
        let properties = device.properties();
        let kernel = tools.holder_kernel().clone();
        let records = MappedHost::zeroed(device, properties.sms as usize).map_err(failed)?;
        // All of it, so that nothing that uses shared memory runs on the same SM.
        let shared_bytes =
            properties.shared_per_block.saturating_sub(kernel.resources().shared_bytes);
        Ok(Self { kernel, shared_bytes, records: Some(records), blocks: 0 })
    }

    /// Launches `blocks` blocks, one per SM, that stay for `hold` by the GPU's timer, and waits until
    /// all are there.
    ///
    /// # Safety
    /// `stream` is a live stream of the holder's device.
    ///
    /// # Errors
    /// More blocks than SMs, blocks that do not start in time, the driver's.
    pub unsafe fn start(&mut self, stream: CUstream, blocks: u32, hold: Duration) -> Result<()> {
        let Some(records) = &self.records else { return odd("an earlier holder did not end") };
        if blocks == 0 || blocks as usize > records.len() || hold > LONGEST {
            return odd("more blocks than SMs, or too long a hold");
        }
        records.clear();
        self.blocks = blocks as usize;
        let params = HoldParams {
            records: records.device_address(),
            hold_ns: hold.as_nanos() as u64,
            deadline_ns: u64::MAX,
            settle_ns: 0,
            record_count: blocks,
            reserved: 0,
            chosen: SmSet::all(),
        };
        let attributes = LaunchAttributes::plain();
        let config =
            LaunchConfig { grid: blocks, block: 32, shared_bytes: self.shared_bytes, attributes };
        // SAFETY: the stream by this function's contract; there are as many records as blocks, and
        // they and the kernel stay until all blocks have ended, or for good.
        unsafe { self.kernel.launch(stream, &config, &params) }.map_err(failed)?;
        self.wait("the holder's start", |state| matches!(state, HOLDING | ENDED))
    }

    /// Whether no block has left yet.
    pub fn is_holding(&self) -> bool {
        self.states().all(|state| state == HOLDING)
    }

    /// Waits until all have left.
    ///
    /// # Errors
    /// They do not within the time they may stay and some.
    pub fn finish(&mut self) -> Result<()> {
        self.wait("the holder's end", |state| state == ENDED)?;
        self.blocks = 0;
        Ok(())
    }

    fn states(&self) -> impl Iterator<Item = u32> {
        let base = self.records.as_ref().map(MappedHost::device_address);
        (0..self.blocks).filter_map(move |block| {
            let record = base? as *mut HoldRecord;
            // SAFETY: in bounds of page-locked memory, whose address is the host's, alive as long as
            // `self`. Acquire pairs with the kernel's st.release.sys.
            let state = unsafe { AtomicU32::from_ptr(&raw mut (*record.add(block)).state) };
            Some(state.load(Ordering::Acquire))
        })
    }

    fn wait(&self, op: &'static str, reached: impl Fn(u32) -> bool) -> Result<()> {
        let start = Instant::now();
        while !self.states().all(&reached) {
            if start.elapsed() > LIMIT {
                return Err(BenchError::Tool { op, detail: format!("not within {LIMIT:?}") });
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let ended = self.wait("the holder's end", |state| state == ENDED);
        if ended.is_err()
            && let Some(records) = self.records.take()
        {
            records.leak();
            std::mem::forget(self.kernel.clone());
        }
    }
}

fn odd<T>(detail: &str) -> Result<T> {
    Err(BenchError::Tool { op: "holder", detail: detail.into() })
}

#[cfg(test)]
mod tests {
    use ep_kernels::cuda::KernelSource;

    use super::*;

    /// The kernel's source is compiled against ep-kernels' structs; these must be the same.
    #[test]
    fn parameters_and_records_are_laid_out_as_the_source_says() {
        let source = KernelSource::all().iter().find(|source| source.name == "holder.cu").unwrap();
        let text = source.assemble();
        let has = |name: &str, value: usize| {
            assert!(text.contains(&format!("#define EP_{name} {value}\n")), "{name} {value}");
        };
        has("SIZE_HoldParams", size_of::<HoldParams>());
        has("SIZE_HoldRecord", size_of::<HoldRecord>());
        has("AT_HoldRecord_state", std::mem::offset_of!(HoldRecord, state));
        has("AT_HoldParams_hold_ns", std::mem::offset_of!(HoldParams, hold_ns));
        has("AT_HoldParams_deadline_ns", std::mem::offset_of!(HoldParams, deadline_ns));
        has("AT_HoldParams_record_count", std::mem::offset_of!(HoldParams, record_count));
        has("AT_HoldParams_chosen", std::mem::offset_of!(HoldParams, chosen));
        for (name, value) in [("HOLDING", HOLDING), ("ENDED", ENDED)] {
            assert!(text.contains(&format!("constexpr u32 HOLD_{name} = {value};")));
        }
    }
}
