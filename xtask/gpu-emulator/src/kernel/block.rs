//! A block that runs: who can go on, who waits, and for what.

use std::fmt::{self, Write as _};

use super::bulk::Bulk;
use super::random::Random;
use super::shared::SharedMemory;
use super::thread::Thread;
use super::warp::{self, Warp};

/// Barriers of a block, as src/shim/cuda.hpp numbers them.
const BARRIERS: [&str; 4] =
    ["__syncthreads", "__syncthreads_or", "__syncthreads_and", "__syncthreads_count"];

/// What a thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// Nothing: it can go on.
    Nothing,
    Block(u32),
    Warp {
        kind: u32,
        mask: u32,
    },
    /// A phase of the mbarrier at an address of shared memory.
    Phase {
        address: u32,
        parity: u32,
    },
    /// An instant of the monotonic clock, ns.
    Until(u64),
    /// It has exited.
    Forever,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Wait::Nothing => f.write_str("runs"),
            Wait::Block(kind) => {
                write!(f, "waits at {}", BARRIERS.get(kind as usize).unwrap_or(&"a barrier"))
            }
            Wait::Warp { kind, mask } => {
                write!(f, "waits at {} with mask {mask:08x}", warp::name(kind))
            }
            Wait::Phase { address, parity } => {
                write!(f, "waits for phase {parity} of the mbarrier at {address:#x}")
            }
            Wait::Until(_) => f.write_str("holds its SM"),
            Wait::Forever => f.write_str("exited"),
        }
    }
}

/// What a thread does after it has asked for something.
pub(super) enum Step {
    /// Goes on, with an answer.
    Go(u64),
    /// Goes on when it is woken, with the answer that it then has.
    Wait(Wait),
    /// Asks again when it is woken.
    Again(Wait),
    /// It did what no kernel may do.
    Fault(String),
}

/// What is the same for all blocks of a launch.
#[derive(Debug)]
pub(super) struct Surroundings {
    pub sms: Vec<u32>,
    pub sm_count: u32,
    pub cluster: u32,
}

/// The threads that have come to the block's barrier.
#[derive(Debug, Default)]
struct Barrier {
    kind: u32,
    arrived: u32,
    set: u32,
}

/// A block that runs.
#[derive(Debug)]
pub(super) struct Block {
    /// Linear number in the grid.
    pub index: u32,
    pub shared: SharedMemory,
    pub random: Random,
    pub bulk: Bulk,
    pub fault: Option<String>,
    /// Threads that have not exited.
    pub alive: u32,
    threads: Vec<*mut Thread>,
    waits: Vec<Wait>,
    values: Vec<u64>,
    arguments: Vec<u32>,
    warps: Vec<Warp>,
    /// Warps with a lane that can go on.
    ready: u32,
    /// The warp that goes on, mostly.
    current: u32,
    barrier: Barrier,
    /// Threads that wait for the clock.
    sleeping: Vec<u32>,
    around: *const Surroundings,
}

impl Block {
    /// A block all threads of which can start; `around` outlives it.
    pub(super) fn new(
        index: u32,
        threads: Vec<*mut Thread>,
        shared: SharedMemory,
        random: Random,
        around: *const Surroundings,
    ) -> Block {
        let count = threads.len();
        let lanes = |warp: usize| match count - 32 * warp {
            full if full >= 32 => u32::MAX,
            some => (1 << some) - 1,
        };
        let new = |warp| Warp { alive: lanes(warp), ready: lanes(warp), groups: Vec::new() };
        let warps: Vec<Warp> = (0..count.div_ceil(32)).map(new).collect();
        Block {
            index,
            shared,
            random,
            bulk: Bulk::new(count),
            fault: None,
            alive: count as u32,
            waits: vec![Wait::Nothing; count],
            values: vec![0; warps.len() * 32],
            arguments: vec![0; count],
            ready: u32::MAX >> (32 - warps.len()),
            threads,
            warps,
            current: 0,
            barrier: Barrier::default(),
            sleeping: Vec::new(),
            around,
        }
    }

    /// The thread that goes on next, if one can.
    pub(super) fn next(&mut self) -> Option<u32> {
        if self.ready == 0 {
            return None;
        }
        if self.ready >> self.current & 1 == 0 || self.random.once_in(16) {
            self.current = self.random.bit(self.ready);
        }
        Some(32 * self.current + self.random.bit(self.warps[self.current as usize].ready))
    }

    /// Where thread `me` has its control block.
    pub(super) fn thread(&self, me: u32) -> *mut Thread {
        self.threads[me as usize]
    }

    /// Whether a thread can go on.
    pub(super) fn can_go_on(&self) -> bool {
        self.ready != 0
    }

    /// The first instant that a thread waits for.
    pub(super) fn wakes_at(&self) -> Option<u64> {
        let instant = |&me: &u32| match self.waits[me as usize] {
            Wait::Until(instant) => Some(instant),
            _ => None,
        };
        self.sleeping.iter().filter_map(instant).min()
    }

    /// Wakes threads that wait for an instant up to `now`.
    pub(super) fn wake_until(&mut self, now: u64) {
        for me in std::mem::take(&mut self.sleeping) {
            match self.waits[me as usize] {
                Wait::Until(instant) if instant <= now => self.wake(me, 0),
                _ => self.sleeping.push(me),
            }
        }
    }

    /// Thread `me` waits from now on.
    pub(super) fn wait(&mut self, me: u32, wait: Wait) {
        self.waits[me as usize] = wait;
        if wait == Wait::Nothing {
            return;
        }
        if let Wait::Until(_) = wait {
            self.sleeping.push(me);
        }
        let warp = &mut self.warps[me as usize / 32];
        warp.ready &= !(1 << (me % 32));
        if warp.ready == 0 {
            self.ready &= !(1 << (me / 32));
        }
    }

    /// Thread `me` can go on, with an answer.
    pub(super) fn wake(&mut self, me: u32, answer: u64) {
        self.waits[me as usize] = Wait::Nothing;
        self.warps[me as usize / 32].ready |= 1 << (me % 32);
        self.ready |= 1 << (me / 32);
        // SAFETY: control blocks outlive the block, and nobody else looks at one of a thread that waits.
        unsafe { (*self.threads[me as usize]).answer = answer };
    }

    /// Thread `me` has returned from the kernel; who waited for it alone goes on.
    pub(super) fn exited(&mut self, me: u32) {
        self.wait(me, Wait::Forever);
        self.alive -= 1;
        let number = me as usize / 32;
        self.warps[number].alive &= !(1 << (me % 32));
        while let Some(group) = self.warps[number].completed() {
            self.complete_warp(number, group.kind, group.arrived);
        }
        if self.barrier.arrived > 0 && self.barrier.arrived == self.alive {
            let answer = self.complete_barrier();
            self.wake_all_at_barrier(answer);
        }
    }

    /// `__syncthreads` and its kin.
    pub(super) fn sync(&mut self, me: u32, kind: u32, value: u32) -> Step {
        let barrier = &mut self.barrier;
        if barrier.arrived > 0 && barrier.kind != kind {
            let name = |kind: u32| BARRIERS.get(kind as usize).copied().unwrap_or("unknown");
            return Step::Fault(format!(
                "thread {me} is at {} while others are at {}",
                name(kind),
                name(barrier.kind)
            ));
        }
        barrier.kind = kind;
        barrier.arrived += 1;
        barrier.set += u32::from(value != 0);
        if barrier.arrived < self.alive {
            return Step::Wait(Wait::Block(kind));
        }
        let answer = self.complete_barrier();
        self.wake_all_at_barrier(answer);
        self.go_or_yield(me, answer)
    }

    /// The barrier's answer; it starts anew.
    fn complete_barrier(&mut self) -> u64 {
        let Barrier { kind, arrived, set } = std::mem::take(&mut self.barrier);
        match kind {
            1 => u64::from(set > 0),
            2 => u64::from(set == arrived),
            3 => u64::from(set),
            _ => 0,
        }
    }

    fn wake_all_at_barrier(&mut self, answer: u64) {
        for me in 0..self.threads.len() as u32 {
            if let Wait::Block(_) = self.waits[me as usize] {
                self.wake(me, answer);
            }
        }
    }

    /// What lanes of a warp do together.
    pub(super) fn warp(
        &mut self,
        me: u32,
        kind: u32,
        mask: u32,
        value: u64,
        argument: u32,
    ) -> Step {
        if mask >> (me % 32) & 1 == 0 {
            let name = warp::name(kind);
            return Step::Fault(format!("thread {me} is not in the mask {mask:08x} of its {name}"));
        }
        self.values[me as usize] = value;
        self.arguments[me as usize] = argument;
        let number = me as usize / 32;
        match self.warps[number].arrive(me % 32, kind, mask) {
            None => Step::Wait(Wait::Warp { kind, mask }),
            Some(took) => {
                self.complete_warp(number, kind, took);
                // SAFETY: as in `wake`; this thread's own block is looked at by this thread alone.
                let answer = unsafe { (*self.threads[me as usize]).answer };
                self.go_or_yield(me, answer)
            }
        }
    }

    fn complete_warp(&mut self, number: usize, kind: u32, took: u32) {
        let first = 32 * number;
        let lanes = first..first + 32;
        let common = warp::common(kind, took, &self.values[lanes.clone()]);
        for lane in (0..32).filter(|lane| took >> lane & 1 != 0) {
            let me = first as u32 + lane;
            let answer = common.unwrap_or_else(|| {
                let (values, argument) = (&self.values[lanes.clone()], self.arguments[me as usize]);
                warp::own(kind, lane, took, values, argument)
            });
            self.wake(me, answer);
        }
    }

    /// The last one to come goes on at once, or others do first.
    fn go_or_yield(&mut self, me: u32, answer: u64) -> Step {
        if self.random.once_in(4) {
            // SAFETY: as in `warp`.
            unsafe { (*self.threads[me as usize]).answer = answer };
            return Step::Wait(Wait::Nothing);
        }
        Step::Go(answer)
    }

    /// `%smid` and such, as src/shim/ptx.hpp numbers them.
    pub(super) fn special(&self, which: u32) -> u64 {
        // SAFETY: outlives the block.
        let around = unsafe { &*self.around };
        u64::from(match which {
            1 => around.sms[self.index as usize % around.sms.len()],
            2 => around.sm_count,
            3 => self.index / around.cluster,
            4 => around.cluster,
            _ => self.index % around.cluster,
        })
    }

    /// What every thread waits for, threads that wait alike together.
    pub(super) fn report(&self) -> String {
        let mut text = String::from("no thread can go on:");
        let mut from = 0;
        while from < self.waits.len() {
            let wait = self.waits[from];
            let alike = self.waits[from..].iter().take_while(|other| **other == wait).count();
            let to = from + alike - 1;
            // Writing to a String cannot fail.
            let _ = match alike {
                1 => write!(text, "\n  thread {from} {wait}"),
                _ => write!(text, "\n  threads {from} to {to}: each {wait}"),
            };
            from += alike;
            if text.len() > 4000 {
                text.push_str("\n  and so on");
                break;
            }
        }
        text
    }
}
