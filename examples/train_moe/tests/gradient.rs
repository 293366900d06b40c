//! The gradient against finite differences, on ranks that share the experts.

use ep_runtime::{EpError, Group};
use train_moe::data::Samples;
use train_moe::model::{Model, Sizes};
use train_moe::train::{gradients, on_ranks};

const STEP: f32 = 1e-2;
/// Parameters of embedding, gate and classifier at the sizes below.
const SHARED: usize = (3 + 1) * 4 + (4 + 1) * 4 + (4 + 1) * 3;

fn samples() -> Samples {
    let input = |i: usize| (0..3).map(|j| ((i * 3 + j) as f32 * 1.7).sin()).collect();
    Samples { inputs: (0..6).map(input).collect(), labels: (0..6).map(|i| i % 3).collect() }
}

/// One rank's gradient and its finite differences: the shared parameters, then its experts'.
fn compare(group: &Group, topk: usize) -> Result<Vec<(f32, f32)>, EpError> {
    let sizes = Sizes { inputs: 3, hidden: 4, ffn: 5, experts: 4, topk, classes: 3 };
    let mut model = Model::new(group, sizes, 6, 5)?;
    let (samples, batch) = (samples(), [0, 1, 2, 3, 4, 5]);
    let (shared, experts) = gradients(group, &model, &samples, &batch)?;
    let loss = |model: &Model| Ok(gradients(group, model, &samples, &batch)?.0.loss);
    let mut pairs = Vec::new();
    for (i, &gradient) in shared.params.iter().enumerate() {
        let slope = slope(&mut model, |m| &mut m.shared[i], STEP, &loss)?;
        pairs.push((gradient, slope));
    }
    for owner in 0..group.world() {
        for (i, gradient) in experts.iter().enumerate() {
            // All ranks compute the loss; the owner's parameter alone moves.
            let mine = owner == group.rank();
            let step = if mine { STEP } else { 0.0 };
            let slope = slope(&mut model, |m| &mut m.moe.params[i], step, &loss)?;
            if mine {
                pairs.push((*gradient, slope));
            }
        }
    }
    Ok(pairs)
}

/// The slope of the loss in one parameter, from `step` below to `step` above.
fn slope(
    model: &mut Model,
    param: impl Fn(&mut Model) -> &mut f32,
    step: f32,
    loss: &impl Fn(&Model) -> Result<f32, EpError>,
) -> Result<f32, EpError> {
    let value = *param(model);
    *param(model) = value + step;
    let above = loss(model)?;
    *param(model) = value - step;
    let below = loss(model)?;
    *param(model) = value;
    Ok((above - below) / (2.0 * STEP))
}

/// The norms of a gradient and of its distance from the slopes.
fn norms(pairs: &[(f32, f32)]) -> (f32, f32) {
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
    (norm(&mut pairs.iter().map(|p| p.0)), norm(&mut pairs.iter().map(|p| p.0 - p.1)))
}

fn assert_slopes(ranks: usize, topk: usize) {
    let ranks = on_ranks(ranks, |group| compare(group, topk)).expect("no error");
    for (rank, pairs) in ranks.iter().enumerate() {
        let (size, error) = norms(pairs);
        assert!(size > 0.1, "rank {rank}: a gradient of {size}");
        assert!(error < 2e-3 * size, "rank {rank}: {error} of {size}: {pairs:?}");
        for (i, (gradient, slope)) in pairs.iter().enumerate() {
            assert!((gradient - slope).abs() < 3e-4, "rank {rank}, {i}: {gradient}, {slope}");
        }
        // Each part on its own, lest a large one hide a small one.
        for part in [&pairs[..16], &pairs[16..36], &pairs[36..SHARED], &pairs[SHARED..]] {
            let (size, error) = norms(part);
            assert!(size > 0.01 && error < 1e-2 * size, "rank {rank}: {error} of {size}: {part:?}");
        }
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
}
