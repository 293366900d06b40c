//! The gradient against finite differences, on ranks that share the experts.

use ep_runtime::{EpError, Group};
use train_moe::data::Samples;
use train_moe::model::{Model, Sizes};
use train_moe::train::{gradients, on_ranks};

const STEP: f32 = 1e-2;

fn samples() -> Samples {
    let input = |i: usize| (0..3).map(|j| ((i * 3 + j) as f32 * 1.7).sin()).collect();
    Samples { inputs: (0..6).map(input).collect(), labels: (0..6).map(|i| i % 3).collect() }
}

/// The gradient of one rank and its finite differences: the shared parameters, then the experts of
/// rank 0, rank 1, ...; a rank's gradient has zeros where the experts are another's.
fn compare(group: &Group, topk: usize) -> Result<Vec<(f32, f32)>, EpError> {
    let sizes = Sizes { inputs: 3, hidden: 4, ffn: 5, experts: 4, topk, classes: 3 };
    let mut model = Model::new(group, sizes, 6, 5)?;
    let (samples, batch) = (samples(), [0, 1, 2, 3, 4, 5]);
    let (shared, experts) = gradients(group, &model, &samples, &batch)?;
    let mut pairs = Vec::new();
    for i in 0..model.shared.len() {
        let value = model.shared[i];
        let mut loss = |x| {
            model.shared[i] = x;
            gradients(group, &model, &samples, &batch).map(|(sum, _)| sum.loss)
        };
        let slope = (loss(value + STEP)? - loss(value - STEP)?) / (2.0 * STEP);
        loss(value)?;
        pairs.push((shared.params[i], slope));
    }
    for owner in 0..group.world() {
        for i in 0..model.moe.params.len() {
            // All ranks compute the loss; the owner's parameter alone moves.
            let (value, mine) = (model.moe.params[i], owner == group.rank());
            let mut loss = |x| {
                model.moe.params[i] = if mine { x } else { value };
                gradients(group, &model, &samples, &batch).map(|(sum, _)| sum.loss)
            };
            let slope = (loss(value + STEP)? - loss(value - STEP)?) / (2.0 * STEP);
            loss(value)?;
            if mine {
                pairs.push((experts[i], slope));
            }
        }
    }
    Ok(pairs)
}

fn assert_slopes(ranks: usize, topk: usize) {
    for (rank, pairs) in
        on_ranks(ranks, |group| compare(group, topk)).expect("no error").iter().enumerate()
    {
        let norm =
            |f: &dyn Fn(&(f32, f32)) -> f32| pairs.iter().map(|p| f(p).powi(2)).sum::<f32>().sqrt();
        let (size, error) = (norm(&|p| p.0), norm(&|p| p.0 - p.1));
        assert!(size > 0.1, "rank {rank}: a gradient of {size}");
        assert!(error < 2e-3 * size, "rank {rank}: {error} of {size}: {pairs:?}");
        for (i, (gradient, slope)) in pairs.iter().enumerate() {
            assert!((gradient - slope).abs() < 3e-4, "rank {rank}, {i}: {gradient}, {slope}");
        }
        // Gradients of experts are small; they are compared on their own, too.
        let experts = &pairs[51..];
        let size = experts.iter().map(|p| p.0.powi(2)).sum::<f32>().sqrt();
        let error = experts.iter().map(|p| (p.0 - p.1).powi(2)).sum::<f32>().sqrt();
        assert!(size > 0.01 && error < 1e-2 * size, "rank {rank}, experts: {error} of {size}");
    }
}

#[test]
fn gradients_are_slopes_where_all_experts_are_chosen() {
    assert_slopes(2, 4);
}

#[test]
fn gradients_are_slopes_where_some_experts_are_chosen() {
    assert_slopes(1, 2);
    assert_slopes(2, 2);
    assert_slopes(4, 2);
}
