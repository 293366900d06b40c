//! Building a layer's communication, and what its operations share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ep_kernels::KernelError;
use ep_transport::{
    Deadline, Group, Link, Mapping, Memory, Queue, Reach, Transport, TransportError, WindowSpec,
};

use crate::config::Config;
use crate::connect::{check_link, open_host};
use crate::handle::HandlePool;
use crate::lane::{Lane, LaneGuard, mapped};
use crate::node::{Across, Hierarchy};
use crate::sched::{SmPolicy, SmSettings, Sms};
use crate::shape::Resolved;
use crate::slots::{Slot, Slots};
use crate::window::{Plan, Window};
use crate::{EpError, MoeShape, Result};

/// Where a rank's rows live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// In host memory.
    #[default]
    Host,
    /// In the memory of the GPU with this ordinal among those the process sees.
    #[cfg(feature = "cuda")]
    Cuda(usize),
}

/// Says how the communication of an MoE layer is built.
///
/// ```
/// use ep_runtime::{EpBuilder, Group, MoeShape};
///
/// let builder = EpBuilder::new(MoeShape::new(512, 2, 8).max_tokens(16)).slots(2);
/// println!("{} bytes per rank", builder.plan(4)?.window_bytes);
/// let eps = std::thread::scope(|ranks| {
///     let start = |group: Group| { let b = &builder; ranks.spawn(move || b.build(&group)) };
///     let ranks: Vec<_> = Group::local(4)?.into_iter().map(start).collect();
///     ranks.into_iter().map(|r| r.join().expect("no panic")).collect::<Result<Vec<_>, _>>()
/// })?;
/// assert_eq!(eps[3].rank(), 3);
/// # Ok::<(), ep_runtime::EpError>(())
/// ```
#[derive(Clone, Debug)]
pub struct EpBuilder {
    pub(crate) shape: MoeShape,
    pub(crate) place: Place,
    pub(crate) transport: Option<Arc<dyn Transport>>,
    pub(crate) slots: usize,
    pub(crate) lanes: usize,
    timeout: Duration,
    connect_timeout: Duration,
    handles: usize,
    pub(crate) hierarchy: Hierarchy,
    pub(crate) sms: SmSettings,
    #[cfg(feature = "cuda")]
    tuning: crate::gpu::Tuning,
    #[cfg(feature = "cuda")]
    pub(crate) tune: crate::gpu::TuneSettings,
}

impl EpBuilder {
    /// Three slots, two lanes, 16 handles, 30 s for an operation and 120 s to connect, on the host, by
    /// the transport that fits the group; on a GPU shared SMs and launch plans that ship or are cached.
    pub fn new(shape: MoeShape) -> Self {
        Self {
            shape,
            place: Place::Host,
            transport: None,
            slots: 3,
            lanes: 2,
            timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(120),
            handles: 16,
            hierarchy: Hierarchy::Flat,
            sms: SmSettings::default(),
            #[cfg(feature = "cuda")]
            tuning: crate::gpu::Tuning::default(),
            #[cfg(feature = "cuda")]
            tune: crate::gpu::TuneSettings::default(),
        }
    }

    /// Where the rows live.
    pub fn place(mut self, place: Place) -> Self {
        self.place = place;
        self
    }

    /// How bytes reach the peers. By default threads of one process share memory, processes of one host
    /// share memory files, and GPUs map each other's memory over NVLink.
    pub fn transport(mut self, transport: impl Transport + 'static) -> Self {
        self.transport = Some(Arc::new(transport));
        self
    }

    /// Result slots, 1 to 64: how many results of this rank can be alive.
    pub fn slots(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    /// Lanes, 1 to 64: how many operations can be in flight.
    pub fn lanes(mut self, lanes: usize) -> Self {
        self.lanes = lanes;
        self
    }

    /// Handles a layer on a GPU can have alive, 16 by default: their memory is taken when it is
    /// built. On the host they are as many as are used.
    pub fn handles(mut self, handles: usize) -> Self {
        self.handles = handles;
        self
    }

    /// How kernels are launched, where that is not left to this crate (see `EpBuilder::tune`).
    #[cfg(feature = "cuda")]
    pub fn tuning(mut self, tuning: crate::gpu::Tuning) -> Self {
        self.tuning = tuning;
        self
    }

    /// The longest any wait of an operation takes.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The longest [`EpBuilder::build`] waits for the peers.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// What this takes on each of `world` ranks, to the byte. Takes none of it yet.
    ///
    /// # Errors
    /// When the layer cannot be built for so many ranks.
    pub fn plan(&self, world: usize) -> Result<Plan> {
        let resolved = self.resolve(world)?;
        #[cfg_attr(not(feature = "cuda"), expect(unused_mut))]
        let mut plan = Plan::new(&resolved, self.needs_staging())?;
        #[cfg(feature = "cuda")]
        if let Place::Cuda(_) = self.place {
            let sizes = crate::gpu::Sizes::new(
                &resolved,
                self.handles,
                self.sms.blocks(),
                self.needs_staging(),
            );
            (plan.device_bytes, plan.pinned_bytes) = (sizes.device, sizes.pinned);
        }
        Ok(plan)
    }

    fn needs_staging(&self) -> bool {
        self.transport.as_ref().is_some_and(|t| !t.maps_all_peers())
    }

    /// Connects this rank to the others. All ranks of the group call it with the same
    /// configuration.
    ///
    /// # Errors
    /// Bad arguments at once; [`EpError::Disagreement`] on every rank when the ranks were
    /// configured differently; what the transport says otherwise. On a GPU also SMs that are taken or a
    /// policy they do not allow ([`EpError::SmsTaken`], [`EpError::SmPolicy`]), a bad `EP_TUNE`, and a
    /// driver, compiler or memory that is not there. A search for launch plans takes seconds.
    pub fn build(&self, group: &Group) -> Result<Ep> {
        let deadline = Deadline::after(self.connect_timeout);
        let shape = self.resolve(group.world());
        let transport = self.transport.as_deref();
        #[cfg(feature = "cuda")]
        let prepared = self.prepare(group.world(), shape.as_ref().ok());
        #[cfg(feature = "cuda")]
        let problem = prepared.as_ref().err().or(shape.as_ref().err());
        #[cfg(not(feature = "cuda"))]
        let problem = shape.as_ref().err();
        let on_gpu = self.place != Place::Host;
        let promised = self.nodes(group.world());
        let carrier = (transport, promised.as_ref());
        let config = Config::new(
            &self.shape,
            (self.slots, self.lanes),
            carrier,
            self.hierarchy,
            (on_gpu, problem),
        );
        config.compare(group, deadline)?;
        let shape = shape?;
        #[cfg(feature = "cuda")]
        let (prepared, tune) = prepared?.unzip();
        let window = shape.window(self.needs_staging())?;
        let spec = WindowSpec { bytes: window.bytes, flags: crate::notify::flags(shape.lanes) };
        let link = match &self.transport {
            Some(transport) => transport.open(group, spec, deadline)?,
            None => match self.place {
                Place::Host => open_host(group, spec, deadline)?,
                #[cfg(feature = "cuda")]
                Place::Cuda(ordinal) => {
                    ep_transport::NvlinkTransport::new(ordinal).open(group, spec, deadline)?
                }
            },
        };
        let kind = (self.needs_staging(), on_gpu);
        let nodes = check_link(group, &*link, &window, kind, promised.as_ref(), deadline)?;
        tracing::debug!(
            rank = group.rank(),
            world = group.world(),
            nodes = nodes.count(),
            window_bytes = window.bytes,
            "expert-parallel group is ready"
        );
        let across = Across::new(nodes, self.hierarchy, group.rank());
        let mut inner = Inner::new(group.clone(), (link, across), shape, window, self.timeout);
        inner.sms = Sms::new(self.sms.policy);
        #[cfg(feature = "cuda")]
        if let Some(prepared) = prepared {
            let opened = inner.on_gpu(prepared);
            // All ranks have their memory, or none goes on.
            let note = opened.as_ref().err().map_or(String::new(), |e| e.to_string());
            let all = group.all_gather_within("build", note.as_bytes(), deadline)?;
            opened?;
            if let Some(rank) = all.iter().position(|note| !note.is_empty()) {
                let why = String::from_utf8_lossy(&all[rank]).into_owned();
                return Err(TransportError::Unsupported {
                    op: "build",
                    detail: format!("rank {rank}: {why}"),
                }
                .into());
            }
        } else if inner.link.memory() != Memory::Host {
            let detail = "the transport's windows are on a GPU: build with Place::Cuda";
            return Err(EpError::argument("build", detail));
        }
        let ep = Ep { inner: Arc::new(inner) };
        #[cfg(feature = "cuda")]
        if let Some(tune) = tune {
            crate::gpu::tune_built(&ep, &tune, self.connect_timeout)?;
        }
        Ok(ep)
    }

    /// Opens the GPU and loads its kernels, if there is one, and says how its layer is tuned.
    #[cfg(feature = "cuda")]
    fn prepare(
        &self,
        world: usize,
        shape: Option<&Resolved>,
    ) -> Result<Option<(crate::gpu::Prepared, crate::gpu::TuneSettings)>> {
        match self.place {
            Place::Cuda(ordinal) => {
                let tune = self.tune.resolve()?;
                let sizes = (self.handles, world);
                let MoeShape { experts, hidden, .. } = self.shape;
                let holder = format!("a layer of {experts} experts and hidden size {hidden}");
                let sms = self.sms.choice(&holder);
                let tuning = self.tuning;
                let prepared = crate::gpu::Prepared::new(ordinal, sms, sizes, tuning, shape)?;
                Ok(Some((prepared, tune)))
            }
            Place::Host => Ok(None),
        }
    }
}

/// The communication of one MoE layer on one rank. Cheap to clone; may be shared by threads.
#[derive(Clone, Debug)]
pub struct Ep {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub group: Group,
    pub link: Arc<dyn Link>,
    pub shape: Resolved,
    pub window: Window,
    pub slots: Slots,
    pub lanes: Vec<Lane>,
    pub handles: HandlePool,
    pub id: u64,
    /// All ranks but this one, those last that share hardware with it.
    pub peers: Vec<usize>,
    /// Those that are mapped,
    pub direct: Vec<usize>,
    /// those that are put to,
    pub bulk: Vec<usize>,
    /// and those that rows are exchanged with.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "only rows on GPUs are exchanged")
    )]
    pub paired: Vec<usize>,
    /// All that raise flags: those that are mapped or put to.
    pub flagged: Vec<usize>,
    /// Every rank's window where it is mapped, this rank's own included.
    pub reach: Vec<Option<Mapping>>,
    pub across: Across,
    /// Where rows are.
    pub place: Memory,
    pub sms: Sms,
    #[cfg(feature = "cuda")]
    pub gpu: Option<crate::gpu::Gpu>,
    own: Mapping,
    timeout: Duration,
}

#[cfg(feature = "cuda")]
impl Drop for Inner {
    fn drop(&mut self) {
        // What runs on the GPU ends before the windows and flags it uses go with the link.
        drop(self.gpu.take());
    }
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Inner {
    pub fn new(
        group: Group,
        (link, across): (Arc<dyn Link>, Across),
        shape: Resolved,
        window: Window,
        timeout: Duration,
    ) -> Self {
        let rank = group.rank();
        let mut peers: Vec<usize> = (0..shape.world).filter(|&r| r != rank).collect();
        peers.sort_by_key(|&peer| link.is_beside(peer));
        let own = link.window();
        let mut reach: Vec<_> = (0..shape.world).map(|r| mapped(link.reach(r))).collect();
        reach[rank] = Some(own);
        let pairs = |peer: usize| matches!(link.reach(peer), Reach::Paired);
        let (paired, flagged): (Vec<_>, Vec<_>) = peers.iter().partition(|&&p| pairs(p));
        let (direct, bulk) = flagged.iter().partition::<Vec<usize>, _>(|&&p| reach[p].is_some());
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Self {
            slots: Slots::new(shape.slots),
            lanes: (0..shape.lanes).map(|_| Lane::new()).collect(),
            handles: HandlePool::new(id, rank),
            id,
            peers,
            direct,
            bulk,
            paired,
            flagged,
            reach,
            across,
            place: link.memory(),
            sms: Sms::new(SmPolicy::Shared),
            #[cfg(feature = "cuda")]
            gpu: None,
            own,
            timeout,
            group,
            link,
            shape,
            window,
        }
    }

    /// Takes what a layer needs on its GPU.
    #[cfg(feature = "cuda")]
    fn on_gpu(&mut self, prepared: crate::gpu::Prepared) -> Result<()> {
        let windows: Vec<u64> =
            self.reach.iter().map(|m| m.map_or(0, |m| m.base.as_ptr() as u64)).collect();
        let me = (self.id, self.group.rank());
        let (link, across, shape) = (&self.link, &self.across, (&self.shape, &self.window));
        self.sms.reservation = Some(prepared.sms());
        self.gpu = Some(crate::gpu::Gpu::new(prepared, me, link, shape, across, &windows)?);
        Ok(())
    }

    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// The longest any wait of an operation takes.
    #[cfg(feature = "cuda")]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    pub fn deadline(&self) -> Deadline {
        Deadline::after(self.timeout)
    }

    /// The address of an offset in this rank's window.
    pub fn local(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.own.bytes);
        self.own.base.as_ptr().wrapping_add(offset)
    }

    /// Passes on the verdict of a transport in the middle of an operation, telling the peers of a
    /// failure. Flags are out of phase then, whatever the transport thinks of its error.
    pub fn check<T>(&self, op: &'static str, result: Result<T, TransportError>) -> Result<T> {
        result.map_err(|e| {
            if e.group_usable() {
                return self.give_up(op, e.into());
            }
            self.group.report(&e);
            EpError::Transport(e)
        })
    }

    /// Ends the group after an error that came when peers counted on this rank already.
    pub fn give_up(&self, op: &'static str, error: EpError) -> EpError {
        if !error.group_usable() {
            return error;
        }
        let why = error.to_string();
        self.group.abort(&why);
        TransportError::Aborted { op, by: self.rank(), blames: None, why }.into()
    }

    /// Fails if an operation on `lane`, which may need a slot, could not start now.
    pub fn could_start(self: &Arc<Self>, op: &'static str, lane: usize, slot: bool) -> Result<()> {
        self.usable(op)?;
        drop(LaneGuard::take(self, op, lane, self.deadline())?);
        if slot {
            drop(Slot::take(self, op)?);
        }
        Ok(())
    }

    /// Passes a kernel's verdict on rows on; rows that are not what was announced end the group.
    pub fn check_rows<T>(&self, op: &'static str, result: Result<T, KernelError>) -> Result<T> {
        result.map_err(|e| self.corrupt(op, e.to_string()))
    }

    /// Ends the group: rows are not what was announced.
    pub fn corrupt(&self, op: &'static str, detail: String) -> EpError {
        self.group.abort(&format!("{op}: {detail}"));
        EpError::Corrupt { op, detail }
    }

    /// A slot that `queue` may write to.
    pub fn free_slot(
        self: &Arc<Self>,
        op: &'static str,
        lane: usize,
        queue: &Queue,
    ) -> Result<Slot> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            return gpu.slot_for(self, op, lane, queue);
        }
        let _ = (lane, queue);
        Slot::take(self, op)
    }

    /// Fails if the group has failed.
    pub fn usable(&self, op: &'static str) -> Result<()> {
        Ok(self.group.health().check(op)?)
    }
}
