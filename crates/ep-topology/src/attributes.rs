//! What the CUDA driver says about a device; the caller asks it, this crate does not.

use serde::{Deserialize, Serialize};

use crate::{PciAddress, SmMap, SmObservation};

/// Driver attributes of one CUDA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceAttributes {
    /// CUDA's ordinal in this process; obeys `CUDA_VISIBLE_DEVICES`, so it differs from NVML's.
    pub ordinal: u32,
    /// UUID, `GPU-…` or `MIG-…`.
    pub uuid: String,
    /// PCI address.
    pub pci: Option<PciAddress>,
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Shared memory of an SM, in bytes.
    pub shared_per_sm: u32,
    /// Shared memory that a block can opt in to, in bytes.
    pub shared_per_block: u32,
    /// Level-2 cache in bytes.
    pub l2_bytes: u64,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
}

/// A CUDA device with what was observed of its SMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaDevice {
    /// What the driver says.
    pub attributes: DeviceAttributes,
    /// What an SM probe saw; `None` if none ran.
    pub sms: Option<SmMap>,
}

impl CudaDevice {
    /// A device and, if a probe ran, what it saw.
    ///
    /// # Errors
    /// [`TopologyError::Observation`](crate::TopologyError::Observation) if the observation
    /// contradicts itself or the device's SM count.
    pub fn new(
        attributes: DeviceAttributes,
        observation: Option<SmObservation>,
    ) -> Result<Self, crate::TopologyError> {
        let sms = observation.map(SmMap::new).transpose()?;
        match &sms {
            Some(map) if map.sm_count() != attributes.sm_count => {
                Err(crate::TopologyError::Observation {
                    op: "SM map",
                    detail: format!(
                        "observed on {} SMs, but the driver says {}",
                        map.sm_count(),
                        attributes.sm_count
                    ),
                })
            }
            _ => Ok(Self { attributes, sms }),
        }
    }
}
