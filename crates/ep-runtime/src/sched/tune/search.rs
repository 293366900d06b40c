//! The search: everything once, the better part again and again.

use std::time::Duration;

/// One measurement of a candidate. Where ranks tune together both numbers are the slowest rank's, so
/// that all see the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// What is compared: the shorter the better.
    pub time: Duration,
    /// What measuring took, repetitions and warm-up included.
    pub spent: Duration,
}

/// How much a search may measure.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// No measurement starts once so much was spent.
    pub spend: Duration,
    /// Measurements of each candidate that is still in the running.
    pub samples: usize,
    /// The share that stays in the running from round to round.
    pub keep: f64,
}

impl Default for Limits {
    /// Two seconds, up to five measurements, a third kept.
    fn default() -> Self {
        Self { spend: Duration::from_secs(2), samples: 5, keep: 1.0 / 3.0 }
    }
}

/// The fastest candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Best {
    /// Its number.
    pub candidate: usize,
    /// The median of its measurements.
    pub time: Duration,
    /// How many candidates were measured.
    pub measured: usize,
    /// How often it was measured itself.
    pub samples: usize,
    /// What all measurements took.
    pub spent: Duration,
}

/// Finds the fastest of `candidates` candidates, numbered from 0. `measure` gives one sample of a
/// candidate, or `None` if it cannot be run at all.
///
/// First all are measured once, in a shuffled order so that a drift of the clocks favours none; then,
/// round by round, those in the running once more, of which each round keeps the best share. It is a
/// pure function of the samples: ranks that get equal samples measure the same candidates in the same
/// order and find the same.
///
/// `None`: nothing could be measured.
pub fn search(
    candidates: usize,
    limits: Limits,
    mut measure: impl FnMut(usize) -> Option<Sample>,
) -> Option<Best> {
    let mut running: Vec<Measured> = shuffled(candidates).map(Measured::new).collect();
    let (mut spent, mut measured) = (Duration::ZERO, 0);
    for round in 0..limits.samples.max(1) {
        for candidate in &mut running {
            if spent >= limits.spend {
                break;
            }
            match measure(candidate.number) {
                Some(sample) => {
                    spent = spent.saturating_add(sample.spent);
                    candidate.times.push(sample.time);
                }
                None => candidate.failed = true,
            }
        }
        running.retain(|candidate| !candidate.failed && !candidate.times.is_empty());
        if round == 0 {
            measured = running.len();
        }
        // Stable: among equals the order of the first round decides, on every rank alike.
        running.sort_by_key(Measured::median);
        if spent >= limits.spend || running.len() < 2 {
            break;
        }
        let kept = (running.len() as f64 * limits.keep.clamp(0.0, 1.0)).ceil() as usize;
        running.truncate(kept.max(2));
    }
    let best = running.first()?;
    let (candidate, time, samples) = (best.number, best.median(), best.times.len());
    Some(Best { candidate, time, measured, samples, spent })
}

struct Measured {
    number: usize,
    times: Vec<Duration>,
    failed: bool,
}

impl Measured {
    fn new(number: usize) -> Self {
        Self { number, times: Vec::new(), failed: false }
    }

    fn median(&self) -> Duration {
        let mut times = self.times.clone();
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or(Duration::MAX)
    }
}

/// 0 to `count` in an order that is the same every time: by a multiplicative hash (Knuth, The Art of
/// Computer Programming 3, 6.4: 2^64 divided by the golden ratio).
fn shuffled(count: usize) -> impl Iterator<Item = usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|&i| (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    order.into_iter()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    fn sample(time: Duration) -> Option<Sample> {
        Some(Sample { time, spent: 3 * time })
    }

    #[test]
    fn without_candidates_or_any_that_runs_there_is_none() {
        assert_eq!(search(0, Limits::default(), |_| unreachable!("no candidates")), None);
        let mut tried = 0;
        let none = search(7, Limits::default(), |_| {
            tried += 1;
            None
        });
        assert_eq!((none, tried), (None, 7), "each is tried once");
    }

    #[test]
    fn one_candidate_is_measured_once() {
        let best = search(1, Limits::default(), |_| sample(MICRO)).expect("one");
        assert_eq!((best.candidate, best.measured, best.samples), (0, 1, 1));
    }

    #[test]
    fn it_stops_when_its_time_is_spent() {
        let limits = Limits { spend: 100 * MICRO, ..Limits::default() };
        let (mut count, mut first) = (0, None);
        let best = search(1000, limits, |i| {
            count += 1;
            first = first.or(Some(i));
            Some(Sample { time: count * MICRO, spent: 9 * MICRO })
        })
        .expect("some were measured");
        assert_eq!((count, best.measured, best.spent), (12, 12, 108 * MICRO));
        assert_eq!(Some(best.candidate), first, "the fastest of those measured");
        // Not even the first fits: it is measured all the same, or nothing would be known.
        let one = search(5, Limits { spend: MICRO, ..limits }, |_| sample(MICRO)).expect("one");
        assert_eq!(one.measured, 1);
    }

    #[test]
    fn an_outlier_does_not_decide() {
        // Candidate 3 is the fastest, but its first measurement is late; so is 5 lucky once.
        let mut seen = [0; 9];
        let best = search(9, Limits::default(), |i| {
            seen[i] += 1;
            let time = match (i, seen[i]) {
                (3, 1) => 105,
                (3, _) => 100,
                (5, 1) => 99,
                (5, _) => 130,
                _ => 150 + i as u32,
            };
            sample(time * MICRO)
        })
        .expect("a best one");
        assert_eq!((best.candidate, best.time), (3, 100 * MICRO));
        assert!(seen.iter().all(|&n| n >= 1) && seen[3] > 1 && seen.iter().sum::<i32>() < 9 * 5);
    }

    proptest! {
        #[test]
        fn the_best_is_within_the_noise_of_the_fastest(
            costs in prop::collection::vec(100u64..10_000, 1..80),
            noise in prop::collection::vec(0u64..100, 64),
            broken in prop::collection::vec(any::<bool>(), 80),
        ) {
            // Up to 1 % noise; nothing is spent beyond the limit but the last measurement.
            let runs = |i: usize| !broken[i] || i == 0;
            let mut count = 0;
            let limits = Limits { spend: Duration::from_secs(1), ..Limits::default() };
            let best = search(costs.len(), limits, |i| {
                count += 1;
                let nanos = costs[i] * (10_000 + noise[(i * 7 + count) % 64]) / 10;
                runs(i).then(|| sample(Duration::from_nanos(nanos)))?
            });
            let best = best.expect("candidate 0 runs");
            let fastest = (0..costs.len()).filter(|&i| runs(i)).map(|i| costs[i]).min().unwrap();
            prop_assert!(runs(best.candidate));
            prop_assert!(costs[best.candidate] as f64 <= fastest as f64 * 1.06);
            prop_assert!(best.spent < Duration::from_secs(1) + Duration::from_millis(31));
        }
    }
}
