//! A whole machine: observed, recorded, replayed.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::nvml::{NVML_LIBRARY, read_nvml};
use crate::placement::{Distance, NicChoice, NicPolicy, choose_nics, distance};
use crate::proxy::{ProxyCores, ProxyPolicy, proxy_cores};
use crate::{
    CudaDevice, DeviceAttributes, Gpu, GpuInventory, Host, NvmlOutcome, P2p, P2pStatus,
    TopologyError,
};

/// Version of the recorded form.
const SCHEMA: u32 = 1;

/// Where to look.
#[derive(Clone, Debug)]
pub struct Options {
    /// Root of sysfs.
    pub sysfs: PathBuf,
    /// Root of procfs.
    pub proc: PathBuf,
    /// Folder of device nodes.
    pub dev: PathBuf,
    /// NVML's library; `None` leaves GPUs out.
    pub nvml: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            sysfs: "/sys".into(),
            proc: "/proc".into(),
            dev: "/dev".into(),
            nvml: Some(NVML_LIBRARY.to_owned()),
        }
    }
}

/// Everything that was observed, before it is interpreted: enough to replay the machine anywhere.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Recording {
    /// sysfs.
    pub host: Host,
    /// NVML, call by call.
    pub nvml: NvmlOutcome,
    /// CUDA devices that the caller has asked the driver about.
    #[serde(default)]
    pub devices: Vec<CudaDevice>,
}

/// What a machine is.
///
/// As JSON it holds both the recording and what follows from it; reading it back takes the
/// recording and interprets it again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Recorded")]
pub struct Machine {
    schema: u32,
    recording: Recording,
    gpus: GpuInventory,
}

#[derive(Deserialize)]
struct Recorded {
    schema: u32,
    recording: Recording,
}

impl TryFrom<Recorded> for Machine {
    type Error = TopologyError;

    fn try_from(file: Recorded) -> Result<Self, TopologyError> {
        match file.schema {
            SCHEMA => Ok(Self::replay(file.recording)),
            other => Err(TopologyError::Format {
                op: "read machine",
                detail: format!("recorded in schema {other}, this build reads {SCHEMA}"),
            }),
        }
    }
}

impl Machine {
    /// Looks at this machine. What is missing (no GPU, no NIC, no NVML, no sysfs) is left out or
    /// stands in the result as a problem or warning.
    pub fn observe(options: &Options) -> Self {
        let host = Host::observe(&options.sysfs, &options.proc, &options.dev);
        let nvml = match options.nvml.as_deref().map(read_nvml) {
            None => NvmlOutcome::Off,
            Some(Ok(record)) => NvmlOutcome::Read(record),
            Some(Err(TopologyError::Library { library, detail, remedy, .. })) => {
                NvmlOutcome::Unavailable { library, detail, remedy }
            }
            Some(Err(other)) => NvmlOutcome::Unavailable {
                library: options.nvml.clone().unwrap_or_default(),
                detail: other.to_string(),
                remedy: String::new(),
            },
        };
        Self::replay(Recording { host, nvml, devices: Vec::new() })
    }

    /// The machine that a recording describes.
    pub fn replay(recording: Recording) -> Self {
        let gpus = GpuInventory::new(&recording.nvml, &recording.host);
        Self { schema: SCHEMA, recording, gpus }
    }

    /// Reads what [`Machine::to_json`] wrote.
    ///
    /// # Errors
    /// [`TopologyError::Format`] for text that is corrupt or of another version.
    pub fn from_json(text: &str) -> Result<Self, TopologyError> {
        serde_json::from_str(text).map_err(|e| format_error("read machine", &e))
    }

    /// The machine as JSON, recording included.
    ///
    /// # Errors
    /// [`TopologyError::Format`] if it cannot be written as JSON.
    pub fn to_json(&self) -> Result<String, TopologyError> {
        serde_json::to_string_pretty(self).map_err(|e| format_error("write machine", &e))
    }

    /// Adds what the CUDA driver and an SM probe say about a device; replaces what was there under
    /// the same UUID.
    ///
    /// # Errors
    /// [`TopologyError::Gpu`] if NVML was read but shows no working GPU at its UUID or PCI address.
    pub fn attach(&mut self, device: CudaDevice) -> Result<(), TopologyError> {
        let read = matches!(self.recording.nvml, NvmlOutcome::Read(_));
        if read && self.gpu_of(&device).is_none() {
            return Err(TopologyError::Gpu {
                op: "attach device",
                gpu: device.attributes.uuid,
                detail: "NVML shows no working GPU with this UUID or PCI address".to_owned(),
            });
        }
        let uuid = &device.attributes.uuid;
        self.recording.devices.retain(|d| d.attributes.uuid != *uuid);
        self.recording.devices.push(device);
        self.recording.devices.sort_by_key(|d| d.attributes.ordinal);
        Ok(())
    }

    /// The host.
    pub fn host(&self) -> &Host {
        &self.recording.host
    }

    /// Its GPUs.
    pub fn gpus(&self) -> &GpuInventory {
        &self.gpus
    }

    /// CUDA devices attached so far, by ordinal.
    pub fn devices(&self) -> &[CudaDevice] {
        &self.recording.devices
    }

    /// The GPU behind a CUDA device: by UUID, else by PCI address (a MIG device has its own UUID).
    pub fn gpu_of(&self, device: &CudaDevice) -> Option<&Gpu> {
        let DeviceAttributes { uuid, pci, .. } = &device.attributes;
        let by_uuid = self.gpus.gpus.iter().find(|g| g.uuid == *uuid);
        by_uuid.or_else(|| self.gpus.gpus.iter().find(|g| pci.is_some() && g.pci == *pci))
    }

    /// The CUDA device of a GPU, if one was attached.
    pub fn device_of(&self, gpu: &Gpu) -> Option<&CudaDevice> {
        let same = |d: &&CudaDevice| self.gpu_of(d).is_some_and(|g| g.uuid == gpu.uuid);
        self.recording.devices.iter().find(same)
    }

    /// NVML's verdict on access from one GPU to another, by UUID: also for GPUs that
    /// `CUDA_VISIBLE_DEVICES` hides from this process.
    pub fn p2p(&self, from: &str, to: &str) -> Option<&P2p> {
        self.gpus.p2p.iter().find(|p| p.from == from && p.to == to)
    }

    /// Whether a GPU can read and write another one's memory, MIG considered.
    ///
    /// # Errors
    /// [`TopologyError::Gpu`] for an unknown or lost GPU, or one in MIG mode.
    pub fn can_access(&self, from: &str, to: &str) -> Result<bool, TopologyError> {
        for uuid in [from, to] {
            if matches!(self.gpu(uuid)?.mig, crate::Mig::On { .. }) {
                return Err(gpu_error(uuid, "MIG is on: its devices have no peer access"));
            }
        }
        let ok = |p: &P2p| p.read == P2pStatus::Ok && p.write == P2pStatus::Ok;
        Ok(from == to || self.p2p(from, to).is_some_and(ok))
    }

    /// The working GPU with a UUID.
    ///
    /// # Errors
    /// [`TopologyError::Gpu`] if it is unknown or lost; the error says which.
    pub fn gpu(&self, uuid: &str) -> Result<&Gpu, TopologyError> {
        if let Some(gpu) = self.gpus.gpus.iter().find(|g| g.uuid == uuid) {
            return Ok(gpu);
        }
        let lost = self.gpus.lost.iter().find(|g| g.uuid.as_deref() == Some(uuid));
        Err(gpu_error(uuid, lost.map_or("not on this machine", |g| &g.reason)))
    }

    /// Distance of every GPU (rows, as in [`GpuInventory::gpus`]) to every NIC (as in
    /// [`Host::nics`]).
    pub fn distances(&self) -> Vec<Vec<Distance>> {
        let host = self.host();
        let row = |gpu| host.nics.iter().map(|nic| distance(host, gpu, nic)).collect();
        self.gpus.gpus.iter().map(row).collect()
    }

    /// NICs for every GPU; see [`choose_nics`].
    ///
    /// # Errors
    /// As [`choose_nics`].
    pub fn nics(&self, policy: &NicPolicy) -> Result<Vec<NicChoice>, TopologyError> {
        choose_nics(self.host(), &self.gpus.gpus, policy)
    }

    /// Cores for proxy threads; see [`proxy_cores`].
    ///
    /// # Errors
    /// As [`proxy_cores`].
    pub fn proxy_cores(
        &self,
        choices: &[NicChoice],
        policy: &ProxyPolicy,
    ) -> Result<Vec<ProxyCores>, TopologyError> {
        proxy_cores(self.host(), &self.gpus.gpus, choices, policy)
    }
}

fn gpu_error(uuid: &str, detail: &str) -> TopologyError {
    TopologyError::Gpu { op: "look up GPU", gpu: uuid.to_owned(), detail: detail.to_owned() }
}

fn format_error(op: &'static str, error: &serde_json::Error) -> TopologyError {
    TopologyError::Format { op, detail: error.to_string() }
}
