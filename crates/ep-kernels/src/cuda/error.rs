use std::fmt;
use std::time::Duration;

/// What went wrong on the way to or on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A shared library could not be opened.
    #[error("{library} could not be opened ({detail}); {remedy}")]
    LibraryMissing {
        /// File name of the library.
        library: &'static str,
        /// What the dynamic loader said.
        detail: String,
        /// What to do about it.
        remedy: &'static str,
    },
    /// A library was opened but lacks a function that is needed.
    #[error("{library} has no function {symbol}; {remedy}")]
    SymbolMissing {
        /// File name of the library.
        library: &'static str,
        /// The function looked for.
        symbol: &'static str,
        /// What to do about it.
        remedy: &'static str,
    },
    /// The library is older than what is needed.
    #[error("{library} is version {found}, at least {needed} is needed; {remedy}")]
    TooOld {
        /// File name of the library.
        library: &'static str,
        /// The version found.
        found: Version,
        /// The oldest version that works.
        needed: Version,
        /// What to do about it.
        remedy: &'static str,
    },
    /// A call of the driver failed.
    #[error("{operation} failed: {name} ({code}): {detail}")]
    Driver {
        /// The driver function, or what was being done.
        operation: &'static str,
        /// The driver's `CUresult`.
        code: i32,
        /// The driver's name of that code.
        name: String,
        /// The driver's description, and a remedy where one is known.
        detail: String,
    },
    /// A kernel source did not compile.
    #[error("{kernel} does not compile for {arch}: {log}")]
    Compile {
        /// File name of the source.
        kernel: String,
        /// The architecture, as `sm_90a`.
        arch: String,
        /// The compiler's messages.
        log: String,
    },
    /// A call of the run-time compiler failed for another reason than the source.
    #[error("{operation} failed: {name} ({code}); {remedy}")]
    Nvrtc {
        /// The NVRTC function.
        operation: &'static str,
        /// The `nvrtcResult`.
        code: i32,
        /// The compiler's name of that code, and its log where it wrote one.
        name: String,
        /// What to do about it.
        remedy: &'static str,
    },
    /// A call of cuBLASLt failed.
    #[error("{operation} failed: {name} ({code}): {detail}")]
    CublasLt {
        /// The library's function.
        operation: &'static str,
        /// The `cublasStatus_t`.
        code: i32,
        /// The library's name of that code.
        name: String,
        /// The library's description.
        detail: String,
    },
    /// Device or driver cannot do what was asked.
    #[error("{operation} is not supported: {reason}")]
    Unsupported {
        /// What was asked.
        operation: &'static str,
        /// Why it cannot be done here.
        reason: String,
    },
    /// An argument is out of range. Nothing was done.
    #[error("{operation}: {reason}")]
    InvalidArgument {
        /// What was asked.
        operation: &'static str,
        /// Which argument, and what would be accepted.
        reason: String,
    },
    /// The GPU did not finish in time. What it may still write is never freed.
    #[error("{operation} did not finish within {waited:?}")]
    TimedOut {
        /// What was waited for.
        operation: &'static str,
        /// How long.
        waited: Duration,
    },
    /// A kernel ran, but what it recorded contradicts how it was launched.
    #[error("{operation}: {reason}")]
    Inconsistent {
        /// The observation.
        operation: &'static str,
        /// The contradiction.
        reason: String,
    },
}

/// A CUDA version, as driver and compiler report it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Major number.
    pub major: i32,
    /// Minor number.
    pub minor: i32,
}

impl Version {
    /// From the driver's encoding, `1000 * major + 10 * minor`.
    pub fn from_driver(encoded: i32) -> Self {
        Version { major: encoded / 1000, minor: encoded % 1000 / 10 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

pub(crate) fn invalid<T>(
    operation: &'static str,
    reason: impl Into<String>,
) -> Result<T, CudaError> {
    Err(CudaError::InvalidArgument { operation, reason: reason.into() })
}
