//! Conversions against definitions.

use ep_kernels::host::{dequantize_fp8, narrow, quantize_fp8, widen};
use ep_kernels::{Fp8E4M3, KernelError, SCALE_BLOCK, ScaleKind, bf16, f16};
use proptest::prelude::*;

/// The value of an fp8 code by the OCP definition.
fn fp8_value(code: u8) -> f64 {
    let (sign, exponent, mantissa) = (code >> 7, i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa / 8.0 * 2_f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2_f64.powi(exponent - 7),
    };
    if sign == 1 { -magnitude } else { magnitude }
}

/// The nearest fp8 code by searching all of them; of two equally near the even one.
fn nearest_fp8(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let wanted = f64::from(x.abs()).min(448.0);
    let distance = |code: u8| (fp8_value(code) - wanted).abs();
    let best = (0..0x7f_u8)
        .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2))));
    best.unwrap() | if x.is_sign_negative() { 0x80 } else { 0 }
}

#[test]
fn every_fp8_code_survives() {
    for code in 0..=255_u8 {
        let value = Fp8E4M3(code).to_f32();
        if code & 0x7f == 0x7f {
            assert!(value.is_nan());
            assert_eq!(Fp8E4M3::from_f32(value), Fp8E4M3::NAN);
        } else {
            assert_eq!(f64::from(value), fp8_value(code));
            assert_eq!(value.is_sign_negative(), code >= 0x80);
            assert_eq!(Fp8E4M3::from_f32(value), Fp8E4M3(code));
        }
    }
    assert_eq!(Fp8E4M3::MAX.to_f32(), 448.0);
}

#[test]
fn fp8_ties_go_to_even_and_the_range_saturates() {
    for code in 0..0x7e_u8 {
        let middle = ((fp8_value(code) + fp8_value(code + 1)) / 2.0) as f32;
        for x in [middle, middle.next_down(), middle.next_up(), -middle, -middle.next_up()] {
            assert_eq!(Fp8E4M3::from_f32(x).0, nearest_fp8(x), "{x}");
        }
    }
    for x in [449.0, 464.0, 465.0, f32::MAX, f32::INFINITY] {
        assert_eq!((Fp8E4M3::from_f32(x).0, Fp8E4M3::from_f32(-x).0), (0x7e, 0xfe));
    }
    for x in [0.0, f32::from_bits(1), f32::MIN_POSITIVE, 0.000976] {
        assert_eq!((Fp8E4M3::from_f32(x).0, Fp8E4M3::from_f32(-x).0), (0, 0x80));
    }
}

#[test]
fn every_16_bit_value_survives_f32() {
    let mut wide = vec![0.0; 1 << 16];
    let row: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let mut back = vec![bf16::ZERO; row.len()];
    widen(&row, &mut wide).unwrap();
    narrow(&wide, &mut back).unwrap();
    for (x, y) in row.iter().zip(&back) {
        assert_eq!(y.to_bits(), x.to_bits() | if x.is_nan() { 0x40 } else { 0 });
    }
    let row: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let mut back = vec![f16::ZERO; row.len()];
    widen(&row, &mut wide).unwrap();
    narrow(&wide, &mut back).unwrap();
    for (x, y) in row.iter().zip(&back) {
        assert_eq!(y.to_bits(), x.to_bits() | if x.is_nan() { 0x200 } else { 0 });
    }
    assert!(matches!(widen(&row, &mut wide[1..]), Err(KernelError::Length { .. })));
    assert!(matches!(narrow(&wide[1..], &mut back), Err(KernelError::Length { .. })));
}

fn quantize(src: &[f32], hidden: usize, kind: ScaleKind) -> (Vec<Fp8E4M3>, Vec<u8>) {
    let mut out = vec![Fp8E4M3(0x55); src.len()];
    let mut scales = vec![0x55; src.len() / hidden * kind.row_bytes(hidden)];
    quantize_fp8(src, hidden, kind, &mut out, &mut scales).unwrap();
    (out, scales)
}

fn f32_scales(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn partial_blocks_have_their_own_scale() {
    // Two rows of 2880 = 22 blocks of 128 and one of 64.
    let src: Vec<f32> =
        (0..2 * 2880).map(|i| if i % 2880 >= 2816 { 896.0 } else { 4.48 }).collect();
    let (out, scales) = quantize(&src, 2880, ScaleKind::F32);
    let scales = f32_scales(&scales);
    assert_eq!(scales.len(), 46);
    assert_eq!((scales[0], scales[22], scales[45]), (4.48 / 448.0, 2.0, 2.0));
    assert!(out.iter().all(|&q| q == Fp8E4M3::MAX));
}

#[test]
fn zero_nan_and_infinity_in_a_block() {
    let mut src = vec![0.0_f32; 3 * SCALE_BLOCK];
    src[SCALE_BLOCK] = 448.0;
    src[SCALE_BLOCK + 1] = f32::NAN;
    src[2 * SCALE_BLOCK] = f32::NEG_INFINITY;
    src[2 * SCALE_BLOCK + 1] = 1.0;
    for kind in [ScaleKind::F32, ScaleKind::Ue8m0] {
        let (out, scales) = quantize(&src, src.len(), kind);
        let mut back = vec![0.0_f32; src.len()];
        dequantize_fp8(&out, &scales, src.len(), kind, &mut back).unwrap();
        assert_eq!(back[..SCALE_BLOCK], [0.0; SCALE_BLOCK]);
        assert_eq!(back[SCALE_BLOCK], 448.0);
        assert_eq!(out[SCALE_BLOCK + 1], Fp8E4M3::NAN);
        assert_eq!(back[SCALE_BLOCK + 2], 0.0);
        assert!(back[2 * SCALE_BLOCK..].iter().all(|x| x.is_nan()));
        match kind {
            ScaleKind::F32 => assert_eq!(f32_scales(&scales), [1e-4 / 448.0, 1.0, f32::INFINITY]),
            // 1e-4 / 448 lies between 2^-23 and 2^-22.
            ScaleKind::Ue8m0 => assert_eq!(scales, [127 - 22, 127, 255]),
        }
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let kind = ScaleKind::F32;
    let run = |src: usize, hidden, out: usize, scales: usize| {
        let mut out = vec![Fp8E4M3(0); out];
        quantize_fp8(&vec![0.0_f32; src], hidden, kind, &mut out, &mut vec![0; scales]).unwrap_err()
    };
    assert!(matches!(run(256, 0, 256, 8), KernelError::Argument { .. }));
    assert!(matches!(run(255, 256, 255, 8), KernelError::Length { what: "src", .. }));
    assert!(matches!(run(256, 256, 255, 8), KernelError::Length { what: "out", .. }));
    assert!(matches!(run(256, 256, 256, 4), KernelError::Length { what: "scales", .. }));
}

proptest! {
    #[test]
    fn fp8_is_the_nearest(bits in any::<u32>(), near in -500.0_f32..500.0) {
        for x in [f32::from_bits(bits), near, near / 1000.0] {
            prop_assert_eq!(Fp8E4M3::from_f32(x).0, nearest_fp8(x), "{}", x);
        }
    }

    #[test]
    fn bf16_rounds_as_the_half_crate_does(bits in any::<u32>(), odd in any::<u16>()) {
        // Random bits, an exact tie, and a NaN whose payload lies in the bits cut off.
        let tie = u32::from(odd) << 16 | 0x8000;
        for x in [bits, tie, tie - 1, tie + 1, 0x7f80_0001, 0xff80_8000].map(f32::from_bits) {
            let mut out = [bf16::ZERO];
            narrow(&[x], &mut out).unwrap();
            prop_assert_eq!(out[0].to_bits(), bf16::from_f32(x).to_bits());
        }
    }

    #[test]
    fn quantising_follows_its_definition(
        row in prop::collection::vec(-1e5_f32..1e5, 1..300),
        small in any::<bool>(),
    ) {
        let row: Vec<f32> = row.iter().map(|x| if small { x * 1e-9 } else { *x }).collect();
        let row: Vec<bf16> = row.iter().map(|&x| bf16::from_f32(x)).collect();
        for kind in [ScaleKind::F32, ScaleKind::Ue8m0] {
            let mut out = vec![Fp8E4M3(0); row.len()];
            let mut scales = vec![0; kind.row_bytes(row.len())];
            quantize_fp8(&row, row.len(), kind, &mut out, &mut scales).unwrap();
            let mut back = vec![bf16::ZERO; row.len()];
            dequantize_fp8(&out, &scales, row.len(), kind, &mut back).unwrap();
            for (block, values) in row.chunks(SCALE_BLOCK).enumerate() {
                let amax = values.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max).max(1e-4);
                let scale = match kind {
                    ScaleKind::F32 => f32_scales(&scales)[block],
                    ScaleKind::Ue8m0 => 2_f32.powi(i32::from(scales[block]) - 127),
                };
                match kind {
                    ScaleKind::F32 => prop_assert_eq!(scale, amax / 448.0),
                    ScaleKind::Ue8m0 => {
                        prop_assert!(scale >= amax / 448.0 && scale / 2.0 < amax / 448.0);
                    }
                }
                for (i, x) in values.iter().enumerate() {
                    let q = out[block * SCALE_BLOCK + i];
                    prop_assert_eq!(q.0, nearest_fp8(x.to_f32() / scale));
                    let expected = bf16::from_f32(q.to_f32() * scale);
                    prop_assert_eq!(back[block * SCALE_BLOCK + i], expected);
                }
            }
        }
    }
}
