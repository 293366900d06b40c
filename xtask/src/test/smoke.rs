//! Small runs of the benchmarks: they verify, their reports are well formed, bad input is refused.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::steps::{TAIL, programs};
use super::{Context, Counts, Outcome, Verdict};
use crate::process::{self, Finished};
use crate::style::COLUMNS;

const LIMIT: Duration = Duration::from_secs(120);

/// Shapes small enough for any machine.
const SMALL: [&str; 10] =
    ["--ranks", "2", "--tokens", "64", "--hidden", "1024", "--topk", "2", "--experts", "8"];

/// One run of ep-bench.
struct Case {
    what: &'static str,
    args: &'static [&'static str],
    /// Whether the run has to succeed; otherwise it has to be refused.
    good: bool,
}

const CASES: [Case; 5] = [
    Case { what: "round trip of threads", args: &["roundtrip"], good: true },
    Case {
        what: "dispatch, expert-major",
        args: &["dispatch", "--layout", "expert-major"],
        good: true,
    },
    Case { what: "round trip of processes", args: &["roundtrip", "--processes"], good: true },
    Case { what: "an unknown option", args: &["roundtrip", "--no-such-option"], good: false },
    Case { what: "an unknown routing", args: &["roundtrip", "--routing", "no-such"], good: false },
];

/// Builds ep-bench and runs every case.
pub fn bench(context: &Context) -> Outcome {
    let program = match programs(context, "ep-bench") {
        Ok(folder) => folder.join("ep-bench"),
        Err(outcome) => return outcome,
    };
    let json = context.workspace.target.join("smoke.json");
    let mut counts = Counts::default();
    let (mut failed, mut tail) = (Vec::new(), String::new());
    for case in CASES {
        match run(case.args, case.good, &program, &json, context.echo) {
            Ok(()) => counts.passed += 1,
            Err((why, output)) => {
                counts.failed += 1;
                failed.push(format!("{}: {why}", case.what));
                tail.push_str(&output);
            }
        }
    }
    let verdict =
        if failed.is_empty() { Verdict::Passed } else { Verdict::Failed(failed.join("; ")) };
    Outcome::of(verdict, counts, tail)
}

/// Runs one case; an error with the end of its output where it went wrong.
fn run(
    args: &[&str],
    good: bool,
    program: &Path,
    json: &Path,
    echo: bool,
) -> Result<(), (String, String)> {
    let plain = |why: String| (why, String::new());
    if json.exists() {
        std::fs::remove_file(json).map_err(|e| plain(e.to_string()))?;
    }
    let mut command = Command::new(program);
    command.args(args).args(SMALL).arg("--json").arg(json);
    let done = process::run(command, LIMIT, echo).map_err(plain)?;
    let failed = |why: String| (why, done.tail(TAIL));
    if !good {
        return refused(&done).map_err(failed);
    }
    if !done.success() {
        return Err(failed(done.why()));
    }
    if let Some(line) = done.output.lines().find(|line| line.chars().count() > COLUMNS) {
        return Err(failed(format!("a line is wider than {COLUMNS} columns: {line}")));
    }
    let text = std::fs::read_to_string(json).map_err(|e| failed(format!("--json: {e}")))?;
    verified(&text).map_err(failed)
}

/// Bad input is an error (not a crash, not a hang) that says something.
fn refused(done: &Finished) -> Result<(), String> {
    match done.status.and_then(|s| s.code()) {
        Some(1..=2) if !done.output.trim().is_empty() => Ok(()),
        _ => Err(format!("not refused with a message and exit code 1 or 2: {}", done.why())),
    }
}

/// `text` is the project's envelope, holds results, and every one of them verified.
fn verified(text: &str) -> Result<(), String> {
    let report: Value = serde_json::from_str(text).map_err(|e| format!("the report: {e}"))?;
    if report["schema"] != 1 {
        return Err("the report is not of schema 1".into());
    }
    let results = report["results"].as_array().filter(|r| !r.is_empty());
    for result in results.ok_or("the report holds no results")? {
        if result["verified"] != true {
            return Err(format!("not verified: {}", result["bench"]));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn only_verified_reports_pass() {
        assert_eq!(verified(r#"{"schema":1,"results":[{"verified":true}]}"#), Ok(()));
        for bad in [
            "",
            r#"{"schema":2,"results":[{"verified":true}]}"#,
            r#"{"schema":1,"results":[]}"#,
            r#"{"schema":1,"results":[{"verified":true},{"verified":false}]}"#,
            r#"{"schema":1,"results":[{}]}"#,
        ] {
            assert!(verified(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_refusal_is_an_exit_code_and_a_message() {
        let done = |raw, output: &str| Finished {
            status: Some(ExitStatus::from_raw(raw)),
            output: output.into(),
        };
        assert!(refused(&done(2 << 8, "error: unknown option")).is_ok());
        assert!(refused(&done(2 << 8, "")).is_err());
        assert!(refused(&done(101 << 8, "thread 'main' panicked")).is_err());
        assert!(refused(&done(0, "fine")).is_err());
        assert!(refused(&done(6, "aborted")).is_err());
    }
}
