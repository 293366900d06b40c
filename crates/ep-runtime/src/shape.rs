//! What a layer looks like, and what it takes in memory.

use ep_kernels::{ExpertFormat, PayloadKind, Placement, RecordFormat, align_row, align16};

use crate::node::Rails;
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
    pub(crate) fixed_blocks: bool,
    pub(crate) max_block_rows: Option<usize>,
    pub(crate) max_block_expert_rows: Option<usize>,
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
            fixed_blocks: false,
            max_block_rows: None,
            max_block_expert_rows: None,
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

    /// On GPUs, rows of ranks that are not mapped go in blocks of fixed size and place wherever
    /// [`DispatchOpts::capacity`](crate::DispatchOpts::capacity) is set: in such dispatches, in those with
    /// their handles, and in combines of both. The host then waits for nothing, as where all ranks are
    /// mapped, and all of it can be captured into graphs if the transport's puts and exchanges can.
    ///
    /// The price is that blocks travel whole, however few rows are in them: each dispatch and combine
    /// sends `max_block_rows` rows to every rank that is not mapped (a combine of
    /// [`Layout::ExpertMajor`] rows that is [`Precision::Exact`](crate::Precision::Exact),
    /// `max_block_expert_rows`), and rows are copied once more where they arrive and where they leave.
    /// Staging grows to a block per rank and lane, twice. Dispatches without `capacity` move the rows
    /// there are, as ever. Where ranks exchange blocks (NCCL), one that disagrees with the others on what is
    /// called ends the group: an exchange that has begun cannot be taken back.
    ///
    /// Not with [`Hierarchy::Node`](crate::Hierarchy::Node) over several nodes. On hosts and where all
    /// ranks are mapped it changes nothing.
    pub fn fixed_blocks(mut self) -> Self {
        self.fixed_blocks = true;
        self
    }

    /// With [`MoeShape::fixed_blocks`], the most rows a rank sends to one that is not mapped; by default,
    /// and at most, `max_tokens`. A dispatch of more is refused on every rank: no rows come of it, and the
    /// event of its combine says so.
    pub fn max_block_rows(mut self, rows: usize) -> Self {
        self.max_block_rows = Some(rows);
        self
    }

    /// With [`MoeShape::fixed_blocks`] and [`MoeShape::expert_major`], the most rows that the experts of a
    /// rank have of another rank, which is not mapped, without padding; by default, and at most, as many as
    /// there can be of `max_block_rows` tokens. A dispatch of more, of [`Layout::ExpertMajor`] rows, is
    /// refused in the same way.
    pub fn max_block_expert_rows(mut self, rows: usize) -> Self {
        self.max_block_expert_rows = Some(rows);
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
        let blocks = self.resolve_blocks(self.topk.min(most_local), rails)?;
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
            blocks,
            payloads,
            formats,
            placement,
            world,
            slots,
            lanes,
            strides,
        })
    }

    /// What blocks of fixed size hold, where a token has up to `choices` experts on a rank.
    fn resolve_blocks(&self, choices: usize, rails: Option<Rails>) -> Result<Option<Blocks>> {
        let bad = |detail: &str| Err(EpError::argument("plan", detail));
        if !self.fixed_blocks {
            return Ok(None);
        }
        if rails.is_some_and(|rails| rails.nodes > 1) {
            return bad(
                "fixed_blocks with Hierarchy::Node over several nodes; use Hierarchy::Flat",
            );
        }
        if self.max_block_rows == Some(0) || self.max_block_expert_rows == Some(0) {
            return bad("blocks of 0 rows; at least 1 is needed");
        }
        let rows = self.max_block_rows.map_or(self.max_tokens, |rows| rows.min(self.max_tokens));
        let all = rows.saturating_mul(choices);
        let expert_rows = match self.expert_alignment {
            Some(_) => self.max_block_expert_rows.map_or(all, |rows| rows.min(all)),
            None => 0,
        };
        Ok(Some(Blocks { rows, expert_rows, any: (rows == self.max_tokens, expert_rows == all) }))
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

/// What blocks of fixed size hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Rows, one per token.
    pub rows: usize,
    /// Rows of experts; 0 where there are none.
    pub expert_rows: usize,
    /// Whether any number of each there can be fits.
    pub any: (bool, bool),
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
    /// Where blocks between ranks that are not mapped have a fixed size.
    pub blocks: Option<Blocks>,
    pub payloads: Vec<PayloadKind>,
    formats: Vec<(RecordFormat, ExpertFormat)>,
    pub placement: Placement,
    pub world: usize,
    pub slots: usize,
    pub lanes: usize,
    pub strides: Strides,
}

impl Resolved {
    /// The formats of received rows of `kind`, one of this shape's payloads.
    pub fn formats(&self, kind: PayloadKind) -> (RecordFormat, ExpertFormat) {
        let known = self.payloads.iter().position(|&p| p == kind).unwrap_or(0);
        self.formats[known]
    }
}
