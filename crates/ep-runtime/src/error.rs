//! What can go wrong in a call.

use ep_kernels::KernelError;
use ep_transport::{ErrorKind, TransportError};

/// An error of this crate.
///
/// Ranks are numbers within the group. [`EpError::group_usable`] tells whether the next operation
/// may be submitted, or whether the group has to be rebuilt.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EpError {
    /// An argument of this rank is wrong. Nothing was launched and no peer was told; the call can
    /// be repeated with right arguments.
    #[error("{op}: {detail}")]
    Argument {
        /// The operation.
        op: &'static str,
        /// Which argument, what it was and what it may be.
        detail: String,
    },
    /// The expert ids of a rank cannot be routed. Every rank gets this verdict; no payload moved.
    #[error("{op}: rank {rank}, token {token}: {detail}")]
    Ids {
        /// The operation.
        op: &'static str,
        /// The rank whose ids are wrong.
        rank: usize,
        /// The token's index on that rank.
        token: usize,
        /// The offending id.
        id: i64,
        /// What is wrong with it.
        detail: String,
    },
    /// A rank would receive more rows than its window holds. Every rank gets this verdict; no
    /// payload moved.
    #[error(
        "{op}: rank {rank} would receive {needed} {what}, but {reserved} are reserved; raise {setting}"
    )]
    Capacity {
        /// The operation.
        op: &'static str,
        /// The first rank that overflows.
        rank: usize,
        /// Which kind of row.
        what: &'static str,
        /// The largest number of rows any rank needs.
        needed: usize,
        /// The rows reserved on every rank.
        reserved: usize,
        /// The setting that reserves them.
        setting: &'static str,
    },
    /// The ranks did not ask for the same operation, or were built differently. Every rank gets
    /// this verdict; no payload moved.
    #[error("{op}: ranks disagree on `{field}`: {detail}")]
    Disagreement {
        /// The operation.
        op: &'static str,
        /// What differs.
        field: String,
        /// The ranks that differ from rank 0.
        ranks: Vec<usize>,
        /// Who has which value.
        detail: String,
    },
    /// Whether the ranks refused an operation on a GPU is not known any more: more operations of the lane
    /// were submitted ahead of the GPU, or more were refused, than the host keeps. It is to be taken for
    /// refused. Who waits for an event of each lane, or asks for a verdict, more often never sees it.
    #[cfg(feature = "cuda")]
    #[error(
        "{op}: whether the ranks refused it is no longer known: {kept} later operations of lane {lane} were \
         submitted before it was done, or refused; wait for an event of the lane, or ask for a verdict, \
         before so many"
    )]
    Forgotten {
        /// The operation.
        op: &'static str,
        /// The lane.
        lane: usize,
        /// How many operations the host may be late, and how many refusals it remembers.
        kept: u64,
    },
    /// All result slots of this rank are owned by results. Nothing was launched.
    #[error(
        "{op}: all {slots} result slots are in use; combine, release or drop a result, or build with more slots"
    )]
    NoFreeSlot {
        /// The operation.
        op: &'static str,
        /// The number of slots.
        slots: usize,
    },
    /// All handles of a layer on a GPU are in use. Nothing was launched.
    #[error(
        "{op}: all {handles} handles are in use; drop one, or build with more (EpBuilder::handles)"
    )]
    NoFreeHandle {
        /// The operation.
        op: &'static str,
        /// The number of handles.
        handles: usize,
    },
    /// The lane has an operation in flight. Nothing was launched.
    #[error(
        "{op}: lane {lane} has an operation in flight; finish it or use another of the {lanes} lanes"
    )]
    LaneBusy {
        /// The operation.
        op: &'static str,
        /// The lane.
        lane: usize,
        /// The number of lanes.
        lanes: usize,
    },
    /// More SMs were asked for than are free on the device. Nothing was taken.
    #[error("{op}: {asked} SMs asked for, {free} of the {sms} of {device} are free: {holders}")]
    SmsTaken {
        /// The operation.
        op: &'static str,
        /// The device's UUID.
        device: String,
        /// SMs asked for.
        asked: u32,
        /// SMs that can be had.
        free: u32,
        /// SMs of the device.
        sms: u32,
        /// Who has how many.
        holders: String,
    },
    /// SMs cannot be set aside as asked: a launch might not start, or the device has no such
    /// partition. Nothing was taken.
    #[error("{op}: {detail}")]
    SmPolicy {
        /// The operation.
        op: &'static str,
        /// Why, and what would do.
        detail: String,
        /// SMs that would do, if any number does.
        enough: Option<u32>,
    },
    /// Operations ahead in a submit order were not submitted in time. The place was given up.
    #[error("{op}: {ahead} operations ahead were not submitted within {after:?}")]
    OutOfTurn {
        /// The operation.
        op: &'static str,
        /// Places ahead, those given up included.
        ahead: u64,
        /// How long it waited.
        after: std::time::Duration,
    },
    /// Rows did not arrive as they were announced, so the transport or a peer is broken. The group
    /// was told.
    #[error("{op}: {detail}")]
    Corrupt {
        /// The operation.
        op: &'static str,
        /// What does not fit.
        detail: String,
    },
    /// A call of CUDA failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] ep_kernels::cuda::CudaError),
    /// The group or transport failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

/// For what callers make of this crate's types before a call, such as a placement.
impl From<KernelError> for EpError {
    fn from(e: KernelError) -> Self {
        Self::Argument { op: "argument", detail: e.to_string() }
    }
}

impl EpError {
    /// What kind of error this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Argument { .. } | Self::SmPolicy { .. } => ErrorKind::Argument,
            Self::Ids { .. } | Self::Capacity { .. } | Self::Disagreement { .. } => {
                ErrorKind::Mismatch
            }
            #[cfg(feature = "cuda")]
            Self::Forgotten { .. } => ErrorKind::Mismatch,
            Self::NoFreeSlot { .. }
            | Self::NoFreeHandle { .. }
            | Self::LaneBusy { .. }
            | Self::SmsTaken { .. }
            | Self::OutOfTurn { .. } => ErrorKind::Busy,
            #[cfg(feature = "cuda")]
            Self::Cuda(e) => match e {
                ep_kernels::cuda::CudaError::InvalidArgument { .. } => ErrorKind::Argument,
                _ => ErrorKind::Device,
            },
            Self::Corrupt { .. } => ErrorKind::Aborted,
            Self::Transport(e) => e.kind(),
        }
    }

    /// The rank to blame, if one is known.
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::Ids { rank, .. } | Self::Capacity { rank, .. } => Some(*rank),
            Self::Disagreement { ranks, .. } => ranks.first().copied(),
            Self::Transport(e) => e.peer(),
            Self::Argument { .. }
            | Self::NoFreeSlot { .. }
            | Self::NoFreeHandle { .. }
            | Self::LaneBusy { .. }
            | Self::SmsTaken { .. }
            | Self::SmPolicy { .. }
            | Self::OutOfTurn { .. }
            | Self::Corrupt { .. } => None,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) | Self::Forgotten { .. } => None,
        }
    }

    /// The code of the operating system, if there is one.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Transport(e) => e.code(),
            #[cfg(feature = "cuda")]
            Self::Cuda(ep_kernels::cuda::CudaError::Driver { code, .. }) => Some(*code),
            _ => None,
        }
    }

    /// Whether the group can still be used. After a time-out, a lost peer or an abort it cannot:
    /// drop it and build another.
    pub fn group_usable(&self) -> bool {
        match self {
            Self::Transport(e) => e.group_usable(),
            Self::Corrupt { .. } => false,
            _ => true,
        }
    }

    /// Whether ranks called different operations.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_operations(&self) -> bool {
        matches!(self, Self::Disagreement { field, .. } if field == crate::notify::OPERATION)
    }

    pub(crate) fn argument(op: &'static str, detail: impl Into<String>) -> Self {
        Self::Argument { op, detail: detail.into() }
    }
}
