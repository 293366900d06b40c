//! Results of a dispatch.

use std::marker::PhantomData;
use std::sync::Arc;

use ep_kernels::{PayloadKind, RecordFormat};
use ep_transport::Queue;

use crate::ep::Inner;
use crate::received::{EMPTY, Format, Outputs, Owned, Received};
use crate::shape::OutFormat;
use crate::slots::{Slot, Tail};
use crate::{EpError, Event, Handle, Layout, Result, RowsMut};

/// The rows a dispatch brought to this rank. Owns the slot they are in until it is combined,
/// released, copied out or dropped.
#[derive(Debug)]
pub struct Dispatched {
    pub(crate) ep: Arc<Inner>,
    pub(crate) slot: Slot,
    pub(crate) handle: Handle,
    /// What was received; nothing in a slot made by `combine_slot`.
    pub(crate) received: Option<PayloadKind>,
    /// What `rows_mut` has been asked for.
    pub(crate) output: Option<PayloadKind>,
    pub(crate) capacity: bool,
    pub(crate) lane: usize,
}

impl Dispatched {
    pub(crate) fn new(
        ep: Arc<Inner>,
        slot: Slot,
        handle: Handle,
        received: Option<PayloadKind>,
        capacity: bool,
        lane: usize,
    ) -> Self {
        Self { ep, slot, handle, received, output: None, capacity, lane }
    }

    /// The routing, to be kept for cached dispatches and backward passes.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The rows received: rank-major rows, or expert-major rows with padding.
    pub fn num_rows(&self) -> usize {
        self.handle.num_rows()
    }

    /// The tokens received for each local expert, `[E_local]`, without padding.
    pub fn counts(&self) -> &[i32] {
        self.handle.counts()
    }

    /// The first row of each local expert and the end, `[E_local + 1]`; see [`Handle::offsets`].
    pub fn offsets(&self) -> &[i32] {
        self.handle.offsets()
    }

    /// The rows the views show.
    fn shown(&self) -> usize {
        match (self.capacity, self.handle.layout()) {
            (false, _) => self.num_rows(),
            (true, Layout::RankMajor) => self.ep.shape.max_rows,
            (true, Layout::ExpertMajor { .. }) => self.ep.shape.max_expert_rows,
        }
    }

    pub(crate) fn base(&self) -> *mut u8 {
        let window = &self.ep.window;
        self.ep.local(match self.handle.layout() {
            Layout::RankMajor => window.rank_rows(self.slot.index()),
            Layout::ExpertMajor { .. } => window.expert_rows(self.slot.index()),
        })
    }

    fn format(&self) -> Result<Option<Format>> {
        self.received.map(|kind| Format::new(&self.ep, self.handle.layout(), kind)).transpose()
    }

    /// The received rows with what belongs to each. In a slot of [`Ep::combine_slot`] there are
    /// none, and after [`Dispatched::rows_mut`] they show what was written over them.
    ///
    /// [`Ep::combine_slot`]: crate::Ep::combine_slot
    pub fn rows(&self) -> Received<'_> {
        let format = self.format().ok().flatten();
        let shown = if format.is_some() { self.shown() } else { 0 };
        let records = self.ep.local(self.ep.window.rank_rows(self.slot.index()));
        Received {
            base: self.base(),
            // A slot without received rows shows none, in the format of any payload it can hold.
            format: format.unwrap_or(Format::Expert(EMPTY)),
            kind: self.received.unwrap_or(PayloadKind::Bf16),
            rows: shown,
            real: if format.is_some() { self.num_rows() } else { 0 },
            records,
            record_rows: self.handle.routing.rows,
            record: self.received.and_then(|kind| {
                RecordFormat::new(kind, self.ep.shape.hidden, self.ep.shape.topk).ok()
            }),
            memory: PhantomData,
        }
    }

    /// Room for the rows that combine sends home, in this result's own slot, so that nothing is
    /// copied. It is the memory of [`Dispatched::rows`]: in place, row by row, where an output row
    /// is not larger than a received one; otherwise the received rows have to be consumed first.
    ///
    /// # Errors
    /// When the layer was not built for `kind`, or rows of that kind cannot be combined.
    pub fn rows_mut(&mut self, kind: PayloadKind) -> Result<Outputs<'_>> {
        let format = self.output_format("rows_mut", kind)?;
        self.output = Some(kind);
        let in_place = self.format()?.is_some_and(|f| f.stride() == format.stride);
        if !in_place {
            *self.slot.tail().lock() = Tail::default();
        }
        let (base, rows) = (self.base(), self.shown());
        // SAFETY: the slot is owned by this exclusively borrowed result; so many rows of this
        // stride were reserved; a window's bytes are always initialised.
        let payload = unsafe {
            RowsMut::from_raw(base, rows, format.payload_bytes, format.stride, kind.dtype())
        };
        Ok(Outputs { payload, base, format, memory: PhantomData })
    }

    pub(crate) fn output_format(&self, op: &'static str, kind: PayloadKind) -> Result<OutFormat> {
        if !kind.reducible() {
            let detail = format!("{kind} rows cannot be combined; use bf16, f16 or f32");
            return Err(EpError::argument(op, detail));
        }
        if !self.ep.shape.payloads.contains(&kind) {
            let detail = format!("the layer was built without MoeShape::payload({kind})");
            return Err(EpError::argument(op, detail));
        }
        Ok(Format::output(self.format()?, &self.ep, self.handle.layout(), kind))
    }

    /// Frees the slot once everything submitted to `queue` so far is done.
    pub fn release(self, queue: &Queue) -> Event {
        let _ = queue;
        Event::done()
    }

    /// Copies the rows out and frees the slot.
    pub fn into_owned(self, queue: &Queue) -> Owned {
        let _ = queue;
        Owned::copy(&self)
    }

    /// In capacity mode, marks the rows behind the last as rows without a source. Only those that
    /// may hold one are touched, so the cost follows the rows there are.
    pub(crate) fn mark_tail(&self) -> Result<()> {
        let Some(kind) = self.received else { return Ok(()) };
        let format = Format::new(&self.ep, self.handle.layout(), kind)?;
        let code = Some((kind.code(), self.handle.layout().code()));
        let rows = self.num_rows();
        let mut tail = self.slot.tail().lock();
        let known = if tail.format == code { Some(tail.marked_from) } else { None };
        if !self.capacity {
            *tail = match known {
                Some(from) => Tail { format: code, marked_from: from.max(rows) },
                None => Tail::default(),
            };
            return Ok(());
        }
        let base = self.base();
        for row in rows..known.unwrap_or(self.shown()) {
            // SAFETY: the row is within the slot, which this result owns.
            unsafe { format.mark_empty(base.add(row * format.stride())) };
        }
        *tail = Tail { format: code, marked_from: rows };
        Ok(())
    }
}
