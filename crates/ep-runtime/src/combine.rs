//! Combine: expert outputs back to the ranks their tokens came from, reduced per token.
//!
//! Every owner announces that its rows are ready; home ranks read mapped owners' rows where they
//! are, while owners that are not mapped send their block; then every rank says that it has read.
//! Only then may an owner's slot be used again. The steps are in [`crate::fold`].

use ep_kernels::{DType, PayloadKind};
use ep_transport::Queue;

use crate::dispatch::host_queue;
use crate::ep::Inner;
use crate::fold::{Parts, reduce_experts};
use crate::handle::HandleInner;
use crate::lane::{LaneGuard, Owing};
use crate::node;
use crate::notify::{self, Counts, Header, Phase};
use crate::result::Dispatched;
use crate::shape::OutFormat;
use crate::{EpError, Event, Layout, Result, Rows, RowsMut};

pub(crate) const OP: &str = "combine";

pub(crate) const REDUCED: u64 = 1;
pub(crate) const WEIGHTED: u64 = 2;
pub(crate) const NODE_REDUCED: u64 = 4;
/// Rows for ranks that are not mapped go in blocks of fixed size.
#[cfg(feature = "cuda")]
pub(crate) const FIXED: u64 = 8;

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
    /// Each node first sums the rows of its ranks, in f32 in the order of (rank, local expert), and
    /// rounds to the payload type, so that one row per node travels between nodes; a token's rank
    /// then sums the nodes' rows, its own node's included, in f32 in the order of nodes, adds biases
    /// and rounds: two roundings, whatever the layout, and the same on whichever node the rank is.
    /// In a group of one node the second rounding changes nothing but for biases: without them it is
    /// [`Precision::Exact`], and on GPUs it takes none. Needs a layer built with
    /// [`Hierarchy::Node`](crate::Hierarchy::Node). Nodes are numbered by their lowest rank.
    NodeReduced,
}

/// How a combine is done. Equal on every rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct CombineOpts {
    /// The lane; by default that of the dispatch.
    pub lane: Option<usize>,
    /// For rank-major rows, [`Precision::Reduced`] is [`Precision::Exact`].
    pub precision: Precision,
    /// Multiply each expert-major row with its gate weight. The owner of rank-major rows does that
    /// itself, since a row is already a sum over its experts.
    pub weighted: bool,
}

/// Where combined tokens go.
#[derive(Debug)]
pub struct Combined<'a> {
    pub(crate) rows: RowsMut<'a>,
    pub(crate) biases: &'a [Rows<'a>],
    /// Dense f32, `T * K` of them.
    pub(crate) weights: Option<RowsMut<'a>>,
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
        // One value per row fits any number of them.
        self.weights = RowsMut::new(weights, 1).ok();
        self
    }

    /// [`Combined::weights`] for weights that may be on a GPU: `[T, K]` of f32, dense.
    pub fn weight_rows(mut self, weights: RowsMut<'a>) -> Self {
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
    parts: Option<Started>,
}

/// A combine between its halves, wherever rows are.
#[derive(Debug)]
enum Started {
    Host(Parts),
    #[cfg(feature = "cuda")]
    Gpu(crate::gpu::Folding),
}
impl Dispatched {
    /// Sends the rows of this result home and sums what comes back for this rank's tokens into
    /// `out`. Collective. The slot is free when it returns.
    ///
    /// The sum of a token is one f32 left fold over (rank, local expert) from the first row, rounded
    /// once to nearest even, unless another [`Precision`] is asked for; a token without experts is +0
    /// plus its biases.
    ///
    /// # Errors
    /// Bad arguments or a busy lane at once: nothing was announced, and the error holds this result,
    /// so that the call can be repeated ([`CombineError::into_result`]). Different operations as
    /// the same error on every rank; a time-out, a lost peer or an abort, after which the group is
    /// unusable.
    pub fn combine<'a>(
        self,
        queue: &Queue,
        out: impl Into<Combined<'a>>,
        opts: &CombineOpts,
    ) -> Result<Event, CombineError> {
        let out = out.into();
        if let Err(error) = self.check_combine(&out) {
            return Err(CombineError { error, result: Some(Box::new(self)) });
        }
        Ok(self.send(queue, opts, true)?.recv(queue, out)?)
    }

    fn check_combine(&self, out: &Combined<'_>) -> Result<()> {
        let kind = self.outgoing()?;
        self.output_format(OP, kind)?;
        check_out(&self.ep, &self.handle.routing, kind, out)
    }

    /// The first half of a combine: says that the rows are ready. It waits, bounded, only for the
    /// end of a dropped dispatch on the same lane.
    ///
    /// # Errors
    /// As [`Dispatched::combine`].
    pub fn combine_send(
        self,
        queue: &Queue,
        opts: &CombineOpts,
    ) -> Result<CombineSend, CombineError> {
        self.send(queue, opts, false)
    }

    /// [`Dispatched::combine_send`]; `whole`: the second half follows at once, on the same queue.
    fn send(
        self,
        queue: &Queue,
        opts: &CombineOpts,
        whole: bool,
    ) -> Result<CombineSend, CombineError> {
        #[cfg(not(feature = "cuda"))]
        let _ = whole;
        #[cfg(feature = "cuda")]
        if self.ep.gpu.is_some() {
            let folding = self.post_on_gpu(queue, opts, whole)?;
            return Ok(CombineSend { parts: Some(Started::Gpu(folding)) });
        }
        let prepared = host_queue(OP, queue).and_then(|()| self.prepare(opts));
        match prepared {
            Ok(prepared) => {
                Ok(CombineSend { parts: Some(Started::Host(self.announce(prepared)?)) })
            }
            Err(error) => Err(CombineError { error, result: Some(Box::new(self)) }),
        }
    }

    #[cfg(feature = "cuda")]
    fn post_on_gpu(
        self,
        queue: &Queue,
        opts: &CombineOpts,
        whole: bool,
    ) -> Result<crate::gpu::Folding, CombineError> {
        let sound = node::check_precision(OP, self.ep.across.hierarchical, opts.precision);
        let kind = match sound.and_then(|()| self.outgoing()) {
            Ok(kind) => kind,
            Err(error) => return Err(CombineError { error, result: Some(Box::new(self)) }),
        };
        crate::gpu::Folding::post(self, queue, opts, kind, whole)
            .map_err(|(error, result)| CombineError { error, result })
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

    /// Everything that can fail before peers are told.
    fn prepare(&self, opts: &CombineOpts) -> Result<Prepared> {
        let _span = tracing::trace_span!("combine_send", lane = self.lane).entered();
        self.ep.usable(OP)?;
        let kind = self.outgoing()?;
        let format = self.output_format(OP, kind)?;
        let routing = &self.handle.routing;
        let expert_major = matches!(routing.layout, Layout::ExpertMajor { .. });
        node::check_precision(OP, self.ep.across.hierarchical, opts.precision)?;
        let per_node = opts.precision == Precision::NodeReduced;
        if opts.weighted && !expert_major {
            return Err(weighted_rank_major());
        }
        let reduced = expert_major && opts.precision == Precision::Reduced;
        let ep = self.ep.clone();
        let index = opts.lane.unwrap_or(self.lane);
        let lane = LaneGuard::take(&ep, OP, index, ep.deadline())?;
        let travelling = if reduced {
            let to = OutFormat::rank_major(None, kind, ep.shape.hidden, ep.shape.topk);
            reduce_experts(self, &lane, kind, &format, &to, opts.weighted)?;
            to
        } else {
            format
        };
        let (per_rank, weighted) = (reduced || !expert_major, opts.weighted && !reduced);
        let header = Header {
            op: notify::OP_COMBINE,
            slot: self.slot.index() as u32,
            layout: routing.layout.code(),
            payload: kind.code(),
            received: self.received.map_or(0, |k| k.code() + 1),
            handle: routing.id,
            options: u64::from(reduced) * REDUCED
                + u64::from(opts.weighted) * WEIGHTED
                + u64::from(per_node) * NODE_REDUCED,
            ..Header::default()
        };
        Ok(Prepared { lane, header, kind, format: travelling, per_rank, weighted, per_node })
    }

    fn announce(self, prepared: Prepared) -> Result<Parts> {
        let Prepared { lane, header, kind, format, per_rank, weighted, per_node } = prepared;
        lane.announce(header, &Counts::default())?;
        let Self { slot, handle, .. } = self;
        Ok(Parts { lane, slot, handle, kind, format, per_rank, weighted, per_node })
    }
}

pub(crate) fn weighted_rank_major() -> EpError {
    let detail = "rank-major rows are sums over a rank's experts already; weigh them where they are \
                  summed";
    EpError::argument(OP, detail)
}

/// A combine that may be announced.
struct Prepared {
    lane: LaneGuard,
    header: Header,
    kind: PayloadKind,
    format: OutFormat,
    per_rank: bool,
    weighted: bool,
    per_node: bool,
}

/// Why a combine did not happen, with the result if it was not announced yet. Where only the reason
/// matters, `?` turns it into an [`EpError`].
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct CombineError {
    #[source]
    error: EpError,
    result: Option<Box<Dispatched>>,
}

impl CombineError {
    /// The result, if nothing was announced: the combine can be called again.
    pub fn into_result(self) -> Option<Dispatched> {
        self.result.map(|result| *result)
    }
}

impl std::ops::Deref for CombineError {
    type Target = EpError;

    fn deref(&self) -> &EpError {
        &self.error
    }
}

impl From<EpError> for CombineError {
    fn from(error: EpError) -> Self {
        Self { error, result: None }
    }
}

impl From<CombineError> for EpError {
    fn from(e: CombineError) -> Self {
        e.error
    }
}

impl CombineSend {
    /// Whether all peers' rows are ready, so that [`CombineSend::recv`] waits only for peers to
    /// have read this rank's.
    pub fn ready(&self) -> bool {
        self.parts.as_ref().is_some_and(|started| match started {
            Started::Host(parts) => parts.lane.ready(Phase::Posted),
            #[cfg(feature = "cuda")]
            Started::Gpu(folding) => folding.lane().ready(Phase::Posted),
        })
    }

    /// The second half of a combine: reads and sums, and waits, bounded, until all peers have read.
    ///
    /// # Errors
    /// As [`Dispatched::combine`].
    pub fn recv<'a>(mut self, queue: &Queue, out: impl Into<Combined<'a>>) -> Result<Event> {
        let mut out = out.into();
        match self.parts.as_ref().expect("taken once") {
            Started::Host(parts) => {
                host_queue(OP, queue)?;
                check_out(&parts.lane.ep, &parts.handle.routing, parts.kind, &out)?;
            }
            #[cfg(feature = "cuda")]
            Started::Gpu(folding) => {
                check_out(folding.ep(), &folding.handle.routing, folding.kind, &out)?;
            }
        }
        #[cfg_attr(not(feature = "cuda"), expect(clippy::infallible_destructuring_match))]
        let parts = match self.parts.take().expect("just seen") {
            Started::Host(parts) => parts,
            #[cfg(feature = "cuda")]
            Started::Gpu(folding) => return folding.recv(queue, &mut out),
        };
        let _span = tracing::trace_span!("combine_recv", lane = parts.lane.index).entered();
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
        // On a GPU the operation ends itself.
        let Some(Started::Host(parts)) = self.parts.take() else { return };
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
/// The first rank's that fails.
pub fn combine_all(
    queue: &Queue,
    calls: Vec<(Dispatched, Combined<'_>)>,
    opts: &CombineOpts,
) -> Result<Vec<Event>> {
    // All that can fail comes before any rank announces.
    for (result, out) in &calls {
        result.check_combine(out)?;
    }
    #[cfg(feature = "cuda")]
    if calls.iter().any(|(result, _)| result.ep.gpu.is_some()) {
        return all_on_gpu(&[queue], calls, opts);
    }
    host_queue(OP, queue)?;
    let prepared = calls.iter().map(|(result, _)| result.prepare(opts));
    let prepared = prepared.collect::<Result<Vec<_>>>()?;
    let mut started: Vec<(Parts, Combined<'_>)> = Vec::with_capacity(calls.len());
    for ((result, out), prepared) in calls.into_iter().zip(prepared) {
        started.push((result.announce(prepared)?, out));
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
            parts.lane.abandon(parts.slot.detach(), Owing::All);
        }
        return Err(error);
    }
    started.iter().try_for_each(|(parts, _)| parts.push())?;
    started.iter().try_for_each(|(parts, _)| parts.pull())?;
    started.iter_mut().try_for_each(|(parts, out)| parts.sum(out))?;
    started.iter().try_for_each(|(parts, _)| parts.release())?;
    started.into_iter().map(|(parts, _)| parts.settle().map(|()| Event::done())).collect()
}

#[cfg(feature = "cuda")]
fn all_on_gpu(
    queues: &[&Queue],
    calls: Vec<(Dispatched, Combined<'_>)>,
    opts: &CombineOpts,
) -> Result<Vec<Event>> {
    let mut started = Vec::with_capacity(calls.len());
    for (i, (result, out)) in calls.into_iter().enumerate() {
        let ep = result.ep.clone();
        match result.post_on_gpu(queues[i % queues.len()], opts, false) {
            Ok(folding) => started.push((folding, out)),
            Err(error) if started.is_empty() => return Err(error.into()),
            // Ranks that have announced the operation cannot take it back.
            Err(error) => return Err(ep.give_up(OP, error.into())),
        }
    }
    crate::gpu::combine_all(started, queues)
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
        Some(weights) => {
            let need = tokens * ep.shape.topk;
            let bytes = weights.len() * weights.row_bytes();
            let dense = weights.stride() == weights.row_bytes() || weights.len() < 2;
            if bytes == need * 4 && dense && weights.dtype() == DType::F32 {
                return Ok(());
            }
            let room = bytes / 4;
            let detail = format!("{need} weights come home; room for {room} was given");
            Err(EpError::argument(OP, detail))
        }
        _ => Ok(()),
    }
}
