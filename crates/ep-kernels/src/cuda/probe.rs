//! The SM probe: where the blocks of a launch run.

use std::sync::Arc;
use std::time::Duration;

use super::compile::{Arch, Compiler};
use super::device::{Device, DeviceProperties};
use super::error::{CudaError, invalid};
use super::holder::{HOLDER, HoldRecord};
use super::launch::{LaunchAttributes, LaunchConfig};
use super::memory::{Lease, Plain, Pool};
use super::module::{Kernel, KernelParams, Module};
use super::source::{KernelSource, layout};
use super::stream::Stream;

pub(crate) static SM_PROBE: KernelSource = KernelSource {
    name: "sm_probe.cu",
    kernels: &["sm_probe"],
    shared: &[],
    text: include_str!("../../kernels/sm_probe.cu"),
    layouts: &[
        layout!(ProbeRecord {
            start_ns,
            smid,
            nsmid,
            cluster,
            cluster_size,
            cluster_rank,
            written
        }),
        layout!(ProbeParams { records, hold_ns, record_count, reserved }),
    ],
};

/// Where one block of the probe ran.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProbeRecord {
    /// The GPU's global timer when the block started, nanoseconds.
    pub start_ns: u64,
    /// `%smid`.
    pub smid: u32,
    /// `%nsmid`: ids are below it, but need not be contiguous.
    pub nsmid: u32,
    /// The cluster's number in the grid; the block's own where there are no clusters.
    pub cluster: u32,
    /// Blocks in that cluster.
    pub cluster_size: u32,
    /// The block's number in its cluster.
    pub cluster_rank: u32,
    /// 1 once the block has run.
    pub written: u32,
}

// SAFETY: repr(C), integers only, no padding (8 + 6 * 4).
unsafe impl Plain for ProbeRecord {}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct ProbeParams {
    records: u64,
    hold_ns: u64,
    record_count: u32,
    reserved: u32,
}

// SAFETY: repr(C), integers only, no padding (8 + 8 + 4 + 4).
unsafe impl Plain for ProbeParams {}
// SAFETY: the struct of kernels/sm_probe.cu, whose layout checks are compiled against this one's.
unsafe impl KernelParams for ProbeParams {}

const _: () = assert!(size_of::<ProbeRecord>() == 32 && size_of::<ProbeParams>() == 24);
const _: () = assert!(std::mem::offset_of!(ProbeRecord, written) == 28);
const _: () = assert!(std::mem::offset_of!(ProbeParams, record_count) == 16);

/// Longest a probe's blocks may be told to stay.
const LONGEST_PROBE: Duration = Duration::from_secs(1);
/// Pieces of memory for records allocated ahead, and how many records each holds.
const AHEAD: (usize, usize) = (2, 1024);

/// A launch of the SM probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeSpec {
    /// Blocks of 32 threads.
    pub blocks: u32,
    /// Attributes of the launch.
    pub attributes: LaunchAttributes,
    /// How long each block stays after its start; at most a second.
    pub hold: Duration,
    /// Dynamic shared memory per block, bytes. `None`: all there is, so that an SM holds one block.
    pub shared_bytes: Option<u32>,
}

impl ProbeSpec {
    /// `blocks` blocks, one per SM, which stay 100 µs: longer than it takes to place a grid.
    pub fn one_per_sm(blocks: u32, attributes: LaunchAttributes) -> Self {
        ProbeSpec { blocks, attributes, hold: Duration::from_micros(100), shared_bytes: None }
    }
}

/// The kernels that observe and occupy SMs, loaded on a device.
#[derive(Debug, Clone)]
pub struct SmTools {
    pub(crate) device: Device,
    pub(crate) probe: Kernel,
    pub(crate) holder: Kernel,
    pub(crate) probe_records: Arc<Pool<ProbeRecord>>,
    pub(crate) hold_records: Arc<Pool<HoldRecord>>,
}

impl SmTools {
    /// Compiles them, or takes them from the cache, and loads them.
    ///
    /// # Errors
    /// A device older than compute capability 8.0, or a failure of compiler or driver.
    pub fn load(device: &Device, compiler: &Compiler) -> Result<SmTools, CudaError> {
        let arch = Arch::of(device.properties())?;
        let load = |source: &KernelSource| -> Result<Kernel, CudaError> {
            Module::load(device, &compiler.cubin(source, arch)?)?.kernel(source.kernels[0])
        };
        Ok(SmTools {
            device: device.clone(),
            probe: load(&SM_PROBE)?,
            holder: load(&HOLDER)?,
            probe_records: Pool::new(device, AHEAD.0, AHEAD.1)?,
            hold_records: Pool::new(device, AHEAD.0, AHEAD.1)?,
        })
    }

    /// The device they are loaded on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The probe's kernel, for occupancy queries.
    pub fn probe_kernel(&self) -> &Kernel {
        &self.probe
    }

    /// The holder's kernel, for occupancy queries.
    pub fn holder_kernel(&self) -> &Kernel {
        &self.holder
    }

    /// The launch that `spec` stands for.
    pub fn probe_config(&self, spec: &ProbeSpec) -> LaunchConfig {
        let shared_bytes =
            spec.shared_bytes.unwrap_or(whole_sm(self.device.properties(), &self.probe));
        LaunchConfig { grid: spec.blocks, block: 32, shared_bytes, attributes: spec.attributes }
    }

    /// Launches the probe and returns at once.
    ///
    /// # Errors
    /// A hold of more than a second, those of [`LaunchConfig::validate`], or the driver's.
    pub fn start_probe<'s>(
        &self,
        stream: &'s Stream,
        spec: &ProbeSpec,
    ) -> Result<ProbeRun<'s>, CudaError> {
        if spec.hold > LONGEST_PROBE {
            return invalid(
                "start_probe",
                format!("a hold of {:?}; at most {LONGEST_PROBE:?}", spec.hold),
            );
        }
        let config = self.probe_config(spec);
        config.validate(self.device.properties())?;
        let records = self.probe_records.take(spec.blocks as usize)?;
        let at = (records.device_address(), records.len());
        self.launch_probe(stream, &config, spec.hold, at)?;
        Ok(ProbeRun { stream, pending: Some((records, self.probe.clone())) })
    }

    pub(crate) fn launch_probe(
        &self,
        stream: &Stream,
        config: &LaunchConfig,
        hold: Duration,
        (address, len): (u64, usize),
    ) -> Result<(), CudaError> {
        let params = ProbeParams {
            records: address,
            hold_ns: hold.as_nanos() as u64,
            record_count: len as u32,
            reserved: 0,
        };
        // SAFETY: `address` is that of `len` records, which are freed or used again only after the
        // stream has completed (or never); the kernel writes nothing else.
        unsafe { self.probe.launch(stream.raw(), config, &params) }
    }
}

/// All the shared memory a block of this kernel may have, so that an SM holds no second block of
/// any kernel that needs some too.
pub(crate) fn whole_sm(properties: &DeviceProperties, kernel: &Kernel) -> u32 {
    properties.shared_per_block.saturating_sub(kernel.resources().shared_bytes)
}

/// A probe that was launched. Dropping it waits a little; what the GPU may still write is never
/// freed.
#[derive(Debug)]
pub struct ProbeRun<'s> {
    stream: &'s Stream,
    // The kernel too: its code must stay loaded while it runs.
    pending: Option<(Lease<ProbeRecord>, Kernel)>,
}

impl ProbeRun<'_> {
    /// Whether the stream has completed.
    ///
    /// # Errors
    /// A failure on the device.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.stream.is_idle()
    }

    /// Waits for the stream and returns a record per block.
    ///
    /// # Errors
    /// Not done in time, a failure on the device, or a block that did not run.
    pub fn finish(mut self, limit: Duration) -> Result<Vec<ProbeRecord>, CudaError> {
        self.stream.wait("SM probe", limit)?;
        let Some((records, _)) = self.pending.take() else { return Ok(Vec::new()) };
        let list: Vec<_> = (0..records.len()).filter_map(|block| records.read(block)).collect();
        if let Some(block) = list.iter().position(|record| record.written != 1) {
            return inconsistent(format!("block {block} of {} left no record", list.len()));
        }
        Ok(list)
    }
}

impl Drop for ProbeRun<'_> {
    fn drop(&mut self) {
        let limit = LONGEST_PROBE + LONGEST_PROBE;
        if self.pending.is_some() && self.stream.wait("SM probe", limit).is_err() {
            std::mem::forget(self.pending.take());
        }
    }
}

pub(crate) fn inconsistent<T>(reason: String) -> Result<T, CudaError> {
    Err(CudaError::Inconsistent { operation: "SM probe", reason })
}
