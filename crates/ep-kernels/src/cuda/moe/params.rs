//! The structs that the kernels of dispatch and combine take: `kernels/moe.cuh` holds their twins,
//! and compiling it checks that both agree.
//!
//! Fields that are addresses are device addresses (`u64`); what they point to is written beside them.

use crate::cuda::memory::Plain;
use crate::cuda::source::{Layout, layout};

/// The fixed part of an announcement, as the runtime's protocol defines it. Counts follow it: one
/// `u32` per physical expert, then one per rank.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoeHeader {
    /// Which operation.
    pub op: u32,
    /// The result slot peers write to (dispatch) or read from (combine).
    pub slot: u32,
    /// How many operations this lane has seen.
    pub sequence: u64,
    /// 0 for rank-major, else the alignment of expert-major rows.
    pub layout: u64,
    /// [`crate::PayloadKind::code`] of the rows that travel.
    pub payload: u64,
    /// That code plus one of what the slot received, 0 if nothing.
    pub received: u64,
    /// The handle an operation refers to; 0 for an uncached dispatch.
    pub handle: u64,
    /// Options that all ranks share, as bits.
    pub options: u64,
    /// What is wrong on this rank: 0 nothing, 1 an id out of range, 2 a duplicate id, 3 the handle's
    /// own dispatch was refused.
    pub status: u32,
    /// The token that is wrong.
    pub bad_token: u32,
    /// The id that is wrong.
    pub bad_id: i64,
}

/// What never changes between operations of a layer on a rank.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MoeShape {
    /// `u64 [world]`: every rank's window as this device sees it.
    pub windows: u64,
    /// `u32 [physical]`: the rank of every physical expert.
    pub rank_of: u64,
    /// `u32 [world + 1]`: the first physical expert of every rank, and the end.
    pub base: u64,
    /// `u32 [experts + 1]` and `u32 [physical]`: the physical experts of every logical one.
    pub replica_offsets: u64,
    /// See `replica_offsets`.
    pub replicas: u64,
    /// `u32` in host memory: not 0 once the group has failed.
    pub poisoned: u64,
    /// Bytes from one mailbox to the next.
    pub message: u64,
    /// Offset of slot 0 in a window.
    pub slots_at: u64,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Offset of the expert-major rows in a slot; rank-major rows start it.
    pub expert_region: u64,
    /// This rank.
    pub rank: u32,
    /// Ranks R.
    pub world: u32,
    /// Choices per token K.
    pub topk: u32,
    /// F = min(K, R): the most destinations of a token.
    pub fan_out: u32,
    /// Physical experts P.
    pub physical: u32,
    /// Logical experts.
    pub experts: u32,
    /// Experts of this rank.
    pub local_experts: u32,
    /// Slots of every rank.
    pub slots: u32,
    /// Rank-major rows a slot holds.
    pub max_rows: u32,
    /// Expert-major rows a slot holds.
    pub max_expert_rows: u32,
    /// Ranks that are not mapped here: their windows are 0.
    pub far: u32,
    /// 0.
    pub reserved: u32,
}

/// A handle in device memory: all arrays but `header` as the host's `Layout` and `CountMatrix` have
/// them. T is the number of this rank's tokens, N the rank-major rows received.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MoeRouting {
    /// [`MoeHandleHeader`].
    pub header: u64,
    /// `i32 [T * K]`: physical expert or −1.
    pub physical: u64,
    /// `u32 [T * K]`: earlier tokens of this rank with that expert.
    pub expert_index: u64,
    /// `i32 [T * K]`: a token's choices k, in the order of physical experts; −1 behind the last.
    pub order: u64,
    /// `f32 [T * K]`: gate weights, 1.0 where none were given.
    pub weights: u64,
    /// `i32 [T * F]`: destination ranks, ascending; −1 behind the last.
    pub dest_rank: u64,
    /// `u32 [T * F]`: earlier tokens of this rank to that rank.
    pub dest_index: u64,
    /// `u32 [R]`: rows this rank sends to each rank.
    pub rank_counts: u64,
    /// `u32 [P]`: (token, choice) pairs of this rank per physical expert.
    pub expert_counts: u64,
    /// `u32 [R]`: where this rank's rows start at each rank.
    pub sent_base: u64,
    /// `u32 [P]`: where this rank's rows start among those of a physical expert.
    pub expert_base: u64,
    /// `i32 [P]`: expert-major, the first row of every physical expert on its rank; of one on a rank
    /// that is not mapped, in this rank's staging, with 0 in `expert_base`.
    pub expert_offsets: u64,
    /// `i32 [local experts]`: tokens received, without padding.
    pub counts: u64,
    /// `i32 [local experts + 1]`: first row of each local expert, and the end.
    pub offsets: u64,
    /// `u32 [R]`: rows received from each rank.
    pub received: u64,
    /// Expert-major, `i32 [N * K]`: the expert-major rows of a received row, ascending, −1 behind
    /// the last.
    pub positions: u64,
    /// Beside them, `i32 [N * K]`: which choice k of its token each one is.
    pub choices: u64,
    /// Beside them, `f32 [N * K]`: their gate weights.
    pub row_weights: u64,
    /// `u32 [R]`: where the rows for and from each rank are staged, in rows: behind those of the
    /// ranks before it.
    pub staged: u64,
    /// `u32 [PIECES * R]`: rows for each rank before each piece of this rank's tokens.
    pub pieces: u64,
    /// Expert-major in blocks of fixed size, `u32 [R * local experts]`: rows from each rank for each
    /// local expert.
    pub experts_from: u64,
    /// T.
    pub tokens: u32,
    /// 0.
    pub reserved: u32,
}

/// What a handle knows of itself.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MoeHandleHeader {
    /// The dispatch it came from: lane << 48 | sequence.
    pub id: u64,
    /// As [`MoeHeader::layout`].
    pub layout: u64,
    /// Not 0 if its dispatch was refused.
    pub status: u32,
    /// N, rank-major rows received.
    pub rows: u32,
    /// Expert-major rows received, padding included.
    pub expert_rows: u32,
    /// T.
    pub tokens: u32,
}

/// A lane in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MoeLane {
    /// Operations so far.
    pub sequence: u64,
    /// The first wrong choice of the layout in progress: `(token * K + k) << 2 | status`, all ones
    /// if none.
    pub bad_choice: u64,
    /// Not 0 if the operation in progress was refused. Kernels that come after the peers' `Done` look
    /// here: announcements may be those of the next operation by then.
    pub refused: u64,
}

/// How an operation went, in host memory. The announcements of all ranks follow it if the verdict
/// is [`verdict::DISAGREE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MoeReport {
    /// The operation's ticket, written last.
    pub ticket: u64,
    /// The operation's number on its lane.
    pub sequence: u64,
    /// Too many rows: the most any rank needs.
    pub needed: u64,
    /// One of [`verdict`].
    pub verdict: u32,
    /// Too many rows: the first rank that has.
    pub rank: u32,
    /// Too many rows: 0 rank-major, 1 expert-major, 2 beyond `i32`, 3 to forward, 4 of a block, 5 of
    /// experts' rows of a block.
    pub what: u32,
    /// 0.
    pub reserved: u32,
}

/// Values of [`MoeReport::verdict`].
pub mod verdict {
    /// Rows move.
    pub const OK: u32 = 0;
    /// The announcements say why not.
    pub const DISAGREE: u32 = 1;
    /// Rows do not fit.
    pub const CAPACITY: u32 = 2;
    /// The group has failed.
    pub const POISONED: u32 = 3;
}

/// [`crate::RecordFormat`] in the kernels' integers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MoeRowFormat {
    /// See [`crate::RecordFormat`].
    pub payload_bytes: u32,
    /// See [`crate::RecordFormat`].
    pub scales_at: u32,
    /// See [`crate::RecordFormat`].
    pub scale_bytes: u32,
    /// See [`crate::RecordFormat`].
    pub ids_at: u32,
    /// See [`crate::RecordFormat`].
    pub weights_at: u32,
    /// See [`crate::RecordFormat`].
    pub source_at: u32,
    /// See [`crate::RecordFormat`].
    pub stride: u32,
    /// 0.
    pub reserved: u32,
}

/// [`crate::ExpertFormat`] in the kernels' integers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MoeExpertFormat {
    /// See [`crate::ExpertFormat`].
    pub payload_bytes: u32,
    /// See [`crate::ExpertFormat`].
    pub scales_at: u32,
    /// See [`crate::ExpertFormat`].
    pub scale_bytes: u32,
    /// See [`crate::ExpertFormat`].
    pub weight_at: u32,
    /// See [`crate::ExpertFormat`].
    pub row_at: u32,
    /// See [`crate::ExpertFormat`].
    pub stride: u32,
}

/// Where a row to be combined has its payload (at 0) and the weights it carries home.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MoeOutFormat {
    /// Bytes of the payload.
    pub payload_bytes: u32,
    /// Offset of the weights.
    pub weights_at: u32,
    /// How many `f32` weights a row carries.
    pub weights: u32,
    /// Bytes from one row to the next.
    pub stride: u32,
}

/// What belongs to one operation.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MoeOp {
    /// [`MoeLane`].
    pub lane: u64,
    /// This lane's mailboxes in this rank's own window, by source.
    pub mailboxes: u64,
    /// [`MoeReport`] in host memory.
    pub report: u64,
    /// What [`MoeReport::ticket`] becomes.
    pub ticket: u64,
    /// `u32` in host memory, 64 bytes apart by phase (announcements, rows), then source: not 0 while the
    /// stream waits for that source's flag; may be 0: nobody looks.
    pub awaited: u64,
    /// The lane's number.
    pub lane_index: u64,
    /// Where rows for ranks that are not mapped are packed.
    pub send: u64,
    /// Where rows that such ranks send home arrive; in blocks of fixed size, all rows of theirs.
    pub receive: u64,
    /// Where blocks have fixed places, bytes from one rank's block to the next, in `send` and in
    /// `receive`: there is one for each rank. Else 0: [`MoeRouting::staged`] says where rows are.
    pub block: u64,
}

macro_rules! plain {
    ($($name:ident),*) => {
        $(
            // SAFETY: repr(C), integers only, no padding: the sizes below add up.
            unsafe impl Plain for $name {}
        )*
    };
}
plain!(
    MoeHeader,
    MoeShape,
    MoeRouting,
    MoeHandleHeader,
    MoeLane,
    MoeReport,
    MoeRowFormat,
    MoeExpertFormat,
    MoeOutFormat,
    MoeOp
);

const _: () = assert!(size_of::<MoeHeader>() == 2 * 4 + 6 * 8 + 2 * 4 + 8);
const _: () = assert!(size_of::<MoeShape>() == 10 * 8 + 12 * 4);
const _: () = assert!(size_of::<MoeRouting>() == 21 * 8 + 2 * 4);
const _: () = assert!(size_of::<MoeHandleHeader>() == 2 * 8 + 4 * 4);
const _: () = assert!(size_of::<MoeLane>() == 24);
const _: () = assert!(size_of::<MoeReport>() == 3 * 8 + 4 * 4);
const _: () = assert!(size_of::<MoeRowFormat>() == 32);
const _: () = assert!(size_of::<MoeExpertFormat>() == 24);
const _: () = assert!(size_of::<MoeOutFormat>() == 16);
const _: () = assert!(size_of::<MoeOp>() == 72);

/// The layouts of the structs above, for every source that has `moe.cuh`.
pub(crate) const SHARED: [Layout; 10] = [
    layout!(MoeHeader {
        op,
        slot,
        sequence,
        layout,
        payload,
        received,
        handle,
        options,
        status,
        bad_token,
        bad_id
    }),
    layout!(MoeShape {
        windows,
        rank_of,
        base,
        replica_offsets,
        replicas,
        poisoned,
        message,
        slots_at,
        slot_bytes,
        expert_region,
        rank,
        world,
        topk,
        fan_out,
        physical,
        experts,
        local_experts,
        slots,
        max_rows,
        max_expert_rows,
        far,
        reserved
    }),
    layout!(MoeRouting {
        header,
        physical,
        expert_index,
        order,
        weights,
        dest_rank,
        dest_index,
        rank_counts,
        expert_counts,
        sent_base,
        expert_base,
        expert_offsets,
        counts,
        offsets,
        received,
        positions,
        choices,
        row_weights,
        staged,
        pieces,
        experts_from,
        tokens,
        reserved
    }),
    layout!(MoeHandleHeader { id, layout, status, rows, expert_rows, tokens }),
    layout!(MoeLane { sequence, bad_choice, refused }),
    layout!(MoeReport { ticket, sequence, needed, verdict, rank, what, reserved }),
    layout!(MoeRowFormat {
        payload_bytes,
        scales_at,
        scale_bytes,
        ids_at,
        weights_at,
        source_at,
        stride,
        reserved
    }),
    layout!(MoeExpertFormat { payload_bytes, scales_at, scale_bytes, weight_at, row_at, stride }),
    layout!(MoeOutFormat { payload_bytes, weights_at, weights, stride }),
    layout!(MoeOp { lane, mailboxes, report, ticket, awaited, lane_index, send, receive, block }),
];

/// Pieces of a rank's tokens that [`MoeRouting::pieces`] tells of: piece `i` begins with the tokens of
/// block `blocks * i / PIECES` of the layout, each of which has [`block_tokens`] tokens.
pub const PIECES: usize = 16;

/// How many tokens a block of a layout of `blocks` blocks has, but for the last: `tile.cuh` deals them.
pub fn block_tokens(tokens: usize, blocks: u32) -> usize {
    tokens.div_ceil(blocks.max(1) as usize).next_multiple_of(32)
}

impl MoeRouting {
    /// The routing of the tokens from `first` to `end` as far as moving and summing need it, for a layer
    /// of `topk` choices and `fan_out` destinations per token.
    pub fn of_tokens(&self, (first, end): (usize, usize), topk: u32, fan_out: u32) -> Self {
        let (choices, places) =
            (4 * first as u64 * u64::from(topk), 4 * first as u64 * u64::from(fan_out));
        Self {
            physical: self.physical + choices,
            expert_index: self.expert_index + choices,
            order: self.order + choices,
            weights: self.weights + choices,
            dest_rank: self.dest_rank + places,
            dest_index: self.dest_index + places,
            tokens: (end - first) as u32,
            ..*self
        }
    }
}

impl MoeRowFormat {
    /// `None` where a row's size does not fit 32 bits.
    pub fn new(f: &crate::RecordFormat) -> Option<Self> {
        let n = |n: usize| u32::try_from(n).ok();
        Some(Self {
            payload_bytes: n(f.payload_bytes)?,
            scales_at: n(f.scales_at)?,
            scale_bytes: n(f.scale_bytes)?,
            ids_at: n(f.ids_at)?,
            weights_at: n(f.weights_at)?,
            source_at: n(f.source_at)?,
            stride: n(f.stride)?,
            reserved: 0,
        })
    }
}

impl MoeExpertFormat {
    /// `None` where a row's size does not fit 32 bits.
    pub fn new(f: &crate::ExpertFormat) -> Option<Self> {
        let n = |n: usize| u32::try_from(n).ok();
        Some(Self {
            payload_bytes: n(f.payload_bytes)?,
            scales_at: n(f.scales_at)?,
            scale_bytes: n(f.scale_bytes)?,
            weight_at: n(f.weight_at)?,
            row_at: n(f.row_at)?,
            stride: n(f.stride)?,
        })
    }
}
