//! A transport over plain TCP, as a crate that is no part of ep-runtime would add it.
//!
//! It needs the standard library and ep-runtime, and shows what [`Transport`] and [`Link`] ask for:
//!
//! * `open` is collective: compare what everyone wants, exchange addresses through the group,
//!   connect, and succeed on all ranks or on none.
//! * `put` and `signal` return at once. A thread per peer sends what they queue, in order, straight
//!   from the window; that TCP keeps this order is all that [`Link`]'s order needs here.
//! * `flush` and `wait` are where a rank may have to wait, so they have deadlines, and end early
//!   where they cannot end well: the peer's connection has ended or the group has failed.
//!
//! It is made to be read: it copies through the kernel, knows no GPU, and trusts its network.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::ptr::NonNull;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ep_runtime::{
    Deadline, Group, Link, Mapping, Put, Queue, Reach, Transport, TransportError, WindowSpec,
};

type Result<T> = std::result::Result<T, TransportError>;

/// How often a wait looks whether the group has failed.
const LOOK: Duration = Duration::from_millis(10);
/// How long closing a link waits for peers to take what was sent to them.
const LINGER: Duration = Duration::from_secs(2);
/// How long a connection may take to say whose it is.
const GREETING: Duration = Duration::from_secs(1);

/// Windows in ordinary memory, reached over TCP connections between all pairs of ranks.
#[derive(Clone, Debug)]
pub struct TcpTransport {
    address: IpAddr,
}

impl TcpTransport {
    /// Peers reach this rank at `address`, which belongs to an interface of its host.
    pub fn at(address: IpAddr) -> Self {
        Self { address }
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn open(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Arc<dyn Link>> {
        spec.agree(group, self.name(), deadline)?;
        // The others would wait for a rank that gives up here; it tells them.
        let link = self.connect(group, spec, deadline).inspect_err(|error| group.report(error))?;
        group.all_gather_within("open", &[], deadline)?;
        Ok(Arc::new(link))
    }
}

impl TcpTransport {
    fn connect(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<TcpLink> {
        let window = Window::new(spec.bytes)?;
        let listen = |e| failed("open", None, format!("cannot listen at {}", self.address), e);
        let listener = TcpListener::bind((self.address, 0)).map_err(listen)?;
        // Only who is of the group knows the key.
        let key = RandomState::new().hash_one(group.rank());
        let card = format!("{} {key}", listener.local_addr().map_err(listen)?);
        let cards = group.all_gather_within("open", card.as_bytes(), deadline)?;

        let mut streams: Streams = (0..group.world()).map(|_| None).collect();
        for (peer, card) in cards[..group.rank()].iter().enumerate() {
            streams[peer] = Some(call(group.rank(), peer, card, deadline)?);
        }
        accept(group, (listener, key), &mut streams, deadline)?;
        TcpLink::new(group, spec.flags, window, streams)
    }
}

/// Connects to `peer` and says who calls.
fn call(rank: usize, peer: usize, card: &[u8], deadline: Deadline) -> Result<TcpStream> {
    let card = String::from_utf8_lossy(card).into_owned();
    let greet = || {
        let (address, key) = card.split_once(' ').ok_or(io::ErrorKind::InvalidData)?;
        let address = address.parse().map_err(io::Error::other)?;
        let stream = TcpStream::connect_timeout(&address, deadline.remaining())?;
        let key = key.parse().map_err(io::Error::other)?;
        (&stream).write_all(&pair(rank as u64, key))?;
        Ok(stream)
    };
    greet().map_err(|e| failed("open", Some(peer), format!("rank {peer} at {card}"), e))
}

/// By rank; none for this one.
type Streams = Vec<Option<TcpStream>>;

/// Takes the calls of all higher ranks, who know the key.
fn accept(group: &Group, at: (TcpListener, u64), to: &mut Streams, by: Deadline) -> Result<()> {
    let (listener, key) = at;
    let listen = |e| failed("open", None, "cannot accept connections".into(), e);
    listener.set_nonblocking(true).map_err(listen)?;
    loop {
        let higher = group.rank() + 1..group.world();
        let missing: Vec<usize> = higher.filter(|&peer| to[peer].is_none()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        match listener.accept() {
            Ok((stream, _)) => match greeted(&stream, key) {
                Ok(peer) if missing.contains(&peer) => to[peer] = Some(stream),
                // A stranger is sent away.
                _ => {}
            },
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                group.health().check_waiting("open", &missing)?;
                if by.expired() {
                    return Err(late("open", missing, by));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(e) => return Err(listen(e)),
        }
    }
}

/// Who is calling.
fn greeted(stream: &TcpStream, key: u64) -> io::Result<usize> {
    stream.set_read_timeout(Some(GREETING))?;
    let mut greeting = [0; 16];
    (&*stream).read_exact(&mut greeting)?;
    stream.set_read_timeout(None)?;
    let (rank, theirs) = unpair(greeting);
    if theirs == key { Ok(rank as usize) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

/// What goes over a connection is a sequence of two numbers: where a put goes and how long it is,
/// followed by its bytes; or a flag and this.
const SIGNAL: u64 = u64::MAX;

fn pair(a: u64, b: u64) -> [u8; 16] {
    (u128::from(b) << 64 | u128::from(a)).to_le_bytes()
}

fn unpair(bytes: [u8; 16]) -> (u64, u64) {
    let both = u128::from_le_bytes(bytes);
    (both as u64, (both >> 64) as u64)
}

fn failed(op: &'static str, peer: Option<usize>, detail: String, e: io::Error) -> TransportError {
    const EIO: i32 = 5;
    let code = e.raw_os_error().unwrap_or(EIO);
    TransportError::Os { op, peer, code, detail: format!("{detail} ({e})") }
}

fn late(op: &'static str, peers: Vec<usize>, deadline: Deadline) -> TransportError {
    TransportError::Timeout { op, peers, after: deadline.length(), hint: String::new() }
}

fn bad(op: &'static str, detail: String) -> TransportError {
    TransportError::Argument { op, detail }
}

/// A rank's window, zeroed.
#[derive(Debug)]
struct Window(Mapping, Layout);

impl Window {
    fn new(bytes: usize) -> Result<Self> {
        let layout = Layout::from_size_align(bytes.max(1), 4096)
            .map_err(|e| bad("open", format!("a window of {bytes} bytes: {e}")))?;
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(|| {
            let detail = format!("a window of {bytes} bytes");
            failed("open", None, detail, io::ErrorKind::OutOfMemory.into())
        })?;
        Ok(Self(Mapping { base, bytes }, layout))
    }

    /// The piece from `at`, if it lies inside.
    fn piece(&self, at: usize, bytes: usize) -> Option<NonNull<[u8]>> {
        at.checked_add(bytes).filter(|&end| end <= self.0.bytes)?;
        // SAFETY: inside the allocation, as just checked.
        Some(NonNull::slice_from_raw_parts(unsafe { self.0.base.add(at) }, bytes))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout by `new`; whoever used it held this value.
        unsafe { dealloc(self.0.base.as_ptr(), self.1) };
    }
}

/// What callers and the threads of a link share.
#[derive(Debug)]
struct Shared {
    window: Window,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// By flag and source.
    flags: Vec<Vec<bool>>,
    peers: Vec<Peer>,
}

#[derive(Clone, Debug, Default)]
struct Peer {
    /// What is queued and not yet with the system.
    unsent: usize,
    /// Why nothing can be sent to it any more.
    cut: Option<String>,
    /// Why nothing comes from it any more. All that came before has been dealt with.
    gone: Option<String>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.state());
        self.changed.notify_all();
        result
    }

    /// Sets flag `flag` of `source`.
    fn raise(&self, flag: usize, source: usize) -> io::Result<()> {
        let raise = |state: &mut State| state.flags.get_mut(flag).map(|row| row[source] = true);
        self.change(raise).ok_or(io::ErrorKind::InvalidData.into())
    }

    /// Takes what comes from `peer`, until its connection ends.
    fn receive(&self, peer: usize, stream: &TcpStream) -> io::Result<()> {
        let mut input = BufReader::new(stream);
        while !input.fill_buf()?.is_empty() {
            let mut header = [0; 16];
            input.read_exact(&mut header)?;
            match unpair(header) {
                (flag, SIGNAL) => self.raise(flag as usize, peer)?,
                (to, bytes) => {
                    let piece = self.window.piece(to as usize, bytes as usize);
                    let piece = piece.ok_or(io::ErrorKind::InvalidData)?;
                    // SAFETY: inside the window; the protocol gives the piece to the peer until it
                    // signals, which is dealt with after this.
                    input.read_exact(unsafe { &mut *piece.as_ptr() })?;
                }
            }
        }
        Ok(())
    }

    /// Sends what is queued for `peer`, until the link is dropped.
    fn send(&self, peer: usize, stream: &TcpStream, queue: Receiver<Frame>) -> io::Result<()> {
        let mut output = BufWriter::new(stream);
        for frame in queue {
            match frame {
                Frame::Put(put) => {
                    let piece = self.window.piece(put.from, put.bytes);
                    let piece = piece.ok_or(io::ErrorKind::InvalidInput)?;
                    output.write_all(&pair(put.to as u64, put.bytes as u64))?;
                    // SAFETY: inside the window; nobody writes it before a flush has seen this sent.
                    output.write_all(unsafe { piece.as_ref() })?;
                }
                Frame::Signal(flag) => {
                    output.write_all(&pair(flag.into(), SIGNAL))?;
                    output.flush()?;
                }
            }
            self.change(|state| state.peers[peer].unsent -= 1);
        }
        output.flush()?;
        stream.shutdown(Shutdown::Write)
    }
}

/// What is queued for a peer.
#[derive(Debug)]
enum Frame {
    Put(Put),
    Signal(u32),
}

/// An open window with a connection to every peer.
#[derive(Debug)]
pub struct TcpLink {
    group: Group,
    flags: u32,
    shared: Arc<Shared>,
    /// By rank; none for this one.
    ways: Vec<Option<Way>>,
}

/// The way to a peer.
#[derive(Debug)]
struct Way {
    queue: Sender<Frame>,
    sender: JoinHandle<()>,
    stream: Arc<TcpStream>,
}

impl TcpLink {
    fn new(group: &Group, flags: u32, window: Window, streams: Streams) -> Result<Self> {
        let row = vec![false; group.world()];
        let peers = vec![Peer::default(); group.world()];
        let state = State { flags: vec![row; flags as usize], peers };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let shared = Arc::new(Shared { window, state, changed });
        let way = |(peer, stream): (usize, Option<TcpStream>)| {
            let way = stream.map(|stream| Way::new(&shared, peer, stream)).transpose();
            way.map_err(|e| failed("open", Some(peer), format!("the way to rank {peer}"), e))
        };
        let ways = streams.into_iter().enumerate().map(way).collect::<Result<_>>()?;
        Ok(Self { group: group.clone(), flags, shared, ways })
    }

    fn check(&self, op: &'static str, peers: &[usize], flag: u32) -> Result<()> {
        let (world, flags) = (self.group.world(), self.flags);
        match peers.iter().find(|&&peer| peer >= world) {
            Some(peer) => Err(bad(op, format!("rank {peer} of {world}"))),
            None if flag >= flags => Err(bad(op, format!("flag {flag} of {flags}"))),
            None => Ok(()),
        }
    }

    /// Queues `frame` for `peer`.
    fn queue(&self, op: &'static str, peer: usize, way: &Way, frame: Frame) -> Result<()> {
        let mut state = self.shared.state();
        if let Some(detail) = state.peers[peer].cut.clone() {
            return Err(TransportError::PeerLost { op, peer, detail });
        }
        state.peers[peer].unsent += 1;
        // If nobody takes it, the way is about to be found cut.
        let _ = way.queue.send(frame);
        Ok(())
    }

    /// The peers of which flag `flag` is not set. An error if that will never change.
    fn missing(
        &self,
        op: &'static str,
        state: &State,
        peers: &[usize],
        flag: u32,
    ) -> Result<Vec<usize>> {
        let set = &state.flags[flag as usize];
        let missing: Vec<usize> = peers.iter().copied().filter(|&peer| !set[peer]).collect();
        let lost = missing.iter().find_map(|&peer| Some((peer, state.peers[peer].gone.clone()?)));
        if let Some((peer, detail)) = lost {
            return Err(TransportError::PeerLost { op, peer, detail });
        }
        match self.group.health().check_waiting(op, &missing) {
            Err(_) if missing.is_empty() => Ok(missing),
            // Its last words may be on their way yet; behind them, its connection ends.
            Err(TransportError::PeerLost { peer, .. }) if missing.contains(&peer) => Ok(missing),
            known => known.map(|()| missing),
        }
    }

    /// Waits until nobody is `missing`, or that is an error.
    fn until(
        &self,
        op: &'static str,
        deadline: Deadline,
        mut missing: impl FnMut(&mut State) -> Result<Vec<usize>>,
    ) -> Result<()> {
        let mut state = self.shared.state();
        loop {
            let missing = missing(&mut state)?;
            if missing.is_empty() {
                return Ok(());
            }
            if deadline.expired() {
                return Err(late(op, missing, deadline));
            }
            let slice = deadline.remaining().min(LOOK);
            let woken = self.shared.changed.wait_timeout(state, slice);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Way {
    fn new(shared: &Arc<Shared>, peer: usize, stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let stream = Arc::new(stream);
        let (queue, frames) = channel();
        let thread = || std::thread::Builder::new().name(format!("tcp {peer}"));
        let (at, from) = (shared.clone(), stream.clone());
        // It ends when the peer closes its end, so it may outlive the link.
        thread().spawn(move || {
            let end = at.receive(peer, &from);
            let why = end.map_or_else(|e| format!("receiving: {e}"), |()| "it has closed".into());
            at.change(|state| state.peers[peer].gone = Some(why));
        })?;
        let (at, to) = (shared.clone(), stream.clone());
        let sender = thread().spawn(move || {
            if let Err(e) = at.send(peer, &to, frames) {
                let cut = Some(format!("sending: {e}"));
                at.change(|state| (state.peers[peer].cut, state.peers[peer].unsent) = (cut, 0));
            }
        })?;
        Ok(Self { queue, sender, stream })
    }
}

impl Drop for TcpLink {
    /// What was signalled arrives even if this rank leaves now; but not at any price.
    fn drop(&mut self) {
        let limit = Deadline::after(LINGER);
        for Way { queue, sender, stream } in self.ways.drain(..).flatten() {
            // The sender ends behind what is queued.
            drop(queue);
            while !sender.is_finished() && !limit.expired() {
                std::thread::sleep(Duration::from_micros(100));
            }
            if !sender.is_finished() {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}

// SAFETY: the only mapping is the own window: zeroed memory, aligned to a page, of the length that
// was asked for, owned by `self`; no rank maps another. Puts and signals to a peer share one queue
// and one connection, both in order, and a flag is set under the lock under which a wait sees it.
unsafe impl Link for TcpLink {
    fn window(&self) -> Mapping {
        self.shared.window.0
    }

    fn reach(&self, peer: usize) -> Reach {
        if peer == self.group.rank() { Reach::Direct(self.window()) } else { Reach::Bulk }
    }

    fn put(&self, _queue: &Queue, put: Put) -> Result<()> {
        let Put { peer, from, to, bytes } = put;
        let outside = || bad("put", format!("{put:?} leaves the window, or the group"));
        let way = self.ways.get(peer).ok_or_else(outside)?;
        let piece = |at: usize| self.shared.window.piece(at, bytes).ok_or_else(outside);
        let (from, to) = (piece(from)?, piece(to)?);
        match way {
            Some(way) => self.queue("put", peer, way, Frame::Put(put)),
            None => {
                // SAFETY: both lie in the own window; they may overlap.
                unsafe { from.cast::<u8>().copy_to(to.cast(), bytes) };
                Ok(())
            }
        }
    }

    fn flush(&self, _queue: &Queue, deadline: Deadline) -> Result<()> {
        self.until("flush", deadline, |state| {
            // A peer that has left in good order has had all it needed: only failures count.
            self.group.health().check("flush")?;
            Ok((0..self.ways.len()).filter(|&peer| state.peers[peer].unsent > 0).collect())
        })
    }

    fn signal(&self, _queue: &Queue, peer: usize, flag: u32) -> Result<()> {
        self.check("signal", &[peer], flag)?;
        match &self.ways[peer] {
            Some(way) => self.queue("signal", peer, way, Frame::Signal(flag)),
            None => {
                self.shared.change(|state| state.flags[flag as usize][peer] = true);
                Ok(())
            }
        }
    }

    fn wait(
        &self,
        _queue: &Queue,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()> {
        self.check(op, peers, flag)?;
        self.until(op, deadline, |state| {
            let missing = self.missing(op, state, peers, flag)?;
            if missing.is_empty() {
                peers.iter().for_each(|&peer| state.flags[flag as usize][peer] = false);
            }
            Ok(missing)
        })
    }

    fn ready(&self, peers: &[usize], flag: u32) -> bool {
        let missing = || self.missing("ready", &self.shared.state(), peers, flag);
        self.check("ready", peers, flag).is_ok() && missing().map_or(true, |peers| peers.is_empty())
    }
}
