//! Ranks as threads of this process.

use std::panic::resume_unwind;
use std::thread;

use crate::case::Case;
use crate::engine::Seat;
use crate::measure::{Options, Outcome, measure};
use crate::verify::Expected;
use crate::{BenchError, Result};

/// Verifies and times `case` with a thread for each of `seats`.
///
/// # Errors
/// The failure of the first rank that failed by itself; a rank that panics is one.
pub fn run<S: Seat + Send>(seats: Vec<S>, case: &Case, options: Options) -> Result<Outcome> {
    run_against(seats, case, &Expected::new(case)?, options)
}

fn run_against<S: Seat + Send>(
    seats: Vec<S>,
    case: &Case,
    expected: &Expected,
    options: Options,
) -> Result<Outcome> {
    let answers = &expected.answers()?;
    let results: Vec<Result<Outcome>> = thread::scope(|scope| {
        let spawn = |seat: S| {
            let name = format!("rank {}", seat.rank());
            thread::Builder::new().name(name).spawn_scoped(scope, move || {
                let outcome = measure(&seat, case, expected, answers, options);
                if let Err(e) = &outcome {
                    seat.abort(&e.to_string());
                }
                outcome
            })
        };
        // All are started before the first is waited for.
        let ranks: Vec<_> = seats.into_iter().map(spawn).collect();
        (ranks.into_iter().enumerate())
            .map(|(rank, thread)| match thread.map(thread::ScopedJoinHandle::join) {
                Ok(Ok(result)) => result,
                Ok(Err(panic)) => Err(panicked(rank, panic)),
                Err(e) => Err(BenchError::RankDied { rank, detail: format!("did not start: {e}") }),
            })
            .collect()
    });
    verdict(results)
}

fn panicked(rank: usize, panic: Box<dyn std::any::Any + Send>) -> BenchError {
    let text = match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (None, Some(text)) => text.clone(),
        // Nothing a report could show.
        (None, None) => resume_unwind(panic),
    };
    BenchError::RankDied { rank, detail: format!("panicked: {text}") }
}

/// Rank 0's outcome, or the error that explains the others.
pub(crate) fn verdict(results: Vec<Result<Outcome>>) -> Result<Outcome> {
    let mut errors: Vec<&BenchError> = results.iter().filter_map(|r| r.as_ref().err()).collect();
    errors.sort_by_key(|e| e.is_echo());
    match errors.first() {
        Some(e) => Err((*e).clone()),
        None => results
            .into_iter()
            .next()
            .unwrap_or_else(|| Err(BenchError::Usage("a job needs at least one rank".into()))),
    }
}

#[cfg(test)]
mod tests;
