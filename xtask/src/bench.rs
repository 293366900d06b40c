//! `cargo xtask bench`, `topo`, `preflight` and `kernels`: ep-bench, built with optimisation, in place of this
//! process.

use std::env::consts::EXE_SUFFIX;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::workspace::{Workspace, cargo};
use crate::{Result, tools};

/// Builds ep-bench and becomes it with `args`, so that its exit code, its signals and its terminal are the
/// caller's. Gives back only an error.
pub fn run(args: &[OsString]) -> Result<()> {
    become_bench(&Workspace::load(false)?, args)
}

/// [`run`] with the name of a command before the arguments.
pub fn command(name: &str, args: &[OsString]) -> Result<()> {
    run(&named(name, args))
}

/// `ep-bench kernels` with a compiler, fetched unless the arguments or the environment name one.
pub fn kernels(args: &[OsString]) -> Result<()> {
    let workspace = Workspace::load(false)?;
    let mut all = named("kernels", args);
    let given = args.iter().any(|arg| {
        let text = arg.to_string_lossy();
        text == "--nvrtc" || text.starts_with("--nvrtc=") || text == "--help" || text == "-h"
    });
    if !given && std::env::var_os("EP_NVRTC_PATH").is_none_or(|path| path.is_empty()) {
        all.push("--nvrtc".into());
        all.push(tools::nvrtc(&workspace, false)?.into());
    }
    become_bench(&workspace, &all)
}

fn named(name: &str, args: &[OsString]) -> Vec<OsString> {
    std::iter::once(OsString::from(name)).chain(args.iter().cloned()).collect()
}

fn become_bench(workspace: &Workspace, args: &[OsString]) -> Result<()> {
    let mut build = cargo(&workspace.root);
    build.args(["build", "--release", "--package", "ep-bench", "--bin", "ep-bench"]);
    let status = build.status().map_err(|e| format!("cargo build: {e}"))?;
    if !status.success() {
        return Err("ep-bench does not build".into());
    }
    let program = workspace.target.join("release").join(format!("ep-bench{EXE_SUFFIX}"));
    let why = Command::new(&program).args(args).exec();
    Err(format!("{}: {why}", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_name_comes_first() {
        assert_eq!(named("topo", &["--json".into()]), ["topo", "--json"]);
    }
}
