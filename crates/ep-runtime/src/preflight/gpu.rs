//! What is tried on GPUs.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use ep_kernels::cuda::{Compiler, Device, Driver};

use super::peers::Memory;
use super::{Check, PeerTrial, Severity};

#[derive(Default)]
pub(super) struct Tried {
    pub gpus: u32,
    pub peers: Vec<PeerTrial>,
    pub checks: Vec<Check>,
}

/// Opens driver, compiler and GPUs and tries every pair, on a thread of its own: calls of a driver in
/// trouble may not return, and this one must. What was found until then is lost with the thread.
pub(super) fn try_all(limit: Duration) -> Tried {
    let (done, result) = channel();
    let spawned = std::thread::Builder::new().name("preflight".into()).spawn(move || {
        // The receiver may have given up.
        let _ = done.send(look(limit));
    });
    let failed = |found: String| Tried {
        checks: vec![Check::new("gpu", "trial", Severity::Failure, found)],
        ..Tried::default()
    };
    if let Err(error) = spawned {
        return failed(format!("no thread: {error}"));
    }
    match result.recv_timeout(limit) {
        Ok(tried) => tried,
        Err(RecvTimeoutError::Timeout) => failed(format!("no answer within {limit:?}")),
        Err(RecvTimeoutError::Disconnected) => failed("the trial ended without a result".into()),
    }
}

fn look(limit: Duration) -> Tried {
    let mut tried = Tried::default();
    let failure = |name: &str, found: String| Check::new("gpu", name, Severity::Failure, found);
    let driver = match Driver::get() {
        Ok(driver) => driver,
        Err(error) => {
            tried.checks.push(failure("driver", error.to_string()));
            return tried;
        }
    };
    tried.checks.push(match Compiler::get() {
        Ok(compiler) => {
            let version = compiler.version().to_owned();
            Check::new("gpu", "compiler", Severity::Ok, version)
        }
        Err(error) => failure("compiler", error.to_string()),
    });
    let count = match driver.device_count() {
        Ok(0) => {
            tried.checks.push(
                failure("devices", "none is visible".into()).remedy("check CUDA_VISIBLE_DEVICES"),
            );
            return tried;
        }
        Ok(count) => count,
        Err(error) => {
            tried.checks.push(failure("devices", error.to_string()));
            return tried;
        }
    };
    let mut devices = Vec::new();
    for ordinal in 0..count {
        let name = format!("CUDA {ordinal}");
        match Device::open(ordinal) {
            Ok(device) => {
                let p = device.properties();
                let (major, minor) = p.capability;
                let found = format!("{}, {} SMs, capability {major}.{minor}", p.name, p.sms);
                tried.checks.push(Check::new("gpu", name, Severity::Ok, found));
                devices.push(device);
            }
            Err(error) => tried.checks.push(failure(&name, error.to_string())),
        }
    }
    tried.gpus = devices.len() as u32;
    pairs(&devices, limit, &mut tried);
    tried
}

/// Every ordered pair.
fn pairs(devices: &[Device], limit: Duration, tried: &mut Tried) {
    if devices.len() < 2 {
        return;
    }
    let memory = Memory::open();
    for from in devices {
        for to in devices {
            let (a, b) = (from.properties().ordinal as u32, to.properties().ordinal as u32);
            if a == b {
                continue;
            }
            let outcome = match &memory {
                Ok(memory) => memory.try_pair(from, to, limit),
                Err(why) => Err(why.clone()),
            };
            let check = match &outcome {
                Ok(bytes) => {
                    let found = format!("{bytes} bytes written and read back");
                    Check::new("peers", format!("{a} to {b}"), Severity::Ok, found)
                }
                Err(why) => Check::new(
                    "peers",
                    format!("{a} to {b}"),
                    Severity::Failure,
                    why.clone(),
                )
                .remedy(
                    "check `nvidia-smi topo -p2p rw`, MIG, and that the IOMMU does not block it",
                ),
            };
            tried.checks.push(check);
            tried.peers.push(PeerTrial { from: a, to: b, failure: outcome.err() });
        }
    }
}
