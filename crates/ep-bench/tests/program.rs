//! The program as users and scripts see it.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use ep_bench::report::Report;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

fn program(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ep-bench"));
    command.args(line.split_whitespace()).args(["--commit", "test", "--budget", "0.2"]);
    command.stdin(Stdio::null());
    command
}

fn run(line: &str) -> Output {
    program(line).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn scratch(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("ep-bench-{name}-{}", std::process::id()))
}

/// Runs `line`, asserts that it succeeds in 80 columns without colours, and reads its JSON.
fn report(name: &str, line: &str) -> Report {
    let path = scratch(name).with_extension("json");
    let out = run(&format!("{line} --json {}", path.display()));
    let (said, errors) = (text(&out.stdout), text(&out.stderr));
    assert!(out.status.success(), "{line}: {said}{errors}");
    let wide = |l: &&str| l.chars().count() > 80 && !l.starts_with("wrote");
    assert_eq!(said.lines().find(wide), None);
    assert!(!said.contains('\u{1b}') && errors.is_empty(), "{errors}");
    let report = Report::parse(&fs::read_to_string(&path).unwrap()).unwrap();
    fs::remove_file(path).unwrap();
    assert!(report.results.iter().all(|row| row.verified && row.p50_us > 0.0));
    assert_eq!(report.commit, "test");
    report
}

const SMALL: &str = "--ranks 3 --tokens 20 --hidden 256 --experts 12 --topk 3";

#[test]
fn the_standard_set_is_measured() {
    let report = report("standard", SMALL);
    let benches: Vec<String> =
        report.results.iter().map(|r| format!("{} {} {}", r.bench, r.dtype, r.ranks)).collect();
    assert_eq!(
        benches,
        [
            "dispatch bf16 3",
            "dispatch fp8 3",
            "combine bf16 3",
            "layout bf16 64",
            "layout bf16 256",
            "layout bf16 1024"
        ]
    );
    assert!(report.results[..3].iter().all(|row| row.limit_us.is_some()));
}

#[test]
fn every_type_layout_and_routing_verifies() {
    for (i, options) in [
        "dispatch --dtype f16 --routing zipf",
        "dispatch --dtype fp8-ue8m0 --layout expert-major --alignment 8",
        "combine --dtype f32 --layout expert-major --unequal",
        "roundtrip --dtype fp8 --routing masked:0.5",
        "roundtrip --layout expert-major --cached --routing one-rank:1",
        "roundtrip --routing grouped --experts 16 --cached",
        "combine --ranks 1",
    ]
    .into_iter()
    .enumerate()
    {
        let (bench, rest) = options.split_once(' ').unwrap();
        let defaults = "--tokens 9 --hidden 272 --topk 3";
        let ranks = if rest.contains("--ranks") { "" } else { "--ranks 3" };
        let experts = if rest.contains("--experts") { "" } else { "--experts 10" };
        let line = format!("{bench} {defaults} {ranks} {experts} {rest}");
        let report = report(&format!("variant-{i}"), &line);
        assert_eq!(report.results.len(), 1, "{line}");
    }
}

#[test]
fn processes_measure_and_leave_html_and_trace() {
    let (html, trace) = (scratch("p").with_extension("html"), scratch("t").with_extension("json"));
    let files = format!("--html {} --trace {}", html.display(), trace.display());
    let report = report("processes", &format!("roundtrip --processes {SMALL} {files}"));
    assert_eq!(report.results[0].metrics["processes"], true);
    let page = fs::read_to_string(&html).unwrap();
    assert!(page.contains("<td>roundtrip</td>"));
    let events: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&trace).unwrap()).unwrap();
    let ranks = events["traceEvents"].as_array().unwrap().iter().filter_map(|e| e["tid"].as_u64());
    assert_eq!(ranks.max(), Some(2));
    fs::remove_file(html).unwrap();
    fs::remove_file(trace).unwrap();
}

#[test]
fn a_killed_rank_is_named_and_no_process_stays() {
    let line = "dispatch --processes --timeout 60 --ranks 3 --tokens 2048 --hidden 7168";
    let mut command = program(line);
    // Long enough to be caught running.
    command.args(["--budget", "30"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.args(["--experts", "12"]).spawn();
    let child = child.unwrap();
    let pid = child.id();
    let ranks = wait_for_ranks(pid, 3);
    sleep(Duration::from_millis(100));
    kill_process(ranks[1], Signal::KILL).unwrap();
    let start = Instant::now();
    let out = child.wait_with_output().unwrap();
    assert!(start.elapsed() < Duration::from_secs(20));
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("rank 1 was killed by signal 9"), "{}", text(&out.stderr));
    gone(&ranks);
}

#[test]
fn killing_the_program_ends_its_ranks() {
    let line = "dispatch --processes --ranks 2 --tokens 2048 --hidden 7168 --experts 12";
    let mut command = program(line);
    command.args(["--budget", "30"]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let ranks = wait_for_ranks(child.id(), 2);
    sleep(Duration::from_millis(300));
    child.kill().unwrap();
    child.wait().unwrap();
    gone(&ranks);
}

fn wait_for_ranks(pid: u32, count: usize) -> Vec<Pid> {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let path = format!("/proc/{pid}/task/{pid}/children");
        let pids: Vec<i32> = fs::read_to_string(path)
            .unwrap_or_default()
            .split_whitespace()
            .filter_map(|p| p.parse().ok())
            .collect();
        // A clone that has not become this program yet is not a rank.
        let ready = |pid: &&i32| {
            fs::read_to_string(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.contains("--rank-process"))
        };
        if pids.iter().filter(ready).count() == count {
            return pids.into_iter().filter_map(Pid::from_raw).collect();
        }
        assert!(Instant::now() < until, "the ranks did not start");
        sleep(Duration::from_millis(2));
    }
}

fn gone(ranks: &[Pid]) {
    let until = Instant::now() + Duration::from_secs(20);
    for &rank in ranks {
        while test_kill_process(rank).is_ok() && !zombie(rank) {
            assert!(Instant::now() < until, "a rank is still there");
            sleep(Duration::from_millis(5));
        }
    }
}

/// Dead, but not yet collected by whoever inherited it.
fn zombie(pid: Pid) -> bool {
    let stat =
        fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'))
}

#[test]
fn routing_files_are_replayed() {
    let path = scratch("ids").with_extension("npy");
    let header =
        format!("{:<117}\n", "{'descr': '<i4', 'fortran_order': False, 'shape': (4, 2), }");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.bytes());
    file.extend([0i32, 5, 1, 2, -1, 3, 7, 4].into_iter().flat_map(i32::to_le_bytes));
    fs::write(&path, file).unwrap();
    let routing = format!("--routing {}", path.display());
    let report = report(
        "replay",
        &format!("dispatch --ranks 2 --tokens 4 --hidden 64 --experts 8 {routing}"),
    );
    assert_eq!(report.results[0].topk, 2, "as many columns as the file has");
    let out = run(&format!("--ranks 2 --experts 7 {routing}"));
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("token 3, entry 0: id 7 is out of range"));
    fs::remove_file(path).unwrap();
}

#[test]
fn wrong_options_end_with_2_and_say_why() {
    for (line, says) in [
        ("--frobnicate", "--frobnicate"),
        ("--ranks 8 --experts 7", "every rank needs an expert"),
        ("combine --dtype fp8", "cannot be combined"),
        ("--routing nowhere", "uniform"),
    ] {
        let out = run(line);
        assert_eq!(out.status.code(), Some(2), "{line}");
        assert!(text(&out.stderr).contains(says), "{line}: {}", text(&out.stderr));
        assert!(out.stdout.is_empty(), "{line}");
    }
}

#[test]
fn a_dry_run_tells_rows_and_bytes() {
    let out = run("--dry-run --ranks 2 --tokens 100 --hidden 64 --routing one-rank:1");
    let said = text(&out.stdout);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(said.contains("rows received per rank  0 to 200 of 128 bytes"), "{said}");
    assert!(said.contains("wire bytes, busiest     12.8 kB"), "{said}");
    assert!(said.lines().all(|l| l.chars().count() <= 80));
}

/// What is missing is named, and nothing hangs or panics; where there are GPUs, it runs.
#[test]
fn transports_without_their_hardware_say_what_is_missing() {
    let small = "--ranks 2 --tokens 20 --hidden 256 --experts 12 --topk 3";
    for (transport, missing) in [
        ("nvlink", &["libcuda", "GPU"][..]),
        ("copy", &["libcuda", "GPU"]),
        ("nccl", &["libcuda", "libnccl", "GPU"]),
        ("rdma", &["feature `rdma`", "RDMA", "libibverbs"]),
    ] {
        let out = run(&format!("dispatch --transport {transport} {small}"));
        if out.status.success() {
            continue;
        }
        let errors = text(&out.stderr);
        assert!(matches!(out.status.code(), Some(1 | 2)), "{transport}: {errors}");
        assert!(errors.starts_with("error: ") && !errors.contains("panicked"), "{errors}");
        assert!(missing.iter().any(|what| errors.contains(what)), "{transport}: {errors}");
    }
}

#[test]
fn a_sweep_that_is_only_planned_says_what_large_groups_take() {
    let out = run("sweep --dry-run --workload decode --tokens 64");
    let said = text(&out.stdout);
    assert!(out.status.success(), "{}", text(&out.stderr));
    for ranks in ["16 ranks in 2 nodes", "64 ranks in 8 nodes", "1024 ranks in 128 nodes"] {
        assert!(said.contains(ranks), "{said}");
    }
    assert!(said.contains("once per node") && said.lines().all(|l| l.chars().count() <= 80));
}
