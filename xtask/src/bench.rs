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
    if wants_rdma(args) {
        // Off by default: it needs packages to build.
        build.args(["--features", "rdma"]);
    }
    let status = build.status().map_err(|e| format!("cargo build: {e}"))?;
    if !status.success() {
        return Err("ep-bench does not build".into());
    }
    let program = workspace.target.join("release").join(format!("ep-bench{EXE_SUFFIX}"));
    let why = Command::new(&program).args(args).exec();
    Err(format!("{}: {why}", program.display()))
}

/// Whether the transport asked for is RDMA: the last that is named counts.
fn wants_rdma(args: &[OsString]) -> bool {
    const OPTION: &str = "--transport";
    let named = |i: usize| {
        let text = args[i].to_str()?;
        match text.strip_prefix(OPTION)? {
            "" => args.get(i + 1)?.to_str(),
            rest => rest.strip_prefix('='),
        }
    };
    (0..args.len()).filter_map(named).next_back() == Some("rdma")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rdma_is_built_where_it_is_asked_for() {
        let wants = |line: &str| {
            wants_rdma(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>())
        };
        assert!(wants("dispatch --transport rdma --ranks 2"));
        assert!(wants("--transport host combine --transport=rdma"));
        assert!(!wants("dispatch --transport host --json rdma"));
        assert!(!wants("--transport rdma --transport nccl") && !wants("--transport"));
    }

    #[test]
    fn the_commands_name_comes_first() {
        assert_eq!(named("topo", &["--json".into()]), ["topo", "--json"]);
    }
}
