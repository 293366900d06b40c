//! Libraries and their kernels.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use parking_lot::Mutex;

use super::code::{Code, Result};
use super::context::SMS;
use super::table::{Handle, Table, new_handle};
use crate::kernel;

/// Shared memory that a block may ask for, and what it has without asking, bytes.
pub const SHARED_MOST: i32 = 232_448;
const SHARED_PLAIN: i32 = 49_152;
/// What every kernel is said to take; there are none here.
pub const REGISTERS: i32 = 64;

/// What runs when a kernel is launched.
pub enum Body {
    /// C++ that the compiler of this emulator made.
    Emulated(kernel::Kernel),
    /// The transport's kernel that writes and awaits words, of which the driver gets PTX.
    Words,
}

/// A kernel of a library.
pub struct Entry {
    pub name: String,
    pub body: Body,
    most_dynamic: AtomicI32,
    pub any_cluster: AtomicBool,
    /// Its library is gone.
    pub unloaded: AtomicBool,
    /// The contexts that it was loaded into.
    loaded: Mutex<HashSet<Handle>>,
}

/// A kernel in a context.
pub struct Function {
    entry: Arc<Entry>,
    context: Handle,
}

struct Library {
    image: Image,
    kernels: Mutex<Vec<(Handle, Arc<Entry>)>>,
}

enum Image {
    Emulated(kernel::Image),
    Words,
}

static LIBRARIES: Table<Library> = Table::new();
static KERNELS: Table<Entry> = Table::new();
static FUNCTIONS: Table<Function> = Table::new();

/// `CUfunction_attribute`.
mod attribute {
    pub const MAX_THREADS: i32 = 0;
    pub const SHARED: i32 = 1;
    pub const CONSTANT: i32 = 2;
    pub const LOCAL: i32 = 3;
    pub const REGISTERS: i32 = 4;
    pub const BINARY_VERSION: i32 = 6;
    pub const MOST_DYNAMIC: i32 = 8;
    pub const ANY_CLUSTER: i32 = 14;
}

/// What the text of the transport's kernel says.
const WORDS: &str = ".visible .entry ep_words(.param .align 8 .b8 ops[296])";

/// Loads a library.
pub fn load(bytes: &[u8]) -> Result<Handle> {
    let image = if bytes.starts_with(b"\x7fELF") {
        Image::Emulated(kernel::Image::load(bytes).map_err(|why| {
            eprintln!("gpu-emulator: {why}");
            Code::INVALID_IMAGE
        })?)
    } else if std::str::from_utf8(bytes).is_ok_and(|text| text.contains(WORDS)) {
        Image::Words
    } else {
        eprintln!("gpu-emulator: of PTX it knows the transport's ep_words alone");
        return Err(Code::INVALID_IMAGE);
    };
    let handle = new_handle();
    LIBRARIES.insert(handle, Arc::new(Library { image, kernels: Mutex::default() }));
    Ok(handle)
}

pub fn unload(library: Handle) -> Result<()> {
    let library = LIBRARIES.remove(library)?;
    for (handle, entry) in library.kernels.lock().drain(..) {
        entry.unloaded.store(true, Ordering::Release);
        let _ = KERNELS.remove(handle);
    }
    Ok(())
}

/// A kernel of a library; the same handle whenever it is asked for.
pub fn kernel(library: Handle, name: &str) -> Result<Handle> {
    let library = LIBRARIES.get(library)?;
    let mut kernels = library.kernels.lock();
    if let Some((handle, _)) = kernels.iter().find(|(_, entry)| entry.name == name) {
        return Ok(*handle);
    }
    let body = match &library.image {
        Image::Emulated(image) => Body::Emulated(image.kernel(name).ok_or(Code::NOT_FOUND)?),
        Image::Words if name == "ep_words" => Body::Words,
        Image::Words => return Err(Code::NOT_FOUND),
    };
    let entry = Entry {
        name: name.into(),
        most_dynamic: AtomicI32::new(SHARED_PLAIN - body.shared()),
        body,
        any_cluster: AtomicBool::new(false),
        unloaded: AtomicBool::new(false),
        loaded: Mutex::default(),
    };
    let (handle, entry) = (new_handle(), Arc::new(entry));
    KERNELS.insert(handle, entry.clone());
    kernels.push((handle, entry));
    Ok(handle)
}

/// A kernel as a function of a context.
pub fn function(kernel: Handle, context: Handle) -> Result<Handle> {
    let function = Function { entry: KERNELS.get(kernel)?, context };
    let handle = new_handle();
    FUNCTIONS.insert(handle, Arc::new(function));
    Ok(handle)
}

pub fn load_function(function: Handle) -> Result<()> {
    let function = FUNCTIONS.get(function)?;
    function.entry.loaded.lock().insert(function.context);
    Ok(())
}

pub fn is_loaded(function: Handle) -> Result<bool> {
    let function = FUNCTIONS.get(function)?;
    let loaded = function.entry.loaded.lock().contains(&function.context);
    Ok(loaded)
}

/// What a launch names: a kernel, or a function.
pub fn entry(handle: Handle) -> Result<Arc<Entry>> {
    let entry = KERNELS.get(handle).or_else(|_| Ok(FUNCTIONS.get(handle)?.entry.clone()))?;
    if entry.unloaded.load(Ordering::Acquire) { Err(Code::INVALID_HANDLE) } else { Ok(entry) }
}

impl Body {
    /// Static shared memory, bytes.
    pub fn shared(&self) -> i32 {
        match self {
            Self::Emulated(kernel) => kernel.static_shared() as i32,
            Self::Words => 0,
        }
    }

    pub fn most_threads(&self) -> u32 {
        match self {
            Self::Emulated(kernel) => kernel.max_threads(),
            Self::Words => 1024,
        }
    }

    /// Sizes of parameters, bytes.
    pub fn params(&self) -> &[usize] {
        match self {
            Self::Emulated(kernel) => kernel.param_sizes(),
            Self::Words => &[super::words::PARAMS],
        }
    }
}

impl Entry {
    pub fn most_dynamic(&self) -> i32 {
        self.most_dynamic.load(Ordering::Acquire)
    }

    pub fn attribute(&self, which: i32) -> Result<i32> {
        Ok(match which {
            attribute::MAX_THREADS => self.body.most_threads() as i32,
            attribute::SHARED => self.body.shared(),
            attribute::CONSTANT | attribute::LOCAL => 0,
            attribute::REGISTERS => REGISTERS,
            attribute::BINARY_VERSION => 90,
            attribute::MOST_DYNAMIC => self.most_dynamic(),
            attribute::ANY_CLUSTER => self.any_cluster.load(Ordering::Acquire).into(),
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    pub fn set_attribute(&self, which: i32, value: i32) -> Result<()> {
        match which {
            attribute::MOST_DYNAMIC if (0..=SHARED_MOST - self.body.shared()).contains(&value) => {
                self.most_dynamic.store(value, Ordering::Release);
            }
            attribute::ANY_CLUSTER if value == 0 || value == 1 => {
                self.any_cluster.store(value == 1, Ordering::Release);
            }
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }

    /// How many blocks one SM holds at once.
    pub fn blocks_per_sm(&self, threads: u32, dynamic: u32) -> u32 {
        let threads = threads.max(1).next_multiple_of(32);
        let shared = dynamic + self.body.shared() as u32;
        if threads > 1024 || shared > SHARED_MOST as u32 || dynamic as i32 > self.most_dynamic() {
            return 0;
        }
        let registers = 65_536 / (REGISTERS as u32 * threads);
        let by_shared = 233_472 / (shared + 1024).next_multiple_of(128);
        (2048 / threads).min(32).min(registers).min(by_shared)
    }

    /// How many clusters some SMs hold at once.
    pub fn clusters(&self, size: u32, (threads, dynamic): (u32, u32), sms: u32) -> Result<u32> {
        let most = if self.any_cluster.load(Ordering::Acquire) { 16 } else { 8 };
        if size > most {
            return Err(Code::INVALID_CLUSTER_SIZE);
        }
        // An H200's own, where SMs that share a GPC do not divide evenly.
        let whole = match size {
            0 | 1 => SMS,
            2 => 66,
            3..=4 => 30,
            5..=8 => 15,
            _ => 7,
        };
        Ok(whole.min(sms / size.max(1)) * self.blocks_per_sm(threads, dynamic))
    }
}
