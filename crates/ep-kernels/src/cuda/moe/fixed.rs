//! Blocks of fixed size and place: what a plan knows of them, and the kernels that move rows between them
//! and slots.

use cudarc::driver::sys::CUstream;

use super::moves::MOE_HEADER;
use super::nodes::reading;
use super::params::{MoeOp, MoeRouting, MoeShape};
use crate::cuda::compile::{Arch, Compiler};
use crate::cuda::device::Device;
use crate::cuda::error::CudaError;
use crate::cuda::memory::Plain;
use crate::cuda::module::{Kernel, KernelParams, Module};
use crate::cuda::source::{KernelSource, layout};
use crate::cuda::stream::Stream;

pub(crate) static FIXED: KernelSource = KernelSource {
    name: "fixed.cu",
    kernels: &["moe_fixed_receive", "moe_fixed_rows", "moe_fixed_experts"],
    shared: &[MOE_HEADER],
    text: include_str!("../../../kernels/fixed.cu"),
    layouts: &[layout!(MoeFixedParams { shape, routing, op, slot, stride, reserved })],
};

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MoeFixedParams {
    shape: MoeShape,
    routing: MoeRouting,
    op: MoeOp,
    slot: u64,
    stride: u32,
    reserved: u32,
}

// SAFETY: repr(C), integers only, no padding: the size adds up.
unsafe impl Plain for MoeFixedParams {}
// SAFETY: the struct of kernels whose layout checks are compiled against this one's.
unsafe impl KernelParams for MoeFixedParams {}
const _: () = assert!(size_of::<MoeFixedParams>() == 128 + 176 + 72 + 8 + 2 * 4);

/// How much a block between ranks that are not mapped holds. Addresses are device addresses.
#[derive(Clone, Copy, Debug, Default)]
pub struct FixedLimits {
    /// `u32 [R]`: the node of every rank; ranks of one map each other.
    pub node_of: u64,
    /// The most rows of one rank for another; 0 where any number fits.
    pub rows: u32,
    /// The most rows of one rank for the experts of another; 0 where any number fits.
    pub expert_rows: u32,
}

/// Rows that move between blocks and a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FixedRows {
    /// Those that came, to their final places.
    Received,
    /// Those that go home, one per (token, rank).
    PerRank,
    /// Those that go home, one per (token, expert).
    PerExpert,
}

/// Moving rows between blocks and a slot of this rank. Addresses are device addresses.
#[derive(Clone, Copy, Debug)]
pub struct FixedArgs {
    /// The layer.
    pub shape: MoeShape,
    /// The routing.
    pub routing: MoeRouting,
    /// The operation, which has blocks.
    pub op: MoeOp,
    /// The slot.
    pub slot: u32,
    /// Bytes from row to row, in the slot as in blocks: a multiple of 16.
    pub stride: u32,
    /// Blocks of the launch.
    pub blocks: u32,
}

/// The kernels of blocks of fixed size, loaded on a device.
#[derive(Clone, Debug)]
pub struct FixedKernels {
    receive: Kernel,
    rows: Kernel,
    experts: Kernel,
}

impl FixedRows {
    /// Its kernel.
    pub(super) fn kernel(self) -> &'static str {
        match self {
            Self::Received => "moe_fixed_receive",
            Self::PerRank => "moe_fixed_rows",
            Self::PerExpert => "moe_fixed_experts",
        }
    }
}

impl FixedKernels {
    /// Compiles them, or takes them from the cache, and loads them.
    ///
    /// # Errors
    /// A device older than compute capability 8.0, or a failure of compiler or driver.
    pub fn load(device: &Device, compiler: &Compiler) -> Result<Self, CudaError> {
        let arch = Arch::of(device.properties())?;
        let module = Module::load(device, &compiler.cubin(&FIXED, arch)?)?;
        let kernel = |rows: FixedRows| module.kernel(rows.kernel());
        Ok(Self {
            receive: kernel(FixedRows::Received)?,
            rows: kernel(FixedRows::PerRank)?,
            experts: kernel(FixedRows::PerExpert)?,
        })
    }

    /// Loads them into the partition of `stream` too, if that launches into one.
    ///
    /// # Errors
    /// The driver's.
    pub fn prepare(&self, stream: &Stream) -> Result<(), CudaError> {
        [&self.receive, &self.rows, &self.experts].iter().try_for_each(|k| k.prepare(stream))
    }

    /// Moves rows.
    ///
    /// # Safety
    /// All addresses are valid on the device for what is done with them, until the kernel has ended;
    /// `stream` is a live stream of this device.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn submit(
        &self,
        stream: CUstream,
        rows: FixedRows,
        args: &FixedArgs,
    ) -> Result<(), CudaError> {
        let &FixedArgs { shape, routing, op, slot, stride, blocks } = args;
        let slot = u64::from(slot);
        let params = MoeFixedParams { shape, routing, op, slot, stride, reserved: 0 };
        let kernel = match rows {
            FixedRows::Received => &self.receive,
            FixedRows::PerRank => &self.rows,
            FixedRows::PerExpert => &self.experts,
        };
        // SAFETY: the caller's promise; the kernel takes these parameters.
        unsafe { kernel.launch(stream, &reading(blocks), &params) }
    }
}
