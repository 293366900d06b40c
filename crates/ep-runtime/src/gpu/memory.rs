//! Handles in device memory, and what they tell the host.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use ep_kernels::cuda::moe::{MoeHandleHeader, MoeRouting, PIECES};
use parking_lot::Mutex;

use crate::ep::Inner;
use crate::handle::HandleInner;
use crate::shape::Resolved;
use crate::{EpError, Result};

use super::machine::Point;
use super::nodes::{HandleNodes, NodeSizes, ToldNodes};
use super::{Gpu, Ticket, Turn, cuda};

/// Arrays in device memory start at multiples of this.
const ALIGN: usize = 256;

/// What the host knows of the rows a dispatch brought.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub rows: usize,
    pub expert_rows: usize,
    pub counts: Vec<i32>,
    pub offsets: Vec<i32>,
    /// Rank-major rows from and to each rank.
    pub from: Vec<u32>,
    pub to: Vec<u32>,
    /// Where there are ranks that are not mapped.
    pub far: ToldFar,
    /// Where tokens cross nodes once.
    pub nodes: ToldNodes,
}

impl Told {
    /// Of a dispatch that brings nothing.
    fn zeros(Counted { experts, ranks, .. }: Counted) -> Self {
        let (counts, offsets) = (vec![0; experts], vec![0; experts + 1]);
        let (from, to) = (vec![0; ranks], vec![0; ranks]);
        Self { counts, offsets, from, to, ..Self::default() }
    }
}

/// What the host has to know of rows for and from ranks that are not mapped; by rank, unless it says
/// more.
#[derive(Debug, Default)]
pub(crate) struct ToldFar {
    /// Where this rank's rows start at each rank.
    pub sent_base: Vec<u32>,
    /// Where rows that go home start in each home's staging, one per token.
    pub home: Vec<u32>,
    /// The same, one per expert.
    pub home_choices: Vec<u32>,
    /// `[R][E]`, rows from each rank for each local expert.
    pub experts: Vec<u32>,
    /// `[P]`, this rank's rows for each physical expert.
    pub sent: Vec<u32>,
    /// `[PIECES][R]`, rows to each rank before each piece of this rank's tokens.
    pub pieces: Vec<u32>,
}

/// How much a summary holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counted {
    pub experts: usize,
    pub ranks: usize,
    pub physical: usize,
    /// Ranks may not be mapped.
    pub far: bool,
    /// Where tokens cross nodes once, how many there are, and the ranks whose tokens one forwards.
    pub nodes: (usize, usize),
}

impl Counted {
    /// The numbers of a summary.
    fn numbers(&self) -> usize {
        let Self { experts, ranks, physical, far, nodes: (nodes, sources) } = *self;
        let near = 2 + experts + experts + 1 + 2 * ranks;
        let crossing = 2 * nodes + 3 * sources;
        near + if far { (3 + experts + PIECES) * ranks + physical + crossing } else { 0 }
    }
}

/// A handle's memory on the device and in page-locked memory.
#[derive(Debug)]
pub(crate) struct HandleMemory {
    pub routing: MoeRouting,
    /// Where tokens cross nodes once.
    pub nodes: Option<HandleNodes>,
    /// Where the GPU writes what [`Told`] holds.
    pub summary: u64,
    /// Its rows go in blocks of fixed size.
    pub fixed: bool,
    sizes: Counted,
    /// Filled while the dispatch still owned the handle.
    told: Told,
    eager: bool,
    /// Filled when somebody asks, and the verdict is good.
    late: OnceLock<Told>,
    /// What is shown where nothing is known.
    nothing: Told,
    /// The dispatch that fills it.
    source: Option<(std::sync::Weak<Inner>, usize, Ticket)>,
    /// The last work of each lane that reads or writes it.
    uses: Mutex<Vec<(usize, Arc<dyn Point>)>>,
    /// The end of the dispatch that fills it, and its lane.
    filled: Mutex<Option<(usize, Arc<dyn Point>)>>,
    /// A graph uses it: it is never given to calls outside of captures.
    captured: AtomicBool,
}

impl HandleMemory {
    /// What the host knows, waiting for it, bounded, if it has to.
    ///
    /// # Errors
    /// The verdict of the dispatch that fills it, if that is bad or does not come.
    pub fn told(&self) -> Result<&Told> {
        if self.eager {
            return Ok(&self.told);
        }
        if let Some(told) = self.late.get() {
            return Ok(told);
        }
        // Held while the summary is read, which goes with it.
        let _layer = self.await_verdict()?;
        Ok(self.late.get_or_init(|| {
            let mut told = Told::default();
            self.read(&mut told);
            told
        }))
    }

    /// As [`HandleMemory::told`]; zeros where that is an error.
    pub fn told_or_zeros(&self) -> &Told {
        self.told().unwrap_or_else(|e| {
            tracing::warn!("a handle has no counts: {e}");
            &self.nothing
        })
    }

    /// Whether the replays of a graph fill it.
    pub fn is_of_a_graph(&self) -> bool {
        !self.eager && matches!(self.source, Some((_, _, Ticket::CAPTURED)))
    }

    /// Waits, bounded, for the verdict of the dispatch that fills it.
    pub fn verdict(&self) -> Result<()> {
        match self.eager || self.late.get().is_some() {
            true => Ok(()),
            false => self.await_verdict().map(drop),
        }
    }

    /// The layer, once the verdict is good.
    fn await_verdict(&self) -> Result<Arc<Inner>> {
        const OP: &str = "dispatch";
        let gone = || EpError::argument(OP, "the layer of the handle is gone, with what it knew");
        let (ep, lane, ticket) = self.source.as_ref().ok_or_else(gone)?;
        let ep = ep.upgrade().ok_or_else(gone)?;
        let gpu = ep.gpu.as_ref().ok_or_else(gone)?;
        gpu.await_verdict(&ep, OP, *lane, *ticket)?;
        Ok(ep)
    }

    /// Reads what the GPU told, once its verdict is known.
    fn read(&self, told: &mut Told) {
        let Counted { experts, ranks, physical, far, nodes: (nodes, sources) } = self.sizes;
        let count = self.sizes.numbers();
        let at = self.summary as *const i32;
        // SAFETY: the summary is page-locked memory of this layer with room for `count` numbers,
        // written before the verdict that was seen; nobody writes it while this handle lives.
        let all = unsafe { std::slice::from_raw_parts(at, count) };
        (told.rows, told.expert_rows) = (all[0] as usize, all[1] as usize);
        let (counts, rest) = all[2..].split_at(experts);
        let (offsets, rest) = rest.split_at(experts + 1);
        told.counts.clear();
        told.counts.extend_from_slice(counts);
        told.offsets.clear();
        told.offsets.extend_from_slice(offsets);
        let mut rest = rest;
        let mut take = |to: &mut Vec<u32>, count: usize| {
            let (these, others) = rest.split_at(count);
            rest = others;
            to.clear();
            to.extend(these.iter().map(|&n| n as u32));
        };
        take(&mut told.from, ranks);
        take(&mut told.to, ranks);
        if far {
            take(&mut told.far.sent_base, ranks);
            take(&mut told.far.home, ranks);
            take(&mut told.far.home_choices, ranks);
            take(&mut told.far.experts, ranks * experts);
            take(&mut told.far.sent, physical);
            take(&mut told.far.pieces, PIECES * ranks);
            take(&mut told.nodes.to, nodes);
            take(&mut told.nodes.counts, nodes);
            told.nodes.read_incoming(&rest[..3 * sources]);
        }
    }

    /// Takes over what the GPU told of a dispatch that is complete on the host.
    pub fn learn(&mut self) {
        let mut told = std::mem::take(&mut self.told);
        self.read(&mut told);
        (self.told, self.eager) = (told, true);
    }

    /// Says which dispatch fills it.
    pub fn filled_by(&mut self, ep: &Arc<Inner>, turn: &Turn, tokens: usize, fixed: bool) {
        self.fixed = fixed;
        (self.eager, self.late) = (false, OnceLock::new());
        self.source = Some((Arc::downgrade(ep), turn.lane, turn.ticket));
        self.routing.tokens = tokens as u32;
    }

    pub fn header(&self) -> u64 {
        self.routing.header
    }

    /// Work up to `point` uses it; work of a graph always may.
    pub fn used_until(&self, point: &Arc<dyn Point>, turn: &Turn) {
        if turn.capturing {
            self.captured.store(true, Ordering::Relaxed);
            return;
        }
        let mut uses = self.uses.lock();
        match uses.iter_mut().find(|known| known.0 == turn.lane) {
            Some(known) => known.1 = point.clone(),
            None => uses.push((turn.lane, point.clone())),
        }
    }

    /// Its routing is complete at `point`.
    pub fn complete_at(&self, point: &Arc<dyn Point>, turn: &Turn) {
        if !turn.capturing {
            *self.filled.lock() = Some((turn.lane, point.clone()));
        }
    }

    /// A graph is about to use it.
    pub fn capture(&self) {
        self.captured.store(true, Ordering::Relaxed);
    }
}

/// How a handle's memory is divided.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HandleSizes {
    offsets: [usize; 21],
    /// Where what is for nodes is, if there is any.
    nodes: Option<(usize, NodeSizes)>,
    /// Bytes of device memory.
    pub device: usize,
    /// Bytes of page-locked memory.
    pub pinned: usize,
}

impl HandleSizes {
    pub fn new(shape: &Resolved, counted: Counted) -> Self {
        let local_experts = counted.experts;
        let far = |bytes: usize| if counted.far { bytes } else { 0 };
        let choices = 4 * shape.max_tokens * shape.topk;
        let fan_out = 4 * shape.max_tokens * shape.topk.min(shape.world);
        let (ranks, physical) = (4 * shape.world, 4 * shape.placement.physical());
        let places = match shape.expert_alignment {
            Some(_) => 4 * shape.max_rows * shape.topk,
            None => 0,
        };
        let blocks = counted.far && shape.blocks.is_some() && shape.expert_alignment.is_some();
        let bytes = [
            size_of::<MoeHandleHeader>(),
            choices,
            choices,
            choices,
            choices,
            fan_out,
            fan_out,
            ranks,
            physical,
            ranks,
            physical,
            physical,
            4 * local_experts,
            4 * (local_experts + 1),
            ranks,
            places,
            places,
            places,
            far(ranks),
            far(ranks * PIECES),
            if blocks { ranks * local_experts } else { 0 },
        ];
        let mut at = 0;
        let offsets = bytes.map(|bytes| {
            let start = at;
            at += bytes.next_multiple_of(ALIGN);
            start
        });
        let nodes = NodeSizes::new(shape).map(|sizes| (at, sizes));
        let device = at + nodes.map_or(0, |(_, sizes)| sizes.per_handle);
        Self { offsets, nodes, device, pinned: (4 * counted.numbers()).next_multiple_of(64) }
    }

    /// What the handle at `base` has for nodes.
    pub fn nodes(&self, base: u64) -> Option<HandleNodes> {
        self.nodes.map(|(at, sizes)| sizes.of_handle(base + at as u64))
    }

    pub fn routing(&self, base: u64) -> MoeRouting {
        let [
            header,
            physical,
            expert_index,
            order,
            weights,
            dest_rank,
            dest_index,
            rank_counts,
            expert_counts,
            sent_base,
            expert_base,
            expert_offsets,
            counts,
            offsets,
            received,
            positions,
            choices,
            row_weights,
            staged,
            pieces,
            experts_from,
        ] = self.offsets.map(|at| base + at as u64);
        MoeRouting {
            header,
            physical,
            expert_index,
            order,
            weights,
            dest_rank,
            dest_index,
            rank_counts,
            expert_counts,
            sent_base,
            expert_base,
            expert_offsets,
            counts,
            offsets,
            received,
            positions,
            choices,
            row_weights,
            staged,
            pieces,
            experts_from,
            tokens: 0,
            reserved: 0,
        }
    }
}

/// All handles of a layer; their memory was taken when it was built.
#[derive(Debug)]
pub(crate) struct Handles {
    all: Mutex<Vec<Arc<HandleInner>>>,
    count: usize,
}

impl Handles {
    pub fn new(
        count: usize,
        (ep, rank): (u64, usize),
        sizes: &HandleSizes,
        (device, pinned): (u64, u64),
        counted: Counted,
    ) -> Self {
        let handle = |i: usize| {
            let mut handle = HandleInner::new(ep, rank);
            let base = device + (i * sizes.device) as u64;
            handle.gpu = Some(HandleMemory {
                routing: sizes.routing(base),
                nodes: sizes.nodes(base),
                summary: pinned + (i * sizes.pinned) as u64,
                fixed: false,
                sizes: counted,
                told: Told::default(),
                eager: false,
                late: OnceLock::new(),
                nothing: Told::zeros(counted),
                source: None,
                uses: Mutex::default(),
                filled: Mutex::default(),
                captured: AtomicBool::new(false),
            });
            Arc::new(handle)
        };
        Self { all: Mutex::new((0..count).map(handle).collect()), count }
    }
}

impl Gpu {
    /// A handle that nobody refers to and that the lane's stream may fill.
    pub(super) fn take_handle(&self, op: &'static str, turn: &Turn) -> Result<Arc<HandleInner>> {
        let mut all = self.handles.all.lock();
        let fits = |h: &mut Arc<HandleInner>| {
            let Some(handle) = Arc::get_mut(h) else { return false };
            handle
                .gpu
                .as_ref()
                .is_some_and(|g| g.captured.load(Ordering::Relaxed) == turn.capturing)
        };
        let found = all.iter_mut().rposition(fits).or_else(|| {
            // A graph takes one from the others for good.
            let idle = |h: &mut Arc<HandleInner>| Arc::get_mut(h).is_some();
            turn.capturing.then(|| all.iter_mut().position(idle)).flatten()
        });
        let Some(found) = found else {
            return Err(EpError::NoFreeHandle { op, handles: self.handles.count });
        };
        let handle = all.swap_remove(found);
        drop(all);
        if let Some(memory) = &handle.gpu {
            *memory.filled.lock() = None;
            if turn.capturing {
                memory.capture();
            } else {
                for (_, point) in memory.uses.lock().drain(..) {
                    // SAFETY: the lane's stream is live.
                    unsafe { point.order(self.lane(turn.lane).stream())? };
                }
            }
        }
        Ok(handle)
    }

    /// Lets the lane's stream wait for the dispatch that fills a handle, which may have been on
    /// another lane and received on another queue than the one it is used with.
    pub(super) fn after_filling(&self, memory: &HandleMemory, turn: &Turn) -> Result<()> {
        match &*memory.filled.lock() {
            // SAFETY: the lane's stream is live.
            Some((lane, point)) if *lane != turn.lane && !turn.capturing => unsafe {
                cuda(point.order(self.lane(turn.lane).stream()))
            },
            _ => Ok(()),
        }
    }

    /// Keeps a handle: once all others have dropped it, it will be taken again.
    pub(super) fn keep_handle(&self, handle: &Arc<HandleInner>) {
        self.handles.all.lock().push(handle.clone());
    }
}
