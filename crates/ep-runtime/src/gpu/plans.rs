//! Which plan each of a layer's kernels is launched by: the caller's, else one that tuning found for
//! rows of this size, else what ships.

use ep_kernels::cuda::DeviceProperties;
use ep_kernels::cuda::moe::MovePlan;

use super::Tuning;
use crate::Result;

/// The kernels that have a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Moving {
    Dispatch,
    Expand,
    Reduce,
    Combine,
}

impl Moving {
    pub const ALL: [Self; 4] = [Self::Dispatch, Self::Expand, Self::Reduce, Self::Combine];

    /// As [`TuneKey::operation`](crate::sched::tune::TuneKey::operation) has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Expand => "expand",
            Self::Reduce => "reduce",
            Self::Combine => "combine",
        }
    }

    /// Whether rows are copied; else they are summed.
    pub fn copies(self) -> bool {
        matches!(self, Self::Dispatch | Self::Expand)
    }

    /// Whether `plan` can be launched on `device` in a group of `ranks`.
    pub fn check(self, plan: &MovePlan, ranks: usize, device: &DeviceProperties) -> Result<()> {
        match self.copies() {
            true => plan.check_rows(ranks, device)?,
            false => plan.check_sums(ranks, device)?,
        }
        Ok(())
    }
}

/// Where a plan comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PlanOrigin {
    /// From the caller: `EpBuilder::tuning` or [`Ep::retune`](crate::Ep::retune).
    Given,
    /// Found by a search when this layer was built.
    Searched,
    /// Found by an earlier search, and kept.
    Cached,
    /// What this crate ships for the device.
    Shipped,
}

/// What a search found, now or earlier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    /// Bytes of the rows that it was found for; others are launched by what ships.
    pub row_bytes: u32,
    pub plan: MovePlan,
    pub origin: PlanOrigin,
}

/// The plans of a layer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Plans {
    pub given: Tuning,
    pub found: [Option<Found>; 4],
}

impl Plans {
    /// The plan for rows of `row_bytes`, and where it comes from.
    pub fn of(&self, moving: Moving, row_bytes: u32, shipped: MovePlan) -> (MovePlan, PlanOrigin) {
        let found = self.found[moving as usize].filter(|found| found.row_bytes == row_bytes);
        match (self.given.of(moving), found) {
            (Some(given), _) => (given, PlanOrigin::Given),
            (None, Some(found)) => (found.plan, found.origin),
            (None, None) => (shipped, PlanOrigin::Shipped),
        }
    }
}
