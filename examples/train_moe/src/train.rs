//! Training, and the sum of the shared parameters' gradients over the ranks.
//!
//! A batch is cut into [`PARTS`] parts, whatever the number of ranks; a rank has one or more of
//! them. Each part's gradient is summed on its own, and the parts' in their order. Experts get their
//! rows by rank and token, which is the order of the batch. So no sum depends on the number of
//! ranks.

use std::ops::Range;

use ep_runtime::{EpError, Group};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng};

use crate::data::Samples;
use crate::linear::axpy;
use crate::model::{Model, SharedGradient, Sizes};

/// The parts of a batch; the most ranks there can be.
pub const PARTS: usize = 4;

/// How the network is trained: plain stochastic gradient descent.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The network.
    pub sizes: Sizes,
    /// Samples per step.
    pub batch: usize,
    /// Times that all samples are seen.
    pub epochs: usize,
    /// Step size.
    pub rate: f32,
    /// Seed of the first parameters and the order of samples.
    pub seed: u64,
}

impl Default for Config {
    fn default() -> Self {
        let sizes = Sizes { inputs: 64, hidden: 32, ffn: 64, experts: 8, topk: 2, classes: 10 };
        Self { sizes, batch: 64, epochs: 8, rate: 0.3, seed: 7 }
    }
}

/// How a training went; the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The mean loss of every step.
    pub losses: Vec<f32>,
    /// The share of test samples that are classified correctly.
    pub accuracy: f32,
}

/// Which of `n` things belong to `part` when they are spread over `parts`, in order.
fn share(n: usize, part: usize, parts: usize) -> Range<usize> {
    part * n / parts..(part + 1) * n / parts
}

/// The loss of one batch and its gradients: the shared parameters', summed over all ranks, and those
/// of this rank's experts. Collective.
///
/// # Errors
/// What the network or the group meet.
pub fn gradients(
    group: &Group,
    model: &Model,
    samples: &Samples,
    batch: &[usize],
) -> Result<(SharedGradient, Vec<f32>), EpError> {
    let mine = share(PARTS, group.rank(), group.world());
    let (mut inputs, mut labels, mut parts) = (Vec::new(), Vec::new(), Vec::new());
    for (i, part) in mine.clone().enumerate() {
        for &sample in &batch[share(batch.len(), part, PARTS)] {
            inputs.push(samples.inputs[sample].as_slice());
            labels.push(samples.labels[sample]);
            parts.push(i);
        }
    }
    let mut shared = vec![model.no_gradient(); mine.len()];
    let pass = model.forward(&inputs)?;
    let experts = model.backward(pass, &inputs, &labels, batch.len(), &parts, &mut shared)?;
    let mut sum = sum_over_ranks(group, model, &shared)?;
    sum.loss /= batch.len() as f32;
    Ok((sum, experts))
}

/// Adds up the gradients of all parts, in their order. Collective.
fn sum_over_ranks(
    group: &Group,
    model: &Model,
    parts: &[SharedGradient],
) -> Result<SharedGradient, EpError> {
    let values = parts.iter().flat_map(|part| part.params.iter().chain([&part.loss]));
    let bytes: Vec<u8> = values.flat_map(|x| x.to_ne_bytes()).collect();
    let mut sum = model.no_gradient();
    for rank in group.all_gather(&bytes)? {
        let (values, _) = rank.as_chunks::<4>();
        let values: Vec<f32> = values.iter().map(|x| f32::from_ne_bytes(*x)).collect();
        for part in values.chunks_exact(sum.params.len() + 1) {
            let (params, loss) = part.split_at(sum.params.len());
            axpy(1.0, params, &mut sum.params);
            sum.loss += loss[0];
        }
    }
    Ok(sum)
}

/// The share of `samples` that are classified correctly. Collective.
fn accuracy(group: &Group, model: &Model, samples: &Samples, batch: usize) -> Result<f32, EpError> {
    let mut correct = 0u64;
    for first in (0..samples.labels.len()).step_by(batch) {
        let n = batch.min(samples.labels.len() - first);
        let mine = share(n, group.rank(), group.world());
        let mine = first + mine.start..first + mine.end;
        let inputs: Vec<&[f32]> = samples.inputs[mine.clone()].iter().map(Vec::as_slice).collect();
        let pass = model.forward(&inputs)?;
        for (logits, &label) in pass.logits.iter().zip(&samples.labels[mine]) {
            correct += u64::from(logits.iter().all(|&x| x <= logits[label]));
        }
    }
    let counts = group.all_gather(&correct.to_ne_bytes())?;
    let count = |bytes: &Vec<u8>| bytes.as_slice().try_into().map_or(0, u64::from_ne_bytes);
    let all: u64 = counts.iter().map(count).sum();
    Ok(all as f32 / samples.labels.len() as f32)
}

/// Trains the network as one rank of `group`, of at most [`PARTS`] ranks. Collective.
///
/// # Errors
/// What the network or the group meet.
pub fn train(
    group: &Group,
    config: &Config,
    samples: &Samples,
    test: &Samples,
) -> Result<Report, EpError> {
    let mut model = Model::new(group, config.sizes, config.batch, config.seed)?;
    let mut rng = ChaCha8Rng::seed_from_u64(config.seed + 1);
    let mut order: Vec<usize> = (0..samples.labels.len()).collect();
    let mut losses = Vec::new();
    for _ in 0..config.epochs {
        for last in (1..order.len()).rev() {
            order.swap(last, rng.next_u32() as usize % (last + 1));
        }
        for batch in order.chunks(config.batch) {
            let (shared, experts) = gradients(group, &model, samples, batch)?;
            axpy(-config.rate, &shared.params, &mut model.shared);
            axpy(-config.rate, &experts, &mut model.moe.params);
            losses.push(shared.loss);
        }
    }
    Ok(Report { losses, accuracy: accuracy(group, &model, test, config.batch)? })
}

/// Runs `f` on `ranks` ranks, threads of this process.
///
/// # Errors
/// What setting up the group or any rank meets.
pub fn on_ranks<T: Send>(
    ranks: usize,
    f: impl Fn(&Group) -> Result<T, EpError> + Sync,
) -> Result<Vec<T>, EpError> {
    let groups = Group::local(ranks)?;
    std::thread::scope(|scope| {
        let f = &f;
        let start = |group| scope.spawn(move || f(&group));
        let ranks: Vec<_> = groups.into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect()
    })
}
