//! Rank 0's listener, and how names become addresses.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Duration;

use super::Rendezvous;
use crate::tcp::explained;
use crate::{Deadline, Result};

/// How long a name that does not resolve is tried again: it may be new.
const RESOLVE: Duration = Duration::from_secs(10);
/// How long a port in use is tried again: the group before may be ending.
const IN_USE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(50);

/// The addresses of the rendezvous.
pub(super) fn resolve(at: &Rendezvous, deadline: Deadline) -> Result<Vec<SocketAddr>> {
    if let Ok(ip) = at.host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, at.port)]);
    }
    let until = Deadline::after(deadline.remaining().min(RESOLVE));
    loop {
        // Resolving has no time-out of its own: a thread that hangs is left behind.
        let (tell, told) = mpsc::sync_channel(1);
        let target = (at.host.clone(), at.port);
        let thread = std::thread::Builder::new().name("ep-resolve".into()).spawn(move || {
            let found = target.to_socket_addrs().map(Vec::from_iter);
            // Nobody listens once the caller's time is up.
            let _ = tell.send(found);
        });
        let found = thread.map_err(|e| e.to_string()).and_then(|_| {
            match told.recv_timeout(until.remaining()) {
                Ok(found) => found.map_err(|e| e.to_string()),
                Err(_) => Err("the resolver does not answer".into()),
            }
        });
        let why = match found {
            Ok(found) if !found.is_empty() => return Ok(found),
            Ok(_) => "it has no addresses".into(),
            Err(why) => why,
        };
        if until.remaining() <= PAUSE {
            let detail = format!(
                "the host name {:?} cannot be resolved ({why}): correct EP_RENDEZVOUS or \
                 MASTER_ADDR, or use an IP address",
                at.host
            );
            return Err(at.error(None, detail));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Rank 0 listens: at the address itself if it is an IP address or this host's loopback, else on
/// all interfaces, since a host's own name often resolves to an address that others cannot reach.
pub(super) fn listen(at: &Rendezvous, deadline: Deadline) -> Result<TcpListener> {
    let addresses = resolve(at, deadline)?;
    let exact = at.host.parse::<IpAddr>().is_ok() || at.host == "localhost";
    let mut tries = if exact { addresses } else { Vec::new() };
    tries.push((Ipv6Addr::UNSPECIFIED, at.port).into());
    tries.push((Ipv4Addr::UNSPECIFIED, at.port).into());
    let until = Deadline::after(deadline.remaining().min(IN_USE));
    loop {
        let mut failure = None;
        for address in &tries {
            match TcpListener::bind(address) {
                Ok(listener) => return Ok(listener),
                Err(e) if e.kind() == ErrorKind::AddrInUse => {
                    failure = Some(e);
                    break;
                }
                Err(e) => failure = Some(e),
            }
        }
        let failure = failure.expect("there is an address to try");
        let in_use = failure.kind() == ErrorKind::AddrInUse;
        if in_use && until.remaining() > PAUSE {
            std::thread::sleep(PAUSE);
            continue;
        }
        let detail = if in_use {
            format!(
                "port {} is in use on rank 0's host: another job may be meeting there; set \
                 EP_RENDEZVOUS to another port on all ranks",
                at.port
            )
        } else {
            format!("rank 0 cannot listen here ({})", explained(&failure))
        };
        return Err(at.error(Some(0), detail));
    }
}

/// Where rank 0 itself reaches `listener`.
pub(super) fn own(listener: &TcpListener) -> std::io::Result<Vec<SocketAddr>> {
    let address = listener.local_addr()?;
    let port = address.port();
    Ok(match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => vec![(Ipv4Addr::LOCALHOST, port).into()],
        IpAddr::V6(ip) if ip.is_unspecified() => {
            vec![(Ipv4Addr::LOCALHOST, port).into(), (Ipv6Addr::LOCALHOST, port).into()]
        }
        _ => vec![address],
    })
}
