//! Dispatch's move: one read of every token, one write per destination.

use super::copy::{copy_row, store_fence, streams};
use crate::{KernelError, Layout, Placement, RecordFormat, align16};

/// The rows of one rank's tokens.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Payload of token 0.
    pub payload: *const u8,
    /// Bytes from one token's payload to the next.
    pub payload_stride: usize,
    /// Scales (or auxiliary bytes) of token 0; null if the payload has none.
    pub scales: *const u8,
    /// Bytes from one token's scales to the next.
    pub scales_stride: usize,
    /// `[T * K]` weights; without them every choice has weight 1.
    pub weights: Option<&'a [f32]>,
}

/// Where a destination rank takes this rank's rows.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Row 0 of the destination's region.
    pub base: *mut u8,
    /// The row that takes this rank's first one.
    pub first_row: usize,
    /// Rows of the region, counted from row 0: none at or beyond is written.
    pub rows: usize,
}

const OPERATION: &str = "scatter";

/// Writes every token's record to its row at every destination.
///
/// `targets` has one entry per rank. The record of a token at rank `r` goes to row
/// `targets[r].first_row + dest_index`. All stores are visible to whoever synchronises with this
/// thread after the call.
///
/// # Errors
/// [`KernelError::Length`], [`KernelError::Null`] or [`KernelError::Capacity`] if the arguments do
/// not fit each other; nothing is written then.
///
/// # Safety
/// - `src` is readable for `layout.tokens` rows of payload and scales in the sizes of `fmt`;
/// - every target is writable for its `rows` rows of `fmt.stride` bytes, or no row goes there;
/// - nothing else accesses the rows written or writes to the source meanwhile, and they do not
///   overlap;
/// - `layout` comes from [`Layout::compute`] with this `placement`.
pub unsafe fn scatter(
    fmt: &RecordFormat,
    src: &Source<'_>,
    layout: &Layout,
    placement: &Placement,
    source_rank: usize,
    targets: &[Target],
) -> Result<(), KernelError> {
    // SAFETY: the caller's promise.
    unsafe { scatter_where(fmt, src, layout, placement, source_rank, targets, &Choice::default()) }
}

/// [`scatter`] to the ranks for which `only` is true; the targets of others are not looked at.
///
/// # Errors
/// As [`scatter`]; `only` has one entry per rank too.
///
/// # Safety
/// As [`scatter`], as far as the chosen ranks are concerned.
pub unsafe fn scatter_only(
    fmt: &RecordFormat,
    src: &Source<'_>,
    layout: &Layout,
    placement: &Placement,
    source_rank: usize,
    targets: &[Target],
    only: &[bool],
) -> Result<(), KernelError> {
    let choice = Choice { only: Some(only), ..Choice::default() };
    // SAFETY: the caller's promise.
    unsafe { scatter_where(fmt, src, layout, placement, source_rank, targets, &choice) }
}

/// [`scatter`] of another rank's tokens, which are not numbered as they are there: token `i` of
/// `layout` is token `tokens[i]` of `source_rank`. Rows are what that rank would have written.
///
/// # Errors
/// As [`scatter`]; `tokens` has one entry per token.
///
/// # Safety
/// As [`scatter`].
pub unsafe fn scatter_relayed(
    fmt: &RecordFormat,
    src: &Source<'_>,
    layout: &Layout,
    placement: &Placement,
    (source_rank, tokens): (usize, &[i32]),
    targets: &[Target],
) -> Result<(), KernelError> {
    let choice = Choice { tokens: Some(tokens), ..Choice::default() };
    // SAFETY: the caller's promise.
    unsafe { scatter_where(fmt, src, layout, placement, source_rank, targets, &choice) }
}

/// What of a scatter is not as usual.
#[derive(Clone, Copy, Default)]
struct Choice<'a> {
    /// Whether rows go to a rank.
    only: Option<&'a [bool]>,
    /// The number of each token on its rank.
    tokens: Option<&'a [i32]>,
}

/// # Safety
/// As [`scatter`].
unsafe fn scatter_where(
    fmt: &RecordFormat,
    src: &Source<'_>,
    layout: &Layout,
    placement: &Placement,
    source_rank: usize,
    targets: &[Target],
    choice: &Choice<'_>,
) -> Result<(), KernelError> {
    let chosen = |rank: usize| choice.only.is_none_or(|only| only[rank]);
    let rows = check(fmt, src, layout, placement, targets, choice)?;
    let stream = streams(rows * fmt.payload_bytes, fmt.payload_bytes);
    for token in 0..layout.tokens {
        let payload = src.payload.wrapping_add(token * src.payload_stride);
        let scales = src.scales.wrapping_add(token * src.scales_stride);
        let choices = token * layout.topk..(token + 1) * layout.topk;
        let physical = &layout.physical[choices.clone()];
        let weights = src.weights.map(|w| &w[choices]);
        // The source row stays in the cache for all its destinations; the next one is fetched
        // during the first copy.
        let mut next = match token + 1 < layout.tokens {
            true => payload.wrapping_add(src.payload_stride),
            false => std::ptr::null(),
        };
        for (rank, index) in layout.destinations(token).filter(|&(rank, _)| chosen(rank)) {
            let target = &targets[rank];
            // SAFETY: `check` saw that all rows of this rank lie below `target.rows`, which are
            // writable, and token `token` is readable, both by the caller's promise.
            unsafe {
                let row = target.base.add((target.first_row + index) * fmt.stride);
                copy_row(payload, row, fmt.payload_bytes, stream, next);
                next = std::ptr::null();
                write_scales(fmt, scales, row);
                let experts = (placement.physical_base(rank), placement.local_experts(rank));
                write_choices(fmt, physical, weights, experts, row);
                let number = choice.tokens.map_or(token as i32, |tokens| tokens[token]);
                write_origin(fmt, number, source_rank, row);
            }
        }
    }
    if stream {
        store_fence();
    }
    Ok(())
}

/// Checks that the arguments fit each other and returns the number of rows to write.
fn check(
    fmt: &RecordFormat,
    src: &Source<'_>,
    layout: &Layout,
    placement: &Placement,
    targets: &[Target],
    Choice { only, tokens }: &Choice<'_>,
) -> Result<usize, KernelError> {
    let ranks = placement.ranks();
    let choices = layout.tokens * layout.topk;
    for (what, got, expected) in [
        ("topk of the layout", layout.topk, fmt.topk),
        ("ranks of the layout", layout.rank_counts.len(), ranks),
        ("choices of the layout", layout.physical.len(), choices),
        ("targets", targets.len(), ranks),
        ("only", only.map_or(ranks, <[bool]>::len), ranks),
        ("tokens", tokens.map_or(layout.tokens, <[i32]>::len), layout.tokens),
        ("weights", src.weights.map_or(choices, <[f32]>::len), choices),
    ] {
        if got != expected {
            return Err(KernelError::Length { operation: OPERATION, what, expected, got });
        }
    }
    let mut rows = 0;
    for (rank, (target, &count)) in targets.iter().zip(&layout.rank_counts).enumerate() {
        if count == 0 || only.is_some_and(|only| !only[rank]) {
            continue;
        }
        rows += count as usize;
        let needed = target.first_row.saturating_add(count as usize);
        if needed > target.rows {
            let available = target.rows;
            return Err(KernelError::Capacity { operation: OPERATION, rank, needed, available });
        }
        if target.base.is_null() {
            return Err(KernelError::Null { operation: OPERATION, what: "a target" });
        }
    }
    if rows > 0 && src.payload.is_null() {
        return Err(KernelError::Null { operation: OPERATION, what: "payload" });
    }
    if rows > 0 && fmt.scale_bytes > 0 && src.scales.is_null() {
        return Err(KernelError::Null { operation: OPERATION, what: "scales" });
    }
    Ok(rows)
}

/// # Safety
/// `row` is a writable record.
pub(super) unsafe fn write_origin(
    fmt: &RecordFormat,
    token: i32,
    source_rank: usize,
    row: *mut u8,
) {
    let origin = [token, source_rank as i32, 0, 0];
    // SAFETY: the part lies inside what the caller promises.
    unsafe { row.add(fmt.source_at).cast::<[i32; 4]>().write_unaligned(origin) };
}

/// # Safety
/// `scales` is readable for the scales of a row, `row` is a writable record.
pub(super) unsafe fn write_scales(fmt: &RecordFormat, scales: *const u8, row: *mut u8) {
    // SAFETY: both parts lie inside what the caller promises.
    unsafe {
        let to = row.add(fmt.scales_at);
        std::ptr::copy_nonoverlapping(scales, to, fmt.scale_bytes);
        let padding = align16(fmt.scale_bytes) - fmt.scale_bytes;
        to.add(fmt.scale_bytes).write_bytes(0, padding);
    }
}

/// Writes the ids and weights that concern a rank holding `count` experts from `base`.
///
/// # Safety
/// `row` is a writable record; `physical` and `weights` have `fmt.topk` entries.
unsafe fn write_choices(
    fmt: &RecordFormat,
    physical: &[i32],
    weights: Option<&[f32]>,
    (base, count): (usize, usize),
    row: *mut u8,
) {
    // SAFETY: ids and weights have room for `topk` rounded up to 4 entries each.
    unsafe {
        let ids = row.add(fmt.ids_at).cast::<i32>();
        let out = row.add(fmt.weights_at).cast::<f32>();
        for (k, &physical) in physical.iter().enumerate() {
            let local = physical.wrapping_sub(base as i32);
            let mine = physical >= 0 && (local as u32) < count as u32;
            let weight = weights.map_or(1.0, |w| w[k]);
            ids.add(k).write_unaligned(if mine { local } else { -1 });
            out.add(k).write_unaligned(if mine { weight } else { 0.0 });
        }
        for k in physical.len()..fmt.topk.next_multiple_of(4) {
            ids.add(k).write_unaligned(0);
            out.add(k).write_unaligned(0.0);
        }
    }
}
