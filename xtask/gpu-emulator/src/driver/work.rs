//! What streams do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::code::{Code, Result};
use super::context::Core;
use super::graph::Run;
use super::launch::Launched;
use super::memory;
use super::point::Point;

/// Something that a stream does in its turn.
#[derive(Clone)]
pub enum Work {
    /// Nothing; its point is what somebody waits for.
    Mark,
    /// Waits for another stream.
    Await(Arc<Point>),
    Copy {
        to: usize,
        from: usize,
        bytes: usize,
    },
    Set {
        to: usize,
        value: u8,
        bytes: usize,
    },
    /// Words, one after the other.
    Words(Vec<WordOp>),
    Kernel(Arc<Launched>),
    Graph(Arc<Run>),
}

/// What streams, and the kernel that stands in for them, do with a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordOp {
    Write {
        at: usize,
        value: u32,
    },
    Write64 {
        at: usize,
        value: u64,
    },
    /// Waits until the word and the value stand in a relation.
    Wait {
        at: usize,
        value: u32,
        until: Until,
    },
    Wait64 {
        at: usize,
        value: u64,
        until: Until,
    },
}

/// `CUstreamWaitValue_flags`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// `(int)(*at - value) >= 0`
    AtLeast,
    Equal,
    /// `(*at & value) != 0`
    And,
    /// `~(*at | value) != 0`
    Nor,
}

impl Until {
    pub fn new(flags: u32) -> Result<Self> {
        // Flush (1 << 30) orders writes of others, which is so here anyway.
        match flags & !(1 << 30) {
            0 => Ok(Self::AtLeast),
            1 => Ok(Self::Equal),
            2 => Ok(Self::And),
            3 => Ok(Self::Nor),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    pub fn holds(self, seen: u64, value: u64, bits: u32) -> bool {
        let mask = u64::MAX >> (64 - bits);
        match self {
            Self::AtLeast => seen.wrapping_sub(value) & (1 << (bits - 1)) == 0,
            Self::Equal => seen == value,
            Self::And => seen & value != 0,
            Self::Nor => !(seen | value) & mask != 0,
        }
    }
}

impl WordOp {
    /// The word, with its size.
    pub fn word(&self) -> (usize, usize) {
        match *self {
            Self::Write { at, .. } | Self::Wait { at, .. } => (at, 4),
            Self::Write64 { at, .. } | Self::Wait64 { at, .. } => (at, 8),
        }
    }

    /// Waits give up when the context has failed.
    fn run(&self, core: &Core) -> Result<()> {
        let (at, bytes) = self.word();
        memory::check_access(at, bytes, core.device)?;
        // SAFETY: `at` was just checked to be memory that the driver knows, and aligned when submitted;
        // everybody uses such words atomically.
        let narrow = |at: usize| unsafe { AtomicU32::from_ptr(at as *mut u32) };
        // SAFETY: as above.
        let wide = |at: usize| unsafe { AtomicU64::from_ptr(at as *mut u64) };
        match *self {
            Self::Write { at, value } => narrow(at).store(value, Ordering::SeqCst),
            Self::Write64 { at, value } => wide(at).store(value, Ordering::SeqCst),
            Self::Wait { at, value, until } => poll(core, || {
                until.holds(narrow(at).load(Ordering::SeqCst).into(), value.into(), 32)
            }),
            Self::Wait64 { at, value, until } => {
                poll(core, || until.holds(wide(at).load(Ordering::SeqCst), value, 64))
            }
        }
        Ok(())
    }
}

/// Looks until something holds, or the context has failed.
fn poll(core: &Core, holds: impl Fn() -> bool) {
    let mut looks = 0u32;
    while !holds() {
        looks += 1;
        match looks {
            0..50 => std::hint::spin_loop(),
            50..200 => std::thread::yield_now(),
            _ if core.check().is_err() => return,
            200..1000 => std::thread::sleep(Duration::from_micros(20)),
            _ => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}

impl Work {
    /// Does it. What goes wrong fails the context.
    pub fn run(&self, core: &Core) {
        if let Err(code) = self.attempt(core) {
            core.fail(code, &format!("{self:?}: code {}", code.0));
        }
    }

    fn attempt(&self, core: &Core) -> Result<()> {
        match *self {
            Self::Mark => {}
            Self::Await(ref point) => point.wait(),
            Self::Copy { to, from, bytes } => {
                memory::check_access(to, bytes, core.device)?;
                memory::check_access(from, bytes, core.device)?;
                // SAFETY: both ranges are as the caller of the driver promised; checked as far as the
                // driver knows them.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
            }
            Self::Set { to, value, bytes } => {
                memory::check_access(to, bytes, core.device)?;
                match value {
                    0 => memory::zero(to, bytes),
                    // SAFETY: just checked as far as the driver knows the range.
                    value => unsafe { std::ptr::write_bytes(to as *mut u8, value, bytes) },
                }
            }
            Self::Words(ref ops) => ops.iter().try_for_each(|op| op.run(core))?,
            Self::Kernel(ref launched) => launched.run(core),
            Self::Graph(ref run) => run.run(core),
        }
        Ok(())
    }
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mark => write!(f, "a mark"),
            Self::Await(_) => write!(f, "a wait for an event"),
            Self::Copy { to, from, bytes } => {
                write!(f, "a copy of {bytes} bytes, {from:#x} to {to:#x}")
            }
            Self::Set { to, bytes, .. } => write!(f, "a fill of {bytes} bytes at {to:#x}"),
            Self::Words(ops) => write!(f, "{ops:x?}"),
            Self::Kernel(launched) => write!(f, "a launch of {}", launched.name()),
            Self::Graph(_) => write!(f, "a graph"),
        }
    }
}
