//! The hub's thread: sockets around the state machine of [`hub`](super::hub).

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::hub::{Action, ConnId, Event, Hub};
use super::wire::{Decoder, MAX_HELLO};
use super::{Bytes, configure, explained};
use crate::{Result, TransportError};

/// How much is read from one connection before the next has its turn.
const CHUNK: usize = 64 << 10;
const CHUNKS: usize = 16;
/// How long a connection that was turned away may take to read why.
const LINGER: Duration = Duration::from_secs(1);
/// How long accepting pauses when the process has no file descriptor left.
const PAUSE: Duration = Duration::from_millis(20);

/// Starts a hub for `world` ranks on `listener`.
pub(crate) fn spawn(
    listener: TcpListener,
    world: usize,
    token: Vec<u8>,
    wait: Duration,
) -> Result<()> {
    let os = |detail: &'static str| {
        move |e: io::Error| TransportError::Os {
            op: "rendezvous",
            peer: None,
            code: e.raw_os_error().unwrap_or(0),
            detail: detail.into(),
        }
    };
    listener.set_nonblocking(true).map_err(os("making the listener non-blocking"))?;
    let hub = Hub::new(world, token, Instant::now(), wait);
    let server =
        Server { hub, listener: Some(listener), sockets: BTreeMap::new(), next: 0, pause: None };
    std::thread::Builder::new()
        .name("ep-hub".into())
        .spawn(move || server.run())
        .map_err(os("starting the rendezvous thread"))?;
    Ok(())
}

#[derive(Debug)]
struct Socket {
    stream: TcpStream,
    decoder: Decoder,
    /// What is to be sent, and how much of the first frame has been.
    queue: VecDeque<Bytes>,
    sent: usize,
    /// The time to drop it, once it is being closed.
    closing: Option<Instant>,
    half_closed: bool,
}

#[derive(Debug)]
struct Server {
    hub: Hub,
    listener: Option<TcpListener>,
    sockets: BTreeMap<ConnId, Socket>,
    next: ConnId,
    /// No accepting until then.
    pause: Option<Instant>,
}

impl Server {
    fn run(mut self) {
        while !(self.hub.done() && self.sockets.is_empty()) {
            if !self.hub.listening() {
                // Free the port: another group may form at this address while this one lives.
                self.listener = None;
            }
            let (accept, ready) = self.poll();
            if accept {
                self.accept();
            }
            for conn in ready {
                self.receive(conn);
                self.flush(conn);
            }
            let now = Instant::now();
            let actions = self.hub.tick(now);
            self.apply(actions);
            self.sockets.retain(|_, socket| socket.closing.is_none_or(|until| now < until));
        }
    }

    /// Waits for something to do: whether to accept, and the connections to look at.
    fn poll(&mut self) -> (bool, Vec<ConnId>) {
        let now = Instant::now();
        self.pause = self.pause.filter(|&until| now < until);
        let listener = self.listener.as_ref().filter(|_| self.pause.is_none());
        let mut fds: Vec<PollFd<'_>> =
            listener.iter().map(|l| PollFd::new(*l, PollFlags::IN)).collect();
        for socket in self.sockets.values() {
            let out = if socket.queue.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            fds.push(PollFd::new(&socket.stream, PollFlags::IN | out));
        }
        let closing = self.sockets.values().filter_map(|socket| socket.closing).min();
        let wake = self.hub.next_deadline().into_iter().chain(closing).chain(self.pause).min();
        // Rounded up, so that what is due then is due.
        let timeout = wake.map(|wake| {
            let wait = wake.saturating_duration_since(now) + Duration::from_millis(1);
            let wait = wait.min(Duration::from_secs(3600));
            rustix::event::Timespec::try_from(wait).expect("an hour at most")
        });
        if poll(&mut fds, timeout.as_ref()).is_err() {
            // EINTR, or a passing shortage of memory.
            std::thread::sleep(Duration::from_millis(1));
            return (false, Vec::new());
        }
        let offset = usize::from(listener.is_some());
        let accept = offset == 1 && !fds[0].revents().is_empty();
        let ready = self.sockets.keys().zip(&fds[offset..]);
        let ready = ready.filter(|(_, fd)| !fd.revents().is_empty()).map(|(conn, _)| *conn);
        (accept, ready.collect())
    }

    fn accept(&mut self) {
        while let Some(listener) = self.listener.as_ref().filter(|_| self.hub.listening()) {
            match listener.accept() {
                Ok((stream, _)) => {
                    if stream.set_nonblocking(true).is_err() {
                        continue;
                    }
                    configure(&stream);
                    let conn = self.next;
                    self.next += 1;
                    self.sockets.insert(conn, Socket::new(stream));
                    let actions = self.hub.handle(Instant::now(), conn, Event::Accepted);
                    self.apply(actions);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if shortage(&e).is_some() && !waits(listener) => return,
                Err(e) if let Some(why) = shortage(&e) => {
                    // It may pass: the hub says when it has lasted too long.
                    let now = Instant::now();
                    self.pause = Some(now + PAUSE);
                    let actions = self.hub.handle(now, self.next, Event::Unaccepted(why));
                    return self.apply(actions);
                }
                // The connection, not the listener, has failed.
                Err(_) => {}
            }
        }
    }

    fn receive(&mut self, conn: ConnId) {
        for _ in 0..CHUNKS {
            let Some(socket) = self.sockets.get_mut(&conn) else { return };
            let event = match socket.decoder.read(&mut socket.stream, CHUNK) {
                Ok(0) if socket.decoder.midway() => {
                    Event::Closed("its connection ended midway".into())
                }
                Ok(0) => Event::Closed("its connection was closed".into()),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => Event::Closed(format!("its connection failed ({e})")),
                Ok(_) if socket.closing.is_some() => {
                    socket.decoder = Decoder::new(MAX_HELLO);
                    continue;
                }
                Ok(_) => {
                    self.frames(conn);
                    continue;
                }
            };
            self.sockets.remove(&conn);
            let actions = self.hub.handle(Instant::now(), conn, event);
            return self.apply(actions);
        }
    }

    fn frames(&mut self, conn: ConnId) {
        while let Some(socket) = self.sockets.get_mut(&conn).filter(|s| s.closing.is_none()) {
            let event = match socket.decoder.next() {
                Ok(None) => return,
                Ok(Some(frame)) => Event::Frame(frame),
                Err(what) => Event::Malformed(what),
            };
            let actions = self.hub.handle(Instant::now(), conn, event);
            if let Some(socket) = self.sockets.get_mut(&conn)
                && self.hub.trusts(conn)
            {
                socket.decoder.trust();
            }
            self.apply(actions);
        }
    }

    fn apply(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Send(conn, frame) => {
                    if let Some(socket) = self.sockets.get_mut(&conn) {
                        socket.queue.push_back(frame);
                        self.flush(conn);
                    }
                }
                Action::Close(conn) => {
                    if let Some(socket) = self.sockets.get_mut(&conn) {
                        socket.closing.get_or_insert_with(|| Instant::now() + LINGER);
                        self.flush(conn);
                    }
                }
            }
        }
    }

    /// Sends what fits. A failed connection is left for [`Server::receive`] to notice.
    fn flush(&mut self, conn: ConnId) {
        let Some(socket) = self.sockets.get_mut(&conn) else { return };
        while let Some(frame) = socket.queue.front() {
            match socket.stream.write(&frame[socket.sent..]) {
                Ok(n) => socket.sent += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    socket.queue.clear();
                    break;
                }
            }
            if socket.sent == frame.len() {
                socket.queue.pop_front();
                socket.sent = 0;
            }
        }
        // Closing at once could reset the connection before the peer has read the last message:
        // end our side and wait (bounded) until the peer ends its own.
        if socket.closing.is_some() && !socket.half_closed {
            socket.half_closed = true;
            // It fails if the peer has closed already, which is fine.
            let _ = socket.stream.shutdown(Shutdown::Write);
        }
    }
}

/// Whether somebody waits to be accepted: without a descriptor to spare the kernel fails before it
/// looks.
fn waits(listener: &TcpListener) -> bool {
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    // If it cannot be told, somebody does.
    !poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&now)).is_ok_and(|n| n == 0)
}

/// What a failure to accept means and what to do, if it is the machine's and not the connection's.
fn shortage(e: &io::Error) -> Option<String> {
    let errno = Errno::from_io_error(e)?;
    matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
        .then(|| format!("rank 0's process cannot accept more ranks: {}", explained(e)))
}

impl Socket {
    fn new(stream: TcpStream) -> Self {
        let (decoder, queue) = (Decoder::new(MAX_HELLO), VecDeque::new());
        Self { stream, decoder, queue, sent: 0, closing: None, half_closed: false }
    }
}
