//! How ranks on GPUs that are in different nodes reach each other.

#[cfg(feature = "rdma")]
use ep_runtime::RdmaTransport;
use ep_runtime::{EpBuilder, NvlinkTransport};

use super::peers::nccl_version;
use crate::cli::{Args, Transport};
use crate::{BenchError, Result};

/// Blocks of NCCL's kernels where nothing else is said, as in `NcclTransport`.
const CTAS: u32 = 8;

/// How ranks reach each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// All of them map each other's windows.
    #[default]
    Mapped,
    /// Those of different nodes by copies. The node of each rank.
    Copies(Vec<usize>),
    /// Those of different nodes by NCCL.
    Nccl {
        /// The node of each rank.
        nodes: Vec<usize>,
        /// Blocks of NCCL's kernels.
        ctas: u32,
    },
    /// Those of different nodes by RDMA, with devices and settings of the variables `EP_RDMA_*`. The
    /// node of each rank.
    Rdma(Vec<usize>),
}

impl Way {
    /// What `args` ask for, for so many ranks on so many GPUs.
    ///
    /// # Errors
    /// Nodes of unequal size; for NCCL no library, or several ranks on a GPU.
    pub fn of(args: &Args, ranks: usize, gpus: usize) -> Result<Self> {
        if !args.transport.has_nodes() {
            return Ok(Self::Mapped);
        }
        let of = ranks / args.nodes_of(ranks)?;
        let nodes = (0..ranks).map(|rank| rank / of).collect();
        match args.transport {
            Transport::Copy => return Ok(Self::Copies(nodes)),
            Transport::Rdma => return rdma(nodes, gpus),
            _ => nccl_version()?,
        };
        if ranks > gpus {
            return Err(BenchError::Usage(format!(
                "--transport nccl: NCCL allows one rank per GPU; {ranks} ranks were asked for on \
                 {gpus} GPUs (--ranks, --gpus)"
            )));
        }
        Ok(Self::Nccl { nodes, ctas: args.gpu.ctas.unwrap_or(CTAS) })
    }

    /// The name used in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Mapped => Transport::Nvlink,
            Self::Copies(_) => Transport::Copy,
            Self::Nccl { .. } => Transport::Nccl,
            Self::Rdma(_) => Transport::Rdma,
        }
        .name()
    }

    /// The node of each rank, where there are several.
    pub fn nodes(&self) -> Option<&[usize]> {
        match self {
            Self::Mapped => None,
            Self::Copies(nodes) | Self::Rdma(nodes) | Self::Nccl { nodes, .. } => Some(nodes),
        }
    }

    /// Whether some rank does not map another: then the host waits for the verdict of every
    /// operation, which so cannot be submitted before it may start.
    pub fn is_far(&self) -> bool {
        self.nodes().is_some_and(|nodes| nodes.iter().any(|node| *node != nodes[0]))
    }

    /// The layer of a rank on GPU `ordinal` whose ranks reach each other like this.
    ///
    /// # Errors
    /// A variable that cannot be read.
    pub fn place(&self, builder: EpBuilder, rank: usize, ordinal: usize) -> Result<EpBuilder> {
        Ok(match self {
            Self::Mapped => builder,
            Self::Copies(nodes) => {
                builder.transport(NvlinkTransport::new(ordinal).nodes(nodes.clone()))
            }
            #[cfg(feature = "nccl")]
            Self::Nccl { nodes, ctas } => builder.transport(
                ep_runtime::NcclTransport::new(ordinal).nodes(nodes.clone()).max_ctas(*ctas),
            ),
            // Options that ask for it are refused in such a build.
            #[cfg(not(feature = "nccl"))]
            Self::Nccl { .. } => builder,
            #[cfg(feature = "rdma")]
            Self::Rdma(nodes) => {
                let rdma =
                    RdmaTransport::from_env().map_err(|e| BenchError::Usage(e.to_string()))?;
                builder.transport(rdma.node(nodes[rank] as u64).cuda(ordinal))
            }
            #[cfg(not(feature = "rdma"))]
            Self::Rdma(_) => {
                let _ = rank;
                builder
            }
        })
    }
}

/// RDMA between these nodes, which have GPUs of their own.
fn rdma(nodes: Vec<usize>, gpus: usize) -> Result<Way> {
    let of = |gpu: usize| nodes.iter().skip(gpu).step_by(gpus.max(1));
    if (0..gpus).any(|gpu| of(gpu).any(|node| Some(node) != of(gpu).next())) {
        return Err(BenchError::Usage(format!(
            "--transport rdma: ranks of different nodes do not share a GPU; {} ranks were asked for on \
             {gpus} GPUs (--ranks, --gpus)",
            nodes.len()
        )));
    }
    Ok(Way::Rdma(nodes))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn of(line: &str, ranks: usize) -> Result<Way> {
        Way::of(&Args::parse_from(std::iter::once("ep-bench").chain(line.split(' '))), ranks, 2)
    }

    #[test]
    fn nodes_are_of_equal_size() {
        assert_eq!(of("--transport nvlink", 4).unwrap(), Way::Mapped);
        let way = of("--transport copy", 3).unwrap();
        assert_eq!(way, Way::Copies(vec![0, 1, 2]));
        assert!(way.is_far());
        let way = of("--transport copy --nodes 2", 4).unwrap();
        assert_eq!(way.nodes(), Some(&[0, 0, 1, 1][..]));
        assert!(!of("--transport copy --nodes 1", 4).unwrap().is_far());
        let error = of("--transport copy --nodes 3", 4).unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains("does not divide"), "{error}");
    }

    #[test]
    fn nodes_over_rdma_have_gpus_of_their_own() {
        let way = of("--transport rdma --gpus 2", 2).unwrap();
        assert_eq!((way.nodes(), way.name()), (Some(&[0, 1][..]), "rdma"));
        assert!(of("--transport rdma --nodes 1 --gpus 2", 4).is_ok());
        let error = of("--transport rdma --nodes 2 --gpus 2", 4).unwrap_err().to_string();
        assert!(error.contains("do not share a GPU"), "{error}");
    }

    #[test]
    fn nccl_has_a_rank_per_gpu_and_a_library() {
        let error = of("--transport nccl", 3).unwrap_err().to_string();
        match nccl_version() {
            Ok(_) => assert!(error.contains("one rank per GPU"), "{error}"),
            Err(_) => assert!(error.contains("libnccl.so.2") && error.contains("EP_NCCL_PATH")),
        }
    }
}
