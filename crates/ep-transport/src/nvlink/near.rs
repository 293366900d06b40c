//! Opening what ranks that map each other share: all ranks of a group, or those of one of its nodes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::board::{Board, Map, Registered, shared_spec};
use super::driver::{Gpu, OP};
use super::graveyard::Buried;
use super::link::{Bell, NvlinkLink};
use super::memory::{Allocation, Mapped, Seen, Window, refused};
use super::trial;
use super::watchdog::{Waits, Watchdog};
#[cfg(feature = "rdma")]
use super::words::Handles;
use super::words::{Signals, Words};
use crate::process::{Shared, share};
use crate::rendezvous::host::HostId;
use crate::{
    Beside, Deadline, Group, HostLink, Pacing, ProcessTransport, Region, Result, ThreadTransport,
    TransportError, WindowSpec,
};

/// Ranks that map each other, among all of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Near<'a> {
    /// All ranks: links go by their numbers, and fail with them.
    pub all: &'a Group,
    /// The ranks that map each other.
    pub group: &'a Group,
    /// Their numbers among all, by their numbers in `group`.
    pub members: &'a [usize],
    /// Streams whose orders a bridge takes to the others.
    pub streams: usize,
}

/// What a rank brings along.
#[derive(Debug)]
pub(crate) struct Own {
    pub gpu: Arc<Gpu>,
    pub place: Place,
    pub signals: Signals,
    /// Its window is handed over by its fabric handle or not at all.
    pub fabric_only: bool,
}

#[cfg(feature = "rdma")]
impl Own {
    /// A window in a GPU's memory, which is given besides.
    pub fn on_device(gpu: &Arc<Gpu>, bytes: usize) -> Result<(Self, Arc<Allocation>)> {
        let (signals, handles) = (Signals::Auto.or_variable()?, Handles::Auto.or_variable()?);
        let memory = Allocation::new(gpu, bytes, handles)?;
        let (gpu, place) = (gpu.clone(), Place::Device(memory.clone()));
        Ok((Self { gpu, place, signals, fabric_only: handles == Handles::Fabric }, memory))
    }

    /// Windows in memory of the host.
    pub fn on_host(gpu: &Arc<Gpu>, regions: Vec<Arc<dyn Region>>) -> Result<Self> {
        let (gpu, signals) = (gpu.clone(), Signals::Auto.or_variable()?);
        Ok(Self { gpu, place: Place::Host(regions), signals, fabric_only: false })
    }
}

/// Where windows are: the same on all ranks that map each other.
#[derive(Debug)]
pub(crate) enum Place {
    /// Each in the memory of its rank's GPU; this rank's.
    Device(Arc<Allocation>),
    /// At the beginning of shared memory of the host, by number; for bulk transports.
    #[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "for bulk transports"))]
    Host(Vec<Arc<dyn Region>>),
}

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
static NEXT_KEY: AtomicU64 = AtomicU64::new(1);

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

fn unsupported(detail: String) -> TransportError {
    TransportError::Unsupported { op: OP, detail }
}

impl Near<'_> {
    /// Opens the link of a rank that brings `own` along and reaches the `bulk` ranks, by rank, only by
    /// puts. A collective of the ranks that map each other.
    pub fn open(
        &self,
        spec: WindowSpec,
        own: Result<Own>,
        bulk: Vec<bool>,
        deadline: Deadline,
    ) -> Result<Arc<NvlinkLink>> {
        let memory = own.as_ref().ok().and_then(|own| match &own.place {
            Place::Device(memory) => Some(memory),
            Place::Host(_) => None,
        });
        let offer = memory.map(Offer::new);
        let fabric = memory.and_then(|memory| memory.fabric);
        let card = Card {
            host: HostId::here(),
            process: crate::thread::process(),
            uuid: own.as_ref().map_or([0; 16], |own| own.gpu.uuid),
            key: offer.as_ref().map_or(0, |offer| offer.0),
            fabric: fabric.map_or_else(Vec::new, |handle| handle.to_vec()),
            fabric_only: own.as_ref().is_ok_and(|own| own.fabric_only),
            problem: own.as_ref().err().map(|e| e.to_string()),
        };
        let bytes = postcard::to_stdvec(&card).unwrap_or_default();
        let all = self.gather(&bytes, deadline)?;
        // A rank's own error says most to it; the others learn whose it is.
        let Own { gpu, place, signals, .. } = own?;
        let cards = read(&all, &self.numbers())?;
        self.together(deadline, self.peers_problem(&gpu, &cards))?;
        let threads = cards.iter().all(|c| c.process == cards[0].process);
        let board = self.open_board(spec, &gpu, threads, deadline)?;
        let windows = match &place {
            Place::Host(regions) => self.lock(&gpu, regions, deadline)?,
            Place::Device(_) if threads => self.fetch(&gpu, &cards, deadline)?,
            Place::Device(memory) => self.hand_over(&gpu, memory, &cards, deadline)?,
        };
        drop(offer);
        let bytes = windows[self.group.rank()].bytes();
        let words = trial::choose(self, &gpu, &board, signals, deadline)?;
        let link = self
            .beside(&cards)
            .map_or(Ok(None), |beside| board.pacing(beside, self.members).map(Some))
            .and_then(|pacing| {
                self.connect(spec, gpu, (self.by_rank(windows), bulk), (board, pacing, words))
            });
        self.together(deadline, link.as_ref().err().map(|e| e.to_string()))?;
        let link = link?;
        link.try_out(self, bytes, deadline)?;
        Ok(Arc::new(link))
    }

    fn gather(&self, bytes: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let all = self.group.all_gather_within(OP, bytes, deadline);
        all.map_err(|error| self.group.outward(error))
    }

    /// What a rank of all is called.
    pub fn number(&self, rank: usize) -> usize {
        self.all.number(rank)
    }

    /// What the ranks that map each other are called.
    fn numbers(&self) -> Vec<usize> {
        self.members.iter().map(|&member| self.number(member)).collect()
    }

    /// One rank's problem is everyone's error.
    pub fn together(&self, deadline: Deadline, problem: Option<String>) -> Result<()> {
        let note = problem.unwrap_or_default();
        let all = self.gather(note.as_bytes(), deadline)?;
        match all.iter().position(|note| !note.is_empty()) {
            None => Ok(()),
            Some(number) => {
                let rank = self.number(self.members[number]);
                let why = String::from_utf8_lossy(&all[number]);
                Err(unsupported(format!("rank {rank}: {why}")))
            }
        }
    }

    fn by_rank(&self, windows: Vec<Seen>) -> Vec<Option<Seen>> {
        let mut all: Vec<_> = (0..self.all.world()).map(|_| None).collect();
        for (&member, window) in self.members.iter().zip(windows) {
            all[member] = Some(window);
        }
        all
    }

    fn connect(
        &self,
        spec: WindowSpec,
        gpu: Arc<Gpu>,
        (windows, bulk): (Vec<Option<Seen>>, Vec<bool>),
        (board, pacing, words): (Board, Option<Pacing>, Words),
    ) -> Result<NvlinkLink> {
        let watchdog = Watchdog::start(self.all, board, Waits::new(spec.flags, self.streams))
            .map_err(|e| {
                let (code, detail) =
                    (e.raw_os_error().unwrap_or(libc::EAGAIN), "starting a thread".into());
                TransportError::Os { op: OP, peer: None, code, detail }
            })?;
        let shared = watchdog.shared.clone();
        let ring: Arc<dyn Fn() + Send + Sync> = Arc::new(move || shared.ring());
        self.all.health().watch(Arc::downgrade(&ring));
        let bell: Arc<dyn Bell> = Arc::new(Held(ring));
        let (windows, words) = (Buried::new(windows), Buried::new(words));
        let group = self.all.clone();
        Ok(NvlinkLink { group, spec, gpu, windows, bulk, watchdog, words, pacing, _bell: bell })
    }

    /// Which ranks are on this rank's GPU, by rank of all; `None` if it has that to itself.
    fn beside(&self, cards: &[Card]) -> Option<Vec<Beside>> {
        let near = beside(self.group.rank(), cards)?;
        let mut all = vec![Beside::No; self.all.world()];
        self.members.iter().zip(near).for_each(|(&member, beside)| all[member] = beside);
        Some(all)
    }

    /// Why this rank's GPU cannot reach another's, as far as the driver says before anything is mapped.
    fn peers_problem(&self, gpu: &Gpu, cards: &[Card]) -> Option<String> {
        self.members.iter().zip(cards).find_map(|(&peer, card)| {
            // Windows that are not offered are not on GPUs.
            if card.uuid == gpu.uuid || card.key == 0 {
                return None;
            }
            // A GPU that this process does not see is tried by mapping its window.
            let device = gpu.visible(&card.uuid)?;
            let mut can = 0;
            // SAFETY: `can` is valid for the call.
            let code = unsafe { (gpu.driver.can_access_peer)(&mut can, gpu.device, device) };
            let [own, peer] = [self.all.rank(), peer].map(|rank| self.number(rank));
            (code != 0 || can == 0).then(|| no_peer_access(own, peer, code))
        })
    }

    fn open_board(
        &self,
        spec: WindowSpec,
        gpu: &Arc<Gpu>,
        threads: bool,
        deadline: Deadline,
    ) -> Result<Board> {
        let map = Map::new(spec.flags, self.all.world(), self.streams);
        let link = self.share_boards(shared_spec(map), threads, deadline)?;
        let board = Board::new(gpu, link, map, (self.all.rank(), self.members));
        self.together(deadline, board.as_ref().err().map(|e| e.to_string()))?;
        board
    }

    fn share_boards(
        &self,
        spec: WindowSpec,
        threads: bool,
        deadline: Deadline,
    ) -> Result<Arc<HostLink>> {
        let link = match threads {
            true => ThreadTransport::new().open_host(self.group, spec, deadline),
            false => ProcessTransport::new().open_host(self.group, spec, deadline),
        };
        link.map_err(|error| self.group.outward(error))
    }

    /// Everyone's memory, by descriptors.
    fn swap<S: Shared>(&self, own: Result<S>, deadline: Deadline) -> Result<Vec<S::Mapped>> {
        share(self.group, own, deadline).map_err(|error| self.group.outward(error))
    }

    /// Windows in memory of the host.
    fn lock(
        &self,
        gpu: &Arc<Gpu>,
        regions: &[Arc<dyn Region>],
        deadline: Deadline,
    ) -> Result<Vec<Seen>> {
        let one = |region: &Arc<dyn Region>| {
            let bytes = region.bytes();
            Ok(Seen::Host(Registered::new(gpu, region.clone(), bytes)?, bytes))
        };
        let windows = regions.iter().map(one).collect::<Result<Vec<_>>>();
        self.together(deadline, windows.as_ref().err().map(|e| e.to_string()))?;
        windows
    }

    /// The windows of ranks that are threads of this process.
    fn fetch(&self, gpu: &Arc<Gpu>, cards: &[Card], deadline: Deadline) -> Result<Vec<Seen>> {
        let one = |(&peer, card): (&usize, &Card)| {
            let offered = OFFERED.lock().get(&card.key).cloned();
            let peer = self.number(peer);
            let Some(memory) = offered else {
                let detail = "it gave up while windows were exchanged".into();
                return Err(TransportError::PeerLost { op: OP, peer, detail });
            };
            Mapped::new(gpu, &memory).map(Seen::Device).map_err(|e| refused(peer, &e))
        };
        let windows = self.members.iter().zip(cards).map(one).collect::<Result<Vec<_>>>();
        // Nobody takes an offer back before everyone has fetched it.
        self.together(deadline, windows.as_ref().err().map(|e| e.to_string()))?;
        windows
    }

    /// The windows of ranks that are processes.
    fn hand_over(
        &self,
        gpu: &Arc<Gpu>,
        memory: &Arc<Allocation>,
        cards: &[Card],
        deadline: Deadline,
    ) -> Result<Vec<Seen>> {
        let seen = |mapped: Vec<Mapped>| mapped.into_iter().map(Seen::Device).collect();
        let numbers = self.numbers();
        if by_fabric(cards, &numbers)? {
            let one = |(&peer, card): (&usize, &Card)| {
                let theirs = match peer == self.all.rank() {
                    true => Ok(memory.clone()),
                    false => memory.import_fabric(&card.fabric),
                };
                let mapped = theirs.and_then(|memory| Mapped::new(gpu, &memory));
                mapped.map_err(|e| refused(self.number(peer), &e))
            };
            let windows = self.members.iter().zip(cards).map(one).collect::<Result<Vec<_>>>();
            // Nobody takes memory back before everyone has it, and all go the same way.
            match self.together(deadline, windows.as_ref().err().map(|e| e.to_string())) {
                Ok(()) => return windows.map(seen),
                Err(why) if why.kind() != crate::ErrorKind::Unsupported => return Err(why),
                Err(why) if cards.iter().any(|card| card.fabric_only) => return Err(why),
                Err(why) => tracing::debug!(%why, "windows are handed over as descriptors instead"),
            }
        }
        let window = Window::new(gpu, memory.clone(), &numbers);
        self.swap(window, deadline).map(seen)
    }
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
fn read(all: &[Vec<u8>], numbers: &[usize]) -> Result<Vec<Card>> {
    let mut cards: Vec<Card> = Vec::with_capacity(all.len());
    for (rank, bytes) in numbers.iter().zip(all) {
        let card = postcard::from_bytes(bytes)
            .map_err(|_| unsupported(format!("rank {rank} sent no card of this library")))?;
        cards.push(card);
    }
    for (rank, card) in numbers.iter().zip(&cards) {
        if let Some(problem) = &card.problem {
            return Err(unsupported(format!("rank {rank} has no window: {problem}")));
        }
        let first = &cards[0].host;
        if card.host.boot != first.boot || card.host.network != first.network {
            return Err(unsupported(format!(
                "rank {rank} is not on rank {}'s host (or in another network namespace): split the \
                 group by host, or use a transport that crosses hosts, such as nccl or rdma",
                numbers[0]
            )));
        }
    }
    Ok(cards)
}

fn no_peer_access(rank: usize, peer: usize, code: i32) -> String {
    format!(
        "the GPU of rank {rank} has no peer access to that of rank {peer} (code {code}): they share \
         neither NVLink nor a PCIe switch that allows it; use a transport that does not map peers, \
         such as nccl"
    )
}

/// Whether windows are handed over by fabric handles: the same answer on every rank.
fn by_fabric(cards: &[Card], numbers: &[usize]) -> Result<bool> {
    let lacks = cards.iter().position(|card| card.fabric.is_empty());
    let needs = cards.iter().position(|card| card.fabric_only);
    match (lacks, needs) {
        (None, _) => Ok(true),
        (Some(_), None) => Ok(false),
        (Some(lacks), Some(needs)) => Err(unsupported(format!(
            "rank {} hands its window over by a fabric handle only, rank {} has none",
            numbers[needs], numbers[lacks]
        ))),
    }
}

#[cfg(test)]
mod tests;
