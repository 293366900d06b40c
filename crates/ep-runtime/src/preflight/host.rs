//! Limits of the process and of the host.

use std::path::Path;

use ep_topology::Options;
use rustix::fs::{MemfdFlags, memfd_create, statvfs};
use rustix::process::{Resource, getrlimit};

use super::{Check, Severity};

/// Locked memory below which registering windows with a NIC fails early, bytes.
const MEMLOCK: u64 = 1 << 30;
/// Open files below which a process with windows to many peers runs out.
const FILES: u64 = 1024;
/// Shared memory that libraries beside this one (NCCL) want, bytes.
const SHM: u64 = 1 << 30;
/// Hardware queues that streams share by default.
const CONNECTIONS: u32 = 8;

pub(super) fn checks(options: &Options, has_gpu: bool, has_nic: bool) -> Vec<Check> {
    let soft = |resource| getrlimit(resource).current;
    let connections = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok();
    let mut checks = vec![
        windows(
            memfd_create("preflight", MemfdFlags::CLOEXEC).map(drop).map_err(|e| e.to_string()),
        ),
        memlock(soft(Resource::Memlock), has_nic),
        files(soft(Resource::Nofile)),
        shared_memory(&options.dev.join("shm"), has_gpu),
    ];
    checks.push(max_connections(connections.as_deref(), has_gpu));
    checks.extend(has_gpu.then(|| imex(&options.dev)));
    checks
}

/// The memory that ranks of one host share.
fn windows(made: Result<(), String>) -> Check {
    match made {
        Ok(()) => Check::new("host", "memfd", Severity::Ok, "can be made".into()),
        Err(why) => Check::new("host", "memfd", Severity::Failure, why)
            .remedy("allow the system call memfd_create"),
    }
}

fn memlock(limit: Option<u64>, has_nic: bool) -> Check {
    let low = limit.is_some_and(|bytes| bytes < MEMLOCK);
    let severity = match (low, has_nic) {
        (true, true) => Severity::Failure,
        (true, false) => Severity::Note,
        _ => Severity::Ok,
    };
    let found = limit.map_or("unlimited".to_owned(), |bytes| format!("{} KiB", bytes >> 10));
    let remedy = if low { "ulimit -l unlimited, for RDMA" } else { "" };
    Check::new("host", "memlock", severity, found).remedy(remedy)
}

fn files(limit: Option<u64>) -> Check {
    let low = limit.is_some_and(|n| n < FILES);
    let severity = if low { Severity::Warning } else { Severity::Ok };
    let found = limit.map_or("unlimited".to_owned(), |n| n.to_string());
    let remedy = if low { "ulimit -n 65536" } else { "" };
    Check::new("host", "open files", severity, found).remedy(remedy)
}

fn shared_memory(path: &Path, has_gpu: bool) -> Check {
    let name = "/dev/shm";
    match statvfs(path) {
        Err(error) => Check::new("host", name, Severity::Note, error.to_string())
            .remedy("only other libraries use it: mount a tmpfs there"),
        Ok(stat) => {
            let (free, all) = (stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize);
            let low = free < SHM && has_gpu;
            let severity = if low { Severity::Note } else { Severity::Ok };
            let found = format!("{} MiB free of {}", free >> 20, all >> 20);
            let remedy = if low { "containers: --shm-size=1g, for NCCL" } else { "" };
            Check::new("host", name, severity, found).remedy(remedy)
        }
    }
}

/// Streams that share a hardware queue lose their overlap.
fn max_connections(value: Option<&str>, has_gpu: bool) -> Check {
    let name = "CUDA_DEVICE_MAX_CONNECTIONS";
    let Some(text) = value else {
        return Check::new("host", name, Severity::Ok, format!("not set: {CONNECTIONS}"));
    };
    let (severity, remedy) = match text.trim().parse::<u32>() {
        Ok(n @ 1..=32) if n >= CONNECTIONS => (Severity::Ok, ""),
        Ok(1..=32) if has_gpu => {
            (Severity::Warning, "a stream that waits holds up others: set 8 or more, or nothing")
        }
        Ok(1..=32) => (Severity::Note, ""),
        _ => (Severity::Warning, "set a number from 1 to 32, or nothing"),
    };
    Check::new("host", name, severity, text.to_owned()).remedy(remedy)
}

/// Channels by which hosts share GPU memory over a multi-node NVLink fabric.
fn imex(dev: &Path) -> Check {
    let channels = std::fs::read_dir(dev.join("nvidia-caps-imex-channels"))
        .map(|entries| entries.flatten().count())
        .unwrap_or(0);
    let found = match channels {
        0 => "no channel: memory is shared within this host only".to_owned(),
        n => format!("{n} channels"),
    };
    Check::new("fabric", "IMEX", if channels == 0 { Severity::Note } else { Severity::Ok }, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_matter_where_they_are_needed() {
        assert_eq!(memlock(None, true).severity, Severity::Ok);
        assert_eq!(memlock(Some(64 << 10), true).severity, Severity::Failure);
        assert_eq!(memlock(Some(64 << 10), false).severity, Severity::Note);
        assert_eq!(files(Some(256)).severity, Severity::Warning);
        assert_eq!(files(Some(1 << 20)).severity, Severity::Ok);
        assert_eq!(windows(Err("not permitted".into())).severity, Severity::Failure);
    }

    #[test]
    fn few_connections_are_a_warning_on_gpus() {
        let severity = |value, gpu| max_connections(value, gpu).severity;
        assert_eq!(severity(None, true), Severity::Ok);
        assert_eq!(severity(Some("8"), true), Severity::Ok);
        assert_eq!(severity(Some("1"), true), Severity::Warning);
        assert_eq!(severity(Some("1"), false), Severity::Note);
        for nonsense in ["", "0", "33", "many", "-1"] {
            assert_eq!(severity(Some(nonsense), false), Severity::Warning, "{nonsense}");
        }
    }

    #[test]
    fn channels_are_counted_and_folders_may_be_missing() {
        let dev = std::env::temp_dir().join(format!("ep-preflight-{}", std::process::id()));
        let folder = dev.join("nvidia-caps-imex-channels");
        assert!(imex(&dev).found.starts_with("no channel"));
        std::fs::create_dir_all(&folder).expect("temporary folder");
        std::fs::write(folder.join("channel0"), "").expect("temporary file");
        assert_eq!(imex(&dev).found, "1 channels");
        assert_eq!(shared_memory(&dev.join("shm"), true).severity, Severity::Note);
        assert_eq!(shared_memory(&dev, false).severity, Severity::Ok);
        std::fs::remove_dir_all(&dev).expect("temporary folder");
    }
}
