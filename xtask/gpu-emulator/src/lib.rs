//! A GPU that is not there: one shared library that stands as `libcuda.so.1` and as
//! `libnvrtc.so.13`, so that the unmodified runtime runs its unmodified kernels on the CPU.
//!
//! [`nvrtc`] compiles CUDA sources as C++, [`kernel`] runs them with every CUDA thread a fiber, and
//! [`driver`] is the part of the driver's interface that the project calls. Where CUDA gives no
//! promise about an order, the emulator draws one, by `EP_EMULATOR_SEED`.

pub mod driver;
pub mod kernel;
pub mod nvrtc;
