//! Combine with one row per (token, node): the steps that [`Precision::NodeReduced`] does
//! differently.
//!
//! [`Precision::NodeReduced`]: crate::Precision::NodeReduced

use ep_kernels::Layout as Routing;
use ep_kernels::host::{self, Stores};

use super::Incoming;
use super::forward::chunk_rows;
use crate::Result;
use crate::combine::{Combined, OP};
use crate::fold::Parts;
use crate::handle::HandleInner;
use crate::lane::{RowSource, Scratch};
use crate::shape::OutFormat;

/// Where the rows of a source are at the ranks of this node.
#[derive(Clone, Copy)]
enum Whose<'a> {
    /// This rank's own tokens.
    Own(&'a HandleInner),
    /// Tokens that this rank forwarded.
    Relayed(&'a Incoming),
}

impl<'a> Whose<'a> {
    fn layout(self) -> &'a Routing {
        match self {
            Self::Own(handle) => &handle.send,
            Self::Relayed(incoming) => &incoming.layout,
        }
    }

    /// The source's first rank-major row at `rank`.
    fn first_row(self, rank: usize) -> usize {
        match self {
            Self::Own(handle) => handle.matrix.sent_base(rank),
            Self::Relayed(incoming) => incoming.places[rank],
        }
    }

    /// The source's first row of a physical expert at its owner.
    fn first_of_expert(self, physical: usize) -> usize {
        match self {
            Self::Own(handle) => {
                handle.expert_offsets[physical] as usize + handle.matrix.expert_base(physical)
            }
            Self::Relayed(incoming) => incoming.experts[physical],
        }
    }

    fn weight(self, at: usize) -> f32 {
        match self {
            Self::Own(handle) => handle.weights.get(at).copied().unwrap_or(1.0),
            Self::Relayed(incoming) => incoming.weights[at],
        }
    }
}

/// Finds the rows of a token at the ranks of this node, in the order of (rank, local expert).
fn gather(parts: &Parts, whose: Whose<'_>, token: usize, scratch: &mut Scratch) {
    let ep = &*parts.lane.ep;
    let (layout, near) = (whose.layout(), &ep.across.near);
    let Scratch { rows, weights, order, sources, .. } = scratch;
    let at = |source: &RowSource, row: usize| source.base.wrapping_add(row * parts.format.stride);
    rows.clear();
    weights.clear();
    order.clear();
    if parts.per_rank {
        for (rank, index) in layout.destinations(token).filter(|&(rank, _)| near[rank]) {
            rows.push(at(&sources[rank], whose.first_row(rank) + index));
            order.push((rank as i32, 0));
        }
        return;
    }
    let chosen = &layout.physical[token * layout.topk..][..layout.topk];
    let owner = |physical: i32| ep.shape.placement.owner(physical as usize).0;
    let mine = (0u32..).zip(chosen).filter(|&(_, &p)| p >= 0 && near[owner(p)]);
    order.extend(mine.map(|(k, &physical)| (physical, k)));
    // Physical experts are in the order of (rank, local expert).
    order.sort_unstable();
    for &(physical, k) in order.iter() {
        let choice = token * layout.topk + k as usize;
        let row = whose.first_of_expert(physical as usize) + layout.expert_index[choice] as usize;
        rows.push(at(&sources[owner(physical)], row));
        weights.push(whose.weight(choice));
    }
}

/// The format of the rows that cross: one per (token, node).
fn crossing_format(parts: &Parts) -> OutFormat {
    let shape = &parts.lane.ep.shape;
    OutFormat::rank_major(None, parts.kind, shape.hidden, shape.topk)
}

/// Sums the rows of each token this rank forwarded over the ranks of its node and puts them to the
/// tokens' homes; then says so to all bulk peers.
pub(crate) fn push(parts: &Parts) -> Result<()> {
    let (lane, ep) = (&parts.lane, &*parts.lane.ep);
    let handle = &*parts.handle.routing;
    let format = crossing_format(parts);
    let mut state = lane.state();
    let state = &mut *state;
    parts.find_sources(&state.headers, &mut state.scratch.sources);
    for incoming in &handle.crossing.incoming {
        let staging = ep.window.forward_staging(lane.index);
        let mut from = staging + incoming.first * format.stride;
        let mut to = ep.window.receive_staging(lane.index) + incoming.home * format.stride;
        let (mut done, chunk) = (0, chunk_rows(incoming.rows, format.stride));
        while done < incoming.rows {
            let until = incoming.rows.min(done + chunk);
            for row in done..until {
                let out = ep.local(from + (row - done) * format.stride);
                gather(parts, Whose::Relayed(incoming), row, &mut state.scratch);
                let Scratch { rows, weights, order, .. } = &state.scratch;
                let weights = parts.weighted.then_some(weights.as_slice());
                let (dtype, hidden) = (parts.kind.dtype(), ep.shape.hidden);
                // SAFETY: the rows are in slots that ranks of this node announced for this operation
                // and stay until this rank raises Done. Forward staging has room for as many rows as
                // were forwarded, each at least as large, and is this rank's own: sources write it
                // only after its next announcement on this lane.
                unsafe {
                    let stores = Stores::Cached;
                    let summed =
                        host::reduce_row_with(stores, dtype, hidden, rows, weights, &[], out);
                    ep.check_rows(OP, summed)?;
                    let carried = out.add(format.weights_at).cast::<f32>();
                    let carried = std::slice::from_raw_parts_mut(carried, ep.shape.topk);
                    let chosen = &incoming.layout.physical[row * carried.len()..][..carried.len()];
                    parts.weights_home(chosen, rows, order, carried);
                }
            }
            let bytes = (until - done) * format.stride;
            lane.write_block(incoming.source, from, to, bytes)?;
            (from, to, done) = (from + bytes, to + bytes, until);
        }
    }
    lane.done(&ep.bulk)
}

/// Sums the rows of every token of this rank: those of its own node to one, rounded like the others',
/// then those of all nodes, in their order.
pub(crate) fn sum(parts: &Parts, out: &mut Combined<'_>) -> Result<()> {
    let (ep, handle) = (&*parts.lane.ep, &*parts.handle.routing);
    let (dtype, hidden, topk) = (parts.kind.dtype(), ep.shape.hidden, ep.shape.topk);
    let nodes = &ep.across.nodes;
    let own = nodes.of(ep.rank());
    let mut state = parts.lane.state();
    let state = &mut *state;
    let scratch = &mut state.scratch;
    parts.find_sources(&state.headers, &mut scratch.sources);
    scratch.partial.resize(hidden * dtype.size(), 0);
    scratch.next.clear();
    scratch.next.resize(nodes.count(), 0);
    for token in 0..handle.send.tokens {
        gather(parts, Whose::Own(handle), token, scratch);
        if !scratch.rows.is_empty() {
            let weights = parts.weighted.then_some(scratch.weights.as_slice());
            let (rows, to) = (&scratch.rows, scratch.partial.as_mut_ptr());
            // SAFETY: the rows are in slots that ranks of this node announced for this operation and
            // stay until this rank raises Done; the buffer is as long as a row.
            let summed = unsafe {
                host::reduce_row_with(Stores::Cached, dtype, hidden, rows, weights, &[], to)
            };
            ep.check_rows(OP, summed)?;
        }
        let mut home = out.weights.as_mut().map(|weights| {
            let at = weights.as_mut_ptr().cast::<f32>().wrapping_add(token * topk);
            // SAFETY: the weights are dense, K for each token (checked on entry), borrowed
            // exclusively.
            unsafe { std::slice::from_raw_parts_mut(at, topk) }
        });
        let chosen = &handle.send.physical[token * topk..][..topk];
        if let Some(home) = &mut home {
            // SAFETY: the rows as above; they and `order` belong together.
            unsafe { parts.weights_home(chosen, &scratch.rows, &scratch.order, home) };
        }
        scratch.sums.clear();
        for node in 0..nodes.count() {
            if node == own {
                let any = !scratch.rows.is_empty();
                scratch.sums.extend(any.then_some(scratch.partial.as_ptr()));
                continue;
            }
            let Some(row) = next_row(parts, node, token, &mut scratch.next[node]) else { continue };
            scratch.sums.push(row);
            if let Some(home) = &mut home {
                // SAFETY: the row is in this rank's staging, complete after its sender's Done.
                unsafe { weights_of_node(parts, node, chosen, row, home) };
            }
        }
        scratch.biases.clear();
        scratch.biases.extend(out.biases.iter().map(|bias| bias.bytes(token).as_ptr()));
        let to = out.rows.bytes_mut(token).as_mut_ptr();
        let (sums, biases) = (&scratch.sums, &scratch.biases);
        // SAFETY: the rows as above; biases and `to` are rows of `hidden` elements of `dtype`
        // (checked on entry).
        let summed = unsafe { host::reduce_row(dtype, hidden, sums, None, biases, to) };
        ep.check_rows(OP, summed)?;
    }
    Ok(())
}

/// The row of a token that another node has sent home, if it went there. `next` counts those taken.
fn next_row(parts: &Parts, node: usize, token: usize, next: &mut usize) -> Option<*const u8> {
    let crossing = &parts.handle.routing.crossing;
    if crossing.tokens_to(node).get(*next) != Some(&(token as u32)) {
        return None;
    }
    let ep = &*parts.lane.ep;
    let row = crossing.rows_before(node) + *next;
    *next += 1;
    let staging = ep.window.receive_staging(parts.lane.index);
    Some(ep.local(staging + row * crossing_format(parts).stride).cast_const())
}

/// Takes the weights of a node's experts from the row that it has sent.
///
/// # Safety
/// `row` is a row that crossed.
unsafe fn weights_of_node(
    parts: &Parts,
    node: usize,
    chosen: &[i32],
    row: *const u8,
    home: &mut [f32],
) {
    let ep = &*parts.lane.ep;
    let carried = row.wrapping_add(crossing_format(parts).weights_at).cast::<f32>();
    for (k, (&physical, home)) in chosen.iter().zip(home).enumerate() {
        let owner = usize::try_from(physical).ok().map(|p| ep.shape.placement.owner(p).0);
        if owner.is_some_and(|owner| ep.across.nodes.of(owner) == node) {
            // SAFETY: by this function's contract; such a row carries K weights.
            *home = unsafe { carried.add(k).read() };
        }
    }
}
