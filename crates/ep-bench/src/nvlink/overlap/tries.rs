//! Launches that must never block, with every attribute, and one that does.

use ep_kernels::cuda::LaunchFlags;
use ep_runtime::{LaunchAttributes, MovePlan, Tuning};

use super::points::{OPERATIONS, Policy, Scope, shuffle};
use super::seat::{Beheld, Seat};
use crate::Result;
use crate::case::Operation;
use crate::nvlink::Job;
use crate::nvlink::budget::Budget;
use crate::nvlink::choice::tuning;
use crate::nvlink::launch::plan_with;
use crate::nvlink::rank::{Call, Rank, Setup, on_ranks_with};

/// SMs of the launches that must not block.
const SMS: u32 = 16;
/// SMs of the launches that the peers' attributes block.
const BLOCKING: [u32; 4] = [8, 12, 16, 24];
/// Calls beside one holder.
const PER_HOLD: usize = 50;
/// Holders beside which a launch that may block is tried: each blocked one lasts as long as it.
const HOLDS: usize = 4;

/// A launch, many times over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Try {
    /// How SMs are had. `Shared`: a holder leaves as many as there are blocks, unplanned.
    pub policy: Policy,
    /// Blocks.
    pub sms: u32,
    /// What is launched.
    pub operation: Operation,
    /// How.
    pub attributes: LaunchAttributes,
}

impl Try {
    /// The name used in reports and for `--only`.
    pub fn name(&self) -> String {
        let policy = match self.policy {
            Policy::Shared => "unplanned margin",
            policy => policy.name(),
        };
        format!("tries {policy} {} {} {}", self.sms, self.operation.name(), self.launch())
    }

    /// How it is launched, as in other reports.
    pub fn launch(&self) -> &'static str {
        let cooperative = self.attributes.flags().contains(LaunchFlags::COOPERATIVE);
        match (self.attributes.cluster() > 1, cooperative) {
            (false, false) => "plain",
            (false, true) => "cooperative",
            (true, false) => "cluster2",
            (true, true) => "cluster2-cooperative",
        }
    }
}

/// What one rank saw of a try.
#[derive(Clone, Debug)]
pub struct Tried {
    /// Why the library refuses it.
    pub refused: Option<String>,
    /// Times alone.
    pub alone: Vec<f64>,
    /// Calls beside the holder.
    pub calls: Vec<Beheld>,
}

/// Layers and what is tried with each, in an order of the seed.
pub fn all(scope: &Scope, seed: u64) -> Vec<((Policy, u32), Vec<Try>)> {
    let plain = LaunchAttributes::plain();
    let every = [
        plain,
        plain.with_cooperative(),
        plain.with_cluster(2),
        plain.with_cluster(2).with_cooperative(),
    ];
    let mut layers = vec![
        ((Policy::Partition, SMS), every.to_vec()),
        // What a margin of as many SMs does not fit is refused, which is reported too.
        ((Policy::Margin, SMS), every.to_vec()),
    ];
    for sms in if scope.quick { &BLOCKING[2..3] } else { &BLOCKING[..] } {
        layers.push(((Policy::Shared, *sms), vec![plain, every[3]]));
    }
    let mut all = Vec::new();
    for ((policy, sms), list) in layers {
        let one = |operation| {
            list.iter().map(move |&attributes| Try { policy, sms, operation, attributes })
        };
        let mut tries: Vec<Try> = OPERATIONS.into_iter().flat_map(one).collect();
        tries.retain(|one| scope.wants(&one.name()));
        shuffle(&mut tries, seed, 500 + all.len());
        if !tries.is_empty() {
            all.push(((policy, sms), tries));
        }
    }
    all
}

/// Tries them; by try, what each rank saw.
///
/// # Errors
/// As the measurements.
pub fn run(
    job: &Job,
    scope: &Scope,
    (seed, budget): (u64, &Budget),
) -> Result<Vec<(Try, Vec<Tried>)>> {
    let mut results = Vec::new();
    for ((policy, sms), tries) in all(scope, seed) {
        if !budget.begins(&format!("tries {} {sms}", policy.name())) {
            continue;
        }
        let setup = Setup { policy: policy.of(sms), ..Setup::new(sms, Tuning::default()) };
        let ranks = on_ranks_with(job, &setup, &|rank| {
            rank.verify(Call::default())?;
            let mut seat = Seat::new(rank)?;
            tries.iter().map(|one| try_one(&mut seat, one, scope)).collect::<Result<Vec<_>>>()
        })?;
        for (i, one) in tries.into_iter().enumerate() {
            results.push((one, ranks.iter().map(|rank| rank[i].clone()).collect()));
        }
    }
    Ok(results)
}

fn plan(rank: &Rank<'_>, one: &Try) -> MovePlan {
    let row = rank.job.case.dtype.payload_bytes(rank.job.case.shape.hidden) as u32;
    plan_with(one.operation, one.sms, one.attributes, row)
}

fn try_one(seat: &mut Seat<'_, '_, '_>, one: &Try, scope: &Scope) -> Result<Tried> {
    let plan = plan(seat.rank, one);
    let mut tried = Tried { refused: None, alone: Vec::new(), calls: Vec::new() };
    // All ranks have the same device and are refused the same.
    if let Err(error) = seat.rank.retune(tuning(one.operation, plan)) {
        tried.refused = Some(error.to_string());
        return Ok(tried);
    }
    // The first launch with an attribute may make the driver wait for the GPU, which then must not wait
    // for the start.
    for _ in 0..2 {
        seat.rank.measure_beside(one.operation, false)?;
    }
    seat.rank.measure(one.operation, Call::default(), (1, 1), true)?;
    let expected = seat.expected(one.operation)?;
    tried.alone = seat.alone(one.operation, (1, scope.runs()))?;
    let (holds, calls, held) = match one.policy {
        Policy::Shared => (HOLDS, 1, seat.sms.all - one.sms),
        _ => (scope.tries().div_ceil(PER_HOLD), PER_HOLD, seat.sms.compute),
    };
    for _ in 0..holds {
        tried.calls.extend(seat.one_hold(one.operation, (calls, expected), held)?);
    }
    Ok(tried)
}
