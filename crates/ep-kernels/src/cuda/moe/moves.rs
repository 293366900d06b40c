//! Launching the kernels that move rows.

use cudarc::driver::sys::CUstream;

use super::args::{CombineArgs, DispatchArgs, ExpandArgs, ReduceArgs};
use super::move_plan::{CopyPath, MovePlan, Mover, ROW_STAGES, SUM_SHAPES, UNROLLS};
use super::nodes::ForwardArgs;
use super::params::{
    MoeExpertFormat, MoeOp, MoeOutFormat, MoeRouting, MoeRowFormat, MoeShape, SHARED,
};
use crate::DType;
use crate::cuda::compile::{Arch, Compiler};
use crate::cuda::device::Device;
use crate::cuda::error::{CudaError, invalid};
use crate::cuda::launch::LaunchConfig;
use crate::cuda::memory::Plain;
use crate::cuda::module::{Kernel, KernelParams, Module};
use crate::cuda::source::{KernelSource, layout};
use crate::cuda::stream::Stream;

pub(crate) const MOE_HEADER: (&str, &str, &[crate::cuda::source::Layout]) =
    ("moe.cuh", include_str!("../../../kernels/moe.cuh"), &SHARED);
const NUMBERS_HEADER: (&str, &str, &[crate::cuda::source::Layout]) =
    ("numbers.cuh", include_str!("../../../kernels/numbers.cuh"), &[]);
pub(super) const TMA_HEADER: (&str, &str, &[crate::cuda::source::Layout]) =
    ("tma.cuh", include_str!("../../../kernels/tma.cuh"), &[]);

pub(crate) static ROWS: KernelSource = KernelSource {
    name: "rows.cu",
    kernels: &[
        "moe_dispatch_tma2",
        "moe_dispatch_tma3",
        "moe_dispatch_tma4",
        "moe_dispatch_ld1",
        "moe_dispatch_ld2",
        "moe_dispatch_ld4",
        "moe_dispatch_ld7",
        "moe_dispatch_ld14",
        "moe_expand_tma2",
        "moe_expand_tma3",
        "moe_expand_tma4",
        "moe_expand_ld1",
        "moe_expand_ld2",
        "moe_expand_ld4",
        "moe_expand_ld7",
        "moe_expand_ld14",
    ],
    shared: &[MOE_HEADER, TMA_HEADER],
    text: include_str!("../../../kernels/rows.cu"),
    layouts: &[layout!(MoeRowsParams {
        shape,
        routing,
        op,
        row,
        expert,
        payload,
        payload_stride,
        scales,
        scales_stride,
        numbers,
        check,
        chunk,
        pieces,
        first
    })],
};

pub(crate) static SUMS: KernelSource = KernelSource {
    name: "sums.cu",
    kernels: &[
        "moe_sum_tma2x4",
        "moe_sum_tma7x3",
        "moe_sum_tma7x4",
        "moe_sum_tma7x6",
        "moe_sum_tma4x6",
        "moe_sum_tma14x2",
        "moe_sum_tma14x3",
        "moe_sum_ld1",
        "moe_sum_ld2",
        "moe_sum_ld4",
        "moe_sum_ld7",
        "moe_sum_ld14",
    ],
    shared: &[MOE_HEADER, TMA_HEADER, NUMBERS_HEADER],
    text: include_str!("../../../kernels/sums.cu"),
    layouts: &[layout!(MoeSumsParams {
        shape,
        routing,
        op,
        from,
        out,
        out_stride,
        weights_home,
        slot,
        bias0,
        bias1,
        bias2,
        bias3,
        bias4,
        bias5,
        bias6,
        bias7,
        bias_stride0,
        bias_stride1,
        bias_stride2,
        bias_stride3,
        bias_stride4,
        bias_stride5,
        bias_stride6,
        bias_stride7,
        dtype,
        row_bytes,
        mode,
        weighted,
        biases,
        check,
        span,
        out_weights_at
    })],
};

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MoeRowsParams {
    shape: MoeShape,
    routing: MoeRouting,
    op: MoeOp,
    row: MoeRowFormat,
    expert: MoeExpertFormat,
    payload: u64,
    payload_stride: u64,
    scales: u64,
    scales_stride: u64,
    numbers: u64,
    check: u32,
    chunk: u32,
    pieces: u32,
    first: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MoeSumsParams {
    shape: MoeShape,
    routing: MoeRouting,
    op: MoeOp,
    from: MoeOutFormat,
    out: u64,
    out_stride: u64,
    weights_home: u64,
    slot: u64,
    bias0: u64,
    bias1: u64,
    bias2: u64,
    bias3: u64,
    bias4: u64,
    bias5: u64,
    bias6: u64,
    bias7: u64,
    bias_stride0: u64,
    bias_stride1: u64,
    bias_stride2: u64,
    bias_stride3: u64,
    bias_stride4: u64,
    bias_stride5: u64,
    bias_stride6: u64,
    bias_stride7: u64,
    dtype: u32,
    row_bytes: u32,
    mode: u32,
    weighted: u32,
    biases: u32,
    check: u32,
    span: u32,
    out_weights_at: u32,
}

// SAFETY: repr(C), integers only, no padding: the sizes below add up.
unsafe impl Plain for MoeRowsParams {}
// SAFETY: repr(C), integers only, no padding: the sizes below add up.
unsafe impl Plain for MoeSumsParams {}
// SAFETY: the structs of kernels/rows.cu and sums.cu, whose layout checks are compiled against these.
unsafe impl KernelParams for MoeRowsParams {}
// SAFETY: the struct of kernels/sums.cu, whose layout checks are compiled against this.
unsafe impl KernelParams for MoeSumsParams {}
const _: () = assert!(size_of::<MoeRowsParams>() == 128 + 176 + 72 + 32 + 24 + 5 * 8 + 4 * 4);
const _: () = assert!(size_of::<MoeSumsParams>() == 128 + 176 + 72 + 16 + 20 * 8 + 8 * 4);

const PER_RANK: u32 = 0;
const PER_EXPERT: u32 = 1;
const LOCAL: u32 = 2;

/// The kernels that move rows, loaded on a device.
#[derive(Clone, Debug)]
pub struct MoveKernels {
    device: Device,
    /// By stages, then by unroll.
    dispatch: Movers,
    expand: Movers,
    /// By shape, then by unroll.
    sums: Movers,
}

/// Kernels by stages or shape of bulk copies, and by unroll.
pub(super) type Movers = (Vec<Kernel>, Vec<Kernel>);

fn all(module: &Module, prefix: &str, suffixes: Vec<String>) -> Result<Vec<Kernel>, CudaError> {
    suffixes.iter().map(|suffix| module.kernel(&format!("{prefix}{suffix}"))).collect()
}

fn unrolls() -> Vec<String> {
    UNROLLS.iter().map(u32::to_string).collect()
}

/// The kernels of a module that copy rows.
pub(super) fn rows_of(module: &Module, prefix: &str) -> Result<Movers, CudaError> {
    let stages = ROW_STAGES.iter().map(u32::to_string).collect();
    let tma = all(module, &format!("{prefix}_tma"), stages)?;
    Ok((tma, all(module, &format!("{prefix}_ld"), unrolls())?))
}

impl MoveKernels {
    /// Compiles them, or takes them from the cache, and loads them.
    ///
    /// # Errors
    /// A device older than compute capability 8.0, or a failure of compiler or driver.
    pub fn load(device: &Device, compiler: &Compiler) -> Result<Self, CudaError> {
        let arch = Arch::of(device.properties())?;
        let rows = Module::load(device, &compiler.cubin(&ROWS, arch)?)?;
        let sums = Module::load(device, &compiler.cubin(&SUMS, arch)?)?;
        let shapes = SUM_SHAPES.iter().map(|(v, s)| format!("{v}x{s}")).collect();
        Ok(Self {
            device: device.clone(),
            dispatch: rows_of(&rows, "moe_dispatch")?,
            expand: rows_of(&rows, "moe_expand")?,
            sums: (all(&sums, "moe_sum_tma", shapes)?, all(&sums, "moe_sum_ld", unrolls())?),
        })
    }

    fn every(&self) -> impl Iterator<Item = &Kernel> {
        [&self.dispatch, &self.expand, &self.sums].into_iter().flat_map(|(a, b)| a.iter().chain(b))
    }

    /// Loads them into the partition of `stream` too, if that launches into one.
    ///
    /// # Errors
    /// The driver's.
    pub fn prepare(&self, stream: &Stream) -> Result<(), CudaError> {
        self.every().try_for_each(|kernel| kernel.prepare(stream))
    }

    /// Writes each token's row to its ranks.
    ///
    /// # Safety
    /// All addresses are valid on the device for what is done with them, until the kernel has ended;
    /// `stream` is a live stream of this device.
    ///
    /// # Errors
    /// A plan that does not fit, or the driver's.
    pub unsafe fn dispatch(
        &self,
        stream: CUstream,
        plan: &MovePlan,
        args: &DispatchArgs,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.rows(stream, plan, &self.dispatch, dispatched(args)) }
    }

    /// As [`MoveKernels::dispatch`], by kernels for rows of other ranks.
    pub(super) unsafe fn forward(
        &self,
        stream: CUstream,
        plan: &MovePlan,
        kernels: &Movers,
        args: &ForwardArgs,
    ) -> Result<(), CudaError> {
        let params = MoeRowsParams { numbers: args.numbers, ..dispatched(&args.rows) };
        // SAFETY: the caller's promise.
        unsafe { self.rows(stream, plan, kernels, params) }
    }

    /// Copies received rows to the rows of their experts, and fills the padding.
    ///
    /// # Safety
    /// As [`MoveKernels::dispatch`].
    ///
    /// # Errors
    /// As [`MoveKernels::dispatch`].
    pub unsafe fn expand(
        &self,
        stream: CUstream,
        plan: &MovePlan,
        args: &ExpandArgs,
    ) -> Result<(), CudaError> {
        let params = MoeRowsParams {
            shape: args.shape,
            routing: args.routing,
            op: args.op,
            row: args.row,
            expert: args.expert,
            ..MoeRowsParams::default()
        };
        // SAFETY: the caller's promise.
        unsafe { self.rows(stream, plan, &self.expand, params) }
    }

    unsafe fn rows(
        &self,
        stream: CUstream,
        plan: &MovePlan,
        kernels: &Movers,
        mut params: MoeRowsParams,
    ) -> Result<(), CudaError> {
        let ranks = params.shape.world as usize;
        plan.validate(Mover::Rows, ranks, self.device.properties())?;
        let kernel = match plan.path {
            CopyPath::Tma { stages, chunk } => {
                params.chunk = chunk.min(params.row.payload_bytes).max(16);
                params.pieces = params.row.payload_bytes.div_ceil(params.chunk);
                pick(&kernels.0, ROW_STAGES.iter().position(|&s| s == stages))?
            }
            CopyPath::LdSt { unroll } => {
                pick(&kernels.1, UNROLLS.iter().position(|&u| u == unroll))?
            }
        };
        // SAFETY: the caller's promise; the kernel takes these parameters.
        unsafe { kernel.launch(stream, &config(plan, ranks), &params) }
    }

    /// Sums each received token's rows of this rank's experts.
    ///
    /// # Safety
    /// As [`MoveKernels::dispatch`].
    ///
    /// # Errors
    /// As [`MoveKernels::dispatch`].
    pub unsafe fn reduce(
        &self,
        stream: CUstream,
        plan: &MovePlan,
        args: &ReduceArgs,
    ) -> Result<(), CudaError> {
        let params = MoeSumsParams {
            shape: args.shape,
            routing: args.routing,
            from: args.from,
            out_stride: u64::from(args.to.stride),
            slot: u64::from(args.slot),
            row_bytes: args.hidden * args.dtype.size() as u32,
            dtype: code(args.dtype)?,
            mode: LOCAL,
            weighted: u32::from(args.weighted),
            out_weights_at: args.to.weights_at,
            ..MoeSumsParams::default()
        };
        // SAFETY: the caller's promise.
        unsafe { self.sums(stream, plan, params) }
    }

    /// Sums each token's rows at home.
    ///
    /// # Safety
    /// As [`MoveKernels::dispatch`].
    ///
    /// # Errors
    /// As [`MoveKernels::dispatch`].
    pub unsafe fn combine(
        &self,
        stream: CUstream,
        plan: &MovePlan,
        args: &CombineArgs,
    ) -> Result<(), CudaError> {
        let [b0, b1, b2, b3, b4, b5, b6, b7] = args.biases;
        let params = MoeSumsParams {
            shape: args.shape,
            routing: args.routing,
            op: args.op,
            from: args.format,
            out: args.out,
            out_stride: args.out_stride,
            weights_home: if args.carried_at > 0 { args.out } else { args.weights_home },
            out_weights_at: args.carried_at,
            bias0: b0.0,
            bias1: b1.0,
            bias2: b2.0,
            bias3: b3.0,
            bias4: b4.0,
            bias5: b5.0,
            bias6: b6.0,
            bias7: b7.0,
            bias_stride0: b0.1,
            bias_stride1: b1.1,
            bias_stride2: b2.1,
            bias_stride3: b3.1,
            bias_stride4: b4.1,
            bias_stride5: b5.1,
            bias_stride6: b6.1,
            bias_stride7: b7.1,
            row_bytes: args.hidden * args.dtype.size() as u32,
            dtype: code(args.dtype)?,
            mode: if args.per_rank { PER_RANK } else { PER_EXPERT },
            weighted: u32::from(args.weighted),
            biases: args.bias_count,
            check: u32::from(args.check),
            ..MoeSumsParams::default()
        };
        // SAFETY: the caller's promise.
        unsafe { self.sums(stream, plan, params) }
    }

    unsafe fn sums(
        &self,
        stream: CUstream,
        plan: &MovePlan,
        mut params: MoeSumsParams,
    ) -> Result<(), CudaError> {
        let ranks = params.shape.world as usize;
        plan.validate(Mover::Sums, ranks, self.device.properties())?;
        let kernel = match plan.path {
            CopyPath::Tma { stages, chunk } => {
                // With few tokens a token's pieces are spread over warps; with many a warp takes
                // whole tokens, whose places it then looks up once.
                let warps = u64::from(plan.blocks) * u64::from(plan.warps);
                let pieces = params.row_bytes.div_ceil(chunk).max(1);
                let many = params.mode == LOCAL || u64::from(params.routing.tokens) >= 16 * warps;
                params.span = if many { pieces } else { 1 };
                let shape = (chunk / 512, stages);
                pick(&self.sums.0, SUM_SHAPES.iter().position(|&s| s == shape))?
            }
            CopyPath::LdSt { unroll } => {
                pick(&self.sums.1, UNROLLS.iter().position(|&u| u == unroll))?
            }
        };
        // SAFETY: the caller's promise; the kernel takes these parameters.
        unsafe { kernel.launch(stream, &config(plan, ranks), &params) }
    }
}

fn dispatched(args: &DispatchArgs) -> MoeRowsParams {
    MoeRowsParams {
        shape: args.shape,
        routing: args.routing,
        op: args.op,
        row: args.format,
        payload: args.payload,
        payload_stride: args.payload_stride,
        scales: args.scales,
        scales_stride: args.scales_stride,
        check: u32::from(args.check),
        first: args.first,
        ..MoeRowsParams::default()
    }
}

/// The launch of a kernel that moves rows.
pub(super) fn config(plan: &MovePlan, ranks: usize) -> LaunchConfig {
    LaunchConfig {
        grid: plan.blocks,
        block: 32 * plan.warps,
        shared_bytes: plan.shared_bytes(ranks) as u32,
        attributes: plan.attributes,
    }
}

fn pick(kernels: &[Kernel], at: Option<usize>) -> Result<&Kernel, CudaError> {
    match at.and_then(|at| kernels.get(at)) {
        Some(kernel) => Ok(kernel),
        None => invalid("move plan", "there is no such kernel"),
    }
}

/// As kernels number what can be summed.
fn code(dtype: DType) -> Result<u32, CudaError> {
    match dtype {
        DType::Bf16 => Ok(0),
        DType::F16 => Ok(1),
        DType::F32 => Ok(2),
        other => invalid("sum", format!("{other} cannot be summed")),
    }
}
