//! Linear maps whose parameters are a part of one vector, and other small arithmetic.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::Rng as _;

/// `y = W x + b`. The parameters from `at` on are `W`, `[outputs, inputs]`, then `b`, `[outputs]`.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    inputs: usize,
    outputs: usize,
    at: usize,
}

impl Linear {
    /// A map whose random parameters are appended to `params`.
    pub fn new(params: &mut Vec<f32>, rng: &mut ChaCha8Rng, inputs: usize, outputs: usize) -> Self {
        let at = params.len();
        // Variance 1 / inputs keeps activations in tanh's middle.
        let bound = (3.0 / inputs as f32).sqrt();
        let unit = |bits: u32| (bits >> 8) as f32 / (1 << 23) as f32 - 1.0;
        params.extend((0..inputs * outputs).map(|_| bound * unit(rng.next_u32())));
        params.resize(params.len() + outputs, 0.0);
        Self { inputs, outputs, at }
    }

    /// `W x + b`.
    pub fn forward(&self, params: &[f32], x: &[f32]) -> Vec<f32> {
        let (weights, biases) = params[self.at..].split_at(self.inputs * self.outputs);
        let rows = weights.chunks_exact(self.inputs);
        rows.zip(biases).map(|(row, bias)| bias + dot(row, x)).collect()
    }

    /// Adds the gradient of the parameters to `grads` and returns that of `x`, given that of `y`.
    pub fn backward(&self, params: &[f32], x: &[f32], dy: &[f32], grads: &mut [f32]) -> Vec<f32> {
        let size = self.inputs * self.outputs;
        let rows = params[self.at..][..size].chunks_exact(self.inputs);
        let (weights, biases) = grads[self.at..].split_at_mut(size);
        let mut dx = vec![0.0; self.inputs];
        for (o, (row, dw)) in rows.zip(weights.chunks_exact_mut(self.inputs)).enumerate() {
            axpy(dy[o], x, dw);
            axpy(dy[o], row, &mut dx);
            biases[o] += dy[o];
        }
        dx
    }
}

/// `Σ a b`, in order.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `y += a x`.
pub fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
}

/// `tanh` of each.
pub fn tanh(x: Vec<f32>) -> Vec<f32> {
    x.into_iter().map(f32::tanh).collect()
}

/// The gradient before a `tanh` that gave `y`.
pub fn tanh_backward(y: &[f32], dy: &[f32]) -> Vec<f32> {
    y.iter().zip(dy).map(|(y, dy)| dy * (1.0 - y * y)).collect()
}

/// `exp(x) / Σ exp(x)`.
pub fn softmax(x: &[f32]) -> Vec<f32> {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exp: Vec<f32> = x.iter().map(|x| (x - max).exp()).collect();
    let sum: f32 = exp.iter().sum();
    exp.iter().map(|x| x / sum).collect()
}
