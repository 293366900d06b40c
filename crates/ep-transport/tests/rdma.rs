//! RDMA on real verbs. These tests need two RDMA devices that reach each other, `rxe0` and `rxe1`;
//! `cargo xtask test --only rdma` runs them in a virtual machine that has such devices.
#![cfg(not(loom))]

use ep_transport::conformance::{CHECKS, Member, run};
use ep_transport::{Group, RdmaTransport, Transport};

/// Each rank is a node of its own; ranks alternate between the two devices.
fn transport(rank: usize) -> RdmaTransport {
    let device = format!("rxe{}", rank % 2);
    RdmaTransport::new().devices(&[&device]).node(rank as u64)
}

fn threads(make: impl Fn(usize) -> RdmaTransport) -> impl Fn(usize) -> Vec<Member> {
    move |world| {
        let groups = Group::local(world).unwrap().into_iter();
        let member =
            |group: Group| (group.rank(), group);
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
