//! Commands from many producers to one proxy thread: a bounded ring in memory that host threads
//! share and that a GPU can have mapped.
//!
//! # Layout
//! All words are 64 bits, little-endian, zero before first use; the ring is aligned to
//! [`ALIGNMENT`].
//!
//! | byte | what |
//! |---|---|
//! | [`HEAD`] | the next ticket to be claimed; tickets count commands from 0 |
//! | [`POSITION`] | the consumer's: how many commands it has taken |
//! | [`DOORBELL`] | 1 while the consumer sleeps or is about to, else 0 |
//! | [`CELLS`] + [`CELL_BYTES`] × (ticket mod capacity) | the cell of a ticket: a [`Command`] of 7 words, then at [`TURN`] its publication word |
//!
//! A cell holds the command of ticket t exactly if its publication word is t + 1. No other word
//! says so: the head may be ahead of commands that are still being written.
//!
//! # Memory order
//! * Publication: a producer writes the payload, then stores the publication word with Release;
//!   the consumer loads that with Acquire, then reads the payload.
//! * Reuse: the consumer reads the payload, then stores its position with Release. A producer may
//!   claim ticket t only after it has loaded, with Acquire, a position above t − capacity: whatever
//!   it writes comes after the cell's last command was read. Producers keep the last position they
//!   saw, so that they rarely touch the line that the consumer writes; those who share one
//!   [`Producer`] hand that on with Release and Acquire too.
//! * Claim: a Relaxed compare-exchange. It orders nothing; it only makes tickets unique and dense.
//! * Sleep: the consumer swaps 1 into the doorbell, a SeqCst fence, looks at its cell, and sleeps
//!   if that is not published. A producer publishes, a SeqCst fence, looks at the doorbell. One of
//!   the two fences comes first: if the producer's, the consumer sees the publication and stays
//!   awake; if the consumer's, the producer sees the doorbell. Then it swaps it for 0, and only who
//!   gets the 1 out of it calls the waker, hence one wake at most per announcement. What must be
//!   published for the consumer to go on is the cell at its position, and it is whoever publishes
//!   that cell who finds the doorbell set (others may wake it earlier, in vain). A producer
//!   that finds or gets a 0 wakes nobody: its fence came before the next announcement's, which
//!   will see what it published. That the 0 is older than the announcement is stated by the swaps'
//!   Acquire (consumer) and Release (producer).
//!
//! # A GPU as producer
//! The memory is page-locked, mapped and not write-combined. A thread writes the payload with plain
//! or relaxed stores and then `st.release.sys` of the publication word: a release at system scope
//! orders all the thread's earlier writes before it for every observer of that scope, and the host's
//! Acquire load is its counterpart. If several threads write one payload, a barrier of theirs
//! (`__syncwarp`, `bar.sync`) goes first: release is cumulative over what was observed through it.
//! The position is read by `ld.acquire.sys`. The head's compare-exchange is atomic against the
//! host's only where the device has native host atomics; elsewhere (PCIe) a GPU gets a ring of its
//! own, whose head only its threads touch. A GPU cannot call the waker, so a consumer that serves
//! one must bound its sleeps, or not sleep while kernels run.

use std::fmt::{Debug, Formatter};
use std::sync::Arc;

use crate::sync::Ordering;
use crate::{Deadline, Result, TransportError};

mod memory;

use memory::{AtomicU64, Memory, fence, pause};

/// One command, as the producer and the proxy agree.
pub type Command = [u64; 7];

/// Makes a sleeping consumer look at its ring, by writing to an eventfd for example. It must not
/// block, and what its caller stored must be visible to whom it wakes (system calls and locks do
/// that).
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// What a ring's first byte is aligned to; also the distance of the header's words, as processors
/// fetch lines of 64 bytes in pairs and GPUs have lines of this size.
pub const ALIGNMENT: usize = 128;
/// Where the head is.
pub const HEAD: usize = 0;
/// Where the consumer's position is.
pub const POSITION: usize = 128;
/// Where the doorbell is.
pub const DOORBELL: usize = 256;
/// Where the cells start.
pub const CELLS: usize = 384;
/// The size of a cell.
pub const CELL_BYTES: usize = 64;
/// Where the publication word is in a cell.
pub const TURN: usize = 56;

/// The doorbell of a consumer that sleeps, and of one that does not.
const ASLEEP: u64 = 1;
const AWAKE: u64 = 0;

/// Every cell is taken; nothing was claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the command ring is full")]
pub struct Full;

/// A ring whose two sides have not been taken yet.
#[derive(Debug)]
pub struct Ring {
    memory: Memory,
}

impl Ring {
    /// The bytes that a ring of `capacity` commands takes; none if that overflows.
    pub fn bytes(capacity: usize) -> Option<usize> {
        capacity.checked_mul(CELL_BYTES)?.checked_add(CELLS)
    }

    /// A ring of `capacity` commands, a power of two, in memory of its own.
    ///
    /// # Errors
    /// An argument error for another capacity, an operating system error if memory is short.
    pub fn new(capacity: usize) -> Result<Self> {
        let bytes = Self::checked_bytes(capacity)?;
        Ok(Self { memory: Memory::alloc(bytes, capacity)? })
    }

    /// The ring that starts `offset` bytes into `region`, zeroed before either side used it. Of all
    /// who open the same ring, in this and other processes, one may use the [`Consumer`].
    ///
    /// # Errors
    /// An argument error if `capacity` is no power of two, or if the ring does not fit there or is
    /// not aligned to [`ALIGNMENT`].
    #[cfg(not(loom))]
    pub fn over(region: Arc<dyn crate::Region>, offset: usize, capacity: usize) -> Result<Self> {
        let bytes = Self::checked_bytes(capacity)?;
        let memory = Memory::new(region, offset, bytes, capacity);
        let memory = memory.ok_or_else(|| {
            let detail = format!(
                "a ring of {capacity} commands does not fit at offset {offset} of the region"
            );
            TransportError::Argument { op: "ring", detail }
        })?;
        Ok(Self { memory })
    }

    fn checked_bytes(capacity: usize) -> Result<usize> {
        let bytes = Self::bytes(capacity).filter(|&bytes| bytes <= isize::MAX as usize);
        bytes.filter(|_| capacity.is_power_of_two()).ok_or_else(|| {
            let detail = format!("{capacity} commands: must be a power of two that fits in memory");
            TransportError::Argument { op: "ring", detail }
        })
    }

    /// The most commands it holds.
    pub fn capacity(&self) -> usize {
        self.memory.capacity()
    }

    /// The bytes of the memory it is in.
    #[cfg(all(test, feature = "rdma", not(loom)))]
    pub(crate) fn allocated(&self) -> usize {
        self.memory.region_bytes()
    }

    /// The two sides. `waker` is what producers call when the consumer sleeps. A side that this
    /// process does not need can be dropped.
    pub fn split(self, waker: Waker) -> (Producer, Consumer) {
        let seen = self.memory.position().load(Ordering::Acquire);
        let consumer = Consumer { memory: self.memory.clone(), position: seen };
        (Producer { memory: self.memory, waker, seen: AtomicU64::new(seen) }, consumer)
    }
}

/// The side that gives commands. Clones are cheap, and threads may also share one.
pub struct Producer {
    memory: Memory,
    waker: Waker,
    /// A position of the consumer that somebody has acquired; it may lag.
    seen: AtomicU64,
}

impl Debug for Producer {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Producer").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl Clone for Producer {
    fn clone(&self) -> Self {
        let seen = AtomicU64::new(self.seen.load(Ordering::Acquire));
        Self { memory: self.memory.clone(), waker: self.waker.clone(), seen }
    }
}

impl Producer {
    /// The most commands the ring holds.
    pub fn capacity(&self) -> usize {
        self.memory.capacity()
    }

    /// Gives a command, after all that this thread has stored and read; its ticket. Tickets are
    /// dense from 0 in the order in which commands are popped.
    ///
    /// # Errors
    /// [`Full`] if the ring is.
    pub fn try_push(&self, command: Command) -> Result<u64, Full> {
        let ticket = self.claim()?;
        self.publish(ticket, &command, Ordering::Release, Ordering::SeqCst);
        Ok(ticket)
    }

    /// [`Producer::try_push`] with other orders, for models that must fail.
    #[cfg(loom)]
    pub fn try_push_with(
        &self,
        command: Command,
        publish: Ordering,
        bell: Ordering,
    ) -> Result<u64, Full> {
        let ticket = self.claim()?;
        self.publish(ticket, &command, publish, bell);
        Ok(ticket)
    }

    /// Gives a command as [`Producer::try_push`] does, waiting while the ring is full: at first by
    /// yielding, then in short sleeps. `stop` is called meanwhile; its error ends the wait.
    ///
    /// # Errors
    /// What `stop` says, or a timeout that names no peer. The command was not given then.
    pub fn push(
        &self,
        op: &'static str,
        command: Command,
        deadline: Deadline,
        mut stop: impl FnMut() -> Result<()>,
    ) -> Result<u64> {
        let mut attempt = 0_u32;
        loop {
            if let Ok(ticket) = self.try_push(command) {
                return Ok(ticket);
            }
            stop()?;
            if deadline.expired() {
                let hint = format!(": the command ring of {} stays full", self.capacity());
                let after = deadline.length();
                return Err(TransportError::Timeout { op, peers: Vec::new(), after, hint });
            }
            pause(attempt, deadline.remaining());
            attempt = attempt.saturating_add(1);
        }
    }

    /// The next ticket, if its cell is free: a full ring claims nothing.
    fn claim(&self) -> Result<u64, Full> {
        let head = self.memory.head();
        let mut ticket = head.load(Ordering::Relaxed);
        while self.has_room(ticket) {
            let next = ticket.wrapping_add(1);
            match head.compare_exchange_weak(ticket, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok(ticket),
                Err(now) => ticket = now,
            }
        }
        Err(Full)
    }

    /// Whether the cell of `ticket` has been consumed.
    fn has_room(&self, ticket: u64) -> bool {
        // A ticket below the position is an old view of the head: its claim will fail.
        let room = |position| ticket.saturating_sub(position) < self.capacity() as u64;
        if room(self.seen.load(Ordering::Acquire)) {
            return true;
        }
        let position = self.memory.position().load(Ordering::Acquire);
        self.seen.store(position, Ordering::Release);
        room(position)
    }

    fn publish(&self, ticket: u64, command: &Command, publish: Ordering, bell: Ordering) {
        self.memory.write(ticket, command);
        self.memory.turn(ticket).store(ticket.wrapping_add(1), publish);
        fence(bell);
        let doorbell = self.memory.doorbell();
        // The load keeps the line shared among producers while the consumer is awake.
        if doorbell.load(Ordering::Relaxed) == ASLEEP
            && doorbell.swap(AWAKE, Ordering::Release) == ASLEEP
        {
            (self.waker)();
        }
    }
}

/// The side that takes commands.
#[derive(Debug)]
pub struct Consumer {
    memory: Memory,
    position: u64,
}

impl Consumer {
    /// The most commands the ring holds.
    pub fn capacity(&self) -> usize {
        self.memory.capacity()
    }

    /// The next command, if it has been published.
    pub fn pop(&mut self) -> Option<Command> {
        self.pop_with_ticket().map(|(_, command)| command)
    }

    /// The next command and its ticket, if it has been published.
    pub fn pop_with_ticket(&mut self) -> Option<(u64, Command)> {
        self.take(Ordering::Acquire, Ordering::Release)
    }

    /// [`Consumer::pop`] with other orders, for models that must fail.
    #[cfg(loom)]
    pub fn pop_with(&mut self, take: Ordering, free: Ordering) -> Option<Command> {
        self.take(take, free).map(|(_, command)| command)
    }

    fn take(&mut self, take: Ordering, free: Ordering) -> Option<(u64, Command)> {
        let ticket = self.position;
        let next = ticket.wrapping_add(1);
        if self.memory.turn(ticket).load(take) != next {
            return None;
        }
        let command = self.memory.read(ticket);
        self.position = next;
        self.memory.position().store(next, free);
        Some((ticket, command))
    }

    /// Whether there is nothing to pop now.
    pub fn is_empty(&self) -> bool {
        self.memory.turn(self.position).load(Ordering::Acquire) != self.position.wrapping_add(1)
    }

    /// Announces that the consumer will sleep until the waker is called: true if it may, false if
    /// there is a command after all (and then it counts as awake).
    ///
    /// After sleeping, for whatever reason that ended, it calls [`Consumer::awake`] and pops until
    /// there is nothing left. The waker is called at most once per announcement; a call may also
    /// come late, after the consumer woke by itself, or before the command at its position has been
    /// published.
    pub fn prepare_sleep(&mut self) -> bool {
        self.announce(Ordering::SeqCst)
    }

    /// [`Consumer::prepare_sleep`] with another fence, for models that must fail.
    #[cfg(loom)]
    pub fn prepare_sleep_with(&mut self, bell: Ordering) -> bool {
        self.announce(bell)
    }

    fn announce(&mut self, bell: Ordering) -> bool {
        self.memory.doorbell().swap(ASLEEP, Ordering::Acquire);
        fence(bell);
        let sleep = self.is_empty();
        if !sleep {
            self.awake();
        }
        sleep
    }

    /// Takes the announcement back: producers need not wake the consumer.
    pub fn awake(&mut self) {
        self.memory.doorbell().store(AWAKE, Ordering::Relaxed);
    }
}
