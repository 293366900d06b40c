//! What kernels read and write where tokens cross nodes once.

use ep_kernels::cuda::moe::{MoeWork, NodeSum};

use super::effects::{On, Ranks, scratch};
use super::memory::{Content, Memory, Place};
use super::rank::window_of;

/// A kernel, or several that follow each other.
#[derive(Clone, Copy, Debug)]
pub enum NodeEffect {
    /// Where tokens go that cross nodes.
    Cross {
        on: On,
        handle: u64,
        ids: u64,
    },
    /// What is in the blocks that a rank forwards.
    Relay {
        on: On,
        handle: u64,
    },
    Forward {
        on: On,
        handle: u64,
        source: usize,
    },
    Split {
        rank: usize,
        handle: u64,
    },
    NodeSum {
        on: On,
        handle: u64,
        which: NodeSum,
        per_rank: bool,
        out: u64,
    },
}

impl NodeEffect {
    pub fn of(work: &MoeWork<'_>) -> Self {
        match *work {
            MoeWork::Cross(a) => Self::Cross {
                on: On::new(a.shape.rank, &a.op),
                handle: a.routing.header,
                ids: a.ids,
            },
            MoeWork::Relay(block, a) => {
                Self::Relay { on: On::new(block.shape.rank, &a.op), handle: a.routing.header }
            }
            MoeWork::Forward(_, a) => Self::Forward {
                on: On::new(window_of(a.rows.payload), &a.rows.op),
                handle: a.rows.routing.header,
                source: a.rows.shape.rank as usize,
            },
            MoeWork::Split(a) => {
                Self::Split { rank: a.shape.rank as usize, handle: a.routing.header }
            }
            MoeWork::NodeSum(which, _, a) => Self::NodeSum {
                on: On::new(a.shape.rank, &a.op),
                handle: a.routing.header,
                which,
                per_rank: a.per_rank,
                out: a.out,
            },
            other => unreachable!("{other:?} knows of no nodes"),
        }
    }

    /// As [`super::effects::Effect::moves`].
    pub fn moves(&self) -> bool {
        matches!(self, Self::Forward { .. } | Self::NodeSum { which: NodeSum::All, .. })
    }
}

impl Ranks {
    /// Does what a kernel does.
    pub fn run_nodes(&self, memory: &mut Memory, stream: usize, effect: NodeEffect) {
        match effect {
            NodeEffect::Cross { on, handle, ids } => {
                memory.expect(stream, Place::User { at: ids }, Content::Value(ids));
                let at = Place::Handle { rank: on.rank, at: handle };
                memory.write(stream, at, Content::Routed { refused: false });
                scratch(memory, stream, on);
            }
            NodeEffect::Relay { on, handle } => self.relay(memory, stream, on, handle),
            NodeEffect::Forward { on, handle, source } => {
                self.forward(memory, stream, on, (handle, source));
            }
            NodeEffect::Split { rank, handle } => {
                memory.read(stream, Place::Handle { rank, at: handle });
            }
            NodeEffect::NodeSum { on, handle, which, per_rank, out } => {
                memory.read(stream, Place::Handle { rank: on.rank, at: handle });
                self.node_sum(memory, stream, on, (which, per_rank, out));
            }
        }
    }

    fn relay(&self, memory: &mut Memory, stream: usize, on: On, handle: u64) {
        let On { rank, lane, .. } = on;
        for source in self.rails.iter().flat_map(|nodes| nodes.sources_of(rank)) {
            memory.read(stream, Place::Block { rank, lane, source });
        }
        let at = Place::Handle { rank, at: handle };
        let routed = memory.read(stream, at);
        memory.write(stream, at, routed);
        scratch(memory, stream, on);
    }

    fn forward(&self, memory: &mut Memory, stream: usize, on: On, (handle, source): (u64, usize)) {
        let On { rank, lane, .. } = on;
        memory.read(stream, Place::Handle { rank, at: handle });
        let content = Content::Received { lane, sequence: self.sequences[rank][lane] };
        memory.expect(stream, Place::Block { rank, lane, source }, content);
        let targets = self.announced(memory, stream, on, false);
        for (owner, &(slot, _)) in targets.iter().enumerate() {
            if !self.is_far(rank, owner) {
                memory.write(stream, Place::Rows { rank: owner, slot, source }, content);
            }
        }
    }

    /// Sums of a node's rows, which are alike.
    fn near_sum(
        &self,
        memory: &mut Memory,
        stream: usize,
        on: On,
        (home, per_rank): (usize, bool),
    ) -> Content {
        let mut sum = None;
        for (rank, &(slot, _)) in self.announced(memory, stream, on, false).iter().enumerate() {
            if self.is_far(on.rank, rank) {
                continue;
            }
            let place = match per_rank {
                true => Place::Rows { rank, slot, source: home },
                false => Place::Experts { rank, slot },
            };
            let content = memory.read(stream, place);
            memory.same(place, content, *sum.get_or_insert(content));
        }
        sum.unwrap_or_default()
    }

    fn node_sum(
        &self,
        memory: &mut Memory,
        stream: usize,
        on: On,
        (which, per_rank, out): (NodeSum, bool, u64),
    ) {
        let On { rank, lane, .. } = on;
        let Some(nodes) = &self.rails else { return };
        let own = Place::OwnSums { rank, lane };
        match which {
            NodeSum::Block => {
                for source in nodes.sources_of(rank) {
                    let sum = self.near_sum(memory, stream, on, (source, per_rank));
                    memory.write(stream, Place::Block { rank, lane, source }, sum);
                }
            }
            NodeSum::Own => {
                let sum = self.near_sum(memory, stream, on, (rank, per_rank));
                memory.write(stream, own, sum);
            }
            NodeSum::All => {
                let sum = memory.read(stream, own);
                if !matches!(sum, Content::Output(_)) {
                    memory.fault(|| format!("{own:?} is combined and holds {sum:?}"));
                }
                for node in (0..nodes.count()).filter(|&node| node != nodes.of(rank)) {
                    let owner = nodes.rail(rank, node);
                    memory.expect(stream, Place::Staged { rank, lane, owner }, sum);
                }
                memory.write(stream, Place::User { at: out }, sum);
            }
        }
    }
}
