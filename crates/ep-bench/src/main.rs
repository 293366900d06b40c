//! The program `ep-bench`; see the library for what it does.

use std::process::ExitCode;

use clap::Parser as _;
use ep_bench::cli::Args;

fn main() -> ExitCode {
    if let Some(code) = ep_bench::tools::run(std::env::args_os()) {
        return code;
    }
    let args = Args::parse();
    if args.rank_process {
        return ExitCode::from(ep_bench::processes::rank_main());
    }
    match ep_bench::run::run(&args) {
        Ok(_) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(e.exit_code())
        }
    }
}
