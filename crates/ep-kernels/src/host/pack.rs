//! Packing of the rows that cross to another node, once each.

use super::copy::copy_row;
use super::scatter::{Source, write_origin, write_scales};
use crate::{KernelError, Layout, Placement, RecordFormat};

/// Which tokens cross to which node.
#[derive(Clone, Copy, Debug)]
pub struct Crossing<'a> {
    /// The node of every rank.
    pub node_of: &'a [usize],
    /// The node that rows are for.
    pub node: usize,
    /// The tokens, in the order of their rows.
    pub tokens: &'a [u32],
}

/// Writes one record per token of `crossing` to `to`, one after the other.
///
/// They are records as of [`super::scatter`], for a whole node: ids are *physical* experts where
/// those are of the node, −1 where they are not; weights go with them. A rank of that node makes
/// the records of its ranks from them by [`super::scatter_relayed`].
///
/// # Errors
/// [`KernelError::Length`] or [`KernelError::Null`] if the arguments do not fit each other; nothing
/// is written then.
///
/// # Safety
/// - `src` is readable for `layout.tokens` rows of payload and scales in the sizes of `fmt`;
/// - `to` is writable for `crossing.tokens.len()` records of `fmt.stride` bytes;
/// - nothing else accesses these or writes to the source meanwhile, and they do not overlap;
/// - `layout` comes from [`Layout::compute`] with this `placement`.
pub unsafe fn pack(
    fmt: &RecordFormat,
    src: &Source<'_>,
    layout: &Layout,
    placement: &Placement,
    source_rank: usize,
    crossing: &Crossing<'_>,
    to: *mut u8,
) -> Result<(), KernelError> {
    check(fmt, src, layout, placement, crossing, to)?;
    let topk = layout.topk;
    for (i, &token) in crossing.tokens.iter().enumerate() {
        let token = token as usize;
        let choices = token * topk..(token + 1) * topk;
        let weights = src.weights.map(|w| &w[choices.clone()]);
        let mine = |physical: i32| {
            let known = usize::try_from(physical).ok();
            known.is_some_and(|p| crossing.node_of[placement.owner(p).0] == crossing.node)
        };
        // SAFETY: `check` saw that the token is one of `layout`, whose rows are readable, and there
        // is room for a record per token, both by the caller's promise. A record has room for ids
        // and weights of `topk` rounded up to 4.
        unsafe {
            let row = to.add(i * fmt.stride);
            let payload = src.payload.add(token * src.payload_stride);
            copy_row(payload, row, fmt.payload_bytes, false, std::ptr::null());
            write_scales(fmt, src.scales.wrapping_add(token * src.scales_stride), row);
            let ids = row.add(fmt.ids_at).cast::<i32>();
            let out = row.add(fmt.weights_at).cast::<f32>();
            for (k, &physical) in layout.physical[choices].iter().enumerate() {
                let (id, weight) = match mine(physical) {
                    true => (physical, weights.map_or(1.0, |w| w[k])),
                    false => (-1, 0.0),
                };
                ids.add(k).write_unaligned(id);
                out.add(k).write_unaligned(weight);
            }
            for k in topk..topk.next_multiple_of(4) {
                ids.add(k).write_unaligned(0);
                out.add(k).write_unaligned(0.0);
            }
            write_origin(fmt, token as i32, source_rank, row);
        }
    }
    Ok(())
}

fn check(
    fmt: &RecordFormat,
    src: &Source<'_>,
    layout: &Layout,
    placement: &Placement,
    crossing: &Crossing<'_>,
    to: *mut u8,
) -> Result<(), KernelError> {
    const OPERATION: &str = "pack";
    let choices = layout.tokens * layout.topk;
    let last = crossing.tokens.iter().max().map_or(0, |&token| token as usize + 1);
    for (what, got, expected) in [
        ("topk of the layout", layout.topk, fmt.topk),
        ("ranks of the layout", layout.rank_counts.len(), placement.ranks()),
        ("nodes of ranks", crossing.node_of.len(), placement.ranks()),
        ("choices of the layout", layout.physical.len(), choices),
        ("weights", src.weights.map_or(choices, <[f32]>::len), choices),
        ("tokens of the layout", last.max(layout.tokens), layout.tokens),
    ] {
        if got != expected {
            return Err(KernelError::Length { operation: OPERATION, what, expected, got });
        }
    }
    let none = crossing.tokens.is_empty();
    for (what, null) in [
        ("payload", src.payload.is_null()),
        ("scales", fmt.scale_bytes > 0 && src.scales.is_null()),
        ("staging", to.is_null()),
    ] {
        if null && !none {
            return Err(KernelError::Null { operation: OPERATION, what });
        }
    }
    Ok(())
}
