//! Reading what cargo test prints.

use std::ops::AddAssign;

/// Tests that passed, failed and were skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
}

impl Counts {
    /// All tests that ran.
    pub fn ran(&self) -> u64 {
        self.passed + self.failed
    }

    /// Sums the `test result:` lines of `output`, one for each test program and doctest run.
    pub fn read(output: &str) -> Self {
        let mut counts = Self::default();
        for line in output.lines() {
            let Some(result) = line.trim_start().strip_prefix("test result: ") else { continue };
            let Some((_, numbers)) = result.split_once(". ") else { continue };
            for part in numbers.split(';') {
                let mut words = part.split_whitespace();
                let number = words.next().and_then(|n| n.parse::<u64>().ok());
                match (number, words.next()) {
                    (Some(n), Some("passed")) => counts.passed += n,
                    (Some(n), Some("failed")) => counts.failed += n,
                    (Some(n), Some("ignored")) => counts.skipped += n,
                    _ => {}
                }
            }
        }
        counts
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// The skipped tests in `output`, with the reason each gives.
pub fn ignored(output: &str) -> Vec<String> {
    let named = output.lines().filter_map(|line| {
        let (name, verdict) = line.trim().strip_prefix("test ")?.rsplit_once(" ... ")?;
        let reason = verdict.strip_prefix("ignored")?;
        let reason = reason.strip_prefix(", ").unwrap_or("no reason given");
        Some(format!("{name}: {reason}"))
    });
    named.collect()
}

/// Names of the failed tests in `output`.
pub fn failures(output: &str) -> Vec<&str> {
    let lines = output.lines().filter_map(|line| line.trim().strip_prefix("test "));
    lines.filter_map(|line| line.strip_suffix(" ... FAILED")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
running 3 tests
test flags::a ... ok
test flags::b ... ignored, needs a GPU
test flags::c ... FAILED

test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

   Doc-tests ep_runtime
test src/lib.rs - Group (line 12) ... ignored
test result: ok. 4 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 1.23s; \
merged doctests compilation took 0.4s
";

    #[test]
    fn results_are_summed() {
        let counts = Counts::read(OUTPUT);
        assert_eq!(counts, Counts { passed: 5, failed: 1, skipped: 2 });
        assert_eq!(counts.ran(), 6);
    }

    #[test]
    fn skipped_and_failed_tests_are_named() {
        let expected = ["flags::b: needs a GPU", "src/lib.rs - Group (line 12): no reason given"];
        assert_eq!(ignored(OUTPUT), expected);
        assert_eq!(failures(OUTPUT), ["flags::c"]);
    }

    #[test]
    fn other_output_counts_for_nothing() {
        let output = "error: could not compile\ntest result: who knows\n12 passed\n";
        assert_eq!(Counts::read(output), Counts::default());
    }
}
