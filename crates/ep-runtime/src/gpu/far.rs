//! Ranks that are not mapped: what goes to them and comes from them by puts, or by exchanges.
//!
//! The steps are those of hosts. Kernels pack rows for such ranks, a block per rank, in this rank's
//! staging; from there they are put to their final places, in several parts if that pays, each of
//! them while the next is packed. Combined rows go home as they are, one block per rank or, where
//! experts' rows go unreduced, one per expert, to the home rank's staging.
//!
//! Ranks on one GPU may share hardware queues, where pacing keeps a wait behind the signals of a phase
//! (`ep_transport::Pacing`). That is enough as long as every wait is for all that raise flags, and a
//! rank has sent what it sends before it raises any. So a combine has a phase more, and a dispatch
//! tells mapped ranks no sooner than others.
//!
//! How large blocks are and where they go is known only behind an operation's verdict. So where some
//! rank is not mapped, the host waits for the verdict of every operation, also in capacity mode, and
//! nothing can be captured, unless blocks have a fixed size ([`super::fixed`]). Announcements are of one
//! size, so they go first.

use std::sync::Arc;

use ep_kernels::cuda::moe::{DispatchArgs, JudgeArgs, MoeWork, MovePlan, PIECES, block_tokens};
use ep_transport::{Put, Queue, Receive};

use crate::Result;
use crate::ep::Inner;
use crate::notify::Phase;

use super::machine::Point;
use super::memory::{HandleMemory, Told};
use super::{Gpu, Turn, cuda};

/// The most parts that rows for ranks that are not mapped go in.
const PARTS: usize = 4;

/// Blocks of one transfer, kept for their memory.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    pub sends: Vec<Put>,
    pub receives: Vec<Receive>,
}

/// Where a stream has packed each part of the rows of a dispatch: as many as there are parts, or
/// none where all go on the same stream.
#[derive(Debug, Default)]
pub(crate) struct Parts([Option<Arc<dyn Point>>; PARTS]);

/// Blocks of rows behind each other: which part of them, and bytes of a row.
#[derive(Clone, Copy, Debug)]
struct Part {
    index: usize,
    of: usize,
    stride: usize,
}

impl Part {
    /// The first row of this part of `rows`, or the end of the part before. Both sides of a transfer
    /// divide its rows alike. Parts are a little shorter than they might be, but for the last: tokens
    /// of one part have rarely as many rows for a rank as those of another.
    fn bound(index: usize, of: usize, rows: usize) -> usize {
        match index == of {
            true => rows,
            false => (rows * index / of).saturating_sub(rows / (8 * of)),
        }
    }

    /// Its first row and how many there are, of `rows`.
    fn rows(&self, rows: usize) -> (usize, usize) {
        let first = Self::bound(self.index, self.of, rows);
        (first, Self::bound(self.index + 1, self.of, rows) - first)
    }
}

fn sum(counts: &[u32]) -> usize {
    counts.iter().map(|&n| n as usize).sum()
}

impl Gpu {
    /// Whether some rank is not mapped.
    pub fn is_far(&self) -> bool {
        self.shape.far > 0
    }

    /// Puts what this rank tells itself of an operation into the mailboxes of those it is put to.
    pub fn tell(&self, ep: &Inner, turn: &Turn) -> Result<()> {
        let at = ep.window.mailbox(turn.lane, ep.rank());
        ep.bulk.iter().try_for_each(|&peer| {
            let put = Put { peer, from: at, to: at, bytes: ep.window.message };
            ep.check("put", ep.link.put(&self.lane(turn.lane).queue, put))
        })
    }

    /// Waits, on the stream, for all announcements; `signal`: says before that this rank's are there.
    pub fn gather(&self, ep: &Inner, turn: &Turn, op: &'static str, signal: bool) -> Result<()> {
        if !ep.paired.is_empty() {
            let own = ep.window.mailbox(turn.lane, ep.rank());
            let mut blocks = self.lane(turn.lane).blocks.lock();
            let Blocks { sends, receives } = &mut *blocks;
            let bytes = ep.window.message;
            sends.clear();
            sends.extend(ep.paired.iter().map(|&peer| Put { peer, from: own, to: own, bytes }));
            receives.clear();
            let mailbox = |peer| ep.window.mailbox(turn.lane, peer);
            receives.extend(ep.paired.iter().map(|&peer| Receive {
                peer,
                to: mailbox(peer),
                bytes,
            }));
            self.exchange(ep, turn, (op, Phase::Posted), &self.lane(turn.lane).queue, &blocks)?;
        }
        self.meet(ep, turn, (op, Phase::Posted), &ep.flagged, signal)
    }

    fn exchange(
        &self,
        ep: &Inner,
        turn: &Turn,
        (op, phase): (&'static str, Phase),
        queue: &Queue,
        blocks: &Blocks,
    ) -> Result<()> {
        let (number, deadline) = (phase.flag(turn.lane), ep.deadline());
        let both = (blocks.sends.as_slice(), blocks.receives.as_slice());
        ep.check(op, ep.link.exchange(queue, op, number, both, deadline))
    }

    /// Where the host has to know it, the verdict on an operation that is not planned.
    pub fn judge(&self, ep: &Inner, turn: &Turn) -> Result<()> {
        if !self.is_far() {
            return Ok(());
        }
        let args = JudgeArgs { shape: self.shape, op: self.op(ep, turn, false) };
        // SAFETY: all addresses are of this layer's memory.
        unsafe { self.submit(turn, &MoeWork::Judge(&args)) }
    }

    /// Into how many parts rows go: the same on all ranks.
    fn parts(&self, ep: &Inner, stride: usize) -> usize {
        let large = ep.shape.max_tokens * stride >= self.in_parts_from;
        // A rail waits for whole blocks.
        if self.is_far() && large && !self.crosses() { PARTS } else { 1 }
    }

    /// Moves all tokens' rows. Where some go to ranks that are not mapped that is done in parts, of
    /// which it is known where the stream has packed them.
    ///
    /// # Safety
    /// As [`Gpu::submit`].
    pub unsafe fn move_in_parts(
        &self,
        ep: &Inner,
        turn: &Turn,
        plan: &MovePlan,
        args: &DispatchArgs,
    ) -> Result<Parts> {
        let mut parts = Parts::default();
        let of = self.parts(ep, args.format.stride as usize);
        if of == 1 || args.op.block > 0 {
            // SAFETY: by this function's contract.
            unsafe { self.submit(turn, &MoeWork::Dispatch(plan, args))? };
            return Ok(parts);
        }
        let tokens = args.routing.tokens as usize;
        for (index, packed) in parts.0.iter_mut().enumerate() {
            let (first, end) = (self.token(tokens, index), self.token(tokens, index + 1));
            if first < end {
                let (topk, fan_out) = (self.shape.topk, self.shape.fan_out);
                let some = DispatchArgs {
                    routing: args.routing.of_tokens((first, end), topk, fan_out),
                    payload: args.payload + first as u64 * args.payload_stride,
                    scales: args.scales + first as u64 * args.scales_stride,
                    first: first as u32,
                    ..*args
                };
                // SAFETY: by this function's contract; some of the same rows.
                unsafe { self.submit(turn, &MoeWork::Dispatch(plan, &some))? };
            }
            // SAFETY: the lane's stream is live.
            *packed = Some(cuda(unsafe { self.machine.record(self.lane(turn.lane).stream()) })?);
        }
        Ok(parts)
    }

    /// The first token of a part, or the end of the one before.
    fn token(&self, tokens: usize, part: usize) -> usize {
        let block = self.sms as usize * (part * PIECES / PARTS) / PIECES;
        if part == PARTS { tokens } else { tokens.min(block * block_tokens(tokens, self.sms)) }
    }

    /// Once a dispatch's verdict is good, sends the rows that were packed, and tells all.
    pub fn send_rows(
        &self,
        ep: &Inner,
        turn: &Turn,
        memory: &HandleMemory,
        parts: &Parts,
        (slot, stride): (usize, usize),
    ) -> Result<()> {
        let (lane, told) = (self.lane(turn.lane), memory.told()?);
        let carrier = lane.carrier.as_ref().filter(|_| parts.0[0].is_some());
        let queue = carrier.unwrap_or(&lane.queue);
        let of = if carrier.is_some() { PARTS } else { 1 };
        let mut packed = 0;
        for index in 0..of {
            let part = Part { index, of, stride };
            if let Some((stream, _)) = carrier.and_then(Queue::raw) {
                packed = packed.max(self.packed_with(ep, told, part));
                if let Some(point) = &parts.0[packed] {
                    // SAFETY: the lane's streams are live.
                    cuda(unsafe { point.order(stream) })?;
                }
            }
            self.send_part(ep, turn, (queue, told), part, slot)?;
        }
        let flag = Phase::Done.flag(turn.lane);
        for &peer in &ep.flagged {
            // What was put is ordered with flags of the same queue.
            let queue = if ep.reach[peer].is_none() { queue } else { &lane.queue };
            ep.check("signal", ep.link.signal(queue, peer, flag))?;
        }
        if let Some((stream, _)) = carrier.and_then(Queue::raw) {
            // First: what the lane's stream does from here on may overwrite what was put.
            self.flush_on(ep, queue)?;
            // SAFETY: both streams are live and of this device.
            cuda(unsafe { self.machine.chain(stream, lane.stream()) })?;
        }
        Ok(())
    }

    /// The part of the tokens with which all rows of a part of the rows have been packed.
    fn packed_with(&self, ep: &Inner, told: &Told, part: Part) -> usize {
        let world = ep.shape.world;
        let enough = |tokens: &usize| {
            let piece = (tokens + 1) * PIECES / PARTS;
            let far = || ep.bulk.iter().chain(&ep.paired);
            far().all(|&peer| {
                let end = Part::bound(part.index + 1, part.of, told.to[peer] as usize);
                let there = told.far.pieces.get(piece * world + peer);
                there.is_some_and(|&there| there as usize >= end)
            })
        };
        (0..PARTS - 1).find(enough).unwrap_or(PARTS - 1)
    }

    fn send_part(
        &self,
        ep: &Inner,
        turn: &Turn,
        (queue, told): (&Queue, &Told),
        part: Part,
        slot: usize,
    ) -> Result<()> {
        let staging = ep.window.send_staging(turn.lane);
        let staged = |peer: usize| {
            let (first, rows) = part.rows(told.to[peer] as usize);
            (staging + (sum(&told.to[..peer]) + first) * part.stride, first, rows * part.stride)
        };
        for &peer in &ep.bulk {
            let (from, first, bytes) = staged(peer);
            let row = told.far.sent_base[peer] as usize + first;
            let theirs = self.announced_slot(turn, peer);
            let to = ep.window.rank_rows(theirs) + row * part.stride;
            self.put(ep, queue, Put { peer, from, to, bytes })?;
        }
        if ep.paired.is_empty() {
            return Ok(());
        }
        let mut blocks = self.lane(turn.lane).blocks.lock();
        blocks.clear();
        let Blocks { sends, receives } = &mut *blocks;
        for &peer in &ep.paired {
            let (from, _, bytes) = staged(peer);
            let (first, rows) = part.rows(told.from[peer] as usize);
            let row = sum(&told.from[..peer]) + first;
            let to = ep.window.rank_rows(slot) + row * part.stride;
            sends.push(Put { peer, from, to: 0, bytes });
            receives.push(Receive { peer, to, bytes: rows * part.stride });
        }
        let op = ("dispatch, rows", Phase::Done);
        blocks.drop_empty();
        self.exchange(ep, turn, op, queue, &blocks)
    }

    fn put(&self, ep: &Inner, queue: &Queue, put: Put) -> Result<()> {
        if put.bytes == 0 {
            return Ok(());
        }
        ep.check("put", ep.link.put(queue, put))
    }

    /// Once a combine's verdict is good, sends the rows of `slot` to those homes that do not read them
    /// here.
    pub fn send_home(
        &self,
        ep: &Inner,
        turn: &Turn,
        told: &Told,
        (slot, stride, per_rank): (usize, usize, bool),
    ) -> Result<()> {
        let mut blocks = self.lane(turn.lane).blocks.lock();
        blocks.clear();
        let Blocks { sends, receives } = &mut *blocks;
        for &home in ep.bulk.iter().chain(&ep.paired) {
            match per_rank {
                true => sends.push(row_block(ep, turn, told, home, (slot, stride))),
                false => expert_blocks(ep, turn, told, home, (slot, stride), sends),
            }
        }
        for &owner in &ep.paired {
            let staging = ep.window.receive_staging(turn.lane);
            if per_rank {
                let (before, rows) = (sum(&told.to[..owner]), told.to[owner] as usize);
                let to = staging + before * stride;
                receives.push(Receive { peer: owner, to, bytes: rows * stride });
                continue;
            }
            let placement = &ep.shape.placement;
            let first = placement.physical_base(owner);
            let mut to = staging + sum(&told.far.sent[..first]) * stride;
            for &rows in &told.far.sent[first..first + placement.local_experts(owner)] {
                let bytes = rows as usize * stride;
                receives.push(Receive { peer: owner, to, bytes });
                to += bytes;
            }
        }
        self.send(ep, turn, ("combine, blocks", Phase::Done), &mut blocks)
    }

    /// Puts blocks to those that are put to, and exchanges those of the others.
    pub fn send(
        &self,
        ep: &Inner,
        turn: &Turn,
        op: (&'static str, Phase),
        blocks: &mut Blocks,
    ) -> Result<()> {
        let queue = &self.lane(turn.lane).queue;
        blocks.drop_empty();
        let sends = &mut blocks.sends;
        let is_bulk = |put: &Put| ep.bulk.contains(&put.peer);
        sends.iter().filter(|put| is_bulk(put)).try_for_each(|put| self.put(ep, queue, *put))?;
        sends.retain(|put| !is_bulk(put));
        if ep.paired.is_empty() {
            return Ok(());
        }
        self.exchange(ep, turn, op, queue, blocks)
    }

    /// Tells all, where some are put to, that this rank's blocks are there.
    pub fn tell_sent(&self, ep: &Inner, turn: &Turn) -> Result<()> {
        if ep.bulk.is_empty() {
            return Ok(());
        }
        self.signal(ep, turn, Phase::Sent, &ep.flagged)
    }

    /// Waits, on the stream, until blocks have come from those that put them here.
    pub fn await_sent(&self, ep: &Inner, turn: &Turn, op: &'static str) -> Result<()> {
        if ep.bulk.is_empty() {
            return Ok(());
        }
        self.wait(ep, turn, (op, Phase::Sent), &ep.flagged)
    }

    /// What comes later on the lane's stream may overwrite what was put by it.
    pub fn flush(&self, ep: &Inner, turn: &Turn) -> Result<()> {
        self.flush_on(ep, &self.lane(turn.lane).queue)
    }

    fn flush_on(&self, ep: &Inner, queue: &Queue) -> Result<()> {
        if ep.bulk.is_empty() {
            return Ok(());
        }
        ep.check("flush", ep.link.flush(queue, ep.deadline()))
    }
}

impl Blocks {
    pub fn clear(&mut self) {
        self.sends.clear();
        self.receives.clear();
    }

    fn drop_empty(&mut self) {
        self.sends.retain(|put| put.bytes > 0);
        self.receives.retain(|receive| receive.bytes > 0);
    }
}

/// The rows of a slot that go home to one rank, one per token.
fn row_block(
    ep: &Inner,
    turn: &Turn,
    told: &Told,
    home: usize,
    (slot, stride): (usize, usize),
) -> Put {
    let from = ep.window.rank_rows(slot) + sum(&told.from[..home]) * stride;
    let to = ep.window.receive_staging(turn.lane) + told.far.home[home] as usize * stride;
    Put { peer: home, from, to, bytes: told.from[home] as usize * stride }
}

/// The rows of a slot that go home to one rank, a block per expert: an expert's rows of one rank are
/// adjacent.
fn expert_blocks(
    ep: &Inner,
    turn: &Turn,
    told: &Told,
    home: usize,
    (slot, stride): (usize, usize),
    blocks: &mut Vec<Put>,
) {
    let experts = told.counts.len();
    let rows = |rank: usize, expert: usize| told.far.experts[rank * experts + expert] as usize;
    let staging = ep.window.receive_staging(turn.lane);
    let mut to = staging + told.far.home_choices[home] as usize * stride;
    for expert in 0..experts {
        let before: usize = (0..home).map(|rank| rows(rank, expert)).sum();
        let from = ep.window.expert_rows(slot) + (told.offsets[expert] as usize + before) * stride;
        let bytes = rows(home, expert) * stride;
        blocks.push(Put { peer: home, from, to, bytes });
        to += bytes;
    }
}
