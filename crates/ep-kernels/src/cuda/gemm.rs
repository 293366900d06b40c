//! A persistent bf16 GEMM on as many SMs as it is given: the compute that communication is measured
//! beside, standing for a caller's own.

use std::ffi::{c_int, c_void};

use cudarc::driver::sys::CUstream;

use super::compile::{Arch, Compiler};
use super::device::{Device, DeviceProperties};
use super::driver::TensorMapEncode;
use super::error::{CudaError, invalid};
use super::launch::{LaunchAttributes, LaunchConfig};
use super::memory::Plain;
use super::module::{Kernel, KernelParams, Module};
use super::source::{KernelSource, layout};
use super::stream::Stream;

pub(crate) static GEMM: KernelSource = KernelSource {
    name: "gemm.cu",
    kernels: &["gemm_bf16"],
    shared: &[("tma.cuh", include_str!("../../kernels/tma.cuh"), &[])],
    text: include_str!("../../kernels/gemm.cu"),
    layouts: &[
        layout!(GemmMap {}),
        layout!(GemmRest {}),
        layout!(GemmParams {
            a_map,
            b_map,
            a,
            b,
            d,
            m,
            n,
            k,
            tiles_m,
            tiles_n,
            tiles,
            steps,
            group,
            rest
        }),
    ],
};

/// k of one stage of the kernel.
const STEP_K: u32 = 64;
/// Rows of tiles walked together: with 132 blocks on 128 x 256 tiles what runs at a time is about
/// 2048 x 2112 outputs, whose rows of A and B fit in L2 for any K of today's models.
const GROUP: u32 = 16;

/// D\[M,N\] = A\[M,K\] · B\[N,K\]ᵀ, all row-major bf16 without padding between rows, accumulated in
/// f32 and rounded once, to nearest even.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmSpec {
    /// Rows of A and D, at least 1.
    pub m: u32,
    /// Rows of B and columns of D, a multiple of 8.
    pub n: u32,
    /// Columns of A and B, a multiple of 8.
    pub k: u32,
    /// Device address of A, 16-byte aligned.
    pub a: u64,
    /// Device address of B, 16-byte aligned.
    pub b: u64,
    /// Device address of D, 16-byte aligned; overlaps neither A nor B.
    pub d: u64,
    /// How many SMs compute: blocks of the grid, each of which takes an SM alone. More than the
    /// device has run in waves.
    pub blocks: u32,
}

impl GemmSpec {
    /// Operations of the product, 2 · M · N · K: what throughput is counted in.
    pub fn flops(&self) -> f64 {
        2.0 * f64::from(self.m) * f64::from(self.n) * f64::from(self.k)
    }

    pub(crate) fn check(&self, operation: &'static str) -> Result<(), CudaError> {
        const MOST: u32 = i32::MAX as u32;
        for (name, size, unit) in [("M", self.m, 1), ("N", self.n, 8), ("K", self.k, 8)] {
            if size == 0 || size > MOST || size % unit != 0 {
                let reason =
                    format!("{name} is {size}; multiples of {unit} to {MOST} are possible");
                return invalid(operation, reason);
            }
        }
        for (name, address) in [("A", self.a), ("B", self.b), ("D", self.d)] {
            if address == 0 || address % 16 != 0 {
                let reason =
                    format!("{name} is at {address:#x}; a 16-byte aligned address is needed");
                return invalid(operation, reason);
            }
        }
        if self.blocks == 0 || self.blocks > MOST {
            let reason = format!("{} blocks; 1 to {MOST} are possible", self.blocks);
            return invalid(operation, reason);
        }
        Ok(())
    }
}

/// `CUtensorMap`: opaque, filled by the driver. Aligned as cuda.h has it since CUDA 13; 64 before.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct GemmMap {
    words: [u64; 16],
}

/// What fills the parameters up to a multiple of their alignment.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct GemmRest {
    words: [u64; 9],
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct GemmParams {
    a_map: GemmMap,
    b_map: GemmMap,
    a: u64,
    b: u64,
    d: u64,
    m: u32,
    n: u32,
    k: u32,
    tiles_m: u32,
    tiles_n: u32,
    tiles: u32,
    steps: u32,
    group: u32,
    rest: GemmRest,
}

// SAFETY: `repr(C)`, integers only, and no padding: the parts add up to a multiple of the alignment.
unsafe impl Plain for GemmParams {}
// SAFETY: gemm.cu's kernel takes this struct; its layout is checked there.
unsafe impl KernelParams for GemmParams {}
const _: () = assert!(size_of::<GemmParams>() == 2 * 128 + 3 * 8 + 8 * 4 + 9 * 8);

/// How the kernel is built for an architecture; gemm.cu has the same figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    tile_m: u32,
    tile_n: u32,
    threads: u32,
    stages: u32,
    tensor_maps: bool,
}

impl Shape {
    fn of(arch: Arch) -> Shape {
        if arch == Arch::SM_90A {
            Shape { tile_m: 128, tile_n: 256, threads: 384, stages: 4, tensor_maps: true }
        } else {
            Shape { tile_m: 128, tile_n: 128, threads: 256, stages: 3, tensor_maps: false }
        }
    }

    /// Dynamic shared memory: the stages, room to align them, two barriers per stage.
    fn shared_bytes(&self) -> u32 {
        let stage = (self.tile_m + self.tile_n) * STEP_K * 2;
        self.stages * (stage + 16) + 1023
    }

    /// Parameters but for the tensor maps.
    fn params(&self, spec: &GemmSpec) -> Result<GemmParams, CudaError> {
        let (tiles_m, tiles_n) = (spec.m.div_ceil(self.tile_m), spec.n.div_ceil(self.tile_n));
        // Walking adds the grid to a tile's number: both stay below 2^31.
        let Some(tiles) = tiles_m.checked_mul(tiles_n).filter(|tiles| *tiles <= i32::MAX as u32)
        else {
            let reason = format!("{tiles_m} x {tiles_n} tiles are too many");
            return invalid("GemmKernel::launch", reason);
        };
        Ok(GemmParams {
            a: spec.a,
            b: spec.b,
            d: spec.d,
            m: spec.m,
            n: spec.n,
            k: spec.k,
            tiles_m,
            tiles_n,
            tiles,
            steps: spec.k.div_ceil(STEP_K),
            group: GROUP,
            ..GemmParams::default()
        })
    }

    fn config(&self, spec: &GemmSpec, params: &GemmParams) -> LaunchConfig {
        LaunchConfig {
            grid: spec.blocks.min(params.tiles),
            block: self.threads,
            shared_bytes: self.shared_bytes(),
            attributes: LaunchAttributes::plain(),
        }
    }
}

/// The kernel, loaded on a device.
///
/// Blocks wait for no other block and need no cluster, so any number of them may be resident. The
/// result has the same bits for every [`GemmSpec::blocks`].
#[derive(Debug, Clone)]
pub struct GemmKernel {
    kernel: Kernel,
    shape: Shape,
    encode: Option<TensorMapEncode>,
}

impl GemmKernel {
    /// Compiles and loads it.
    ///
    /// # Errors
    /// The compiler's and the driver's, an architecture without bf16 tensor cores, or on compute
    /// capability 9.0 a driver without tensor maps.
    pub fn load(device: &Device, compiler: &Compiler) -> Result<Self, CudaError> {
        let arch = Arch::of(device.properties())?;
        let shape = Shape::of(arch);
        let encode = device.driver().f.tensor_map_encode;
        check_device(device.properties(), &shape, encode.is_some())?;
        let cubin = compiler.cubin(&GEMM, arch)?;
        let kernel = Module::load(device, &cubin)?.kernel(GEMM.kernels[0])?;
        Ok(GemmKernel { kernel, shape, encode })
    }

    /// Loads it into the partition of `stream` too, if that launches into one, so that the first
    /// launch there loads nothing.
    ///
    /// # Errors
    /// The driver's.
    pub fn prepare(&self, stream: &Stream) -> Result<(), CudaError> {
        self.kernel.prepare(stream)
    }

    /// Computes D in the order of `stream`, which may be capturing and may belong to a partition.
    ///
    /// # Safety
    /// `stream` is a live stream of this kernel's device. A and B can be read and D be written there,
    /// in the sizes of `spec`, until the kernel has ended; D overlaps neither. Until then a clone of
    /// `self` is kept.
    ///
    /// # Errors
    /// Sizes, addresses or blocks out of range, before anything happens, and the driver's.
    pub unsafe fn launch(&self, stream: CUstream, spec: &GemmSpec) -> Result<(), CudaError> {
        spec.check("GemmKernel::launch")?;
        let mut params = self.shape.params(spec)?;
        if let (true, Some(encode)) = (self.shape.tensor_maps, self.encode) {
            self.kernel.device().ensure_current()?;
            params.a_map = self.map(encode, spec.a, (spec.m, spec.k), self.shape.tile_m)?;
            params.b_map = self.map(encode, spec.b, (spec.n, spec.k), self.shape.tile_n)?;
        }
        let config = self.shape.config(spec, &params);
        // SAFETY: the caller's promise; the kernel stays inside the sizes that `params` has.
        unsafe { self.kernel.launch(stream, &config, &params) }
    }

    /// Describes a row-major matrix of bf16 in pieces of `rows` rows and 64 columns, each row of a
    /// piece 128 swizzled bytes of shared memory. Reads past the end give zeros.
    fn map(
        &self,
        encode: TensorMapEncode,
        at: u64,
        (height, width): (u32, u32),
        rows: u32,
    ) -> Result<GemmMap, CudaError> {
        // Enumerators of cuda.h: CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, _SWIZZLE_128B,
        // _L2_PROMOTION_L2_256B; no interleaving, zeros past the end.
        const BFLOAT16: c_int = 9;
        const SWIZZLE_128B: c_int = 3;
        const PROMOTION_256B: c_int = 3;
        let mut map = GemmMap::default();
        let sizes = [u64::from(width), u64::from(height)];
        let strides = [u64::from(width) * 2];
        let (piece, steps) = ([STEP_K, rows], [1, 1]);
        // SAFETY: `map` is aligned and as large as the driver's; the arrays have the length
        // of the rank, `strides` one less.
        self.kernel.device().check("cuTensorMapEncodeTiled", unsafe {
            encode(
                (&raw mut map).cast(),
                BFLOAT16,
                2,
                at as *mut c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                piece.as_ptr(),
                steps.as_ptr(),
                0,
                SWIZZLE_128B,
                PROMOTION_256B,
                0,
            )
        })?;
        Ok(map)
    }
}

fn check_device(
    device: &DeviceProperties,
    shape: &Shape,
    tensor_maps: bool,
) -> Result<(), CudaError> {
    const OP: &str = "the GEMM kernel";
    if shape.tensor_maps && !tensor_maps {
        let reason = format!("the driver (CUDA {}) has no cuTensorMapEncodeTiled", device.driver);
        return Err(CudaError::Unsupported { operation: OP, reason });
    }
    if shape.shared_bytes() > device.shared_per_block {
        let reason = format!(
            "it takes {} bytes of shared memory per block; {} has {}",
            shape.shared_bytes(),
            device.name,
            device.shared_per_block
        );
        return Err(CudaError::Unsupported { operation: OP, reason });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use cudarc::driver::sys;
    use proptest::prelude::*;

    use super::*;

    const GOOD: GemmSpec =
        GemmSpec { m: 1, n: 8, k: 8, a: 0x1000, b: 0x2000, d: 0x3000, blocks: 1 };

    #[test]
    fn bad_arguments_are_named() {
        assert_eq!(GOOD.check("x"), Ok(()));
        assert_eq!(GemmSpec { m: 127, n: 264, k: 72, blocks: 500, ..GOOD }.check("x"), Ok(()));
        let bad = [
            (GemmSpec { m: 0, ..GOOD }, "M is 0"),
            (GemmSpec { m: 1 << 31, ..GOOD }, "M is 2147483648"),
            (GemmSpec { n: 0, ..GOOD }, "N is 0"),
            (GemmSpec { n: 12, ..GOOD }, "N is 12; multiples of 8"),
            (GemmSpec { k: 0, ..GOOD }, "K is 0"),
            (GemmSpec { k: 7, ..GOOD }, "K is 7; multiples of 8"),
            (GemmSpec { a: 0, ..GOOD }, "A is at 0x0"),
            (GemmSpec { b: 0x2008, ..GOOD }, "B is at 0x2008"),
            (GemmSpec { d: 0x3002, ..GOOD }, "D is at 0x3002"),
            (GemmSpec { blocks: 0, ..GOOD }, "0 blocks"),
        ];
        for (spec, expected) in bad {
            let error = spec.check("x").unwrap_err();
            assert!(matches!(error, CudaError::InvalidArgument { .. }), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        }
        let vast = GemmSpec { m: i32::MAX as u32, n: 1 << 30, ..GOOD };
        let error = Shape::of(Arch::SM_90A).params(&vast).unwrap_err();
        assert!(error.to_string().contains("too many"), "{error}");
    }

    #[test]
    fn it_fits_the_devices_it_is_built_for() {
        let h200 = DeviceProperties::h200();
        let hopper = Shape::of(Arch::SM_90A);
        assert_eq!(hopper.shared_bytes(), 4 * 48 * 1024 + 1023 + 64);
        assert_eq!(check_device(&h200, &hopper, true), Ok(()));
        let error = check_device(&h200, &hopper, false).unwrap_err();
        assert!(error.to_string().contains("cuTensorMapEncodeTiled"), "{error}");
        // The least that a compute capability from 8.0 on has, 8.6's 99 KiB.
        let small = DeviceProperties { shared_per_block: 101_376, ..h200 };
        assert_eq!(check_device(&small, &Shape::of(Arch::SM_80), false), Ok(()));
        assert!(check_device(&small, &hopper, true).is_err());
    }

    #[test]
    fn tensor_maps_are_the_drivers() {
        use sys::{CUtensorMapDataType as Type, CUtensorMapL2promotion as Promotion};
        assert_eq!(size_of::<GemmMap>(), size_of::<sys::CUtensorMap>());
        assert!(align_of::<GemmMap>() >= align_of::<sys::CUtensorMap>());
        assert_eq!(Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 as c_int, 9);
        assert_eq!(sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B as c_int, 3);
        assert_eq!(Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B as c_int, 3);
        assert_eq!(sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE as c_int, 0);
        assert_eq!(sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as c_int, 0);
    }

    /// The kernel's `tile_at`.
    fn tile_at(p: &GemmParams, t: u32) -> (u32, u32) {
        let per_group = p.group * p.tiles_n;
        let (first, inside) = (t / per_group * p.group, t % per_group);
        let rows = p.group.min(p.tiles_m - first);
        (first + inside % rows, inside / rows)
    }

    proptest! {
        #[test]
        fn every_tile_is_walked_once_whatever_the_grid(
            m in 1u32..9000, n in 1u32..1100, blocks in 1u32..200, hopper: bool
        ) {
            let shape = Shape::of(if hopper { Arch::SM_90A } else { Arch::SM_80 });
            let spec = GemmSpec { m, n: n * 8, blocks, ..GOOD };
            let params = shape.params(&spec).unwrap();
            let grid = shape.config(&spec, &params).grid;
            prop_assert!(grid >= 1 && grid <= blocks && grid <= params.tiles);
            let mut walked: Vec<_> = (0..grid)
                .flat_map(|block| (block..params.tiles).step_by(grid as usize))
                .map(|t| tile_at(&params, t))
                .collect();
            walked.sort();
            let all = (0..m.div_ceil(shape.tile_m))
                .flat_map(|row| (0..spec.n.div_ceil(shape.tile_n)).map(move |column| (row, column)));
            prop_assert!(walked.into_iter().eq(all));
        }
    }
}
