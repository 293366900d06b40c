//! What can go wrong in a benchmark.

use std::path::PathBuf;

/// The result of this crate's operations.
pub type Result<T, E = BenchError> = std::result::Result<T, E>;

/// An error of the benchmark program.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// Options that do not fit together, or not onto this machine; nothing was run.
    #[error("{0}")]
    Usage(String),
    /// A routing file cannot be used.
    #[error("routing file {}: {detail}", .path.display())]
    RoutingFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it and what to do.
        detail: String,
    },
    /// A file could not be read or written.
    #[error("{}: {detail}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        detail: String,
    },
    /// What was received or reduced is not what the oracle expects.
    #[error("verification failed on rank {rank}: {bench}: {detail}")]
    Verification {
        /// The rank that saw the difference.
        rank: usize,
        /// The bench and its data type.
        bench: String,
        /// The first difference.
        detail: String,
    },
    /// An operation of the library under test failed.
    #[error("rank {rank}: {op}: {detail}")]
    Rank {
        /// The rank on which it failed.
        rank: usize,
        /// The operation.
        op: &'static str,
        /// The peer it blames, if any.
        blames: Option<usize>,
        /// The library's message.
        detail: String,
    },
    /// A command beside the benchmark failed.
    #[error("{op}: {detail}")]
    Tool {
        /// The command.
        op: &'static str,
        /// What went wrong, and what to do.
        detail: String,
    },
    /// A rank ended without a result.
    #[error("rank {rank} {detail}")]
    RankDied {
        /// The rank.
        rank: usize,
        /// How it ended.
        detail: String,
    },
}

impl BenchError {
    /// The code with which the program exits: 2 for options, 1 for everything else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::RoutingFile { .. } => 2,
            _ => 1,
        }
    }

    /// Whether this error only repeats what another rank did: such errors are shown when nothing
    /// better is known.
    pub fn is_echo(&self) -> bool {
        matches!(self, Self::Rank { blames: Some(_), .. })
    }

    pub(crate) fn io(path: impl Into<PathBuf>, e: impl std::fmt::Display) -> Self {
        Self::Io { path: path.into(), detail: e.to_string() }
    }
}
