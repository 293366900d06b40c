//! Odd jobs for proptest, shrinking towards one rank, one expert and one token.

use super::job::Payload;
use super::random::{JobSpec, PlacementSpec, Routing};
use proptest::prelude::*;

/// Jobs of up to 9 ranks. See [`JobSpec::random`] for the same kind of jobs without proptest.
pub fn job_specs() -> impl Strategy<Value = JobSpec> {
    let shape = (1..=9usize).prop_flat_map(|ranks| {
        let tokens = prop_oneof![3 => 0..12usize, 1 => Just(0), 1 => 0..40usize];
        (Just(ranks), prop::collection::vec(tokens, ranks))
    });
    let topk = prop_oneof![3 => 1..=8usize, 1 => 1..=24usize];
    let payload = prop_oneof![
        Just(Payload::Bf16),
        Just(Payload::F16),
        Just(Payload::F32),
        Just(Payload::Fp8F32),
        Just(Payload::Fp8Ue8m0),
        (0..40usize).prop_map(|aux_bytes| Payload::Opaque { row_bytes: 0, aux_bytes }),
    ];
    let placement = prop_oneof![
        Just(PlacementSpec::Contiguous),
        (1..=4usize).prop_map(|replicas| PlacementSpec::Explicit { replicas }),
    ];
    let routing = prop_oneof![
        2 => Just(Routing::Uniform),
        1 => Just(Routing::Skewed),
        1 => (0..9usize).prop_map(Routing::OneRank),
    ];
    let alignment = prop::sample::select(vec![1, 2, 3, 8, 64, 128]);
    let masked = prop::sample::select(vec![0, 10, 50, 95, 100]);
    let rest = (alignment, masked, routing, any::<bool>(), any::<bool>(), any::<u64>());
    (shape, 1..=24usize, topk, 1..=20usize, payload, placement, rest).prop_map(
        |((ranks, tokens), experts, topk, units, payload, placement, rest)| {
            let (alignment, masked_percent, routing, physical_ids, weights, seed) = rest;
            JobSpec {
                ranks,
                experts,
                topk,
                units,
                payload,
                placement,
                physical_ids,
                alignment,
                tokens,
                masked_percent,
                routing,
                weights,
                seed,
            }
        },
    )
}
