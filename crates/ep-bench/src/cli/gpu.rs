//! Options that only GPUs have.

use std::path::PathBuf;
use std::time::Duration;

use super::count;

/// Options of `--transport nvlink`, `copy` and `nccl`.
#[derive(Clone, Debug, clap::Args)]
pub struct GpuArgs {
    /// GPUs; rank r runs on GPU r mod N [default: up to 2]
    #[arg(long, value_name = "N", value_parser = count)]
    pub gpus: Option<usize>,
    /// SMs for communication [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sms: Option<u32>,
    /// Blocks of NCCL's kernels, beside those SMs [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub ctas: Option<u32>,
    /// Replay a graph
    #[arg(long)]
    pub graph: bool,
    /// Lay the routing out every time
    #[arg(long)]
    pub uncached: bool,
    /// Without telling the host how many rows come; lays out every time
    #[arg(long)]
    pub capacity: bool,
    /// Sum experts' rows before they travel (expert-major)
    #[arg(long)]
    pub reduced: bool,
    /// Search for launch plans first, for at most so many seconds, or take what was found earlier
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "4", value_parser = tuning_seconds, conflicts_with = "no_tune")]
    pub tune: Option<f64>,
    /// Launch by the plans that ship (the default)
    #[arg(long)]
    pub no_tune: bool,
    /// Write results of suite, overlap and unroll into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Overlap and unroll: fewer SMs and runs
    #[arg(long)]
    pub quick: bool,
    /// Overlap and unroll: only what has this in its name, as `partition 16`
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
}

impl GpuArgs {
    /// SMs for communication.
    pub fn sms(&self) -> u32 {
        self.sms.unwrap_or(16)
    }

    /// How long launch plans are searched for, if they are.
    pub fn search(&self) -> Option<Duration> {
        self.tune.map(Duration::from_secs_f64)
    }

    /// Which of these options were given, as they are written.
    pub(super) fn given(&self) -> Vec<&'static str> {
        let all = [
            (self.gpus.is_some(), "--gpus"),
            (self.sms.is_some(), "--sms"),
            (self.ctas.is_some(), "--ctas"),
            (self.graph, "--graph"),
            (self.uncached, "--uncached"),
            (self.capacity, "--capacity"),
            (self.reduced, "--reduced"),
            (self.tune.is_some(), "--tune"),
            (self.no_tune, "--no-tune"),
            (self.out.is_some(), "--out"),
            (self.quick, "--quick"),
            (self.only.is_some(), "--only"),
        ];
        all.into_iter().filter(|(given, _)| *given).map(|(_, name)| name).collect()
    }
}

fn tuning_seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s > 0.0 && s <= 600.0 => Ok(s),
        _ => Err("expected seconds, more than 0 and at most 600".into()),
    }
}
