//! Measuring one point, and making one result of what all ranks saw.

use super::clocks::sm_mhz;
use super::judge::{Figures, loss, median};
use super::multiply::FLOPS;
use super::points::{Beside, Point, Policy, Scope, shuffle};
use super::seat::{Beheld, Seat, WARM_LAUNCHES, Where, submit};
use crate::Result;

/// Calls back to back where they wait for compute.
const SHARED_CALLS: usize = 12;

/// What one rank saw.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Times of calls alone.
    pub alone: Vec<f64>,
    /// Times of calls alone, each right behind compute.
    pub warm: Vec<f64>,
    /// Calls beside compute.
    pub beside: Vec<Beheld>,
    /// Microseconds of a launch of compute alone on all SMs, by round.
    pub all_us: Vec<f64>,
    /// The same on the SMs that are left.
    pub own_us: Vec<f64>,
    /// The same while calls run back to back.
    pub beside_us: Vec<f64>,
    /// The same calls' mean time.
    pub back_to_back_us: Vec<f64>,
    /// MHz of the SMs after calls alone.
    pub clock_alone: Vec<f64>,
    /// MHz after calls right behind compute.
    pub clock_warm: Vec<f64>,
    /// MHz while compute and calls run.
    pub clock_beside: Vec<f64>,
}

/// A part of a point; all ranks run them in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    CallsAlone,
    CallsBehind,
    ComputeOnAll,
    ComputeOnOwn,
    CallsBeside,
    Together,
}

/// Measures a point whose calls take about `expected` microseconds alone. `number` decides, with the
/// seed, about the order. Collective.
///
/// # Errors
/// As the measurements.
pub fn measure(
    seat: &mut Seat<'_, '_, '_>,
    point: &Point,
    (scope, seed, number): (&Scope, u64, usize),
    expected: f64,
) -> Result<Sample> {
    use Part::{CallsAlone, CallsBehind, CallsBeside, ComputeOnAll, ComputeOnOwn, Together};
    let mut sample = Sample::default();
    for round in 0..scope.rounds() {
        let mut parts = match point.beside {
            Beside::Holder => vec![CallsAlone, CallsBeside],
            _ => {
                vec![CallsAlone, CallsBehind, ComputeOnAll, ComputeOnOwn, CallsBeside, Together]
            }
        };
        shuffle(&mut parts, seed, 1000 + 8 * number + round);
        for part in parts {
            one(seat, point, (part, scope), expected, &mut sample)?;
        }
    }
    Ok(sample)
}

fn one(
    seat: &mut Seat<'_, '_, '_>,
    point: &Point,
    (part, scope): (Part, &Scope),
    expected: f64,
    sample: &mut Sample,
) -> Result<()> {
    let (operation, beside, runs) = (point.operation, point.beside, scope.runs());
    let launches = (WARM_LAUNCHES, scope.launches());
    match part {
        Part::CallsAlone => {
            sample.alone.extend(seat.alone(operation, (2, runs))?);
            sample.clock_alone.extend(sm_mhz(&seat.rank.device));
        }
        Part::CallsBehind => {
            sample.warm.extend(seat.behind(operation, beside, (runs, expected))?);
            sample.clock_warm.extend(sm_mhz(&seat.rank.device));
        }
        Part::CallsBeside => {
            // One more, which may find compute's first launches on their way.
            let seen = seat.beside(operation, beside, (1 + runs, expected))?;
            sample.beside.extend(seen.into_iter().skip(1));
        }
        Part::ComputeOnAll => sample.all_us.push(seat.compute(beside, Where::All, launches)?),
        Part::ComputeOnOwn => sample.own_us.push(seat.compute(beside, Where::Own, launches)?),
        Part::Together => together(seat, point, scope, expected, sample)?,
    }
    Ok(())
}

/// Compute's speed while calls run back to back.
fn together(
    seat: &mut Seat<'_, '_, '_>,
    point: &Point,
    scope: &Scope,
    expected: f64,
    sample: &mut Sample,
) -> Result<()> {
    let (kind, operation) = (point.beside, point.operation);
    let launch_us = seat.pair(kind)?.launch_us;
    let count = match point.config.policy {
        // Where nothing is set aside, every kernel of a call may wait for a launch of compute to end.
        Policy::Shared => SHARED_CALLS,
        _ => 4 + (scope.launches() as f64 * launch_us / expected.max(1.0)).ceil() as usize,
    };
    let ahead = seat.ahead(kind, expected)?;
    let mut load = seat.load(kind, Where::Own)?;
    seat.rank.barrier()?;
    load.keep(ahead + WARM_LAUNCHES)?;
    load.await_launch(WARM_LAUNCHES - 1)?;
    let (start, end) =
        seat.back_to_back(count, |rank| submit(rank, operation), || load.keep(ahead))?;
    // Compute still runs.
    sample.clock_beside.extend(sm_mhz(&seat.rank.device));
    load.finish()?;
    sample.beside_us.extend(load.micros_within(&start, &end)?);
    let us = end.micros_since(&start).map_err(crate::nvlink::raw::failed)?;
    sample.back_to_back_us.push(us / (count - 1) as f64);
    Ok(())
}

/// The slowest rank counts, run by run; a call counts where all ranks saw it inside.
pub fn merge(samples: &[Sample]) -> (Vec<f64>, Vec<f64>, Figures) {
    let slowest = |of: fn(&Sample) -> &Vec<f64>| {
        crate::nvlink::slowest(&samples.iter().map(|s| of(s).clone()).collect::<Vec<_>>())
    };
    let alone = slowest(|s| &s.alone);
    let runs = samples.iter().map(|s| s.beside.len()).min().unwrap_or(0);
    let (mut beside, mut blocked, mut outside) = (Vec::new(), 0, 0);
    for run in 0..runs {
        let seen = || samples.iter().map(|s| s.beside[run]);
        if seen().any(|one| one.blocked) {
            blocked += 1;
        } else if seen().all(|one| one.inside) {
            beside.push(seen().map(|one| one.us).fold(0.0, f64::max));
        } else {
            outside += 1;
        }
    }
    let worst = |of: &dyn Fn(&Sample) -> Option<f64>| {
        samples
            .iter()
            .filter_map(of)
            .fold(None, |most: Option<f64>, value| Some(most.map_or(value, |most| most.max(value))))
    };
    let rate = |of: &dyn Fn(&Sample) -> Option<f64>| worst(of).map(|us| FLOPS / us / 1e6);
    let least =
        |of: &dyn Fn(&Sample) -> Option<f64>| samples.iter().filter_map(of).reduce(f64::min);
    let figures = Figures {
        alone_us: median(&alone),
        warm_us: median(&slowest(|s| &s.warm)),
        beside_us: median(&beside),
        blocked,
        outside,
        tflops_all: rate(&|s| median(&s.all_us)),
        tflops_own: rate(&|s| median(&s.own_us)),
        tflops_beside: rate(&|s| median(&s.beside_us)),
        loss: worst(&|s| loss(median(&s.all_us), median(&s.beside_us))),
        loss_own: worst(&|s| loss(median(&s.own_us), median(&s.beside_us))),
        back_to_back_us: worst(&|s| median(&s.back_to_back_us)),
        clock_alone: least(&|s| median(&s.clock_alone)),
        clock_warm: least(&|s| median(&s.clock_warm)),
        clock_beside: least(&|s| median(&s.clock_beside)),
    };
    (alone, beside, figures)
}
