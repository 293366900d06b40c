//! Phases of every rank in the Chrome trace format, for Perfetto or `chrome://tracing`.

use serde::{Deserialize, Serialize};
use serde_json::json;

/// One phase of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// `barrier`, `dispatch`, `copy`, …
    pub name: String,
    /// The rank.
    pub rank: usize,
    /// Start in nanoseconds of the clock all ranks share.
    pub start_ns: u64,
    /// End in nanoseconds of the same clock.
    pub end_ns: u64,
}

/// The spans of one case.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaseTrace {
    /// Its name.
    pub title: String,
    /// Phases of all ranks.
    pub spans: Vec<Span>,
}

/// The trace as JSON: a process per case, a thread per rank, microseconds from the first start.
pub fn json(cases: &[CaseTrace]) -> String {
    let spans = cases.iter().flat_map(|case| &case.spans);
    let zero = spans.map(|span| span.start_ns).min().unwrap_or(0);
    let micros = |ns: u64| ns as f64 / 1e3;
    let mut events = Vec::new();
    for (pid, case) in cases.iter().enumerate() {
        events.push(json!({"ph": "M", "name": "process_name", "pid": pid,
            "args": {"name": case.title}}));
        let mut ranks: Vec<usize> = case.spans.iter().map(|span| span.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        for rank in ranks {
            events.push(json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": rank,
                "args": {"name": format!("rank {rank}")}}));
        }
        for span in &case.spans {
            events.push(json!({"ph": "X", "name": span.name, "cat": "bench", "pid": pid,
                "tid": span.rank, "ts": micros(span.start_ns - zero),
                "dur": micros(span.end_ns.saturating_sub(span.start_ns))}));
        }
    }
    let mut text = json!({"displayTimeUnit": "ns", "traceEvents": events}).to_string();
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_per_rank_and_time_from_zero() {
        let span =
            |rank, start_ns, end_ns| Span { name: "dispatch".into(), rank, start_ns, end_ns };
        let case = CaseTrace {
            title: "dispatch bf16".into(),
            spans: vec![span(1, 9000, 11_500), span(0, 5000, 6000)],
        };
        let trace: serde_json::Value = serde_json::from_str(&json(&[case])).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let names: Vec<_> = events.iter().filter(|e| e["ph"] == "M").collect();
        assert_eq!(names.len(), 3);
        let slices: Vec<_> = events.iter().filter(|e| e["ph"] == "X").collect();
        assert_eq!((slices[0]["ts"].as_f64(), slices[0]["dur"].as_f64()), (Some(4.0), Some(2.5)));
        assert_eq!((slices[1]["ts"].as_f64(), &slices[1]["tid"]), (Some(0.0), &json!(0)));
    }

    #[test]
    fn no_cases_no_events() {
        let trace: serde_json::Value = serde_json::from_str(&json(&[])).unwrap();
        assert_eq!(trace["traceEvents"], json!([]));
    }
}
