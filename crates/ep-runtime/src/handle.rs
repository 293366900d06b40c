//! What a dispatch decided, to be used again by combine, cached dispatches and backward passes.

use std::sync::Arc;

use ep_kernels::host::Expander;
use ep_kernels::{CountMatrix, Layout as Routing, RecordFormat};
use parking_lot::Mutex;

use crate::node::Crossing;
use crate::notify::Counts;
use crate::shape::Resolved;
use crate::{Layout, Result};

/// The routing of one dispatch: who sent which token where.
///
/// Cheap to clone; valid for the [`Ep`](crate::Ep) it came from, on every rank of which the handle
/// of the same dispatch has to be passed.
#[derive(Clone, Debug)]
pub struct Handle {
    pub(crate) routing: Arc<HandleInner>,
}

/// Filled by one dispatch, then only read. The buffers are used again once no handle refers to
/// them.
#[derive(Debug)]
pub(crate) struct HandleInner {
    /// The `Ep` of this rank that made it.
    pub ep: u64,
    /// This rank.
    pub rank: usize,
    /// The dispatch it came from; the same number on every rank.
    pub id: u64,
    pub layout: Layout,
    /// The lane of that dispatch.
    pub lane: usize,
    /// Where this rank's tokens go.
    pub send: Routing,
    /// Top-k weights of this rank's tokens `[T, K]`; empty if none were given.
    pub weights: Vec<f32>,
    pub matrix: CountMatrix,
    /// What crosses nodes, where tokens do so once.
    pub crossing: Crossing,
    /// Rank-major rows received.
    pub rows: usize,
    /// Expert-major rows received, padding included.
    pub expert_rows: usize,
    /// Expert-major: the first row of every physical expert on its rank.
    pub expert_offsets: Vec<i32>,
    /// Received tokens per local expert.
    pub counts: Vec<i32>,
    /// Expert-major: first row of each local expert, and the end.
    pub offsets: Vec<i32>,
    /// Expert-major: where the received rows went.
    pub received: Received,
    #[cfg(feature = "cuda")]
    pub gpu: Option<crate::gpu::HandleMemory>,
}

/// The receiver's side of an expert-major dispatch.
#[derive(Debug, Default)]
pub(crate) struct Received {
    pub expander: Expander,
    /// Local expert ids `[rows, K]`, -1 where an expert is elsewhere.
    pub ids: Vec<i32>,
    /// Top-k weights `[rows, K]`.
    pub weights: Vec<f32>,
}

impl Received {
    /// Keeps what combine needs of the received records: the slot's bytes will be overwritten.
    ///
    /// # Safety
    /// `from` holds `rows` received records of this format.
    pub unsafe fn keep_metadata(&mut self, format: &RecordFormat, from: *const u8, rows: usize) {
        self.ids.clear();
        self.weights.clear();
        for row in 0..rows {
            // SAFETY: by this function's contract; parts of a record are aligned to 16.
            unsafe {
                let record = from.add(row * format.stride);
                let ids = record.add(format.ids_at).cast::<i32>();
                self.ids.extend_from_slice(std::slice::from_raw_parts(ids, format.topk));
                let weights = record.add(format.weights_at).cast::<f32>();
                self.weights.extend_from_slice(std::slice::from_raw_parts(weights, format.topk));
            }
        }
    }
}

impl HandleInner {
    pub fn new(ep: u64, rank: usize) -> Self {
        Self {
            ep,
            rank,
            id: 0,
            layout: Layout::RankMajor,
            lane: 0,
            send: Routing::default(),
            weights: Vec::new(),
            matrix: CountMatrix::new(),
            crossing: Crossing::default(),
            rows: 0,
            expert_rows: 0,
            expert_offsets: Vec::new(),
            counts: Vec::new(),
            offsets: Vec::new(),
            received: Received::default(),
            #[cfg(feature = "cuda")]
            gpu: None,
        }
    }

    /// What this rank announces of its rows.
    pub fn counts(&self) -> Counts<'_> {
        let (send, node) = (&self.send, &self.crossing.counts);
        Counts { expert: &send.expert_counts, rank: &send.rank_counts, node }
    }

    /// What a GPU told of a dispatch, where the host did not lay it out itself.
    #[cfg(feature = "cuda")]
    pub fn told(&self) -> Option<&crate::gpu::Told> {
        self.gpu.as_ref().map(|gpu| gpu.told_or_zeros())
    }

    /// Derives everything that follows from the count matrix.
    pub fn finish(&mut self, shape: &Resolved) {
        let rank = self.rank;
        self.rows = self.matrix.rows_at(rank);
        self.matrix.counts(rank, &mut self.counts);
        self.expert_offsets.clear();
        self.expert_rows = 0;
        if let Layout::ExpertMajor { alignment } = self.layout {
            for owner in 0..shape.world {
                self.matrix.expert_offsets(owner, alignment, &mut self.offsets);
                let firsts = &self.offsets[..self.offsets.len() - 1];
                self.expert_offsets.extend_from_slice(firsts);
            }
            self.matrix.expert_offsets(rank, alignment, &mut self.offsets);
            self.expert_rows = self.matrix.expert_rows(rank, alignment);
        } else {
            self.matrix.expert_offsets(rank, 1, &mut self.offsets);
        }
    }
}

impl Handle {
    /// The tokens this rank sent.
    pub fn tokens(&self) -> usize {
        self.routing.send.tokens
    }

    /// The rows this rank received: rank-major rows, or expert-major rows with padding. In capacity
    /// mode on a GPU this waits, bounded, until the GPU knows; 0 where [`Handle::verdict`] is an error:
    /// nothing came. The same holds for the other numbers here.
    pub fn num_rows(&self) -> usize {
        #[cfg(feature = "cuda")]
        if let Some(told) = self.routing.told() {
            return match self.routing.layout {
                Layout::RankMajor => told.rows,
                Layout::ExpertMajor { .. } => told.expert_rows,
            };
        }
        match self.routing.layout {
            Layout::RankMajor => self.routing.rows,
            Layout::ExpertMajor { .. } => self.routing.expert_rows,
        }
    }

    /// Whether the dispatch that made it went through: in capacity mode on a GPU this waits, bounded, until
    /// the GPU knows, else it is known. Never later than [`Handle::num_rows`] and the other numbers.
    ///
    /// # Errors
    /// What the ranks refused the dispatch for, however late that is asked for; a time-out, a lost peer or
    /// an abort; [`EpError::Forgotten`](crate::EpError::Forgotten); bad arguments for a dispatch that was
    /// captured into a graph, and once the layer is gone.
    pub fn verdict(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.routing.gpu {
            return gpu.verdict();
        }
        Ok(())
    }

    /// How the rows are laid out.
    pub fn layout(&self) -> Layout {
        self.routing.layout
    }

    /// The tokens received for each local expert, `[E_local]`, without padding.
    pub fn counts(&self) -> &[i32] {
        #[cfg(feature = "cuda")]
        if let Some(told) = self.routing.told() {
            return &told.counts;
        }
        &self.routing.counts
    }

    /// The first row of each local expert and the end, `[E_local + 1]`. Rank-major rows are not
    /// grouped by expert; there it is the running sum of the counts.
    pub fn offsets(&self) -> &[i32] {
        #[cfg(feature = "cuda")]
        if let Some(told) = self.routing.told() {
            return &told.offsets;
        }
        &self.routing.offsets
    }

    /// The rank-major rows (one per token and rank) received from rank `source`.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn rows_from(&self, source: usize) -> usize {
        #[cfg(feature = "cuda")]
        if let Some(told) = self.routing.told() {
            return told.from[source] as usize;
        }
        self.routing.matrix.received(source)
    }

    /// The rank-major rows (one per token and rank) sent to `rank`.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn rows_to(&self, rank: usize) -> usize {
        #[cfg(feature = "cuda")]
        if let Some(told) = self.routing.told() {
            return told.to[rank] as usize;
        }
        self.routing.send.rank_counts[rank] as usize
    }
}

/// Handles that were used before, so that a dispatch allocates nothing once warm.
#[derive(Debug)]
pub(crate) struct HandlePool {
    ep: u64,
    rank: usize,
    all: Mutex<Vec<Arc<HandleInner>>>,
}

impl HandlePool {
    pub fn new(ep: u64, rank: usize) -> Self {
        Self { ep, rank, all: Mutex::default() }
    }

    /// A handle nobody else refers to. It leaves the pool, so that it can be filled.
    pub fn take(&self) -> Arc<HandleInner> {
        let mut all = self.all.lock();
        // The one used last is the warmest.
        match all.iter_mut().rposition(|h| Arc::get_mut(h).is_some()) {
            Some(free) => all.swap_remove(free),
            None => Arc::new(HandleInner::new(self.ep, self.rank)),
        }
    }

    /// Keeps a filled handle: once all others have dropped it, it will be taken again.
    pub fn keep(&self, handle: &Arc<HandleInner>) {
        self.all.lock().push(handle.clone());
    }
}
