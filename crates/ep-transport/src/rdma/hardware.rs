//! Broken devices on real verbs: what a NIC refuses is an error that names peer, queue pair and
//! status. These tests need the devices `rxe0` and `rxe1`, as those of `tests/rdma.rs` do.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::RdmaTransport;
use super::device::{Completion, Device};
use super::endpoint::Endpoint;
use super::events::Event;
use super::pair::Write;
use crate::{Deadline, ErrorKind, Group, Link, Put, Queue, Result, TransportError, WindowSpec};

const LIMIT: Duration = Duration::from_secs(30);

/// A NIC whose requests are wrong.
#[derive(Debug)]
struct Broken {
    nic: Endpoint,
    /// Changes what is asked of the NIC.
    how: fn(&mut Write),
}

impl Device for Broken {
    unsafe fn write(&mut self, peer: usize, pair: usize, write: &Write) -> Result<()> {
        let mut write = *write;
        (self.how)(&mut write);
        // SAFETY: the caller's promise; a wrong key or address is for the NIC to refuse.
        unsafe { self.nic.write(peer, pair, &write) }
    }

    fn receive(&mut self, peer: usize, pair: usize) -> Result<()> {
        self.nic.receive(peer, pair)
    }

    fn poll(&mut self, into: &mut Vec<Completion>) -> Result<bool> {
        self.nic.poll(into)
    }

    fn sleep(&mut self, bell: BorrowedFd<'_>, bound: Duration) -> Result<bool> {
        self.nic.sleep(bell, bound)
    }

    fn arm(&mut self) -> Result<()> {
        self.nic.arm()
    }

    fn number(&self, peer: usize, pair: usize) -> u32 {
        self.nic.number(peer, pair)
    }

    fn remote(&self, peer: usize, at: usize) -> (u64, u32) {
        self.nic.remote(peer, at)
    }

    fn events(&mut self, into: &mut Vec<Event>) -> Result<()> {
        self.nic.events(into)
    }

    fn local(&self, at: usize) -> (u64, u32) {
        self.nic.local(at)
    }
}

/// Rank 0's requests are wrong; what it and rank 1 get.
fn errors(how: fn(&mut Write)) -> Vec<TransportError> {
    let rank = |group: Group| {
        let rank = group.rank();
        let device = format!("rxe{rank}");
        let transport = RdmaTransport::new().devices(&[&device]).node(rank as u64);
        let spec = WindowSpec { bytes: 1 << 16, flags: 1 };
        let right: fn(&mut Write) = |_| {};
        let how = if rank == 0 { how } else { right };
        let broken = |nic| Broken { nic, how };
        let link = transport.open_on(&group, spec, Deadline::after(LIMIT), broken).unwrap();
        let (queue, deadline) = (Queue::host(), || Deadline::after(LIMIT));
        if rank == 1 {
            return link.wait(&queue, "data", &[0], 0, deadline()).unwrap_err();
        }
        // More than travels within a request, so that keys matter.
        link.put(&queue, Put { peer: 1, from: 0, to: 0, bytes: 4096 }).unwrap();
        let error = link.flush(&queue, deadline()).unwrap_err();
        assert_eq!(link.signal(&queue, 1, 0).unwrap_err().to_string(), error.to_string());
        error
    };
    std::thread::scope(|scope| {
        let groups = Group::local(2).unwrap();
        let ranks: Vec<_> = groups.into_iter().map(|g| scope.spawn(|| rank(g))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn check(how: fn(&mut Write), status: i32, text: &str) {
    let errors = errors(how);
    // Who is to blame: the peer that refuses, or the request.
    let expected =
        if status == 10 { (ErrorKind::PeerLost, Some(1)) } else { (ErrorKind::Device, None) };
    assert_eq!((errors[0].kind(), errors[0].peer()), expected);
    assert_eq!(errors[0].code(), Some(status), "{}", errors[0]);
    for error in errors {
        let said = error.to_string();
        assert!(said.contains(text) && said.contains("queue pair"), "{said}");
        assert!(!error.group_usable());
    }
}

#[test]
#[ignore = "needs RDMA devices"]
fn a_wrong_remote_key_is_refused() {
    check(|write| write.remote_key ^= 0xff00, 10, "remote access error");
}

#[test]
#[ignore = "needs RDMA devices"]
fn memory_beyond_the_peers_region_is_refused() {
    check(|write| write.remote += 1 << 30, 10, "remote access error");
}

#[test]
#[ignore = "needs RDMA devices"]
fn memory_that_is_not_registered_is_refused() {
    check(|write| write.local += 1 << 40, 4, "local protection error");
}

#[test]
#[ignore = "needs RDMA devices"]
fn a_wrong_local_key_is_refused() {
    // rxe has another word for it than hardware.
    check(|write| write.local_key ^= 0xff00, 2, "local QP operation error");
}
