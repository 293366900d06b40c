//! The step `rdma`: the tests of real verbs, all in one boot of a virtual machine that has devices.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::steps::{TAIL, cargo, judge};
use super::{Context, Outcome};
use crate::emulate::Emulator;
use crate::process::{self, Finished};
use crate::rdma_vm;
use crate::workspace::Workspace;

/// Where the machine finds the scripts.
const FOLDER: &str = "/rdma-vm";
/// Where it finds the emulated GPUs, and how many there are.
const GPU: &str = "/gpu";
const GPUS: &str = "4";
/// The test, of the programs for the machine, that has all their kernels compiled.
const COMPILES: &str = "ranks_of_one_host_compile_the_same_kernels";
/// What a test prints that found no GPU.
const SKIPPED: &str = "skipped:";
/// Unit tests whose paths have this need devices.
const HARDWARE: &str = "rdma::hardware::";
/// And those with this need emulated GPUs, but no devices.
const ON_GPUS: &str = "rdma::on_gpus::";
/// How the name of the program of ep-transport's unit tests starts.
const UNITS: &str = "ep_transport-";
const BUILD: Duration = Duration::from_secs(15 * 60);
/// For the machine, from boot to end, in seconds. It emulates its CPUs where there is no KVM.
const RUN: u64 = 900;
/// MiB; the machine takes what is used of it.
const MEMORY: &str = "2048";

pub fn rdma(context: &Context) -> Outcome {
    if let Err(outcome) = prepared(context) {
        return outcome;
    }
    let built = build(context).and_then(|(programs, units)| {
        let failed = |why| Outcome::failed(why, String::new());
        let emulator = Emulator::build(&context.workspace, context.echo).map_err(failed)?;
        compile_kernels(context, &emulator, &programs)?;
        let mut simulated = Command::new(&units);
        emulator.show_to(simulated.args([ON_GPUS, "--test-threads", "1", "--show-output"]));
        simulated.env("EP_EMULATOR_DEVICES", GPUS);
        Ok((simulated, in_vm(&context.workspace, &emulator, &programs, &units)))
    });
    let (simulated, machine) = match built {
        Ok(commands) => commands,
        Err(outcome) => return outcome,
    };
    let simulated = on_gpus(context, simulated, BUILD);
    if simulated.is_failure() {
        return simulated;
    }
    let mut outcome = on_gpus(context, machine, Duration::from_secs(RUN + 60));
    outcome.counts += simulated.counts;
    outcome
}

/// Runs tests that need emulated GPUs, of which one that found none has failed.
fn on_gpus(context: &Context, command: Command, limit: Duration) -> Outcome {
    match process::run(command, limit, context.echo) {
        Err(why) => Outcome::failed(why, String::new()),
        Ok(done) if done.success() && done.output.contains(SKIPPED) => {
            Outcome::failed("the emulated GPUs were not found", done.tail(TAIL))
        }
        Ok(done) => judge(&done),
    }
}

/// Has the kernels of the tests compiled on this machine, as there is no compiler in the virtual one.
fn compile_kernels(
    context: &Context,
    emulator: &Emulator,
    programs: &[PathBuf],
) -> Result<(), Outcome> {
    for program in programs {
        let mut command = Command::new(program);
        emulator.show_to(command.args(["--exact", COMPILES, "--show-output"]));
        command.env("EP_EMULATOR_CXX", rdma_vm::script(&context.workspace, "cxx.sh"));
        command.env("EP_CXX_ANSWERS", answers(emulator));
        let done = process::run(command, BUILD, false);
        let done = done.map_err(|why| Outcome::failed(why, String::new()))?;
        if !done.success() || done.output.contains(SKIPPED) {
            return Err(Outcome::failed("kernels of the tests do not compile", done.tail(TAIL)));
        }
    }
    Ok(())
}

/// What the compiler said.
fn answers(emulator: &Emulator) -> PathBuf {
    emulator.folder().join("answers")
}

/// What lints, tests and this step add to cargo's arguments where the packages are there, the same for
/// all, so that nothing is built twice.
pub fn features(context: &Context) -> Vec<String> {
    let packages = rdma_vm::missing_packages(&context.workspace);
    let there = cfg!(target_arch = "x86_64") && packages.is_ok_and(|missing| missing.is_empty());
    if there { arguments(&with_feature(&context.workspace)) } else { Vec::new() }
}

fn arguments(crates: &[&str]) -> Vec<String> {
    crates.iter().map(|name| format!("--features={name}/rdma")).collect()
}

/// Everything that is no part of the project is there.
fn prepared(context: &Context) -> Result<(), Outcome> {
    if !cfg!(target_arch = "x86_64") {
        return Err(Outcome::missing(context, "the virtual machine is an x86-64 one", true));
    }
    if !is_debian(&std::fs::read_to_string("/etc/os-release").unwrap_or_default()) {
        let why = "the virtual machine's kernel comes from Debian, which this is not";
        return Err(Outcome::missing(context, why, true));
    }
    let missing = |why: String| Outcome::missing(context, &why, false);
    let packages = rdma_vm::missing_packages(&context.workspace).map_err(missing)?;
    if !packages.is_empty() {
        return Err(missing(format!("not installed: {}", packages.join(" "))));
    }
    rdma_vm::fetch_kernel(&context.workspace, context.echo).map_err(missing)
}

/// Whether this is Debian, by /etc/os-release.
fn is_debian(release: &str) -> bool {
    release.lines().any(|line| line == "ID=debian")
}

/// The crates that have the feature.
fn with_feature(workspace: &Workspace) -> Vec<&str> {
    let members = workspace.members();
    let having = members.iter().filter(|m| m.package["features"]["rdma"].is_array());
    having.map(|m| m.name).collect()
}

/// Builds the test programs whose names start with `rdma`, and that of ep-transport's unit tests.
fn build(context: &Context) -> Result<(Vec<PathBuf>, PathBuf), Outcome> {
    let names = built(context, &["--test", "rdma*"])?;
    let units = built(context, &["--lib"])?;
    let starts = |path: &PathBuf, with: &str| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(with))
    };
    if names.iter().filter(|path| starts(path, "rdma_gpu-")).count() < 2 {
        let why = "the tests of layers and links on GPUs over RDMA were not built";
        return Err(Outcome::failed(why, String::new()));
    }
    let ours = |path: &&PathBuf| starts(path, UNITS);
    match units.iter().find(ours) {
        Some(units) => Ok((names, units.clone())),
        None => Err(Outcome::failed("ep-transport has no unit tests", String::new())),
    }
}

/// The workspace's test programs that `which` selects; there is at least one.
fn built(context: &Context, which: &[&str]) -> Result<Vec<PathBuf>, Outcome> {
    let mut command = cargo(context, &["test", "--workspace", "--profile", "checked", "--no-run"]);
    command.args(features(context)).args(which);
    command.args(["--message-format", "json-render-diagnostics"]);
    let done =
        process::run(command, BUILD, false).map_err(|why| Outcome::failed(why, "".into()))?;
    let programs = programs(&done.output);
    if done.success() && !programs.is_empty() {
        return Ok(programs);
    }
    let output = done.output.lines().filter(|line| !line.starts_with('{')).collect::<Vec<_>>();
    let readable = Finished { status: done.status, output: output.join("\n") };
    Err(Outcome::failed("the tests do not build", readable.tail(TAIL)))
}

/// The test programs that cargo's messages name.
fn programs(output: &str) -> Vec<PathBuf> {
    let messages = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let built = messages.filter(|message| message["profile"]["test"] == true);
    built.filter_map(|message| Some(message["executable"].as_str()?.into())).collect()
}

/// The machine that checks itself and then runs `programs`, and of `units` what needs devices.
fn in_vm(
    workspace: &Workspace,
    emulator: &Emulator,
    programs: &[PathBuf],
    units: &Path,
) -> Command {
    let inside = |name: &str| format!("{FOLDER}/{name}");
    let mut command = rdma_vm::command(workspace);
    command.args(["-m", MEMORY, "-t", &RUN.to_string(), "-f", "ib_write_bw"]);
    for name in ["bandwidth.sh", "gpu.sh", "selftest.sh", "tests.sh"] {
        let script = rdma_vm::script(workspace, name);
        command.arg("-f").arg(format!("{}:{}", script.display(), inside(name)));
    }
    for (from, name) in [
        (emulator.library(), "libgpu_emulator.so"),
        (emulator.folder().join("kernels"), "kernels"),
        (answers(emulator), "answers"),
        (rdma_vm::script(workspace, "cxx.sh"), "cxx.sh"),
    ] {
        command.arg("-f").arg(format!("{}:{GPU}/{name}", from.display()));
    }
    command.args(["-e", &format!("EP_EMULATOR_DEVICES={GPUS}")]);
    for program in programs.iter().map(PathBuf::as_path).chain([units]) {
        command.arg("-f").arg(program);
    }
    for name in passed_on(std::env::vars_os().filter_map(|(name, _)| name.into_string().ok())) {
        command.args(["-e", &name]);
    }
    command.args(["-e", &format!("EP_TEST_RDMA_BANDWIDTH={}", inside("bandwidth.sh"))]);
    command.args(["--", "sh", &inside("gpu.sh"), "sh"]);
    command.args([inside("tests.sh"), inside("selftest.sh")]);
    command.arg(format!("{}@{HARDWARE}", units.display()));
    command.args(programs.iter().map(PathBuf::as_path).map(Path::as_os_str));
    command
}

/// The variables that tests in the machine see.
fn passed_on(names: impl Iterator<Item = String>) -> Vec<String> {
    names.filter(|name| name == "RUST_BACKTRACE" || name.starts_with("EP_TEST_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_told_from_other_artifacts() {
        let output = r#"   Compiling ep-transport
{"reason":"compiler-artifact","profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","profile":{"test":false},"executable":"/t/ep-bench"}
{"reason":"compiler-artifact","profile":{"test":true},"executable":"/t/deps/rdma-1"}
{"reason":"compiler-artifact","profile":{"test":true},"executable":"/t/deps/rdma-2"}
{"reason":"build-finished","success":true}
"#;
        assert_eq!(programs(output), ["/t/deps/rdma-1", "/t/deps/rdma-2"].map(PathBuf::from));
        assert!(programs("error: could not compile").is_empty());
    }

    #[test]
    fn debian_is_told_from_what_resembles_it() {
        assert!(is_debian("NAME=\"Debian GNU/Linux\"\nID=debian\n"));
        assert!(!is_debian("ID=ubuntu\nID_LIKE=debian\n"));
        assert!(!is_debian(""));
    }

    #[test]
    fn every_crate_gets_its_feature() {
        assert_eq!(arguments(&["a", "b"]), ["--features=a/rdma", "--features=b/rdma"]);
        let workspace = Workspace::load(false).unwrap();
        assert!(with_feature(&workspace).contains(&"ep-transport"));
    }

    #[test]
    fn tests_see_no_other_variables() {
        let names = ["PATH", "EP_TEST_SEED", "RUST_BACKTRACE", "EP_TIMEOUT"].map(str::to_owned);
        assert_eq!(passed_on(names.into_iter()), ["EP_TEST_SEED", "RUST_BACKTRACE"]);
    }

    #[test]
    fn the_machine_is_given_scripts_and_programs() {
        let workspace = Workspace::load(false).unwrap();
        let emulator = Emulator::at("/t/emulator".into());
        let programs = ["/t/deps/rdma-1".into()];
        let command = in_vm(&workspace, &emulator, &programs, Path::new("/t/deps/unit-1"));
        let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
        let at = args.iter().position(|arg| arg == "--").unwrap();
        let units = "/t/deps/unit-1@rdma::hardware::";
        let scripts = ["/rdma-vm/gpu.sh", "sh", "/rdma-vm/tests.sh", "/rdma-vm/selftest.sh"];
        let expected = [&["sh"][..], &scripts, &[units, "/t/deps/rdma-1"]].concat();
        assert_eq!(args[at + 1..], expected);
        let library = "/t/emulator/libcuda.so.1:/gpu/libgpu_emulator.so";
        assert!(args[..at].windows(2).any(|pair| pair == ["-f", library]));
        assert!(args[..at].windows(2).any(|pair| pair == ["-f", "/t/deps/unit-1"]));
        assert!(args[..at].windows(2).any(|pair| pair == ["-f", "/t/deps/rdma-1"]));
    }
}
