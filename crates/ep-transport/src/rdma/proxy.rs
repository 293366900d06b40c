//! The thread that talks to a NIC: takes commands, posts writes, counts what arrives.
//!
//! It makes no call of a GPU's driver, so that it can never wait for one. Whoever waits on this rank
//! waits on its flags or for a ticket; both are written here.

mod failures;

use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::arrivals::{Arrivals, Immediate};
use super::device::{Completion, Device, Id, Kind};
use super::layout::CREDIT;
use super::pair::Write;
use super::sender::{Credit, Limits, Peer, Post, Pushed, What};
use super::shared::{OP, Order, Shared};
use super::tickets::Tickets;
use crate::ring::Consumer;
use crate::{Deadline, Result, TransportError};

/// Commands taken, and writes posted per peer, before others get their turn.
const BURST: usize = 32;
/// A proxy with nothing to do polls for so long before it sleeps.
const SPIN: Duration = Duration::from_micros(20);
/// The longest sleep: a safety net, and how soon news of the group are seen.
const SLICE: Duration = Duration::from_millis(50);
/// Credit comes as a plain write, which wakes nobody: who waits for it looks this often.
const STARVED: Duration = Duration::from_millis(1);

/// What a proxy knows of one bulk peer.
#[derive(Debug)]
struct Remote {
    sender: Peer,
    arrivals: Arrivals,
    consumed: u32,
    /// What the peer was told last, and whether that is under way.
    told: Credit,
    telling: bool,
    /// A queue pair failed; nothing more is posted while it is decided what that means.
    broken: bool,
    /// Nothing more is sent to it: it has closed its link, left, or failed.
    gone: bool,
}

/// The settings of a proxy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setup {
    pub nic: usize,
    pub limits: Limits,
    /// Bytes under way on this NIC.
    pub in_flight: usize,
    /// Never sleeps.
    pub busy: bool,
    /// How long what is under way may take once the link is dropped.
    pub drain: Duration,
    /// How long a port may be down before that is a failure.
    pub grace: Duration,
}

#[derive(Debug)]
pub(super) struct Proxy<D> {
    setup: Setup,
    device: D,
    commands: Consumer,
    bell: Arc<OwnedFd>,
    shared: Arc<Shared>,
    remotes: Vec<Option<Remote>>,
    tickets: Tickets,
    in_flight: usize,
    completions: Vec<Completion>,
    /// The last look at the NIC took all there was.
    drained: bool,
    /// Peers have been told that the link is closed.
    closing: bool,
    /// Where the round of peers starts.
    first: usize,
    /// Failures whose peers may turn out to have left: peer, error, and until when.
    doubtful: Vec<(usize, TransportError, Deadline)>,
    /// Rounds until the next look at what befalls the NIC.
    rounds: u32,
    /// The port that is down, and until when that is no failure.
    down: Option<(String, Deadline)>,
}

impl<D: Device> Proxy<D> {
    /// `bulk` are the peers that are reached through this NIC.
    pub(super) fn new(
        setup: Setup,
        device: D,
        commands: Consumer,
        bell: Arc<OwnedFd>,
        shared: Arc<Shared>,
        bulk: &[usize],
    ) -> Self {
        let mut remotes: Vec<Option<Remote>> = (0..shared.world()).map(|_| None).collect();
        for &peer in bulk {
            remotes[peer] = Some(Remote {
                sender: Peer::new(setup.limits),
                arrivals: Arrivals::new(),
                consumed: 0,
                told: Credit::default(),
                telling: false,
                broken: false,
                gone: false,
            });
        }
        Self {
            setup,
            device,
            commands,
            bell,
            shared,
            remotes,
            tickets: Tickets::default(),
            in_flight: 0,
            completions: Vec::with_capacity(BURST),
            drained: false,
            closing: false,
            first: 0,
            doubtful: Vec::new(),
            rounds: 0,
            down: None,
        }
    }

    /// Works until the link is dropped and everything it was told is done.
    pub(super) fn run(mut self) {
        // Whoever waits on this rank has to hear of a proxy that ends, however it does.
        let worked = catch_unwind(AssertUnwindSafe(|| self.work()));
        let panicked = |_| {
            let detail = "the proxy of a NIC panicked".into();
            Err(TransportError::Device { op: OP, call: "proxy", code: libc::EIO, detail })
        };
        if let Err(error) = worked.unwrap_or_else(panicked) {
            self.shared.fail_all(&error);
        }
        self.shared.end(self.setup.nic);
    }

    fn work(&mut self) -> Result<()> {
        let mut idle: Option<Instant> = None;
        let mut ending: Option<Deadline> = None;
        loop {
            let mut busy = self.take();
            busy |= self.reap()?;
            busy |= self.post()?;
            self.tell()?;
            if !self.watch()? {
                return self.outlast();
            }
            self.judge();
            if self.drained {
                self.shared.passed(self.setup.nic);
            }
            self.shared.retire(self.setup.nic, self.tickets.retire());
            if self.shared.stopping() {
                let deadline = *ending.get_or_insert_with(|| Deadline::after(self.patience()));
                let done = self.tickets.is_empty() && self.commands.is_empty();
                if (done && self.close()?) || deadline.expired() {
                    return if done { Ok(()) } else { Err(self.unsent()) };
                }
            }
            if busy {
                idle = None;
                continue;
            }
            let since = *idle.get_or_insert_with(Instant::now);
            if self.setup.busy || (self.shared.spins() && since.elapsed() < SPIN) {
                std::hint::spin_loop();
            } else {
                self.sleep()?;
                idle = None;
            }
        }
    }

    /// Takes commands from the ring.
    fn take(&mut self) -> bool {
        for taken in 0..BURST {
            let Some(command) = self.commands.pop() else { return taken > 0 };
            let ticket = self.tickets.push();
            let order = Order::decode(&command);
            let remote = self.remotes[order.peer()].as_mut().filter(|remote| !remote.gone);
            let queued = match (remote, order) {
                // What is for a peer that has gone is done with.
                (None, _) => false,
                (Some(remote), Order::Put { from, to, bytes, .. }) => {
                    remote.sender.push_put(from, to, bytes, ticket) == Pushed::Queued
                }
                (Some(remote), Order::Signal { flag, parts, .. }) => {
                    remote.sender.push_signal(flag, parts, ticket);
                    true
                }
            };
            if !queued {
                self.tickets.close(ticket);
            }
        }
        true
    }

    /// Posts what may be posted, peer by peer.
    fn post(&mut self) -> Result<bool> {
        let (world, first) = (self.remotes.len(), self.first);
        let mut posted = false;
        for peer in (0..world).map(|i| (first + i) % world) {
            for _ in 0..BURST {
                let room = self.setup.in_flight.saturating_sub(self.in_flight);
                if room == 0 {
                    self.first = peer;
                    return Ok(posted);
                }
                let Some(remote) = self.remotes[peer].as_mut().filter(|r| !r.broken) else { break };
                if remote.sender.starved() {
                    let at = self.shared.layout.credit_in(peer, self.setup.nic);
                    remote.sender.credit(self.shared.words.credit(at));
                }
                let Some((post, ticket, last)) = remote.sender.next(room) else { break };
                self.tickets.posted(ticket);
                if last {
                    self.tickets.close(ticket);
                }
                self.start(peer, &post)?;
                posted = true;
            }
        }
        Ok(posted)
    }

    fn start(&mut self, peer: usize, post: &Post) -> Result<()> {
        let (shared, nic) = (&self.shared, self.setup.nic);
        let (from, to, bytes) = match post.what {
            What::Bytes { from, to, bytes } => (from, to, bytes),
            What::Record(record) => {
                let from = shared.layout.record_out(peer, nic, record.epoch);
                // Free: the epoch that had the place before is complete at the peer.
                shared.words.set_record(from, &record);
                (
                    from,
                    shared.layout.record_in(shared.rank(), nic, record.epoch),
                    size_of_val(&record),
                )
            }
        };
        if let What::Bytes { .. } = post.what {
            self.in_flight += bytes;
        }
        let id = Id { kind: Kind::Write, peer, pair: post.pair };
        let immediate = Some(post.immediate);
        self.write(id, (from, to, bytes), immediate, post.signalled)
    }

    fn write(
        &mut self,
        id: Id,
        (from, to, bytes): (usize, usize, usize),
        immediate: Option<u32>,
        signalled: bool,
    ) -> Result<()> {
        let (remote, remote_key) = self.device.remote(id.peer, to);
        let (local, local_key) = self.device.local(from);
        let write = Write {
            id: id.encode(),
            local,
            local_key,
            bytes: bytes as u32,
            remote,
            remote_key,
            immediate,
            signalled,
        };
        // SAFETY: puts lie in the window, whose bytes the caller leaves alone until they are
        // flushed; records and credit are left alone here until they are done.
        unsafe { self.device.write(id.peer, id.pair, &write) }
    }

    /// Takes what the NIC reports.
    fn reap(&mut self) -> Result<bool> {
        let mut completions = std::mem::take(&mut self.completions);
        completions.clear();
        let polled = self.device.poll(&mut completions);
        let any = !completions.is_empty();
        for completion in completions.drain(..) {
            match completion {
                Completion::Written(id) => self.written(id),
                Completion::Arrived { id, immediate } => self.arrived(id, immediate)?,
                Completion::Failed { id, status, detail } => self.failed(id, status, &detail),
            }
        }
        self.completions = completions;
        self.drained = polled?;
        Ok(any)
    }

    fn written(&mut self, id: Id) {
        let Some(remote) = self.remotes[id.peer].as_mut() else { return };
        if id.kind == Kind::Tell {
            remote.telling = false;
            return;
        }
        remote.sender.completed(id.pair, |done| {
            self.tickets.done(done.ticket);
            self.in_flight -= done.bytes;
        });
    }

    fn arrived(&mut self, id: Id, immediate: Option<u32>) -> Result<()> {
        // What a peer said before it left counts.
        let Some(remote) = self.remotes[id.peer].as_mut() else { return Ok(()) };
        let room = self.device.receive(id.peer, id.pair);
        if !remote.broken {
            room?;
        }
        remote.consumed = remote.consumed.wrapping_add(1);
        let counted =
            immediate.and_then(Immediate::decode).ok_or_else(|| "no immediate".to_owned());
        let counted = counted.and_then(|immediate| {
            if !immediate.signal {
                return remote.arrivals.write(immediate.epoch);
            }
            let (source, epoch) = (id.peer, u32::from(immediate.epoch));
            let at = self.shared.layout.record_in(source, self.setup.nic, epoch);
            remote.arrivals.signal(immediate.epoch, self.shared.words.record(at))
        });
        if let Err(detail) = counted {
            let detail = format!("what arrives does not add up: {detail}");
            self.lose(id.peer, self.error(id, libc::EPROTO, &detail));
            return Ok(());
        }
        while let Some(record) = remote.arrivals.due() {
            if !self.shared.part_came(id.peer, record.flag, record.parts) {
                let detail = format!("it signalled what is no flag: {record:?}");
                let error = self.error(id, libc::EPROTO, &detail);
                self.lose(id.peer, error);
                return Ok(());
            }
        }
        Ok(())
    }

    /// Tells peers of the room they have made no use of yet, a quarter at a time.
    fn tell(&mut self) -> Result<()> {
        let depth = self.setup.limits.depth;
        for peer in 0..self.remotes.len() {
            let Some(remote) = self.remotes[peer].as_mut() else { continue };
            let now = Credit { immediates: remote.consumed, epochs: remote.arrivals.complete() };
            let news = now.immediates.wrapping_sub(remote.told.immediates) >= (depth / 4).max(1)
                || now.epochs.wrapping_sub(remote.told.epochs) >= super::arrivals::WINDOW / 4;
            if !news || remote.telling || remote.gone || remote.broken {
                continue;
            }
            (remote.told, remote.telling) = (now, true);
            self.tell_peer(peer, now, false)?;
        }
        Ok(())
    }

    fn tell_peer(&mut self, peer: usize, credit: Credit, closed: bool) -> Result<()> {
        let (shared, nic) = (&self.shared, self.setup.nic);
        let from = shared.layout.credit_out(peer, nic);
        shared.words.set_credit(from, credit, closed);
        let to = shared.layout.credit_in(shared.rank(), nic);
        let id = Id { kind: Kind::Tell, peer, pair: 0 };
        self.write(id, (from, to, CREDIT), None, true)
    }

    /// How long what is under way may take after the link was dropped: where something went wrong, no
    /// longer than the news of it.
    fn patience(&self) -> Duration {
        let longest = self.setup.drain;
        if self.shared.fault().is_some() { longest.min(failures::NEWS) } else { longest }
    }

    /// Tells peers that nobody answers here any more, so that what they send yet is no failure;
    /// whether all know. Those that have closed, left or failed need not. Where something went wrong
    /// nobody is told, as the word might come before the news of it.
    fn close(&mut self) -> Result<bool> {
        if self.shared.fault().is_some() {
            return Ok(true);
        }
        let telling = |proxy: &Self, peer: usize| {
            let over = proxy.shared.closed(peer, proxy.setup.nic) || proxy.shared.is_lost(peer);
            let remote = proxy.remotes[peer].as_ref();
            remote.filter(|r| !over && !r.gone && !r.broken).map(|remote| remote.telling)
        };
        let peers = 0..self.remotes.len();
        if peers.clone().any(|peer| telling(self, peer) == Some(true)) {
            // The last news are under way, be it credit or the end.
            return Ok(false);
        }
        if self.closing {
            return Ok(true);
        }
        self.closing = true;
        for peer in peers {
            if telling(self, peer).is_none() {
                continue;
            }
            let Some(remote) = self.remotes[peer].as_mut() else { continue };
            remote.telling = true;
            let epochs = remote.arrivals.complete();
            let credit = Credit { immediates: remote.consumed, epochs };
            remote.told = credit;
            self.tell_peer(peer, credit, true)?;
        }
        Ok(false)
    }

    /// Sleeps until a command, a completion, or a while has come.
    fn sleep(&mut self) -> Result<()> {
        self.device.arm()?;
        // What came before arming would ring no more.
        if self.reap()? || !self.commands.prepare_sleep() {
            self.commands.awake();
            return Ok(());
        }
        self.note_unsent();
        let waits = |r: &Remote| r.sender.waiting();
        let starved = self.remotes.iter().flatten().any(waits) || !self.doubtful.is_empty();
        let bound =
            if starved || self.shared.stopping.load(Ordering::Acquire) { STARVED } else { SLICE };
        let slept = self.device.sleep(self.bell.as_fd(), bound);
        self.commands.awake();
        let mut rings = [0u8; 8];
        // Nothing to read is fine: the descriptor does not block.
        let _ = rustix::io::read(&*self.bell, &mut rings);
        if slept? {
            self.look_next_round();
        }
        Ok(())
    }

    fn note_unsent(&self) {
        for (peer, remote) in self.remotes.iter().enumerate() {
            let unsent = remote.as_ref().is_some_and(|remote| !remote.sender.idle());
            self.shared.set_unsent(self.setup.nic, peer, unsent);
        }
    }

    /// The error of a link that is dropped before everything was sent.
    fn unsent(&self) -> TransportError {
        self.note_unsent();
        let error = self.shared.unanswered("close", self.setup.drain);
        tracing::warn!(%error, "a link is dropped before everything was sent");
        error
    }
}
