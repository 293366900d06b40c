//! What is to be written to one peer through one NIC, and in which pieces.
//!
//! Pure bookkeeping: it says what to post next and is told what is done. Puts are split into pieces
//! of bounded size that go round the peer's queue pairs in turn, adjacent puts become one, and a
//! signal ends an epoch of writes ([`super::arrivals`]). Two bounds hold everything in check: the
//! receiver's *credit* (it has room for `depth` immediates and [`WINDOW`] epochs that it has not
//! yet told of) and the length of each queue pair's send queue.

use std::collections::VecDeque;

use super::arrivals::{Immediate, Record, WINDOW};

/// What bounds a peer's traffic.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Immediates that the receiver has room for.
    pub depth: u32,
    /// Writes that fit a send queue.
    pub send_queue: usize,
    /// Queue pairs per peer.
    pub queue_pairs: usize,
    /// The largest write in bytes.
    pub piece: usize,
    /// A put smaller than this is not split over queue pairs.
    pub stripe: usize,
}

/// What the receiver has said about itself: both numbers only grow (and wrap).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Credit {
    /// Immediates it has consumed.
    pub immediates: u32,
    /// Epochs that are complete.
    pub epochs: u32,
}

/// A write to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Post {
    /// On which of the peer's queue pairs.
    pub pair: usize,
    pub what: What,
    pub immediate: u32,
    /// Whether its completion is to be reported; those before it on its queue pair are done with it.
    pub signalled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// A piece of this rank's window to the peer's.
    Bytes { from: usize, to: usize, bytes: usize },
    /// The end of an epoch.
    Record(Record),
}

/// A write that has been posted and is not done.
#[derive(Clone, Copy, Debug)]
struct Posted {
    ticket: u64,
    bytes: usize,
    signalled: bool,
}

#[derive(Debug)]
enum Item {
    Put { from: usize, to: usize, bytes: usize, ticket: u64 },
    Signal { flag: u32, parts: u32, ticket: u64 },
}

/// What [`Peer::push_put`] did with a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pushed {
    /// It is an item of its own.
    Queued,
    /// It became part of the put before it; nothing is posted for it.
    Merged,
}

/// What a completion sets free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub ticket: u64,
    pub bytes: usize,
}

#[derive(Debug)]
pub(super) struct Peer {
    limits: Limits,
    items: VecDeque<Item>,
    /// The epoch that is open, and its writes so far.
    epoch: u32,
    writes: u32,
    /// Immediates posted.
    posted: u32,
    credit: Credit,
    /// Where the next write goes.
    turn: usize,
    pairs: Vec<VecDeque<Posted>>,
    in_flight: usize,
}

impl Peer {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            items: VecDeque::new(),
            epoch: 0,
            writes: 0,
            posted: 0,
            credit: Credit::default(),
            turn: 0,
            pairs: vec![VecDeque::with_capacity(limits.send_queue); limits.queue_pairs],
            in_flight: 0,
        }
    }

    /// A put of at least one byte.
    pub(super) fn push_put(&mut self, from: usize, to: usize, bytes: usize, ticket: u64) -> Pushed {
        if let Some(Item::Put { from: f, to: t, bytes: b, .. }) = self.items.back_mut()
            && (*f + *b, *t + *b) == (from, to)
        {
            *b += bytes;
            return Pushed::Merged;
        }
        self.items.push_back(Item::Put { from, to, bytes, ticket });
        Pushed::Queued
    }

    /// The end of what was pushed since the last signal.
    pub(super) fn push_signal(&mut self, flag: u32, parts: u32, ticket: u64) {
        self.items.push_back(Item::Signal { flag, parts, ticket });
    }

    /// The receiver has said this. What it said earlier may come later; numbers never go back.
    pub(super) fn credit(&mut self, credit: Credit) {
        let ahead = |new: u32, old: u32| (new.wrapping_sub(old) as i32) > 0;
        if ahead(credit.immediates, self.credit.immediates) {
            self.credit.immediates = credit.immediates;
        }
        if ahead(credit.epochs, self.credit.epochs) {
            self.credit.epochs = credit.epochs;
        }
    }

    /// Whether anything waits to be posted.
    pub(super) fn waiting(&self) -> bool {
        !self.items.is_empty()
    }

    /// Whether nothing waits and nothing is under way.
    pub(super) fn idle(&self) -> bool {
        self.items.is_empty() && self.in_flight == 0
    }

    /// Whether the next write lacks the receiver's credit.
    pub(super) fn starved(&self) -> bool {
        let used = self.posted.wrapping_sub(self.credit.immediates);
        let open = self.epoch.wrapping_sub(self.credit.epochs);
        self.waiting() && (used >= self.limits.depth || open >= WINDOW)
    }

    /// The next write to post, with the ticket it belongs to and whether it is that command's last.
    /// None if nothing waits, or what waits has to. One that takes the last of `room` bytes reports,
    /// since nothing may follow before it has.
    pub(super) fn next(&mut self, room: usize) -> Option<(Post, u64, bool)> {
        let pair = self.turn;
        if self.pairs[pair].len() >= self.limits.send_queue || self.starved() {
            return None;
        }
        // Round the queue pairs strictly in turn: a write need not report if as many writes as there
        // are queue pairs surely follow, as one of them goes where it went.
        let behind = self.items.len().checked_sub(1)?;
        let (what, ticket, last, left) = match self.items.front_mut()? {
            Item::Put { from, to, bytes, ticket } => {
                let piece = piece(*bytes, &self.limits);
                let what = What::Bytes { from: *from, to: *to, bytes: piece };
                *from += piece;
                *to += piece;
                *bytes -= piece;
                self.writes += 1;
                (what, *ticket, *bytes == 0, bytes.div_ceil(self.limits.piece))
            }
            Item::Signal { flag, parts, ticket } => {
                let (flag, parts) = (*flag, *parts);
                let record = Record { flag, writes: self.writes, epoch: self.epoch, parts };
                (What::Record(record), *ticket, true, 0)
            }
        };
        let signal = matches!(what, What::Record(_));
        let bytes = if let What::Bytes { bytes, .. } = what { bytes } else { 0 };
        let follow = left + behind >= self.limits.queue_pairs && bytes < room;
        let signalled = signal || !follow || self.is_long(pair);
        let immediate = Immediate::new(self.epoch, signal).encode();
        if last {
            self.items.pop_front();
        }
        if signal {
            self.epoch = self.epoch.wrapping_add(1);
            self.writes = 0;
        }
        self.posted = self.posted.wrapping_add(1);
        self.turn = (pair + 1) % self.limits.queue_pairs;
        self.pairs[pair].push_back(Posted { ticket, bytes, signalled });
        self.in_flight += 1;
        Some((Post { pair, what, immediate, signalled }, ticket, last))
    }

    /// Whether a quarter of the send queue has been posted without a report.
    fn is_long(&self, pair: usize) -> bool {
        let silent = self.pairs[pair].iter().rev().take_while(|posted| !posted.signalled).count();
        silent + 1 >= (self.limits.send_queue / 4).max(1)
    }

    /// A signalled write on `pair` is done, and with it those before it.
    pub(super) fn completed(&mut self, pair: usize, mut done: impl FnMut(Done)) {
        while let Some(posted) = self.pairs[pair].pop_front() {
            self.in_flight -= 1;
            done(Done { ticket: posted.ticket, bytes: posted.bytes });
            if posted.signalled {
                return;
            }
        }
    }

    /// Forgets everything: the peer is gone. `done` hears of what was under way, `dropped` of the
    /// tickets of what was not posted to its end.
    pub(super) fn clear(&mut self, mut done: impl FnMut(Done), mut dropped: impl FnMut(u64)) {
        for posted in self.pairs.iter_mut().flat_map(|pair| pair.drain(..)) {
            done(Done { ticket: posted.ticket, bytes: posted.bytes });
        }
        self.in_flight = 0;
        for item in self.items.drain(..) {
            match item {
                Item::Put { ticket, .. } | Item::Signal { ticket, .. } => dropped(ticket),
            }
        }
    }
}

/// How much of `bytes` the next write takes: an equal share of what is worth sharing, of whole
/// pages, up to the largest write.
fn piece(bytes: usize, limits: &Limits) -> usize {
    let share = bytes.div_ceil(limits.queue_pairs).next_multiple_of(4096);
    bytes.min(share.max(limits.stripe)).min(limits.piece)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits =
        Limits { depth: 8, send_queue: 4, queue_pairs: 2, piece: 10_000, stripe: 4_096 };

    fn drain(peer: &mut Peer) -> Vec<Post> {
        std::iter::from_fn(|| peer.next(usize::MAX).map(|(post, ..)| post)).collect()
    }

    #[test]
    fn adjacent_puts_become_one_and_a_signal_counts_its_writes() {
        let mut peer = Peer::new(LIMITS);
        assert_eq!(peer.push_put(0, 100, 10, 0), Pushed::Queued);
        assert_eq!(peer.push_put(10, 110, 10, 1), Pushed::Merged);
        assert_eq!(peer.push_put(30, 130, 10, 2), Pushed::Queued, "a gap");
        peer.push_signal(3, 1, 3);
        assert_eq!(peer.push_put(40, 140, 10, 4), Pushed::Queued, "another epoch");
        let posts = drain(&mut peer);
        let record = Record { flag: 3, writes: 2, epoch: 0, parts: 1 };
        let bytes = |from, to, bytes| What::Bytes { from, to, bytes };
        let what: Vec<What> = posts.iter().map(|post| post.what).collect();
        let expected =
            [bytes(0, 100, 20), bytes(30, 130, 10), What::Record(record), bytes(40, 140, 10)];
        assert_eq!(what, expected);
        let pairs: Vec<usize> = posts.iter().map(|post| post.pair).collect();
        assert_eq!(pairs, [0, 1, 0, 1]);
        assert_eq!(posts[3].immediate, Immediate::new(1, false).encode());
    }

    #[test]
    fn large_puts_are_shared_by_the_queue_pairs() {
        let mut peer = Peer::new(LIMITS);
        peer.push_put(0, 0, 16_384, 0);
        let sizes: Vec<_> = drain(&mut peer).iter().map(|post| post.what).collect();
        let bytes = |from, bytes| What::Bytes { from, to: from, bytes };
        assert_eq!(sizes, [bytes(0, 8_192), bytes(8_192, 4_096), bytes(12_288, 4_096)]);
    }

    #[test]
    fn without_credit_nothing_is_posted() {
        let mut peer = Peer::new(Limits { send_queue: 100, queue_pairs: 1, ..LIMITS });
        for ticket in 0..20 {
            peer.push_signal(0, 1, ticket);
        }
        assert_eq!(drain(&mut peer).len(), 8);
        assert!(peer.starved());
        peer.credit(Credit { immediates: 3, epochs: 3 });
        peer.credit(Credit { immediates: 2, epochs: 2 });
        assert_eq!(drain(&mut peer).len(), 3, "an old credit takes nothing back");
    }

    #[test]
    fn no_more_epochs_are_open_than_have_places() {
        let limits = Limits { depth: 4096, send_queue: 1000, queue_pairs: 1, ..LIMITS };
        let mut peer = Peer::new(limits);
        for ticket in 0..WINDOW as u64 + 9 {
            peer.push_signal(0, 1, ticket);
        }
        assert_eq!(drain(&mut peer).len(), WINDOW as usize);
        peer.credit(Credit { immediates: WINDOW, epochs: 5 });
        assert_eq!(drain(&mut peer).len(), 5);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// Every byte is written once and where it belongs, every signal counts its writes, bounds
        /// hold, and whatever is posted is reported in the end, whichever queue pair it is on.
        #[test]
        fn everything_is_posted_once_and_reported(
            commands in prop::collection::vec((0usize..30_000, any::<bool>()), 1..40),
            queue_pairs in 1usize..4,
            send_queue in 1usize..6,
            depth in 2u32..12,
            seed in any::<u64>(),
        ) {
            let limits = Limits { depth, send_queue, queue_pairs, ..LIMITS };
            let mut peer = Peer::new(limits);
            let mut at = 0;
            let mut expected = Vec::new();
            let mut tickets = super::super::tickets::Tickets::default();
            for (i, &(bytes, signal)) in commands.iter().enumerate() {
                if bytes > 0 && !signal {
                    let ticket = tickets.push();
                    if peer.push_put(at, at + 7, bytes, ticket) == Pushed::Merged {
                        tickets.close(ticket);
                    }
                    expected.push((at, bytes));
                    // Sometimes a gap.
                    at += bytes + usize::from(i % 3 == 0);
                } else {
                    peer.push_signal(1, 1, tickets.push());
                }
            }
            let total = commands.len();
            let mut state = seed | 1;
            let mut random = move |n: usize| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
                (state >> 33) as usize % n
            };
            let budget = 12_000;
            let mut in_flight = 0usize;
            let mut written = Vec::new();
            let mut flying: Vec<VecDeque<bool>> = vec![VecDeque::new(); queue_pairs];
            let (mut arrived, mut epochs, mut in_epoch) = (0u32, 0u32, 0u32);
            let mut steps = 0;
            while !peer.idle() {
                steps += 1;
                prop_assert!(steps < 100_000, "stuck: {:?}", peer);
                let room = budget - in_flight.min(budget);
                let next = if room > 0 { peer.next(room) } else { None };
                if let Some((post, ticket, last)) = next {
                    tickets.posted(ticket);
                    if last {
                        tickets.close(ticket);
                    }
                    flying[post.pair].push_back(post.signalled);
                    prop_assert!(flying[post.pair].len() <= send_queue);
                    arrived += 1;
                    match post.what {
                        What::Bytes { from, to, bytes } => {
                            prop_assert_eq!(to, from + 7);
                            prop_assert!(bytes > 0 && bytes <= limits.piece);
                            written.push((from, bytes));
                            in_flight += bytes;
                            in_epoch += 1;
                        }
                        What::Record(record) => {
                            prop_assert_eq!((record.epoch, record.writes), (epochs, in_epoch));
                            epochs += 1;
                            in_epoch = 0;
                        }
                    }
                    if random(3) > 0 {
                        continue;
                    }
                }
                // Something completes, or the receiver gives credit.
                let pair = random(queue_pairs);
                if let Some(end) = flying[pair].iter().position(|&signalled| signalled) {
                    flying[pair].drain(..=end);
                    peer.completed(pair, |done| {
                        tickets.done(done.ticket);
                        in_flight -= done.bytes;
                    });
                }
                peer.credit(Credit { immediates: arrived, epochs });
            }
            prop_assert_eq!(tickets.retire(), total as u64, "some command never ends");
            // The pieces, joined, are the puts, joined.
            let join = |runs: &[(usize, usize)]| {
                let mut joined: Vec<(usize, usize)> = Vec::new();
                for &(at, bytes) in runs {
                    match joined.last_mut() {
                        Some(last) if last.0 + last.1 == at => last.1 += bytes,
                        _ => joined.push((at, bytes)),
                    }
                }
                joined
            };
            prop_assert_eq!(join(&written), join(&expected));
        }
    }
}
