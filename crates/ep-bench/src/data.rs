//! What is sent: tokens' rows and experts' outputs, a function of the seed and the rank.
//!
//! Values are random but finite and of middling size, so that a reduction neither overflows nor
//! swallows its smaller terms, and every wrong row shows.

use crate::case::{Case, Dtype};
use crate::rng::{Purpose, Rng};
use crate::routing::{Router, Routes};

/// One rank's input, rows back to back.
#[derive(Clone, Debug, PartialEq)]
pub struct Input {
    /// Where tokens go.
    pub routes: Routes,
    /// `[tokens]` rows of `payload_bytes`.
    pub payload: Vec<u8>,
    /// `[tokens]` rows of `scale_bytes`; empty without scales.
    pub scales: Vec<u8>,
}

impl Input {
    /// The input of `rank`.
    pub fn of(case: &Case, router: &Router, rank: usize) -> Self {
        let (routes, hidden) = (router.routes(rank), case.shape.hidden);
        let mut payload = vec![0; routes.tokens * case.dtype.payload_bytes(hidden)];
        let mut rng = Rng::new(case.seed, Purpose::Payload, rank);
        rng.fill(&mut payload);
        tame(case.dtype, &mut payload);
        let mut scales = vec![0; routes.tokens * case.dtype.scale_bytes(hidden)];
        let mut rng = Rng::new(case.seed, Purpose::Scales, rank);
        rng.fill(&mut scales);
        match case.dtype {
            Dtype::Fp8 => {
                tame(Dtype::F32, &mut scales);
                // Scales are positive; the sign is the top bit of a little-endian word.
                scales.iter_mut().skip(3).step_by(4).for_each(|b| *b &= 0x7f);
            }
            _ => scales.iter_mut().for_each(|b| *b = 120 + (*b & 7)),
        }
        Self { routes, payload, scales }
    }
}

/// Expert outputs of `rank`: `rows` rows in the type that comes back, back to back.
pub fn outputs(case: &Case, rank: usize, rows: usize) -> Vec<u8> {
    let back = case.dtype.back();
    let mut bytes = vec![0; rows * back.payload_bytes(case.shape.hidden)];
    Rng::new(case.seed, Purpose::Outputs, rank).fill(&mut bytes);
    tame(back, &mut bytes);
    bytes
}

/// Turns random bits into numbers of magnitude 1/8 to 16, both signs, all mantissas.
fn tame(dtype: Dtype, bytes: &mut [u8]) {
    match dtype {
        Dtype::Bf16 => bytes.as_chunks_mut::<2>().0.iter_mut().for_each(|word| {
            let bits = u16::from_le_bytes(*word);
            let exponent = 124 + ((bits >> 7) & 7).min(6);
            *word = ((bits & 0x807f) | (exponent << 7)).to_le_bytes();
        }),
        Dtype::F16 => bytes.as_chunks_mut::<2>().0.iter_mut().for_each(|word| {
            let bits = u16::from_le_bytes(*word);
            let exponent = 12 + ((bits >> 10) & 7).min(6);
            *word = ((bits & 0x83ff) | (exponent << 10)).to_le_bytes();
        }),
        Dtype::F32 => bytes.as_chunks_mut::<4>().0.iter_mut().for_each(|word| {
            let bits = u32::from_le_bytes(*word);
            let exponent = 124 + ((bits >> 23) & 7).min(6);
            *word = ((bits & 0x807f_ffff) | (exponent << 23)).to_le_bytes();
        }),
        // Any byte is a number but the two NaNs, 0x7f and 0xff.
        Dtype::Fp8 | Dtype::Fp8Ue8m0 => {
            bytes.iter_mut().filter(|b| **b & 0x7f == 0x7f).for_each(|b| *b ^= 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Layout, Operation, Shape};
    use crate::routing::Routing;

    fn case(dtype: Dtype) -> Case {
        Case {
            operation: Operation::Dispatch,
            workload: "custom".into(),
            shape: Shape { ranks: 2, tokens: 50, hidden: 272, topk: 2, experts: 8 },
            dtype,
            layout: Layout::RankMajor,
            alignment: 1,
            routing: Routing::Uniform,
            seed: 5,
            cached: false,
            unequal: false,
        }
    }

    fn values(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
        match dtype {
            Dtype::Bf16 => bytes
                .as_chunks::<2>()
                .0
                .iter()
                .map(|w| half::bf16::from_le_bytes(*w).to_f32())
                .collect(),
            Dtype::F16 => bytes
                .as_chunks::<2>()
                .0
                .iter()
                .map(|w| half::f16::from_le_bytes(*w).to_f32())
                .collect(),
            _ => bytes.as_chunks::<4>().0.iter().map(|w| f32::from_le_bytes(*w)).collect(),
        }
    }

    #[test]
    fn values_are_of_middling_size_and_both_signs() {
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
            let case = case(dtype);
            let input = Input::of(&case, &Router::new(&case).unwrap(), 1);
            let values = values(dtype, &input.payload);
            assert_eq!(values.len(), 50 * 272);
            assert!(values.iter().all(|v| (0.125..16.0).contains(&v.abs())), "{dtype:?}");
            let negative = values.iter().filter(|v| **v < 0.0).count();
            assert!((6300..7300).contains(&negative), "{negative}");
            assert!(input.scales.is_empty());
        }
    }

    #[test]
    fn fp8_has_no_nan_and_positive_scales() {
        for (dtype, scale_bytes) in [(Dtype::Fp8, 12), (Dtype::Fp8Ue8m0, 3)] {
            let case = case(dtype);
            let input = Input::of(&case, &Router::new(&case).unwrap(), 0);
            assert!(input.payload.iter().all(|b| b & 0x7f != 0x7f));
            assert_eq!(input.scales.len(), 50 * scale_bytes, "the last block is partial");
        }
        let case = case(Dtype::Fp8);
        let input = Input::of(&case, &Router::new(&case).unwrap(), 0);
        assert!(values(Dtype::F32, &input.scales).iter().all(|s| *s > 0.0));
    }

    #[test]
    fn ranks_differ_and_repeat_themselves() {
        let case = case(Dtype::Bf16);
        let router = Router::new(&case).unwrap();
        assert_eq!(Input::of(&case, &router, 0), Input::of(&case, &router, 0));
        assert_ne!(Input::of(&case, &router, 0).payload, Input::of(&case, &router, 1).payload);
        assert_ne!(outputs(&case, 0, 9), outputs(&case, 1, 9));
        assert_eq!(outputs(&case, 0, 9).len(), 9 * 544);
    }
}
