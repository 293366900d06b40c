//! The GEMMs that run beside communication.

use std::rc::Rc;

use cudarc::driver::sys::CUstream;
use ep_kernels::cuda::{
    Compiler, CublasLt, CublasLtPlan, CudaError, Device, DeviceMemory, GemmKernel, GemmSpec,
};

use super::points::Beside;
use crate::Result;
use crate::nvlink::raw::{LIMIT, failed};
use crate::rng::{Purpose, Rng};

/// Rows, columns and depth of the product: the size that GEMMs are usually compared at.
pub const SIDE: u32 = 8192;

/// Operations of one product.
pub const FLOPS: f64 = 2.0 * (SIDE as f64) * (SIDE as f64) * (SIDE as f64);

/// A product that can be launched again and again.
pub trait Multiply {
    /// Launches it.
    ///
    /// # Safety
    /// `stream` is a live stream of the device it was made for; it, what it was made from and the
    /// matrices live until it has ended.
    ///
    /// # Errors
    /// The driver's or the library's.
    unsafe fn launch(&self, stream: CUstream) -> std::result::Result<(), CudaError>;
}

struct Own {
    kernel: Rc<GemmKernel>,
    spec: GemmSpec,
}

impl Multiply for Own {
    unsafe fn launch(&self, stream: CUstream) -> std::result::Result<(), CudaError> {
        // SAFETY: by this function's contract.
        unsafe { self.kernel.launch(stream, &self.spec) }
    }
}

impl Multiply for CublasLtPlan {
    unsafe fn launch(&self, stream: CUstream) -> std::result::Result<(), CudaError> {
        // SAFETY: by this function's contract.
        unsafe { CublasLtPlan::launch(self, stream) }
    }
}

/// Two factors and room for their product, on one GPU.
#[derive(Debug)]
pub struct Matrices(DeviceMemory);

impl Matrices {
    const BYTES: usize = 2 * (SIDE as usize) * (SIDE as usize);

    /// Random factors: of zeros, a GEMM takes less power and time.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(device: &Device) -> Result<Self> {
        let stream = device.stream(0).map_err(failed)?;
        let memory = DeviceMemory::zeroed(&stream, 3 * Self::BYTES, LIMIT).map_err(failed)?;
        let mut piece = vec![0u8; 8 << 20];
        let mut rng = Rng::new(1, Purpose::Payload, usize::MAX);
        rng.fill(&mut piece);
        for value in piece.chunks_exact_mut(2) {
            // bf16 of either sign with a magnitude from 0.5 to 2.
            value[1] = (value[1] & 0x80) | 0x3f;
        }
        for at in (0..2 * Self::BYTES).step_by(piece.len()) {
            let len = piece.len().min(2 * Self::BYTES - at);
            memory.upload(&stream, at, &piece[..len], LIMIT).map_err(failed)?;
        }
        Ok(Self(memory))
    }

    fn spec(&self, (m, n, k): (u32, u32, u32), blocks: u32) -> GemmSpec {
        let [a, b, d] = [0, 1, 2].map(|i| self.0.address() + (i * Self::BYTES) as u64);
        GemmSpec { m, n, k, a, b, d, blocks }
    }
}

/// What makes products on one GPU.
pub struct Products<'m> {
    matrices: &'m Matrices,
    sizes: (u32, u32, u32),
    device: Device,
    own: Rc<GemmKernel>,
    blas: std::result::Result<CublasLt, String>,
}

impl<'m> Products<'m> {
    /// Loads our kernel, and cuBLASLt if it is there.
    ///
    /// # Errors
    /// A kernel that cannot be loaded.
    pub fn load(device: &Device, matrices: &'m Matrices) -> Result<Self> {
        let kernel = Compiler::get()
            .and_then(|compiler| GemmKernel::load(device, compiler))
            .map_err(failed)?;
        let blas = CublasLt::open().map_err(|e| e.to_string());
        let sizes = (SIDE, SIDE, SIDE);
        Ok(Self { matrices, sizes, device: device.clone(), own: Rc::new(kernel), blas })
    }

    /// With parts of the factors only: M, N and K, each at most [`SIDE`].
    pub fn sized(self, (m, n, k): (u32, u32, u32)) -> Self {
        let sizes = (m.min(SIDE), n.min(SIDE), k.min(SIDE));
        Self { sizes, ..self }
    }

    /// Why cuBLASLt is missing.
    pub fn missing(&self) -> Option<&str> {
        self.blas.as_ref().err().map(String::as_str)
    }

    /// A product on `blocks` SMs; `None` for one that is not there, or is none.
    ///
    /// # Errors
    /// No way of cuBLASLt's to do it.
    pub fn on(&self, beside: Beside, blocks: u32) -> Result<Option<Rc<dyn Multiply + 'm>>> {
        let spec = self.matrices.spec(self.sizes, blocks);
        Ok(match (beside, &self.blas) {
            (Beside::Holder, _) | (Beside::CublasLt, Err(_)) => None,
            (Beside::Gemm, _) => Some(Rc::new(Own { kernel: self.own.clone(), spec })),
            (Beside::CublasLt, Ok(blas)) => {
                Some(Rc::new(blas.plan(&self.device, &spec).map_err(failed)?))
            }
        })
    }
}
