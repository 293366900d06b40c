//! NVRTC, the run-time compiler: opened at run time, from a path that can be given.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::os::unix::Library;

use super::driver::open_first;
use super::error::CudaError;

/// Environment variable with the path of libnvrtc, or of the folder that holds it.
pub const NVRTC_PATH_VARIABLE: &str = "EP_NVRTC_PATH";

const LIBNVRTC: &str = "libnvrtc.so";
const REMEDY: &str = "install CUDA's run-time compiler (the toolkit, or the Python wheel nvidia-cuda-nvrtc) or set \
     EP_NVRTC_PATH to libnvrtc.so.13 or its folder";
/// File names of the versions that compile these sources, newest first.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

type Program = *mut c_void;
type NvrtcResult = c_int;
/// `NVRTC_ERROR_COMPILATION`.
const ERROR_COMPILATION: NvrtcResult = 6;

macro_rules! nvrtc_functions {
    ($($name:ident: $symbol:literal ($($arg:ty),*) -> $ret:ty;)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($arg),*) -> $ret,)*
        }

        impl Functions {
            fn look_up(library: &Library) -> Result<Self, CudaError> {
                Ok(Functions {
                    $($name: {
                        // SAFETY: the signature is that of nvrtc.h for this exact symbol.
                        unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> $ret>($symbol.as_bytes()) }
                            .map(|found| *found)
                            .map_err(|_| CudaError::SymbolMissing {
                                library: LIBNVRTC,
                                symbol: $symbol,
                                remedy: REMEDY,
                            })?
                    },)*
                })
            }
        }
    };
}

nvrtc_functions! {
    error_string: "nvrtcGetErrorString" (NvrtcResult) -> *const c_char;
    version: "nvrtcVersion" (*mut c_int, *mut c_int) -> NvrtcResult;
    create: "nvrtcCreateProgram" (
        *mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
    ) -> NvrtcResult;
    destroy: "nvrtcDestroyProgram" (*mut Program) -> NvrtcResult;
    compile: "nvrtcCompileProgram" (Program, c_int, *const *const c_char) -> NvrtcResult;
    log_size: "nvrtcGetProgramLogSize" (Program, *mut usize) -> NvrtcResult;
    log: "nvrtcGetProgramLog" (Program, *mut c_char) -> NvrtcResult;
    cubin_size: "nvrtcGetCUBINSize" (Program, *mut usize) -> NvrtcResult;
    cubin: "nvrtcGetCUBIN" (Program, *mut c_char) -> NvrtcResult;
    ptx_size: "nvrtcGetPTXSize" (Program, *mut usize) -> NvrtcResult;
    ptx: "nvrtcGetPTX" (Program, *mut c_char) -> NvrtcResult;
}

/// The opened compiler. Never closed: it keeps state in the process that does not survive being
/// unloaded.
pub(crate) struct Nvrtc {
    f: Functions,
    version: String,
}

impl Nvrtc {
    /// Opens `path` (a file or a folder), else what [`NVRTC_PATH_VARIABLE`] names, else the first
    /// one found on the loader's path and in the usual places.
    pub(crate) fn open(path: Option<&Path>) -> Result<Nvrtc, CudaError> {
        let named = path.map(PathBuf::from).or_else(|| {
            std::env::var_os(NVRTC_PATH_VARIABLE)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        });
        let library = match &named {
            Some(path) => open_at(path)?,
            None => open_anywhere()?,
        };
        let f = Functions::look_up(&library)?;
        std::mem::forget(library);
        let mut nvrtc = Nvrtc { f, version: String::new() };
        nvrtc.version = nvrtc.full_version()?;
        Ok(nvrtc)
    }

    /// Its version down to the build, as `13.0 V13.0.88 CL-36424714`.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// Compiles to a cubin. Returns it with the compiler's messages.
    pub(crate) fn cubin(
        &self,
        name: &str,
        source: &str,
        arch: &str,
        options: &[String],
    ) -> Result<(Vec<u8>, String), CudaError> {
        let program = self.create(name, source)?;
        let log = self.compile(&program, name, arch, options)?;
        let cubin = self.bytes("nvrtcGetCUBIN", &program, self.f.cubin_size, self.f.cubin)?;
        Ok((cubin, log))
    }

    /// `nvrtcVersion` gives major and minor only; the build is written in the PTX of any program.
    fn full_version(&self) -> Result<String, CudaError> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both are valid for the call.
        self.check("nvrtcVersion", unsafe { (self.f.version)(&mut major, &mut minor) })?;
        let program = self.create("version", "")?;
        self.compile(&program, "version", "the default architecture", &[])?;
        let ptx = self.bytes("nvrtcGetPTX", &program, self.f.ptx_size, self.f.ptx)?;
        let build = build_of(&String::from_utf8_lossy(&ptx));
        Ok(format!("{major}.{minor}{build}"))
    }

    fn create(&self, name: &str, source: &str) -> Result<ProgramGuard<'_>, CudaError> {
        let c_string = |text: &str| {
            CString::new(text).map_err(|_| CudaError::InvalidArgument {
                operation: "compile",
                reason: format!("{name} contains a NUL"),
            })
        };
        let (c_name, c_source) = (c_string(name)?, c_string(source)?);
        let mut program = std::ptr::null_mut();
        // SAFETY: both strings are NUL-terminated and copied; there are no headers.
        self.check("nvrtcCreateProgram", unsafe {
            (self.f.create)(
                &mut program,
                c_source.as_ptr(),
                c_name.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        })?;
        Ok(ProgramGuard { nvrtc: self, program })
    }

    fn compile(
        &self,
        program: &ProgramGuard<'_>,
        kernel: &str,
        arch: &str,
        options: &[String],
    ) -> Result<String, CudaError> {
        let owned: Vec<CString> = options
            .iter()
            .map(|option| CString::new(option.as_str()))
            .collect::<Result<_, _>>()
            .map_err(|_| CudaError::InvalidArgument {
                operation: "compile",
                reason: "an option contains a NUL".into(),
            })?;
        let pointers: Vec<*const c_char> = owned.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is live; `pointers` holds as many NUL-terminated strings as said.
        let code = unsafe {
            (self.f.compile)(program.program, pointers.len() as c_int, pointers.as_ptr())
        };
        let log = self.bytes("nvrtcGetProgramLog", program, self.f.log_size, self.f.log)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_string();
        match code {
            0 => Ok(log),
            ERROR_COMPILATION => {
                Err(CudaError::Compile { kernel: kernel.into(), arch: arch.into(), log })
            }
            _ => match self.check("nvrtcCompileProgram", code) {
                Err(CudaError::Nvrtc { operation, code, name, remedy }) if !log.is_empty() => {
                    Err(CudaError::Nvrtc {
                        operation,
                        code,
                        name: format!("{name}: {log}"),
                        remedy,
                    })
                }
                other => other.map(|()| log),
            },
        }
    }

    fn bytes(
        &self,
        operation: &'static str,
        program: &ProgramGuard<'_>,
        size: unsafe extern "C" fn(Program, *mut usize) -> NvrtcResult,
        get: unsafe extern "C" fn(Program, *mut c_char) -> NvrtcResult,
    ) -> Result<Vec<u8>, CudaError> {
        let mut len = 0;
        // SAFETY: the program is live; `len` is valid for the call.
        self.check(operation, unsafe { size(program.program, &mut len) })?;
        let mut bytes = vec![0u8; len];
        // SAFETY: the program is live, and `bytes` has the size it just gave.
        self.check(operation, unsafe { get(program.program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }

    fn check(&self, operation: &'static str, code: NvrtcResult) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: returns a static NUL-terminated string for every code.
        let text = unsafe { (self.f.error_string)(code) };
        let name = if text.is_null() {
            String::from("unknown error")
        } else {
            // SAFETY: not null, hence such a string.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(CudaError::Nvrtc { operation, code, name, remedy: REMEDY })
    }
}

struct ProgramGuard<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Drop for ProgramGuard<'_> {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { (self.nvrtc.f.destroy)(&mut self.program) };
    }
}

/// The version and build from PTX's leading comments; empty where they are missing.
fn build_of(ptx: &str) -> String {
    let mut build = String::new();
    for line in ptx.lines().take_while(|line| line.is_empty() || line.starts_with("//")) {
        if let Some((_, version)) = line.rsplit_once(", V") {
            build = format!(" V{}{build}", version.trim());
        } else if let Some((_, id)) = line.split_once("Compiler Build ID: ") {
            build = format!("{build} {}", id.trim());
        }
    }
    build
}

fn open_at(path: &Path) -> Result<Library, CudaError> {
    let mut candidates = vec![path.to_path_buf()];
    if path.is_dir() {
        candidates =
            NAMES.iter().map(|name| path.join(name)).filter(|file| file.exists()).collect();
    }
    let Some(file) = candidates.first() else {
        let detail = format!("{} holds none of {}", path.display(), NAMES.join(", "));
        return Err(CudaError::LibraryMissing { library: LIBNVRTC, detail, remedy: REMEDY });
    };
    preload_builtins(file);
    open_first(&[&file.to_string_lossy()], LIBNVRTC, REMEDY)
}

/// libnvrtc opens `libnvrtc-builtins` by name when it first compiles and has no run path of its
/// own; outside the loader's path that fails unless the library is in the process already.
fn preload_builtins(libnvrtc: &Path) {
    let Some(entries) = libnvrtc.parent().and_then(|folder| std::fs::read_dir(folder).ok()) else {
        return;
    };
    for file in entries.flatten().map(|entry| entry.path()) {
        let name = file.file_name().map(|name| name.to_string_lossy().into_owned());
        if !name.is_some_and(|name| name.starts_with("libnvrtc-builtins.so.")) {
            continue;
        }
        // SAFETY: a data library of NVRTC's without initialisers.
        match unsafe { Library::new(&file) } {
            Ok(library) => std::mem::forget(library),
            Err(error) => tracing::debug!(%error, file = %file.display(), "not preloaded"),
        }
    }
}

fn open_anywhere() -> Result<Library, CudaError> {
    let on_loader_path = open_first(&NAMES, LIBNVRTC, REMEDY);
    if on_loader_path.is_ok() {
        return on_loader_path;
    }
    usual_places("cuda_nvrtc")
        .iter()
        .filter(|folder| folder.is_dir())
        .find_map(|folder| open_at(folder).ok())
        .map_or(on_loader_path, Ok)
}

/// Where toolkits and Python wheels put a library; `wheel` is its folder in wheels before CUDA 13.
pub(crate) fn usual_places(wheel: &str) -> Vec<PathBuf> {
    let from = |variable: &str| std::env::var_os(variable).map(PathBuf::from);
    let mut places = Vec::new();
    for root in ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| from(name)) {
        places.push(root.join("lib64"));
    }
    places.push("/usr/local/cuda/lib64".into());
    for root in ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| from(name)) {
        let lib = root.join("lib");
        places.push(lib.clone());
        let Ok(pythons) = std::fs::read_dir(&lib) else { continue };
        for python in pythons.flatten() {
            let nvidia = python.path().join("site-packages/nvidia");
            places.push(nvidia.join("cu13/lib"));
            places.push(nvidia.join(wheel).join("lib"));
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_compiler_names_library_and_remedy() {
        let error =
            Nvrtc::open(Some(Path::new("/nowhere/libnvrtc.so.13"))).err().expect("no such file");
        let text = error.to_string();
        assert!(text.contains("libnvrtc.so") && text.contains("EP_NVRTC_PATH"), "{text}");
        let error = Nvrtc::open(Some(Path::new("/proc"))).err().expect("holds no compiler");
        assert!(error.to_string().contains("/proc holds none of libnvrtc.so.13"), "{error}");
    }

    #[test]
    fn a_library_that_is_no_compiler_is_an_error() {
        let error = Nvrtc::open(Some(Path::new("libc.so.6"))).err().expect("libc is no compiler");
        assert!(
            matches!(error, CudaError::SymbolMissing { symbol: "nvrtcGetErrorString", .. }),
            "{error}"
        );
    }

    #[test]
    fn the_build_is_read_from_ptx() {
        let ptx = "//\n// Generated by NVIDIA NVVM Compiler\n//\n// Compiler Build ID: CL-36424714\n// Cuda \
                   compilation tools, release 13.0, V13.0.88\n// Based on NVVM 7.0.1\n//\n\n.version 9.0\n";
        assert_eq!(build_of(ptx), " V13.0.88 CL-36424714");
        assert_eq!(build_of(".version 9.0"), "");
        assert_eq!(build_of(""), "");
    }
}
