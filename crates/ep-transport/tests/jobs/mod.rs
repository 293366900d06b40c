//! Ranks as processes of this test binary.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// How long ranks wait for each other in the rendezvous.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// An address of this host on which nobody listens, outside the range that connections use.
pub fn address() -> String {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let base = 10_000 + (std::process::id() % 900) as u16 * 20;
        let address = format!("127.0.0.1:{}", base + NEXT.fetch_add(1, Ordering::Relaxed) % 2000);
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}

/// The ranks of one job; killed if the test gives up. Each runs this test binary's `a_rank`, with
/// `EP_TEST_PART` saying what it does.
pub struct Job(Vec<Child>);

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // One that has ended cannot be killed, which is fine.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Job {
    pub fn start(part: &str, world: usize) -> Self {
        Self::start_some(part, world, world)
    }

    /// Starts the first `ranks` of `world` ranks.
    pub fn start_some(part: &str, ranks: usize, world: usize) -> Self {
        let address = address();
        let rank = |rank: usize| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "a_rank", "--nocapture", "--test-threads=1"])
                .env("EP_TEST_PART", part)
                .env("EP_RANK", rank.to_string())
                .env("EP_WORLD", world.to_string())
                .env("EP_RENDEZVOUS", &address)
                .env("EP_TIMEOUT", TIMEOUT.as_secs().to_string())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        Self((0..ranks).map(rank).collect())
    }

    /// Waits until `rank` says `word` on its standard output.
    pub fn hear(&mut self, rank: usize, word: &str) {
        let out = self.0[rank].stdout.as_mut().unwrap();
        let mut line = String::new();
        let mut reader = BufReader::with_capacity(1, out);
        while !line.contains(word) {
            line.clear();
            assert!(reader.read_line(&mut line).unwrap() > 0, "rank {rank} ended without {word:?}");
        }
    }

    pub fn kill(&mut self, rank: usize) {
        self.0[rank].kill().unwrap();
    }

    /// Waits for all ranks to end; those in `killed` may fail.
    pub fn end(mut self, limit: Duration, killed: &[usize]) -> Result<(), String> {
        let start = Instant::now();
        let mut wrong = Vec::new();
        for (rank, child) in self.0.iter_mut().enumerate() {
            let status = loop {
                match child.try_wait().unwrap() {
                    Some(status) => break Some(status),
                    None if start.elapsed() > limit => break None,
                    None => std::thread::sleep(Duration::from_millis(2)),
                }
            };
            if killed.contains(&rank) {
                continue;
            }
            let mut text = String::new();
            match status {
                Some(status) if status.success() => continue,
                Some(_) => {
                    let err = child.stderr.as_mut().unwrap();
                    err.read_to_string(&mut text).unwrap();
                }
                None => text.push_str("it does not end"),
            }
            wrong.push(format!("rank {rank}: {text}"));
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
    }
}
