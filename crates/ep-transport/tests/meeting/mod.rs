//! Ranks on threads that meet over TCP.

use std::collections::HashSet;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread::{JoinHandle, spawn};
use std::time::{Duration, Instant};

use ep_transport::{Group, Rendezvous, Result, TransportError};

pub const LIMIT: Duration = Duration::from_secs(20);

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

pub fn at(rank: usize, world: usize, address: &str) -> Rendezvous {
    Rendezvous::new(rank, world, address).unwrap().with_timeout(LIMIT)
}

pub fn join(rendezvous: Rendezvous) -> JoinHandle<Result<Group>> {
    spawn(move || Group::from_env(&rendezvous))
}

pub fn groups(world: usize) -> Vec<Group> {
    groups_at(world, &address())
}

pub fn groups_at(world: usize, address: &str) -> Vec<Group> {
    let ranks: Vec<_> = (0..world).map(|rank| join(at(rank, world, address))).collect();
    ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
}

/// Runs `part` on a thread per group, and gives the results by rank.
pub fn each<T: Send>(groups: Vec<Group>, part: impl Fn(Group) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let part = &part;
        let ranks: Vec<_> =
            groups.into_iter().map(|group| scope.spawn(move || part(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

pub fn errors(ranks: Vec<JoinHandle<Result<Group>>>) -> Vec<TransportError> {
    ranks.into_iter().map(|rank| rank.join().unwrap().unwrap_err()).collect()
}

/// Which ranks are late is for the clock to say, and those of a machine that stalls are late too: one
/// try of some has to go as it should.
#[track_caller]
pub fn in_one_of_some_tries(mut attempt: impl FnMut() -> Result<(), String>) {
    let mut wrong = Vec::new();
    while wrong.len() < 8 {
        match attempt() {
            Ok(()) => return,
            Err(what) => wrong.push(what),
        }
    }
    panic!("{wrong:#?}");
}

/// Nothing, or what is wrong.
pub fn expect(fine: bool, what: impl Into<String>) -> Result<(), String> {
    if fine { Ok(()) } else { Err(what.into()) }
}

pub fn works(groups: Vec<Group>) {
    each(groups, |group| {
        let mine = vec![group.rank() as u8; group.rank() + 1];
        let all = group.all_gather(&mine).unwrap();
        let expected: Vec<_> = (0..group.world()).map(|r| vec![r as u8; r + 1]).collect();
        assert_eq!(all, expected);
    });
}

/// A connection to what will listen there.
pub fn connected(address: &str) -> TcpStream {
    let start = Instant::now();
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return stream,
            Err(e) => assert!(start.elapsed() < LIMIT, "{e}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The sockets that a process has open.
pub fn sockets(process: u32) -> HashSet<PathBuf> {
    let open = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten();
    let open = open.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    open.filter(|to| to.to_string_lossy().starts_with("socket:")).collect()
}
