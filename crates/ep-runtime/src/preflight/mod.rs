//! What a machine offers and what it lacks, looked at before anything is built on it.
//!
//! [`Preflight::here`] looks at this machine; it needs neither GPU nor NIC, changes nothing and ends
//! within its limit. [`Preflight::agree`] exchanges what the ranks of a group found, so that all of them
//! come to the same [`Verdict`].

#[cfg(feature = "cuda")]
mod gpu;
mod host;
mod libraries;
#[cfg(feature = "cuda")]
mod peers;
mod verdict;

use std::time::Duration;

use ep_topology::{Fabric, GpuInventory, Machine, Mig, NVML_LIBRARY, NvmlOutcome, Options};
use serde::{Deserialize, Serialize};

pub use libraries::Library;
pub use verdict::{Ability, Finding, Verdict};

/// Version of the recorded form.
const SCHEMA: u32 = 1;

/// How serious a check's result is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Missing or unusual, and nothing here needs it.
    Note,
    /// Works, but not as well as it could.
    Warning,
    /// What the hardware here is for will not work.
    Failure,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// `library`, `driver`, `gpu`, `peers`, `host`, `fabric`.
    pub area: String,
    /// What was looked at, within its area.
    pub name: String,
    /// How serious it is.
    pub severity: Severity,
    /// What was found.
    pub found: String,
    /// What to do about it; empty where nothing needs doing.
    pub remedy: String,
}

impl Check {
    fn new(area: &str, name: impl Into<String>, severity: Severity, found: String) -> Self {
        Self { area: area.to_owned(), name: name.into(), severity, found, remedy: String::new() }
    }

    fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }
}

/// Access from one GPU to another's memory, tried by mapping a block of the other's memory, writing it and
/// reading it back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerTrial {
    /// CUDA ordinal of the GPU that accesses.
    pub from: u32,
    /// CUDA ordinal of the GPU whose memory is accessed.
    pub to: u32,
    /// Why it does not work; `None` if every byte came back.
    pub failure: Option<String>,
}

/// What a machine offers, as one rank found it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Preflight {
    /// Version of this form.
    pub schema: u32,
    /// The host's name.
    pub host: String,
    /// Version of the kernel driver; `None` without one.
    pub driver: Option<String>,
    /// Libraries that are opened at run time, by name.
    pub libraries: Vec<Library>,
    /// Visible GPUs with a driver that answered.
    pub gpus: u32,
    /// Every ordered pair of visible GPUs; empty where they were not tried.
    pub peers: Vec<PeerTrial>,
    /// RDMA devices with an active port that this process may open.
    pub nics: u32,
    /// Everything that was looked at.
    pub checks: Vec<Check>,
}

/// How to look.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PreflightOptions {
    /// Where the machine's files are and how NVML is called.
    pub machine: Options,
    /// Whether GPUs may be used (a context on each, a few megabytes for a moment). Without the feature
    /// `cuda` they never are.
    pub try_gpus: bool,
    /// Bound of everything that uses GPUs.
    pub limit: Duration,
}

impl Default for PreflightOptions {
    fn default() -> Self {
        Self { machine: Options::default(), try_gpus: true, limit: Duration::from_secs(30) }
    }
}

impl Preflight {
    /// Looks at this machine.
    pub fn here(options: &PreflightOptions) -> Self {
        let mut nvml = None;
        let outcome = match options.machine.nvml.as_deref().map(ep_topology::read_nvml) {
            None => NvmlOutcome::Off,
            Some(Ok(record)) => {
                nvml = record.library.value().cloned();
                NvmlOutcome::Read(record)
            }
            Some(Err(error)) => NvmlOutcome::Unavailable {
                library: NVML_LIBRARY.into(),
                detail: error.to_string(),
                remedy: String::new(),
            },
        };
        let machine = Machine::observe(&Options { nvml: None, ..options.machine.clone() });
        let inventory = GpuInventory::new(&outcome, machine.host());
        let has_gpu = !inventory.gpus.is_empty()
            || !inventory.hidden.is_empty()
            || !inventory.lost.is_empty()
            || options.machine.dev.join("nvidiactl").exists();
        let libraries = libraries::all(nvml);
        let mut found = Self {
            schema: SCHEMA,
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            driver: inventory.driver.clone(),
            gpus: 0,
            peers: Vec::new(),
            nics: machine.host().nics.iter().filter(|nic| nic.usable()).count() as u32,
            checks: Vec::new(),
            libraries,
        };
        let nics = !machine.host().nics.is_empty();
        found.checks.extend(gpus(&inventory, has_gpu));
        found.checks.extend(host::checks(&options.machine, has_gpu, nics));
        found.try_gpus(options, has_gpu);
        // Only now: the compiler is looked for in more places than the loader's.
        libraries::locate(&mut found.libraries);
        let library = |library: &Library| library.check(has_gpu, nics);
        found.checks.splice(0..0, found.libraries.iter().map(library).collect::<Vec<_>>());
        found
    }

    /// The part that runs on GPUs.
    #[cfg(feature = "cuda")]
    fn try_gpus(&mut self, options: &PreflightOptions, has_gpu: bool) {
        if !options.try_gpus || !has_gpu {
            return;
        }
        let tried = gpu::try_all(options.limit);
        self.gpus = tried.gpus;
        self.peers = tried.peers;
        self.checks.extend(tried.checks);
    }

    #[cfg(not(feature = "cuda"))]
    fn try_gpus(&mut self, options: &PreflightOptions, has_gpu: bool) {
        if options.try_gpus && has_gpu {
            let found = "not tried: this build lacks the feature `cuda`".to_owned();
            let check = Check::new("gpu", "trial", Severity::Failure, found);
            self.checks.push(check.remedy("build with the feature `cuda`"));
        }
    }

    /// As indented JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain data")
    }

    /// The most serious result.
    pub fn worst(&self) -> Severity {
        self.checks.iter().map(|check| check.severity).max().unwrap_or(Severity::Ok)
    }
}

/// What NVML says of driver, GPUs and fabric.
fn gpus(inventory: &GpuInventory, has_gpu: bool) -> Vec<Check> {
    let mut checks = Vec::new();
    match &inventory.driver {
        Some(version) => {
            let cuda = inventory.cuda.map_or(String::new(), |(a, b)| format!(", CUDA {a}.{b}"));
            checks.push(Check::new("driver", "version", Severity::Ok, format!("{version}{cuda}")));
        }
        None => {
            let severity = if has_gpu { Severity::Failure } else { Severity::Note };
            let found = if has_gpu { "a GPU, but no driver answers" } else { "no GPU, no driver" };
            let check = Check::new("driver", "version", severity, found.into());
            let remedy = if has_gpu {
                "install the NVIDIA driver, or start the container with it"
            } else {
                ""
            };
            checks.push(check.remedy(remedy));
        }
    }
    for lost in &inventory.lost {
        let check = Check::new(
            "gpu",
            format!("NVML {}", lost.index),
            Severity::Failure,
            lost.reason.clone(),
        );
        checks.push(check.remedy("take it out of the job, or repair it"));
    }
    for address in &inventory.hidden {
        let found = "on the PCI bus, but not shown to this process".to_owned();
        checks.push(Check::new("gpu", address.to_string(), Severity::Note, found));
    }
    for gpu in &inventory.gpus {
        let name = gpu.uuid.clone();
        if matches!(gpu.mig, Mig::On { .. }) {
            let found = "MIG is on: its parts have no peer access".to_owned();
            let check = Check::new("gpu", name.clone(), Severity::Warning, found);
            checks.push(check.remedy("use GPUs without MIG for expert parallelism over NVLink"));
        }
        let (severity, found, remedy) = fabric(&gpu.fabric);
        checks.push(Check::new("fabric", name, severity, found).remedy(remedy));
    }
    checks
}

fn fabric(fabric: &Fabric) -> (Severity, String, &'static str) {
    const MANAGER: &str = "check that nvidia-fabricmanager runs and look at its log";
    match fabric {
        Fabric::Unsupported => (Severity::Ok, "none needed".into(), ""),
        Fabric::Member { cluster, clique } => {
            (Severity::Ok, format!("registered, cluster {cluster}, clique {clique}"), "")
        }
        Fabric::Pending => (Severity::Failure, "registration is not complete".into(), MANAGER),
        Fabric::Failed(status) => {
            (Severity::Failure, format!("registration failed, NVML status {status}"), MANAGER)
        }
        Fabric::Unknown => (Severity::Note, "not known".into(), ""),
    }
}

#[cfg(test)]
mod tests;
