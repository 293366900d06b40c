//! A report to look at: one HTML file that needs nothing else.

mod tables;

use std::fmt::Write as _;

use crate::format::{bytes, micros};
use crate::report::{Report, Row, footnote};

const STYLE: &str = "\
:root{color-scheme:light dark;--fg:#1c2330;--dim:#677083;--line:#d9dee7;--bg:#fff;--bar:#3b6fd4;\
--tail:#a9c1ee;--mark:#d4572b}\
@media(prefers-color-scheme:dark){:root{--fg:#e4e8ef;--dim:#98a2b3;--line:#333b49;--bg:#12161d;\
--bar:#6d9bf5;--tail:#34507f;--mark:#f08a5d}}\
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);max-width:64rem;\
margin:2rem auto;padding:0 1rem}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}\
.dim,svg .dim{color:var(--dim);fill:var(--dim)}.scroll{overflow-x:auto}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums;white-space:nowrap}\
th,td{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:right}\
th:nth-child(-n+5),td:nth-child(-n+5){text-align:left}\
.named th:nth-child(n+2),.named td:nth-child(n+2){text-align:right}.no{color:var(--mark);font-weight:600}\
svg{width:100%;height:auto;font:12px system-ui,sans-serif}svg text{fill:var(--fg)}\
.bar{fill:var(--bar)}.tail{fill:var(--tail)}.mark{stroke:var(--mark);stroke-width:2}\
.axis{stroke:var(--line)}.s0{stroke:var(--bar);fill:var(--bar)}.s1{stroke:var(--mark);\
fill:var(--mark)}.s2{stroke:#3a9c6d;fill:#3a9c6d}.s3{stroke:#a561c9;fill:#a561c9}\
path.s0,path.s1,path.s2,path.s3{fill:none;stroke-width:2}";

/// The whole page.
pub fn page(report: &Report) -> String {
    let machine = &report.machine;
    let mut out = String::from("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    let _ = write!(
        out,
        "<meta name=\"viewport\" content=\"width=device-width\"><title>Expert parallelism: \
         {} results</title><style>{STYLE}</style></head><body>\n<h1>Dispatch and combine</h1>\n\
         <p class=\"dim\">Commit {} · {}, {} cores, {} · Linux {} {}{}</p>\n",
        report.results.len(),
        escape(&report.commit),
        escape(&machine.cpu),
        machine.cores,
        bytes(machine.memory_bytes as f64),
        escape(&machine.kernel),
        escape(&machine.arch),
        machine.gpus.iter().map(|gpu| format!(" · {}", escape(gpu))).collect::<String>(),
    );
    if report.results.is_empty() {
        out.push_str("<p>No results.</p>\n");
    } else {
        tables::draw(&mut out, &report.results);
        times(&mut out, report.results.iter().filter(|row| !tables::has(row)).cloned().collect());
        if let Some(note) = footnote(report) {
            let _ = writeln!(out, "<p class=\"dim\">{}</p>", escape(&note));
        }
    }
    out.push_str("</body></html>\n");
    out
}

/// What rows that have no table of their own show: times.
fn times(out: &mut String, rows: Vec<Row>) {
    if rows.is_empty() {
        return;
    }
    bars(out, &rows);
    for plot in Plot::of(&rows) {
        plot.draw(out);
    }
    table(out, &rows);
}

/// `text` with what has a meaning in HTML replaced.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// Times as horizontal bars: median, the tail up to p90, and the limit as a line.
fn bars(out: &mut String, rows: &[Row]) {
    let longest =
        rows.iter().flat_map(|r| [r.p90_us, r.limit_us.unwrap_or(0.0)]).fold(0.0, f64::max);
    let scale = 560.0 / if longest > 0.0 { longest } else { 1.0 };
    let height = 24 * rows.len() + 8;
    let _ = write!(
        out,
        "<h2>Time per call</h2>\n<p class=\"dim\">Median, and up to the 90th percentile; the line \
         is the limit measured in the same run.</p>\n<svg viewBox=\"0 0 920 {height}\" role=\"img\" \
         aria-label=\"time per call\">\n"
    );
    for (i, row) in rows.iter().enumerate() {
        let (y, p50, p90) = (24 * i + 4, row.p50_us * scale, row.p90_us * scale);
        let _ = write!(
            out,
            "<g><title>{}</title><text x=\"232\" y=\"{}\" text-anchor=\"end\">{}</text>\
             <rect class=\"tail\" x=\"240\" y=\"{y}\" width=\"{p90:.1}\" height=\"16\"/>\
             <rect class=\"bar\" x=\"240\" y=\"{y}\" width=\"{p50:.1}\" height=\"16\"/>",
            escape(&describe(row)),
            y + 12,
            escape(&label(row)),
        );
        if let Some(limit) = row.limit_us {
            let x = 240.0 + limit * scale;
            let _ = write!(
                out,
                "<line class=\"mark\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{}\" y2=\"{}\"/>",
                y - 2,
                y + 18
            );
        }
        let end = 246.0 + p90.max(row.limit_us.unwrap_or(0.0) * scale);
        let _ = writeln!(
            out,
            "<text class=\"dim\" x=\"{end:.1}\" y=\"{}\">{}</text></g>",
            y + 12,
            micros(row.p50_us)
        );
    }
    out.push_str("</svg>\n");
}

fn label(row: &Row) -> String {
    let layout = if row.layout == "expert-major" { " expert" } else { "" };
    crate::format::cut(&format!("{}{layout}", row.title()), 34)
}

fn describe(row: &Row) -> String {
    let limit = row.limit_us.map(|us| format!(", limit {}", micros(us))).unwrap_or_default();
    format!(
        "{} {} {}: p50 {}, p90 {}, min {}{limit}",
        row.transport,
        row.title(),
        row.layout,
        micros(row.p50_us),
        micros(row.p90_us),
        micros(row.min_us)
    )
}

/// Lines of one size against another; made where a size takes several values.
struct Plot {
    title: String,
    unit: &'static str,
    series: Vec<(String, Vec<(f64, f64)>)>,
}

/// A name and how to find the number it stands for.
type Size = (&'static str, fn(&Row) -> usize);
/// A name, its unit and how to find the number.
type Value = (&'static str, &'static str, fn(&Row) -> f64);

impl Plot {
    fn of(rows: &[Row]) -> Vec<Plot> {
        let sizes: [Size; 2] = [("tokens per rank", |r| r.tokens), ("ranks", |r| r.ranks)];
        let values: [Value; 2] =
            [("Time", "µs", |r| r.p50_us), ("Rate", "GB/s", |r| r.logical_gbps)];
        let mut plots = Vec::new();
        for (size_name, size) in sizes {
            for (value_name, unit, value) in values {
                let mut series: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
                for row in rows.iter().filter(|row| value(row) > 0.0) {
                    let other = if size_name == "ranks" {
                        format!("{} tokens", row.tokens)
                    } else {
                        format!("{} ranks", row.ranks)
                    };
                    let name = format!("{} {} {} {other}", row.bench, row.dtype, row.layout);
                    let point = (size(row) as f64, value(row));
                    match series.iter_mut().find(|s| s.0 == name) {
                        Some(s) => s.1.push(point),
                        None => series.push((name, vec![point])),
                    }
                }
                series.iter_mut().for_each(|s| s.1.sort_by(|a, b| a.0.total_cmp(&b.0)));
                series.retain(|s| s.1.first().map(|p| p.0) != s.1.last().map(|p| p.0));
                if !series.is_empty() {
                    plots.push(Plot {
                        title: format!("{value_name} by {size_name}"),
                        unit,
                        series,
                    });
                }
            }
        }
        plots
    }

    /// Both axes logarithmic: sizes and times span decades.
    fn draw(&self, out: &mut String) {
        let points = || self.series.iter().flat_map(|s| &s.1);
        let range = |pick: fn(&(f64, f64)) -> f64| {
            let low = points().map(pick).fold(f64::MAX, f64::min).max(1e-9).log2();
            let high = points().map(pick).fold(0.0, f64::max).max(1e-9).log2();
            (low, (high - low).max(1e-9))
        };
        let ((x0, xs), (y0, ys)) = (range(|p| p.0), range(|p| p.1));
        let x = |v: f64| 70.0 + 620.0 * (v.max(1e-9).log2() - x0) / xs;
        let y = |v: f64| 270.0 - 250.0 * (v.max(1e-9).log2() - y0) / ys;
        let height = 310.max(40 + 18 * self.series.len());
        let _ = write!(
            out,
            "<h2>{}</h2>\n<svg viewBox=\"0 0 920 {height}\" role=\"img\" aria-label=\"{}\">\n\
             <line class=\"axis\" x1=\"70\" x2=\"690\" y1=\"270\" y2=\"270\"/>\
             <line class=\"axis\" x1=\"70\" x2=\"70\" y1=\"20\" y2=\"270\"/>\n",
            escape(&self.title),
            escape(&self.title)
        );
        let mut sizes: Vec<f64> = points().map(|p| p.0).collect();
        sizes.sort_by(f64::total_cmp);
        sizes.dedup();
        for size in sizes.iter().step_by(sizes.len().div_ceil(12)) {
            let _ = writeln!(
                out,
                "<text class=\"dim\" x=\"{:.1}\" y=\"290\" text-anchor=\"middle\">{size}</text>",
                x(*size)
            );
        }
        for step in 0..=4 {
            let value = (y0 + ys * f64::from(step) / 4.0).exp2();
            let text = if self.unit == "µs" { micros(value) } else { format!("{value:.3}") };
            let _ = writeln!(
                out,
                "<text class=\"dim\" x=\"62\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                y(value) + 4.0
            );
        }
        for (i, (name, points)) in self.series.iter().enumerate() {
            let class = format!("s{}", i % 4);
            let path: Vec<String> =
                points.iter().map(|p| format!("{:.1},{:.1}", x(p.0), y(p.1))).collect();
            let _ = write!(out, "<path class=\"{class}\" d=\"M{}\"/>", path.join(" L"));
            for p in points {
                let _ = write!(
                    out,
                    "<circle class=\"{class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"><title>{} at {}: \
                     {:.2} {}</title></circle>",
                    x(p.0),
                    y(p.1),
                    escape(name),
                    p.0,
                    p.1,
                    self.unit
                );
            }
            let _ = writeln!(
                out,
                "<circle class=\"{class}\" cx=\"706\" cy=\"{}\" r=\"4\"/><text x=\"716\" y=\"{}\">{}</text>",
                26 + 18 * i,
                30 + 18 * i,
                escape(&crate::format::cut(name, 34))
            );
        }
        out.push_str("</svg>\n");
    }
}

fn table(out: &mut String, rows: &[Row]) {
    out.push_str("<h2>All results</h2>\n<div class=\"scroll\"><table><thead><tr>");
    for head in [
        "bench",
        "transport",
        "workload",
        "dtype",
        "layout",
        "ranks",
        "tokens",
        "hidden",
        "top-k",
        "experts",
        "p50",
        "p90",
        "min",
        "wire GB/s",
        "logical GB/s",
        "limit",
        "of limit",
        "verified",
    ] {
        let _ = write!(out, "<th>{head}</th>");
    }
    out.push_str("</tr></thead><tbody>\n");
    for row in rows {
        out.push_str("<tr>");
        let limit = match (row.limit_us, &row.limit_kind) {
            (Some(us), Some(kind)) => format!("{} ({kind})", micros(us)),
            _ => "–".into(),
        };
        let cells = [
            row.bench.clone(),
            row.transport.clone(),
            row.workload.clone(),
            row.dtype.clone(),
            row.layout.clone(),
            row.ranks.to_string(),
            row.tokens.to_string(),
            row.hidden.to_string(),
            row.topk.to_string(),
            row.experts.to_string(),
            micros(row.p50_us),
            micros(row.p90_us),
            micros(row.min_us),
            format!("{:.2}", row.wire_gbps),
            format!("{:.2}", row.logical_gbps),
            limit,
            row.wire_share.map_or("–".into(), |share| format!("{:.0} %", 100.0 * share)),
        ];
        for cell in cells {
            let _ = write!(out, "<td>{}</td>", escape(&cell));
        }
        out.push_str(match (row.verified, row.partial()) {
            (true, false) => "<td>yes</td></tr>\n",
            (true, true) => "<td>yes*</td></tr>\n",
            (false, _) => "<td class=\"no\">no</td></tr>\n",
        });
    }
    out.push_str("</tbody></table></div>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::{report, row};

    fn count(page: &str, what: &str) -> usize {
        page.matches(what).count()
    }

    #[test]
    fn one_result_is_a_page_without_lines() {
        let page = page(&report(vec![row("dispatch", 1024)]));
        assert_eq!(count(&page, "<tr>"), 2);
        assert_eq!(count(&page, "class=\"bar\""), 1);
        assert_eq!(count(&page, "<path"), 0, "nothing varies");
        assert!(page.contains("12.3 ms") && page.contains("11.0 ms (in-run copy)"));
    }

    #[test]
    fn a_hundred_results_are_all_there() {
        let rows = (0..100).map(|i| row("dispatch", 16 + i)).collect();
        let page = page(&report(rows));
        assert_eq!(count(&page, "<tr>"), 101);
        assert_eq!(count(&page, "class=\"bar\""), 100);
        assert_eq!(count(&page, "<svg"), count(&page, "</svg>"));
        assert_eq!(count(&page, "<h2>Time by tokens per rank"), 1);
        assert!(!page.contains("NaN") && !page.contains("inf\""));
    }

    #[test]
    fn pages_need_nothing_from_elsewhere() {
        let page = page(&report(vec![row("dispatch", 1), row("dispatch", 2)]));
        for outside in ["http", "src=", "href=", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
        assert!(page.contains("prefers-color-scheme:dark"));
    }

    #[test]
    fn names_cannot_break_the_page() {
        let mut odd = row("<script>", 1);
        odd.dtype = "\"&'".into();
        let page = page(&report(vec![odd]));
        assert!(!page.contains("<script>") && page.contains("&lt;script&gt;"));
    }

    #[test]
    fn failures_show() {
        let mut bad = row("dispatch", 1);
        bad.verified = false;
        assert!(page(&report(vec![bad])).contains("class=\"no\""));
        assert!(page(&report(vec![])).contains("No results"));
    }

    #[test]
    fn a_partial_verification_shows() {
        let mut part = row("combine", 64);
        assert!(!page(&report(vec![part.clone()])).contains("yes*"));
        part.metrics.insert("verified_tokens".into(), 32.into());
        let page = page(&report(vec![part]));
        assert!(page.contains("<td>yes*</td>") && page.contains("at least 32"));
    }
}
