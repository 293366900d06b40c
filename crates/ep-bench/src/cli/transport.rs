//! Which transports there are, and which options go with which.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::{Args, Bench};
use crate::{BenchError, Result};

/// How bytes reach a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Shared memory of this host, which runs anywhere.
    #[default]
    Auto,
    /// Shared memory of this host.
    Host,
    /// RDMA verbs between nodes, rows in host memory or, with --gpus, on GPUs.
    Rdma,
    /// NVLink between GPUs.
    Nvlink,
    /// GPUs: copies between nodes of this process.
    Copy,
    /// GPUs: NCCL between nodes.
    Nccl,
}

impl Transport {
    /// The name used in reports and options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto | Self::Host => "host",
            Self::Rdma => "rdma",
            Self::Nvlink => "nvlink",
            Self::Copy => "copy",
            Self::Nccl => "nccl",
        }
    }

    /// Whether rows are on GPUs whatever else is asked for.
    pub fn is_on_gpus(self) -> bool {
        matches!(self, Self::Nvlink | Self::Copy | Self::Nccl)
    }

    /// Whether ranks are in nodes that do not map each other.
    pub fn has_nodes(self) -> bool {
        matches!(self, Self::Rdma | Self::Copy | Self::Nccl)
    }
}

impl Args {
    /// Whether rows are on GPUs.
    pub fn is_on_gpus(&self) -> bool {
        self.transport.is_on_gpus()
            || (self.transport == Transport::Rdma && self.gpu.gpus.is_some())
    }

    /// Whether this build has the transport, and the options go with it and with the bench.
    ///
    /// # Errors
    /// Which does not.
    pub(crate) fn check_transport(&self) -> Result<()> {
        let usage = |text: String| Err(BenchError::Usage(text));
        let name = self.transport.name();
        let without_gpus = self.is_on_gpus() && !cfg!(feature = "cuda");
        let missing = missing_feature(self.transport).or(without_gpus.then_some("cuda"));
        if let Some(feature) = missing {
            return usage(format!(
                "--transport {name} is not in this build: build with the feature `{feature}`"
            ));
        }
        if self.nodes.is_some() && !self.dry_run && !self.transport.has_nodes() {
            return usage("--nodes needs --dry-run or --transport rdma, copy or nccl".into());
        }
        match self.is_on_gpus() {
            true => self.check_gpu_options(name),
            false => self.check_host_options(),
        }
    }

    fn check_host_options(&self) -> Result<()> {
        if matches!(
            self.bench,
            Some(Bench::Suite | Bench::Copy | Bench::Launch | Bench::Overlap | Bench::Unroll)
        ) {
            let text = "suite, copy, launch, overlap and unroll measure GPUs: add \
                        --transport nvlink";
            return Err(BenchError::Usage(text.into()));
        }
        match self.gpu.given().first() {
            Some(option) => Err(BenchError::Usage(format!(
                "{option} is for GPUs: add --transport nvlink, copy or nccl, or --gpus to rdma"
            ))),
            None => Ok(()),
        }
    }

    fn check_gpu_options(&self, name: &str) -> Result<()> {
        let usage = |text: String| Err(BenchError::Usage(text));
        let far = self.transport.has_nodes();
        if self.processes {
            return usage(format!(
                "--transport {name} runs ranks as threads: leave --processes out"
            ));
        }
        if self.dry_run {
            return usage(format!(
                "--dry-run counts rows and bytes on this host: leave --transport {name} out"
            ));
        }
        if self.gpu.ctas.is_some() && self.transport != Transport::Nccl {
            return usage("--ctas is for --transport nccl".into());
        }
        match self.bench {
            Some(Bench::Sweep | Bench::Layout) => usage(
                "GPUs run dispatch, combine, roundtrip, copy, launch, suite, overlap and unroll"
                    .into(),
            ),
            Some(Bench::Suite | Bench::Copy | Bench::Launch | Bench::Overlap | Bench::Unroll)
                if far =>
            {
                usage(format!(
                    "--transport {name} runs dispatch, combine and roundtrip; the others measure \
                 ranks that map each other: --transport nvlink"
                ))
            }
            Some(Bench::Launch) if self.gpu.tune.is_some() => usage(
                "launch varies the attributes of plans that it gives itself: leave --tune out"
                    .into(),
            ),
            _ if far && self.gpu.graph => usage(format!(
                "--graph: the host waits for verdicts over --transport {name}, which cannot be \
                 captured"
            )),
            _ => Ok(()),
        }
    }

    /// How many nodes the ranks of a case are in: by default each is one.
    ///
    /// # Errors
    /// Nodes that would be of unequal size.
    pub(crate) fn nodes_of(&self, ranks: usize) -> Result<usize> {
        match self.nodes.unwrap_or(ranks) {
            nodes if ranks.is_multiple_of(nodes) => Ok(nodes),
            nodes => {
                Err(BenchError::Usage(format!("--nodes {nodes} does not divide {ranks} ranks")))
            }
        }
    }
}

/// What this build lacks for a transport.
fn missing_feature(transport: Transport) -> Option<&'static str> {
    match transport {
        Transport::Rdma if !cfg!(feature = "rdma") => Some("rdma"),
        Transport::Nvlink | Transport::Copy if !cfg!(feature = "cuda") => Some("cuda"),
        Transport::Nccl if !cfg!(feature = "nccl") => Some("nccl"),
        _ => None,
    }
}
