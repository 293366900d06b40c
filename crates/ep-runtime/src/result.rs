//! Results of a dispatch.

use std::marker::PhantomData;
use std::sync::Arc;

use ep_kernels::PayloadKind;
use ep_transport::Queue;

use crate::ep::Inner;
use crate::received::{Format, Outputs, Owned, Received};
use crate::shape::OutFormat;
use crate::slots::Slot;
use crate::{EpError, Event, Handle, Layout, Memory, Result};

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
    /// Its dispatch on a GPU, if there was one.
    #[cfg(feature = "cuda")]
    pub(crate) ticket: Option<(usize, crate::gpu::Ticket)>,
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
        Self {
            ep,
            slot,
            handle,
            received,
            output: None,
            capacity,
            lane,
            #[cfg(feature = "cuda")]
            ticket: None,
        }
    }

    /// Its dispatch, if the ranks judge it later than the host returns.
    #[cfg(feature = "cuda")]
    pub(crate) fn judged(&self) -> Option<crate::event::Judged> {
        let later = self.ticket.filter(|(_, ticket)| *ticket != crate::gpu::Ticket::CAPTURED);
        later.map(|(lane, ticket)| (crate::dispatch::OP, lane, ticket))
    }

    /// Whether its dispatch went through. On the host, and where the host learned how many rows came, that
    /// is known; on a GPU in capacity mode, or where a handle was used again, this waits, bounded, until the
    /// GPU knows.
    ///
    /// # Errors
    /// As [`Handle::verdict`], for the dispatch of this result instead of the one that made its handle.
    pub fn verdict(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let (Some(gpu), Some((lane, ticket))) = (&self.ep.gpu, self.ticket) {
            return gpu.await_verdict(&self.ep, crate::dispatch::OP, lane, ticket);
        }
        Ok(())
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

    /// The rows that `rows` shows.
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

    fn format(&self) -> Option<Format> {
        self.received.map(|kind| Format::new(&self.ep, self.handle.layout(), kind))
    }

    /// The received rows with what belongs to each. In a slot of [`Ep::combine_slot`] there are
    /// none, and after [`Dispatched::rows_mut`] they show what was written over them.
    ///
    /// [`Ep::combine_slot`]: crate::Ep::combine_slot
    pub fn rows(&self) -> Received<'_> {
        let kind = self.received.unwrap_or(self.ep.shape.payloads[0]);
        let (shown, real) = match self.received {
            // On a GPU how many rows there are is looked up only where the caller needs it.
            Some(_) if self.capacity && self.ep.place != Memory::Host => {
                (self.shown(), self.shown())
            }
            Some(_) => (self.shown(), self.num_rows()),
            None => (0, 0),
        };
        // Only host memory shows them; copies of what is on a GPU ask.
        let record_rows = if self.ep.place == Memory::Host { self.handle.routing.rows } else { 0 };
        let (record, expert) = self.ep.shape.formats(kind);
        Received {
            base: self.base(),
            format: match self.handle.layout() {
                Layout::RankMajor => Format::Rank(record),
                Layout::ExpertMajor { .. } => Format::Expert(expert),
            },
            kind,
            rows: shown,
            real,
            records: self.ep.local(self.ep.window.rank_rows(self.slot.index())),
            record_rows,
            record,
            place: self.ep.place,
            memory: PhantomData,
        }
    }

    /// Room for the rows that combine sends home, in this result's own slot, so that nothing is
    /// copied; for the rows there are, also in capacity mode on the host (on a GPU for all that
    /// [`Dispatched::rows`] shows). It is the memory of [`Dispatched::rows`]: in place, row by row,
    /// where an output row is not larger than a received one; otherwise the received rows have to be
    /// consumed first.
    ///
    /// # Errors
    /// When the layer was not built for `kind`, or rows of that kind cannot be combined.
    pub fn rows_mut(&mut self, kind: PayloadKind) -> Result<Outputs<'_>> {
        let format = self.output_format("rows_mut", kind)?;
        self.output = Some(kind);
        let rows = match self.capacity && self.ep.place != Memory::Host {
            true => self.shown(),
            false => self.num_rows(),
        };
        self.slot.tail().lock().overwritten(rows * format.stride);
        let (base, dtype, place) = (self.base(), kind.dtype(), self.ep.place);
        Ok(Outputs { base, rows, dtype, format, place, memory: PhantomData })
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
        Ok(Format::output(self.format(), &self.ep, self.handle.layout(), kind))
    }

    /// Frees the slot once everything submitted to `queue` so far is done. If that cannot be known, as
    /// where `queue` is not one of the layer's device, the event's wait is the error.
    pub fn release(mut self, queue: &Queue) -> Event {
        self.slot.used_on(queue);
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.ep.gpu {
            return gpu.released(&self.ep, queue);
        }
        Event::done()
    }

    /// Copies the rows out, in the order of `queue`, and frees the slot. Rows on a GPU are copied to
    /// memory of that GPU, which is allocated.
    ///
    /// # Errors
    /// On a GPU: no memory, or a dispatch whose rows never came, or that was refused (see
    /// [`Dispatched::verdict`]).
    pub fn into_owned(mut self, queue: &Queue) -> Result<Owned> {
        self.slot.used_on(queue);
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.ep.gpu {
            return gpu.duplicate(&self, queue);
        }
        Ok(Owned::copy(&self))
    }

    /// Copies the rows to host memory, after everything submitted to `queue` so far, and waits for
    /// them: for looking into them.
    ///
    /// # Errors
    /// On a GPU: a dispatch whose rows never came, or that was refused (see [`Dispatched::verdict`]).
    pub fn to_host(&self, queue: &Queue) -> Result<Owned> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.ep.gpu {
            return gpu.download(self, queue);
        }
        let _ = queue;
        Ok(Owned::copy(self))
    }

    /// In capacity mode, marks the rows behind the last as rows without ids and source. Only those
    /// that may hold some are touched, so that the cost follows the rows there are.
    pub(crate) fn mark_tail(&self) {
        let Some(kind) = self.received else { return };
        let format = Format::new(&self.ep, self.handle.layout(), kind);
        let code = (kind.code(), self.handle.layout().code());
        let base = self.base();
        let mut tail = self.slot.tail().lock();
        let unmarked = tail.received(code, format.stride(), self.num_rows(), self.shown());
        for row in unmarked.filter(|_| self.capacity) {
            // SAFETY: the row is within the slot, which this result owns.
            unsafe { format.mark_empty(base.add(row * format.stride())) };
        }
        if self.capacity {
            tail.marked();
        }
    }
}
