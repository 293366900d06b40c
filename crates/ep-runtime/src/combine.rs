//! Combine: expert outputs back to the ranks their tokens came from, reduced per token.
//!
//! Every owner announces that its rows are ready; home ranks read mapped owners' rows where they
//! are, while owners that are not mapped send their block; then every rank says that it has read.
//! Only then may an owner's slot be used again.

use ep_kernels::host;
use ep_kernels::{CountMatrix, PayloadKind};
use ep_transport::Queue;

use crate::ep::Inner;
use crate::handle::HandleInner;
use crate::lane::{LaneGuard, RowSource, Scratch};
use crate::notify::{self, Header, Phase};
use crate::result::Dispatched;
use crate::shape::OutFormat;
use crate::slots::Slot;
use crate::{EpError, Event, Handle, Layout, Result, Rows, RowsMut};

const OP: &str = "combine";

const REDUCED: u64 = 1;
const WEIGHTED: u64 = 2;

/// How expert-major rows are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Precision {
    /// All rows of a token travel and are summed in f32, with one rounding.
    #[default]
    Exact,
    /// Each rank first sums its own experts' rows in f32 and rounds to the payload type, so that
    /// one row per rank travels: two roundings.
    Reduced,
}

/// How a combine is done. Equal on every rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct CombineOpts {
    /// The lane; by default that of the dispatch.
    pub lane: Option<usize>,
    /// For expert-major rows; rank-major rows are always summed exactly.
    pub precision: Precision,
    /// Multiply each expert-major row with its gate weight. The owner of rank-major rows does that
    /// itself, since a row is already a sum over its experts.
    pub weighted: bool,
}

/// Where combined tokens go.
#[derive(Debug)]
pub struct Combined<'a> {
    rows: RowsMut<'a>,
    biases: &'a [Rows<'a>],
    weights: Option<&'a mut [f32]>,
}

impl<'a> Combined<'a> {
    /// One row per token this rank dispatched, `[T, hidden]`, of the type that is combined.
    pub fn new(rows: RowsMut<'a>) -> Self {
        Self { rows, biases: &[], weights: None }
    }

    /// Adds one row of each of `biases`, `[T, hidden]` of the same type, to each token's sum, in
    /// order, after all experts.
    pub fn biases(mut self, biases: &'a [Rows<'a>]) -> Self {
        self.biases = biases;
        self
    }

    /// Brings home the weights that rows carry, `[T, K]`: for each of a token's experts the value
    /// its owner wrote with [`Outputs::weights`], 0 for none.
    ///
    /// [`Outputs::weights`]: crate::Outputs::weights
    pub fn weights(mut self, weights: &'a mut [f32]) -> Self {
        self.weights = Some(weights);
        self
    }
}

impl<'a> From<RowsMut<'a>> for Combined<'a> {
    fn from(rows: RowsMut<'a>) -> Self {
        Self::new(rows)
    }
}

/// A combine whose rows are ready on this rank; those of the peers may not be.
///
/// Dropping it gives this rank's sums up, but waits, bounded, until the peers have got theirs.
#[derive(Debug)]
pub struct CombineSend {
    parts: Option<Parts>,
}

#[derive(Debug)]
struct Parts {
    lane: LaneGuard,
    slot: Slot,
    handle: Handle,
    kind: PayloadKind,
    /// The rows that travel.
    format: OutFormat,
    /// They are one per (token, rank), in the slot's rank-major region.
    per_rank: bool,
    weighted: bool,
}

impl Dispatched {
    /// Sends the rows of this result home and sums what comes back for this rank's tokens into
    /// `out`. Collective. The slot is free when it returns.
    ///
    /// The sum of a token is one f32 left fold over (rank, local expert) from the first row, rounded
    /// once to nearest even; a token without experts is +0 plus its biases.
    ///
    /// # Errors
    /// Bad arguments or a busy lane at once (the result is dropped); different operations as the
    /// same error on every rank; a time-out, a lost peer or an abort, after which the group is
    /// unusable.
    pub fn combine<'a>(
        self,
        queue: &Queue,
        out: impl Into<Combined<'a>>,
        opts: &CombineOpts,
    ) -> Result<Event> {
        let out = out.into();
        let kind = self.outgoing()?;
        self.output_format(OP, kind)?;
        check_out(&self.ep, &self.handle.routing, kind, &out)?;
        self.combine_send(queue, opts)?.recv(queue, out)
    }

    /// The first half of a combine: says that the rows are ready. Waits for nobody.
    ///
    /// # Errors
    /// As [`Dispatched::combine`].
    pub fn combine_send(self, queue: &Queue, opts: &CombineOpts) -> Result<CombineSend> {
        let _ = queue;
        Ok(CombineSend { parts: Some(self.start(opts)?) })
    }

    /// The payload type that combine sends: what `rows_mut` was asked for, else what was received.
    fn outgoing(&self) -> Result<PayloadKind> {
        match self.output.or(self.received) {
            Some(kind) => Ok(kind),
            None => {
                Err(EpError::argument(OP, "nothing was written: call rows_mut before combining"))
            }
        }
    }

    fn start(self, opts: &CombineOpts) -> Result<Parts> {
        self.ep.usable(OP)?;
        let kind = self.outgoing()?;
        let format = self.output_format(OP, kind)?;
        let routing = &self.handle.routing;
        let expert_major = matches!(routing.layout, Layout::ExpertMajor { .. });
        if opts.weighted && !expert_major {
            let detail = "rank-major rows are sums over a rank's experts already; weigh them where \
                          they are summed";
            return Err(EpError::argument(OP, detail));
        }
        let reduced = expert_major && opts.precision == Precision::Reduced;
        let ep = self.ep.clone();
        let index = opts.lane.unwrap_or(self.lane);
        let lane = LaneGuard::take(&ep, OP, index, ep.deadline())?;
        let travelling = if reduced {
            let to = OutFormat::rank_major(None, kind, ep.shape.hidden, ep.shape.topk);
            reduce_experts(&self, &lane, kind, &format, &to, opts.weighted)?;
            to
        } else {
            format
        };
        let header = Header {
            op: notify::OP_COMBINE,
            slot: self.slot.index() as u32,
            layout: routing.layout.code(),
            payload: kind.code(),
            received: self.received.map_or(0, |k| k.code() + 1),
            handle: routing.id,
            options: u64::from(reduced) * REDUCED + u64::from(opts.weighted) * WEIGHTED,
            ..Header::default()
        };
        lane.announce(header, &[], &[])?;
        let Self { slot, handle, .. } = self;
        let per_rank = reduced || !expert_major;
        let weighted = opts.weighted && !reduced;
        Ok(Parts { lane, slot, handle, kind, format: travelling, per_rank, weighted })
    }
}

impl CombineSend {
    /// Whether all peers' rows are ready, so that [`CombineSend::recv`] waits only for peers to
    /// have read this rank's.
    pub fn ready(&self) -> bool {
        self.parts.as_ref().is_some_and(|p| p.lane.ready(Phase::Posted))
    }

    /// The second half of a combine: reads and sums, and waits, bounded, until all peers have read.
    ///
    /// # Errors
    /// As [`Dispatched::combine`].
    pub fn recv<'a>(mut self, queue: &Queue, out: impl Into<Combined<'a>>) -> Result<Event> {
        let _ = queue;
        let mut out = out.into();
        let parts = self.parts.as_ref().expect("taken once");
        check_out(&parts.lane.ep, &parts.handle.routing, parts.kind, &out)?;
        let parts = self.parts.take().expect("just seen");
        parts.collect()?;
        parts.push()?;
        parts.pull()?;
        parts.sum(&mut out)?;
        parts.finish()?;
        Ok(Event::done())
    }
}

impl Drop for CombineSend {
    fn drop(&mut self) {
        let Some(parts) = self.parts.take() else { return };
        if std::thread::panicking() {
            return parts.lane.ep.group.abort("a combine was dropped in a panic");
        }
        // `Done` may be raised only once a peer has announced this operation: before that its flag
        // may still be up from the last one. So this waits, as `recv` does.
        if let Err(e) = parts.give_up() {
            tracing::warn!("a dropped combine could not be brought to its end: {e}");
        }
    }
}

/// [`Dispatched::combine`] for several ranks driven by one thread, phase by phase.
///
/// # Errors
/// The first rank's that fails. Ranks that had announced the operation abort their group then.
pub fn combine_all(
    queue: &Queue,
    calls: Vec<(Dispatched, Combined<'_>)>,
    opts: &CombineOpts,
) -> Result<Vec<Event>> {
    let _ = queue;
    for (result, out) in &calls {
        check_out(&result.ep, &result.handle.routing, result.outgoing()?, out)?;
    }
    let mut started: Vec<(Parts, Combined<'_>)> = Vec::with_capacity(calls.len());
    for (result, out) in calls {
        match result.start(opts) {
            Ok(parts) => started.push((parts, out)),
            Err(e) => {
                if let Some((first, _)) = started.first() {
                    first.lane.ep.group.abort(&format!("combine_all could not go on: {e}"));
                }
                return Err(e);
            }
        }
    }
    // A bad verdict is everyone's: all raise their flags before anyone waits for them.
    let mut refused = None;
    for (parts, _) in &started {
        match parts.gather() {
            Err(e) if e.group_usable() => {
                parts.lane.done(&parts.lane.ep.peers)?;
                refused = Some(e);
            }
            other => other?,
        }
    }
    if let Some(error) = refused {
        for (parts, _) in started {
            parts.lane.abandon(parts.slot.detach());
        }
        return Err(error);
    }
    started.iter().try_for_each(|(parts, _)| parts.push())?;
    started.iter().try_for_each(|(parts, _)| parts.pull())?;
    started.iter_mut().try_for_each(|(parts, out)| parts.sum(out))?;
    started.iter().try_for_each(|(parts, _)| parts.release())?;
    started.into_iter().map(|(parts, _)| parts.settle().map(|()| Event::done())).collect()
}

impl Parts {
    /// Waits for the announcements and judges them.
    fn gather(&self) -> Result<()> {
        self.lane.collect(OP, self.lane.ep.deadline())?;
        notify::verdict(OP, &self.lane.state().headers)
    }

    /// [`Parts::gather`]; a bad verdict ends the operation on every rank.
    fn collect(&self) -> Result<()> {
        match self.gather() {
            Err(e) if e.group_usable() => {
                self.lane.close(OP, self.lane.ep.deadline())?;
                Err(e)
            }
            other => other,
        }
    }

    /// Sends each peer that does not map this rank's window its block of rows, in the order of its
    /// tokens, to where it expects this rank's block.
    fn push(&self) -> Result<()> {
        let ep = &*self.lane.ep;
        let handle = &self.handle.routing;
        let stride = self.format.stride;
        for &home in &ep.bulk {
            let rows = handle.matrix.rank[home * ep.shape.world + ep.rank()] as usize;
            let first = handle.matrix.row_base(home, ep.rank());
            let before = block_rows(ep, &handle.matrix, self.per_rank, home, ep.rank());
            let mut to = ep.window.receive_staging(self.lane.index) + before * stride;
            if self.per_rank {
                let from = ep.window.rank_rows(self.slot.index()) + first * stride;
                if rows > 0 {
                    self.lane.write_block(home, from, to, rows * stride)?;
                }
                continue;
            }
            let region = ep.window.expert_rows(self.slot.index());
            let order = &mut self.lane.state().scratch.order;
            for row in first..first + rows {
                local_experts(handle, ep.shape.topk, row, order);
                for &(_, k) in order.iter() {
                    let at = handle.received.expander.map[row * ep.shape.topk + k as usize];
                    self.lane.write_block(home, region + at as usize * stride, to, stride)?;
                    to += stride;
                }
            }
        }
        self.lane.done(&ep.bulk)
    }

    /// Waits for the blocks that were sent here.
    fn pull(&self) -> Result<()> {
        let ep = &*self.lane.ep;
        self.lane.wait(OP, &ep.bulk, Phase::Done, ep.deadline())
    }

    /// Sums the rows of every token of this rank.
    fn sum(&self, out: &mut Combined<'_>) -> Result<()> {
        let ep = &*self.lane.ep;
        let mut state = self.lane.state();
        let state = &mut *state;
        self.find_sources(&state.headers, &mut state.scratch.sources);
        let dtype = self.kind.dtype();
        for token in 0..self.handle.routing.send.tokens {
            if self.per_rank {
                self.rank_rows(token, &mut state.scratch);
            } else {
                self.expert_rows(token, &mut state.scratch);
            }
            let Scratch { rows, biases, weights, order, .. } = &mut state.scratch;
            biases.clear();
            biases.extend(out.biases.iter().map(|b| b.bytes(token).as_ptr()));
            let to = out.rows.bytes_mut(token).as_mut_ptr();
            let weights = self.weighted.then_some(weights.as_slice());
            // SAFETY: the rows are in slots of owners that announced them for this operation (or
            // in this rank's staging, after their owner's Done), and stay until this rank raises
            // Done; biases and `to` are rows of `hidden` elements of `dtype` (checked on entry).
            let summed =
                unsafe { host::reduce_row(dtype, ep.shape.hidden, rows, weights, biases, to) };
            ep.check_rows(OP, summed)?;
            if let Some(home) = &mut out.weights {
                let home = &mut home[token * ep.shape.topk..][..ep.shape.topk];
                // SAFETY: as above; `rows` and `order` belong together.
                unsafe { self.weights_home(token, rows, order, home) };
            }
        }
        Ok(())
    }

    /// Tells the owners that their rows were read, and waits for all who read this rank's.
    fn finish(&self) -> Result<()> {
        self.release()?;
        self.settle()
    }

    /// Everything peers wait for, without sums.
    fn give_up(&self) -> Result<()> {
        self.collect()?;
        self.push()?;
        self.pull()?;
        self.finish()
    }

    /// Tells the owners that their rows were read.
    fn release(&self) -> Result<()> {
        self.lane.done(&self.lane.ep.direct)
    }

    /// Waits for all who read this rank's rows.
    fn settle(&self) -> Result<()> {
        let ep = &*self.lane.ep;
        let deadline = ep.deadline();
        self.lane.wait(OP, &ep.direct, Phase::Done, deadline)?;
        self.lane.flush(deadline)
    }

    /// Says for each owner where its rows for this rank are.
    fn find_sources(&self, headers: &[Header], sources: &mut Vec<RowSource>) {
        let ep = &*self.lane.ep;
        let matrix = &self.handle.routing.matrix;
        sources.clear();
        for (owner, header) in headers.iter().enumerate() {
            let slot = header.slot as usize;
            sources.push(match ep.reach[owner] {
                Some(window) => {
                    let region = match self.per_rank {
                        true => ep.window.rank_rows(slot),
                        false => ep.window.expert_rows(slot),
                    };
                    let base = window.base.as_ptr().wrapping_add(region).cast_const();
                    let first = matrix.row_base(ep.rank(), owner);
                    RowSource { base, first, block: false }
                }
                None => {
                    let before = block_rows(ep, matrix, self.per_rank, ep.rank(), owner);
                    let region = ep.window.receive_staging(self.lane.index);
                    let base = ep.local(region + before * self.format.stride).cast_const();
                    RowSource { base, first: 0, block: true }
                }
            });
        }
    }

    /// The rows of a token where there is one per rank, in rank order.
    fn rank_rows(&self, token: usize, scratch: &mut Scratch) {
        scratch.rows.clear();
        scratch.order.clear();
        for (owner, index) in self.handle.routing.send.destinations(token) {
            let source = scratch.sources[owner];
            let row = source.first + index;
            scratch.rows.push(source.base.wrapping_add(row * self.format.stride));
            scratch.order.push((owner as i32, 0));
        }
    }

    /// The rows of a token where there is one per expert, in the order of (rank, local expert),
    /// which is that of physical experts.
    fn expert_rows(&self, token: usize, scratch: &mut Scratch) {
        let handle = &*self.handle.routing;
        let ep = &*self.lane.ep;
        let topk = ep.shape.topk;
        let chosen = &handle.send.physical[token * topk..][..topk];
        let Scratch { rows, weights, order, sources, .. } = scratch;
        order.clear();
        order.extend((0u32..).zip(chosen).filter(|(_, p)| **p >= 0).map(|(k, p)| (*p, k)));
        order.sort_unstable();
        rows.clear();
        weights.clear();
        for &(physical, k) in order.iter() {
            let at = token * topk + k as usize;
            weights.push(handle.weights.get(at).copied().unwrap_or(1.0));
            let physical = physical as usize;
            let (owner, _) = ep.shape.placement.owner(physical);
            let source = &mut sources[owner];
            let row = if source.block {
                source.first += 1;
                source.first - 1
            } else {
                handle.expert_offsets[physical] as usize
                    + handle.matrix.expert_base(ep.rank(), physical)
                    + handle.send.expert_index[at] as usize
            };
            rows.push(source.base.wrapping_add(row * self.format.stride));
        }
    }

    /// Reads the weights that a token's rows carry.
    ///
    /// # Safety
    /// `rows` are rows of this combine that may be read, and `order` says whose they are.
    unsafe fn weights_home(
        &self,
        token: usize,
        rows: &[*const u8],
        order: &[(i32, u32)],
        home: &mut [f32],
    ) {
        home.fill(0.0);
        let placement = &self.lane.ep.shape.placement;
        let chosen = &self.handle.routing.send.physical[token * home.len()..][..home.len()];
        for (&row, &(who, k)) in rows.iter().zip(order) {
            let carried = row.wrapping_add(self.format.weights_at).cast::<f32>();
            if !self.per_rank {
                // SAFETY: by this function's contract; an expert's row carries one weight.
                home[k as usize] = unsafe { carried.read() };
                continue;
            }
            for (k, home) in home.iter_mut().enumerate() {
                let owner = usize::try_from(chosen[k]).ok().map(|p| placement.owner(p).0);
                if owner == Some(who as usize) {
                    // SAFETY: by this function's contract; a rank's row carries K weights.
                    *home = unsafe { carried.add(k).read() };
                }
            }
        }
    }
}

/// How many rows come home to `home` from owners before `owner`, mapped or not: where `owner`'s
/// block starts in the staging of `home`.
fn block_rows(
    ep: &Inner,
    matrix: &CountMatrix,
    per_rank: bool,
    home: usize,
    owner: usize,
) -> usize {
    let counts = if per_rank {
        &matrix.rank[home * matrix.ranks..][..owner]
    } else {
        let before = ep.shape.placement.physical_base(owner);
        &matrix.expert[home * matrix.physical..][..before]
    };
    counts.iter().map(|&n| n as usize).sum()
}

/// The local experts of a received row as (local id, k), ascending.
fn local_experts(handle: &HandleInner, topk: usize, row: usize, order: &mut Vec<(i32, u32)>) {
    let ids = &handle.received.ids[row * topk..][..topk];
    order.clear();
    order.extend((0u32..).zip(ids).filter(|(_, id)| **id >= 0).map(|(k, id)| (*id, k)));
    order.sort_unstable();
}

/// Sums the rows of each received token over this rank's experts, into the slot's rank-major rows.
fn reduce_experts(
    result: &Dispatched,
    lane: &LaneGuard,
    kind: PayloadKind,
    from: &OutFormat,
    to: &OutFormat,
    weighted: bool,
) -> Result<()> {
    let ep = &*result.ep;
    let handle = &*result.handle.routing;
    let topk = ep.shape.topk;
    let source = ep.local(ep.window.expert_rows(result.slot.index())).cast_const();
    let target = ep.local(ep.window.rank_rows(result.slot.index()));
    let mut state = lane.state();
    let Scratch { rows, weights, order, .. } = &mut state.scratch;
    for row in 0..handle.rows {
        local_experts(handle, topk, row, order);
        rows.clear();
        weights.clear();
        for &(_, k) in order.iter() {
            let at = row * topk + k as usize;
            let position = handle.received.expander.map[at] as usize;
            rows.push(source.wrapping_add(position * from.stride));
            weights.push(handle.received.weights[at]);
        }
        let out = target.wrapping_add(row * to.stride);
        let weights = weighted.then_some(weights.as_slice());
        // SAFETY: both regions are in the slot this result owns, apart from each other; positions
        // come from the expansion and rows from the matrix, within what is reserved.
        unsafe {
            let summed = host::reduce_row(kind.dtype(), ep.shape.hidden, rows, weights, &[], out);
            ep.check_rows(OP, summed)?;
            let carried = out.add(to.weights_at).cast::<f32>();
            carried.write_bytes(0, topk);
            for (&(_, k), row) in order.iter().zip(rows.iter()) {
                carried.add(k as usize).write(row.add(from.weights_at).cast::<f32>().read());
            }
        }
    }
    Ok(())
}

fn check_out(
    ep: &Inner,
    handle: &HandleInner,
    kind: PayloadKind,
    out: &Combined<'_>,
) -> Result<()> {
    let tokens = handle.send.tokens;
    let row_bytes = kind.payload_bytes(ep.shape.hidden);
    let rows = |what: &str, len: usize, bytes: usize, dtype| {
        if len == tokens && bytes == row_bytes && dtype == kind.dtype() {
            return Ok(());
        }
        let detail = format!(
            "{what} is {len} rows of {bytes} bytes ({dtype:?}); {tokens} rows of {row_bytes} \
             bytes ({:?}) are combined",
            kind.dtype()
        );
        Err(EpError::argument(OP, detail))
    };
    rows("the output", out.rows.len(), out.rows.row_bytes(), out.rows.dtype())?;
    for bias in out.biases {
        rows("a bias", bias.len(), bias.row_bytes(), bias.dtype())?;
    }
    match &out.weights {
        Some(weights) if weights.len() != tokens * ep.shape.topk => {
            let need = tokens * ep.shape.topk;
            let detail =
                format!("{} weights come home; room for {} was given", need, weights.len());
            Err(EpError::argument(OP, detail))
        }
        _ => Ok(()),
    }
}
