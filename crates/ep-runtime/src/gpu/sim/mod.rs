//! The protocol of GPUs against simulated ones, without a driver.
//!
//! Ranks run the layer's own code, as callers do, on threads of which one goes at a time; their
//! streams are mapped to a few hardware queues, kernels take their time, and a seed picks what
//! happens next. What kernels read and write is checked by clocks of streams ([`memory`]), so that an
//! access nothing orders is found even where it happens to come at the right time. A deadlock is a
//! state in which nobody can go on, not a time-out.

mod device;
mod effects;
mod far;
mod fixed;
mod launches;
mod memory;
mod nodes;
mod program;
mod rank;
mod run;
mod tests;
mod tune;
mod turns;
