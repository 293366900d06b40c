//! Copying rows past the cache.

/// Copies of less than this many bytes in total stay in the cache: the receiver reads them soon.
const STREAM_FROM: usize = 4 << 20;

/// Whether an operation that writes `total` bytes of rows of `row_bytes` should bypass the cache.
pub(super) fn streams(total: usize, row_bytes: usize) -> bool {
    total >= STREAM_FROM && row_bytes >= 256
}

/// Makes streaming stores visible before later stores of this thread.
///
/// Needed between [`super::reduce_row_with`] with [`super::Stores::Streaming`] and the store (of
/// whatever kind) that tells another thread of the result; the other kernels do it themselves.
#[inline]
pub fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of the x86-64 baseline.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Asks for `bytes` bytes from `at` to be brought into the cache. Reads nothing: any address does.
#[inline]
pub fn prefetch(at: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..bytes).step_by(64) {
        // SAFETY: a prefetch never faults, whatever the address.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(offset).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, bytes);
}

/// Copies one row; `stream` bypasses the cache on the way out, and then `next` (or null) is
/// fetched meanwhile. A streaming copy needs [`store_fence`] before anyone is told of it.
///
/// # Safety
/// `src` is readable and `dst` writable for `len` bytes, and they do not overlap.
#[inline]
pub(super) unsafe fn copy_row(
    src: *const u8,
    dst: *mut u8,
    len: usize,
    stream: bool,
    next: *const u8,
) {
    #[cfg(target_arch = "x86_64")]
    if stream && is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 is there; the rest is the caller's promise.
        return unsafe { copy_row_avx2(src, dst, len, next) };
    }
    let _ = (stream, next);
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
}

/// [`copy_row`] with streaming stores of whole cache lines; the ends, whose lines other rows or
/// parts share, go through the cache, since a partly written streamed line costs a memory access.
///
/// # Safety
/// As [`copy_row`], and the CPU has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn copy_row_avx2(src: *const u8, dst: *mut u8, len: usize, next: *const u8) {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T1, _mm_prefetch, _mm256_loadu_si256, _mm256_stream_si256,
    };
    let head = dst.align_offset(64).min(len);
    let lines_end = head + (len - head) / 64 * 64;
    // SAFETY: all offsets stay within `len`, where both sides are accessible; streamed addresses
    // are multiples of 64; prefetching never faults.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        let mut at = head;
        while at < lines_end {
            let from = src.add(at).cast::<__m256i>();
            let to = dst.add(at).cast::<__m256i>();
            let low = _mm256_loadu_si256(from);
            let high = _mm256_loadu_si256(from.add(1));
            if !next.is_null() {
                _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(at).cast());
            }
            _mm256_stream_si256(to, low);
            _mm256_stream_si256(to.add(1), high);
            at += 64;
        }
        std::ptr::copy_nonoverlapping(src.add(at), dst.add(at), len - at);
    }
}

/// Copies `rows` rows of `row_bytes` between two strided regions (strides in bytes).
///
/// # Safety
/// Every row of `src` is readable and every row of `dst` writable, nothing else writes to either
/// meanwhile, and the two regions do not overlap.
pub unsafe fn copy_rows(
    src: *const u8,
    src_stride: usize,
    dst: *mut u8,
    dst_stride: usize,
    row_bytes: usize,
    rows: usize,
) {
    if rows == 0 || row_bytes == 0 {
        return;
    }
    if src_stride == row_bytes && dst_stride == row_bytes {
        // SAFETY: rows that touch are one range; the caller's promise.
        return unsafe { std::ptr::copy_nonoverlapping(src, dst, rows * row_bytes) };
    }
    let stream = streams(rows * row_bytes, row_bytes);
    for row in 0..rows {
        // SAFETY: rows below `rows` are accessible by the caller's promise.
        unsafe {
            let from = src.add(row * src_stride);
            let next = from.wrapping_add(src_stride);
            copy_row(from, dst.add(row * dst_stride), row_bytes, stream, next);
        }
    }
    if stream {
        store_fence();
    }
}

/// Copies row `index[i]` of `src` to row `i` of `dst` (strides in bytes); a negative index gives a
/// row of zeros.
///
/// # Safety
/// Every row of `src` that is named is readable, `index.len()` rows of `dst` are writable, nothing
/// else writes to either meanwhile, and the two regions do not overlap.
pub unsafe fn gather(
    src: *const u8,
    src_stride: usize,
    index: &[i32],
    dst: *mut u8,
    dst_stride: usize,
    row_bytes: usize,
) {
    let stream = streams(index.len() * row_bytes, row_bytes);
    for (i, &row) in index.iter().enumerate() {
        // SAFETY: named rows and all rows of `dst` are accessible by the caller's promise.
        unsafe {
            let to = dst.add(i * dst_stride);
            match usize::try_from(row) {
                Ok(row) => {
                    let next = index.get(i + 1).and_then(|&row| usize::try_from(row).ok());
                    let next =
                        next.map_or(std::ptr::null(), |row| src.wrapping_add(row * src_stride));
                    copy_row(src.add(row * src_stride), to, row_bytes, stream, next);
                }
                Err(_) => to.write_bytes(0, row_bytes),
            }
        }
    }
    if stream {
        store_fence();
    }
}
