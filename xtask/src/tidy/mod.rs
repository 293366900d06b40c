//! `cargo xtask tidy`: the project's invariants that can be checked mechanically.

mod code;
mod crates;
mod documents;
mod source;

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::style::wrap;
use crate::workspace::Workspace;
use crate::{Result, mutate, tree};
use source::Source;

/// One check; it gives back what it found wrong, one line each.
struct Check {
    name: &'static str,
    what: &'static str,
    run: fn(&Input) -> Vec<String>,
}

const CHECKS: &[Check] = &[
    Check { name: "length", what: "no source file is longer than 500 lines", run: code::length },
    Check { name: "unfinished", what: "nothing is left to do", run: code::unfinished },
    Check { name: "paths", what: "no path leaves the repository", run: code::paths },
    Check { name: "output", what: "libraries print nothing", run: code::output },
    Check { name: "subscriber", what: "libraries install no subscriber", run: code::subscriber },
    Check { name: "unwrap", what: "libraries panic only with a reason", run: code::unwrap },
    Check { name: "ignored", what: "tests are skipped for a good reason", run: code::ignored },
    Check { name: "oracle", what: "the oracle imports no crate of ours", run: code::oracle },
    Check { name: "transports", what: "ep-runtime treats transports alike", run: code::transports },
    Check { name: "graph", what: "crates depend one way", run: crates::graph },
    Check { name: "linking", what: "no native library is linked", run: crates::linking },
    Check { name: "cudarc", what: "cudarc is opened at run time only", run: crates::cudarc },
    Check {
        name: "manifests",
        what: "lints and versions come from the root",
        run: crates::manifests,
    },
    Check { name: "figures", what: "figures stand in bench/results", run: documents::figures },
    Check { name: "links", what: "local links of documents lead somewhere", run: documents::links },
    Check { name: "mutations", what: "every mutation still applies", run: mutations },
];

/// What checks look at.
pub struct Input {
    files: Vec<File>,
    /// `cargo metadata` with all packages.
    metadata: Value,
    root: PathBuf,
}

struct File {
    path: PathBuf,
    text: String,
    /// For Rust sources.
    source: Option<Source>,
}

impl Input {
    fn new(root: &Path, texts: Vec<(PathBuf, String)>, metadata: Value) -> Self {
        let files = texts.into_iter().map(|(path, text)| {
            let rust = path.extension().is_some_and(|e| e == "rs");
            let source = rust.then(|| Source::new(&text));
            File { path, text, source }
        });
        let mut files: Vec<File> = files.collect();
        source::blank_test_modules(&mut files);
        Self { files, metadata, root: root.to_owned() }
    }

    /// The Rust sources whose path begins with `folder`.
    fn rust<'a>(&'a self, folder: &'a str) -> impl Iterator<Item = (&'a File, &'a Source)> {
        let under = self.files.iter().filter(move |f| f.path.starts_with(folder));
        under.filter_map(|file| Some((file, file.source.as_ref()?)))
    }

    /// The sources of the libraries, tests beside them aside.
    fn libraries(&self) -> impl Iterator<Item = (&File, &Source)> {
        crates::LIBRARIES.iter().flat_map(|folder| self.rust(folder))
    }

    #[cfg(test)]
    fn of(files: &[(&str, &str)]) -> Self {
        let texts = files.iter().map(|(path, text)| (path.into(), (*text).to_owned()));
        Self::new(Path::new("/nowhere"), texts.collect(), Value::Null)
    }
}

impl File {
    /// `path:line: what`.
    fn at(&self, line: usize, what: &str) -> String {
        format!("{}:{line}: {what}", self.path.display())
    }
}

/// What the checks found.
pub struct Report(Vec<(&'static Check, Vec<String>)>);

impl Report {
    /// How many checks found nothing.
    pub fn passed(&self) -> usize {
        self.0.len() - self.failed()
    }

    /// How many checks found something.
    pub fn failed(&self) -> usize {
        self.0.iter().filter(|(_, found)| !found.is_empty()).count()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (check, found)) in self.0.iter().enumerate() {
            let verdict = if found.is_empty() { "ok" } else { "FAILED" };
            let end = if i > 0 { "\n" } else { "" };
            write!(f, "{end}{:<11} {:<48} {verdict}", check.name, check.what)?;
            for line in found {
                write!(f, "\n  {}", wrap(line, 2, 4))?;
            }
        }
        Ok(())
    }
}

/// Runs every check on the tree at `root`.
pub fn check(root: &Path) -> Result<Report> {
    let metadata = Workspace::load(true)?.metadata;
    let input = Input::new(root, tree::texts(root)?, metadata);
    Ok(Report(CHECKS.iter().map(|check| (check, (check.run)(&input))).collect()))
}

/// The command.
pub fn run() -> Result<()> {
    let report = check(&crate::workspace::root())?;
    println!("{report}\n\n{} passed, {} failed", report.passed(), report.failed());
    match report.failed() {
        0 => Ok(()),
        n => Err(format!("{n} checks failed")),
    }
}

fn mutations(input: &Input) -> Vec<String> {
    mutate::stale(&input.root)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_counts_and_fits() {
        let report = Report(vec![
            (&CHECKS[0], vec![]),
            (&CHECKS[1], vec!["a/b.rs:1: ".to_owned() + &"long ".repeat(40)]),
        ]);
        assert_eq!((report.passed(), report.failed()), (1, 1));
        assert!(report.to_string().lines().all(|line| line.chars().count() <= 80));
    }

    #[test]
    fn names_of_checks_are_unique_and_fit() {
        for (i, check) in CHECKS.iter().enumerate() {
            assert!(CHECKS[..i].iter().all(|other| other.name != check.name), "{}", check.name);
            assert!(check.name.len() <= 11 && check.what.len() <= 48, "{}", check.name);
        }
    }
}
