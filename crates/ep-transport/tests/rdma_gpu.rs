//! RDMA with windows of GPUs, on real verbs. These tests need the devices `rxe0` and `rxe1`, as those
//! of `tests/rdma.rs` do, and GPUs, for which the project's emulated ones will do: `cargo xtask test
//! --only rdma` runs them in a virtual machine that has both. Soft-RoCE takes no dma-buf, so the windows
//! are in page-locked memory of the host there. Without libcuda each says so and passes; with it, whatever
//! else is missing is a failure.
#![cfg(not(loom))]

use std::time::{Duration, Instant};

use ep_transport::conformance::{CHECKS, Member, Queues, run_members, run_members_on};
use ep_transport::{
    Deadline, Group, Memory, NvlinkTransport, RdmaTransport, Reach, Transport, WindowSpec,
};

const LIMIT: Duration = Duration::from_secs(60);
/// The checks that differ most from those over a simulated fabric, which is seen to pass them all; with
/// `EP_TEST_ALL` all are made here too.
const VERBS: [&str; 4] = [
    "data_before_signal_is_visible",
    "sources_may_change_after_flush",
    "lost_peers_are_named_promptly",
    "signals_outlive_their_source",
];
const SPEC: WindowSpec = WindowSpec { bytes: 10_000, flags: 1 };

/// Whether there is a driver of GPUs. With one, whatever else is missing is a failure.
fn gpu() -> bool {
    let group = Group::local(1).unwrap().remove(0);
    let there = NvlinkTransport::new(0).open(&group, SPEC, Deadline::after(LIMIT));
    let Err(why) = there else { return true };
    let why = why.to_string();
    assert!(why.contains("libcuda.so.1"), "{why}");
    eprintln!("skipped: {why}");
    false
}

/// Ranks in nodes of `per_node`, each node with a GPU and one of the two devices.
fn members(world: usize, per_node: usize) -> Vec<Member> {
    let make = |group: Group| -> Member {
        let node = group.rank() / per_node;
        let device = format!("rxe{}", node % 2);
        let transport = RdmaTransport::new().devices(&[&device]).node(node as u64).cuda(node);
        // With an emulated CPU a peer may not run for long: packets have three seconds.
        (group, Box::new(transport.ack_timeout(17)))
    };
    Group::local(world).unwrap().into_iter().map(make).collect()
}

#[test]
#[ignore = "needs RDMA devices and GPUs"]
fn a_node_of_two_and_a_lone_rank_pass_checks_on_streams() {
    if !gpu() {
        return;
    }
    let mut wrong = Vec::new();
    let all = std::env::var_os("EP_TEST_ALL").is_some();
    for check in CHECKS.iter().filter(|check| all || VERBS.contains(&check.name)) {
        let start = Instant::now();
        let outcome = run_members_on(check.name, members(3, 2), LIMIT, Queues::Streams);
        println!("{}: {:?}, {outcome:?}", check.name, start.elapsed());
        wrong.extend(outcome.err());
    }
    assert!(VERBS.iter().all(|name| CHECKS.iter().any(|check| check.name == *name)));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
#[ignore = "needs RDMA devices and GPUs"]
fn ranks_of_a_node_map_each_other_and_no_others() {
    if !gpu() {
        return;
    }
    std::thread::scope(|scope| {
        for (group, transport) in members(4, 2) {
            scope.spawn(move || {
                let link = transport.open(&group, SPEC, Deadline::after(LIMIT)).unwrap();
                let rank = group.rank();
                assert_eq!(link.memory(), Memory::Cuda { ordinal: rank / 2 });
                let mapped = |peer| matches!(link.reach(peer), Reach::Direct(_));
                let all: Vec<bool> = (0..4).map(mapped).collect();
                assert_eq!(all, (0..4).map(|peer| peer / 2 == rank / 2).collect::<Vec<_>>());
                assert!(link.is_beside(rank ^ 1) && !link.is_beside((rank + 2) % 4));
                group.barrier().unwrap();
            });
        }
    });
}

/// Windows are on GPUs on all ranks or on none.
#[test]
#[ignore = "needs RDMA devices and GPUs"]
fn hosts_and_gpus_do_not_mix() {
    if !gpu() {
        return;
    }
    let mut mixed = members(2, 1);
    mixed[0].1 = Box::new(RdmaTransport::new().devices(&["rxe0"]).node(0));
    let text = run_members("zero_length_puts", mixed, LIMIT).unwrap_err();
    assert!(text.contains("windows on GPUs"), "{text}");
}
