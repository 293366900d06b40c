//! Tables of benches whose rows are more than a time.

use std::fmt::Write as _;

use serde_json::Value;

use super::escape;
use crate::report::Row;

/// A heading, the metric it shows, what that is multiplied by, and digits.
type Column = (&'static str, &'static str, f64, usize);

/// A table: which rows it has, its heading, what it shows, and its columns behind the rows' names.
struct Table {
    name: &'static str,
    title: &'static str,
    about: &'static str,
    columns: &'static [Column],
}

const TABLES: [Table; 6] = [
    Table {
        name: "overlap",
        title: "Beside compute",
        about: "Calls alone, right behind compute (in the clocks it leaves) and while it runs, medians \
                in µs, and how much of what they are slower clocks and how much sharing the GPU \
                explain; compute alone on all SMs, alone on those left to it, and while calls run \
                back to back, in 10¹² operations per second; what it loses against both; clocks in \
                MHz.",
        columns: &[
            ("SMs asked", "sms_asked", 1.0, 0),
            ("taken", "sms_taken", 1.0, 0),
            ("alone", "alone_us", 1.0, 1),
            ("behind", "alone_warm_us", 1.0, 1),
            ("beside", "beside_us", 1.0, 1),
            ("slower %", "slowdown", 100.0, 1),
            ("by clocks %", "slowdown_by_clocks", 100.0, 1),
            ("by sharing %", "slowdown_by_contention", 100.0, 1),
            ("blocked", "blocked", 1.0, 0),
            ("compute, all SMs", "tflops_all", 1.0, 0),
            ("its SMs", "tflops_own", 1.0, 0),
            ("beside calls", "tflops_beside", 1.0, 0),
            ("loss %", "loss", 100.0, 1),
            ("loss in its SMs %", "loss_own", 100.0, 1),
            ("clock alone", "clock_alone_mhz", 1.0, 0),
            ("behind", "clock_alone_warm_mhz", 1.0, 0),
            ("beside", "clock_beside_mhz", 1.0, 0),
        ],
    },
    Table {
        name: "choice",
        title: "Plans in force against the best",
        about: "Of all launch plans, swept in the same layer, the best and the one that ships or that \
                tuning found, timed again in turns, medians in µs: at most 5 % apart.",
        columns: &[
            ("plans", "points", 1.0, 0),
            ("in force", "chosen_us", 1.0, 1),
            ("best", "best_us", 1.0, 1),
            ("above it %", "above_best", 100.0, 1),
        ],
    },
    Table {
        name: "tries",
        title: "Launch attributes beside full SMs",
        about: "How many of so many launches waited for the kernel that holds all other SMs. With an \
                unplanned margin, as many SMs are free as there are blocks.",
        columns: &[
            ("tries", "tries", 1.0, 0),
            ("blocked", "blocked", 1.0, 0),
            ("alone, µs", "alone_us", 1.0, 1),
            ("beside, µs", "beside_us", 1.0, 1),
            ("slower %", "slowdown", 100.0, 1),
        ],
    },
    Table {
        name: "pipeline",
        title: "Micro-batches that overlap",
        about: "Dispatch, GEMM and combine of micro-batches, medians in µs of each stage alone, against \
                what no schedule of such stages is shorter than; and the line of stages that are kept \
                busy by each other.",
        columns: &[
            ("micro-batches", "batches", 1.0, 0),
            ("dispatch", "dispatch_us", 1.0, 1),
            ("experts", "experts_us", 1.0, 1),
            ("combine", "combine_us", 1.0, 1),
            ("dispatch and combine at once", "pair_us", 1.0, 1),
            ("at the least", "ideal_us", 1.0, 0),
            ("stages busy", "busy_us", 1.0, 0),
            ("one by one", "serial_us", 1.0, 0),
            ("× the least", "ratio", 1.0, 3),
        ],
    },
    Table {
        name: "unroll summary",
        title: "Copies tuned beside compute",
        about: "The best way alone, the same beside compute, and the best beside compute; medians in \
                µs.",
        columns: &[
            ("SMs taken", "sms_taken", 1.0, 0),
            ("alone", "alone_us", 1.0, 1),
            ("overlapped", "overlapped_us", 1.0, 1),
            ("slower %", "overlapped", 100.0, 1),
            ("and tuned", "tuned_us", 1.0, 1),
            ("slower %", "tuned", 100.0, 1),
        ],
    },
    Table {
        name: "unroll",
        title: "Every way through an SM",
        about: "Loads and stores by unroll (u) and warps (w), bulk copies by stages × bytes and \
                warps; medians in µs. ● marks the best alone, beside a holder and beside the GEMM.",
        columns: &[
            ("alone", "alone_us", 1.0, 1),
            ("beside a holder", "holder_us", 1.0, 1),
            ("slower %", "holder_slowdown", 100.0, 1),
            ("beside the GEMM", "gemm_us", 1.0, 1),
            ("slower %", "gemm_slowdown", 100.0, 1),
        ],
    },
];

/// Metrics that say that a row's number in a column is the best.
const MARKS: [(&str, &str); 3] =
    [("alone_us", "best_alone"), ("holder_us", "best_holder"), ("gemm_us", "best_gemm")];

/// Whether a row belongs into one of these tables rather than into those of times.
pub(super) fn has(row: &Row) -> bool {
    TABLES.iter().any(|table| table.is_of(row))
}

/// All tables that have rows.
pub(super) fn draw(out: &mut String, rows: &[Row]) {
    for table in &TABLES {
        let rows: Vec<&Row> = rows.iter().filter(|row| table.is_of(row)).collect();
        if !rows.is_empty() {
            table.draw(out, &rows);
        }
    }
}

impl Table {
    fn is_of(&self, row: &Row) -> bool {
        row.metrics.get("table").and_then(Value::as_str) == Some(self.name)
    }

    fn draw(&self, out: &mut String, rows: &[&Row]) {
        let _ = write!(
            out,
            "<h2>{}</h2>\n<p class=\"dim\">{}</p>\n<div class=\"scroll\"><table class=\"named\">\
             <thead><tr><th>what</th>",
            self.title, self.about
        );
        // What is measured as a whole is in the rows themselves.
        for (head, ..) in self.columns {
            let _ = write!(out, "<th>{head}</th>");
        }
        out.push_str("<th>p50, µs</th><th>verdict</th></tr></thead><tbody>\n");
        for row in rows {
            let _ = write!(out, "<tr><td>{}</td>", escape(&name(row)));
            for column in self.columns {
                let _ = write!(out, "<td>{}</td>", cell(row, column));
            }
            let _ = writeln!(out, "<td>{:.1}</td>{}</tr>", row.p50_us, verdict(row));
        }
        out.push_str("</tbody></table></div>\n");
    }
}

fn name(row: &Row) -> String {
    let how = row.metrics.get("how").and_then(Value::as_str).unwrap_or_default();
    match row.metrics.get("path") {
        Some(_) => format!("{} {} SMs {how}", row.bench, row.sms),
        None => how.into(),
    }
}

fn cell(row: &Row, &(_, metric, scale, digits): &Column) -> String {
    let Some(value) = row.metrics.get(metric).and_then(Value::as_f64) else { return "–".into() };
    let is_best = |mark: &str| row.metrics.get(mark) == Some(&Value::Bool(true));
    let best = MARKS.iter().any(|(of, mark)| *of == metric && is_best(mark));
    format!("{:.digits$}{}", scale * value, if best { " ●" } else { "" })
}

/// The verdict, with what was missed.
fn verdict(row: &Row) -> String {
    let text = |value: &Value| value.as_str().map(String::from);
    if let Some(why) = row.metrics.get("refused").and_then(text) {
        return format!("<td title=\"{}\">refused</td>", escape(&why));
    }
    match row.metrics.get("verdict").and_then(text).as_deref() {
        Some("missed") => {
            let bounds = row.metrics.get("bounds").and_then(Value::as_array);
            let missed = bounds.into_iter().flatten().filter(|b| b["verdict"] == "missed");
            let what: Vec<String> = missed.filter_map(|b| text(&b["what"])).collect();
            format!("<td class=\"no\">missed: {}</td>", escape(&what.join(", ")))
        }
        Some(reached) => format!("<td>{}</td>", escape(reached)),
        None => "<td>–</td>".into(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::page;
    use super::*;
    use crate::report::tests::{report, row};

    fn tabled(table: &str, metrics: Value) -> Row {
        let mut row = row("dispatch", 1024);
        row.metrics.insert("table".into(), table.into());
        for (name, value) in metrics.as_object().unwrap() {
            row.metrics.insert(name.clone(), value.clone());
        }
        row
    }

    #[test]
    fn rows_of_a_table_are_shown_there_only() {
        let overlap = tabled(
            "overlap",
            json!({"how": "partition 16 dispatch gemm", "slowdown": 0.0512, "loss": null,
                "verdict": "missed",
                "bounds": [{"what": "slowdown", "verdict": "missed"},
                    {"what": "blocked", "verdict": "goal"}]}),
        );
        let unroll = tabled(
            "unroll",
            json!({"how": "ldst u4 w16", "path": "ldst", "alone_us": 399.96, "best_alone": true,
                "holder_us": 401.0, "best_holder": false}),
        );
        let page = page(&report(vec![row("combine", 64), overlap, unroll]));
        assert_eq!(page.matches("class=\"bar\"").count(), 1);
        assert_eq!(page.matches("<h2>Beside compute</h2>").count(), 1);
        assert!(page.contains("<td>partition 16 dispatch gemm</td>"));
        assert!(page.contains("<td>5.1</td>") && page.contains("<td>–</td>"));
        assert!(page.contains("missed: slowdown</td>") && !page.contains("slowdown, blocked"));
        assert!(page.contains("<td>400.0 ●</td>") && page.contains("<td>401.0</td>"));
        assert!(!page.contains("Micro-batches"));
    }

    #[test]
    fn a_refusal_is_told() {
        let refused = tabled("tries", json!({"how": "<b>", "refused": "a \"margin\" of 16"}));
        let page = page(&report(vec![refused]));
        assert!(page.contains("<td title=\"a &quot;margin&quot; of 16\">refused</td>"));
        assert!(page.contains("<td>&lt;b&gt;</td>") && !page.contains("No results"));
    }
}
