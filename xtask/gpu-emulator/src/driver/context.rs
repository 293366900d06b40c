//! Contexts, and which one is current.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::channel::Channel;
use super::code::{Code, Result};
use super::config::{config, connections};
use super::memory::{self, DEVICES, Place};
use super::stream::Stream;
use super::table::{Handle, Table, new_handle};

/// A function that waits for so long says so.
const LONG: Duration = Duration::from_secs(2);

/// SMs of an H200.
pub const SMS: u32 = 132;

/// What contexts of a device share with their partitions: hardware queues, and the end.
pub struct Core {
    pub device: usize,
    /// Memory goes with it.
    pub owner: Handle,
    channels: Vec<Arc<Channel>>,
    next: AtomicUsize,
    failed: AtomicI32,
    /// Devices whose memory it was given access to, a bit each.
    peers: AtomicU32,
    ended: AtomicBool,
    /// The legacy stream.
    pub null: Mutex<Option<Arc<Stream>>>,
}

/// A context: of a device, or of a part of its SMs.
pub struct Context {
    pub handle: Handle,
    pub core: Arc<Core>,
    /// The SMs that its streams' kernels run on.
    pub sms: Vec<u32>,
    /// The green context that it stands for.
    pub green: Option<Handle>,
}

static CONTEXTS: Table<Context> = Table::new();
/// A primary context, and how often it is retained.
type Retained = Option<(Arc<Context>, usize)>;
static PRIMARY: Mutex<[Retained; DEVICES]> = Mutex::new([const { None }; DEVICES]);

thread_local! {
    static CURRENT: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

impl Core {
    fn new(device: usize, owner: Handle, connections: usize) -> Result<Self> {
        let seed = config()?.seed;
        let channel = |i: usize| Channel::new(seed ^ ((owner as u64) << 8) ^ i as u64);
        Ok(Self {
            device,
            owner,
            channels: (0..connections).map(channel).collect(),
            next: AtomicUsize::new(0),
            failed: AtomicI32::new(0),
            peers: AtomicU32::new(0),
            ended: AtomicBool::new(false),
            null: Mutex::new(None),
        })
    }

    /// The hardware queue of the next stream.
    pub fn channel(&self) -> Arc<Channel> {
        let i = self.next.fetch_add(1, Ordering::Relaxed) % self.channels.len();
        self.channels[i].clone()
    }

    /// A kernel failed, or memory that is not there was used: nothing works here any more.
    pub fn fail(&self, code: Code, why: &str) {
        eprintln!("gpu-emulator: device {}: {why}", self.device);
        let _ = self.failed.compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The error that stays.
    pub fn check(&self) -> Result<()> {
        match self.failed.load(Ordering::Acquire) {
            0 if self.ended.load(Ordering::Acquire) => Err(Code::CONTEXT_IS_DESTROYED),
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }

    /// False if that was done before.
    pub fn enable_peer(&self, device: usize) -> bool {
        self.peers.fetch_or(1 << device, Ordering::AcqRel) & (1 << device) == 0
    }

    /// Waits for everything submitted so far; says so where that takes long, as it may be for ever.
    pub fn settle(&self, function: &str) {
        let last: Vec<_> = self.channels.iter().map(|channel| channel.last()).collect();
        for point in last {
            if !point.wait_for(LONG) {
                let device = self.device;
                eprintln!("gpu-emulator: {function} waits for what runs on device {device}");
                point.wait();
            }
        }
    }

    fn end(&self) {
        self.settle("the end of a context");
        self.ended.store(true, Ordering::Release);
        self.null.lock().take();
        for channel in &self.channels {
            channel.close();
        }
        for range in memory::ranges_of(self.owner) {
            let allocated = |place| matches!(place, Place::Device(_) | Place::Pinned);
            if memory::free(range.start, allocated).is_err() {
                let _ = memory::remove(range.start, |_| true);
            }
        }
    }
}

impl Context {
    fn whole(device: usize, connections: usize) -> Result<Arc<Self>> {
        let handle = new_handle();
        let core = Arc::new(Core::new(device, handle, connections)?);
        let context = Arc::new(Self { handle, core, sms: (0..SMS).collect(), green: None });
        CONTEXTS.insert(handle, context.clone());
        Ok(context)
    }

    /// A context on some SMs of a device's primary one, which has to be retained.
    pub fn part(device: usize, sms: Vec<u32>, green: Handle) -> Result<Arc<Self>> {
        let primary = PRIMARY.lock()[device].as_ref().map(|(context, _)| context.core.clone());
        let core = primary.ok_or(Code::INVALID_CONTEXT)?;
        let context = Arc::new(Self { handle: new_handle(), core, sms, green: Some(green) });
        CONTEXTS.insert(context.handle, context.clone());
        Ok(context)
    }

    pub fn device(&self) -> usize {
        self.core.device
    }

    /// The context of the same queues that memory and streams of the whole device go with.
    pub fn owner(&self) -> Handle {
        self.core.owner
    }
}

/// The context with this handle.
pub fn get(handle: Handle) -> Result<Arc<Context>> {
    CONTEXTS.get(handle).map_err(|_| Code::INVALID_CONTEXT)
}

/// The current context, unless it has failed.
pub fn current() -> Result<Arc<Context>> {
    config()?;
    let current = top().ok_or(Code::INVALID_CONTEXT)?;
    current.core.check()?;
    Ok(current)
}

/// The current context, whatever became of it.
pub fn top() -> Option<Arc<Context>> {
    CURRENT.with_borrow(|stack| stack.last().cloned())
}

pub fn push(handle: Handle) -> Result<()> {
    let context = get(handle)?;
    CURRENT.with_borrow_mut(|stack| stack.push(context));
    Ok(())
}

pub fn pop() -> Result<Arc<Context>> {
    CURRENT.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)
}

/// Puts a context, or none, in the place of the current one.
pub fn set(handle: Handle) -> Result<()> {
    let context = if handle == 0 { None } else { Some(get(handle)?) };
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        stack.extend(context);
    });
    Ok(())
}

/// Retains the primary context of a device.
pub fn retain(device: usize) -> Result<Handle> {
    let mut all = PRIMARY.lock();
    if let Some((context, count)) = &mut all[device] {
        *count += 1;
        return Ok(context.handle);
    }
    let context = Context::whole(device, connections())?;
    let handle = context.handle;
    all[device] = Some((context, 1));
    Ok(handle)
}

/// Gives back what [`retain`] took; with the last one the context ends.
pub fn release(device: usize) -> Result<()> {
    let mut all = PRIMARY.lock();
    let (_, count) = all[device].as_mut().ok_or(Code::INVALID_CONTEXT)?;
    *count -= 1;
    if *count > 0 {
        return Ok(());
    }
    let (context, _) = all[device].take().expect("just seen");
    drop(all);
    CONTEXTS.remove(context.handle)?;
    context.core.end();
    Ok(())
}

/// A context of its own with so many hardware queues, made current.
pub fn create(device: usize, connections: usize) -> Result<Handle> {
    let context = Context::whole(device, connections)?;
    CURRENT.with_borrow_mut(|stack| stack.push(context.clone()));
    Ok(context.handle)
}

/// Ends a context that [`create`] or [`Context::part`] made.
pub fn destroy(handle: Handle) -> Result<()> {
    let is_primary =
        |one: &Retained| one.as_ref().is_some_and(|(context, _)| context.handle == handle);
    if PRIMARY.lock().iter().any(is_primary) {
        return Err(Code::INVALID_CONTEXT);
    }
    let context = CONTEXTS.remove(handle).map_err(|_| Code::INVALID_CONTEXT)?;
    CURRENT.with_borrow_mut(|stack| {
        if stack.last().is_some_and(|top| top.handle == handle) {
            stack.pop();
        }
    });
    if context.green.is_none() {
        context.core.end();
    }
    Ok(())
}

/// Waits for all that was submitted to a device, as whoever takes memory away has to.
pub fn settle_device(device: usize, function: &str) {
    let mut cores: Vec<Arc<Core>> = Vec::new();
    for context in CONTEXTS.all() {
        if context.device() == device && !cores.iter().any(|core| Arc::ptr_eq(core, &context.core))
        {
            cores.push(context.core.clone());
        }
    }
    cores.iter().for_each(|core| core.settle(function));
}

/// Waits, no longer than `limit`, for all that was submitted to any device.
pub fn drain(limit: Duration) {
    let until = Instant::now() + limit;
    for context in CONTEXTS.all() {
        for channel in &context.core.channels {
            channel.last().wait_for(until.saturating_duration_since(Instant::now()));
        }
    }
}

/// When the process ends, what it submitted last is given the time that it needs, unless it waits.
pub fn drain_at_exit() {
    extern "C" fn at_exit() {
        drain(Duration::from_millis(200));
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the library is never unloaded, so the function is there when it is called.
        unsafe { libc::atexit(at_exit) };
    });
}

/// Waits for all that was submitted to any device.
pub fn settle_all(function: &str) {
    (0..DEVICES).for_each(|device| settle_device(device, function));
}
