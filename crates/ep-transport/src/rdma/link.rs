//! The link of a rank whose window is in host memory.

use std::sync::Arc;

use super::core::{Core, Wired};
use super::device::Device;
use super::layout::{Layout, Words};
use super::nodes::Nodes;
use super::options::Options;
use crate::flags::FlagBoard;
use crate::host_link::{self, Region};
use crate::{
    Deadline, Group, Link, Mapping, Put, Queue, Reach, Result, TransportError, WindowSpec,
};

/// How often a wait looks again after the news that a peer has gone.
const LOOKS: u32 = 3;

/// What was made before the proxies start.
#[derive(Debug)]
pub(super) struct Opened {
    pub group: Group,
    pub spec: WindowSpec,
    pub layout: Layout,
    /// Those of the node's ranks, by rank.
    pub regions: Vec<Option<Arc<dyn Region>>>,
    pub nodes: Nodes,
}

pub(super) struct RdmaLink {
    // The first to go: its proxies raise flags and read windows.
    core: Core,
    group: Group,
    spec: WindowSpec,
    regions: Vec<Option<Arc<dyn Region>>>,
    boards: Vec<Option<FlagBoard>>,
    own: FlagBoard,
    /// Makes this rank's waits look at the group's health when there is news.
    _bell: Arc<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for RdmaLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("RdmaLink");
        out.field("rank", &self.group.rank()).field("world", &self.group.world());
        out.field("spec", &self.spec).field("core", &self.core).finish_non_exhaustive()
    }
}

impl RdmaLink {
    /// Starts a proxy on each of `devices`, bound to `cores` (by device) where they are given.
    pub(super) fn start<D: Device + 'static>(
        opened: Opened,
        devices: Vec<(D, Vec<u32>)>,
        options: &Options,
    ) -> Result<Arc<Self>> {
        let Opened { group, spec, layout, regions, nodes } = opened;
        let (rank, world) = (group.rank(), group.world());
        let offset = host_link::board_offset(spec).expect("checked with the layout");
        let board = |region: &Option<Arc<dyn Region>>| {
            let region = region.as_ref();
            region.map(|r| FlagBoard::over(r.clone(), offset, world, spec.flags)).transpose()
        };
        let boards = regions.iter().map(board).collect::<Result<Vec<_>>>()?;
        let own = boards[rank].clone().expect("a rank has a window");
        let words = Words::behind(regions[rank].clone().expect("a rank has a window"), 0);
        let waits = own.clone();
        let bell: Arc<dyn Fn() + Send + Sync> = Arc::new(move || waits.ring());
        group.health().watch(Arc::downgrade(&bell));
        let raised = own.clone();
        let flags = (spec.flags, Box::new(move |flag, source| raised.set(flag, source)) as _);
        let wired = Wired { group: group.clone(), layout, words, nodes, pollers: 0 };
        let core = Core::start(wired, flags, devices, options)?;
        Ok(Arc::new(Self { core, group, spec, regions, boards, own, _bell: bell }))
    }

    fn mapped(&self, rank: usize) -> Option<Mapping> {
        let region = self.regions[rank].as_ref()?;
        Some(Mapping { base: region.base(), bytes: self.spec.bytes })
    }
}

/// Fails for queues other than the host's: windows are not on a GPU.
fn on_host(op: &'static str, queue: &Queue) -> Result<()> {
    if queue.is_host() {
        return Ok(());
    }
    let detail = "windows in host memory take the host queue: for streams ask for windows on a GPU \
                  (RdmaTransport::cuda)";
    Err(TransportError::Unsupported { op, detail: detail.into() })
}

// SAFETY: a mapping is of this rank's region or a mapped peer's, which `self` holds and which are as
// long as the layout, which holds the window. Ranks are partitioned into nodes by what they all said,
// so that either both of two map each other or none does. Order: a proxy counts every write of an epoch
// before it raises the flag that ends it, and `FlagBoard` does the rest; puts and signals to one peer go
// through each ring in the order of the calls, and a signal goes through all of them.
unsafe impl Link for RdmaLink {
    fn window(&self) -> Mapping {
        self.mapped(self.group.rank()).expect("a rank has a window")
    }

    fn reach(&self, peer: usize) -> Reach {
        self.regions.get(peer).and_then(|_| self.mapped(peer)).map_or(Reach::Bulk, Reach::Direct)
    }

    fn put(&self, queue: &Queue, put: Put) -> Result<()> {
        on_host("put", queue)?;
        host_link::check_put(&put, self.group.world(), self.spec)?;
        let Some(theirs) = self.mapped(put.peer) else { return self.core.put(put) };
        let (from, to) = (self.window().base.as_ptr(), theirs.base.as_ptr());
        // SAFETY: both ranges were just checked to lie in windows that stay mapped while `self`
        // holds their regions; they may overlap, which `copy` allows. That no other rank writes them
        // meanwhile is the protocol's promise to itself.
        unsafe { std::ptr::copy(from.add(put.from), to.add(put.to), put.bytes) };
        Ok(())
    }

    fn flush(&self, queue: &Queue, deadline: Deadline) -> Result<()> {
        on_host("flush", queue)?;
        self.core.flush(deadline)
    }

    fn signal(&self, queue: &Queue, peer: usize, flag: u32) -> Result<()> {
        on_host("signal", queue)?;
        host_link::check_rank("signal", peer, self.group.world())?;
        host_link::check_flag("signal", flag, self.spec)?;
        if let Some(board) = &self.boards[peer] {
            board.set(flag, self.group.rank());
            return Ok(());
        }
        self.core.signal(peer, flag)
    }

    fn wait(
        &self,
        queue: &Queue,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()> {
        on_host(op, queue)?;
        host_link::check_flag(op, flag, self.spec)?;
        peers.iter().try_for_each(|&p| host_link::check_rank(op, p, self.group.world()))?;
        // A peer may leave as soon as its NIC knows its last words delivered, which is before this
        // rank's proxy has read of them.
        let mut looks = LOOKS;
        let settle = || {
            let again = looks > 0;
            if again {
                looks -= 1;
                self.core.settle();
            }
            again
        };
        self.own.wait_until(op, flag, peers, deadline, self.group.health(), settle)
    }

    fn ready(&self, peers: &[usize], flag: u32) -> bool {
        host_link::ready(&self.own, &self.group, peers, flag)
    }
}
