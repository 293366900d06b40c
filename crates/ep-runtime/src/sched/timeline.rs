//! When what ran, for Perfetto or `chrome://tracing`.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};

/// What a part of a pipeline does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Stage {
    /// From handing a micro-batch over to having received its rows.
    Dispatch,
    /// The caller's closure; on streams, what it submitted.
    Experts,
    /// From having the experts' rows to having the sums.
    Combine,
}

impl Stage {
    const ALL: [Self; 3] = [Self::Dispatch, Self::Experts, Self::Combine];

    fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Experts => "experts",
            Self::Combine => "combine",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One stage of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Span {
    /// The rank.
    pub rank: usize,
    /// What it was.
    pub stage: Stage,
    /// The micro-batch.
    pub batch: usize,
    /// When it started, from the timeline's beginning.
    pub start: Duration,
    /// When it ended.
    pub end: Duration,
    /// Measured on a device: the start of its pipeline on the host's clock, plus what events measured
    /// from there.
    pub on_device: bool,
}

/// Records when stages start and end. Clones are the same timeline; ranks of one process may share one.
#[derive(Clone)]
pub struct Timeline {
    shared: Arc<Shared>,
}

struct Shared {
    origin: Instant,
    spans: Mutex<Vec<Span>>,
    #[cfg(feature = "cuda")]
    pending: Mutex<Vec<Pending>>,
}

/// A stage between two events of a stream.
#[cfg(feature = "cuda")]
pub(crate) struct Pending {
    pub rank: usize,
    pub stage: Stage,
    pub batch: usize,
    /// When the pipeline started: on the host, and on the device.
    pub origin: (Instant, Arc<ep_kernels::cuda::Event>),
    pub start: ep_kernels::cuda::Event,
    pub end: ep_kernels::cuda::Event,
}

impl Default for Timeline {
    fn default() -> Self {
        Self::new()
    }
}

impl Timeline {
    /// An empty one, which begins now.
    pub fn new() -> Self {
        Self {
            shared: Arc::new(Shared {
                origin: Instant::now(),
                spans: Mutex::default(),
                #[cfg(feature = "cuda")]
                pending: Mutex::default(),
            }),
        }
    }

    /// Adds a stage that ran on the host.
    pub fn record(
        &self,
        rank: usize,
        stage: Stage,
        batch: usize,
        (start, end): (Instant, Instant),
    ) {
        let at = |time: Instant| time.saturating_duration_since(self.shared.origin);
        let (start, end) = (at(start), at(end));
        let span = Span { rank, stage, batch, start, end, on_device: false };
        self.shared.spans.lock().push(span);
    }

    /// Adds a stage whose times are known once the device gets there.
    #[cfg(feature = "cuda")]
    pub(crate) fn defer(&self, pending: Pending) {
        self.shared.pending.lock().push(pending);
    }

    /// Looks which stages on the device have ended.
    #[cfg(feature = "cuda")]
    fn resolve(&self) {
        let mut pending = self.shared.pending.lock();
        let mut spans = self.shared.spans.lock();
        pending.retain(|p| match p.measure(self.shared.origin) {
            Some(span) => {
                spans.extend(span);
                false
            }
            None => true,
        });
    }

    /// All stages that have ended, in the order of their starts.
    pub fn spans(&self) -> Vec<Span> {
        #[cfg(feature = "cuda")]
        self.resolve();
        let mut spans = self.shared.spans.lock().clone();
        spans.sort_by_key(|span| (span.start, span.end));
        spans
    }

    /// Forgets what was recorded.
    pub fn clear(&self) {
        #[cfg(feature = "cuda")]
        self.shared.pending.lock().clear();
        self.shared.spans.lock().clear();
    }

    /// The stages in the Chrome trace format, as JSON: a process per rank, a row per stage (those of
    /// devices apart), times in microseconds from the timeline's beginning.
    pub fn chrome_trace(&self) -> String {
        let spans = self.spans();
        let mut rows: Vec<(usize, bool, Stage)> =
            spans.iter().map(|s| (s.rank, s.on_device, s.stage)).collect();
        rows.sort_unstable();
        rows.dedup();
        let mut events: Vec<Value> = Vec::with_capacity(spans.len() + 2 * rows.len());
        for (i, &(rank, on_device, stage)) in rows.iter().enumerate() {
            if i == 0 || rows[i - 1].0 != rank {
                events.push(json!({"ph": "M", "name": "process_name", "pid": rank,
                    "args": {"name": format!("rank {rank}")}}));
            }
            let name = if on_device { format!("{stage} (device)") } else { stage.to_string() };
            events.push(json!({"ph": "M", "name": "thread_name", "pid": rank,
                "tid": row(on_device, stage), "args": {"name": name}}));
        }
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        events.extend(spans.iter().map(|s| {
            json!({"ph": "X", "name": format!("{} {}", s.stage, s.batch), "cat": s.stage.name(),
                "pid": s.rank, "tid": row(s.on_device, s.stage), "ts": micros(s.start),
                "dur": micros(s.end.saturating_sub(s.start)), "args": {"batch": s.batch}})
        }));
        json!({"displayTimeUnit": "ns", "traceEvents": events}).to_string()
    }
}

/// The number of a row among those of a rank.
fn row(on_device: bool, stage: Stage) -> usize {
    let stages = Stage::ALL.len();
    usize::from(on_device) * stages + stage as usize
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline").field("spans", &self.shared.spans.lock().len()).finish()
    }
}

#[cfg(feature = "cuda")]
impl Pending {
    /// `None`: not yet. Without a span: it never will be.
    fn measure(&self, beginning: Instant) -> Option<Option<Span>> {
        match self.end.is_done() {
            Ok(false) => return None,
            Ok(true) => {}
            Err(_) => return Some(None),
        }
        let (host, device) = (&self.origin.0, &self.origin.1);
        let zero = host.saturating_duration_since(beginning);
        let since = |event: &ep_kernels::cuda::Event| {
            let micros = event.micros_since(device).ok()?;
            Some(zero + Duration::from_nanos((micros.max(0.0) * 1e3) as u64))
        };
        let times = since(&self.start).zip(since(&self.end));
        Some(times.map(|(start, end)| {
            let &Self { rank, stage, batch, .. } = self;
            Span { rank, stage, batch, start, end, on_device: true }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_has_a_process_per_rank_and_a_row_per_stage() {
        let timeline = Timeline::new();
        let zero = timeline.shared.origin;
        let at = |from: u64, to: u64| {
            (zero + Duration::from_nanos(from), zero + Duration::from_nanos(to))
        };
        timeline.record(1, Stage::Experts, 7, at(9_000, 11_500));
        timeline.record(0, Stage::Dispatch, 7, at(5_000, 6_250));
        timeline.clone().record(0, Stage::Combine, 7, at(7_000, 7_000));
        let trace: Value = serde_json::from_str(&timeline.chrome_trace()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let of = |ph: &str| events.iter().filter(|e| e["ph"] == ph).collect::<Vec<_>>();
        let slices = of("X");
        let names: Vec<_> = slices.iter().map(|e| e["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["dispatch 7", "combine 7", "experts 7"]);
        let times = |e: &Value| (e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap());
        assert_eq!(times(slices[0]), (5.0, 1.25));
        assert_eq!(times(slices[1]), (7.0, 0.0));
        assert_eq!((&slices[2]["pid"], &slices[2]["args"]["batch"]), (&json!(1), &json!(7)));
        // Two processes and three rows are named, and no two rows of a process have one number.
        assert_eq!(of("M").len(), 5);
        assert_ne!(slices[0]["tid"], slices[1]["tid"]);
        timeline.clear();
        assert!(timeline.spans().is_empty());
        let empty: Value = serde_json::from_str(&timeline.chrome_trace()).unwrap();
        assert_eq!(empty["traceEvents"], json!([]));
    }

    #[test]
    fn a_stage_before_the_beginning_starts_at_it() {
        let before = Instant::now();
        let timeline = Timeline::new();
        timeline.record(0, Stage::Dispatch, 0, (before, before));
        assert_eq!(timeline.spans()[0].start, Duration::ZERO);
    }
}
