//! Ranks on GPUs, as threads of this process: rank `r` on GPU `r % gpus`.

use std::sync::Arc;

use ep_kernels::cuda::{Device, DeviceMemory, EventPool, Stream};
use ep_runtime::{
    CombineOpts, DType, DeviceIds, DispatchOpts, Dispatched, Ep, EpBuilder, Group, Handle, IdKind,
    Payload, Place, Queue, Route, Rows, RowsMut, SmPolicy, Tuning,
};

pub use super::known::Job;
use super::raw::failed as cuda;
use super::raw::{Gate, LIMIT};
use super::reference::{
    Reference, combine_opts, compare_combined, compare_rows, failed, layer, layout,
};
use crate::case::Dtype;
use crate::host::kind;
use crate::{BenchError, Result};

/// How an operation is called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// With the routing of this call, not of an earlier one.
    pub uncached: bool,
    /// Without telling the host how many rows come.
    pub capacity: bool,
    /// By replaying a graph.
    pub graph: bool,
    /// Of several operations (`timing::CHAIN`), each of which counts as one.
    pub chain: bool,
}

/// The layer that ranks build.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Blocks of its kernels.
    pub sms: u32,
    /// How they are launched.
    pub tuning: Tuning,
    /// How they get their SMs.
    pub policy: SmPolicy,
    /// Results at once. With one slot, what was poisoned is what the next call writes.
    pub slots: usize,
    /// Operations at once.
    pub lanes: usize,
}

impl Setup {
    /// One operation at a time, on SMs that nothing sets aside.
    pub fn new(sms: u32, tuning: Tuning) -> Self {
        Self { sms, tuning, policy: SmPolicy::Shared, slots: 1, lanes: 1 }
    }
}

/// One rank. Fields that refer to others are dropped before them.
pub struct Rank<'a> {
    /// Its number.
    pub rank: usize,
    /// Its GPU.
    pub device: Device,
    pub(super) job: &'a Job,
    pub(super) group: &'a Group,
    pub(super) gate: &'a Gate,
    pub(super) round: u32,
    pub(super) handle: Option<Handle>,
    pub(super) ep: Ep,
    pub(super) queue: Queue,
    pub(super) places: Places,
    pub(super) memory: DeviceMemory,
    /// The experts' outputs as they lie in a slot, by stride.
    pub(super) images: Vec<(usize, DeviceMemory)>,
    pub(super) events: Arc<EventPool>,
    /// The caller's stream.
    pub stream: Stream,
}

/// Where a rank's data is.
#[derive(Clone, Copy, Default)]
pub(super) struct Places {
    payload: u64,
    scales: u64,
    ids: u64,
    weights: u64,
    out: u64,
}

/// Runs `script` on every rank of `job`. Gives back what it gave, by rank.
///
/// # Errors
/// The first failure that is not another rank's.
pub fn on_ranks<T: Send>(
    job: &Job,
    (sms, tuning): (u32, Tuning),
    graph: bool,
    script: &(dyn Fn(&mut Rank<'_>) -> Result<T> + Sync),
) -> Result<Vec<T>> {
    let slots = if graph { 3 } else { 1 };
    on_ranks_with(job, &Setup { slots, ..Setup::new(sms, tuning) }, script)
}

/// As [`on_ranks`], with any layer.
///
/// # Errors
/// As [`on_ranks`].
pub fn on_ranks_with<T: Send>(
    job: &Job,
    setup: &Setup,
    script: &(dyn Fn(&mut Rank<'_>) -> Result<T> + Sync),
) -> Result<Vec<T>> {
    let gate = Gate::new(&job.devices[0])?;
    let groups = Group::local(job.case.shape.ranks)
        .map_err(|e| BenchError::Tool { op: "nvlink", detail: e.to_string() })?;
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let start = |group: Group| {
            let gate = &gate;
            scope.spawn(move || {
                let done = Rank::new(job, &group, gate, setup).and_then(|mut rank| {
                    let done = script(&mut rank);
                    if let Err(e) = &done {
                        // Nobody waits for this rank, nor for the gate.
                        group.abort(&e.to_string());
                        gate.open(i32::MAX as u32);
                    }
                    done
                });
                if let Err(e) = &done {
                    group.abort(&e.to_string());
                }
                done
            })
        };
        let ranks: Vec<_> = groups.into_iter().map(start).collect();
        (ranks.into_iter().enumerate())
            .map(|(rank, thread)| {
                let died = |_| Err(BenchError::RankDied { rank, detail: "panicked".into() });
                thread.join().unwrap_or_else(died)
            })
            .collect()
    });
    let mut errors: Vec<&BenchError> = results.iter().filter_map(|r| r.as_ref().err()).collect();
    errors.sort_by_key(|e| e.is_echo());
    match errors.first() {
        Some(&e) => Err(e.clone()),
        None => results.into_iter().collect(),
    }
}

impl<'a> Rank<'a> {
    pub(super) fn new(
        job: &'a Job,
        group: &'a Group,
        gate: &'a Gate,
        setup: &Setup,
    ) -> Result<Self> {
        let rank = group.rank();
        let device = job.devices[rank % job.devices.len()].clone();
        let stream = device.stream(0).map_err(cuda)?;
        let ordinal = device.properties().ordinal;
        let builder = EpBuilder::new(layer(&job.case, &job.traffic)).place(Place::Cuda(ordinal));
        let ep = (job.way.place(builder, rank, ordinal)?)
            .slots(setup.slots)
            .lanes(setup.lanes)
            .sm_policy(setup.policy)
            .comm_sms(setup.sms)
            .tuning(setup.tuning)
            .tune(job.tune)
            .timeout(LIMIT)
            .build(group)
            .map_err(failed(rank, "build"))?;
        job.launched(&ep);
        let events = EventPool::new(&device, 16, true).map_err(cuda)?;
        let (memory, places) = place(job, rank, &stream)?;
        // SAFETY: the stream is dropped last, and all work on it is waited for.
        let queue = unsafe { Queue::from_raw(stream.raw().cast(), ordinal) };
        let (round, handle, images) = (0, None, Vec::new());
        Ok(Self {
            rank,
            device,
            job,
            group,
            gate,
            round,
            handle,
            ep,
            queue,
            places,
            memory,
            images,
            events,
            stream,
        })
    }

    /// The answers of this rank.
    pub(super) fn reference(&self) -> &'a Reference {
        &self.job.references[self.rank]
    }

    /// Launches kernels differently.
    pub fn retune(&self, tuning: Tuning) -> Result<()> {
        self.ep.retune(tuning).map_err(failed(self.ep.rank(), "retune"))
    }

    /// Waits for all ranks.
    ///
    /// # Errors
    /// A rank that failed.
    pub fn barrier(&self) -> Result<()> {
        self.group.barrier().map_err(|e| BenchError::Rank {
            rank: self.rank,
            op: "barrier",
            blames: e.peer().or(Some(0)),
            detail: e.to_string(),
        })
    }

    /// Waits for this rank's stream.
    ///
    /// # Errors
    /// The driver's.
    pub fn drain(&self) -> Result<()> {
        self.stream.wait("a rank's stream", LIMIT).map_err(cuda)
    }

    /// What this rank sends.
    pub(super) fn payload(&self) -> Result<Payload<'_>> {
        let (case, p) = (&self.job.case, self.places);
        let (hidden, tokens) = (case.shape.hidden, self.reference().input.routes.tokens);
        let ordinal = self.device.properties().ordinal;
        let rows = |at, bytes: usize, dtype| {
            // SAFETY: dense rows in this rank's memory, which nobody writes any more.
            unsafe { Rows::from_device(ordinal, at, tokens, bytes, bytes, dtype) }
        };
        let row = case.dtype.payload_bytes(hidden);
        let scale_rows = |dtype| rows(p.scales, case.dtype.scale_bytes(hidden), dtype);
        let payload = match case.dtype {
            Dtype::Fp8 => {
                Payload::fp8(rows(p.payload, row, DType::Fp8E4M3), scale_rows(DType::F32))
            }
            Dtype::Fp8Ue8m0 => {
                Payload::fp8(rows(p.payload, row, DType::Fp8E4M3), scale_rows(DType::Bytes))
            }
            dtype => Payload::new(rows(p.payload, row, kind(dtype).dtype())),
        };
        payload.map_err(failed(self.rank, "payload"))
    }

    pub(super) fn dispatch(&self, call: Call) -> Result<Dispatched> {
        self.dispatch_on(&self.queue, call)
    }

    /// As [`Rank::dispatch`], in the order of another stream.
    pub(super) fn dispatch_on(&self, queue: &Queue, call: Call) -> Result<Dispatched> {
        let (case, p, rank) = (&self.job.case, self.places, self.rank);
        let tokens = self.reference().input.routes.tokens;
        let ordinal = self.device.properties().ordinal;
        let choices = tokens * case.shape.topk;
        let route = match &self.handle {
            Some(handle) if !call.uncached => Route::Cached(handle),
            _ => Route::Device {
                // SAFETY: so many ids are there, written by nobody any more.
                ids: unsafe { DeviceIds::from_raw(ordinal, p.ids, choices, IdKind::I64) },
                // SAFETY: so many ids are there, written by nobody any more.
                weights: Some(unsafe {
                    Rows::from_device(ordinal, p.weights, choices, 4, 4, DType::F32)
                }),
            },
        };
        let opts = DispatchOpts {
            layout: layout(case),
            capacity: call.capacity,
            ..DispatchOpts::default()
        };
        let payload = self.payload()?;
        self.ep.dispatch(queue, payload, route, &opts).map_err(failed(rank, "dispatch"))
    }

    /// Room for this rank's sums at `at`.
    ///
    /// # Safety
    /// As many bytes as [`Rank::out_bytes`] are there, in memory of this rank's GPU that nobody else
    /// uses until what they are passed to is done.
    pub(super) unsafe fn sums_at(&self, at: u64) -> RowsMut<'_> {
        let (tokens, row) = (self.reference().input.routes.tokens, self.row());
        let dtype = kind(self.job.case.dtype.back()).dtype();
        let ordinal = self.device.properties().ordinal;
        // SAFETY: by this function's contract.
        unsafe { RowsMut::from_device(ordinal, at, tokens, row, row, dtype) }
    }

    /// Bytes of this rank's sums.
    pub(super) fn out_bytes(&self) -> usize {
        self.reference().combined.len()
    }

    pub(super) fn combine(&self, held: Dispatched) -> Result<()> {
        self.combine_on(&self.queue, held, None)
    }

    /// As [`Rank::combine`], in the order of another stream and on another lane.
    pub(super) fn combine_on(
        &self,
        queue: &Queue,
        held: Dispatched,
        lane: Option<usize>,
    ) -> Result<()> {
        // SAFETY: dense rows in this rank's memory, used by nobody else.
        let out = unsafe { self.sums_at(self.places.out) };
        let opts = CombineOpts { lane, ..combine_opts(&self.job.case, self.job.reduced) };
        held.combine(queue, out, &opts)
            .map(drop)
            .map_err(|e| failed(self.rank, "combine")(e.into()))
    }

    /// The sums as they are now.
    pub(super) fn sums(&self) -> Result<Vec<u8>> {
        let mut got = vec![0u8; self.out_bytes()];
        let at = (self.places.out - self.memory.address()) as usize;
        self.memory.download(&self.stream, at, &mut got, LIMIT).map_err(cuda)?;
        Ok(got)
    }

    /// Where the held rows are, and their stride.
    pub(super) fn rows_of(&self, held: &mut Dispatched) -> Result<(u64, usize)> {
        let mut rows = held
            .rows_mut(kind(self.job.case.dtype.back()))
            .map_err(failed(self.rank, "rows_mut"))?;
        let mut rows = rows.payload();
        Ok((rows.as_mut_ptr() as u64, rows.stride()))
    }

    /// Overwrites received rows and sums with NaN.
    pub(super) fn poison(&self, (at, stride): (u64, usize)) -> Result<()> {
        let rows = self.reference().rows.rows().len();
        let (out, raw) = (self.reference().combined.len(), self.stream.raw());
        // SAFETY: rows of a result that is alive; this rank's own output.
        unsafe {
            self.device.fill(raw, at, 0xff, rows * stride).map_err(cuda)?;
            self.device.fill(raw, self.places.out, 0xff, out).map_err(cuda)?;
        }
        self.drain()
    }

    /// Makes the image that [`Rank::write_outputs`] copies. Allocates: no stream may be held.
    pub(super) fn draw_image(&mut self, (_, stride): (u64, usize)) -> Result<()> {
        let outputs = &self.reference().outputs;
        if outputs.is_empty() || self.images.iter().any(|(known, _)| *known == stride) {
            return Ok(());
        }
        let row = self.row();
        let mut image = vec![0u8; outputs.len() / row * stride];
        for (to, from) in image.chunks_exact_mut(stride).zip(outputs.chunks_exact(row)) {
            to[..row].copy_from_slice(from);
        }
        let memory = DeviceMemory::zeroed(&self.stream, image.len(), LIMIT).map_err(cuda)?;
        memory.upload(&self.stream, 0, &image, LIMIT).map_err(cuda)?;
        self.images.push((stride, memory));
        Ok(())
    }

    /// Copies the experts' outputs to where combine takes them from.
    pub(super) fn write_outputs(&self, (at, stride): (u64, usize)) -> Result<()> {
        if let Some((_, image)) = self.images.iter().find(|(known, _)| *known == stride) {
            // SAFETY: rows of a result that is alive, and the image of them.
            unsafe { self.device.copy(self.stream.raw(), at, image.address(), image.bytes()) }
                .map_err(cuda)?;
        }
        self.drain()
    }

    pub(super) fn row(&self) -> usize {
        self.job.case.dtype.back().payload_bytes(self.job.case.shape.hidden)
    }

    pub(super) fn verdict(
        &self,
        what: &str,
        compared: std::result::Result<(), String>,
    ) -> Result<()> {
        compared.map_err(|e| BenchError::Verification {
            rank: self.rank,
            bench: format!("{} {}", what, self.job.case.dtype.name()),
            detail: e,
        })
    }

    pub(super) fn check_rows(&self, held: &Dispatched) -> Result<()> {
        let got = held.to_host(&self.queue).map_err(failed(self.rank, "to_host"))?;
        self.verdict("dispatch", compare_rows(&self.reference().rows, &got))
    }

    pub(super) fn check_combined(&self) -> Result<()> {
        let want = &self.reference().combined;
        self.verdict("combine", compare_combined(want, &self.sums()?, self.row()))
    }

    /// Compares one dispatch as it is called and one combine with the host backend. Leaves a
    /// routing to be used again.
    ///
    /// # Errors
    /// A difference, or what the library says.
    pub fn verify(&mut self, call: Call) -> Result<()> {
        let mut first = self.dispatch(Call { uncached: true, ..Call::default() })?;
        self.check_rows(&first)?;
        self.handle = Some(first.handle().clone());
        let rows = self.rows_of(&mut first)?;
        self.draw_image(rows)?;
        self.poison(rows)?;
        first.release(&self.queue);
        let second = self.dispatch(call)?;
        self.check_rows(&second)?;
        second.release(&self.queue);
        self.combine_once()?;
        self.check_combined()
    }

    pub(super) fn combine_once(&mut self) -> Result<()> {
        let mut held = self.slot()?;
        let rows = self.rows_of(&mut held)?;
        self.draw_image(rows)?;
        self.poison(rows)?;
        self.write_outputs(rows)?;
        self.combine(held)?;
        self.drain()
    }

    pub(super) fn slot(&self) -> Result<Dispatched> {
        let handle = self.handle.as_ref().ok_or_else(|| BenchError::Rank {
            rank: self.rank,
            op: "combine_slot",
            blames: None,
            detail: "nothing was dispatched yet".into(),
        })?;
        self.ep.combine_slot(handle, &self.queue).map_err(failed(self.rank, "combine_slot"))
    }
}

impl Drop for Rank<'_> {
    fn drop(&mut self) {
        // Work that the gate holds must end before the gate and the memory go.
        if std::thread::panicking() {
            self.gate.open(i32::MAX as u32);
        }
        if let Err(e) = self.drain() {
            eprintln!("rank {}: {e}", self.rank);
        }
    }
}

/// Uploads a rank's data.
fn place(job: &Job, rank: usize, stream: &Stream) -> Result<(DeviceMemory, Places)> {
    let Reference { input, combined, .. } = &job.references[rank];
    let ids: Vec<u8> = input.routes.ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
    let weights: Vec<u8> = input.routes.weights.iter().flat_map(|w| w.to_ne_bytes()).collect();
    let parts = [&input.payload, &input.scales, &ids, &weights];
    let room = |bytes: usize| bytes.next_multiple_of(256) + 256;
    let all = parts.iter().map(|p| room(p.len())).sum::<usize>() + room(combined.len());
    let memory = DeviceMemory::zeroed(stream, all, LIMIT).map_err(cuda)?;
    let mut at = 0;
    let mut addresses = [0u64; 4];
    for (part, address) in parts.iter().zip(&mut addresses) {
        memory.upload(stream, at, part, LIMIT).map_err(cuda)?;
        *address = memory.address() + at as u64;
        at += room(part.len());
    }
    let [payload, scales, ids, weights] = addresses;
    let out = memory.address() + at as u64;
    Ok((memory, Places { payload, scales, ids, weights, out }))
}
