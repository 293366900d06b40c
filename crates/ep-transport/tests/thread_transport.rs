//! The thread transport against the conformance suite, with direct and with bulk peers.
#![cfg(not(loom))]

use ep_transport::conformance::Member;
use ep_transport::{Group, ThreadTransport, Transport};

fn members(world: usize, bulk: bool) -> Vec<Member> {
    let transport = || Box::new(ThreadTransport::new().bulk(bulk)) as Box<dyn Transport>;
    Group::local(world).unwrap().into_iter().map(|group| (group, transport())).collect()
}

mod direct {
    ep_transport::conformance_suite!(|world| super::members(world, false));
}

mod bulk {
    ep_transport::conformance_suite!(|world| super::members(world, true));
}

/// Direct and bulk peers in one group.
mod nodes {
    use ep_transport::conformance::Member;
    use ep_transport::{Group, ThreadTransport, Transport};

    fn members(world: usize) -> Vec<Member> {
        let sizes = [world.div_ceil(2), world / 2];
        let transport = || Box::new(ThreadTransport::new().nodes(&sizes)) as Box<dyn Transport>;
        Group::local(world).unwrap().into_iter().map(|group| (group, transport())).collect()
    }

    ep_transport::conformance_suite!(super::nodes::members);
}
