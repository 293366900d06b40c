//! `cargo xtask test`: every check of the project, one step after the other.

mod count;
mod gpu;
mod rdma;
mod smoke;
mod steps;

use std::time::{Duration, Instant};

use clap::Args;

use crate::Result;
use crate::style::{BOLD, GREEN, RED, YELLOW, paint, seconds, wrap};
use crate::workspace::{Workspace, in_ci};

pub use count::{Counts, failures};
use steps::STEPS;

/// Options of `cargo xtask test`.
#[derive(Args)]
pub struct Options {
    /// Run this step alone (may be repeated)
    #[arg(long, value_name = "STEP", value_parser = steps::names())]
    only: Vec<String>,
    /// List the steps and leave
    #[arg(long)]
    list: bool,
    /// Print the output of failed steps only
    #[arg(long, short)]
    quiet: bool,
}

/// What every step is given.
pub struct Context {
    pub workspace: Workspace,
    /// Continuous integration: nothing may be missing.
    pub ci: bool,
    /// Whether output of programs is passed on as it comes.
    pub echo: bool,
}

/// How a step ended.
#[derive(Debug)]
pub struct Outcome {
    verdict: Verdict,
    counts: Counts,
    /// Single tests that were skipped, with reasons.
    ignored: Vec<String>,
    /// The end of the output of what failed.
    tail: String,
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Failed(String),
    Skipped(String),
}

impl Outcome {
    /// A step that is one check passed.
    fn passed() -> Self {
        Self::of(Verdict::Passed, Counts { passed: 1, ..Counts::default() }, String::new())
    }

    /// A step that is one check failed.
    fn failed(why: impl Into<String>, tail: String) -> Self {
        let counts = Counts { failed: 1, ..Counts::default() };
        Self::of(Verdict::Failed(why.into()), counts, tail)
    }

    /// Something the step needs is missing. `always` says that it may be missing in CI too.
    fn missing(context: &Context, why: &str, always: bool) -> Self {
        if context.ci && !always {
            return Self::failed(format!("{why}, and CI may not skip this"), String::new());
        }
        let counts = Counts { skipped: 1, ..Counts::default() };
        Self::of(Verdict::Skipped(why.into()), counts, String::new())
    }

    fn of(verdict: Verdict, counts: Counts, tail: String) -> Self {
        Self { verdict, counts, ignored: Vec::new(), tail }
    }
}

/// One step that has run.
struct Done {
    name: &'static str,
    outcome: Outcome,
    time: Duration,
}

/// Runs the steps asked for; an error if any failed.
pub fn run(options: &Options) -> Result<()> {
    if options.list {
        for step in STEPS {
            println!("{:<9} {}", step.name, wrap(step.title, 10, 10));
        }
        return Ok(());
    }
    let context = Context { workspace: Workspace::load(false)?, ci: in_ci(), echo: !options.quiet };
    let wanted = |name: &str| options.only.is_empty() || options.only.iter().any(|o| o == name);

    let mut done = Vec::new();
    for step in STEPS.iter().filter(|step| wanted(step.name)) {
        println!("{}", paint(&format!("==> {}: {}", step.name, step.title), BOLD));
        let start = Instant::now();
        let outcome = (step.run)(&context);
        let time = start.elapsed();
        let (word, why) = outcome.word();
        let line = format!("<== {}: {} in {}{why}", step.name, word, seconds(time));
        println!("{}\n", wrap(&line, 0, 4));
        done.push(Done { name: step.name, outcome, time });
    }
    report(&done);
    summary(&done);

    let failed: Vec<&str> =
        done.iter().filter(|d| d.outcome.is_failure()).map(|d| d.name).collect();
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

impl Outcome {
    fn is_failure(&self) -> bool {
        matches!(self.verdict, Verdict::Failed(_))
    }

    /// The verdict, and why behind a colon.
    fn word(&self) -> (String, String) {
        match &self.verdict {
            Verdict::Passed => (paint("passed", GREEN), String::new()),
            Verdict::Failed(why) => (paint("FAILED", RED), format!(": {why}")),
            Verdict::Skipped(why) => (paint("skipped", YELLOW), format!(": {why}")),
        }
    }
}

/// What failed: the end of its output and how to run it alone.
fn report(done: &[Done]) {
    for Done { name, outcome, .. } in done.iter().filter(|d| d.outcome.is_failure()) {
        println!("{}", paint(&format!("--- {name}: the end of its output"), BOLD));
        if !outcome.tail.is_empty() {
            println!("{}", outcome.tail);
        }
        println!("--- alone: cargo xtask test --only {name}\n");
    }
}

/// The table, what was skipped, and the sum as the last line.
fn summary(done: &[Done]) {
    println!("{}", paint(&format!("{:<9}{:<9}{:>13}  tests", "step", "verdict", "time"), BOLD));
    let mut sum = Counts::default();
    for Done { name, outcome, time } in done {
        sum += outcome.counts;
        let (plain, colour) = match outcome.verdict {
            Verdict::Passed => ("passed", GREEN),
            Verdict::Failed(_) => ("FAILED", RED),
            Verdict::Skipped(_) => ("skipped", YELLOW),
        };
        let verdict = paint(&format!("{plain:<9}"), colour);
        println!("{name:<9}{verdict}{:>13}  {}", seconds(*time), tests(outcome.counts));
    }
    let mut skipped = Vec::new();
    for Done { name, outcome, .. } in done {
        if let Verdict::Skipped(why) = &outcome.verdict {
            skipped.push(format!("{name}: {why}"));
        }
        skipped.extend(outcome.ignored.iter().map(|what| format!("{name}: {what}")));
    }
    if !skipped.is_empty() {
        println!("\nskipped:");
        for line in skipped {
            println!("  {}", wrap(&line, 2, 4));
        }
    }
    println!("\n{} passed, {} failed, {} skipped", sum.passed, sum.failed, sum.skipped);
}

/// `3 passed, 1 skipped`, without what is zero.
fn tests(counts: Counts) -> String {
    let parts = [(counts.passed, "passed"), (counts.failed, "failed"), (counts.skipped, "skipped")];
    let parts = parts.iter().filter(|(n, _)| *n > 0).map(|(n, word)| format!("{n} {word}"));
    parts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(ci: bool) -> Context {
        Context { workspace: Workspace::load(false).unwrap(), ci, echo: false }
    }

    #[test]
    fn what_is_missing_fails_only_under_ci() {
        let outcome = Outcome::missing(&context(false), "no tool", false);
        assert_eq!(outcome.verdict, Verdict::Skipped("no tool".into()));
        assert_eq!(outcome.counts, Counts { skipped: 1, ..Counts::default() });
        assert!(Outcome::missing(&context(true), "no tool", false).is_failure());
        assert!(!Outcome::missing(&context(true), "no target", true).is_failure());
    }

    #[test]
    fn counts_read_well() {
        assert_eq!(tests(Counts { passed: 3, failed: 0, skipped: 1 }), "3 passed, 1 skipped");
        assert_eq!(tests(Counts::default()), "");
    }

    #[test]
    fn step_names_are_unique_and_titles_fit() {
        for (i, step) in STEPS.iter().enumerate() {
            assert!(STEPS[..i].iter().all(|other| other.name != step.name), "{}", step.name);
            assert!(step.name.len() < 9 && step.title.len() < 66, "{}", step.name);
        }
    }
}
