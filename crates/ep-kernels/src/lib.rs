//! Kernels of expert parallelism: the host reference.
