//! Flags in host memory that all ranks of a host and all their GPUs see.
//!
//! A rank's board, in one page-locked piece of shared memory: a cache line per (flag, source), in which
//! the flag, a `u32`, is followed by another that says that a stream waits for it, so that one write of
//! eight bytes ends both; then the sticky word of [`StreamSide`]; then a `u32` per source for the trial
//! at start-up; then the words of [`Pacing`], which are for hosts only. Streams write and await words as
//! [`super::words`] does, hosts by atomics.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;

use super::driver::{Gpu, OP};
use super::graveyard::Buried;
use crate::{Beside, HostLink, Pacing, Region, Result, StreamSide, WindowSpec};

const LINE: usize = StreamSide::AWAITED_STRIDE as usize;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`.
const PORTABLE_MAPPED: u32 = 1 | 2;

/// Where things are on a board.
#[derive(Clone, Copy, Debug)]
pub(super) struct Map {
    flags: u32,
    world: usize,
    /// Streams whose orders a bridge takes.
    streams: usize,
}

impl Map {
    pub fn new(flags: u32, world: usize, streams: usize) -> Self {
        Self { flags, world, streams }
    }

    fn flag(&self, flag: u32, source: usize) -> usize {
        (flag as usize * self.world + source) * LINE
    }

    fn awaited(&self, flag: u32, source: usize) -> usize {
        self.flag(flag, source) + 4
    }

    fn poisoned(&self) -> usize {
        self.flag(self.flags, 0)
    }

    /// The word that `source` writes here to see whether words arrive.
    fn trial(&self, source: usize) -> usize {
        self.poisoned() + LINE + source * LINE
    }

    fn pacing(&self) -> usize {
        self.trial(self.world)
    }

    /// Where streams tell that an exchange of a number is under way; behind it, that one has ended.
    fn exchanging(&self, number: u32) -> usize {
        let pacing = Pacing::bytes(self.flags, self.world).next_multiple_of(LINE);
        self.pacing() + pacing + number as usize * LINE
    }

    /// Where a stream tells up to which of its orders it has come.
    fn doorbell(&self, stream: usize) -> usize {
        self.exchanging(self.flags) + 2 * stream * LINE
    }

    /// What a stream awaits until the sources of its puts are free; behind it, what says that it does.
    fn flushed(&self, stream: usize) -> usize {
        self.doorbell(stream) + LINE
    }

    pub fn bytes(&self) -> usize {
        self.doorbell(self.streams)
    }
}

/// Bytes of the page-locked memory that a rank's board is in, of `world` ranks of which `near` map each
/// other, with so many streams whose orders a bridge takes.
pub(crate) fn bytes(flags: u32, world: usize, near: usize, streams: usize) -> Result<usize> {
    let map = Map::new(flags, world, streams);
    HostLink::region_bytes(shared_spec(map), near)
}

/// What is shared so that boards fit.
pub(super) fn shared_spec(map: Map) -> WindowSpec {
    WindowSpec { bytes: map.bytes().next_multiple_of(4096), flags: 1 }
}

/// Page-locked memory that the GPUs of this process see.
#[derive(Debug)]
pub(super) struct Registered {
    /// Its first byte as GPUs see it.
    pub device: u64,
    /// Words of a test are not locked.
    _locked: Option<Buried<Locked>>,
}

/// What has to be unlocked before it is unmapped.
#[derive(Debug)]
struct Locked {
    gpu: Arc<Gpu>,
    region: Arc<dyn Region>,
}

impl Registered {
    /// Locks the first `bytes` of a region. Threads of one process that share memory share its
    /// registration.
    pub fn new(gpu: &Arc<Gpu>, region: Arc<dyn Region>, bytes: usize) -> Result<Arc<Self>> {
        static ALL: LazyLock<Mutex<HashMap<usize, Weak<Registered>>>> =
            LazyLock::new(Mutex::default);
        let at = region.base().as_ptr().cast::<c_void>();
        let mut all = ALL.lock();
        if let Some(known) = all.get(&(at as usize)).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let _current = gpu.current(OP)?;
        let (driver, mut device) = (gpu.driver, 0);
        // SAFETY: the range is mapped for as long as the value below holds the region.
        let code = unsafe { (driver.host_register)(at, bytes, PORTABLE_MAPPED) };
        gpu.check(OP, "cuMemHostRegister", code)?;
        let locked = Buried::new(Locked { gpu: gpu.clone(), region });
        // SAFETY: just registered as mapped.
        let code = unsafe { (driver.host_pointer)(&mut device, at, 0) };
        gpu.check(OP, "cuMemHostGetDevicePointer", code)?;
        let registered = Arc::new(Self { device, _locked: Some(locked) });
        all.retain(|_, known| known.strong_count() > 0);
        all.insert(at as usize, Arc::downgrade(&registered));
        Ok(registered)
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let Ok(_current) = self.gpu.current("close") else { return };
        let at = self.region.base().as_ptr().cast::<c_void>();
        // SAFETY: registered by `new`; streams that used it have ended, by the contract of a link.
        let code = unsafe { (self.gpu.driver.host_unregister)(at) };
        if code != 0 {
            tracing::warn!(code, "cuMemHostUnregister failed");
        }
    }
}

/// The boards of the ranks that map each other, as one of them sees them, with flags of all ranks.
#[derive(Clone, Debug)]
pub(crate) struct Board {
    map: Map,
    rank: usize,
    /// By rank: where the board is for the host and for GPUs.
    boards: Arc<Vec<Option<OneBoard>>>,
    /// Of those that map each other.
    shared: Arc<HostLink>,
}

#[derive(Debug)]
struct OneBoard {
    at: usize,
    registered: Arc<Registered>,
}

impl Board {
    /// Over the windows of a host link of `members`, each at least `map.bytes()` long.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        shared: Arc<HostLink>,
        map: Map,
        (rank, members): (usize, &[usize]),
    ) -> Result<Self> {
        const PAGE: usize = 4096;
        let mut boards: Vec<Option<OneBoard>> = (0..map.world).map(|_| None).collect();
        for (number, &member) in members.iter().enumerate() {
            let region = shared.region(number);
            let at = region.base().as_ptr() as usize;
            let bytes = map.bytes().next_multiple_of(PAGE);
            let registered = Registered::new(gpu, region, bytes)?;
            boards[member] = Some(OneBoard { at, registered });
        }
        Ok(Self { map, rank, boards: Arc::new(boards), shared })
    }

    pub fn flags(&self) -> u32 {
        self.map.flags
    }

    /// How many streams there may be whose orders a bridge takes.
    pub fn streams(&self) -> usize {
        self.map.streams
    }

    /// The counts by which waits stay behind signals, with where each rank is.
    pub fn pacing(&self, beside: Vec<Beside>, members: &[usize]) -> Result<Pacing> {
        let (at, flags) = (self.map.pacing(), self.map.flags);
        Pacing::among(self.shared.clone(), at, self.rank, flags, (beside, members))
    }

    /// Of a rank that maps this one: others are told by a bridge.
    fn of(&self, rank: usize) -> &OneBoard {
        self.boards[rank].as_ref().expect("a rank of this node")
    }

    fn device(&self, rank: usize) -> u64 {
        self.of(rank).registered.device
    }

    fn word(&self, rank: usize, offset: usize) -> &AtomicU32 {
        let at = self.of(rank).at + offset;
        // SAFETY: an aligned word of a board that stays mapped while `self` lives; all who access
        // it do so atomically.
        unsafe { AtomicU32::from_ptr(at as *mut u32) }
    }

    /// The flag that this rank raises at `peer`, as GPUs see it.
    pub fn theirs(&self, peer: usize, flag: u32) -> u64 {
        self.device(peer) + self.map.flag(flag, self.rank) as u64
    }

    /// The flag that `source` raises here, as GPUs see it.
    pub fn ours(&self, source: usize, flag: u32) -> u64 {
        self.device(self.rank) + self.map.flag(flag, source) as u64
    }

    /// The word of the trial that this rank writes at `peer`, as GPUs see it.
    pub fn their_trial(&self, peer: usize) -> u64 {
        self.device(peer) + self.map.trial(self.rank) as u64
    }

    /// The word of the trial that `source` writes here, as GPUs see it.
    pub fn our_trial(&self, source: usize) -> u64 {
        self.device(self.rank) + self.map.trial(source) as u64
    }

    pub fn tried(&self, source: usize) -> bool {
        self.word(self.rank, self.map.trial(source)).load(Ordering::Acquire) == 1
    }

    /// Lets go of a stream that awaits the words of the trial, or clears them.
    pub fn set_trial(&self, value: u32) {
        for source in 0..self.map.world {
            self.word(self.rank, self.map.trial(source)).store(value, Ordering::Release);
        }
    }

    pub fn set(&self, peer: usize, flag: u32) {
        // Release: what this thread did before is seen by who sees the flag.
        self.word(peer, self.map.flag(flag, self.rank)).store(1, Ordering::Release);
    }

    /// Raises a flag here for a source that cannot.
    #[cfg(feature = "rdma")]
    pub fn raise(&self, flag: u32, source: usize) {
        // Release: as `set`.
        self.word(self.rank, self.map.flag(flag, source)).store(1, Ordering::Release);
    }

    /// The word by which a stream tells how far it has come, as GPUs see it.
    #[cfg(feature = "rdma")]
    pub fn doorbell_word(&self, stream: usize) -> u64 {
        self.device(self.rank) + self.map.doorbell(stream) as u64
    }

    /// Acquire: whoever sees how far a stream has come sees what it did before.
    #[cfg(feature = "rdma")]
    pub fn doorbell(&self, stream: usize) -> u32 {
        self.word(self.rank, self.map.doorbell(stream)).load(Ordering::Acquire)
    }

    /// The word that a stream awaits until its sources are free, as GPUs see it.
    #[cfg(feature = "rdma")]
    pub fn flushed_word(&self, stream: usize) -> u64 {
        self.device(self.rank) + self.map.flushed(stream) as u64
    }

    #[cfg(feature = "rdma")]
    pub fn is_flushed(&self, stream: usize) -> bool {
        self.word(self.rank, self.map.flushed(stream)).load(Ordering::Acquire) != 0
    }

    /// Lets a stream that awaits that its sources are free go on.
    pub fn set_flushed(&self, stream: usize) {
        self.word(self.rank, self.map.flushed(stream)).store(1, Ordering::Release);
    }

    pub fn is_set(&self, flag: u32, source: usize) -> bool {
        self.word(self.rank, self.map.flag(flag, source)).load(Ordering::Acquire) != 0
    }

    pub fn reset(&self, flag: u32, source: usize) {
        self.word(self.rank, self.map.flag(flag, source)).store(0, Ordering::Relaxed);
    }

    /// The sources whose flag a stream waits for and that have not raised it, with the numbers that
    /// the waits were marked with.
    pub fn absent(&self, flag: u32) -> Vec<(usize, u32)> {
        let mark =
            |source| self.word(self.rank, self.map.awaited(flag, source)).load(Ordering::Relaxed);
        (0..self.map.world)
            .map(|source| (source, mark(source)))
            .filter(|&(source, mark)| mark != 0 && !self.is_set(flag, source))
            .collect()
    }

    /// What marks the wait of a stream that awaits that its sources are free, while it does.
    pub fn unflushed(&self, stream: usize) -> Option<u32> {
        let word = |offset| self.word(self.rank, self.map.flushed(stream) + offset);
        let mark = word(4).load(Ordering::Relaxed);
        (mark != 0 && word(0).load(Ordering::Acquire) == 0).then_some(mark)
    }

    /// Whether a stream is seen waiting for something.
    pub fn is_awaited(&self) -> bool {
        (0..self.map.flags).any(|flag| !self.absent(flag).is_empty())
            || (0..self.map.streams).any(|stream| self.unflushed(stream).is_some())
    }

    /// The word of [`Board::exchanging`], as GPUs see it.
    #[cfg(feature = "nccl")]
    pub fn exchanging_word(&self, number: u32) -> u64 {
        self.device(self.rank) + self.map.exchanging(number) as u64
    }

    /// Whether an exchange of a number is under way on a stream of this rank: not 0 from its begin on.
    #[cfg(feature = "nccl")]
    pub fn exchanging(&self, number: u32) -> bool {
        self.word(self.rank, self.map.exchanging(number)).load(Ordering::Relaxed) != 0
    }

    /// Whether an exchange of a number has ended since this was asked last: each resets the word behind
    /// that of [`Board::exchanging`].
    #[cfg(feature = "nccl")]
    pub fn exchanged(&self, number: u32) -> bool {
        self.word(self.rank, self.map.exchanging(number) + 4).swap(1, Ordering::Relaxed) == 0
    }

    pub fn poison(&self) {
        // Release: before any flag that is raised to release a stream.
        self.word(self.rank, self.map.poisoned()).store(1, Ordering::Release);
    }

    pub fn is_poisoned(&self) -> bool {
        self.word(self.rank, self.map.poisoned()).load(Ordering::Acquire) != 0
    }

    /// Raises all flags here and says that sources are free, so that streams get past their waits.
    pub fn release(&self) {
        for flag in 0..self.map.flags {
            for source in 0..self.map.world {
                self.word(self.rank, self.map.flag(flag, source)).store(1, Ordering::Release);
            }
        }
        (0..self.map.streams).for_each(|stream| self.set_flushed(stream));
    }

    pub fn side(&self) -> StreamSide {
        let device = self.device(self.rank);
        StreamSide {
            poisoned: device + self.map.poisoned() as u64,
            awaited: device + self.map.awaited(0, 0) as u64,
        }
    }
}

/// Of a rank that is alone and has no GPU: a test writes what streams would.
#[cfg(test)]
impl Board {
    pub fn alone(flags: u32, streams: usize) -> Self {
        let map = Map::new(flags, 1, streams);
        let group = crate::Group::local(1).unwrap().remove(0);
        let deadline = crate::Deadline::after(crate::DEFAULT_TIMEOUT);
        let shared = crate::ThreadTransport::new().open_host(&group, shared_spec(map), deadline);
        let shared = shared.unwrap();
        let at = shared.region(0).base().as_ptr() as usize;
        let registered = Arc::new(Registered { device: at as u64, _locked: None });
        Self { map, rank: 0, boards: Arc::new(vec![Some(OneBoard { at, registered })]), shared }
    }

    /// Writes a word by the address that GPUs have of it.
    pub fn write(&self, address: u64, value: u32) {
        let offset = address - self.device(self.rank);
        assert!((offset as usize) < self.map.bytes());
        self.word(self.rank, offset as usize).store(value, Ordering::Release);
    }

    /// The word of a stream that awaits that its sources are free.
    pub fn flush_of(&self, stream: usize) -> u64 {
        self.device(self.rank) + self.map.flushed(stream) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that waits is seen waiting until it is let go, whatever it waits for.
    #[test]
    fn all_that_streams_wait_for_is_released() {
        let board = Board::alone(3, 4);
        assert!(!board.is_awaited());
        let flags: Vec<u64> = (0..3).map(|flag| board.ours(0, flag)).collect();
        let flushes: Vec<u64> = (0..4).map(|stream| board.flush_of(stream)).collect();
        for &word in flags.iter().chain(&flushes) {
            board.write(word + 4, 6);
            assert!(board.is_awaited());
            board.write(word + 4, 0);
            assert!(!board.is_awaited());
        }
        flags.iter().chain(&flushes).for_each(|&word| board.write(word + 4, 6));
        assert_eq!(board.absent(1), [(0, 6)]);
        assert_eq!(board.unflushed(3), Some(6));
        board.release();
        assert!(!board.is_awaited());
        assert!((0..3).all(|flag| board.is_set(flag, 0)));
        // They have taken note, and wait again.
        flags.iter().chain(&flushes).for_each(|&word| board.write(word, 0));
        assert_eq!((board.absent(2), board.unflushed(0)), (vec![(0, 6)], Some(6)));
        board.set_flushed(0);
        assert_eq!((board.unflushed(0), board.unflushed(1)), (None, Some(6)));
    }

    #[test]
    fn words_of_a_board_are_apart() {
        for (flags, world) in [(1, 1), (4, 2), (6, 7)] {
            let map = Map::new(flags, world, 3);
            let mut words: Vec<(usize, usize)> = (0..flags)
                .flat_map(|f| (0..world).map(move |s| (map.flag(f, s), 4)))
                .chain((0..flags).flat_map(|f| (0..world).map(move |s| (map.awaited(f, s), 4))))
                .chain([(map.poisoned(), 4)])
                .chain((0..world).map(|s| (map.trial(s), 4)))
                .chain([(map.pacing(), Pacing::bytes(flags, world))])
                .chain((0..flags).flat_map(|f| [0, 4].map(|at| (map.exchanging(f) + at, 4))))
                .chain(
                    (0..3)
                        .flat_map(|s| [map.doorbell(s), map.flushed(s), map.flushed(s) + 4])
                        .map(|at| (at, 4)),
                )
                .collect();
            words.sort_unstable();
            assert!(words.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0));
            assert!(words.iter().all(|w| w.0 % w.1.min(8) == 0 && w.0 + w.1 <= map.bytes()));
        }
    }
}
