//! The commands beside the benchmark of dispatch and combine: `topo`, `preflight`, `kernels`, `margin`.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

use crate::{kernels, margin, preflight, topo};

/// A command with its options.
#[derive(Debug, Parser)]
#[command(name = "ep-bench", max_term_width = 80, disable_help_subcommand = true)]
enum Command {
    /// What this machine is: GPUs, links, NICs, SM domains
    Topo(topo::Args),
    /// Whether this machine has what expert parallelism needs
    Preflight(preflight::Args),
    /// What the GPU kernels take: registers, shared memory, spills
    Kernels(kernels::Args),
    /// How many SMs compute must leave so that a launch starts
    Margin(margin::Args),
}

/// Names that [`run`] takes.
const NAMES: [&str; 4] = ["topo", "preflight", "kernels", "margin"];

/// Runs the command that the first of `args` (behind the program's name) names; `None` if it names none.
/// The exit code is 0, 1 for a failure, 2 for options that cannot be met.
pub fn run(args: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    let args: Vec<OsString> = args.into_iter().collect();
    let first = args.get(1)?.to_str()?;
    if !NAMES.contains(&first) {
        return None;
    }
    let done = match Command::parse_from(args) {
        Command::Topo(args) => topo::run(&args),
        Command::Preflight(args) => preflight::run(&args),
        Command::Kernels(args) => kernels::run(&args),
        Command::Margin(args) => margin::run(&args),
    };
    Some(match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_code())
        }
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_every_command_is_dispatched() {
        Command::command().debug_assert();
        let names: Vec<_> =
            Command::command().get_subcommands().map(|c| c.get_name().to_owned()).collect();
        assert_eq!(names, NAMES);
    }

    #[test]
    fn other_arguments_are_left_alone() {
        let args = |line: &str| line.split_whitespace().map(OsString::from).collect::<Vec<_>>();
        assert!(run(args("ep-bench")).is_none());
        assert!(run(args("ep-bench dispatch --ranks 2")).is_none());
        assert!(run(args("ep-bench --json topo")).is_none());
    }
}
