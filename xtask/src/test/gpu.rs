//! The step `gpu`: tests that need GPUs, on emulated ones.

use std::time::Duration;

use super::steps::{cargo, judge};
use super::{Context, Outcome, Verdict, rdma};
use crate::emulate::Emulator;
use crate::process;

/// The longest a case may run, with what has to be built for it.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// Some test programs, run alike.
struct Case {
    what: &'static str,
    programs: &'static [&'static str],
    /// Parts of the names of tests, or nothing for all; and what else the programs take.
    args: &'static [&'static str],
    env: &'static [(&'static str, &'static str)],
}

/// Tests of one program share GPUs, and some count what is free.
const ALONE: &str = "--test-threads=1";
/// What a program prints that found no GPU.
const SKIPPED: &str = "skipped:";

const CASES: [Case; 6] = [
    // First: it shows whether the emulator is found at all.
    Case { what: "graphs", programs: &["gpu_graphs"], args: &[ALONE, "--show-output"], env: &[] },
    Case {
        what: "layers",
        programs: &[
            "gpu_behaviour",
            "gpu_bulk",
            "gpu_fixed",
            "gpu_cast",
            "gpu_layer",
            "gpu_oracle",
            "gpu_processes",
            "gpu_verdicts",
        ],
        // Rows of training are too many for it.
        args: &[ALONE, "--skip", "shapes_of_training", "--skip", "rows_that_go_in_parts"],
        env: &[
            ("EP_GPU_CASES", "24"),
            ("EP_GPU_LARGE", "2"),
            ("EP_GPU_PLAN_CASES", "1"),
            ("EP_GPU_ITERATIONS", "60"),
            ("EP_GPU_ROWS", "8"),
        ],
    },
    Case { what: "nodes", programs: &["gpu_nodes"], args: &[ALONE], env: &[("EP_GPU_CASES", "3")] },
    // Four ranks whose streams share a queue: what waits there holds up all of them.
    Case {
        what: "one GPU, one hardware queue",
        programs: &["gpu_layer"],
        args: &[ALONE],
        env: &[("EP_EMULATOR_DEVICES", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1")],
    },
    Case {
        what: "GPUs that lack what may be lacking",
        programs: &["gpu_layer"],
        args: &[ALONE],
        env: &[("EP_EMULATOR_NO", "memops,green,clusters"), ("EP_EMULATOR_SEED", "1")],
    },
    Case {
        what: "windows on GPUs",
        programs: &["nvlink"],
        args: &["two_ranks", "a_thread_per_gpu", "by_a_kernel", "refused", "usable", "every"],
        env: &[],
    },
];

pub fn gpu(context: &Context) -> Outcome {
    let emulator = match Emulator::build(&context.workspace, context.echo) {
        Ok(emulator) => emulator,
        Err(why) => return Outcome::failed(why, String::new()),
    };
    let mut sum: Option<Outcome> = None;
    for case in CASES {
        let outcome = run(context, &emulator, &case);
        if outcome.is_failure() {
            return outcome;
        }
        match &mut sum {
            Some(sum) => sum.counts += outcome.counts,
            None => sum = Some(outcome),
        }
    }
    sum.unwrap_or_else(|| Outcome::failed("no case", String::new()))
}

fn run(context: &Context, emulator: &Emulator, case: &Case) -> Outcome {
    // As the step `test` builds them, so that nothing is built twice.
    let mut command = cargo(context, &["test", "--workspace", "--profile", "checked"]);
    command.args(rdma::features(context));
    command.args(case.programs.iter().flat_map(|program| ["--test", program]));
    emulator.show_to(command.arg("--").args(case.args)).envs(case.env.iter().copied());
    let done = match process::run(command, LIMIT, context.echo) {
        Ok(done) => done,
        Err(why) => return Outcome::failed(why, String::new()),
    };
    let mut outcome = judge(&done);
    match &mut outcome.verdict {
        Verdict::Failed(why) => *why = format!("{}: {why}", case.what),
        _ if done.output.contains(SKIPPED) => {
            return Outcome::failed("the emulated GPUs were not found", done.tail(20));
        }
        _ => {}
    }
    outcome
}
