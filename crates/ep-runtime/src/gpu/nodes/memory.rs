//! Device memory for tokens that cross nodes once: tables of a layer, and what handles hold.

use ep_kernels::Placement;
use ep_kernels::cuda::moe::{MoeLane, MoeRouting};
use ep_kernels::cuda::{DeviceMemory, Stream};

use crate::Result;
use crate::node::Across;
use crate::shape::Resolved;

use super::super::build::SETUP;

/// Arrays start at multiples of this.
const ALIGN: usize = 256;
/// Where a lane's counts are, behind what stands for its state.
pub(super) const COUNTS_AT: u64 = ALIGN as u64;

/// Where arrays of so many bytes are if they follow each other, and where they end.
fn follow<const N: usize>(bytes: [usize; N]) -> ([usize; N], usize) {
    let mut end = 0;
    let starts = bytes.map(|bytes| {
        let start = end;
        end += bytes.next_multiple_of(ALIGN);
        start
    });
    (starts, end)
}

/// How memory for nodes is divided.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeSizes {
    /// Ranks, one that nobody is, and the most nodes.
    pub columns: usize,
    tables: [usize; 9],
    lanes_at: usize,
    lane: usize,
    splits: [usize; 5],
    /// Bytes of a layer's tables and lanes.
    pub device: usize,
    handle: [usize; 14],
    /// Bytes of a handle.
    pub per_handle: usize,
}

impl NodeSizes {
    /// `None` where nothing crosses nodes, or each token as often as it has ranks there.
    pub fn new(shape: &Resolved) -> Option<Self> {
        if shape.nodes < 2 {
            return None;
        }
        let (world, physical, sources) = (shape.world, shape.placement.physical(), shape.sources);
        let columns = world + 1 + shape.nodes;
        let (tables, lanes_at) = follow([
            8 * columns,
            8 * columns,
            4 * physical,
            4 * (columns + 1),
            4 * world,
            4 * world * shape.nodes,
            4 * sources,
            8 * shape.nodes,
            4 * physical,
        ]);
        let (tokens, rows) = (shape.max_tokens, shape.max_forward_rows);
        let (topk, fan_out) = (4 * shape.topk, 4 * shape.topk.min(world));
        let counts = ALIGN + (4 * (world + physical)).next_multiple_of(ALIGN);
        let dests = tokens * fan_out;
        let (splits, split) = follow([dests, dests, tokens * topk, dests, dests]);
        let (splits, lane) = (splits.map(|at| counts + at), counts + split);
        let (handle, per_handle) = follow([
            tokens * fan_out,
            tokens * fan_out,
            4 * columns,
            4 * columns,
            4 * columns,
            4 * sources * world,
            4 * sources * physical,
            rows * topk,
            rows * topk,
            rows * topk,
            rows * topk,
            rows * fan_out,
            rows * fan_out,
            4 * rows,
        ]);
        let device = lanes_at + shape.lanes * lane;
        Some(Self { columns, tables, lanes_at, lane, splits, device, handle, per_handle })
    }

    /// The tables in memory at `base`.
    pub fn tables(&self, base: u64) -> Tables {
        let at = self.tables.map(|at| base + at as u64);
        let [windows, silent, ranks, base, node_of, rails, sources, node_windows, node_ranks] = at;
        Tables { windows, silent, ranks, base, node_of, rails, sources, node_windows, node_ranks }
    }

    /// What a lane has in memory at `base`.
    pub fn lane(&self, base: u64, lane: usize) -> u64 {
        base + (self.lanes_at + lane * self.lane) as u64
    }

    /// Where the rows of a lane's tokens are on the way home, in memory of the lane.
    pub fn split(&self, lane: u64) -> Split {
        let [near_rank, near_index, near_order, node_rank, node_index] =
            self.splits.map(|at| lane + at as u64);
        Split { near_rank, near_index, near_order, node_rank, node_index }
    }

    /// What a handle has in memory at `base`, in a layer with so many rows to forward.
    pub fn of_handle(&self, base: u64) -> HandleNodes {
        let [
            dest_rank,
            dest_index,
            counts,
            sent_base,
            staged,
            places,
            expert_places,
            physical,
            expert_index,
            order,
            weights,
            incoming_rank,
            incoming_index,
            numbers,
        ] = self.handle.map(|at| base + at as u64);
        HandleNodes {
            dest_rank,
            dest_index,
            counts,
            sent_base,
            staged,
            places,
            expert_places,
            physical,
            expert_index,
            order,
            weights,
            incoming_rank,
            incoming_index,
            numbers,
        }
    }

    /// Fills the tables and lanes in `memory` from `at` on. `windows`: of all ranks, 0 where not mapped.
    pub fn fill(
        &self,
        (memory, at, stream): (&DeviceMemory, usize, &Stream),
        placement: &Placement,
        across: &Across,
        (windows, me): (&[u64], usize),
    ) -> Result<()> {
        let filled = fill(placement, across, windows, me);
        let [windows_at, _, ranks, base, node_of, rails, sources, node_windows, node_ranks] =
            self.tables;
        let lanes = (self.device - self.lanes_at) / self.lane;
        for lane in 0..lanes {
            let fresh = MoeLane { bad_choice: u64::MAX, ..MoeLane::default() };
            let lane = at + self.lanes_at + lane * self.lane;
            memory.upload(stream, lane, &[fresh], SETUP)?;
        }
        memory.upload(stream, at + windows_at, &filled.windows, SETUP)?;
        memory.upload(stream, at + node_windows, &filled.node_windows, SETUP)?;
        for (table, numbers) in [
            (ranks, &filled.ranks),
            (base, &filled.base),
            (node_of, &filled.node_of),
            (rails, &filled.rails),
            (sources, &filled.sources),
            (node_ranks, &filled.node_ranks),
        ] {
            memory.upload(stream, at + table, numbers, SETUP)?;
        }
        Ok(())
    }
}

/// What stands in the tables.
#[derive(Debug)]
struct Filled {
    windows: Vec<u64>,
    ranks: Vec<u32>,
    base: Vec<u32>,
    node_of: Vec<u32>,
    rails: Vec<u32>,
    sources: Vec<u32>,
    node_windows: Vec<u64>,
    node_ranks: Vec<u32>,
}

fn fill(placement: &Placement, across: &Across, windows: &[u64], me: usize) -> Filled {
    let (nodes, world, physical) = (&across.nodes, windows.len(), placement.physical());
    let count = nodes.count();
    let own = nodes.of(me);
    let owners = || (0..physical).map(|expert| placement.owner(expert).0);
    let column = |owner: usize| match across.near[owner] {
        true => owner,
        false => world + 1 + nodes.of(owner),
    };
    let bases = (0..world).map(|rank| placement.physical_base(rank) as u32);
    // All experts are of the rank that stands for a node: with a multiple of their number added, by
    // which a rail knows them again. The differences of these are large.
    let of_nodes = (0..=count).map(|node| 0u32.wrapping_sub((node * physical) as u32));
    let rail = |rank: usize, node: usize| match nodes.of(rank) == node {
        true => rank as u32,
        false => nodes.rail(rank, node) as u32,
    };
    Filled {
        windows: windows.iter().copied().chain(std::iter::repeat_n(0, 1 + count)).collect(),
        ranks: owners().map(|owner| column(owner) as u32).collect(),
        base: bases.chain([physical as u32]).chain(of_nodes).collect(),
        node_of: nodes.all().iter().map(|&node| node as u32).collect(),
        rails: (0..world).flat_map(|r| (0..count).map(move |n| rail(r, n))).collect(),
        sources: across.sources.iter().map(|&rank| rank as u32).collect(),
        node_windows: (0..count).map(|n| if n == own { windows[me] } else { 0 }).collect(),
        node_ranks: owners().map(|owner| nodes.of(owner) as u32).collect(),
    }
}

/// Addresses of the tables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables {
    /// `u64` per column: the windows of ranks that are mapped, and 0 for all others.
    pub windows: u64,
    /// The same, all 0.
    pub silent: u64,
    /// `u32` per physical expert: its rank in this node, or its node, as a column.
    pub ranks: u64,
    /// `u32` per column and one more: the first physical expert of each.
    pub base: u64,
    /// As [`ep_kernels::cuda::moe::MoeCrossing`] has them.
    pub node_of: u64,
    pub rails: u64,
    pub sources: u64,
    /// `u64` per node: this rank's window for its own, else 0.
    pub node_windows: u64,
    /// `u32` per physical expert: its node.
    pub node_ranks: u64,
}

/// Addresses of what [`ep_kernels::cuda::moe::SplitArgs`] finds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Split {
    pub near_rank: u64,
    pub near_index: u64,
    pub near_order: u64,
    pub node_rank: u64,
    pub node_index: u64,
}

/// What a handle holds of tokens that cross nodes; addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HandleNodes {
    dest_rank: u64,
    dest_index: u64,
    /// As [`ep_kernels::cuda::moe::MoeCrossing`] has them.
    pub counts: u64,
    pub sent_base: u64,
    pub staged: u64,
    pub places: u64,
    pub expert_places: u64,
    /// Of the tokens of all blocks that come here, one behind the other.
    physical: u64,
    expert_index: u64,
    order: u64,
    weights: u64,
    incoming_rank: u64,
    incoming_index: u64,
    /// `u32` each: their numbers at their sources.
    pub numbers: u64,
}

impl HandleNodes {
    /// The routing of this rank's tokens with nodes behind the ranks.
    pub fn sent(&self, routing: &MoeRouting) -> MoeRouting {
        MoeRouting {
            dest_rank: self.dest_rank,
            dest_index: self.dest_index,
            rank_counts: self.counts,
            sent_base: self.sent_base,
            staged: self.staged,
            ..*routing
        }
    }

    /// The routing of the tokens of blocks, without what differs between blocks.
    pub fn incoming(&self, routing: &MoeRouting) -> MoeRouting {
        MoeRouting {
            physical: self.physical,
            expert_index: self.expert_index,
            order: self.order,
            weights: self.weights,
            dest_rank: self.incoming_rank,
            dest_index: self.incoming_index,
            ..*routing
        }
    }
}

/// What the host has to know of nodes.
#[derive(Clone, Debug, Default)]
pub(crate) struct ToldNodes {
    /// By node: the row of its rail's forward staging where this rank's block starts, and its rows.
    pub to: Vec<u32>,
    pub counts: Vec<u32>,
    /// By rank whose tokens this rank forwards.
    pub incoming: Vec<ToldBlock>,
}

/// A block that comes here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ToldBlock {
    pub rows: u32,
    /// The row of forward staging where it starts.
    pub first: u32,
    /// Where rows of this node start among those that come home to its sender, one per (token, node).
    pub home: u32,
}

impl ToldNodes {
    /// Takes what the GPU told of blocks.
    pub fn read_incoming(&mut self, numbers: &[i32]) {
        self.incoming.clear();
        let block =
            |b: &[i32]| ToldBlock { rows: b[0] as u32, first: b[1] as u32, home: b[2] as u32 };
        self.incoming.extend(numbers.chunks_exact(3).map(block));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{Hierarchy, Nodes};

    /// The kernels' arithmetic: the local id that a row for a column says of an expert, if any.
    fn said(base: &[u32], column: usize, expert: u32) -> Option<u32> {
        let local = expert.wrapping_sub(base[column]);
        (local < base[column + 1].wrapping_sub(base[column])).then_some(local)
    }

    #[test]
    fn rows_for_a_node_name_all_experts_and_those_for_a_rank_its_own() {
        let placement = Placement::contiguous(11, 4).unwrap();
        let across = Across::new(Nodes::new(&[0, 1, 0, 2]), Hierarchy::Node, 2);
        let filled = fill(&placement, &across, &[8, 0, 9, 0], 2);
        assert_eq!(filled.windows, [8, 0, 9, 0, 0, 0, 0, 0]);
        assert_eq!(filled.ranks, [0, 0, 0, 6, 6, 6, 2, 2, 2, 7, 7]);
        for expert in 0..11 {
            for node in 0..3u32 {
                let there = said(&filled.base, 5 + node as usize, expert);
                assert_eq!(there, Some(expert + 11 * node), "expert {expert} to node {node}");
            }
            for rank in 0..4 {
                let (owner, local) = placement.owner(expert as usize);
                let mine = (owner == rank).then_some(local as u32);
                assert_eq!(
                    said(&filled.base, rank, expert),
                    mine,
                    "expert {expert} to rank {rank}"
                );
            }
        }
        // Rank 1 gives to rank 0 of node 0, being the first of its own.
        assert_eq!(filled.rails, [0, 1, 3, 0, 1, 3, 2, 1, 3, 0, 1, 3]);
        assert!(filled.sources.is_empty());
        assert_eq!(filled.node_windows, [9, 0, 0]);
        assert_eq!(filled.node_ranks, [0, 0, 0, 1, 1, 1, 0, 0, 0, 2, 2]);
    }
}
