//! Exchanges end: a thread that aborts communicators when the group has failed or an exchange takes
//! longer than it may, and passes failures between the group and that of the node.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::link::Comms;
use crate::nvlink::board::Board;
use crate::nvlink::watchdog::Shared;
use crate::{Fault, Group, Result, TransportError};

/// How often words and communicators are looked at.
const LOOKING: Duration = Duration::from_millis(5);

/// What the caller told of the exchanges of a number.
type Expected = (Duration, &'static str);

/// Since when one exchange has been under way, as far as looking tells.
///
/// What streams tell are constants, since graphs replay them: one word says that an exchange is under way,
/// its end resets that and another, which whoever looks sets. So replays that follow each other at once are
/// told apart.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pending(Option<Instant>);

impl Pending {
    /// Notes whether an exchange is under way, and whether one has ended since the last look. True if one is
    /// for longer than allowed.
    pub fn stuck(
        &mut self,
        (under_way, ended): (bool, bool),
        allowed: Duration,
        now: Instant,
    ) -> bool {
        match self.0 {
            _ if !under_way => self.0 = None,
            Some(since) if !ended => return now.duration_since(since) > allowed,
            _ => self.0 = Some(now),
        }
        false
    }
}

/// What streams tell of a number: that an exchange is under way, and that one has ended since the last look.
fn told(board: &Board, number: u32) -> (bool, bool) {
    let under_way = board.exchanging(number);
    (under_way, under_way && board.exchanged(number))
}

#[derive(Debug)]
struct Watched {
    group: Group,
    near: Group,
    paired: Vec<usize>,
    board: Arc<Shared>,
    comms: Arc<Comms>,
    expected: Mutex<Vec<Expected>>,
    stop: AtomicBool,
}

/// The thread, stopped when this drops.
#[derive(Debug)]
pub(super) struct Watch {
    watched: Arc<Watched>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl Watch {
    pub fn start(
        (group, near): (&Group, Group),
        paired: Vec<usize>,
        board: Arc<Shared>,
        comms: Arc<Comms>,
    ) -> Result<Self> {
        let expected = vec![(Duration::MAX, "an exchange"); board.board.flags() as usize];
        let watched = Arc::new(Watched {
            group: group.clone(),
            near,
            paired,
            board,
            comms,
            expected: Mutex::new(expected),
            stop: AtomicBool::new(false),
        });
        let of_thread = watched.clone();
        let thread = std::thread::Builder::new()
            .name("ep-nccl-watch".into())
            .spawn(move || of_thread.run())
            .map_err(|e| {
                let code = e.raw_os_error().unwrap_or(libc::EAGAIN);
                let detail = "starting a thread".into();
                TransportError::Os { op: "open", peer: None, code, detail }
            })?;
        Ok(Self { watched, thread: Mutex::new(Some(thread)) })
    }

    /// An exchange is about to be submitted that may take so long.
    pub fn expect(&self, number: u32, op: &'static str, allowed: Duration) {
        self.watched.expected.lock()[number as usize] = (allowed, op);
    }

    pub fn stop(&self) {
        self.watched.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.lock().take()
            && thread.thread().id() != std::thread::current().id()
        {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Watched {
    fn run(&self) {
        let mut pending = vec![Pending::default(); self.board.board.flags() as usize];
        while !self.stop.load(Ordering::Acquire) {
            if let Some(error) = self.look(&mut pending) {
                self.group.report(&error);
                self.end();
                return;
            }
            std::thread::park_timeout(LOOKING);
        }
    }

    /// Why exchanges have to end, if they have.
    fn look(&self, pending: &mut [Pending]) -> Option<TransportError> {
        self.pass_on();
        let now = Instant::now();
        let mut waits = false;
        for (number, pending) in pending.iter_mut().enumerate() {
            let (allowed, op) = self.expected.lock()[number];
            let told = told(&self.board.board, number as u32);
            waits |= told.0;
            if pending.stuck(told, allowed, now) {
                let (peers, hint) = (self.paired.clone(), " (exchanged with on a stream)".into());
                return Some(TransportError::Timeout { op, peers, after: allowed, hint });
            }
        }
        let absent: &[usize] = if waits { &self.paired } else { &[] };
        let health = self.group.health().check_waiting("exchange", absent);
        health.and_then(|()| self.comms.async_error()).err()
    }

    /// What the node's group has heard, in the numbers of the whole group.
    fn pass_on(&self) {
        let heard = self.near.health().check("exchange").map_err(|error| self.near.outward(error));
        match heard {
            Ok(()) => {}
            Err(TransportError::Aborted { by, blames, why, .. }) => {
                self.group.fail(Fault { by, blames, why });
            }
            Err(error) => {
                let (by, blames) = (self.group.rank(), error.peer());
                self.group.fail(Fault { by, blames, why: error.to_string() });
            }
        }
    }

    /// Ends what is on streams: first the word that keeps kernels from what did not arrive.
    fn end(&self) {
        self.board.board.poison();
        let why = match self.group.health().check("exchange") {
            Ok(()) => "the group has failed".to_string(),
            Err(e) => e.to_string(),
        };
        self.near.abort(&why);
        self.comms.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever looks sees one under way every time.
    #[test]
    fn replays_that_follow_each_other_at_once_are_no_single_exchange() {
        let (board, allowed) = (Board::alone(3, 0), Duration::from_millis(10));
        let word = board.exchanging_word(1);
        let (mut pending, mut now) = (Pending::default(), Instant::now());
        let mut is_stuck = |after: u64| {
            now += Duration::from_millis(after);
            assert_eq!((told(&board, 0), told(&board, 2)), ((false, false), (false, false)));
            pending.stuck(told(&board, 1), allowed, now)
        };
        for replay in 0..20 {
            board.write(word, 1);
            assert!(!is_stuck(1), "{replay}");
            assert!(!is_stuck(7), "{replay}");
            // As the stream tells of its end.
            board.write(word + 4, 0);
            board.write(word, 0);
        }
        board.write(word, 1);
        assert!(!is_stuck(1) && !is_stuck(10));
        assert!(is_stuck(1), "this one does not end");
    }

    #[test]
    fn an_exchange_is_stuck_when_it_does_not_end_in_time() {
        let (start, allowed) = (Instant::now(), Duration::from_millis(10));
        let mut pending = Pending::default();
        let mut at = |told, ms| pending.stuck(told, allowed, start + Duration::from_millis(ms));
        let (idle, begun, same) = ((false, false), (true, true), (true, false));
        assert!(!at(idle, 0) && !at(begun, 5) && !at(same, 15));
        // It has ended and the next one has begun meanwhile, perhaps the same one of a graph.
        assert!(!at(begun, 16) && !at(same, 26));
        assert!(at(same, 27));
        // Nothing was set anew while none was under way.
        assert!(!at(idle, 60) && !at(same, 61) && !at(same, 71));
        assert!(at(same, 72));
    }
}
