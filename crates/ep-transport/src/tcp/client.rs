//! A rank's connection to the hub.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::moment;
use super::wire::{Decoder, Failure, Frame, GroupId, Message, encode, text};
use crate::health::{Fault, Health};
use crate::{Deadline, Result, TransportError};

/// How long the last messages of a rank may take.
const PARTING: Duration = Duration::from_secs(5);
/// How long after a rank's own deadline it waits for the hub to name the absent.
const GRACE: Duration = Duration::from_millis(200);
/// Waits look around this often even if nobody wakes them.
const SLICE: Duration = Duration::from_millis(50);
const CHUNK: usize = 64 << 10;

/// What became of an all-gather.
pub(super) type Answer = std::result::Result<Vec<Vec<u8>>, Failure>;

/// One group on the connection.
#[derive(Debug)]
struct Seat {
    members: Vec<usize>,
    health: Arc<Health>,
    answer: Option<(u64, Answer)>,
}

impl Seat {
    fn number(&self, rank: usize) -> Option<usize> {
        self.members.iter().position(|&m| m == rank)
    }
}

#[derive(Debug)]
struct State {
    seats: BTreeMap<GroupId, Seat>,
    /// The ranks of the world that died, and how that was noticed.
    lost: BTreeMap<usize, String>,
    /// Rank 0 has finished in good order.
    farewell: bool,
    parted: bool,
    closed: Option<String>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    world: usize,
}

/// The connection, shared by the groups of a rank. Says goodbye when the last one is dropped.
#[derive(Debug)]
pub(crate) struct Conn {
    writer: Mutex<TcpStream>,
    /// The same, for when a thread has the writer.
    socket: TcpStream,
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
}

impl Conn {
    /// Takes over a connection on which the hub has said welcome; `decoder` has what it said since.
    pub(crate) fn start(
        stream: TcpStream,
        mut decoder: Decoder,
        rank: usize,
        world: usize,
    ) -> io::Result<Self> {
        decoder.trust();
        stream.set_read_timeout(None)?;
        let (from, socket) = (stream.try_clone()?, stream.try_clone()?);
        let (seats, lost) = (BTreeMap::new(), BTreeMap::new());
        let state = State { seats, lost, farewell: false, parted: false, closed: None };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new(), world });
        // The world's seat is there before the first message about it is read.
        shared.add(GroupId::new(), (0..world).collect());
        let of_reader = shared.clone();
        let reader = std::thread::Builder::new()
            .name(format!("ep-control-{rank}"))
            .spawn(move || of_reader.read(from, decoder))?;
        Ok(Self { writer: Mutex::new(stream), socket, shared, reader: Some(reader) })
    }

    /// Joins a group; the world's seat exists already.
    pub(super) fn seat(&self, id: &GroupId, members: &[usize]) -> Arc<Health> {
        self.shared.add(id.clone(), members.to_vec())
    }

    /// Forgets a group.
    pub(super) fn stand_up(&self, id: &GroupId) {
        self.shared.state.lock().seats.remove(id);
    }

    /// Sends a frame before `deadline`.
    pub(super) fn send(
        &self,
        op: &'static str,
        message: &Message,
        body: &[u8],
        deadline: Deadline,
    ) -> Result<()> {
        let frame = encode(message, body);
        let until = moment(deadline, Duration::ZERO);
        let sent = match self.writer.try_lock_until(until) {
            Some(mut writer) => write_until(&mut writer, &frame, until).inspect_err(|_| {
                // Half a frame may be out: nothing sensible can follow it.
                let _ = writer.shutdown(Shutdown::Both);
            }),
            None => Err(io::ErrorKind::TimedOut.into()),
        };
        sent.map_err(|e| {
            let code = e.raw_os_error().unwrap_or(rustix::io::Errno::TIMEDOUT.raw_os_error());
            let detail = "sending to the rendezvous in rank 0's process".into();
            TransportError::Os { op, peer: None, code, detail }
        })
    }

    /// Waits for the answer to all-gather `seq` of a group.
    pub(super) fn answer(
        &self,
        op: &'static str,
        id: &GroupId,
        seq: u64,
        deadline: Deadline,
    ) -> Result<Answer> {
        let until = moment(deadline, GRACE);
        let mut state = self.shared.state.lock();
        loop {
            let State { seats, closed, .. } = &mut *state;
            let seat = seats.get_mut(id).expect("a group in use has a seat");
            if seat.answer.as_ref().is_some_and(|(answered, _)| *answered == seq) {
                let (_, answer) = seat.answer.take().expect("just seen");
                if answer.is_err() {
                    // A known culprit says more than who was absent.
                    seat.health.check(op)?;
                }
                return Ok(answer);
            }
            seat.health.check(op)?;
            if let Some(detail) = closed {
                return Err(hub_gone(op, seat.number(0), detail));
            }
            if Instant::now() >= until {
                let hint = ": the rendezvous in rank 0's process does not answer".into();
                let peers = seat.number(0).into_iter().collect();
                return Err(TransportError::Timeout { op, peers, after: deadline.length(), hint });
            }
            let slice = (Instant::now() + SLICE).min(until);
            self.shared.changed.wait_until(&mut state, slice);
        }
    }

    /// Ends the connection, whatever is under way on it.
    pub(super) fn cut(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Makes waits of this rank look at their group's health.
    pub(super) fn wake(&self) {
        self.shared.changed.notify_all();
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        let until = Deadline::after(PARTING);
        if self.send("leave", &Message::Bye, &[], until).is_ok() {
            // Only once the hub has passed the news on may this process end: the hub's thread may
            // be part of it.
            let mut state = self.shared.state.lock();
            while !state.parted && state.closed.is_none() && !until.expired() {
                self.shared.changed.wait_for(&mut state, until.remaining());
            }
        }
        // The reader ends with the connection.
        let _ = self.writer.get_mut().shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn write_until(stream: &mut TcpStream, mut bytes: &[u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        stream.set_write_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && !left.is_zero() => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn hub_gone(op: &'static str, peer: Option<usize>, detail: &str) -> TransportError {
    let detail = format!("its process carried the control plane, and {detail}");
    match peer {
        Some(peer) => TransportError::PeerLost { op, peer, detail },
        None => {
            let code = rustix::io::Errno::CONNRESET.raw_os_error();
            TransportError::Os {
                op,
                peer: None,
                code,
                detail: format!("the world's rank 0: {detail}"),
            }
        }
    }
}

impl Shared {
    fn add(&self, id: GroupId, members: Vec<usize>) -> Arc<Health> {
        let mut state = self.state.lock();
        if let Some(seat) = state.seats.get(&id) {
            return seat.health.clone();
        }
        let health = Arc::new(Health::new(members.len()));
        let seat = Seat { members, health: health.clone(), answer: None };
        for (&rank, detail) in &state.lost {
            if let Some(number) = seat.number(rank) {
                health.lost(number, detail);
            }
        }
        state.seats.insert(id, seat);
        health
    }

    fn read(&self, mut from: TcpStream, mut decoder: Decoder) {
        let why = loop {
            match decoder.next() {
                Ok(Some(frame)) => {
                    if let Err(what) = self.hear(frame) {
                        break what;
                    }
                    continue;
                }
                Ok(None) => {}
                Err(what) => break what,
            }
            match decoder.read(&mut from, CHUNK) {
                Ok(0) => break "its connection was closed".to_owned(),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => break format!("its connection failed ({e})"),
            }
        };
        self.closed(&why);
    }

    fn closed(&self, why: &str) {
        let mut state = self.state.lock();
        let why = if state.farewell { "it has left" } else { why };
        if !state.farewell && !state.parted {
            lose(&mut state, 0, why);
        }
        state.closed = Some(why.to_owned());
        self.changed.notify_all();
    }

    /// Takes in a message of the hub. An error means that it makes no sense.
    fn hear(&self, frame: Frame) -> std::result::Result<(), String> {
        let mut state = self.state.lock();
        let state = &mut *state;
        match frame.message {
            Message::Gathered { group, seq, lens } => {
                let parts = cut(&frame.body, &lens).ok_or("it sent a result of wrong lengths")?;
                if let Some(seat) = state.seats.get_mut(&group) {
                    seat.answer = Some((seq, Ok(parts)));
                }
            }
            Message::Failed { group, seq, failure } => {
                if let Some(seat) = state.seats.get_mut(&group) {
                    seat.answer = Some((seq, Err(failure)));
                }
            }
            Message::Fault { group, by, blames, why } => {
                if let Some(seat) = state.seats.get(&group) {
                    let blames = blames.map(|rank| rank as usize);
                    seat.health.set(Fault { by: by as usize, blames, why });
                }
            }
            Message::Left { group, rank, panicked } => {
                let seat = state.seats.get(&group).filter(|s| (rank as usize) < s.members.len());
                match seat {
                    Some(seat) if panicked => {
                        seat.health.lost(rank as usize, "its thread panicked")
                    }
                    Some(seat) => seat.health.left(rank as usize),
                    None => {}
                }
            }
            Message::Lost { rank, detail } => {
                if rank as usize >= self.world {
                    return Err("it spoke of a rank that cannot be".into());
                }
                lose(state, rank as usize, &detail);
            }
            Message::Farewell => state.farewell = true,
            Message::ByeAck => state.parted = true,
            _ => return Err("it sent a message that only ranks send".into()),
        }
        self.changed.notify_all();
        Ok(())
    }
}

/// A rank of the world is dead, in every group it is part of.
fn lose(state: &mut State, rank: usize, detail: &str) {
    for seat in state.seats.values() {
        if let Some(number) = seat.number(rank) {
            seat.health.lost(number, detail);
        }
    }
    state.lost.entry(rank).or_insert_with(|| text(detail));
}

fn cut(mut body: &[u8], lens: &[u32]) -> Option<Vec<Vec<u8>>> {
    let mut parts = Vec::with_capacity(lens.len());
    for &len in lens {
        let (part, rest) = body.split_at_checked(len as usize)?;
        parts.push(part.to_vec());
        body = rest;
    }
    body.is_empty().then_some(parts)
}
