//! What a flag costs. Not run by default, as the figures need a quiet machine:
//! `cargo test -p ep-transport --release --test latency -- --ignored --nocapture`.
#![cfg(not(loom))]

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ep_transport::{Deadline, Group, Link, Queue, ThreadTransport, Transport, WindowSpec};

const QUEUE: Queue = Queue::host();

fn on_ranks(world: usize, body: impl Fn(Group, Arc<dyn Link>) + Sync) {
    let spec = WindowSpec { bytes: 4096, flags: 2 };
    thread::scope(|scope| {
        for group in Group::local(world).unwrap() {
            let body = &body;
            scope.spawn(move || {
                let deadline = Deadline::after(Duration::from_secs(60));
                let link = ThreadTransport::new().open(&group, spec, deadline).unwrap();
                body(group, link);
            });
        }
    });
}

fn wait(link: &dyn Link, peers: &[usize], flag: u32) {
    let deadline = Deadline::after(Duration::from_secs(60));
    link.wait(&QUEUE, "latency", peers, flag, deadline).unwrap();
}

#[test]
#[ignore = "measures latency"]
fn ping_pong() {
    const ROUNDS: u32 = 100_000;
    on_ranks(2, |group, link| {
        let peer = 1 - group.rank();
        let round = || {
            if group.rank() == 0 {
                link.signal(&QUEUE, peer, 0).unwrap();
                wait(&*link, &[peer], 0);
            } else {
                wait(&*link, &[peer], 0);
                link.signal(&QUEUE, peer, 0).unwrap();
            }
        };
        (0..1000).for_each(|_| round());
        let start = Instant::now();
        (0..ROUNDS).for_each(|_| round());
        let each = start.elapsed() / ROUNDS;
        if group.rank() == 0 {
            println!("2 ranks: {each:?} per round trip");
            assert!(each < Duration::from_micros(2) * 2, "{each:?} there and back");
        }
    });
}

#[test]
#[ignore = "measures latency"]
fn all_to_all() {
    for world in [2, 4, 16, 64, 256] {
        let rounds = (20_000 / (world * world)).clamp(5, 2_000) as u32;
        on_ranks(world, |group, link| {
            let all: Vec<usize> = (0..world).collect();
            let round = || {
                for flag in [0, 1] {
                    for &peer in &all {
                        link.signal(&QUEUE, peer, flag).unwrap();
                    }
                    wait(&*link, &all, flag);
                }
            };
            (0..2).for_each(|_| round());
            group.barrier().unwrap();
            let start = Instant::now();
            (0..rounds).for_each(|_| round());
            if group.rank() == 0 {
                let each = start.elapsed() / rounds;
                println!("{world} ranks: {each:?} per handshake of all with all");
            }
        });
    }
}
