//! What a policy comes to on a device.

use std::sync::Arc;

use ep_topology::{Basis, Launch, MarginPlanner, SmMap, SmObservation, TopologyError};

use super::carve::{Carver, NoPart, Partition, SmDevice};
use super::lease::SmLease;
use super::policy::{SmPolicy, SmReport};
use crate::{EpError, Result};

const OP: &str = "SM policy";

/// SMs that were set aside, until it is dropped.
#[derive(Debug)]
pub(crate) struct Reservation<D: SmDevice> {
    pub carver: Arc<Carver<D>>,
    /// The partition goes before the lease: nobody may count on SMs that are not back.
    pub partition: Option<Partition<D>>,
    lease: Option<SmLease>,
    asked: SmPolicy,
    in_force: SmPolicy,
    blocks: u32,
    why: Option<String>,
}

impl<D: SmDevice> Reservation<D> {
    pub fn report(&self) -> SmReport {
        let budget = &self.carver.budget;
        SmReport {
            asked: self.asked,
            in_force: self.in_force,
            device: Some(budget.device().to_owned()),
            device_sms: budget.sms(),
            blocks: self.blocks,
            reserved: self.lease.as_ref().map_or(0, SmLease::sms),
            compute_sms: budget.compute_sms(),
            why: self.why.clone(),
        }
    }

    /// Whether these launches may replace those it was made for.
    pub fn check(&self, launches: &[Launch]) -> Result<()> {
        match self.in_force {
            SmPolicy::Margin { sms } => fits_margin(&self.carver.device, sms, launches),
            SmPolicy::Partition { .. } => {
                let sms = self.partition.as_ref().map_or(0, Partition::sms);
                fits_partition(sms, launches)
            }
            SmPolicy::Shared => Ok(()),
        }
    }
}

/// Sets SMs aside for `holder`, whose kernels are launched as `launches` say.
pub(crate) fn reserve<D: SmDevice>(
    carver: &Arc<Carver<D>>,
    holder: &str,
    asked: SmPolicy,
    blocks: u32,
    launches: &[Launch],
) -> Result<Reservation<D>> {
    let shared = Reservation {
        carver: carver.clone(),
        partition: None,
        lease: None,
        asked,
        in_force: asked,
        blocks,
        why: None,
    };
    match asked {
        SmPolicy::Shared => Ok(shared),
        SmPolicy::Margin { sms } => {
            fits_margin(&carver.device, sms, launches)?;
            let lease = Some(carver.budget.lease(holder, sms)?);
            Ok(Reservation { lease, ..shared })
        }
        SmPolicy::Partition { sms } => {
            let lease = carver.budget.lease(holder, sms)?;
            match carver.carve(sms) {
                Ok(partition) => {
                    fits_partition(partition.sms(), launches)?;
                    lease.grow(partition.sms())?;
                    Ok(Reservation { partition: Some(partition), lease: Some(lease), ..shared })
                }
                Err(NoPart::Refused(why)) => Err(refused(format!("{asked}: {why}"), None)),
                Err(NoPart::Missing(why)) => {
                    fits_margin(&carver.device, sms, launches).map_err(|e| instead(e, &why))?;
                    let in_force = SmPolicy::Margin { sms };
                    let device = carver.budget.device();
                    tracing::warn!(device, sms, why, "{in_force} instead of {asked}");
                    Ok(Reservation { lease: Some(lease), in_force, why: Some(why), ..shared })
                }
            }
        }
    }
}

fn refused(detail: String, enough: Option<u32>) -> EpError {
    EpError::SmPolicy { op: OP, detail, enough }
}

/// Says of a margin's refusal that a margin is not what was asked for.
fn instead(error: EpError, why: &str) -> EpError {
    match error {
        EpError::SmPolicy { op, detail, enough } => {
            let detail = format!("there is no partition ({why}), and in its place {detail}");
            EpError::SmPolicy { op, detail, enough }
        }
        other => other,
    }
}

/// More blocks than SMs would run in waves, and never if they are to be resident together.
fn fits_partition(sms: u32, launches: &[Launch]) -> Result<()> {
    let largest = launches.iter().map(|launch| launch.blocks).max().unwrap_or(0);
    if largest <= sms {
        return Ok(());
    }
    let detail = format!("a launch of {largest} blocks in a partition of {sms} SMs");
    Err(refused(detail, Some(largest)))
}

/// Fails unless all blocks of each launch are resident at once within a margin, wherever it is.
fn fits_margin<D: SmDevice>(device: &D, sms: u32, launches: &[Launch]) -> Result<()> {
    let map = map_for(device, launches)?;
    let planner = MarginPlanner::new(&map);
    let bad = |e: TopologyError| refused(e.to_string(), None);
    let mut worst: Option<(u32, String)> = None;
    for launch in launches {
        let plan = planner.plan(*launch).map_err(bad)?;
        let Some(margin) = plan.all_resident else {
            return Err(refused(format!("no margin is enough. {}", plan.explanation), None));
        };
        let needed = margin.worst_case;
        if needed > sms && worst.as_ref().is_none_or(|(most, _)| needed > *most) {
            worst = Some((needed, plan.explanation));
        }
    }
    let Some((enough, explanation)) = worst else { return Ok(()) };
    let best = planner.best(sms, Basis::WorstCase);
    let instead = best.first().map_or(String::new(), |fit| match fit.cluster {
        1 => format!(", or {} blocks without clusters", fit.blocks),
        c => format!(", or {} blocks in clusters of {c}", fit.blocks),
    });
    let detail =
        format!("a margin of {sms} SMs is not enough; {enough} would do{instead}. {explanation}");
    Err(refused(detail, Some(enough)))
}

/// What is known of the device's domains. Without clusters nothing has to be.
fn map_for<D: SmDevice>(device: &D, launches: &[Launch]) -> Result<SmMap> {
    if launches.iter().any(|launch| launch.cluster > 1) {
        let unknown = |why| {
            refused(format!("a launch has clusters, and no SM's domain is known: {why}"), None)
        };
        return device.map().map_err(unknown);
    }
    let seen = SmObservation { sm_count: device.sms(), ..SmObservation::default() };
    SmMap::new(seen).map_err(|e| refused(e.to_string(), None))
}
