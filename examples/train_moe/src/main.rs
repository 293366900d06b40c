//! Trains the classifier on 1, 2 and 4 ranks; fails unless their losses agree and it has learned.

use std::process::ExitCode;
use std::time::Instant;

use ep_runtime::EpError;
use train_moe::data;
use train_moe::train::{Config, Report, on_ranks, train};

/// The largest difference of two runs' losses, relative.
fn difference(a: &Report, b: &Report) -> f32 {
    let relative = |(a, b): (&f32, &f32)| ((a - b) / a).abs();
    a.losses.iter().zip(&b.losses).map(relative).fold(0.0, f32::max)
}

fn main() -> Result<ExitCode, EpError> {
    let (samples, test) = data::load();
    let config = Config::default();
    println!("{} digits to train with, {} to test with", samples.labels.len(), test.labels.len());
    println!("ranks  loss: first  middle    last  accuracy  seconds");
    let mut runs: Vec<Report> = Vec::new();
    for ranks in [1, 2, 4] {
        let began = Instant::now();
        let reports = on_ranks(ranks, |group| train(group, &config, &samples, &test))?;
        let seconds = began.elapsed().as_secs_f32();
        let run = &reports[0];
        let (first, middle) = (run.losses[0], run.losses[run.losses.len() / 2]);
        let last = run.losses[run.losses.len() - 1];
        let accuracy = 100.0 * run.accuracy;
        println!("{ranks:5}  {first:11.5} {middle:7.5} {last:7.5} {accuracy:7.1} %  {seconds:7.2}");
        runs.extend(reports);
    }
    let apart = runs.iter().map(|run| difference(&runs[0], run)).fold(0.0, f32::max);
    // Not by `apart`, which passes over NaN.
    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * a.abs();
    let agree = runs.iter().all(|run| runs[0].losses.iter().zip(&run.losses).all(close));
    println!("losses of all {} steps agree to {apart:.1e} (1e-5 allowed)", runs[0].losses.len());
    let majority = test.majority();
    let learned = runs.iter().all(|run| run.accuracy >= majority + 0.15);
    println!("the most common class alone gives {:.1} %", 100.0 * majority);
    if agree && learned {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("error: {}", if agree { "it has not learned" } else { "the losses do not agree" });
    Ok(ExitCode::FAILURE)
}
