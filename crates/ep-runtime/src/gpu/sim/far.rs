//! Ranks that are not mapped: what is told of them, and what is carried between windows.

use std::mem::size_of;

use ep_kernels::cuda::moe::{MoeHeader, MoeReport, MoeShape, PIECES};

use super::memory::{Memory, Place};
use super::run::TOKENS;
use crate::node::Nodes;
use crate::window::Window;

/// Parts of the tokens that are packed one by one.
pub const PARTS: usize = 4;
const PART: usize = TOKENS / PARTS;

/// The parts that tokens or rows belong to.
pub fn parts(first: usize, count: usize) -> std::ops::Range<usize> {
    first / PART..(first + count).div_ceil(PART)
}

/// Where a kernel writes what the host has to know, and whose it is.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    at: u64,
    rank: usize,
    world: usize,
    experts: usize,
    physical: usize,
    /// Tokens cross nodes once.
    once: bool,
}

impl Summary {
    pub fn new(at: u64, shape: &MoeShape, once: bool) -> Option<Self> {
        (shape.far > 0).then_some(Self {
            at,
            rank: shape.rank as usize,
            world: shape.world as usize,
            experts: shape.local_experts as usize,
            physical: shape.physical as usize,
            once,
        })
    }

    /// The first expert of a rank, where they are contiguous.
    fn base(&self, rank: usize) -> usize {
        rank * (self.physical / self.world) + rank.min(self.physical % self.world)
    }

    /// Tells that every token goes to the first expert of every rank.
    pub fn write(&self, nodes: Option<&Nodes>) {
        let Self { rank, world, experts, physical, .. } = *self;
        let all = TOKENS * world;
        let repeat = |n: usize, count: usize| std::iter::repeat_n(n, count);
        let first = |n: usize| std::iter::once(n).chain(repeat(0, experts - 1));
        let sent = (0..physical).map(|e| (0..world).any(|r| self.base(r) == e));
        let numbers = [all, all].into_iter().chain(first(all));
        let numbers = numbers.chain([0]).chain(repeat(all, experts));
        // From and to each rank; where this rank's rows start there; and where they are staged.
        let numbers = numbers.chain(repeat(TOKENS, 2 * world));
        let numbers = numbers.chain(repeat(TOKENS * rank, 3 * world));
        let numbers = numbers.chain((0..world).flat_map(|_| first(TOKENS)));
        let numbers = numbers.chain(sent.map(|some| TOKENS * usize::from(some)));
        let pieces = (0..PIECES).flat_map(|i| repeat(TOKENS / PIECES * i, world));
        let nodes = nodes.filter(|_| self.once).map_or(Vec::new(), |nodes| of_nodes(nodes, rank));
        for (i, number) in numbers.chain(pieces).chain(nodes).enumerate() {
            // SAFETY: summaries are in the memory of the simulated rank, with room for all of it.
            unsafe { (self.at as *mut i32).add(i).write(number as i32) };
        }
    }
}

/// What a rank is told of nodes if every token goes to all.
fn of_nodes(nodes: &Nodes, rank: usize) -> Vec<usize> {
    let (own, all) = (nodes.of(rank), 0..nodes.count());
    let to = |node: usize| match node == own {
        true => 0,
        false => TOKENS * place(nodes, nodes.rail(rank, node), rank),
    };
    let count = |node: usize| TOKENS * usize::from(node != own);
    let mut told: Vec<usize> = all.clone().map(to).chain(all.map(count)).collect();
    for (i, source) in nodes.sources_of(rank).enumerate() {
        told.extend([TOKENS, i * TOKENS, before(nodes, source, own) * TOKENS]);
    }
    told
}

/// Which of the blocks that a rank forwards comes from `source`.
fn place(nodes: &Nodes, rank: usize, source: usize) -> usize {
    nodes.sources_of(rank).position(|one| one == source).unwrap_or(usize::MAX / TOKENS)
}

/// To how many nodes before `node` a rank's tokens cross.
fn before(nodes: &Nodes, rank: usize, node: usize) -> usize {
    (0..node).filter(|&node| node != nodes.of(rank)).count()
}

/// Writes the slots that ranks announced behind a report.
pub fn write_slots(report: u64, slots: impl Iterator<Item = usize>) {
    let headers = (report as usize + size_of::<MoeReport>()) as *mut MoeHeader;
    for (rank, slot) in slots.enumerate() {
        let header = MoeHeader { slot: slot as u32, ..MoeHeader::default() };
        // SAFETY: reports are in the memory of the simulated rank, with room for all headers.
        unsafe { headers.add(rank).write_volatile(header) };
    }
}

/// Where things are in a window.
#[derive(Clone, Debug)]
pub struct Map {
    pub window: Window,
    pub world: usize,
    pub lanes: usize,
    pub slots: usize,
    /// Bytes of a received row.
    pub stride: usize,
    /// Where tokens cross nodes once.
    pub nodes: Option<Nodes>,
}

/// A block of a window.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Whose window.
    pub rank: usize,
    /// With whom the block is exchanged.
    pub other: usize,
    pub at: usize,
    pub bytes: usize,
}

/// The places of a block; one, but for packed rows.
pub type Places = [Option<Place>; PARTS];

impl Map {
    /// What a block is, if it is something that may be carried.
    pub fn places(&self, block: Block) -> Option<Places> {
        let Block { rank, other, at, bytes } = block;
        let one = |place| Some([Some(place), None, None, None]);
        let w = &self.window;
        for lane in 0..self.lanes {
            for source in 0..self.world {
                if at == w.mailbox(lane, source) && bytes == w.message {
                    return one(Place::Mailbox { rank, lane, source });
                }
            }
            let (send, receive) = (w.send_staging(lane), w.receive_staging(lane));
            let forward = w.forward_staging(lane);
            if w.block > 0 && (send..forward).contains(&at) {
                // A block of fixed size; else a part of it, or rows whose number is known.
                let whole = |first: usize| at == first + other * w.block;
                if whole(send) && bytes > self.stride * (TOKENS - PART) {
                    let all = std::array::from_fn(|part| {
                        Some(Place::Packed { rank, lane, peer: other, part })
                    });
                    return Some(all);
                }
                if whole(receive) {
                    return one(Place::Staged { rank, lane, owner: other });
                }
            }
            if (send..receive).contains(&at) {
                return self.packed((rank, lane, other), at - send, bytes);
            }
            if (forward..w.send_staging(lane + 1)).contains(&at) {
                let index = place(self.nodes.as_ref()?, rank, other);
                let whole = TOKENS * self.stride;
                // Sums may be of other rows than received ones.
                let right = at - forward == index * bytes && bytes % TOKENS == 0 && whole > 0;
                return right.then(|| one(Place::Block { rank, lane, source: other })).flatten();
            }
            if (receive..forward).contains(&at) {
                let nodes = self.nodes.as_ref();
                let block = nodes.map(|nodes| before(nodes, rank, nodes.of(other)));
                // Rows of all ranks, or one per node.
                let right = [Some(other), block].contains(&Some((at - receive) / bytes));
                let right = right && (at - receive).is_multiple_of(bytes);
                return right.then(|| one(Place::Staged { rank, lane, owner: other })).flatten();
            }
        }
        let slot = (0..self.slots).rfind(|&slot| w.rank_rows(slot) <= at)?;
        if at >= w.expert_rows(slot) {
            let right = at - w.expert_rows(slot) == other * bytes;
            return right.then(|| one(Place::Experts { rank, slot })).flatten();
        }
        // Whole blocks may be of other rows than received ones.
        let row = at - w.rank_rows(slot);
        let right = row == other * bytes || row / self.stride / TOKENS == other;
        right.then(|| one(Place::Rows { rank, slot, source: other })).flatten()
    }

    fn packed(
        &self,
        (rank, lane, peer): (usize, usize, usize),
        at: usize,
        bytes: usize,
    ) -> Option<Places> {
        let block = match &self.nodes {
            Some(nodes) => before(nodes, rank, nodes.of(peer)),
            None => peer,
        };
        let (row, rows) = ((at / self.stride).checked_sub(block * TOKENS)?, bytes / self.stride);
        let mut places = Places::default();
        for part in parts(row, rows) {
            *places.get_mut(part)? = Some(Place::Packed { rank, lane, peer, part });
        }
        Some(places)
    }
}

/// Copies from some places to others, of which one side is a single one.
pub fn carry(memory: &mut Memory, stream: usize, from: Places, to: Places) {
    let mut content = None;
    for place in from.into_iter().flatten() {
        let found = memory.read(stream, place);
        memory.same(place, found, *content.get_or_insert(found));
    }
    for place in to.into_iter().flatten() {
        memory.write(stream, place, content.unwrap_or_default());
    }
}
