//! Expert parallelism for mixture-of-experts models: dispatch and combine that run beside compute.
