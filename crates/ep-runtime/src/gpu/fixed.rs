//! Ranks that are not mapped, reached without the host: blocks of fixed size and place.
//!
//! The steps are those of [`super::far`], but for what is put or exchanged: whole blocks, one per rank, from
//! a fixed place of this rank's staging to a fixed place of the other's. Kernels pack rows into blocks
//! before that and bring them from there to their places behind it, by counts that are on the device. So
//! addresses and sizes are constants, the host need not know a verdict, and all of it can be captured.
//!
//! Whether the rows of a handle go like this was said by the dispatch it is of, in capacity mode, on all
//! ranks.
//!
//! *Blocks move whatever the verdict is.* Where an operation is refused, or a wait was released by a failure,
//! nothing has been packed; and a block has one place for all such operations of a lane, so what is moved
//! then is what was moved to the same place the last time: who still reads it there reads the same. (After a
//! failure, rows of exact mode may be there, whose places are others; then the host says that it failed.)
//! What is packed follows the announcement of the rank it is for, which follows that rank's last reading of
//! its staging.

use ep_kernels::PayloadKind;
use ep_kernels::cuda::moe::{FixedArgs, FixedLimits, FixedRows, MoeOp, MoeWork};
use ep_transport::{Put, Receive};

use crate::ep::Inner;
use crate::notify::Phase;
use crate::shape::{Blocks, Resolved};
use crate::window::Window;
use crate::{EpError, Result};

use super::memory::HandleMemory;
use super::{Gpu, Turn};

/// What a layer has for blocks of fixed size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fixed {
    blocks: Blocks,
    /// Bytes from block to block.
    stride: u64,
    limits: FixedLimits,
    /// Whether the transport's puts and exchanges can be captured.
    captures: bool,
}

impl Fixed {
    /// `None` where blocks have no fixed size or all ranks are mapped. `node_of`: the table of nodes.
    pub fn new(
        shape: &Resolved,
        window: &Window,
        (node_of, far, captures): (u64, usize, bool),
    ) -> Option<Self> {
        let blocks = shape.blocks.filter(|_| far > 0)?;
        let limit = |rows: usize, any: bool| if any { 0 } else { rows as u32 };
        let limits = FixedLimits {
            node_of,
            rows: limit(blocks.rows, blocks.any.0),
            expert_rows: limit(blocks.expert_rows, blocks.any.1),
        };
        Some(Self { blocks, stride: window.block as u64, limits, captures })
    }
}

impl Gpu {
    /// Whether rows of dispatches in capacity mode go in blocks of fixed size.
    pub(super) fn has_fixed(&self) -> bool {
        self.fixed.is_some()
    }

    /// Whether an error that leaves groups usable elsewhere ends this one. Of ranks that disagree some may
    /// have begun an exchange of blocks, of whose size the others know nothing: what those exchange next
    /// would be taken for it.
    pub(super) fn ends(&self, ep: &Inner, error: &EpError) -> bool {
        let disagree = matches!(error, EpError::Disagreement { .. });
        disagree && self.has_fixed() && !ep.paired.is_empty()
    }

    /// Fails if nothing of this layer can be captured.
    pub(super) fn check_capture(&self, op: &'static str) -> Result<()> {
        let detail = match &self.fixed {
            _ if !self.is_far() => return Ok(()),
            Some(fixed) if fixed.captures => return Ok(()),
            Some(_) => {
                "some ranks are not mapped, and what the transport sends them cannot be captured"
            }
            None => {
                "some ranks are not mapped: how much goes to them is known to the host only once \
                 announcements have come, so it cannot be captured; see MoeShape::fixed_blocks"
            }
        };
        Err(EpError::argument(op, detail))
    }

    /// Fails if rows of a handle cannot move in a capture.
    pub(super) fn check_captured_handle(
        &self,
        op: &'static str,
        memory: &HandleMemory,
    ) -> Result<()> {
        match self.is_far() && !memory.fixed {
            false => Ok(()),
            true => {
                let detail = "some ranks are not mapped, and the handle's rows do not go in blocks \
                              of fixed size, so they cannot be captured: set DispatchOpts::capacity \
                              in the dispatch it is of";
                Err(EpError::argument(op, detail))
            }
        }
    }

    /// As [`Gpu::op`], for rows of a handle.
    pub(super) fn op_with(
        &self,
        ep: &Inner,
        turn: &Turn,
        memory: &HandleMemory,
        marks: bool,
    ) -> MoeOp {
        let block = self.fixed.filter(|_| memory.fixed).map_or(0, |fixed| fixed.stride);
        MoeOp { block, ..self.op(ep, turn, marks) }
    }

    /// What blocks for rows of a handle hold.
    pub(super) fn limits(&self, memory: &HandleMemory) -> FixedLimits {
        self.fixed.filter(|_| memory.fixed).map_or_else(FixedLimits::default, |fixed| fixed.limits)
    }

    /// Sends the blocks into which a dispatch has packed rows of `stride` bytes.
    pub(super) fn send_fixed_rows(&self, ep: &Inner, turn: &Turn, stride: usize) -> Result<()> {
        let rows = self.fixed.map_or(0, |fixed| fixed.blocks.rows);
        self.send_fixed(ep, turn, "dispatch, rows", rows * stride)
    }

    /// Brings rows that have come in blocks to their places in a slot.
    pub(super) fn take_fixed_rows(
        &self,
        ep: &Inner,
        turn: &Turn,
        memory: &HandleMemory,
        (slot, kind): (usize, PayloadKind),
    ) -> Result<()> {
        let stride = self.row_format(ep, kind).stride as usize;
        self.move_fixed(ep, turn, memory, FixedRows::Received, (slot, stride))
    }

    /// Packs the rows of `slot` that go home to ranks that are not mapped, and sends them.
    pub(super) fn send_fixed_home(
        &self,
        ep: &Inner,
        turn: &Turn,
        memory: &HandleMemory,
        (slot, stride, per_rank): (usize, usize, bool),
    ) -> Result<()> {
        let Some(Fixed { blocks, .. }) = self.fixed else { return Ok(()) };
        let (which, rows) = match per_rank {
            true => (FixedRows::PerRank, blocks.rows),
            false => (FixedRows::PerExpert, blocks.expert_rows),
        };
        self.move_fixed(ep, turn, memory, which, (slot, stride))?;
        self.send_fixed(ep, turn, "combine, blocks", rows * stride)
    }

    fn move_fixed(
        &self,
        ep: &Inner,
        turn: &Turn,
        memory: &HandleMemory,
        which: FixedRows,
        (slot, stride): (usize, usize),
    ) -> Result<()> {
        let args = FixedArgs {
            shape: self.shape,
            routing: memory.routing,
            op: self.op_with(ep, turn, memory, false),
            slot: slot as u32,
            // Sizes were checked when the layer was built.
            stride: stride as u32,
            blocks: self.sms,
        };
        // SAFETY: the slot is this rank's, and so is this lane's staging; blocks that came are complete
        // behind the flags of those who sent them, and none is packed before the last was sent.
        unsafe { self.submit(turn, &MoeWork::Fixed(which, &args)) }
    }

    /// Sends `bytes` of the block of each rank that is not mapped.
    fn send_fixed(&self, ep: &Inner, turn: &Turn, op: &'static str, bytes: usize) -> Result<()> {
        let (rank, block) = (ep.rank(), ep.window.block);
        let send = ep.window.send_staging(turn.lane);
        let receive = ep.window.receive_staging(turn.lane);
        let mut blocks = self.lane(turn.lane).blocks.lock();
        blocks.clear();
        // Not all begin with the same rank.
        let next = ep.bulk.iter().position(|&peer| peer > rank).unwrap_or(0);
        let (later, first) = ep.bulk.split_at(next);
        let put = |&peer: &usize| Put {
            peer,
            from: send + peer * block,
            to: receive + rank * block,
            bytes,
        };
        blocks.sends.extend(first.iter().chain(later).chain(&ep.paired).map(put));
        let come = |&peer: &usize| Receive { peer, to: receive + peer * block, bytes };
        blocks.receives.extend(ep.paired.iter().map(come));
        self.send(ep, turn, (op, Phase::Done), &mut blocks)
    }
}
