//! Micro-batches that overlap: dispatch of one, experts of the one before, combine of the one before
//! that.

mod host;
#[cfg(feature = "cuda")]
mod stream;

use std::fmt::Display;
use std::time::{Duration, Instant};

use super::timeline::{Stage, Timeline};
use crate::payload;
use crate::{
    CombineOpts, Combined, DispatchOpts, Dispatched, Ep, EpError, ErrorKind, Event, Payload, Queue,
    Result, Route,
};

const OP: &str = "pipeline";
/// Results alive at once: one being received, one at the experts, one being combined.
const RESULTS: usize = 3;

/// The tokens of one micro-batch, where they go, and where their sums come to.
#[derive(Debug)]
pub struct MicroBatch<'a> {
    /// The rows.
    pub payload: Payload<'a>,
    /// Their experts.
    pub route: Route<'a>,
    /// As many rows as the payload has, and what goes with them.
    pub out: Combined<'a>,
}

impl<'a> MicroBatch<'a> {
    /// A micro-batch.
    pub fn new(payload: Payload<'a>, route: Route<'a>, out: impl Into<Combined<'a>>) -> Self {
        Self { payload, route, out: out.into() }
    }
}

/// Runs micro-batches through a layer so that communication hides behind the experts: while those of
/// micro-batch *i* run, *i* + 1 is dispatched and *i* − 1 combined. The results are those of one after
/// the other, bit by bit.
///
/// On the host a thread of each run communicates while the calling thread runs the experts. On a GPU
/// the calling thread submits everything; two streams of the pipeline carry what dispatch and combine
/// wait for, so that neither waits for experts it does not need.
///
/// ```
/// use ep_runtime::sched::{MicroBatch, Pipeline};
/// use ep_runtime::{
///     EpBuilder, EpError, Group, Ids, MoeShape, Payload, PayloadKind, Queue, Route, Rows, RowsMut,
/// };
///
/// const HIDDEN: usize = 64;
///
/// fn rank(group: Group) -> Result<Vec<f32>, Box<dyn std::error::Error + Send + Sync>> {
///     let shape = MoeShape::new(HIDDEN, 1, 4).max_tokens(2).payload(PayloadKind::F32);
///     let pipeline = Pipeline::new(&EpBuilder::new(shape).build(&group)?)?;
///     let (tokens, ids) = (vec![1.0f32; 8 * HIDDEN], [0, 1, 2, 3, 0, 1, 2, 3]);
///     let mut sums = vec![0.0f32; 8 * HIDDEN];
///     let batches = tokens
///         .chunks(2 * HIDDEN)
///         .zip(ids.chunks(2))
///         .zip(sums.chunks_mut(2 * HIDDEN))
///         .map(|((rows, ids), out)| {
///             let payload = Payload::new(Rows::new(rows, HIDDEN)?)?;
///             let route = Route::Topk { ids: Ids::I32(ids), weights: None };
///             Ok(MicroBatch::new(payload, route, RowsMut::new(out, HIDDEN)?))
///         })
///         .collect::<Result<Vec<_>, EpError>>()?;
///     pipeline.run(&Queue::host(), batches, |batch, rows| {
///         let mut outputs = rows.rows_mut(PayloadKind::F32)?;
///         for i in 0..outputs.payload().len() {
///             outputs.payload().row_mut::<f32>(i).fill(batch as f32);
///         }
///         Ok::<(), EpError>(())
///     })?;
///     Ok(sums)
/// }
///
/// let ranks = Group::local(2)?.into_iter().map(|group| std::thread::spawn(move || rank(group)));
/// for rank in ranks.collect::<Vec<_>>() {
///     let sums = rank.join().expect("no panic").expect("a run without errors");
///     assert_eq!((sums[0], sums[6 * HIDDEN]), (0.0, 3.0));
/// }
/// # Ok::<(), EpError>(())
/// ```
#[derive(Debug)]
pub struct Pipeline {
    ep: Ep,
    dispatch: DispatchOpts,
    combine: CombineOpts,
    timeline: Option<Timeline>,
    #[cfg(feature = "cuda")]
    streams: Option<stream::Streams>,
}

/// Why a pipeline ended early. Micro-batches before the one it names were combined; the slots of all
/// others are free.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError<E> {
    /// The caller's closure failed. The group was told, so the pipeline ends on every rank; it has to
    /// be rebuilt.
    #[error("experts of micro-batch {batch}: {error}")]
    Experts {
        /// The micro-batch.
        batch: usize,
        /// The closure's error.
        error: E,
    },
    /// Communication failed. Whether the group is still usable the error says.
    #[error("{stage} of micro-batch {batch}: {error}")]
    Communication {
        /// What failed.
        stage: Stage,
        /// The micro-batch.
        batch: usize,
        /// Why.
        #[source]
        error: EpError,
    },
    /// The run could not start. Nothing was sent.
    #[error(transparent)]
    Start(EpError),
}

impl<E> PipelineError<E> {
    /// Whether the group can still be used: see [`EpError::group_usable`].
    pub fn group_usable(&self) -> bool {
        match self {
            Self::Experts { .. } => false,
            Self::Communication { error, .. } | Self::Start(error) => error.group_usable(),
        }
    }
}

/// Communication's part of an error.
struct Failed {
    stage: Stage,
    batch: usize,
    error: EpError,
}

impl<E> From<Failed> for PipelineError<E> {
    fn from(Failed { stage, batch, error }: Failed) -> Self {
        Self::Communication { stage, batch, error }
    }
}

/// What a run submitted. On the host all of it has happened.
#[derive(Clone, Debug, Default)]
pub struct Finished {
    events: Vec<Event>,
}

impl Finished {
    /// Whether all sums are there, or never will be.
    pub fn ready(&self) -> bool {
        self.events.iter().all(Event::ready)
    }

    /// Waits for all sums on the calling thread.
    ///
    /// # Errors
    /// The first micro-batch's that has one: see [`Event::wait`].
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        self.events.iter().try_for_each(|event| event.wait(timeout.saturating_sub(start.elapsed())))
    }
}

impl Pipeline {
    /// A pipeline over `ep`, which dispatches on lane 0 and combines on lane 1.
    ///
    /// # Errors
    /// A layer with fewer than 2 lanes or 3 slots; on a GPU, streams that cannot be made.
    pub fn new(ep: &Ep) -> Result<Self> {
        let (lanes, slots) = (ep.inner.lanes.len(), ep.inner.slots.count());
        if lanes < 2 || slots < RESULTS {
            let detail = format!(
                "a pipeline takes 2 lanes and {RESULTS} slots; the layer has {lanes} and {slots}"
            );
            return Err(EpError::argument(OP, detail));
        }
        Ok(Self {
            ep: ep.clone(),
            dispatch: DispatchOpts::default(),
            combine: CombineOpts { lane: Some(1), ..CombineOpts::default() },
            timeline: None,
            #[cfg(feature = "cuda")]
            streams: stream::Streams::new(ep)?,
        })
    }

    /// How micro-batches are dispatched, and on which lane.
    pub fn dispatch_opts(mut self, opts: DispatchOpts) -> Self {
        self.dispatch = opts;
        self
    }

    /// How they are combined, and on which lane: another than dispatch's; without one on lane 1.
    pub fn combine_opts(mut self, opts: CombineOpts) -> Self {
        self.combine = CombineOpts { lane: Some(opts.lane.unwrap_or(1)), ..opts };
        self
    }

    /// Records when stages start and end.
    pub fn timeline(mut self, timeline: &Timeline) -> Self {
        self.timeline = Some(timeline.clone());
        self
    }

    /// Runs all micro-batches. Collective: the same number of them on every rank; a rank with fewer
    /// tokens passes micro-batches without any. `experts` gets each one's number and rows in order,
    /// and leaves in them, by [`Dispatched::rows_mut`], what is combined. On a GPU it submits to the
    /// stream `queue`, which also waits for all sums in the end.
    ///
    /// Uses three result slots, or as many as there are micro-batches. On the host each run of two or
    /// more starts a thread.
    ///
    /// # Errors
    /// [`PipelineError::Start`] for bad arguments, a busy lane or too few free slots, with nothing
    /// sent. Whatever ends the pipeline on one rank ends it on all: refusals that are the same on every
    /// rank leave the group usable; after an error of a rank's own, its closure's included, the other
    /// ranks get [`ErrorKind::Aborted`] naming the rank, and the group has to be rebuilt. A panic of
    /// the closure is passed on after the group was told.
    pub fn run<'a, E: Display>(
        &self,
        queue: &Queue,
        batches: impl IntoIterator<Item = MicroBatch<'a>>,
        experts: impl FnMut(usize, &mut Dispatched) -> Result<(), E>,
    ) -> Result<Finished, PipelineError<E>> {
        let batches: Vec<MicroBatch<'a>> = batches.into_iter().collect();
        self.check(queue, &batches).map_err(PipelineError::Start)?;
        let _span = tracing::debug_span!("pipeline", batches = batches.len()).entered();
        #[cfg(feature = "cuda")]
        if let Some(streams) = &self.streams {
            return self.run_on_streams(streams, queue, batches, experts);
        }
        self.run_on_host(batches, experts)
    }

    /// Everything that can be seen before anything is sent.
    fn check(&self, queue: &Queue, batches: &[MicroBatch<'_>]) -> Result<()> {
        let ep = &self.ep.inner;
        let (dispatch, combine) = (self.dispatch.lane, self.combine.lane.unwrap_or(1));
        if dispatch == combine {
            let detail = format!("dispatch and combine are both on lane {dispatch}");
            return Err(EpError::argument(OP, detail));
        }
        if queue.is_host() != (ep.place == crate::Memory::Host) {
            let detail = "the queue is not where the layer works".to_owned();
            return Err(EpError::argument(OP, detail));
        }
        for (i, MicroBatch { payload, route, out }) in batches.iter().enumerate() {
            payload::check(OP, ep, payload, route, &self.dispatch)?;
            let (tokens, sums) = (payload.rows.len(), out.rows.len());
            if tokens != sums {
                let detail =
                    format!("micro-batch {i} has {tokens} tokens and room for {sums} sums");
                return Err(EpError::argument(OP, detail));
            }
        }
        let need = batches.len().min(RESULTS);
        if need == 0 {
            return Ok(());
        }
        [dispatch, combine].into_iter().try_for_each(|lane| ep.could_start(OP, lane, true))?;
        if ep.slots.free() < need {
            return Err(EpError::NoFreeSlot { op: OP, slots: ep.slots.count() });
        }
        Ok(())
    }

    /// A rank's own error in the middle ends the group: the others count on this rank. A verdict is
    /// everyone's anyway.
    fn failed(&self, stage: Stage, batch: usize, error: EpError) -> Failed {
        let first = stage == Stage::Dispatch && batch == 0;
        let error = match error.kind() {
            ErrorKind::Mismatch => error,
            _ if first => error,
            _ => self.ep.inner.give_up(OP, error),
        };
        Failed { stage, batch, error }
    }

    /// Tells the group that the experts of this rank failed.
    fn experts_failed<E: Display>(&self, batch: usize, error: E) -> PipelineError<E> {
        let error = PipelineError::Experts { batch, error };
        self.ep.group().abort(&error.to_string());
        error
    }

    fn record(&self, stage: Stage, batch: usize, start: Instant) {
        if let Some(timeline) = &self.timeline {
            timeline.record(self.ep.rank(), stage, batch, (start, Instant::now()));
        }
    }
}

/// Tells the group if the experts panic, so that no rank waits for this one.
struct Panicking<'a>(&'a Ep);

impl Drop for Panicking<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.group().abort("the experts of a pipeline panicked");
        }
    }
}
