//! Ranks as processes on GPUs: a GPU for each, or shared where there are fewer. The bits are those of
//! threads on the host; bad arguments are errors; a killed process is named, and those left go on in a
//! group of their own. Without a GPU each test says so and passes.
#![cfg(feature = "cuda")]

mod common;

use std::fmt::Write as _;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use common::exercise::{How, check_rank};
use common::gpu::Gpus;
use common::gpu_small::{LIMIT, Rank, plain};
use common::ground::{Grounds, Hosts};
use common::jobs::{PROMPT, TASK, TIMEOUT, VICTIM, address, dies, said, start};
use common::small::{HIDDEN, Tokens, assert_argument, builder, opts};
use common::{Nodes, ranks};
use ep_bench::oracle::{Float, JobSpec, Mode};
use ep_kernels::cuda::Driver;
use ep_runtime::{EpError, Group, Hierarchy, Queue, Rendezvous};

/// How long a rank may take from being started, with kernels to compile.
const START: Duration = Duration::from_secs(120);

/// How many GPUs there are, if any; one test at a time.
fn gpus() -> Option<(usize, MutexGuard<'static, ()>)> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|broken| broken.into_inner());
    match Driver::get().and_then(|driver| driver.device_count()) {
        Ok(0) => None,
        Ok(gpus) => Some((gpus, turn)),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// Not a test of its own: what copies run.
#[test]
fn copies_of_this_binary() {
    let Ok(task) = std::env::var(TASK) else { return };
    let rendezvous = Rendezvous::from_env().expect("the parent's environment");
    let rank = rendezvous.rank();
    let gpus = Gpus::of(rank..rank + 1, 128 << 20).expect("a GPU");
    let (kind, what) = task.split_once(':').expect("kind:what");
    match kind {
        "jobs" => {
            let group = Group::from_env(&rendezvous).expect("a group");
            println!("digest {}", digests(&group, &gpus));
            group.barrier().expect("all ranks get here");
        }
        "bad" => {
            let group = Group::from_env(&rendezvous).expect("a group");
            bad_arguments(&group, &gpus);
            println!("digest none");
        }
        "killed" => println!("{}", survives(&rendezvous, &gpus, what)),
        other => panic!("no task {other}"),
    }
}

/// The random jobs of so many ranks, with a way to run each.
fn random_jobs(world: usize) -> impl Iterator<Item = (u64, JobSpec, How)> {
    let all = (0u64..).map(|seed| (seed, JobSpec::random(seed)));
    let fitting = all.filter(move |(_, spec)| spec.ranks == world).take(24);
    fitting.enumerate().map(|(i, (seed, spec))| {
        let mode = [Mode::RankMajor, Mode::ExpertExact, Mode::ExpertReduced][i % 3];
        let how = How {
            mode,
            float: Float::ALL[i / 3 % 3],
            weighted: i % 2 == 0 && mode != Mode::RankMajor,
            biases: i % 3,
            capacity: i % 4 == 1,
            nodes: Nodes::Mapped,
            hierarchy: Hierarchy::Flat,
            node_reduced: false,
            narrow_ids: i % 5 == 2,
        };
        (seed, spec, how)
    })
}

/// Digests of all random jobs on this rank, each compared with the oracle too.
fn digests(group: &Group, grounds: &dyn Grounds) -> String {
    let mut text = String::new();
    for (seed, spec, how) in random_jobs(group.world()) {
        let digest = check_rank(group, &spec.build(), how, seed, grounds);
        write!(text, "{digest:016x}").expect("a String takes it");
    }
    text
}

#[test]
fn processes_get_the_bits_that_threads_on_the_host_get() {
    let Some((gpus, _turn)) = gpus() else { return };
    let world = gpus.clamp(2, 4);
    println!("{world} processes on {} GPUs", gpus.min(world));
    let mut copies = start(world, "jobs:");
    let on_host = ranks(world, |group| digests(&group, &Hosts));
    for (child, digests) in copies.0.iter_mut().zip(on_host) {
        let line = said(child, START);
        assert!(line.ends_with(&format!("digest {digests}")), "{line}\n{digests}");
    }
}

fn bad_arguments(group: &Group, gpus: &Gpus) {
    let (rank, world) = (group.rank(), group.world());
    let ep = gpus.place(rank, world, builder()).build(group).expect("build");
    let rank = Rank::new(gpus, ep);
    let (here, queue) = (rank.gpu.ordinal(), rank.queue());
    let on_host = Tokens::new(rank.ep.rank(), 4);
    rank.load(&on_host);
    let go = |payload| rank.ep.dispatch(&queue, payload, rank.route(4), &opts(0));
    let host = vec![0.0f32; 4 * HIDDEN];
    assert_argument(go(rank.rows_at(here, host.as_ptr() as u64, 4)), "Host memory");
    assert_argument(go(rank.rows_at(here + 1, rank.rows, 4)), "works in");
    assert_argument(go(rank.rows_at(here, rank.rows + 4, 4)), "multiple of 16");
    assert_argument(go(on_host.payload()), "works in");
    let e = rank.ep.dispatch(&Queue::host(), rank.payload(4), rank.route(4), &opts(0));
    assert_argument(e, "pass a stream");
    // One rank's bad id is everyone's error.
    let mut tokens = Tokens::new(rank.ep.rank(), 4);
    if rank.ep.rank() == 1 {
        tokens.ids[4] = 9;
    }
    rank.load(&tokens);
    let e = rank.dispatch(4, &opts(0)).expect_err("an id out of range");
    assert!(matches!(e, EpError::Ids { rank: 1, token: 2, .. }) && e.group_usable(), "{e}");
    rank.round_trip();
}

#[test]
fn bad_arguments_are_errors_and_the_group_goes_on() {
    let Some((gpus, _turn)) = gpus() else { return };
    let mut copies = start(gpus.clamp(2, 4), "bad:");
    for child in &mut copies.0 {
        assert_eq!(said(child, START), "digest none");
    }
}

/// What a rank meets when rank 1 is killed in a phase, `PHASE@ADDRESS`; then the others meet at the
/// address and go on.
fn survives(rendezvous: &Rendezvous, gpus: &Gpus, what: &str) -> String {
    let (phase, address) = what.split_once('@').expect("phase@address");
    let me = rendezvous.rank();
    let group = Group::from_env(rendezvous).expect("a group").with_timeout(TIMEOUT).unwrap();
    let ep = gpus.place(me, group.world(), builder()).timeout(TIMEOUT).build(&group).unwrap();
    let rank = Rank::new(gpus, ep);
    rank.round_trip();
    group.barrier().unwrap();
    let start = Instant::now();
    let e = work(&rank, phase).expect_err("a rank was killed");
    let took = start.elapsed();
    let mut line = format!("error peer={:?} usable={} ", e.peer(), e.group_usable());
    let _ = write!(line, "after {} ms: {e}", took.as_millis());
    drop((rank, group));
    // Ranks 0 and 2 of three.
    let rest = Rendezvous::new(me / 2, 2, address).unwrap().with_timeout(LIMIT);
    let group = Group::from_env(&rest).expect("a group of the survivors");
    // On the GPU that was waiting, in the same context.
    let ep = gpus.place(me, 2, builder()).build(&group).expect("build again");
    let rank = Rank::on(gpus.rank(me), ep);
    for _ in 0..5 {
        rank.round_trip();
    }
    group.barrier().unwrap();
    format!("{line}; went on")
}

fn work(rank: &Rank<'_>, phase: &str) -> Result<(), EpError> {
    let (me, queue) = (rank.ep.rank(), rank.queue());
    let tokens = Tokens::new(me, 6);
    rank.load(&tokens);
    dies(phase, me, "before dispatch");
    let sent = rank.ep.dispatch_send(&queue, rank.payload(6), rank.route(6), &opts(0))?;
    dies(phase, me, "after dispatch_send");
    let result = sent.recv(&queue)?;
    dies(phase, me, "holding a result");
    let sent = result.combine_send(&queue, &plain())?;
    dies(phase, me, "after combine_send");
    sent.recv(&queue, rank.out_at(rank.out, 6))?.wait(LIMIT)?;
    // Whoever was killed at last may have done its part before.
    let result = rank.dispatch(6, &opts(0))?;
    rank.combine(result, &plain())?.wait(LIMIT)
}

fn killed(phase: &str) {
    let Some((_, _turn)) = gpus() else { return };
    let mut ranks = start(3, &format!("killed:{phase}@{}", address()));
    said(&mut ranks.0[VICTIM], START);
    let died = Instant::now();
    for (rank, child) in ranks.0.iter_mut().enumerate().filter(|(rank, _)| *rank != VICTIM) {
        let line = said(child, START);
        let name = format!("rank {rank}, victim killed {phase}: {line}");
        println!("{name} ({:?} after the death)", died.elapsed());
        assert!(line.contains("error peer=Some(1) usable=false"), "{name}");
        assert!(line.ends_with("; went on"), "{name}");
        let ms = line.split("after ").nth(1).and_then(|text| text.split(' ').next()?.parse().ok());
        let took = Duration::from_millis(ms.expect("a number"));
        assert!(took < PROMPT, "{name}: too late");
    }
}

#[test]
fn one_killed_before_dispatch_is_named_and_the_others_go_on() {
    killed("before dispatch");
}

#[test]
fn one_killed_after_dispatch_send_is_named_and_the_others_go_on() {
    killed("after dispatch_send");
}

#[test]
fn one_killed_holding_a_result_is_named_and_the_others_go_on() {
    killed("holding a result");
}

#[test]
fn one_killed_after_combine_send_is_named_and_the_others_go_on() {
    killed("after combine_send");
}
