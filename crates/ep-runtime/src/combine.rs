//! Combine: expert outputs back to the ranks their tokens came from, reduced per token.
//!
//! Every owner announces that its rows are ready; home ranks read mapped owners' rows where they
//! are, while owners that are not mapped send their block; then every rank says that it has read.
//! Only then may an owner's slot be used again. The steps are in [`crate::fold`].

use ep_kernels::PayloadKind;
use ep_transport::Queue;

use crate::ep::Inner;
use crate::fold::{Parts, reduce_experts};
use crate::handle::HandleInner;
use crate::lane::LaneGuard;
use crate::notify::{self, Header, Phase};
use crate::result::Dispatched;
use crate::shape::OutFormat;
use crate::{EpError, Event, Layout, Result, Rows, RowsMut};

pub(crate) const OP: &str = "combine";

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
    pub(crate) rows: RowsMut<'a>,
    pub(crate) biases: &'a [Rows<'a>],
    pub(crate) weights: Option<&'a mut [f32]>,
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
        let _span = tracing::trace_span!("combine_send", lane = self.lane).entered();
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
