//! What ranks do: the same calls in the same order on every rank, by a seed.

use super::device::Rng;
use crate::Layout;

pub const LANES: usize = 2;
pub const SLOTS: usize = 3;
/// Handles kept for cached dispatches.
const KEPT: usize = 3;

/// How a dispatch is made.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    pub lane: usize,
    pub queue: usize,
    pub layout: Layout,
    pub capacity: bool,
    /// The handle of an earlier one, by its number.
    pub cached: Option<u64>,
    /// One rank has a wrong id, so that all refuse it. Known at once in exact mode only.
    pub bad: bool,
}

/// One call. Results have numbers.
#[derive(Clone, Copy, Debug)]
pub enum Call {
    Dispatch {
        number: u64,
        sent: Sent,
        halves: bool,
    },
    Receive {
        lane: usize,
    },
    DropSend {
        lane: usize,
    },
    /// A slot for rows that the caller makes up.
    Slot {
        number: u64,
        handle: u64,
        queue: usize,
    },
    Combine {
        number: u64,
        lane: usize,
        reduced: bool,
        halves: bool,
    },
    CombineReceive {
        lane: usize,
    },
    DropCombine {
        lane: usize,
    },
    Release {
        number: u64,
        dropped: bool,
    },
}

#[derive(Clone, Copy, Debug)]
enum Busy {
    Dispatch(u64, Sent),
    Combine,
}

/// What is known of the ranks while calls are made up.
#[derive(Debug, Default)]
struct Known {
    busy: [Option<Busy>; LANES],
    /// Results that are alive, and the layout of each.
    results: Vec<(u64, Layout)>,
    kept: Vec<(u64, Layout)>,
    next: u64,
}

impl Known {
    fn slots(&self) -> usize {
        SLOTS - self.results.len() - self.busy.iter().flatten().count()
    }

    fn arrived(&mut self, number: u64, sent: Sent) {
        self.results.push((number, sent.layout));
        if self.kept.len() < KEPT && sent.cached.is_none() {
            self.kept.push((number, sent.layout));
        }
    }

    fn take(&mut self, rng: &mut Rng) -> (u64, Layout) {
        let at = rng.below(self.results.len());
        self.results.swap_remove(at)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn dispatch(&mut self, rng: &mut Rng, lane: usize, whole: bool) -> Call {
        let layout = match rng.chance(50) {
            true => Layout::RankMajor,
            false => Layout::ExpertMajor { alignment: 8 },
        };
        let cached = (rng.chance(30) && !self.kept.is_empty())
            .then(|| self.kept[rng.below(self.kept.len())]);
        let capacity = rng.chance(50);
        let bad = !capacity && cached.is_none() && rng.chance(8);
        let sent = Sent {
            lane,
            queue: rng.below(2),
            layout: cached.map_or(layout, |kept| kept.1),
            capacity,
            cached: cached.map(|kept| kept.0),
            bad,
        };
        let (number, halves) = (self.number(), !whole && !bad && rng.chance(60));
        match (halves, bad) {
            (true, _) => self.busy[lane] = Some(Busy::Dispatch(number, sent)),
            (false, false) => self.arrived(number, sent),
            (false, true) => {}
        }
        Call::Dispatch { number, sent, halves }
    }

    fn next(&mut self, rng: &mut Rng, whole: bool) -> Option<Call> {
        let lane = rng.below(LANES);
        match self.busy[lane] {
            Some(Busy::Dispatch(number, sent)) => {
                self.busy[lane] = None;
                if rng.chance(25) {
                    return Some(Call::DropSend { lane });
                }
                self.arrived(number, sent);
                Some(Call::Receive { lane })
            }
            Some(Busy::Combine) => {
                self.busy[lane] = None;
                match rng.chance(25) {
                    true => Some(Call::DropCombine { lane }),
                    false => Some(Call::CombineReceive { lane }),
                }
            }
            None if self.slots() > 0 && rng.chance(50) => Some(self.dispatch(rng, lane, whole)),
            None if self.slots() > 0 && !self.kept.is_empty() && !whole && rng.chance(20) => {
                let (handle, layout) = self.kept[rng.below(self.kept.len())];
                let number = self.number();
                self.results.push((number, layout));
                Some(Call::Slot { number, handle, queue: rng.below(2) })
            }
            None if !self.results.is_empty() => {
                let (number, layout) = self.take(rng);
                if rng.chance(25) {
                    return Some(Call::Release { number, dropped: rng.chance(50) });
                }
                let reduced = layout != Layout::RankMajor && rng.chance(50);
                let halves = !whole && rng.chance(60);
                self.busy[lane] = halves.then_some(Busy::Combine);
                Some(Call::Combine { number, lane, reduced, halves })
            }
            None => None,
        }
    }
}

/// Calls by a seed, at least `count` of them, that leave nothing in flight. `whole`: no halves.
pub fn calls(rng: &mut Rng, count: usize, whole: bool) -> Vec<Call> {
    let (mut known, mut all) = (Known::default(), Vec::new());
    while all.len() < count || known.busy.iter().any(Option::is_some) {
        all.extend(known.next(rng, whole));
    }
    all
}
