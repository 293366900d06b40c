//! What ranks tell each other before rows move.
//!
//! Every operation, dispatch or combine, is announced by every rank to every rank, so all hold the
//! same set of announcements and come to the same verdict: a wrong id, an overflow or a
//! disagreement is the same error everywhere, before payload moves. Binary flags per (lane,
//! source) carry an operation:
//!
//! * [`Phase::Posted`]: the source's announcement is in this rank's mailbox. It is consumed before
//!   this rank raises `Done`.
//! * [`Phase::Done`]: the source has written all rows it owed this rank (to a rank of another node,
//!   where rows are forwarded inside nodes: its blocks), and has read all rows and the announcement
//!   it wanted from it.
//!
//! A rank announces its next operation on a lane only after it has consumed `Done` from every peer,
//! so an announcement never overwrites one that is still being read, and no flag is raised twice.

use ep_kernels::{CountMatrix, IdError};

use crate::shape::Resolved;
use crate::{EpError, Result};

/// The flags of a lane.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Phase {
    Posted,
    Done,
    /// On GPUs where ranks are not mapped: the source has sent what goes home. All raise it, also
    /// those that are mapped, so that every wait is for all.
    #[cfg(feature = "cuda")]
    Sent,
}

impl Phase {
    pub fn flag(self, lane: usize) -> u32 {
        (lane * PHASES) as u32 + self as u32
    }
}

/// Flags of a lane, whatever this crate is built with: ranks have to agree.
const PHASES: usize = 3;

/// How many flags `lanes` lanes take per source.
pub(crate) fn flags(lanes: usize) -> u32 {
    (lanes * PHASES) as u32
}

/// The fixed part of an announcement. The counts of an uncached dispatch follow it: one u32 per
/// physical expert, then one per rank, then one per node where tokens cross nodes once.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    /// Which operation.
    pub op: u32,
    /// The result slot peers write to (dispatch) or read from (combine).
    pub slot: u32,
    /// How many operations this lane has seen.
    pub sequence: u64,
    /// `Layout::code`.
    pub layout: u64,
    /// `PayloadKind::code` of the rows that travel.
    pub payload: u64,
    /// `PayloadKind::code + 1` of what the slot received, 0 if nothing; decides in-place formats.
    pub received: u64,
    /// The handle an operation refers to; 0 for an uncached dispatch.
    pub handle: u64,
    /// Options that all ranks share, as bits.
    pub options: u64,
    /// What is wrong with this rank's ids, if anything.
    pub status: u32,
    /// The token that is wrong.
    pub bad_token: u32,
    /// The id that is wrong.
    pub bad_id: i64,
}

pub(crate) const OP_DISPATCH: u32 = 1;
pub(crate) const OP_CACHED: u32 = 2;
pub(crate) const OP_COMBINE: u32 = 3;

pub(crate) const STATUS_OK: u32 = 0;
pub(crate) const STATUS_RANGE: u32 = 1;
pub(crate) const STATUS_DUPLICATE: u32 = 2;

const HEADER: usize = size_of::<Header>();
const _: () = assert!(HEADER.is_multiple_of(8) && align_of::<Header>() == 8);

/// Bytes of an announcement, a multiple of a cache line.
pub(crate) fn message_bytes(physical: usize, world: usize, nodes: usize) -> usize {
    bytes(physical + world + nodes).next_multiple_of(64)
}

/// Bytes of an announcement with so many counts.
pub(crate) fn bytes(counts: usize) -> usize {
    (HEADER + 4 * counts).next_multiple_of(16)
}

fn op_name(op: u32) -> &'static str {
    match op {
        OP_DISPATCH => "dispatch",
        OP_CACHED => "cached dispatch",
        OP_COMBINE => "combine",
        _ => "another operation",
    }
}

/// How many of a rank's rows go where.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts<'a> {
    /// Per physical expert.
    pub expert: &'a [u32],
    /// Per rank.
    pub rank: &'a [u32],
    /// Per other node, where tokens cross nodes once.
    pub node: &'a [u32],
}

impl Counts<'_> {
    /// How many counts these are.
    pub fn len(&self) -> usize {
        self.expert.len() + self.rank.len() + self.node.len()
    }
}

/// Writes an announcement.
///
/// # Safety
/// `to` is aligned to 16 and writable for `bytes(counts.len())`.
pub(crate) unsafe fn write(to: *mut u8, header: &Header, counts: &Counts<'_>) {
    // SAFETY: by this function's contract.
    unsafe {
        to.cast::<Header>().write(*header);
        let mut at = to.add(HEADER).cast::<u32>();
        for counts in [counts.expert, counts.rank, counts.node] {
            at.copy_from_nonoverlapping(counts.as_ptr(), counts.len());
            at = at.add(counts.len());
        }
    }
}

/// Reads an announcement's fixed part.
///
/// # Safety
/// `from` is a whole announcement and nobody writes it.
pub(crate) unsafe fn read(from: *const u8) -> Header {
    // SAFETY: by this function's contract.
    unsafe { from.cast::<Header>().read() }
}

/// The counts of an announcement in which there are so many of `nodes`.
///
/// # Safety
/// As [`read`], while the result lives; the announcement is one of an uncached dispatch with OK
/// status.
pub(crate) unsafe fn counts<'a>(from: *const u8, shape: &Resolved, nodes: usize) -> Counts<'a> {
    let (physical, ranks) = (shape.placement.physical(), shape.world);
    let all = physical + ranks + nodes;
    // SAFETY: by this function's contract; a message holds so many counts.
    let counts = unsafe { std::slice::from_raw_parts(from.add(HEADER).cast(), all) };
    let (expert, rest) = counts.split_at(physical);
    let (rank, node) = rest.split_at(ranks);
    Counts { expert, rank, node }
}

/// What differs where ranks called different operations.
pub(crate) const OPERATION: &str = "operation";

/// The verdict on the announcements of all ranks: the same on each of them.
pub(crate) fn verdict(op: &'static str, all: &[Header]) -> Result<()> {
    let show_layout = |layout| match layout {
        0 => "rank-major".into(),
        alignment => format!("expert-major aligned to {alignment}"),
    };
    agree(op, all, OPERATION, |h| h.op.into(), |op| op_name(op as u32).into())?;
    agree(op, all, "sequence on the lane", |h| h.sequence, |n| n.to_string())?;
    agree(op, all, "layout", |h| h.layout, show_layout)?;
    agree(op, all, "payload type", |h| h.payload, |code| format!("type {code:#x}"))?;
    agree(op, all, "received payload type", |h| h.received, |code| format!("type {code:#x}"))?;
    agree(op, all, "handle", |h| h.handle, |id| format!("{id:#x}"))?;
    agree(op, all, "options", |h| h.options, |bits| format!("{bits:#b}"))?;
    match all.iter().position(|h| h.status != STATUS_OK) {
        None => Ok(()),
        Some(rank) => {
            let Header { status, bad_token, bad_id, .. } = all[rank];
            let detail = match status {
                STATUS_RANGE => format!("expert id {bad_id} is out of range"),
                STATUS_DUPLICATE => format!("expert id {bad_id} occurs twice"),
                _ => "the dispatch of its handle was refused".into(),
            };
            Err(EpError::Ids { op, rank, token: bad_token as usize, id: bad_id, detail })
        }
    }
}

fn agree(
    op: &'static str,
    all: &[Header],
    field: &str,
    key: impl Fn(&Header) -> u64,
    show: impl Fn(u64) -> String,
) -> Result<()> {
    let first = key(&all[0]);
    if all.iter().all(|h| key(h) == first) {
        return Ok(());
    }
    let ranks: Vec<usize> = (1..all.len()).filter(|&r| key(&all[r]) != first).collect();
    let others: Vec<String> =
        ranks.iter().map(|&r| format!("rank {r}: {}", show(key(&all[r])))).collect();
    let detail = format!("rank 0: {}; {}", show(first), others.join("; "));
    Err(EpError::Disagreement { op, field: field.into(), ranks, detail })
}

/// The verdict on the counts of a dispatch: the same on every rank.
pub(crate) fn capacity(
    op: &'static str,
    matrix: &CountMatrix,
    max_rows: usize,
    expert_major: Option<(usize, usize)>,
) -> Result<()> {
    if let Err(e) = matrix.finish() {
        // Row numbers are i32; so many rows never fit.
        let (what, setting) = ("rows", "max_rows");
        let needed = i32::MAX as usize + 1;
        tracing::debug!("{e}");
        return Err(EpError::Capacity { op, rank: 0, what, needed, reserved: max_rows, setting });
    }
    let over = |what, setting, reserved: usize, rows: &dyn Fn(usize) -> usize| {
        let Some(rank) = (0..matrix.ranks()).find(|&r| rows(r) > reserved) else { return Ok(()) };
        let needed = (0..matrix.ranks()).map(rows).max().unwrap_or(0);
        Err(EpError::Capacity { op, rank, what, needed, reserved, setting })
    };
    over("rank-major rows", "max_rows", max_rows, &|r| matrix.rows_at(r))?;
    if let Some((alignment, reserved)) = expert_major {
        let rows = |r| matrix.expert_rows(r, alignment);
        over("expert-major rows", "max_expert_rows", reserved, &rows)?;
    }
    Ok(())
}
/// Says in an announcement what is wrong with the ids.
pub(crate) fn set_status(header: &mut Header, error: &IdError) -> Result<()> {
    let (status, token, id) = match *error {
        IdError::OutOfRange { token, id, .. } => (STATUS_RANGE, token, id),
        IdError::Duplicate { token, id } => (STATUS_DUPLICATE, token, id),
        _ => return Err(EpError::argument("dispatch", error.to_string())),
    };
    header.status = status;
    header.bad_token = token as u32;
    header.bad_id = id;
    Ok(())
}
