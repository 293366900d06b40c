//! What the same GPUs reach by other means in the same run: copy engines, and NCCL.

use std::ffi::{c_int, c_void};
use std::path::PathBuf;

use ep_kernels::cuda::{Device, DeviceMemory, Event, EventPool, Stream};
use libloading::Library;

use super::raw::{Gate, LIMIT, await_event, copy_to_peer, enable_peers, failed};
use crate::stats::{RUNS, Summary, WARM_UPS};
use crate::{BenchError, Result};

/// Where libnccl.so.2 is, where the loader does not find it: a file or a folder.
pub const NCCL_PATH_VARIABLE: &str = "EP_NCCL_PATH";

/// Streams, memory and a common start on several GPUs, driven by one thread.
struct Bench {
    devices: Vec<Device>,
    /// `[gpu][stream]`.
    streams: Vec<Vec<Stream>>,
    events: Vec<std::sync::Arc<EventPool>>,
    gate: Gate,
    round: u32,
}

const STREAMS: usize = 4;

impl Bench {
    fn new(devices: &[Device]) -> Result<Self> {
        let streams = |d: &Device| (0..STREAMS).map(|_| d.stream(0).map_err(failed)).collect();
        let pool = |d: &Device| EventPool::new(d, 4 * STREAMS, true).map_err(failed);
        Ok(Self {
            devices: devices.to_vec(),
            streams: devices.iter().map(streams).collect::<Result<_>>()?,
            events: devices.iter().map(pool).collect::<Result<_>>()?,
            gate: Gate::new(&devices[0])?,
            round: 0,
        })
    }

    fn record(&self, gpu: usize, stream: usize) -> Result<Event> {
        // SAFETY: a live stream of this device.
        unsafe { self.events[gpu].record(self.streams[gpu][stream].raw()) }.map_err(failed)
    }

    /// Times `work` on `used` streams of every GPU, which start together; the slowest counts.
    fn time(&mut self, used: usize, work: &mut dyn FnMut(&Self) -> Result<()>) -> Result<Summary> {
        let mut times = Vec::with_capacity(RUNS);
        for run in 0..WARM_UPS + RUNS {
            self.round += 1;
            let mut starts = Vec::new();
            for (gpu, device) in self.devices.iter().enumerate() {
                for stream in 0..used {
                    let raw = self.streams[gpu][stream].raw();
                    // SAFETY: a live stream, whose work is waited for below.
                    unsafe { self.gate.hold(device, raw, self.round)? };
                    starts.push(self.record(gpu, stream)?);
                }
            }
            let submitted = work(self);
            let mut ends = Vec::new();
            for gpu in 0..self.devices.len() {
                for stream in 0..used {
                    ends.push(self.record(gpu, stream)?);
                }
            }
            self.gate.open(self.round);
            // All of them first: a stream's end says nothing of another's start.
            ends.iter().try_for_each(|end| await_event(end, "copying between GPUs"))?;
            let mut slowest = 0.0f64;
            for (at, end) in ends.iter().enumerate() {
                // Streams share a copy engine, and a stream's start may wait for its turn there:
                // what counts is the first start on the GPU.
                let first = at / used * used;
                for start in &starts[first..first + used] {
                    slowest = slowest.max(end.micros_since(start).map_err(failed)?);
                }
            }
            submitted?;
            if run >= WARM_UPS {
                times.push(slowest);
            }
        }
        Summary::of(&times).ok_or_else(|| BenchError::Usage("nothing was timed".into()))
    }

    fn memory(&self, bytes: usize) -> Result<Vec<DeviceMemory>> {
        let one = |s: &Vec<Stream>| DeviceMemory::zeroed(&s[0], bytes.max(1), LIMIT);
        self.streams.iter().map(one).collect::<std::result::Result<_, _>>().map_err(failed)
    }
}

/// Time of the copy engines for `bytes` from each GPU to the next, all at once, with the number of
/// streams that was best.
///
/// # Errors
/// The driver's.
pub fn copy_engines(devices: &[Device], bytes: usize) -> Result<(Summary, usize)> {
    enable_peers(devices)?;
    let mut bench = Bench::new(devices)?;
    let (from, to) = (bench.memory(bytes)?, bench.memory(bytes)?);
    let mut best: Option<(Summary, usize)> = None;
    for streams in [1, 2, STREAMS] {
        let part = bytes.div_ceil(streams).next_multiple_of(4096);
        let time = bench.time(streams, &mut |b| {
            for (gpu, device) in b.devices.iter().enumerate() {
                let next = (gpu + 1) % b.devices.len();
                for stream in 0..streams {
                    let at = (stream * part).min(bytes);
                    let size = part.min(bytes - at);
                    if size > 0 {
                        let raw = b.streams[gpu][stream].raw();
                        let dest = (&b.devices[next], to[next].address() + at as u64);
                        let source = (device, from[gpu].address() + at as u64);
                        // SAFETY: inside both allocations, which outlive the wait in `time`.
                        unsafe { copy_to_peer(dest, source, size, raw)? };
                    }
                }
            }
            Ok(())
        })?;
        if best.is_none_or(|(b, _)| time.p50_us < b.p50_us) {
            best = Some((time, streams));
        }
    }
    best.ok_or_else(|| BenchError::Usage("no copies".into()))
}

type UniqueId = [u8; 128];
type NewId = unsafe extern "C" fn(*mut UniqueId) -> c_int;
type Init = unsafe extern "C" fn(*mut *mut c_void, c_int, UniqueIdArg, c_int, *mut Config) -> c_int;
type Destroy = unsafe extern "C" fn(*mut c_void) -> c_int;
type Transfer = unsafe extern "C" fn(u64, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
type Plain = unsafe extern "C" fn() -> c_int;
type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;

/// `ncclInt8`.
const BYTES: c_int = 0;
/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

/// `ncclUniqueId`, as it is passed.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueIdArg(UniqueId);

/// `ncclConfig_t` of 2.18, which later versions take.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_void,
    split_share: c_int,
}

impl Config {
    fn new(max_ctas: Option<u32>) -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 2_18_01,
            blocking: 1,
            cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: max_ctas.and_then(|n| n.try_into().ok()).unwrap_or(UNDEFINED),
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// NCCL, opened at run time.
struct Nccl {
    new_id: NewId,
    init: Init,
    destroy: Destroy,
    send: Transfer,
    recv: Transfer,
    start: Plain,
    end: Plain,
    version: c_int,
    _library: Library,
}

fn nccl_error(detail: impl std::fmt::Display) -> BenchError {
    BenchError::Tool { op: "nccl", detail: detail.to_string() }
}

impl Nccl {
    fn open() -> Result<Self> {
        let name = match std::env::var_os(NCCL_PATH_VARIABLE).map(PathBuf::from) {
            Some(path) if path.is_dir() => path.join("libnccl.so.2"),
            Some(path) => path,
            None => "libnccl.so.2".into(),
        };
        // SAFETY: NVIDIA's library; its initialisers have no preconditions.
        let library = unsafe { Library::new(&name) }.map_err(|e| {
            let why = std::error::Error::source(&e).map_or(e.to_string(), |why| why.to_string());
            let name = name.display();
            nccl_error(format!("{name}: {why}; {NCCL_PATH_VARIABLE} says where it is"))
        })?;
        macro_rules! symbol {
            ($name:literal, $kind:ty) => {
                // SAFETY: the signature is that of nccl.h (2.x) for this symbol.
                *unsafe { library.get::<$kind>($name) }.map_err(nccl_error)?
            };
        }
        let get_version = symbol!(b"ncclGetVersion", GetVersion);
        let mut version = 0;
        // SAFETY: `version` is valid for the call.
        unsafe { get_version(&mut version) };
        Ok(Self {
            new_id: symbol!(b"ncclGetUniqueId", NewId),
            init: symbol!(b"ncclCommInitRankConfig", Init),
            destroy: symbol!(b"ncclCommDestroy", Destroy),
            send: symbol!(b"ncclSend", Transfer),
            recv: symbol!(b"ncclRecv", Transfer),
            start: symbol!(b"ncclGroupStart", Plain),
            end: symbol!(b"ncclGroupEnd", Plain),
            version,
            _library: library,
        })
    }
}

impl Nccl {
    /// A communicator per GPU, all of this process.
    fn connect(&self, devices: &[Device], ctas: Option<u32>) -> Result<Vec<*mut c_void>> {
        let mut id = UniqueIdArg([0; 128]);
        // SAFETY: the output is valid for the call.
        ok("ncclGetUniqueId", unsafe { (self.new_id)(&mut id.0) })?;
        let (n, mut config) = (devices.len(), Config::new(ctas));
        let mut comms = vec![std::ptr::null_mut(); n];
        // SAFETY: no arguments; ended below whatever comes between.
        ok("ncclGroupStart", unsafe { (self.start)() })?;
        let started =
            devices.iter().zip(&mut comms).enumerate().try_for_each(|(rank, (gpu, comm))| {
                let _current = gpu.make_current().map_err(failed)?;
                // SAFETY: outputs and configuration live until the group has ended.
                let code = unsafe { (self.init)(comm, n as c_int, id, rank as c_int, &mut config) };
                ok("ncclCommInitRankConfig", code)
            });
        // SAFETY: no arguments; begun above.
        let ended = ok("ncclGroupEnd", unsafe { (self.end)() });
        started.and(ended).map(|()| comms)
    }
}

/// NCCL's version, as it numbers them.
///
/// # Errors
/// No libnccl.so.2.
pub fn nccl_version() -> Result<c_int> {
    Nccl::open().map(|nccl| nccl.version)
}

fn ok(op: &str, code: c_int) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(nccl_error(format!("{op}: ncclResult {code}"))) }
}

/// Time of NCCL's all-to-all with `block` bytes between any two GPUs, a GPU's own block included,
/// and NCCL's version; its kernels take as many blocks as NCCL likes, or at most `ctas`. NVLink multicast
/// stays off.
///
/// # Errors
/// No libnccl.so.2, or what it or the driver says.
pub fn nccl_all_to_all(
    devices: &[Device],
    block: usize,
    ctas: Option<u32>,
) -> Result<(Summary, c_int)> {
    let nccl = Nccl::open()?;
    let mut bench = Bench::new(devices)?;
    let n = devices.len();
    let (from, to) = (bench.memory(n * block)?, bench.memory(n * block)?);
    let comms = nccl.connect(devices, ctas)?;
    let mut exchange = |b: &Bench| -> Result<()> {
        // SAFETY: no arguments.
        ok("ncclGroupStart", unsafe { (nccl.start)() })?;
        for (gpu, &comm) in comms.iter().enumerate() {
            let stream = b.streams[gpu][0].raw().cast::<c_void>();
            for peer in 0..n {
                let at = (peer * block) as u64;
                let (source, dest) = (from[gpu].address() + at, to[gpu].address() + at);
                // SAFETY: blocks inside allocations that outlive the wait; the stream is live.
                let sent =
                    unsafe { (nccl.send)(source, block, BYTES, peer as c_int, comm, stream) };
                ok("ncclSend", sent)?;
                // SAFETY: blocks inside allocations that outlive the wait; the stream is live.
                let got = unsafe { (nccl.recv)(dest, block, BYTES, peer as c_int, comm, stream) };
                ok("ncclRecv", got)?;
            }
        }
        // SAFETY: no arguments.
        ok("ncclGroupEnd", unsafe { (nccl.end)() })
    };
    // The first one connects, for which no stream may be held.
    exchange(&bench)?;
    for streams in &bench.streams {
        streams[0].wait("NCCL's first all-to-all", LIMIT).map_err(failed)?;
    }
    let time = bench.time(1, &mut exchange);
    for comm in comms {
        // SAFETY: made above, destroyed once, its work is done.
        ok("ncclCommDestroy", unsafe { (nccl.destroy)(comm) })?;
    }
    Ok((time?, nccl.version))
}
