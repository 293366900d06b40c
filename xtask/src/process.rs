//! Running programs: output is streamed and kept, and no run lasts for ever.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Write, pipe, stdout};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::style::{colours, strip_ansi};

/// How long output is still read once the program has ended (a process it left behind may hold
/// the pipe open).
const DRAIN: Duration = Duration::from_secs(2);

/// How a program ended.
#[derive(Debug)]
pub struct Finished {
    /// Absent when the time limit ended it.
    pub status: Option<ExitStatus>,
    /// Standard output and standard error as they came, without colours.
    pub output: String,
}

impl Finished {
    /// Whether it ended in time and well.
    pub fn success(&self) -> bool {
        self.status.is_some_and(|s| s.success())
    }

    /// Why it counts as failed.
    pub fn why(&self) -> String {
        match self.status {
            None => "it ran past its time limit".into(),
            Some(status) => status.to_string(),
        }
    }

    /// The last `n` lines of the output.
    pub fn tail(&self, n: usize) -> String {
        let mut last = VecDeque::with_capacity(n);
        for line in self.output.lines() {
            if last.len() == n {
                last.pop_front();
            }
            last.push_back(line);
        }
        Vec::from(last).join("\n")
    }
}

/// Runs `command` for at most `limit`, passing its output on where `echo`.
pub fn run(mut command: Command, limit: Duration, echo: bool) -> Result<Finished, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let failed = |e: std::io::Error| format!("{name}: {e}");
    let (reader, writer) = pipe().map_err(failed)?;
    command.stdin(Stdio::null()).stdout(writer.try_clone().map_err(failed)?).stderr(writer);
    let mut child = command.spawn().map_err(failed)?;
    drop(command); // holds the writing end, without which the reader sees the end

    let (lines, received) = channel();
    thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            if lines.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
            line.clear();
        }
    });

    let mut output = String::new();
    let coloured = colours();
    let status = follow(&mut child, &received, limit, |line| {
        let plain = strip_ansi(line);
        if echo {
            // Some programs colour whatever they write to. A closed standard output must not end
            // the run, which reports through its exit code.
            let shown = if coloured { line } else { &plain };
            let _ = stdout().write_all(shown.as_bytes()).and_then(|()| stdout().flush());
        }
        output.push_str(&plain);
    })
    .map_err(failed)?;
    Ok(Finished { status, output })
}

/// Hands on lines until the program and its output end, or `limit` passes.
fn follow(
    child: &mut Child,
    lines: &Receiver<String>,
    limit: Duration,
    mut each: impl FnMut(&str),
) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    let mut ended: Option<(ExitStatus, Instant)> = None;
    let mut open = true;
    loop {
        match lines.recv_timeout(Duration::from_millis(50)) {
            Ok(line) => each(&line),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                open = false;
                thread::sleep(Duration::from_millis(5));
            }
        }
        if let Some((status, since)) = ended {
            if !open || since.elapsed() > DRAIN {
                return Ok(Some(status));
            }
        } else if let Some(status) = child.try_wait()? {
            ended = Some((status, Instant::now()));
        } else if start.elapsed() >= limit {
            kill_tree(child.id());
            child.wait()?;
            return Ok(None);
        }
    }
}

/// Kills the process `root` and everything it started that is still there. All are stopped first,
/// parents before children, so that none starts another or loses its parent meanwhile.
fn kill_tree(root: u32) {
    let mut found = vec![root];
    let mut next = 0;
    while next < found.len() {
        send(found[next], Signal::STOP);
        found.extend(children(found[next]));
        next += 1;
    }
    for pid in found {
        send(pid, Signal::KILL);
    }
}

fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // A process that is already gone is as good.
        let _ = kill_process(pid, signal);
    }
}

/// The processes whose parent is `parent`, from /proc.
fn children(parent: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        parent_in_stat(&stat) == Some(parent)
    })
    .collect()
}

/// The parent in a line of /proc/PID/stat. The name before it stands in parentheses and may hold
/// any character.
fn parent_in_stat(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn output_and_status_come_back() {
        let done = run(sh("echo one; echo two >&2; exit 3"), Duration::from_secs(20), false);
        let done = done.unwrap();
        assert_eq!(done.output, "one\ntwo\n");
        assert_eq!(done.status.unwrap().code(), Some(3));
        assert!(!done.success());
        assert_eq!(done.tail(1), "two");
    }

    #[test]
    fn a_missing_program_is_an_error() {
        let why = run(Command::new("/nonexistent/program"), Duration::from_secs(1), false);
        assert!(why.unwrap_err().contains("/nonexistent/program"));
    }

    #[test]
    fn the_limit_ends_a_run_and_its_children() {
        let start = Instant::now();
        let done = run(sh("sleep 61.0625 & echo $!; wait"), Duration::from_secs(3), false);
        let done = done.unwrap();
        assert!(done.status.is_none());
        assert!(start.elapsed() < Duration::from_secs(20));
        let child: u32 = done.output.trim().parse().unwrap();
        let gone = || {
            fs::read_to_string(format!("/proc/{child}/cmdline"))
                .map_or(true, |line| !line.contains("61.0625"))
        };
        let wait = Instant::now();
        while !gone() && wait.elapsed() < Duration::from_secs(10) {
            thread::sleep(Duration::from_millis(10));
        }
        assert!(gone(), "the child outlived the limit");
    }

    #[test]
    fn a_child_that_keeps_the_pipe_does_not_hold_the_run() {
        let start = Instant::now();
        let done = run(sh("sleep 30 & echo $!"), Duration::from_secs(25), false).unwrap();
        assert!(done.success());
        assert!(start.elapsed() < Duration::from_secs(15));
        kill_tree(done.output.trim().parse().unwrap());
    }

    #[test]
    fn names_with_parentheses_do_not_confuse() {
        assert_eq!(parent_in_stat("12 (a) (b c)) S 7 12 12"), Some(7));
        assert_eq!(parent_in_stat("garbage"), None);
    }
}
