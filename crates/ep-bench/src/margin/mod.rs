//! `margin`: how many SMs compute must leave so that a launch starts, predicted and then observed.
//!
//! A holder keeps one block on every SM but a margin; a launch of `n` blocks of one per SM, in clusters or not,
//! cooperative or not, is submitted beside it. The study first observes the device, calibrates the planner with
//! some launches, writes down what it predicts for all, and only then looks: beside plain holders, and beside
//! holders that leave the most awkward SMs free.

mod adversary;
#[cfg(feature = "cuda")]
mod gpu;
pub mod lab;
mod output;
#[cfg(test)]
mod sim;
pub mod study;
#[cfg(test)]
mod tests;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;

use crate::machine::{Machine, commit};
use crate::report::{Report, write};
use crate::{BenchError, Result};

/// Options of `margin`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// CUDA ordinal of the GPU
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub gpu: usize,
    /// Trials per margin
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Seconds for all of it
    #[arg(long, value_name = "S", default_value_t = 230, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub budget: u64,
    /// Write the results as JSON
    #[arg(long, value_name = "PATH")]
    pub json: Option<PathBuf>,
    /// Write a report to look at
    #[arg(long, value_name = "PATH")]
    pub html: Option<PathBuf>,
    /// Write the predictions, before anything is observed [default: beside --json]
    #[arg(long, value_name = "PATH")]
    pub predictions: Option<PathBuf>,
    /// The commit that is measured [default: what git says]
    #[arg(long, value_name = "HASH")]
    pub commit: Option<String>,
}

/// Runs the study on a GPU. False if a prediction did not hold.
///
/// # Errors
/// No GPU, a GPU that is not idle, files that cannot be written.
pub fn run(args: &Args) -> Result<bool> {
    let mut lab = open(args.gpu)?;
    run_on(lab.as_mut(), args, &study::Plan::default())
}

#[cfg(feature = "cuda")]
fn open(ordinal: usize) -> Result<Box<dyn lab::Lab>> {
    Ok(Box::new(gpu::GpuLab::open(ordinal)?))
}

#[cfg(not(feature = "cuda"))]
fn open(_: usize) -> Result<Box<dyn lab::Lab>> {
    Err(BenchError::Usage("this build has no GPU support: build with the feature `cuda`".into()))
}

/// The study on any device: prints and writes what `args` ask for.
fn run_on(lab: &mut dyn lab::Lab, args: &Args, plan: &study::Plan) -> Result<bool> {
    let plan = study::Plan {
        rounds: args.rounds,
        limit: Duration::from_secs(args.budget),
        ..plan.clone()
    };
    let mut report = Report::new(commit(args.commit.as_deref()), Machine::here());
    report.machine.gpus = vec![lab.name()];
    let path = args.predictions.clone().or_else(|| args.json.as_deref().map(beside));
    let commit = report.commit.clone();
    let mut predicted = |predictions: &study::Predictions| {
        println!("{}", output::predictions(predictions));
        let Some(path) = &path else { return Ok(()) };
        let value =
            json!({"schema": 1, "commit": commit, "unix_time": now(), "predictions": predictions});
        durable(path, &format!("{value:#}\n"))
    };
    let study = study::run(lab, &plan, &mut predicted, &mut |step| eprintln!("{step}"))?;
    print!("{}", output::table(&study));
    report.results = output::rows(&study);
    if let Some(path) = &args.json {
        write(path, &report.json())?;
    }
    if let Some(path) = &args.html {
        write(path, &output::page(&report, &study))?;
    }
    for path in [&path, &args.json, &args.html].into_iter().flatten() {
        println!("wrote {}", path.display());
    }
    if study.combinations.is_empty() {
        return Err(BenchError::Tool {
            op: "margin",
            detail: "the device runs none of the launches".into(),
        });
    }
    let wrong = study.combinations.iter().filter(|c| !c.violations().is_empty()).count();
    let all = study.combinations.len();
    match wrong {
        0 => println!("every prediction held: {all} launches"),
        n => println!("predictions that did NOT hold: {n} of {all} launches"),
    }
    Ok(wrong == 0)
}

/// `DIR/NAME-predictions.json` beside `DIR/NAME.json`.
fn beside(json: &Path) -> PathBuf {
    let stem = json.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    json.with_file_name(format!("{stem}-predictions.json"))
}

/// Writes a file and sees to it that it is on the disk: what comes later is then known to come later.
fn durable(path: &Path, text: &str) -> Result<()> {
    write(path, "")?;
    let put = || -> std::io::Result<()> {
        let mut file = std::fs::File::create(path)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()
    };
    put().map_err(|e| BenchError::io(path, e))
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
