//! The commands of `cargo xtask`.

mod api;
mod bench;
mod emulate;
mod mutate;
mod process;
mod rdma_vm;
mod style;
mod test;
mod tidy;
mod tools;
mod tree;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// What a command gives back: `Err` holds what to print before exiting with 1.
type Result<T, E = String> = std::result::Result<T, E>;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "The project's own commands.",
    arg_required_else_help = true,
    disable_help_subcommand = true,
    max_term_width = 80
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the benchmarks and run them; every argument goes to ep-bench
    #[command(disable_help_flag = true)]
    Bench {
        /// Arguments of ep-bench (`cargo xtask bench --help` lists them)
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<std::ffi::OsString>,
    },
    /// Show what this machine is: GPUs, links, NICs, SM domains
    #[command(disable_help_flag = true)]
    Topo {
        /// Arguments of `ep-bench topo`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<std::ffi::OsString>,
    },
    /// Check whether this machine has what expert parallelism needs
    #[command(disable_help_flag = true)]
    Preflight {
        /// Arguments of `ep-bench preflight`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<std::ffi::OsString>,
    },
    /// Compile the GPU kernels without a GPU and list what they take
    #[command(disable_help_flag = true)]
    Kernels {
        /// Arguments of `ep-bench kernels`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<std::ffi::OsString>,
    },
    /// Run a program in a throw-away virtual machine that has RDMA devices
    #[command(disable_help_flag = true)]
    RdmaVm {
        /// Options, then the program and its arguments (`cargo xtask rdma-vm -h` says which)
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<std::ffi::OsString>,
    },
    /// Run a program with emulated GPUs; without one, say which variables do that
    #[command(disable_help_flag = true)]
    Emulate {
        /// The program and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<std::ffi::OsString>,
    },
    /// Run every check of the project, as CI does
    Test(test::Options),
    /// Check the project's invariants that can be checked mechanically
    Tidy,
    /// Break the code on purpose, one line at a time: each must fail a test
    Mutate(mutate::Options),
    /// Compare the public API of the libraries with docs/api
    Api(api::Options),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Bench { args } => bench::run(&args),
        Command::Topo { args } => bench::command("topo", &args),
        Command::Preflight { args } => bench::command("preflight", &args),
        Command::Kernels { args } => bench::kernels(&args),
        Command::RdmaVm { args } => rdma_vm::run(&args),
        Command::Emulate { command } => emulate::run(&command),
        Command::Test(options) => test::run(&options),
        Command::Tidy => tidy::run(),
        Command::Mutate(options) => mutate::run(&options),
        Command::Api(options) => api::run(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn bench_passes_every_argument_on() {
        let cli = Cli::try_parse_from(["xtask", "bench", "--help", "-x", "sweep"]).unwrap();
        let Command::Bench { args } = cli.command else { panic!("not bench") };
        assert_eq!(args, ["--help", "-x", "sweep"]);
    }

    #[test]
    fn other_commands_pass_every_argument_on() {
        for name in ["topo", "preflight", "kernels"] {
            let cli = Cli::try_parse_from(["xtask", name, "--help", "--json"]).unwrap();
            let (Command::Topo { args } | Command::Preflight { args } | Command::Kernels { args }) =
                cli.command
            else {
                panic!("{name} is another command")
            };
            assert_eq!(args, ["--help", "--json"]);
        }
    }

    #[test]
    fn rdma_vm_passes_options_and_the_program_on() {
        let cli =
            Cli::try_parse_from(["xtask", "rdma-vm", "-t", "60", "--", "sh", "-c", "x"]).unwrap();
        let Command::RdmaVm { args } = cli.command else { panic!("not rdma-vm") };
        assert_eq!(args, ["-t", "60", "--", "sh", "-c", "x"]);
        let cli = Cli::try_parse_from(["xtask", "rdma-vm", "--", "ls", "-l"]).unwrap();
        let Command::RdmaVm { args } = cli.command else { panic!("not rdma-vm") };
        assert_eq!(args, ["ls", "-l"]);
    }

    #[test]
    fn unknown_commands_and_options_are_refused() {
        assert!(Cli::try_parse_from(["xtask", "nonsense"]).is_err());
        assert!(Cli::try_parse_from(["xtask", "test", "--nonsense"]).is_err());
    }
}
