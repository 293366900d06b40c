//! Windows of other hosts, reached by RDMA verbs.
//!
//! A thread per NIC, the *proxy*, takes commands from a ring ([`crate::ring`]), posts them as large
//! one-sided writes with an immediate each, and counts the immediates that arrive. Nothing depends
//! on the order in which the fabric delivers: see [`arrivals`].

mod areas;
mod arrivals;
mod core;
mod device;
mod endpoint;
mod events;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(test)]
mod hardware;
mod layout;
mod link;
#[cfg(test)]
mod mock;
mod nodes;
#[cfg(all(test, feature = "cuda"))]
mod on_gpus;
mod options;
mod pair;
#[cfg(test)]
mod posting;
mod proxy;
mod sender;
mod shared;
#[cfg(test)]
mod simulated;
mod tickets;
#[cfg(test)]
mod trouble;
mod verbs;

use std::path::Path;
use std::sync::Arc;

use ep_topology::Host;
use serde::{Deserialize, Serialize};

use crate::{Deadline, Group, Link, Result, Transport, TransportError, WindowSpec};
use areas::{Refused, Source};
use device::Device;
use endpoint::{Card, Endpoint};
use layout::Layout;
use link::{Opened, RdmaLink};
use nodes::Nodes;
use options::{Chosen, Options};
use verbs::Context;

const OP: &str = "open";

/// A NIC that is open, and the cores near it.
type OpenNic = (Arc<Context>, Chosen, Vec<u32>);

/// NICs that know a rank's memory, each with the cores near it.
type Endpoints = Vec<(Endpoint, Vec<u32>)>;

/// The transport between hosts: ranks of one host map each other's windows, those of others are
/// reached by RDMA writes over reliably connected queue pairs (InfiniBand, RoCE).
///
/// Each rank uses the NICs that are its own by its number among the ranks of its host, or those it
/// is told to use; the `i`-th NIC of a rank talks to the `i`-th of each peer. A setting that all
/// ranks must share is checked when windows are opened. libibverbs is opened at run time.
///
/// Windows are in host memory unless asked otherwise (`cuda`). Registering them counts against the limit on locked memory.
#[derive(Clone, Debug, Default)]
pub struct RdmaTransport {
    options: Options,
}

macro_rules! settings {
    ($($(#[$doc:meta])* $name:ident: $from:ty => |$options:ident, $value:ident| $set:expr;)*) => {
        impl RdmaTransport {
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $name(mut self, $value: $from) -> Self {
                    let $options = &mut self.options;
                    $set;
                    self
                }
            )*
        }
    };
}

settings! {
    /// The NICs to use, by name (`mlx5_0`), the first [`nics`](RdmaTransport::nics) of them. By
    /// default those that are usable, in turns by the rank's number on its host.
    devices: &[&str] => |o, names| o.devices = names.iter().map(|&name| name.to_owned()).collect();
    /// How many NICs a rank uses, 1 to 8; large puts are divided among them. Default 1.
    nics: usize => |o, count| o.nics = count;
    /// The NICs' port, from 1. By default the first that is active.
    port: u32 => |o, port| o.port = Some(port);
    /// The index of the GID. By default RoCE v2 over IPv4, then over IPv6, then what there is; none
    /// on InfiniBand, where local identifiers do.
    gid_index: u32 => |o, index| o.gid_index = Some(index);
    /// Queue pairs per peer and NIC, 1 to 16; large puts are divided among them. Default 1.
    queue_pairs: usize => |o, count| o.queue_pairs = count;
    /// The InfiniBand service level or, on RoCE, the priority, 0 to 15. Default 0.
    service_level: u8 => |o, level| o.service_level = level;
    /// The traffic class (on RoCE v2 the DSCP and ECN bits). Default 0.
    traffic_class: u8 => |o, class| o.traffic_class = class;
    /// The index of the partition key. Default 0.
    pkey_index: u16 => |o, index| o.pkey_index = index;
    /// The largest packet in bytes, 256 to 4096. By default what both ports can.
    mtu: u32 => |o, bytes| o.mtu = Some(bytes);
    /// How long an answer to a packet may take: 4.096 µs × 2^`exponent`, 1 to 31. Default 14 (67 ms).
    ///
    /// A port that goes down is an error once it has been down for that time × ([`retries`] + 1), 0.47
    /// s by default, or once a connection breaks meanwhile; one that is back before is none.
    ///
    /// [`retries`]: RdmaTransport::retries
    ack_timeout: u8 => |o, exponent| o.timeout = exponent;
    /// How often a packet is sent again before its peer counts as lost, 0 to 6. Default 6.
    retries: u8 => |o, count| o.retries = count;
    /// Writes that a peer can have under way per NIC, 8 to 4096. Default 128.
    depth: usize => |o, count| o.depth = count;
    /// The largest write in bytes; longer puts are split. Default 1 MiB.
    max_write: usize => |o, bytes| o.piece = bytes;
    /// Bytes that a rank can have under way per NIC. Default 16 MiB.
    max_in_flight: usize => |o, bytes| o.in_flight = bytes;
    /// Whether the NIC may write messages to memory in any order (PCIe relaxed ordering), which is
    /// safe as every write is counted by itself. Default true.
    relaxed_ordering: bool => |o, on| o.relaxed = on;
    /// Whether proxies are bound to the cores near their NIC. Default true.
    pin_proxies: bool => |o, on| o.pin = on;
    /// Whether proxies never sleep: the lowest latency, at the price of a core each. Default false.
    busy_polling: bool => |o, on| o.busy = on;
    /// The node this rank counts as part of. By default its host: ranks of a node map each other's
    /// windows. Setting it lets one host stand for several nodes.
    node: u64 => |o, node| o.node = Some(node);
}

#[cfg(feature = "cuda")]
settings! {
    /// Windows are on the GPU with this ordinal among those the process sees, on all ranks, and
    /// operations take its streams. Ranks of one node map each other's windows as over NVLink
    /// ([`NvlinkTransport`](crate::NvlinkTransport)) and may share GPUs; ranks of different nodes may not.
    ///
    /// The NICs reach the GPU's memory through a dma-buf (`cuMemGetHandleForAddressRange`,
    /// `ibv_reg_dmabuf_mr`) where driver and NIC have that, and the host makes the GPU see what
    /// arrived (`cuFlushGPUDirectRDMAWrites`) where it would not by itself. Elsewhere the windows of a
    /// node are in page-locked memory of the host that its GPUs have mapped, and a warning says why.
    ///
    /// What a stream puts or signals to other nodes a thread of the link takes to the NICs once the stream
    /// has come to it, so that it cannot be captured into graphs. At most 64 streams have such under way
    /// at once.
    cuda: usize => |o, ordinal| o.memory = crate::Memory::Cuda { ordinal };
}

impl RdmaTransport {
    /// Everything by default.
    pub fn new() -> Self {
        Self::default()
    }

    /// What the variables `EP_RDMA_DEVICES` (names with commas between), `EP_RDMA_NICS`, `_PORT`,
    /// `_GID_INDEX`, `_QUEUE_PAIRS`, `_SERVICE_LEVEL`, `_TRAFFIC_CLASS`, `_PKEY_INDEX`, `_MTU`,
    /// `_TIMEOUT`, `_RETRIES` and `_NODE` say, the default where one is not set.
    ///
    /// # Errors
    /// An argument error naming a variable that cannot be read.
    pub fn from_env() -> Result<Self> {
        let mut options = Options::default();
        options.read(|name| std::env::var(name).ok())?;
        Ok(Self { options })
    }
}

impl Transport for RdmaTransport {
    fn name(&self) -> &'static str {
        "rdma"
    }

    fn open(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Arc<dyn Link>> {
        #[cfg(feature = "cuda")]
        if let crate::Memory::Cuda { ordinal } = self.options.memory {
            return Ok(self.open_on_gpu(group, spec, ordinal, deadline)?);
        }
        Ok(self.open_on(group, spec, deadline, |endpoint| endpoint)?)
    }
}

impl RdmaTransport {
    /// What all ranks have to agree on, and who is where. A collective.
    fn meet(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Nodes> {
        spec.agree(group, self.name(), deadline)?;
        // A rank whose options are wrong must not leave the others waiting.
        together(group, self.options.check(), |()| Vec::new(), deadline)?;
        group.agree(OP, &self.options.shared(), deadline)?;
        Nodes::meet(group, self.options.node, deadline)
    }

    /// Opens windows in host memory whose proxies work on what `device` makes of each connected NIC.
    fn open_on<D: Device + 'static>(
        &self,
        group: &Group,
        spec: WindowSpec,
        deadline: Deadline,
        device: impl Fn(Endpoint) -> D,
    ) -> Result<Arc<RdmaLink>> {
        let nodes = self.meet(group, spec, deadline)?;
        let layout = Layout::new(spec, group.world(), self.options.nics)?;
        let regions = nodes.share(group, layout.bytes, deadline);
        let prepared = regions.and_then(|regions| {
            let nics = self.open_nics(&nodes)?;
            let region = regions[group.rank()].clone().expect("a rank has a window");
            let memory = [(0, Source::Pages { region, from: 0 })];
            Ok((regions, self.register(&nics, &nodes, group.world(), &memory)?))
        });
        let cards = |(_, endpoints): &(_, Endpoints)| self.cards(endpoints);
        let ((regions, mut endpoints), all) = together(group, prepared, cards, deadline)?;
        let connected = self.connect(group.rank(), &nodes, &mut endpoints, &all);
        let opened = Opened { group: group.clone(), spec, layout, regions, nodes };
        let devices = endpoints.into_iter().map(|(endpoint, cores)| (device(endpoint), cores));
        let started =
            connected.and_then(|()| RdmaLink::start(opened, devices.collect(), &self.options));
        // Nobody writes before all are connected.
        let (link, _) = together(group, started, |_| Vec::new(), deadline)?;
        Ok(link)
    }

    /// Opens windows on GPUs.
    #[cfg(feature = "cuda")]
    fn open_on_gpu(
        &self,
        group: &Group,
        spec: WindowSpec,
        ordinal: usize,
        deadline: Deadline,
    ) -> Result<Arc<gpu::GpuLink>> {
        let nodes = self.meet(group, spec, deadline)?;
        let nics = self.open_nics(&nodes).map(|nics| {
            let nodes = nodes.clone();
            Verbs { transport: self, group, nodes, nics, deadline }
        });
        let options = &self.options;
        gpu::open(gpu::Opening { group, spec, nodes, options, ordinal, deadline }, nics)
    }

    /// Makes memory known to the NICs, each with the offset at which it begins.
    fn register(
        &self,
        nics: &[OpenNic],
        nodes: &Nodes,
        world: usize,
        memory: &[(usize, Source)],
    ) -> Result<Endpoints, Refused> {
        let on = |(context, chosen, cores): &OpenNic| {
            let bulk = (nodes.bulk(), world);
            let opened = Endpoint::on(context.clone(), chosen, memory, bulk, &self.options)?;
            Ok((opened, cores.clone()))
        };
        nics.iter().map(on).collect()
    }

    /// What other ranks have to know of this rank's NICs.
    fn cards(&self, endpoints: &Endpoints) -> Vec<u8> {
        let card = |endpoint: &(Endpoint, Vec<u32>)| endpoint.0.card(&self.options);
        let cards: Vec<Card> = endpoints.iter().map(card).collect();
        postcard::to_stdvec(&cards).expect("plain data")
    }

    /// Chooses and opens this rank's NICs, each with the cores near it.
    fn open_nics(&self, nodes: &Nodes) -> Result<Vec<OpenNic>> {
        if nodes.bulk().is_empty() {
            return Ok(Vec::new());
        }
        let host = Host::observe(Path::new("/sys"), Path::new("/proc"), Path::new("/dev"));
        let chosen = options::choose(&host.nics, &self.options, nodes.local())?;
        let open = |one: Chosen| {
            let cores =
                if self.options.pin { core::cores_near(&host, one.numa_node) } else { Vec::new() };
            Ok((Context::open(&one.device)?, one, cores))
        };
        chosen.into_iter().map(open).collect()
    }

    fn connect(
        &self,
        rank: usize,
        nodes: &Nodes,
        endpoints: &mut [(Endpoint, Vec<u32>)],
        all: &[Vec<u8>],
    ) -> Result<()> {
        for &peer in nodes.bulk() {
            let cards: Vec<Card> =
                postcard::from_bytes(&all[peer]).map_err(|_| unreadable(peer))?;
            if cards.len() != endpoints.len() {
                return Err(unreadable(peer));
            }
            for ((endpoint, _), card) in endpoints.iter_mut().zip(&cards) {
                endpoint.connect(rank, peer, card, &self.options)?;
            }
        }
        Ok(())
    }
}

/// The NICs of a rank whose window a GPU has.
#[cfg(feature = "cuda")]
struct Verbs<'a> {
    transport: &'a RdmaTransport,
    group: &'a Group,
    nodes: Nodes,
    nics: Vec<OpenNic>,
    deadline: Deadline,
}

#[cfg(feature = "cuda")]
impl gpu::Nics for Verbs<'_> {
    type Wired = Endpoints;
    type Device = Endpoint;

    fn register(&self, memory: &[(usize, Source)]) -> Result<Endpoints, Refused> {
        self.transport.register(&self.nics, &self.nodes, self.group.world(), memory)
    }

    fn connect(self, mut endpoints: Endpoints) -> Result<Endpoints> {
        let cards = self.transport.cards(&endpoints);
        let all = self.group.all_gather_within(OP, &cards, self.deadline)?;
        let rank = self.group.rank();
        let connected = self.transport.connect(rank, &self.nodes, &mut endpoints, &all);
        together(self.group, connected, |()| Vec::new(), self.deadline)?;
        Ok(endpoints)
    }
}

/// What ranks tell each other of a step: what came out of it, or why it failed.
#[derive(Serialize, Deserialize)]
enum Told {
    Done(Vec<u8>),
    Failed(Problem),
}

/// What the others need to make the same kind of error of a rank's.
#[derive(Serialize, Deserialize)]
struct Problem {
    /// It only cannot take part; the group is as good as before.
    unable: bool,
    code: i32,
    why: String,
}

/// Ends a step that every rank does by itself: all get what all made of it, or all fail.
fn together<T>(
    group: &Group,
    own: Result<T>,
    tell: impl FnOnce(&T) -> Vec<u8>,
    deadline: Deadline,
) -> Result<(T, Vec<Vec<u8>>)> {
    let told = match &own {
        Ok(value) => Told::Done(tell(value)),
        Err(error) => Told::Failed(problem(error)),
    };
    let told = postcard::to_stdvec(&told).expect("plain data");
    let all = group.all_gather_within(OP, &told, deadline)?;
    let own = own?;
    let mut values = Vec::with_capacity(all.len());
    for (rank, bytes) in all.iter().enumerate() {
        match postcard::from_bytes(bytes) {
            Ok(Told::Done(value)) => values.push(value),
            Ok(Told::Failed(problem)) => return Err(theirs(rank, problem)),
            Err(_) => return Err(unreadable(rank)),
        }
    }
    Ok((own, values))
}

fn problem(error: &TransportError) -> Problem {
    let code = error.code().unwrap_or(libc::EIO);
    Problem { unable: error.group_usable(), code, why: error.to_string() }
}

/// The error of `rank`, as the others have it.
fn theirs(rank: usize, Problem { unable, code, why }: Problem) -> TransportError {
    let detail = format!("rank {rank} cannot take part: {why}");
    match unable {
        true => TransportError::Unsupported { op: OP, detail },
        false => TransportError::Os { op: OP, peer: Some(rank), code, detail },
    }
}

fn unreadable(rank: usize) -> TransportError {
    let detail = format!("rank {rank} sent no card of this library");
    TransportError::Unsupported { op: OP, detail }
}
