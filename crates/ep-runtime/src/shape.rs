//! What a layer looks like, and what it takes in memory.

use ep_kernels::{ExpertFormat, PayloadKind, Placement, RecordFormat, align_row, align16};

use crate::node::Rails;
use crate::notify;
use crate::{EpError, Result};

/// How received rows are laid out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layout {
    /// One row per (token, rank), by source rank, then token.
    #[default]
    RankMajor,
    /// One row per (token, local expert), grouped by local expert, each group padded with zero rows
    /// to a multiple of `alignment` rows, inside a group by source rank, then token.
    ExpertMajor {
        /// Rows; 1 for no padding.
        alignment: usize,
    },
}

impl Layout {
    pub(crate) fn code(self) -> u64 {
        match self {
            Self::RankMajor => 0,
            Self::ExpertMajor { alignment } => alignment as u64,
        }
    }
}

/// The shape of an MoE layer as dispatch and combine see it. Equal on every rank.
#[derive(Clone, Debug)]
pub struct MoeShape {
    pub(crate) hidden: usize,
    pub(crate) topk: usize,
    pub(crate) experts: usize,
    pub(crate) max_tokens: usize,
    pub(crate) max_rows: Option<usize>,
    pub(crate) max_expert_rows: Option<usize>,
    pub(crate) expert_alignment: Option<usize>,
    pub(crate) max_forward_rows: Option<usize>,
    pub(crate) payloads: Vec<PayloadKind>,
    pub(crate) placement: Option<Placement>,
}

impl MoeShape {
    /// A layer of `experts` experts over rows of `hidden` elements, of which each token takes
    /// `topk`. Carries bf16, up to 4096 tokens per rank, rank-major, unless told otherwise.
    pub fn new(hidden: usize, topk: usize, experts: usize) -> Self {
        Self {
            hidden,
            topk,
            experts,
            max_tokens: 4096,
            max_rows: None,
            max_expert_rows: None,
            expert_alignment: None,
            max_forward_rows: None,
            payloads: Vec::new(),
            placement: None,
        }
    }

    /// The most tokens a rank sends in one dispatch.
    pub fn max_tokens(mut self, tokens: usize) -> Self {
        self.max_tokens = tokens;
        self
    }

    /// The rank-major rows a rank can receive in one dispatch; the worst case, `world *
    /// max_tokens`, by default. More rows are [`EpError::Capacity`] on every rank.
    pub fn max_rows(mut self, rows: usize) -> Self {
        self.max_rows = Some(rows);
        self
    }

    /// Reserves room for [`Layout::ExpertMajor`] with alignments up to `alignment`.
    pub fn expert_major(mut self, alignment: usize) -> Self {
        self.expert_alignment = Some(alignment);
        self
    }

    /// The expert-major rows, padding included, a rank can receive in one dispatch; the worst case
    /// by default. More rows are [`EpError::Capacity`] on every rank.
    pub fn max_expert_rows(mut self, rows: usize) -> Self {
        self.max_expert_rows = Some(rows);
        self
    }

    /// With [`Hierarchy::Node`](crate::Hierarchy::Node), the rows of other nodes a rank can be given
    /// to forward in one dispatch; by default the worst case, `max_tokens` of every rank that may
    /// send it some. More are [`EpError::Capacity`] on every rank. On GPUs every handle has room for the
    /// choices of as many.
    pub fn max_forward_rows(mut self, rows: usize) -> Self {
        self.max_forward_rows = Some(rows);
        self
    }

    /// Adds a payload type that dispatch or combine carries. Without a call it is bf16 alone.
    pub fn payload(mut self, kind: PayloadKind) -> Self {
        if !self.payloads.contains(&kind) {
            self.payloads.push(kind);
        }
        self
    }

    /// Which ranks hold which expert; contiguous by default.
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = Some(placement);
        self
    }

    /// What this layer takes on each of `world` ranks, and whether it can be built at all. `rails`
    /// bounds what crosses nodes, where tokens do so once.
    pub(crate) fn resolve(
        &self,
        world: usize,
        (slots, lanes): (usize, usize),
        rails: Option<Rails>,
    ) -> Result<Resolved> {
        const OP: &str = "plan";
        let bad = |detail: String| Err(EpError::argument(OP, detail));
        if world == 0 {
            return bad("a group has at least one rank".into());
        }
        if self.topk == 0 || self.topk > self.experts {
            let (k, e) = (self.topk, self.experts);
            return bad(format!("top-k is {k}; it may be 1 to the number of experts, {e}"));
        }
        if slots == 0 || slots > 64 {
            return bad(format!("{slots} slots; 1 to 64 are possible"));
        }
        if lanes == 0 || lanes > 64 {
            return bad(format!("{lanes} lanes; 1 to 64 are possible"));
        }
        if self.expert_alignment == Some(0) {
            return bad("an expert-major alignment of 0 rows; 1 means no padding".into());
        }
        let placement = self.resolve_placement(world)?;
        let payloads = match self.payloads.as_slice() {
            [] => vec![PayloadKind::Bf16],
            kinds => kinds.to_vec(),
        };
        let most_local = (0..world).map(|r| placement.local_experts(r)).max().unwrap_or(0);
        let max_rows = self.max_rows.unwrap_or_else(|| world.saturating_mul(self.max_tokens));
        let max_expert_rows = self.expert_alignment.map_or(0, |alignment| {
            let rows = max_rows.saturating_mul(self.topk.min(most_local));
            let padded = rows.saturating_add(most_local.saturating_mul(alignment - 1));
            self.max_expert_rows.unwrap_or(padded)
        });
        if max_rows > i32::MAX as usize || max_expert_rows > i32::MAX as usize {
            return bad(format!(
                "{max_rows} rank-major and {max_expert_rows} expert-major rows per rank; row numbers are i32"
            ));
        }
        let forward = |rails: Rails| {
            let most = rails.sources.saturating_mul(self.max_tokens);
            self.max_forward_rows.map_or(most, |rows| rows.min(most))
        };
        let mut strides = Strides::default();
        let mut formats = Vec::new();
        for &kind in &payloads {
            formats.push(strides.include(kind, self.hidden, self.topk)?);
        }
        Ok(Resolved {
            hidden: self.hidden,
            topk: self.topk,
            max_tokens: self.max_tokens,
            max_rows,
            max_expert_rows,
            expert_alignment: self.expert_alignment,
            nodes: rails.map_or(0, |rails| rails.nodes),
            #[cfg(feature = "cuda")]
            sources: rails.map_or(0, |rails| rails.sources),
            max_forward_rows: rails.map_or(0, forward),
            payloads,
            formats,
            placement,
            world,
            slots,
            lanes,
            strides,
        })
    }

    fn resolve_placement(&self, world: usize) -> Result<Placement> {
        match &self.placement {
            None => Placement::contiguous(self.experts, world)
                .map_err(|e| EpError::argument("plan", e.to_string())),
            Some(p) if p.experts() != self.experts || p.ranks() != world => Err(EpError::argument(
                "plan",
                format!(
                    "the placement is for {} experts on {} ranks, the layer has {} on {world}",
                    p.experts(),
                    p.ranks(),
                    self.experts
                ),
            )),
            Some(p) => Ok(p.clone()),
        }
    }
}

/// The largest distances between rows over all payload types.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Strides {
    /// Rank-major rows, received or combined.
    pub rank: usize,
    /// Expert-major rows, received or combined.
    pub expert: usize,
}

impl Strides {
    fn include(
        &mut self,
        kind: PayloadKind,
        hidden: usize,
        topk: usize,
    ) -> Result<(RecordFormat, ExpertFormat)> {
        let record = RecordFormat::new(kind, hidden, topk)
            .map_err(|e| EpError::argument("plan", format!("payload {kind}: {e}")))?;
        self.rank = self.rank.max(record.stride);
        let expert = ExpertFormat::new(kind, hidden)
            .map_err(|e| EpError::argument("plan", format!("payload {kind}: {e}")))?;
        self.expert = self.expert.max(expert.stride);
        if kind.reducible() {
            self.rank = self.rank.max(OutFormat::rank_major(None, kind, hidden, topk).stride);
            self.expert = self.expert.max(OutFormat::expert_major(None, kind, hidden).stride);
        }
        Ok((record, expert))
    }
}

/// Where a row to be combined has its payload (at 0) and the weights it carries home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OutFormat {
    pub payload_bytes: usize,
    pub weights_at: usize,
    /// How many f32 weights a row carries.
    pub weights: usize,
    pub stride: usize,
}

impl OutFormat {
    /// In place over a received record where the output fits over the payload, dense otherwise.
    pub fn rank_major(
        received: Option<&RecordFormat>,
        kind: PayloadKind,
        hidden: usize,
        topk: usize,
    ) -> Self {
        let payload_bytes = kind.payload_bytes(hidden);
        match received {
            Some(f) if payload_bytes <= f.payload_bytes => {
                Self { payload_bytes, weights_at: f.weights_at, weights: topk, stride: f.stride }
            }
            _ => Self::dense(payload_bytes, topk),
        }
    }

    /// As [`OutFormat::rank_major`], for rows of [`Layout::ExpertMajor`].
    pub fn expert_major(received: Option<&ExpertFormat>, kind: PayloadKind, hidden: usize) -> Self {
        let payload_bytes = kind.payload_bytes(hidden);
        match received {
            Some(f) if payload_bytes <= f.payload_bytes => {
                Self { payload_bytes, weights_at: f.weight_at, weights: 1, stride: f.stride }
            }
            _ => Self::dense(payload_bytes, 1),
        }
    }

    fn dense(payload_bytes: usize, weights: usize) -> Self {
        let weights_at = align16(payload_bytes);
        Self { payload_bytes, weights_at, weights, stride: align_row(weights_at + weights * 4) }
    }
}

/// A shape with everything filled in for a world size.
#[derive(Clone, Debug)]
pub(crate) struct Resolved {
    pub hidden: usize,
    pub topk: usize,
    pub max_tokens: usize,
    pub max_rows: usize,
    pub max_expert_rows: usize,
    pub expert_alignment: Option<usize>,
    /// The most nodes there may be, where tokens cross them once; else 0.
    pub nodes: usize,
    /// Then, the most ranks whose rows one rank forwards.
    #[cfg(feature = "cuda")]
    pub sources: usize,
    pub max_forward_rows: usize,
    pub payloads: Vec<PayloadKind>,
    formats: Vec<(RecordFormat, ExpertFormat)>,
    pub placement: Placement,
    pub world: usize,
    pub slots: usize,
    pub lanes: usize,
    pub strides: Strides,
}

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
    /// The formats of received rows of `kind`, one of this shape's payloads.
    pub fn formats(&self, kind: PayloadKind) -> (RecordFormat, ExpertFormat) {
        let known = self.payloads.iter().position(|&p| p == kind).unwrap_or(0);
        self.formats[known]
    }

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
        // Some room tells that ranks may not be mapped.
        let (send, receive) =
            if bulk { (pages(home.max(1))?, pages(home.max(home_experts))?) } else { (0, 0) };
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
            max_rows: resolved.max_rows,
            max_expert_rows: resolved.max_expert_rows,
            flags: notify::flags(resolved.lanes),
            device_bytes: 0,
            pinned_bytes: 0,
        })
    }
}
