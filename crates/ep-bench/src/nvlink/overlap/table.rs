//! The results as text of at most 80 columns.

use std::fmt::Write as _;

use serde_json::Value;

use crate::report::{Report, Row};

/// All tables that `report` has rows for.
pub(in crate::nvlink) fn table(report: &Report) -> String {
    let mut out = String::new();
    let of = |name: &str| {
        let name = Value::from(name);
        report.results.iter().filter(move |row| row.metrics.get("table") == Some(&name))
    };
    let mut head = true;
    for row in of("overlap") {
        if std::mem::take(&mut head) {
            let _ = writeln!(
                out,
                "{:<30}{:>4} {:>6} {:>6} {:>6} {:>6} {:>5} {:>5}",
                "calls and compute, µs",
                "SMs",
                "alone",
                "behind",
                "beside",
                "slower",
                "loss",
                "MHz"
            );
        }
        let _ = writeln!(
            out,
            "{:<30}{:>4} {:>6} {:>6} {:>6} {:>6} {:>5} {:>5} {}",
            text(row, "how"),
            number(row, "sms_taken", 1.0, 0),
            number(row, "alone_us", 1.0, 0),
            number(row, "alone_warm_us", 1.0, 0),
            number(row, "beside_us", 1.0, 0),
            number(row, "slowdown", 100.0, 1),
            number(row, "loss", 100.0, 1),
            number(row, "clock_beside_mhz", 1.0, 0),
            mark(row)
        );
    }
    for row in of("tries") {
        let refused = if row.metrics["refused"].is_null() { "" } else { " refused" };
        let _ = writeln!(
            out,
            "{:<60} {:>4} of {:>4}{refused} {}",
            text(row, "how"),
            number(row, "blocked", 1.0, 0),
            number(row, "tries", 1.0, 0),
            mark(row)
        );
    }
    for row in of("pipeline") {
        let times = ["dispatch_us", "experts_us", "combine_us"].map(|t| number(row, t, 1.0, 0));
        let _ = writeln!(
            out,
            "{}: {:.0} µs, at least {} ({}), {}× {}",
            text(row, "how"),
            row.p50_us,
            number(row, "ideal_us", 1.0, 0),
            times.join(" + "),
            number(row, "ratio", 1.0, 3),
            mark(row)
        );
    }
    for row in of("unroll summary") {
        let _ = writeln!(
            out,
            "{}: {} µs alone ({}), +{} % beside, +{} % tuned ({}) {}",
            text(row, "how"),
            number(row, "alone_us", 1.0, 0),
            text(row, "alone_how"),
            number(row, "overlapped", 100.0, 1),
            number(row, "tuned", 100.0, 1),
            text(row, "tuned_how"),
            mark(row)
        );
    }
    out
}

fn text<'r>(row: &'r Row, name: &str) -> &'r str {
    row.metrics.get(name).and_then(Value::as_str).unwrap_or_default()
}

/// A number times `scale`, or a dash.
fn number(row: &Row, name: &str, scale: f64, digits: usize) -> String {
    let value = row.metrics.get(name).and_then(Value::as_f64);
    value.map_or("-".into(), |value| format!("{:.digits$}", scale * value))
}

fn mark(row: &Row) -> &str {
    match text(row, "verdict") {
        "missed" => "MISS",
        verdict => verdict,
    }
}
