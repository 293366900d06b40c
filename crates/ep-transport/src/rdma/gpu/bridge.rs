//! What streams order of ranks that they do not reach: a thread takes it to the proxies.
//!
//! A stream cannot put or signal to another node, but it can write a word. So the caller appends its order
//! to the stream's queue and submits the write of a growing number, the *mark*, to the stream's *doorbell*
//! in page-locked memory; whatever precedes the mark on the stream is done once it is there. The bridge
//! executes the orders whose mark has come, in their order. The same way a stream is told that the sources
//! of its puts are free: it awaits a word that the bridge sets.
//!
//! Nobody waits for this thread without end, since it calls the driver, which may not come back: a stream's
//! wait for its sources is marked for the watchdog, and who drops the bridge goes on after a while.
//!
//! Nobody waits for a stream here: a caller may be held up in the driver, which waits for streams, which
//! wait for flags that the bridge raises. So what callers hold meanwhile ([`Turn`]) the bridge never takes.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::super::core::Tickets;
pub(super) use crate::rdma_plan::LANES;
use crate::{Deadline, Put, Result, TransportError};

/// Orders of a stream that there is room for from its first on.
const ROOM: usize = 256;
/// Puts of fewer bytes go with what is ordered next: a mark takes the stream a microsecond or more.
const LARGE: usize = 64 << 10;
/// Marks are the numbers of orders, from this on, modulo [`MARKS`]: lower ones mean something else to the
/// kernel that writes words.
const FIRST: u64 = 4;
const MARKS: u64 = (1 << 32) - 2 * FIRST;
/// A bridge that waits polls for so long before it sleeps in between: at first for so long at a time, then
/// for longer the longer it has waited, up to the other bound.
const SPIN: Duration = Duration::from_micros(50);
const NAP: Duration = Duration::from_micros(20);
const LONG_NAP: Duration = Duration::from_micros(500);
/// The longest sleep with nothing to wait for: a safety net.
const SLICE: Duration = Duration::from_millis(50);
/// The longest that others wait for the bridge to look.
const SETTLE: Duration = Duration::from_millis(200);
/// How much longer than it may take the end of the thread is waited for.
const LAST: Duration = Duration::from_millis(200);
const OP: &str = "rdma";

/// What a bridge joins: streams' words on one side, proxies on the other.
pub(super) trait Ends: Send + Sync + 'static {
    fn put(&self, put: Put) -> Result<()>;
    fn signal(&self, peer: usize, flag: u32) -> Result<()>;
    /// What has been ordered of the proxies so far, and whether that much is done.
    fn pushed(&self) -> Tickets;
    fn are_retired(&self, tickets: &Tickets) -> bool;
    /// The error of what was not done within `after`.
    fn unanswered(&self, after: Duration) -> TransportError;
    /// The doorbell of a lane.
    fn bell(&self, lane: usize) -> u32;
    /// Lets the stream of a lane go on, and whether it has not taken note of that yet.
    fn let_go(&self, lane: usize);
    fn is_let_go(&self, lane: usize) -> bool;
    /// Makes the GPU see what has come.
    fn see(&self) -> Result<()>;
    /// Raises a flag of another rank here.
    fn raise(&self, flag: u32, source: usize);
    /// Tells everyone of a failure, and whether there was one.
    fn fail(&self, error: &TransportError);
    fn failed(&self) -> bool;
    /// Whether there is a core to poll on.
    fn spins(&self) -> bool;
}

/// What a stream orders.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Step {
    Put(Put),
    Signal {
        peer: usize,
        flag: u32,
    },
    /// The stream goes on once the sources of what was put before are free, within this time.
    Flush(Duration),
}

/// What callers of one stream hold while they order.
#[derive(Debug, Default)]
struct Turn {
    /// The stream; 0 at first.
    stream: usize,
    /// Something was put since the last flush.
    unflushed: bool,
}

/// The orders of one stream.
#[derive(Debug, Default)]
struct Orders {
    /// Each with the number whose mark it waits for.
    queue: VecDeque<(u64, Step)>,
    /// Marks that were submitted, and that have come.
    told: u64,
    reached: u64,
    /// The stream waits until so much is done.
    flushing: Option<(Tickets, Deadline)>,
    /// The bridge has taken an order that it has not passed on yet.
    executing: bool,
}

impl Orders {
    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.flushing.is_none() && !self.executing
    }
}

#[derive(Debug, Default)]
struct Lane {
    turn: Mutex<Turn>,
    orders: Mutex<Orders>,
    /// There are orders; changed under their lock.
    busy: AtomicBool,
}

/// Flags that have come and are raised once the GPU sees what came before them.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    come: Mutex<Vec<(u32, usize)>>,
    any: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Inbox {
    /// With room for as many as there can be.
    pub(super) fn new(flags: usize) -> Arc<Self> {
        Arc::new(Self { come: Mutex::new(Vec::with_capacity(flags)), ..Self::default() })
    }

    /// From a proxy: it waits for nobody.
    pub(super) fn came(&self, flag: u32, source: usize) {
        self.come.lock().push((flag, source));
        self.any.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

/// The mark of order `number`.
fn mark(number: u64) -> u32 {
    (FIRST + number % MARKS) as u32
}

/// The number of the last order whose mark has come, of which `before` had.
fn reached(before: u64, mark: u32) -> u64 {
    match u64::from(mark).checked_sub(FIRST) {
        Some(mark) => before + (mark + MARKS - before % MARKS) % MARKS,
        // Nothing was written yet.
        None => before,
    }
}

pub(super) struct Works<E> {
    pub ends: E,
    lanes: Vec<Lane>,
    /// Streams by lane, for those who look for theirs.
    streams: Mutex<[usize; LANES]>,
    inbox: Arc<Inbox>,
    stopping: AtomicBool,
    /// Until when what has come is done, once it is stopping.
    end: OnceLock<Deadline>,
    broken: AtomicBool,
    /// How often everything was looked at.
    passes: AtomicU64,
}

/// What came of a look at everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Pass {
    moved: bool,
    /// Something is bound to come.
    expects: bool,
}

impl<E: Ends> Works<E> {
    pub(super) fn new(ends: E, inbox: Arc<Inbox>) -> Self {
        Self {
            ends,
            lanes: (0..LANES).map(|_| Lane::default()).collect(),
            streams: Mutex::new([0; LANES]),
            inbox,
            stopping: AtomicBool::new(false),
            end: OnceLock::new(),
            broken: AtomicBool::new(false),
            passes: AtomicU64::new(0),
        }
    }

    /// Appends an order of `stream` (not 0). `tell` submits what writes a mark to the doorbell of a lane;
    /// it is not called where nothing has to be told.
    pub(super) fn order(
        &self,
        stream: usize,
        step: Step,
        tell: impl FnOnce(usize, u32) -> Result<()>,
    ) -> Result<()> {
        // Another stream may have its lane by now; then what it put has been passed on.
        if let (Step::Flush(_), None) = (step, self.known(stream))
            && self.ends.are_retired(&self.ends.pushed())
        {
            return Ok(());
        }
        let (index, mut turn) = loop {
            let index = self.lane_of(stream)?;
            let turn = self.lanes[index].turn.lock();
            // Another may have got the lane meanwhile.
            if turn.stream == stream {
                break (index, turn);
            }
        };
        let lane = &self.lanes[index];
        if let Step::Flush(_) = step {
            if !std::mem::take(&mut turn.unflushed) || self.is_done(lane) {
                return Ok(());
            }
        } else if let Step::Put(_) = step {
            turn.unflushed = true;
        }
        let mut orders = lane.orders.lock();
        if orders.queue.capacity() == 0 {
            orders.queue.reserve(ROOM);
        }
        let number = orders.told + 1;
        orders.queue.push_back((number, step));
        lane.busy.store(true, Ordering::Release);
        if matches!(step, Step::Put(put) if put.bytes < LARGE) {
            return Ok(());
        }
        orders.told = number;
        drop(orders);
        let told = tell(index, mark(number));
        if told.is_err() {
            // Its mark will not come; `turn` keeps it the last.
            let mut orders = lane.orders.lock();
            orders.queue.pop_back();
            orders.told -= 1;
            turn.unflushed |= matches!(step, Step::Flush(_));
        }
        self.inbox.wake();
        told
    }

    /// Whether everything that was ordered by now is done.
    fn is_done(&self, lane: &Lane) -> bool {
        lane.orders.lock().is_idle() && self.ends.are_retired(&self.ends.pushed())
    }

    fn known(&self, stream: usize) -> Option<usize> {
        self.streams.lock().iter().position(|&one| one == stream)
    }

    /// The lane of a stream: its own, or one that nobody uses.
    fn lane_of(&self, stream: usize) -> Result<usize> {
        let mut streams = self.streams.lock();
        if let Some(known) = streams.iter().position(|&one| one == stream) {
            return Ok(known);
        }
        let free = |index: &usize| {
            let lane = &self.lanes[*index];
            let Some(mut turn) = lane.turn.try_lock() else { return false };
            let orders = lane.orders.lock();
            let reached = orders.reached == orders.told;
            let free = orders.is_idle() && reached && !self.ends.is_let_go(*index);
            if free {
                (turn.stream, turn.unflushed) = (stream, true);
            }
            free
        };
        // Those that were never used first.
        let unused = streams.iter().position(|&one| one == 0);
        let found = unused.filter(free).or_else(|| (0..LANES).find(free));
        let found = found.ok_or_else(|| {
            let detail = format!("more than {LANES} streams have puts and signals under way");
            TransportError::Argument { op: "put", detail }
        })?;
        streams[found] = stream;
        Ok(found)
    }

    /// Looks at everything once.
    fn pass(&self) -> Result<Pass> {
        let mut pass = Pass { moved: self.deliver()?, expects: false };
        for (index, lane) in self.lanes.iter().enumerate() {
            if lane.busy.load(Ordering::Acquire) {
                self.serve(index, lane, &mut pass)?;
            }
        }
        self.passes.fetch_add(1, Ordering::Release);
        Ok(pass)
    }

    /// Raises what flags have come; whether there were any.
    fn deliver(&self) -> Result<bool> {
        if !self.inbox.any.swap(false, Ordering::Acquire) {
            return Ok(false);
        }
        // What comes later is seen by the next look.
        let count = self.inbox.come.lock().len();
        self.ends.see()?;
        let mut come = self.inbox.come.lock();
        come.drain(..count).for_each(|(flag, source)| self.ends.raise(flag, source));
        Ok(count > 0)
    }

    /// Executes what orders of a lane have come.
    fn serve(&self, index: usize, lane: &Lane, pass: &mut Pass) -> Result<()> {
        while let Some(step) = self.next(index, lane, pass)? {
            pass.moved = true;
            let broken = self.broken.load(Ordering::Relaxed);
            match step {
                Step::Put(put) if !broken => self.ends.put(put)?,
                Step::Signal { peer, flag } if !broken => self.ends.signal(peer, flag)?,
                Step::Flush(_) if broken => self.ends.let_go(index),
                Step::Flush(allowed) => {
                    let until = Deadline::after(allowed);
                    lane.orders.lock().flushing = Some((self.ends.pushed(), until));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn next(&self, index: usize, lane: &Lane, pass: &mut Pass) -> Result<Option<Step>> {
        let mut orders = lane.orders.lock();
        orders.executing = false;
        if let Some((tickets, deadline)) = &orders.flushing {
            if self.ends.are_retired(tickets) || self.broken.load(Ordering::Relaxed) {
                orders.flushing = None;
                pass.moved = true;
                self.ends.let_go(index);
            } else if deadline.expired() {
                let after = deadline.length();
                orders.flushing = None;
                return Err(self.ends.unanswered(after));
            } else {
                pass.expects = true;
                return Ok(None);
            }
        }
        orders.reached = reached(orders.reached, self.ends.bell(index));
        match orders.queue.front() {
            Some((number, _)) if *number <= orders.reached => {
                orders.executing = true;
                Ok(orders.queue.pop_front().map(|(_, step)| step))
            }
            Some(_) => {
                pass.expects |= orders.told > orders.reached;
                Ok(None)
            }
            None => {
                // A mark whose order a failed call took back does not come.
                lane.busy.store(false, Ordering::Release);
                Ok(None)
            }
        }
    }

    /// Waits, bounded, until everything that has come by now was looked at.
    pub(super) fn settle(&self) {
        let goal = self.passes.load(Ordering::Acquire).saturating_add(2);
        let deadline = Deadline::after(SETTLE);
        while self.passes.load(Ordering::Acquire) < goal && !deadline.expired() {
            self.inbox.wake();
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// The error of what was to be done by the proxies, or here, within `after`.
    pub(super) fn unanswered(&self, after: Duration) -> TransportError {
        match self.ends.unanswered(after) {
            TransportError::Timeout { op, peers, after, .. } if peers.is_empty() => {
                let hint = ": what takes orders of streams to other nodes, or the driver's call by which \
                            a GPU sees what has come, does not come to its end";
                TransportError::Timeout { op, peers, after, hint: hint.into() }
            }
            error => error,
        }
    }

    /// Has the thread end, by what this gives at the latest.
    fn stop(&self, drain: Duration) -> Deadline {
        let end = *self.end.get_or_init(|| Deadline::after(drain));
        self.stopping.store(true, Ordering::Release);
        end
    }

    /// Lets streams go whose sources nobody frees any more, which is everyone's error.
    fn give_up(&self) {
        for (index, lane) in self.lanes.iter().enumerate() {
            let waits = lane.orders.lock().flushing.take();
            if let Some((_, deadline)) = waits {
                self.ends.fail(&self.ends.unanswered(deadline.length()));
                self.ends.let_go(index);
            }
        }
    }

    fn run(&self) {
        let mut idle: Option<Instant> = None;
        loop {
            // Before the look: what was ordered before the end is seen by it.
            let stopping = self.stopping.load(Ordering::Acquire);
            let pass = self.guarded();
            if stopping {
                let expired = self.end.get().is_some_and(Deadline::expired);
                let late = expired || self.ends.failed();
                if !pass.moved && (late || !pass.expects) {
                    return self.give_up();
                }
            }
            if pass.moved {
                idle = None;
            } else if !pass.expects {
                idle = None;
                std::thread::park_timeout(SLICE);
            } else {
                let waited = idle.get_or_insert_with(Instant::now).elapsed();
                if self.ends.spins() && waited < SPIN {
                    std::hint::spin_loop();
                } else {
                    std::thread::park_timeout((waited / 8).clamp(NAP, LONG_NAP));
                }
            }
        }
    }

    /// A look whose failure, a panic too, is told to everyone.
    fn guarded(&self) -> Pass {
        let looked = catch_unwind(AssertUnwindSafe(|| self.pass())).unwrap_or_else(|_| {
            let detail = "the thread that takes orders of streams panicked".into();
            Err(TransportError::Device { op: OP, call: "bridge", code: libc::EIO, detail })
        });
        looked.unwrap_or_else(|error| {
            self.broken.store(true, Ordering::Relaxed);
            self.ends.fail(&error);
            Pass { moved: true, expects: true }
        })
    }
}

/// The thread, stopped when this drops, after what streams have come to.
pub(super) struct Bridge<E: Ends> {
    pub works: Arc<Works<E>>,
    thread: Option<JoinHandle<()>>,
    /// How long what streams have come to may take then.
    drain: Duration,
}

impl<E: Ends> Bridge<E> {
    pub(super) fn start(works: Works<E>, name: String, drain: Duration) -> Result<Self> {
        let works = Arc::new(works);
        let of_thread = works.clone();
        let spawned =
            std::thread::Builder::new().name(name).spawn(move || of_thread.run()).map_err(|e| {
                let code = e.raw_os_error().unwrap_or(libc::EAGAIN);
                let detail = "starting a bridge".into();
                TransportError::Os { op: "open", peer: None, code, detail }
            })?;
        let _ = works.inbox.thread.set(spawned.thread().clone());
        works.inbox.wake();
        Ok(Self { works, thread: Some(spawned), drain })
    }
}

impl<E: Ends> Drop for Bridge<E> {
    fn drop(&mut self) {
        let end = self.works.stop(self.drain);
        let Some(thread) = self.thread.take() else { return };
        thread.thread().unpark();
        let last = Deadline::after(end.remaining() + LAST);
        while !thread.is_finished() && !last.expired() {
            std::thread::sleep(Duration::from_micros(200));
        }
        if thread.is_finished() {
            // What befell it was told to everyone.
            let _ = thread.join();
            return;
        }
        // It has its own hold on what it uses: words of streams, proxies and what NICs know.
        let error = self.works.unanswered(self.drain);
        tracing::warn!(%error, "a bridge does not end; it is left as it is, with what it uses");
        self.works.ends.fail(&error);
    }
}

#[cfg(test)]
mod tests;
