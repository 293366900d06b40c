//! The study's device: a GPU.

use std::time::{Duration, Instant};

use ep_kernels::cuda::{
    Compiler, CudaError, Device, HoldSpec, KernelParams, LaunchAttributes, MappedHost,
    ObserveOptions, Plain, ProbeRecord, ProbeSpec, SmSet, SmTools, Stream,
};
use ep_topology::{Launch, SmObservation};

use super::lab::{Held, Lab, Trial};
use crate::{BenchError, Result};
use ep_runtime::sched::sm_observation;

/// Bound of each wait for the GPU.
const LIMIT: Duration = Duration::from_secs(5);
/// How long SMs are held at first: long beside the tens of microseconds in which a launch starts.
const HOLD: Duration = Duration::from_millis(2);
/// SMs are never held longer: other users of the GPU wait that long too.
const LONGEST: Duration = Duration::from_millis(32);
/// How long blocks stay beyond that, so that none makes room for another of its launch in time.
const LONGER: Duration = Duration::from_micros(500);
/// How often a trial is repeated when the host was too slow; SMs are held twice as long from then on.
const TRIES: u32 = 6;

/// The parameters of the SM probe, laid out as in kernels/sm_probe.cu: launched from here, so that nothing is
/// allocated between holding and launching.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ProbeParams {
    records: u64,
    hold_ns: u64,
    record_count: u32,
    reserved: u32,
}

// SAFETY: repr(C), integers only, no padding (8 + 8 + 4 + 4).
unsafe impl Plain for ProbeParams {}
// SAFETY: the struct of kernels/sm_probe.cu; a test compares it with the layout that source is compiled against.
unsafe impl KernelParams for ProbeParams {}

/// A GPU with the kernels that hold and probe SMs.
#[derive(Debug)]
pub struct GpuLab {
    tools: SmTools,
    holding: Stream,
    beside: Stream,
    /// Gone after a launch that did not end: the GPU may still write them.
    records: Option<MappedHost<ProbeRecord>>,
    /// Every SM id, once observed.
    sms: Vec<u32>,
    /// How long SMs are held.
    hold: Duration,
}

fn failed(error: CudaError) -> BenchError {
    BenchError::Tool { op: "margin", detail: error.to_string() }
}

fn odd<T>(detail: String) -> Result<T> {
    Err(BenchError::Tool { op: "margin", detail })
}

impl GpuLab {
    /// Opens a GPU.
    ///
    /// # Errors
    /// No driver, no compiler, no such GPU.
    pub fn open(ordinal: usize) -> Result<Self> {
        let open = || -> std::result::Result<Self, CudaError> {
            let device = Device::open(ordinal)?;
            let tools = SmTools::load(&device, Compiler::get()?)?;
            let (least, greatest) = device.priorities()?;
            Ok(Self {
                holding: device.stream(least)?,
                beside: device.stream(greatest)?,
                records: Some(MappedHost::zeroed(&device, device.properties().sms as usize)?),
                sms: Vec::new(),
                hold: HOLD,
                tools,
            })
        };
        open().map_err(failed)
    }

    fn count(&self) -> u32 {
        self.tools.device().properties().sms
    }

    fn spec(&self, held: &Held, hold: Duration) -> Result<HoldSpec> {
        Ok(match held {
            Held::AllButSome(free) if (1..self.count()).contains(free) => {
                HoldSpec::anywhere(self.count() - free, hold)
            }
            Held::AllButSome(free) => return odd(format!("{free} free SMs of {}", self.count())),
            Held::AllBut(free) => {
                let chosen = SmSet::all_but(free.iter().copied()).map_err(failed)?;
                HoldSpec::chosen(self.count(), chosen, hold)
            }
        })
    }

    /// One try; `None` if the host launched so late, or the SMs held were so few, that it says nothing.
    fn attempt(&mut self, held: &Held, launch: Launch, hold: Duration) -> Result<Option<Trial>> {
        let mut attributes = LaunchAttributes::plain();
        if launch.cluster > 1 {
            attributes = attributes.with_cluster(launch.cluster);
        }
        if launch.cooperative {
            attributes = attributes.with_cooperative();
        }
        let config = self.tools.probe_config(&ProbeSpec::one_per_sm(launch.blocks, attributes));
        let spec = self.spec(held, hold)?;
        let Some(records) = self.records.take() else {
            return odd("an earlier launch did not end".into());
        };
        if launch.blocks as usize > records.len() {
            return odd(format!("{} blocks on {} SMs", launch.blocks, records.len()));
        }
        records.clear();
        let params = ProbeParams {
            records: records.device_address(),
            hold_ns: (hold + LONGER).as_nanos() as u64,
            record_count: launch.blocks,
            reserved: 0,
        };
        let holder = self.tools.hold(&self.holding, &spec).map_err(failed)?;
        let start = Instant::now();
        let busy = holder.wait_holding(LIMIT).map_err(failed)?;
        // SAFETY: the stream is of the kernel's device; `records` holds `record_count` records and is freed only
        // after the stream has completed (or never); the kernel is loaded while `self.tools` lives.
        let launched =
            unsafe { self.tools.probe_kernel().launch(self.beside.raw(), &config, &params) };
        let in_time = start.elapsed() < hold / 2;
        launched.map_err(failed)?;
        if let Err(error) = self.beside.wait("margin probe", LIMIT) {
            records.leak();
            std::mem::forget(self.tools.clone());
            return Err(failed(error));
        }
        let report = holder.finish(LIMIT).map_err(failed)?;
        let seen = (0..launch.blocks as usize).filter_map(|block| records.read(block));
        let list: Vec<ProbeRecord> = seen.collect();
        self.records = Some(records);
        if let Some(block) = list.iter().position(|record| record.written != 1) {
            return odd(format!("block {block} of {} left no record", launch.blocks));
        }
        let free = match held {
            Held::AllButSome(free) => *free,
            Held::AllBut(free) => free.len() as u32,
        };
        if !in_time || busy.len() as u32 != self.count() - free || has_duplicates(&busy) {
            return Ok(None);
        }
        let early = list.iter().filter(|record| record.start_ns < report.first_end_ns).count();
        Ok(Some(Trial { started: early as u32, blocks: launch.blocks }))
    }
}

fn has_duplicates(ascending: &[u32]) -> bool {
    ascending.windows(2).any(|pair| pair[0] == pair[1])
}

impl Lab for GpuLab {
    fn name(&self) -> String {
        self.tools.device().properties().name.clone()
    }

    fn observe(&mut self) -> Result<SmObservation> {
        let mut options = ObserveOptions::default();
        options.margins = 1;
        let seen = self.tools.observe(&options).map_err(failed)?;
        self.sms = seen.sm_ids.clone();
        Ok(sm_observation(&seen))
    }

    fn left_free(&mut self, free: u32) -> Result<Vec<u32>> {
        let spec = self.spec(&Held::AllButSome(free), Duration::from_micros(300))?;
        for _ in 0..TRIES {
            let holder = self.tools.hold(&self.holding, &spec).map_err(failed)?;
            let busy = holder.finish(LIMIT).map_err(failed)?.held;
            if busy.len() as u32 == spec.blocks && !has_duplicates(&busy) {
                return Ok(self.sms.iter().copied().filter(|sm| !busy.contains(sm)).collect());
            }
        }
        odd(format!(
            "a holder of {} SMs does not get an SM for each block: is the GPU idle?",
            spec.blocks
        ))
    }

    fn trial(&mut self, held: &Held, launch: Launch) -> Result<Trial> {
        for _ in 0..TRIES {
            if let Some(trial) = self.attempt(held, launch, self.hold)? {
                return Ok(trial);
            }
            self.hold = (self.hold * 2).min(LONGEST);
        }
        odd(format!(
            "{launch:?} beside {held:?}: the launch was never submitted in time within {:?}, or SMs were not \
             all held: is the GPU idle?",
            self.hold
        ))
    }
}

#[cfg(test)]
mod tests {
    use ep_kernels::cuda::KernelSource;

    use super::*;

    /// The kernel's source is compiled against ep-kernels' struct; this one must be the same.
    #[test]
    fn the_probes_parameters_are_laid_out_as_its_source_says() {
        let source =
            KernelSource::all().iter().find(|source| source.name == "sm_probe.cu").unwrap();
        let text = source.assemble();
        let has = |name: &str, value: usize| {
            assert!(text.contains(&format!("#define EP_{name} {value}\n")), "{name} {value}");
        };
        has("SIZE_ProbeParams", size_of::<ProbeParams>());
        has("AT_ProbeParams_records", std::mem::offset_of!(ProbeParams, records));
        has("AT_ProbeParams_hold_ns", std::mem::offset_of!(ProbeParams, hold_ns));
        has("AT_ProbeParams_record_count", std::mem::offset_of!(ProbeParams, record_count));
        has("AT_ProbeParams_reserved", std::mem::offset_of!(ProbeParams, reserved));
    }
}
