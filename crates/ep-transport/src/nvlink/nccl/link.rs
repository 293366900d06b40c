//! The link of one rank: windows and flags of its node, and communicators to all ranks.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::bounded;
use super::library::{BYTES, Handle, Nccl};
use super::watch::Watch;
use crate::host_link::{check_flag, check_put, check_rank};
use crate::nvlink::driver::MemOp;
use crate::nvlink::link::NvlinkLink;
use crate::{
    Deadline, Group, Link, Mapping, Memory, Put, Queue, Reach, Receive, Result, StreamSide,
    TransportError, WindowSpec,
};

/// The longest that the end of a communicator is waited for.
const END: Duration = Duration::from_secs(10);

/// Communicators, until they are aborted.
#[derive(Debug)]
pub(super) struct Comms {
    nccl: &'static Nccl,
    handles: Vec<Handle>,
    /// The window's registrations, by communicator.
    registered: Vec<*mut c_void>,
    /// No call begins once this is set.
    over: AtomicBool,
    /// Held during a group of calls: one thread of a rank at a time uses its communicators.
    turn: Mutex<()>,
}

// SAFETY: handles of NCCL, which takes them from any thread; `turn` keeps calls apart.
unsafe impl Send for Comms {}
// SAFETY: handles never change, and `turn` keeps the threads' calls apart.
unsafe impl Sync for Comms {}

impl Comms {
    pub fn new(nccl: &'static Nccl, handles: Vec<Handle>) -> Self {
        let (over, turn) = (AtomicBool::new(false), Mutex::new(()));
        Self { nccl, handles, registered: Vec::new(), over, turn }
    }

    /// Makes the window known to NCCL, so that it may copy between windows rather than through buffers
    /// of its own. Where it cannot, or is too old for that, nothing is registered. All ranks have to do
    /// alike, so they have to agree on what comes of it.
    pub fn register(&mut self, window: Mapping) -> bool {
        let Some((register, _)) = self.nccl.registration else { return false };
        let at = window.base.as_ptr() as u64;
        for &comm in &self.handles {
            let mut handle = std::ptr::null_mut();
            // SAFETY: the communicator is live; the window lives until the link has dropped `self`.
            let code = unsafe { register(comm, at, window.bytes, &mut handle) };
            if let Err(why) = self.nccl.check("open", "ncclCommRegister", code, comm) {
                tracing::debug!(%why, "NCCL copies through its own buffers");
                self.deregister();
                return false;
            }
            self.registered.push(handle);
        }
        true
    }

    /// Takes back what [`Comms::register`] did, while communicators live.
    pub fn deregister(&mut self) {
        let Some((_, deregister)) = self.nccl.registration else { return };
        for (&comm, handle) in self.handles.iter().zip(self.registered.drain(..)) {
            // SAFETY: both are live, and no exchange is under way.
            unsafe { deregister(comm, handle) };
        }
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// What went wrong in the background.
    pub fn async_error(&self) -> Result<()> {
        if self.is_over() {
            return Ok(());
        }
        self.handles.iter().try_for_each(|&comm| {
            let mut code = 0;
            // SAFETY: the communicator is live until `over`; only the watching thread, which calls
            // this, aborts it.
            let asked = unsafe { (self.nccl.async_error)(comm, &mut code) };
            self.nccl.check("exchange", "ncclCommGetAsyncError", asked, comm)?;
            self.nccl.check("exchange", "ncclCommGetAsyncError", code, comm)
        })
    }

    /// Ends kernels that wait for peers. Communicators are gone then.
    pub fn abort(&self) {
        if self.over.swap(true, Ordering::AcqRel) {
            return;
        }
        // A group of calls that is under way ends by itself, unless it waits for a peer.
        let _turn = self.turn.try_lock_for(Duration::from_secs(1));
        self.end("ncclCommAbort", self.nccl.abort, false);
    }

    /// Gives communicators up by a call that may not return while graphs have exchanges of theirs: then
    /// the thread that makes it is left behind.
    fn end(
        &self,
        what: &'static str,
        call: unsafe extern "C" fn(Handle) -> i32,
        deregisters: bool,
    ) {
        let nccl = self.nccl;
        let deregister = nccl.registration.filter(|_| deregisters).map(|both| both.1);
        let end = |comm: usize, registered: Option<usize>| {
            let ended = bounded(what, Deadline::after(END), move || {
                if let Some((deregister, one)) = deregister.zip(registered) {
                    // SAFETY: both are live, and their work is done.
                    unsafe { deregister(comm as Handle, one as *mut c_void) };
                }
                // SAFETY: live, and `over` keeps everyone else from using it from now on; this is the
                // last call with it.
                let code = unsafe { call(comm as Handle) };
                nccl.check("close", what, code, std::ptr::null_mut())
            });
            if let Err(e) = ended {
                tracing::warn!("{e}");
            }
        };
        // At once: none has to wait for another one's graphs.
        std::thread::scope(|scope| {
            for (i, comm) in self.handles.iter().map(|&comm| comm as usize).enumerate() {
                let registered = self.registered.get(i).map(|&one| one as usize);
                scope.spawn(move || end(comm, registered));
            }
        });
    }

    /// Frees communicators whose work has ended.
    fn destroy(&self) {
        if self.over.swap(true, Ordering::AcqRel) {
            return;
        }
        self.end("ncclCommDestroy", self.nccl.destroy, true);
    }
}

#[derive(Debug)]
pub(super) struct NcclLink {
    group: Group,
    spec: WindowSpec,
    inner: Arc<NvlinkLink>,
    /// The number within this node of every rank that is in it.
    near: Vec<Option<usize>>,
    comms: Arc<Comms>,
    watch: Watch,
}

impl NcclLink {
    pub fn new(
        group: &Group,
        near_group: Group,
        spec: WindowSpec,
        inner: Arc<NvlinkLink>,
        nodes: Vec<usize>,
        comms: Comms,
    ) -> Result<Self> {
        let own = nodes[group.rank()];
        let before = |rank: usize| nodes[..rank].iter().filter(|&&node| node == own).count();
        let number = |rank: usize| (nodes[rank] == own).then(|| before(rank));
        let near: Vec<Option<usize>> = (0..nodes.len()).map(number).collect();
        let comms = Arc::new(comms);
        let paired = (0..nodes.len()).filter(|&rank| near[rank].is_none()).collect();
        let board = inner.watchdog.shared.clone();
        let watch = Watch::start((group, near_group), paired, board, comms.clone())?;
        let group = group.clone();
        Ok(Self { group, spec, inner, near, comms, watch })
    }

    /// The peers of other nodes.
    pub fn paired(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.near.len()).filter(|&peer| self.near[peer].is_none())
    }

    /// The number within this node of a peer that raises flags.
    fn near(&self, op: &'static str, peer: usize) -> Result<usize> {
        check_rank(op, peer, self.group.world())?;
        self.near[peer].ok_or_else(|| {
            let detail = format!("rank {peer} is of another node: it only exchanges");
            TransportError::Argument { op, detail }
        })
    }

    fn all_near(&self, op: &'static str, peers: &[usize]) -> Result<Vec<usize>> {
        peers.iter().map(|&peer| self.near(op, peer)).collect()
    }

    /// What the inner link says of ranks of this node, in the numbers of the whole group.
    fn told<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| self.inner.group.outward(error))
    }

    fn check_blocks(
        &self,
        op: &'static str,
        (sends, receives): (&[Put], &[Receive]),
    ) -> Result<()> {
        let bad = |detail: String| Err(TransportError::Argument { op, detail });
        for put in sends {
            check_put(&Put { to: 0, ..*put }, self.group.world(), self.spec)?;
            if put.bytes == 0 || self.near[put.peer].is_some() {
                return bad(format!("{put:?} cannot be exchanged"));
            }
        }
        for &Receive { peer, to, bytes } in receives {
            check_put(&Put { peer, from: 0, to, bytes }, self.group.world(), self.spec)?;
            if bytes == 0 || self.near[peer].is_some() {
                return bad(format!("{bytes} bytes of rank {peer} cannot be exchanged"));
            }
        }
        Ok(())
    }

    /// An exchange by one of the communicators, which the watching thread sees if it has a number.
    pub fn exchange_by(
        &self,
        queue: &Queue,
        op: &'static str,
        (comm, number): (usize, Option<u32>),
        blocks: (&[Put], &[Receive]),
        deadline: Deadline,
    ) -> Result<()> {
        self.check_blocks(op, blocks)?;
        let Some(stream) = self.inner.stream(op, queue)? else {
            let detail = "exchanges by NCCL are on streams".into();
            return Err(TransportError::Argument { op, detail });
        };
        if blocks.0.is_empty() && blocks.1.is_empty() {
            return Ok(());
        }
        let _current = self.inner.gpu.current(op)?;
        let Some(number) = number else { return self.submit(op, comm, stream.cast(), blocks) };
        // Of a graph's, all replays may take as long.
        self.watch.expect(number, op, deadline.length());
        let word = self.inner.watchdog.shared.board.exchanging_word(number);
        let (gpu, words) = (&self.inner.gpu, &self.inner.words);
        words.raise(op, gpu, stream, word)?;
        let sent = self.submit(op, comm, stream.cast(), blocks);
        // The word behind it first: else the end of this one might be taken for that of the next.
        let mut narrow = [MemOp::write(word + 4, 0), MemOp::write(word, 0)];
        let mut both = [MemOp::clear_both(word)];
        let ended: &mut [MemOp] = if gpu.writes_both() { &mut both } else { &mut narrow };
        words.submit(op, gpu, stream, ended)?;
        sent
    }

    fn submit(
        &self,
        op: &'static str,
        comm: usize,
        stream: *mut c_void,
        (sends, receives): (&[Put], &[Receive]),
    ) -> Result<()> {
        let _turn = self.comms.turn.lock();
        if self.comms.is_over() {
            self.group.health().check(op)?;
            let (by, why) = (self.group.rank(), "communicators were aborted".to_string());
            return Err(TransportError::Aborted { op, by, blames: None, why });
        }
        let (nccl, comm) = (self.comms.nccl, self.comms.handles[comm]);
        let own = self.inner.window().base.as_ptr() as u64;
        // SAFETY: no arguments; ended below whatever comes between.
        nccl.check(op, "ncclGroupStart", unsafe { (nccl.start)() }, comm)?;
        let sent = sends.iter().try_for_each(|put| {
            let (at, peer) = (own + put.from as u64, put.peer as i32);
            // SAFETY: inside the own window (checked), which lives as long as `self`; the communicator
            // is live while `turn` is held; the stream is the caller's.
            let code = unsafe { (nccl.send)(at, put.bytes, BYTES, peer, comm, stream) };
            nccl.check(op, "ncclSend", code, comm)
        });
        let received = receives.iter().try_for_each(|receive| {
            let (at, peer) = (own + receive.to as u64, receive.peer as i32);
            // SAFETY: inside the own window (checked), which lives as long as `self`; the communicator
            // is live while `turn` is held; the stream is the caller's.
            let code = unsafe { (nccl.recv)(at, receive.bytes, BYTES, peer, comm, stream) };
            nccl.check(op, "ncclRecv", code, comm)
        });
        // SAFETY: no arguments; begun above.
        let ended = nccl.check(op, "ncclGroupEnd", unsafe { (nccl.end)() }, comm);
        sent.and(received).and(ended)
    }
}

// SAFETY: windows and flags are those of the inner link, whose ranks are this rank's node; others are
// paired, symmetrically, by the list of nodes all ranks agreed on. Exchanges order by NCCL's promise
// that its operations take their turn on the stream.
unsafe impl Link for NcclLink {
    fn window(&self) -> Mapping {
        self.inner.window()
    }

    fn memory(&self) -> Memory {
        self.inner.memory()
    }

    fn stream_side(&self) -> Option<StreamSide> {
        self.inner.stream_side()
    }

    fn captures(&self) -> bool {
        true
    }

    fn is_beside(&self, peer: usize) -> bool {
        self.near[peer].is_some_and(|near| self.inner.is_beside(near))
    }

    fn reach(&self, peer: usize) -> Reach {
        match self.near[peer] {
            Some(near) => self.inner.reach(near),
            None => Reach::Paired,
        }
    }

    fn put(&self, queue: &Queue, put: Put) -> Result<()> {
        check_put(&put, self.group.world(), self.spec)?;
        let peer = self.near("put", put.peer)?;
        self.told(self.inner.put(queue, Put { peer, ..put }))
    }

    fn exchange(
        &self,
        queue: &Queue,
        op: &'static str,
        number: u32,
        blocks: (&[Put], &[Receive]),
        deadline: Deadline,
    ) -> Result<()> {
        check_flag(op, number, self.spec)?;
        let comms = self.comms.handles.len();
        let comm = number as usize * comms / self.spec.flags as usize;
        self.exchange_by(queue, op, (comm, Some(number)), blocks, deadline)
    }

    fn flush(&self, queue: &Queue, deadline: Deadline) -> Result<()> {
        self.told(self.inner.flush(queue, deadline))
    }

    fn signal(&self, queue: &Queue, peer: usize, flag: u32) -> Result<()> {
        self.told(self.inner.signal(queue, self.near("signal", peer)?, flag))
    }

    fn wait(
        &self,
        queue: &Queue,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()> {
        self.told(self.inner.wait(queue, op, &self.all_near(op, peers)?, flag, deadline))
    }

    fn ready(&self, peers: &[usize], flag: u32) -> bool {
        let failed = || self.group.health().check_waiting("ready", peers).is_err();
        match self.all_near("ready", peers) {
            Ok(near) => self.inner.ready(&near, flag) || failed(),
            Err(_) => failed(),
        }
    }

    fn absent(&self, flag: u32) -> Vec<usize> {
        let absent = self.inner.absent(flag);
        let is = |peer: &usize| self.near[*peer].is_some_and(|near| absent.contains(&near));
        (0..self.near.len()).filter(is).collect()
    }
}

impl Drop for NcclLink {
    fn drop(&mut self) {
        self.watch.stop();
        match self.group.health().check("close").is_ok() {
            true => self.comms.destroy(),
            false => self.comms.abort(),
        }
    }
}
