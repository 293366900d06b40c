//! A device whose SMs are numbers.

use std::collections::BTreeSet;
use std::sync::Arc;

use ep_topology::{SmMap, SmObservation};
use parking_lot::Mutex;

use crate::sched::carve::{Carver, NoPart, SmDevice};
use crate::sched::lease::SmBudget;

/// A device of `sms` SMs that is cut into multiples of `unit`.
#[derive(Debug)]
pub struct SimDevice {
    pub sms: u32,
    pub unit: u32,
    /// Why it cannot be cut at all.
    pub missing: Option<String>,
    /// Domains that clusters stay in; `None`: nobody looked.
    pub domains: Option<Vec<u32>>,
    /// SMs of every live part but those that are left over.
    pub live: Arc<Mutex<Vec<BTreeSet<u32>>>>,
}

/// A set of SMs. Taken from the live ones when it goes.
#[derive(Debug)]
pub struct SimPart {
    pub sms: BTreeSet<u32>,
    live: Option<Arc<Mutex<Vec<BTreeSet<u32>>>>>,
}

impl Drop for SimPart {
    fn drop(&mut self) {
        if let Some(live) = &self.live {
            live.lock().retain(|sms| *sms != self.sms);
        }
    }
}

impl SimDevice {
    /// As an H200: 132 SMs, multiples of 8, two domains of 66 SMs.
    pub fn hopper() -> Self {
        Self { sms: 132, unit: 8, missing: None, domains: Some(vec![66, 66]), live: Arc::default() }
    }

    pub fn carver(self) -> Arc<Carver<Self>> {
        let budget = SmBudget::private("GPU-simulated", self.sms).unwrap();
        Arc::new(Carver::new(self, budget))
    }
}

impl SmDevice for SimDevice {
    type Part = SimPart;

    fn sms(&self) -> u32 {
        self.sms
    }

    fn split(
        &self,
        from: Option<&SimPart>,
        sms: u32,
    ) -> Result<(SimPart, Option<SimPart>), NoPart> {
        if let Some(why) = &self.missing {
            return Err(NoPart::Missing(why.clone()));
        }
        let whole = || (0..self.sms).collect::<BTreeSet<u32>>();
        let mut left: Vec<u32> = from.map_or_else(whole, |p| p.sms.clone()).into_iter().collect();
        let size = sms.next_multiple_of(self.unit) as usize;
        if size > left.len() {
            return Err(NoPart::Refused(format!("{sms} SMs of {} cannot be cut off", left.len())));
        }
        let rest: BTreeSet<u32> = left.split_off(size).into_iter().collect();
        let sms: BTreeSet<u32> = left.into_iter().collect();
        self.live.lock().push(sms.clone());
        let part = SimPart { sms, live: Some(self.live.clone()) };
        Ok((part, (!rest.is_empty()).then_some(SimPart { sms: rest, live: None })))
    }

    fn size(&self, part: &SimPart) -> u32 {
        part.sms.len() as u32
    }

    fn map(&self) -> Result<SmMap, String> {
        let domains = self.domains.as_ref().ok_or("the probe failed")?;
        let mut next = 0;
        let domain = |size: &u32| {
            let sms = (next..next + size).collect::<Vec<u32>>();
            next += size;
            sms
        };
        let together: Vec<Vec<u32>> = domains.iter().map(domain).collect();
        let active = |size: u32| (size, domains.iter().map(|d| d / size).sum());
        SmMap::new(SmObservation {
            sm_count: self.sms,
            together,
            max_active_clusters: [1, 2, 4, 8].map(active).into(),
            ..SmObservation::default()
        })
        .map_err(|e| e.to_string())
    }
}
