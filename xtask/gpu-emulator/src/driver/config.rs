//! What the environment asks for.

use std::sync::OnceLock;

use super::code::{Code, Result};
use super::memory::DEVICES;

/// What variables say, read by `cuInit`.
#[derive(Debug)]
pub struct Config {
    /// `EP_EMULATOR_DEVICES`.
    pub devices: usize,
    /// `EP_EMULATOR_BYTES`, memory of each device.
    pub bytes: usize,
    /// `EP_EMULATOR_SEED`, of the delays.
    pub seed: u64,
    /// `EP_EMULATOR_DELAY_US`: the longest delay between operations; 0: none.
    pub delay_us: u64,
    /// `EP_EMULATOR_NO`: what the devices lack, by name.
    no: Vec<String>,
}

/// The names that `EP_EMULATOR_NO` knows.
const FEATURES: [&str; 8] =
    ["peer", "memops", "memops64", "green", "vmm", "hostregister", "clusters", "cooperative"];

static CONFIG: OnceLock<Config> = OnceLock::new();

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Err(_) => default,
        Ok(text) => text.parse().unwrap_or_else(|_| {
            eprintln!(
                "gpu-emulator: {name} is {text:?}, which is no number; it counts as {default}"
            );
            default
        }),
    }
}

impl Config {
    fn read() -> Self {
        let no = std::env::var("EP_EMULATOR_NO").unwrap_or_default();
        let no: Vec<String> =
            no.split(',').map(|name| name.trim().to_owned()).filter(|n| !n.is_empty()).collect();
        for unknown in no.iter().filter(|name| !FEATURES.contains(&name.as_str())) {
            eprintln!("gpu-emulator: EP_EMULATOR_NO knows {FEATURES:?}, not {unknown:?}");
        }
        Self {
            devices: number("EP_EMULATOR_DEVICES", 2).min(DEVICES as u64) as usize,
            bytes: number("EP_EMULATOR_BYTES", 4 << 30) as usize,
            seed: number("EP_EMULATOR_SEED", 0),
            delay_us: number("EP_EMULATOR_DELAY_US", 30),
            no,
        }
    }

    /// Whether the devices have a feature.
    pub fn has(&self, feature: &str) -> bool {
        debug_assert!(FEATURES.contains(&feature));
        !self.no.iter().any(|name| name == feature)
    }

    /// An error where they have not.
    pub fn needs(&self, feature: &str) -> Result<()> {
        if self.has(feature) { Ok(()) } else { Err(Code::NOT_SUPPORTED) }
    }
}

/// As `cuInit` does.
pub fn init() {
    CONFIG.get_or_init(Config::read);
}

/// What `cuInit` read; an error before it.
pub fn config() -> Result<&'static Config> {
    CONFIG.get().ok_or(Code::NOT_INITIALIZED)
}

/// `CUDA_DEVICE_MAX_CONNECTIONS`, which is read when a context is made: hardware queues of its streams.
pub fn connections() -> usize {
    number("CUDA_DEVICE_MAX_CONNECTIONS", 8).clamp(1, 32) as usize
}
