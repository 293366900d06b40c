//! Images: shared objects in memory, opened by the loader.

use std::fmt;
use std::io::Write as _;
use std::sync::Arc;

use libloading::os::unix::Library;
use rustix::fs::{MemfdFlags, memfd_create};

use super::host::{HOST, Host};
use super::run;
use super::thread::Entry;
use super::{KernelError, Launch};

/// A loaded image: the shared object that [`crate::nvrtc`] made.
#[derive(Debug, Clone)]
pub struct Image {
    opened: Arc<Opened>,
    static_shared: u32,
}

/// A library and its file: the loader takes two of one path for the same, so the descriptor's number
/// must not be used again while the library is loaded.
#[derive(Debug)]
struct Opened {
    library: Library,
    // Dropped behind the library.
    _file: std::fs::File,
}

/// A kernel of an image, which it keeps loaded.
#[derive(Clone)]
pub struct Kernel {
    image: Image,
    name: String,
    entry: Entry,
    sizes: Vec<usize>,
    max_threads: u32,
}

/// `EpKernelInfo` of src/shim/cuda.hpp.
#[repr(C)]
#[derive(Default)]
struct Info {
    max_threads: u32,
    params: u32,
    sizes: [u32; 30],
}

impl Image {
    /// Loads an image.
    ///
    /// # Errors
    /// [`KernelError::Image`].
    pub fn load(bytes: &[u8]) -> Result<Image, KernelError> {
        let failed = |reason: &dyn fmt::Display| KernelError::Image(reason.to_string());
        let fd = memfd_create("gpu-emulator", MemfdFlags::CLOEXEC).map_err(|e| failed(&e))?;
        let mut file = std::fs::File::from(fd);
        file.write_all(bytes).map_err(|error| failed(&error))?;
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        // SAFETY: an image of this crate's compiler has no initialisers; for other bytes the driver's
        // interface makes the caller answer.
        let library = unsafe { Library::new(&path) }.map_err(|error| failed(&error))?;
        let static_shared = {
            // SAFETY: the signatures of src/shim/cuda.hpp.
            let set = unsafe { library.get::<unsafe extern "C" fn(*const Host)>(b"ep_set_host") };
            // SAFETY: as above.
            let size = unsafe { library.get::<unsafe extern "C" fn() -> u64>(b"ep_static_shared") };
            let (set, size) = (set.map_err(|e| failed(&e))?, size.map_err(|e| failed(&e))?);
            // SAFETY: the table lives as long as the process.
            unsafe { set(&HOST) };
            // SAFETY: takes nothing.
            unsafe { size() }
        };
        let opened = Arc::new(Opened { library, _file: file });
        Ok(Image { opened, static_shared: static_shared as u32 })
    }

    /// A kernel by its name.
    pub fn kernel(&self, name: &str) -> Option<Kernel> {
        // SAFETY: the signature of `nvrtc::compile::translation`.
        let entry =
            unsafe { self.opened.library.get::<Entry>(format!("ep_entry_{name}").as_bytes()) };
        // SAFETY: as above.
        let describe = unsafe {
            let symbol = format!("ep_info_{name}");
            self.opened.library.get::<unsafe extern "C" fn(*mut Info)>(symbol.as_bytes())
        };
        let (entry, describe) = (*entry.ok()?, describe.ok()?);
        let mut info = Info::default();
        // SAFETY: `info` is laid out as the shim's and valid for the write.
        unsafe { describe(&mut info) };
        let sizes = info.sizes.iter().take(info.params as usize).map(|&size| size as usize);
        Some(Kernel {
            image: self.clone(),
            name: name.into(),
            entry,
            sizes: sizes.collect(),
            max_threads: info.max_threads.min(1024),
        })
    }
}

impl Kernel {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sizes of its parameters, bytes.
    pub fn param_sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Static shared memory per block, bytes: that of all kernels of the image.
    pub fn static_shared(&self) -> u32 {
        self.image.static_shared
    }

    /// The most threads per block, by its launch bounds; 1024 without.
    pub fn max_threads(&self) -> u32 {
        self.max_threads
    }

    /// Runs all blocks on the calling thread and returns when the kernel has ended, everything it
    /// wrote being written.
    ///
    /// # Safety
    /// The parameters' addresses are valid for what the kernel does with them.
    ///
    /// # Errors
    /// [`KernelError::Launch`] before anything happens, [`KernelError::Fault`] afterwards.
    pub unsafe fn run(&self, launch: &Launch) -> Result<(), KernelError> {
        // SAFETY: the caller's promise; `entry` stays loaded while `self` lives.
        unsafe { run::run(self, self.entry, launch) }
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").field("name", &self.name).finish_non_exhaustive()
    }
}
