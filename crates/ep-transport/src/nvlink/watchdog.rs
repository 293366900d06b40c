//! Waits on streams end: a thread that looks at flags, and at streams that wait for their sources to be
//! free, and releases them when their time is over or the group has failed. It makes no call of the driver.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::board::Board;
use crate::{Group, TransportError};

/// How often flags are looked at, while they are released and otherwise.
const RELEASING: Duration = Duration::from_millis(1);
const LOOKING: Duration = Duration::from_millis(5);

/// How often a wait looks again after the news that a peer has gone, where its last words may have come
/// and not been told yet.
pub(super) const LOOKS: u32 = 3;

/// Who is absent from a wait, with what marks it.
type Absent = Vec<(usize, u32)>;

/// When each wait began to look as it does now.
#[derive(Debug, Default)]
pub(super) struct Progress(Vec<Option<(Absent, Instant)>>);

impl Progress {
    /// Notes what is to be seen of a wait. True if it has looked so for longer than `allowed`.
    fn stuck(&mut self, wait: usize, absent: &Absent, allowed: Duration, now: Instant) -> bool {
        if self.0.len() <= wait {
            self.0.resize(wait + 1, None);
        }
        if absent.is_empty() {
            self.0[wait] = None;
            return false;
        }
        match &self.0[wait] {
            Some((before, since)) if before == absent => now.duration_since(*since) > allowed,
            _ => {
                self.0[wait] = Some((absent.clone(), now));
                false
            }
        }
    }
}

/// What callers told of their waits: for flags, by number, then of streams for their sources.
#[derive(Debug)]
pub(super) struct Waits {
    flags: usize,
    /// Nanoseconds a wait may take.
    allowed: Vec<AtomicU64>,
    /// What waits.
    ops: Vec<Mutex<&'static str>>,
    marks: AtomicU32,
}

impl Waits {
    pub fn new(flags: u32, streams: usize) -> Self {
        let (flags, all) = (flags as usize, flags as usize + streams);
        Self {
            flags,
            // A kernel may mark a wait before it is submitted.
            allowed: (0..all).map(|_| AtomicU64::new(u64::MAX)).collect(),
            ops: (0..all).map(|_| Mutex::new("a wait on a stream")).collect(),
            marks: AtomicU32::new(0),
        }
    }

    /// A mark for a wait that no kernel marks: even, as theirs are odd, another one every time, so that
    /// two waits are not taken for one, and one that [`super::words`] can write.
    pub fn mark(&self) -> u32 {
        self.marks.fetch_add(2, Ordering::Relaxed).wrapping_add(4).max(super::words::LEAST_MARK)
    }

    /// A wait for `flag` is about to be submitted.
    pub fn submit(&self, op: &'static str, flag: u32, allowed: Duration) {
        self.expect(op, flag as usize, allowed);
    }

    /// A stream is about to be told to wait for its sources.
    #[cfg(feature = "rdma")]
    pub fn submit_flush(&self, op: &'static str, stream: usize, allowed: Duration) {
        self.expect(op, self.flags + stream, allowed);
    }

    fn expect(&self, op: &'static str, wait: usize, allowed: Duration) {
        let nanos = u64::try_from(allowed.as_nanos()).unwrap_or(u64::MAX);
        self.allowed[wait].store(nanos, Ordering::Relaxed);
        *self.ops[wait].lock() = op;
    }
}

/// What knows of ranks that raise no flags themselves.
pub(crate) trait Others: Send + Sync {
    /// Waits, bounded, until what has come from them has been told.
    fn settle(&self);
    /// The error of a stream whose sources were not free within `after`.
    fn unanswered(&self, op: &'static str, after: Duration) -> TransportError;
}

/// Of a link of which some ranks raise no flags themselves.
pub(super) struct Beyond(OnceLock<Box<dyn Others>>);

impl std::fmt::Debug for Beyond {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Beyond")
    }
}

/// What the thread shares with its link.
#[derive(Debug)]
pub(super) struct Shared {
    pub board: Board,
    pub waits: Waits,
    beyond: Beyond,
    stop: AtomicBool,
    news: AtomicBool,
    lock: Mutex<()>,
    bell: Condvar,
}

/// The thread, stopped when this drops.
#[derive(Debug)]
pub(super) struct Watchdog {
    pub shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Watchdog {
    pub fn start(group: &Group, board: Board, waits: Waits) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::new(board, waits));
        super::graveyard::watch(&shared);
        let (of_thread, group) = (shared.clone(), group.clone());
        let thread = std::thread::Builder::new()
            .name("ep-watchdog".into())
            .spawn(move || of_thread.run(&group))?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Shared {
    fn new(board: Board, waits: Waits) -> Self {
        Self {
            board,
            waits,
            beyond: Beyond(OnceLock::new()),
            stop: AtomicBool::new(false),
            news: AtomicBool::new(false),
            lock: Mutex::new(()),
            bell: Condvar::new(),
        }
    }

    /// Makes the thread look at once.
    pub fn ring(&self) {
        self.news.store(true, Ordering::Release);
        self.bell.notify_all();
    }

    fn run(&self, group: &Group) {
        let mut progress = Progress::default();
        let mut poisoned = false;
        while !self.stop.load(Ordering::Acquire) {
            if !poisoned {
                let stuck = self.look(&mut progress);
                if let Some(error) = &stuck {
                    group.report(error);
                }
                poisoned = stuck.is_some() || self.bad_news(group);
                if poisoned {
                    self.board.poison();
                }
            }
            if poisoned {
                // Streams reset what they consume; whatever is submitted later passes too.
                self.board.release();
            }
            let mut guard = self.lock.lock();
            if !self.news.swap(false, Ordering::Acquire) {
                let slice = if poisoned { RELEASING } else { LOOKING };
                self.bell.wait_for(&mut guard, slice);
            }
        }
    }

    /// Whether waits on streams cannot end. A peer may have left once its last words had arrived.
    fn bad_news(&self, group: &Group) -> bool {
        const OP: &str = "a wait on a stream";
        let health = group.health();
        let stuck = || health.check_waiting(OP, &self.waited_for()).is_err();
        let mut looks = LOOKS;
        while stuck() {
            if looks == 0 || health.check(OP).is_err() || !self.settle() {
                return true;
            }
            looks -= 1;
        }
        false
    }

    /// Who knows of ranks that raise no flags themselves.
    #[cfg(any(feature = "rdma", test))]
    pub fn ask(&self, others: impl Others + 'static) {
        // Once, when a link is made.
        let _ = self.beyond.0.set(Box::new(others));
    }

    /// Waits, bounded, until what has come has been told; false if everyone tells by himself.
    pub fn settle(&self) -> bool {
        let beyond = self.beyond.0.get();
        beyond.inspect(|others| others.settle()).is_some()
    }

    /// Peers that some stream is waiting for now.
    fn waited_for(&self) -> Vec<usize> {
        let absent = |flag| self.board.absent(flag).into_iter().map(|(peer, _)| peer);
        (0..self.board.flags()).flat_map(absent).collect()
    }

    /// The error of a wait that took too long.
    fn look(&self, progress: &mut Progress) -> Option<TransportError> {
        let now = Instant::now();
        let (board, waits) = (&self.board, &self.waits);
        let flags = (0..board.flags()).map(|flag| board.absent(flag));
        let own = |stream| board.unflushed(stream).map(|mark| (stream, mark));
        let flushes = (0..board.streams()).map(|stream| own(stream).into_iter().collect());
        for (wait, absent) in flags.chain(flushes).enumerate() {
            let after = Duration::from_nanos(waits.allowed[wait].load(Ordering::Relaxed));
            if !progress.stuck(wait, &absent, after, now) {
                continue;
            }
            let op = *waits.ops[wait].lock();
            let known = self.beyond.0.get().filter(|_| wait >= waits.flags);
            return Some(known.map(|others| others.unanswered(op, after)).unwrap_or_else(|| {
                let peers = absent.into_iter().map(|(peer, _)| peer).collect();
                let hint = " (waited for on a stream)".into();
                TransportError::Timeout { op, peers, after, hint }
            }));
        }
        None
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.ring();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A wait is stuck exactly when it looked the same, with someone absent, for longer than it
        /// may take.
        #[test]
        fn stuck_is_what_never_changed(steps in prop::collection::vec((0u32..3, 0usize..3, 1u64..40), 1..60)) {
            let (start, allowed) = (Instant::now(), Duration::from_millis(100));
            let mut progress = Progress::default();
            let (mut at, mut since) = (0u64, None::<((u32, usize), u64)>);
            for (number, absent, took) in steps {
                at += took;
                let seen = (0..absent).map(|peer| (peer, number)).collect();
                let stuck = progress.stuck(2, &seen, allowed, start + Duration::from_millis(at));
                if absent == 0 {
                    since = None;
                } else if since.is_none_or(|(look, _)| look != (number, absent)) {
                    since = Some(((number, absent), at));
                }
                prop_assert_eq!(stuck, since.is_some_and(|(_, from)| at - from > 100));
            }
        }
    }

    #[test]
    fn what_was_never_submitted_is_not_stuck_and_marks_differ() {
        let waits = Waits::new(2, 0);
        let allowed = Duration::from_nanos(waits.allowed[1].load(Ordering::Relaxed));
        let (mut progress, start) = (Progress::default(), Instant::now());
        assert!(!progress.stuck(1, &vec![(0, 3)], allowed, start));
        assert!(!progress.stuck(1, &vec![(0, 3)], allowed, start + Duration::from_secs(86_400)));
        let marks = [waits.mark(), waits.mark(), waits.mark()];
        assert!(marks.iter().all(|mark| mark % 2 == 0 && *mark >= 4));
        waits.marks.store(u32::MAX - 3, Ordering::Relaxed);
        assert_eq!([waits.mark(), waits.mark()], [4, 4]);
        assert!(marks[0] != marks[1] && marks[1] != marks[2]);
    }

    /// What a stream that waits for its sources is told of the ranks that free them.
    struct Late;

    impl Others for Late {
        fn settle(&self) {}

        fn unanswered(&self, op: &'static str, after: Duration) -> TransportError {
            TransportError::Timeout { op, peers: vec![5], after, hint: String::new() }
        }
    }

    /// Nobody but the thread lets the stream go.
    #[test]
    fn a_stream_whose_sources_are_not_freed_goes_on_when_its_time_is_over() {
        let group = Group::local(1).unwrap().remove(0);
        let watchdog = Watchdog::start(&group, Board::alone(2, 3), Waits::new(2, 3)).unwrap();
        let Shared { board, waits, .. } = &*watchdog.shared;
        watchdog.shared.ask(Late);
        let allowed = Duration::from_millis(100);
        waits.expect("flush", 2 + 1, allowed);
        let start = Instant::now();
        board.write(board.flush_of(1) + 4, waits.mark());
        while board.unflushed(1).is_some() {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(start.elapsed() >= allowed && board.is_poisoned());
        let fault = group.health().fault().unwrap();
        assert_eq!((fault.by, fault.blames), (0, Some(5)));
    }

    /// Memory is not given back below it.
    #[test]
    fn a_stream_that_waits_for_its_sources_is_waited_for() {
        let group = Group::local(1).unwrap().remove(0);
        let watchdog = Watchdog::start(&group, Board::alone(1, 2), Waits::new(1, 2)).unwrap();
        let board = &watchdog.shared.board;
        let given_back = Arc::new(());
        board.write(board.flush_of(1) + 4, 8);
        super::super::graveyard::drop_when_quiet(given_back.clone());
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(Arc::strong_count(&given_back), 2, "memory is given back below a stream");
        board.set_flushed(1);
        let start = Instant::now();
        while Arc::strong_count(&given_back) == 2 {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_wait_that_ended_starts_anew() {
        let (start, allowed) = (Instant::now(), Duration::from_millis(10));
        let mut progress = Progress::default();
        let seen = vec![(3, 1)];
        let later = |ms| start + Duration::from_millis(ms);
        assert!(!progress.stuck(0, &seen, allowed, later(0)));
        assert!(!progress.stuck(0, &vec![], allowed, later(9)));
        assert!(!progress.stuck(0, &seen, allowed, later(15)));
        assert!(progress.stuck(0, &seen, allowed, later(26)));
    }
}
