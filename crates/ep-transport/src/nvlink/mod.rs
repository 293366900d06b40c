//! Windows in the memory of GPUs that reach each other over NVLink (or PCIe).

mod board;
mod driver;
mod hand;
mod link;
mod memory;
mod watchdog;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::rendezvous::host::HostId;
use crate::{
    Beside, Deadline, Group, Link, Pacing, ProcessTransport, Queue, Result, ThreadTransport,
    Transport, TransportError, WindowSpec,
};
use board::{Board, Map};
use driver::{Gpu, OP};
pub(crate) use hand::Hand;
use link::{Bell, NvlinkLink};
use memory::{Allocation, Mapped, Setup, Window, refused};
use watchdog::{Waits, Watchdog};

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
/// A link is dropped only when all work that uses its windows or flags has ended.
#[derive(Clone, Debug)]
pub struct NvlinkTransport {
    ordinal: usize,
    nodes: Option<Vec<usize>>,
}

impl NvlinkTransport {
    /// This rank's window is on the GPU `ordinal` among those the process sees.
    pub fn new(ordinal: usize) -> Self {
        Self { ordinal, nodes: None }
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

/// What each rank tells the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Card {
    host: HostId,
    process: u128,
    uuid: [u8; 16],
    /// The key of the window offered to threads of this process.
    key: u64,
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
        spec.agree(group, self.name(), deadline)?;
        let bulk = self.bulk(group.rank(), group.world())?;
        let own = Gpu::open(self.ordinal).and_then(|gpu| {
            let gpu = Arc::new(gpu);
            let memory = Allocation::new(&gpu, spec.bytes)?;
            Ok((gpu, memory))
        });
        let offer = own.as_ref().ok().map(|(_, memory)| Offer::new(memory));
        let card = Card {
            host: HostId::here(),
            process: crate::thread::process(),
            uuid: own.as_ref().map_or([0; 16], |(gpu, _)| gpu.uuid),
            key: offer.as_ref().map_or(0, |offer| offer.0),
            problem: own.as_ref().err().map(|e| e.to_string()),
        };
        let bytes = postcard::to_stdvec(&card).unwrap_or_default();
        let all = group.all_gather_within(OP, &bytes, deadline)?;
        // A rank's own error says most to it; the others learn whose it is.
        let (gpu, memory) = own?;
        let cards = read(&all)?;
        together(group, deadline, peers_problem(&gpu, &cards, group.rank()))?;
        let threads = cards.iter().all(|c| c.process == cards[0].process);
        let board = open_board(group, spec, &gpu, threads, deadline)?;
        let windows = match threads {
            true => fetch(group, &gpu, &cards, deadline)?,
            false => crate::process::share(group, Window::new(&gpu, memory.clone()), deadline)?,
        };
        drop(offer);
        let link = beside(group.rank(), &cards)
            .map_or(Ok(None), |beside| board.pacing(beside).map(Some))
            .and_then(|pacing| connect((group, spec), gpu, (windows, bulk), (board, pacing)));
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
    (board, pacing): (Board, Option<Pacing>),
) -> Result<NvlinkLink> {
    let watchdog = Watchdog::start(group, board, Waits::new(spec.flags)).map_err(|e| {
        let (code, detail) = (e.raw_os_error().unwrap_or(libc::EAGAIN), "starting a thread".into());
        TransportError::Os { op: OP, peer: None, code, detail }
    })?;
    let shared = watchdog.shared.clone();
    let ring: Arc<dyn Fn() + Send + Sync> = Arc::new(move || shared.ring());
    group.health().watch(Arc::downgrade(&ring));
    let bell: Arc<dyn Bell> = Arc::new(Held(ring));
    let group = group.clone();
    Ok(NvlinkLink { group, spec, gpu, windows, bulk, watchdog, pacing, _bell: bell })
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
        true => ThreadTransport::new().open(group, shared, deadline)?,
        false => ProcessTransport::new().open(group, shared, deadline)?,
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

impl NvlinkLink {
    /// Zeroes the window, writes a word into everyone's and raises a flag by a stream, so that what
    /// the driver promised is seen to work before rows depend on it. After each step the ranks tell
    /// each other how it went: one's problem is everyone's error.
    fn try_out(&self, memory: &Allocation, deadline: Deadline) -> Result<()> {
        let setup = Setup::new(&self.gpu);
        let step = |done: Result<()>| {
            together(&self.group, deadline, done.as_ref().err().map(|e| e.to_string()))
        };
        let with = |work: &dyn Fn(&Setup) -> Result<()>| match &setup {
            Ok(setup) => work(setup),
            Err(e) => Err(e.clone()),
        };
        step(with(&|setup| self.clear(setup, memory.bytes(), deadline)))?;
        step(with(&|setup| self.write_words(setup, deadline)))?;
        step(with(&|setup| self.read_words(setup, deadline)))?;
        let words = 8 * self.group.world().min(self.spec.bytes / 8);
        step(with(&|setup| self.clear(setup, words, deadline)))
    }

    fn clear(&self, setup: &Setup, bytes: usize, deadline: Deadline) -> Result<()> {
        setup.zero(self.windows[self.group.rank()].base, bytes)?;
        setup.wait("zeroing the window", deadline)
    }

    /// Writes this rank's word into everyone's window, and a flag of its own.
    fn write_words(&self, setup: &Setup, deadline: Deadline) -> Result<()> {
        let rank = self.group.rank();
        let mine = word_of(rank);
        if rank < self.spec.bytes / 8 {
            for window in &self.windows {
                setup.copy(window.base + 8 * rank as u64, &raw const mine as u64, 8, deadline)?;
            }
        }
        if self.spec.flags > 0 {
            // SAFETY: the stream lives until `setup` drops, and is waited for here.
            let queue = unsafe { Queue::from_raw(setup.raw.cast(), self.gpu.ordinal) };
            self.signal(&queue, rank, 0)?;
            self.wait(&queue, OP, &[rank], 0, deadline)?;
            setup.wait("a flag raised by a stream", deadline)?;
        }
        Ok(())
    }

    fn read_words(&self, setup: &Setup, deadline: Deadline) -> Result<()> {
        let own = &self.windows[self.group.rank()];
        for peer in (0..self.group.world()).filter(|&peer| peer < self.spec.bytes / 8) {
            let mut seen = 0u64;
            setup.copy(&raw mut seen as u64, own.base + 8 * peer as u64, 8, deadline)?;
            if seen != word_of(peer) {
                let rank = self.group.rank();
                let detail =
                    format!("what rank {peer} wrote into rank {rank}'s window did not arrive");
                return Err(TransportError::Unsupported { op: OP, detail });
            }
        }
        Ok(())
    }
}

/// What a rank writes into windows to try them.
fn word_of(rank: usize) -> u64 {
    0x5eed_0000_0000_0001 + rank as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(process: u128) -> Card {
        let host = HostId { boot: "b".into(), name: "n".into(), network: "net:[1]".into() };
        Card { host, process, uuid: [1; 16], key: 0, problem: None }
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
