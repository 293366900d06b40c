//! `cargo xtask rdma-vm`: a program in a throw-away virtual machine that has RDMA devices. The work
//! is done by the scripts in `xtask/rdma-vm`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::workspace::Workspace;
use crate::{Result, process};

/// The longest that fetching and unpacking a kernel may take.
const FETCH: Duration = Duration::from_secs(600);

/// Becomes `run.sh` with `args`. Gives back only an error.
pub fn run(args: &[OsString]) -> Result<()> {
    let mut command = command(&Workspace::load(false)?);
    let why = command.args(args).exec();
    Err(format!("{}: {why}", command.get_program().display()))
}

/// One of the scripts.
pub fn script(workspace: &Workspace, name: &str) -> PathBuf {
    workspace.root.join("xtask/rdma-vm").join(name)
}

/// `run.sh`, which takes options and the command to run in the machine.
pub fn command(workspace: &Workspace) -> Command {
    let mut command = Command::new(script(workspace, "run.sh"));
    command.env("RDMA_VM_CACHE", cache(workspace));
    command
}

/// The Debian packages that the tests need and that are not installed.
pub fn missing_packages(workspace: &Workspace) -> Result<Vec<String>> {
    let command = Command::new(script(workspace, "packages.sh"));
    let done = process::run(command, Duration::from_secs(60), false)?;
    if !done.success() {
        return Err(format!("packages.sh: {}; {}", done.why(), done.tail(3)));
    }
    Ok(done.output.lines().map(str::to_owned).collect())
}

/// Fetches the machine's kernel unless it is there.
pub fn fetch_kernel(workspace: &Workspace, echo: bool) -> Result<()> {
    let mut command = Command::new(script(workspace, "kernel.sh"));
    command.arg(cache(workspace));
    let done = process::run(command, FETCH, echo)?;
    if done.success() {
        return Ok(());
    }
    Err(format!("there is no kernel for the virtual machine: {}; {}", done.why(), done.tail(3)))
}

fn cache(workspace: &Workspace) -> PathBuf {
    workspace.target.join("rdma-vm")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scripts_are_there_and_may_run() {
        use std::os::unix::fs::PermissionsExt;
        let workspace = Workspace::load(false).unwrap();
        for name in ["run.sh", "init.sh", "kernel.sh", "packages.sh", "cxx.sh"] {
            let found = std::fs::metadata(script(&workspace, name)).unwrap();
            assert_eq!(found.permissions().mode() & 0o111, 0o111, "{name}");
        }
    }

    #[test]
    fn a_wrong_option_is_answered_with_the_usage() {
        let mut command = command(&Workspace::load(false).unwrap());
        command.arg("-z");
        let done = process::run(command, Duration::from_secs(60), false).unwrap();
        assert_eq!(done.status.unwrap().code(), Some(125));
        assert!(done.output.contains("Usage: run.sh"), "{}", done.output);
    }
}
