//! Streams that are captured into graphs.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;

use super::code::{Code, Result};
use super::graph::{self, Node};
use super::stream::Stream;
use super::table::Handle;
use super::work::Work;

/// `CUstreamCaptureMode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl Mode {
    pub fn new(number: i32) -> Result<Self> {
        [Self::Global, Self::ThreadLocal, Self::Relaxed]
            .get(usize::try_from(number).unwrap_or(usize::MAX))
            .copied()
            .ok_or(Code::INVALID_VALUE)
    }
}

/// `CUstreamCaptureStatus`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    None,
    Active,
    Invalidated,
}

/// A capture, from its begin to its end.
pub struct Capture {
    pub id: u64,
    mode: Mode,
    thread: ThreadId,
    origin: Handle,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    nodes: Vec<Node>,
    /// By stream, the nodes that its next one depends on.
    tips: HashMap<Handle, BTreeSet<usize>>,
    streams: Vec<Arc<Stream>>,
    invalid: bool,
    ended: bool,
}

static ACTIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// Swaps the mode of the calling thread.
pub fn exchange(mode: Mode) -> Mode {
    MODE.replace(mode)
}

/// What could make a capture wrong was called: an error, for the captures too, where the modes say so.
pub fn unsafe_call() -> Result<()> {
    let (mode, this) = (MODE.get(), std::thread::current().id());
    let active = ACTIVE.lock();
    let forbids = |capture: &&Arc<Capture>| match (mode, capture.mode) {
        (Mode::Relaxed, _) | (_, Mode::Relaxed) => false,
        (_, _) if capture.thread == this => true,
        (Mode::Global, Mode::Global) => true,
        _ => false,
    };
    let mut result = Ok(());
    for capture in active.iter().filter(forbids) {
        capture.invalidate();
        result = Err(Code::CAPTURE_UNSUPPORTED);
    }
    result
}

/// Begins to capture what is submitted to a stream.
pub fn begin(stream: &Arc<Stream>, mode: Mode) -> Result<()> {
    static IDS: AtomicU64 = AtomicU64::new(1);
    stream.core().check()?;
    let mut of_stream = stream.capture.lock();
    if of_stream.is_some() {
        return Err(Code::INVALID_VALUE);
    }
    let state = State {
        tips: HashMap::from([(stream.handle, BTreeSet::new())]),
        streams: vec![stream.clone()],
        ..State::default()
    };
    let capture = Arc::new(Capture {
        id: IDS.fetch_add(1, Ordering::Relaxed),
        mode,
        thread: std::thread::current().id(),
        origin: stream.handle,
        state: Mutex::new(state),
    });
    ACTIVE.lock().push(capture.clone());
    *of_stream = Some(capture);
    Ok(())
}

/// Ends what [`begin`] began: a graph, or why there is none. Either way nothing is captured any more.
pub fn end(stream: &Arc<Stream>) -> Result<Handle> {
    let capture = stream.capture.lock().clone().ok_or(Code::INVALID_VALUE)?;
    if capture.origin != stream.handle {
        return Err(Code::CAPTURE_UNMATCHED);
    }
    if capture.mode != Mode::Relaxed && capture.thread != std::thread::current().id() {
        return Err(Code::CAPTURE_WRONG_THREAD);
    }
    ACTIVE.lock().retain(|active| !Arc::ptr_eq(active, &capture));
    let streams = {
        let mut state = capture.state.lock();
        state.ended = true;
        std::mem::take(&mut state.streams)
    };
    for stream in streams {
        stream.capture.lock().take();
    }
    let mut state = capture.state.lock();
    if state.invalid {
        return Err(Code::CAPTURE_INVALIDATED);
    }
    if !state.is_joined(capture.origin) {
        return Err(Code::CAPTURE_UNJOINED);
    }
    Ok(graph::keep(std::mem::take(&mut state.nodes)))
}

pub fn status(stream: &Stream) -> (Status, u64) {
    match &*stream.capture.lock() {
        None => (Status::None, 0),
        Some(capture) if capture.state.lock().invalid => (Status::Invalidated, capture.id),
        Some(capture) => (Status::Active, capture.id),
    }
}

impl State {
    /// Whether everything captured comes before the end of the stream that the capture began in.
    fn is_joined(&self, origin: Handle) -> bool {
        let mut seen: BTreeSet<usize> = BTreeSet::new();
        let mut left: Vec<usize> = self.tips[&origin].iter().copied().collect();
        while let Some(node) = left.pop() {
            if seen.insert(node) {
                left.extend(&self.nodes[node].after);
            }
        }
        self.tips.values().flatten().all(|tip| seen.contains(tip))
    }
}

impl Capture {
    pub fn invalidate(&self) {
        self.state.lock().invalid = true;
    }

    /// Adds a node to the graph.
    pub fn add(&self, stream: Handle, work: Work) -> Result<()> {
        let mut state = self.state.lock();
        if state.invalid {
            return Err(Code::CAPTURE_INVALIDATED);
        }
        let number = state.nodes.len();
        let tips = state.tips.entry(stream).or_default();
        let after = std::mem::replace(tips, BTreeSet::from([number])).into_iter().collect();
        state.nodes.push(Node { work, after, stream });
        Ok(())
    }

    /// The nodes that a stream's next one depends on.
    pub fn tips(&self, stream: Handle) -> Result<BTreeSet<usize>> {
        let state = self.state.lock();
        if state.invalid {
            return Err(Code::CAPTURE_INVALIDATED);
        }
        Ok(state.tips.get(&stream).cloned().unwrap_or_default())
    }

    /// A stream waits for some nodes: with that it is captured too.
    pub fn join(self: &Arc<Self>, stream: &Arc<Stream>, nodes: &BTreeSet<usize>) -> Result<()> {
        let mut of_stream = stream.capture.lock();
        let mut state = self.state.lock();
        match &*of_stream {
            _ if state.ended => return Err(Code::CAPTURED_EVENT),
            _ if state.invalid => return Err(Code::CAPTURE_INVALIDATED),
            Some(capture) if !Arc::ptr_eq(capture, self) => {
                state.invalid = true;
                capture.invalidate();
                return Err(Code::CAPTURE_MERGE);
            }
            Some(_) => {}
            None => {
                state.streams.push(stream.clone());
                *of_stream = Some(self.clone());
            }
        }
        state.tips.entry(stream.handle).or_default().extend(nodes);
        Ok(())
    }
}
