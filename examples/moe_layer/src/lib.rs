//! A mixture-of-experts layer on ep-runtime: gate, dispatch, experts, combine.
//!
//! [`moe_layer`] is what an engine would write. It touches no row itself, so it does not know where
//! rows are: a [`Backend`] does the computing, and whoever calls it makes the queue and the views
//! of rows. [`host`] is the backend for host memory; [`check`] compares it with the dense layer.

pub mod check;
pub mod host;

use ep_runtime::{
    CombineOpts, DispatchOpts, Dispatched, Ep, EpError, Event, Layout, Payload, Queue, Route, Rows,
    RowsMut,
};

/// The computation of a layer, ordered by a queue.
pub trait Backend {
    /// The gate's choices, kept until the layer's dispatch is done.
    type Choices;

    /// Chooses experts for `tokens`, `[T, hidden]`.
    ///
    /// # Errors
    /// What the backend meets.
    fn gate(&self, queue: &Queue, tokens: Rows<'_>) -> Result<Self::Choices, EpError>;

    /// The choices as dispatch takes them.
    fn route<'a>(&self, choices: &'a Self::Choices) -> Route<'a>;

    /// Replaces the received rows by the outputs of this rank's experts. Rank-major rows become the
    /// weighted sum over the token's experts on this rank; expert-major rows become their expert's
    /// output and are weighted by combine.
    ///
    /// # Errors
    /// What the backend meets.
    fn experts(&self, queue: &Queue, received: &mut Dispatched) -> Result<(), EpError>;
}

/// Applies the layer to this rank's `tokens`, `[T, hidden]`, and writes `out`, `[T, hidden]` of the
/// same type. Collective: every rank calls it, with as many tokens as it has, which may be none.
///
/// # Errors
/// What the backend, dispatch or combine meet.
pub fn moe_layer<B: Backend>(
    backend: &B,
    ep: &Ep,
    queue: &Queue,
    layout: Layout,
    tokens: Rows<'_>,
    out: RowsMut<'_>,
) -> Result<Event, EpError> {
    let choices = backend.gate(queue, tokens)?;
    let opts = DispatchOpts { layout, ..DispatchOpts::default() };
    let payload = Payload::new(tokens)?;
    let mut received = ep.dispatch(queue, payload, backend.route(&choices), &opts)?;
    backend.experts(queue, &mut received)?;
    let weighted = matches!(layout, Layout::ExpertMajor { .. });
    Ok(received.combine(queue, out, &CombineOpts { weighted, ..CombineOpts::default() })?)
}
