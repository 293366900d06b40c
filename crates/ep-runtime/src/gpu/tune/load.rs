//! What trials run beside: a GEMM, which takes what a caller's compute takes from them (memory, L2, the
//! SM clock), or where there is none a kernel that holds its SMs and no more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ep_kernels::cuda::{
    Compiler, CudaError, Device, DeviceMemory, Event, EventPool, GemmKernel, GemmSpec, HoldSpec,
    Holder, SmTools, Stream,
};

use super::bench::LIMIT;
use crate::sched::ComputeStream;

/// M, N and K: a launch takes about 0.2 ms on an H200, and the matrices 96 MiB.
const SIDE: u32 = 4096;
const BYTES: usize = 2 * (SIDE as usize) * (SIDE as usize);
/// Launches that are timed to know how many a trial needs.
const TIMED: u32 = 8;
/// The longest a trial may keep the SMs: other users of the GPU wait that long too.
const LONGEST: Duration = Duration::from_secs(2);

/// The SMs that compute would have, and what runs on them. Its stream is dropped last.
pub(super) struct Load {
    gemm: Option<Gemm>,
    sms: u32,
    stream: ComputeStream,
}

struct Gemm {
    kernel: GemmKernel,
    spec: GemmSpec,
    /// Of one launch, microseconds.
    micros: f64,
    memory: Option<DeviceMemory>,
}

/// What runs beside a trial.
pub(super) enum Running<'a> {
    Held(Holder<'a>),
    /// The end of the last product.
    Products(Event),
}

impl Load {
    /// On as many of the SMs of `stream` as compute has; `None` if that is none.
    pub fn new(
        device: &Device,
        stream: ComputeStream,
        sms: u32,
        events: &Arc<EventPool>,
    ) -> Option<Self> {
        let sms = stream.sms().min(sms);
        if sms == 0 {
            return None;
        }
        let gemm = Gemm::new(device, stream.stream(), sms, events)
            .inspect_err(|why| tracing::warn!("launch plans are sought beside no GEMM: {why}"));
        Some(Self { gemm: gemm.ok(), sms, stream })
    }

    /// Whether it is as compute is. Otherwise what is found says little to other layers.
    pub fn computes(&self) -> bool {
        self.gemm.is_some()
    }

    /// Keeps the SMs busy for so long at the least, from now on.
    pub fn start<'a>(
        &'a self,
        tools: &'a SmTools,
        events: &Arc<EventPool>,
        time: Duration,
    ) -> Result<Running<'a>, CudaError> {
        let (stream, time) = (self.stream.stream(), time.min(LONGEST));
        let Some(gemm) = &self.gemm else {
            let holder = tools.hold(stream, &HoldSpec::anywhere(self.sms, time))?;
            holder.wait_holding(LIMIT)?;
            return Ok(Running::Held(holder));
        };
        // What the trial before did not use up.
        stream.wait("the end of a trial", LIMIT)?;
        gemm.launch(stream)?;
        let first = record(events, stream)?;
        for _ in 0..(time.as_secs_f64() * 1e6 / gemm.micros) as u64 {
            gemm.launch(stream)?;
        }
        let end = record(events, stream)?;
        let late = Instant::now() + LIMIT;
        while !first.is_done()? {
            if Instant::now() > late {
                return stream.wait("a GEMM", Duration::ZERO).map(|()| Running::Products(end));
            }
            std::thread::yield_now();
        }
        Ok(Running::Products(end))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // Nothing is freed under the feet of a kernel.
        let Some(gemm) = &mut self.gemm else { return };
        if let Err(error) = self.stream.stream().wait("the end of tuning", LIMIT) {
            tracing::warn!("{error}");
            if let Some(memory) = gemm.memory.take() {
                memory.leak();
            }
        }
    }
}

impl Running<'_> {
    /// Whether it still runs: a trial that it did not outlast was in part alone.
    pub fn runs(&self) -> Result<bool, CudaError> {
        match self {
            Self::Held(holder) => Ok(holder.is_holding()),
            Self::Products(end) => Ok(!end.is_done()?),
        }
    }
}

impl Gemm {
    fn new(
        device: &Device,
        stream: &Stream,
        blocks: u32,
        events: &Arc<EventPool>,
    ) -> Result<Self, CudaError> {
        let kernel = GemmKernel::load(device, Compiler::get()?)?;
        kernel.prepare(stream)?;
        let memory = DeviceMemory::zeroed(stream, 3 * BYTES, LIMIT)?;
        fill(&memory, stream)?;
        let [a, b, d] = [0, 1, 2].map(|i| memory.address() + (i * BYTES) as u64);
        let spec = GemmSpec { m: SIDE, n: SIDE, k: SIDE, a, b, d, blocks };
        let mut gemm = Self { kernel, spec, micros: 0.0, memory: Some(memory) };
        gemm.launch(stream)?;
        let start = record(events, stream)?;
        for _ in 0..TIMED {
            gemm.launch(stream)?;
        }
        let end = record(events, stream)?;
        stream.wait("a GEMM", LIMIT)?;
        gemm.micros = (end.micros_since(&start)? / f64::from(TIMED)).max(1.0);
        Ok(gemm)
    }

    fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the stream is live and of the kernel's device; the matrices stay until its work is
        // done, else they are leaked; the result overlaps no factor.
        unsafe { self.kernel.launch(stream.raw(), &self.spec) }
    }
}

/// bf16 of either sign, 0.5 to 2, for both factors: of zeros a GEMM takes less power, and less time.
fn fill(memory: &DeviceMemory, stream: &Stream) -> Result<(), CudaError> {
    let mut state = 1u32;
    let number = |_| {
        // The linear congruential generator of "Numerical Recipes", third edition, 7.1.
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Two values.
        state.rotate_left(16) & 0x80ff_80ff | 0x3f00_3f00
    };
    let piece: Vec<u32> = (0..BYTES / 8).map(number).collect();
    let size = 4 * piece.len();
    (0..2 * BYTES / size).try_for_each(|i| memory.upload(stream, i * size, &piece, LIMIT))
}

fn record(events: &Arc<EventPool>, stream: &Stream) -> Result<Event, CudaError> {
    // SAFETY: the stream is live.
    unsafe { events.record(stream.raw()) }
}
