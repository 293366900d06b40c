//! Checks the GEMM kernel and cuBLASLt against a host reference, then times both. Prints one JSON
//! object, also to PATH if one is given, and exits non-zero if anything did not hold.
//!
//! Usage: `gpu_gemm [--only CASE[,CASE...]] [PATH]`; a case is `MxNxK`, `graph`, `partition` or
//! `time`. Cases run in a child process: one that hangs or faults is named, and a fresh child takes
//! the rest.

mod cases;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ep_kernels::cuda::Driver;
use serde_json::{Value, json};

const CASES: [&str; 13] = [
    "128x256x64",
    "1x256x64",
    "127x256x64",
    "128x8x64",
    "128x256x8",
    "128x256x72",
    "129x264x520",
    "300x520x1032",
    "4096x7168x2048",
    "8192x8192x8192",
    "graph",
    "partition",
    "time",
];
/// Of one case, the first with the start of the process and of CUDA, and of everything.
const CASE_LIMIT: Duration = Duration::from_secs(15);
const TOTAL_LIMIT: Duration = Duration::from_secs(57);

fn main() -> ExitCode {
    let mut cases: Vec<String> = CASES.map(String::from).to_vec();
    let (mut child, mut path) = (false, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--child" => child = true,
            "--only" => {
                let list = arguments.next().unwrap_or_default();
                cases = list.split(',').map(String::from).collect();
            }
            _ if !argument.starts_with('-') && path.is_none() => path = Some(argument),
            _ => cases.clear(),
        }
    }
    let known = |case: &String| CASES.contains(&case.as_str()) || cases::shape_of(case).is_some();
    if cases.is_empty() || !cases.iter().all(known) {
        eprintln!("usage: gpu_gemm [--only CASE[,CASE...]] [PATH]; cases: {}", CASES.join(", "));
        return ExitCode::from(2);
    }
    if child { run_cases(&cases) } else { supervise(&cases, path.as_deref()) }
}

/// Ends the process, at once and whatever the driver waits for, when a limit has passed.
struct Watchdog(Mutex<(String, Instant)>);

impl Watchdog {
    fn start(what: &str, limit: Duration) -> &'static Watchdog {
        let first = Mutex::new((what.to_string(), Instant::now() + limit));
        let dog: &'static Watchdog = Box::leak(Box::new(Watchdog(first)));
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_millis(50));
                let (what, end) = dog.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
                if Instant::now() > end {
                    eprintln!("gpu_gemm: {what} did not end in time");
                    std::process::abort();
                }
            }
        });
        dog
    }

    fn next(&self, what: &str, limit: Duration) {
        let end = Instant::now() + limit;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (what.to_string(), end);
    }
}

/// The child: one line per case. A device that failed once is not asked again.
fn run_cases(cases: &[String]) -> ExitCode {
    let dog = Watchdog::start(&cases[0], CASE_LIMIT);
    let gpu = match cases::Gpu::open() {
        Ok(gpu) => gpu,
        Err(error) => {
            let failures = [error.to_string()];
            println!("{}", json!({ "case": cases[0], "failures": failures, "ended": true }));
            return ExitCode::FAILURE;
        }
    };
    for case in cases {
        dog.next(case, CASE_LIMIT);
        eprintln!("gpu_gemm: {case}");
        match gpu.case(case) {
            Ok(line) => println!("{line}"),
            Err(error) => {
                let failures = [error.to_string()];
                println!("{}", json!({ "case": case, "failures": failures, "ended": true }));
                // Not through destructors: they would wait for what hangs.
                std::process::abort();
            }
        }
    }
    ExitCode::SUCCESS
}

fn start_child(cases: &[String]) -> std::io::Result<Child> {
    Command::new(std::env::current_exe()?)
        .args(["--child", "--only", &cases.join(",")])
        .stdout(Stdio::piped())
        .spawn()
}

/// Runs the cases in children and gathers their lines, one per case in order.
fn supervise(cases: &[String], path: Option<&str>) -> ExitCode {
    if let Err(error) = Driver::get() {
        return finish(&[json!({ "case": "driver", "failures": [error.to_string()] })], path);
    }
    Watchdog::start("everything", TOTAL_LIMIT);
    let mut results: Vec<Value> = Vec::new();
    while results.len() < cases.len() {
        let mut child = match start_child(&cases[results.len()..]) {
            Ok(child) => child,
            Err(error) => {
                eprintln!("gpu_gemm: no child process: {error}");
                return ExitCode::FAILURE;
            }
        };
        let mut said_why = false;
        let lines = child.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines);
        for line in lines.map_while(Result::ok) {
            if let Ok(value) = serde_json::from_str::<Value>(&line) {
                eprintln!("gpu_gemm: {line}");
                said_why = value["ended"] == true;
                results.push(value);
            }
        }
        let status =
            child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        if results.len() < cases.len() && !said_why {
            let case = &cases[results.len()];
            eprintln!("gpu_gemm: {case}: the process ended: {status}");
            results.push(json!({ "case": case, "failures": [format!("ended: {status}")] }));
        }
    }
    finish(&results, path)
}

fn finish(results: &[Value], path: Option<&str>) -> ExitCode {
    let held = |result: &Value| result["failures"].as_array().is_some_and(Vec::is_empty);
    let passed = results.iter().all(held);
    let report = format!("{:#}\n", json!({ "passed": passed, "cases": results }));
    print!("{report}");
    if let Some(path) = path
        && let Err(error) = std::fs::write(path, report)
    {
        eprintln!("gpu_gemm: {path}: {error}");
        return ExitCode::FAILURE;
    }
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
