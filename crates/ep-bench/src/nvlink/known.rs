//! A job whose answers are known.

use std::sync::{Mutex, PoisonError};

use ep_kernels::cuda::Device;
use ep_runtime::{Ep, PlanInForce, Tune};

use super::reference::Reference;
use super::way::Way;
use crate::case::Case;
use crate::host::kind;
use crate::plan::Traffic;

/// A job whose answers are known.
#[derive(Debug)]
pub struct Job {
    /// What is sent where.
    pub case: Case,
    /// Rows between ranks.
    pub traffic: Traffic,
    /// Whether experts' rows are summed before they travel.
    pub reduced: bool,
    /// The host backend's answers, by rank.
    pub references: Vec<Reference>,
    /// The GPUs.
    pub devices: Vec<Device>,
    /// Whether its layers are tuned.
    pub tune: Tune,
    /// How its ranks reach each other.
    pub way: Way,
    plans: Mutex<Vec<PlanInForce>>,
}

impl Job {
    pub(super) fn new(
        case: Case,
        traffic: Traffic,
        reduced: bool,
        references: Vec<Reference>,
        devices: &[Device],
    ) -> Self {
        let (devices, tune, way) = (devices.to_vec(), Tune::Off, Way::Mapped);
        let plans = Mutex::default();
        Self { case, traffic, reduced, references, devices, tune, way, plans }
    }

    /// Remembers how a layer of this job launches its kernels: rank 0's.
    pub(super) fn launched(&self, ep: &Ep) {
        if ep.rank() == 0 {
            let (sent, back) = (kind(self.case.dtype), kind(self.case.dtype.back()));
            let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
            *plans = ep.plans_in_force(sent, back);
        }
    }

    /// How the layer that was built last launches its kernels.
    pub fn plans(&self) -> Vec<PlanInForce> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
