//! The plan in force in a layer against a sweep of all plans there: beside a holder, as the tuner
//! searches, or alone where nothing is set aside.

use ep_runtime::MovePlan;

use super::judge::median;
use super::points::{Beside, Config, OPERATIONS, Policy, Scope, shuffle};
use super::seat::Seat;
use crate::Result;
use crate::case::Operation;
use crate::host::kind;
use crate::nvlink::Job;
use crate::nvlink::choice::{Choice, candidates, in_force, in_turns, tuning};
use crate::nvlink::rank::Call;

/// Calls per point of the sweep: as many as one holder is there for.
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

/// Calls by a plan. Collective.
///
/// # Errors
/// As the measurements; a plan that cannot be launched.
fn time(
    seat: &mut Seat<'_, '_, '_>,
    (operation, beside): (Operation, Option<Beside>),
    plan: MovePlan,
    runs: usize,
) -> Result<Vec<f64>> {
    seat.rank.retune(tuning(operation, plan))?;
    // The first call by another plan finds nothing of it in caches.
    let first = seat.alone(operation, (1, 2))?;
    let Some(beside) = beside else { return seat.alone(operation, (0, runs)) };
    let expected = seat.largest(first.into_iter().fold(0.0, f64::max))?;
    let seen = seat.beside(operation, beside, (runs, expected))?;
    Ok(seen.into_iter().map(|call| call.us).collect())
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
    in_turns(seat, plans, |seat, plan| time(seat, (operation, beside), plan, TURN))
}

/// Sweeps all plans of an operation in this layer, then times the best and the plan in force again.
/// `None` where there is none in force. Collective.
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
    let beside = Some(Beside::Holder).filter(|_| config.policy != Policy::Shared);
    let mut best: Option<(f64, MovePlan)> = None;
    for &plan in &all {
        let times = time(seat, (operation, beside), plan, SWEEP)?;
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
