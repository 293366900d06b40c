//! Windows in the memory of GPUs that reach each other over NVLink (or PCIe).

mod board;
mod driver;
mod graveyard;
mod hand;
mod link;
mod memory;
#[cfg(feature = "nccl")]
mod nccl;
mod trial;
mod watchdog;
mod words;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::rendezvous::host::HostId;
use crate::{
    Beside, Deadline, Group, Link, Pacing, ProcessTransport, Result, ThreadTransport, Transport,
    TransportError, WindowSpec,
};
use board::{Board, Map};
use driver::{Gpu, OP};
pub(crate) use graveyard::Buried;
pub use graveyard::drop_when_quiet;
pub(crate) use hand::Hand;
use link::{Bell, NvlinkLink};
use memory::{Allocation, Mapped, Window, refused};
#[cfg(feature = "nccl")]
pub use nccl::NcclTransport;
use watchdog::{Waits, Watchdog};
use words::Words;
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
/// [`Pacing`] for what that cannot cover: graphs, and threads that drive several ranks.
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

/// How long opening waits for memory of links that were dropped before.
const GIVEN_BACK: std::time::Duration = std::time::Duration::from_millis(500);

/// What each rank tells the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Card {
    host: HostId,
    process: u128,
    uuid: [u8; 16],
    /// The key of the window offered to threads of this process.
    key: u64,
    /// The window's fabric handle, or nothing.
    fabric: Vec<u8>,
    /// It can be handed over by its fabric handle only.
    fabric_only: bool,
    problem: Option<String>,
}

/// Windows whose ranks are about to fetch each other's, by key.
static OFFERED: LazyLock<Mutex<HashMap<u64, Arc<Allocation>>>> = LazyLock::new(Mutex::default);
static NEXT_KEY: AtomicU64 = AtomicU64::new(0);

/// Takes the window back from [`OFFERED`], however `open` ends.
struct Offer(u64);

impl Offer {
    fn new(memory: &Arc<Allocation>) -> Self {
        let key = NEXT_KEY.fetch_add(1, Ordering::Relaxed);
        OFFERED.lock().insert(key, memory.clone());
        Self(key)
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        OFFERED.lock().remove(&self.0);
    }
}

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
        spec.agree(group, self.name(), deadline)?;
        let bulk = self.bulk(group.rank(), group.world())?;
        // What was dropped gives its memory back first, if that is soon.
        graveyard::settle(GIVEN_BACK);
        let choices = self.signals.or_variable().and_then(|s| Ok((s, self.handles.or_variable()?)));
        let own = choices.and_then(|(signals, handles)| {
            let gpu = Arc::new(Gpu::open(self.ordinal)?);
            let memory = Allocation::new(&gpu, spec.bytes, handles)?;
            Ok((gpu, memory, signals, handles))
        });
        let offer = own.as_ref().ok().map(|(_, memory, ..)| Offer::new(memory));
        let fabric = own.as_ref().ok().and_then(|(_, memory, ..)| memory.fabric);
        let card = Card {
            host: HostId::here(),
            process: crate::thread::process(),
            uuid: own.as_ref().map_or([0; 16], |(gpu, ..)| gpu.uuid),
            key: offer.as_ref().map_or(0, |offer| offer.0),
            fabric: fabric.map_or_else(Vec::new, |handle| handle.to_vec()),
            fabric_only: own.as_ref().is_ok_and(|(.., handles)| *handles == Handles::Fabric),
            problem: own.as_ref().err().map(|e| e.to_string()),
        };
        let bytes = postcard::to_stdvec(&card).unwrap_or_default();
        let all = group.all_gather_within(OP, &bytes, deadline)?;
        // A rank's own error says most to it; the others learn whose it is.
        let (gpu, memory, signals, _) = own?;
        let cards = read(&all)?;
        together(group, deadline, peers_problem(&gpu, &cards, group.rank()))?;
        let threads = cards.iter().all(|c| c.process == cards[0].process);
        let board = open_board(group, spec, &gpu, threads, deadline)?;
        let windows = match threads {
            true => fetch(group, &gpu, &cards, deadline)?,
            false => hand_over(group, &gpu, &memory, &cards, deadline)?,
        };
        drop(offer);
        let words = trial::choose(group, &gpu, &board, signals, deadline)?;
        let link = beside(group.rank(), &cards)
            .map_or(Ok(None), |beside| board.pacing(beside).map(Some))
            .and_then(|pacing| {
                connect((group, spec), gpu, (windows, bulk), (board, pacing, words))
            });
        together(group, deadline, link.as_ref().err().map(|e| e.to_string()))?;
        let link = link?;
        link.try_out(&memory, deadline)?;
        Ok(Arc::new(link))
    }
}

fn connect(
    (group, spec): (&Group, WindowSpec),
    gpu: Arc<Gpu>,
    (windows, bulk): (Vec<Mapped>, Vec<bool>),
    (board, pacing, words): (Board, Option<Pacing>, Words),
) -> Result<NvlinkLink> {
    let watchdog = Watchdog::start(group, board, Waits::new(spec.flags)).map_err(|e| {
        let (code, detail) = (e.raw_os_error().unwrap_or(libc::EAGAIN), "starting a thread".into());
        TransportError::Os { op: OP, peer: None, code, detail }
    })?;
    let shared = watchdog.shared.clone();
    let ring: Arc<dyn Fn() + Send + Sync> = Arc::new(move || shared.ring());
    group.health().watch(Arc::downgrade(&ring));
    let bell: Arc<dyn Bell> = Arc::new(Held(ring));
    let (group, windows, words) = (group.clone(), Buried::new(windows), Buried::new(words));
    Ok(NvlinkLink { group, spec, gpu, windows, bulk, watchdog, words, pacing, _bell: bell })
}

/// Which ranks are on `rank`'s GPU; `None` if it has that to itself.
fn beside(rank: usize, cards: &[Card]) -> Option<Vec<Beside>> {
    let own = &cards[rank];
    let one = |(peer, card): (usize, &Card)| match (card.uuid == own.uuid, card.process) {
        (true, _) if peer == rank => Beside::No,
        (true, process) if process == own.process => Beside::Thread,
        (true, _) => Beside::Process,
        (false, _) => Beside::No,
    };
    let all: Vec<_> = cards.iter().enumerate().map(one).collect();
    all.iter().any(|&beside| beside != Beside::No).then_some(all)
}

struct Held(
    #[expect(dead_code, reason = "held for the group's health")] Arc<dyn Fn() + Send + Sync>,
);

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bell")
    }
}

impl Bell for Held {}

/// Reads everyone's cards; fails, the same on every rank but that at fault, where one cannot take
/// part.
fn read(all: &[Vec<u8>]) -> Result<Vec<Card>> {
    let unsupported = |detail: String| TransportError::Unsupported { op: OP, detail };
    let mut cards: Vec<Card> = Vec::with_capacity(all.len());
    for (rank, bytes) in all.iter().enumerate() {
        let card = postcard::from_bytes(bytes)
            .map_err(|_| unsupported(format!("rank {rank} sent no card of this library")))?;
        cards.push(card);
    }
    for (rank, card) in cards.iter().enumerate() {
        if let Some(problem) = &card.problem {
            return Err(unsupported(format!("rank {rank} has no window: {problem}")));
        }
        let first = &cards[0].host;
        if card.host.boot != first.boot || card.host.network != first.network {
            return Err(unsupported(format!(
                "rank {rank} is not on rank 0's host (or in another network namespace): split the \
                 group by host, or use a transport that crosses hosts, such as nccl or rdma"
            )));
        }
    }
    Ok(cards)
}

/// Why this rank's GPU cannot reach another's, as far as the driver says before anything is mapped.
fn peers_problem(gpu: &Gpu, cards: &[Card], rank: usize) -> Option<String> {
    cards.iter().enumerate().find_map(|(peer, card)| {
        if card.uuid == gpu.uuid {
            return None;
        }
        // A GPU that this process does not see is tried by mapping its window.
        let device = gpu.visible(&card.uuid)?;
        let mut can = 0;
        // SAFETY: `can` is valid for the call.
        let code = unsafe { (gpu.driver.can_access_peer)(&mut can, gpu.device, device) };
        (code != 0 || can == 0).then(|| no_peer_access(rank, peer, code))
    })
}

fn no_peer_access(rank: usize, peer: usize, code: i32) -> String {
    format!(
        "the GPU of rank {rank} has no peer access to that of rank {peer} (code {code}): they share \
         neither NVLink nor a PCIe switch that allows it; use a transport that does not map peers, \
         such as nccl"
    )
}

/// One rank's problem is everyone's error.
fn together(group: &Group, deadline: Deadline, problem: Option<String>) -> Result<()> {
    let note = problem.unwrap_or_default();
    let all = group.all_gather_within(OP, note.as_bytes(), deadline)?;
    match all.iter().position(|note| !note.is_empty()) {
        None => Ok(()),
        Some(rank) => {
            let why = String::from_utf8_lossy(&all[rank]);
            Err(TransportError::Unsupported { op: OP, detail: format!("rank {rank}: {why}") })
        }
    }
}

fn open_board(
    group: &Group,
    spec: WindowSpec,
    gpu: &Arc<Gpu>,
    threads: bool,
    deadline: Deadline,
) -> Result<Board> {
    let map = Map::new(spec.flags, group.world());
    let shared = WindowSpec { bytes: map.bytes().next_multiple_of(4096), flags: 1 };
    let link = match threads {
        true => ThreadTransport::new().open_host(group, shared, deadline)?,
        false => ProcessTransport::new().open_host(group, shared, deadline)?,
    };
    let board = Board::new(gpu, link, map, group.rank());
    together(group, deadline, board.as_ref().err().map(|e| e.to_string()))?;
    board
}

/// The windows of ranks that are threads of this process.
fn fetch(group: &Group, gpu: &Arc<Gpu>, cards: &[Card], deadline: Deadline) -> Result<Vec<Mapped>> {
    let one = |(peer, card): (usize, &Card)| {
        let offered = OFFERED.lock().get(&card.key).cloned();
        let Some(memory) = offered else {
            let detail = "it gave up while windows were exchanged".into();
            return Err(TransportError::PeerLost { op: OP, peer, detail });
        };
        Mapped::new(gpu, &memory).map_err(|e| refused(peer, &e))
    };
    let windows = cards.iter().enumerate().map(one).collect::<Result<Vec<_>>>();
    // Nobody takes an offer back before everyone has fetched it.
    together(group, deadline, windows.as_ref().err().map(|e| e.to_string()))?;
    windows
}

/// Whether windows are handed over by fabric handles: the same answer on every rank.
fn by_fabric(cards: &[Card]) -> Result<bool> {
    let lacks = cards.iter().position(|card| card.fabric.is_empty());
    let needs = cards.iter().position(|card| card.fabric_only);
    match (lacks, needs) {
        (None, _) => Ok(true),
        (Some(_), None) => Ok(false),
        (Some(lacks), Some(needs)) => {
            let detail = format!(
                "rank {needs} hands its window over by a fabric handle only, rank {lacks} has none"
            );
            Err(TransportError::Unsupported { op: OP, detail })
        }
    }
}

/// The windows of ranks that are processes.
fn hand_over(
    group: &Group,
    gpu: &Arc<Gpu>,
    memory: &Arc<Allocation>,
    cards: &[Card],
    deadline: Deadline,
) -> Result<Vec<Mapped>> {
    if by_fabric(cards)? {
        let one = |(peer, card): (usize, &Card)| {
            let theirs = match peer == group.rank() {
                true => Ok(memory.clone()),
                false => memory.import_fabric(&card.fabric),
            };
            theirs.and_then(|memory| Mapped::new(gpu, &memory)).map_err(|e| refused(peer, &e))
        };
        let windows = cards.iter().enumerate().map(one).collect::<Result<Vec<_>>>();
        // Nobody takes memory back before everyone has it, and all go the same way.
        let problem = windows.as_ref().err().map(|e| e.to_string());
        match together(group, deadline, problem) {
            Ok(()) => return windows,
            Err(why) if why.kind() != crate::ErrorKind::Unsupported => return Err(why),
            Err(why) if cards.iter().any(|card| card.fabric_only) => return Err(why),
            Err(why) => tracing::debug!(%why, "windows are handed over as descriptors instead"),
        }
    }
    crate::process::share(group, Window::new(gpu, memory.clone()), deadline)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(process: u128) -> Card {
        let host = HostId { boot: "b".into(), name: "n".into(), network: "net:[1]".into() };
        let (fabric, fabric_only) = (Vec::new(), false);
        Card { host, process, uuid: [1; 16], key: 0, fabric, fabric_only, problem: None }
    }

    fn verdict(cards: &[Card]) -> Result<Vec<Card>> {
        let all: Vec<_> = cards.iter().map(|card| postcard::to_stdvec(card).unwrap()).collect();
        read(&all)
    }

    #[test]
    fn who_cannot_take_part_is_named_with_the_way_out() {
        assert_eq!(verdict(&[card(1), card(2)]).unwrap().len(), 2);
        let mut away = card(1);
        away.host.boot = "other".into();
        let e = verdict(&[card(1), away]).unwrap_err().to_string();
        assert!(e.contains("rank 1") && e.contains("nccl"), "{e}");
        let mut poor = card(1);
        poor.problem = Some("cuMemCreate failed: out of memory".into());
        let e = verdict(&[card(1), card(1), poor]).unwrap_err().to_string();
        assert!(e.contains("rank 2") && e.contains("out of memory"), "{e}");
        assert!(read(&[vec![1, 2]]).is_err());
        let e = no_peer_access(0, 3, 0);
        assert!(e.contains("rank 0") && e.contains("rank 3") && e.contains("nccl"), "{e}");
    }

    #[test]
    fn fabric_handles_are_for_all_or_none() {
        let with = |has: bool, only| {
            let fabric = if has { vec![1; 64] } else { Vec::new() };
            Card { fabric, fabric_only: only, ..card(1) }
        };
        assert!(by_fabric(&[with(true, false), with(true, true)]).unwrap());
        assert!(!by_fabric(&[with(true, false), with(false, false)]).unwrap());
        let e = by_fabric(&[with(true, true), with(false, false)]).unwrap_err().to_string();
        assert!(e.contains("rank 0") && e.contains("rank 1"), "{e}");
    }

    #[test]
    fn ranks_of_one_gpu_are_told_apart_by_process() {
        let on = |gpu: u8, process| Card { uuid: [gpu; 16], ..card(process) };
        let cards = [on(1, 7), on(1, 7), on(1, 8), on(2, 7)];
        use Beside::{No, Process, Thread};
        assert_eq!(beside(0, &cards), Some(vec![No, Thread, Process, No]));
        assert_eq!(beside(2, &cards), Some(vec![Process, Process, No, No]));
        assert_eq!(beside(3, &cards), None);
    }

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
