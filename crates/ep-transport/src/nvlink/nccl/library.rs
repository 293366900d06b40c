//! The part of NCCL that the transport calls, opened at run time.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::os::unix::Library;

use crate::{Result, TransportError};

/// Where libnccl.so.2 is, where the loader does not find it: a file or a folder.
const PATH_VARIABLE: &str = "EP_NCCL_PATH";
/// `ncclInt8`.
pub const BYTES: c_int = 0;
/// `ncclInProgress`.
const IN_PROGRESS: c_int = 7;
/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;
/// The first version whose `ncclConfig_t` has all fields that are used here; later ones take its
/// layout, as its size and version say.
const CONFIG_VERSION: c_uint = 2_18_01;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` of 2.18.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}
const _: () = assert!(size_of::<Config>() == 48);

impl Config {
    pub fn new(max_ctas: u32, cluster_size: u32) -> Self {
        let number = |n: u32| c_int::try_from(n).unwrap_or(c_int::MAX);
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: CONFIG_VERSION,
            blocking: 1,
            cluster_size: number(cluster_size),
            min_ctas: UNDEFINED,
            max_ctas: number(max_ctas),
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// `ncclComm_t`.
pub type Handle = *mut c_void;
type Transfer = unsafe extern "C" fn(u64, usize, c_int, c_int, Handle, *mut c_void) -> c_int;

type Register = unsafe extern "C" fn(Handle, u64, usize, *mut *mut c_void) -> c_int;
type Deregister = unsafe extern "C" fn(Handle, *mut c_void) -> c_int;

fn registration(library: &Library) -> Option<(Register, Deregister)> {
    // SAFETY: the signatures are those of nccl.h (2.19 and later) for these symbols.
    unsafe {
        let register = library.get::<Register>(b"ncclCommRegister").ok()?;
        let deregister = library.get::<Deregister>(b"ncclCommDeregister").ok()?;
        Some((*register, *deregister))
    }
}

macro_rules! functions {
    ($($name:ident: $symbol:literal $kind:ty;)*) => {
        /// NCCL's functions.
        pub struct Nccl {
            $(pub $name: $kind,)*
            /// `ncclCommRegister` and `ncclCommDeregister`, which came with 2.19.
            pub registration: Option<(Register, Deregister)>,
            // The pointers above are valid while this is open.
            _library: Library,
        }

        impl Nccl {
            fn look_up(library: Library) -> std::result::Result<Self, String> {
                Ok(Nccl {
                    $($name: {
                        // SAFETY: the signature is that of nccl.h (2.x) for this symbol.
                        unsafe { library.get::<$kind>($symbol.as_bytes()) }
                            .map(|found| *found)
                            .map_err(|_| format!("libnccl.so.2 has no {}; NCCL 2.18 or newer is needed", $symbol))?
                    },)*
                    registration: registration(&library),
                    _library: library,
                })
            }
        }
    };
}

functions! {
    version: "ncclGetVersion" unsafe extern "C" fn(*mut c_int) -> c_int;
    unique_id: "ncclGetUniqueId" unsafe extern "C" fn(*mut UniqueId) -> c_int;
    init: "ncclCommInitRankConfig"
        unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int;
    destroy: "ncclCommDestroy" unsafe extern "C" fn(Handle) -> c_int;
    abort: "ncclCommAbort" unsafe extern "C" fn(Handle) -> c_int;
    async_error: "ncclCommGetAsyncError" unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
    send: "ncclSend" Transfer;
    recv: "ncclRecv" Transfer;
    start: "ncclGroupStart" unsafe extern "C" fn() -> c_int;
    end: "ncclGroupEnd" unsafe extern "C" fn() -> c_int;
    error_string: "ncclGetErrorString" unsafe extern "C" fn(c_int) -> *const c_char;
    last_error: "ncclGetLastError" unsafe extern "C" fn(Handle) -> *const c_char;
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Nccl")
    }
}

impl Nccl {
    /// The library, opened by the first call.
    pub fn get() -> Result<&'static Nccl> {
        static NCCL: OnceLock<std::result::Result<Nccl, String>> = OnceLock::new();
        let opened = NCCL.get_or_init(Self::open);
        opened
            .as_ref()
            .map_err(|detail| TransportError::Unsupported { op: "open", detail: detail.clone() })
    }

    fn open() -> std::result::Result<Self, String> {
        let name = match std::env::var_os(PATH_VARIABLE).map(PathBuf::from) {
            Some(path) if path.is_dir() => path.join("libnccl.so.2"),
            Some(path) => path,
            None => "libnccl.so.2".into(),
        };
        // SAFETY: NVIDIA's library, whose initialisers have no preconditions.
        let library = unsafe { Library::new(&name) }.map_err(|e| {
            let why =
                std::error::Error::source(&e).map_or_else(|| e.to_string(), |s| s.to_string());
            format!(
                "{}: {why}: install NCCL 2 (libnccl2), or say where it is by {PATH_VARIABLE}",
                name.display()
            )
        })?;
        let nccl = Self::look_up(library)?;
        let mut version = 0;
        // SAFETY: `version` is valid for the call.
        let code = unsafe { (nccl.version)(&mut version) };
        // Since 2.9 versions are numbered 10000 * major + 100 * minor + patch.
        match code == 0 && version >= CONFIG_VERSION as c_int {
            true => Ok(nccl),
            false => Err(format!("libnccl.so.2 is version {version}; 2.18 or newer is needed")),
        }
    }

    /// An error, with the text of the library and what it said last.
    pub fn check(
        &self,
        op: &'static str,
        call: &'static str,
        code: c_int,
        comm: Handle,
    ) -> Result<()> {
        if code == 0 || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: both give static strings, or null; the communicator may be null.
        let (what, last) =
            unsafe { (text((self.error_string)(code)), text((self.last_error)(comm))) };
        let detail = if last.is_empty() { what } else { format!("{what}: {last}") };
        Err(TransportError::Device { op, call, code, detail })
    }
}

/// # Safety
/// `at` is null or a NUL-terminated string that stays as it is.
unsafe fn text(at: *const c_char) -> String {
    if at.is_null() {
        return String::new();
    }
    // SAFETY: by this function's contract.
    unsafe { CStr::from_ptr(at) }.to_string_lossy().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_the_way_out() {
        // SAFETY: no other test of this binary reads this variable.
        unsafe { std::env::set_var(PATH_VARIABLE, "/nowhere/libnccl.so.2") };
        let e = Nccl::get().unwrap_err();
        assert_eq!(e.kind(), crate::ErrorKind::Unsupported, "{e}");
        assert!(
            e.to_string().contains("/nowhere") && e.to_string().contains("EP_NCCL_PATH"),
            "{e}"
        );
    }
}
