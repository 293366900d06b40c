//! Errors of this crate.

use std::path::PathBuf;

/// What went wrong while a machine was observed or a launch was planned.
///
/// What is merely absent or unreadable on a machine (a GPU off the bus, a garbled sysfs field) is
/// no error: it stands in the model as a flag or a [`Warning`](crate::Warning).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// An argument is wrong; nothing has happened.
    #[error("{op}: {detail}")]
    Argument {
        /// The operation.
        op: &'static str,
        /// What is wrong with which argument.
        detail: String,
    },
    /// A library that is opened at run time is missing, too old or refuses to start.
    #[error("{op}: {library}: {detail}; {remedy}")]
    Library {
        /// The operation.
        op: &'static str,
        /// The library's file name.
        library: String,
        /// What it said.
        detail: String,
        /// How to get a working one.
        remedy: String,
    },
    /// Observations contradict each other or the device they claim to describe.
    #[error("{op}: {detail}")]
    Observation {
        /// The operation.
        op: &'static str,
        /// What contradicts what.
        detail: String,
    },
    /// A GPU that cannot be used as asked (off the bus, MIG, unknown).
    #[error("{op}: GPU {gpu}: {detail}")]
    Gpu {
        /// The operation.
        op: &'static str,
        /// UUID, PCI address or index, whichever names it best.
        gpu: String,
        /// Why.
        detail: String,
    },
    /// Text that was recorded in another format or version, or is corrupt.
    #[error("{op}: {detail}")]
    Format {
        /// The operation.
        op: &'static str,
        /// What does not fit.
        detail: String,
    },
    /// The operating system refused.
    #[error("{op}: {}: {detail}{}", .path.display(), errno(.code))]
    Os {
        /// The operation.
        op: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        detail: String,
        /// errno, if there was one.
        code: Option<i32>,
    },
}

fn errno(code: &Option<i32>) -> String {
    code.map_or(String::new(), |c| format!(" (errno {c})"))
}

impl TopologyError {
    pub(crate) fn os(op: &'static str, path: &std::path::Path, error: &std::io::Error) -> Self {
        Self::Os {
            op,
            path: path.to_owned(),
            detail: error.kind().to_string(),
            code: error.raw_os_error(),
        }
    }
}
