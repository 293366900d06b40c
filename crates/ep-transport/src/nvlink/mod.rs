//! Windows in the memory of GPUs that reach each other over NVLink (or PCIe).

mod board;
mod driver;
mod graveyard;
mod hand;
mod link;
mod memory;
#[cfg(feature = "nccl")]
mod nccl;
mod near;
mod trial;
mod watchdog;
mod words;

use std::sync::Arc;

use crate::{Deadline, Group, Link, Result, Transport, TransportError, WindowSpec};
use driver::{Gpu, OP};
pub use graveyard::drop_when_quiet;
pub(crate) use hand::Hand;
use link::NvlinkLink;
use memory::Allocation;
#[cfg(feature = "nccl")]
pub use nccl::NcclTransport;
use near::{Near, Own, Place};
pub use words::{Handles, Signals};

/// The transport for ranks on GPUs of one host that can map each other's memory.
///
/// Windows are device memory (CUDA virtual memory management); flags are in host memory that all
/// ranks and GPUs see. Ranks are threads of one process or processes of one host, each on a GPU of
/// its own or several on one. No rank needs rights beyond those of its user.
///
/// Operations take streams of the GPU as queues. On the host queue flags work too; what was
/// submitted to streams before has to be complete then.
///
/// Ranks on one GPU may share hardware queues, so there a wait is submitted once those peers have
/// submitted what it waits for; until then the call waits on the host, for 2 s at most. See
/// [`Pacing`](crate::Pacing) for what that cannot cover: graphs, and threads that drive several ranks.
///
/// A link is dropped only when all work that uses its windows or flags has ended. Its memory is given
/// back soon after, by a thread of its own: that may wait for streams which wait for this rank.
#[derive(Clone, Debug)]
pub struct NvlinkTransport {
    ordinal: usize,
    nodes: Option<Vec<usize>>,
    signals: Signals,
    handles: Handles,
}

impl NvlinkTransport {
    /// This rank's window is on the GPU `ordinal` among those the process sees.
    pub fn new(ordinal: usize) -> Self {
        Self { ordinal, nodes: None, signals: Signals::Auto, handles: Handles::Auto }
    }

    /// How streams raise and await flags. `EP_NVLINK_SIGNALS` (`auto`, `stream` or `kernel`), where
    /// it is set, says so instead.
    pub fn signals(mut self, signals: Signals) -> Self {
        self.signals = signals;
        self
    }

    /// How processes hand windows over. `EP_NVLINK_HANDLES` (`auto`, `fd` or `fabric`), where it is
    /// set, says so instead. Threads of one process need no handles.
    pub fn handles(mut self, handles: Handles) -> Self {
        self.handles = handles;
        self
    }

    /// Ranks of different numbers count as ranks of different nodes: they reach each other's windows
    /// only by [`Link::put`], which copies on the queue. `nodes` has one number per rank and is the
    /// same on every rank. This is how what crosses nodes is tried on one host.
    pub fn nodes(mut self, nodes: Vec<usize>) -> Self {
        self.nodes = Some(nodes);
        self
    }

    /// Which ranks `rank` of `world` reaches only by puts.
    fn bulk(&self, rank: usize, world: usize) -> Result<Vec<bool>> {
        let Some(nodes) = &self.nodes else { return Ok(vec![false; world]) };
        if nodes.len() != world {
            let detail = format!("nodes of {} ranks were given; there are {world}", nodes.len());
            return Err(TransportError::Argument { op: OP, detail });
        }
        Ok(nodes.iter().map(|node| *node != nodes[rank]).collect())
    }
}

pub(crate) use board::bytes as board_bytes;

/// What transports between nodes are made of, besides their own.
#[cfg(feature = "rdma")]
pub(crate) mod parts {
    pub(crate) use super::board::Board;
    pub(crate) use super::driver::Gpu;
    pub(crate) use super::graveyard::Buried;
    pub(crate) use super::link::NvlinkLink;
    pub(crate) use super::memory::{Allocation, Mapped};
    pub(crate) use super::near::{Near, Own};
    pub(crate) use super::watchdog::Others;

    /// Waits, bounded, for memory of links that were dropped before.
    pub(crate) fn settle() {
        super::graveyard::settle(super::GIVEN_BACK);
    }
}

/// How long opening waits for memory of links that were dropped before.
const GIVEN_BACK: std::time::Duration = std::time::Duration::from_millis(500);

impl Transport for NvlinkTransport {
    fn name(&self) -> &'static str {
        "nvlink"
    }

    fn maps_all_peers(&self) -> bool {
        let mut pairs = self.nodes.iter().flat_map(|nodes| nodes.windows(2));
        pairs.all(|pair| pair[0] == pair[1])
    }

    fn nodes(&self, world: usize) -> Option<Vec<usize>> {
        let nodes = self.nodes.clone().unwrap_or_else(|| vec![0; world]);
        (nodes.len() == world).then_some(nodes)
    }

    fn open(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Arc<dyn Link>> {
        Ok(self.open_link(group, spec, deadline)?)
    }
}

impl NvlinkTransport {
    fn open_link(
        &self,
        group: &Group,
        spec: WindowSpec,
        deadline: Deadline,
    ) -> Result<Arc<NvlinkLink>> {
        spec.agree(group, self.name(), deadline).map_err(|e| group.outward(e))?;
        let bulk = self.bulk(group.rank(), group.world())?;
        // What was dropped gives its memory back first, if that is soon.
        graveyard::settle(GIVEN_BACK);
        let choices = self.signals.or_variable().and_then(|s| Ok((s, self.handles.or_variable()?)));
        let own = choices.and_then(|(signals, handles)| {
            let gpu = Arc::new(Gpu::open(self.ordinal)?);
            let memory = Allocation::new(&gpu, spec.bytes, handles)?;
            let fabric_only = handles == Handles::Fabric;
            Ok(Own { gpu, place: Place::Device(memory), signals, fabric_only })
        });
        let members: Vec<usize> = (0..group.world()).collect();
        let near = Near { all: group, group, members: &members, streams: 0 };
        near.open(spec, own, bulk, deadline)
    }
}

/// One rank's problem is everyone's error.
#[cfg(feature = "nccl")]
fn together(group: &Group, deadline: Deadline, problem: Option<String>) -> Result<()> {
    let members: Vec<usize> = (0..group.world()).collect();
    Near { all: group, group, members: &members, streams: 0 }.together(deadline, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_opening_is_an_error_on_all_ranks() {
        if driver::Driver::get().is_ok() {
            return;
        }
        std::thread::scope(|scope| {
            for group in Group::local(2).unwrap() {
                scope.spawn(move || {
                    let deadline = Deadline::after(std::time::Duration::from_secs(10));
                    let spec = WindowSpec { bytes: 4096, flags: 2 };
                    let e = NvlinkTransport::new(0).open(&group, spec, deadline).unwrap_err();
                    assert_eq!(e.kind(), crate::ErrorKind::Unsupported, "{e}");
                    assert!(e.to_string().contains("libcuda"), "{e}");
                    group.barrier().unwrap();
                });
            }
        });
    }
}
