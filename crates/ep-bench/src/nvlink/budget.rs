//! How long a bench of many parts goes on: GPUs are shared.

use std::time::{Duration, Instant};

use super::rank::Rank;
use crate::Result;
use crate::cli::Args;

/// Seconds where nothing else is said.
const DEFAULT: f64 = 170.0;

/// Time after which no further part is begun. What was begun is finished.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    start: Instant,
    limit: Duration,
}

impl Budget {
    /// What `args` allow, from now on.
    pub fn of(args: &Args) -> Self {
        Self { start: Instant::now(), limit: args.budget(DEFAULT) }
    }

    /// Whether it is spent.
    pub fn is_spent(&self) -> bool {
        self.start.elapsed() >= self.limit
    }

    /// Whether a part may be begun; if so, says at what time, else that it is left out.
    pub fn begins(&self, part: &str) -> bool {
        if self.is_spent() {
            println!("left out after {} s (--budget): {part}", self.limit.as_secs_f64());
            return false;
        }
        eprintln!("{:>5.1} s: {part}", self.start.elapsed().as_secs_f64());
        true
    }

    /// Whether it is spent for one of the ranks: the same answer on all. Collective.
    ///
    /// # Errors
    /// A rank that failed.
    pub fn is_spent_for_any(&self, rank: &Rank<'_>) -> Result<bool> {
        Ok(rank.largest(f64::from(u8::from(self.is_spent())))? > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[test]
    fn nothing_is_begun_once_it_is_spent() {
        let budget = |seconds| Budget::of(&Args::parse_from(["ep-bench", "--budget", seconds]));
        assert!(budget("1000").begins("a part"));
        let short = budget("0.001");
        std::thread::sleep(Duration::from_millis(2));
        assert!(short.is_spent() && !short.begins("another"));
    }
}
