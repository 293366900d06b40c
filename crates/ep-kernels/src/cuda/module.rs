use std::ffi::{CString, c_int, c_void};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUstream};

use super::compile::Cubin;
use super::device::{Current, Device};
use super::driver::{CuKernel, CuLibrary, RawLaunchConfig};
use super::error::{CudaError, invalid};
use super::launch::LaunchConfig;
use super::memory::Plain;
use super::stream::Stream;

/// A type that a kernel takes as its one parameter.
///
/// # Safety
/// [`Plain`], at most 4 KiB, and laid out as the struct of the kernel it is passed to; the kernel's
/// source asserts that.
pub unsafe trait KernelParams: Plain {}

/// `CUfunction_attribute`, cuda.h.
const SHARED_STATIC: c_int = 1;
const LOCAL_BYTES: c_int = 3;
const REGISTERS: c_int = 4;
const MAX_DYNAMIC_SHARED: c_int = 8;
const NON_PORTABLE_CLUSTER: c_int = 14;

/// A cubin loaded on a device. Its kernels keep it loaded.
///
/// Kernels belong to no context: the same one launches into the primary context and into green
/// contexts.
#[derive(Clone)]
pub struct Module {
    inner: Arc<ModuleInner>,
}

struct ModuleInner {
    library: CuLibrary,
    device: Device,
    name: String,
}

// SAFETY: driver handles may be used from any thread, and nothing here changes after creation.
unsafe impl Send for ModuleInner {}
// SAFETY: driver handles may be used from any thread, and nothing here changes after creation.
unsafe impl Sync for ModuleInner {}

impl Module {
    /// Loads a cubin.
    ///
    /// # Errors
    /// The driver's, for instance a cubin of another architecture.
    pub fn load(device: &Device, cubin: &Cubin) -> Result<Module, CudaError> {
        let mut library = std::ptr::null_mut();
        let none = std::ptr::null_mut;
        let _current = device.make_current()?;
        // SAFETY: `cubin` is a complete image, checked by its checksum or fresh from the compiler;
        // the driver copies it. No options are passed.
        device.check("cuLibraryLoadData", unsafe {
            (device.driver().f.library_load)(
                &mut library,
                cubin.bytes().as_ptr().cast(),
                std::ptr::null_mut(),
                none(),
                0,
                std::ptr::null_mut(),
                none(),
                0,
            )
        })?;
        let name = cubin.name().to_string();
        Ok(Module { inner: Arc::new(ModuleInner { library, device: device.clone(), name }) })
    }

    /// A kernel by its name, made ready to launch: its code is on the device when this returns, so
    /// a first launch loads nothing while another rank waits.
    ///
    /// # Errors
    /// No kernel of that name, or the driver's.
    pub fn kernel(&self, name: &str) -> Result<Kernel, CudaError> {
        let device = &self.inner.device;
        let symbol =
            CString::new(name).or_else(|_| invalid("Module::kernel", "NUL in the name"))?;
        let mut raw = std::ptr::null_mut();
        let _current = device.make_current()?;
        // SAFETY: the library is loaded while `self` lives; `symbol` is NUL-terminated.
        device.check("cuLibraryGetKernel", unsafe {
            (device.driver().f.library_kernel)(&mut raw, self.inner.library, symbol.as_ptr())
        })?;
        let mut kernel = Kernel { raw, module: self.clone(), resources: Resources::default() };
        kernel.resources = Resources {
            registers: kernel.attribute(REGISTERS)?,
            shared_bytes: kernel.attribute(SHARED_STATIC)?,
            local_bytes: kernel.attribute(LOCAL_BYTES)?,
        };
        // Set once, to the most there is: a launch still asks for what it needs, and setting it per
        // launch would race between threads.
        let most =
            device.properties().shared_per_block.saturating_sub(kernel.resources.shared_bytes);
        kernel.set_attribute(MAX_DYNAMIC_SHARED, most)?;
        if device.properties().clusters {
            kernel.set_attribute(NON_PORTABLE_CLUSTER, 1)?;
        }
        kernel.load_here()?;
        Ok(kernel)
    }

    /// The device it is loaded on.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }
}

impl Drop for ModuleInner {
    fn drop(&mut self) {
        let Ok(_current) = self.device.make_current() else { return };
        // SAFETY: loaded once, unloaded once, and no kernel of it is left.
        let code = unsafe { (self.device.driver().f.library_unload)(self.library) };
        if code != 0 {
            tracing::warn!(code, module = self.name, "cuLibraryUnload failed");
        }
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module").field("name", &self.inner.name).finish_non_exhaustive()
    }
}

/// What a kernel takes, as the driver reports it after loading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Static shared memory per block, bytes.
    pub shared_bytes: u32,
    /// Local memory per thread (stack and spills), bytes.
    pub local_bytes: u32,
}

/// A kernel, ready to launch.
#[derive(Clone)]
pub struct Kernel {
    raw: CuKernel,
    module: Module,
    resources: Resources,
}

// SAFETY: a context-independent handle of the driver, usable from any thread.
unsafe impl Send for Kernel {}
// SAFETY: a context-independent handle of the driver, usable from any thread.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// What it takes.
    pub fn resources(&self) -> Resources {
        self.resources
    }

    /// The device it is loaded on.
    pub fn device(&self) -> &Device {
        self.module.device()
    }

    /// Loads it into the partition of `stream` too, if that launches into one.
    ///
    /// # Errors
    /// The driver's.
    pub fn prepare(&self, stream: &Stream) -> Result<(), CudaError> {
        let Some(green) = stream.green_context() else { return Ok(()) };
        let _current = Current::push(self.device().driver(), green.context())?;
        self.load_here()
    }

    /// Launches on a stream. Returns as soon as the driver has the launch.
    ///
    /// # Safety
    /// `stream` is a live stream of this kernel's device. Every address in `params` is valid on the
    /// device for what the kernel does with it, until the kernel has ended. Until then a handle of
    /// the kernel or of its module is kept.
    ///
    /// # Errors
    /// Those of [`LaunchConfig::validate`], before anything happens, and the driver's.
    pub unsafe fn launch<P: KernelParams>(
        &self,
        stream: CUstream,
        config: &LaunchConfig,
        params: &P,
    ) -> Result<(), CudaError> {
        const { assert!(size_of::<P>() <= 4096 && size_of::<P>() > 0) };
        self.validate(config)?;
        self.device().ensure_current()?;
        let mut argument: *mut c_void = std::ptr::from_ref(params).cast_mut().cast();
        self.with_raw(stream, config, |raw| {
            // SAFETY: the kernel takes one parameter laid out as `P` (its source asserts that),
            // which the driver copies before returning; stream and addresses are the caller's
            // promise.
            self.device().check("cuLaunchKernelEx", unsafe {
                (self.device().driver().f.launch)(
                    raw,
                    self.function(),
                    &mut argument,
                    std::ptr::null_mut(),
                )
            })
        })
    }

    /// How many blocks of this shape one SM holds at once.
    ///
    /// # Errors
    /// Arguments out of range, or the driver's.
    pub fn blocks_per_sm(&self, block: u32, shared_bytes: u32) -> Result<u32, CudaError> {
        let config = LaunchConfig { grid: 1, block, shared_bytes, attributes: Default::default() };
        self.validate(&config)?;
        let mut blocks = 0;
        let _current = self.device().make_current()?;
        // SAFETY: a context is current, in which the handle stands for this kernel.
        self.device().check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
            (self.device().driver().f.max_active_blocks)(
                &mut blocks,
                self.function(),
                block as c_int,
                shared_bytes as usize,
            )
        })?;
        Ok(blocks.max(0) as u32)
    }

    /// How many clusters of a launch can be resident at once, on the SMs of `stream` or, without
    /// one, on the whole device. 0: the device holds no cluster of that size.
    ///
    /// # Errors
    /// No clusters on this device, arguments out of range, or the driver's.
    pub fn max_active_clusters(
        &self,
        config: &LaunchConfig,
        stream: Option<&Stream>,
    ) -> Result<u32, CudaError> {
        self.cluster_query("cuOccupancyMaxActiveClusters", config, stream, |raw, answer| {
            // SAFETY: a context is current, in which the handle stands for this kernel.
            unsafe { (self.device().driver().f.max_active_clusters)(answer, self.function(), raw) }
        })
    }

    /// The largest cluster that a launch of this shape could have on this device.
    ///
    /// # Errors
    /// As [`Kernel::max_active_clusters`].
    pub fn max_cluster_size(
        &self,
        config: &LaunchConfig,
        stream: Option<&Stream>,
    ) -> Result<u32, CudaError> {
        self.cluster_query("cuOccupancyMaxPotentialClusterSize", config, stream, |raw, answer| {
            // SAFETY: a context is current, in which the handle stands for this kernel.
            unsafe { (self.device().driver().f.max_cluster_size)(answer, self.function(), raw) }
        })
    }

    fn cluster_query(
        &self,
        operation: &'static str,
        config: &LaunchConfig,
        stream: Option<&Stream>,
        query: impl Fn(*const RawLaunchConfig, *mut c_int) -> c_int,
    ) -> Result<u32, CudaError> {
        let device = self.device();
        if !device.properties().clusters {
            let reason = format!("{} has no clusters", device.properties().name);
            return Err(CudaError::Unsupported { operation, reason });
        }
        self.validate(config)?;
        let _current = device.make_current()?;
        let raw_stream = stream.map_or(std::ptr::null_mut(), Stream::raw);
        let mut answer = 0;
        self.with_raw(raw_stream, config, |raw| device.check(operation, query(raw, &mut answer)))?;
        Ok(answer.max(0) as u32)
    }

    fn validate(&self, config: &LaunchConfig) -> Result<(), CudaError> {
        let properties = self.device().properties();
        config.validate(properties)?;
        let available = properties.shared_per_block.saturating_sub(self.resources.shared_bytes);
        if config.shared_bytes > available {
            return invalid(
                "launch",
                format!(
                    "{} bytes of dynamic shared memory, but {available} are left beside the kernel's own",
                    config.shared_bytes
                ),
            );
        }
        Ok(())
    }

    fn with_raw<R>(
        &self,
        stream: CUstream,
        config: &LaunchConfig,
        call: impl FnOnce(&RawLaunchConfig) -> R,
    ) -> R {
        let attributes = config.attributes.encode();
        let raw = RawLaunchConfig {
            grid: [config.grid, 1, 1],
            block: [config.block, 1, 1],
            shared_bytes: config.shared_bytes,
            stream,
            attributes: attributes.as_ptr(),
            attribute_count: attributes.len(),
        };
        call(&raw)
    }

    /// The driver takes a context-independent kernel wherever it takes a function.
    fn function(&self) -> CUfunction {
        self.raw.cast()
    }

    /// Loads the code into the context that is current.
    fn load_here(&self) -> Result<(), CudaError> {
        let (device, f) = (self.device(), &self.device().driver().f);
        let mut function = std::ptr::null_mut();
        // SAFETY: a context of the kernel's device is current.
        device.check("cuKernelGetFunction", unsafe {
            (f.kernel_function)(&mut function, self.raw)
        })?;
        if let Some(load) = f.func_load {
            // SAFETY: `function` was just given for the current context.
            device.check("cuFuncLoad", unsafe { load(function) })?;
        }
        if let Some(is_loaded) = f.func_is_loaded {
            let mut state = 0;
            // SAFETY: as above; `state` is valid for the call.
            device.check("cuFuncIsLoaded", unsafe { is_loaded(&mut state, function) })?;
            if state != 1 {
                let reason = format!("cuFuncLoad left state {state}");
                return Err(CudaError::Inconsistent { operation: "eager loading", reason });
            }
        }
        Ok(())
    }

    fn attribute(&self, which: c_int) -> Result<u32, CudaError> {
        let mut value = 0;
        let device = self.device();
        // SAFETY: the kernel is loaded while its module lives; `value` is valid for the call.
        device.check("cuKernelGetAttribute", unsafe {
            (device.driver().f.kernel_attribute)(&mut value, which, self.raw, device.cu_device())
        })?;
        Ok(value.max(0) as u32)
    }

    fn set_attribute(&self, which: c_int, value: u32) -> Result<(), CudaError> {
        let device = self.device();
        // SAFETY: called once, before the kernel is handed out, so no other thread sets it
        // meanwhile.
        device.check("cuKernelSetAttribute", unsafe {
            (device.driver().f.kernel_set_attribute)(
                which,
                value as c_int,
                self.raw,
                device.cu_device(),
            )
        })
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel")
            .field("module", &self.module)
            .field("resources", &self.resources)
            .finish()
    }
}
