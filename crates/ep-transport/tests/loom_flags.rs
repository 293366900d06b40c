//! The flags' code, as it is in production, under every interleaving and memory order that loom
//! explores: `RUSTFLAGS="--cfg loom" cargo test -p ep-transport --release --test loom_flags`.
#![cfg(loom)]

use std::time::Duration;

use ep_transport::flags::FlagBoard;
use ep_transport::{Deadline, Health};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};
use loom::thread;

const WORLD: usize = 3;

/// Payload whose races loom reports.
struct Payload(UnsafeCell<u32>);

// SAFETY: loom's cell checks every access against every other.
unsafe impl Sync for Payload {}
// SAFETY: as above.
unsafe impl Send for Payload {}

impl Payload {
    fn new() -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(0)))
    }

    fn write(&self, value: u32) {
        // SAFETY: loom fails the model if another access is concurrent.
        self.0.with_mut(|cell| unsafe { *cell = value });
    }

    fn read(&self) -> u32 {
        // SAFETY: as above.
        self.0.with(|cell| unsafe { *cell })
    }
}

fn model(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}

fn wait(board: &FlagBoard, flag: u32, peers: &[usize]) {
    let deadline = Deadline::after(Duration::from_secs(3600));
    board.wait_all("model", flag, peers, deadline, &Health::new(WORLD)).unwrap();
}

fn payload_is_visible(set: Ordering, ring: Ordering, take: Ordering) {
    model(3, move || {
        let (board, payload) = (FlagBoard::model(WORLD, 1), Payload::new());
        let source = {
            let (board, payload) = (board.clone(), payload.clone());
            thread::spawn(move || {
                payload.write(7);
                board.set_with(0, 1, set, ring);
            })
        };
        if board.take_with(0, 1, take) {
            assert_eq!(payload.read(), 7);
            assert!(!board.is_set(0, 1));
        }
        source.join().unwrap();
    });
}

#[test]
fn what_was_stored_before_set_is_visible_after_take() {
    payload_is_visible(Release, Release, Acquire);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_set_loses_payload() {
    payload_is_visible(Relaxed, Release, Acquire);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_take_loses_payload() {
    payload_is_visible(Release, Release, Relaxed);
}

fn no_wake_up_is_lost(ring: Ordering) {
    model(3, move || {
        let (board, payload) = (FlagBoard::model(WORLD, 1), Payload::new());
        let source = {
            let (board, payload) = (board.clone(), payload.clone());
            thread::spawn(move || {
                payload.write(7);
                board.set_with(0, 1, Release, ring);
            })
        };
        wait(&board, 0, &[1]);
        assert_eq!(payload.read(), 7);
        source.join().unwrap();
    });
}

#[test]
fn a_waiter_is_always_woken() {
    no_wake_up_is_lost(Release);
}

/// Loom's report of a deadlock ends the process, so it gets one of its own.
#[test]
fn a_relaxed_ring_lets_a_waiter_sleep_forever() {
    let inner = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "model_of_a_relaxed_ring", "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&inner.stderr);
    assert!(!inner.status.success() && text.contains("deadlock"), "{text}");
}

#[test]
#[ignore = "runs in a process of its own: it must fail there"]
fn model_of_a_relaxed_ring() {
    no_wake_up_is_lost(Relaxed);
}

#[test]
fn one_waiter_hears_two_sources() {
    model(2, || {
        let board = FlagBoard::model(WORLD, 1);
        let sources = [1, 2].map(|source| {
            let board = board.clone();
            thread::spawn(move || board.set(0, source))
        });
        wait(&board, 0, &[1, 2]);
        for source in sources {
            source.join().unwrap();
        }
    });
}

#[test]
fn two_waiters_hear_one_source() {
    model(2, || {
        let board = FlagBoard::model(WORLD, 2);
        let waiter = {
            let board = board.clone();
            thread::spawn(move || wait(&board, 1, &[1]))
        };
        let source = {
            let board = board.clone();
            thread::spawn(move || {
                board.set(0, 1);
                board.set(1, 1);
            })
        };
        wait(&board, 0, &[1]);
        waiter.join().unwrap();
        source.join().unwrap();
    });
}

/// The protocol's pair: the receiver says "ready", the sender writes and says "data", the receiver
/// reads. What is read is never overwritten early, and no reset swallows the next signal.
fn pair(ready: Ordering) {
    model(3, move || {
        let (sender, receiver) = (FlagBoard::model(2, 1), FlagBoard::model(2, 1));
        let window = Payload::new();
        let peer = {
            let (sender, receiver, window) = (sender.clone(), receiver.clone(), window.clone());
            thread::spawn(move || {
                for round in 1..=2 {
                    wait(&sender, 0, &[1]);
                    window.write(round);
                    receiver.set(0, 0);
                }
            })
        };
        for round in 1..=2 {
            sender.set_with(0, 1, ready, Release);
            wait(&receiver, 0, &[0]);
            assert_eq!(window.read(), round);
        }
        peer.join().unwrap();
        assert!(!sender.is_set(0, 1) && !receiver.is_set(0, 0));
    });
}

#[test]
fn a_pair_of_flags_can_be_used_again() {
    pair(Release);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_ready_lets_the_sender_overwrite_what_is_being_read() {
    pair(Relaxed);
}
