//! Peers that are killed and peers that stop: both are named within the deadline.
//!
//! The test starts a copy of this very binary as rank 1; the environment tells it that it is one.

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ep_runtime::{
    Deadline, Group, Link, Put, Queue, Rendezvous, Transport, TransportError, WindowSpec,
};
use tcp_transport::TcpTransport;

/// More than the system takes off a sender's hands.
const SPEC: WindowSpec = WindowSpec { bytes: 64 << 20, flags: 2 };
const SOON: Duration = Duration::from_secs(60);
const QUEUE: Queue = Queue::host();
const COPY: &str = "TCP_TRANSPORT_TEST_COPY";

fn open(rendezvous: &Rendezvous) -> (Group, Arc<dyn Link>) {
    let group = Group::from_env(rendezvous).expect("a group");
    let transport = TcpTransport::at(Ipv4Addr::LOCALHOST.into());
    let link = transport.open(&group, SPEC, Deadline::after(SOON)).expect("a link");
    (group, link)
}

/// Not a test of its own: what the copy runs, until it is killed.
#[test]
fn copy_of_this_binary() {
    if std::env::var_os(COPY).is_some() {
        let (_group, link) = open(&Rendezvous::from_env().expect("the test's environment"));
        link.signal(&QUEUE, 0, 0).expect("rank 0 is there");
        std::thread::sleep(SOON);
    }
}

struct Peer(Child);

impl Peer {
    fn send(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.0.id().to_string()]).status();
        assert!(sent.expect("kill runs").success());
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn with_a_peer(test: impl FnOnce(&Peer, &dyn Link)) {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|l| l.local_addr());
    let address = free.expect("a free port").to_string();
    let copy = Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", "copy_of_this_binary"])
        .env(COPY, "1")
        .env("EP_RENDEZVOUS", &address)
        .env("EP_JOB_TOKEN", format!("dead peers {address}"))
        .env("EP_RANK", "1")
        .env("EP_WORLD", "2")
        .spawn();
    let peer = Peer(copy.expect("a copy starts"));
    let rendezvous = Rendezvous::new(0, 2, &address).expect("an address");
    let token = rendezvous.with_token(format!("dead peers {address}"));
    let (_group, link) = open(&token.expect("a short token"));
    link.wait(&QUEUE, "test", &[1], 0, Deadline::after(SOON)).expect("the copy signals");
    test(&peer, &*link);
    // Whatever is still queued for a dead peer does not hold up who leaves.
    let began = Instant::now();
    drop(link);
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_killed_peer_is_named_at_once() {
    with_a_peer(|peer, link| {
        let killer = || {
            std::thread::sleep(Duration::from_millis(100));
            peer.send("-KILL");
        };
        std::thread::scope(|scope| {
            scope.spawn(killer);
            let waited = link.wait(&QUEUE, "test", &[1], 1, Deadline::after(SOON));
            assert!(matches!(waited, Err(TransportError::PeerLost { peer: 1, .. })), "{waited:?}");
        });
        let began = Instant::now();
        let refused = loop {
            match link.signal(&QUEUE, 1, 1) {
                Err(error) => break error,
                Ok(()) => assert!(began.elapsed() < SOON, "signals to a dead peer"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(matches!(refused, TransportError::PeerLost { peer: 1, .. }), "{refused:?}");
    });
}

#[test]
fn a_stopped_peer_is_named_when_the_time_is_over() {
    with_a_peer(|peer, link| {
        peer.send("-STOP");
        let (began, limit) = (Instant::now(), Duration::from_millis(300));
        // Neither waits for the peer.
        link.put(&QUEUE, Put { peer: 1, from: 0, to: 0, bytes: SPEC.bytes }).expect("queued");
        link.signal(&QUEUE, 1, 1).expect("queued");
        for late in [
            link.flush(&QUEUE, Deadline::after(limit)),
            link.wait(&QUEUE, "test", &[1], 1, Deadline::after(limit)),
        ] {
            let named =
                matches!(&late, Err(TransportError::Timeout { peers, .. }) if peers == &[1]);
            assert!(named, "{late:?}");
        }
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    });
}
