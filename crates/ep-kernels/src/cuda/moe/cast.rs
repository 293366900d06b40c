//! Launching the kernels that convert rows to fp8 and back.

use cudarc::driver::sys::CUstream;

use super::moves::MOE_HEADER;
use crate::cuda::compile::{Arch, Compiler};
use crate::cuda::device::Device;
use crate::cuda::error::{CudaError, invalid};
use crate::cuda::launch::{LaunchAttributes, LaunchConfig};
use crate::cuda::memory::Plain;
use crate::cuda::module::{Kernel, KernelParams, Module};
use crate::cuda::source::{KernelSource, layout};
use crate::cuda::stream::Stream;
use crate::{DType, SCALE_BLOCK, ScaleKind};

pub(crate) static CAST: KernelSource = KernelSource {
    name: "cast.cu",
    kernels: &["moe_quantize", "moe_dequantize"],
    shared: &[MOE_HEADER],
    text: include_str!("../../../kernels/cast.cu"),
    layouts: &[layout!(MoeCastParams {
        src,
        out,
        scales,
        src_stride,
        out_stride,
        scales_stride,
        rows,
        hidden,
        dtype,
        ue8m0,
        wide
    })],
};

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MoeCastParams {
    src: u64,
    out: u64,
    scales: u64,
    src_stride: u64,
    out_stride: u64,
    scales_stride: u64,
    rows: u64,
    hidden: u32,
    dtype: u32,
    ue8m0: u32,
    wide: u32,
}

// SAFETY: repr(C), integers only, no padding: the size adds up.
unsafe impl Plain for MoeCastParams {}
// SAFETY: the struct of kernels whose layout checks are compiled against this one's.
unsafe impl KernelParams for MoeCastParams {}
const _: () = assert!(size_of::<MoeCastParams>() == 7 * 8 + 4 * 4);

/// A conversion of rows. Addresses are device addresses, strides bytes from row to row.
#[derive(Clone, Copy, Debug)]
pub struct CastArgs {
    /// Row 0 and stride of what is read.
    pub src: (u64, u64),
    /// Row 0 and stride of what is written.
    pub out: (u64, u64),
    /// Row 0 and stride of the scales, one per [`SCALE_BLOCK`] elements.
    pub scales: (u64, u64),
    /// Rows.
    pub rows: u64,
    /// Elements of a row.
    pub hidden: u32,
    /// The type on the side that is not fp8.
    pub dtype: DType,
    /// How scales are stored.
    pub kind: ScaleKind,
    /// The most blocks to launch; more than there is work for are not.
    pub blocks: u32,
}

/// The kernels, loaded on a device.
#[derive(Debug)]
pub struct CastKernels {
    quantize: Kernel,
    dequantize: Kernel,
}

/// Warps of a block.
const WARPS: u64 = 8;

impl CastKernels {
    /// Compiles them, or takes them from the cache, and loads them.
    ///
    /// # Errors
    /// The compiler's or the driver's.
    pub fn load(device: &Device, compiler: &Compiler) -> Result<Self, CudaError> {
        let module = Module::load(device, &compiler.cubin(&CAST, Arch::of(device.properties())?)?)?;
        let (quantize, dequantize) =
            (module.kernel("moe_quantize")?, module.kernel("moe_dequantize")?);
        Ok(Self { quantize, dequantize })
    }

    /// Loads them into the partition of `stream` too, if that launches into one.
    ///
    /// # Errors
    /// The driver's.
    pub fn prepare(&self, stream: &Stream) -> Result<(), CudaError> {
        self.quantize.prepare(stream)?;
        self.dequantize.prepare(stream)
    }

    /// Rows of numbers to fp8 and scales: what [`quantize_fp8`](crate::host::quantize_fp8) gives, bit
    /// for bit.
    ///
    /// # Safety
    /// All addresses are valid on the device for what is done with them, aligned to their elements,
    /// until the kernel has ended; `stream` is a live stream of this device.
    ///
    /// # Errors
    /// A type that is no number; the driver's.
    pub unsafe fn quantize(&self, stream: CUstream, args: &CastArgs) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { launch(&self.quantize, stream, args, (args.src, args.out)) }
    }

    /// Fp8 and scales to rows of numbers: what [`dequantize_fp8`](crate::host::dequantize_fp8) gives,
    /// with NaN canonical.
    ///
    /// # Safety
    /// As [`CastKernels::quantize`].
    ///
    /// # Errors
    /// As [`CastKernels::quantize`].
    pub unsafe fn dequantize(&self, stream: CUstream, args: &CastArgs) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { launch(&self.dequantize, stream, args, (args.out, args.src)) }
    }
}

/// `numbers` are the address and stride of the rows that are not fp8, `codes` those of fp8.
unsafe fn launch(
    kernel: &Kernel,
    stream: CUstream,
    args: &CastArgs,
    (numbers, codes): ((u64, u64), (u64, u64)),
) -> Result<(), CudaError> {
    const OP: &str = "cast";
    let dtype = match args.dtype {
        DType::Bf16 => 0,
        DType::F16 => 1,
        DType::F32 => 2,
        other => return invalid(OP, format!("{other} is no type of numbers to convert")),
    };
    if args.hidden == 0 || args.blocks == 0 {
        return invalid(OP, format!("{} elements on {} blocks", args.hidden, args.blocks));
    }
    let units = args.rows.saturating_mul(u64::from(args.hidden).div_ceil(SCALE_BLOCK as u64));
    if units == 0 {
        return Ok(());
    }
    let aligned = |(at, stride): (u64, u64), to: u64| at % to == 0 && stride % to == 0;
    let wide = aligned(numbers, 4 * args.dtype.size() as u64) && aligned(codes, 4);
    let params = MoeCastParams {
        src: args.src.0,
        out: args.out.0,
        scales: args.scales.0,
        src_stride: args.src.1,
        out_stride: args.out.1,
        scales_stride: args.scales.1,
        rows: args.rows,
        hidden: args.hidden,
        dtype,
        ue8m0: u32::from(args.kind == ScaleKind::Ue8m0),
        wide: u32::from(wide),
    };
    let blocks = units.div_ceil(WARPS).min(u64::from(args.blocks)) as u32;
    let attributes = LaunchAttributes::plain();
    let config =
        LaunchConfig { grid: blocks, block: 32 * WARPS as u32, shared_bytes: 0, attributes };
    // SAFETY: the caller's promise; the kernel takes these parameters.
    unsafe { kernel.launch(stream, &config, &params) }
}
