//! What kernels read and write: those of the layer, and those of its callers.

use ep_kernels::cuda::moe::{MoeOp, MoeReport, MoeWork, verdict};

use super::far::{Places, Summary, carry, parts, write_slots};
use super::fixed::FixedEffect;
use super::memory::{Content, Memory, Place};
use super::nodes::NodeEffect;
use crate::node::Nodes;

/// Ids at addresses with this bit are wrong.
pub const BAD: u64 = 1 << 20;

/// A kernel, or several that follow each other.
#[derive(Clone, Copy, Debug)]
pub enum Effect {
    Announce {
        on: On,
        slot: usize,
        handle: u64,
        ids: Option<u64>,
    },
    /// Where tokens cross nodes once.
    Nodes(NodeEffect),
    /// Where blocks have a fixed size.
    Fixed(FixedEffect),
    Judge {
        on: On,
    },
    Plan {
        on: On,
        handle: u64,
        summary: Option<Summary>,
    },
    Dispatch {
        on: On,
        handle: u64,
        payload: u64,
        cached: bool,
        /// The first token and how many.
        tokens: (usize, usize),
    },
    /// What is carried between windows.
    Carry {
        from: Places,
        to: Places,
    },
    /// Sources of what was put are free: they may have been read up to here.
    Free {
        from: Places,
    },
    Places {
        on: On,
        handle: u64,
    },
    Expand {
        on: On,
        handle: u64,
    },
    Tail {
        on: On,
        experts: bool,
    },
    Reduce {
        rank: usize,
        slot: usize,
        handle: u64,
    },
    Combine {
        on: On,
        handle: u64,
        per_rank: bool,
        out: u64,
    },
    /// The caller fills a payload and ids.
    Fill {
        at: u64,
    },
    /// The caller's experts read the rows of a slot, unless none were received, and write the rows
    /// of result `number`, unless that is none.
    Experts {
        rank: usize,
        slot: usize,
        experts: bool,
        received: bool,
        number: Option<u64>,
    },
    /// The caller reads the sums of result `number`.
    Collect {
        at: u64,
        number: u64,
    },
}

/// An operation on a lane.
#[derive(Clone, Copy, Debug)]
pub struct On {
    pub rank: usize,
    pub lane: usize,
    report: u64,
    ticket: u64,
}

impl On {
    pub fn new(rank: u32, op: &MoeOp) -> Self {
        let (rank, lane) = (rank as usize, op.lane_index as usize);
        Self { rank, lane, report: op.report, ticket: op.ticket }
    }
}

impl Effect {
    pub fn of(work: &MoeWork<'_>) -> Self {
        match *work {
            MoeWork::Layout(a) => Self::Announce {
                on: On::new(a.shape.rank, &a.op),
                slot: a.header.slot as usize,
                handle: a.routing.header,
                ids: Some(a.ids),
            },
            MoeWork::Cross(_)
            | MoeWork::Relay(..)
            | MoeWork::Forward(..)
            | MoeWork::Split(_)
            | MoeWork::NodeSum(..) => Self::Nodes(NodeEffect::of(work)),
            MoeWork::Fixed(rows, a) => Self::Fixed(FixedEffect::of(rows, a)),
            MoeWork::Announce(a) => Self::Announce {
                on: On::new(a.shape.rank, &a.op),
                slot: a.header.slot as usize,
                handle: a.handle,
                ids: None,
            },
            MoeWork::Judge(a) => Self::Judge { on: On::new(a.shape.rank, &a.op) },
            MoeWork::Plan(a) => {
                let summary = Summary::new(a.summary, &a.shape, a.crossing.nodes > 0);
                Self::Plan { on: On::new(a.shape.rank, &a.op), handle: a.routing.header, summary }
            }
            MoeWork::Dispatch(_, a) => Self::Dispatch {
                on: On::new(a.shape.rank, &a.op),
                handle: a.routing.header,
                payload: a.payload - u64::from(a.first) * a.payload_stride,
                cached: a.check,
                tokens: (a.first as usize, a.routing.tokens as usize),
            },
            MoeWork::Places(a) => {
                Self::Places { on: On::new(a.shape.rank, &a.op), handle: a.routing.header }
            }
            MoeWork::Expand(_, a) => {
                Self::Expand { on: On::new(a.shape.rank, &a.op), handle: a.routing.header }
            }
            MoeWork::Tail(a) => {
                Self::Tail { on: On::new(a.shape.rank, &a.op), experts: a.expert_major }
            }
            MoeWork::Reduce(_, a) => Self::Reduce {
                rank: a.shape.rank as usize,
                slot: a.slot as usize,
                handle: a.routing.header,
            },
            MoeWork::Combine(_, a) => Self::Combine {
                on: On::new(a.shape.rank, &a.op),
                handle: a.routing.header,
                per_rank: a.per_rank,
                out: a.out,
            },
        }
    }

    /// Whether it is what a later signal tells the peers of.
    pub fn moves(&self) -> bool {
        match self {
            Self::Dispatch { .. } | Self::Combine { .. } => true,
            Self::Nodes(effect) => effect.moves(),
            _ => false,
        }
    }
}

/// The ranks and what their lanes count.
#[derive(Debug, Default)]
pub struct Ranks {
    pub world: usize,
    /// By rank; ranks of different ones are not mapped. All are if there are none.
    nodes: Vec<usize>,
    /// Where tokens cross nodes once.
    pub rails: Option<Nodes>,
    /// By rank, then lane.
    pub sequences: Vec<Vec<u64>>,
}

impl Ranks {
    pub fn new(world: usize, lanes: usize) -> Self {
        Self { world, sequences: vec![vec![0; lanes]; world], ..Self::default() }
    }

    /// Ranks of nodes, which tokens cross `once`.
    pub fn apart(mut self, nodes: &[usize], once: bool) -> Self {
        self.nodes = nodes.to_vec();
        self.rails = once.then(|| Nodes::new(nodes));
        self
    }

    pub fn is_far(&self, rank: usize, other: usize) -> bool {
        self.nodes.get(rank) != self.nodes.get(other)
    }

    fn has_far(&self, rank: usize) -> bool {
        (0..self.world).any(|other| self.is_far(rank, other))
    }

    /// Does what a kernel does.
    pub fn run(&mut self, memory: &mut Memory, stream: usize, effect: Effect) {
        match effect {
            Effect::Announce { on, slot, handle, ids } => {
                self.announce(memory, stream, on, slot, (handle, ids));
            }
            Effect::Nodes(effect) => self.run_nodes(memory, stream, effect),
            Effect::Fixed(effect) => self.run_fixed(memory, stream, effect),
            Effect::Judge { on } => {
                let slots = self.announced(memory, stream, on, true);
                write_slots(on.report, slots.iter().map(|one| one.0));
                report(on, verdict::OK);
            }
            Effect::Plan { on, handle, summary } => {
                self.plan(memory, stream, on, (handle, summary))
            }
            Effect::Dispatch { on, handle, payload, cached, tokens } => {
                self.dispatch(memory, stream, on, (handle, payload, cached), tokens);
            }
            Effect::Carry { from, to } => carry(memory, stream, from, to),
            Effect::Free { from } => from.into_iter().flatten().for_each(|place| {
                memory.read(stream, place);
            }),
            Effect::Places { on, handle } => {
                self.received(memory, stream, on);
                let at = Place::Handle { rank: on.rank, at: handle };
                let routed = memory.read(stream, at);
                memory.write(stream, at, routed);
                scratch(memory, stream, on);
            }
            Effect::Expand { on, handle } => {
                memory.read(stream, Place::Handle { rank: on.rank, at: handle });
                let (slot, content) = self.received(memory, stream, on);
                memory.write(stream, Place::Experts { rank: on.rank, slot }, content);
            }
            Effect::Tail { on, experts } => self.tail(memory, stream, on, experts),
            Effect::Reduce { rank, slot, handle } => {
                memory.read(stream, Place::Handle { rank, at: handle });
                let content = memory.read(stream, Place::Experts { rank, slot });
                for source in 0..self.world {
                    memory.write(stream, Place::Rows { rank, slot, source }, content);
                }
            }
            Effect::Combine { on, handle, per_rank, out } => {
                memory.read(stream, Place::Handle { rank: on.rank, at: handle });
                self.combine(memory, stream, on, per_rank, out);
            }
            Effect::Fill { at } => memory.write(stream, Place::User { at }, Content::Value(at)),
            Effect::Experts { rank, slot, experts, received, number } => {
                self.experts(memory, stream, (rank, slot, experts), received, number);
            }
            Effect::Collect { at, number } => {
                memory.expect(stream, Place::User { at }, Content::Output(number));
            }
        }
    }

    fn announce(
        &mut self,
        memory: &mut Memory,
        stream: usize,
        on: On,
        slot: usize,
        (handle, ids): (u64, Option<u64>),
    ) {
        let On { rank, lane, .. } = on;
        self.sequences[rank][lane] += 1;
        let sequence = self.sequences[rank][lane];
        scratch(memory, stream, on);
        let at = Place::Handle { rank, at: handle };
        if let Some(ids) = ids {
            memory.expect(stream, Place::User { at: ids }, Content::Value(ids));
            memory.write(stream, at, Content::Routed { refused: false });
        } else {
            memory.read(stream, at);
        }
        let bad = ids.is_some_and(|ids| ids & BAD != 0);
        for peer in (0..self.world).filter(|&peer| !self.is_far(rank, peer)) {
            let mailbox = Place::Mailbox { rank: peer, lane, source: rank };
            memory.write(stream, mailbox, Content::Announced { sequence, slot, bad });
        }
    }

    /// What ranks announced of the operation this rank is at: all, or those that are mapped.
    pub fn announced(
        &self,
        memory: &mut Memory,
        stream: usize,
        on: On,
        all: bool,
    ) -> Vec<(usize, bool)> {
        let On { rank, lane, .. } = on;
        let due = self.sequences[rank][lane];
        let one = |source| {
            if !all && self.is_far(rank, source) {
                return (0, false);
            }
            let place = Place::Mailbox { rank, lane, source };
            match memory.read(stream, place) {
                Content::Announced { sequence, slot, bad } if sequence == due => (slot, bad),
                other => {
                    memory.fault(|| format!("{place:?} holds {other:?} where {due} is due"));
                    (0, false)
                }
            }
        };
        (0..self.world).map(one).collect()
    }

    fn plan(
        &self,
        memory: &mut Memory,
        stream: usize,
        on: On,
        (handle, summary): (u64, Option<Summary>),
    ) {
        let announced = self.announced(memory, stream, on, true);
        let refused = announced.iter().any(|&(_, bad)| bad);
        if let Some(summary) = summary {
            write_slots(on.report, announced.iter().map(|one| one.0));
            summary.write(self.rails.as_ref());
        }
        let at = Place::Handle { rank: on.rank, at: handle };
        memory.read(stream, at);
        memory.write(stream, at, Content::Routed { refused });
        scratch(memory, stream, on);
        report(on, if refused { verdict::CAPACITY } else { verdict::OK });
    }

    fn dispatch(
        &self,
        memory: &mut Memory,
        stream: usize,
        on: On,
        (handle, payload, cached): (u64, u64, bool),
        (first, tokens): (usize, usize),
    ) {
        let On { rank, lane, .. } = on;
        let routed = memory.read(stream, Place::Handle { rank, at: handle });
        let targets = self.announced(memory, stream, on, cached);
        if routed != (Content::Routed { refused: true }) {
            memory.expect(stream, Place::User { at: payload }, Content::Value(payload));
            let content = Content::Received { lane, sequence: self.sequences[rank][lane] };
            for (owner, &(slot, _)) in targets.iter().enumerate() {
                if self.is_far(rank, owner) {
                    if self.rails.as_ref().is_some_and(|n| n.rail(rank, n.of(owner)) != owner) {
                        continue;
                    }
                    for part in parts(first, tokens) {
                        let packed = Place::Packed { rank, lane, peer: owner, part };
                        memory.write(stream, packed, content);
                    }
                    continue;
                }
                memory.write(stream, Place::Rows { rank: owner, slot, source: rank }, content);
            }
        }
        if cached {
            report(on, verdict::OK);
        }
    }

    /// The slot this rank received into, whose rows have to be of the operation it is at.
    fn received(&self, memory: &mut Memory, stream: usize, on: On) -> (usize, Content) {
        let On { rank, lane, .. } = on;
        let (slot, _) = self.own(memory, stream, on);
        let content = Content::Received { lane, sequence: self.sequences[rank][lane] };
        for source in 0..self.world {
            memory.expect(stream, Place::Rows { rank, slot, source }, content);
        }
        (slot, content)
    }

    fn own(&self, memory: &mut Memory, stream: usize, on: On) -> (usize, bool) {
        let On { rank, lane, .. } = on;
        match memory.read(stream, Place::Mailbox { rank, lane, source: rank }) {
            Content::Announced { slot, bad, .. } => (slot, bad),
            _ => (0, false),
        }
    }

    fn tail(&self, memory: &mut Memory, stream: usize, on: On, experts: bool) {
        let (rank, (slot, _)) = (on.rank, self.own(memory, stream, on));
        for place in self.result(rank, slot, experts) {
            let content = memory.read(stream, place);
            memory.write(stream, place, content);
        }
    }

    /// The places of a result's rows.
    fn result(&self, rank: usize, slot: usize, experts: bool) -> Vec<Place> {
        match experts {
            true => vec![Place::Experts { rank, slot }],
            false => (0..self.world).map(|source| Place::Rows { rank, slot, source }).collect(),
        }
    }

    fn combine(&self, memory: &mut Memory, stream: usize, on: On, per_rank: bool, out: u64) {
        let (home, mut sum) = (on.rank, None);
        let near = !self.has_far(home);
        let owners = self.announced(memory, stream, on, near);
        for (rank, &(slot, _)) in owners.iter().enumerate() {
            let place = match per_rank {
                _ if self.is_far(home, rank) => {
                    Place::Staged { rank: home, lane: on.lane, owner: rank }
                }
                true => Place::Rows { rank, slot, source: home },
                false => Place::Experts { rank, slot },
            };
            let content = memory.read(stream, place);
            if !matches!(content, Content::Output(_)) {
                memory.fault(|| format!("{place:?} is combined and holds {content:?}"));
            }
            let first = *sum.get_or_insert(content);
            memory.same(place, content, first);
        }
        memory.write(stream, Place::User { at: out }, sum.unwrap_or_default());
        if near {
            report(on, verdict::OK);
        }
    }

    fn experts(
        &self,
        memory: &mut Memory,
        stream: usize,
        (rank, slot, experts): (usize, usize, bool),
        received: bool,
        number: Option<u64>,
    ) {
        let mut first = None;
        for place in self.result(rank, slot, experts) {
            if received {
                let content = memory.read(stream, place);
                let first = *first.get_or_insert(content);
                memory.same(place, content, first);
                if !matches!(content, Content::Received { .. }) {
                    memory.fault(|| format!("{place:?} holds {content:?}, not received rows"));
                }
            }
            if let Some(number) = number {
                memory.write(stream, place, Content::Output(number));
            }
        }
    }
}

pub fn scratch(memory: &mut Memory, stream: usize, on: On) {
    let place = Place::Scratch { rank: on.rank, lane: on.lane };
    memory.write(stream, place, Content::Value(on.ticket));
}

fn report(on: On, verdict: u32) {
    let report = MoeReport { ticket: on.ticket, verdict, ..MoeReport::default() };
    // SAFETY: reports are in the memory of the simulated rank, aligned, and read by volatile loads
    // under the same lock that this runs under.
    unsafe { (on.report as *mut MoeReport).write_volatile(report) };
}
