//! cuBLASLt, opened at run time: the vendor's GEMM beside ours, told how many SMs it may count on.

mod library;

use std::ffi::{c_int, c_void};
use std::fmt;
use std::time::Duration;

use cudarc::driver::sys::CUstream;

use super::device::Device;
use super::device_memory::DeviceMemory;
use super::error::{CudaError, Version};
use super::gemm::GemmSpec;
use library::{Algorithm, Functions, Heuristic, Opaque, Status};

pub use library::CUBLASLT_PATH_VARIABLE;

// Enumerators of cublasLt.h, cublas_api.h and library_types.h.
const COMPUTE_32F: c_int = 68;
const TYPE_32F: c_int = 0;
const TYPE_16BF: c_int = 14;
const OP_TRANSPOSE: c_int = 1;
const PRODUCT_TRANSA: c_int = 3;
const PRODUCT_SM_COUNT_TARGET: c_int = 15;
const PREFER_MAX_WORKSPACE: c_int = 1;
/// For A; those of B, C and D follow it.
const PREFER_ALIGNMENT_A: c_int = 5;

/// What the library's documentation recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;
const LIMIT: Duration = Duration::from_secs(10);

/// libcublasLt of this process.
#[derive(Clone, Copy)]
pub struct CublasLt {
    f: &'static Functions,
}

impl CublasLt {
    /// Opens what `EP_CUBLASLT_PATH` names (a file or a folder), else the library of version 13 or 12
    /// on the loader's path and where toolkits and Python wheels put it.
    ///
    /// # Errors
    /// Library or function missing, with what to do about it. The answer is remembered for the life
    /// of the process.
    pub fn open() -> Result<Self, CudaError> {
        Functions::get().map(|f| CublasLt { f })
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.f.version()
    }

    /// Prepares one product: asks the library once for its algorithm, and allocates the workspace. Not
    /// for use during capture.
    ///
    /// [`GemmSpec::blocks`], at most the device's SMs, is the library's target
    /// (`CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET`): what it tunes for, no limit that it promises to keep. A
    /// partition's stream keeps it in any case.
    ///
    /// # Errors
    /// Those of [`GemmKernel::launch`](super::GemmKernel::launch) before anything happens, no
    /// algorithm for these sizes, the library's and the driver's.
    pub fn plan(&self, device: &Device, spec: &GemmSpec) -> Result<CublasLtPlan, CudaError> {
        spec.check("CublasLt::plan")?;
        let _current = device.make_current()?;
        let f = self.f;
        let handle = Handle::make(f, device)?;
        let product = product(f, spec.blocks.min(device.properties().sms))?;
        // The library's matrices are column-major, so it computes Dᵀ[N,M] = B · Aᵀ: its first matrix
        // is our B, stored [K,N] and transposed, its second our A, stored [K,M].
        let left = matrix(f, spec.k, spec.n)?;
        let right = matrix(f, spec.k, spec.m)?;
        let out = matrix(f, spec.n, spec.m)?;
        let preference = preference(f, spec)?;
        let found = heuristic(f, handle.raw, [&product, &left, &right, &out, &out, &preference])?;
        let workspace = match found.workspace_bytes {
            0 => None,
            bytes => Some(DeviceMemory::zeroed(&device.stream(0)?, bytes, LIMIT)?),
        };
        Ok(CublasLtPlan {
            f,
            spec: *spec,
            algorithm: found.algorithm,
            waves: found.waves,
            left,
            right,
            out,
            product,
            workspace,
            handle,
        })
    }
}

impl fmt::Debug for CublasLt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CublasLt").field("version", &self.version()).finish()
    }
}

/// A product ready to run: sizes, addresses and algorithm are fixed.
pub struct CublasLtPlan {
    f: &'static Functions,
    spec: GemmSpec,
    algorithm: Algorithm,
    waves: f32,
    left: Owned,
    right: Owned,
    out: Owned,
    product: Owned,
    workspace: Option<DeviceMemory>,
    handle: Handle,
}

impl CublasLtPlan {
    /// Computes D in the order of `stream`, which may be capturing and may belong to a partition.
    ///
    /// # Safety
    /// `stream` is a live stream of the plan's device. A and B can be read and D be written there, in
    /// the sizes of the plan's [`GemmSpec`], until the product is done; D overlaps neither. Products of
    /// one plan share its workspace: each runs after the one before it, and the last is done before the
    /// plan is dropped.
    ///
    /// # Errors
    /// The library's.
    pub unsafe fn launch(&self, stream: CUstream) -> Result<(), CudaError> {
        self.handle.device.ensure_current()?;
        let (one, zero) = (1.0f32, 0.0f32);
        let (workspace, bytes) = match &self.workspace {
            Some(memory) => (memory.address(), memory.bytes()),
            None => (0, 0),
        };
        let (a, b, d) = (self.spec.a, self.spec.b, self.spec.d);
        // SAFETY: descriptors and handle live as long as the plan; factors are read before the call
        // returns; addresses and stream are the caller's promise.
        self.f.check("cublasLtMatmul", unsafe {
            (self.f.multiply)(
                self.handle.raw,
                self.product.raw,
                (&raw const one).cast(),
                b as *const c_void,
                self.left.raw,
                a as *const c_void,
                self.right.raw,
                (&raw const zero).cast(),
                d as *const c_void,
                self.out.raw,
                d as *mut c_void,
                self.out.raw,
                &self.algorithm,
                workspace as *mut c_void,
                bytes,
                stream,
            )
        })
    }

    /// How many waves of blocks the library expects, where it says.
    pub fn waves(&self) -> f32 {
        self.waves
    }
}

impl fmt::Debug for CublasLtPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CublasLtPlan")
            .field("spec", &self.spec)
            .field("waves", &self.waves)
            .field("workspace", &self.workspace.as_ref().map(DeviceMemory::bytes))
            .finish_non_exhaustive()
    }
}

/// A descriptor of the library, which belongs to no context; destroyed when this drops.
struct Owned {
    raw: Opaque,
    destroy: unsafe extern "C" fn(Opaque) -> Status,
}

// SAFETY: nothing is bound to a thread, and nothing changes once it is prepared.
unsafe impl Send for Owned {}
// SAFETY: it is only read once it is prepared, and nothing is bound to a thread.
unsafe impl Sync for Owned {}

impl Owned {
    fn make(
        f: &'static Functions,
        operation: &'static str,
        destroy: unsafe extern "C" fn(Opaque) -> Status,
        create: impl FnOnce(*mut Opaque) -> Status,
    ) -> Result<Owned, CudaError> {
        let mut raw = std::ptr::null_mut();
        f.check(operation, create(&mut raw))?;
        Ok(Owned { raw, destroy })
    }

    /// Sets an attribute by one of the library's setters, which copies it.
    fn set<T: Copy>(
        &self,
        f: &'static Functions,
        operation: &'static str,
        setter: unsafe extern "C" fn(Opaque, c_int, *const c_void, usize) -> Status,
        (attribute, value): (c_int, T),
    ) -> Result<(), CudaError> {
        // SAFETY: the descriptor is live and of the setter's kind; the value has the size given, which
        // the library checks against the attribute's.
        let code =
            unsafe { setter(self.raw, attribute, (&raw const value).cast(), size_of::<T>()) };
        f.check(operation, code)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once, by the function that belongs to it.
        let code = unsafe { (self.destroy)(self.raw) };
        if code != 0 {
            tracing::warn!(code, "cuBLASLt did not destroy a descriptor");
        }
    }
}

/// The library's handle in a device's context.
struct Handle {
    raw: Opaque,
    f: &'static Functions,
    device: Device,
}

// SAFETY: the library's documentation allows its handle in any thread.
unsafe impl Send for Handle {}
// SAFETY: the library's documentation allows several threads to use a handle at once.
unsafe impl Sync for Handle {}

impl Handle {
    fn make(f: &'static Functions, device: &Device) -> Result<Handle, CudaError> {
        let mut raw = std::ptr::null_mut();
        let _current = device.make_current()?;
        // SAFETY: the device's context is current; `raw` is valid for the call.
        f.check("cublasLtCreate", unsafe { (f.create)(&mut raw) })?;
        Ok(Handle { raw, f, device: device.clone() })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Ok(_current) = self.device.make_current() else { return };
        // SAFETY: created once, destroyed once, in the context it belongs to.
        let code = unsafe { (self.f.destroy)(self.raw) };
        if code != 0 {
            tracing::warn!(code, "cublasLtDestroy failed");
        }
    }
}

/// First matrix transposed, f32 accumulation and factors, `sms` SMs to count on.
fn product(f: &'static Functions, sms: u32) -> Result<Owned, CudaError> {
    let product = Owned::make(f, "cublasLtMatmulDescCreate", f.product_destroy, |to| {
        // SAFETY: `to` is valid for the call.
        unsafe { (f.product_create)(to, COMPUTE_32F, TYPE_32F) }
    })?;
    for attribute in [(PRODUCT_TRANSA, OP_TRANSPOSE), (PRODUCT_SM_COUNT_TARGET, sms as c_int)] {
        product.set(f, "cublasLtMatmulDescSetAttribute", f.product_set, attribute)?;
    }
    Ok(product)
}

/// A column-major matrix of bf16 without padding.
fn matrix(f: &'static Functions, rows: u32, columns: u32) -> Result<Owned, CudaError> {
    Owned::make(f, "cublasLtMatrixLayoutCreate", f.matrix_destroy, |to| {
        let (height, width) = (u64::from(rows), u64::from(columns));
        // SAFETY: `to` is valid for the call.
        unsafe { (f.matrix_create)(to, TYPE_16BF, height, width, i64::from(rows)) }
    })
}

/// The workspace there may be, and how the matrices are aligned: the library assumes 256 bytes where
/// it is told nothing.
fn preference(f: &'static Functions, spec: &GemmSpec) -> Result<Owned, CudaError> {
    const OP: &str = "cublasLtMatmulPreferenceSetAttribute";
    let preference =
        Owned::make(f, "cublasLtMatmulPreferenceCreate", f.preference_destroy, |to| {
            // SAFETY: `to` is valid for the call.
            unsafe { (f.preference_create)(to) }
        })?;
    preference.set(f, OP, f.preference_set, (PREFER_MAX_WORKSPACE, WORKSPACE_BYTES))?;
    for (attribute, address) in (PREFER_ALIGNMENT_A..).zip([spec.b, spec.a, spec.d, spec.d]) {
        preference.set(f, OP, f.preference_set, (attribute, alignment(address)))?;
    }
    Ok(preference)
}

/// The largest power of two up to 256 that divides an address.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

/// The library's first choice. `of`: product, both matrices, C, D, preference.
fn heuristic(
    f: &'static Functions,
    handle: Opaque,
    of: [&Owned; 6],
) -> Result<Heuristic, CudaError> {
    const OP: &str = "cublasLtMatmulAlgoGetHeuristic";
    let [product, left, right, c, d, preference] = of.map(|owned| owned.raw);
    let mut found = Heuristic::default();
    let mut count = 0;
    // SAFETY: all descriptors are live; there is room for the one result asked for.
    f.check(OP, unsafe {
        (f.heuristic)(handle, product, left, right, c, d, preference, 1, &mut found, &mut count)
    })?;
    f.check(OP, found.state)?;
    if count < 1 {
        let reason = "it has no algorithm for these sizes".to_string();
        return Err(CudaError::Unsupported { operation: OP, reason });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignments_are_powers_of_two_up_to_256() {
        assert_eq!(alignment(0x1010), 16);
        assert_eq!(alignment(0x1000), 256);
        assert_eq!(alignment(0x1080), 128);
    }

    /// Descriptors need no GPU: where the library is installed, its own checks of attributes and sizes
    /// are a test of ours.
    #[test]
    fn the_library_takes_our_descriptors() {
        let cublaslt = match CublasLt::open() {
            Ok(cublaslt) => cublaslt,
            Err(error @ CudaError::LibraryMissing { .. }) => {
                eprintln!("skipped: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        assert!((12..=13).contains(&cublaslt.version().major), "{cublaslt:?}");
        let f = cublaslt.f;
        let product = product(f, 116).unwrap();
        matrix(f, 8, 16).unwrap();
        let spec = GemmSpec { m: 8, n: 8, k: 8, a: 0x1010, b: 0x1000, d: 0x1080, blocks: 1 };
        preference(f, &spec).unwrap();
        let wrong = (PRODUCT_TRANSA, 1u8);
        let error = product.set(f, "a wrong size", f.product_set, wrong).unwrap_err();
        assert!(error.to_string().contains("CUBLAS_STATUS_INVALID_VALUE"), "{error}");
    }
}
