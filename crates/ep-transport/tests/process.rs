//! Ranks that are processes: the conformance suite, and processes killed in every phase.
//!
//! The test binary starts itself once per rank; `EP_TEST_PART` says what the rank does.
#![cfg(not(loom))]

mod jobs;

use std::time::{Duration, Instant};

use ep_transport::conformance::{CHECKS, Member, rank_main};
use ep_transport::{
    Deadline, Group, ProcessTransport, Queue, Rendezvous, Transport, TransportError, WindowSpec,
};
use jobs::{Job, TIMEOUT, address};

const LIMIT: Duration = Duration::from_secs(20);
const SPEC: WindowSpec = WindowSpec { bytes: 8 << 20, flags: 4 };

/// Not a test of its own: what a rank's process runs.
#[test]
fn a_rank() {
    let Ok(part) = std::env::var("EP_TEST_PART") else { return };
    let (kind, name) = part.split_once(':').unwrap();
    match kind {
        "check" => {
            let group = Group::from_env(&Rendezvous::from_env().unwrap()).unwrap();
            rank_main(name, group, &ProcessTransport::new(), LIMIT).unwrap();
        }
        "victim" => victim(name.parse().unwrap()),
        "threads" => threads_are_refused(),
        other => panic!("no part {other}"),
    }
}

/// Runs one check with a process per rank.
fn in_processes(name: &str, worlds: &[usize]) {
    let check = CHECKS.iter().find(|check| check.name == name).unwrap();
    for &world in worlds.iter().filter(|world| check.worlds.contains(world)) {
        let job = Job::start(&format!("check:{name}"), world);
        job.end(LIMIT * 9, &[]).unwrap_or_else(|e| panic!("{name}, {world} ranks: {e}"));
    }
}

#[test]
fn processes_pass_every_check() {
    for check in CHECKS {
        // Two are enough for what runs long.
        let worlds: &[usize] = if check.name.contains("rounds") { &[2] } else { &[2, 3] };
        in_processes(check.name, worlds);
    }
}

#[test]
fn eight_processes_share_their_windows() {
    in_processes("data_before_signal_is_visible", &[8]);
}

fn threads(world: usize) -> Vec<Member> {
    let address = address();
    let join = |rank| {
        let address = address.clone();
        std::thread::spawn(move || {
            Group::from_env(&Rendezvous::new(rank, world, &address).unwrap()).unwrap()
        })
    };
    let ranks: Vec<_> = (0..world).map(join).collect();
    let member = |group| (group, Box::new(ProcessTransport::new()) as Box<dyn Transport>);
    ranks.into_iter().map(|rank| member(rank.join().unwrap())).collect()
}

mod in_threads {
    ep_transport::conformance_suite!(super::threads);
}

#[test]
fn bulk_peers_are_written_to_by_put() {
    let members = |world| {
        let groups = Group::local(world).unwrap().into_iter();
        let transport = || Box::new(ProcessTransport::new().bulk(true)) as Box<dyn Transport>;
        groups.map(|group| (group, transport())).collect()
    };
    ep_transport::conformance::run("data_before_signal_is_visible", members).unwrap();
    ep_transport::conformance::run("sources_may_change_after_flush", members).unwrap();
}

#[test]
fn many_threads_open_windows_at_once() {
    let groups = Group::local(64).unwrap();
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || {
                let spec = WindowSpec { bytes: 4096, flags: 1 };
                let deadline = Deadline::after(LIMIT);
                let link = ProcessTransport::new().open(&group, spec, deadline).unwrap();
                let (queue, next) = (Queue::host(), (group.rank() + 1) % 64);
                link.signal(&queue, next, 0).unwrap();
                link.wait(&queue, "ring", &[(group.rank() + 63) % 64], 0, deadline).unwrap();
            });
        }
    });
}

/// The thread transport across processes: refused with the name of the right one.
fn threads_are_refused() {
    let group = Group::from_env(&Rendezvous::from_env().unwrap()).unwrap();
    let transport = ep_transport::ThreadTransport::new();
    let e = transport.open(&group, SPEC, Deadline::after(TIMEOUT)).unwrap_err().to_string();
    assert!(e.contains("ProcessTransport"), "{e}");
    group.barrier().unwrap();
}

#[test]
fn the_thread_transport_is_refused_across_processes() {
    Job::start("threads:", 2).end(LIMIT * 3, &[]).unwrap();
}

/// Phases in which a process is killed.
const RENDEZVOUS: usize = 0;
const GATHER: usize = 1;
const OPEN: usize = 2;
const FLAGS: usize = 3;

/// Says that this process is ready once it has so many sockets.
fn ready_with(sockets: usize) {
    while open_files().iter().filter(|to| to.starts_with("socket:")).count() < sockets {
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("\nready");
}

/// What this process has open.
fn open_files() -> Vec<String> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let to = |fd: std::fs::DirEntry| std::fs::read_link(fd.path()).ok();
    let open = open.filter_map(|fd| to(fd.ok()?));
    open.map(|to| to.to_string_lossy().into_owned()).collect()
}

/// A rank of a job of three whose rank 1 (rank 0 if the phase is 10 more) dies in a phase; the
/// others see it.
fn victim(phase: usize) {
    let (dies, phase) = if phase >= 10 { (0, phase - 10) } else { (1, phase) };
    let rendezvous = Rendezvous::from_env().unwrap();
    let rank = rendezvous.rank();
    let sleep_if = |at: usize| {
        if rank == dies && phase == at {
            println!("\nready");
            std::thread::sleep(LIMIT * 4);
        }
    };
    let mut start = Instant::now();
    let mut group = None;
    let result: Result<(), TransportError> = (|| {
        if phase == RENDEZVOUS && rank == dies {
            // Rank 0 listens, and has both ends of its own connection and one of each other rank's.
            std::thread::spawn(move || ready_with(if rank == 0 { 5 } else { 1 }));
        }
        let group = group.insert(Group::from_env(&rendezvous)?);
        start = Instant::now();
        sleep_if(GATHER);
        group.all_gather(&[1])?;
        sleep_if(OPEN);
        let link = ProcessTransport::new().open(group, SPEC, Deadline::after(TIMEOUT))?;
        sleep_if(FLAGS);
        let others: Vec<usize> = (0..group.world()).filter(|&r| r != rank).collect();
        link.wait(&Queue::host(), "flags", &others, 0, Deadline::after(TIMEOUT))
    })();
    let e = result.expect_err("a rank was killed");
    // Nobody waits for a time-out, unless the rank was killed before it had said hello.
    let most = if group.is_some() { TIMEOUT / 2 } else { TIMEOUT * 2 };
    assert!(start.elapsed() < most, "after {:?}", start.elapsed());
    let named = e.peer() == Some(dies) || e.to_string().contains(&format!("rank {dies}"));
    assert!(named, "rank {rank}: {e}");
    drop(group);
    let ours = |to: &String| to.contains("ep-window") || to.starts_with("socket:");
    let open = open_files().into_iter().filter(ours);
    // Rank 0's hub may still be telling the others.
    let open: Vec<String> = open.filter(|to| rank != 0 || to.contains("ep-window")).collect();
    assert!(open.is_empty(), "{open:?}");
}

fn killed_in(phase: usize) {
    let dies = usize::from(phase < 10);
    // A rendezvous that lacks a rank is where they wait for each other.
    let world = if phase % 10 == RENDEZVOUS { 4 } else { 3 };
    let mut job = Job::start_some(&format!("victim:{phase}"), 3, world);
    job.hear(dies, "ready");
    // Let the others come to where they wait.
    std::thread::sleep(Duration::from_millis(300));
    job.kill(dies);
    job.end(LIMIT * 3, &[dies]).unwrap();
}

#[test]
fn a_rank_killed_in_the_rendezvous_is_named() {
    killed_in(RENDEZVOUS);
}

#[test]
fn a_rank_killed_in_a_gather_is_named() {
    killed_in(GATHER);
}

#[test]
fn a_rank_killed_while_windows_open_is_named() {
    killed_in(OPEN);
}

#[test]
fn a_rank_killed_while_others_wait_on_flags_is_named() {
    killed_in(FLAGS);
}

#[test]
fn rank_0_killed_is_named_in_every_phase() {
    for phase in [RENDEZVOUS, GATHER, OPEN, FLAGS] {
        killed_in(10 + phase);
    }
}
