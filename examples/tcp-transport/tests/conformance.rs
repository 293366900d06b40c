//! The suite every transport has to pass, over loopback.

use std::net::Ipv4Addr;

use ep_runtime::{Group, Transport};
use ep_transport::conformance::Member;
use tcp_transport::TcpTransport;

fn members(world: usize) -> Vec<Member> {
    let member = |group| {
        (group, Box::new(TcpTransport::at(Ipv4Addr::LOCALHOST.into())) as Box<dyn Transport>)
    };
    Group::local(world).expect("a local group").into_iter().map(member).collect()
}

ep_transport::conformance_suite!(members);
