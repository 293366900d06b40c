//! Streams.

use std::sync::Arc;

use parking_lot::Mutex;

use super::capture::{self, Capture};
use super::channel::{Channel, Op};
use super::code::{Code, Result};
use super::context::{self, Context, Core};
use super::point::Point;
use super::table::{Handle, Table, new_handle};
use super::work::Work;

/// `CU_STREAM_NON_BLOCKING`, `CU_STREAM_LEGACY`.
const NON_BLOCKING: u32 = 1;
const LEGACY: Handle = 1;
/// Lowest and highest priority of an H200.
pub const PRIORITIES: (i32, i32) = (0, -5);

/// A stream.
pub struct Stream {
    pub handle: Handle,
    pub context: Arc<Context>,
    channel: Arc<Channel>,
    /// Whether the legacy stream waits for it and the other way round.
    blocking: bool,
    last: Mutex<Arc<Point>>,
    pub capture: Mutex<Option<Arc<Capture>>>,
}

static STREAMS: Table<Stream> = Table::new();

impl Stream {
    fn make(context: Arc<Context>, blocking: bool) -> Arc<Self> {
        Arc::new(Self {
            handle: new_handle(),
            channel: context.core.channel(),
            context,
            blocking,
            last: Mutex::new(Arc::new(Point::past())),
            capture: Mutex::new(None),
        })
    }

    pub fn core(&self) -> &Arc<Core> {
        &self.context.core
    }

    fn is_null(&self) -> bool {
        self.core().null.lock().as_ref().is_some_and(|null| null.handle == self.handle)
    }

    /// Submits, or adds to the graph that it is captured into.
    pub fn submit(&self, work: Work) -> Result<()> {
        self.submit_with(work, Arc::new(Point::default()))
    }

    /// As [`Stream::submit`], with the point that says that it is done.
    pub fn submit_with(&self, work: Work, done: Arc<Point>) -> Result<()> {
        self.core().check()?;
        if let Some(capture) = &*self.capture.lock() {
            return capture.add(self.handle, work);
        }
        let waits = self.legacy_order()?;
        let op = |work, done| Op { work, core: self.core().clone(), done };
        let waits = waits.into_iter().map(|point| op(Work::Await(point), Arc::default()));
        let mut last = self.last.lock();
        self.channel.submit(waits.chain([op(work, done.clone())]));
        *last = done;
        Ok(())
    }

    /// What the legacy stream and blocking streams owe each other.
    fn legacy_order(&self) -> Result<Vec<Arc<Point>>> {
        if self.is_null() {
            let same = |s: &&Arc<Stream>| s.blocking && Arc::ptr_eq(s.core(), self.core());
            let streams = STREAMS.all();
            let streams: Vec<_> = streams.iter().filter(same).collect();
            if streams.iter().any(|stream| stream.capture.lock().is_some()) {
                return Err(Code::CAPTURE_IMPLICIT);
            }
            return Ok(streams.iter().map(|stream| stream.last()).collect());
        }
        let null = self.core().null.lock().clone().filter(|_| self.blocking);
        Ok(null.map(|null| null.last()).into_iter().collect())
    }

    pub fn last(&self) -> Arc<Point> {
        self.last.lock().clone()
    }

    /// Whether all is done; an error where it is being captured or its context has failed.
    pub fn is_idle(&self) -> Result<bool> {
        self.leave_captures_alone()?;
        let idle = self.last().is_done();
        self.core().check()?;
        Ok(idle)
    }

    pub fn wait(&self) -> Result<()> {
        self.leave_captures_alone()?;
        self.last().wait();
        self.core().check()
    }

    fn leave_captures_alone(&self) -> Result<()> {
        if let Some(capture) = &*self.capture.lock() {
            capture.invalidate();
            return Err(Code::CAPTURE_UNSUPPORTED);
        }
        capture::unsafe_call()
    }
}

/// A new stream of a context. Priorities promise nothing, so none has one.
pub fn create(context: Arc<Context>, flags: u32) -> Result<Handle> {
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let stream = Stream::make(context, flags & NON_BLOCKING == 0);
    let handle = stream.handle;
    STREAMS.insert(handle, stream);
    Ok(handle)
}

/// The stream of a handle: of the current context, where that says so.
pub fn get(handle: Handle) -> Result<Arc<Stream>> {
    if handle != 0 && handle != LEGACY {
        return STREAMS.get(handle);
    }
    let current = context::current()?;
    let mut null = current.core.null.lock();
    Ok(null.get_or_insert_with(|| Stream::make(current.clone(), false)).clone())
}

/// Its work goes on to its end.
pub fn destroy(handle: Handle) -> Result<()> {
    let stream = STREAMS.remove(handle)?;
    if let Some(capture) = stream.capture.lock().take() {
        capture.invalidate();
    }
    Ok(())
}
