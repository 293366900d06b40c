//! Ranks on GPUs that do not map each other's windows: rows go by puts, bit for bit as the oracle has
//! them. Two GPUs, or ranks that share one, stand for nodes. Without a GPU each test says so and passes.
#![cfg(feature = "cuda")]

mod common;

use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use common::exercise::{How, check};
use common::gpu::Gpus;
use common::gpu_apart::{ALONE, Apart, RANKS, TOGETHER, apart, random};
use common::gpu_small::{Graph, STOPS, capacity, gpus, plain};
use common::small::{Tokens, assert_argument, builder, opts};
use ep_bench::oracle::{JobSpec, Payload as Kind, PlacementSpec, Routing};
use ep_runtime::EpError;

#[test]
fn ranks_that_are_put_to_equal_the_oracle() {
    let Some(gpus) = Gpus::new(RANKS, 128 << 20) else { return };
    random(60, |seed, job| check(job, How::of(seed), seed, &Apart { gpus: &gpus, node: ALONE }));
}

#[test]
fn mapped_ranks_and_others_in_one_call_equal_the_oracle() {
    let Some(gpus) = Gpus::new(RANKS, 128 << 20) else { return };
    random(60, |seed, job| {
        let node = TOGETHER[seed as usize % TOGETHER.len()];
        check(job, How::of(seed), seed, &Apart { gpus: &gpus, node });
    });
}

/// So many tokens that their rows go in parts while others are packed.
fn large(ranks: usize, seed: u64) -> JobSpec {
    let tokens = [1100, 1400, 700, 31];
    JobSpec {
        ranks,
        experts: 12,
        topk: 3,
        units: 512,
        payload: [Kind::Bf16, Kind::F32, Kind::Fp8F32][seed as usize % 3],
        placement: PlacementSpec::Contiguous,
        physical_ids: false,
        alignment: 16,
        tokens: tokens[..ranks].to_vec(),
        masked_percent: 5,
        routing: [Routing::Uniform, Routing::Skewed][seed as usize % 2],
        weights: true,
        seed,
    }
}

#[test]
fn rows_that_go_in_parts_equal_the_oracle() {
    let Some(gpus) = Gpus::new(4, 512 << 20) else { return };
    for (seed, (ranks, node)) in (0u64..).zip([(2, ALONE), (3, ALONE), (4, TOGETHER[1])]) {
        let job = large(ranks, seed).build();
        check(&job, How::of(3 * seed + seed), seed, &Apart { gpus: &gpus, node });
    }
}

const TIMEOUT: Duration = Duration::from_secs(20);

#[test]
fn bad_ids_are_the_same_error_everywhere_and_captures_are_refused() {
    let Some(gpus) = gpus() else { return };
    apart(&gpus, 2, (&builder(), TIMEOUT), |rank| {
        rank.round_trip();
        rank.bad_ids_are_refused(&[opts(0), capacity()]);
        let graph = Graph::capture(rank.gpu.stream(), || {
            assert_argument(rank.dispatch(4, &capacity()), "cannot be captured");
        });
        drop(graph);
        rank.round_trip();
    });
}

#[test]
fn different_operations_are_the_same_error_everywhere() {
    let Some(gpus) = gpus() else { return };
    apart(&gpus, 3, (&builder(), TIMEOUT), |rank| {
        rank.round_trip();
        rank.load(&Tokens::new(rank.ep.rank(), 4));
        let held = rank.dispatch(4, &opts(0)).unwrap();
        let e: EpError = match rank.ep.rank() {
            1 => match rank.combine(held, &plain()) {
                Err(e) => e.into(),
                Ok(event) => event.wait(TIMEOUT).unwrap_err(),
            },
            _ => rank.dispatch(4, &opts(0)).unwrap_err(),
        };
        assert!(matches!(e, EpError::Disagreement { .. }), "{e}");
        rank.round_trip();
    });
}

#[test]
fn dropped_halves_and_cached_handles_leave_the_group_usable() {
    let Some(gpus) = gpus() else { return };
    apart(&gpus, 2, (&builder(), TIMEOUT), |rank| {
        rank.drop_halves_and_use_handles(&opts(0), &plain());
    });
}

#[test]
fn a_rank_that_stops_is_named_and_a_new_group_works() {
    let Some(gpus) = gpus() else { return };
    let through = AtomicUsize::new(0);
    apart(&gpus, 3, (&builder(), STOPS), |rank| rank.one_stops(&opts(0), &through));
    apart(&gpus, 3, (&builder(), TIMEOUT), |rank| rank.round_trip());
}

/// Ranks that are nodes, on a GPU each, by NCCL.
#[cfg(feature = "nccl")]
mod nccl {
    use common::eps_of;
    use common::gpu_apart::nccl::{Paired, gpus};
    use common::gpu_small::Rank;
    use common::ground::Grounds;

    use super::*;

    #[test]
    fn ranks_that_exchange_equal_the_oracle() {
        let Some(gpus) = gpus(512 << 20) else { return };
        let world = gpus.count();
        random(24, |seed, _| {
            let tokens = [[13, 9], [0, 21], [7, 7]][seed as usize % 3];
            let tokens = (0..world).map(|rank| tokens[rank % 2]).collect();
            let spec = JobSpec { ranks: world, tokens, ..JobSpec::random(seed) };
            check(&spec.build(), How::of(seed), seed, &Paired(&gpus));
        });
        for seed in 0..3 {
            let job = large(world.min(4), seed).build();
            if job.ranks == world {
                check(&job, How::of(4 * seed), seed, &Paired(&gpus));
            }
        }
    }

    #[test]
    fn errors_are_everyones_and_a_rank_that_stops_is_named() {
        let Some(gpus) = gpus(64 << 20) else { return };
        let through = AtomicUsize::new(0);
        let placed = |rank| {
            let paired = Paired(&gpus);
            paired.place(rank, gpus.count(), builder()).lanes(2).timeout(STOPS)
        };
        eps_of(gpus.count(), &placed, |ep| {
            let rank = Rank::new(&gpus, ep);
            rank.round_trip();
            rank.bad_ids_are_refused(&[opts(0)]);
            rank.one_stops(&opts(0), &through);
        });
        eps_of(gpus.count(), &placed, |ep| Rank::new(&gpus, ep).round_trip());
    }
}
