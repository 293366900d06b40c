//! Running a grid: blocks in a random order, one or a few at a time, on the calling thread.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::time::Duration;

use corosensei::CoroutineResult;

use super::block::{Block, Surroundings};
use super::bulk::Late;
use super::host::now;
use super::random::Random;
use super::shared::{ALIGNMENT, MOST_SHARED, SharedMemory};
use super::stack::{Slot, Stacks};
use super::thread::{End, Entry, Fiber, Thread, fiber};
use super::trap::{self, Here};
use super::{Kernel, KernelError, Launch};

/// Threads of a launch that are resident at once, at most, if blocks make room by waiting for the clock.
const MOST_RESIDENT: u32 = 8192;

/// Runs a launch to its end.
///
/// # Safety
/// `entry` is the kernel's; the parameters' addresses are valid for what it does with them.
pub(super) unsafe fn run(
    kernel: &Kernel,
    entry: Entry,
    launch: &Launch,
) -> Result<(), KernelError> {
    check(kernel, launch)
        .map_err(|reason| KernelError::Launch { kernel: kernel.name().into(), reason })?;
    trap::install();
    // Aligned as a GPU's constant memory is.
    let copies: Vec<Vec<u128>> = launch.params.iter().map(|bytes| aligned(bytes)).collect();
    let params: Vec<*const c_void> = copies.iter().map(|copy| copy.as_ptr().cast()).collect();
    let around = Surroundings {
        sms: launch.sms.clone(),
        sm_count: launch.sm_count,
        cluster: launch.cluster.max(1),
    };
    let mut random = Random::new(launch.seed, launch.number, u64::MAX);
    let mut waiting: Vec<u32> = (0..blocks(launch)).collect();
    random.shuffle(&mut waiting);
    let grid = Grid {
        launch,
        entry,
        params: &params,
        around: &around,
        static_bytes: kernel.static_shared().next_multiple_of(ALIGNMENT),
        // Mostly one after the other, which proves that none waits for another.
        at_once: if random.once_in(2) { 1 } else { 1 + random.below(3) },
        random,
        waiting,
        running: Vec::new(),
        late: Vec::new(),
    };
    let _clock = trap::Clock::start();
    grid.run().map_err(|(block, report)| KernelError::Fault {
        kernel: kernel.name().into(),
        block,
        report,
    })
}

/// Writes what blocks left to be written, on a fiber, so that a fault is the launch's as elsewhere.
///
/// # Safety
/// All addresses are the kernel's.
unsafe fn write_late(late: &[Late]) -> Result<(), (u32, String)> {
    let Some(first) = late.first() else { return Ok(()) };
    let failed = |reason| (first.block, reason);
    let Some(stacks) = Stacks::take(1, true).map_err(failed)? else { return Ok(()) };
    let done = Cell::new(0);
    let (list, count): (*const [Late], *const Cell<usize>) = (late, &done);
    // SAFETY: the stack is this fiber's alone, and outlives it.
    let slot = unsafe { Slot::below(stacks.thread(0)) };
    let mut fiber = Fiber::with_stack(slot, move |_, ()| {
        // SAFETY: both outlive the fiber, which this function alone resumes; the addresses are the
        // caller's promise.
        unsafe {
            for late in &*list {
                late.write();
                (*count).set((*count).get() + 1);
            }
        }
        End::Returned
    });
    match trap::here(|here| here.resume(&mut fiber, null_mut())) {
        CoroutineResult::Return(End::Fault(address)) => {
            let report = format!("a bulk store: no memory for it at {address:#x}");
            Err((late[done.get()].block, report))
        }
        _ => Ok(()),
    }
}

fn blocks(launch: &Launch) -> u32 {
    launch.grid.iter().product()
}

fn threads(launch: &Launch) -> u32 {
    launch.block.iter().product()
}

fn aligned(bytes: &[u8]) -> Vec<u128> {
    let word = |part: &[u8]| {
        let mut word = [0; 16];
        word[..part.len()].copy_from_slice(part);
        u128::from_ne_bytes(word)
    };
    bytes.chunks(16).map(word).collect()
}

fn check(kernel: &Kernel, launch: &Launch) -> Result<(), String> {
    let sizes: Vec<usize> = launch.params.iter().map(Vec::len).collect();
    if sizes != kernel.param_sizes() {
        return Err(format!("parameters of {sizes:?} bytes, it takes {:?}", kernel.param_sizes()));
    }
    let product = |dims: [u32; 3]| dims.iter().try_fold(1u32, |all, &n| all.checked_mul(n));
    let most = kernel.max_threads();
    match product(launch.block) {
        Some(threads) if (1..=most).contains(&threads) => {}
        _ => return Err(format!("blocks of {:?} threads, 1 to {most} are possible", launch.block)),
    }
    if !matches!(product(launch.grid), Some(1..=0x7fff_ffff)) {
        return Err(format!("a grid of {:?} blocks", launch.grid));
    }
    if launch.sms.is_empty() {
        return Err("no SMs to run on".into());
    }
    let shared = u64::from(kernel.static_shared()) + u64::from(launch.dynamic_shared);
    if shared + u64::from(ALIGNMENT) > u64::from(MOST_SHARED) {
        return Err(format!("{shared} bytes of shared memory per block"));
    }
    Ok(())
}

/// A block with its fibers.
struct Running {
    block: *mut Block,
    fibers: Vec<Fiber>,
    // Used by the fibers, hence dropped behind them.
    _stacks: Stacks,
}

impl Drop for Running {
    fn drop(&mut self) {
        for fiber in &mut self.fibers {
            if fiber.started() && !fiber.done() {
                // SAFETY: on a suspended fiber are a kernel's frames, which own nothing, and `ask`'s,
                // which then holds nothing but a report's text at most.
                unsafe { fiber.force_reset() };
            }
        }
        self.fibers.clear();
        // SAFETY: made by `Box::into_raw`; no fiber is left to use it.
        drop(unsafe { Box::from_raw(self.block) });
    }
}

impl Running {
    /// The block.
    fn block(&mut self) -> &mut Block {
        // SAFETY: alive while `self` is, and no fiber runs while the reference is held: they run in
        // `go_on` alone, which holds none.
        unsafe { &mut *self.block }
    }

    /// Lets threads go on, `times` times at most. Whether all have exited.
    fn go_on(&mut self, times: u32, here: Here<'_>) -> Result<bool, (u32, String)> {
        for _ in 0..times {
            let Some(me) = self.block().next() else { break };
            let thread = self.block().thread(me);
            let fault = match here.resume(&mut self.fibers[me as usize], thread) {
                CoroutineResult::Yield(()) => None,
                CoroutineResult::Return(End::Returned) => {
                    self.block().exited(me);
                    None
                }
                CoroutineResult::Return(End::Fault(address)) => {
                    Some(format!("thread {me}: no memory for it at {address:#x}"))
                }
                CoroutineResult::Return(End::Endless) => {
                    Some(format!("thread {me}: still runs, though the launch's time is over"))
                }
            };
            if let Some(report) = fault {
                return Err((self.block().index, report));
            }
            let block = self.block();
            if let Some(report) = block.fault.take() {
                return Err((block.index, report));
            }
        }
        Ok(self.block().alive == 0)
    }
}

/// A launch that runs.
struct Grid<'a> {
    launch: &'a Launch,
    entry: Entry,
    params: &'a [*const c_void],
    around: &'a Surroundings,
    static_bytes: u32,
    random: Random,
    at_once: u32,
    /// Blocks that have not started, the next one last.
    waiting: Vec<u32>,
    running: Vec<Running>,
    late: Vec<Late>,
}

impl Grid<'_> {
    fn run(mut self) -> Result<(), (u32, String)> {
        loop {
            while (self.running.len() as u32) < self.at_once && self.start()? {}
            if self.running.is_empty() {
                break;
            }
            self.step()?;
        }
        self.random.shuffle(&mut self.late);
        // SAFETY: the kernel's promise, as for every store of it.
        unsafe { write_late(&self.late) }
    }

    /// Lets one block go on that can; else time passes.
    fn step(&mut self) -> Result<(), (u32, String)> {
        let able: Vec<usize> =
            (0..self.running.len()).filter(|&at| self.running[at].block().can_go_on()).collect();
        if able.is_empty() {
            return self.pass_time();
        }
        let at = able[self.random.below(able.len() as u32) as usize];
        let times = if self.running.len() == 1 { u32::MAX } else { 1 + self.random.below(512) };
        if trap::here(|here| self.running[at].go_on(times, here))? {
            self.finish(at)?;
        }
        Ok(())
    }

    /// No block can go on: one more is started if there is room, else the clock has to.
    fn pass_time(&mut self) -> Result<(), (u32, String)> {
        let mut first = u64::MAX;
        for running in &mut self.running {
            let block = running.block();
            match block.wakes_at() {
                Some(instant) => first = first.min(instant),
                None => return Err((block.index, block.report())),
            }
        }
        let resident = (self.running.len() as u32 + 1) * threads(self.launch);
        if resident <= MOST_RESIDENT && self.start()? {
            return Ok(());
        }
        let left = first.saturating_sub(now());
        std::thread::sleep(Duration::from_nanos(left));
        let now = now();
        self.running.iter_mut().for_each(|running| running.block().wake_until(now));
        Ok(())
    }

    /// Starts the next block. False if none is left or there is no room.
    fn start(&mut self) -> Result<bool, (u32, String)> {
        let Some(&index) = self.waiting.last() else { return Ok(false) };
        let count = threads(self.launch);
        let failed = |reason| (index, reason);
        let Some(stacks) = Stacks::take(count, self.running.is_empty()).map_err(failed)? else {
            return Ok(false);
        };
        let bytes = self.static_bytes + self.launch.dynamic_shared;
        let shared = SharedMemory::take(bytes).map_err(failed)?;
        let random = Random::new(self.launch.seed, self.launch.number, u64::from(index));
        let threads: Vec<*mut Thread> = (0..count).map(|linear| stacks.thread(linear)).collect();
        let at = shared.at();
        let made = Box::new(Block::new(index, threads.clone(), shared, random, self.around));
        let block = Box::into_raw(made);
        let fibers = threads.iter().zip(0..).map(|(&thread, linear)| {
            // SAFETY: the place is this block's alone; fibers are dropped before stacks, block, image
            // and parameters, and reset by `Running`'s drop.
            unsafe {
                thread.write(self.thread(index, linear, at, bytes, block));
                fiber(thread, self.entry, self.params.as_ptr())
            }
        });
        let fibers = fibers.collect();
        self.waiting.pop();
        self.running.push(Running { block, fibers, _stacks: stacks });
        Ok(true)
    }

    fn thread(
        &self,
        block: u32,
        linear: u32,
        shared: *mut u8,
        shared_bytes: u32,
        owner: *mut Block,
    ) -> Thread {
        let place = |number: u32, size: [u32; 3]| {
            [number % size[0], number / size[0] % size[1], number / size[0] / size[1]]
        };
        Thread {
            thread: place(linear, self.launch.block),
            block: place(block, self.launch.grid),
            block_size: self.launch.block,
            grid_size: self.launch.grid,
            shared,
            shared_bytes,
            static_bytes: self.static_bytes,
            owner,
            yielder: null(),
            linear,
            answer: 0,
            asking: false,
        }
    }

    /// All threads of a block have exited.
    fn finish(&mut self, at: usize) -> Result<(), (u32, String)> {
        let mut ended = self.running.swap_remove(at);
        let block = ended.block();
        let late = block.bulk_end().map_err(|report| (block.index, report))?;
        if !block.shared.end_is_whole() {
            let report = "it wrote behind the end of its shared memory".into();
            return Err((block.index, report));
        }
        self.late.extend(late);
        Ok(())
    }
}
