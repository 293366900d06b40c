//! Windows that GPUs have, over the simulated fabric: the driver is the project's emulated one, or a real
//! one. Without libcuda each test says so and passes.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::areas::{DmaBuf, Refused, Source};
use super::gpu::{self, GpuLink, Nics, See};
use super::nodes::Nodes;
use super::simulated::{Simulated, SimulatedDevice, ranks};
use crate::conformance::{CHECKS, Member, Queues, run_members_on};
use crate::nvlink::Hand;
use crate::nvlink::parts::{Allocation, Buried, Gpu, Mapped};
use crate::{
    Deadline, ErrorKind, Group, Link, Memory, Put, Queue, Reach, Result, Transport, TransportError,
    WindowSpec, drop_when_quiet,
};

const LIMIT: Duration = Duration::from_secs(30);
const SPEC: WindowSpec = WindowSpec { bytes: 1 << 16, flags: 2 };
const HOST: Queue = Queue::host();

/// Writes of NICs that a GPU does not see yet.
pub(super) type Posted = Arc<Mutex<Vec<(usize, Vec<u8>)>>>;

/// Where a rank's window is, and what its NICs can do.
#[derive(Clone, Debug)]
pub(super) struct OnGpu {
    pub ordinal: usize,
    /// NICs reach the GPU's memory.
    pub reached: bool,
    /// What they write there has to be flushed, and whether anybody does.
    pub hidden: Option<bool>,
    pub call: Arc<Call>,
}

/// The call by which a GPU sees what NICs wrote.
#[derive(Debug, Default)]
pub(super) struct Call {
    made: AtomicUsize,
    /// It does not come back.
    stuck: AtomicBool,
    fails: AtomicBool,
}

impl Call {
    fn make(&self) -> Result<()> {
        self.made.fetch_add(1, SeqCst);
        until("the call comes back", || !self.stuck.load(SeqCst));
        let (call, detail) = ("cuFlushGPUDirectRDMAWrites", "a test's".into());
        match self.fails.load(SeqCst) {
            true => Err(TransportError::Device { op: "flush", call, code: 999, detail }),
            false => Ok(()),
        }
    }
}

/// Waits, bounded.
fn until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Deadline::after(LIMIT);
    while !is_so() {
        assert!(!deadline.expired(), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

struct SimulatedNics<'a> {
    of: &'a Simulated,
    on: &'a OnGpu,
    group: &'a Group,
    nodes: Nodes,
    number: usize,
    posted: Posted,
    deadline: Deadline,
}

impl Nics for SimulatedNics<'_> {
    type Wired = Vec<(usize, Source)>;
    type Device = SimulatedDevice;

    fn export(
        &self,
        gpu: &Arc<Gpu>,
        memory: &Arc<Allocation>,
    ) -> Result<(Arc<DmaBuf>, Option<See>), Refused> {
        if !self.on.reached {
            return Err(Refused::Unreachable("this fabric takes no dma-buf".into()));
        }
        let mapped = Buried::new(Mapped::new(gpu, memory)?);
        let (address, bytes) = (mapped.base, mapped.bytes);
        let fd = rustix::fs::memfd_create("dma-buf", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let buf = Arc::new(DmaBuf { fd, address, bytes, _memory: Box::new(mapped) });
        let (posted, call) = (self.posted.clone(), self.on.call.clone());
        let see = move || {
            call.make()?;
            for (at, bytes) in posted.lock().drain(..) {
                // SAFETY: a device of this test was asked to write there, and nobody else does.
                unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len());
                }
            }
            Ok(())
        };
        let flushes = self.on.hidden == Some(true);
        Ok((buf, flushes.then(|| Box::new(see) as See)))
    }

    fn register(&self, memory: &[(usize, Source)]) -> Result<Self::Wired, Refused> {
        Ok(memory.to_vec())
    }

    fn connect(self, known: Self::Wired) -> Result<Vec<(SimulatedDevice, Vec<u32>)>> {
        let devices = self.of.devices(self.group.rank(), self.number, &self.nodes, &known);
        if let ([window, words], Some(_)) = (&known[..], self.on.hidden) {
            let begin = window.1.address();
            let range = begin..begin + words.0 as u64;
            for nic in 0..self.of.options.nics {
                let fabric = self.of.fabric(self.number, nic);
                fabric.lock().hidden.push((range.clone(), self.posted.clone()));
            }
        }
        self.group.all_gather_within("open", &[], self.deadline)?;
        Ok(devices)
    }
}

impl OnGpu {
    pub(super) fn open(
        &self,
        of: &Simulated,
        (group, number): (&Group, usize),
        spec: WindowSpec,
        nodes: Nodes,
        deadline: Deadline,
    ) -> Result<Arc<GpuLink>> {
        let posted = Posted::default();
        let (on, members) = (self, nodes.clone());
        let nics = SimulatedNics { of, on, group, nodes: members, number, posted, deadline };
        let (options, ordinal) = (&of.options, self.ordinal);
        gpu::open(gpu::Opening { group, spec, nodes, options, ordinal, deadline }, Ok(nics))
    }
}

/// One test at a time, if there are so many GPUs.
fn gpus(least: usize) -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock();
    // Checks on streams of a rank need hardware queues of their own, whatever tests there were before.
    Hand::none_idle();
    match Gpu::open(0) {
        Err(why) => {
            assert!(why.to_string().contains("libcuda.so.1"), "{why}");
            eprintln!("skipped: {why}");
            return None;
        }
        Ok(gpu) => {
            let mut count: c_int = 0;
            // SAFETY: `count` is valid for the call.
            assert_eq!(unsafe { (gpu.driver.device_count)(&mut count) }, 0);
            if (count as usize) < least {
                eprintln!("skipped: {count} GPUs, this needs {least}");
                return None;
            }
        }
    }
    Some(turn)
}

/// Ranks in nodes of `per_node`, each node on a GPU of its own.
fn on_gpus(
    world: usize,
    (nics, queue_pairs, per_node): (usize, usize, usize),
    seed: u64,
    (reached, hidden): (bool, Option<bool>),
) -> Vec<(Group, Simulated)> {
    let (mut members, _) = ranks(world, (nics, queue_pairs, per_node), seed);
    for (group, one) in &mut members {
        let ordinal = group.rank() / per_node;
        one.gpu = Some(OnGpu { ordinal, reached, hidden, call: Arc::default() });
    }
    members
}

/// Runs `f` on every rank, with its link.
fn each<T: Send>(
    members: Vec<(Group, Simulated)>,
    f: impl Fn(&Group, Arc<dyn Link>) -> T + Sync,
) -> Vec<T> {
    let f = &f;
    std::thread::scope(|scope| {
        let run = |(group, transport): (Group, Simulated)| {
            scope.spawn(move || {
                let link = transport.open(&group, SPEC, Deadline::after(LIMIT)).unwrap();
                f(&group, link)
            })
        };
        let ranks: Vec<_> = members.into_iter().map(run).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Every check, with ranks in nodes.
fn pass_every_check(
    world: usize,
    shape: (usize, usize, usize),
    how: (bool, Option<bool>),
    queues: Queues,
) {
    let Some(_turn) = gpus(world.div_ceil(shape.2)) else { return };
    let mut wrong = Vec::new();
    for check in CHECKS {
        let members = on_gpus(world, shape, 17, how).into_iter();
        let members = members.map(|(group, one)| -> Member { (group, Box::new(one)) });
        let start = Instant::now();
        let outcome = run_members_on(check.name, members.collect(), LIMIT, queues);
        println!("{queues:?}, {}: {:?}", check.name, start.elapsed());
        wrong.extend(outcome.err().map(|e| format!("{queues:?}, {}: {e}", check.name)));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn lone_ranks_with_windows_on_the_host_pass_every_check_on_the_host_queue() {
    pass_every_check(2, (1, 2, 1), (false, None), Queues::Host);
}

#[test]
fn nodes_with_windows_that_are_flushed_pass_every_check_on_streams() {
    pass_every_check(3, (2, 1, 2), (true, Some(true)), Queues::Streams);
}

/// The other arrangements; those above have what differs.
#[test]
#[ignore = "takes minutes"]
fn every_arrangement_passes_every_check() {
    for queues in [Queues::Host, Queues::Streams] {
        for (world, shape) in [(2, (1, 1, 1)), (3, (2, 3, 1)), (4, (2, 1, 2)), (3, (1, 2, 2))] {
            for how in [(false, None), (true, None), (true, Some(true))] {
                pass_every_check(world, shape, how, queues);
            }
        }
    }
}

/// Rank 0 puts to rank 1, on a stream, over a fabric whose writes are not seen before they are flushed;
/// whether rank 1 sees them.
fn is_seen(flushed: bool) -> Option<bool> {
    let _turn = gpus(2)?;
    let (count, half) = (20_000, SPEC.bytes / 2);
    let seen = each(on_gpus(2, (2, 2, 1), 10, (true, Some(flushed))), |group, link| {
        let Memory::Cuda { ordinal } = link.memory() else { panic!("{link:?}") };
        assert!(matches!(link.reach(1 - group.rank()), Reach::Bulk));
        let (hand, deadline) = (Hand::take(ordinal).unwrap(), Deadline::after(LIMIT));
        let window = link.window().base.as_ptr() as u64;
        let data: Vec<u8> = (0..count).map(|i| i as u8 | 1).collect();
        let queue = hand.queue();
        let mut right = true;
        if group.rank() == 0 {
            // SAFETY: this rank's own window.
            unsafe { hand.write(window, &data, deadline).unwrap() };
            link.put(&queue, Put { peer: 1, from: 0, to: half, bytes: count }).unwrap();
            link.signal(&queue, 1, 0).unwrap();
            link.flush(&queue, deadline).unwrap();
        } else {
            link.wait(&queue, "data", &[0], 0, deadline).unwrap();
            let mut found = vec![0; count];
            // SAFETY: this rank's own window.
            unsafe { hand.read(window + half as u64, &mut found, deadline).unwrap() };
            right = found == data;
            assert!(right || found.iter().all(|&byte| byte == 0));
        }
        hand.settle(deadline).unwrap();
        group.barrier().unwrap();
        right
    });
    Some(seen[1])
}

#[test]
fn what_arrives_is_flushed_before_a_stream_goes_on() {
    if let Some(seen) = is_seen(true) {
        assert!(seen, "flushed before the flag was raised");
        assert_eq!(is_seen(false), Some(false), "so the test would see a missing flush");
    }
}

/// What comes from a peer that has left since is not lost: the news of its leaving is quicker.
#[test]
fn last_words_count() {
    let Some(_turn) = gpus(2) else { return };
    for seed in 0..10 {
        each(on_gpus(2, (1, 1, 1), seed, (seed % 2 == 0, None)), |group, link| {
            let Memory::Cuda { ordinal } = link.memory() else { panic!("{link:?}") };
            let (hand, deadline) = (Hand::take(ordinal).unwrap(), Deadline::after(LIMIT));
            if group.rank() == 0 {
                link.put(&hand.queue(), Put { peer: 1, from: 0, to: 0, bytes: 1 << 15 }).unwrap();
                link.signal(&hand.queue(), 1, 0).unwrap();
                hand.settle(deadline).unwrap();
                return;
            }
            if seed < 5 {
                link.wait(&HOST, "last words", &[0], 0, deadline).unwrap();
            } else {
                link.wait(&hand.queue(), "last words", &[0], 0, deadline).unwrap();
                hand.settle(deadline).unwrap();
                let mut poisoned = [0; 4];
                let at = link.stream_side().unwrap().poisoned;
                // SAFETY: a word of the link, which is page-locked.
                unsafe { hand.read(at, &mut poisoned, deadline).unwrap() };
                assert_eq!(poisoned, [0; 4], "seed {seed}");
            }
        });
    }
}

/// A peer that answers nothing any more is named to everyone; streams that wait go on.
#[test]
fn a_dead_peer_is_everyones_error_and_streams_go_on() {
    let Some(_turn) = gpus(3) else { return };
    let members = on_gpus(3, (1, 1, 1), 3, (true, None));
    let fabric = members[0].1.fabric(0, 0);
    each(members, |group, link| {
        let (rank, start) = (group.rank(), Instant::now());
        let Memory::Cuda { ordinal } = link.memory() else { panic!("{link:?}") };
        let (hand, deadline) = (Hand::take(ordinal).unwrap(), Deadline::after(LIMIT));
        let queue = hand.queue();
        group.barrier().unwrap();
        if rank == 0 {
            fabric.lock().dead.push(2);
            link.put(&queue, Put { peer: 2, from: 0, to: 0, bytes: 1 << 15 }).unwrap();
            link.signal(&queue, 2, 0).unwrap();
            // The stream waits for what is never done.
            link.flush(&queue, deadline).unwrap();
        }
        link.wait(&queue, "wait", &[(rank + 1) % 3], 0, deadline).unwrap();
        hand.settle(deadline).unwrap();
        assert!(start.elapsed() < LIMIT / 3, "{:?}", start.elapsed());
        let error = link.wait(&HOST, "wait", &[(rank + 1) % 3], 0, deadline).unwrap_err();
        assert_eq!(error.peer(), Some(2), "rank {rank}: {error}");
        if rank == 0 {
            let refused = link.signal(&queue, 2, 1).unwrap_err();
            assert_eq!((refused.kind(), refused.peer()), (ErrorKind::PeerLost, Some(2)));
        }
    });
}

/// Rank 1 is in a call of the driver that does not come back when its stream waits, for as long as
/// `allowed`, for its sources to be free. `then` happens on all ranks; the stream goes on, all fail, and
/// rank 1 may drop its link. What each rank says of it.
fn in_a_call_that_does_not_come_back(
    allowed: Duration,
    then: impl Fn(&Group, &Call) + Sync,
) -> Option<Vec<TransportError>> {
    let _turn = gpus(2)?;
    let mut members = on_gpus(2, (1, 1, 1), 6, (true, Some(true)));
    members.iter_mut().for_each(|(_, one)| one.options.drain = Duration::from_millis(300));
    let call = members[1].1.gpu.as_ref().unwrap().call.clone();
    Some(each(members, |group, link| {
        let Memory::Cuda { ordinal } = link.memory() else { panic!("{link:?}") };
        let (hand, start) = (Hand::take(ordinal).unwrap(), Instant::now());
        if group.rank() == 0 {
            group.barrier().unwrap();
            link.signal(&HOST, 1, 0).unwrap();
            group.barrier().unwrap();
            then(group, &call);
        } else {
            call.stuck.store(true, SeqCst);
            let before = call.made.load(SeqCst);
            group.barrier().unwrap();
            until("the call is made", || call.made.load(SeqCst) > before);
            link.put(&hand.queue(), Put { peer: 0, from: 0, to: 0, bytes: 1 << 15 }).unwrap();
            link.flush(&hand.queue(), Deadline::after(allowed)).unwrap();
            let given_back = Arc::new(());
            std::thread::sleep(Duration::from_millis(20));
            drop_when_quiet(given_back.clone());
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(Arc::strong_count(&given_back), 2, "given back below a stream");
            group.barrier().unwrap();
            then(group, &call);
            hand.settle(Deadline::after(LIMIT)).unwrap();
            until("memory is given back", || Arc::strong_count(&given_back) == 1);
        }
        until("all hear of it", || group.health().check("wait").is_err());
        let error = group.health().check("wait").unwrap_err();
        drop((hand, link));
        assert!(start.elapsed() < LIMIT / 5, "{:?}", start.elapsed());
        if group.rank() == 1 {
            call.stuck.store(false, SeqCst);
        }
        error
    }))
}

#[test]
fn a_call_that_does_not_come_back_ends_by_the_streams_time() {
    let errors = in_a_call_that_does_not_come_back(Duration::from_secs(1), |_, _| ());
    for error in errors.into_iter().flatten() {
        let TransportError::Aborted { by: 1, blames: None, why, .. } = &error else {
            panic!("{error}")
        };
        assert!(why.contains("flush: no answer within 1s") && why.contains("driver"), "{why}");
    }
}

#[test]
fn streams_go_on_when_others_give_up_whatever_the_driver_does() {
    let give_up = |group: &Group, _: &Call| {
        if group.rank() == 0 {
            group.abort("enough");
        }
    };
    for error in in_a_call_that_does_not_come_back(LIMIT, give_up).into_iter().flatten() {
        assert!(error.to_string().contains("rank 0 gave up: enough"), "{error}");
    }
}

#[test]
fn a_call_that_fails_is_everyones_error_and_streams_go_on() {
    let fail = |group: &Group, call: &Call| {
        if group.rank() == 1 {
            call.fails.store(true, SeqCst);
            call.stuck.store(false, SeqCst);
        }
    };
    for error in in_a_call_that_does_not_come_back(LIMIT, fail).into_iter().flatten() {
        assert!(error.to_string().contains("cuFlushGPUDirectRDMAWrites"), "{error}");
    }
}

#[test]
fn ranks_of_different_nodes_on_one_gpu_are_refused_everywhere() {
    let Some(_turn) = gpus(1) else { return };
    let mut members = on_gpus(3, (1, 1, 1), 3, (true, None));
    for (_, one) in &mut members {
        one.gpu.as_mut().unwrap().ordinal = 0;
    }
    std::thread::scope(|scope| {
        for (group, transport) in members {
            scope.spawn(move || {
                let e = transport.open(&group, SPEC, Deadline::after(LIMIT)).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Unsupported);
                assert!(e.to_string().contains("ranks 0 and 1 are of different nodes"), "{e}");
                group.barrier().unwrap();
            });
        }
    });
}
