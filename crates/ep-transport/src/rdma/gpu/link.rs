//! The link of a rank whose window a GPU has: its node's ranks are reached as over NVLink, those of other
//! nodes through a bridge and proxies.

use std::sync::{Arc, Weak};
use std::time::Duration;

use cudarc::driver::sys::CUstream;

use super::See;
use super::bridge::{Bridge, Ends, Inbox, Step, Works};
use crate::host_link::{check_flag, check_put, check_rank};
use crate::nvlink::parts::{Board, NvlinkLink, Others};
use crate::rdma::core::{Core, Tickets, Wired};
use crate::rdma::device::Device;
use crate::rdma::options::Options;
use crate::{
    Deadline, Group, Link, Mapping, Meeting, Memory, Put, Queue, Reach, Result, StreamSide,
    TransportError, WindowSpec,
};

/// `CU_STREAM_LEGACY`, which null stands for, and `CU_STREAM_PER_THREAD`.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// The number of a stream, which is never 0.
fn number(stream: CUstream) -> usize {
    if stream.is_null() { LEGACY } else { stream as usize }
}

/// What the bridge of a link joins.
struct Both {
    core: Arc<Core>,
    board: Board,
    group: Group,
    see: Option<See>,
}

impl Ends for Both {
    fn put(&self, put: Put) -> Result<()> {
        self.core.put(put)
    }

    fn signal(&self, peer: usize, flag: u32) -> Result<()> {
        self.core.signal(peer, flag)
    }

    fn pushed(&self) -> Tickets {
        self.core.pushed()
    }

    fn are_retired(&self, tickets: &Tickets) -> bool {
        self.core.shared.are_retired(tickets)
    }

    fn unanswered(&self, after: Duration) -> TransportError {
        self.core.shared.unanswered("flush", after)
    }

    fn bell(&self, lane: usize) -> u32 {
        self.board.doorbell(lane)
    }

    fn let_go(&self, lane: usize) {
        self.board.set_flushed(lane);
    }

    fn is_let_go(&self, lane: usize) -> bool {
        self.board.is_flushed(lane)
    }

    fn see(&self) -> Result<()> {
        self.see.as_ref().map_or(Ok(()), |see| see())
    }

    fn raise(&self, flag: u32, source: usize) {
        self.board.raise(flag, source);
    }

    fn fail(&self, error: &TransportError) {
        self.core.shared.fail_all(error);
    }

    fn failed(&self) -> bool {
        self.group.health().check("close").is_err()
    }

    fn spins(&self) -> bool {
        self.core.shared.spins()
    }
}

/// What a node's watchdog asks about the ranks of other nodes, while there is a bridge.
struct Beyond(Weak<Works<Both>>);

impl Others for Beyond {
    fn settle(&self) {
        if let Some(works) = self.0.upgrade() {
            works.ends.core.settle();
            works.settle();
        }
    }

    fn unanswered(&self, op: &'static str, after: Duration) -> TransportError {
        match self.0.upgrade() {
            Some(works) => works.unanswered(after),
            None => TransportError::Timeout { op, peers: Vec::new(), after, hint: String::new() },
        }
    }
}

pub(in crate::rdma) struct GpuLink {
    // In this order: what streams have come to is taken to the proxies, those end, then what streams use.
    bridge: Bridge<Both>,
    core: Arc<Core>,
    near: Arc<NvlinkLink>,
    group: Group,
    spec: WindowSpec,
}

impl std::fmt::Debug for GpuLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("GpuLink");
        out.field("near", &self.near).field("core", &self.core).finish_non_exhaustive()
    }
}

impl GpuLink {
    /// Joins what reaches the ranks of this node and what `devices` reach. `see` makes the GPU see what
    /// NICs have reported as written, where somebody has to.
    pub(super) fn start<D: Device + 'static>(
        near: Arc<NvlinkLink>,
        wired: Wired,
        devices: Vec<(D, Vec<u32>)>,
        options: &Options,
        see: Option<See>,
    ) -> Result<Arc<Self>> {
        let (group, spec, board) = (wired.group.clone(), near.spec, near.board());
        let inbox = Inbox::new(spec.flags as usize * group.world());
        // Where nothing has to be flushed a flag needs nobody but the proxy, who only stores a word.
        let raise: Box<dyn Fn(u32, usize) + Send + Sync> = match see {
            None => {
                let board = board.clone();
                Box::new(move |flag, source| board.raise(flag, source))
            }
            Some(_) => {
                let inbox = inbox.clone();
                Box::new(move |flag, source| inbox.came(flag, source))
            }
        };
        let core = Arc::new(Core::start(wired, (spec.flags, raise), devices, options)?);
        let both = Both { core: core.clone(), board, group: group.clone(), see };
        let name = format!("ep-bridge-{}", group.rank());
        let bridge = Bridge::start(Works::new(both, inbox), name, options.drain)?;
        near.ask(Beyond(Arc::downgrade(&bridge.works)));
        Ok(Arc::new(Self { bridge, core, near, group, spec }))
    }

    /// The stream of a queue by its number, for an operation on a rank of another node.
    fn far_stream(&self, op: &'static str, queue: &Queue) -> Result<Option<usize>> {
        let stream = self.near.stream(op, queue)?;
        let bad = |detail: &str| Err(TransportError::Argument { op, detail: detail.into() });
        if stream.is_some() && self.near.capturing(op, stream)? {
            return bad("what goes to or comes from other nodes cannot be captured");
        }
        match stream.map(number) {
            Some(PER_THREAD) => bad("each thread has a default stream of its own: use another one"),
            number => Ok(number),
        }
    }

    fn order(&self, op: &'static str, stream: usize, step: Step) -> Result<()> {
        self.core.shared.check()?;
        let flush = match step {
            Step::Flush(allowed) => Some(allowed),
            _ => None,
        };
        self.bridge
            .works
            .order(stream, step, |lane, mark| self.near.tell(op, stream as _, (lane, mark), flush))
    }
}

// SAFETY: windows and flags are those of the near link, whose ranks are this rank's node; others are not
// mapped. Order: a put or signal is handed to the proxies once the stream has come to it, in the order of
// the stream; a proxy counts every write of an epoch before the flag that ends it is raised, and the flag
// is raised once the GPU sees them; stream memory operations do the rest, as for near ranks.
unsafe impl Link for GpuLink {
    fn window(&self) -> Mapping {
        self.near.window()
    }

    fn memory(&self) -> Memory {
        self.near.memory()
    }

    fn stream_side(&self) -> Option<StreamSide> {
        self.near.stream_side()
    }

    fn is_beside(&self, peer: usize) -> bool {
        self.near.is_beside(peer)
    }

    fn reach(&self, peer: usize) -> Reach {
        self.near.reach(peer)
    }

    fn put(&self, queue: &Queue, put: Put) -> Result<()> {
        check_put(&put, self.group.world(), self.spec)?;
        if self.near.is_near(put.peer) {
            return self.near.put(queue, put);
        }
        match self.far_stream("put", queue)? {
            _ if put.bytes == 0 => Ok(()),
            None => self.core.put(put),
            Some(stream) => self.order("put", stream, Step::Put(put)),
        }
    }

    fn flush(&self, queue: &Queue, deadline: Deadline) -> Result<()> {
        // A capture has put nothing to other nodes.
        match self.near.stream("flush", queue)? {
            None => self.core.flush(deadline),
            stream if self.near.capturing("flush", stream)? => Ok(()),
            Some(stream) => self.order("flush", number(stream), Step::Flush(deadline.length())),
        }
    }

    fn signal(&self, queue: &Queue, peer: usize, flag: u32) -> Result<()> {
        const OP: &str = "signal";
        check_rank(OP, peer, self.group.world())?;
        check_flag(OP, flag, self.spec)?;
        if self.near.is_near(peer) {
            return self.near.signal(queue, peer, flag);
        }
        match self.far_stream(OP, queue)? {
            None => self.core.signal(peer, flag),
            Some(stream) => self.order(OP, stream, Step::Signal { peer, flag }),
        }
    }

    fn wait(
        &self,
        queue: &Queue,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()> {
        if !peers.iter().all(|&peer| self.near.is_near(peer)) {
            self.far_stream(op, queue)?;
        }
        self.near.wait(queue, op, peers, flag, deadline)
    }

    fn meet(&self, queue: &Queue, meeting: &Meeting<'_>) -> Result<()> {
        let &Meeting { op, peers, flag, signal, .. } = meeting;
        if peers.iter().all(|&peer| self.near.is_near(peer)) {
            return self.near.meet(queue, meeting);
        }
        self.far_stream(op, queue)?;
        if signal {
            peers.iter().try_for_each(|&peer| self.signal(queue, peer, flag))?;
        }
        self.near.meet(queue, &Meeting { signal: false, ..*meeting })
    }

    fn ready(&self, peers: &[usize], flag: u32) -> bool {
        self.near.ready(peers, flag)
    }

    fn absent(&self, flag: u32) -> Vec<usize> {
        self.near.absent(flag)
    }
}
