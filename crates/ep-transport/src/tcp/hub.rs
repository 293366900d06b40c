//! The meeting point of a group's ranks, as a state machine without sockets: events of connections
//! and the clock go in, messages to send and connections to close come out.
//!
//! Until all ranks have said hello nothing but a verdict is given; then groups are served until
//! every rank has gone. Whoever does not speak the protocol, or has another job's token, is turned
//! away without any rank noticing.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use super::room::Room;
use super::wire::{Frame, GroupId, Message, encode, text};
use super::{Bytes, ranks_text};

/// Names a connection.
pub(crate) type ConnId = u64;

/// How long a connection may stay before it has said who it is.
const HELLO_TIME: Duration = Duration::from_secs(5);
/// So many connections beyond the ranks may wait to say who they are; then the oldest is closed.
const STRANGERS: usize = 256;
/// A shortage of the operating system that lasts so long ends the meeting.
const SHORTAGE: Duration = Duration::from_secs(2);
/// So long those who come later are told that the meeting has ended, and why; less than a rank waits
/// for a verdict beyond its own deadline.
const TELLING: Duration = Duration::from_millis(800);
/// No rank waits longer than this for a collective.
const MAX_WAIT: Duration = Duration::from_secs(30 * 24 * 3600);
/// The most groups at a time; a bound for ranks that lose track.
const MAX_GROUPS: usize = 1 << 16;

/// What happened to a connection.
#[derive(Debug)]
pub(crate) enum Event {
    Accepted,
    /// Somebody waits to be accepted, which the operating system does not allow, and why.
    Unaccepted(String),
    Frame(Frame),
    /// What it sent is no frame of this protocol.
    Malformed(String),
    /// It is closed, and why.
    Closed(String),
}

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Action {
    Send(ConnId, Bytes),
    /// Close once all earlier messages are sent.
    Close(ConnId),
}

#[derive(Debug)]
enum Peer {
    Stranger {
        until: Instant,
    },
    Rank(usize),
    /// Turned away; its socket is being closed.
    Refused,
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    Gathering,
    Running,
    /// There will be no group.
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seat {
    Free,
    Taken(ConnId),
    Gone,
}

/// The actions of one step, by rank or connection.
#[derive(Debug)]
pub(super) struct Out {
    seats: Vec<Seat>,
    actions: Vec<Action>,
}

impl Out {
    /// Sends to a rank of the world, if it is still there.
    pub(super) fn send(&mut self, rank: usize, frame: Bytes) {
        if let Seat::Taken(conn) = self.seats[rank] {
            self.actions.push(Action::Send(conn, frame));
        }
    }

    fn send_all(&mut self, frame: &Bytes) {
        (0..self.seats.len()).for_each(|rank| self.send(rank, frame.clone()));
    }
}

/// Why there will be no group.
#[derive(Clone, Debug)]
struct Verdict {
    until: Instant,
    peer: Option<usize>,
    detail: String,
}

/// The state machine.
#[derive(Debug)]
pub(crate) struct Hub {
    token: Vec<u8>,
    until: Instant,
    waited: Duration,
    phase: Phase,
    /// What keeps ranks from being accepted, and until when that may pass.
    shortage: Option<(Instant, String)>,
    /// What those hear who are accepted after a failure.
    verdict: Option<Verdict>,
    /// How many knew another token.
    foreign: usize,
    peers: HashMap<ConnId, Peer>,
    rooms: BTreeMap<GroupId, Room>,
    out: Out,
}

impl Hub {
    /// A meeting point for `world` ranks that know `token`, which all must have come after `wait`.
    pub(crate) fn new(world: usize, token: Vec<u8>, now: Instant, wait: Duration) -> Self {
        let wait = wait.min(MAX_WAIT);
        Self {
            token,
            until: now + wait,
            waited: wait,
            phase: Phase::Gathering,
            shortage: None,
            verdict: None,
            foreign: 0,
            peers: HashMap::new(),
            rooms: BTreeMap::new(),
            out: Out { seats: vec![Seat::Free; world], actions: Vec::new() },
        }
    }

    /// Whether new connections are welcome.
    pub(crate) fn listening(&self) -> bool {
        self.phase == Phase::Gathering || self.verdict.is_some()
    }

    /// Whether all ranks have gone (or been told that there will be no group).
    pub(crate) fn done(&self) -> bool {
        match self.phase {
            Phase::Gathering => false,
            Phase::Running => self.out.seats.iter().all(|seat| *seat == Seat::Gone),
            Phase::Failed => self.verdict.is_none(),
        }
    }

    /// When [`Hub::tick`] has something to do next.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let strangers = self.peers.values().filter_map(|peer| match peer {
            Peer::Stranger { until } => Some(*until),
            _ => None,
        });
        let start = (self.phase == Phase::Gathering).then_some(self.until);
        let rooms = self.rooms.values().filter_map(Room::next_deadline);
        let shortage = self.shortage.as_ref().map(|(until, _)| *until);
        let verdict = self.verdict.as_ref().map(|verdict| verdict.until);
        strangers.chain(start).chain(shortage).chain(verdict).chain(rooms).min()
    }

    /// Takes an event, and gives what is to be done.
    pub(crate) fn handle(&mut self, now: Instant, conn: ConnId, event: Event) -> Vec<Action> {
        match event {
            Event::Accepted => self.accepted(now, conn),
            Event::Unaccepted(why) if self.phase == Phase::Gathering => {
                self.shortage.get_or_insert_with(|| {
                    tracing::warn!(why, "rendezvous: waiting for the shortage to pass");
                    (now + SHORTAGE, why)
                });
            }
            Event::Unaccepted(_) => {}
            Event::Frame(frame) => match self.peers.get(&conn) {
                Some(&Peer::Rank(rank)) if self.phase == Phase::Running => {
                    if let Err(what) = self.serve(now, rank, frame) {
                        self.lose(conn, &what);
                    }
                }
                Some(Peer::Rank(_)) => self.lose(conn, "it spoke before the group was complete"),
                Some(Peer::Stranger { .. }) => self.hello(now, conn, frame),
                Some(Peer::Refused) | None => {}
            },
            Event::Malformed(what) => match self.peers.get(&conn) {
                Some(Peer::Stranger { .. }) => {
                    tracing::warn!(conn, what, "rendezvous: turned away a stranger");
                    self.refuse(conn, None, &what);
                }
                _ => self.lose(conn, &what),
            },
            Event::Closed(what) => self.lose(conn, &what),
        }
        std::mem::take(&mut self.out.actions)
    }

    /// Does what is due at `now`.
    pub(crate) fn tick(&mut self, now: Instant) -> Vec<Action> {
        let late = |peer: &Peer| matches!(peer, Peer::Stranger { until } if *until <= now);
        let late: Vec<ConnId> =
            self.peers.iter().filter(|(_, peer)| late(peer)).map(|(conn, _)| *conn).collect();
        for conn in late {
            tracing::warn!(conn, "rendezvous: closed a connection that did not say who it is");
            self.refuse(conn, None, "no hello came in time");
        }
        self.give_up(now);
        if let Some(Verdict { peer, detail, .. }) = self.verdict.take_if(|v| v.until <= now)
            && let Seat::Taken(conn) = self.out.seats[0]
            && matches!(self.peers.get(&conn), Some(Peer::Rank(0)))
        {
            self.refuse(conn, peer, &detail);
        }
        for room in self.rooms.values_mut() {
            room.tick(now, &mut self.out);
        }
        std::mem::take(&mut self.out.actions)
    }

    /// Ends the meeting if ranks do not come, or cannot be let in.
    fn give_up(&mut self, now: Instant) {
        let late = self.until <= now;
        let short = self.shortage.take_if(|(until, _)| late || *until <= now);
        if self.phase != Phase::Gathering || !(late || short.is_some()) {
            return;
        }
        let missing: Vec<usize> = (0..self.world()).filter(|&r| !self.taken(r)).collect();
        let (world, waited) = (self.world(), self.waited);
        if let Some((_, why)) = short {
            let here = world - missing.len();
            let detail = format!("{why}; {here} of {world} ranks had been accepted");
            return self.conclude(now, Some(0), detail);
        }
        let foreign = match self.foreign {
            0 => String::new(),
            1 => " (1 process with another job token was refused)".into(),
            n => format!(" ({n} processes with another job token were refused)"),
        };
        let detail = format!(
            "{} of {world} missing after {waited:?}{foreign}: check that each was started and \
             reaches this address",
            ranks_text(&missing)
        );
        self.fail(missing.first().copied(), &detail);
    }

    /// Whether the connection is a rank of the running group and may send large frames.
    pub(crate) fn trusts(&self, conn: ConnId) -> bool {
        matches!(self.peers.get(&conn), Some(Peer::Rank(_)))
    }

    fn world(&self) -> usize {
        self.out.seats.len()
    }

    fn taken(&self, rank: usize) -> bool {
        matches!(self.out.seats[rank], Seat::Taken(_))
    }

    fn accepted(&mut self, now: Instant, conn: ConnId) {
        if let Some(Verdict { peer, detail, .. }) = self.verdict.clone() {
            return self.refuse(conn, peer, &detail);
        }
        if self.phase != Phase::Gathering {
            self.out.actions.push(Action::Close(conn));
            return;
        }
        self.shortage = None;
        let strangers = self.peers.iter().filter(|(_, p)| matches!(p, Peer::Stranger { .. }));
        if strangers.clone().count() >= self.world() + STRANGERS {
            let oldest = strangers.map(|(conn, _)| *conn).min().expect("there are some");
            tracing::warn!("rendezvous: too many connections that do not say who they are");
            self.refuse(oldest, None, "too many connections");
        }
        self.peers.insert(conn, Peer::Stranger { until: now + HELLO_TIME });
    }

    /// Turns a connection away that is no rank of this group.
    fn refuse(&mut self, conn: ConnId, peer: Option<usize>, detail: &str) {
        self.peers.insert(conn, Peer::Refused);
        let peer = peer.map(|p| p as u32);
        let frame = encode(&Message::Refused { peer, detail: text(detail) }, &[]);
        self.out.actions.push(Action::Send(conn, frame));
        self.out.actions.push(Action::Close(conn));
    }

    /// There will be no group: tells every rank that is here, and for a while those who come yet. Rank 0
    /// hears it last: this is its process, which may end when it does.
    fn conclude(&mut self, now: Instant, peer: Option<usize>, detail: String) {
        let first = std::mem::replace(&mut self.out.seats[0], Seat::Free);
        self.fail(peer, &detail);
        self.out.seats[0] = first;
        // Nothing ends before rank 0 has come, which may take as long as others may be silent.
        let wait = if first == Seat::Free { HELLO_TIME } else { TELLING };
        self.verdict = Some(Verdict { until: now + wait, peer, detail });
    }

    /// There will be no group: tells every rank that is here.
    fn fail(&mut self, peer: Option<usize>, detail: &str) {
        (self.phase, self.shortage) = (Phase::Failed, None);
        for rank in 0..self.world() {
            if let Seat::Taken(conn) = self.out.seats[rank] {
                self.refuse(conn, peer, detail);
            }
        }
        let others: Vec<ConnId> = self
            .peers
            .iter()
            .filter(|(_, peer)| matches!(peer, Peer::Stranger { .. }))
            .map(|(conn, _)| *conn)
            .collect();
        others.into_iter().for_each(|conn| self.refuse(conn, peer, detail));
    }

    fn hello(&mut self, now: Instant, conn: ConnId, frame: Frame) {
        let Message::Hello { rank, world, wait_ms } = frame.message else {
            tracing::warn!(conn, "rendezvous: turned away a connection that did not say hello");
            return self.refuse(conn, None, "a connection starts with a hello");
        };
        if !same(&frame.body, &self.token) {
            tracing::warn!(conn, "rendezvous: turned away a rank of another job");
            self.foreign += 1;
            let detail = "this is another job's rendezvous (the job tokens differ): set \
                          EP_RENDEZVOUS to a free port, or EP_JOB_TOKEN alike on all ranks";
            return self.refuse(conn, None, detail);
        }
        if self.phase != Phase::Gathering {
            return self.refuse(conn, None, "the group is already complete");
        }
        let rank = rank as usize;
        let problem = if world as usize != self.world() {
            let ours: Vec<usize> = (0..self.world()).filter(|&r| self.taken(r)).collect();
            let ours = if ours.is_empty() { vec![0] } else { ours };
            let size = self.world();
            Some(format!(
                "world sizes differ: rank {rank} has {world}, {} {size}",
                ranks_text(&ours)
            ))
        } else if rank >= self.world() {
            Some(format!("rank {rank} is not below the world size {world}"))
        } else if self.taken(rank) {
            Some(format!("rank {rank} was started twice: give every process its own rank"))
        } else {
            None
        };
        if let Some(problem) = problem {
            self.refuse(conn, Some(rank), &problem);
            return self.conclude(now, Some(rank), problem);
        }
        self.peers.insert(conn, Peer::Rank(rank));
        self.out.seats[rank] = Seat::Taken(conn);
        self.out.send(rank, encode(&Message::Heard, &[]));
        let wait = Duration::from_millis(wait_ms).min(MAX_WAIT);
        if now + wait < self.until {
            // The group cannot be complete once this rank has given up.
            (self.until, self.waited) = (now + wait, wait);
        }
        if (0..self.world()).all(|rank| self.taken(rank)) {
            self.start();
        }
    }

    fn start(&mut self) {
        (self.phase, self.shortage) = (Phase::Running, None);
        self.out.send_all(&encode(&Message::Welcome, &[]));
        let members: Vec<usize> = (0..self.world()).collect();
        let mut room = Room::new(GroupId::new(), members.clone());
        for rank in members {
            room.open(rank, &mut self.out);
        }
        self.rooms.insert(GroupId::new(), room);
    }

    /// A connection is of no use any more.
    fn lose(&mut self, conn: ConnId, what: &str) {
        match self.peers.remove(&conn) {
            Some(Peer::Rank(rank)) if self.phase == Phase::Gathering => {
                self.out.seats[rank] = Seat::Free;
                self.fail(Some(rank), &format!("rank {rank} died before all had come: {what}"));
            }
            Some(Peer::Rank(rank)) if self.phase == Phase::Running => {
                tracing::warn!(rank, what, "a rank is lost");
                self.out.seats[rank] = Seat::Gone;
                let lost = Message::Lost { rank: rank as u32, detail: text(what) };
                self.out.send_all(&encode(&lost, &[]));
                self.leave_all(rank, false);
            }
            Some(Peer::Stranger { .. }) => {
                tracing::warn!(conn, what, "rendezvous: dropped a stranger");
            }
            Some(Peer::Rank(_) | Peer::Refused) | None => {}
        }
        self.out.actions.push(Action::Close(conn));
    }

    fn leave_all(&mut self, rank: usize, tell: bool) {
        for room in self.rooms.values_mut() {
            room.leave(rank, false, tell, &mut self.out);
        }
        self.rooms.retain(|_, room| !room.empty());
    }

    /// A message of a rank of the running group. An error means that the rank is confused.
    fn serve(&mut self, now: Instant, rank: usize, frame: Frame) -> Result<(), String> {
        match frame.message {
            Message::Open { group, members } => self.open(rank, group, &members),
            Message::Gather { group, seq, wait_ms, op } => {
                let (room, seat, out) = self.seat(rank, &group)?;
                let until = now + Duration::from_millis(wait_ms).min(MAX_WAIT);
                let fine = room.gather(seat, (seq, op, frame.body), until, out);
                fine.then_some(()).ok_or_else(|| "it is in two collectives at once".into())
            }
            Message::Abort { group, blames, why } => {
                let (room, seat, out) = self.seat(rank, &group)?;
                room.fail(seat, blames, why, out);
                Ok(())
            }
            Message::Leave { group, panicked } => {
                let (room, _, out) = self.seat(rank, &group)?;
                room.leave(rank, panicked, true, out);
                if room.empty() {
                    self.rooms.remove(&group);
                }
                Ok(())
            }
            Message::Bye => {
                self.bye(rank);
                Ok(())
            }
            _ => Err("it sent a message that only the hub sends".into()),
        }
    }

    fn seat(
        &mut self,
        rank: usize,
        group: &GroupId,
    ) -> Result<(&mut Room, usize, &mut Out), String> {
        let unknown = || "it is not in the group it speaks of".to_owned();
        let room = self.rooms.get_mut(group).ok_or_else(unknown)?;
        let seat = room.seat(rank).ok_or_else(unknown)?;
        Ok((room, seat, &mut self.out))
    }

    fn open(&mut self, rank: usize, group: GroupId, members: &[u32]) -> Result<(), String> {
        let members: Vec<usize> = members.iter().map(|&m| m as usize).collect();
        let mut seen = vec![false; self.world()];
        let distinct =
            members.iter().all(|&m| m < seen.len() && !std::mem::replace(&mut seen[m], true));
        if !distinct || group.is_empty() || self.rooms.len() >= MAX_GROUPS {
            return Err("it opened a group that cannot be".into());
        }
        let Self { rooms, out, .. } = self;
        let room = rooms.entry(group.clone()).or_insert_with(|| {
            let mut room = Room::new(group, members.clone());
            for &member in &members {
                if out.seats[member] == Seat::Gone {
                    room.leave(member, false, false, out);
                }
            }
            room
        });
        if room.members() != members || !room.open(rank, out) {
            return Err("it opened a group that others see differently".into());
        }
        Ok(())
    }

    fn bye(&mut self, rank: usize) {
        let Seat::Taken(conn) = self.out.seats[rank] else { return };
        self.leave_all(rank, true);
        self.out.seats[rank] = Seat::Gone;
        if rank == 0 {
            self.out.send_all(&encode(&Message::Farewell, &[]));
        }
        self.peers.insert(conn, Peer::Refused);
        self.out.actions.push(Action::Send(conn, encode(&Message::ByeAck, &[])));
        self.out.actions.push(Action::Close(conn));
    }
}

/// Compares secrets without telling by time how much of them agrees.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |diff, (a, b)| diff | (a ^ b)) == 0
}

#[cfg(test)]
mod tests;
