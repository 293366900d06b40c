//! What the benchmark ran on.

use std::fs;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The machine, as far as results depend on it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Model of the CPU.
    pub cpu: String,
    /// Cores this process may use.
    pub cores: usize,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// The operating system's kernel.
    pub kernel: String,
    /// The architecture, as Rust names it.
    pub arch: String,
    /// GPUs used, by name; empty for a host run.
    pub gpus: Vec<String>,
}

impl Machine {
    /// Looks at this machine. What cannot be found is empty or 0.
    pub fn here() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Self {
            cpu: cpu_model(&read("/proc/cpuinfo")),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: meminfo(&read("/proc/meminfo"), "MemTotal"),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            arch: std::env::consts::ARCH.into(),
            gpus: Vec::new(),
        }
    }
}

/// Bytes of memory that can be used without pushing anything out, within the limit of this
/// process's control group if it has one.
pub fn free_memory() -> u64 {
    let free = meminfo(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemAvailable");
    let number = |name: &str| -> Option<u64> {
        fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse().ok()
    };
    match (number("memory.max"), number("memory.current")) {
        (Some(most), Some(used)) => free.min(most.saturating_sub(used)),
        _ => free,
    }
}

fn cpu_model(cpuinfo: &str) -> String {
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    // ARM kernels give numbers instead of names.
    field("model name")
        .or_else(|| field("CPU part").map(|p| format!("ARM part {p}")))
        .unwrap_or_default()
}

fn meminfo(text: &str, field: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kib = value.and_then(|v| v.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// The commit that is measured: `given` if there is one, else what git says here, with `-dirty`
/// when tracked files have changed, else `unknown`.
pub fn commit(given: Option<&str>) -> String {
    if let Some(commit) = given {
        return commit.to_owned();
    }
    let git = |args: &[&str]| {
        let out =
            Command::new("git").args(args).stderr(std::process::Stdio::null()).output().ok()?;
        out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_owned())
    };
    match git(&["rev-parse", "--verify", "HEAD"]) {
        Some(hash) if !hash.is_empty() => {
            let changed = git(&["status", "--porcelain", "--untracked-files=no"]);
            let dirty = changed.is_some_and(|files| !files.is_empty());
            if dirty { format!("{hash}-dirty") } else { hash }
        }
        _ => "unknown".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_understood() {
        let x86 = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: other\n";
        assert_eq!(cpu_model(x86), "Some CPU @ 2 GHz");
        assert_eq!(cpu_model("processor : 0\nCPU part\t: 0xd4f\n"), "ARM part 0xd4f");
        assert_eq!(cpu_model(""), "");
        let text = "MemTotal:       16000 kB\nMemAvailable:   8000 kB\nOdd: x\n";
        assert_eq!(meminfo(text, "MemAvailable"), 8000 * 1024);
        assert_eq!(meminfo(text, "Mem"), 0);
        assert_eq!(meminfo(text, "Odd"), 0);
    }

    #[test]
    fn this_machine_is_seen() {
        let machine = Machine::here();
        assert!(machine.cores > 0 && machine.memory_bytes > 0 && !machine.kernel.is_empty());
        assert!(free_memory() > 0 && free_memory() <= machine.memory_bytes);
        assert_eq!(commit(Some("abc")), "abc");
        assert!(!commit(None).is_empty());
    }
}
