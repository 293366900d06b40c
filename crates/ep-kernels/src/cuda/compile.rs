use std::fmt;
use std::path::PathBuf;
use std::sync::OnceLock;

use parking_lot::Mutex;

use super::cache::{CacheKey, KernelCache};
use super::device::DeviceProperties;
use super::error::{CudaError, invalid};
use super::nvrtc::Nvrtc;
use super::source::KernelSource;

/// A GPU architecture that machine code is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    major: u32,
    minor: u32,
}

impl Arch {
    /// Ampere data centre parts (A100).
    pub const SM_80: Arch = Arch { major: 8, minor: 0 };
    /// Hopper (H100, H200).
    pub const SM_90A: Arch = Arch { major: 9, minor: 0 };
    /// Blackwell data centre parts (B200).
    pub const SM_100A: Arch = Arch { major: 10, minor: 0 };
    /// Those that every kernel is compiled for in tests.
    pub const TESTED: [Arch; 3] = [Arch::SM_80, Arch::SM_90A, Arch::SM_100A];

    /// The architecture of a device, with the instructions that only it has.
    ///
    /// # Errors
    /// Older than compute capability 8.0, for which these kernels are not written.
    pub fn of(device: &DeviceProperties) -> Result<Arch, CudaError> {
        let (major, minor) = device.capability;
        if major < 8 {
            let reason =
                format!("{} has compute capability {major}.{minor}; 8.0 is needed", device.name);
            return Err(CudaError::Unsupported { operation: "kernels", reason });
        }
        Ok(Arch { major, minor })
    }
}

/// As the compiler spells it. From 9.0 on with the suffix `a`: `sm_90a` code runs on 9.0 alone, and
/// so does any cubin on its own architecture.
impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = if self.major >= 9 { "a" } else { "" };
        write!(f, "sm_{}{}{suffix}", self.major, self.minor)
    }
}

/// Machine code of one source for one architecture.
#[derive(Clone, PartialEq, Eq)]
pub struct Cubin {
    name: String,
    bytes: Vec<u8>,
    cached: bool,
}

impl Cubin {
    /// The ELF image.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// File name of its source.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it came from the cache.
    pub fn from_cache(&self) -> bool {
        self.cached
    }
}

impl fmt::Debug for Cubin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cubin")
            .field("name", &self.name)
            .field("bytes", &self.bytes.len())
            .field("cached", &self.cached)
            .finish()
    }
}

/// Where the compiler and its cache are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompilerOptions {
    /// libnvrtc or the folder that holds it. `None`: `EP_NVRTC_PATH`, else wherever one is found.
    pub nvrtc: Option<PathBuf>,
    /// The cache.
    pub cache: CacheChoice,
}

impl CompilerOptions {
    /// With libnvrtc at a path, or in a folder.
    pub fn with_nvrtc(mut self, path: impl Into<PathBuf>) -> Self {
        self.nvrtc = Some(path.into());
        self
    }

    /// With this cache.
    pub fn with_cache(mut self, cache: CacheChoice) -> Self {
        self.cache = cache;
        self
    }
}

/// Which cache of compiled kernels is used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CacheChoice {
    /// That of [`KernelCache::from_env`].
    #[default]
    Default,
    /// This one.
    At(KernelCache),
    /// None.
    Off,
}

/// Compiles sources to cubins, once each.
pub struct Compiler {
    nvrtc: Nvrtc,
    cache: Option<KernelCache>,
    // NVRTC serialises compilation inside; a lock of ours makes that independent of its version.
    compiling: Mutex<()>,
}

impl Compiler {
    /// Opens NVRTC.
    ///
    /// # Errors
    /// The library or one of its functions is missing, or it does not work.
    pub fn open(options: &CompilerOptions) -> Result<Compiler, CudaError> {
        let nvrtc = Nvrtc::open(options.nvrtc.as_deref())?;
        let cache = match &options.cache {
            CacheChoice::Default => KernelCache::from_env(),
            CacheChoice::At(cache) => Some(cache.clone()),
            CacheChoice::Off => None,
        };
        Ok(Compiler { nvrtc, cache, compiling: Mutex::new(()) })
    }

    /// The process's compiler with default options, opened by the first call.
    ///
    /// # Errors
    /// Those of [`Compiler::open`], remembered for the life of the process.
    pub fn get() -> Result<&'static Compiler, CudaError> {
        static COMPILER: OnceLock<Result<Compiler, CudaError>> = OnceLock::new();
        COMPILER
            .get_or_init(|| Compiler::open(&CompilerOptions::default()))
            .as_ref()
            .map_err(Clone::clone)
    }

    /// NVRTC's version down to the build.
    pub fn version(&self) -> &str {
        self.nvrtc.version()
    }

    /// The cubin of a source: from the cache, else compiled and stored. A cache that cannot be used
    /// is a warning.
    ///
    /// # Errors
    /// The source does not compile, or NVRTC fails.
    pub fn cubin(&self, source: &KernelSource, arch: Arch) -> Result<Cubin, CudaError> {
        let text = source.assemble();
        let options = options_for(arch);
        let key = CacheKey::new(&text, &options, &arch.to_string(), self.version());
        let name = source.name.to_string();
        if let Some(bytes) = self.cache.as_ref().and_then(|cache| cache.load(&key)) {
            return Ok(Cubin { name, bytes, cached: true });
        }
        let (bytes, _) = self.compile(source.name, &text, arch)?;
        if let Some(cache) = &self.cache
            && let Err(error) = cache.store(&key, &bytes)
        {
            tracing::warn!(%error, folder = %cache.folder().display(), "compiled kernel not cached");
        }
        Ok(Cubin { name, bytes, cached: false })
    }

    /// Compiles a text, past the cache. Returns the cubin and the compiler's messages with `ptxas
    /// -v`'s.
    ///
    /// # Errors
    /// The text does not compile, or NVRTC fails.
    pub fn compile(
        &self,
        name: &str,
        text: &str,
        arch: Arch,
    ) -> Result<(Vec<u8>, String), CudaError> {
        let _one_at_a_time = self.compiling.lock();
        let arch_name = arch.to_string();
        let options = options_for(arch);
        // Where there is a driver, NVRTC keeps a cache of its own, and a hit there says nothing of
        // registers or spills. Versions without the cache do not know the option.
        let fresh = [options.as_slice(), &["--no-cache".to_string()]].concat();
        let (bytes, log) = match self.nvrtc.cubin(name, text, &arch_name, &fresh) {
            Ok(compiled) => compiled,
            Err(_) => self.nvrtc.cubin(name, text, &arch_name, &options)?,
        };
        if !bytes.starts_with(b"\x7fELF") {
            return invalid("compile", format!("{name} gave no machine code for {arch_name}"));
        }
        Ok((bytes, log))
    }
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler")
            .field("nvrtc", &self.version())
            .field("cache", &self.cache)
            .finish_non_exhaustive()
    }
}

/// Multiply and add stay separate, and nothing is flushed to zero: results must equal the host's
/// bit by bit.
fn options_for(arch: Arch) -> Vec<String> {
    [
        &format!("--gpu-architecture={arch}"),
        "--std=c++17",
        "--fmad=false",
        "--ftz=false",
        "--prec-div=true",
        "--prec-sqrt=true",
        "--ptxas-options=-v",
    ]
    .map(str::to_string)
    .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_spelt_as_the_compiler_wants_them() {
        assert_eq!(Arch::TESTED.map(|arch| arch.to_string()), ["sm_80", "sm_90a", "sm_100a"]);
        assert_eq!(Arch { major: 8, minor: 6 }.to_string(), "sm_86");
        assert_eq!(Arch { major: 12, minor: 1 }.to_string(), "sm_121a");
    }

    #[test]
    fn options_keep_arithmetic_exact() {
        let options = options_for(Arch::SM_90A);
        assert_eq!(options[0], "--gpu-architecture=sm_90a");
        assert!(options.iter().any(|option| option == "--fmad=false"));
        assert!(options.iter().any(|option| option == "--ftz=false"));
    }

    #[test]
    fn a_missing_compiler_is_an_error_value() {
        let options =
            CompilerOptions::default().with_nvrtc("/nowhere").with_cache(CacheChoice::Off);
        let error = Compiler::open(&options).unwrap_err();
        assert!(matches!(error, CudaError::LibraryMissing { .. }), "{error}");
    }
}
