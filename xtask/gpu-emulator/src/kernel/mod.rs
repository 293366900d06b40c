//! Kernels on the CPU: every CUDA thread is a fiber, blocks run in an order drawn from a seed.
//!
//! A launch runs on the thread that asks for it. Its blocks are started in a random order, one or a
//! few at a time; inside a block, warps and lanes run in a random order between the points where
//! they wait for each other. What CUDA leaves open is decided against the kernel where that costs
//! little: shared memory starts as garbage, bulk copies happen as late or as early as they may.
//! All of it follows from the launch's seed and number.

mod block;
mod bulk;
mod host;
mod image;
mod random;
mod run;
mod shared;
mod stack;
mod thread;
mod trap;
mod warp;

pub use image::{Image, Kernel};
pub use stack::{STACK_BYTES, STACK_COLOURS, STACK_SPAN};

/// Why an image was not loaded, or what a kernel did that no kernel may do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The bytes are no image of this emulator's compiler.
    #[error("the image cannot be loaded: {0}")]
    Image(String),
    /// The launch does not fit the kernel: parameters, block or grid.
    #[error("{kernel}: {reason}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// What does not fit.
        reason: String,
    },
    /// The kernel misbehaved: a deadlock, a wrong address, an undefined operation. The device's
    /// contexts are lost, as after a GPU's exception.
    #[error("{kernel}, block {block}: {report}")]
    Fault {
        /// The kernel.
        kernel: String,
        /// Linear number of the block in the grid.
        block: u32,
        /// What happened, with threads and what each waits for.
        report: String,
    },
}

/// One launch of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads per block.
    pub block: [u32; 3],
    /// Blocks per cluster, along x; 1 without clusters.
    pub cluster: u32,
    /// Dynamic shared memory per block, bytes.
    pub dynamic_shared: u32,
    /// The parameters' bytes, in order, as [`Kernel::param_sizes`] says.
    pub params: Vec<Vec<u8>>,
    /// Numbers of the SMs that blocks run on, not empty: block `b` is on `sms[b % len]`.
    pub sms: Vec<u32>,
    /// SMs of the device, what `%nsmid` reads.
    pub sm_count: u32,
    /// What orders are drawn from, together with `number`.
    pub seed: u64,
    /// Number of this launch.
    pub number: u64,
}
