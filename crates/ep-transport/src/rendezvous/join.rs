//! A rank's way into its group.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::Rendezvous;
use super::listen::{listen, own, resolve};
use crate::tcp::client::Conn;
use crate::tcp::control::TcpControl;
use crate::tcp::wire::{Decoder, MAX_HELLO, Message, encode};
use crate::tcp::{configure, explained, moment, server};
use crate::{Deadline, Group, Result, TransportError};

/// How long connecting to one address may take before the next is tried.
const CONNECT: Duration = Duration::from_secs(3);
/// How long a hub may take to say that it has heard.
const HEARD: Duration = Duration::from_secs(5);
/// How long after its deadline a rank waits for the hub's verdict.
const GRACE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(20);
const MAX_PAUSE: Duration = Duration::from_millis(250);
/// Names are resolved again this often while nobody answers.
const RESOLVE_AGAIN: Duration = Duration::from_secs(2);

pub(super) fn from_env(at: &Rendezvous) -> Result<Group> {
    let deadline = Deadline::after(at.timeout);
    if at.rank != 0 {
        return join(at, None, deadline);
    }
    let listener = listen(at, deadline)?;
    let own = own(&listener).map_err(|e| at.error(Some(0), format!("no local address ({e})")))?;
    server::spawn(listener, at.world, at.token.clone().into_bytes(), at.timeout)?;
    join(at, Some(own), deadline)
}

/// Why an attempt did not lead into the group.
enum Refusal {
    /// Another attempt may.
    Again(String),
    /// None will.
    Final(TransportError),
}

/// Joins the group whose hub is at one of `addresses`, or where the rendezvous' name leads.
pub(super) fn join(
    at: &Rendezvous,
    addresses: Option<Vec<SocketAddr>>,
    deadline: Deadline,
) -> Result<Group> {
    let fixed = addresses.is_some();
    let mut addresses = match addresses {
        Some(addresses) => addresses,
        None => resolve(at, deadline)?,
    };
    let (mut resolved, mut pause) = (Instant::now(), PAUSE);
    loop {
        let mut last = String::from("it has no address");
        for &address in &addresses {
            match attempt(at, address, deadline) {
                Ok(group) => return Ok(group),
                Err(Refusal::Final(error)) => {
                    // Of several addresses one may be another machine's.
                    let stranger = error.peer().is_none() && fixed && addresses.len() > 1;
                    if !stranger {
                        return Err(error);
                    }
                    last = error.to_string();
                }
                Err(Refusal::Again(why)) => last = why,
            }
        }
        if deadline.remaining() <= pause {
            let detail = format!(
                "rank 0 is not to be found there after {:?} ({last}): check that rank 0 was \
                 started, that its address is right and reachable, and that no rank was started \
                 twice",
                deadline.length()
            );
            return Err(at.error(Some(0), detail));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(MAX_PAUSE);
        if !fixed && resolved.elapsed() >= RESOLVE_AGAIN {
            if let Ok(found) = resolve(at, Deadline::after(deadline.remaining().min(CONNECT))) {
                addresses = found;
            }
            resolved = Instant::now();
        }
    }
}

fn attempt(
    at: &Rendezvous,
    address: SocketAddr,
    deadline: Deadline,
) -> std::result::Result<Group, Refusal> {
    let again = |e: io::Error| match Errno::from_io_error(&e) {
        // Trying again would only hide it behind "not to be found".
        Some(Errno::MFILE | Errno::NFILE) => Refusal::Final(unusable(at, &e)),
        _ => Refusal::Again(format!("{address}: {e}")),
    };
    let limit = deadline.remaining().clamp(Duration::from_millis(1), CONNECT);
    let mut stream = TcpStream::connect_timeout(&address, limit).map_err(again)?;
    if stream.local_addr().map_err(again)? == address {
        // Nobody listened, and the kernel picked the very port it connected to.
        return Err(Refusal::Again(format!("{address}: nobody listens")));
    }
    configure(&stream);
    let wait_ms = u64::try_from(deadline.remaining().as_millis()).unwrap_or(u64::MAX);
    let hello = Message::Hello { rank: at.rank as u32, world: at.world as u32, wait_ms };
    stream.set_write_timeout(Some(limit)).map_err(again)?;
    stream.write_all(&encode(&hello, at.token.as_bytes())).map_err(again)?;
    let mut decoder = Decoder::new(MAX_HELLO * 2);
    verdict(at, &mut stream, &mut decoder, deadline)?;
    let conn = Conn::start(stream, decoder, at.rank, at.world)
        .map_err(|e| Refusal::Final(unusable(at, &e)))?;
    let (control, health) = TcpControl::world(conn, at.world);
    Ok(Group::from_parts(at.rank, at.world, at.timeout, Box::new(control), health))
}

/// Waits until the hub says that the group is complete.
fn verdict(
    at: &Rendezvous,
    stream: &mut TcpStream,
    decoder: &mut Decoder,
    deadline: Deadline,
) -> std::result::Result<(), Refusal> {
    let mut until = Instant::now() + deadline.remaining().min(HEARD) + GRACE;
    let mut heard = false;
    loop {
        while let Some(frame) =
            decoder.next().map_err(|what| Refusal::Final(stranger(at, &what)))?
        {
            match frame.message {
                Message::Heard => {
                    heard = true;
                    until = moment(deadline, GRACE);
                }
                Message::Welcome => return Ok(()),
                Message::Refused { peer, detail } => {
                    return Err(Refusal::Final(at.error(peer.map(|p| p as usize), detail)));
                }
                _ => return Err(Refusal::Final(stranger(at, "it answers out of turn"))),
            }
        }
        let left = until.saturating_duration_since(Instant::now());
        let read = if left.is_zero() {
            Err(io::ErrorKind::TimedOut.into())
        } else {
            stream.set_read_timeout(Some(left)).and_then(|()| decoder.read(stream, 4096))
        };
        let why = match read {
            Ok(0) => "it closed the connection".to_owned(),
            Ok(_) => continue,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                "it does not answer".to_owned()
            }
            Err(e) => format!("its connection failed ({e})"),
        };
        // A connection may have reached a listener that was just closing.
        return Err(if heard {
            let detail = format!("rank 0's process has died or hangs: {why}");
            Refusal::Final(at.error(Some(0), detail))
        } else {
            Refusal::Again(why)
        });
    }
}

/// This rank's own process cannot go on.
fn unusable(at: &Rendezvous, e: &io::Error) -> TransportError {
    let detail = format!("rank {} cannot use its connection: {}", at.rank, explained(e));
    at.error(Some(at.rank), detail)
}

fn stranger(at: &Rendezvous, what: &str) -> TransportError {
    let detail = format!(
        "what listens there is no rendezvous of this library and version ({what}): set \
         EP_RENDEZVOUS to a free port of rank 0's host"
    );
    at.error(None, detail)
}
