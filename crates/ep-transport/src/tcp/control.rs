//! A group's control plane over a rank's connection to the hub.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::client::Conn;
use super::wire::{Failure, GroupId, MAX_BODY, Message, text};
use crate::control::Control;
use crate::health::{Fault, Health};
use crate::{Deadline, Result, TransportError};

/// How long telling the others may take.
const TELL: Duration = Duration::from_millis(200);
/// How long telling them that this rank leaves may take, which others go by.
const LEAVE: Duration = Duration::from_secs(2);

/// One group of a rank.
#[derive(Debug)]
pub(crate) struct TcpControl {
    id: GroupId,
    /// The group's ranks as ranks of the world.
    members: Vec<usize>,
    health: Arc<Health>,
    /// The number of the next all-gather; held during one.
    next: Mutex<u64>,
    splits: AtomicU32,
    /// The others could not be told of a fault of this rank.
    untold: AtomicBool,
    conn: Arc<Conn>,
}

impl TcpControl {
    /// The group of all ranks.
    pub(crate) fn world(conn: Conn, world: usize) -> (Self, Arc<Health>) {
        Self::new(Arc::new(conn), GroupId::new(), (0..world).collect())
    }

    fn new(conn: Arc<Conn>, id: GroupId, members: Vec<usize>) -> (Self, Arc<Health>) {
        let health = conn.seat(&id, &members);
        let (next, splits) = (Mutex::new(0), AtomicU32::new(0));
        let untold = AtomicBool::new(false);
        (Self { id, members, health: health.clone(), next, splits, untold, conn }, health)
    }

    fn aborted(&self, fault: &Fault) -> Message {
        let blames = fault.blames.and_then(|rank| u32::try_from(rank).ok());
        Message::Abort { group: self.id.clone(), blames, why: text(&fault.why) }
    }

    fn explain(&self, op: &'static str, failure: Failure, deadline: Deadline) -> TransportError {
        match failure {
            Failure::Absent(peers) => {
                let peers = peers.into_iter().map(|peer| peer as usize).collect();
                let (after, hint) = (deadline.length(), String::new());
                TransportError::Timeout { op, peers, after, hint }
            }
            Failure::Left(peer) => {
                let detail = "it has left the group".into();
                TransportError::PeerLost { op, peer: peer as usize, detail }
            }
            Failure::Operations(ops) => mismatch(op, "operation", &ops),
            Failure::Sequences(seqs) => mismatch(op, "sequence", &seqs),
            Failure::TooLarge(total) => TransportError::Argument {
                op,
                detail: format!("the ranks' bytes together are {total}, more than {MAX_BODY}"),
            },
        }
    }
}

/// The error that says which ranks have which value.
fn mismatch<T: PartialEq + std::fmt::Display>(
    op: &'static str,
    field: &str,
    values: &[T],
) -> TransportError {
    let mut groups: Vec<(&T, Vec<usize>)> = Vec::new();
    for (rank, value) in values.iter().enumerate() {
        match groups.iter_mut().find(|(known, _)| *known == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((value, vec![rank])),
        }
    }
    let texts: Vec<String> = groups
        .iter()
        .map(|(value, ranks)| format!("{} on {}", value, super::ranks_text(ranks)))
        .collect();
    let ranks = groups.iter().skip(1).flat_map(|(_, ranks)| ranks.iter().copied()).collect();
    TransportError::Mismatch { op, field: field.into(), ranks, detail: texts.join(", ") }
}

impl Control for TcpControl {
    fn all_gather(
        &self,
        op: &'static str,
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>> {
        if bytes.len() > MAX_BODY {
            let detail = format!("{} bytes are more than {MAX_BODY}", bytes.len());
            return Err(TransportError::Argument { op, detail });
        }
        let Some(mut next) = self.next.try_lock_for(deadline.remaining()) else {
            let hint = ": another collective of this rank is in progress".into();
            return Err(TransportError::Timeout {
                op,
                peers: vec![],
                after: deadline.length(),
                hint,
            });
        };
        self.health.check(op)?;
        let seq = *next;
        *next += 1;
        if self.members.len() == 1 {
            return Ok(vec![bytes.to_vec()]);
        }
        let wait_ms = u64::try_from(deadline.remaining().as_millis()).unwrap_or(u64::MAX);
        let (group, op_text) = (self.id.clone(), text(op));
        let message = Message::Gather { group, seq, wait_ms, op: op_text };
        // If sending fails the connection has: what became of the others says more.
        let sent = self.conn.send(op, &message, bytes, deadline);
        let wait = if sent.is_ok() { deadline } else { Deadline::after(TELL) };
        let answer = match (self.conn.answer(op, &self.id, seq, wait), sent) {
            (Err(TransportError::Timeout { .. }), Err(error)) => return Err(error),
            (answer, _) => answer?,
        };
        answer.map_err(|failure| self.explain(op, failure, deadline))
    }

    fn abort(&self, fault: &Fault) {
        self.conn.wake();
        let (message, until) = (self.aborted(fault), Deadline::after(TELL));
        if let Err(error) = self.conn.send("abort", &message, &[], until) {
            tracing::debug!(%error, "the others could not be told of a failure yet");
            self.untold.store(true, Ordering::Release);
        }
    }

    fn leave(&self, panicking: bool) {
        let until = Deadline::after(LEAVE);
        let tell = |message| self.conn.send("leave", &message, &[], until);
        let fault = self.health.fault().filter(|_| self.untold.load(Ordering::Acquire));
        let told = fault.map_or(Ok(()), |fault| tell(self.aborted(&fault)));
        let left = Message::Leave { group: self.id.clone(), panicked: panicking };
        if let Err(error) = told.and_then(|()| tell(left)) {
            // The others must not go on as if this rank were there; they hear that it is lost.
            tracing::debug!(%error, "a group could not be left in good order");
            self.conn.cut();
        }
        self.conn.stand_up(&self.id);
    }

    fn split(
        &self,
        members: &[usize],
        deadline: Deadline,
    ) -> Result<(Box<dyn Control>, Arc<Health>)> {
        let members: Vec<usize> = members.iter().map(|&rank| self.members[rank]).collect();
        let mut id = self.id.clone();
        id.extend([self.splits.fetch_add(1, Ordering::Relaxed), members[0] as u32]);
        // The seat first: news about the group may come at once.
        let (control, health) = Self::new(self.conn.clone(), id.clone(), members.clone());
        let members = members.into_iter().map(|rank| rank as u32).collect();
        let open = Message::Open { group: id, members };
        self.conn.send("split", &open, &[], deadline)?;
        Ok((Box::new(control), health))
    }
}
