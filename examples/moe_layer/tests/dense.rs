//! The layer is the dense layer, however many ranks share it.

use ep_runtime::{Group, Layout, bf16};
use moe_layer::check::{Outcome, check};
use moe_layer::host::{Float, Shape};

const SHAPE: Shape = Shape { hidden: 16, ffn: 24, experts: 10, topk: 3 };
const EXPERT_MAJOR: Layout = Layout::ExpertMajor { alignment: 1 };

/// Runs the layer on as many ranks as there are numbers of tokens.
fn run<T: Float>(layout: Layout, tokens: &[usize]) -> Vec<Outcome> {
    let groups = Group::local(tokens.len()).expect("a local group");
    std::thread::scope(|scope| {
        let start = |(group, &n): (Group, &usize)| {
            scope.spawn(move || check::<T>(&group, SHAPE, layout, n, 16).expect("no error"))
        };
        let ranks: Vec<_> = groups.into_iter().zip(tokens).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

#[track_caller]
fn assert_dense<T: Float>(layout: Layout, tokens: &[usize], tolerance: f32) {
    for (rank, (outcome, &tokens)) in run::<T>(layout, tokens).into_iter().zip(tokens).enumerate() {
        assert!(outcome.same_bits, "{layout:?}, rank {rank}: {outcome:?}");
        let far = outcome.distance > tolerance * outcome.largest;
        assert!(!far, "{layout:?}, rank {rank}: {outcome:?}");
        assert_eq!(outcome.largest > 0.1, tokens > 0, "the layer does something");
    }
}

#[test]
fn one_rank_is_the_dense_layer_bit_by_bit() {
    assert_dense::<f32>(Layout::RankMajor, &[13], 0.0);
    assert_dense::<bf16>(Layout::RankMajor, &[13], 0.0);
    assert_dense::<f32>(EXPERT_MAJOR, &[13], 0.0);
    assert_dense::<bf16>(EXPERT_MAJOR, &[13], 0.0);
}

#[test]
fn expert_major_is_the_dense_layer_bit_by_bit_on_any_number_of_ranks() {
    for tokens in [&[16, 9][..], &[7, 16, 1], &[5, 6, 7, 8]] {
        assert_dense::<f32>(EXPERT_MAJOR, tokens, 0.0);
        assert_dense::<bf16>(EXPERT_MAJOR, tokens, 0.0);
    }
}

#[test]
fn rank_major_groups_additions_by_rank() {
    for tokens in [&[16, 9][..], &[7, 16, 1], &[5, 6, 7, 8]] {
        assert_dense::<f32>(Layout::RankMajor, tokens, 4.0 * f32::EPSILON);
        assert_dense::<bf16>(Layout::RankMajor, tokens, 4.0 / 256.0);
    }
}

#[test]
fn ranks_without_tokens_take_part() {
    for tokens in [&[0, 5][..], &[5, 0, 3], &[0, 0, 0, 4], &[0, 0]] {
        assert_dense::<f32>(EXPERT_MAJOR, tokens, 0.0);
        assert_dense::<f32>(Layout::RankMajor, tokens, 4.0 * f32::EPSILON);
    }
}
