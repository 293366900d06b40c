//! Which ranks share a host, and the memory they share.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::OP;
use crate::host_link::Region;
use crate::rendezvous::host::HostId;
use crate::{Deadline, Group, Result, process};

/// Where a rank says it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    host: HostId,
    node: Option<u64>,
}

impl Place {
    fn shares(&self, other: &Self) -> bool {
        self.node == other.node && (self.node.is_some() || self.host.shares(&other.host))
    }
}

/// The ranks' nodes, as seen by one rank.
#[derive(Clone, Debug)]
pub(super) struct Nodes {
    /// The first rank of each rank's node.
    heads: Vec<usize>,
    /// The ranks of this rank's node, itself included.
    members: Vec<usize>,
    bulk: Vec<usize>,
    /// How many ranks the host has, whatever nodes they count as.
    on_host: usize,
    /// This rank's number among them.
    local: usize,
    rank: usize,
}

impl Nodes {
    /// Asks everyone where it is.
    pub(super) fn meet(group: &Group, node: Option<u64>, deadline: Deadline) -> Result<Self> {
        let place = Place { host: HostId::here(), node };
        let bytes = postcard::to_stdvec(&place).expect("plain data");
        let all = group.all_gather_within(OP, &bytes, deadline)?;
        let places: Result<Vec<Place>> = all
            .iter()
            .enumerate()
            .map(|(rank, bytes)| postcard::from_bytes(bytes).map_err(|_| super::unreadable(rank)))
            .collect();
        Ok(Self::of(&places?, group.rank()))
    }

    fn of(places: &[Place], rank: usize) -> Self {
        let head = |one: &Place| places.iter().position(|other| one.shares(other));
        // A rank that does not say where it is shares nothing, not even with itself.
        let heads: Vec<usize> =
            places.iter().enumerate().map(|(i, one)| head(one).unwrap_or(i)).collect();
        let of_mine = |r: &usize| heads[*r] == heads[rank];
        let (members, bulk) = (0..places.len()).partition(of_mine);
        let host = &places[rank].host;
        let mut beside: Vec<usize> =
            (0..places.len()).filter(|&one| places[one].host == *host).collect();
        // Ranks of one node behind each other: nodes that share a host get NICs of their own, and
        // ranks of the same number within nodes of one size have NICs of the same number.
        beside.sort_by_key(|&one| (heads[one], one));
        let local = beside.iter().take_while(|&&one| one != rank).count();
        Self { heads, members, bulk, on_host: beside.len(), local, rank }
    }

    /// The peers on other nodes.
    pub(super) fn bulk(&self) -> &[usize] {
        &self.bulk
    }

    /// This rank's number among those of its host, of which those of a node follow each other.
    pub(super) fn local(&self) -> usize {
        self.local
    }

    /// How many ranks share the host's cores.
    pub(super) fn on_host(&self) -> usize {
        self.on_host
    }

    /// Makes this rank's region and maps those of its node's ranks; by rank. A collective.
    pub(super) fn share(
        &self,
        group: &Group,
        bytes: usize,
        deadline: Deadline,
    ) -> Result<Vec<Option<Arc<dyn Region>>>> {
        let near = self.near(group)?;
        let shared = self.share_in(&near, bytes, deadline)?;
        let mut regions = vec![None; group.world()];
        for (&rank, region) in self.members.iter().zip(shared) {
            regions[rank] = Some(region);
        }
        Ok(regions)
    }

    /// The ranks of this rank's node as a group. A collective.
    pub(super) fn near(&self, group: &Group) -> Result<Group> {
        let near = group.split(self.heads[self.rank] as u32, self.rank as i64)?;
        Ok(near.part_of_another(&self.members))
    }

    /// As [`Nodes::share`], by number within the node, whose group `near` is.
    pub(super) fn share_in(
        &self,
        near: &Group,
        bytes: usize,
        deadline: Deadline,
    ) -> Result<Vec<Arc<dyn Region>>> {
        // Ranks are numbered within the node there.
        process::share_memfd(near, bytes, deadline).map_err(|error| near.outward(error))
    }

    /// The ranks of this rank's node.
    #[cfg(feature = "cuda")]
    pub(super) fn members(&self) -> &[usize] {
        &self.members
    }

    /// Two ranks of different nodes of which the same is known, be it what GPU they use.
    #[cfg(feature = "cuda")]
    pub(super) fn clash<T: PartialEq>(&self, known: &[T]) -> Option<(usize, usize)> {
        let ranks = 0..self.heads.len();
        ranks
            .clone()
            .flat_map(|a| (0..a).map(move |b| (b, a)))
            .find(|&(b, a)| self.heads[a] != self.heads[b] && known[a] == known[b])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(name: &str, node: Option<u64>) -> Place {
        let host = HostId { boot: "b".into(), name: name.into(), network: "net:[1]".into() };
        Place { host, node }
    }

    /// One host that stands for nodes, in whatever order ranks count as theirs, divides its NICs
    /// among them as if each had been given some; real hosts do not mind.
    #[test]
    fn nodes_of_one_host_have_nics_of_their_own() {
        let locals = |places: &[Place]| -> Vec<usize> {
            (0..places.len()).map(|rank| Nodes::of(places, rank).local()).collect()
        };
        assert_eq!(locals(&[0, 1, 0, 1].map(|node| place("a", Some(node)))), [0, 2, 1, 3]);
        assert_eq!(locals(&[1, 1, 0, 0].map(|node| place("a", Some(node)))), [0, 1, 2, 3]);
        let hosts = [("a", 5), ("a", 5), ("b", 7), ("b", 7)];
        assert_eq!(locals(&hosts.map(|(host, node)| place(host, Some(node)))), [0, 1, 0, 1]);
    }

    #[test]
    fn ranks_of_a_host_are_a_node_unless_they_say_otherwise() {
        let (a, b) = (place("a", None), place("b", None));
        let nodes = Nodes::of(&[a.clone(), b.clone(), a.clone(), b, a], 2);
        assert_eq!((nodes.members.as_slice(), nodes.bulk()), (&[0, 2, 4][..], &[1, 3][..]));
        assert_eq!((nodes.local(), nodes.on_host()), (1, 3));
        let nodes = Nodes::of(&[0, 0, 1, 1].map(|node| place("a", Some(node))), 3);
        assert_eq!((nodes.members.as_slice(), nodes.bulk()), (&[2, 3][..], &[0, 1][..]));
        assert_eq!((nodes.local(), nodes.on_host()), (3, 4));
        let nodes = Nodes::of(&[place("a", None), place("a", Some(1))], 0);
        assert_eq!(nodes.bulk(), [1]);
        // Two that cannot tell which host they are on.
        let lost =
            Place { host: HostId { boot: String::new(), ..place("a", None).host }, node: None };
        let nodes = Nodes::of(&[lost.clone(), lost], 1);
        assert_eq!((nodes.members.as_slice(), nodes.bulk()), (&[1][..], &[0][..]));
    }
}
