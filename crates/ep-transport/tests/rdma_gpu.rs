//! RDMA with windows of GPUs, on real verbs. These tests need the devices `rxe0` and `rxe1`, as those
//! of `tests/rdma.rs` do, and a GPU, for which the project's emulator of one will do: soft-RoCE takes
//! no dma-buf, so the windows are in page-locked memory of the host either way. Without libcuda each
//! says so and passes; with it, whatever else is missing is a failure.
//!
//! ```sh
//! cargo xtask rdma-vm -e LD_LIBRARY_PATH=/gpu -f EMULATOR/libcuda.so.1:/gpu/libcuda.so.1 -- \
//!     TARGET/deps/rdma_gpu-... --include-ignored --test-threads 1
//! ```
#![cfg(not(loom))]

use std::time::{Duration, Instant};

use ep_transport::conformance::{CHECKS, Member, run_members};
use ep_transport::{Deadline, Group, Memory, RdmaTransport, Reach, Transport, WindowSpec};

const LIMIT: Duration = Duration::from_secs(60);

/// Whether there is a driver of GPUs. With one, whatever else is missing is a failure.
fn gpu() -> bool {
    let there = RdmaTransport::new().cuda(0).open(
        &Group::local(1).unwrap().remove(0),
        WindowSpec { bytes: 4096, flags: 1 },
        Deadline::after(LIMIT),
    );
    let Err(why) = there else { return true };
    let why = why.to_string();
    assert!(why.contains("libcuda.so.1 cannot be opened"), "{why}");
    eprintln!("skipped: {why}");
    false
}

/// Ranks that alternate between the two devices. They are all on one host: that they do not map each
/// other's windows is because those are on GPUs.
fn members(world: usize) -> Vec<Member> {
    let make = |group: Group| -> Member {
        let device = format!("rxe{}", group.rank() % 2);
        (group, Box::new(RdmaTransport::new().devices(&[&device]).cuda(0)))
    };
    Group::local(world).unwrap().into_iter().map(make).collect()
}

#[test]
#[ignore = "needs RDMA devices and a GPU"]
fn windows_of_gpus_pass_every_check() {
    if !gpu() {
        return;
    }
    let mut wrong = Vec::new();
    for check in CHECKS {
        let start = Instant::now();
        let outcome = run_members(check.name, members(3), LIMIT);
        println!("{}: {:?}, {outcome:?}", check.name, start.elapsed());
        wrong.extend(outcome.err());
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
#[ignore = "needs RDMA devices and a GPU"]
fn ranks_of_one_host_do_not_map_windows_of_gpus() {
    if !gpu() {
        return;
    }
    std::thread::scope(|scope| {
        for (group, transport) in members(2) {
            scope.spawn(move || {
                let spec = WindowSpec { bytes: 10_000, flags: 1 };
                let link = transport.open(&group, spec, Deadline::after(LIMIT)).unwrap();
                assert_eq!(link.memory(), Memory::Cuda { ordinal: 0 });
                assert!(matches!(link.reach(1 - group.rank()), Reach::Bulk));
                assert!(matches!(link.reach(group.rank()), Reach::Direct(_)));
                group.barrier().unwrap();
            });
        }
    });
}

/// Windows are on GPUs on all ranks or on none.
#[test]
#[ignore = "needs RDMA devices and a GPU"]
fn hosts_and_gpus_do_not_mix() {
    if !gpu() {
        return;
    }
    let mut mixed = members(2);
    mixed[0].1 = Box::new(RdmaTransport::new().devices(&["rxe0"]).node(0));
    let text = run_members("zero_length_puts", mixed, LIMIT).unwrap_err();
    assert!(text.contains("windows on GPUs"), "{text}");
}
