//! Tokens that cross nodes once, on GPUs: the steps of [`crate::node`], submitted to streams.
//!
//! Other nodes count as ranks (`ep_kernels::cuda::moe::NodeKernels` has how): a second layout says which
//! tokens go to each rank of this node and to each other node, and one kernel moves them to the former and
//! packs a block for each of the latter. The host puts the blocks to their rails once the verdict is known.
//! A rail lays out the tokens of each block as if they were its own, with the ranks of its node alone, and
//! moves them by the kernel that moves a rank's own. Places come from announcements, so rows, results and
//! handles are those of a flat dispatch, and so is the way home unless nodes are summed first.
//!
//! Flags: [`Phase::Sent`] says that a rank's blocks are there, [`Phase::Done`] is raised behind what a rank
//! forwards. All ranks raise both and wait for both of all, as pacing needs it (`super::far`).

mod combine;
mod memory;

use ep_kernels::PayloadKind;
use ep_kernels::cuda::moe::{
    BlockArgs, DispatchArgs, ForwardArgs, IdsKind, LayoutArgs, MoeCrossing, MoeHeader, MoeOp,
    MoeRouting, MoeRowFormat, MoeShape, MoeWork,
};
use ep_transport::{Put, Receive};

pub(super) use combine::Homeward;
pub(crate) use memory::NodeSizes;
pub(super) use memory::{HandleNodes, Tables, ToldBlock, ToldNodes};

use crate::Result;
use crate::ep::Inner;
use crate::notify::Phase;

use super::memory::{HandleMemory, Told};
use super::plans::Moving;
use super::{Gpu, Turn};

/// What a layer has for nodes that tokens cross to once.
#[derive(Debug)]
pub(super) struct Crossings {
    /// The layer with nodes behind its ranks, as rows move.
    outward: MoeShape,
    /// The same for layouts, which tell nobody.
    quiet: MoeShape,
    /// The layer, for layouts of blocks.
    inward: MoeShape,
    tables: Tables,
    /// Nodes, and ranks whose tokens this rank forwards.
    nodes: u32,
    incoming: u32,
    max_rows: u32,
    /// What the senders of blocks add to ids for this node.
    offset: u32,
    /// By lane: what layouts of blocks count, which nobody reads.
    lanes: Vec<u64>,
    /// By lane: where rows are on the way home.
    splits: Vec<memory::Split>,
    /// This rank's node.
    own: u32,
}

impl Crossings {
    /// For a layer of that `shape`; `sources`: ranks whose tokens this rank forwards.
    pub fn new(
        shape: &MoeShape,
        tables: Tables,
        (nodes, own, sources): (usize, usize, usize),
        (max_tokens, max_rows): (usize, usize),
        (lanes, splits): (Vec<u64>, Vec<memory::Split>),
    ) -> Self {
        let outward = MoeShape {
            windows: tables.windows,
            rank_of: tables.ranks,
            base: tables.base,
            world: shape.world + 1 + nodes as u32,
            // What is packed has no place in a slot.
            max_rows: shape.max_rows.max(max_tokens as u32),
            ..*shape
        };
        Self {
            outward,
            quiet: MoeShape { windows: tables.silent, far: 0, ..outward },
            inward: MoeShape { windows: tables.silent, far: 0, ..*shape },
            tables,
            nodes: nodes as u32,
            incoming: sources as u32,
            max_rows: max_rows as u32,
            offset: own as u32 * shape.physical,
            lanes,
            splits,
            own: own as u32,
        }
    }
}

impl Gpu {
    /// The most ranks that a kernel knows of: nodes may count as such.
    pub fn columns(&self) -> usize {
        self.crossings.as_ref().map_or(self.shape.world, |all| all.outward.world) as usize
    }

    /// Whether tokens cross nodes once.
    pub(super) fn crosses(&self) -> bool {
        self.crossings.is_some()
    }

    /// What the layer and a handle have for nodes that tokens cross to once.
    fn of_nodes<'a>(
        &'a self,
        memory: &'a HandleMemory,
    ) -> Option<(&'a Crossings, &'a HandleNodes)> {
        self.crossings.as_ref().zip(memory.nodes.as_ref())
    }

    /// Lays out where this rank's tokens go, nodes being one place each. Returns what a layout says of
    /// them.
    pub(super) fn lay_out_nodes(
        &self,
        turn: &Turn,
        memory: &HandleMemory,
        args: LayoutArgs,
    ) -> Result<LayoutArgs> {
        let Some((all, handle)) = self.of_nodes(memory) else {
            return Ok(args);
        };
        let routing = handle.sent(&memory.routing);
        let op = MoeOp { awaited: 0, ..args.op };
        let quiet = LayoutArgs { shape: all.quiet, routing, op, ..args };
        // SAFETY: ids and weights are the caller's, checked; all else is memory of this layer.
        unsafe { self.submit(turn, &MoeWork::Cross(&quiet))? };
        let first = 4 * (u64::from(self.shape.world) + 1);
        Ok(LayoutArgs { crossing: handle.counts + first, nodes: all.nodes, ..args })
    }

    /// What a plan knows of nodes.
    pub(super) fn crossing(&self, memory: &HandleMemory) -> MoeCrossing {
        let Some((all, handle)) = self.of_nodes(memory) else {
            return MoeCrossing::default();
        };
        MoeCrossing {
            node_of: all.tables.node_of,
            rails: all.tables.rails,
            sources: all.tables.sources,
            counts: handle.counts,
            sent_base: handle.sent_base,
            staged: handle.staged,
            places: handle.places,
            expert_places: handle.expert_places,
            nodes: all.nodes,
            incoming: all.incoming,
            max_rows: all.max_rows,
            reserved: 0,
        }
    }

    /// The layer and the routing by which this rank's rows move.
    pub(super) fn outward(&self, memory: &HandleMemory) -> (MoeShape, MoeRouting) {
        match self.of_nodes(memory) {
            Some((all, handle)) => (all.outward, handle.sent(&memory.routing)),
            None => (self.shape, memory.routing),
        }
    }

    /// Once a dispatch's verdict is good, sends this rank's blocks to their rails, and says so.
    pub(super) fn send_blocks(
        &self,
        ep: &Inner,
        turn: &Turn,
        told: &Told,
        stride: usize,
    ) -> Result<()> {
        let (across, rank) = (&ep.across, ep.rank());
        let (nodes, crossing) = (&across.nodes, &told.nodes);
        let lane = self.lane(turn.lane);
        let (send, forward) =
            (ep.window.send_staging(turn.lane), ep.window.forward_staging(turn.lane));
        let mut blocks = lane.blocks.lock();
        blocks.clear();
        let (own, count) = (nodes.of(rank), nodes.count());
        // Not all begin with the same node.
        for node in (1..count).map(|step| (own + step) % count) {
            let rows = |node: usize| crossing.counts[node] as usize;
            let before: usize = (0..node).map(rows).sum();
            let (peer, from) = (nodes.rail(rank, node), send + before * stride);
            let to = forward + crossing.to[node] as usize * stride;
            blocks.sends.push(Put { peer, from, to, bytes: rows(node) * stride });
        }
        let paired = |peer: usize| ep.paired.contains(&peer);
        let sources = across.sources.iter().zip(&crossing.incoming);
        blocks.receives.extend(sources.filter(|(peer, _)| paired(**peer)).map(|(&peer, block)| {
            let to = forward + block.first as usize * stride;
            Receive { peer, to, bytes: block.rows as usize * stride }
        }));
        self.send(ep, turn, ("dispatch, blocks", Phase::Done), &mut blocks)?;
        drop(blocks);
        self.tell_sent(ep, turn)
    }

    /// Forwards the rows of the blocks that come here, behind which all are told.
    pub(super) fn forward(
        &self,
        ep: &Inner,
        turn: &Turn,
        memory: &HandleMemory,
        (kind, cached): (PayloadKind, bool),
    ) -> Result<()> {
        self.await_sent(ep, turn, "dispatch, rows of other nodes")?;
        let told = memory.told()?;
        for (index, block) in told.nodes.incoming.iter().enumerate() {
            if block.rows > 0 {
                self.forward_block(ep, turn, memory, (index, kind, cached))?;
            }
        }
        self.signal(ep, turn, Phase::Done, &ep.flagged)
    }

    fn forward_block(
        &self,
        ep: &Inner,
        turn: &Turn,
        memory: &HandleMemory,
        (index, kind, cached): (usize, PayloadKind, bool),
    ) -> Result<()> {
        let Some((all, handle)) = self.of_nodes(memory) else {
            return Ok(());
        };
        let block = memory.told()?.nodes.incoming[index];
        let format = self.row_format(ep, kind);
        let stride = u64::from(format.stride);
        let staging = ep.local(ep.window.forward_staging(turn.lane)) as u64;
        let records = staging + u64::from(block.first) * stride;
        let routing = self.block_routing(memory, turn, (index, block));
        let numbers = handle.numbers + 4 * u64::from(block.first);
        if !cached {
            self.read_block(ep, turn, (all, format, records), &routing, numbers)?;
        }
        let source = ep.across.sources[index] as u32;
        let rows = DispatchArgs {
            shape: MoeShape { rank: source, ..self.shape },
            routing,
            op: self.op(ep, turn, false),
            format,
            payload: records,
            payload_stride: stride,
            scales: records + u64::from(format.scales_at),
            scales_stride: stride,
            check: false,
            first: 0,
        };
        let plan = self.plan(Moving::Dispatch, format.payload_bytes);
        // SAFETY: the block is within this lane's forward staging by the verdict, and complete behind
        // its sender's flag; the targets are slots that ranks of this node offered for this operation.
        unsafe { self.submit(turn, &MoeWork::Forward(&plan, &ForwardArgs { rows, numbers })) }
    }

    /// Learns where the tokens of a block go.
    fn read_block(
        &self,
        ep: &Inner,
        turn: &Turn,
        (all, format, records): (&Crossings, MoeRowFormat, u64),
        routing: &MoeRouting,
        numbers: u64,
    ) -> Result<()> {
        let block = BlockArgs {
            shape: self.shape,
            lane: all.lanes[turn.lane],
            format,
            records,
            rows: routing.tokens,
            offset: all.offset,
            physical: routing.physical,
            weights: routing.weights,
            numbers,
            blocks: self.sms,
        };
        let args = LayoutArgs {
            shape: all.inward,
            routing: *routing,
            op: MoeOp { lane: all.lanes[turn.lane], ..self.op(ep, turn, false) },
            header: MoeHeader::default(),
            ids: routing.physical,
            ids_kind: IdsKind::I32,
            weights: routing.weights,
            physical_ids: true,
            scratch: self.lane(turn.lane).scratch,
            blocks: self.sms,
            crossing: 0,
            nodes: 0,
        };
        // SAFETY: the block as in `forward_block`; all else is memory of this layer.
        unsafe { self.submit(turn, &MoeWork::Relay(&block, &args)) }
    }

    /// The routing of the tokens of a block that came here, as if they were this rank's.
    fn block_routing(
        &self,
        memory: &HandleMemory,
        turn: &Turn,
        (index, block): (usize, ToldBlock),
    ) -> MoeRouting {
        let Some((all, handle)) = self.of_nodes(memory) else {
            return memory.routing;
        };
        let (world, physical) = (u64::from(self.shape.world), u64::from(self.shape.physical));
        let (counts, at) = (all.lanes[turn.lane] + memory::COUNTS_AT, index as u64);
        let routing = MoeRouting {
            rank_counts: counts,
            expert_counts: counts + 4 * world,
            sent_base: handle.places + 4 * at * world,
            expert_base: handle.expert_places + 4 * at * physical,
            ..handle.incoming(&memory.routing)
        };
        let (first, rows) = (block.first as usize, block.rows as usize);
        routing.of_tokens((first, first + rows), self.shape.topk, self.shape.fan_out)
    }
}
