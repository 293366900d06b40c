//! Events.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;

use super::capture::{self, Capture};
use super::code::{Code, Result};
use super::context::{self, Core};
use super::point::Point;
use super::stream::Stream;
use super::table::{Handle, Table, new_handle};
use super::work::Work;

/// `CU_EVENT_DISABLE_TIMING`; all flags there are.
const NO_TIMING: u32 = 2;
const FLAGS: u32 = 7;
/// `CU_EVENT_WAIT_EXTERNAL`.
const EXTERNAL: u32 = 1;

/// An event.
pub struct Event {
    core: Arc<Core>,
    timed: bool,
    recorded: Mutex<Recorded>,
}

enum Recorded {
    Never,
    Point(Arc<Point>),
    /// In a capture, after these nodes.
    Captured(Arc<Capture>, BTreeSet<usize>),
}

static EVENTS: Table<Event> = Table::new();

pub fn get(handle: Handle) -> Result<Arc<Event>> {
    EVENTS.get(handle)
}

pub fn create(flags: u32) -> Result<Handle> {
    if flags & !FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let core = context::current()?.core.clone();
    let (timed, recorded) = (flags & NO_TIMING == 0, Mutex::new(Recorded::Never));
    let handle = new_handle();
    EVENTS.insert(handle, Arc::new(Event { core, timed, recorded }));
    Ok(handle)
}

/// What waits for it keeps waiting.
pub fn destroy(handle: Handle) -> Result<()> {
    EVENTS.remove(handle).map(drop)
}

impl Event {
    /// From now on it stands for what `stream` has got to do so far.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        if !Arc::ptr_eq(&self.core, stream.core()) {
            return Err(Code::INVALID_HANDLE);
        }
        let capture = stream.capture.lock().clone();
        let recorded = match capture {
            Some(capture) => {
                let tips = capture.tips(stream.handle)?;
                Recorded::Captured(capture, tips)
            }
            None => {
                let point = Arc::new(Point::default());
                stream.submit_with(Work::Mark, point.clone())?;
                Recorded::Point(point)
            }
        };
        *self.recorded.lock() = recorded;
        Ok(())
    }

    /// Makes what is submitted to `stream` from now on come after it.
    pub fn order(&self, stream: &Arc<Stream>, flags: u32) -> Result<()> {
        if flags & !EXTERNAL != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let capturing = stream.capture.lock().clone();
        let recorded = self.recorded.lock();
        match (&*recorded, capturing) {
            (Recorded::Captured(capture, tips), _) => capture.join(stream, tips),
            (Recorded::Never, _) => Ok(()),
            // Nothing outside of a graph is known to its replays.
            (Recorded::Point(_), Some(capture)) => {
                capture.invalidate();
                Err(Code::CAPTURE_ISOLATION)
            }
            (Recorded::Point(point), None) => {
                let point = point.clone();
                drop(recorded);
                stream.submit(Work::Await(point))
            }
        }
    }

    /// What was last recorded; an error where no host may ask.
    fn point(&self) -> Result<Option<Arc<Point>>> {
        match &*self.recorded.lock() {
            Recorded::Never => Ok(None),
            Recorded::Point(point) => Ok(Some(point.clone())),
            Recorded::Captured(capture, _) => {
                capture.invalidate();
                Err(Code::CAPTURED_EVENT)
            }
        }
    }

    pub fn is_done(&self) -> Result<bool> {
        capture::unsafe_call()?;
        let done = self.point()?.is_none_or(|point| point.is_done());
        self.core.check()?;
        Ok(done)
    }

    pub fn wait(&self) -> Result<()> {
        capture::unsafe_call()?;
        if let Some(point) = self.point()? {
            point.wait();
        }
        self.core.check()
    }

    /// Milliseconds from `start` to this.
    pub fn since(&self, start: &Self) -> Result<f32> {
        let (Some(from), Some(to)) = (start.point()?, self.point()?) else {
            return Err(Code::INVALID_HANDLE);
        };
        if !self.timed || !start.timed {
            return Err(Code::INVALID_HANDLE);
        }
        if !from.is_done() || !to.is_done() {
            return Err(Code::NOT_READY);
        }
        Ok((to.at() as f64 - from.at() as f64) as f32 / 1e6)
    }
}
