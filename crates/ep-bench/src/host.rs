//! Ranks of this host, by ep-runtime.

use std::borrow::Cow;
use std::time::Duration;

use ep_runtime::{
    CombineOpts, DType, DispatchOpts, Dispatched, Element, Ep, EpBuilder, EpError, Fp8E4M3, Group,
    Handle, Ids, MoeShape, Payload, PayloadKind, Queue, Rendezvous, Route, Rows, RowsMut,
    ScaleKind, TransportError, bf16, f16,
};

use crate::case::{Case, Dtype, Layout};
use crate::cli::Transport;
use crate::data::Input;
use crate::engine::{Capacity, Engine, Held, HeldRow, Seat};
use crate::oracle::RankRow;
use crate::verify::weighted;
use crate::{BenchError, Result};

/// A rank of a group on this host, a thread or a process.
#[derive(Debug)]
pub struct HostSeat {
    group: Group,
    timeout: Duration,
    carrier: Carrier,
}

/// How ranks of this host reach each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carrier {
    transport: Transport,
    nodes: Option<usize>,
}

impl Carrier {
    /// By `transport`, where it connects nodes between so many; by default each rank is one.
    pub fn new(transport: Transport, nodes: Option<usize>) -> Self {
        Self { transport, nodes }
    }

    #[cfg(not(feature = "rdma"))]
    fn place(self, builder: EpBuilder, _: usize, _: usize) -> Result<EpBuilder> {
        Ok(builder)
    }

    /// Devices and their settings are those of the variables `EP_RDMA_*`.
    #[cfg(feature = "rdma")]
    fn place(self, builder: EpBuilder, rank: usize, ranks: usize) -> Result<EpBuilder> {
        if self.transport != Transport::Rdma {
            return Ok(builder);
        }
        let of = ranks / self.nodes.unwrap_or(ranks).clamp(1, ranks);
        let transport = ep_runtime::RdmaTransport::from_env()
            .map_err(|e| transport(rank, "--transport rdma", &e))?;
        Ok(builder.transport(transport.node((rank / of) as u64)))
    }
}

impl HostSeat {
    /// All ranks of a job of threads.
    ///
    /// # Errors
    /// What the library says.
    pub fn local(ranks: usize, timeout: Duration) -> Result<Vec<HostSeat>> {
        let groups = Group::local(ranks).map_err(|e| transport(0, "local group", &e))?;
        let seat = |group: Group| {
            let rank = group.rank();
            let group =
                group.with_timeout(timeout).map_err(|e| transport(rank, "local group", &e))?;
            Ok(HostSeat { group, timeout, carrier: Carrier::default() })
        };
        groups.into_iter().map(seat).collect()
    }

    /// This process's rank, by the environment.
    ///
    /// # Errors
    /// What the library says.
    pub fn from_env(rank: usize, timeout: Duration) -> Result<HostSeat> {
        let failed = |e: TransportError| transport(rank, "rendezvous", &e);
        let rendezvous = Rendezvous::from_env().map_err(failed)?.with_timeout(timeout);
        let group = Group::from_env(&rendezvous).map_err(failed)?;
        Ok(HostSeat { group, timeout, carrier: Carrier::default() })
    }

    /// Reaches other ranks like this.
    #[must_use]
    pub fn over(self, carrier: Carrier) -> Self {
        Self { carrier, ..self }
    }
}

fn transport(rank: usize, op: &'static str, e: &TransportError) -> BenchError {
    BenchError::Rank { rank, op, blames: e.peer().filter(|&p| p != rank), detail: e.to_string() }
}

impl Seat for HostSeat {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn ranks(&self) -> usize {
        self.group.world()
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.group.all_gather(bytes).map_err(|e| transport(self.rank(), "all_gather", &e))
    }

    fn barrier(&self) -> Result<()> {
        self.group.barrier().map_err(|e| transport(self.rank(), "barrier", &e))
    }

    fn abort(&self, why: &str) {
        self.group.abort(why);
    }

    fn engine(&self, case: &Case, capacity: Capacity) -> Result<Box<dyn Engine>> {
        let shape = &case.shape;
        let mut moe = MoeShape::new(shape.hidden, shape.topk, shape.experts)
            .max_tokens(capacity.tokens)
            .max_rows(capacity.rows)
            .payload(kind(case.dtype))
            .payload(kind(case.dtype.back()));
        let mut opts = DispatchOpts::default();
        if case.layout == Layout::ExpertMajor {
            moe = moe.expert_major(case.alignment).max_expert_rows(capacity.expert_rows);
            opts.layout = ep_runtime::Layout::ExpertMajor { alignment: case.alignment };
        }
        let rank = self.rank();
        let builder = EpBuilder::new(moe)
            .slots(1)
            .lanes(1)
            .timeout(self.timeout)
            .connect_timeout(self.timeout);
        let ep = self
            .carrier
            .place(builder, rank, self.ranks())?
            .build(&self.group)
            .map_err(|e| failed(rank, "build", &e))?;
        let combine = CombineOpts { weighted: weighted(case), ..CombineOpts::default() };
        let out_row = case.dtype.back().payload_bytes(shape.hidden);
        Ok(Box::new(HostEngine {
            rank,
            case: case.clone(),
            dispatch: opts,
            combine,
            out: vec![0; capacity.tokens * out_row],
            out_tokens: 0,
            copied: vec![0; copied_rows(case, capacity) * case.dtype.row_bytes(shape.hidden)],
            held: None,
            handle: None,
            ep,
        }))
    }
}

fn copied_rows(case: &Case, capacity: Capacity) -> usize {
    match (case.operation, case.layout) {
        (crate::case::Operation::Dispatch, Layout::RankMajor) => capacity.rows,
        (crate::case::Operation::Dispatch, Layout::ExpertMajor) => capacity.expert_rows,
        _ => 0,
    }
}

fn failed(rank: usize, op: &'static str, e: &EpError) -> BenchError {
    BenchError::Rank { rank, op, blames: e.peer().filter(|&p| p != rank), detail: e.to_string() }
}

pub(crate) fn kind(dtype: Dtype) -> PayloadKind {
    match dtype {
        Dtype::Bf16 => PayloadKind::Bf16,
        Dtype::F16 => PayloadKind::F16,
        Dtype::F32 => PayloadKind::F32,
        Dtype::Fp8 => PayloadKind::Fp8 { scales: ScaleKind::F32 },
        Dtype::Fp8Ue8m0 => PayloadKind::Fp8 { scales: ScaleKind::Ue8m0 },
    }
}

struct HostEngine {
    rank: usize,
    case: Case,
    dispatch: DispatchOpts,
    combine: CombineOpts,
    out: Vec<u8>,
    out_tokens: usize,
    copied: Vec<u8>,
    held: Option<Dispatched>,
    handle: Option<Handle>,
    ep: Ep,
}

/// Bytes as elements. Allocators align large buffers far beyond an element's need; that it is so
/// is checked.
fn elements<T: Element>(bytes: &[u8]) -> std::result::Result<&[T], EpError> {
    // SAFETY: every bit pattern is a value of the sealed Element types.
    let (before, elements, after) = unsafe { bytes.align_to::<T>() };
    let whole = before.is_empty() && after.is_empty();
    whole.then_some(elements).ok_or_else(|| misaligned(bytes.len()))
}

pub(crate) fn elements_mut<T: Element>(bytes: &mut [u8]) -> std::result::Result<&mut [T], EpError> {
    let length = bytes.len();
    // SAFETY: as in `elements`, and every value is valid bytes.
    let (before, elements, after) = unsafe { bytes.align_to_mut::<T>() };
    let whole = before.is_empty() && after.is_empty();
    whole.then_some(elements).ok_or_else(|| misaligned(length))
}

fn misaligned(bytes: usize) -> EpError {
    EpError::Argument { op: "rows", detail: format!("a buffer of {bytes} bytes is not aligned") }
}

pub(crate) fn payload<'a>(
    case: &Case,
    input: &'a Input,
) -> std::result::Result<Payload<'a>, EpError> {
    let (hidden, bytes) = (case.shape.hidden, input.payload.as_slice());
    let blocks = hidden.div_ceil(crate::case::SCALE_BLOCK);
    match case.dtype {
        Dtype::Bf16 => Payload::new(Rows::new(elements::<bf16>(bytes)?, hidden)?),
        Dtype::F16 => Payload::new(Rows::new(elements::<f16>(bytes)?, hidden)?),
        Dtype::F32 => Payload::new(Rows::new(elements::<f32>(bytes)?, hidden)?),
        Dtype::Fp8 => Payload::fp8(
            Rows::new(elements::<Fp8E4M3>(bytes)?, hidden)?,
            Rows::new(elements::<f32>(&input.scales)?, blocks)?,
        ),
        Dtype::Fp8Ue8m0 => Payload::fp8(
            Rows::new(elements::<Fp8E4M3>(bytes)?, hidden)?,
            Rows::new(input.scales.as_slice(), blocks)?,
        ),
    }
}

impl HostEngine {
    fn held(&self, op: &'static str) -> Result<&Dispatched> {
        self.held.as_ref().ok_or_else(|| self.nothing(op))
    }

    fn nothing(&self, op: &'static str) -> BenchError {
        let detail = "no result is held".into();
        BenchError::Rank { rank: self.rank, op, blames: None, detail }
    }
}

impl Engine for HostEngine {
    fn dispatch(&mut self, input: &Input, cached: bool) -> Result<()> {
        let route = match &self.handle {
            Some(handle) if cached => Route::Cached(handle),
            _ => Route::Topk {
                ids: Ids::I64(&input.routes.ids),
                weights: Some(&input.routes.weights),
            },
        };
        let held = payload(&self.case, input)
            .and_then(|p| self.ep.dispatch(&Queue::host(), p, route, &self.dispatch))
            .map_err(|e| failed(self.rank, "dispatch", &e))?;
        self.handle = Some(held.handle().clone());
        self.held = Some(held);
        Ok(())
    }

    fn reserve(&mut self) -> Result<()> {
        let handle = self.handle.as_ref().ok_or_else(|| self.nothing("combine_slot"))?;
        let slot = self.ep.combine_slot(handle, &Queue::host());
        self.held = Some(slot.map_err(|e| failed(self.rank, "combine_slot", &e))?);
        Ok(())
    }

    fn held(&self) -> Result<Held<'_>> {
        let held = self.held("rows")?;
        let rows = held.rows();
        let (payload, scales, weights) = (rows.payload(), rows.scales(), rows.weights());
        let scale = |i| scales.map_or(&[][..], |s| s.bytes(i));
        let source = |i| rows.source(i).map(|s| (s.rank, s.token));
        if let Some(ids) = rows.topk_ids() {
            let row = |i| {
                // A row without a source differs from every row the oracle has.
                let (source_rank, source_token) = source(i).unwrap_or((usize::MAX, usize::MAX));
                RankRow {
                    payload: payload.bytes(i),
                    scales: scale(i),
                    ids: ids.get(i).into(),
                    weights: weights.get(i).into(),
                    source_rank,
                    source_token,
                }
            };
            return Ok(Held::Rank((0..rows.len()).map(row).collect()));
        }
        let row = |i| HeldRow {
            payload: Cow::Borrowed(payload.bytes(i)),
            scales: Cow::Borrowed(scale(i)),
            weight: weights.get(i)[0],
            source: source(i),
        };
        Ok(Held::Expert {
            offsets: held.offsets().to_vec(),
            counts: held.counts().iter().map(|&n| n as u32).collect(),
            rows: (0..rows.len()).map(row).collect(),
        })
    }

    fn rows(&self) -> usize {
        self.held.as_ref().map_or(0, Dispatched::num_rows)
    }

    fn copy_out(&mut self) -> Result<()> {
        let Some(held) = &self.held else { return Err(self.nothing("rows")) };
        let rows = held.rows();
        let (payload, scales) = (rows.payload(), rows.scales());
        let size = self.case.dtype.row_bytes(self.case.shape.hidden);
        for (i, to) in self.copied.chunks_exact_mut(size).take(rows.len()).enumerate() {
            let (row, rest) = to.split_at_mut(payload.row_bytes());
            row.copy_from_slice(payload.bytes(i));
            if let Some(scales) = scales {
                rest.copy_from_slice(scales.bytes(i));
            }
        }
        Ok(())
    }

    fn fill(&mut self, outputs: &[u8]) -> Result<()> {
        let (rank, back) = (self.rank, kind(self.case.dtype.back()));
        let size = self.case.dtype.back().payload_bytes(self.case.shape.hidden);
        let Some(held) = &mut self.held else { return Err(self.nothing("rows_mut")) };
        let mut rows = held.rows_mut(back).map_err(|e| failed(rank, "rows_mut", &e))?;
        let mut rows = rows.payload();
        for (i, row) in outputs.chunks_exact(size).take(rows.len()).enumerate() {
            rows.bytes_mut(i).copy_from_slice(row);
        }
        Ok(())
    }

    fn scrub(&mut self) -> Result<()> {
        // As a bf16, f16 or f32 a finite number that no run has a whole row of.
        const SCRUBBED: u8 = 0xa5;
        self.out.fill(SCRUBBED);
        let (rank, back) = (self.rank, kind(self.case.dtype.back()));
        let Some(held) = &mut self.held else { return Ok(()) };
        let mut rows = held.rows_mut(back).map_err(|e| failed(rank, "rows_mut", &e))?;
        let mut rows = rows.payload();
        for i in 0..rows.len() {
            rows.bytes_mut(i).fill(SCRUBBED);
        }
        Ok(())
    }

    fn combine(&mut self, tokens: usize) -> Result<()> {
        let held = self.held.take().ok_or_else(|| self.nothing("combine"))?;
        let (hidden, back) = (self.case.shape.hidden, self.case.dtype.back());
        self.out_tokens = tokens;
        let out = &mut self.out[..tokens * back.payload_bytes(hidden)];
        let rows = match kind(back).dtype() {
            DType::F16 => elements_mut::<f16>(out).and_then(|out| RowsMut::new(out, hidden)),
            DType::F32 => elements_mut::<f32>(out).and_then(|out| RowsMut::new(out, hidden)),
            _ => elements_mut::<bf16>(out).and_then(|out| RowsMut::new(out, hidden)),
        };
        rows.and_then(|rows| Ok(held.combine(&Queue::host(), rows, &self.combine)?))
            .map_err(|e| failed(self.rank, "combine", &e))?;
        Ok(())
    }

    fn combined(&self) -> &[u8] {
        &self.out[..self.out_tokens * self.case.dtype.back().payload_bytes(self.case.shape.hidden)]
    }

    fn release(&mut self) -> Result<()> {
        if let Some(held) = self.held.take() {
            held.release(&Queue::host());
        }
        Ok(())
    }
}
