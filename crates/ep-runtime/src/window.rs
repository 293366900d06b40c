//! Where things are in a rank's window, and what a layer takes.

use crate::notify;
use crate::shape::{Blocks, Resolved};
use crate::{EpError, Result};

const PAGE: usize = 4096;

fn pages(bytes: usize) -> Result<usize> {
    bytes.checked_next_multiple_of(PAGE).ok_or_else(too_large)
}

fn too_large() -> EpError {
    EpError::argument("plan", "the window would exceed the address space")
}

fn mul(a: usize, b: usize) -> Result<usize> {
    a.checked_mul(b).ok_or_else(too_large)
}

fn add(a: usize, b: usize) -> Result<usize> {
    a.checked_add(b).ok_or_else(too_large)
}

impl Resolved {
    /// The offsets of everything in a rank's window; the same on every rank.
    pub fn window(&self, bulk: bool) -> Result<Window> {
        let message = notify::message_bytes(self.placement.physical(), self.world, self.nodes);
        let fan_out = self.topk.min(self.world);
        let rank_region = pages(mul(self.max_rows, self.strides.rank)?)?;
        let expert_region = pages(mul(self.max_expert_rows, self.strides.expert)?)?;
        // A home rank's staging holds every row that comes back to it: one per (token, rank), or
        // per (token, expert) where experts' rows travel unreduced.
        let home = mul(mul(self.max_tokens, fan_out)?, self.strides.rank)?;
        let home_experts = match self.expert_alignment {
            Some(_) => mul(mul(self.max_tokens, self.topk)?, self.strides.expert)?,
            None => 0,
        };
        // Whose staging has blocks of fixed size has one for each rank, of whatever rows.
        let block = match self.blocks {
            Some(Blocks { rows, expert_rows, .. }) if bulk => {
                mul(rows, self.strides.rank)?.max(mul(expert_rows, self.strides.expert)?)
            }
            _ => 0,
        };
        let blocks = mul(self.world, block)?;
        // Some room tells that ranks may not be mapped.
        let (send, receive) = if bulk {
            (pages(home.max(blocks).max(1))?, pages(home.max(home_experts).max(blocks))?)
        } else {
            (0, 0)
        };
        let forward = pages(mul(self.max_forward_rows, self.strides.rank)?)?;
        let mut window = Window {
            message,
            outboxes: 0,
            mailboxes: 0,
            slots: 0,
            slot: add(rank_region, expert_region)?,
            expert_region: rank_region,
            staging: 0,
            send,
            receive,
            forward,
            block,
            world: self.world,
            bytes: 0,
        };
        window.mailboxes = mul(self.lanes, message)?;
        let mailboxes = mul(mul(self.lanes, self.world)?, message)?;
        window.slots = pages(add(window.mailboxes, mailboxes)?)?;
        window.staging = add(mul(self.slots, window.slot)?, window.slots)?;
        let staging = add(add(send, receive)?, forward)?;
        window.bytes = add(window.staging, mul(self.lanes, staging)?)?;
        // A mapping's length is an isize.
        if window.bytes > isize::MAX as usize {
            return Err(too_large());
        }
        Ok(window)
    }
}

/// Where things are in a window, as offsets in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub message: usize,
    outboxes: usize,
    mailboxes: usize,
    slots: usize,
    slot: usize,
    expert_region: usize,
    staging: usize,
    send: usize,
    receive: usize,
    forward: usize,
    /// Bytes of a block of fixed size, one per rank in `send` and in `receive`; 0 without.
    pub block: usize,
    world: usize,
    pub bytes: usize,
}

impl Window {
    /// Where this rank composes what it announces on a lane.
    pub fn outbox(&self, lane: usize) -> usize {
        self.outboxes + lane * self.message
    }

    /// Where `source` announces itself on a lane.
    pub fn mailbox(&self, lane: usize, source: usize) -> usize {
        self.mailboxes + (lane * self.world + source) * self.message
    }

    /// Bytes of a slot.
    #[cfg(feature = "cuda")]
    pub fn slot_bytes(&self) -> usize {
        self.slot
    }

    /// Whether there is room for rows of ranks that are not mapped.
    #[cfg(feature = "cuda")]
    pub fn has_staging(&self) -> bool {
        self.send > 0
    }

    /// A slot's rank-major rows.
    pub fn rank_rows(&self, slot: usize) -> usize {
        self.slots + slot * self.slot
    }

    /// A slot's expert-major rows.
    pub fn expert_rows(&self, slot: usize) -> usize {
        self.rank_rows(slot) + self.expert_region
    }

    /// Where rows for bulk peers are packed.
    pub fn send_staging(&self, lane: usize) -> usize {
        self.staging + lane * (self.send + self.receive + self.forward)
    }

    /// Where bulk owners' blocks arrive at a home rank.
    pub fn receive_staging(&self, lane: usize) -> usize {
        self.send_staging(lane) + self.send
    }

    /// Where blocks of other nodes' ranks arrive at their rail.
    pub fn forward_staging(&self, lane: usize) -> usize {
        self.receive_staging(lane) + self.receive
    }
}

/// What a layer takes on each rank. Nothing has been allocated.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// Ranks.
    pub world: usize,
    /// Bytes of the symmetric window, all that follows included.
    pub window_bytes: usize,
    /// Bytes of one result slot.
    pub slot_bytes: usize,
    /// Result slots.
    pub slots: usize,
    /// Lanes.
    pub lanes: usize,
    /// Bytes of one rank's announcement of one operation.
    pub message_bytes: usize,
    /// Bytes of staging for peers that are not mapped; 0 where all are.
    pub staging_bytes: usize,
    /// Bytes of staging for rows of other nodes that this rank forwards; 0 unless
    /// [`Hierarchy::Node`](crate::Hierarchy::Node).
    pub forward_bytes: usize,
    /// Rows of other nodes a rank can be given to forward in one dispatch.
    pub max_forward_rows: usize,
    /// Bytes of a block of fixed size, with its part of staging; 0 unless
    /// [`MoeShape::fixed_blocks`](crate::MoeShape::fixed_blocks) and ranks may not be mapped.
    pub block_bytes: usize,
    /// Rank-major rows a slot holds.
    pub max_rows: usize,
    /// Expert-major rows a slot holds, padding included; 0 unless asked for.
    pub max_expert_rows: usize,
    /// Flags per source rank.
    pub flags: u32,
    /// Bytes of device memory beside the window, on a GPU.
    pub device_bytes: usize,
    /// Bytes of page-locked host memory beside flags, on a GPU.
    pub pinned_bytes: usize,
}

impl Plan {
    pub(crate) fn new(resolved: &Resolved, bulk: bool) -> Result<Self> {
        let window = resolved.window(bulk)?;
        Ok(Self {
            world: resolved.world,
            window_bytes: window.bytes,
            slot_bytes: window.slot,
            slots: resolved.slots,
            lanes: resolved.lanes,
            message_bytes: window.message,
            staging_bytes: resolved.lanes * (window.send + window.receive),
            forward_bytes: resolved.lanes * window.forward,
            max_forward_rows: resolved.max_forward_rows,
            block_bytes: window.block,
            max_rows: resolved.max_rows,
            max_expert_rows: resolved.max_expert_rows,
            flags: notify::flags(resolved.lanes),
            device_bytes: 0,
            pinned_bytes: 0,
        })
    }
}
