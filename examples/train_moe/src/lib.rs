//! A small mixture-of-experts classifier of handwritten digits, trained on several ranks.
//!
//! Experts are spread over the ranks, and so are the samples of every batch. [`moe`] is the part
//! that uses ep-runtime, forward and backward; [`model`] is the network around it; [`train`] the
//! loop, with the sum of the shared weights' gradients over the ranks.
//!
//! Nothing is added in an order that depends on the number of ranks, so any number of them computes
//! the same losses.

pub mod data;
pub mod linear;
pub mod model;
pub mod moe;
pub mod train;
