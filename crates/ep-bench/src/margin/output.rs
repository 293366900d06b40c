//! The study as text, as rows of the project's envelope, and as a page.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ep_topology::Margin;
use serde_json::{Value, json};

use super::study::{Combination, Predictions, Study, attributes};
use crate::report::{Report, Row};

/// One row per combination. `verified` says that nothing contradicts the predictions; these rows hold no times.
pub fn rows(study: &Study) -> Vec<Row> {
    study.combinations.iter().map(|c| row(c, study)).collect()
}

fn row(c: &Combination, study: &Study) -> Row {
    let launch = c.plan.launch;
    let margin = |margin: &Option<Margin>| match margin {
        Some(m) => json!({"practice": m.practice, "worst_case": m.worst_case, "bound": m.bound}),
        None => Value::Null,
    };
    let curve = |curve: &super::study::Curve| {
        let point = |p: &super::study::Point| json!([p.margin, p.trials, p.started, p.resident]);
        curve.0.iter().map(point).collect::<Vec<Value>>()
    };
    let metrics: [(&str, Value); 14] = [
        ("blocks", launch.blocks.into()),
        ("cluster", launch.cluster.into()),
        ("cooperative", launch.cooperative.into()),
        ("held_out", c.held_out.into()),
        ("device", study.predictions.device.clone().into()),
        ("predicted_starts", margin(&c.plan.starts)),
        ("predicted_all_resident", margin(&c.plan.all_resident)),
        ("observed_starts", c.plain.starts_from().into()),
        ("observed_first_start", c.plain.first_start().into()),
        ("observed_all_resident", c.plain.resident_from().into()),
        ("adversary_starts", c.adversary.starts_from().into()),
        ("adversary_all_resident", c.adversary.resident_from().into()),
        ("violations", c.violations().into()),
        // [margin, trials, trials that started, trials with all blocks resident]
        ("curves", json!({"plain": curve(&c.plain), "adversary": curve(&c.adversary)})),
    ];
    Row {
        bench: "margin".into(),
        transport: "none".into(),
        workload: "margin".into(),
        dtype: "none".into(),
        layout: "none".into(),
        ranks: 1,
        sms: launch.blocks,
        launch: attributes(&launch),
        verified: c.violations().is_empty(),
        metrics: metrics.into_iter().map(|(k, v)| (k.to_owned(), v)).collect::<BTreeMap<_, _>>(),
        ..Row::default()
    }
}

/// What is predicted, a line per launch.
pub fn predictions(predictions: &Predictions) -> String {
    let held_out: Vec<String> = predictions.held_out.iter().map(u32::to_string).collect();
    let head = format!(
        "Predicted for {}, before observing; held out: launches of {} blocks",
        predictions.device,
        held_out.join(", ")
    );
    let mut out = format!(
        "{}\n{:<30}{:>10}{:>12}{:>14}\n",
        crate::format::wrap(&head, crate::report::WIDTH, "  "),
        "launch",
        "starts at",
        "worst case",
        "all resident"
    );
    for plan in &predictions.plans {
        let number = |n: Option<u32>| n.map_or("never".to_owned(), |n| n.to_string());
        let _ = writeln!(
            out,
            "{:<30}{:>10}{:>12}{:>14}",
            super::study::title(&plan.launch),
            number(plan.starts.map(|m| m.practice.unwrap_or(m.worst_case))),
            number(plan.starts.map(|m| m.worst_case)),
            number(plan.all_resident.map(|m| m.worst_case)),
        );
    }
    out
}

/// Predicted and observed, a line per launch, with what contradicts the predictions.
pub fn table(study: &Study) -> String {
    let mut out = format!(
        "{:<30}{:>10}{:>9}{:>11}{:>11}  {}\n",
        "launch (* held out)", "predicted", "observed", "worst case", "adversary", "ok"
    );
    out.push_str(&"─".repeat(76));
    out.push('\n');
    for c in &study.combinations {
        let number = |n: Option<u32>| n.map_or("-".to_owned(), |n| n.to_string());
        let star = if c.held_out { " *" } else { "" };
        let violations = c.violations();
        let _ = writeln!(
            out,
            "{:<30}{:>10}{:>9}{:>11}{:>11}  {}",
            format!("{}{star}", super::study::title(&c.plan.launch)),
            number(c.plan.starts.map(|m| m.practice.unwrap_or(m.worst_case))),
            number(c.plain.starts_from()),
            number(c.plan.starts.map(|m| m.worst_case)),
            number(c.adversary.starts_from()),
            if violations.is_empty() { "yes" } else { "NO" }
        );
        for violation in violations {
            let _ = writeln!(out, "  {}", crate::format::wrap(&violation, 76, "    "));
        }
    }
    let _ = writeln!(out, "\n{} trials in {:.0} s", study.trials, study.elapsed.as_secs_f64());
    out
}

const STYLE: &str = ":root{color-scheme:light dark;--fg:#1c2330;--dim:#677083;--line:#d9dee7;--bg:#fff;\
--a:#3b6fd4;--b:#d4572b;--c:#3a9c6d}@media(prefers-color-scheme:dark){:root{--fg:#e4e8ef;--dim:#98a2b3;\
--line:#333b49;--bg:#12161d;--a:#6d9bf5;--b:#f08a5d;--c:#6cc79b}}body{font:15px/1.5 system-ui,sans-serif;\
color:var(--fg);background:var(--bg);max-width:64rem;margin:2rem auto;padding:0 1rem}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.2rem .6rem;\
border-bottom:1px solid var(--line);text-align:right}th:first-child,td:first-child{text-align:left}\
svg{width:100%;height:auto;font:11px system-ui,sans-serif}svg text{fill:var(--fg)}.dim{color:var(--dim)}\
.axis{stroke:var(--line)}.seen{stroke:var(--a);stroke-width:6}.pred{stroke:var(--b);stroke-width:2}\
.worst{stroke:var(--c);stroke-width:2;stroke-dasharray:3 2}.adv{fill:var(--c)}.no{color:var(--b);font-weight:600}";

/// A self-contained page.
pub fn page(report: &Report, study: &Study) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width\"><title>SM margins</title><style>{STYLE}</style></head><body>\n\
         <h1>SM margins: predicted and observed</h1>\n<p class=\"dim\">Commit {} · {} · {} trials</p>\n\
         <p>A holder keeps one block on every SM but the margin. Bars: from which margin on a launch started \
         in every trial. Full line: the margin predicted for this device. Dashed: the proved worst case. Dot: \
         the same beside holders that leave the most awkward SMs free. * not used to calibrate.</p>\n",
        escape(&report.commit),
        escape(&study.predictions.device),
        study.trials
    );
    chart(&mut out, study);
    out.push_str(
        "<table><thead><tr><th>launch</th><th>predicted</th><th>observed</th><th>worst case</th>\
         <th>adversary</th><th>all resident: observed</th><th>worst case</th><th>adversary</th><th></th></tr>\
         </thead><tbody>\n",
    );
    for c in &study.combinations {
        let violations = c.violations();
        let cells = [
            c.plan.starts.map(|m| m.practice.unwrap_or(m.worst_case)),
            c.plain.starts_from(),
            c.plan.starts.map(|m| m.worst_case),
            c.adversary.starts_from(),
            c.plain.resident_from(),
            c.plan.all_resident.map(|m| m.worst_case),
            c.adversary.resident_from(),
        ];
        let _ = write!(out, "<tr><td>{}</td>", escape(&label(c)));
        for cell in cells {
            let _ = write!(out, "<td>{}</td>", cell.map_or("–".to_owned(), |n| n.to_string()));
        }
        let text =
            if violations.is_empty() { "yes".to_owned() } else { escape(&violations.join("; ")) };
        let class = if violations.is_empty() { "" } else { " class=\"no\"" };
        let _ = writeln!(out, "<td{class}>{text}</td></tr>");
    }
    out.push_str("</tbody></table></body></html>\n");
    out
}

fn label(c: &Combination) -> String {
    format!("{}{}", super::study::title(&c.plan.launch), if c.held_out { " *" } else { "" })
}

fn chart(out: &mut String, study: &Study) {
    let worst = |c: &Combination| c.plan.starts.map_or(0, |m| m.worst_case);
    let most = study.combinations.iter().map(worst).max().unwrap_or(1).max(1) + 2;
    let x = |margin: u32| 240.0 + 640.0 * f64::from(margin) / f64::from(most);
    let height = 18 * study.combinations.len() + 36;
    let _ = writeln!(out, "<svg viewBox=\"0 0 900 {height}\" role=\"img\" aria-label=\"margins\">");
    for tick in (0..=most).step_by(8) {
        let at = x(tick);
        let _ = writeln!(
            out,
            "<line class=\"axis\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"18\" y2=\"{height}\"/>\
             <text x=\"{at:.1}\" y=\"12\" text-anchor=\"middle\">{tick}</text>"
        );
    }
    for (i, c) in study.combinations.iter().enumerate() {
        let y = 30 + 18 * i;
        let _ = write!(
            out,
            "<text x=\"232\" y=\"{}\" text-anchor=\"end\">{}</text>",
            y + 4,
            escape(&label(c))
        );
        if let Some(seen) = c.plain.starts_from() {
            let (from, to) = (x(seen), x(most));
            let _ = write!(
                out,
                "<line class=\"seen\" x1=\"{from:.1}\" x2=\"{to:.1}\" y1=\"{y}\" y2=\"{y}\"/>"
            );
        }
        let mut mark = |class: &str, at: Option<u32>| {
            if let Some(at) = at {
                let (at, top, bottom) = (x(at), y - 7, y + 7);
                let _ = write!(
                    out,
                    "<line class=\"{class}\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{top}\" y2=\"{bottom}\"/>"
                );
            }
        };
        mark("pred", c.plan.starts.map(|m| m.practice.unwrap_or(m.worst_case)));
        mark("worst", c.plan.starts.map(|m| m.worst_case));
        if let Some(at) = c.adversary.starts_from() {
            let _ = write!(out, "<circle class=\"adv\" cx=\"{:.1}\" cy=\"{y}\" r=\"3\"/>", x(at));
        }
        out.push('\n');
    }
    out.push_str("</svg>\n");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
