//! Dispatch across nodes: blocks out to rails, and what rails do with them.

use ep_kernels::RecordFormat;
use ep_kernels::host::{self, Crossing as Block, Source, Target};

use super::{Crossing, Incoming};
use crate::Result;
use crate::handle::HandleInner;
use crate::lane::LaneGuard;
use crate::notify::Phase;

const OP: &str = "dispatch";

/// A block travels in at least so many writes, so that most of it is on its way while the rest is
/// packed, unless they would be smaller than [`CHUNK_BYTES`].
const CHUNKS: usize = 8;

/// Below this the cost of a write is not that of its bytes.
const CHUNK_BYTES: usize = 64 << 10;

/// How many rows of a block to write at once.
pub(super) fn chunk_rows(rows: usize, stride: usize) -> usize {
    rows.div_ceil(CHUNKS).max(CHUNK_BYTES / stride).max(1)
}

/// Packs this rank's rows for other nodes and puts them to their rails, then says so to all bulk
/// peers.
///
/// # Safety
/// `source` has the tokens of `handle`, in the sizes of `format`.
pub(crate) unsafe fn send_blocks(
    lane: &LaneGuard,
    handle: &HandleInner,
    format: &RecordFormat,
    source: &Source<'_>,
) -> Result<()> {
    let ep = &*lane.ep;
    let (nodes, rank) = (&ep.across.nodes, ep.rank());
    let (own, count) = (nodes.of(rank), nodes.count());
    // Not all begin with the same node.
    for node in (1..count).map(|step| (own + step) % count) {
        let tokens = handle.crossing.tokens_to(node);
        let mut from =
            ep.window.send_staging(lane.index) + handle.crossing.rows_before(node) * format.stride;
        let mut to =
            ep.window.forward_staging(lane.index) + handle.crossing.to[node] * format.stride;
        for tokens in tokens.chunks(chunk_rows(tokens.len(), format.stride)) {
            let block = Block { node_of: nodes.all(), node, tokens };
            let (placement, at) = (&ep.shape.placement, ep.local(from));
            // SAFETY: the source by this function's contract; this lane's staging has room for a row
            // per token and node it can go to.
            let packed =
                unsafe { host::pack(format, source, &handle.send, placement, rank, &block, at) };
            ep.check_rows(OP, packed)?;
            let bytes = tokens.len() * format.stride;
            lane.write_block(nodes.rail(rank, node), from, to, bytes)?;
            (from, to) = (from + bytes, to + bytes);
        }
    }
    lane.done(&ep.bulk)
}

/// Waits for the blocks of other nodes, and for their ranks to have read this one's announcement.
pub(crate) fn await_blocks(lane: &LaneGuard) -> Result<()> {
    let ep = &*lane.ep;
    lane.wait("dispatch, rows of other nodes", &ep.bulk, Phase::Done, ep.deadline())
}

/// Learns from the blocks that have arrived which row is for whom.
pub(crate) fn read_blocks(
    lane: &LaneGuard,
    crossing: &mut Crossing,
    format: &RecordFormat,
) -> Result<()> {
    let ep = &*lane.ep;
    for incoming in &mut crossing.incoming {
        let from = block_at(lane, incoming, format.stride).cast_const();
        // SAFETY: the block is within forward staging by the verdict and complete, and nobody writes
        // it before this rank's next announcement.
        let read = unsafe { incoming.read(format, from, &ep.shape, &ep.across.members) };
        read.map_err(|detail| ep.corrupt(OP, detail))?;
    }
    Ok(())
}

/// Stores the rows of the blocks that have arrived where they belong and tells this node's ranks.
pub(crate) fn forward(lane: &LaneGuard, crossing: &Crossing, format: &RecordFormat) -> Result<()> {
    let ep = &*lane.ep;
    let mut state = lane.state();
    let state = &mut *state;
    for incoming in &crossing.incoming {
        let from = block_at(lane, incoming, format.stride).cast_const();
        state.targets.clear();
        for rank in 0..ep.shape.world {
            let count = incoming.layout.rank_counts[rank] as usize;
            let slot = state.headers[rank].slot as usize;
            let base = ep.reach[rank].map_or(std::ptr::null_mut(), |window| {
                window.base.as_ptr().wrapping_add(ep.window.rank_rows(slot))
            });
            let first_row = incoming.places[rank];
            state.targets.push(Target { base, first_row, rows: first_row + count });
        }
        let source = Source {
            payload: from,
            payload_stride: format.stride,
            scales: from.wrapping_add(format.scales_at),
            scales_stride: format.stride,
            weights: Some(&incoming.weights),
        };
        let origin = (incoming.source, incoming.tokens.as_slice());
        // SAFETY: the block holds a record per token of the layout and stays as it is. The targets
        // are the source's blocks in slots offered for this operation, as large as it announced,
        // which the rows read were compared with: disjoint between sources and within capacity by
        // the verdict. No row goes to a rank that is not mapped.
        let stored = unsafe {
            let (layout, placement) = (&incoming.layout, &ep.shape.placement);
            host::scatter_relayed(format, &source, layout, placement, origin, &state.targets)
        };
        ep.check_rows(OP, stored)?;
    }
    lane.done(&ep.direct)
}

fn block_at(lane: &LaneGuard, incoming: &Incoming, stride: usize) -> *mut u8 {
    let ep = &*lane.ep;
    ep.local(ep.window.forward_staging(lane.index) + incoming.first * stride)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_blocks_travel_in_several_writes_and_small_ones_in_one() {
        let writes = |rows: usize, stride| rows.div_ceil(chunk_rows(rows, stride));
        assert_eq!((writes(8192, 14_592), writes(37, 16_512)), (8, 8));
        // Four of the smallest.
        assert_eq!(writes(4 * CHUNK_BYTES / 1024, 1024), 4);
        assert_eq!((writes(1, 128), writes(0, 128), writes(20, 640)), (1, 0, 1));
        // Rows that are larger than a write.
        assert_eq!(writes(5, 2 * CHUNK_BYTES), 5);
    }
}
