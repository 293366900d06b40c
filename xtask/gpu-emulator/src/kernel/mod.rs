//! Kernels on the CPU: every CUDA thread is a fiber, blocks run in an order drawn from a seed.

use std::sync::Arc;

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

/// A loaded image: the shared object that [`crate::nvrtc`] made.
#[derive(Debug, Clone)]
pub struct Image {
    inner: Arc<()>,
}

/// A kernel of an image, which it keeps loaded.
#[derive(Debug, Clone)]
pub struct Kernel {
    image: Image,
    name: String,
}

impl Image {
    /// Loads an image.
    ///
    /// # Errors
    /// [`KernelError::Image`].
    pub fn load(bytes: &[u8]) -> Result<Image, KernelError> {
        Err(KernelError::Image(format!("{} bytes: not written yet", bytes.len())))
    }

    /// A kernel by its name.
    pub fn kernel(&self, name: &str) -> Option<Kernel> {
        Some(Kernel { image: self.clone(), name: name.into() })
    }
}

impl Kernel {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sizes of its parameters, bytes.
    pub fn param_sizes(&self) -> &[usize] {
        &[]
    }

    /// Static shared memory per block, bytes.
    pub fn static_shared(&self) -> u32 {
        0
    }

    /// The most threads per block, by its launch bounds; 1024 without.
    pub fn max_threads(&self) -> u32 {
        0
    }

    /// Runs all blocks on the calling thread and returns when the kernel has ended, everything it
    /// wrote being written.
    ///
    /// # Safety
    /// The parameters' addresses are valid for what the kernel does with them.
    ///
    /// # Errors
    /// [`KernelError::Launch`] before anything happens, [`KernelError::Fault`] afterwards.
    pub unsafe fn run(&self, launch: &Launch) -> Result<(), KernelError> {
        let reason = format!("{:?} {:?}: not written yet", self.image, launch);
        Err(KernelError::Launch { kernel: self.name.clone(), reason })
    }
}
