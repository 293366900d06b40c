//! Dispatch: every token to the ranks of its experts, in three steps that each bound their waits.
//!
//! *Post* lays the routing out and announces it. *Send* waits for the announcements of all ranks,
//! so knows the final place of every row, and writes rows there. *Recv* waits for the rows of all
//! ranks.

use std::sync::Arc;

use ep_kernels::host::{self, ExpertRows, Source, Target};
use ep_kernels::{ExpertFormat, PayloadKind, RecordFormat};
use ep_transport::Queue;

use crate::ep::Inner;
use crate::handle::HandleInner;
use crate::lane::{LaneGuard, LaneState, Owing};
use crate::node;
use crate::notify::{self, Counts, Header, Phase};
use crate::payload::{self, DispatchOpts, Payload, Route};
use crate::result::Dispatched;
use crate::routing::{Fresh, Routing};
use crate::slots::Slot;
use crate::{Ep, EpError, Handle, Layout, Result};

pub(crate) const OP: &str = "dispatch";

/// Options that all ranks of a dispatch share, as they travel.
pub(crate) const CAPACITY: u64 = 1;
pub(crate) const PHYSICAL_IDS: u64 = 2;
/// Rows for ranks that are not mapped go in blocks of fixed size.
#[cfg(feature = "cuda")]
pub(crate) const FIXED: u64 = 4;

/// A dispatch that has been announced.
#[derive(Debug)]
pub(crate) struct Posted {
    lane: LaneGuard,
    slot: Slot,
    routing: Routing,
    kind: PayloadKind,
    capacity: bool,
}

/// A dispatch whose rows have left this rank; those of the peers may still be on their way.
///
/// Dropping it gives the received rows up; the lane's next operation waits for them.
#[derive(Debug)]
pub struct DispatchSend {
    parts: Option<Sent>,
}

/// A dispatch between its halves, wherever rows are.
#[derive(Debug)]
enum Sent {
    Host(Posted),
    #[cfg(feature = "cuda")]
    Gpu(crate::gpu::Sending),
}

impl Ep {
    /// Sends each token of this rank to the ranks of its experts and receives theirs. Collective:
    /// all ranks call it, with as many tokens as each has.
    ///
    /// The rows are received into a free slot, which the result owns.
    ///
    /// # Errors
    /// Bad arguments, a busy lane or no free slot at once, with nothing sent; bad ids, too many
    /// rows or different operations as the same error on every rank, with no payload sent; a
    /// time-out, a lost peer or an abort, after which the group is unusable.
    pub fn dispatch(
        &self,
        queue: &Queue,
        payload: Payload<'_>,
        route: Route<'_>,
        opts: &DispatchOpts,
    ) -> Result<Dispatched> {
        self.send(queue, payload, route, opts, true)?.recv(queue)
    }

    /// The first half of a dispatch: returns when this rank's rows have been written. It waits,
    /// bounded, until every peer has said where its rows go (and, uncached, how many come), and with
    /// [`Hierarchy::Node`](crate::Hierarchy::Node) until the rows that this rank has to pass on have
    /// arrived from other nodes, so that nobody depends on when the second half is called.
    ///
    /// # Errors
    /// As [`Ep::dispatch`].
    pub fn dispatch_send(
        &self,
        queue: &Queue,
        payload: Payload<'_>,
        route: Route<'_>,
        opts: &DispatchOpts,
    ) -> Result<DispatchSend> {
        self.send(queue, payload, route, opts, false)
    }

    /// [`Ep::dispatch_send`]; `whole`: the second half follows at once, on the same queue.
    fn send(
        &self,
        queue: &Queue,
        payload: Payload<'_>,
        route: Route<'_>,
        opts: &DispatchOpts,
        whole: bool,
    ) -> Result<DispatchSend> {
        let tokens = payload.rows.len();
        let _span = tracing::trace_span!("dispatch_send", lane = opts.lane, tokens).entered();
        #[cfg(feature = "cuda")]
        if self.inner.gpu.is_some() {
            let sent = crate::gpu::Sending::new(&self.inner, queue, &payload, &route, opts, whole)?;
            return Ok(DispatchSend { parts: Some(Sent::Gpu(sent)) });
        }
        #[cfg(not(feature = "cuda"))]
        let _ = whole;
        host_queue(OP, queue)?;
        Posted::new(&self.inner, &payload, &route, opts)?.send(&payload)
    }
}

/// [`Ep::dispatch`] for several ranks driven by one thread, phase by phase: rank `i` is `calls[i]`.
///
/// # Errors
/// The first rank's that fails; the others' results are dropped.
pub fn dispatch_all(
    queue: &Queue,
    calls: &[(&Ep, Payload<'_>, Route<'_>)],
    opts: &DispatchOpts,
) -> Result<Vec<Dispatched>> {
    for (ep, payload, route) in calls {
        payload::check(OP, &ep.inner, payload, route, opts)?;
        ep.inner.could_start(OP, opts.lane, true)?;
    }
    #[cfg(feature = "cuda")]
    if calls.iter().any(|(ep, ..)| ep.inner.gpu.is_some()) {
        return crate::gpu::dispatch_all(&[queue], calls, opts);
    }
    host_queue(OP, queue)?;
    let mut posted = Vec::with_capacity(calls.len());
    for (ep, payload, route) in calls {
        let one = Posted::new(&ep.inner, payload, route, opts);
        // Ranks that have announced the operation cannot take it back.
        let first = posted.is_empty();
        posted.push(one.map_err(|e| if first { e } else { ep.inner.give_up(OP, e) })?);
    }
    let prepared = posted.into_iter().map(Posted::prepare).collect::<Vec<_>>();
    let mut sent = Vec::with_capacity(calls.len());
    // A bad verdict is everyone's: all raise their flags before anyone waits for them.
    let mut failed = None;
    for (prepared, (_, payload, _)) in prepared.into_iter().zip(calls) {
        match prepared {
            Ok(posted) => sent.push(posted.write(payload)?),
            Err(refused) => {
                let Refused { error, lane, slot } = *refused;
                if error.group_usable() {
                    lane.done(&lane.ep.peers)?;
                    lane.abandon(slot.detach(), Owing::All);
                }
                failed = failed.or(Some(error));
            }
        }
    }
    match failed {
        Some(error) => Err(error),
        None => {
            let sent = sent.into_iter().map(Posted::forward).collect::<Result<Vec<_>>>()?;
            sent.into_iter().map(|s| s.recv(queue)).collect()
        }
    }
}

/// A dispatch that all ranks refuse, or that failed.
struct Refused {
    error: EpError,
    lane: LaneGuard,
    slot: Slot,
}

impl Posted {
    fn new(
        ep: &Arc<Inner>,
        payload: &Payload<'_>,
        route: &Route<'_>,
        opts: &DispatchOpts,
    ) -> Result<Self> {
        ep.usable(OP)?;
        payload::check(OP, ep, payload, route, opts)?;
        let deadline = ep.deadline();
        let lane = LaneGuard::take(ep, OP, opts.lane, deadline)?;
        let slot = Slot::take(ep, OP)?;
        let mut header = Header {
            slot: slot.index() as u32,
            payload: payload.kind.code(),
            options: u64::from(opts.capacity) * CAPACITY
                + u64::from(opts.physical_ids) * PHYSICAL_IDS,
            ..Header::default()
        };
        let routing = match route {
            Route::Cached(handle) => {
                header.op = notify::OP_CACHED;
                header.handle = handle.routing.id;
                header.layout = handle.routing.layout.code();
                lane.announce(header, &Counts::default())?;
                Routing::Cached((*handle).clone())
            }
            #[cfg(feature = "cuda")]
            Route::Device { .. } => {
                let detail = "ids on a GPU, the layer works on the host";
                return Err(EpError::argument(OP, detail));
            }
            Route::Topk { ids, weights } => {
                header.op = notify::OP_DISPATCH;
                header.layout = opts.layout.code();
                let mut fresh = Fresh::take(ep);
                let new = fresh.get_mut();
                new.layout = opts.layout;
                new.weights.clear();
                new.weights.extend_from_slice(weights.unwrap_or(&[]));
                let shape = &ep.shape;
                let (k, placement) = (shape.topk, &shape.placement);
                let routed = new.send.compute(*ids, k, placement, ep.rank(), opts.physical_ids);
                if let Err(e) = routed {
                    notify::set_status(&mut header, &e)?;
                }
                if ep.across.hierarchical {
                    new.crossing.lay_out(&new.send, &ep.across.nodes, ep.rank());
                }
                let sequence = lane.announce(header, &new.counts())?;
                new.id = ((opts.lane as u64) << 48) | sequence;
                new.lane = opts.lane;
                Routing::New(fresh)
            }
        };
        Ok(Self { lane, slot, routing, kind: payload.kind, capacity: opts.capacity })
    }

    /// Waits for the announcements; then everything about the rows is known.
    fn prepare(mut self) -> Result<Self, Box<Refused>> {
        match self.prepare_in_place() {
            Ok(()) => Ok(self),
            Err(error) => {
                let Self { lane, slot, .. } = self;
                Err(Box::new(Refused { error, lane, slot }))
            }
        }
    }

    fn prepare_in_place(&mut self) -> Result<()> {
        let ep = self.lane.ep.clone();
        self.lane.collect("dispatch, announcements", ep.deadline())?;
        notify::verdict(OP, &self.lane.state().headers)?;
        let Routing::New(fresh) = &mut self.routing else { return Ok(()) };
        let handle = fresh.get_mut();
        let (across, hierarchical) = (&ep.across, ep.across.hierarchical);
        handle.matrix.reset(&ep.shape.placement, ep.rank());
        if hierarchical {
            handle.crossing.reset(&ep.shape, &across.nodes, &across.sources);
        }
        let nodes = if hierarchical { across.nodes.count() } else { 0 };
        for source in 0..ep.shape.world {
            let mailbox = ep.local(ep.window.mailbox(self.lane.index, source));
            // SAFETY: the announcement is whole and stays until this rank raises Done; the verdict
            // says that it is one of an uncached dispatch.
            let counts = unsafe { notify::counts(mailbox, &ep.shape, nodes) };
            ep.check_rows(OP, handle.matrix.add(counts.expert, counts.rank))?;
            if hierarchical {
                handle.crossing.add(&ep.shape, &across.nodes, ep.rank(), (source, &counts));
            }
        }
        let expert_major = match handle.layout {
            Layout::ExpertMajor { alignment } => Some((alignment, ep.shape.max_expert_rows)),
            Layout::RankMajor => None,
        };
        notify::capacity(OP, &handle.matrix, ep.shape.max_rows, expert_major)?;
        handle.crossing.capacity(OP, ep.shape.max_forward_rows)?;
        handle.finish(&ep.shape);
        let first = &handle.expert_offsets;
        handle.crossing.finish(handle.layout, &ep.shape, &across.members, first);
        Ok(())
    }

    fn send(self, payload: &Payload<'_>) -> Result<DispatchSend> {
        match self.prepare() {
            Ok(posted) => posted.write(payload)?.forward(),
            Err(refused) => {
                let Refused { error, lane, .. } = *refused;
                if error.group_usable() {
                    lane.close(OP, lane.ep.deadline())?;
                }
                Err(error)
            }
        }
    }

    /// Writes every row to its final place, or only as far as its rail, and tells the peers.
    fn write(self, payload: &Payload<'_>) -> Result<Self> {
        let ep = &self.lane.ep;
        let (format, _) = ep.shape.formats(self.kind);
        let handle = self.routing.get();
        let source = Source {
            payload: payload.rows.as_ptr(),
            payload_stride: payload.rows.stride(),
            scales: payload.scales.map_or(std::ptr::null(), |s| s.as_ptr()),
            scales_stride: payload.scales.map_or(0, |s| s.stride()),
            weights: (!handle.weights.is_empty()).then_some(handle.weights.as_slice()),
        };
        if ep.across.hierarchical {
            // SAFETY: `payload` has as many rows of the format's size as the routing has tokens
            // (checked on entry).
            unsafe { node::send_blocks(&self.lane, handle, &format, &source)? };
        }
        let mut state = self.lane.state();
        self.aim(&mut state, &format);
        // SAFETY: the source as above; the targets are blocks of slots their owners offered for this
        // operation, disjoint between sources by the count matrix and within capacity by the verdict,
        // or this lane's staging.
        let scattered = unsafe {
            let (placement, targets) = (&ep.shape.placement, &state.targets);
            let (send, rank) = (&handle.send, ep.rank());
            match ep.across.hierarchical {
                false => host::scatter(&format, &source, send, placement, rank, targets),
                true => {
                    let near = &ep.across.near;
                    host::scatter_only(&format, &source, send, placement, rank, targets, near)
                }
            }
        };
        ep.check_rows(OP, scattered)?;
        if ep.across.hierarchical {
            drop(state);
            return Ok(self);
        }
        for &peer in &ep.bulk {
            let rows = handle.send.rank_counts[peer] as usize;
            let from = self.staging_of(peer, format.stride);
            let first = handle.matrix.sent_base(peer);
            let slot = state.headers[peer].slot as usize;
            let to = ep.window.rank_rows(slot) + first * format.stride;
            if rows > 0 {
                self.lane.write_block(peer, from, to, rows * format.stride)?;
            }
        }
        drop(state);
        self.lane.done(&ep.peers)?;
        Ok(self)
    }

    /// Passes on what other nodes sent to this rank for those of its node.
    fn forward(mut self) -> Result<DispatchSend> {
        if self.lane.ep.across.hierarchical {
            let (format, _) = self.lane.ep.shape.formats(self.kind);
            node::await_blocks(&self.lane)?;
            if let Routing::New(fresh) = &mut self.routing {
                node::read_blocks(&self.lane, &mut fresh.get_mut().crossing, &format)?;
            }
            node::forward(&self.lane, &self.routing.get().crossing, &format)?;
        }
        Ok(DispatchSend { parts: Some(Sent::Host(self)) })
    }

    /// Says for each rank where this rank's rows go: into the offered slot, or to staging.
    fn aim(&self, state: &mut LaneState, format: &RecordFormat) {
        let ep = &self.lane.ep;
        let handle = self.routing.get();
        state.targets.clear();
        for rank in 0..ep.shape.world {
            let rows = handle.send.rank_counts[rank] as usize;
            let target = match ep.reach[rank] {
                Some(window) => {
                    let slot = state.headers[rank].slot as usize;
                    let base = window.base.as_ptr().wrapping_add(ep.window.rank_rows(slot));
                    let first_row = handle.matrix.sent_base(rank);
                    Target { base, first_row, rows: first_row + rows }
                }
                None => {
                    let base = ep.local(self.staging_of(rank, format.stride));
                    Target { base, first_row: 0, rows }
                }
            };
            state.targets.push(target);
        }
    }

    /// Where the rows for a bulk peer are packed: behind those for the ranks before it.
    fn staging_of(&self, rank: usize, stride: usize) -> usize {
        let before = &self.routing.get().send.rank_counts[..rank];
        let rows: usize = before.iter().map(|&n| n as usize).sum();
        self.lane.ep.window.send_staging(self.lane.index) + rows * stride
    }
}

/// Fails unless `queue` is the host's: rows on the host are moved by the calling thread.
pub(crate) fn host_queue(op: &'static str, queue: &Queue) -> Result<()> {
    if queue.is_host() {
        return Ok(());
    }
    Err(EpError::argument(op, "the layer works on the host: pass Queue::host()"))
}

impl DispatchSend {
    /// Whether all peers' rows have arrived, so that [`DispatchSend::recv`] would not wait.
    pub fn ready(&self) -> bool {
        self.parts.as_ref().is_some_and(|sent| match sent {
            Sent::Host(posted) => posted.lane.ready_from(posted.lane.ep.owing_rows(), Phase::Done),
            #[cfg(feature = "cuda")]
            Sent::Gpu(sending) => sending.lane().ready(Phase::Done),
        })
    }

    /// The second half of a dispatch: waits, bounded, for the rows of every peer.
    ///
    /// # Errors
    /// A time-out or loss names the absent peers; the group is then unusable.
    pub fn recv(mut self, queue: &Queue) -> Result<Dispatched> {
        #[cfg_attr(not(feature = "cuda"), expect(clippy::infallible_destructuring_match))]
        let posted = match self.parts.take().expect("taken once") {
            Sent::Host(posted) => posted,
            #[cfg(feature = "cuda")]
            Sent::Gpu(sending) => return sending.recv(queue),
        };
        host_queue(OP, queue)?;
        let _span = tracing::trace_span!("dispatch_recv", lane = posted.lane.index).entered();
        let Posted { lane, slot, mut routing, kind, capacity } = posted;
        let ep = lane.ep.clone();
        let deadline = ep.deadline();
        lane.wait("dispatch, rows", ep.owing(ep.owing_rows()), Phase::Done, deadline)?;
        lane.flush(deadline)?;
        if let Layout::ExpertMajor { .. } = routing.get().layout {
            expand(&ep, &lane, &slot, &mut routing, kind)?;
        }
        let handle = match routing {
            Routing::New(fresh) => Handle { routing: fresh.done() },
            Routing::Cached(handle) => handle,
        };
        let result = Dispatched::new(ep, slot, handle, Some(kind), capacity, lane.index);
        result.mark_tail();
        Ok(result)
    }
}

impl Drop for DispatchSend {
    fn drop(&mut self) {
        if let Some(Sent::Host(Posted { lane, slot, routing, kind, .. })) = self.parts.take() {
            let (format, _) = lane.ep.shape.formats(kind);
            slot.tail().lock().overwritten(routing.get().rows * format.stride);
            lane.abandon(slot.detach(), lane.ep.owing_rows());
        }
    }
}

/// Copies received rank-major rows to the rows of their local experts.
fn expand(
    ep: &Inner,
    lane: &LaneGuard,
    slot: &Slot,
    routing: &mut Routing,
    kind: PayloadKind,
) -> Result<()> {
    let (format, expert_format) = ep.shape.formats(kind);
    let from = ep.local(ep.window.rank_rows(slot.index())).cast_const();
    let base = ep.local(ep.window.expert_rows(slot.index()));
    let rows = ep.shape.max_expert_rows;
    fn room(handle: &HandleInner, base: *mut u8, rows: usize, fmt: ExpertFormat) -> ExpertRows<'_> {
        ExpertRows { base, rows, fmt, offsets: &handle.offsets, counts: &handle.counts }
    }
    match routing {
        Routing::New(fresh) => {
            let handle = fresh.get_mut();
            let mut received = std::mem::take(&mut handle.received);
            // SAFETY: the slot is this rank's and all its rows have arrived; the regions do not
            // overlap and hold the reserved rows, within which the verdict keeps these.
            let expanded = unsafe {
                received.keep_metadata(&format, from, handle.rows);
                received.expander.expand(
                    &format,
                    from,
                    handle.rows,
                    &room(handle, base, rows, expert_format),
                )
            };
            handle.received = received;
            ep.check_rows(OP, expanded)
        }
        Routing::Cached(handle) => {
            let handle = &handle.routing;
            let mut state = lane.state();
            // SAFETY: as above; a cached dispatch brings the same rows.
            let expanded = unsafe {
                state.expander.expand(
                    &format,
                    from,
                    handle.rows,
                    &room(handle, base, rows, expert_format),
                )
            };
            ep.check_rows(OP, expanded)
        }
    }
}
