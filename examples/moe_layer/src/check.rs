//! The layer on several ranks against the dense layer on one.
//!
//! Expert-major rows travel one by one and are summed at home in the order of the experts, as the
//! dense layer sums them: on any number of ranks the results are its bits. Rank-major rows are sums
//! over the experts of a rank already, so on several ranks the additions are grouped by owner; their
//! bits are those of a dense layer that groups them likewise, and equal to those of the plain one up
//! to rounding.

use ep_runtime::{Ep, EpBuilder, EpError, Group, Layout, Queue};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use crate::host::{Float, HostMoe, Shape, experts_of, random, views};
use crate::moe_layer;

/// How a rank's results compare with the dense layer's.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// They are the bits of the dense layer that adds in the same order.
    pub same_bits: bool,
    /// The largest distance from the plain dense layer.
    pub distance: f32,
    /// The largest number in the plain dense layer's results.
    pub largest: f32,
}

/// Runs the layer with rows of `T` on this rank's `tokens` random tokens, at most `max_tokens`, and
/// compares. Collective.
///
/// # Errors
/// What the layer meets.
pub fn check<T: Float>(
    group: &Group,
    shape: Shape,
    layout: Layout,
    tokens: usize,
    max_tokens: usize,
) -> Result<Outcome, EpError> {
    let ep = EpBuilder::new(shape.moe_shape::<T>(max_tokens)).build(group)?;
    check_with(&ep, shape, layout, tokens, |layer, tokens| {
        let mut out = vec![T::from_f32(f32::NAN); tokens.len()];
        let (rows, into) = views(shape.hidden, tokens, &mut out)?;
        moe_layer(layer, &ep, &Queue::host(), layout, rows, into)?;
        Ok(out)
    })
}

/// As [`check`] for a layer that is built, wherever its rows are: `run` gets this rank's part of the
/// layer and its tokens, and gives what the layer gave.
///
/// # Errors
/// Those of `run`.
pub fn check_with<T: Float>(
    ep: &Ep,
    shape: Shape,
    layout: Layout,
    tokens: usize,
    run: impl FnOnce(&HostMoe<T>, &[T]) -> Result<Vec<T>, EpError>,
) -> Result<Outcome, EpError> {
    const SEED: u64 = 2;
    let mut rng = ChaCha8Rng::seed_from_u64(100 + ep.rank() as u64);
    let tokens: Vec<T> =
        random(&mut rng, tokens * shape.hidden, 1.0).into_iter().map(T::from_f32).collect();

    let out = run(&HostMoe::<T>::of_rank(shape, ep, SEED), &tokens)?;

    let whole = HostMoe::<T>::new(shape, 0..shape.experts, SEED);
    let everyone = std::slice::from_ref(&(0..shape.experts)).to_vec();
    let plain = whole.dense(&tokens, &everyone);
    let same_order = match layout {
        Layout::RankMajor => {
            let owners: Vec<_> = (0..ep.world()).map(|rank| experts_of(ep, rank)).collect();
            whole.dense(&tokens, &owners)
        }
        _ => plain.clone(),
    };
    let bits = |x: &T| x.to_f32().to_bits();
    let max = |values: &mut dyn Iterator<Item = f32>| values.fold(0.0, f32::max);
    Ok(Outcome {
        same_bits: out.iter().map(bits).eq(same_order.iter().map(bits)),
        distance: max(&mut out.iter().zip(&plain).map(|(a, b)| (a.to_f32() - b.to_f32()).abs())),
        largest: max(&mut plain.iter().map(|x| x.to_f32().abs())),
    })
}
