//! The layer's computation on host memory, with SwiGLU experts.

use std::marker::PhantomData;
use std::ops::Range;

use ep_runtime::{
    Dispatched, Ep, EpError, Ids, Layout, MoeShape, PayloadKind, Queue, Route, Rows, RowsMut, bf16,
    cast::Real, f16,
};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng};

use crate::Backend;

/// The sizes of the layer.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Elements of a token.
    pub hidden: usize,
    /// Elements between the two matrices of an expert.
    pub ffn: usize,
    /// Experts of all ranks.
    pub experts: usize,
    /// Experts per token.
    pub topk: usize,
}

impl Shape {
    /// What ep-runtime has to know of a layer with rows of `T`.
    pub fn moe_shape<T: Float>(&self, max_tokens: usize) -> MoeShape {
        MoeShape::new(self.hidden, self.topk, self.experts)
            .max_tokens(max_tokens)
            .payload(T::KIND)
            .expert_major(1)
    }
}

/// The types of rows this backend computes with, by way of f32.
pub trait Float: Real {
    /// Rows of this type.
    const KIND: PayloadKind;
}

impl Float for f32 {
    const KIND: PayloadKind = PayloadKind::F32;
}

impl Float for bf16 {
    const KIND: PayloadKind = PayloadKind::Bf16;
}

impl Float for f16 {
    const KIND: PayloadKind = PayloadKind::F16;
}

/// A dense matrix, `[rows, columns]`.
#[derive(Debug)]
struct Matrix {
    data: Vec<f32>,
    columns: usize,
}

impl Matrix {
    /// Uniform numbers of variance `1 / columns`, which keep the size of what they multiply.
    fn random(rng: &mut ChaCha8Rng, rows: usize, columns: usize) -> Self {
        let bound = (3.0 / columns as f32).sqrt();
        Self { data: random(rng, rows * columns, bound), columns }
    }

    fn times<'a>(&'a self, x: &'a [f32]) -> impl Iterator<Item = f32> + 'a {
        self.data
            .chunks_exact(self.columns)
            .map(move |row| row.iter().zip(x).map(|(w, x)| w * x).sum())
    }
}

/// `n` uniform numbers from -bound to bound.
pub(crate) fn random(rng: &mut ChaCha8Rng, n: usize, bound: f32) -> Vec<f32> {
    let unit = |bits: u32| (bits >> 8) as f32 / (1 << 23) as f32 - 1.0;
    (0..n).map(|_| bound * unit(rng.next_u32())).collect()
}

/// `down · (silu(gate · x) ∘ (up · x))`: SwiGLU, Shazeer 2020, arXiv:2002.05202.
#[derive(Debug)]
struct Expert {
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

impl Expert {
    /// Expert number `id`, the same whichever rank makes it.
    fn new(shape: &Shape, seed: u64, id: usize) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(1 + id as u64);
        Self {
            gate: Matrix::random(&mut rng, shape.ffn, shape.hidden),
            up: Matrix::random(&mut rng, shape.ffn, shape.hidden),
            down: Matrix::random(&mut rng, shape.hidden, shape.ffn),
        }
    }

    /// The output for one token, rounded to the type that travels.
    fn apply<T: Float>(&self, token: &[T]) -> Vec<T> {
        let x: Vec<f32> = token.iter().map(|x| x.to_f32()).collect();
        let silu = |x: f32| x / (1.0 + (-x).exp());
        let inner: Vec<f32> =
            self.gate.times(&x).zip(self.up.times(&x)).map(|(gate, up)| silu(gate) * up).collect();
        self.down.times(&inner).map(T::from_f32).collect()
    }
}

/// The gate and some of the experts of a layer with rows of `T`.
#[derive(Debug)]
pub struct HostMoe<T> {
    shape: Shape,
    router: Matrix,
    experts: Vec<Expert>,
    rows: PhantomData<T>,
}

/// Experts and weights of some tokens, `[T, K]` each.
#[derive(Debug, Default)]
pub struct Choices {
    ids: Vec<i32>,
    weights: Vec<f32>,
}

impl Choices {
    /// The experts, `[T, K]`.
    pub fn ids(&self) -> &[i32] {
        &self.ids
    }

    /// Their weights, `[T, K]`.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// The experts of a token and their weights, in the order in which they are summed.
    fn of(&self, token: usize, topk: usize) -> Vec<(usize, f32)> {
        let at = token * topk..(token + 1) * topk;
        in_order(&self.ids[at.clone()], &self.weights[at])
    }
}

/// The chosen experts and their weights by number of the expert, those of other ranks left out.
fn in_order(ids: &[i32], weights: &[f32]) -> Vec<(usize, f32)> {
    let pairs = ids.iter().zip(weights);
    let mut chosen: Vec<(usize, f32)> =
        pairs.filter_map(|(&id, &w)| Some((usize::try_from(id).ok()?, w))).collect();
    chosen.sort_unstable_by_key(|&(id, _)| id);
    chosen
}

impl<T: Float> HostMoe<T> {
    /// A layer that holds the `experts` with these numbers.
    pub fn new(shape: Shape, experts: Range<usize>, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let router = Matrix::random(&mut rng, shape.experts, shape.hidden);
        let experts = experts.map(|id| Expert::new(&shape, seed, id)).collect();
        Self { shape, router, experts, rows: PhantomData }
    }

    /// The part of the layer that belongs to this rank.
    pub fn of_rank(shape: Shape, ep: &Ep, seed: u64) -> Self {
        Self::new(shape, experts_of(ep, ep.rank()), seed)
    }

    /// Softmax over all experts, of which the `topk` most probable are kept; their weights add up
    /// to one.
    fn choose(&self, token: &[T], choices: &mut Choices) {
        let x: Vec<f32> = token.iter().map(|x| x.to_f32()).collect();
        let logits: Vec<f32> = self.router.times(&x).collect();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        order.truncate(self.shape.topk);
        // The softmax's denominator cancels when the chosen ones are made to add up to one.
        let odds: Vec<f32> =
            order.iter().map(|&id| (logits[id] - logits[order[0]]).exp()).collect();
        let sum: f32 = odds.iter().sum();
        choices.ids.extend(order.iter().map(|&id| id as i32));
        choices.weights.extend(odds.iter().map(|x| x / sum));
    }

    /// The layer without ep-runtime, for a `HostMoe` that holds all experts.
    ///
    /// The experts of a token are summed in f32 in the order of their numbers, those of each range
    /// in `sums` first, rounded to `T`; then these sums likewise. With the one range of all experts
    /// that is one sum with one rounding.
    pub fn dense(&self, tokens: &[T], sums: &[Range<usize>]) -> Vec<T> {
        let mut out = Vec::with_capacity(tokens.len());
        for token in tokens.chunks_exact(self.shape.hidden) {
            let mut choices = Choices::default();
            self.choose(token, &mut choices);
            let chosen = choices.of(0, self.shape.topk);
            let parts = sums.iter().filter_map(|range| {
                let inside = chosen.iter().copied().filter(|(id, _)| range.contains(id)).collect();
                self.weighted_sum(token, inside)
            });
            let parts: Vec<Vec<T>> = parts.collect();
            let column = |h: usize| parts.iter().map(move |part| part[h].to_f32());
            out.extend((0..token.len()).map(|h| T::from_f32(left_fold(column(h)))));
        }
        out
    }

    /// The weighted outputs of some experts for one token, summed in f32 and rounded; `None` for no
    /// expert.
    fn weighted_sum(&self, token: &[T], chosen: Vec<(usize, f32)>) -> Option<Vec<T>> {
        let outputs: Vec<(Vec<T>, f32)> =
            chosen.iter().map(|&(id, weight)| (self.experts[id].apply(token), weight)).collect();
        let column = |h: usize| outputs.iter().map(move |(y, weight)| weight * y[h].to_f32());
        let sum = (0..token.len()).map(|h| T::from_f32(left_fold(column(h)))).collect();
        (!outputs.is_empty()).then_some(sum)
    }

    /// What replaces a rank-major row: the weighted sum over the token's experts here, by the ids and
    /// weights that came with it. `None` for no expert.
    pub fn sum_of_experts(&self, token: &[T], ids: &[i32], weights: &[f32]) -> Option<Vec<T>> {
        self.weighted_sum(token, in_order(ids, weights))
    }

    /// What replaces an expert-major row: the output of the expert of this rank with that number.
    pub fn output_of(&self, expert: usize, token: &[T]) -> Vec<T> {
        self.experts[expert].apply(token)
    }

    fn rank_major(&self, received: &mut Dispatched) -> Result<(), EpError> {
        // What comes with the rows is copied: writing the outputs borrows the slot.
        let rows = received.rows();
        let ids = rows.topk_ids().expect("rank-major rows carry ids");
        let chosen: Vec<_> =
            (0..rows.len()).map(|i| in_order(ids.get(i), rows.weights().get(i))).collect();
        let mut outputs = received.rows_mut(T::KIND)?;
        let mut to = outputs.payload();
        for (i, chosen) in chosen.into_iter().enumerate() {
            let row = to.row_mut::<T>(i);
            if let Some(sum) = self.weighted_sum(row, chosen) {
                row.copy_from_slice(&sum);
            }
        }
        Ok(())
    }

    fn expert_major(&self, received: &mut Dispatched) -> Result<(), EpError> {
        let handle = received.handle().clone();
        let mut outputs = received.rows_mut(T::KIND)?;
        let mut to = outputs.payload();
        let groups = handle.offsets().iter().zip(handle.counts());
        for (expert, (&first, &count)) in self.experts.iter().zip(groups) {
            for i in first..first + count {
                let row = to.row_mut::<T>(i as usize);
                row.copy_from_slice(&expert.apply(row));
            }
        }
        Ok(())
    }
}

/// One f32 sum from the first value on; +0 for none.
fn left_fold(values: impl Iterator<Item = f32>) -> f32 {
    values.reduce(|sum, x| sum + x).unwrap_or(0.0)
}

/// The numbers of the experts of a rank.
pub(crate) fn experts_of(ep: &Ep, rank: usize) -> Range<usize> {
    let first = ep.placement().physical_base(rank);
    first..first + ep.local_experts(rank)
}

impl<T: Float> Backend for HostMoe<T> {
    type Choices = Choices;

    fn gate(&self, _: &Queue, tokens: Rows<'_>) -> Result<Choices, EpError> {
        let mut choices = Choices::default();
        tokens.iter::<T>().for_each(|token| self.choose(token, &mut choices));
        Ok(choices)
    }

    fn route<'a>(&self, choices: &'a Choices) -> Route<'a> {
        Route::Topk { ids: Ids::I32(&choices.ids), weights: Some(&choices.weights) }
    }

    fn experts(&self, _: &Queue, received: &mut Dispatched) -> Result<(), EpError> {
        match received.handle().layout() {
            Layout::RankMajor => self.rank_major(received),
            _ => self.expert_major(received),
        }
    }
}

/// Views of dense rows of `hidden` elements.
pub(crate) fn views<'a, T: Float>(
    hidden: usize,
    tokens: &'a [T],
    out: &'a mut [T],
) -> Result<(Rows<'a>, RowsMut<'a>), EpError> {
    Ok((Rows::new(tokens, hidden)?, RowsMut::new(out, hidden)?))
}
