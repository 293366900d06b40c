//! What figures mean: losses and what is asked of them.

use super::points::{Beside, Policy};
use super::seat::Sms;

/// What a point came to. Rates are of the slowest rank, losses of the rank that lost most.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Half of the calls alone took no longer, microseconds.
    pub alone_us: Option<f64>,
    /// The same right behind compute, in the clocks that it leaves.
    pub warm_us: Option<f64>,
    /// The same beside compute.
    pub beside_us: Option<f64>,
    /// Calls that waited for the end of what held the SMs.
    pub blocked: usize,
    /// Calls that do not count: compute ended before them.
    pub outside: usize,
    /// 10¹² operations per second of compute alone on all SMs.
    pub tflops_all: Option<f64>,
    /// On those that are left.
    pub tflops_own: Option<f64>,
    /// On those, while calls run back to back.
    pub tflops_beside: Option<f64>,
    /// Share of compute's speed on all SMs that is lost beside calls.
    pub loss: Option<f64>,
    /// Share of its speed on its SMs.
    pub loss_own: Option<f64>,
    /// Mean time of those calls.
    pub back_to_back_us: Option<f64>,
    /// MHz.
    pub clock_alone: Option<f64>,
    /// MHz.
    pub clock_warm: Option<f64>,
    /// MHz.
    pub clock_beside: Option<f64>,
}

impl Figures {
    /// Share by which calls are slower beside compute.
    pub fn slowdown(&self) -> Option<f64> {
        Some(self.beside_us? / self.alone_us? - 1.0)
    }

    /// The part of it that lower clocks explain: by how much calls alone are slower right behind
    /// compute.
    pub fn by_clocks(&self) -> Option<f64> {
        Some(self.warm_us? / self.alone_us? - 1.0)
    }

    /// The part that sharing the GPU explains: by how much calls beside compute are slower than right
    /// behind it. 1 + `slowdown` is 1 + `by_clocks` times 1 + this.
    pub fn by_contention(&self) -> Option<f64> {
        Some(self.beside_us? / self.warm_us? - 1.0)
    }
}

/// A bound, and what was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// Of what.
    pub what: &'static str,
    /// What was found; `None`: nothing, which misses any bound.
    pub found: Option<f64>,
    /// At most.
    pub must: f64,
    /// Wanted.
    pub goal: f64,
}

impl Bound {
    /// In words.
    pub fn verdict(&self) -> &'static str {
        match self.found {
            Some(found) => crate::nvlink::suite::verdict(found, self.must, self.goal),
            None => "missed",
        }
    }
}

/// What a point has to reach, as far as something is asked of it.
pub fn bounds(policy: Policy, beside: Beside, sms: &Sms, figures: &Figures) -> Vec<Bound> {
    let mut bounds = Vec::new();
    let slower = match (policy, beside) {
        (Policy::Partition, Beside::Holder) => Some((0.03, 0.01)),
        (Policy::Partition, Beside::Gemm) => Some((0.12, 0.06)),
        (Policy::Margin, Beside::Holder) => Some((0.08, 0.03)),
        _ => None,
    };
    if let Some((must, goal)) = slower {
        bounds.push(Bound { what: "slowdown", found: figures.slowdown(), must, goal });
    }
    if policy != Policy::Shared && beside == Beside::Holder {
        let found = Some(figures.blocked as f64);
        bounds.push(Bound { what: "blocked", found, must: 0.0, goal: 0.0 });
    }
    if policy != Policy::Shared && beside == Beside::Gemm {
        let must = f64::from(sms.taken) / f64::from(sms.all.max(1)) + 0.05;
        bounds.push(Bound { what: "compute's loss", found: figures.loss, must, goal: must });
        // Nothing is asked of it in its own SMs but as a goal.
        let (found, must) = (figures.loss_own, f64::INFINITY);
        bounds.push(Bound { what: "loss in its SMs", found, must, goal: 0.05 });
    }
    bounds
}

/// The worst of several verdicts; `None` where nothing was asked.
pub fn worst(bounds: &[Bound]) -> Option<&'static str> {
    let verdicts: Vec<_> = bounds.iter().map(Bound::verdict).collect();
    ["missed", "must", "goal"].into_iter().find(|v| verdicts.contains(v))
}

/// The share of speed lost when a launch takes `after` instead of `before`.
pub fn loss(before: Option<f64>, after: Option<f64>) -> Option<f64> {
    Some(1.0 - before? / after?)
}

/// The median, nearest rank.
pub fn median(values: &[f64]) -> Option<f64> {
    crate::stats::Summary::of(values).map(|summary| summary.p50_us)
}
