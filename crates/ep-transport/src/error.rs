//! What can go wrong between ranks.

use std::time::Duration;

/// What kind of thing went wrong; the same kinds in every crate of the project.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller's arguments; nothing was launched.
    Argument,
    /// What the ranks asked for does not fit together, or not into what was reserved. Every rank
    /// gets the same verdict, and no payload has moved.
    Mismatch,
    /// A resource of this rank is in use (a result slot, a lane).
    Busy,
    /// A peer did not do its part in time.
    Timeout,
    /// A peer is gone.
    PeerLost,
    /// A rank called [`Group::abort`](crate::Group::abort) or failed by itself and said so.
    Aborted,
    /// The operating system refused.
    Os,
    /// A call of a device's driver failed.
    Device,
    /// This machine or build cannot do it.
    Unsupported,
}

/// An error of a transport or a group.
///
/// Ranks are numbers within the group that reports the error.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// An argument is wrong; nothing has happened.
    #[error("{op}: {detail}")]
    Argument {
        /// The operation.
        op: &'static str,
        /// What is wrong with which argument.
        detail: String,
    },
    /// The ranks were configured differently.
    #[error("{op}: ranks disagree on `{field}`: {detail}")]
    Mismatch {
        /// The operation.
        op: &'static str,
        /// The name of the field.
        field: String,
        /// The ranks that differ from rank 0.
        ranks: Vec<usize>,
        /// Who has which value.
        detail: String,
    },
    /// Peers did not do their part in time.
    #[error("{op}: no answer{} within {after:?}{hint}", from(.peers))]
    Timeout {
        /// The operation and phase.
        op: &'static str,
        /// The absent peers; the one most to blame first. None where no peer is to blame.
        peers: Vec<usize>,
        /// How long was waited.
        after: Duration,
        /// More that is known, starting with a separator, or empty.
        hint: String,
    },
    /// A peer has left or died.
    #[error("{op}: rank {peer} is gone: {detail}")]
    PeerLost {
        /// The operation and phase.
        op: &'static str,
        /// The peer.
        peer: usize,
        /// How that was noticed.
        detail: String,
    },
    /// A rank gave up and told everyone.
    #[error("{op}: rank {by} gave up: {why}")]
    Aborted {
        /// The operation and phase in which it was noticed here.
        op: &'static str,
        /// The rank that gave up.
        by: usize,
        /// The rank it blames, if any.
        blames: Option<usize>,
        /// Its reason.
        why: String,
    },
    /// The rendezvous could not be made.
    #[error("rendezvous at {address}: {detail}")]
    Rendezvous {
        /// Where it was tried.
        address: String,
        /// The rank at fault, if one is known.
        peer: Option<usize>,
        /// What happened and what to do.
        detail: String,
    },
    /// A call of the operating system failed.
    #[error("{op}: {detail}: {}", std::io::Error::from_raw_os_error(*.code))]
    Os {
        /// The operation.
        op: &'static str,
        /// The peer it concerned, if any.
        peer: Option<usize>,
        /// The value of `errno`.
        code: i32,
        /// What was tried.
        detail: String,
    },
    /// A call of a device's driver failed.
    #[error("{op}: {call} failed with code {code}: {detail}")]
    Device {
        /// The operation.
        op: &'static str,
        /// The driver's function.
        call: &'static str,
        /// The driver's code.
        code: i32,
        /// What it means, as far as is known.
        detail: String,
    },
    /// A NIC reported that something to or from a peer failed; the connection is broken.
    #[error("{op}: queue pair {queue_pair} to rank {peer}: {detail}")]
    Completion {
        /// The operation.
        op: &'static str,
        /// The peer.
        peer: usize,
        /// The number of this rank's queue pair.
        queue_pair: u32,
        /// The NIC's status (`ibv_wc_status`).
        status: i32,
        /// What it means, as far as is known.
        detail: String,
    },
    /// This machine, build or transport cannot do it.
    #[error("{op}: {detail}")]
    Unsupported {
        /// The operation.
        op: &'static str,
        /// What is missing and how to get it.
        detail: String,
    },
}

fn from(ranks: &[usize]) -> String {
    if ranks.is_empty() {
        return String::new();
    }
    let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!(" from rank {}", ranks.join(", "))
}

/// Whether a NIC's status (`ibv_wc_status`) blames the request and not the peer: errors of length, of
/// the local queue pair or context, and of local memory.
fn is_local(status: i32) -> bool {
    (1..=4).contains(&status)
}

impl TransportError {
    /// What kind of error this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Argument { .. } => ErrorKind::Argument,
            Self::Mismatch { .. } => ErrorKind::Mismatch,
            Self::Timeout { .. } => ErrorKind::Timeout,
            Self::PeerLost { .. } => ErrorKind::PeerLost,
            Self::Aborted { .. } => ErrorKind::Aborted,
            Self::Rendezvous { .. } | Self::Os { .. } => ErrorKind::Os,
            Self::Device { .. } => ErrorKind::Device,
            Self::Completion { status, .. } if is_local(*status) => ErrorKind::Device,
            Self::Completion { .. } => ErrorKind::PeerLost,
            Self::Unsupported { .. } => ErrorKind::Unsupported,
        }
    }

    /// The rank to blame, if one is known.
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::Mismatch { ranks, .. } => ranks.first().copied(),
            Self::Timeout { peers, .. } => peers.first().copied(),
            Self::PeerLost { peer, .. } => Some(*peer),
            Self::Completion { status, .. } if is_local(*status) => None,
            Self::Completion { peer, .. } => Some(*peer),
            Self::Aborted { by, blames, .. } => Some(blames.unwrap_or(*by)),
            Self::Rendezvous { peer, .. } | Self::Os { peer, .. } => *peer,
            Self::Argument { .. } | Self::Device { .. } | Self::Unsupported { .. } => None,
        }
    }

    /// The code of the operating system or driver, if there is one.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Os { code, .. } | Self::Device { code, .. } => Some(*code),
            Self::Completion { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// Whether the group can still be used after this error: true where nothing had started or
    /// every rank got the same verdict, false where flags may be out of phase.
    pub fn group_usable(&self) -> bool {
        matches!(
            self.kind(),
            ErrorKind::Argument | ErrorKind::Mismatch | ErrorKind::Busy | ErrorKind::Unsupported
        )
    }

    /// The error with ranks as they are numbered elsewhere: by their numbers here. What is only said in
    /// words stays.
    pub(crate) fn renumbered(mut self, numbers: &[usize]) -> Self {
        let to = |rank: &mut usize| *rank = numbers.get(*rank).copied().unwrap_or(*rank);
        match &mut self {
            Self::Mismatch { ranks: all, .. } | Self::Timeout { peers: all, .. } => {
                all.iter_mut().for_each(to);
            }
            Self::PeerLost { peer, .. } | Self::Completion { peer, .. } => to(peer),
            Self::Aborted { by, blames, .. } => {
                [Some(by), blames.as_mut()].into_iter().flatten().for_each(to)
            }
            Self::Rendezvous { peer, .. } | Self::Os { peer, .. } => peer.iter_mut().for_each(to),
            Self::Argument { .. } | Self::Device { .. } | Self::Unsupported { .. } => {}
        }
        self
    }

    /// An [`TransportError::Os`] from an errno of `rustix`.
    #[cfg(not(loom))]
    pub(crate) fn os(op: &'static str, detail: impl Into<String>, e: rustix::io::Errno) -> Self {
        Self::Os { op, peer: None, code: e.raw_os_error(), detail: detail.into() }
    }
}
