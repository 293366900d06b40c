//! The fault-injecting transport: what it disturbs, what it keeps, and how it fails.
#![cfg(not(loom))]

mod words;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ep_transport::conformance::{self, CHECKS, Member};
use ep_transport::{
    Deadline, ErrorKind, Failure, FaultyTransport, ForwardLink, Group, Link, Put, Queue, Result,
    ThreadTransport, Transport, TransportError, WindowSpec,
};
use parking_lot::Mutex;
use proptest::prelude::*;

fn over(bulk: bool, seed: u64) -> FaultyTransport<ThreadTransport> {
    FaultyTransport::new(ThreadTransport::new().bulk(bulk), seed)
}

fn members(world: usize, transport: impl Transport + Clone + 'static) -> Vec<Member> {
    let member = |group| (group, Box::new(transport.clone()) as Box<dyn Transport>);
    Group::local(world).unwrap().into_iter().map(member).collect()
}

/// Short delays, so that thousands of rounds take seconds.
fn brief(bulk: bool, seed: u64) -> FaultyTransport<ThreadTransport> {
    over(bulk, seed).delays(0.5, Duration::from_micros(100))
}

mod bulk {
    use super::*;

    ep_transport::conformance_suite!(|world| members(world, brief(true, 1)));
}

/// Every check but the one that is long by the number of its rounds.
fn most_checks(transport: impl Transport + Clone + 'static) {
    for check in CHECKS.iter().filter(|check| check.name != "reuse_over_many_rounds") {
        conformance::run(check.name, |world| members(world, transport.clone())).unwrap();
    }
}

#[test]
fn delays_that_are_rare_but_long_break_no_promise() {
    most_checks(over(true, 2).delays(0.002, Duration::from_millis(20)));
}

#[test]
fn late_signals_to_mapped_peers_break_no_promise() {
    most_checks(brief(false, 3));
}

/// What reached the inner link.
#[derive(Clone, Debug, PartialEq)]
enum Seen {
    Put(Put),
    Signal(usize, u32),
    Flush,
}

#[derive(Clone, Debug, Default)]
struct Recorder(Arc<Mutex<Vec<Seen>>>);

#[derive(Debug)]
struct Recording {
    inner: Arc<dyn Link>,
    log: Recorder,
}

impl Transport for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }

    fn open(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Arc<dyn Link>> {
        let inner = ThreadTransport::new().bulk(true).open(group, spec, deadline)?;
        Ok(Arc::new(Recording { inner, log: self.clone() }))
    }
}

// SAFETY: it only takes notes.
unsafe impl ForwardLink for Recording {
    fn inner(&self) -> &dyn Link {
        &*self.inner
    }

    fn put(&self, queue: &Queue, put: Put) -> Result<()> {
        self.log.0.lock().push(Seen::Put(put));
        self.inner.put(queue, put)
    }

    fn flush(&self, queue: &Queue, deadline: Deadline) -> Result<()> {
        self.log.0.lock().push(Seen::Flush);
        self.inner.flush(queue, deadline)
    }

    fn signal(&self, queue: &Queue, peer: usize, flag: u32) -> Result<()> {
        self.log.0.lock().push(Seen::Signal(peer, flag));
        self.inner.signal(queue, peer, flag)
    }
}

const SPEC: WindowSpec = WindowSpec { bytes: 4096, flags: 64 };
const WORLD: usize = 3;
const SOON: Duration = Duration::from_secs(20);

/// Opens `transport` on all ranks and lets `f` work with rank 0's link.
fn on_rank_0<T: Send>(transport: &impl Transport, f: impl FnOnce(&Group, &dyn Link) -> T) -> T {
    let groups = Group::local(WORLD).unwrap();
    let open = |group: &Group| transport.open(group, SPEC, Deadline::after(SOON)).unwrap();
    std::thread::scope(|scope| {
        let start = |group| scope.spawn(move || open(group));
        let others: Vec<_> = groups[1..].iter().map(start).collect();
        let link = open(&groups[0]);
        let others: Vec<_> = others.into_iter().map(|other| other.join().unwrap()).collect();
        let result = f(&groups[0], &*link);
        drop(link);
        drop(others);
        result
    })
}

/// Runs a program on rank 0 over a recorder, to its end; what the inner link saw.
fn record(seed: u64, longest: Duration, program: &[Seen]) -> Vec<Seen> {
    let log = Recorder::default();
    let transport = FaultyTransport::new(log.clone(), seed).delays(0.7, longest);
    on_rank_0(&transport, |_, link| {
        let queue = Queue::host();
        for step in program {
            match *step {
                Seen::Put(put) => link.put(&queue, put).unwrap(),
                Seen::Signal(peer, flag) => link.signal(&queue, peer, flag).unwrap(),
                Seen::Flush => link.flush(&queue, Deadline::after(SOON)).unwrap(),
            }
        }
    });
    std::mem::take(&mut *log.0.lock())
}

/// Puts and signals that can be told apart.
fn programs() -> impl Strategy<Value = Vec<Seen>> {
    let step = (0..6u8, 0..WORLD);
    prop::collection::vec(step, 0..60).prop_map(|steps| {
        let number = |(i, (kind, peer)): (usize, (u8, usize))| match kind {
            0..=3 => Seen::Put(Put { peer, from: i, to: i, bytes: 1 }),
            4 => Seen::Signal(peer, i as u32),
            _ => Seen::Flush,
        };
        steps.into_iter().enumerate().map(number).collect()
    })
}

fn place(of: &Seen, seen: &[Seen]) -> usize {
    let mut places = seen.iter().enumerate().filter(|(_, other)| *other == of).map(|(at, _)| at);
    let first = places.next().unwrap_or_else(|| panic!("{of:?} is lost in {seen:?}"));
    assert_eq!(places.next(), None, "{of:?} is there twice");
    first
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Nothing is lost or done twice; puts come before the signal and the flush that follow them.
    #[test]
    fn order_that_is_promised_is_kept(program in programs(), seed: u64, micros in 0..2000u64) {
        let seen = record(seed, Duration::from_micros(micros), &program);
        assert_eq!(seen.len(), program.len());
        let mut flushes = seen.iter().enumerate().filter(|(_, s)| **s == Seen::Flush);
        for (i, step) in program.iter().enumerate() {
            let before = program[..i].iter().filter_map(|step| match step {
                Seen::Put(put) => Some((put.peer, step)),
                _ => None,
            });
            let (at, peer) = match step {
                Seen::Signal(peer, _) => (place(step, &seen), Some(*peer)),
                Seen::Flush => (flushes.next().unwrap().0, None),
                Seen::Put(_) => continue,
            };
            for (_, put) in before.filter(|(to, _)| peer.is_none_or(|p| p == *to)) {
                assert!(place(put, &seen) < at, "{put:?} comes after {step:?}: {seen:?}");
            }
        }
    }
}

/// Ten puts and a signal to each peer.
fn epochs() -> Vec<Seen> {
    let put = |peer, i| Seen::Put(Put { peer, from: i, to: 100 * peer + i, bytes: 1 });
    let epoch = |peer| (0..10).map(move |i| put(peer, i)).chain([Seen::Signal(peer, 0)]);
    (0..WORLD).flat_map(epoch).collect()
}

#[test]
fn a_seed_gives_one_order_and_seeds_differ() {
    // The longest there is. Most delays are a tiny share of it; the least of seed 5's must outlast
    // the program, or when it ends would decide about the order.
    let long = Duration::MAX;
    let of = |seed| record(seed, long, &epochs());
    assert_eq!(of(5), of(5));
    assert!((6..16).any(|seed| of(seed) != of(5)), "eleven seeds give one order");
    let reordered = |seen: &[Seen]| {
        let puts: Vec<_> = seen.iter().filter(|s| matches!(s, Seen::Put(_))).cloned().collect();
        let asked: Vec<_> = epochs().into_iter().filter(|s| matches!(s, Seen::Put(_))).collect();
        puts != asked
    };
    assert!(reordered(&of(5)), "puts keep their order");
    let signals = |seen: Vec<Seen>| -> Vec<usize> {
        let peer = |s| if let Seen::Signal(peer, _) = s { Some(peer) } else { None };
        seen.into_iter().filter_map(peer).collect()
    };
    let orders: Vec<_> = (0..20).map(|seed| signals(of(seed))).collect();
    assert!(orders.iter().any(|order| *order != [0, 1, 2]), "signals keep their order");
}

#[test]
fn without_delays_all_is_as_submitted() {
    assert_eq!(record(1, Duration::ZERO, &epochs()).len(), epochs().len());
    let log = Recorder::default();
    let transport = FaultyTransport::new(log.clone(), 1).delays(0.0, SOON);
    on_rank_0(&transport, |_, link| {
        link.put(&Queue::host(), Put { peer: 1, from: 0, to: 0, bytes: 8 }).unwrap();
        link.signal(&Queue::host(), 1, 0).unwrap();
        assert_eq!(log.0.lock().len(), 2);
    });
}

#[test]
fn what_nothing_forces_goes_out_when_its_time_has_come() {
    let log = Recorder::default();
    let transport = FaultyTransport::new(log.clone(), 1).delays(1.0, Duration::from_millis(20));
    on_rank_0(&transport, |_, link| {
        let began = Instant::now();
        for i in 0..8 {
            link.put(&Queue::host(), Put { peer: 1, from: i, to: i, bytes: 1 }).unwrap();
            link.signal(&Queue::host(), 2, i as u32).unwrap();
        }
        while log.0.lock().len() < 16 {
            assert!(began.elapsed() < SOON, "held back for ever: {:?}", log.0.lock());
            std::thread::yield_now();
        }
    });
}

/// Puts to and signals rank `peer` until that fails, at most `most` times; how often it went well,
/// and the error. Flushes each time, which brings errors of puts that were held back.
fn until_error(link: &dyn Link, peer: usize, most: u64) -> (u64, Option<TransportError>) {
    let queue = Queue::host();
    for i in 0..most {
        let put = link.put(&queue, Put { peer, from: 0, to: 0, bytes: 4 });
        let done = put.and_then(|()| link.flush(&queue, Deadline::after(SOON)));
        if let Err(e) = done.and_then(|()| link.signal(&queue, peer, i as u32)) {
            return (i, Some(e));
        }
    }
    (most, None)
}

#[test]
fn errors_come_after_so_many_operations_and_stay() {
    for (failure, share) in
        [(Failure::PutError, 0.0), (Failure::PutError, 1.0), (Failure::SignalError, 0.0)]
    {
        let transport = over(true, 4).delays(share, Duration::from_micros(50)).fail(0, 10, failure);
        on_rank_0(&transport, |_, link| {
            let (rounds, error) = until_error(link, 1, 64);
            let error = error.expect("an error");
            assert_eq!(
                (rounds, error.kind(), error.peer()),
                (5, ErrorKind::Os, Some(1)),
                "{error}"
            );
            assert_eq!(error.code(), Some(libc::EIO));
            assert!(error.to_string().contains("after 1"), "{error}");
            let (rounds, error) = until_error(link, 1, 1);
            assert_eq!((rounds, error.and_then(|e| e.peer())), (0, Some(1)));
            // The way to the other peer is as good as before, but a flush is for all.
            link.signal(&Queue::host(), 2, 0).unwrap();
        });
    }
}

#[test]
fn an_error_of_a_late_signal_is_told_to_the_group() {
    let transport =
        over(true, 4).delays(1.0, Duration::from_millis(1)).fail(0, 0, Failure::SignalError);
    on_rank_0(&transport, |group, link| {
        let began = Instant::now();
        // Whether the error comes at once depends on nothing but the delay, which may be tiny.
        let _ = link.signal(&Queue::host(), 1, 0);
        while group.health().fault().is_none() {
            assert!(began.elapsed() < SOON, "nobody is told");
            std::thread::yield_now();
        }
        assert_eq!(group.health().fault().unwrap().blames, Some(1));
        assert!(link.signal(&Queue::host(), 1, 1).is_err());
    });
}

#[test]
fn what_is_lost_is_lost_without_an_error() {
    for failure in [Failure::PutLost, Failure::SignalLost] {
        let log = Recorder::default();
        let transport = FaultyTransport::new(log.clone(), 4).delays(0.0, SOON).fail(0, 10, failure);
        on_rank_0(&transport, |_, link| {
            assert!(matches!(until_error(link, 1, 32), (32, None)));
            link.signal(&Queue::host(), 2, 0).unwrap();
            let seen = log.0.lock();
            let put = |s: &&Seen| matches!(s, Seen::Put(_));
            let signal = |s: &&Seen| matches!(s, Seen::Signal(1, _));
            let through = (seen.iter().filter(put).count(), seen.iter().filter(signal).count());
            let expected = if failure == Failure::PutLost { (5, 5) } else { (6, 5) };
            assert_eq!(through, expected, "never only the put");
            assert_eq!(seen.last(), Some(&Seen::Signal(2, 0)), "only the way to rank 1 is cut");
        });
    }
}

#[test]
fn a_link_that_is_down_fails_everything() {
    let transport = over(true, 4).fail(0, 3, Failure::LinkDown);
    on_rank_0(&transport, |_, link| {
        let queue = Queue::host();
        let error = (0..5).find_map(|flag| link.signal(&queue, 2, flag).err()).expect("an error");
        assert_eq!((error.kind(), error.code()), (ErrorKind::Os, Some(libc::ENETDOWN)), "{error}");
        let put = Put { peer: 1, from: 0, to: 0, bytes: 1 };
        let soon = || Deadline::after(SOON);
        assert!(link.put(&queue, put).is_err() && link.signal(&queue, 1, 0).is_err());
        assert!(link.flush(&queue, soon()).is_err());
        assert!(link.wait(&queue, "test", &[0], 0, soon()).is_err());
    });
}

/// A transport that relies on the order of puts works over one that keeps it, and the suite finds
/// it out over one that does not.
#[test]
fn an_order_that_nobody_promised_is_found_out() {
    let run = |transport: Arc<dyn Transport>| {
        conformance::run("data_before_signal_is_visible", |world| {
            members(world, words::Words(transport.clone()))
        })
    };
    run(Arc::new(ThreadTransport::new().bulk(true))).expect("in order it works");
    let verdict = run(Arc::new(over(true, 9))).expect_err("out of order it must fail");
    assert!(verdict.contains("should be"), "it fails for another reason: {verdict}");
}
