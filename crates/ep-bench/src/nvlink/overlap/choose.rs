//! The plan in force in a layer against a sweep of all plans there: beside the GEMM, as the tuner
//! searches, or alone where nothing is set aside.

use ep_runtime::MovePlan;

use super::judge::median;
use super::points::{Beside, Config, OPERATIONS, Policy, Scope, shuffle};
use super::seat::{Seat, WARM_LAUNCHES, Where};
use crate::Result;
use crate::case::Operation;
use crate::host::kind;
use crate::nvlink::Job;
use crate::nvlink::choice::{Choice, TURNS, candidates, in_force, tuning};
use crate::nvlink::rank::Call;

/// Calls per point of the sweep.
const SWEEP: usize = 4;
/// Calls per turn of the best and of what is in force.
const TURN: usize = 8;

/// What one rank saw. The plans are the same on all ranks.
#[derive(Clone, Debug)]
pub struct Swept {
    choice: Choice,
    times: [Vec<f64>; 2],
}

/// What all ranks saw, as one.
pub fn merge(ranks: Vec<Swept>) -> Option<Choice> {
    let choice = ranks.first()?.choice.clone();
    Some(Choice { times: ranks.into_iter().map(|swept| swept.times).collect(), ..choice })
}

/// The operations whose plan in force is compared in a layer.
pub fn wanted(config: &Config, scope: &Scope) -> Vec<Operation> {
    let name = |operation: &Operation| format!("choice {config} {}", operation.name());
    OPERATIONS.into_iter().filter(|operation| scope.wants(&name(operation))).collect()
}

/// Calls by each of `plans`, beside compute that does not end meanwhile or alone. Collective.
///
/// # Errors
/// As the measurements; a plan that cannot be launched.
fn sweep(
    seat: &mut Seat<'_, '_, '_>,
    (operation, beside): (Operation, Option<Beside>),
    plans: &[MovePlan],
    runs: usize,
) -> Result<Vec<Vec<f64>>> {
    let mut slowest = 0.0f64;
    for &plan in plans {
        // What a plan needs is there before compute runs, which may otherwise be waited for.
        seat.rank.retune(tuning(operation, plan))?;
        slowest = seat.alone(operation, (0, 1))?.into_iter().fold(slowest, f64::max);
    }
    let expected = seat.largest(slowest)?;
    let mut load = match beside {
        Some(kind) => Some((seat.load(kind, Where::Own)?, seat.ahead(kind, expected)?)),
        None => None,
    };
    if let Some((load, ahead)) = &mut load {
        seat.rank.barrier()?;
        load.keep(*ahead + WARM_LAUNCHES)?;
        load.await_launch(WARM_LAUNCHES - 1)?;
    }
    let mut times = Vec::with_capacity(plans.len());
    for &plan in plans {
        seat.rank.retune(tuning(operation, plan))?;
        let mut seen = Vec::with_capacity(1 + runs);
        for _ in 0..=runs {
            if let Some((load, ahead)) = &mut load {
                load.keep(*ahead)?;
            }
            seen.extend(seat.rank.measure_beside(operation, true)?);
        }
        // The first finds nothing of its own in caches.
        times.push(seen.split_off(1.min(seen.len())));
    }
    if let Some((load, _)) = &load {
        load.finish()?;
    }
    Ok(times)
}

/// Compares two plans' results with the host backend and times them in turns. Collective.
///
/// # Errors
/// As the measurements.
pub fn duel(
    seat: &mut Seat<'_, '_, '_>,
    (operation, beside): (Operation, Option<Beside>),
    plans: [MovePlan; 2],
) -> Result<[Vec<f64>; 2]> {
    for plan in plans {
        seat.rank.retune(tuning(operation, plan))?;
        seat.rank.measure(operation, Call::default(), (0, 1), true)?;
    }
    let order: Vec<MovePlan> = TURNS.iter().map(|&which| plans[which]).collect();
    let seen = sweep(seat, (operation, beside), &order, TURN)?;
    let mut times = [Vec::new(), Vec::new()];
    TURNS.iter().zip(seen).for_each(|(&which, seen)| times[which].extend(seen));
    Ok(times)
}

/// Sweeps all plans of an operation in this layer, then times the best and the plan in force again.
/// `None` where there is none in force. Collective, and the GEMM was added to the seat.
///
/// # Errors
/// As the measurements.
pub fn measure(
    seat: &mut Seat<'_, '_, '_>,
    job: &Job,
    operation: Operation,
    (config, number): (&Config, usize),
) -> Result<Option<Swept>> {
    // What earlier measurements gave does not count.
    seat.rank.retune(ep_runtime::Tuning::default())?;
    let case = &job.case;
    let plans = seat.rank.ep.plans_in_force(kind(case.dtype), kind(case.dtype.back()));
    let Some(chosen) = in_force(&plans, operation) else { return Ok(None) };
    let device = seat.rank.device.properties().clone();
    let mut all = candidates(case, operation, &device, seat.sms.blocks);
    if !all.contains(&chosen.plan) {
        all.push(chosen.plan);
    }
    shuffle(&mut all, case.seed, 5000 + number);
    let beside = Some(Beside::Gemm).filter(|_| config.policy != Policy::Shared);
    let mut best: Option<(f64, MovePlan)> = None;
    for (&plan, times) in all.iter().zip(sweep(seat, (operation, beside), &all, SWEEP)?) {
        // All ranks take the same plan for the best.
        let us = seat.largest(median(&times).unwrap_or(f64::INFINITY))?;
        if best.is_none_or(|(least, _)| us < least) {
            best = Some((us, plan));
        }
    }
    let Some((_, best)) = best else { return Ok(None) };
    let times = duel(seat, (operation, beside), [chosen.plan, best])?;
    seat.rank.retune(ep_runtime::Tuning::default())?;
    let (points, beside) = (all.len(), beside.map_or("alone", Beside::name));
    let choice = Choice { operation, chosen, best, points, beside, times: Vec::new() };
    Ok(Some(Swept { choice, times }))
}
