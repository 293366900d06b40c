//! From rank-major rows to expert-major ones, on the receiving rank.

use super::copy::{copy_row, store_fence, streams};
use crate::{ExpertFormat, KernelError, RecordFormat, align16};

/// Copies received rows to the experts they are for; reusable.
#[derive(Clone, Debug, Default)]
pub struct Expander {
    /// `[rows * topk]`, from the last [`Expander::expand`]: the expert-major row that serves a
    /// choice of a received row, or −1 where the choice is not for this rank.
    pub map: Vec<i32>,
    next: Vec<i32>,
}

/// The expert-major region that [`Expander::expand`] fills.
#[derive(Clone, Copy, Debug)]
pub struct ExpertRows<'a> {
    /// Row 0.
    pub base: *mut u8,
    /// Rows there is room for.
    pub rows: usize,
    /// The rows' format.
    pub fmt: ExpertFormat,
    /// `[local experts + 1]`: where each expert's rows start, then the end.
    pub offsets: &'a [i32],
    /// `[local experts]`: rows of each expert, without padding.
    pub counts: &'a [i32],
}

const OPERATION: &str = "expand";

impl Expander {
    /// An expander without buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Writes each of `rows` rank-major rows to every local expert it is for, experts' rows in
    /// rank-major order, and fills the padding rows between: payload, scales and weight zero,
    /// origin −1. Fills [`Expander::map`].
    ///
    /// # Errors
    /// [`KernelError::Length`], [`KernelError::Null`], [`KernelError::Capacity`] (its rank is 0) if
    /// the arguments do not fit each other; [`KernelError::Inconsistent`] if the ids in the rows
    /// are not those that were counted. No row is written then.
    ///
    /// # Safety
    /// - `region` is readable for `rows` records of `fmt`;
    /// - `out.base` is writable for `out.rows` rows of `out.fmt`;
    /// - nothing else writes to either meanwhile, and they do not overlap.
    pub unsafe fn expand(
        &mut self,
        fmt: &RecordFormat,
        region: *const u8,
        rows: usize,
        out: &ExpertRows<'_>,
    ) -> Result<(), KernelError> {
        check(fmt, region, rows, out)?;
        // SAFETY: the caller's promise about `region`.
        unsafe { self.number(fmt, region, rows, out)? };
        let stream = streams(self.map.len().min(out.rows) * fmt.payload_bytes, fmt.payload_bytes);
        for row in 0..rows {
            // SAFETY: the row is readable; `number` keeps every position below the last offset,
            // which `check` saw to be at most `out.rows`.
            unsafe {
                let from = region.add(row * fmt.stride);
                let next = from.wrapping_add(fmt.stride);
                self.copy_one(fmt, from, row, out, stream, next);
            }
        }
        for (&count, ends) in out.counts.iter().zip(out.offsets.windows(2)) {
            for position in ends[0] + count..ends[1] {
                // SAFETY: the position is below the last offset, as above.
                unsafe {
                    write_padding(&out.fmt, out.base.add(position as usize * out.fmt.stride))
                };
            }
        }
        if stream {
            store_fence();
        }
        Ok(())
    }

    /// Fills the map, in rank-major order of rows.
    ///
    /// # Safety
    /// `region` is readable for `rows` records.
    unsafe fn number(
        &mut self,
        fmt: &RecordFormat,
        region: *const u8,
        rows: usize,
        out: &ExpertRows<'_>,
    ) -> Result<(), KernelError> {
        let inconsistent =
            |what, index| KernelError::Inconsistent { operation: OPERATION, what, index };
        self.next.clear();
        self.next.extend_from_slice(&out.offsets[..out.counts.len()]);
        self.map.clear();
        for row in 0..rows {
            // SAFETY: the ids lie inside the record.
            let ids = unsafe { region.add(row * fmt.stride + fmt.ids_at).cast::<i32>() };
            for k in 0..fmt.topk {
                // SAFETY: `k` is below `topk`.
                let id = unsafe { ids.add(k).read_unaligned() };
                if id == -1 {
                    self.map.push(-1);
                    continue;
                }
                let expert = usize::try_from(id).ok().filter(|&e| e < out.counts.len());
                let Some(expert) = expert else {
                    return Err(inconsistent("an expert id", row));
                };
                let position = &mut self.next[expert];
                if *position - out.offsets[expert] >= out.counts[expert] {
                    return Err(inconsistent("too many rows of an expert", expert));
                }
                self.map.push(*position);
                *position += 1;
            }
        }
        let ends = out.offsets.iter().zip(out.counts).map(|(offset, count)| offset + count);
        match self.next.iter().zip(ends).position(|(&next, end)| next != end) {
            Some(expert) => Err(inconsistent("too few rows of an expert", expert)),
            None => Ok(()),
        }
    }

    /// Copies the received row at `from` to its positions.
    ///
    /// # Safety
    /// `from` is a readable record and the map's positions of `row` are writable.
    unsafe fn copy_one(
        &self,
        fmt: &RecordFormat,
        from: *const u8,
        row: usize,
        out: &ExpertRows<'_>,
        stream: bool,
        mut next: *const u8,
    ) {
        let positions = &self.map[row * fmt.topk..][..fmt.topk];
        for (k, &position) in positions.iter().enumerate() {
            let Ok(position) = usize::try_from(position) else { continue };
            // SAFETY: all offsets lie inside the record and the expert-major row.
            unsafe {
                let to = out.base.add(position * out.fmt.stride);
                copy_row(from, to, fmt.payload_bytes, stream, next);
                next = std::ptr::null();
                let scales = from.add(fmt.scales_at);
                let bytes = align16(fmt.scale_bytes); // the padding is zero on both sides
                std::ptr::copy_nonoverlapping(scales, to.add(out.fmt.scales_at), bytes);
                let weight = from.add(fmt.weights_at).cast::<u32>().add(k).read_unaligned();
                let tail = [weight, row as u32, 0, 0];
                to.add(out.fmt.weight_at).cast::<[u32; 4]>().write_unaligned(tail);
            }
        }
    }
}

fn check(
    fmt: &RecordFormat,
    region: *const u8,
    rows: usize,
    out: &ExpertRows<'_>,
) -> Result<(), KernelError> {
    for (what, got, expected) in [
        ("offsets", out.offsets.len(), out.counts.len() + 1),
        ("payload bytes of the expert format", out.fmt.payload_bytes, fmt.payload_bytes),
        ("scale bytes of the expert format", out.fmt.scale_bytes, fmt.scale_bytes),
    ] {
        if got != expected {
            return Err(KernelError::Length { operation: OPERATION, what, expected, got });
        }
    }
    if i32::try_from(rows).is_err() {
        return Err(KernelError::TooManyRows { what: "rank", index: 0 });
    }
    let spans = out.offsets.windows(2).zip(out.counts);
    let fits = |(ends, &count): (&[i32], &i32)| {
        ends[0] >= 0 && count >= 0 && ends[0].checked_add(count).is_some_and(|end| end <= ends[1])
    };
    if let Some(index) = spans.map(fits).position(|fits| !fits) {
        let what = "offsets and counts of an expert";
        return Err(KernelError::Inconsistent { operation: OPERATION, what, index });
    }
    let (needed, available) = (out.offsets[out.counts.len()] as usize, out.rows);
    if !out.counts.is_empty() && needed > available {
        return Err(KernelError::Capacity { operation: OPERATION, rank: 0, needed, available });
    }
    if rows > 0 && region.is_null() {
        return Err(KernelError::Null { operation: OPERATION, what: "region" });
    }
    if out.offsets.last().is_some_and(|&end| end > 0) && out.base.is_null() {
        return Err(KernelError::Null { operation: OPERATION, what: "base" });
    }
    Ok(())
}

/// # Safety
/// `row` is a writable expert-major row.
unsafe fn write_padding(fmt: &ExpertFormat, row: *mut u8) {
    // SAFETY: the whole row is writable.
    unsafe {
        row.write_bytes(0, fmt.stride);
        row.add(fmt.row_at).cast::<i32>().write_unaligned(-1);
    }
}
