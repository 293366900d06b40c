//! Windows on GPUs against the conformance suite, in every arrangement of ranks: several on one GPU,
//! a thread per GPU, a process per GPU (two on one where there is only one). Without a GPU each test
//! says so and passes; so does one that needs more GPUs than there are.
//!
//! Two checks differ on streams, as they say themselves: a time-out is the end of a group there, so it
//! is tried once; and threads that wait for different flags have a stream each.
#![cfg(all(feature = "cuda", not(loom)))]

mod jobs;

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ep_transport::conformance::{CHECKS, Member, Queues, rank_main_on, run_members_on};
use ep_transport::{
    Deadline, ErrorKind, Group, Link, Memory, NvlinkHandles, NvlinkSignals, NvlinkTransport, Queue,
    Rendezvous, Transport, WindowSpec,
};
use jobs::{Job, address};

const LIMIT: Duration = Duration::from_secs(20);

/// How many GPUs there are.
fn count() -> Result<usize, String> {
    // SAFETY: NVIDIA's library, whose initialisers have no preconditions.
    let library = unsafe { libloading::Library::new("libcuda.so.1") }.map_err(|e| e.to_string())?;
    let mut count = 0;
    // SAFETY: the signatures are those of cuda.h; `count` is valid for the call.
    let codes = unsafe {
        let init = library.get::<unsafe extern "C" fn(u32) -> i32>(b"cuInit");
        let devices = library.get::<unsafe extern "C" fn(*mut i32) -> i32>(b"cuDeviceGetCount");
        let (init, devices) = (init.map_err(|e| e.to_string())?, devices);
        [init(0), devices.map_err(|e| e.to_string())?(&mut count)]
    };
    // Closing the driver under those who use it would not do.
    std::mem::forget(library);
    if codes == [0, 0] { Ok(count as usize) } else { Err(format!("codes {codes:?}")) }
}

/// One test at a time, with the number of GPUs, if there are at least `least`.
fn gpus(least: usize) -> Option<(usize, MutexGuard<'static, ()>)> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|broken| broken.into_inner());
    // Some checks wait on one stream before they signal on another, which a shared hardware queue does
    // not forgive: with eight, ranks that share a GPU ran out of them.
    const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(CONNECTIONS).is_none() {
        // SAFETY: tests that use the environment or the driver hold the lock.
        unsafe { std::env::set_var(CONNECTIONS, "32") };
    }
    match count() {
        Ok(gpus) if gpus >= least => Some((gpus, turn)),
        Ok(gpus) => {
            eprintln!("skipped: {gpus} GPUs, this needs {least}");
            None
        }
        Err(why) => {
            eprintln!("skipped: no GPU ({why})");
            None
        }
    }
}

fn members(world: usize, make: impl Fn(usize) -> NvlinkTransport) -> Vec<Member> {
    let groups = Group::local(world).unwrap().into_iter();
    groups.map(|g| (g.rank(), g)).map(|(rank, g)| (g, Box::new(make(rank)) as _)).collect()
}

/// Every check with ranks that are threads.
fn pass_every_check(world: usize, queues: Queues, make: impl Fn(usize) -> NvlinkTransport) {
    let mut wrong = Vec::new();
    for check in CHECKS {
        let start = Instant::now();
        let outcome = run_members_on(check.name, members(world, &make), LIMIT, queues);
        println!("{world} ranks, {queues:?}, {}: {:?}", check.name, start.elapsed());
        wrong.extend(outcome.err().map(|e| format!("{}, {world} ranks: {e}", check.name)));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn on_one_gpu(world: usize, queues: Queues) {
    if let Some((_, _turn)) = gpus(1) {
        pass_every_check(world, queues, |_| NvlinkTransport::new(0));
    }
}

#[test]
fn two_ranks_on_one_gpu_on_the_host_queue() {
    on_one_gpu(2, Queues::Host);
}

#[test]
fn two_ranks_on_one_gpu_on_streams() {
    on_one_gpu(2, Queues::Streams);
}

#[test]
fn three_ranks_on_one_gpu_on_the_host_queue() {
    on_one_gpu(3, Queues::Host);
}

#[test]
fn three_ranks_on_one_gpu_on_streams() {
    on_one_gpu(3, Queues::Streams);
}

#[test]
fn four_ranks_on_one_gpu_on_the_host_queue() {
    on_one_gpu(4, Queues::Host);
}

#[test]
fn four_ranks_on_one_gpu_on_streams() {
    on_one_gpu(4, Queues::Streams);
}

#[test]
fn a_thread_per_gpu_on_the_host_queue() {
    if let Some((gpus, _turn)) = gpus(2) {
        pass_every_check(gpus.min(4), Queues::Host, NvlinkTransport::new);
    }
}

#[test]
fn a_thread_per_gpu_on_streams() {
    if let Some((gpus, _turn)) = gpus(2) {
        pass_every_check(gpus.min(4), Queues::Streams, NvlinkTransport::new);
    }
}

/// More ranks than GPUs: some peers are beside a rank, others are not.
#[test]
fn three_ranks_on_two_gpus_on_streams() {
    if let Some((_, _turn)) = gpus(2) {
        pass_every_check(3, Queues::Streams, |rank| NvlinkTransport::new(rank % 2));
    }
}

/// Flags raised and awaited by a kernel, as where streams cannot.
fn by_kernel(ordinal: usize) -> NvlinkTransport {
    NvlinkTransport::new(ordinal).signals(NvlinkSignals::Kernel)
}

#[test]
fn three_ranks_on_one_gpu_by_a_kernel() {
    if let Some((_, _turn)) = gpus(1) {
        pass_every_check(3, Queues::Streams, |_| by_kernel(0));
    }
}

#[test]
fn a_thread_per_gpu_by_a_kernel() {
    if let Some((gpus, _turn)) = gpus(2) {
        pass_every_check(gpus.min(4), Queues::Streams, by_kernel);
    }
}

/// As ranks of different nodes, which reach each other by puts.
#[test]
fn bulk_peers_on_one_gpu() {
    if let Some((_, _turn)) = gpus(1) {
        let apart = |_| NvlinkTransport::new(0).nodes(vec![0, 0, 1]);
        pass_every_check(3, Queues::Host, apart);
        pass_every_check(3, Queues::Streams, apart);
    }
}

/// One rank by a kernel, the other by its stream.
#[test]
fn ranks_signal_each_in_its_way() {
    if let Some((_, _turn)) = gpus(1) {
        let mixed = |rank: usize| if rank == 0 { by_kernel(0) } else { NvlinkTransport::new(0) };
        pass_every_check(2, Queues::Streams, mixed);
    }
}

/// Not a test of its own: what a rank's process runs, all checks one after the other.
#[test]
fn a_rank() {
    let Ok(part) = std::env::var("EP_TEST_PART") else { return };
    let mut words = part.split(' ');
    let how = words.next();
    let queues = match how {
        Some("host") => Queues::Host,
        Some("streams" | "kernel") => Queues::Streams,
        Some("handles") => return every_handle(words.next().unwrap().parse().unwrap()),
        Some("dies") => return one_dies(words.next().unwrap().parse().unwrap()),
        other => panic!("no part {other:?}"),
    };
    let gpus: usize = words.next().unwrap().parse().unwrap();
    let this = Rendezvous::from_env().unwrap();
    let (rank, world) = (this.rank(), this.world());
    for (check, address) in CHECKS.iter().zip(words) {
        let start = Instant::now();
        let rendezvous = Rendezvous::new(rank, world, address).unwrap().with_timeout(LIMIT);
        let group = Group::from_env(&rendezvous).unwrap();
        let transport = match how {
            Some("kernel") => by_kernel(rank % gpus),
            _ => NvlinkTransport::new(rank % gpus),
        };
        rank_main_on(check.name, group, &transport, LIMIT, queues)
            .unwrap_or_else(|e| panic!("{}: {e}", check.name));
        eprintln!("{}: {:?}", check.name, start.elapsed());
    }
}

/// A process per GPU; two on one GPU where there is only one.
fn in_processes(queues: &str) {
    let Some((gpus, _turn)) = gpus(1) else { return };
    let world = gpus.clamp(2, 4);
    println!("{world} processes on {} GPUs", gpus.min(world));
    let addresses: Vec<String> = CHECKS.iter().map(|_| address()).collect();
    let job = Job::start(&format!("{queues} {gpus} {}", addresses.join(" ")), world);
    job.end(LIMIT * 9, &[]).unwrap();
}

#[test]
fn processes_on_the_host_queue() {
    in_processes("host");
}

#[test]
fn processes_on_streams() {
    in_processes("streams");
}

#[test]
fn processes_by_a_kernel() {
    in_processes("kernel");
}

/// Rank 1 is killed while the others wait for it. Their GPU is as good as before: a group of
/// the others works.
fn one_dies(gpus: usize) {
    let group = Group::from_env(&Rendezvous::from_env().unwrap()).unwrap();
    let rank = group.rank();
    let spec = WindowSpec { bytes: 4096, flags: 2 };
    let transport = NvlinkTransport::new(rank % gpus);
    let link = transport.open(&group, spec, Deadline::after(LIMIT)).unwrap();
    group.barrier().unwrap();
    if rank == 1 {
        println!("\nready");
        std::thread::sleep(LIMIT * 2);
    }
    let start = Instant::now();
    let e = link.wait(&Queue::host(), "test", &[1], 0, Deadline::after(LIMIT)).unwrap_err();
    assert_eq!(e.peer(), Some(1), "{e}");
    assert!(start.elapsed() < LIMIT / 2, "{:?}: {e}", start.elapsed());
    drop((link, group));
    let alone = Group::local(1).unwrap().remove(0);
    rank_main_on("data_before_signal_is_visible", alone, &transport, LIMIT, Queues::Streams)
        .unwrap();
}

/// Windows handed over in each way that there is; one that there is not is the error of all.
fn every_handle(gpus: usize) {
    let group = Group::from_env(&Rendezvous::from_env().unwrap()).unwrap();
    let spec = WindowSpec { bytes: 3 << 20, flags: 2 };
    for handles in [NvlinkHandles::Fd, NvlinkHandles::Fabric, NvlinkHandles::Auto] {
        let transport = NvlinkTransport::new(group.rank() % gpus).handles(handles);
        match transport.open(&group, spec, Deadline::after(LIMIT)) {
            Ok(link) => {
                eprintln!("{handles:?}: windows of {} bytes", link.window().bytes);
                group.barrier().unwrap();
            }
            Err(e) => {
                eprintln!("{handles:?}: {e}");
                assert_eq!(handles, NvlinkHandles::Fabric, "{e}");
            }
        }
    }
}

#[test]
fn processes_hand_windows_over_in_every_way() {
    let Some((gpus, _turn)) = gpus(1) else { return };
    Job::start(&format!("handles {gpus}"), 2).end(LIMIT * 4, &[]).unwrap();
}

#[test]
fn a_killed_process_leaves_the_gpu_usable() {
    let Some((gpus, _turn)) = gpus(1) else { return };
    let mut job = Job::start(&format!("dies {gpus}"), 3);
    job.hear(1, "ready");
    std::thread::sleep(Duration::from_millis(300));
    job.kill(1);
    job.end(LIMIT * 4, &[1]).unwrap();
}

/// Runs `f` on two ranks on GPU 0, each with an open link.
fn linked(f: impl Fn(&Group, &dyn Link) + Sync) {
    std::thread::scope(|scope| {
        for group in Group::local(2).unwrap() {
            let f = &f;
            scope.spawn(move || {
                let spec = WindowSpec { bytes: 4096, flags: 2 };
                let transport = NvlinkTransport::new(0);
                let link = transport.open(&group, spec, Deadline::after(LIMIT)).unwrap();
                f(&group, &*link);
            });
        }
    });
}

#[test]
fn streams_of_other_gpus_are_refused() {
    let Some((_, _turn)) = gpus(1) else { return };
    linked(|group, link| {
        assert_eq!(link.memory(), Memory::Cuda { ordinal: 0 });
        // SAFETY: no call gets as far as the stream.
        let other = unsafe { Queue::from_raw(std::ptr::null_mut(), 1) };
        let peer = 1 - group.rank();
        let put = ep_transport::Put { peer, from: 0, to: 0, bytes: 8 };
        let refused = [
            link.signal(&other, peer, 0),
            link.wait(&other, "test", &[peer], 0, Deadline::after(LIMIT)),
            link.put(&other, put),
        ];
        for refused in refused {
            let e = refused.unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Argument, "{e}");
            assert!(e.to_string().contains("GPU 1") && e.group_usable(), "{e}");
        }
        group.barrier().unwrap();
        assert!(!link.ready(&[peer], 0));
        // A wait for one that has left would end.
        group.barrier().unwrap();
    });
}

#[test]
fn gpus_that_are_not_there_are_everyones_error() {
    let Some((gpus, _turn)) = gpus(1) else { return };
    let groups = Group::local(2).unwrap();
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || {
                let spec = WindowSpec { bytes: 4096, flags: 2 };
                let open = |ordinal| {
                    NvlinkTransport::new(ordinal).open(&group, spec, Deadline::after(LIMIT))
                };
                let e = open(if group.rank() == 1 { gpus } else { 0 }).unwrap_err();
                assert!(e.to_string().contains("no GPU"), "{e}");
                // The group is as good as before.
                open(0).unwrap();
            });
        }
    });
}
