//! Conversions between element types, fp8 with block scales among them.

use crate::fp8::{ue8m0_above, ue8m0_value};
use crate::{Fp8E4M3, KernelError, Real, SCALE_BLOCK, ScaleKind};

/// The least magnitude a block is scaled for: an all-zero block still gets a usable scale.
const AMAX_FLOOR: f32 = 1e-4;
/// The largest fp8 e4m3 value, which the largest element of a block maps to.
const FP8_MAX: f32 = 448.0;

/// Converts to `f32`, exactly.
///
/// # Errors
/// [`KernelError::Length`] if the lengths differ.
pub fn widen<T: Real>(src: &[T], out: &mut [f32]) -> Result<(), KernelError> {
    same_length("widen", "out", src.len(), out.len())?;
    T::widen(src, out);
    Ok(())
}

/// Converts from `f32` to the nearest value, ties to even, infinite beyond the range. NaN stays
/// NaN, made quiet, with the sign and the payload bits that fit.
///
/// # Errors
/// [`KernelError::Length`] if the lengths differ.
pub fn narrow<T: Real>(src: &[f32], out: &mut [T]) -> Result<(), KernelError> {
    same_length("narrow", "out", src.len(), out.len())?;
    T::narrow(src, out);
    Ok(())
}

/// Quantises rows of `hidden` elements to fp8 with one scale per [`SCALE_BLOCK`] elements.
///
/// With `amax` the largest magnitude in a block (NaN aside), scale = max(amax, 1e-4) / 448, or for
/// [`ScaleKind::Ue8m0`] the smallest power of two that is not less; an element becomes x / scale,
/// a division in `f32`, rounded to the nearest fp8 value, ties to even, saturating at ±448. NaN
/// becomes NaN. A block with an infinite element has the scale infinity (UE8M0: NaN), so that all
/// of it is NaN when read back: an overflow is seen, not hidden.
///
/// `scales` takes [`ScaleKind::row_bytes`] per row, without padding, native-endian.
///
/// # Errors
/// [`KernelError::Argument`] if `hidden` is 0, [`KernelError::Length`] if `src` is not whole rows
/// or an output has another length than the rows need.
pub fn quantize_fp8<T: Real>(
    src: &[T],
    hidden: usize,
    kind: ScaleKind,
    out: &mut [Fp8E4M3],
    scales: &mut [u8],
) -> Result<(), KernelError> {
    check_rows("quantize", hidden, kind, (src.len(), out.len(), scales.len()))?;
    let rows = src.chunks_exact(hidden).zip(out.chunks_exact_mut(hidden));
    for ((src, out), scales) in rows.zip(scales.chunks_exact_mut(kind.row_bytes(hidden))) {
        let blocks = src.chunks(SCALE_BLOCK).zip(out.chunks_mut(SCALE_BLOCK));
        for ((src, out), scale) in blocks.zip(scales.chunks_exact_mut(kind.size())) {
            let mut wide = [0.0; SCALE_BLOCK];
            let wide = &mut wide[..src.len()];
            T::widen(src, wide);
            write_scale(kind, quantize_block(wide, kind, out), scale);
        }
    }
    Ok(())
}

/// Undoes [`quantize_fp8`]: every element times its scale, a product in `f32`, rounded to `T`.
///
/// # Errors
/// As [`quantize_fp8`].
pub fn dequantize_fp8<T: Real>(
    src: &[Fp8E4M3],
    scales: &[u8],
    hidden: usize,
    kind: ScaleKind,
    out: &mut [T],
) -> Result<(), KernelError> {
    check_rows("dequantize", hidden, kind, (src.len(), out.len(), scales.len()))?;
    let rows = src.chunks_exact(hidden).zip(out.chunks_exact_mut(hidden));
    for ((src, out), scales) in rows.zip(scales.chunks_exact(kind.row_bytes(hidden))) {
        let blocks = src.chunks(SCALE_BLOCK).zip(out.chunks_mut(SCALE_BLOCK));
        for ((src, out), scale) in blocks.zip(scales.chunks_exact(kind.size())) {
            let scale = read_scale(kind, scale);
            let mut wide = [0.0; SCALE_BLOCK];
            let wide = &mut wide[..src.len()];
            for (wide, x) in wide.iter_mut().zip(src) {
                *wide = x.to_f32() * scale;
            }
            T::narrow(wide, out);
        }
    }
    Ok(())
}

/// Quantises one block and returns its scale, for UE8M0 already a power of two.
fn quantize_block(src: &[f32], kind: ScaleKind, out: &mut [Fp8E4M3]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 is there.
        return unsafe { quantize_block_avx2(src, kind, out) };
    }
    quantize_block_any(src, kind, out)
}

/// The same code for wider vectors; without fused instructions the bits stay the same.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn quantize_block_avx2(src: &[f32], kind: ScaleKind, out: &mut [Fp8E4M3]) -> f32 {
    quantize_block_any(src, kind, out)
}

#[inline(always)]
fn quantize_block_any(src: &[f32], kind: ScaleKind, out: &mut [Fp8E4M3]) -> f32 {
    // Magnitudes order as their bits do; eight maxima side by side vectorise. NaN counts as 0.
    let larger = |max: u32, x: &f32| {
        let bits = x.abs().to_bits();
        max.max(if bits > f32::INFINITY.to_bits() { 0 } else { bits })
    };
    let mut lanes = [AMAX_FLOOR.to_bits(); 8];
    let (eights, rest) = src.as_chunks::<8>();
    for eight in eights {
        for (lane, x) in lanes.iter_mut().zip(eight) {
            *lane = larger(*lane, x);
        }
    }
    let amax = rest.iter().fold(lanes.into_iter().fold(0, u32::max), larger);
    let amax = f32::from_bits(amax);
    let exact = amax / FP8_MAX;
    let scale = match kind {
        ScaleKind::F32 => exact,
        ScaleKind::Ue8m0 => ue8m0_value(ue8m0_above(exact)),
    };
    for (out, x) in out.iter_mut().zip(src) {
        *out = Fp8E4M3::from_f32(x / scale);
    }
    scale
}

fn write_scale(kind: ScaleKind, scale: f32, out: &mut [u8]) {
    match kind {
        ScaleKind::F32 => out.copy_from_slice(&scale.to_ne_bytes()),
        // A power of two has its exponent field as code; NaN has 255 there.
        ScaleKind::Ue8m0 => out[0] = (scale.to_bits() >> 23) as u8,
    }
}

fn read_scale(kind: ScaleKind, scale: &[u8]) -> f32 {
    match (kind, scale) {
        (ScaleKind::F32, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]),
        (ScaleKind::Ue8m0, &[code]) => ue8m0_value(code),
        _ => f32::NAN,
    }
}

fn check_rows(
    operation: &'static str,
    hidden: usize,
    kind: ScaleKind,
    (src, out, scales): (usize, usize, usize),
) -> Result<(), KernelError> {
    if hidden == 0 {
        let (what, allowed) = ("hidden", "1..");
        return Err(KernelError::Argument { operation, what, value: hidden, allowed });
    }
    same_length(operation, "src", src.next_multiple_of(hidden), src)?;
    same_length(operation, "out", src, out)?;
    same_length(operation, "scales", src / hidden * kind.row_bytes(hidden), scales)
}

fn same_length(
    operation: &'static str,
    what: &'static str,
    expected: usize,
    got: usize,
) -> Result<(), KernelError> {
    match got == expected {
        true => Ok(()),
        false => Err(KernelError::Length { operation, what, expected, got }),
    }
}
