//! `cargo xtask mutate`: breaks a copy of the code one line at a time; every breakage has to fail
//! the test that is there for it.

mod list;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;

use crate::process::{self, Finished};
use crate::style::{BOLD, GREEN, RED, paint, seconds, wrap};
use crate::workspace::{Workspace, cargo};
use crate::{Result, tree};
use list::{MUTATIONS, Mutation, Test};

const BUILD_LIMIT: Duration = Duration::from_secs(15 * 60);
/// A broken wait may hang; every test command is far faster than this.
const TEST_LIMIT: Duration = Duration::from_secs(5 * 60);

/// Options of `cargo xtask mutate`.
#[derive(Args)]
pub struct Options {
    /// Apply this mutation alone (may be repeated)
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// List the mutations and leave
    #[arg(long)]
    list: bool,
    /// Print what the builds and tests print
    #[arg(long, short)]
    verbose: bool,
}

/// How a mutation ended.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// Its test failed, as it has to.
    Caught(String),
    /// Its test passed.
    Survived,
    /// It says nothing: it does not apply, does not build, or its test fails without it too.
    Void(String),
}

/// What mutations are applied to and tested with; a fake in the tests.
trait Bench {
    /// The folder with the copy of the tree.
    fn folder(&self) -> &Path;
    /// Builds the test.
    fn build(&self, test: Test) -> Result<Finished>;
    /// Runs the test.
    fn run(&self, test: Test) -> Result<Finished>;
}

/// The command.
pub fn run(options: &Options) -> Result<()> {
    if let Some(unknown) = options.only.iter().find(|o| MUTATIONS.iter().all(|m| m.name != **o)) {
        return Err(format!("there is no mutation {unknown}; --list names them"));
    }
    if options.list {
        for mutation in MUTATIONS {
            println!("{}\n  {}", mutation.name, mutation.file);
        }
        return Ok(());
    }
    let workspace = Workspace::load(false)?;
    let cargo = Cargo::new(&workspace, options.verbose)?;
    let wanted =
        |m: &&Mutation| options.only.is_empty() || options.only.iter().any(|o| o == m.name);
    let mutations: Vec<&Mutation> = MUTATIONS.iter().filter(wanted).collect();

    let mut baselines = Vec::new();
    let (mut caught, mut survived, mut void) = (0, 0, 0);
    for mutation in mutations {
        println!("{}", paint(&format!("==> {} in {}", mutation.name, mutation.file), BOLD));
        let start = Instant::now();
        let fate = apply(mutation, &cargo, &mut baselines)?;
        let text = match &fate {
            Fate::Caught(by) => {
                caught += 1;
                format!("{} by {by}", paint("caught", GREEN))
            }
            Fate::Survived => {
                survived += 1;
                format!("{}: its test passed", paint("SURVIVED", RED))
            }
            Fate::Void(why) => {
                void += 1;
                format!("{}: {why}", paint("VOID", RED))
            }
        };
        println!("{} ({})", wrap(&text, 0, 4), seconds(start.elapsed()));
    }
    println!("\n{caught} caught, {survived} survived, {void} void");
    if survived + void == 0 { Ok(()) } else { Err("not every mutation was caught".into()) }
}

/// Applies one mutation, runs its test, and takes it back. `baselines` are the tests known to pass
/// without a mutation.
fn apply(mutation: &Mutation, bench: &dyn Bench, baselines: &mut Vec<Test>) -> Result<Fate> {
    let path = bench.folder().join(mutation.file);
    let failed = |e: std::io::Error| format!("{}: {e}", mutation.file);
    let Ok(original) = fs::read_to_string(&path) else {
        return Ok(Fate::Void("there is no such file".into()));
    };
    let broken = match mutated(mutation, &original) {
        Ok(broken) => broken,
        Err(why) => return Ok(Fate::Void(why)),
    };
    if !baselines.contains(&mutation.test) {
        let done = bench.build(mutation.test)?;
        let done = if done.success() { bench.run(mutation.test)? } else { done };
        if !done.success() {
            return Ok(Fate::Void(format!("its test fails without it:\n{}", done.tail(15))));
        }
        if crate::test::Counts::read(&done.output).ran() == 0 {
            return Ok(Fate::Void("its test command runs no test".into()));
        }
        baselines.push(mutation.test);
    }
    fs::write(&path, broken).map_err(failed)?;
    let fate = judge(bench, mutation.test);
    fs::write(&path, original).map_err(failed)?;
    fate
}

/// Builds and runs the test on broken code.
fn judge(bench: &dyn Bench, test: Test) -> Result<Fate> {
    let built = bench.build(test)?;
    if !built.success() {
        return Ok(Fate::Void(format!("it does not build:\n{}", built.tail(15))));
    }
    let done = bench.run(test)?;
    if done.success() {
        return Ok(Fate::Survived);
    }
    let failed = crate::test::failures(&done.output);
    let by = match failed.as_slice() {
        [] => done.why(),
        [one] => (*one).to_owned(),
        [first, rest @ ..] => format!("{first} and {} more", rest.len()),
    };
    Ok(Fate::Caught(by))
}

/// `original` with the mutation applied.
fn mutated(mutation: &Mutation, original: &str) -> Result<String> {
    match original.matches(mutation.find).count() {
        1 => Ok(original.replacen(mutation.find, mutation.replace, 1)),
        n => Err(format!("its text occurs {n} times: {}", mutation.find)),
    }
}

/// Mutations that cannot be applied to the tree at `root`.
pub fn stale(root: &Path) -> Vec<String> {
    let check = |mutation: &Mutation| {
        let why = match fs::read_to_string(root.join(mutation.file)) {
            Ok(text) => mutated(mutation, &text).err()?,
            Err(e) => e.to_string(),
        };
        Some(format!("{}: {}: {why}", mutation.file, mutation.name))
    };
    MUTATIONS.iter().filter_map(check).collect()
}

/// The copy of the tree, tested by cargo.
struct Cargo {
    folder: PathBuf,
    target: PathBuf,
    echo: bool,
    /// Held while this process may change the copy.
    _lock: File,
}

impl Cargo {
    fn new(workspace: &Workspace, echo: bool) -> Result<Self> {
        let home = workspace.target.join("mutate");
        let folder = home.join("tree");
        let failed = |e: std::io::Error| format!("{}: {e}", home.display());
        fs::create_dir_all(&home).map_err(failed)?;
        let lock = File::create(home.join("lock")).map_err(failed)?;
        lock.try_lock().map_err(|_| "another cargo xtask mutate is running")?;
        tree::mirror(&workspace.root, &folder)?;
        Ok(Self { folder, target: home.join("target"), echo, _lock: lock })
    }

    fn command(&self, test: Test, build: bool) -> Command {
        let mut command = cargo(&self.folder);
        command.arg("test");
        let (args, target) = match test {
            Test::Plain(args) => {
                command.args(["--profile", "checked"]);
                (args, self.target.clone())
            }
            Test::Loom(args) => {
                command.arg("--release").env("RUSTFLAGS", "--cfg loom");
                (args, self.target.join("loom"))
            }
        };
        command.env("CARGO_TARGET_DIR", target);
        if build {
            // A filter of test names changes nothing in the build.
            command.arg("--no-run");
        }
        command.args(args);
        command
    }
}

impl Bench for Cargo {
    fn folder(&self) -> &Path {
        &self.folder
    }

    fn build(&self, test: Test) -> Result<Finished> {
        process::run(self.command(test, true), BUILD_LIMIT, self.echo)
    }

    fn run(&self, test: Test) -> Result<Finished> {
        process::run(self.command(test, false), TEST_LIMIT, self.echo)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;
    use crate::tree::Scratch;

    const TEST: Test = Test::Plain(&[]);

    /// Its test passes while `f.rs` holds `good`; what holds `garbage` does not build.
    struct Fake {
        scratch: Scratch,
        good: &'static str,
    }

    impl Fake {
        fn new(name: &str, good: &'static str) -> Self {
            let scratch = Scratch::new(name);
            scratch.write("f.rs", "let a = 1; let b = 2;");
            Self { scratch, good }
        }

        fn text(&self) -> String {
            fs::read_to_string(self.scratch.0.join("f.rs")).unwrap()
        }

        fn fate(&self, find: &'static str, replace: &'static str) -> Fate {
            let mutation = Mutation { name: "m", file: "f.rs", find, replace, test: TEST };
            let before = self.text();
            let fate = apply(&mutation, self, &mut Vec::new()).unwrap();
            assert_eq!(self.text(), before, "the mutation was not taken back");
            fate
        }
    }

    fn finished(good: bool, output: &str) -> Result<Finished> {
        let status = Some(ExitStatus::from_raw(if good { 0 } else { 101 << 8 }));
        Ok(Finished { status, output: output.into() })
    }

    impl Bench for Fake {
        fn folder(&self) -> &Path {
            &self.scratch.0
        }

        fn build(&self, _: Test) -> Result<Finished> {
            finished(!self.text().contains("garbage"), "error: expected item")
        }

        fn run(&self, _: Test) -> Result<Finished> {
            let good = self.text().contains(self.good);
            let output = if good {
                "test a ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored"
            } else {
                "test a ... FAILED\ntest result: FAILED. 0 passed; 1 failed; 0 ignored"
            };
            finished(good, output)
        }
    }

    #[test]
    fn a_mutation_that_fails_its_test_is_caught() {
        let fake = Fake::new("caught", "a = 1");
        assert_eq!(fake.fate("a = 1", "a = 3"), Fate::Caught("a".into()));
    }

    #[test]
    fn a_mutation_that_passes_survives() {
        let fake = Fake::new("survived", "a = 1");
        assert_eq!(fake.fate("b = 2", "b = 3"), Fate::Survived);
    }

    #[test]
    fn text_that_is_not_there_once_is_void() {
        let fake = Fake::new("void", "a = 1");
        assert!(matches!(fake.fate("c = 1", "c = 2"), Fate::Void(why) if why.contains("0 times")));
        assert!(matches!(fake.fate("let", "var"), Fate::Void(why) if why.contains("2 times")));
    }

    #[test]
    fn what_does_not_build_is_no_evidence() {
        let fake = Fake::new("build", "a = 1");
        let fate = fake.fate("a = 1", "garbage");
        assert!(matches!(fate, Fate::Void(why) if why.contains("does not build")));
    }

    #[test]
    fn a_test_that_fails_anyway_is_no_evidence() {
        let fake = Fake::new("anyway", "a = 7");
        let fate = fake.fate("a = 1", "a = 3");
        assert!(matches!(fate, Fate::Void(why) if why.contains("without it")));
    }

    #[test]
    fn mutations_have_names_of_their_own() {
        for (i, mutation) in MUTATIONS.iter().enumerate() {
            assert!(MUTATIONS[..i].iter().all(|m| m.name != mutation.name), "{}", mutation.name);
            assert_ne!(mutation.find, mutation.replace, "{}", mutation.name);
        }
    }
}
