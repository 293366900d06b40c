use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUcontext, CUdevice};

use super::driver::Driver;
use super::error::{CudaError, Version, invalid};
use super::stream::Stream;

/// A GPU with its primary context, the one that engines in this process share.
///
/// Cloning is cheap. Nothing here changes which context is current on the calling thread, except on
/// a thread that has none.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    driver: &'static Driver,
    context: Arc<CudaContext>,
    properties: DeviceProperties,
}

/// What the driver says about a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceProperties {
    /// Position among the GPUs visible to this process.
    pub ordinal: usize,
    /// Product name.
    pub name: String,
    /// UUID; [`DeviceProperties::uuid_text`] writes it.
    pub uuid: [u8; 16],
    /// PCI domain, bus and device.
    pub pci: (u32, u32, u32),
    /// Compute capability.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Most shared memory one block may ask for, bytes.
    pub shared_per_block: u32,
    /// Shared memory of one SM, bytes.
    pub shared_per_sm: u32,
    /// Shared memory the system takes per block, bytes.
    pub shared_reserved: u32,
    /// L2 cache, bytes.
    pub l2_bytes: u32,
    /// Whether launches may have cluster dimensions.
    pub clusters: bool,
    /// Whether launches may be cooperative.
    pub cooperative: bool,
    /// The newest CUDA version that the driver supports.
    pub driver: Version,
}

impl DeviceProperties {
    /// What an H200 (SXM) says of itself, with ordinal 0: for plans and tests without a GPU.
    pub fn h200() -> Self {
        DeviceProperties {
            ordinal: 0,
            name: "NVIDIA H200".into(),
            uuid: [0; 16],
            pci: (0, 1, 0),
            capability: (9, 0),
            sms: 132,
            shared_per_block: 232_448,
            shared_per_sm: 233_472,
            shared_reserved: 1024,
            l2_bytes: 60 << 20,
            clusters: true,
            cooperative: true,
            driver: Version { major: 13, minor: 0 },
        }
    }

    /// The UUID as NVML writes it: `GPU-8-4-4-4-12`.
    pub fn uuid_text(&self) -> String {
        let mut text = String::from("GPU");
        for (i, byte) in self.uuid.iter().enumerate() {
            if matches!(i, 0 | 4 | 6 | 8 | 10) {
                text.push('-');
            }
            text.push_str(&format!("{byte:02x}"));
        }
        text
    }
}

// `CUdevice_attribute`, cuda.h.
const SM_COUNT: c_int = 16;
const PCI_BUS: c_int = 33;
const PCI_DEVICE: c_int = 34;
const L2_BYTES: c_int = 38;
const PCI_DOMAIN: c_int = 50;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;
const SHARED_PER_SM: c_int = 81;
const COOPERATIVE: c_int = 95;
const SHARED_PER_BLOCK_OPTIN: c_int = 97;
const SHARED_RESERVED: c_int = 111;
const CLUSTER_LAUNCH: c_int = 120;

impl Device {
    /// Opens the GPU with this ordinal and retains its primary context.
    ///
    /// # Errors
    /// Those of [`Driver::get`], an ordinal out of range, or a context that cannot be had.
    pub fn open(ordinal: usize) -> Result<Device, CudaError> {
        let driver = Driver::get()?;
        let count = driver.device_count()?;
        if ordinal >= count {
            return invalid(
                "Device::open",
                format!("ordinal {ordinal}, but {count} GPUs are visible"),
            );
        }
        let before = current(driver)?;
        let context =
            CudaContext::new(ordinal).map_err(|e| from_cudarc("cuDevicePrimaryCtxRetain", e))?;
        if !before.is_null() && before != context.cu_ctx() {
            // cudarc made the primary context current: put the caller's own back.
            let mut popped = std::ptr::null_mut();
            // SAFETY: a context is current, so popping and pushing are balanced.
            driver.check("cuCtxPopCurrent", unsafe { (driver.f.ctx_pop)(&mut popped) })?;
            // SAFETY: `before` was current on this thread a moment ago.
            driver.check("cuCtxPushCurrent", unsafe { (driver.f.ctx_push)(before) })?;
        }
        Self::from_context(context)
    }

    /// The GPU of a context that the caller holds already.
    ///
    /// # Errors
    /// Those of [`Driver::get`], or a query that failed.
    pub fn from_context(context: Arc<CudaContext>) -> Result<Device, CudaError> {
        let driver = Driver::get()?;
        let properties = properties(driver, &context)?;
        Ok(Device { inner: Arc::new(Inner { driver, context, properties }) })
    }

    /// What the driver says about it.
    pub fn properties(&self) -> &DeviceProperties {
        &self.inner.properties
    }

    /// cudarc's handle of its context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.inner.context
    }

    /// Lowest and highest priority of streams, as `(least, greatest)`; the greatest is the smaller
    /// number.
    ///
    /// # Errors
    /// The driver's.
    pub fn priorities(&self) -> Result<(i32, i32), CudaError> {
        let (mut least, mut greatest) = (0, 0);
        let _current = self.make_current()?;
        // SAFETY: a context is current; both are valid for the call.
        self.check("cuCtxGetStreamPriorityRange", unsafe {
            (self.driver().f.ctx_priority_range)(&mut least, &mut greatest)
        })?;
        Ok((least, greatest))
    }

    /// A stream that does not synchronise with the default stream.
    ///
    /// # Errors
    /// The driver's.
    pub fn stream(&self, priority: i32) -> Result<Stream, CudaError> {
        Stream::create(self, priority)
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.inner.driver
    }

    pub(crate) fn cu_device(&self) -> CUdevice {
        self.inner.context.cu_device()
    }

    pub(crate) fn check(&self, operation: &'static str, code: c_int) -> Result<(), CudaError> {
        self.inner.driver.check(operation, code)
    }

    /// Makes the context current on this thread until the guard drops, then the one before it.
    ///
    /// # Errors
    /// The driver's.
    pub fn make_current(&self) -> Result<Current, CudaError> {
        Current::push(self.driver(), self.inner.context.cu_ctx())
    }

    /// Makes the context current on a thread that has none; leaves others alone.
    pub(crate) fn ensure_current(&self) -> Result<(), CudaError> {
        if current(self.driver())?.is_null() {
            self.inner.context.bind_to_thread().map_err(|e| from_cudarc("cuCtxSetCurrent", e))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.inner.properties).finish()
    }
}

/// A context made current on this thread; the one before it returns when this drops.
#[derive(Debug)]
pub struct Current {
    driver: &'static Driver,
}

impl Current {
    pub(crate) fn push(driver: &'static Driver, context: CUcontext) -> Result<Current, CudaError> {
        // SAFETY: the caller holds `context` for longer than the guard.
        driver.check("cuCtxPushCurrent", unsafe { (driver.f.ctx_push)(context) })?;
        Ok(Current { driver })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: pops what `push` pushed: guards live on one thread's stack and drop in reverse
        // order.
        let code = unsafe { (self.driver.f.ctx_pop)(&mut popped) };
        if code != 0 {
            tracing::warn!(code, "cuCtxPopCurrent failed");
        }
    }
}

fn current(driver: &Driver) -> Result<CUcontext, CudaError> {
    let mut context = std::ptr::null_mut();
    // SAFETY: the driver is initialised; `context` is valid for the call.
    driver.check("cuCtxGetCurrent", unsafe { (driver.f.ctx_get_current)(&mut context) })?;
    Ok(context)
}

pub(crate) fn from_cudarc(
    operation: &'static str,
    error: cudarc::driver::result::DriverError,
) -> CudaError {
    let code = error.0 as c_int;
    match Driver::get().and_then(|driver| driver.check(operation, code)) {
        Err(error) => error,
        Ok(()) => CudaError::Driver {
            operation,
            code,
            name: "no error".into(),
            detail: "cudarc reported a failure without a code".into(),
        },
    }
}

fn properties(driver: &Driver, context: &CudaContext) -> Result<DeviceProperties, CudaError> {
    let device = context.cu_device();
    let attribute = |which: c_int| -> Result<u32, CudaError> {
        let mut value = 0;
        // SAFETY: the driver is initialised; `value` is valid for the call.
        let code = unsafe { (driver.f.device_attribute)(&mut value, which, device) };
        driver.check("cuDeviceGetAttribute", code)?;
        Ok(value.max(0) as u32)
    };
    let major = attribute(CAPABILITY_MAJOR)?;
    let uuid = context.uuid().map_err(|e| from_cudarc("cuDeviceGetUuid", e))?;
    Ok(DeviceProperties {
        ordinal: context.ordinal(),
        name: context.name().map_err(|e| from_cudarc("cuDeviceGetName", e))?,
        uuid: uuid.bytes.map(|byte| byte as u8),
        pci: (attribute(PCI_DOMAIN)?, attribute(PCI_BUS)?, attribute(PCI_DEVICE)?),
        capability: (major, attribute(CAPABILITY_MINOR)?),
        sms: attribute(SM_COUNT)?,
        shared_per_block: attribute(SHARED_PER_BLOCK_OPTIN)?,
        shared_per_sm: attribute(SHARED_PER_SM)?,
        shared_reserved: attribute(SHARED_RESERVED)?,
        l2_bytes: attribute(L2_BYTES)?,
        clusters: attribute(CLUSTER_LAUNCH)? != 0,
        cooperative: attribute(COOPERATIVE)? != 0,
        driver: driver.version(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_read_as_nvml_writes_them() {
        let uuid = std::array::from_fn(|i| i as u8 * 16 + 1);
        let device = DeviceProperties { uuid, ..DeviceProperties::h200() };
        assert_eq!(device.uuid_text(), "GPU-01112131-4151-6171-8191-a1b1c1d1e1f1");
    }
}
