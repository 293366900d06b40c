//! Combine with one row per (token, node): [`Precision::NodeReduced`](crate::Precision::NodeReduced).
//!
//! A rail sums the rows of each token it forwarded over the ranks of its node and sends the sums home. There
//! the rows of the token's own node are summed alike, and then the sums of all nodes, in their order: by the
//! kernel that sums ranks, with nodes in their place.

use ep_kernels::cuda::moe::{
    CombineArgs, MAX_BIASES, MoeOp, MoeOutFormat, MoeRouting, MoeShape, MoeWork, NodeSum, SplitArgs,
};
use ep_transport::{Put, Receive};

use crate::Result;
use crate::ep::Inner;
use crate::notify::Phase;

use super::super::memory::{HandleMemory, Told};
use super::super::plans::Moving;
use super::super::{Gpu, Turn};
use super::memory::Split;
use super::{Crossings, HandleNodes};

/// A combine as far as its sums are concerned.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct Homeward<'a> {
    /// What a combine of ranks would be told.
    pub args: &'a CombineArgs,
    /// Rows of sums that travel.
    pub crossing: MoeOutFormat,
    pub memory: &'a HandleMemory,
}

impl Homeward<'_> {
    /// Sums of `routing` at `out`, which carry their weights.
    fn sums(&self, shape: MoeShape, routing: MoeRouting, out: u64) -> CombineArgs {
        CombineArgs {
            shape,
            routing,
            out,
            out_stride: u64::from(self.crossing.stride),
            biases: [(0, 0); MAX_BIASES],
            bias_count: 0,
            weights_home: 0,
            carried_at: self.crossing.weights_at,
            check: false,
            ..*self.args
        }
    }
}

impl Gpu {
    /// Once a combine's verdict is good, sums the rows of tokens that this rank forwarded and sends them
    /// home.
    pub(in crate::gpu) fn send_sums(
        &self,
        ep: &Inner,
        turn: &Turn,
        home: &Homeward<'_>,
    ) -> Result<()> {
        let told = home.memory.told()?;
        let forward = ep.window.forward_staging(turn.lane);
        let stride = home.crossing.stride as usize;
        for (index, block) in told.nodes.incoming.iter().enumerate().filter(|(_, b)| b.rows > 0) {
            let routing = self.block_routing(home.memory, turn, (index, *block));
            let out = ep.local(forward + block.first as usize * stride) as u64;
            let args = home.sums(self.shape, routing, out);
            // SAFETY: rows are in slots that ranks of this node announced for this operation; forward
            // staging has room for as many sums as rows were forwarded, and is this rank's own until
            // its next announcement.
            unsafe { self.sum(turn, NodeSum::Block, &args)? };
        }
        let mut blocks = self.lane(turn.lane).blocks.lock();
        blocks.clear();
        sends(ep, turn, told, stride, &mut blocks.sends);
        receives(ep, turn, told, stride, &mut blocks.receives);
        self.send(ep, turn, ("combine, blocks", Phase::Done), &mut blocks)
    }

    /// Sums the rows of this rank's tokens over its node.
    pub(in crate::gpu) fn sum_own(
        &self,
        ep: &Inner,
        turn: &Turn,
        home: &Homeward<'_>,
    ) -> Result<()> {
        let Some((all, handle)) = self.of_nodes(home.memory) else { return Ok(()) };
        let split = all.splits[turn.lane];
        let args = SplitArgs {
            shape: self.shape,
            routing: handle.sent(&home.memory.routing),
            own: all.own,
            near_rank: split.near_rank,
            near_index: split.near_index,
            near_order: split.near_order,
            node_rank: split.node_rank,
            node_index: split.node_index,
            blocks: self.sms,
        };
        // SAFETY: all addresses are of this layer's memory.
        unsafe { self.submit(turn, &MoeWork::Split(&args))? };
        let out = ep.local(ep.window.send_staging(turn.lane)) as u64;
        let args = home.sums(self.shape, split.near(&home.memory.routing), out);
        // SAFETY: as in `send_sums`; there is room for a row per token where rows are packed, which
        // nothing is during a combine.
        unsafe { self.sum(turn, NodeSum::Own, &args) }
    }

    /// Sums the nodes' rows of this rank's tokens, once those of other nodes have come.
    pub(in crate::gpu) fn sum_nodes(
        &self,
        ep: &Inner,
        turn: &Turn,
        home: &Homeward<'_>,
    ) -> Result<()> {
        let Some((all, handle)) = self.of_nodes(home.memory) else { return Ok(()) };
        let routing = all.splits[turn.lane].nodes(all, handle, &home.memory.routing);
        let args = CombineArgs {
            shape: MoeShape {
                windows: all.tables.node_windows,
                rank_of: all.tables.node_ranks,
                world: all.nodes,
                // This node's sums are at one place, whatever was announced.
                slots_at: ep.window.send_staging(turn.lane) as u64,
                slot_bytes: 0,
                message: 0,
                ..self.shape
            },
            routing,
            op: MoeOp { ..home.args.op },
            format: home.crossing,
            per_rank: true,
            weighted: false,
            carried_at: 0,
            check: false,
            ..*home.args
        };
        // SAFETY: `out` and biases are the caller's, checked; rows are in this lane's staging, complete
        // behind the flags of those who sent them.
        unsafe { self.sum(turn, NodeSum::All, &args) }
    }

    unsafe fn sum(&self, turn: &Turn, which: NodeSum, args: &CombineArgs) -> Result<()> {
        let plan = self.plan(Moving::Combine, args.hidden * args.dtype.size() as u32);
        // SAFETY: by this function's contract, which is that of `Gpu::submit`.
        unsafe { self.submit(turn, &MoeWork::NodeSum(which, &plan, args)) }
    }
}

/// The sums that go home from here, a block per source.
fn sends(ep: &Inner, turn: &Turn, told: &Told, stride: usize, to: &mut Vec<Put>) {
    let (forward, receive) =
        (ep.window.forward_staging(turn.lane), ep.window.receive_staging(turn.lane));
    let sources = ep.across.sources.iter().zip(&told.nodes.incoming);
    to.extend(sources.map(|(&peer, block)| Put {
        peer,
        from: forward + block.first as usize * stride,
        to: receive + block.home as usize * stride,
        bytes: block.rows as usize * stride,
    }));
}

/// The sums that come home from ranks that rows are exchanged with, a block per node.
fn receives(ep: &Inner, turn: &Turn, told: &Told, stride: usize, to: &mut Vec<Receive>) {
    let (nodes, rank) = (&ep.across.nodes, ep.rank());
    let mut at = ep.window.receive_staging(turn.lane);
    for node in (0..nodes.count()).filter(|&node| node != nodes.of(rank)) {
        let (peer, bytes) = (nodes.rail(rank, node), told.nodes.counts[node] as usize * stride);
        if ep.paired.contains(&peer) {
            to.push(Receive { peer, to: at, bytes });
        }
        at += bytes;
    }
}

impl Split {
    /// The routing of tokens with this node's ranks alone.
    fn near(&self, routing: &MoeRouting) -> MoeRouting {
        MoeRouting {
            dest_rank: self.near_rank,
            dest_index: self.near_index,
            order: self.near_order,
            ..*routing
        }
    }

    /// The routing of tokens with nodes in the place of ranks.
    fn nodes(&self, all: &Crossings, handle: &HandleNodes, routing: &MoeRouting) -> MoeRouting {
        let first = 4 * u64::from(all.outward.world - all.nodes);
        MoeRouting {
            dest_rank: self.node_rank,
            dest_index: self.node_index,
            // No rank's place, so 0.
            sent_base: handle.sent_base + first,
            staged: handle.staged + first,
            ..*routing
        }
    }
}
