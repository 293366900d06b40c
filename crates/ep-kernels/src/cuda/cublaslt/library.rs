//! libcublasLt: opened at run time, from a path that can be given.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::driver::sys::CUstream;
use libloading::os::unix::Library;

use crate::cuda::driver::open_first;
use crate::cuda::error::{CudaError, Version};
use crate::cuda::nvrtc::usual_places;

/// Environment variable with the path of libcublasLt, or of the folder that holds it.
pub const CUBLASLT_PATH_VARIABLE: &str = "EP_CUBLASLT_PATH";

const LIBCUBLASLT: &str = "libcublasLt.so";
const REMEDY: &str = "install cuBLAS (the CUDA toolkit, or the Python wheel nvidia-cublas) or set EP_CUBLASLT_PATH to \
     libcublasLt.so.13 or its folder";
/// File names of the versions whose functions these are, newest first.
const NAMES: [&str; 2] = ["libcublasLt.so.13", "libcublasLt.so.12"];

/// `cublasStatus_t`.
pub(super) type Status = c_int;
/// Descriptors of a product, of a matrix, of preferences; the library's handle.
pub(super) type Opaque = *mut c_void;

/// `cublasLtMatmulAlgo_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Algorithm {
    data: [u64; 8],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Heuristic {
    pub algorithm: Algorithm,
    pub workspace_bytes: usize,
    pub state: Status,
    pub waves: f32,
    reserved: [c_int; 4],
}
const _: () = assert!(size_of::<Heuristic>() == 96);

macro_rules! cublaslt_functions {
    ($($name:ident: $symbol:literal ($($arg:ty),*) -> $ret:ty;)*) => {
        /// Function pointers of the library; valid for the life of the process.
        pub(super) struct Functions {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> $ret,)*
        }

        impl Functions {
            fn look_up(library: &Library) -> Result<Self, CudaError> {
                Ok(Functions {
                    $($name: {
                        // SAFETY: the signature is that of cublasLt.h for this exact symbol.
                        unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> $ret>($symbol.as_bytes()) }
                            .map(|found| *found)
                            .map_err(|_| CudaError::SymbolMissing {
                                library: LIBCUBLASLT,
                                symbol: $symbol,
                                remedy: REMEDY,
                            })?
                    },)*
                })
            }
        }
    };
}

cublaslt_functions! {
    version: "cublasLtGetVersion" () -> usize;
    status_name: "cublasLtGetStatusName" (Status) -> *const c_char;
    status_string: "cublasLtGetStatusString" (Status) -> *const c_char;
    create: "cublasLtCreate" (*mut Opaque) -> Status;
    destroy: "cublasLtDestroy" (Opaque) -> Status;
    product_create: "cublasLtMatmulDescCreate" (*mut Opaque, c_int, c_int) -> Status;
    product_set: "cublasLtMatmulDescSetAttribute" (Opaque, c_int, *const c_void, usize) -> Status;
    product_destroy: "cublasLtMatmulDescDestroy" (Opaque) -> Status;
    matrix_create: "cublasLtMatrixLayoutCreate" (*mut Opaque, c_int, u64, u64, i64) -> Status;
    matrix_destroy: "cublasLtMatrixLayoutDestroy" (Opaque) -> Status;
    preference_create: "cublasLtMatmulPreferenceCreate" (*mut Opaque) -> Status;
    preference_set: "cublasLtMatmulPreferenceSetAttribute" (Opaque, c_int, *const c_void, usize) -> Status;
    preference_destroy: "cublasLtMatmulPreferenceDestroy" (Opaque) -> Status;
    heuristic: "cublasLtMatmulAlgoGetHeuristic" (
        Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, c_int, *mut Heuristic, *mut c_int
    ) -> Status;
    multiply: "cublasLtMatmul" (
        Opaque, Opaque, *const c_void, *const c_void, Opaque, *const c_void, Opaque, *const c_void,
        *const c_void, Opaque, *mut c_void, Opaque, *const Algorithm, *mut c_void, usize, CUstream
    ) -> Status;
}

impl Functions {
    /// The process's library, opened by the first call. Never closed: it keeps state in the process
    /// that does not survive being unloaded.
    pub(super) fn get() -> Result<&'static Functions, CudaError> {
        static OPENED: OnceLock<Result<Functions, CudaError>> = OnceLock::new();
        let named = || {
            std::env::var_os(CUBLASLT_PATH_VARIABLE)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        OPENED.get_or_init(|| Functions::open(named().as_deref())).as_ref().map_err(Clone::clone)
    }

    /// Opens `path` (a file or a folder), else the first one found on the loader's path and in the
    /// usual places.
    fn open(path: Option<&Path>) -> Result<Functions, CudaError> {
        let library = match path {
            Some(path) => open_at(path)?,
            None => open_anywhere()?,
        };
        let functions = Functions::look_up(&library)?;
        std::mem::forget(library);
        Ok(functions)
    }

    /// Turns a status into an error that names the operation.
    pub(super) fn check(&self, operation: &'static str, code: Status) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let text = |lookup: unsafe extern "C" fn(Status) -> *const c_char| {
            // SAFETY: takes any status.
            let text = unsafe { lookup(code) };
            // SAFETY: not null, hence a static NUL-terminated string of the library.
            (!text.is_null())
                .then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let name = text(self.status_name).unwrap_or_else(|| "unknown status".into());
        let detail = text(self.status_string).unwrap_or_default();
        Err(CudaError::CublasLt { operation, code, name, detail })
    }

    /// Its version; the library's encoding is `10000 * major + 100 * minor + patch`.
    pub(super) fn version(&self) -> Version {
        // SAFETY: takes nothing and may be called at any time.
        version_of(unsafe { (self.version)() })
    }
}

fn version_of(encoded: usize) -> Version {
    Version { major: (encoded / 10_000) as i32, minor: (encoded % 10_000 / 100) as i32 }
}

fn open_at(path: &Path) -> Result<Library, CudaError> {
    let file = if path.is_dir() {
        NAMES.iter().map(|name| path.join(name)).find(|file| file.exists())
    } else {
        Some(path.to_path_buf())
    };
    let Some(file) = file else {
        let detail = format!("{} holds none of {}", path.display(), NAMES.join(", "));
        return Err(CudaError::LibraryMissing { library: LIBCUBLASLT, detail, remedy: REMEDY });
    };
    open_first(&[&file.to_string_lossy()], LIBCUBLASLT, REMEDY)
}

fn open_anywhere() -> Result<Library, CudaError> {
    let on_loader_path = open_first(&NAMES, LIBCUBLASLT, REMEDY);
    if on_loader_path.is_ok() {
        return on_loader_path;
    }
    usual_places("cublas")
        .iter()
        .filter(|folder| folder.is_dir())
        .find_map(|folder| open_at(folder).ok())
        .map_or(on_loader_path, Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_names_itself_and_the_remedy() {
        let error = Functions::open(Some(Path::new("/nowhere/libcublasLt.so.13"))).err();
        let text = error.expect("no such file").to_string();
        assert!(text.contains("libcublasLt.so") && text.contains("EP_CUBLASLT_PATH"), "{text}");
        let error = Functions::open(Some(Path::new("/proc"))).err().expect("holds no library");
        assert!(error.to_string().contains("/proc holds none of libcublasLt.so.13"), "{error}");
    }

    #[test]
    fn another_library_is_an_error() {
        let error = Functions::open(Some(Path::new("libc.so.6"))).err().expect("libc is no cuBLAS");
        assert!(
            matches!(error, CudaError::SymbolMissing { symbol: "cublasLtGetVersion", .. }),
            "{error}"
        );
    }

    #[test]
    fn versions_are_read_as_the_library_encodes_them() {
        assert_eq!(version_of(130_100), Version { major: 13, minor: 1 });
        assert_eq!(version_of(120_803), Version { major: 12, minor: 8 });
    }
}
