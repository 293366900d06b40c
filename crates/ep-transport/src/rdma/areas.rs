//! What a NIC knows of a rank's memory: one area on hosts, two where the window is on a GPU and what
//! stands behind it is not.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

#[cfg(feature = "cuda")]
use super::OP;
use crate::TransportError;
use crate::host_link::Region;

/// Memory from some offset of a rank's on, as a NIC knows it. It ends where the next begins: no put
/// or record lies in two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Area {
    pub from: usize,
    /// The address of its first byte.
    pub address: u64,
    pub key: u32,
}

/// The address of a byte and the key to it.
pub(super) fn find(areas: &[Area], at: usize) -> (u64, u32) {
    let area = areas.iter().rfind(|area| area.from <= at);
    // Unconnected peers have no areas; nothing is sent to them.
    area.map_or((0, 0), |area| (area.address + (at - area.from) as u64, area.key))
}

/// Memory that is to be registered.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// Pages of this process from `from` bytes into the region to its end.
    Pages { region: Arc<dyn Region>, from: usize },
    /// A device's memory, exported as a dma-buf.
    #[cfg(feature = "cuda")]
    DmaBuf(Arc<DmaBuf>),
}

/// The memory of a device as a file that a NIC's driver imports.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub(super) struct DmaBuf {
    pub fd: std::os::fd::OwnedFd,
    /// Where the device has it; peers' requests name its bytes by this.
    pub address: u64,
    pub bytes: usize,
    /// What the file stands for stays allocated.
    pub _memory: Box<dyn std::fmt::Debug + Send + Sync>,
}

/// Why memory cannot be registered.
#[derive(Debug)]
pub(super) enum Refused {
    /// NICs do not reach a device's memory here, which only says that the window has to be elsewhere.
    #[cfg(feature = "cuda")]
    Unreachable(String),
    /// Something else is wrong, with windows anywhere.
    Failed(TransportError),
}

impl From<TransportError> for Refused {
    fn from(error: TransportError) -> Self {
        Self::Failed(error)
    }
}

impl From<Refused> for TransportError {
    fn from(refused: Refused) -> Self {
        match refused {
            #[cfg(feature = "cuda")]
            Refused::Unreachable(detail) => Self::Unsupported { op: OP, detail },
            Refused::Failed(error) => error,
        }
    }
}

impl Source {
    pub(super) fn address(&self) -> u64 {
        match self {
            Self::Pages { region, from } => region.base().as_ptr() as u64 + *from as u64,
            #[cfg(feature = "cuda")]
            Self::DmaBuf(buf) => buf.address,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Pages { region, from } => region.bytes() - from,
            #[cfg(feature = "cuda")]
            Self::DmaBuf(buf) => buf.bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_is_in_the_last_area_that_begins_before_it() {
        let one = [Area { from: 0, address: 1 << 20, key: 7 }];
        assert_eq!(find(&one, 4096), ((1 << 20) + 4096, 7));
        let two = [one[0], Area { from: 100, address: 1 << 30, key: 8 }];
        assert_eq!(find(&two, 99), ((1 << 20) + 99, 7));
        assert_eq!(find(&two, 100), (1 << 30, 8));
        assert_eq!(find(&two, 103), ((1 << 30) + 3, 8));
        assert_eq!(find(&[], 5), (0, 0));
    }
}
