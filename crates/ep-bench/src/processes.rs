//! Ranks as processes: this program starts itself once per rank.
//!
//! A rank process gets the plan by standard input, meets the others at `EP_RENDEZVOUS`, and writes
//! one JSON message per line to standard output. It cannot outlive its parent: the parent kills
//! what is left when it gives up, and the kernel does if the parent is killed.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};

use crate::cli::Plan;
use crate::engine::Seat;
use crate::host::HostSeat;
use crate::measure::{Options, Outcome, measure};
use crate::verify::Expected;
use crate::{BenchError, Result};

const RANK: &str = "EP_RANK";
const PARENT: &str = "EP_BENCH_PARENT";
/// How long other ranks may take to tell what they saw of a failure, beyond the time-out.
const GRACE: Duration = Duration::from_secs(2);

#[derive(Debug, Serialize, Deserialize)]
enum Message {
    Started(usize),
    Done(Box<Outcome>),
    Failed { echo: bool, text: String },
}

enum Event {
    Said(usize, Message),
    Closed,
}

/// The rank processes; those still alive are killed when this is dropped.
struct Ranks(Vec<Rank>);

struct Rank {
    child: Child,
    status: Option<ExitStatus>,
    failed: Option<(bool, String)>,
    stderr: Option<thread::JoinHandle<String>>,
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            if rank.status.is_none() {
                // Already gone is as good.
                let _ = rank.child.kill();
            }
        }
        for rank in &mut self.0 {
            let _ = rank.child.wait();
        }
    }
}

/// Runs the plan's cases with a process per rank. `started` and `done` are told of each case.
///
/// # Errors
/// The failure of the first rank that failed by itself, naming it.
pub fn run(
    plan: &Plan,
    mut started: impl FnMut(usize),
    mut done: impl FnMut(Outcome),
) -> Result<()> {
    let Some(case) = plan.cases.first() else { return Ok(()) };
    let (events, inbox) = channel();
    let mut ranks = spawn(plan, case.shape.ranks, &events)?;
    drop(events);
    let mut open = ranks.0.len();
    let mut give_up: Option<Instant> = None;
    while open > 0 && give_up.is_none_or(|at| Instant::now() < at) {
        match next(&inbox) {
            Some(Event::Said(0, Message::Started(case))) => started(case),
            Some(Event::Said(0, Message::Done(outcome))) => done(*outcome),
            Some(Event::Said(rank, Message::Failed { echo, text })) => {
                ranks.0[rank].failed = Some((echo, text));
            }
            Some(Event::Said(..)) => {}
            Some(Event::Closed) => open -= 1,
            None => {}
        }
        if ranks.reap() && give_up.is_none() {
            give_up = Some(Instant::now() + plan.timeout + GRACE);
        }
    }
    ranks.verdict()
}

fn next(inbox: &Receiver<Event>) -> Option<Event> {
    match inbox.recv_timeout(Duration::from_millis(50)) {
        Ok(event) => Some(event),
        Err(RecvTimeoutError::Timeout) => None,
        Err(RecvTimeoutError::Disconnected) => Some(Event::Closed),
    }
}

impl Ranks {
    /// Takes note of ranks that have ended; true once one has failed.
    fn reap(&mut self) -> bool {
        for rank in &mut self.0 {
            if rank.status.is_none() {
                rank.status = rank.child.try_wait().ok().flatten();
            }
        }
        self.0.iter().any(|r| r.failed.is_some() || r.status.is_some_and(|s| !s.success()))
    }

    /// The failure that explains the others: a rank that was killed, then one that failed by
    /// itself, then one that blames another.
    fn verdict(&mut self) -> Result<()> {
        // A rank that has said all it had to say is about to end.
        let until = Instant::now() + GRACE;
        while self.0.iter().any(|r| r.status.is_none()) && Instant::now() < until {
            self.reap();
            thread::sleep(Duration::from_millis(5));
        }
        let mut worst: Option<(u8, BenchError)> = None;
        for (number, rank) in self.0.iter_mut().enumerate() {
            let (severity, detail) = match (rank.status, &rank.failed) {
                (Some(status), None) if status.success() => continue,
                (Some(status), _) if status.signal().is_some() => {
                    (0, format!("was killed by signal {}", status.signal().unwrap_or(0)))
                }
                (_, Some((false, text))) => (1, format!("failed: {text}")),
                (Some(status), None) => (1, format!("ended early: {status}")),
                (None, None) => (2, "did not end in time and was killed".into()),
                (_, Some((true, text))) => (3, format!("failed: {text}")),
            };
            if worst.as_ref().is_some_and(|(s, _)| *s <= severity) {
                continue;
            }
            let mut detail = detail;
            if rank.failed.is_none() && rank.status.is_some() {
                let said = rank.stderr.take().and_then(|t| t.join().ok()).unwrap_or_default();
                if !said.trim().is_empty() {
                    detail = format!("{detail}\n{}", said.trim_end());
                }
            }
            worst = Some((severity, BenchError::RankDied { rank: number, detail }));
        }
        worst.map_or(Ok(()), |(_, error)| Err(error))
    }
}

fn spawn(plan: &Plan, world: usize, events: &Sender<Event>) -> Result<Ranks> {
    let failed = |e: std::io::Error| BenchError::io("rank process", e);
    let exe = std::env::current_exe().map_err(failed)?;
    // The port is free now; should another program take it meanwhile, rank 0 says so.
    let port =
        TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).map_err(failed)?.port();
    let text = serde_json::to_string(plan).expect("a plan is plain data");
    let mut ranks = Ranks(Vec::with_capacity(world));
    for rank in 0..world {
        let mut child = Command::new(&exe)
            .arg("--rank-process")
            .env("EP_RENDEZVOUS", format!("127.0.0.1:{port}"))
            .env("EP_JOB_TOKEN", format!("ep-bench-{}-{port}", std::process::id()))
            .env(RANK, rank.to_string())
            .env("EP_WORLD", world.to_string())
            .env(PARENT, std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let (input, output, errors) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let stderr = errors.map(|pipe| thread::spawn(move || tail(pipe)));
        ranks.0.push(Rank { child, status: None, failed: None, stderr });
        if let Some(mut input) = input {
            // A rank that is gone already is found out by its status.
            let _ = input.write_all(text.as_bytes());
        }
        if let Some(output) = output {
            let events = events.clone();
            thread::spawn(move || listen(rank, output, &events));
        }
    }
    Ok(ranks)
}

fn listen(rank: usize, output: impl Read, events: &Sender<Event>) {
    for line in BufReader::new(output).lines().map_while(std::result::Result::ok) {
        if let Ok(message) = serde_json::from_str(&line) {
            // The parent may have stopped listening.
            let _ = events.send(Event::Said(rank, message));
        }
    }
    let _ = events.send(Event::Closed);
}

/// The last lines of what a rank wrote to standard error.
fn tail(pipe: impl Read) -> String {
    const LINES: usize = 20;
    let mut lines = std::collections::VecDeque::new();
    for line in BufReader::new(pipe).lines().map_while(std::result::Result::ok) {
        if lines.len() == LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }
    lines.into_iter().collect::<Vec<_>>().join("\n")
}

/// The life of one rank process. Gives back its exit code.
pub fn rank_main() -> u8 {
    let number = |name| std::env::var(name).ok().and_then(|v| v.parse::<usize>().ok());
    let rank = number(RANK).unwrap_or(0);
    // Nobody would read the results, and nobody would end this process.
    let tied = set_parent_process_death_signal(Some(Signal::KILL));
    let parent = getppid().map(|pid| pid.as_raw_nonzero().get() as usize);
    if tied.is_err() || parent != number(PARENT) {
        return 1;
    }
    match rank_cases(rank) {
        Ok(()) => 0,
        Err(e) => {
            say(&Message::Failed { echo: e.is_echo(), text: e.to_string() });
            1
        }
    }
}

fn rank_cases(rank: usize) -> Result<()> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).map_err(|e| BenchError::io("plan", e))?;
    let plan: Plan = serde_json::from_str(&text).map_err(|e| BenchError::io("plan", e))?;
    let options = Options::of(&plan);
    let seat = HostSeat::from_env(rank, plan.timeout)?.over(options.carrier());
    for (number, case) in plan.cases.iter().enumerate() {
        if rank == 0 {
            say(&Message::Started(number));
        }
        let outcome = Expected::new(case).and_then(|expected| {
            let answers = expected.answers()?;
            measure(&seat, case, &expected, &answers, options)
        });
        match outcome {
            Ok(outcome) if rank == 0 => say(&Message::Done(Box::new(outcome))),
            Ok(_) => {}
            Err(e) => {
                seat.abort(&e.to_string());
                return Err(e);
            }
        }
    }
    // Leaving before the others have what they need would look like a failure.
    seat.barrier()
}

fn say(message: &Message) {
    let line = serde_json::to_string(message).expect("messages are plain data");
    let mut out = std::io::stdout().lock();
    // Without a parent to read it there is nobody to tell.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
