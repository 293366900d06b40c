//! The fold of [`super::reduce`], 32 elements at a time.

use std::arch::x86_64::*;

use super::reduce::{Stores, Terms, fold};
use crate::{DType, KernelError, Real, bf16, f16};

/// Elements per step: one cache line of 16-bit elements.
const STEP: usize = 32;
/// How far ahead of a step its rows are fetched. Consecutive rows of a region follow each other, so
/// this also reaches into the row that is read next.
const AHEAD: usize = 768;

type Acc = [__m256; 4];

/// Element types as vectors of eight.
trait Wide: Real {
    const SIZE: usize = size_of::<Self>();
    /// # Safety
    /// AVX2 and F16C; eight elements are readable.
    unsafe fn load(at: *const u8) -> __m256;
    /// Rounds and writes [`STEP`] elements.
    ///
    /// # Safety
    /// AVX2 and F16C; the elements are writable, and `at` is a multiple of 16 if `stream`.
    unsafe fn store(at: *mut u8, acc: Acc, stream: bool);
}

/// # Safety
/// AVX2; 32 bytes are writable, and `at` is a multiple of 16 if `stream`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn put(at: *mut u8, value: __m256i, stream: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        if !stream {
            _mm256_storeu_si256(at.cast(), value);
        } else if at.addr().is_multiple_of(32) {
            _mm256_stream_si256(at.cast(), value);
        } else {
            _mm_stream_si128(at.cast(), _mm256_castsi256_si128(value));
            _mm_stream_si128(at.cast::<__m128i>().add(1), _mm256_extracti128_si256::<1>(value));
        }
    }
}

impl Wide for bf16 {
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load(at: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        let half = unsafe { _mm_loadu_si128(at.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn store(at: *mut u8, acc: Acc, stream: bool) {
        // Adding just under half a step, and one more where the kept part is odd, rounds to
        // nearest even; infinity and the canonical NaN stay what they are.
        let round = |v: __m256| {
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half))
        };
        // Packing interleaves the 128-bit halves of its operands; the permutation undoes that.
        let pack = |low, high| {
            _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(round(low), round(high)))
        };
        // SAFETY: the caller's promise.
        unsafe {
            put(at, pack(acc[0], acc[1]), stream);
            put(at.add(32), pack(acc[2], acc[3]), stream);
        }
    }
}

impl Wide for f16 {
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load(at: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(at.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn store(at: *mut u8, acc: Acc, stream: bool) {
        let round = |v| _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v);
        let pack = |low, high| _mm256_set_m128i(round(high), round(low));
        // SAFETY: the caller's promise.
        unsafe {
            put(at, pack(acc[0], acc[1]), stream);
            put(at.add(32), pack(acc[2], acc[3]), stream);
        }
    }
}

impl Wide for f32 {
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load(at: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(at.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn store(at: *mut u8, acc: Acc, stream: bool) {
        for (j, v) in acc.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { put(at.add(32 * j), _mm256_castps_si256(v), stream) };
        }
    }
}

/// # Safety
/// As [`super::reduce_row_with`], and the CPU has AVX2 and F16C.
pub(super) unsafe fn reduce(
    dtype: DType,
    terms: &Terms<'_>,
    out: *mut u8,
    stores: Stores,
) -> Result<(), KernelError> {
    let stream = stores == Stores::Streaming && out.addr().is_multiple_of(16);
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::Bf16 => row::<bf16>(terms, out, stream),
            DType::F16 => row::<f16>(terms, out, stream),
            DType::F32 => row::<f32>(terms, out, stream),
            _ => return Err(KernelError::Unsupported { operation: "reduce", dtype }),
        }
    }
    Ok(())
}

/// # Safety
/// As [`reduce`], with `out` a multiple of 16 if `stream`.
#[target_feature(enable = "avx2,f16c")]
unsafe fn row<T: Wide>(terms: &Terms<'_>, out: *mut u8, stream: bool) {
    let whole = terms.hidden / STEP * STEP;
    // SAFETY: steps up to `whole` lie inside the rows; the rest is folded by the scalar code.
    unsafe {
        for i in (0..whole).step_by(STEP) {
            let at = i * T::SIZE;
            let sum = match terms.weights {
                None => step::<T, false>(terms, &[], at),
                Some(weights) => step::<T, true>(terms, weights, at),
            };
            T::store(out.add(at), sum, stream);
        }
        fold::<T>(terms, whole, out);
    }
}

/// The sum of one step that starts `at` bytes into the rows.
///
/// # Safety
/// AVX2 and F16C; every row and bias is readable for a step from there; one weight per row if
/// `WEIGHTED`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn step<T: Wide, const WEIGHTED: bool>(
    terms: &Terms<'_>,
    weights: &[f32],
    at: usize,
) -> Acc {
    // SAFETY: the caller's promise; a prefetch never faults.
    let load = |row: *const u8| unsafe {
        let here = row.add(at);
        for line in 0..T::SIZE / 2 {
            _mm_prefetch::<_MM_HINT_T0>(here.wrapping_add(AHEAD + 64 * line).cast());
        }
        let step = 8 * T::SIZE;
        let load = |j: usize| T::load(here.add(j * step));
        [load(0), load(1), load(2), load(3)]
    };
    let term = |j: usize, row: *const u8| {
        let mut v = load(row);
        if WEIGHTED {
            let weight = _mm256_set1_ps(weights[j]);
            v.iter_mut().for_each(|v| *v = _mm256_mul_ps(weight, *v));
        }
        v
    };
    let mut sum = [_mm256_setzero_ps(); 4];
    if let [first, others @ ..] = terms.rows {
        sum = term(0, *first);
        for (j, &row) in others.iter().enumerate() {
            add(&mut sum, term(j + 1, row));
        }
    }
    for &bias in terms.biases {
        add(&mut sum, load(bias));
    }
    let nan = _mm256_set1_ps(f32::NAN);
    sum.map(|v| _mm256_blendv_ps(v, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn add(sum: &mut Acc, terms: Acc) {
    for (sum, term) in sum.iter_mut().zip(terms) {
        *sum = _mm256_add_ps(*sum, term);
    }
}
