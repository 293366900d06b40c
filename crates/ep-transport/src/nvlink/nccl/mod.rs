//! Ranks of other nodes by NCCL: each exchange is a group of sends and receives on the stream.

mod library;
mod link;
mod watch;

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};

use super::memory::Setup;
use super::{NvlinkTransport, together};
use crate::rendezvous::host::HostId;
use crate::{
    Deadline, Group, Link, Put, Queue, Receive, Result, Transport, TransportError, WindowSpec,
};
use library::{Config, Handle, Nccl, UniqueId};
use link::{Comms, NcclLink};

const OP: &str = "open";
/// Blocks of NCCL's kernels, where nothing else is said.
const CTAS: u32 = 8;

/// The transport for ranks on GPUs of several hosts, over any fabric that NCCL knows.
///
/// Ranks of one host map each other's windows, as with [`NvlinkTransport`]. Others are paired
/// ([`Reach::Paired`](crate::Reach::Paired)): blocks go by grouped `ncclSend` and `ncclRecv` in the
/// order of the stream. Their kernels take SMs and wait for the other side; how many they take is
/// bounded by [`NcclTransport::max_ctas`].
///
/// Windows are registered with NCCL where it lets them (2.19 and later), so that it need not copy through
/// buffers of its own. `NCCL_LOCAL_REGISTER=0` turns that off.
///
/// NCCL allows one rank per GPU. Its library, libnccl.so.2 of 2.18 or newer, is opened at run time;
/// `EP_NCCL_PATH` says where it is if the loader does not know.
///
/// When the group fails, or an exchange takes longer than it may, the communicators are aborted, so
/// that streams end. Exchanges can be captured; graphs that have some are to be destroyed before the layer is
/// dropped, since NCCL's communicators live on for 10 s with them, and are left behind after that.
#[derive(Clone, Debug)]
pub struct NcclTransport {
    ordinal: usize,
    nodes: Option<Vec<usize>>,
    max_ctas: u32,
    cluster_size: u32,
    communicators: usize,
}

impl NcclTransport {
    /// This rank's window is on the GPU `ordinal` among those the process sees.
    pub fn new(ordinal: usize) -> Self {
        Self { ordinal, nodes: None, max_ctas: CTAS, cluster_size: 0, communicators: 1 }
    }

    /// The node of each rank, the same on every rank: ranks of equal numbers map each other and have
    /// to be on one host. By default they are those of a host.
    pub fn nodes(mut self, nodes: Vec<usize>) -> Self {
        self.nodes = Some(nodes);
        self
    }

    /// The most blocks, and so SMs, of a kernel of NCCL (`maxCTAs`), 8 by default. They come beside
    /// those of this project's kernels: both together should not exceed the SMs set aside.
    pub fn max_ctas(mut self, blocks: u32) -> Self {
        self.max_ctas = blocks;
        self
    }

    /// The cluster size of NCCL's kernels (`cgaClusterSize`), by default 0: none, since clusters need
    /// a larger SM margin than the SMs they run on.
    pub fn cluster_size(mut self, size: u32) -> Self {
        self.cluster_size = size;
        self
    }

    /// Communicators among which exchanges are divided, 1 by default: then exchanges of all lanes
    /// happen one after another, in the order in which they are submitted. With several those of
    /// different lanes are in flight together; kernels of NCCL wait for each other, so there have to
    /// be SMs for all of them at once.
    pub fn communicators(mut self, count: usize) -> Self {
        self.communicators = count;
        self
    }

    fn check(&self, world: usize) -> Result<()> {
        let bad = |detail: String| Err(TransportError::Argument { op: OP, detail });
        match &self.nodes {
            Some(nodes) if nodes.len() != world => {
                bad(format!("nodes of {} ranks were given; there are {world}", nodes.len()))
            }
            _ if self.max_ctas == 0 || self.max_ctas > 64 => {
                bad(format!("{} blocks of a kernel of NCCL; 1 to 64 are possible", self.max_ctas))
            }
            _ if self.cluster_size > 8 => {
                bad(format!("clusters of {}; up to 8 are possible", self.cluster_size))
            }
            _ if self.communicators == 0 => bad("no communicators; at least 1 is needed".into()),
            _ => Ok(()),
        }
    }

    /// The node of every rank, by number or by host.
    fn gather_nodes(&self, group: &Group, deadline: Deadline) -> Result<Vec<usize>> {
        if let Some(nodes) = &self.nodes {
            return Ok(nodes.clone());
        }
        let here = postcard::to_stdvec(&HostId::here()).unwrap_or_default();
        let all = group.all_gather_within(OP, &here, deadline)?;
        let first = |bytes: &Vec<u8>| all.iter().position(|other| other == bytes).unwrap_or(0);
        Ok(all.iter().map(first).collect())
    }

    /// This rank's end of all communicators.
    fn connect(
        &self,
        group: &Group,
        setup: &Setup,
        ids: &[UniqueId],
        deadline: Deadline,
    ) -> Result<Vec<Handle>> {
        let nccl = Nccl::get()?;
        let (world, rank) = (group.world() as i32, group.rank() as i32);
        let (ids, gpu) = (ids.to_vec(), setup.gpu.clone());
        let (max_ctas, cluster_size) = (self.max_ctas, self.cluster_size);
        bounded("ncclCommInitRankConfig", deadline, move || {
            let _current = gpu.current(OP)?;
            let one = |id: &UniqueId| {
                let mut comm = std::ptr::null_mut();
                let mut config = Config::new(max_ctas, cluster_size);
                // SAFETY: outputs and config are valid for the call; all ranks call it with the same
                // id. The context is current.
                let code = unsafe { (nccl.init)(&mut comm, world, *id, rank, &mut config) };
                nccl.check(OP, "ncclCommInitRankConfig", code, comm)?;
                Ok(comm as usize)
            };
            ids.iter().map(one).collect::<Result<Vec<_>>>()
        })
        .map(|comms| comms.into_iter().map(|comm| comm as Handle).collect())
    }

    /// The ids of all communicators, which the first rank makes.
    fn ids(&self, group: &Group, deadline: Deadline) -> Result<Vec<UniqueId>> {
        let mut ids = Vec::new();
        let mut problem = Nccl::get().err();
        if group.rank() == 0 && problem.is_none() {
            let nccl = Nccl::get()?;
            for _ in 0..self.communicators {
                let mut id = UniqueId([0; 128]);
                // SAFETY: the output is valid for the call.
                let code = unsafe { (nccl.unique_id)(&mut id) };
                let made = nccl.check(OP, "ncclGetUniqueId", code, std::ptr::null_mut());
                problem = problem.or(made.err());
                ids.extend_from_slice(&id.0);
            }
        }
        together(group, deadline, problem.map(|e| e.to_string()))?;
        let all = group.all_gather_within(OP, &ids, deadline)?;
        let ids = all[0].chunks_exact(128).map(|id| UniqueId(id.try_into().expect("128 bytes")));
        let ids: Vec<_> = ids.collect();
        match ids.len() == self.communicators {
            true => Ok(ids),
            false => {
                let detail = format!("rank 0 made {} communicators", ids.len());
                Err(TransportError::Argument { op: OP, detail })
            }
        }
    }
}

/// Runs what may not end on a thread that is left behind if it does not.
fn bounded<T: Send + 'static>(
    what: &'static str,
    deadline: Deadline,
    f: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (done, wait) = channel();
    let started = std::thread::Builder::new().name("ep-nccl".into()).spawn(move || {
        let _ = done.send(f());
    });
    started.map_err(|e| {
        let code = e.raw_os_error().unwrap_or(libc::EAGAIN);
        TransportError::Os { op: OP, peer: None, code, detail: "starting a thread".into() }
    })?;
    match wait.recv_timeout(deadline.remaining()) {
        Ok(done) => done,
        Err(RecvTimeoutError::Timeout) => {
            let (after, hint) = (deadline.length(), format!(": {what} did not end"));
            Err(TransportError::Timeout { op: OP, peers: Vec::new(), after, hint })
        }
        Err(RecvTimeoutError::Disconnected) => {
            let detail = format!("{what} panicked");
            Err(TransportError::Unsupported { op: OP, detail })
        }
    }
}

impl Transport for NcclTransport {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn nodes(&self, world: usize) -> Option<Vec<usize>> {
        self.nodes.clone().filter(|nodes| nodes.len() == world)
    }

    fn open(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Arc<dyn Link>> {
        spec.agree(group, self.name(), deadline)?;
        let options = [
            ("nodes", format!("{:?}", self.nodes)),
            ("communicators", self.communicators.to_string()),
        ];
        group.agree(OP, &options, deadline)?;
        self.check(group.world())?;
        let nodes = self.gather_nodes(group, deadline)?;
        let own = nodes[group.rank()];
        let near = group.split(own as u32, group.rank() as i64)?;
        let members: Vec<usize> = (0..nodes.len()).filter(|&rank| nodes[rank] == own).collect();
        let near = near.part_of_another(&members);
        let opened = NvlinkTransport::new(self.ordinal).open_link(&near, spec, deadline);
        together(group, deadline, opened.as_ref().err().map(|e| e.to_string()))?;
        let inner = opened?;
        let ids = self.ids(group, deadline)?;
        let setup = Setup::new(&inner.gpu);
        together(group, deadline, setup.as_ref().err().map(|e| e.to_string()))?;
        let setup = setup?;
        let comms = self.connect(group, &setup, &ids, deadline);
        together(group, deadline, comms.as_ref().err().map(|e| e.to_string()))?;
        let mut comms = Comms::new(Nccl::get()?, comms?);
        let registered = comms.register(inner.window());
        let all = group.all_gather_within(OP, &[registered.into()], deadline)?;
        if all.iter().any(|one| one != &[1]) {
            comms.deregister();
        }
        let link = NcclLink::new(group, near, spec, inner, nodes, comms)?;
        let warm = warm_up(&link, group, &setup, self.communicators, deadline);
        together(group, deadline, warm.as_ref().err().map(|e| e.to_string()))?;
        warm?;
        Ok(Arc::new(link))
    }
}

/// The first exchange connects, for which no stream may wait and no thread drive several ranks.
fn warm_up(
    link: &NcclLink,
    group: &Group,
    setup: &Setup,
    communicators: usize,
    deadline: Deadline,
) -> Result<()> {
    let bytes = 16.min(link.window().bytes);
    let peers: Vec<usize> = link.paired().collect();
    if bytes == 0 || peers.is_empty() {
        return Ok(());
    }
    let sends: Vec<_> = peers.iter().map(|&peer| Put { peer, from: 0, to: 0, bytes }).collect();
    let receives: Vec<_> = peers.iter().map(|&peer| Receive { peer, to: 0, bytes }).collect();
    // SAFETY: the stream lives until `setup` drops, and is waited for here.
    let queue = unsafe { Queue::from_raw(setup.raw.cast(), setup.gpu.ordinal) };
    for comm in 0..communicators {
        link.exchange_by(&queue, OP, (comm, None), (&sends, &receives), deadline)?;
    }
    setup.wait("the first exchange by NCCL", deadline)?;
    tracing::debug!(rank = group.rank(), peers = peers.len(), "NCCL is connected");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused() {
        let new = || NcclTransport::new(0);
        assert!(new().nodes(vec![0, 1]).check(2).is_ok());
        for bad in [
            new().nodes(vec![0]),
            new().max_ctas(0),
            new().max_ctas(65),
            new().cluster_size(9),
            new().communicators(0),
        ] {
            let e = bad.check(2).unwrap_err();
            assert_eq!(e.kind(), crate::ErrorKind::Argument, "{bad:?}: {e}");
        }
    }

    #[test]
    fn what_does_not_end_is_left_behind() {
        let short = Deadline::after(std::time::Duration::from_millis(20));
        let long = std::time::Duration::from_secs(20);
        let e = bounded("a call", short, move || {
            std::thread::sleep(long);
            Ok(())
        })
        .unwrap_err();
        assert_eq!(e.kind(), crate::ErrorKind::Timeout, "{e}");
        let done = bounded("a call", Deadline::after(long), || Ok(7));
        assert_eq!(done.unwrap(), 7);
    }
}
