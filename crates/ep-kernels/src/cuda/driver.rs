//! The CUDA driver: opened at run time, probed before anything else touches it.
//!
//! cudarc panics where the driver or one of its functions is missing. This module therefore opens
//! the library first and looks up by name every function whose presence or structs differ between
//! CUDA versions; cudarc is called only for functions that every driver this accepts has.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{CUcontext, CUdevice, CUevent, CUfunction, CUstream};
use libloading::os::unix::Library;

use super::error::{CudaError, Version};

pub(crate) const LIBCUDA: &str = "libcuda.so.1";
const DRIVER_REMEDY: &str = "install the NVIDIA driver (525 or newer), or start the container with the GPU's driver \
     libraries (NVIDIA Container Toolkit)";
/// The oldest driver with context-independent kernels (`cuLibraryLoadData`).
const OLDEST_DRIVER: Version = Version { major: 12, minor: 0 };

/// `CUresult`. An integer: a newer driver may return codes that no enum of ours lists.
pub(crate) type CuResult = c_int;
pub(crate) type CuLibrary = *mut c_void;
pub(crate) type CuKernel = *mut c_void;
pub(crate) type CuGreenCtx = *mut c_void;
pub(crate) type CuResourceDesc = *mut c_void;
/// `cuTensorMapEncodeTiled`: map, data type, rank, address, sizes, strides, piece, steps, interleave,
/// swizzle, promotion in L2, what lies past the end.
pub(crate) type TensorMapEncode = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    c_uint,
    *mut c_void,
    *const u64,
    *const u64,
    *const u32,
    *const u32,
    c_int,
    c_int,
    c_int,
    c_int,
) -> CuResult;

/// `CUlaunchConfig`, the same in every CUDA version since 11.8.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawLaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: CUstream,
    pub attributes: *const super::launch::RawAttribute,
    pub attribute_count: c_uint,
}
const _: () = assert!(size_of::<RawLaunchConfig>() == 56);

/// `CUdevResource` (ABI version 1) of type SM: 144 bytes in every CUDA version that has it. Fields
/// that came after CUDA 12.4 lie in what was padding then; an older driver leaves them zero.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(crate) struct RawSmResource {
    pub kind: c_uint,
    pub internal: [u8; 92],
    pub sm_count: c_uint,
    pub min_partition: c_uint,
    pub coscheduled_alignment: c_uint,
    pub rest: [u8; 36],
}
const _: () = assert!(size_of::<RawSmResource>() == 144);
const _: () = assert!(std::mem::offset_of!(RawSmResource, sm_count) == 96);

macro_rules! driver_functions {
    (
        required { $($name:ident: $symbol:literal ($($arg:ty),*);)* }
        optional { $($opt:ident: $opt_symbol:literal ($($opt_arg:ty),*);)* }
    ) => {
        /// Function pointers of the driver; valid for the life of the process, since the library
        /// stays open.
        pub(crate) struct Functions {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> CuResult,)*
            $(pub $opt: Option<unsafe extern "C" fn($($opt_arg),*) -> CuResult>,)*
        }

        impl Functions {
            fn look_up(library: &Library) -> Result<Self, CudaError> {
                Ok(Functions {
                    $($name: {
                        // SAFETY: the signature is that of cuda.h for this exact symbol.
                        unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> CuResult>($symbol.as_bytes()) }
                            .map(|found| *found)
                            .map_err(|_| CudaError::SymbolMissing {
                                library: LIBCUDA,
                                symbol: $symbol,
                                remedy: DRIVER_REMEDY,
                            })?
                    },)*
                    $($opt: {
                        // SAFETY: the signature is that of cuda.h for this exact symbol.
                        unsafe { library.get::<unsafe extern "C" fn($($opt_arg),*) -> CuResult>($opt_symbol.as_bytes()) }
                            .map(|found| *found)
                            .ok()
                    },)*
                })
            }
        }
    };
}

driver_functions! {
    required {
        init: "cuInit" (c_uint);
        error_name: "cuGetErrorName" (CuResult, *mut *const c_char);
        error_string: "cuGetErrorString" (CuResult, *mut *const c_char);
        device_count: "cuDeviceGetCount" (*mut c_int);
        device_attribute: "cuDeviceGetAttribute" (*mut c_int, c_int, CUdevice);
        ctx_get_current: "cuCtxGetCurrent" (*mut CUcontext);
        ctx_push: "cuCtxPushCurrent_v2" (CUcontext);
        ctx_pop: "cuCtxPopCurrent_v2" (*mut CUcontext);
        ctx_priority_range: "cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);
        host_alloc: "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        host_free: "cuMemFreeHost" (*mut c_void);
        stream_create: "cuStreamCreateWithPriority" (*mut CUstream, c_uint, c_int);
        stream_destroy: "cuStreamDestroy_v2" (CUstream);
        stream_query: "cuStreamQuery" (CUstream);
        stream_wait_event: "cuStreamWaitEvent" (CUstream, CUevent, c_uint);
        stream_context: "cuStreamGetCtx" (CUstream, *mut CUcontext);
        stream_capturing: "cuStreamIsCapturing" (CUstream, *mut c_int);
        capture_mode: "cuThreadExchangeStreamCaptureMode" (*mut c_int);
        event_create: "cuEventCreate" (*mut CUevent, c_uint);
        event_destroy: "cuEventDestroy_v2" (CUevent);
        event_record: "cuEventRecord" (CUevent, CUstream);
        event_query: "cuEventQuery" (CUevent);
        event_elapsed: "cuEventElapsedTime" (*mut f32, CUevent, CUevent);
        mem_alloc: "cuMemAlloc_v2" (*mut u64, usize);
        mem_free: "cuMemFree_v2" (u64);
        mem_set: "cuMemsetD8Async" (u64, u8, usize, CUstream);
        mem_copy: "cuMemcpyAsync" (u64, u64, usize, CUstream);
        pointer_attribute: "cuPointerGetAttribute" (*mut c_void, c_int, u64);
        library_load: "cuLibraryLoadData" (
            *mut CuLibrary, *const c_void,
            *mut c_uint, *mut *mut c_void, c_uint,
            *mut c_uint, *mut *mut c_void, c_uint
        );
        library_unload: "cuLibraryUnload" (CuLibrary);
        library_kernel: "cuLibraryGetKernel" (*mut CuKernel, CuLibrary, *const c_char);
        kernel_function: "cuKernelGetFunction" (*mut CUfunction, CuKernel);
        kernel_attribute: "cuKernelGetAttribute" (*mut c_int, c_int, CuKernel, CUdevice);
        kernel_set_attribute: "cuKernelSetAttribute" (c_int, c_int, CuKernel, CUdevice);
        launch: "cuLaunchKernelEx" (*const RawLaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
        max_active_blocks: "cuOccupancyMaxActiveBlocksPerMultiprocessor" (*mut c_int, CUfunction, c_int, usize);
        max_active_clusters: "cuOccupancyMaxActiveClusters" (*mut c_int, CUfunction, *const RawLaunchConfig);
        max_cluster_size: "cuOccupancyMaxPotentialClusterSize" (*mut c_int, CUfunction, *const RawLaunchConfig);
    }
    optional {
        func_load: "cuFuncLoad" (CUfunction);
        func_is_loaded: "cuFuncIsLoaded" (*mut c_uint, CUfunction);
        device_resource: "cuDeviceGetDevResource" (CUdevice, *mut RawSmResource, c_uint);
        split_by_count: "cuDevSmResourceSplitByCount" (
            *mut RawSmResource, *mut c_uint, *const RawSmResource, *mut RawSmResource, c_uint, c_uint
        );
        resource_desc: "cuDevResourceGenerateDesc" (*mut CuResourceDesc, *mut RawSmResource, c_uint);
        green_create: "cuGreenCtxCreate" (*mut CuGreenCtx, CuResourceDesc, CUdevice, c_uint);
        green_destroy: "cuGreenCtxDestroy" (CuGreenCtx);
        green_resource: "cuGreenCtxGetDevResource" (CuGreenCtx, *mut RawSmResource, c_uint);
        green_context: "cuCtxFromGreenCtx" (*mut CUcontext, CuGreenCtx);
        green_stream: "cuGreenCtxStreamCreate" (*mut CUstream, CuGreenCtx, c_uint, c_int);
        stream_contexts: "cuStreamGetCtx_v2" (CUstream, *mut CUcontext, *mut CuGreenCtx);
        tensor_map_encode: "cuTensorMapEncodeTiled" (
            *mut c_void, c_int, c_uint, *mut c_void,
            *const u64, *const u64, *const u32, *const u32,
            c_int, c_int, c_int, c_int
        );
    }
}

/// The driver of this process.
pub struct Driver {
    version: Version,
    pub(crate) f: Functions,
    // Last on purpose: the pointers above are valid while this is open.
    _library: Library,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Driver {
    /// The driver, opened and initialised by the first call.
    ///
    /// # Errors
    /// Library or function missing, driver too old, no GPU, or a failed `cuInit`. The answer is
    /// remembered for the life of the process.
    pub fn get() -> Result<&'static Driver, CudaError> {
        static DRIVER: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
        // Both names are among those that cudarc tries, so it finds the driver wherever this does.
        DRIVER.get_or_init(|| Driver::open(&[LIBCUDA, "libcuda.so"])).as_ref().map_err(Clone::clone)
    }

    /// The newest CUDA version that the driver supports.
    pub fn version(&self) -> Version {
        self.version
    }

    /// How many GPUs this process sees.
    ///
    /// # Errors
    /// The driver's.
    pub fn device_count(&self) -> Result<usize, CudaError> {
        let mut count = 0;
        // SAFETY: the driver is initialised; `count` is valid for the call.
        self.check("cuDeviceGetCount", unsafe { (self.f.device_count)(&mut count) })?;
        Ok(count.max(0) as usize)
    }

    fn open(names: &[&str]) -> Result<Driver, CudaError> {
        let library = open_first(names, LIBCUDA, DRIVER_REMEDY)?;
        let version = driver_version(&library)?;
        let f = Functions::look_up(&library)?;
        let driver = Driver { version, f, _library: library };
        // SAFETY: `cuInit` may be called any number of times, from any thread.
        let code = unsafe { (driver.f.init)(0) };
        driver.check("cuInit", code)?;
        Ok(driver)
    }

    /// Turns a `CUresult` into an error that names the operation.
    pub(crate) fn check(&self, operation: &'static str, code: CuResult) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let name = self.text(code, self.f.error_name).unwrap_or_else(|| "unknown error".into());
        let mut detail = self.text(code, self.f.error_string).unwrap_or_default();
        if let Some(remedy) = remedy(code) {
            detail = format!("{detail}; {remedy}");
        }
        Err(CudaError::Driver { operation, code, name, detail })
    }

    fn text(
        &self,
        code: CuResult,
        lookup: unsafe extern "C" fn(CuResult, *mut *const c_char) -> CuResult,
    ) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: the driver stores a pointer to a static string, or null for a code it does not
        // know.
        let status = unsafe { lookup(code, &mut text) };
        if status != 0 || text.is_null() {
            return None;
        }
        // SAFETY: not null, hence a static NUL-terminated string of the driver.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }
}

/// Opens the first library of `names` that can be.
pub(crate) fn open_first(
    names: &[&str],
    library: &'static str,
    remedy: &'static str,
) -> Result<Library, CudaError> {
    let mut detail = String::new();
    for name in names {
        // SAFETY: the libraries opened here are NVIDIA's; their initialisers have no preconditions.
        match unsafe { Library::new(*name) } {
            Ok(opened) => return Ok(opened),
            // The first name is the canonical one: its message says most.
            Err(error) if detail.is_empty() => detail = reason(&error),
            Err(_) => {}
        }
    }
    Err(CudaError::LibraryMissing { library, detail, remedy })
}

/// The loader's own words, which libloading keeps as the source of its error.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

fn driver_version(library: &Library) -> Result<Version, CudaError> {
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> CuResult;
    // SAFETY: the signature is that of cuda.h since the first version.
    let found = unsafe { library.get::<GetVersion>(b"cuDriverGetVersion") }.map_err(|_| {
        CudaError::SymbolMissing {
            library: LIBCUDA,
            symbol: "cuDriverGetVersion",
            remedy: DRIVER_REMEDY,
        }
    })?;
    let mut encoded = 0;
    // SAFETY: needs no initialisation; `encoded` is valid for the call.
    let code = unsafe { found(&mut encoded) };
    if code != 0 {
        let detail = remedy(code).unwrap_or(DRIVER_REMEDY).to_string();
        let name = format!("CUresult {code}");
        return Err(CudaError::Driver { operation: "cuDriverGetVersion", code, name, detail });
    }
    check_version(Version::from_driver(encoded))
}

fn check_version(found: Version) -> Result<Version, CudaError> {
    if found < OLDEST_DRIVER {
        return Err(CudaError::TooOld {
            library: LIBCUDA,
            found,
            needed: OLDEST_DRIVER,
            remedy: DRIVER_REMEDY,
        });
    }
    Ok(found)
}

/// Remedies for codes whose description does not say what to do.
fn remedy(code: CuResult) -> Option<&'static str> {
    Some(match code {
        34 => {
            "a stub libcuda.so was loaded: remove the toolkit's `stubs` folder from LD_LIBRARY_PATH"
        }
        100 => "no GPU is visible: check CUDA_VISIBLE_DEVICES and `nvidia-smi`",
        101 => "the ordinal exceeds the visible GPUs: check CUDA_VISIBLE_DEVICES",
        802 => "the NVLink fabric is not ready: check that nvidia-fabricmanager runs",
        803 => "libcuda and kernel module differ in version: reboot after a driver update",
        900..=908 => {
            "a stream is being captured: build layers, and run exact dispatches once, before capture"
        }
        804 => "remove the `cuda-compat` libraries from the library path",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_library_names_library_and_remedy() {
        let error = Driver::open(&["libcuda-that-is-not-there.so.1"]).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("libcuda.so.1") && text.contains("install the NVIDIA driver"),
            "{text}"
        );
        // The loader's words name the file it looked for.
        assert!(text.contains("libcuda-that-is-not-there.so.1"), "{text}");
        assert!(matches!(error, CudaError::LibraryMissing { .. }));
    }

    #[test]
    fn a_library_that_is_no_driver_is_an_error() {
        // libc has none of the driver's functions.
        let error = Driver::open(&["libc.so.6"]).unwrap_err();
        assert!(
            matches!(error, CudaError::SymbolMissing { symbol: "cuDriverGetVersion", .. }),
            "{error}"
        );
        let library = open_first(&["libc.so.6"], LIBCUDA, DRIVER_REMEDY).unwrap();
        let error = Functions::look_up(&library).err().expect("libc is no driver");
        assert!(matches!(error, CudaError::SymbolMissing { symbol: "cuInit", .. }), "{error}");
    }

    #[test]
    fn old_drivers_are_refused_with_both_versions() {
        let text = check_version(Version::from_driver(11040)).unwrap_err().to_string();
        assert!(text.contains("11.4") && text.contains("12.0") && text.contains("525"), "{text}");
        assert_eq!(check_version(Version::from_driver(13000)), Ok(Version { major: 13, minor: 0 }));
        assert_eq!(Version::from_driver(12080).to_string(), "12.8");
    }

    #[test]
    fn the_process_wide_driver_answers_the_same_twice_without_panicking() {
        let first = Driver::get().map(Driver::version);
        assert_eq!(first, Driver::get().map(Driver::version));
        if let Err(error) = first {
            assert!(!error.to_string().is_empty());
        }
    }
}
