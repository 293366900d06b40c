//! `cargo xtask bench`: the benchmarks, built with optimisation, in place of this process.

use std::env::consts::EXE_SUFFIX;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::Result;
use crate::workspace::{Workspace, cargo};

/// Builds ep-bench and becomes it, so that its exit code, its signals and its terminal are the
/// caller's. Gives back only an error.
pub fn run(args: &[OsString]) -> Result<()> {
    let workspace = Workspace::load(false)?;
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
