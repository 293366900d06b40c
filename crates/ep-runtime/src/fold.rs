//! The steps of a combine that has been announced.

use ep_kernels::PayloadKind;
use ep_kernels::host;

use crate::combine::{Combined, OP};
use crate::handle::HandleInner;
use crate::lane::{LaneGuard, RowSource, Scratch};
use crate::node;
use crate::notify::{self, Header, Phase};
use crate::result::Dispatched;
use crate::shape::OutFormat;
use crate::slots::Slot;
use crate::{Handle, Result};

/// A combine that has been announced.
#[derive(Debug)]
pub(crate) struct Parts {
    pub lane: LaneGuard,
    pub slot: Slot,
    pub handle: Handle,
    pub kind: PayloadKind,
    /// The rows that travel.
    pub format: OutFormat,
    /// They are one per (token, rank), in the slot's rank-major region.
    pub per_rank: bool,
    pub weighted: bool,
    /// One row per (token, node) crosses nodes.
    pub per_node: bool,
}

impl Parts {
    /// Waits for the announcements and judges them.
    pub fn gather(&self) -> Result<()> {
        self.lane.collect("combine, announcements", self.lane.ep.deadline())?;
        notify::verdict(OP, &self.lane.state().headers)
    }

    /// [`Parts::gather`]; a bad verdict ends the operation on every rank.
    pub fn collect(&self) -> Result<()> {
        match self.gather() {
            Err(e) if e.group_usable() => {
                self.lane.close(OP, self.lane.ep.deadline())?;
                Err(e)
            }
            other => other,
        }
    }

    /// Sends each peer that does not map this rank's window its block of rows, in the order of its
    /// tokens, to where it expects this rank's block.
    pub fn push(&self) -> Result<()> {
        if self.per_node {
            return node::push(self);
        }
        let ep = &*self.lane.ep;
        let handle = &self.handle.routing;
        let stride = self.format.stride;
        for &home in &ep.bulk {
            let rows = handle.matrix.received(home);
            let first = handle.matrix.received_base(home);
            // Where this block starts: after those of earlier owners, mapped or not.
            let before = match self.per_rank {
                true => handle.matrix.rows_elsewhere(home),
                false => handle.matrix.choices_elsewhere(home),
            };
            let mut to = ep.window.receive_staging(self.lane.index) + before * stride;
            if self.per_rank {
                let from = ep.window.rank_rows(self.slot.index()) + first * stride;
                if rows > 0 {
                    self.lane.write_block(home, from, to, rows * stride)?;
                }
                continue;
            }
            let region = ep.window.expert_rows(self.slot.index());
            let order = &mut self.lane.state().scratch.order;
            for row in first..first + rows {
                local_experts(handle, ep.shape.topk, row, order);
                for &(_, k) in order.iter() {
                    let at = handle.received.expander.map[row * ep.shape.topk + k as usize];
                    self.lane.write_block(home, region + at as usize * stride, to, stride)?;
                    to += stride;
                }
            }
        }
        self.lane.done(&ep.bulk)
    }

    /// Waits for the blocks that were sent here.
    pub fn pull(&self) -> Result<()> {
        let ep = &*self.lane.ep;
        self.lane.wait("combine, blocks", &ep.bulk, Phase::Done, ep.deadline())
    }

    /// Sums the rows of every token of this rank.
    pub fn sum(&self, out: &mut Combined<'_>) -> Result<()> {
        if self.per_node {
            return node::sum(self, out);
        }
        let ep = &*self.lane.ep;
        let mut state = self.lane.state();
        let state = &mut *state;
        self.find_sources(&state.headers, &mut state.scratch.sources);
        let dtype = self.kind.dtype();
        for token in 0..self.handle.routing.send.tokens {
            if self.per_rank {
                self.rank_rows(token, &mut state.scratch);
            } else {
                self.expert_rows(token, &mut state.scratch);
            }
            let Scratch { rows, biases, weights, order, .. } = &mut state.scratch;
            biases.clear();
            biases.extend(out.biases.iter().map(|b| b.bytes(token).as_ptr()));
            let to = out.rows.bytes_mut(token).as_mut_ptr();
            let weights = self.weighted.then_some(weights.as_slice());
            // SAFETY: the rows are in slots of owners that announced them for this operation (or
            // in this rank's staging, after their owner's Done), and stay until this rank raises
            // Done; biases and `to` are rows of `hidden` elements of `dtype` (checked on entry).
            let summed =
                unsafe { host::reduce_row(dtype, ep.shape.hidden, rows, weights, biases, to) };
            ep.check_rows(OP, summed)?;
            if let Some(home) = &mut out.weights {
                let at = home.as_mut_ptr().cast::<f32>().wrapping_add(token * ep.shape.topk);
                // SAFETY: the weights are dense, K for each token (checked on entry), borrowed
                // exclusively.
                let home = unsafe { std::slice::from_raw_parts_mut(at, ep.shape.topk) };
                let chosen = &self.handle.routing.send.physical[token * home.len()..][..home.len()];
                // SAFETY: as above; `rows` and `order` belong together.
                unsafe { self.weights_home(chosen, rows, order, home) };
            }
        }
        Ok(())
    }

    /// Tells the owners that their rows were read, and waits for all who read this rank's.
    pub fn finish(&self) -> Result<()> {
        self.release()?;
        self.settle()
    }

    /// Everything peers wait for, without sums.
    pub fn give_up(&self) -> Result<()> {
        self.collect()?;
        self.push()?;
        self.pull()?;
        self.finish()
    }

    /// Tells the owners that their rows were read.
    pub fn release(&self) -> Result<()> {
        self.lane.done(&self.lane.ep.direct)
    }

    /// Waits for all who read this rank's rows.
    pub fn settle(&self) -> Result<()> {
        let ep = &*self.lane.ep;
        let deadline = ep.deadline();
        self.lane.wait("combine, read by all", &ep.direct, Phase::Done, deadline)?;
        self.lane.flush(deadline)
    }

    /// Says for each owner where its rows for this rank are.
    pub fn find_sources(&self, headers: &[Header], sources: &mut Vec<RowSource>) {
        let ep = &*self.lane.ep;
        let matrix = &self.handle.routing.matrix;
        sources.clear();
        for (owner, header) in headers.iter().enumerate() {
            let slot = header.slot as usize;
            sources.push(match ep.reach[owner] {
                Some(window) => {
                    let region = match self.per_rank {
                        true => ep.window.rank_rows(slot),
                        false => ep.window.expert_rows(slot),
                    };
                    let base = window.base.as_ptr().wrapping_add(region).cast_const();
                    let first = matrix.sent_base(owner);
                    RowSource { base, first, block: false }
                }
                None => {
                    let before = self.rows_before(owner);
                    let region = ep.window.receive_staging(self.lane.index);
                    let base = ep.local(region + before * self.format.stride).cast_const();
                    RowSource { base, first: 0, block: true }
                }
            });
        }
    }

    /// How many rows come home from owners before `owner`, mapped or not: where its block starts.
    fn rows_before(&self, owner: usize) -> usize {
        let send = &self.handle.routing.send;
        let counts = match self.per_rank {
            true => &send.rank_counts[..owner],
            false => &send.expert_counts[..self.lane.ep.shape.placement.physical_base(owner)],
        };
        counts.iter().map(|&n| n as usize).sum()
    }

    /// The rows of a token where there is one per rank, in rank order.
    fn rank_rows(&self, token: usize, scratch: &mut Scratch) {
        scratch.rows.clear();
        scratch.order.clear();
        for (owner, index) in self.handle.routing.send.destinations(token) {
            let source = scratch.sources[owner];
            let row = source.first + index;
            scratch.rows.push(source.base.wrapping_add(row * self.format.stride));
            scratch.order.push((owner as i32, 0));
        }
    }

    /// The rows of a token where there is one per expert, in the order of (rank, local expert),
    /// which is that of physical experts.
    fn expert_rows(&self, token: usize, scratch: &mut Scratch) {
        let handle = &*self.handle.routing;
        let ep = &*self.lane.ep;
        let topk = ep.shape.topk;
        let chosen = &handle.send.physical[token * topk..][..topk];
        let Scratch { rows, weights, order, sources, .. } = scratch;
        order.clear();
        order.extend((0u32..).zip(chosen).filter(|(_, p)| **p >= 0).map(|(k, p)| (*p, k)));
        order.sort_unstable();
        rows.clear();
        weights.clear();
        for &(physical, k) in order.iter() {
            let at = token * topk + k as usize;
            weights.push(handle.weights.get(at).copied().unwrap_or(1.0));
            let physical = physical as usize;
            let (owner, _) = ep.shape.placement.owner(physical);
            let source = &mut sources[owner];
            let row = if source.block {
                source.first += 1;
                source.first - 1
            } else {
                handle.expert_offsets[physical] as usize
                    + handle.matrix.expert_base(physical)
                    + handle.send.expert_index[at] as usize
            };
            rows.push(source.base.wrapping_add(row * self.format.stride));
        }
    }

    /// Reads the weights that a token's rows carry, for the physical experts it chose.
    ///
    /// # Safety
    /// `rows` are rows of this combine that may be read, and `order` says whose they are.
    pub unsafe fn weights_home(
        &self,
        chosen: &[i32],
        rows: &[*const u8],
        order: &[(i32, u32)],
        home: &mut [f32],
    ) {
        home.fill(0.0);
        let placement = &self.lane.ep.shape.placement;
        for (&row, &(who, k)) in rows.iter().zip(order) {
            let carried = row.wrapping_add(self.format.weights_at).cast::<f32>();
            if !self.per_rank {
                // SAFETY: by this function's contract; an expert's row carries one weight.
                home[k as usize] = unsafe { carried.read() };
                continue;
            }
            for (k, home) in home.iter_mut().enumerate() {
                let owner = usize::try_from(chosen[k]).ok().map(|p| placement.owner(p).0);
                if owner == Some(who as usize) {
                    // SAFETY: by this function's contract; a rank's row carries K weights.
                    *home = unsafe { carried.add(k).read() };
                }
            }
        }
    }
}

/// The local experts of a received row as (local id, k), ascending.
fn local_experts(handle: &HandleInner, topk: usize, row: usize, order: &mut Vec<(i32, u32)>) {
    let ids = &handle.received.ids[row * topk..][..topk];
    order.clear();
    order.extend((0u32..).zip(ids).filter(|(_, id)| **id >= 0).map(|(k, id)| (*id, k)));
    order.sort_unstable();
}

/// Sums the rows of each received token over this rank's experts, into the slot's rank-major rows.
pub(crate) fn reduce_experts(
    result: &Dispatched,
    lane: &LaneGuard,
    kind: PayloadKind,
    from: &OutFormat,
    to: &OutFormat,
    weighted: bool,
) -> Result<()> {
    let ep = &*result.ep;
    let handle = &*result.handle.routing;
    let topk = ep.shape.topk;
    let source = ep.local(ep.window.expert_rows(result.slot.index())).cast_const();
    let target = ep.local(ep.window.rank_rows(result.slot.index()));
    result.slot.tail().lock().overwritten(handle.rows * to.stride);
    let mut state = lane.state();
    let Scratch { rows, weights, order, .. } = &mut state.scratch;
    for row in 0..handle.rows {
        local_experts(handle, topk, row, order);
        rows.clear();
        weights.clear();
        for &(_, k) in order.iter() {
            let at = row * topk + k as usize;
            let position = handle.received.expander.map[at] as usize;
            rows.push(source.wrapping_add(position * from.stride));
            weights.push(handle.received.weights[at]);
        }
        let out = target.wrapping_add(row * to.stride);
        let weights = weighted.then_some(weights.as_slice());
        // SAFETY: both regions are in the slot this result owns, apart from each other; positions
        // come from the expansion and rows from the matrix, within what is reserved.
        unsafe {
            let summed = host::reduce_row(kind.dtype(), ep.shape.hidden, rows, weights, &[], out);
            ep.check_rows(OP, summed)?;
            let carried = out.add(to.weights_at).cast::<f32>();
            carried.write_bytes(0, topk);
            for (&(_, k), row) in order.iter().zip(rows.iter()) {
                carried.add(k as usize).write(row.add(from.weights_at).cast::<f32>().read());
            }
        }
    }
    Ok(())
}
