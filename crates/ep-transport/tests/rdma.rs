//! RDMA on real verbs. These tests need two RDMA devices that reach each other, `rxe0` and `rxe1`;
//! `cargo xtask test --only rdma` runs them in a virtual machine that has such devices.
#![cfg(not(loom))]

use ep_transport::conformance::{CHECKS, Member, run};
use std::time::{Duration, Instant};

use ep_transport::{Deadline, Group, Put, Queue, RdmaTransport, Transport, WindowSpec};

/// Each rank is a node of its own; ranks alternate between the two devices.
fn transport(rank: usize) -> RdmaTransport {
    let device = format!("rxe{}", rank % 2);
    RdmaTransport::new().devices(&[&device]).node(rank as u64)
}

fn threads(make: impl Fn(usize) -> RdmaTransport) -> impl Fn(usize) -> Vec<Member> {
    move |world| {
        let groups = Group::local(world).unwrap().into_iter();
        let member = |group: Group| (group.rank(), group);
        groups
            .map(member)
            .map(|(rank, group)| (group, Box::new(make(rank)) as Box<dyn Transport>))
            .collect()
    }
}

/// Runs every check and says how long each took.
fn all_checks(make: impl Fn(usize) -> Vec<Member> + Copy) {
    let mut wrong = Vec::new();
    for check in CHECKS {
        let start = std::time::Instant::now();
        match run(check.name, make) {
            Ok(()) => println!("{} passed, {:?}", check.name, start.elapsed()),
            Err(error) => {
                println!("{} FAILED, {:?}: {error}", check.name, start.elapsed());
                wrong.push(error);
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
#[ignore = "needs RDMA devices"]
fn threads_pass_every_check() {
    all_checks(&threads(transport));
}

#[test]
#[ignore = "needs RDMA devices; measures latency"]
fn ping_pong() {
    const ROUNDS: usize = 300;
    let spec = WindowSpec { bytes: 1 << 20, flags: 1 };
    let start = Instant::now();
    std::thread::scope(|scope| {
        for group in Group::local(2).unwrap() {
            scope.spawn(move || {
                let (rank, queue) = (group.rank(), Queue::host());
                let limit = || Deadline::after(Duration::from_secs(20));
                let link = transport(rank).open(&group, spec, limit()).unwrap();
                println!("open: {:?}", start.elapsed());
                for bytes in [0, 1024, 65536, 1 << 20] {
                    let start = Instant::now();
                    for _ in 0..ROUNDS {
                        for turn in 0..2 {
                            if turn == rank {
                                let put = Put { peer: 1 - rank, from: 0, to: 0, bytes };
                                link.put(&queue, put).unwrap();
                                link.signal(&queue, 1 - rank, 0).unwrap();
                            } else {
                                link.wait(&queue, "ping", &[1 - rank], 0, limit()).unwrap();
                            }
                        }
                    }
                    let took = start.elapsed() / (2 * ROUNDS as u32);
                    if rank == 0 {
                        println!("{bytes} bytes one way: {took:?}");
                    }
                }
                link.flush(&queue, limit()).unwrap();
            });
        }
    });
}
