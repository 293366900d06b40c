//! From options to results: the whole program but for its `main`.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::case::Case;
use crate::cli::{Args, Bench, Plan};
use crate::crossing::Crossing;
use crate::format::{bytes, wrap};
use crate::host::HostSeat;
use crate::machine::{Machine, commit, free_memory};
use crate::measure::{Options, Outcome};
use crate::plan::Traffic;
use crate::report::{Report, WIDTH, footnote, legend, next_steps, write};
use crate::scale::{NODES, Scale};
use crate::trace::CaseTrace;
use crate::workload::total_bytes;
use crate::{Result, html, layout_cost, processes, threads, trace};

/// Does what `args` ask for and prints it. Gives back the report.
///
/// # Errors
/// Options that cannot be met, a failed verification, a failed rank, files that cannot be written.
pub fn run(args: &Args) -> Result<Report> {
    args.check_transport()?;
    #[cfg(feature = "cuda")]
    if args.is_on_gpus() {
        return crate::nvlink::run(args);
    }
    // What crosses between nodes is asked of larger machines than this one.
    let free = if args.dry_run && args.nodes.is_some() { u64::MAX } else { free_memory() };
    let plan = args.plan(free)?;
    let mut report = Report::new(commit(args.commit.as_deref()), Machine::here());
    for note in &plan.notes {
        println!("{}", wrap(note, WIDTH, "  "));
    }
    if args.dry_run {
        print!("{}", describe(&plan, args.nodes)?);
        if args.bench == Some(Bench::Sweep) {
            print!("{}", growing(&args.largest_case()?)?);
        }
        return Ok(report);
    }
    let machine = &report.machine;
    let about = format!("{} · {} cores · commit {}", machine.cpu, machine.cores, report.commit);
    println!("{}", wrap(&about, WIDTH, "  "));
    let mut traces = Vec::new();
    execute(&plan, args.seed, &mut report, &mut traces)?;
    println!("\n{}\n{}", report.table(), legend());
    if let Some(note) = footnote(&report) {
        println!("{note}");
    }
    if let Some(path) = &args.json {
        write(path, &report.json())?;
    }
    if let Some(path) = &args.html {
        write(path, &html::page(&report))?;
    }
    if let Some(path) = &args.trace {
        write(path, &trace::json(&traces))?;
    }
    for path in [&args.json, &args.html, &args.trace].into_iter().flatten() {
        println!("wrote {}", path.display());
    }
    println!("\nTry next:");
    for step in next_steps(&report, command()) {
        println!("  {step}");
    }
    Ok(report)
}

/// How the user calls this program: by `cargo xtask bench`, which cargo leaves a trace of, or by
/// its name.
fn command() -> &'static str {
    match std::env::var("CARGO_PKG_NAME") {
        Ok(name) if name == "xtask" => "cargo xtask bench",
        _ => "ep-bench",
    }
}

fn execute(plan: &Plan, seed: u64, report: &mut Report, traces: &mut Vec<CaseTrace>) -> Result<()> {
    let layouts = if plan.layout_cost { layout_cost::RANKS.len() } else { 0 };
    let bar = progress(plan.cases.len() + layouts);
    let started = |number: usize| {
        if let Some(case) = plan.cases.get(number) {
            bar.set_message(format!("{}, {} tokens", case.title(), case.shape.tokens));
        }
    };
    let mut done = |outcome: Outcome| {
        traces.push(CaseTrace { title: outcome.row.title(), spans: outcome.spans });
        report.results.push(outcome.row);
        bar.inc(1);
    };
    if plan.processes {
        processes::run(plan, started, &mut done)?;
    } else {
        let options = Options::of(plan);
        for (number, case) in plan.cases.iter().enumerate() {
            started(number);
            let seats = HostSeat::local(case.shape.ranks, plan.timeout)?;
            let seats = seats.into_iter().map(|seat| seat.over(options.carrier())).collect();
            done(threads::run(seats, case, options)?);
        }
    }
    for ranks in layout_cost::RANKS.into_iter().take(layouts) {
        bar.set_message(format!("layout, {ranks} ranks"));
        report.results.push(layout_cost::measure(&layout_cost::case(ranks, seed))?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}

/// A bar on a terminal, nothing when piped.
fn progress(steps: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(steps as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos}/{len} {elapsed} {wide_msg}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// What a plan would move, without running it.
///
/// # Errors
/// As [`Traffic::of`].
pub fn describe(plan: &Plan, nodes: Option<usize>) -> Result<String> {
    let mut out = String::new();
    let mut line = |text: String| {
        out.push_str(&text);
        out.push('\n');
    };
    let kind = if plan.processes { "processes" } else { "threads" };
    for case in &plan.cases {
        let (traffic, shape) = (Traffic::of(case)?, case.shape);
        let row = case.dtype.row_bytes(shape.hidden);
        let range = |list: &[usize]| {
            let (least, most) = (list.iter().min(), list.iter().max());
            format!("{} to {}", least.copied().unwrap_or(0), most.copied().unwrap_or(0))
        };
        line(format!("{} ({}), {}", case.title(), case.workload, case.layout.name()));
        line(format!(
            "  {} {kind}, {} tokens of {} each, top-{} of {}, {}",
            shape.ranks, shape.tokens, shape.hidden, shape.topk, shape.experts, case.routing
        ));
        line(format!("  rows received per rank  {} of {row} bytes", range(&traffic.rows)));
        if traffic.expert_rows.iter().any(|&n| n > 0) {
            line(format!("  expert rows per rank    {}", range(&traffic.expert_rows)));
        }
        let most = traffic.tokens.iter().max().copied().unwrap_or(0);
        line(format!("  bytes sent per rank     {} before copies", bytes((most * row) as f64)));
        line(format!("  bytes received, busiest {}", bytes(traffic.logical_bytes(case) as f64)));
        line(format!("  wire bytes, busiest     {}", bytes(traffic.wire_bytes(case) as f64)));
        let memory = total_bytes(case, &traffic, plan.processes) as f64;
        line(format!("  memory, all ranks       {} with verification", bytes(memory)));
        if let Some(nodes) = nodes {
            between(&Crossing::of(case, nodes)?).into_iter().for_each(&mut line);
        }
    }
    if plan.layout_cost {
        line(format!("layout cost at {:?} ranks, simulated", layout_cost::RANKS));
    }
    Ok(out)
}

/// What a case sends and takes on more and more ranks.
fn growing(case: &Case) -> Result<String> {
    let shape = case.shape;
    let mut out = format!(
        "{} on more ranks, {} tokens of {} each, top-{}, {}\n",
        case.title(),
        shape.tokens,
        shape.hidden,
        shape.topk,
        case.routing
    );
    for nodes in NODES {
        for line in Scale::of(case, nodes)?.lines() {
            out.push_str(&line);
            out.push('\n');
        }
    }
    Ok(out)
}

/// What crosses between nodes, line by line.
fn between(crossing: &Crossing) -> [String; 4] {
    let ((flat, once), expected) = (crossing.busiest(), crossing.expected);
    let sent =
        |found: u64, expected: f64| format!("{}, uniform {}", bytes(found as f64), bytes(expected));
    let (window, forwarding) = crossing.windows;
    [
        format!("  between {} nodes, flat   {}", crossing.nodes, sent(flat, expected.0)),
        format!("  once per node           {}", sent(once, expected.1)),
        format!("  window per rank         {}", bytes(window as f64)),
        format!("  window, once per node   {}", bytes(forwarding as f64)),
    ]
}
