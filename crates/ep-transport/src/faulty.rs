//! A transport that delays, reorders and fails what another one carries.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::{
    Deadline, ForwardLink, Group, Link, Put, Queue, Result, Transport, TransportError, WindowSpec,
};

/// A failure to inject with [`FaultyTransport::fail`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Failure {
    /// A put fails, and with it everything to the same peer that is still under way or comes later.
    PutError,
    /// The same for a signal.
    SignalError,
    /// A put and everything to the same peer that comes later is lost without an error, as if the
    /// peer had died or the way to it were cut. Waits on both sides then run into their deadlines.
    PutLost,
    /// The same for a signal.
    SignalLost,
    /// The rank's link fails: every put, signal, flush and wait that begins later is an error, and
    /// what is under way is lost.
    LinkDown,
}

/// A transport over another one, for tests of what is built on transports: it keeps every promise
/// of [`Link`] and no more, and fails where it is told to.
///
/// It holds puts and signals back, as a network might:
///
/// * The puts to a peer between two signals to it are carried out in any order, and as late as right
///   before the later signal. A flush carries out all puts.
/// * Signals are carried out in any order and late, each after the puts that came before it. Closing
///   the link carries out whatever is still held back.
///
/// Which operations are held back, by how much, and the order of held puts are drawn from the seed,
/// the rank and the number of operations that the calling thread has submitted on the link before,
/// so they are the same in every run. Only how delays overlap is up to the clock.
///
/// Operations on streams and loads and stores in mapped windows go their way undisturbed; wrap a
/// transport with bulk peers to test that path:
///
/// ```
/// use std::time::Duration;
/// use ep_transport::{Failure, FaultyTransport, ThreadTransport};
///
/// let inner = ThreadTransport::new().bulk(true);
/// // Every second operation is up to 5 ms late, and what rank 1 puts after its first 40 puts and
/// // signals vanishes.
/// let transport = FaultyTransport::new(inner, 17)
///     .delays(0.5, Duration::from_millis(5))
///     .fail(1, 40, Failure::PutLost);
/// # let _ = transport;
/// ```
#[derive(Clone, Debug)]
pub struct FaultyTransport<T> {
    inner: T,
    dice: Dice,
    failures: Vec<(usize, u64, Failure)>,
}

impl<T: Transport> FaultyTransport<T> {
    /// Half of the operations over `inner` are up to 1 ms late; none fails.
    pub fn new(inner: T, seed: u64) -> Self {
        let dice = Dice { seed, share: 0.5, longest: Duration::from_millis(1) };
        Self { inner, dice, failures: Vec::new() }
    }

    /// Holds back a `share` of the operations, 0.0 to 1.0, each by at most `longest`. Most delays
    /// are a small part of it: they average a ninth. `longest` is at most a century.
    pub fn delays(mut self, share: f64, longest: Duration) -> Self {
        // So that adding one to the clock overflows nowhere.
        const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
        (self.dice.share, self.dice.longest) = (share, longest.min(CENTURY));
        self
    }

    /// Lets `failure` befall the first operation of its kind that `rank` submits to another rank
    /// after `after` puts and signals to other ranks. The error of an operation that is held back
    /// comes with a later call and is told to the group ([`Group::report`]).
    ///
    /// May be called several times.
    pub fn fail(mut self, rank: usize, after: u64, failure: Failure) -> Self {
        self.failures.push((rank, after, failure));
        self
    }
}

impl<T: Transport> Transport for FaultyTransport<T> {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn maps_all_peers(&self) -> bool {
        self.inner.maps_all_peers()
    }

    fn open(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Arc<dyn Link>> {
        let inner = self.inner.open(group, spec, deadline)?;
        let mine = self.failures.iter().filter(|(rank, ..)| *rank == group.rank());
        let state = State {
            failures: mine.map(|&(_, after, failure)| (after, failure)).collect(),
            paths: vec![Path::Good; group.world()],
            ..State::default()
        };
        let (group, dice) = (group.clone(), self.dice);
        let (state, bell) = (Mutex::new(state), Condvar::new());
        let wire = Arc::new(Wire { group, spec, dice, inner, state, bell });
        let late = wire.clone();
        let carrier = std::thread::Builder::new().name("ep-faulty".into());
        let carrier = carrier.spawn(move || late.carry()).map_err(|e| TransportError::Os {
            op: "open",
            peer: None,
            code: e.raw_os_error().unwrap_or(libc::EAGAIN),
            detail: "cannot start a thread".into(),
        });
        let carrier = carrier.inspect_err(|error| wire.group.report(error))?;
        Ok(Arc::new(FaultyLink { wire, carrier: Some(carrier) }))
    }
}

/// How delays are drawn.
#[derive(Clone, Copy, Debug)]
struct Dice {
    seed: u64,
    share: f64,
    longest: Duration,
}

impl Dice {
    /// How long operation `nth` of a thread of `rank` is held back; `None` if it is not.
    fn draw(&self, rank: usize, nth: u64) -> Option<Duration> {
        let place = mix(self.seed ^ mix(nth)) ^ rank as u64;
        let uniform = |n: u64| mix(place.wrapping_add(n)) as f64 / u64::MAX as f64;
        // The eighth power: short delays, as of adaptive routing, and few long ones, as of
        // retransmissions.
        (uniform(1 << 32) < self.share).then(|| self.longest.mul_f64(uniform(2 << 32).powi(8)))
    }
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
/// 2014).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[derive(Clone, Copy, Debug)]
enum What {
    Put(Put),
    Signal { peer: usize, flag: u32 },
}

impl What {
    fn peer(&self) -> usize {
        match *self {
            What::Put(put) => put.peer,
            What::Signal { peer, .. } => peer,
        }
    }

    fn is_put(&self) -> bool {
        matches!(self, What::Put(_))
    }
}

/// An operation on its way.
#[derive(Debug)]
struct Op {
    what: What,
    /// How much later than submitted; gives held puts their order.
    delay: Duration,
    due: Instant,
    /// The error to end with instead of being carried out.
    fails: Option<TransportError>,
}

/// The way to a peer.
#[derive(Clone, Debug)]
enum Path {
    Good,
    /// Swallows what is submitted.
    Silent,
    /// Fails what is submitted, and what is under way.
    Broken(TransportError),
}

#[derive(Debug, Default)]
struct State {
    /// Operations submitted to other ranks.
    submitted: u64,
    /// Operations submitted by each thread.
    drawn: HashMap<ThreadId, u64>,
    /// What is held back, in the order of submission.
    held: Vec<Op>,
    /// By peer.
    paths: Vec<Path>,
    /// Failures to come, each behind so many operations.
    failures: Vec<(u64, Failure)>,
    /// The error of a link that is down.
    down: Option<TransportError>,
    closing: bool,
}

impl State {
    /// The failure that befalls the next operation, if any.
    fn strike(&mut self, put: bool) -> Option<(u64, Failure)> {
        let now = self.submitted;
        self.submitted += 1;
        let befalls = |failure| match failure {
            Failure::PutError | Failure::PutLost => put,
            Failure::SignalError | Failure::SignalLost => !put,
            Failure::LinkDown => true,
        };
        let at = self.failures.iter().position(|&(after, f)| after <= now && befalls(f))?;
        Some((now, self.failures.swap_remove(at).1))
    }

    fn shut(&mut self, error: &TransportError) {
        self.held.clear();
        self.paths.fill(Path::Broken(error.clone()));
        self.down = Some(error.clone());
    }

    fn first_error(&self) -> Option<TransportError> {
        self.paths.iter().find_map(|path| match path {
            Path::Broken(error) => Some(error.clone()),
            _ => None,
        })
    }

    /// The held operation whose time comes first.
    fn next(&self) -> Option<(usize, Instant)> {
        self.held.iter().enumerate().map(|(at, op)| (at, op.due)).min_by_key(|&(_, due)| due)
    }
}

fn injected(op: &'static str, peer: Option<usize>, code: i32, after: u64) -> TransportError {
    let to = peer.map_or_else(String::new, |peer| format!("to rank {peer}, "));
    TransportError::Os { op, peer, code, detail: format!("{to}injected after {after} operations") }
}

/// What callers and the thread that carries out late operations share.
#[derive(Debug)]
struct Wire {
    group: Group,
    spec: WindowSpec,
    dice: Dice,
    inner: Arc<dyn Link>,
    state: Mutex<State>,
    /// Something new is held back, or the link closes.
    bell: Condvar,
}

impl Wire {
    fn submit(&self, what: What) -> Result<()> {
        let mut state = self.state.lock();
        let (peer, rank) = (what.peer(), self.group.rank());
        match &state.paths[peer] {
            Path::Broken(error) => return Err(error.clone()),
            Path::Silent => return Ok(()),
            Path::Good => {}
        }
        let strike = if peer == rank { None } else { state.strike(what.is_put()) };
        let fails = match strike {
            Some((_, Failure::PutLost | Failure::SignalLost)) => {
                state.paths[peer] = Path::Silent;
                return Ok(());
            }
            Some((after, Failure::LinkDown)) => {
                let error = injected("link", None, libc::ENETDOWN, after);
                state.shut(&error);
                return Err(error);
            }
            Some((after, failure)) => {
                let op = if failure == Failure::PutError { "put" } else { "signal" };
                Some(injected(op, Some(peer), libc::EIO, after))
            }
            None => None,
        };
        let nth = state.drawn.entry(std::thread::current().id()).or_default();
        let delay = self.dice.draw(rank, *nth);
        *nth += 1;
        let late = delay.unwrap_or_default();
        state.held.push(Op { what, delay: late, due: Instant::now() + late, fails });
        if delay.is_none() {
            let last = state.held.len() - 1;
            return self.release(&mut state, last);
        }
        self.bell.notify_one();
        Ok(())
    }

    /// Carries out the held operation `at`, and before a signal the puts it follows.
    fn release(&self, state: &mut State, at: usize) -> Result<()> {
        let op = state.held.remove(at);
        if !op.what.is_put() {
            self.release_puts(state, at, Some(op.what.peer()))?;
        }
        self.carry_out(state, op)
    }

    /// Carries out the puts among the first `before` held operations, to `peer` or to all, the
    /// least delayed first.
    fn release_puts(&self, state: &mut State, before: usize, peer: Option<usize>) -> Result<()> {
        let wanted = |op: &mut Op| op.what.is_put() && peer.is_none_or(|p| p == op.what.peer());
        let mut puts: Vec<Op> = state.held.extract_if(..before, wanted).collect();
        puts.sort_by_key(|put| put.delay);
        // The puts to other peers go out even if one fails: their signals may follow yet.
        let mut done = Ok(());
        puts.into_iter().for_each(|put| done = done.clone().and(self.carry_out(state, put)));
        done
    }

    /// Carries out one operation, or lets it fail.
    fn carry_out(&self, state: &mut State, op: Op) -> Result<()> {
        let (peer, queue) = (op.what.peer(), Queue::host());
        if let Path::Broken(error) = &state.paths[peer] {
            return Err(error.clone());
        }
        let done = match (op.fails, op.what) {
            (Some(error), _) => Err(error),
            (None, What::Put(put)) => self.inner.put(&queue, put),
            (None, What::Signal { peer, flag }) => self.inner.signal(&queue, peer, flag),
        };
        done.inspect_err(|error| {
            state.held.retain(|op| op.what.peer() != peer);
            state.paths[peer] = Path::Broken(error.clone());
        })
    }

    /// As [`Wire::release`], where there is no caller to give an error to.
    fn release_late(&self, state: &mut MutexGuard<'_, State>, at: usize) {
        if let Err(error) = self.release(state, at) {
            self.group.report(&error);
        }
    }

    /// Carries out what is held back when its time has come, until the link closes.
    fn carry(&self) {
        let mut state = self.state.lock();
        while !state.closing {
            match state.next() {
                None => self.bell.wait(&mut state),
                Some((at, due)) if due <= Instant::now() => self.release_late(&mut state, at),
                Some((_, due)) => _ = self.bell.wait_until(&mut state, due),
            }
        }
    }

    /// Whether a put can be held back: one that leaves the window is for the inner link to refuse.
    fn is_sound(&self, put: &Put) -> bool {
        let inside =
            |start: usize| start.checked_add(put.bytes).is_some_and(|e| e <= self.spec.bytes);
        put.peer < self.group.world() && inside(put.from) && inside(put.to)
    }
}

#[derive(Debug)]
struct FaultyLink {
    wire: Arc<Wire>,
    carrier: Option<JoinHandle<()>>,
}

impl Drop for FaultyLink {
    fn drop(&mut self) {
        let mut state = self.wire.state.lock();
        while let Some((at, _)) = state.next() {
            self.wire.release_late(&mut state, at);
        }
        state.closing = true;
        drop(state);
        self.wire.bell.notify_one();
        if let Some(carrier) = self.carrier.take() {
            // It has nothing to tell; a panic of the inner link has been printed.
            let _ = carrier.join();
        }
    }
}

// SAFETY: mappings are the inner link's. A signal is given to it after all puts to that peer that
// were submitted before, and the sources of puts are read before a flush returns. A failure may
// withhold signals and puts with them, never only puts.
unsafe impl ForwardLink for FaultyLink {
    fn inner(&self) -> &dyn Link {
        &*self.wire.inner
    }

    fn put(&self, queue: &Queue, put: Put) -> Result<()> {
        if !queue.is_host() || !self.wire.is_sound(&put) {
            return self.inner().put(queue, put);
        }
        self.wire.submit(What::Put(put))
    }

    fn flush(&self, queue: &Queue, deadline: Deadline) -> Result<()> {
        if queue.is_host() {
            let mut state = self.wire.state.lock();
            let all = state.held.len();
            let released = self.wire.release_puts(&mut state, all, None);
            released.and(state.first_error().map_or(Ok(()), Err))?;
        }
        self.inner().flush(queue, deadline)
    }

    fn signal(&self, queue: &Queue, peer: usize, flag: u32) -> Result<()> {
        let sound = peer < self.wire.group.world() && flag < self.wire.spec.flags;
        if !queue.is_host() || !sound {
            return self.inner().signal(queue, peer, flag);
        }
        self.wire.submit(What::Signal { peer, flag })
    }

    fn wait(
        &self,
        queue: &Queue,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()> {
        if let Some(error) = self.wire.state.lock().down.clone() {
            return Err(error);
        }
        self.inner().wait(queue, op, peers, flag, deadline)
    }
}
