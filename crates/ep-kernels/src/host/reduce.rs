//! Combine's sum: one left fold in `f32`, one rounding.

use super::copy::store_fence;
use crate::{DType, KernelError, Real, bf16, f16};

/// How a reduced row is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// Through the cache: for rows that are read again soon.
    Cached,
    /// Past the cache where the address is a multiple of 16: for batches much larger than it. The
    /// caller calls [`super::store_fence`] after the last row.
    Streaming,
}

/// Rows of at least this many bytes are streamed by [`reduce_row`].
const STREAM_FROM: usize = 4096;

/// Adds `rows` of `hidden` elements of `dtype` and writes the sum to `out`.
///
/// The fold runs from the left in the order of `rows`, in `f32`: it starts with the first row (times
/// its weight), adds every further row (times its weight), then every bias. Product and sum are
/// rounded separately, never fused; nothing is flushed to zero; the end is rounded to the nearest
/// value of `dtype`, ties to even, infinite beyond its range. No rows give +0 before the biases. A
/// NaN anywhere gives the canonical NaN (`0x7fc0`, `0x7e00`, `0x7fc00000`), so that results are
/// equal bit by bit wherever they were computed.
///
/// All stores are visible to whoever synchronises with this thread after the call.
///
/// # Errors
/// [`KernelError::Unsupported`] if `dtype` cannot be added, [`KernelError::Length`] if there is not
/// one weight per row. Nothing is written then.
///
/// # Safety
/// Every row and bias is readable and `out` writable for `hidden` elements; `out` overlaps none of
/// them (it may be equal to one); nothing else writes to them meanwhile. No alignment is needed.
pub unsafe fn reduce_row(
    dtype: DType,
    hidden: usize,
    rows: &[*const u8],
    weights: Option<&[f32]>,
    biases: &[*const u8],
    out: *mut u8,
) -> Result<(), KernelError> {
    let stream = hidden * dtype.size() >= STREAM_FROM;
    let stores = if stream { Stores::Streaming } else { Stores::Cached };
    // SAFETY: the caller's promise.
    unsafe { reduce_row_with(stores, dtype, hidden, rows, weights, biases, out)? };
    if stream {
        store_fence();
    }
    Ok(())
}

/// [`reduce_row`] with the kind of stores chosen by the caller.
///
/// # Errors
/// As [`reduce_row`].
///
/// # Safety
/// As [`reduce_row`]; and after [`Stores::Streaming`], [`super::store_fence`] comes before other
/// threads are told of the result.
pub unsafe fn reduce_row_with(
    stores: Stores,
    dtype: DType,
    hidden: usize,
    rows: &[*const u8],
    weights: Option<&[f32]>,
    biases: &[*const u8],
    out: *mut u8,
) -> Result<(), KernelError> {
    let terms = Terms { hidden, rows, weights, biases };
    if let Some(weights) = weights
        && weights.len() != rows.len()
    {
        let (what, expected, got) = ("weights", rows.len(), weights.len());
        return Err(KernelError::Length { operation: "reduce", what, expected, got });
    }
    if !dtype.is_float_reducible() {
        return Err(KernelError::Unsupported { operation: "reduce", dtype });
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
        // SAFETY: the features are there; the rest is the caller's promise.
        return unsafe { super::reduce_avx2::reduce(dtype, &terms, out, stores) };
    }
    // SAFETY: the caller's promise.
    unsafe { scalar(dtype, &terms, out) }
}

/// What is added.
pub(super) struct Terms<'a> {
    pub(super) hidden: usize,
    pub(super) rows: &'a [*const u8],
    pub(super) weights: Option<&'a [f32]>,
    pub(super) biases: &'a [*const u8],
}

/// # Safety
/// As [`reduce_row`].
unsafe fn scalar(dtype: DType, terms: &Terms<'_>, out: *mut u8) -> Result<(), KernelError> {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::Bf16 => fold::<bf16>(terms, 0, out),
            DType::F16 => fold::<f16>(terms, 0, out),
            DType::F32 => fold::<f32>(terms, 0, out),
            _ => return Err(KernelError::Unsupported { operation: "reduce", dtype }),
        }
    }
    Ok(())
}

/// The fold, element by element, from element `from` on.
///
/// # Safety
/// As [`reduce_row`], for elements of type `T`.
pub(super) unsafe fn fold<T: Real>(terms: &Terms<'_>, from: usize, out: *mut u8) {
    for i in from..terms.hidden {
        // SAFETY: element `i` of every row is readable.
        let at = |row: *const u8| unsafe { row.cast::<T>().add(i).read_unaligned() }.to_f32();
        let term = |j: usize| match terms.weights {
            Some(weights) => weights[j] * at(terms.rows[j]),
            None => at(terms.rows[j]),
        };
        let mut sum = 0.0;
        if !terms.rows.is_empty() {
            sum = term(0);
            for j in 1..terms.rows.len() {
                sum += term(j);
            }
        }
        for &bias in terms.biases {
            sum += at(bias);
        }
        if sum.is_nan() {
            sum = f32::NAN;
        }
        // SAFETY: element `i` of `out` is writable.
        unsafe { out.cast::<T>().add(i).write_unaligned(T::from_f32(sum)) };
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bits that reach every corner: all patterns, with specials made likely.
    fn bits() -> impl Strategy<Value = u32> {
        let special = [0, 0x8000_0000, 0x7f80_0000, 0xff80_0000, 0x7fc0_0001, 0xffa0_0000, 1];
        prop_oneof![
            4 => any::<u32>(),
            4 => (0x3f00_0000_u32..0x4080_0000).prop_map(|b| b),
            1 => prop::sample::select(special.to_vec()),
        ]
    }

    proptest! {
        #[test]
        fn vectors_and_scalars_give_the_same_bits(
            which in 0_usize..3,
            hidden in 1_usize..140,
            rows in 0_usize..6,
            biases in 0_usize..3,
            weighted in any::<bool>(),
            shift in 0_usize..33,
            stream in any::<bool>(),
            weights in prop::collection::vec(bits(), 6),
            data in prop::collection::vec(bits(), 8 * 140),
        ) {
            if !is_x86_feature_detected!("avx2") || !is_x86_feature_detected!("f16c") {
                return Ok(());
            }
            let dtype = [DType::Bf16, DType::F16, DType::F32][which];
            let bytes = data.iter().flat_map(|b| b.to_le_bytes()).collect::<Vec<u8>>();
            // 16-bit rows at odd halves of the same data mix exponents with mantissas.
            let at = |row: usize| bytes[row * 140 * 4..].as_ptr();
            let rows: Vec<_> = (0..rows).map(at).collect();
            let biases: Vec<_> = (6..6 + biases).map(at).collect();
            let weights: Vec<_> = weights.iter().map(|&b| f32::from_bits(b)).collect();
            let weights = weighted.then_some(&weights[..rows.len()]);
            let terms = Terms { hidden, rows: &rows, weights, biases: &biases };
            let mut fast = vec![0xa5_u8; hidden * 4 + 64];
            let mut slow = fast.clone();
            let stores = if stream { Stores::Streaming } else { Stores::Cached };
            // SAFETY: all rows hold 140 f32; the outputs hold `hidden` f32 from `shift`.
            unsafe {
                let out = fast.as_mut_ptr().add(shift);
                crate::host::reduce_avx2::reduce(dtype, &terms, out, stores).unwrap();
                store_fence();
                scalar(dtype, &terms, slow.as_mut_ptr().add(shift)).unwrap();
            }
            prop_assert_eq!(fast, slow);
        }
    }
}
