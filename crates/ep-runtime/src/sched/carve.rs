//! Partitions of one device: disjoint, and apart from what compute runs on.

use std::sync::{Arc, Weak};

use ep_topology::SmMap;
use parking_lot::Mutex;

use super::lease::SmBudget;
use crate::Result;

/// A device as the scheduler sees it.
pub(crate) trait SmDevice: Send + Sync {
    /// Some of its SMs.
    type Part: Send + Sync + std::fmt::Debug;

    fn sms(&self) -> u32;

    /// Splits at least `sms` SMs off a part, or off the whole device. Gives what remains too.
    fn split(
        &self,
        from: Option<&Self::Part>,
        sms: u32,
    ) -> Result<(Self::Part, Option<Self::Part>), NoPart>;

    fn size(&self, part: &Self::Part) -> u32;

    /// Which SMs share clusters. Asked for only where a launch has clusters.
    fn map(&self) -> Result<SmMap, String>;
}

/// Why there is no partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoPart {
    /// This device or driver has none at all.
    Missing(String),
    /// Not this one.
    Refused(String),
}

/// What a device was cut into.
#[derive(Debug)]
pub(crate) struct Carver<D: SmDevice> {
    pub device: D,
    pub budget: SmBudget,
    cuts: Mutex<Cuts<D::Part>>,
}

#[derive(Debug)]
struct Cuts<P> {
    /// What no partition was cut from yet; the whole device before the first cut.
    rest: Option<Arc<P>>,
    /// Partitions that were given back.
    spare: Vec<P>,
    /// How many are in use.
    used: usize,
    /// What compute runs on, while it does: `rest` as it was then.
    compute: Weak<P>,
}

impl<P> Cuts<P> {
    fn whole() -> Self {
        Self { rest: None, spare: Vec::new(), used: 0, compute: Weak::new() }
    }

    /// Whether compute holds what is left: somebody beside `rest` does.
    fn computing(&self) -> bool {
        self.compute.strong_count() > 1
    }

    /// What nobody uses is one piece again, so that any size can be cut from it.
    fn mend(&mut self) {
        if self.used == 0 && !self.computing() {
            *self = Self::whole();
        }
    }
}

impl<D: SmDevice> Carver<D> {
    pub fn new(device: D, budget: SmBudget) -> Self {
        Self { device, budget, cuts: Mutex::new(Cuts::whole()) }
    }

    /// A partition of at least `sms` SMs that no other overlaps.
    pub fn carve(self: &Arc<Self>, sms: u32) -> Result<Partition<D>, NoPart> {
        let mut cuts = self.cuts.lock();
        cuts.mend();
        let fits = |part: &D::Part| self.device.size(part) >= sms;
        let smallest = (0..cuts.spare.len())
            .filter(|&i| fits(&cuts.spare[i]))
            .min_by_key(|&i| self.device.size(&cuts.spare[i]));
        let part = match smallest {
            Some(at) => cuts.spare.swap_remove(at),
            None => self.cut(&mut cuts, sms)?,
        };
        cuts.used += 1;
        Ok(Partition { carver: self.clone(), part: Some(part) })
    }

    fn cut(&self, cuts: &mut Cuts<D::Part>, sms: u32) -> Result<D::Part, NoPart> {
        if cuts.computing() {
            let why = "compute runs on the SMs that are left: build all layers before asking for \
                       compute streams, or let layers share SMs (EpBuilder::share_sms)";
            return Err(NoPart::Refused(why.into()));
        }
        let (part, rest) = self.device.split(cuts.rest.as_deref(), sms)?;
        match rest {
            Some(rest) => {
                cuts.rest = Some(Arc::new(rest));
                Ok(part)
            }
            None => {
                let size = self.device.size(&part);
                let why = format!(
                    "a partition of {sms} SMs takes {size}, all that are left; compute would have none"
                );
                Err(NoPart::Refused(why))
            }
        }
    }

    /// The SMs in no partition, to run compute on. `None`: nothing was partitioned.
    pub fn compute(&self) -> Option<Arc<D::Part>> {
        let mut cuts = self.cuts.lock();
        let rest = cuts.rest.clone().filter(|_| cuts.used > 0)?;
        cuts.compute = Arc::downgrade(&rest);
        Some(rest)
    }

    fn give_back(&self, part: D::Part) {
        let mut cuts = self.cuts.lock();
        cuts.used -= 1;
        cuts.spare.push(part);
        cuts.mend();
    }
}

/// A partition in use; given back when dropped.
#[derive(Debug)]
pub(crate) struct Partition<D: SmDevice> {
    carver: Arc<Carver<D>>,
    part: Option<D::Part>,
}

impl<D: SmDevice> Partition<D> {
    pub fn part(&self) -> &D::Part {
        self.part.as_ref().expect("taken only when dropped")
    }

    pub fn sms(&self) -> u32 {
        self.carver.device.size(self.part())
    }
}

impl<D: SmDevice> Drop for Partition<D> {
    fn drop(&mut self) {
        if let Some(part) = self.part.take() {
            self.carver.give_back(part);
        }
    }
}
