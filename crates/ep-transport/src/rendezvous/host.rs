//! Which machine this is.

use std::fs;

use serde::{Deserialize, Serialize};

/// What tells hosts, and containers on one host, apart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostId {
    /// The kernel's, new at every boot.
    pub(crate) boot: String,
    pub(crate) name: String,
    /// The network namespace: processes that share it reach each other by loopback and by abstract
    /// sockets.
    pub(crate) network: String,
}

impl HostId {
    pub(crate) fn here() -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let network = fs::read_link("/proc/self/ns/net").unwrap_or_default();
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let network = network.to_string_lossy().into_owned();
        Self { boot: boot.trim().to_owned(), name, network }
    }

    /// Whether both are surely the same.
    pub(crate) fn shares(&self, other: &Self) -> bool {
        !self.boot.is_empty() && !self.network.is_empty() && self == other
    }
}

/// Random bytes that nobody can guess.
pub(crate) fn random() -> [u8; 16] {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => {
                // Kernels without the call: uniqueness is what matters, and time and identity give
                // that.
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                let now = now.map_or(0, |now| now.as_nanos());
                let id = u128::from(std::process::id()) << 96;
                return (now ^ id ^ (&raw const bytes as usize as u128)).to_le_bytes();
            }
        }
    }
    bytes
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
