//! Conversions of rows on a GPU.

use cudarc::driver::sys::CUstream;
use ep_kernels::cuda::moe::{CastArgs, CastKernels};
use ep_kernels::cuda::{Compiler, Device, PointerPlace};
use ep_kernels::{DType, SCALE_BLOCK, ScaleKind};

use crate::{EpError, Memory, Queue, Result, Rows, RowsMut};

/// Blocks per SM, where the caller does not say how many.
const PER_SM: u32 = 4;

/// Conversions of rows in the memory of a GPU, in the order of its streams: the twins of
/// [`quantize_fp8`](crate::cast::quantize_fp8) and [`dequantize_fp8`](crate::cast::dequantize_fp8),
/// with their bits. A call allocates nothing and does not wait; it can be captured into a graph.
#[derive(Debug)]
pub struct DeviceCasts {
    device: Device,
    kernels: CastKernels,
    blocks: u32,
}

/// One side of a conversion.
#[derive(Clone, Copy)]
struct Side {
    what: &'static str,
    place: Memory,
    at: u64,
    rows: usize,
    row_bytes: usize,
    stride: usize,
    dtype: DType,
}

impl Side {
    fn read(what: &'static str, rows: &Rows<'_>) -> Self {
        Self {
            what,
            place: rows.place(),
            at: rows.as_ptr() as u64,
            rows: rows.len(),
            row_bytes: rows.row_bytes(),
            stride: rows.stride(),
            dtype: rows.dtype(),
        }
    }

    fn written(what: &'static str, rows: &RowsMut<'_>) -> Self {
        Self::read(what, &rows.as_rows())
    }

    fn address(&self) -> (u64, u64) {
        (self.at, self.stride as u64)
    }
}

impl DeviceCasts {
    /// For the GPU with this ordinal. Compiles kernels, or takes them from the cache.
    ///
    /// # Errors
    /// No such GPU, no compiler, or the driver's.
    pub fn new(ordinal: usize) -> Result<Self> {
        let device = Device::open(ordinal)?;
        let kernels = CastKernels::load(&device, Compiler::get()?)?;
        let blocks = PER_SM * device.properties().sms;
        Ok(Self { device, kernels, blocks })
    }

    /// Launches at most so many blocks of 256 threads, at least 1: what else runs keeps the other
    /// SMs. Otherwise 4 per SM. It never changes results.
    pub fn blocks(mut self, blocks: u32) -> Self {
        self.blocks = blocks.max(1);
        self
    }

    /// Rows of bf16, f16 or f32 to fp8 with one scale per [`SCALE_BLOCK`] elements, the last block of
    /// a row possibly shorter. Scales of f32 are divisors, scales of bytes UE8M0.
    ///
    /// # Errors
    /// Rows of another GPU, type, number or length, a queue that is no stream of this GPU; the
    /// driver's.
    pub fn quantize_fp8(
        &self,
        queue: &Queue,
        src: Rows<'_>,
        out: RowsMut<'_>,
        scales: RowsMut<'_>,
    ) -> Result<()> {
        const OP: &str = "quantize_fp8";
        let (numbers, codes) = (Side::read("src", &src), Side::written("out", &out));
        let (stream, args) =
            self.check(OP, queue, (numbers, codes), Side::written("scales", &scales))?;
        let args = CastArgs { src: numbers.address(), out: codes.address(), ..args };
        // SAFETY: the views' makers promise valid memory in the order of the queue; where it is and
        // how it is aligned was just checked, and the queue's stream is live.
        let cast = unsafe { self.kernels.quantize(stream, &args) };
        cast.map_err(EpError::from)
    }

    /// Rows of fp8 with their scales to rows of bf16, f16 or f32. NaN is canonical.
    ///
    /// # Errors
    /// As [`DeviceCasts::quantize_fp8`].
    pub fn dequantize_fp8(
        &self,
        queue: &Queue,
        src: Rows<'_>,
        scales: Rows<'_>,
        out: RowsMut<'_>,
    ) -> Result<()> {
        const OP: &str = "dequantize_fp8";
        let (codes, numbers) = (Side::read("src", &src), Side::written("out", &out));
        let (stream, args) =
            self.check(OP, queue, (numbers, codes), Side::read("scales", &scales))?;
        let args = CastArgs { src: codes.address(), out: numbers.address(), ..args };
        // SAFETY: as in `quantize_fp8`.
        let cast = unsafe { self.kernels.dequantize(stream, &args) };
        cast.map_err(EpError::from)
    }

    /// Checks everything; the arguments without source and destination.
    fn check(
        &self,
        op: &'static str,
        queue: &Queue,
        (numbers, codes): (Side, Side),
        scales: Side,
    ) -> Result<(CUstream, CastArgs)> {
        let wrong = |detail: String| Err(EpError::argument(op, detail));
        let ordinal = self.device.properties().ordinal;
        let stream = match queue.raw() {
            Some((stream, on)) if on == ordinal => stream,
            Some((_, on)) => return wrong(format!("a stream of GPU {on}; this is GPU {ordinal}")),
            None => return wrong("rows on a GPU need a stream as queue; pass a stream".into()),
        };
        let kind = match scales.dtype {
            DType::F32 => ScaleKind::F32,
            DType::Bytes => ScaleKind::Ue8m0,
            other => return wrong(format!("scales are {other}")),
        };
        if codes.dtype != DType::Fp8E4M3 || !numbers.dtype.is_float_reducible() {
            return wrong(format!("no conversion between {} and {}", numbers.dtype, codes.dtype));
        }
        let hidden = codes.row_bytes;
        if hidden == 0 || u32::try_from(hidden).is_err() {
            return wrong(format!("rows of {hidden} elements"));
        }
        let bytes = [
            (numbers, hidden * numbers.dtype.size()),
            (codes, hidden),
            (scales, kind.row_bytes(hidden)),
        ];
        for (side, row_bytes) in bytes {
            if side.rows != codes.rows || side.row_bytes != row_bytes {
                let Side { what, rows, row_bytes: got, .. } = side;
                return wrong(format!(
                    "{what} are {rows} rows of {got} bytes; {} rows of {hidden} elements in blocks \
                     of {SCALE_BLOCK} need {row_bytes}",
                    codes.rows
                ));
            }
            self.check_memory(op, &side)?;
        }
        let args = CastArgs {
            src: (0, 0),
            out: (0, 0),
            scales: scales.address(),
            rows: codes.rows as u64,
            hidden: hidden as u32,
            dtype: numbers.dtype,
            kind,
            blocks: self.blocks,
        };
        Ok((stream, args))
    }

    fn check_memory(&self, op: &'static str, side: &Side) -> Result<()> {
        let ordinal = self.device.properties().ordinal;
        let &Side { what, place, at, rows, stride, dtype, .. } = side;
        let size = dtype.size() as u64;
        if rows == 0 {
            return Ok(());
        }
        let detail = if place != (Memory::Cuda { ordinal }) {
            format!("{what} are in {place:?}; this is GPU {ordinal}")
        } else if !at.is_multiple_of(size) || !(stride as u64).is_multiple_of(size) {
            format!("{what} are at {at:#x}, {stride} bytes apart; a multiple of {size} is needed")
        } else {
            match self.device.place_of(at)? {
                PointerPlace::Device(on) if on == ordinal => return Ok(()),
                other => format!("{what} are in {other:?} memory; this is GPU {ordinal}"),
            }
        };
        Err(EpError::argument(op, detail))
    }
}
