//! A link over memory that every rank of a host has mapped.

use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::flags::FlagBoard;
use crate::{
    Deadline, Group, Link, Mapping, Put, Queue, Reach, Result, TransportError, WindowSpec,
};

/// Memory that several ranks have mapped.
///
/// # Safety
/// The `bytes()` bytes from `base()`, which is aligned to a page, stay mapped for loads and stores
/// at that address while the value lives.
pub unsafe trait Region: Debug + Send + Sync {
    /// Its first byte.
    fn base(&self) -> NonNull<u8>;
    /// Its length.
    fn bytes(&self) -> usize;
}

const PAGE: usize = 4096;

/// Which ranks of a host are shown as bulk peers of each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Apart {
    #[default]
    None,
    All,
    /// Those with different entries.
    Nodes(Arc<[usize]>),
}

impl Apart {
    pub fn all(bulk: bool) -> Self {
        if bulk { Self::All } else { Self::None }
    }

    /// Consecutive ranks in nodes of these sizes.
    pub fn sizes(sizes: &[usize]) -> Self {
        let ranks = |(node, &size): (usize, &usize)| std::iter::repeat_n(node, size);
        Self::Nodes(sizes.iter().enumerate().flat_map(ranks).collect())
    }

    fn are(&self, a: usize, b: usize) -> bool {
        a != b
            && match self {
                Self::None => false,
                Self::All => true,
                Self::Nodes(of) => of.get(a) != of.get(b) || a >= of.len(),
            }
    }

    /// The node of each of `world` ranks, if it was said.
    pub fn nodes(&self, world: usize) -> Option<Vec<usize>> {
        match self {
            Self::None => Some(vec![0; world]),
            Self::All => Some((0..world).collect()),
            Self::Nodes(of) => (of.len() == world).then(|| of.to_vec()),
        }
    }

    /// Fails if nodes were given for another number of ranks.
    pub fn check(&self, world: usize) -> Result<()> {
        match self {
            Self::Nodes(of) if of.len() != world => {
                let detail = format!("the nodes have {} ranks, the group {world}", of.len());
                Err(TransportError::Argument { op: "open", detail })
            }
            _ => Ok(()),
        }
    }
}

/// A [`Link`] over one mapped [`Region`] per rank: the window, then the rank's flags.
pub struct HostLink {
    group: Group,
    spec: WindowSpec,
    regions: Vec<Arc<dyn Region>>,
    boards: Vec<FlagBoard>,
    apart: Apart,
    /// Makes this rank's waits look at the group's health when there is news.
    _bell: Arc<dyn Fn() + Send + Sync>,
}

impl Debug for HostLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("HostLink");
        out.field("rank", &self.group.rank()).field("world", &self.group.world());
        out.field("spec", &self.spec).field("apart", &self.apart).finish_non_exhaustive()
    }
}

impl HostLink {
    /// The size of each rank's region.
    ///
    /// # Errors
    /// An argument error if it is beyond what can be addressed.
    pub fn region_bytes(spec: WindowSpec, world: usize) -> Result<usize> {
        let total = board_offset(spec).and_then(|offset| {
            offset.checked_add(FlagBoard::bytes(world, spec.flags)?)?.checked_next_multiple_of(PAGE)
        });
        total.filter(|&total| total <= isize::MAX as usize).ok_or_else(|| {
            TransportError::Argument {
                op: "open",
                detail: format!("{spec:?} for {world} ranks is beyond the address space"),
            }
        })
    }

    /// The memory of a rank's region, which starts with its window.
    #[cfg(feature = "cuda")]
    pub(crate) fn region(&self, rank: usize) -> Arc<dyn Region> {
        self.regions[rank].clone()
    }

    /// A link of this rank over the regions of all ranks, by rank and zeroed before any was used.
    ///
    /// # Errors
    /// An argument error if the number of regions or the size of one does not fit.
    pub fn new(group: &Group, spec: WindowSpec, regions: Vec<Arc<dyn Region>>) -> Result<Self> {
        let world = group.world();
        let bytes = Self::region_bytes(spec, world)?;
        if regions.len() != world || regions.iter().any(|region| region.bytes() < bytes) {
            let detail = format!("needs {world} regions of {bytes} bytes");
            return Err(TransportError::Argument { op: "open", detail });
        }
        let offset = board_offset(spec).expect("part of region_bytes");
        let board =
            |region: &Arc<dyn Region>| FlagBoard::over(region.clone(), offset, world, spec.flags);
        let boards = regions.iter().map(board).collect::<Result<Vec<_>>>()?;
        let own = boards[group.rank()].clone();
        let bell: Arc<dyn Fn() + Send + Sync> = Arc::new(move || own.ring());
        group.health().watch(Arc::downgrade(&bell));
        Ok(Self { group: group.clone(), spec, regions, boards, apart: Apart::None, _bell: bell })
    }

    /// Reports other ranks as bulk peers, so that callers' bulk paths can be tested on any host.
    pub fn bulk(self, bulk: bool) -> Self {
        self.apart(Apart::all(bulk))
    }

    /// Reports the ranks of other nodes as bulk peers, as if each node were a host of its own.
    /// `node_of` has one entry per rank, the same on all ranks; ranks of equal entries map each
    /// other, and ranks behind its end are nodes of their own.
    pub fn bulk_across(self, node_of: &[usize]) -> Self {
        self.apart(Apart::Nodes(node_of.into()))
    }

    pub(crate) fn apart(mut self, apart: Apart) -> Self {
        self.apart = apart;
        self
    }

    fn mapping(&self, rank: usize) -> Mapping {
        Mapping { base: self.regions[rank].base(), bytes: self.spec.bytes }
    }
}

/// Where a rank's flags are in its region.
pub(crate) fn board_offset(spec: WindowSpec) -> Option<usize> {
    spec.bytes.checked_next_multiple_of(PAGE)
}

/// # Errors
/// An argument error if there is no rank `peer`.
pub(crate) fn check_rank(op: &'static str, peer: usize, world: usize) -> Result<()> {
    if peer < world {
        return Ok(());
    }
    Err(TransportError::Argument { op, detail: format!("rank {peer} of {world}") })
}

/// # Errors
/// An argument error if there is no such flag.
pub(crate) fn check_flag(op: &'static str, flag: u32, spec: WindowSpec) -> Result<()> {
    let flags = spec.flags;
    if flag < flags {
        return Ok(());
    }
    Err(TransportError::Argument { op, detail: format!("flag {flag} of {flags}") })
}

/// # Errors
/// An argument error if there is no such rank or a side of the put leaves its window.
pub(crate) fn check_put(put: &Put, world: usize, spec: WindowSpec) -> Result<()> {
    check_rank("put", put.peer, world)?;
    let inside = |start: usize| start.checked_add(put.bytes).is_some_and(|end| end <= spec.bytes);
    if inside(put.from) && inside(put.to) {
        return Ok(());
    }
    let detail = format!("{put:?} leaves the window of {} bytes", spec.bytes);
    Err(TransportError::Argument { op: "put", detail })
}

/// [`Link::ready`] of a link whose flags are on `board`.
pub(crate) fn ready(board: &FlagBoard, group: &Group, peers: &[usize], flag: u32) -> bool {
    let known = |peer| peer < group.world() && flag < board.flags();
    let absent = |&&peer: &&usize| !(known(peer) && board.is_set(flag, peer));
    let mut absent = peers.iter().filter(absent).peekable();
    // Where the group has failed, the wait would fail at once.
    let fails = |&peer: &usize| group.health().check_waiting("ready", &[peer]).is_err();
    absent.peek().is_none() || absent.any(fails)
}

// SAFETY: mappings come from regions that `self` holds, whose lengths were checked against the spec
// when it was made; which ranks are apart is symmetric and the same on all; flags and order are those of
// `FlagBoard`, which conformance and models test.
unsafe impl Link for HostLink {
    fn window(&self) -> Mapping {
        self.mapping(self.group.rank())
    }

    fn reach(&self, peer: usize) -> Reach {
        if self.apart.are(self.group.rank(), peer) {
            Reach::Bulk
        } else {
            Reach::Direct(self.mapping(peer))
        }
    }

    fn put(&self, _queue: &Queue, put: Put) -> Result<()> {
        check_put(&put, self.group.world(), self.spec)?;
        let (from, to) = (self.window().base.as_ptr(), self.mapping(put.peer).base.as_ptr());
        // SAFETY: both ranges were just checked to lie in windows that stay mapped while `self`
        // holds their regions. That no other rank writes them meanwhile is the protocol's promise
        // to itself; within one window they may overlap, which `copy` allows.
        unsafe { std::ptr::copy(from.add(put.from), to.add(put.to), put.bytes) };
        Ok(())
    }

    fn flush(&self, _queue: &Queue, _deadline: Deadline) -> Result<()> {
        Ok(())
    }

    fn signal(&self, _queue: &Queue, peer: usize, flag: u32) -> Result<()> {
        check_rank("signal", peer, self.group.world())?;
        check_flag("signal", flag, self.spec)?;
        self.boards[peer].set(flag, self.group.rank());
        Ok(())
    }

    fn wait(
        &self,
        _queue: &Queue,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()> {
        check_flag(op, flag, self.spec)?;
        peers.iter().try_for_each(|&peer| check_rank(op, peer, self.group.world()))?;
        self.boards[self.group.rank()].wait_all(op, flag, peers, deadline, self.group.health())
    }

    fn ready(&self, peers: &[usize], flag: u32) -> bool {
        ready(&self.boards[self.group.rank()], &self.group, peers, flag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_apart_and_ranks_of_one_are_not() {
        let nodes = Apart::sizes(&[1, 0, 2]);
        let apart = |a| (0..4).map(|b| nodes.are(a, b)).collect::<Vec<_>>();
        assert_eq!(apart(0), [false, true, true, true]);
        assert_eq!(apart(1), [true, false, false, true]);
        // Ranks that were not mentioned are alone.
        assert_eq!(apart(3), [true, true, true, false]);
        assert!(nodes.are(4, 3) && nodes.are(3, 4));
        assert_eq!((nodes.nodes(3), nodes.nodes(4)), (Some(vec![0, 2, 2]), None));
        assert!(nodes.check(3).is_ok() && nodes.check(4).is_err());
        assert_eq!(Apart::all(true).nodes(2), Some(vec![0, 1]));
        assert!(Apart::all(false).check(7).is_ok() && !Apart::all(false).are(0, 1));
    }
}
