//! The network around the experts: embedding, gate and classifier, which every rank has.

use ep_runtime::{EpError, Group};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use crate::linear::{Linear, axpy, dot, softmax, tanh, tanh_backward};
use crate::moe::{Moe, Saved};

/// The sizes of the network.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Numbers of a sample.
    pub inputs: usize,
    /// Numbers of a token.
    pub hidden: usize,
    /// Numbers between the two maps of an expert.
    pub ffn: usize,
    /// Experts of all ranks.
    pub experts: usize,
    /// Experts per token.
    pub topk: usize,
    /// Classes.
    pub classes: usize,
}

/// The network as one rank has it.
#[derive(Debug)]
pub struct Model {
    sizes: Sizes,
    embed: Linear,
    gate: Linear,
    head: Linear,
    /// The parameters that all ranks share: embedding, gate, classifier.
    pub shared: Vec<f32>,
    /// The experts.
    pub moe: Moe,
}

/// What a forward pass leaves.
#[derive(Debug)]
pub struct Pass {
    /// Log-odds of the classes, `[T][classes]`.
    pub logits: Vec<Vec<f32>>,
    /// Tokens before and after the experts, `[T, hidden]`.
    tokens: Vec<f32>,
    mixed: Vec<f32>,
    /// Chosen experts and their weights, `[T, topk]`.
    ids: Vec<i32>,
    weights: Vec<f32>,
    saved: Saved,
}

/// A gradient of the shared parameters, and the sum of the losses it belongs to.
#[derive(Clone, Debug)]
pub struct SharedGradient {
    /// Losses added up.
    pub loss: f32,
    /// As [`Model::shared`].
    pub params: Vec<f32>,
}

impl Model {
    /// This rank's part of the network, for at most `max_tokens` samples per rank and pass.
    /// Collective.
    ///
    /// # Errors
    /// When ep-runtime cannot be set up.
    pub fn new(group: &Group, sizes: Sizes, max_tokens: usize, seed: u64) -> Result<Self, EpError> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut shared = Vec::new();
        let mut linear = |inputs, outputs| Linear::new(&mut shared, &mut rng, inputs, outputs);
        let embed = linear(sizes.inputs, sizes.hidden);
        let gate = linear(sizes.hidden, sizes.experts);
        let head = linear(sizes.hidden, sizes.classes);
        let moe = Moe::new(group, &sizes, max_tokens, seed)?;
        Ok(Self { sizes, embed, gate, head, shared, moe })
    }

    /// A gradient of zero.
    pub fn no_gradient(&self) -> SharedGradient {
        SharedGradient { loss: 0.0, params: vec![0.0; self.shared.len()] }
    }

    /// Classifies this rank's samples. Collective.
    ///
    /// # Errors
    /// What the experts meet.
    pub fn forward(&self, samples: &[&[f32]]) -> Result<Pass, EpError> {
        let (mut tokens, mut ids, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        for sample in samples {
            let token = tanh(self.embed.forward(&self.shared, sample));
            let logits = self.gate.forward(&self.shared, &token);
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            order.truncate(self.sizes.topk);
            weights.extend(softmax(&order.iter().map(|&id| logits[id]).collect::<Vec<_>>()));
            ids.extend(order.into_iter().map(|id| id as i32));
            tokens.extend(token);
        }
        let (mixed, saved) = self.moe.forward(&tokens, &ids, &weights)?;
        let rows = mixed.chunks_exact(self.sizes.hidden);
        let logits = rows.map(|row| self.head.forward(&self.shared, row)).collect();
        Ok(Pass { logits, tokens, mixed, ids, weights, saved })
    }

    /// The gradients of the mean cross-entropy over `batch` samples, of which this rank has
    /// `samples`. Those of the shared parameters are added to `shared[part]`, where a sample's part
    /// is in `parts`; those of this rank's experts are complete and returned. Collective.
    ///
    /// # Errors
    /// What the experts meet.
    pub fn backward(
        &self,
        pass: Pass,
        samples: &[&[f32]],
        labels: &[usize],
        batch: usize,
        parts: &[usize],
        shared: &mut [SharedGradient],
    ) -> Result<Vec<f32>, EpError> {
        let (hidden, topk) = (self.sizes.hidden, self.sizes.topk);
        let mut dmixed = Vec::with_capacity(pass.mixed.len());
        for (t, row) in pass.mixed.chunks_exact(hidden).enumerate() {
            let grads = &mut shared[parts[t]];
            let mut dlogits = softmax(&pass.logits[t]);
            grads.loss -= dlogits[labels[t]].ln();
            dlogits[labels[t]] -= 1.0;
            dlogits.iter_mut().for_each(|d| *d /= batch as f32);
            dmixed.extend(self.head.backward(&self.shared, row, &dlogits, &mut grads.params));
        }
        let mut experts = vec![0.0; self.moe.params.len()];
        let (mut dtokens, dweights) = self.moe.backward(pass.saved, &dmixed, &mut experts)?;
        let rows = pass.tokens.chunks_exact(hidden).zip(dtokens.chunks_exact_mut(hidden));
        for (t, (token, dtoken)) in rows.enumerate() {
            let grads = &mut shared[parts[t]].params;
            let choice = t * topk..(t + 1) * topk;
            let (weights, dweights) = (&pass.weights[choice.clone()], &dweights[choice.clone()]);
            let mean = dot(weights, dweights);
            let mut dlogits = vec![0.0; self.sizes.experts];
            for ((&id, w), dw) in pass.ids[choice].iter().zip(weights).zip(dweights) {
                dlogits[id as usize] = w * (dw - mean);
            }
            let dgate = self.gate.backward(&self.shared, token, &dlogits, grads);
            axpy(1.0, &dgate, dtoken);
            let dembed = tanh_backward(token, dtoken);
            self.embed.backward(&self.shared, samples[t], &dembed, grads);
        }
        Ok(experts)
    }
}
