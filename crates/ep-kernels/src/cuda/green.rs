//! Green contexts: disjoint parts of a device's SMs.

use std::ffi::c_uint;
use std::fmt;
use std::sync::Arc;

use bitflags::bitflags;
use cudarc::driver::sys::CUcontext;

use super::device::{Current, Device};
use super::driver::{CuGreenCtx, RawSmResource};
use super::error::{CudaError, invalid};
use super::stream::{NON_BLOCKING, Stream};

/// `CU_DEV_RESOURCE_TYPE_SM`.
const TYPE_SM: c_uint = 1;
/// `CU_GREEN_CTX_DEFAULT_STREAM`, which the driver requires.
const DEFAULT_STREAM: c_uint = 1;

bitflags! {
    /// How SMs are split. `CUdevSmResourceSplitByCount_flags`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct SplitFlags: u32 {
        /// Finer parts, whose SMs may be unable to hold the clusters they could hold otherwise.
        const IGNORE_COSCHEDULING = 1;
        /// Parts that hold the largest clusters possible.
        const MAX_CLUSTER = 2;
    }
}

/// A set of SMs, as the driver describes it.
#[derive(Clone)]
pub struct SmResource {
    raw: RawSmResource,
    device: Device,
}

impl SmResource {
    /// Number of SMs.
    pub fn sms(&self) -> u32 {
        self.raw.sm_count
    }

    /// The smallest part that can be split off, SMs. 0: the driver (older than CUDA 13.0) does not
    /// say.
    pub fn min_partition(&self) -> u32 {
        self.raw.min_partition
    }

    /// Parts whose SMs are scheduled together are multiples of this. 0: the driver does not say.
    pub fn alignment(&self) -> u32 {
        self.raw.coscheduled_alignment
    }

    /// Splits off `groups` parts of at least `sms` SMs each. The driver rounds up (on compute
    /// capability 9.0 to multiples of 8): ask each part for its [`SmResource::sms`]. Also returns
    /// what remains, if anything.
    ///
    /// # Errors
    /// More SMs than there are, fewer parts possible than asked for, a driver without green
    /// contexts, or its refusal.
    pub fn split(
        &self,
        groups: u32,
        sms: u32,
        flags: SplitFlags,
    ) -> Result<(Vec<SmResource>, Option<SmResource>), CudaError> {
        const OP: &str = "cuDevSmResourceSplitByCount";
        let fits = groups.checked_mul(sms).is_some_and(|all| all <= self.sms());
        if groups == 0 || sms == 0 || !fits {
            return invalid(OP, format!("{groups} parts of {sms} SMs out of {}", self.sms()));
        }
        let split = needed(&self.device, self.device.driver().f.split_by_count, OP)?;
        let mut parts = vec![empty(); groups as usize];
        let mut rest = empty();
        let mut made = groups;
        // SAFETY: `parts` has room for `made` resources; all pointers are valid for the call.
        self.device.check(OP, unsafe {
            split(parts.as_mut_ptr(), &mut made, &self.raw, &mut rest, flags.bits(), sms)
        })?;
        if made < groups {
            let reason =
                format!("only {made} of {groups} parts of {sms} SMs fit in {}", self.sms());
            return Err(CudaError::Unsupported { operation: OP, reason });
        }
        let with_device = |raw| SmResource { raw, device: self.device.clone() };
        let rest = (rest.kind == TYPE_SM && rest.sm_count > 0).then(|| with_device(rest));
        Ok((parts.into_iter().map(with_device).collect(), rest))
    }
}

impl fmt::Debug for SmResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SmResource")
            .field("sms", &self.sms())
            .field("min_partition", &self.min_partition())
            .field("alignment", &self.alignment())
            .finish()
    }
}

impl Device {
    /// All SMs of the device, to be split.
    ///
    /// # Errors
    /// A driver without green contexts, or its refusal.
    pub fn sm_resource(&self) -> Result<SmResource, CudaError> {
        const OP: &str = "cuDeviceGetDevResource";
        let get = needed(self, self.driver().f.device_resource, OP)?;
        let mut raw = empty();
        // SAFETY: `raw` has the size of the driver's struct.
        self.check(OP, unsafe { get(self.cu_device(), &mut raw, TYPE_SM) })?;
        Ok(SmResource { raw, device: self.clone() })
    }
}

/// A context whose streams run on a part of the SMs. Its streams keep it alive.
///
/// It shares memory and kernels with the primary context.
#[derive(Clone)]
pub struct GreenContext {
    inner: Arc<Inner>,
}

struct Inner {
    handle: CuGreenCtx,
    context: CUcontext,
    device: Device,
    sms: u32,
}

// SAFETY: driver handles may be used from any thread, and nothing here changes after creation.
unsafe impl Send for Inner {}
// SAFETY: driver handles may be used from any thread, and nothing here changes after creation.
unsafe impl Sync for Inner {}

impl GreenContext {
    /// A context on these SMs.
    ///
    /// # Errors
    /// A driver without green contexts, or its refusal.
    pub fn new(part: &SmResource) -> Result<GreenContext, CudaError> {
        let device = &part.device;
        let f = &device.driver().f;
        let describe = needed(device, f.resource_desc, "cuDevResourceGenerateDesc")?;
        let create = needed(device, f.green_create, "cuGreenCtxCreate")?;
        needed(device, f.green_destroy, "cuGreenCtxDestroy")?;
        let as_context = needed(device, f.green_context, "cuCtxFromGreenCtx")?;
        let mut raw = part.raw;
        let mut desc = std::ptr::null_mut();
        // SAFETY: one resource that the driver itself described.
        device.check("cuDevResourceGenerateDesc", unsafe { describe(&mut desc, &mut raw, 1) })?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `desc` was just made for this device, whose primary context `device` retains.
        device.check("cuGreenCtxCreate", unsafe {
            create(&mut handle, desc, device.cu_device(), DEFAULT_STREAM)
        })?;
        // From here on dropping `inner` destroys it.
        let mut inner = Inner {
            handle,
            context: std::ptr::null_mut(),
            device: device.clone(),
            sms: part.sms(),
        };
        // SAFETY: `handle` is live; the context lives as long.
        device.check("cuCtxFromGreenCtx", unsafe { as_context(&mut inner.context, handle) })?;
        inner.sms = inner.granted()?.unwrap_or(inner.sms);
        Ok(GreenContext { inner: Arc::new(inner) })
    }

    /// Number of SMs it has.
    pub fn sms(&self) -> u32 {
        self.inner.sms
    }

    /// The driver's context, valid while this lives.
    pub fn context(&self) -> CUcontext {
        self.inner.context
    }

    /// A stream that runs on these SMs.
    ///
    /// # Errors
    /// The driver's.
    pub fn stream(&self, priority: i32) -> Result<Stream, CudaError> {
        let device = &self.inner.device;
        let f = &device.driver().f;
        let mut raw = std::ptr::null_mut();
        if let Some(create) = f.green_stream {
            // SAFETY: the green context is live; `raw` is valid for the call.
            let code = unsafe { create(&mut raw, self.inner.handle, NON_BLOCKING, priority) };
            device.check("cuGreenCtxStreamCreate", code)?;
        } else {
            // The first drivers with green contexts make their streams through the context itself.
            let _current = Current::push(device.driver(), self.inner.context)?;
            // SAFETY: the context is current; `raw` is valid for the call.
            let code = unsafe { (f.stream_create)(&mut raw, NON_BLOCKING, priority) };
            device.check("cuStreamCreateWithPriority", code)?;
        }
        Ok(Stream::of_green(raw, device.clone(), self.clone()))
    }
}

impl Inner {
    fn granted(&self) -> Result<Option<u32>, CudaError> {
        let Some(get) = self.device.driver().f.green_resource else { return Ok(None) };
        let mut raw = empty();
        // SAFETY: the green context is live; `raw` has the size of the driver's struct.
        let code = unsafe { get(self.handle, &mut raw, TYPE_SM) };
        self.device.check("cuGreenCtxGetDevResource", code)?;
        Ok(Some(raw.sm_count))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Some(destroy) = self.device.driver().f.green_destroy else { return };
        // SAFETY: created once, destroyed once, after its streams.
        let code = unsafe { destroy(self.handle) };
        if code != 0 {
            tracing::warn!(code, "cuGreenCtxDestroy failed");
        }
    }
}

impl fmt::Debug for GreenContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GreenContext").field("sms", &self.sms()).finish_non_exhaustive()
    }
}

fn empty() -> RawSmResource {
    RawSmResource {
        kind: 0,
        internal: [0; 92],
        sm_count: 0,
        min_partition: 0,
        coscheduled_alignment: 0,
        rest: [0; 36],
    }
}

fn needed<F>(device: &Device, function: Option<F>, name: &'static str) -> Result<F, CudaError> {
    function.ok_or_else(|| CudaError::Unsupported {
        operation: "green context",
        reason: format!(
            "the driver (CUDA {}) has no {name}; install driver 550 (CUDA 12.4) or newer",
            device.driver().version()
        ),
    })
}

#[cfg(test)]
mod tests {
    use cudarc::driver::sys;

    use super::*;

    /// Against cudarc's bindings of whichever CUDA version they were built for.
    #[test]
    fn resource_layout_agrees_with_the_bindings_of_cuda_h() {
        assert_eq!(size_of::<RawSmResource>(), size_of::<sys::CUdevResource>());
        assert_eq!(TYPE_SM, sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM as u32);
        let mut raw = empty();
        raw.kind = TYPE_SM;
        raw.sm_count = 132;
        // SAFETY: same size (asserted above), the type is one of the enum's, and the pointer of
        // later versions at the end is null.
        let theirs = unsafe { *std::ptr::from_ref(&raw).cast::<sys::CUdevResource>() };
        assert_eq!(theirs.type_, sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM);
        // SAFETY: the union holds the SM resource.
        assert_eq!(unsafe { theirs.__bindgen_anon_1.sm.smCount }, 132);
    }

    #[test]
    fn split_flags_are_the_drivers() {
        assert_eq!(SplitFlags::IGNORE_COSCHEDULING.bits(), 1);
        assert_eq!(SplitFlags::MAX_CLUSTER.bits(), 2);
    }
}
