//! The steps of `cargo xtask test`.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use clap::builder::PossibleValuesParser;

use super::count::{Counts, failures, ignored};
use super::{Context, Outcome, Verdict, gpu, rdma, smoke};
use crate::process::{self, Finished};
use crate::style::colours;
use crate::{api, tidy, tools, workspace};

/// One step.
pub struct Step {
    pub name: &'static str,
    pub title: &'static str,
    pub run: fn(&Context) -> Outcome,
}

/// In the order they run: what fails fast comes first.
pub const STEPS: &[Step] = &[
    Step { name: "fmt", title: "formatting", run: fmt },
    Step { name: "tidy", title: "invariants that can be checked mechanically", run: invariants },
    Step { name: "clippy", title: "lints, warnings are errors", run: clippy },
    Step { name: "doc", title: "documentation, warnings are errors", run: doc },
    Step { name: "test", title: "unit, property and conformance tests, doctests", run: tests },
    Step { name: "loom", title: "flags and command ring under a model checker", run: loom },
    Step { name: "examples", title: "every example runs to its end", run: examples },
    Step { name: "bench", title: "small benchmarks on hosts verify", run: smoke::bench },
    Step { name: "kernels", title: "GPU kernels compile everywhere, nothing spills", run: kernels },
    Step { name: "gpu", title: "layers and transport on emulated GPUs", run: gpu::gpu },
    Step { name: "rdma", title: "real verbs on devices of a virtual machine", run: rdma::rdma },
    Step { name: "api", title: "the public API is the one in docs/api", run: public_api },
    Step { name: "aarch64", title: "the workspace compiles for 64-bit Arm", run: aarch64 },
];

/// The longest a step's program may run.
const MINUTES: fn(u64) -> Duration = |n| Duration::from_secs(60 * n);
/// Lines kept of what failed.
pub const TAIL: usize = 40;

/// The names, for the command line.
pub fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(STEPS.iter().map(|step| step.name))
}

/// cargo in the workspace, coloured where our output is.
pub fn cargo(context: &Context, args: &[&str]) -> Command {
    let mut command = workspace::cargo(&context.workspace.root);
    command.args(args);
    if context.echo && colours() {
        command.env("CARGO_TERM_COLOR", "always");
    }
    command
}

/// The folder of the workspace's programs, built as the step `test` builds them, so that nothing is built
/// twice. That `package` also builds as users have it, with its own features alone, is checked first.
pub fn programs(context: &Context, package: &str) -> Result<PathBuf, Outcome> {
    let alone = cargo(context, &["check", "--profile", "checked", "--package", package]);
    let mut all = cargo(context, &["build", "--workspace", "--profile", "checked"]);
    all.args(["--bins", "--tests"]);
    all.args(rdma::features(context));
    for command in [alone, all] {
        let built = check(context, command, MINUTES(20));
        if built.is_failure() {
            return Err(built);
        }
    }
    Ok(context.workspace.target.join("checked"))
}

/// Runs one program that either succeeds or not.
pub fn check(context: &Context, command: Command, limit: Duration) -> Outcome {
    match process::run(command, limit, context.echo) {
        Ok(done) if done.success() => Outcome::passed(),
        Ok(done) => Outcome::failed(done.why(), done.tail(TAIL)),
        Err(why) => Outcome::failed(why, String::new()),
    }
}

/// Runs a `cargo test`: it must succeed and must have run tests.
pub fn cargo_test(context: &Context, command: Command, limit: Duration) -> Outcome {
    match process::run(command, limit, context.echo) {
        Ok(done) => judge(&done),
        Err(why) => Outcome::failed(why, String::new()),
    }
}

/// The outcome of a finished `cargo test`.
pub fn judge(done: &Finished) -> Outcome {
    let mut counts = Counts::read(&done.output);
    let failed = failures(&done.output);
    let verdict = if !done.success() {
        // A program that did not compile, crashed or hung has failed as one test.
        counts.failed = counts.failed.max(1);
        let named = if failed.is_empty() { done.why() } else { failed.join(", ") };
        Verdict::Failed(named)
    } else if counts.ran() == 0 {
        counts.failed = 1;
        Verdict::Failed("no test ran".into())
    } else {
        Verdict::Passed
    };
    let tail = if verdict == Verdict::Passed { String::new() } else { done.tail(TAIL) };
    Outcome { verdict, counts, ignored: ignored(&done.output), tail }
}

/// Whether `cargo NAME` is there.
pub fn has_component(context: &Context, name: &str) -> bool {
    cargo(context, &[name, "--version"]).output().is_ok_and(|out| out.status.success())
}

fn fmt(context: &Context) -> Outcome {
    if !has_component(context, "fmt") {
        return Outcome::missing(context, "rustfmt is not installed", false);
    }
    check(context, cargo(context, &["fmt", "--all", "--check"]), MINUTES(2))
}

fn clippy(context: &Context) -> Outcome {
    if !has_component(context, "clippy") {
        return Outcome::missing(context, "clippy is not installed", false);
    }
    // In the tests' profile, as what build scripts make is made once for each.
    let args = ["clippy", "--workspace", "--all-targets", "--profile", "checked"];
    let mut command = cargo(context, &args);
    command.args(rdma::features(context)).args(["--", "-D", "warnings"]);
    check(context, command, MINUTES(15))
}

fn doc(context: &Context) -> Outcome {
    let mut command = cargo(context, &["doc", "--workspace", "--no-deps"]);
    command.env("RUSTDOCFLAGS", "-D warnings");
    check(context, command, MINUTES(15))
}

fn tests(context: &Context) -> Outcome {
    let args = ["test", "--workspace", "--profile", "checked", "--no-fail-fast"];
    let mut command = cargo(context, &args);
    command.args(rdma::features(context));
    cargo_test(context, command, MINUTES(30))
}

fn loom(context: &Context) -> Outcome {
    let mut command = cargo(context, &["test", "--package", "ep-transport", "--release"]);
    command.args(["--test", "loom_flags", "--test", "loom_ring"]);
    command.env("RUSTFLAGS", "--cfg loom");
    // Other flags rebuild everything, so this has a folder of its own.
    command.env("CARGO_TARGET_DIR", context.workspace.target.join("loom"));
    cargo_test(context, command, MINUTES(15))
}

fn examples(context: &Context) -> Outcome {
    let names = context.workspace.names_under("examples");
    if names.is_empty() {
        return Outcome::failed("there are no examples", String::new());
    }
    let mut counts = Counts::default();
    let (mut failed, mut tail) = (Vec::new(), String::new());
    for name in names {
        let folder = match programs(context, name) {
            Ok(folder) => folder,
            Err(outcome) => return outcome,
        };
        let run = Command::new(folder.join(name));
        let why = match process::run(run, MINUTES(3), context.echo) {
            Ok(done) if !done.success() => Some((done.why(), done.tail(TAIL))),
            Ok(done) if done.output.trim().is_empty() => {
                Some(("it printed nothing".into(), String::new()))
            }
            Err(why) => Some((why, String::new())),
            Ok(_) => None,
        };
        match why {
            None => counts.passed += 1,
            Some((why, output)) => {
                counts.failed += 1;
                failed.push(format!("{name}: {why}"));
                tail.push_str(&output);
            }
        }
    }
    let verdict =
        if failed.is_empty() { Verdict::Passed } else { Verdict::Failed(failed.join("; ")) };
    Outcome::of(verdict, counts, tail)
}

fn invariants(context: &Context) -> Outcome {
    match tidy::check(&context.workspace.root) {
        Err(why) => Outcome::failed(why, String::new()),
        Ok(report) => {
            if context.echo {
                println!("{report}");
            }
            let (passed, failed) = (report.passed() as u64, report.failed() as u64);
            let verdict = match failed {
                0 => Verdict::Passed,
                n => Verdict::Failed(format!("{n} checks failed")),
            };
            let tail = if failed > 0 { report.to_string() } else { String::new() };
            Outcome::of(verdict, Counts { passed, failed, skipped: 0 }, tail)
        }
    }
}

/// Without a GPU: the report of every kernel, and the tests that need the compiler.
fn kernels(context: &Context) -> Outcome {
    let nvrtc = match tools::nvrtc(&context.workspace, context.echo) {
        Ok(folder) => folder,
        Err(why) => return Outcome::missing(context, &why, false),
    };
    let folder = match programs(context, "ep-kernels") {
        Ok(folder) => folder,
        Err(outcome) => return outcome,
    };
    let mut report = Command::new(folder.join("ep-bench"));
    report.args(["kernels", "--nvrtc"]).arg(&nvrtc);
    let mut tests = cargo(context, &["test", "--workspace", "--profile", "checked"]);
    tests.args(rdma::features(context)).args(["--test", "cuda_compile"]);
    tests.env("EP_NVRTC_PATH", &nvrtc).env("EP_REQUIRE_NVRTC", "1");
    // The compiler uses one core of a process, and most of the time is its own.
    let (report, mut outcome) = std::thread::scope(|scope| {
        let report = scope.spawn(|| check(context, report, MINUTES(15)));
        let outcome = cargo_test(context, tests, MINUTES(15));
        (report.join().expect("no panic"), outcome)
    });
    if report.is_failure() {
        return report;
    }
    outcome.counts += report.counts;
    outcome
}

fn public_api(context: &Context) -> Outcome {
    match api::compare(&context.workspace, context.echo) {
        Ok(api::Verdict::Same(crates)) => {
            let counts = Counts { passed: crates as u64, ..Counts::default() };
            Outcome::of(Verdict::Passed, counts, String::new())
        }
        Ok(api::Verdict::Changed(text)) => Outcome::failed("the public API changed", text),
        Ok(api::Verdict::Unreadable(why)) => Outcome::missing(context, &why, false),
        Err(why) => Outcome::failed(why, String::new()),
    }
}

fn aarch64(context: &Context) -> Outcome {
    const TARGET: &str = "aarch64-unknown-linux-gnu";
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let out = Command::new(rustc).args(["--print", "target-libdir", "--target", TARGET]).output();
    let installed = out.is_ok_and(|out| {
        let folder = String::from_utf8_lossy(&out.stdout);
        out.status.success() && std::path::Path::new(folder.trim()).is_dir()
    });
    if !installed {
        // It comes from rustup alone, which a machine without a network cannot ask.
        let why = format!("target {TARGET} is not installed (rustup target add {TARGET})");
        return Outcome::missing(context, &why, true);
    }
    let args = ["check", "--workspace", "--target", TARGET];
    check(context, cargo(context, &args), MINUTES(15))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    fn finished(code: i32, output: &str) -> Finished {
        Finished { status: Some(ExitStatus::from_raw(code << 8)), output: output.into() }
    }

    const GOOD: &str = "test result: ok. 4 passed; 0 failed; 1 ignored; 0 measured\n";

    #[test]
    fn a_good_run_passes_with_its_counts() {
        let outcome = judge(&finished(0, GOOD));
        assert!(!outcome.is_failure());
        assert_eq!(outcome.counts, Counts { passed: 4, failed: 0, skipped: 1 });
    }

    #[test]
    fn a_run_without_tests_fails() {
        let outcome = judge(&finished(0, "test result: ok. 0 passed; 0 failed; 0 ignored\n"));
        assert!(outcome.is_failure());
        assert_eq!(outcome.counts.failed, 1);
    }

    #[test]
    fn a_crash_after_good_tests_fails() {
        let outcome = judge(&finished(101, GOOD));
        assert!(outcome.is_failure());
        assert_eq!(outcome.counts, Counts { passed: 4, failed: 1, skipped: 1 });
        assert!(judge(&Finished { status: None, output: GOOD.into() }).is_failure());
    }
}
