//! Ranks as processes: the same calls, the same bits, and survivors of a killed rank.
//!
//! A test starts this very binary once per rank; the environment tells a copy what to do.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ep_runtime::{
    CombineOpts, DispatchOpts, Ep, EpBuilder, EpError, Group, Ids, Layout, MoeShape, Payload,
    PayloadKind, Queue, Rendezvous, Route, Rows, RowsMut,
};

const HIDDEN: usize = 64;
const TOPK: usize = 3;
const EXPERTS: usize = 10;
const TIMEOUT: Duration = Duration::from_secs(2);

const TASK: &str = "EP_RUNTIME_TEST_TASK";
const VICTIM: usize = 1;

fn build(group: &Group) -> Result<Ep, EpError> {
    let shape = MoeShape::new(HIDDEN, TOPK, EXPERTS).max_tokens(32).expert_major(2);
    EpBuilder::new(shape.payload(PayloadKind::F32)).timeout(TIMEOUT).build(group)
}

/// Where a rank is told to die.
fn dies(task: &str, rank: usize, here: &str) {
    if rank == VICTIM && task == here {
        // No handler sees this signal.
        let me = std::process::id().to_string();
        let _ = Command::new("kill").args(["-KILL", &me]).status();
        std::thread::sleep(Duration::from_secs(60));
    }
}

/// A few steps of everything; a digest of all that was received and summed.
fn work(ep: &Ep, task: &str, steps: usize) -> Result<u64, EpError> {
    let queue = Queue::host();
    let rank = ep.rank();
    let mut digest = 0xcbf2_9ce4_8422_2325_u64;
    let mut eat = |bytes: &[u8]| {
        bytes.iter().for_each(|&b| digest = (digest ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    };
    for step in 0..steps {
        let tokens = (step * 5 + rank * 11) % 33;
        let rows: Vec<f32> = (0..tokens * HIDDEN).map(|i| (i * 7 + rank + step) as f32).collect();
        let ids: Vec<u32> = (0..tokens)
            .flat_map(|t| (0..TOPK).map(move |k| ((t + 3 * k + rank) % EXPERTS) as u32))
            .collect();
        let payload = Payload::new(Rows::new(&rows, HIDDEN)?)?;
        let route = Route::Topk { ids: Ids::U32(&ids), weights: None };
        let layout =
            if step % 2 == 0 { Layout::RankMajor } else { Layout::ExpertMajor { alignment: 2 } };
        let opts = DispatchOpts { layout, ..DispatchOpts::default() };
        let kill = if step == 2 { task } else { "" };
        dies(kill, rank, "before dispatch");
        let sent = ep.dispatch_send(&queue, payload, route, &opts)?;
        dies(kill, rank, "after dispatch_send");
        let result = sent.recv(&queue)?;
        for i in 0..result.num_rows() {
            eat(result.rows().payload().bytes(i));
        }
        dies(kill, rank, "holding a result");
        let sent = result.combine_send(&queue, &CombineOpts::default())?;
        dies(kill, rank, "after combine_send");
        let mut out = vec![0.0f32; tokens * HIDDEN];
        sent.recv(&queue, RowsMut::new(&mut out, HIDDEN)?)?;
        out.iter().for_each(|x| eat(&x.to_le_bytes()));
    }
    Ok(digest)
}

/// What a started copy does: prints one line and exits.
fn child(task: &str) {
    let rendezvous = Rendezvous::from_env().expect("the parent's environment");
    let rank = rendezvous.rank();
    dies(task, rank, "before the rendezvous");
    let run = || -> Result<u64, EpError> {
        let group = Group::from_env(&rendezvous.clone().with_timeout(TIMEOUT))?;
        let group = group.with_timeout(TIMEOUT)?;
        dies(task, rank, "before build");
        let ep = build(&group)?;
        let digest = work(&ep, task, 12)?;
        group.barrier()?;
        Ok(digest)
    };
    match run() {
        Ok(digest) => println!("digest {digest:016x}"),
        Err(e) => println!("error peer={:?} usable={} {e}", e.peer(), e.group_usable()),
    }
}

struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn start(ranks: usize, task: &str) -> Ranks {
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
    let address = port.expect("a free port").to_string();
    let start = |rank: usize| {
        Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "copies_of_this_binary", "--nocapture"])
            .env(TASK, task)
            .env("EP_RENDEZVOUS", &address)
            .env("EP_JOB_TOKEN", format!("processes test {address}"))
            .env("EP_RANK", rank.to_string())
            .env("EP_WORLD", ranks.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a copy starts")
    };
    Ranks((0..ranks).map(start).collect())
}

/// What a copy printed, once it has ended.
fn said(child: &mut Child, within: Duration) -> String {
    let end = Instant::now() + within;
    while child.try_wait().expect("a child of ours").is_none() {
        assert!(Instant::now() < end, "a copy is still running after {within:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut out = String::new();
    let pipe = child.stdout.as_mut().expect("piped");
    std::io::Read::read_to_string(pipe, &mut out).expect("text");
    let line = out.lines().find(|l| l.contains("digest ") || l.contains("error "));
    line.unwrap_or("nothing").to_owned()
}

/// Not a test of its own: what copies run.
#[test]
fn copies_of_this_binary() {
    if let Ok(task) = std::env::var(TASK) {
        child(&task);
    }
}

#[test]
fn processes_get_the_bits_that_threads_get() {
    let groups = Group::local(3).expect("a local group");
    let threads: Vec<_> = groups
        .into_iter()
        .map(|group| {
            std::thread::spawn(move || work(&build(&group).expect("build"), "", 12).expect("work"))
        })
        .collect();
    let expected: Vec<u64> = threads.into_iter().map(|t| t.join().expect("no panic")).collect();
    let mut ranks = start(3, "run");
    for (child, digest) in ranks.0.iter_mut().zip(expected) {
        let line = said(child, Duration::from_secs(60));
        assert!(line.ends_with(&format!("digest {digest:016x}")), "{line}");
    }
}

#[test]
fn survivors_of_a_killed_rank_name_it() {
    let phases = [
        "before the rendezvous",
        "before build",
        "before dispatch",
        "after dispatch_send",
        "holding a result",
        "after combine_send",
    ];
    for phase in phases {
        let mut ranks = start(4, phase);
        said(&mut ranks.0[VICTIM], Duration::from_secs(30));
        let died = Instant::now();
        for (rank, child) in ranks.0.iter_mut().enumerate().filter(|(rank, _)| *rank != VICTIM) {
            let line = said(child, Duration::from_secs(30));
            let name = format!("rank {rank}, victim killed {phase}: {line}");
            assert!(line.contains("error peer=Some(1) usable=false"), "{name}");
            assert!(died.elapsed() < TIMEOUT + Duration::from_secs(1), "{name}: too late");
        }
    }
}
