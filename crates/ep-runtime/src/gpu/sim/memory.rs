//! What is where, and who may touch it: a happens-before check of every access.
//!
//! Each stream has a clock. Work on a stream comes after earlier work on it; events and flags carry
//! clocks between streams. Hardware queues carry none: what they order by chance does not count. An
//! access that another one of the same place is not ordered with is a fault, whichever came first.

use std::collections::HashMap;
use std::fmt::Debug;

/// How far each stream has got, as far as somebody knows.
pub type Clock = Vec<u32>;

/// A stream and how much it had done.
type Epoch = (usize, u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    Mailbox {
        rank: usize,
        lane: usize,
        source: usize,
    },
    /// Rank-major rows of a slot that came from a rank.
    Rows {
        rank: usize,
        slot: usize,
        source: usize,
    },
    Experts {
        rank: usize,
        slot: usize,
    },
    Handle {
        rank: usize,
        at: u64,
    },
    /// What a lane's kernels share.
    Scratch {
        rank: usize,
        lane: usize,
    },
    /// A part of the rows that are packed for a rank that is not mapped.
    Packed {
        rank: usize,
        lane: usize,
        peer: usize,
        part: usize,
    },
    /// A block that a rank forwards.
    Block {
        rank: usize,
        lane: usize,
        source: usize,
    },
    /// Sums of this rank's tokens over its node.
    OwnSums {
        rank: usize,
        lane: usize,
    },
    /// Rows that came home from a rank that is not mapped.
    Staged {
        rank: usize,
        lane: usize,
        owner: usize,
    },
    /// A block of an exchange on its way.
    Wire {
        from: usize,
        to: usize,
        number: u32,
        index: usize,
    },
    /// Payloads, ids and sums.
    User {
        at: u64,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Content {
    #[default]
    Nothing,
    Announced {
        sequence: u64,
        slot: usize,
        bad: bool,
    },
    Received {
        lane: usize,
        sequence: u64,
    },
    /// What a caller's kernel wrote: the number of its result.
    Output(u64),
    Routed {
        refused: bool,
    },
    Value(u64),
}

#[derive(Debug, Default)]
struct Cell {
    content: Content,
    write: Option<Epoch>,
    reads: Vec<Epoch>,
}

#[derive(Debug, Default)]
pub struct Memory {
    cells: HashMap<Place, Cell>,
    pub clocks: Vec<Clock>,
    /// What the protocol did that it may not do.
    pub faults: Vec<String>,
}

pub fn join(into: &mut Clock, from: &Clock) {
    if into.len() < from.len() {
        into.resize(from.len(), 0);
    }
    for (a, b) in into.iter_mut().zip(from) {
        *a = (*a).max(*b);
    }
}

impl Memory {
    pub fn stream(&mut self) -> usize {
        self.clocks.push(Vec::new());
        self.clocks.len() - 1
    }

    /// The next piece of work of a stream begins.
    pub fn tick(&mut self, stream: usize) {
        let clock = &mut self.clocks[stream];
        if clock.len() <= stream {
            clock.resize(stream + 1, 0);
        }
        clock[stream] += 1;
    }

    fn now(&self, stream: usize) -> Epoch {
        (stream, self.clocks[stream][stream])
    }

    fn before(&self, (other, when): Epoch, stream: usize) -> bool {
        self.clocks[stream].get(other).copied().unwrap_or(0) >= when
    }

    pub fn fault(&mut self, what: impl FnOnce() -> String) {
        // The first ones say what happened.
        if self.faults.len() < 20 {
            self.faults.push(what());
        }
    }

    pub fn read(&mut self, stream: usize, place: Place) -> Content {
        let now = self.now(stream);
        let (content, write) =
            self.cells.get(&place).map_or_else(Default::default, |c| (c.content, c.write));
        match write {
            None => self.fault(|| format!("{place:?} is read and was never written")),
            Some(write) if !self.before(write, stream) => {
                self.fault(|| format!("{place:?} is read beside the write of {content:?}"));
            }
            Some(_) => {}
        }
        let reads = &mut self.cells.entry(place).or_default().reads;
        reads.retain(|read| read.0 != stream);
        reads.push(now);
        content
    }

    pub fn write(&mut self, stream: usize, place: Place, content: Content) {
        let now = self.now(stream);
        let cell = self.cells.remove(&place).unwrap_or_default();
        if cell.write.is_some_and(|write| !self.before(write, stream)) {
            let was = cell.content;
            self.fault(|| format!("{place:?}: {content:?} is written beside {was:?}"));
        }
        if cell.reads.iter().any(|&read| !self.before(read, stream)) {
            let was = cell.content;
            self.fault(|| format!("{place:?}: {content:?} is written while {was:?} is read"));
        }
        self.cells.insert(place, Cell { content, write: Some(now), reads: Vec::new() });
    }

    /// Reads what has to be `expected`.
    pub fn expect(&mut self, stream: usize, place: Place, expected: Content) {
        let found = self.read(stream, place);
        self.same(place, found, expected);
    }

    pub fn same(&mut self, place: impl Debug, found: Content, expected: Content) {
        if found != expected {
            self.fault(|| format!("{place:?} holds {found:?} where {expected:?} is due"));
        }
    }
}
