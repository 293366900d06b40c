//! Checks of source text.

use super::Input;
use super::source::{Source, line_of, words};

/// The longest source file.
const LINES: usize = 500;

pub fn length(input: &Input) -> Vec<String> {
    let lengths = input.rust("").map(|(file, _)| (file, file.text.lines().count()));
    lengths
        .filter(|(_, lines)| *lines > LINES)
        .map(|(file, lines)| file.at(LINES + 1, &format!("{lines} lines")))
        .collect()
}

pub fn unfinished(input: &Input) -> Vec<String> {
    // Spelled so that this file does not hold them.
    let marks = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
    let macros = [concat!("to", "do!"), concat!("unimple", "mented!")];
    let mut found = Vec::new();
    for file in &input.files {
        let mut report = |text: &str, word: &str| {
            for at in words(text, word) {
                found.push(file.at(line_of(text, at), word));
            }
        };
        marks.iter().for_each(|mark| report(&file.text, mark));
        if let Some(source) = &file.source {
            macros.iter().for_each(|word| report(&source.code, word));
        }
    }
    found
}

/// Paths that exist on one machine only.
pub fn paths(input: &Input) -> Vec<String> {
    let own = |s: &str| format!("/{s}/");
    let outside = [concat!("..", "/shared").to_owned()]
        .into_iter()
        .chain(["home", "root", "work", "Users"].map(own));
    let outside: Vec<String> = outside.collect();
    let mut found = Vec::new();
    for file in &input.files {
        for (i, line) in file.text.lines().enumerate() {
            for path in &outside {
                let starts = line.match_indices(path.as_str()).any(|(at, _)| {
                    let before = line[..at].chars().next_back();
                    path.starts_with('.') || before.is_none_or(|c| " \t\"'`(=<:".contains(c))
                });
                if starts {
                    found.push(file.at(i + 1, path));
                }
            }
        }
    }
    found
}

/// Reports every word of `forbidden` in what the libraries ship.
fn forbidden(input: &Input, forbidden: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (file, source) in input.libraries() {
        for word in forbidden {
            for at in words(&source.shipped, word) {
                found.push(file.at(line_of(&source.shipped, at), word));
            }
        }
    }
    found
}

pub fn output(input: &Input) -> Vec<String> {
    forbidden(input, &["println!", "eprintln!", "print!", "eprint!", "dbg!"])
}

pub fn subscriber(input: &Input) -> Vec<String> {
    forbidden(input, &["tracing_subscriber", "set_global_default", "set_default(", "env_logger"])
}

/// `unwrap` says nothing; `expect` has to say why it cannot happen. The conformance suite is a
/// test that panics by design.
pub fn unwrap(input: &Input) -> Vec<String> {
    let mut found = forbidden(input, &[".unwrap()", ".unwrap_err()"]);
    found.retain(|line| !line.contains("/conformance"));
    for (file, source) in input.libraries() {
        for at in words(&source.shipped, ".expect(\"") {
            let reason = &file.text[at + ".expect(\"".len()..];
            if reason.find('"').is_some_and(|length| length < 8) {
                found.push(file.at(line_of(&file.text, at), "expect without a reason"));
            }
        }
    }
    found
}

/// Why a test may be skipped: what it needs is no part of every machine, it only measures, it takes
/// too long for every change, or another test runs it.
const REASONS: [&str; 5] = [
    "needs a GPU",
    "needs RDMA devices",
    "measures",
    "takes minutes",
    "runs in a process of its own",
];

pub fn ignored(input: &Input) -> Vec<String> {
    let mut found = Vec::new();
    for (file, Source { code, .. }) in input.rust("") {
        for (at, _) in code.match_indices("#[ignore") {
            let given = &file.text[at + "#[ignore".len()..];
            let reason = given.trim_start_matches([' ', '=', '"']);
            if !REASONS.iter().any(|allowed| reason.starts_with(allowed)) {
                let what = format!("ignored without one of the reasons {REASONS:?}");
                found.push(file.at(line_of(code, at), &what));
            }
        }
        for (i, line) in file.text.lines().enumerate() {
            let line = line.trim_start();
            let doc = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
            if doc.is_some_and(|d| d.trim_start().starts_with("```ignore")) {
                found.push(file.at(i + 1, "a doctest that is neither built nor run"));
            }
        }
    }
    found
}

/// What everything is compared with must share no mistake with it.
pub fn oracle(input: &Input) -> Vec<String> {
    const FOLDER: &str = "crates/ep-bench/src/oracle";
    let mut found = Vec::new();
    let mut files = 0;
    for (file, source) in input.rust(FOLDER).chain(input.rust("crates/ep-bench/src/oracle.rs")) {
        files += 1;
        for name in ["ep_kernels", "ep_runtime", "ep_transport", "ep_topology"] {
            for at in words(&source.code, name) {
                found.push(file.at(line_of(&source.code, at), name));
            }
        }
        for at in words(&source.code, "crate::") {
            if !source.code[at..].starts_with("crate::oracle") {
                found.push(file.at(line_of(&source.code, at), "a module outside the oracle"));
            }
        }
    }
    if files == 0 {
        found.push(format!("{FOLDER}: there is no oracle"));
    }
    found
}

/// A branch on a transport's name would make the same calls behave differently.
pub fn transports(input: &Input) -> Vec<String> {
    const TESTS: [&str; 9] = [
        "==",
        "!=",
        "match ",
        "matches!",
        "if let",
        ".starts_with",
        ".ends_with",
        ".contains",
        ".eq(",
    ];
    let mut found = Vec::new();
    for (file, source) in input.rust("crates/ep-runtime/src") {
        let lines: Vec<&str> = source.shipped.lines().collect();
        for (i, line) in lines.iter().enumerate().filter(|(_, line)| line.contains(".name()")) {
            // rustfmt puts an operator that does not fit at the start of the next line.
            let next = lines.get(i + 1).map_or("", |next| next.trim_start());
            if TESTS.iter().any(|test| line.contains(test) || next.starts_with(test)) {
                found.push(file.at(i + 1, "a branch on a name"));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIB: &str = "crates/ep-runtime/src/lib.rs";

    /// The check finds nothing in `good` and something in each of `bad`.
    fn check(run: fn(&Input) -> Vec<String>, path: &str, good: &str, bad: &[&str]) {
        let found = |text: &str| run(&Input::of(&[(path, text)]));
        assert_eq!(found(good), Vec::<String>::new());
        for text in bad {
            let found = found(text);
            assert!(!found.is_empty(), "not found in: {text}");
            assert!(found[0].starts_with(path), "{found:?}");
        }
    }

    #[test]
    fn length_is_bounded() {
        check(length, "a/b.rs", &"\n".repeat(500), &[&"\n".repeat(501)]);
        check(length, "a/b.md", &"\n".repeat(900), &[]);
    }

    #[test]
    fn unfinished_work_is_found() {
        let comment = concat!("// FIX", "ME later");
        let call = concat!("fn f() { to", "do!() }");
        check(unfinished, LIB, "// done\nfn f() {}", &[comment, call]);
        check(unfinished, "README.md", "Done.", &[concat!("TO", "DO: write")]);
    }

    #[test]
    fn paths_of_one_machine_are_found() {
        let good = "see ../README.md, https://example.org/home/page and /sys/class";
        let bad =
            [concat!("`..", "/shared/x`"), concat!("in /ho", "me/me"), concat!("\"/wo", "rk/x\"")];
        check(paths, "a.md", good, &bad);
    }

    #[test]
    fn output_of_libraries_is_found() {
        let good =
            "/// println!(\"x\")\nfn f() {}\n#[cfg(test)]\nmod tests { fn g() { dbg!(1); } }";
        check(output, LIB, good, &["fn f() { println!(\"x\"); }", "fn f() { eprint!(\"x\"); }"]);
        check(output, "crates/ep-bench/src/main.rs", "fn main() { println!(\"x\"); }", &[]);
    }

    #[test]
    fn subscribers_are_found() {
        let bad =
            ["fn f() { tracing_subscriber::fmt::init(); }", "fn f() { set_global_default(x); }"];
        check(subscriber, LIB, "fn f() { tracing::info!(\"x\"); }", &bad);
    }

    #[test]
    fn panics_without_reason_are_found() {
        let good = "fn f() { a.expect(\"the lock is ours alone\"); b.unwrap_or(0); }\n\
                    #[test]\nfn g() { c.unwrap(); }";
        check(unwrap, LIB, good, &["fn f() { a.unwrap(); }", "fn f() { a.expect(\"\"); }"]);
        check(unwrap, "crates/ep-transport/src/conformance/a.rs", "fn f() { a.unwrap(); }", &[]);
    }

    #[test]
    fn skipped_tests_need_a_reason() {
        let good = "#[test]\n#[ignore = \"needs a GPU\"]\nfn f() {}\n\
                    #[test]\n#[ignore = \"measures latency\"]\nfn g() {}\n/// ```no_run\n/// ```";
        let bad =
            ["#[test]\n#[ignore]\nfn f() {}", "#[ignore = \"flaky\"]\nfn f() {}", "/// ```ignore"];
        check(ignored, "crates/ep-transport/tests/a.rs", good, &bad);
    }

    #[test]
    fn the_oracle_stands_alone() {
        let path = "crates/ep-bench/src/oracle/mod.rs";
        let good = "//! Unlike ep_kernels.\nuse crate::oracle::job;\nuse half::bf16;";
        let bad = ["use ep_kernels::cast;", "use ep_runtime as r;", "use crate::runner::x;"];
        check(oracle, path, good, &bad);
        assert_eq!(oracle(&Input::of(&[])).len(), 1);
    }

    #[test]
    fn branches_on_names_are_found() {
        let good = "fn f() { tracing::debug!(transport = t.name()); }\n\
                    #[test]\nfn g() { assert!(t.name() == \"host\"); }";
        let bad = [
            "fn f() { if t.name() == \"host\" {} }",
            "fn f() { match t.name() { _ => {} } }",
            "fn f() { t.name().starts_with(\"n\") }",
            "fn f() {\n let x = long.name()\n   == other;\n}",
        ];
        check(transports, LIB, good, &bad);
    }
}
