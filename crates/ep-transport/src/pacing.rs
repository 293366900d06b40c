//! The progress rule where ranks share a GPU.
//!
//! Streams of ranks on one GPU may share a hardware queue. A wait at its head holds up everything
//! behind it, also the signal it waits for if a co-located rank submitted that later: then no stream
//! moves again. So a rank submits a wait only once the co-located peers have *submitted* the signals
//! it waits for. This module counts both.
//!
//! # Why that is enough
//! All ranks make the same calls in the same order; say that each call, number `i`, waits for signals
//! of calls `j < i`. Suppose nothing moves. Of the waits at the heads of hardware queues take that
//! with the lowest call `i`, which waits for the signal of call `j` of rank `q`. If `q` has not
//! submitted it, `q`'s host stands at a call before `i`, and of such hosts the one that is least far
//! waits for nobody: all others have submitted what it needs. So it is submitted, and is behind the
//! head of `q`'s queue, a wait of call `i' >= i` of a rank `r` beside `q`. `r` made call `i` before
//! or now, and for that it waited until `q` had submitted the signal of `j`, to `r` as the last of
//! all, for which callers tell ranks on this GPU last ([`Link::is_beside`]): so that signal is ahead
//! of the head, not behind it. Peers on other GPUs are not waited for, since no queue holds both.
//! This takes waits that are for all ranks at once: with a wait for some of them `r` would not know of
//! the signals that `q` submits to the others.
//!
//! # What is left out
//! * A thread that drives several ranks cannot wait for itself, so it is not made to: a wait does
//!   not mind a peer that the same thread was the last to use. Such a thread has to submit phase by
//!   phase. A peer that nobody used yet counts as another thread's.
//! * Graphs. Their replays do not pass here, and cannot be counted by captured constants. A flag that
//!   was captured on either side is left out from then on, for that pair of ranks; graphs of
//!   co-located ranks need streams with hardware queues of their own.
//! * The wait on the host is bounded. When the peer has not submitted within the limit, be it that
//!   its caller is late, the wait is submitted all the same, and that is logged.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::{Deadline, Link, Reach, Result, TransportError};

const LINE: usize = 64;
/// The flag is part of a graph.
const CAPTURED: u64 = 1 << 63;

/// Where a peer is, as far as sharing hardware queues matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// On another GPU, or this rank itself: it is not paced.
    No,
    /// On the same GPU, in another process.
    Process,
    /// On the same GPU, in this process: possibly driven by the calling thread.
    Thread,
}

/// Counts of signals that were submitted to streams and of waits for them, for ranks that share a
/// GPU: for transports whose flags streams raise and await.
///
/// The words are in host memory that all ranks have mapped. After submitting a signal a link calls
/// [`Pacing::signalled`]; before submitting a wait, [`Pacing::hold`], then [`Pacing::awaited`].
/// Signals and waits on the host queue count as well.
#[derive(Debug)]
pub struct Pacing {
    shared: Arc<dyn Link>,
    at: usize,
    rank: usize,
    flags: u32,
    /// By rank.
    beside: Vec<Beside>,
    /// By rank, its number in the link of those that share the words.
    numbers: Vec<Option<usize>>,
    /// By flag, then source; [`CAPTURED`] as in the shared words.
    awaited: Vec<AtomicU64>,
}

impl Pacing {
    /// Bytes of words in each rank's window.
    pub fn bytes(flags: u32, world: usize) -> usize {
        LINE + (8 * flags as usize * world).next_multiple_of(LINE)
    }

    /// For rank `rank` of as many ranks as there are in `beside`, with words at offset `at`, a
    /// multiple of 8, of every window of `shared`. They are zero at first and used by nobody else.
    ///
    /// # Errors
    /// [`TransportError::Argument`] where words are not mapped, not aligned or do not fit.
    pub fn new(
        shared: Arc<dyn Link>,
        at: usize,
        rank: usize,
        flags: u32,
        beside: Vec<Beside>,
    ) -> Result<Self> {
        let members: Vec<usize> = (0..beside.len()).collect();
        Self::among(shared, at, rank, flags, (beside, &members))
    }

    /// [`Pacing::new`] where `shared` is the link of some ranks only, `members` by its numbers; no other
    /// rank is beside this one.
    pub(crate) fn among(
        shared: Arc<dyn Link>,
        at: usize,
        rank: usize,
        flags: u32,
        (beside, members): (Vec<Beside>, &[usize]),
    ) -> Result<Self> {
        let world = beside.len();
        let mut numbers = vec![None; world];
        for (number, &member) in members.iter().enumerate() {
            numbers[member] = Some(number);
        }
        let end = at.checked_add(Self::bytes(flags, world));
        let fits = |number: usize| match shared.reach(number) {
            Reach::Direct(window) => end.is_some_and(|end| end <= window.bytes),
            _ => false,
        };
        let all = |(peer, number): (usize, &Option<usize>)| match number {
            Some(number) => fits(*number),
            None => peer != rank && beside[peer] == Beside::No,
        };
        if rank >= world || !at.is_multiple_of(8) || !numbers.iter().enumerate().all(all) {
            let detail = format!("no words for {flags} flags of {world} ranks at {at}");
            return Err(TransportError::Argument { op: "open", detail });
        }
        let awaited = (0..flags as usize * world).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { shared, at, rank, flags, beside, numbers, awaited })
    }

    /// Whether any of `peers` is beside this rank.
    pub fn concerns(&self, peers: &[usize]) -> bool {
        peers.iter().any(|&peer| self.is_beside(peer))
    }

    fn is_beside(&self, peer: usize) -> bool {
        self.beside.get(peer).is_some_and(|&beside| beside != Beside::No)
    }

    fn index(&self, flag: u32, source: usize) -> usize {
        flag as usize * self.beside.len() + source
    }

    fn word(&self, rank: usize, offset: usize) -> &AtomicU64 {
        let base = match self.numbers[rank].map(|number| self.shared.reach(number)) {
            Some(Reach::Direct(window)) => window.base,
            _ => unreachable!("links answer the same every time; `among` saw it mapped"),
        };
        // SAFETY: `among` checked that the words are aligned and inside the window, which stays mapped
        // while `self.shared` is held; they are only ever used as atomics.
        unsafe { AtomicU64::from_ptr(base.add(self.at + offset).as_ptr().cast()) }
    }

    /// Who used `rank`'s link last.
    fn driver(&self, rank: usize) -> &AtomicU64 {
        self.word(rank, 0)
    }

    /// Signals that `source` submitted for `flag` of `rank`.
    fn submitted(&self, rank: usize, flag: u32, source: usize) -> &AtomicU64 {
        self.word(rank, LINE + 8 * self.index(flag, source))
    }

    /// A signal was submitted to a stream, or captured into a graph.
    pub fn signalled(&self, peer: usize, flag: u32, captured: bool) {
        self.driver(self.rank).store(this_thread(), Ordering::Relaxed);
        if !self.is_beside(peer) || flag >= self.flags {
            return;
        }
        let word = self.submitted(peer, flag, self.rank);
        // Release: whoever sees the count submits after this signal.
        match captured {
            true => word.fetch_or(CAPTURED, Ordering::Release),
            false => word.fetch_add(1, Ordering::Release),
        };
    }

    /// A wait is about to be submitted, or captured into a graph.
    pub fn awaited(&self, peers: &[usize], flag: u32, captured: bool) {
        self.driver(self.rank).store(this_thread(), Ordering::Relaxed);
        for &peer in peers.iter().filter(|&&peer| self.is_beside(peer) && flag < self.flags) {
            let count = &self.awaited[self.index(flag, peer)];
            match captured {
                true => count.fetch_or(CAPTURED, Ordering::Relaxed),
                false => count.fetch_add(1, Ordering::Relaxed),
            };
        }
    }

    /// Those of `peers` that have not submitted the signal that the next wait for `flag` is for, and
    /// for which the calling thread may wait.
    pub fn owing(&self, peers: &[usize], flag: u32) -> impl Iterator<Item = usize> {
        let me = this_thread();
        peers.iter().copied().filter(move |&peer| {
            if !self.is_beside(peer) || flag >= self.flags {
                return false;
            }
            let awaited = self.awaited[self.index(flag, peer)].load(Ordering::Relaxed);
            // Acquire: see `signalled`.
            let submitted = self.submitted(self.rank, flag, peer).load(Ordering::Acquire);
            let graphs = (awaited | submitted) & CAPTURED != 0;
            let mine = self.beside[peer] == Beside::Thread
                && self.driver(peer).load(Ordering::Relaxed) == me;
            submitted <= awaited && !graphs && !mine
        })
    }

    /// Waits on the calling thread until no peer owes its signal, for `limit` at most or until
    /// `failed`. False if some still do, and the rule is broken.
    pub fn hold(
        &self,
        peers: &[usize],
        flag: u32,
        limit: Duration,
        failed: impl Fn() -> bool,
    ) -> bool {
        let limit = Deadline::after(limit);
        let mut looks = 0u32;
        loop {
            if self.owing(peers, flag).next().is_none() {
                return true;
            }
            looks += 1;
            if looks < 2_000 {
                std::hint::spin_loop();
                continue;
            }
            if limit.expired() || failed() {
                return false;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

/// The number of the calling thread among those of this process, from 1.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static THIS: Cell<u64> = const { Cell::new(0) });
    THIS.with(|this| {
        if this.get() == 0 {
            this.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        this.get()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::{Group, ThreadTransport, Transport, WindowSpec};

    const FLAGS: u32 = 3;
    const SOON: Duration = Duration::from_millis(30);
    const LONG: Duration = Duration::from_secs(20);

    /// Runs `f` on each of `world` ranks, all on one GPU, on a thread of its own.
    fn ranks<T: Send>(world: usize, f: impl Fn(Pacing) -> T + Sync) -> Vec<T> {
        let f = &f;
        std::thread::scope(|scope| {
            let start = |group: Group| {
                scope.spawn(move || {
                    let bytes = (64 + Pacing::bytes(FLAGS, world)).next_multiple_of(4096);
                    let spec = WindowSpec { bytes, flags: 1 };
                    let shared = ThreadTransport::new().open(&group, spec, Deadline::after(LONG));
                    let beside = |peer| match peer == group.rank() {
                        true => Beside::No,
                        false => Beside::Thread,
                    };
                    let beside = (0..world).map(beside).collect();
                    f(Pacing::new(shared.unwrap(), 64, group.rank(), FLAGS, beside).unwrap())
                })
            };
            let all: Vec<_> = Group::local(world).unwrap().into_iter().map(start).collect();
            all.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn others(p: &Pacing) -> Vec<usize> {
        (0..p.beside.len()).filter(|&peer| peer != p.rank).collect()
    }

    #[test]
    fn a_wait_is_held_until_all_have_submitted_their_signals() {
        let turn = Barrier::new(3);
        ranks(3, |p| {
            let peers = others(&p);
            for round in 0..20 {
                let flag = round % FLAGS;
                let last = p.rank == round as usize % 3;
                if !last {
                    peers.iter().for_each(|&peer| p.signalled(peer, flag, false));
                }
                turn.wait();
                if !last {
                    // The last rank has not submitted anything for this round.
                    assert!(!p.hold(&peers, flag, Duration::from_millis(1), || false));
                    let owing: Vec<_> = p.owing(&peers, flag).collect();
                    assert_eq!(owing, [round as usize % 3]);
                    assert!(!p.hold(&peers, flag, LONG, || true), "a failure ends it");
                } else {
                    assert!(p.hold(&peers, flag, LONG, || false));
                }
                turn.wait();
                if last {
                    peers.iter().for_each(|&peer| p.signalled(peer, flag, false));
                }
                assert!(p.hold(&peers, flag, LONG, || false));
                p.awaited(&peers, flag, false);
                turn.wait();
            }
        });
    }

    #[test]
    fn a_thread_does_not_wait_for_ranks_it_drives_itself() {
        let all = ranks(3, |p| p);
        // Nobody has used them: for all that is known other threads drive them.
        assert!(!all[0].hold(&[1, 2], 0, SOON, || false));
        all[1].signalled(0, 1, false);
        assert!(all[0].hold(&[1], 0, SOON, || false));
        assert_eq!(all[0].owing(&[1, 2], 0).collect::<Vec<_>>(), [2]);
        std::thread::scope(|scope| scope.spawn(|| all[1].signalled(0, 1, false)).join().unwrap());
        assert_eq!(all[0].owing(&[1, 2], 0).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn flags_of_graphs_are_left_out_on_both_sides() {
        let all = ranks(2, |p| p);
        std::thread::scope(|scope| scope.spawn(|| all[1].signalled(0, 0, true)).join().unwrap());
        assert!(all[0].hold(&[1], 0, SOON, || false));
        assert!(!all[0].hold(&[1], 1, SOON, || false), "other flags are paced as before");
        all[0].awaited(&[1], 1, true);
        assert!(all[0].hold(&[1], 1, SOON, || false));
        assert!(!all[0].hold(&[1], 2, SOON, || false));
    }

    #[test]
    fn peers_on_other_gpus_and_unknown_ones_owe_nothing() {
        let all = ranks(2, |mut p| {
            p.beside[1 - p.rank] = Beside::No;
            p
        });
        assert!(!all[0].concerns(&[0, 1]) && all[0].hold(&[0, 1], 0, SOON, || false));
        all[0].signalled(1, 0, false);
        assert_eq!(all[1].submitted(1, 0, 0).load(Ordering::Relaxed), 0);
        let one = &ranks(2, |p| p)[0];
        assert!(one.hold(&[7], 0, SOON, || false) && one.hold(&[1], FLAGS, SOON, || false));
    }

    /// Ranks 1 and 3 of four, which alone share words.
    #[test]
    fn ranks_of_a_node_go_by_the_numbers_of_all() {
        let members = [1, 3];
        let mut groups = Group::local(2).unwrap();
        let open = |group: Group| {
            let bytes = Pacing::bytes(FLAGS, 4).next_multiple_of(4096);
            let spec = WindowSpec { bytes, flags: 1 };
            ThreadTransport::new().open(&group, spec, Deadline::after(LONG)).unwrap()
        };
        let second = groups.pop().unwrap();
        let first = groups.pop().unwrap();
        let (a, b) = std::thread::scope(|scope| {
            let b = scope.spawn(|| open(second));
            (open(first), b.join().unwrap())
        });
        let make = |link: Arc<dyn Link>, rank: usize, near: Beside| {
            let beside = (0..4).map(|peer| if peer == 4 - rank { near } else { Beside::No });
            Pacing::among(link, 0, rank, FLAGS, (beside.collect(), &members))
        };
        let one = make(a.clone(), 1, Beside::Process).unwrap();
        let three = make(b, 3, Beside::Process).unwrap();
        assert_eq!(one.owing(&[0, 2, 3], 2).collect::<Vec<_>>(), [3]);
        three.signalled(1, 2, false);
        three.signalled(2, 2, false);
        assert_eq!(one.owing(&[0, 2, 3], 2).count(), 0);
        assert!(make(a, 2, Beside::Process).is_err(), "a rank that shares no words");
    }

    #[test]
    fn words_that_do_not_fit_are_refused() {
        let group = Group::local(1).unwrap().remove(0);
        let spec = WindowSpec { bytes: 4096, flags: 1 };
        let shared = ThreadTransport::new().open(&group, spec, Deadline::after(LONG)).unwrap();
        let new = |at, rank, flags| {
            Pacing::new(shared.clone(), at, rank, flags, vec![Beside::No]).map(drop)
        };
        new(0, 0, 500).unwrap();
        for (at, rank, flags) in [(4096 - 64, 0, 1), (4, 0, 1), (0, 1, 1), (usize::MAX - 7, 0, 1)] {
            assert!(new(at, rank, flags).is_err(), "{at} {rank} {flags}");
        }
    }
}
