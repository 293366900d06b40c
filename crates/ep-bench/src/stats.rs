//! How often to measure, and what to say about it.

use std::time::Duration;

/// Warm-ups before the timed runs, where there is time for them.
pub const WARM_UPS: usize = 10;
/// Timed runs, where there is time for them.
pub const RUNS: usize = 30;
/// The least of both, however slow a run is.
pub const LEAST_RUNS: usize = 5;

/// The middle, the slow end and the best of a set of durations in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// Median: half of the runs were not slower.
    pub p50_us: f64,
    /// Nine of ten runs were not slower.
    pub p90_us: f64,
    /// The fastest run.
    pub min_us: f64,
    /// How many runs.
    pub runs: usize,
}

impl Summary {
    /// Summarises durations in microseconds; percentiles are nearest-rank, so each is a run that
    /// happened. `None` without any.
    pub fn of(us: &[f64]) -> Option<Self> {
        let mut sorted = us.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let rank = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100) - 1];
        let min_us = *sorted.first()?;
        Some(Self { p50_us: rank(50), p90_us: rank(90), min_us, runs: sorted.len() })
    }
}

/// How many warm-ups and timed runs of `once` fit into `budget`.
pub fn counts(once: Duration, budget: Duration) -> (usize, usize) {
    let fit = |share: f64, most: usize, least: usize| {
        let n = share * budget.as_secs_f64() / once.as_secs_f64().max(1e-9);
        (n as usize).clamp(least, most)
    };
    (fit(0.25, WARM_UPS, 1), fit(0.75, RUNS, LEAST_RUNS))
}

/// For every run, the time from the first rank's start to the last rank's end, in microseconds:
/// the slowest rank counts. Times are nanoseconds of one clock, `[rank][run]`.
pub fn slowest(ranks: &[Vec<(u64, u64)>]) -> Vec<f64> {
    let runs = ranks.iter().map(Vec::len).min().unwrap_or(0);
    (0..runs)
        .map(|run| {
            let start = ranks.iter().map(|r| r[run].0).min().unwrap_or(0);
            let end = ranks.iter().map(|r| r[run].1).max().unwrap_or(0);
            end.saturating_sub(start) as f64 / 1e3
        })
        .collect()
}

/// Nanoseconds of the monotonic clock, which threads and processes of a host share.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_runs_that_happened() {
        let us: Vec<f64> = (1..=30).rev().map(f64::from).collect();
        let s = Summary::of(&us).unwrap();
        assert_eq!(s, Summary { p50_us: 15.0, p90_us: 27.0, min_us: 1.0, runs: 30 });
        assert_eq!(Summary::of(&[7.0]).unwrap().p90_us, 7.0);
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn slow_runs_are_fewer() {
        let counts = |ms| counts(Duration::from_millis(ms), Duration::from_secs(4));
        assert_eq!(counts(1), (10, 30));
        assert_eq!(counts(200), (5, 15));
        assert_eq!(counts(60_000), (1, 5));
        assert_eq!(super::counts(Duration::ZERO, Duration::from_secs(1)), (10, 30));
    }

    #[test]
    fn the_slowest_rank_counts() {
        let ranks = [vec![(1000, 2000), (5000, 5500)], vec![(1500, 4000), (4000, 5000)]];
        assert_eq!(slowest(&ranks), [3.0, 1.5]);
        assert!(slowest(&[]).is_empty());
    }

    #[test]
    fn the_clock_runs() {
        let before = now_ns();
        std::thread::sleep(Duration::from_millis(2));
        assert!((2_000_000..3_600_000_000_000).contains(&(now_ns() - before)));
    }
}
