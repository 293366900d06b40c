//! Where trials run: a GPU and its clock.

use std::sync::Arc;
use std::time::Duration;

use ep_kernels::cuda::{
    Compiler, CudaError, Device, DeviceMemory, Event, EventPool, HoldSpec, Holder, SmTools, Stream,
};
use ep_transport::{Deadline, Queue};

use super::load::{Load, Running};
use super::trial::{Bench, Candidate, Kinds, OP, RUNS, Scene, choices};
use crate::gpu::machine::Point;
use crate::{Ep, Result, SmPolicy};

/// How long the stream is held back, so that operations are submitted before the first one runs.
const HEAD_START: Duration = Duration::from_micros(400);
/// What starting compute, and an agreement of the ranks, may take.
const START: Duration = Duration::from_millis(3);
/// How much slower than expected an operation may be beside compute.
const SLOWER: u32 = 3;
/// Of what is no operation.
pub(super) const LIMIT: Duration = Duration::from_secs(20);
const ALIGN: usize = 256;

/// A stream on the layer's GPU with memory for tokens. Fields that others use are dropped last.
pub(super) struct GpuBench {
    scene: Scene,
    tools: SmTools,
    /// What runs where compute would, if trials are to run beside it.
    load: Option<Load>,
    events: Arc<EventPool>,
    memory: Option<DeviceMemory>,
    stream: Stream,
}

/// Whether a layer's trials run beside compute on all other SMs: where SMs are set aside.
pub(super) fn beside(ep: &Ep) -> bool {
    ep.sm_report().in_force != SmPolicy::Shared
}

impl GpuBench {
    pub fn new(ep: &Ep) -> Result<Self> {
        let gpu = ep.inner.gpu.as_ref().expect("only layers on a GPU are tuned");
        let device = gpu.device(OP)?.clone();
        let tools = SmTools::load(&device, Compiler::get()?)?;
        let stream = device.stream(0)?;
        let compute = match beside(ep) {
            true => Some(ep.compute_stream(0)?),
            false => None,
        };
        // What is loaded at its first use waits for what runs then.
        for stream in compute.iter().map(|compute| compute.stream()).chain([&stream]) {
            tools.hold(stream, &HoldSpec::anywhere(1, Duration::ZERO))?.finish(LIMIT)?;
        }
        let events = EventPool::new(&device, 4, true)?;
        let load =
            compute.and_then(|compute| Load::new(&device, compute, ep.compute_sms(), &events));
        let (memory, scene) = place(ep, &device, &stream)?;
        Ok(Self { scene, tools, load, events, memory: Some(memory), stream })
    }

    fn mark(&self) -> Result<Event, CudaError> {
        // SAFETY: the bench's stream is live.
        unsafe { self.events.record(self.stream.raw()) }
    }

    /// Starts compute, for six operations of the expected time, or slower ones.
    fn compute(&self, expected: Duration) -> Result<Option<Running<'_>>, CudaError> {
        let Some(load) = &self.load else { return Ok(None) };
        let time = START + HEAD_START + expected * SLOWER * (RUNS + 1);
        load.start(&self.tools, &self.events, time).map(Some)
    }

    /// Keeps the stream from going on at once. Without it times are a little longer, so it may fail.
    fn hold_back(&self) -> Option<Holder<'_>> {
        let spec = HoldSpec { shared_bytes: Some(0), ..HoldSpec::anywhere(1, HEAD_START) };
        self.tools.hold(&self.stream, &spec).ok()
    }
}

impl Bench for GpuBench {
    fn scene(&self) -> &Scene {
        &self.scene
    }

    fn is_lasting(&self) -> bool {
        self.load.as_ref().is_none_or(Load::computes)
    }

    fn run(
        &mut self,
        ep: &Ep,
        candidate: &Candidate,
        agreed: &mut dyn FnMut(bool) -> Result<bool>,
        once: &mut dyn FnMut(&Scene) -> Result<()>,
    ) -> Result<Option<Duration>> {
        let compute = self.compute(candidate.expected);
        if let Err(error) = &compute {
            tracing::debug!("a trial cannot begin: {error}");
        }
        if !agreed(compute.is_ok())? {
            return Ok(None);
        }
        let compute = compute?;
        let _held_back = self.hold_back();
        once(&self.scene)?;
        let start = self.mark()?;
        for _ in 0..RUNS {
            once(&self.scene)?;
        }
        let end = self.mark()?;
        await_event(ep, &end)?;
        let whole = compute.is_none_or(|compute| compute.runs().unwrap_or(false));
        let micros = end.micros_since(&start)? / f64::from(RUNS);
        Ok((whole && micros > 0.0).then(|| Duration::from_secs_f64(micros / 1e6)))
    }
}

fn await_event(ep: &Ep, event: &Event) -> Result<()> {
    let gpu = ep.inner.gpu.as_ref().expect("only layers on a GPU are tuned");
    let event: &dyn Point = event;
    // The watchdogs of the operations' own waits know more of what is wrong; they get to speak first.
    let patience = ep.inner.timeout() * (RUNS + 1) + LIMIT;
    gpu.await_point(&ep.inner, OP, event, Deadline::after(patience))
}

/// Takes memory for as many tokens as the layer takes, with made-up choices.
fn place(ep: &Ep, device: &Device, stream: &Stream) -> Result<(DeviceMemory, Scene)> {
    let shape = &ep.inner.shape;
    let Kinds { dispatched, combined } = Kinds::of(ep);
    let rows =
        |bytes: usize| (shape.max_tokens * bytes.next_multiple_of(16)).next_multiple_of(ALIGN);
    let ids = choices(ep.rank(), shape.max_tokens, shape.topk, shape.placement.experts());
    let parts = [
        rows(dispatched.payload_bytes(shape.hidden)),
        rows(dispatched.scale_bytes(shape.hidden)),
        (4 * ids.len()).next_multiple_of(ALIGN),
        rows(combined.map_or(0, |kind| kind.payload_bytes(shape.hidden))),
    ];
    let memory = DeviceMemory::zeroed(stream, parts.iter().sum::<usize>().max(ALIGN), LIMIT)?;
    if !ids.is_empty() {
        memory.upload(stream, parts[0] + parts[1], &ids, LIMIT)?;
    }
    let mut at = memory.address();
    let [payload, scales, ids, out] = parts.map(|bytes| {
        let start = at;
        at += bytes as u64;
        start
    });
    // SAFETY: the bench drops its stream last, and waits for all work on it.
    let queue = unsafe { Queue::from_raw(stream.raw().cast(), device.properties().ordinal) };
    Ok((memory, Scene { queue, payload, scales, ids, out, experts: None }))
}

impl Drop for GpuBench {
    fn drop(&mut self) {
        // Nothing is freed under the feet of a kernel.
        if let Err(error) = self.stream.wait("the end of tuning", LIMIT) {
            tracing::warn!("{error}");
            if let Some(memory) = self.memory.take() {
                memory.leak();
            }
        }
    }
}
