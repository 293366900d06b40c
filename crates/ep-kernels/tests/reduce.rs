//! Sums against scalar code, and the corners of rounding.

use ep_kernels::host::reduce_row;
use ep_kernels::{DType, KernelError, Real, bf16, f16};
use proptest::prelude::*;

fn pointers<T>(rows: &[Vec<T>]) -> Vec<*const u8> {
    rows.iter().map(|row| row.as_ptr().cast()).collect()
}

fn reduce<T: Real>(
    rows: &[Vec<T>],
    weights: Option<&[f32]>,
    biases: &[Vec<T>],
    hidden: usize,
) -> Vec<T> {
    let mut out = vec![T::from_f32(99.0); hidden];
    let (rows, biases) = (pointers(rows), pointers(biases));
    let to = out.as_mut_ptr().cast();
    // SAFETY: every row, bias and the output have `hidden` elements.
    unsafe { reduce_row(T::DTYPE, hidden, &rows, weights, &biases, to).unwrap() };
    out
}

/// bfloat16 rounded from the exact f32 by comparing neighbours, not by bit tricks.
fn round_bf16(x: f32) -> u16 {
    if x.is_nan() {
        return 0x7fc0;
    }
    let down = (x.to_bits() >> 16) as u16; // towards zero
    let up = down.wrapping_add(1);
    let value = |bits: u16| match f32::from_bits(u32::from(bits) << 16) {
        // The step beyond the largest finite value stands in for infinity.
        v if v.is_infinite() => 2_f64.powi(128).copysign(f64::from(v)),
        v => f64::from(v),
    };
    if x.is_infinite() {
        return down;
    }
    let (below, above) = ((f64::from(x) - value(down)).abs(), (value(up) - f64::from(x)).abs());
    if below < above || (below == above && down.is_multiple_of(2)) { down } else { up }
}

#[test]
fn every_16_bit_value_survives_and_every_nan_is_canonical() {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    let row: Vec<bf16> = bits.iter().map(|&b| bf16::from_bits(b)).collect();
    for (out, &x) in reduce(std::slice::from_ref(&row), None, &[], row.len()).iter().zip(&row) {
        assert_eq!(out.to_bits(), if x.is_nan() { 0x7fc0 } else { x.to_bits() });
    }
    let row: Vec<f16> = bits.iter().map(|&b| f16::from_bits(b)).collect();
    for (out, &x) in reduce(std::slice::from_ref(&row), None, &[], row.len()).iter().zip(&row) {
        assert_eq!(out.to_bits(), if x.is_nan() { 0x7e00 } else { x.to_bits() });
    }
}

#[test]
fn sums_round_once_to_nearest_even() {
    let one = |x: &[f32]| x.iter().map(|&x| vec![bf16::from_f32(x)]).collect::<Vec<_>>();
    let sum = |x: &[f32]| reduce(&one(x), None, &[], 1)[0].to_f32();
    // 1 + 2^-8 lies halfway between 1 and 1 + 2^-7.
    assert_eq!(sum(&[1.0, 0.00390625]), 1.0);
    assert_eq!(sum(&[1.0078125, 0.00390625]), 1.015625);
    // Rounded after every addition, small terms would be lost.
    assert_eq!(sum(&[1.0, 0.00390625, 0.00390625]), 1.0078125);
    assert_eq!(sum(&[3.3e38, 3.3e38]), f32::INFINITY);
    assert!(sum(&[f32::INFINITY, f32::NEG_INFINITY]).is_nan());
    // The order is that of the rows: in f32, 1e8 + 1 is 1e8.
    assert_eq!(reduce(&[vec![1e8_f32], vec![1.0], vec![-1e8]], None, &[], 1), [0.0]);
    assert_eq!(reduce(&[vec![1e8_f32], vec![-1e8], vec![1.0]], None, &[], 1), [1.0]);
}

#[test]
fn signs_of_zero_subnormals_and_biases() {
    let bits = |rows: &[Vec<f32>], biases: &[Vec<f32>]| reduce(rows, None, biases, 1)[0].to_bits();
    assert_eq!(bits(&[], &[]), 0);
    assert_eq!(bits(&[vec![-0.0]], &[]), 0x8000_0000);
    assert_eq!(bits(&[], &[vec![-0.0]]), 0);
    assert_eq!(bits(&[vec![f32::from_bits(3)], vec![f32::from_bits(4)]], &[]), 7);
    assert_eq!(bits(&[vec![1e8], vec![-1e8]], &[vec![1.0], vec![2.0]]), 3.0_f32.to_bits());
    let tiny = vec![f16::from_bits(1)];
    assert_eq!(reduce(&[tiny.clone(), tiny.clone()], None, &[tiny], 1)[0].to_bits(), 3);
}

#[test]
fn products_and_sums_are_rounded_separately() {
    // With a fused multiply-add the difference would be 2^-46, the product's lost tail.
    let w = 1.0 + f32::EPSILON;
    let rows: Vec<Vec<f32>> = vec![vec![-(w * w); 64], vec![w; 64]];
    assert_eq!(reduce(&rows, Some(&[1.0, w]), &[], 64), [0.0; 64]);
    assert_ne!(w.mul_add(w, -(w * w)), 0.0);
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let mut out = [7_u8; 16];
    let (row, to) = ([0_u8; 16], out.as_mut_ptr());
    let rows = [row.as_ptr(), row.as_ptr()];
    // SAFETY: rows and output have 16 bytes.
    let run = |dtype, weights| unsafe { reduce_row(dtype, 4, &rows, weights, &[], to) };
    for dtype in [DType::Fp8E4M3, DType::Bytes] {
        let unsupported = KernelError::Unsupported { operation: "reduce", dtype };
        assert_eq!(run(dtype, None), Err(unsupported));
    }
    assert!(matches!(run(DType::F32, Some(&[1.0])), Err(KernelError::Length { .. })));
    assert_eq!(out, [7; 16]);
}

proptest! {
    #[test]
    fn bf16_sums_equal_scalar_ones(
        hidden in 1_usize..100,
        rows in 0_usize..5,
        biases in 0_usize..3,
        weights in prop::option::of(prop::collection::vec(-4.0_f32..4.0, 4)),
        data in prop::collection::vec(any::<u16>(), 700),
    ) {
        let row = |i: usize| data[i * 100..][..hidden].iter().map(|&b| bf16::from_bits(b)).collect();
        let rows: Vec<Vec<bf16>> = (0..rows).map(row).collect();
        let biases: Vec<Vec<bf16>> = (4..4 + biases).map(row).collect();
        let weights = weights.as_deref().map(|w| &w[..rows.len()]);
        let out = reduce(&rows, weights, &biases, hidden);
        for i in 0..hidden {
            let terms = rows.iter().enumerate().map(|(j, row)| match weights {
                Some(w) => w[j] * row[i].to_f32(),
                None => row[i].to_f32(),
            });
            let sum = terms.reduce(|a, b| a + b).unwrap_or(0.0);
            let sum = biases.iter().fold(sum, |sum, bias| sum + bias[i].to_f32());
            prop_assert_eq!(out[i].to_bits(), round_bf16(sum), "element {}", i);
        }
    }
}
