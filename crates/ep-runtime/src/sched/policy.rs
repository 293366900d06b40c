//! How communication gets its SMs, and what became of it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How communication gets its SMs on a GPU. On the host it has no effect but that it is reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
#[non_exhaustive]
pub enum SmPolicy {
    /// SMs of its own, which compute cannot take: a green context. The driver rounds the size up
    /// (on compute capability 9.0 to multiples of 8). Compute has the others if it runs on
    /// [`Ep::compute_stream`]; other streams may use all SMs. A captured graph keeps its partition.
    ///
    /// Where the driver has no green contexts (older than CUDA 12.4, some MIG and MPS set-ups) it is a
    /// margin instead, which a tracing event and [`SmReport::why`] say.
    ///
    /// [`Ep::compute_stream`]: crate::Ep
    Partition {
        /// The least SMs; blocks of the kernels, unless `EpBuilder::comm_sms` says less.
        sms: u32,
    },
    /// SMs that compute leaves free: it launches at most `Ep::compute_sms` blocks that stay. Valid
    /// only if all kernels that stay do so. Refused where the layer's own launches could not all be
    /// resident within the margin, wherever the free SMs are.
    Margin {
        /// SMs left free.
        sms: u32,
    },
    /// None set aside; communication's streams have the greatest priority.
    #[default]
    Shared,
}

impl SmPolicy {
    /// The SMs asked for; 0 for shared ones.
    pub fn sms(self) -> u32 {
        match self {
            Self::Partition { sms } | Self::Margin { sms } => sms,
            Self::Shared => 0,
        }
    }
}

impl fmt::Display for SmPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Partition { sms } => write!(f, "a partition of {sms} SMs"),
            Self::Margin { sms } => write!(f, "a margin of {sms} SMs"),
            Self::Shared => f.write_str("shared SMs"),
        }
    }
}

/// What became of an [`SmPolicy`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SmReport {
    /// What was asked for.
    pub asked: SmPolicy,
    /// What holds; the sizes in it are those asked for.
    pub in_force: SmPolicy,
    /// The GPU, `GPU-…`; `None` on the host.
    pub device: Option<String>,
    /// SMs of the device; 0 on the host.
    pub device_sms: u32,
    /// The most blocks, so SMs, of one of the layer's kernels, tuned launches aside.
    pub blocks: u32,
    /// SMs set aside for the layer, what the device rounded up included.
    pub reserved: u32,
    /// SMs that nothing in this process has set aside, now; 0 on the host.
    pub compute_sms: u32,
    /// Why something else than what was asked for is in force.
    pub why: Option<String>,
}

impl fmt::Display for SmReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.in_force)?;
        if self.in_force != self.asked {
            write!(f, " instead of {}", self.asked)?;
        }
        if let Some(device) = &self.device {
            let Self { reserved, device_sms, blocks, compute_sms, .. } = self;
            write!(
                f,
                ": {reserved} of the {device_sms} SMs of {device} set aside for {blocks} blocks, \
                 {compute_sms} for compute"
            )?;
        }
        match &self.why {
            Some(why) => write!(f, " ({why})"),
            None => Ok(()),
        }
    }
}
