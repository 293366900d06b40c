//! Every odd shape on GPUs against the oracle, bit by bit. Without a GPU each test says so and
//! passes.
#![cfg(feature = "cuda")]

mod common;

use common::exercise::{How, check};
use common::gpu::Gpus;
use ep_bench::oracle::{JobSpec, Payload, Routing};
use ep_runtime::{CopyPath, MovePlan, Tuning};

/// As many as a random shape has at most.
const RANKS: usize = 16;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

/// Random shapes by seed, as many as `EP_GPU_CASES` says from `EP_GPU_FIRST` on, those of at most
/// `EP_GPU_RANKS` ranks.
#[test]
fn every_shape_equals_the_oracle() {
    let Some(gpus) = Gpus::new(RANKS, 128 << 20) else { return };
    let first = number("EP_GPU_FIRST", 0);
    for seed in first..first + number("EP_GPU_CASES", 200) {
        let job = JobSpec::random(seed).build();
        if job.ranks as u64 > number("EP_GPU_RANKS", 16) {
            continue;
        }
        println!("case {seed}: {} ranks, {:?}", job.ranks, How::of(seed));
        check(&job, How::of(seed), seed, &gpus);
    }
}

/// Shapes as models have them: wide rows that are no multiple of a piece, many experts and choices, many
/// tokens, ranks without any.
fn large(seed: u64) -> JobSpec {
    // Hidden, experts, top-k, tokens by rank.
    let (hidden, experts, topk, tokens): (usize, usize, usize, &[usize]) = match seed % 6 {
        0 => (2880, 128, 4, &[411, 0, 97]),
        1 => (3584, 64, 8, &[129, 300, 1, 0, 77]),
        2 => (32, 448, 32, &[20_000, 7]),
        3 => (7168, 256, 8, &[333, 512]),
        4 => (64, 448, 1, &[0, 9_001, 20_000]),
        _ => (1024, 60, 17, &[640, 2, 0, 511, 64, 63]),
    };
    JobSpec {
        ranks: tokens.len(),
        experts,
        topk,
        units: hidden / 8,
        payload: Payload::Bf16,
        routing: if seed % 4 == 3 { Routing::OneRank(0) } else { Routing::Uniform },
        tokens: tokens.to_vec(),
        ..JobSpec::random(seed)
    }
}

#[test]
fn large_shapes_equal_the_oracle() {
    let Some(gpus) = Gpus::new(6, 1 << 30) else { return };
    for seed in 0..number("EP_GPU_LARGE", 12) {
        println!("large case {seed}: {:?}", How::of(seed));
        check(&large(seed).build(), How::of(seed), seed, &gpus);
    }
}

/// All ways through an SM give the same bits, whatever the number of blocks.
#[test]
fn every_plan_equals_the_oracle() {
    let Some(mut gpus) = Gpus::new(RANKS, 128 << 20) else { return };
    let tma = |stages, chunk| CopyPath::Tma { stages, chunk };
    let plans = [
        (tma(2, 1024), tma(4, 1024), 1, 4),
        (tma(4, 256), tma(2, 7168), 3, 7),
        (tma(3, 8192), tma(4, 3584), 16, 5),
        (CopyPath::LdSt { unroll: 1 }, CopyPath::LdSt { unroll: 1 }, 5, 3),
        (CopyPath::LdSt { unroll: 2 }, CopyPath::LdSt { unroll: 2 }, 132, 8),
        (CopyPath::LdSt { unroll: 4 }, CopyPath::LdSt { unroll: 4 }, 2, 16),
        (CopyPath::LdSt { unroll: 7 }, CopyPath::LdSt { unroll: 7 }, 8, 12),
        (CopyPath::LdSt { unroll: 14 }, CopyPath::LdSt { unroll: 14 }, 16, 8),
        (tma(2, 7168), tma(6, 3584), 132, 10),
        (tma(3, 3584), tma(6, 2048), 24, 16),
    ];
    for (i, (rows, sums, blocks, warps)) in (0u64..).zip(plans) {
        let mut tuning = Tuning::default();
        tuning.dispatch = Some(MovePlan::new(blocks, warps, rows));
        tuning.expand = Some(MovePlan::new(blocks, warps, rows));
        tuning.reduce = Some(MovePlan::new(blocks, warps, sums));
        tuning.combine = Some(MovePlan::new(blocks, warps, sums));
        gpus.set_tuning(tuning, blocks.min(16));
        for seed in 0..number("EP_GPU_PLAN_CASES", 18) {
            let job = JobSpec::random(1_000 * i + seed).build();
            check(&job, How::of(seed), seed, &gpus);
        }
    }
}
