//! Ranks as processes, over any transport.
//!
//! A test starts its own binary once per rank; the environment tells a copy what to do. The binary
//! has a test `copies_of_this_binary` that calls [`copy`].

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ep_runtime::{
    CombineOpts, DispatchOpts, Ep, EpBuilder, EpError, Group, Ids, Layout, MoeShape, Payload,
    PayloadKind, Queue, Rendezvous, Route, Rows, RowsMut,
};

const HIDDEN: usize = 64;
const TOPK: usize = 3;
const EXPERTS: usize = 10;
/// Nobody waits so long, as a death is told: in less than [`PROMPT`].
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// Far less than the time-out, and enough for a machine that stalls.
pub const PROMPT: Duration = Duration::from_secs(20);

pub const TASK: &str = "EP_RUNTIME_TEST_TASK";
pub const VICTIM: usize = 1;

/// Sets a rank's transport, by rank.
pub type Over = fn(EpBuilder, usize) -> EpBuilder;

fn build(group: &Group, over: Over) -> Result<Ep, EpError> {
    let shape = MoeShape::new(HIDDEN, TOPK, EXPERTS).max_tokens(32).expert_major(2);
    let builder = EpBuilder::new(shape.payload(PayloadKind::F32)).timeout(TIMEOUT);
    over(builder, group.rank()).build(group)
}

/// Where a rank is told to die.
pub fn dies(task: &str, rank: usize, here: &str) {
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
fn child(task: &str, over: Over) {
    let rendezvous = Rendezvous::from_env().expect("the parent's environment");
    let rank = rendezvous.rank();
    dies(task, rank, "before the rendezvous");
    let run = || -> Result<u64, EpError> {
        let group = Group::from_env(&rendezvous)?;
        let group = group.with_timeout(TIMEOUT)?;
        dies(task, rank, "before build");
        let ep = build(&group, over)?;
        let digest = work(&ep, task, 12)?;
        group.barrier()?;
        Ok(digest)
    };
    match run() {
        Ok(digest) => println!("digest {digest:016x}"),
        Err(e) => println!("error peer={:?} usable={} {e}", e.peer(), e.group_usable()),
    }
}

pub struct Ranks(pub Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// An address of this host on which nobody listens.
pub fn address() -> String {
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
    port.expect("a free port").to_string()
}

/// Starts `ranks` copies with a task.
pub fn start(ranks: usize, task: &str) -> Ranks {
    start_waiting(ranks, task, TIMEOUT)
}

/// As [`start`]; the copies wait so long for each other to come.
fn start_waiting(ranks: usize, task: &str, wait: Duration) -> Ranks {
    let address = address();
    let start = |rank: usize| {
        Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "copies_of_this_binary", "--nocapture"])
            .env(TASK, task)
            .env("EP_RENDEZVOUS", &address)
            .env("EP_JOB_TOKEN", format!("processes test {address}"))
            .env("EP_RANK", rank.to_string())
            .env("EP_WORLD", ranks.to_string())
            .env("EP_TIMEOUT", wait.as_secs().to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a copy starts")
    };
    Ranks((0..ranks).map(start).collect())
}

/// What a copy printed, once it has ended.
pub fn said(child: &mut Child, within: Duration) -> String {
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

/// Does what this copy was started for, if it is one.
pub fn copy(over: Over) {
    if let Ok(task) = std::env::var(TASK) {
        child(&task, over);
    }
}

/// The digests of as many steps on threads of this process.
fn on_threads(ranks: usize) -> Vec<u64> {
    let groups = Group::local(ranks).expect("a local group");
    let threads: Vec<_> = groups
        .into_iter()
        .map(|group| {
            let ep = move || build(&group, |builder, _| builder).expect("build");
            std::thread::spawn(move || work(&ep(), "", 12).expect("work"))
        })
        .collect();
    threads.into_iter().map(|t| t.join().expect("no panic")).collect()
}

/// Copies get the bits that threads get.
pub fn get_the_bits_of_threads(ranks: usize) {
    let mut copies = start(ranks, "run");
    for (child, digest) in copies.0.iter_mut().zip(on_threads(ranks)) {
        let line = said(child, TIMEOUT * 2);
        assert!(line.ends_with(&format!("digest {digest:016x}")), "{line}");
    }
}

/// Kills one of four copies in each phase; the others name it at once, or when their time to meet is
/// over.
pub fn survivors_name_the_killed() {
    let mut wait = 1;
    super::in_one_of_some_tries(|| {
        // Each time longer, if copies come later than that.
        wait = 16.min(wait * 2);
        let wait = Duration::from_secs(wait);
        name_the_killed("before the rendezvous", wait, wait + PROMPT)
    });
    for phase in [
        "before build",
        "before dispatch",
        "after dispatch_send",
        "holding a result",
        "after combine_send",
    ] {
        name_the_killed(phase, TIMEOUT, PROMPT).expect("all name it");
    }
}

/// Kills one of four copies that wait so long for each other to come; the others name it within `most`.
fn name_the_killed(phase: &str, wait: Duration, most: Duration) -> Result<(), String> {
    let mut ranks = start_waiting(4, phase, wait);
    said(&mut ranks.0[VICTIM], TIMEOUT * 2);
    let died = Instant::now();
    for (rank, child) in ranks.0.iter_mut().enumerate().filter(|(rank, _)| *rank != VICTIM) {
        let line = said(child, TIMEOUT * 2);
        if !line.contains("error peer=Some(1) usable=false") || died.elapsed() > most {
            return Err(format!("rank {rank}, killed {phase}, {:?}: {line}", died.elapsed()));
        }
    }
    Ok(())
}
