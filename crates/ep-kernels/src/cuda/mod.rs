//! GPUs: driver, run-time compilation, launches with attributes, partitions of SMs, and the two
//! kernels that observe and occupy SMs.
//!
//! Nothing links CUDA: libcuda and libnvrtc are opened when first needed, and where one is missing,
//! too old or without a GPU the answer is a [`CudaError`] that names the library and what to do. So it
//! is with libcublasLt, which only [`CublasLt`] needs.
//!
//! ```no_run
//! use ep_kernels::cuda::{Compiler, Device, ObserveOptions, SmTools};
//!
//! # fn main() -> Result<(), ep_kernels::cuda::CudaError> {
//! let device = Device::open(0)?;
//! let tools = SmTools::load(&device, Compiler::get()?)?;
//! let seen = tools.observe(&ObserveOptions::default())?;
//! println!("{} SMs, {:?}", seen.sm_ids.len(), seen.sizes);
//! # Ok(())
//! # }
//! ```

mod cache;
mod compile;
mod cublaslt;
mod device;
mod device_memory;
mod driver;
mod error;
mod event;
mod gemm;
mod green;
mod holder;
mod launch;
mod memory;
mod module;
pub mod moe;
mod nvrtc;
mod observe;
mod probe;
mod report;
mod source;
mod stream;

pub use cache::{CACHE_VARIABLE, CacheKey, KernelCache};
pub use compile::{Arch, CacheChoice, Compiler, CompilerOptions, Cubin};
pub use cublaslt::{CUBLASLT_PATH_VARIABLE, CublasLt, CublasLtPlan};
pub use device::{Current, Device, DeviceProperties};
pub use device_memory::{DeviceMemory, PointerPlace};
pub use driver::Driver;
pub use error::{CudaError, Version};
pub use event::{CaptureRelaxed, Event, EventPool};
pub use gemm::{GemmKernel, GemmSpec};
pub use green::{GreenContext, SmResource, SplitFlags};
pub use holder::{HoldReport, HoldSpec, Holder, SmSet};
pub use launch::{ClusterScheduling, LaunchAttributes, LaunchConfig, LaunchFlags, MemSyncDomain};
pub use memory::{MappedHost, Plain};
pub use module::{Kernel, KernelParams, Module, Resources};
pub use nvrtc::NVRTC_PATH_VARIABLE;
pub use observe::{ClusterObservation, ObserveOptions, SmObservations, observe_sms};
pub use probe::{ProbeRecord, ProbeRun, ProbeSpec, SmTools};
pub use report::{KernelReport, compile_report};
pub use source::{KernelSource, Layout};
pub use stream::Stream;
