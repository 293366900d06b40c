//! Nodes: the classes of ranks that map each other, and what crosses from one to another.
//!
//! In a layer built with [`Hierarchy::Node`] a token crosses to another node at most once. Its rank,
//! the `l`-th of its node, packs one record per token and node, in the order of its tokens, and puts
//! them as one block into the forward staging of its *rail* in that node: rank `l mod n` of its `n`
//! ranks. The rail stores each record into the slots of the ranks it is for, exactly where its source
//! would have put it. All places follow from what is announced: beside its counts per expert and
//! rank, each rank tells how many of its tokens cross to each node.
//!
//! On hosts (`crate::gpu::nodes` says what differs on GPUs) no flag is added. `Done` towards a bulk peer says that the blocks for its node are there; a rail
//! consumes it from all bulk peers before it forwards, and then raises `Done` at the ranks of its own
//! node. All put before any waits, so ranks that do the same cannot wait in a circle. A rank announces
//! its next operation on a lane after it has forwarded, so its staging is not written before that.

mod build;
mod crossing;
mod forward;
mod reduce;

pub(crate) use crossing::{Crossing, Incoming};
pub(crate) use forward::{await_blocks, forward, read_blocks, send_blocks};
pub(crate) use reduce::{push, sum};

use crate::{EpError, Precision, Result};

/// How tokens get to ranks of other nodes: those whose windows are not mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Hierarchy {
    /// Once for each rank they go to.
    #[default]
    Flat,
    /// Once for each node they go to, to one of its ranks, which passes them on inside the node.
    /// Results, handles and metadata are bit for bit those of [`Hierarchy::Flat`].
    Node,
}

/// Bounds of what crosses nodes, for sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rails {
    pub nodes: usize,
    /// Ranks of other nodes whose tokens one rank forwards.
    pub sources: usize,
}

impl Rails {
    /// Those of any nodes of `world` ranks.
    pub fn any(world: usize) -> Self {
        Self { nodes: world, sources: world.saturating_sub(1) }
    }
}

/// Fails if rows cannot be combined like this in a layer that was not built for it.
pub(crate) fn check_precision(
    op: &'static str,
    hierarchical: bool,
    precision: Precision,
) -> Result<()> {
    if precision != Precision::NodeReduced || hierarchical {
        return Ok(());
    }
    let detail = "Precision::NodeReduced needs a layer built with Hierarchy::Node";
    Err(EpError::argument(op, detail))
}

/// Which ranks form which node. Nodes are numbered in the order of their first ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Nodes {
    of: Vec<usize>,
    /// A rank's index among those of its node.
    local: Vec<usize>,
    members: Vec<Vec<usize>>,
}

/// What a rank knows of the nodes of its layer.
#[derive(Debug)]
pub(crate) struct Across {
    pub nodes: Nodes,
    /// Tokens cross to other nodes once.
    pub hierarchical: bool,
    /// The ranks of other nodes whose rows this rank forwards then.
    pub sources: Vec<usize>,
    /// The ranks of this rank's node, this one included.
    pub members: Vec<usize>,
    /// Whether each rank is one of them.
    pub near: Vec<bool>,
}

impl Across {
    pub fn new(nodes: Nodes, hierarchy: Hierarchy, rank: usize) -> Self {
        let own = nodes.of(rank);
        Self {
            hierarchical: hierarchy == Hierarchy::Node,
            sources: nodes.sources_of(rank).collect(),
            members: nodes.members(own).to_vec(),
            near: nodes.all().iter().map(|&node| node == own).collect(),
            nodes,
        }
    }
}

impl Nodes {
    /// Ranks with equal entries form a node.
    pub fn new(of: &[usize]) -> Self {
        let mut nodes = Self { of: Vec::new(), local: Vec::new(), members: Vec::new() };
        for (rank, &label) in of.iter().enumerate() {
            let node = match of[..rank].iter().position(|&earlier| earlier == label) {
                Some(first) => nodes.of[first],
                None => {
                    nodes.members.push(Vec::new());
                    nodes.members.len() - 1
                }
            };
            nodes.of.push(node);
            nodes.local.push(nodes.members[node].len());
            nodes.members[node].push(rank);
        }
        nodes
    }

    /// From who maps whom: `maps(a, b)`, which is symmetric; of oneself it is not asked. Says which
    /// ranks are no node, if any.
    pub fn from_reach(world: usize, maps: impl Fn(usize, usize) -> bool) -> Result<Self, String> {
        let maps = |a: usize, b: usize| a == b || maps(a, b);
        let mut of = Vec::with_capacity(world);
        for rank in 0..world {
            // Where ranks map each other, what they map is the same.
            let first = (0..rank).find(|&r| maps(rank, r)).unwrap_or(rank);
            if let Some(other) = (0..world).find(|&r| maps(first, r) != maps(rank, r)) {
                return Err(format!(
                    "ranks {first} and {rank} map each other, but only one of them maps rank {other}"
                ));
            }
            of.push(first);
        }
        Ok(Self::new(&of))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// The node of `rank`.
    pub fn of(&self, rank: usize) -> usize {
        self.of[rank]
    }

    /// The node of every rank.
    pub fn all(&self) -> &[usize] {
        &self.of
    }

    /// The ranks of a node, ascending.
    pub fn members(&self, node: usize) -> &[usize] {
        &self.members[node]
    }

    /// The rank of `node` that forwards what `source`, a rank of another node, sends there.
    pub fn rail(&self, source: usize, node: usize) -> usize {
        let members = &self.members[node];
        members[self.local[source] % members.len()]
    }

    /// The ranks of other nodes whose rows `rank` forwards, ascending.
    pub fn sources_of(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        let node = self.of[rank];
        let elsewhere = (0..self.of.len()).filter(move |&source| self.of[source] != node);
        elsewhere.filter(move |&source| self.rail(source, node) == rank)
    }

    /// What there is of rails.
    pub fn rails(&self) -> Rails {
        let sources = (0..self.of.len()).map(|rank| self.sources_of(rank).count()).max();
        Rails { nodes: self.count(), sources: sources.unwrap_or(0) }
    }

    /// A number that differs between most groups of different nodes.
    pub fn digest(&self) -> u32 {
        self.of
            .iter()
            .fold(0x811c_9dc5, |hash: u32, &node| (hash ^ node as u32).wrapping_mul(0x0100_0193))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_numbered_by_their_first_ranks() {
        let nodes = Nodes::new(&[7, 3, 7, 0, 3]);
        assert_eq!(nodes.of, [0, 1, 0, 2, 1]);
        assert_eq!(nodes.members, [vec![0, 2], vec![1, 4], vec![3]]);
        assert_eq!(nodes.local, [0, 0, 1, 0, 1]);
        let same = |a: usize, b: usize| a % 3 == b % 3;
        assert_eq!(Nodes::from_reach(5, same).unwrap().of, [0, 1, 2, 0, 1]);
        assert_eq!(Nodes::from_reach(0, same).unwrap().of, [0; 0]);
    }

    #[test]
    fn every_rank_has_one_rail_in_every_other_node() {
        for of in [&[0, 0, 1, 1][..], &[0, 1, 1, 1], &[0, 1, 1, 2, 2, 2], &[0, 1, 0, 2, 1, 0, 0]] {
            let nodes = Nodes::new(of);
            for source in 0..of.len() {
                for node in (0..nodes.count()).filter(|&node| node != nodes.of(source)) {
                    let forwards = |&rank: &usize| nodes.sources_of(rank).any(|s| s == source);
                    let rails = nodes.members(node).iter().copied().filter(forwards);
                    assert_eq!(rails.collect::<Vec<_>>(), [nodes.rail(source, node)]);
                }
            }
        }
        assert_eq!(Nodes::new(&[0, 0, 1, 1]).rails(), Rails { nodes: 2, sources: 1 });
        // The lone rank gets from all three; of these the first gets from it.
        assert_eq!(Nodes::new(&[0, 1, 1, 1]).rails(), Rails { nodes: 2, sources: 3 });
        assert_eq!(Nodes::new(&[5, 5]).rails(), Rails { nodes: 1, sources: 0 });
    }

    #[test]
    fn what_is_no_partition_is_refused() {
        let chain = |a: usize, b: usize| a.abs_diff(b) == 1;
        let error = Nodes::from_reach(3, chain).unwrap_err();
        assert!(error.contains("ranks 0 and 1") && error.contains("rank 2"), "{error}");
        let star = |a: usize, b: usize| a == 2 || b == 2;
        let error = Nodes::from_reach(3, star).unwrap_err();
        assert!(error.contains("ranks 0 and 2") && error.contains("rank 1"), "{error}");
    }
}
