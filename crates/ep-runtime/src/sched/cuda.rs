//! The scheduler's device on CUDA: green contexts, and where clusters fit.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUstream;
use ep_kernels::cuda::{
    Compiler, CudaError, Device, EventPool, GreenContext, ObserveOptions, SmObservations,
    SmResource, SmTools, SplitFlags, Stream,
};
use ep_topology::{Launch, SmCache, SmMap, SmObservation};
use ep_transport::Queue;
use parking_lot::Mutex;

use super::carve::{Carver, NoPart, SmDevice};
use super::lease::SmBudget;
use super::policy::SmPolicy;
use super::reserve::{Reservation, reserve};
use crate::{Ep, EpError, Result};

/// `CUDA_ERROR_NOT_PERMITTED`, `CUDA_ERROR_NOT_SUPPORTED` and `CUDA_ERROR_INVALID_RESOURCE_TYPE`: what
/// drivers say where a device cannot be partitioned at all.
const NONE_HERE: [i32; 3] = [800, 801, 914];

/// What ep-kernels says is not supported where the driver lacks all of it.
const NO_PARTITIONS: &str = "green context";

pub(crate) type CudaReservation = Reservation<CudaSms>;

/// A GPU whose SMs can be set aside.
#[derive(Debug)]
pub(crate) struct CudaSms {
    device: Device,
}

/// Some SMs of a GPU, and the context that runs on them once one is needed.
#[derive(Debug)]
pub(crate) struct CudaPart {
    sms: SmResource,
    context: Mutex<Option<GreenContext>>,
}

impl CudaPart {
    fn new(sms: SmResource) -> Self {
        Self { sms, context: Mutex::new(None) }
    }

    fn context(&self) -> Result<GreenContext, CudaError> {
        let mut context = self.context.lock();
        if let Some(context) = &*context {
            return Ok(context.clone());
        }
        let new = GreenContext::new(&self.sms)?;
        *context = Some(new.clone());
        Ok(new)
    }
}

impl CudaReservation {
    /// Whether it is of this GPU.
    pub fn is_on(&self, device: &Device) -> bool {
        self.carver.device.device.properties().uuid == device.properties().uuid
    }

    /// A stream for communication: in the partition, if there is one.
    pub fn stream(&self, priority: i32) -> Result<Stream, CudaError> {
        match &self.partition {
            Some(partition) => partition.part().context()?.stream(priority),
            None => self.carver.device.device.stream(priority),
        }
    }
}

impl CudaSms {
    /// A driver that splits but makes no contexts, or whose partitions' streams do not take part in the
    /// order of others, has to be known now.
    fn try_out(&self, part: &CudaPart) -> Result<(), CudaError> {
        let stream = part.context()?.stream(0)?;
        let outside = self.device.stream(0)?;
        let events = EventPool::new(&self.device, 0, false)?;
        // SAFETY: both streams are live.
        let ordered = unsafe {
            let there = events.record(outside.raw()).and_then(|e| e.order(stream.raw()));
            let back = there.and_then(|()| events.record(stream.raw())?.order(outside.raw()));
            // Callers' queues are checked in this way.
            back.and_then(|()| self.device.check_stream("build", stream.raw()))
        };
        ordered.map_err(|e| CudaError::Unsupported {
            operation: NO_PARTITIONS,
            reason: format!("streams of a partition do not work with others: {e}"),
        })
    }

    fn uuid(&self) -> String {
        self.device.properties().uuid_text()
    }
}

fn no_part(error: CudaError) -> NoPart {
    let missing = match &error {
        CudaError::Unsupported { operation, .. } => *operation == NO_PARTITIONS,
        CudaError::Driver { code, .. } => NONE_HERE.contains(code),
        CudaError::SymbolMissing { .. } | CudaError::TooOld { .. } => true,
        _ => false,
    };
    let why = error.to_string();
    if missing { NoPart::Missing(why) } else { NoPart::Refused(why) }
}

impl SmDevice for CudaSms {
    type Part = CudaPart;

    fn sms(&self) -> u32 {
        self.device.properties().sms
    }

    fn split(
        &self,
        from: Option<&CudaPart>,
        sms: u32,
    ) -> Result<(CudaPart, Option<CudaPart>), NoPart> {
        let split = || {
            let whole = match from {
                Some(part) => part.sms.clone(),
                None => self.device.sm_resource()?,
            };
            // Co-scheduled SMs stay together: compute's clusters need them.
            let (parts, rest) = whole.split(1, sms, SplitFlags::empty())?;
            let part = parts.into_iter().next().map(CudaPart::new);
            let part = part.ok_or_else(|| CudaError::Unsupported {
                operation: "cuDevSmResourceSplitByCount",
                reason: format!("no part of {sms} SMs"),
            })?;
            self.try_out(&part)?;
            Ok((part, rest.map(CudaPart::new)))
        };
        split().map_err(no_part)
    }

    fn size(&self, part: &CudaPart) -> u32 {
        part.sms.sms()
    }

    fn map(&self) -> Result<SmMap, String> {
        let cache = SmCache::of_user();
        let (uuid, driver) = (self.uuid(), format!("cuda-{}", self.device.properties().driver));
        let known = cache.as_ref().and_then(|cache| cache.load(&uuid, &driver));
        if let Some(map) = known.filter(|map| map.sm_count() == self.sms()) {
            return Ok(map);
        }
        let seen = Compiler::get()
            .and_then(|compiler| SmTools::load(&self.device, compiler))
            .and_then(|tools| tools.observe(&ObserveOptions::default()))
            .map_err(|e| e.to_string())?;
        let map = SmMap::new(sm_observation(&seen)).map_err(|e| e.to_string())?;
        if let Some(Err(error)) = cache.map(|cache| cache.store(&uuid, &driver, &map)) {
            tracing::warn!("the map of SMs is not kept: {error}");
        }
        Ok(map)
    }
}

/// What the probe saw, in ep-topology's terms. Size 1 says nothing about neighbours; sizes at which
/// nothing runs stay as 0 active clusters.
pub fn sm_observation(seen: &SmObservations) -> SmObservation {
    let clustered = || seen.sizes.iter().filter(|size| size.size > 1);
    SmObservation {
        sm_count: seen.device.sms,
        clusters: clustered().map(|size| (size.size, size.clusters.clone())).collect(),
        max_active_clusters: seen.sizes.iter().map(|size| (size.size, size.max_active)).collect(),
        together: Vec::new(),
        left_free: seen.left_free.clone(),
    }
}

/// The one carver of each GPU, so that no two layers of the process overlap.
fn carver(device: &Device) -> Result<Arc<Carver<CudaSms>>> {
    static ALL: Mutex<Vec<Arc<Carver<CudaSms>>>> = Mutex::new(Vec::new());
    let mut all = ALL.lock();
    let same = |known: &&Arc<Carver<CudaSms>>| {
        known.device.device.properties().uuid == device.properties().uuid
    };
    if let Some(known) = all.iter().find(same) {
        return Ok(known.clone());
    }
    let device = CudaSms { device: device.clone() };
    let budget = SmBudget::of(&device.uuid(), device.sms())?;
    let new = Arc::new(Carver::new(device, budget));
    all.push(new.clone());
    Ok(new)
}

/// [`reserve`] on a GPU.
pub(crate) fn reserve_on_gpu(
    device: &Device,
    holder: &str,
    asked: SmPolicy,
    blocks: u32,
    launches: &[Launch],
) -> Result<CudaReservation> {
    reserve(&carver(device)?, holder, asked, blocks, launches)
}

/// A stream for compute, on the SMs that no partition has. While it lives no further partition is cut
/// from them.
#[derive(Debug)]
pub struct ComputeStream {
    stream: Stream,
    ordinal: usize,
    _part: Option<Arc<CudaPart>>,
}

impl ComputeStream {
    /// The driver's handle: what kernels and libraries are launched into. Valid while this lives.
    pub fn raw(&self) -> CUstream {
        self.stream.raw()
    }

    /// It as ep-kernels has it.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// SMs it runs on.
    pub fn sms(&self) -> u32 {
        match self.stream.green_context() {
            Some(context) => context.sms(),
            None => self.stream.device().properties().sms,
        }
    }

    /// It as the queue of this crate's calls.
    ///
    /// # Safety
    /// This value outlives the queue, its clones and all work submitted to them.
    pub unsafe fn queue(&self) -> Queue {
        // SAFETY: by this function's contract.
        unsafe { Queue::from_raw(self.raw().cast(), self.ordinal) }
    }

    /// It as a stream of cudarc. cudarc's own calls make its primary context current; kernels run on
    /// the stream's SMs nevertheless. Memory that cudarc allocates on it is of the primary context.
    ///
    /// # Safety
    /// This value outlives what is returned, its clones and all work submitted to them.
    pub unsafe fn cudarc(&self) -> Arc<CudaStream> {
        // SAFETY: the stream belongs to the context or to a partition of it, which shares its memory
        // and kernels, and lives long enough by this function's contract.
        unsafe { self.stream.device().context().wrap_borrowed_stream(self.raw()) }
    }
}

impl Ep {
    /// A stream on the SMs that no layer of this process has set aside as a partition; on all where
    /// none is. Build all layers first: while such a stream lives, no further partition is cut.
    ///
    /// `priority` as CUDA has it: 0 is the least, smaller numbers are greater.
    ///
    /// # Errors
    /// A layer on the host, or the driver's.
    pub fn compute_stream(&self, priority: i32) -> Result<ComputeStream> {
        let Some(reservation) = &self.inner.sms.reservation else {
            return Err(EpError::argument("compute_stream", "the layer works on the host"));
        };
        let carver = &reservation.carver;
        let device = &carver.device.device;
        let ordinal = device.properties().ordinal;
        let part = carver.compute();
        let stream = match &part {
            Some(part) => part.context()?.stream(priority)?,
            None => device.stream(priority)?,
        };
        Ok(ComputeStream { stream, ordinal, _part: part })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_driver_without_partitions_means_a_margin() {
        let driver = |code| CudaError::Driver {
            operation: "cuGreenCtxCreate",
            code,
            name: "E".into(),
            detail: String::new(),
        };
        let old = CudaError::Unsupported { operation: "green context", reason: "old".into() };
        assert!(matches!(no_part(old), NoPart::Missing(_)));
        assert!(matches!(no_part(driver(801)), NoPart::Missing(_)));
        // CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: this size does not fit.
        assert!(matches!(no_part(driver(915)), NoPart::Refused(_)));
        let full = CudaError::InvalidArgument { operation: "split", reason: "200 of 132".into() };
        assert!(matches!(no_part(full), NoPart::Refused(_)));
    }
}
