//! What befalls NICs, and windows whose bytes have to be flushed, on the simulated fabric.

use std::time::{Duration, Instant};

use super::device::{Completion, Id, Kind};
use super::events::Event;
use super::simulated::{Fabric, ranks};
use crate::{Deadline, Group, Put, Queue, Transport, TransportError, WindowSpec};

const SPEC: WindowSpec = WindowSpec { bytes: 1 << 16, flags: 1 };
const LIMIT: Duration = Duration::from_secs(40);
const QUEUE: Queue = Queue::host();

fn after() -> Deadline {
    Deadline::after(LIMIT)
}

/// Three ranks wait for each other while `happen` befalls some; what each gets, and after how long.
fn waits(happen: impl Fn(&mut Fabric) + Sync) -> Vec<(Result<(), TransportError>, Duration)> {
    let (ranks, fabrics) = ranks(3, (1, 1, 1), 8);
    let run = |(group, transport): (Group, super::simulated::Simulated)| {
        let rank = group.rank();
        let link = transport.open(&group, SPEC, after()).unwrap();
        group.barrier().unwrap();
        let start = Instant::now();
        if rank == 0 {
            happen(&mut fabrics.0.lock()[&(0, 0)].lock());
        }
        let waited = link.wait(&QUEUE, "data", &[(rank + 1) % 3], 0, after());
        (waited, start.elapsed())
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = ranks.into_iter().map(|one| scope.spawn(|| run(one))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// What happens to rank 2 is an error on every rank, which says so.
fn is_everyones_error(event: Event, texts: &[&str], blamed: usize) {
    for (rank, (waited, took)) in waits(|fabric| {
        fabric.events.entry(2).or_default().push(event.clone());
    })
    .into_iter()
    .enumerate()
    {
        let error = waited.unwrap_err();
        let said = error.to_string();
        assert!(texts.iter().all(|text| said.contains(text)), "rank {rank}: {said}");
        assert_eq!(error.peer(), Some(blamed), "rank {rank}: {said}");
        assert!(took < LIMIT / 2, "rank {rank}: {took:?}");
    }
}

#[test]
fn a_port_that_stays_down_is_everyones_error() {
    let event = Event::PortDown { port: "port 1 of nic2".into() };
    is_everyones_error(event, &["port 1 of nic2 is down"], 2);
}

#[test]
fn a_device_that_fails_is_everyones_error() {
    let (call, code, detail) = ("ibv_get_async_event", libc::EIO, "nic2: removed".to_owned());
    let dead = TransportError::Device { op: "rdma", call, code, detail };
    is_everyones_error(Event::Dead(dead), &["nic2: removed"], 2);
}

#[test]
fn a_queue_pair_that_fails_is_everyones_error() {
    let id = Id { kind: Kind::Write, peer: 1, pair: 0 };
    let detail = "local catastrophic error (port 1 of nic2)".to_owned();
    let texts = ["queue pair 100 to rank 1", "port 1 of nic2"];
    // A status that blames the rank's own side, and one that blames the peer.
    is_everyones_error(Event::Pair { id, status: 2, detail: detail.clone() }, &texts, 2);
    is_everyones_error(Event::Pair { id, status: 10, detail }, &texts, 1);
}

/// Rank 0 puts to rank 1, which goes before that has moved, `when` it is well or not; what the flush says.
fn flush_to_one_that_goes(
    well: bool,
    puts_first: bool,
    bytes: usize,
) -> Result<(), TransportError> {
    let (mut ranks, fabrics) = ranks(2, (1, 1, 1), 13);
    let ((peer, mut theirs), (group, transport)) = (ranks.pop().unwrap(), ranks.pop().unwrap());
    // Its last word does not move either.
    theirs.options.drain = Duration::from_millis(100);
    let opens = || theirs.open(&peer, SPEC, after()).unwrap();
    let (link, other) = std::thread::scope(|scope| {
        let other = scope.spawn(opens);
        (transport.open(&group, SPEC, after()).unwrap(), other.join().unwrap())
    });
    let fabric = fabrics.0.lock()[&(0, 0)].clone();
    fabric.lock().held = true;
    let put = || link.put(&QUEUE, Put { peer: 1, from: 0, to: 0, bytes });
    if puts_first {
        put().unwrap();
    }
    if !well {
        let id = Id { kind: Kind::Write, peer: 0, pair: 0 };
        let event = Event::Pair { id, status: 10, detail: "remote access error".into() };
        fabric.lock().events.entry(1).or_default().push(event);
        other.wait(&QUEUE, "data", &[0], 0, after()).unwrap_err();
    }
    drop((other, peer));
    fabric.lock().held = false;
    if !puts_first {
        put()?;
    }
    link.flush(&QUEUE, after())
}

/// A write that came to nothing is an error, even if the peer is gone by then, if it went for it.
#[test]
fn what_a_failed_peer_did_not_get_is_an_error() {
    for (puts_first, bytes) in [(true, 64), (true, 1 << 16), (false, 4096)] {
        let error = flush_to_one_that_goes(false, puts_first, bytes).unwrap_err();
        assert_eq!(error.peer(), Some(1), "{error}");
        // A peer that has left in good order wanted nothing more.
        flush_to_one_that_goes(true, puts_first, bytes).unwrap();
    }
}

/// What takes a peer that is there, or nobody but this rank, is an error though the peer has left.
#[test]
fn requests_that_are_refused_are_an_error_whoever_has_left() {
    for status in [1, 2, 4, 9, 10, 11, 13] {
        let (ranks, fabrics) = ranks(2, (1, 1, 1), 14);
        let run = |(group, transport): (Group, super::simulated::Simulated)| {
            let link = transport.open(&group, SPEC, after()).unwrap();
            group.barrier().unwrap();
            if group.rank() == 1 {
                return;
            }
            link.wait(&QUEUE, "its end", &[1], 0, after()).unwrap_err();
            let id = Id { kind: Kind::Write, peer: 1, pair: 0 };
            let failed = Completion::Failed { id, status, detail: "refused".into() };
            let fabric = fabrics.0.lock()[&(0, 0)].clone();
            fabric.lock().reports.entry(0).or_default().push(failed);
            let until = after();
            while link.flush(&QUEUE, after()).is_ok() {
                assert!(!until.expired(), "status {status} is nobody's error");
                std::thread::yield_now();
            }
            let error = link.flush(&QUEUE, after()).unwrap_err();
            assert_eq!(error.code(), Some(status), "{error}");
        };
        std::thread::scope(|scope| {
            ranks.into_iter().for_each(|one| drop(scope.spawn(|| run(one))))
        });
    }
}

/// What befalls a NIC through which nobody is reached any more ends no group.
#[test]
fn a_nic_that_nobody_needs_may_fail() {
    let (call, code) = ("ibv_get_async_event", libc::EIO);
    let dead = TransportError::Device { op: "rdma", call, code, detail: "removed".into() };
    for event in [Event::Dead(dead), Event::PortDown { port: "port 1".into() }] {
        let (ranks, fabrics) = ranks(2, (1, 1, 1), 12);
        let run = |(group, transport): (Group, super::simulated::Simulated)| {
            let link = transport.open(&group, SPEC, after()).unwrap();
            group.barrier().unwrap();
            if group.rank() == 1 {
                drop(link);
                group.barrier().unwrap();
                group.barrier().unwrap();
                return;
            }
            group.barrier().unwrap();
            let fabric = fabrics.0.lock()[&(0, 0)].clone();
            fabric.lock().events.entry(0).or_default().push(event.clone());
            // Longer than a port may be down.
            std::thread::sleep(Duration::from_millis(700));
            // More than a NIC's ring takes at once.
            for _ in 0..2000 {
                link.put(&QUEUE, Put { peer: 1, from: 0, to: 0, bytes: 64 }).unwrap();
            }
            link.flush(&QUEUE, after()).unwrap();
            group.barrier().unwrap();
        };
        std::thread::scope(|scope| {
            ranks.into_iter().for_each(|one| drop(scope.spawn(|| run(one))))
        });
    }
}

/// A port that is back before packets are given up is no failure.
#[test]
fn a_port_that_comes_back_is_no_failure() {
    let (ranks, fabrics) = ranks(2, (1, 1, 1), 9);
    std::thread::scope(|scope| {
        for (group, transport) in ranks {
            let fabrics = fabrics.clone();
            scope.spawn(move || {
                let (rank, peer) = (group.rank(), 1 - group.rank());
                let link = transport.open(&group, SPEC, after()).unwrap();
                let fabric = fabrics.0.lock()[&(0, 0)].clone();
                let down = Event::PortDown { port: "port 1".into() };
                fabric.lock().events.entry(rank).or_default().extend([down, Event::PortUp]);
                // Longer than a port may be down.
                std::thread::sleep(Duration::from_millis(600));
                link.put(&QUEUE, Put { peer, from: 0, to: 0, bytes: 4096 }).unwrap();
                link.signal(&QUEUE, peer, 0).unwrap();
                link.wait(&QUEUE, "data", &[peer], 0, after()).unwrap();
                group.barrier().unwrap();
            });
        }
    });
}

/// Streams are no queues of this link, and it says so before anything happens.
#[cfg(feature = "cuda")]
#[test]
fn streams_are_refused() {
    let (ranks, _) = ranks(2, (1, 1, 1), 11);
    let run = |(group, transport): (Group, super::simulated::Simulated)| {
        let link = transport.open(&group, SPEC, after()).unwrap();
        // SAFETY: never used as a stream, as it is refused.
        let stream = unsafe { Queue::from_raw(std::ptr::null_mut(), 0) };
        let peer = 1 - group.rank();
        let put = Put { peer, from: 0, to: 0, bytes: 8 };
        for refused in [
            link.put(&stream, put),
            link.signal(&stream, peer, 0),
            link.wait(&stream, "wait", &[peer], 0, after()),
            link.flush(&stream, after()),
        ] {
            let error = refused.unwrap_err();
            assert!(error.group_usable() && error.to_string().contains("host queue"), "{error}");
        }
        group.barrier().unwrap();
    };
    std::thread::scope(|scope| ranks.into_iter().for_each(|one| drop(scope.spawn(|| run(one)))));
}
