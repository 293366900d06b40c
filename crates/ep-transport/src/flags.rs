//! Binary flags in shared host memory, and the parking of those who wait for them.

use std::time::{Duration, Instant};

use crate::health::Health;
use crate::sync::{LINE, Ordering, Words};
use crate::{Deadline, Result, TransportError};

/// Bit of the doorbell that says a waiter sleeps; the count of rings starts above it.
const SLEEPING: u32 = 1;
const RING: u32 = 2;

/// How long a wait polls without giving up its core, where every rank can have one.
const SPIN: Duration = Duration::from_micros(20);
/// How long it then offers its core to others between polls.
const YIELD: Duration = Duration::from_micros(80);
/// How many times a wait offers its core where ranks outnumber cores.
const OFFERS: u32 = 2;
/// A sleeper looks around this often even if nobody rings: a safety net, since news about peers
/// ring too.
const SLICE: Duration = Duration::from_millis(50);
/// With several peers absent one of them may be the cause of all: those who wait for that one
/// alone give up first and say so, and the others listen for this long.
const GRACE: Duration = Duration::from_millis(50);

/// The flags of one rank: one per (flag, source rank), and a doorbell to sleep on.
///
/// # Memory order
/// * Payload: a source stores 1 with Release after its payload; the owner reads 1 with Acquire.
/// * Reset: a Relaxed store of 0. The source sets the flag again only after it has acquired a later
///   Release of the owner (the protocol's flags close in pairs), so the reset cannot overtake it.
/// * Sleep: one word, `doorbell`, carries a count of rings and the bit `SLEEPING`. A waiter sets
///   the bit (Acquire), looks at its flags, then sleeps if the doorbell is still what it saw. A
///   source sets its flag, then adds to the doorbell (Release). Both are read-modify-writes of one
///   word, hence ordered: if the waiter's came later, it acquired the flag and sees it; if
///   earlier, the source saw the bit and wakes everyone after it has changed the word, on which
///   the futex compares under its own lock. (2³¹ rings within one such interval would look like
///   none.)
#[derive(Clone, Debug)]
pub struct FlagBoard {
    words: Words,
    world: usize,
    flags: u32,
    spin: bool,
}

impl FlagBoard {
    /// The bytes a board takes; none if that overflows.
    pub fn bytes(world: usize, flags: u32) -> Option<usize> {
        words(world, flags)?.checked_mul(LINE)
    }

    /// The board that starts `offset` bytes into `region`, zeroed before any rank used it.
    ///
    /// # Errors
    /// An argument error if it does not fit there or is not aligned to 64 bytes.
    #[cfg(not(loom))]
    pub fn over(
        region: std::sync::Arc<dyn crate::host_link::Region>,
        offset: usize,
        world: usize,
        flags: u32,
    ) -> Result<Self> {
        let words = words(world, flags).and_then(|count| Words::new(region, offset, count));
        let words = words.ok_or_else(|| TransportError::Argument {
            op: "flags",
            detail: format!(
                "{flags} flags of {world} ranks do not fit at offset {offset} of the region"
            ),
        })?;
        Ok(Self { words, world, flags, spin: world <= cores() })
    }

    /// A board of loom's atomics.
    #[cfg(loom)]
    pub fn model(world: usize, flags: u32) -> Self {
        let words = Words::model(words(world, flags).expect("a small model"));
        Self { words, world, flags, spin: false }
    }

    /// How many flags there are per source.
    pub fn flags(&self) -> u32 {
        self.flags
    }

    /// Sets flag `flag` of `source`, after all this thread has stored and read, and wakes the owner.
    ///
    /// # Panics
    /// If there is no such flag or source.
    pub fn set(&self, flag: u32, source: usize) {
        self.publish(flag, source, Ordering::Release, Ordering::Release);
    }

    fn publish(&self, flag: u32, source: usize, set: Ordering, ring: Ordering) {
        self.words.get(self.index(flag, source)).store(1, set);
        self.ring_with(ring);
    }

    /// [`FlagBoard::set`] with other orders, for models that must fail.
    #[cfg(loom)]
    pub fn set_with(&self, flag: u32, source: usize, set: Ordering, ring: Ordering) {
        self.publish(flag, source, set, ring);
    }

    /// Makes whoever waits on this board look around.
    pub fn ring(&self) {
        self.ring_with(Ordering::Release);
    }

    fn ring_with(&self, order: Ordering) {
        let bell = self.words.get(0);
        if bell.fetch_add(RING, order) & SLEEPING != 0 {
            bell.fetch_and(!SLEEPING, Ordering::Relaxed);
            self.words.unpark();
        }
    }

    /// Whether the flag is set, without resetting it.
    pub fn is_set(&self, flag: u32, source: usize) -> bool {
        self.words.get(self.index(flag, source)).load(Ordering::Acquire) == 1
    }

    /// Resets the flag; whether it was set. For the owner only.
    pub fn take(&self, flag: u32, source: usize) -> bool {
        self.consume(flag, source, Ordering::Acquire)
    }

    /// [`FlagBoard::take`] with another order, for models that must fail.
    #[cfg(loom)]
    pub fn take_with(&self, flag: u32, source: usize, order: Ordering) -> bool {
        self.consume(flag, source, order)
    }

    fn consume(&self, flag: u32, source: usize, order: Ordering) -> bool {
        let word = self.words.get(self.index(flag, source));
        let set = word.load(order) == 1;
        if set {
            word.store(0, Ordering::Relaxed);
        }
        set
    }

    /// Waits until flag `flag` of every source in `peers` has been set, resetting each as it is
    /// seen: at first polling, then asleep. Does not allocate unless it fails, in worlds of up to
    /// 1024 ranks.
    ///
    /// # Errors
    /// See [`Link::wait`](crate::Link::wait). Flags already seen stay reset.
    pub fn wait_all(
        &self,
        op: &'static str,
        flag: u32,
        peers: &[usize],
        deadline: Deadline,
        health: &Health,
    ) -> Result<()> {
        self.wait_until(op, flag, peers, deadline, health, || false)
    }

    /// [`FlagBoard::wait_all`] where flags of a peer that has left may still be on their way: before
    /// bad news are believed, `settle` says whether it has waited for more to arrive.
    pub(crate) fn wait_until(
        &self,
        op: &'static str,
        flag: u32,
        peers: &[usize],
        deadline: Deadline,
        health: &Health,
        mut settle: impl FnMut() -> bool,
    ) -> Result<()> {
        let mut small = [0; SMALL / 64];
        let mut large = Vec::new();
        let mut absent = Absent::of(peers, self.world, &mut small, &mut large);
        if self.collect(flag, &mut absent) || self.linger(flag, &mut absent, deadline) {
            return Ok(());
        }
        let mut until = deadline;
        let mut grace = GRACE.min(deadline.length() / 8);
        loop {
            let bell = self.words.get(0);
            let seen = bell.fetch_or(SLEEPING, Ordering::Acquire) | SLEEPING;
            if self.collect(flag, &mut absent) {
                return Ok(());
            }
            // A flag that is set wins over bad news: look again after hearing it, until nothing new
            // arrives. Whoever left had set its flags before.
            while let Err(news) = health.check_waiting_on(op, absent.iter()) {
                let before = absent.count;
                if self.collect(flag, &mut absent) {
                    return Ok(());
                }
                if absent.count == before && !settle() {
                    return Err(news);
                }
            }
            if until.expired() {
                if absent.count == 1 || grace.is_zero() {
                    return Err(timeout(op, &absent, deadline));
                }
                until = Deadline::after(std::mem::take(&mut grace));
                continue;
            }
            self.words.park(seen, until.remaining().min(SLICE));
            if self.offer(flag, &mut absent) {
                return Ok(());
            }
        }
    }

    /// Polls for a while before the caller goes to sleep; whether all have arrived.
    fn linger(&self, flag: u32, absent: &mut Absent<'_>, deadline: Deadline) -> bool {
        if !self.spin {
            return self.offer(flag, absent);
        }
        let start = Instant::now();
        let bound = (SPIN + YIELD).min(deadline.remaining());
        loop {
            let passed = start.elapsed();
            if passed >= bound {
                return false;
            }
            if passed >= SPIN {
                std::thread::yield_now();
            }
            for _ in 0..16 {
                if self.collect(flag, absent) {
                    return true;
                }
                std::hint::spin_loop();
            }
        }
    }

    /// Lets others run first, so that one sleep covers many arrivals; whether all have arrived.
    fn offer(&self, flag: u32, absent: &mut Absent<'_>) -> bool {
        if cfg!(loom) || self.spin {
            return false;
        }
        (0..OFFERS).any(|_| {
            std::thread::yield_now();
            self.collect(flag, absent)
        })
    }

    /// Takes the flags that are set; whether none is absent any more.
    fn collect(&self, flag: u32, absent: &mut Absent<'_>) -> bool {
        absent.retain(|source| !self.take(flag, source));
        absent.count == 0
    }

    fn index(&self, flag: u32, source: usize) -> usize {
        assert!(flag < self.flags && source < self.world, "flag {flag} of rank {source}");
        1 + flag as usize * self.world + source
    }
}

fn words(world: usize, flags: u32) -> Option<usize> {
    world.checked_mul(usize::try_from(flags).ok()?)?.checked_add(1)
}

#[cfg(not(loom))]
fn cores() -> usize {
    static CORES: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

fn timeout(op: &'static str, absent: &Absent<'_>, deadline: Deadline) -> TransportError {
    let (peers, after) = (absent.iter().collect(), deadline.length());
    TransportError::Timeout { op, peers, after, hint: String::new() }
}

/// Worlds up to this size keep the set of absent ranks on the stack.
const SMALL: usize = 1024;

/// The ranks a wait still misses, as a bit set.
struct Absent<'a> {
    bits: &'a mut [u64],
    count: usize,
}

impl<'a> Absent<'a> {
    fn of(
        peers: &[usize],
        world: usize,
        small: &'a mut [u64; SMALL / 64],
        large: &'a mut Vec<u64>,
    ) -> Self {
        let len = world.div_ceil(64);
        let bits = if world <= SMALL {
            &mut small[..len]
        } else {
            large.resize(len, 0);
            &mut large[..]
        };
        for &peer in peers {
            assert!(peer < world, "rank {peer} of {world}");
            bits[peer / 64] |= 1 << (peer % 64);
        }
        let count = bits.iter().map(|word| word.count_ones() as usize).sum();
        Self { bits, count }
    }

    fn retain(&mut self, keep: impl Fn(usize) -> bool) {
        for (index, word) in self.bits.iter_mut().enumerate() {
            for bit in ones(*word) {
                if !keep(index * 64 + bit) {
                    *word &= !(1 << bit);
                    self.count -= 1;
                }
            }
        }
    }

    fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.bits.iter().enumerate().flat_map(|(i, &word)| ones(word).map(move |bit| i * 64 + bit))
    }
}

fn ones(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = word.trailing_zeros() as usize;
        word &= word.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}
