//! The mixture of experts, forward and backward: dispatch, experts, combine, both ways.

use std::ops::Range;

use ep_runtime::{
    CombineOpts, Combined, DispatchOpts, Dispatched, Ep, EpBuilder, EpError, Group, Handle, Ids,
    Layout, MoeShape, Payload, PayloadKind, Queue, Route, Rows, RowsMut,
};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use crate::linear::{Linear, dot, tanh, tanh_backward};
use crate::model::Sizes;

/// `down · tanh(up · x)`.
#[derive(Clone, Copy, Debug)]
struct Expert {
    up: Linear,
    down: Linear,
}

/// The experts of this rank, and the ways to all others.
#[derive(Debug)]
pub struct Moe {
    ep: Ep,
    queue: Queue,
    hidden: usize,
    topk: usize,
    experts: Vec<Expert>,
    /// The parameters of this rank's experts.
    pub params: Vec<f32>,
}

/// What the backward pass needs: the rows that this rank's experts received. They stay in their
/// slot; nothing is copied.
#[derive(Debug)]
pub struct Saved(Dispatched);

impl Moe {
    /// The part of the layer that belongs to this rank. Collective.
    ///
    /// # Errors
    /// When ep-runtime cannot be set up.
    pub fn new(
        group: &Group,
        sizes: &Sizes,
        max_tokens: usize,
        seed: u64,
    ) -> Result<Self, EpError> {
        let shape = MoeShape::new(sizes.hidden, sizes.topk, sizes.experts)
            .max_tokens(max_tokens)
            .payload(PayloadKind::F32)
            .expert_major(1);
        let ep = EpBuilder::new(shape).build(group)?;
        let first = ep.placement().physical_base(ep.rank());
        let mut params = Vec::new();
        let new = |id: usize| {
            // An expert is the same whichever rank makes it.
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(1 + id as u64);
            let up = Linear::new(&mut params, &mut rng, sizes.hidden, sizes.ffn);
            Expert { up, down: Linear::new(&mut params, &mut rng, sizes.ffn, sizes.hidden) }
        };
        let experts = (first..first + ep.local_experts(ep.rank())).map(new).collect();
        let (hidden, topk) = (sizes.hidden, sizes.topk);
        Ok(Self { ep, queue: Queue::host(), hidden, topk, experts, params })
    }

    /// Expert-major: combine sums a token's experts in one order, whichever ranks have them.
    fn dispatch(&self, rows: &[f32], route: Route<'_>) -> Result<Dispatched, EpError> {
        let layout = Layout::ExpertMajor { alignment: 1 };
        let payload = Payload::new(Rows::new(rows, self.hidden)?)?;
        self.ep.dispatch(
            &self.queue,
            payload,
            route,
            &DispatchOpts { layout, ..DispatchOpts::default() },
        )
    }

    /// `x + Σ weight · expert(x)` for each of this rank's tokens, `[T, hidden]`; `ids` and `weights`
    /// are `[T, topk]`. Collective.
    ///
    /// # Errors
    /// What dispatch and combine meet.
    pub fn forward(
        &self,
        x: &[f32],
        ids: &[i32],
        weights: &[f32],
    ) -> Result<(Vec<f32>, Saved), EpError> {
        let route = Route::Topk { ids: Ids::I32(ids), weights: Some(weights) };
        let received = self.dispatch(x, route)?;
        // The outputs get a slot of their own, so that the received rows survive.
        let mut outputs = self.ep.combine_slot(received.handle(), &self.queue)?;
        let mut rows = outputs.rows_mut(PayloadKind::F32)?;
        let mut to = rows.payload();
        for (expert, group) in self.experts.iter().zip(groups(received.handle())) {
            for i in group {
                let x = received.rows().payload().row::<f32>(i);
                let inner = tanh(expert.up.forward(&self.params, x));
                let y = expert.down.forward(&self.params, &inner);
                to.row_mut(i).copy_from_slice(&y);
            }
        }
        let mut out = vec![0.0; x.len()];
        let skip = [Rows::new(x, self.hidden)?];
        let sums = Combined::new(RowsMut::new(&mut out, self.hidden)?).biases(&skip);
        let opts = CombineOpts { weighted: true, ..CombineOpts::default() };
        outputs.combine(&self.queue, sums, &opts)?;
        Ok((out, Saved(received)))
    }

    /// Given the gradient of the outputs, `[T, hidden]`: those of the inputs, `[T, hidden]`, and of
    /// the weights, `[T, topk]`; that of the experts' parameters is added to `grads`. Collective.
    ///
    /// # Errors
    /// What dispatch and combine meet.
    pub fn backward(
        &self,
        saved: Saved,
        dout: &[f32],
        grads: &mut [f32],
    ) -> Result<(Vec<f32>, Vec<f32>), EpError> {
        let received = saved.0.rows();
        let handle = saved.0.handle();
        // Backward of combine: each output's gradient goes where its token went.
        let mut gradients = self.dispatch(dout, Route::Cached(handle))?;
        let mut rows = gradients.rows_mut(PayloadKind::F32)?;
        for (expert, group) in self.experts.iter().zip(groups(handle)) {
            for i in group {
                let (x, weight) = (received.payload().row(i), received.weights().get(i)[0]);
                let mut payload = rows.payload();
                let row = payload.row_mut::<f32>(i);
                let (dx, dweight) = self.expert_backward(expert, x, weight, row, grads);
                row.copy_from_slice(&dx);
                rows.weights(i)[0] = dweight;
            }
        }
        // Backward of dispatch: the gradients of a token's copies are summed at home.
        let mut dx = vec![0.0; dout.len()];
        let mut dweights = vec![0.0; handle.tokens() * self.topk];
        let skip = [Rows::new(dout, self.hidden)?];
        let sums = Combined::new(RowsMut::new(&mut dx, self.hidden)?).biases(&skip);
        gradients.combine(&self.queue, sums.weights(&mut dweights), &CombineOpts::default())?;
        Ok((dx, dweights))
    }

    /// One row of `weight · expert(x)`: the gradients of `x` and `weight`. What the forward pass
    /// computed is computed again instead of being kept.
    fn expert_backward(
        &self,
        expert: &Expert,
        x: &[f32],
        weight: f32,
        dout: &[f32],
        grads: &mut [f32],
    ) -> (Vec<f32>, f32) {
        let inner = tanh(expert.up.forward(&self.params, x));
        let y = expert.down.forward(&self.params, &inner);
        let dy: Vec<f32> = dout.iter().map(|d| weight * d).collect();
        let dinner = expert.down.backward(&self.params, &inner, &dy, grads);
        let dinner = tanh_backward(&inner, &dinner);
        (expert.up.backward(&self.params, x, &dinner, grads), dot(&y, dout))
    }
}

/// The rows of each of this rank's experts.
fn groups(handle: &Handle) -> impl Iterator<Item = Range<usize>> + '_ {
    let rows = |(&first, &count): (&i32, &i32)| first as usize..(first + count) as usize;
    handle.offsets().iter().zip(handle.counts()).map(rows)
}
