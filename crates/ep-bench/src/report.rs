//! Results: the JSON envelope, the terminal's table, and what to try next.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::format::{cut, micros, wrap};
use crate::machine::Machine;
use crate::{BenchError, Result};

/// The version of the envelope.
pub const SCHEMA: u32 = 1;
/// The width that terminal output keeps to.
pub const WIDTH: usize = 80;

/// A set of results and where they are from. Every bench of the project writes this.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The commit that was measured.
    pub commit: String,
    /// The machine it ran on.
    pub machine: Machine,
    /// One row per measurement.
    pub results: Vec<Row>,
}

/// One measurement. Times are microseconds, rates 10⁹ bytes per second.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// `dispatch`, `combine`, `roundtrip`, `layout`, …
    pub bench: String,
    /// `host`, `nvlink`, …
    pub transport: String,
    /// `train`, `decode`, … or `custom`.
    pub workload: String,
    /// `bf16`, `fp8`, …
    pub dtype: String,
    /// `rank-major` or `expert-major`.
    pub layout: String,
    /// Ranks.
    pub ranks: usize,
    /// Tokens per rank (the most, where ranks differ).
    pub tokens: usize,
    /// Elements of a row.
    pub hidden: usize,
    /// Experts per token.
    pub topk: usize,
    /// Experts of the whole job.
    pub experts: usize,
    /// Streaming multiprocessors used; 0 on hosts.
    pub sms: u32,
    /// `plain`, `cooperative`, `cluster2`, …
    pub launch: String,
    /// Whether the routing of an earlier dispatch was used again.
    pub cached: bool,
    /// Whether everything compared was equal: before timing, and the last timed run.
    pub verified: bool,
    /// Half of the runs were not slower than this; the slowest rank counts.
    pub p50_us: f64,
    /// Nine of ten runs were not slower than this.
    pub p90_us: f64,
    /// The fastest run.
    pub min_us: f64,
    /// Bytes between different ranks, of the busiest one, per median time.
    pub wire_gbps: f64,
    /// Bytes of all rows of the busiest rank, its own included, per median time.
    pub logical_gbps: f64,
    /// What the same bytes take at the limit, measured in the same run; absent without a limit.
    pub limit_us: Option<f64>,
    /// What the limit is: `in-run copy` on hosts, `copy engine` on GPUs.
    pub limit_kind: Option<String>,
    /// The share of the limit that is reached: `limit_us / p50_us`.
    pub wire_share: Option<f64>,
    /// More numbers of this bench.
    pub metrics: BTreeMap<String, Value>,
}

impl Report {
    /// An empty report of this machine.
    pub fn new(commit: String, machine: Machine) -> Self {
        Self { schema: SCHEMA, commit, machine, results: Vec::new() }
    }

    /// The envelope as JSON, ending in a newline: indented, but for rows, of which each is a line.
    /// Sweeps have hundreds.
    pub fn json(&self) -> String {
        let head = Self { results: Vec::new(), ..self.clone() };
        let mut text = serde_json::to_string_pretty(&head).expect("a report is plain data");
        let rows: Vec<String> = self
            .results
            .iter()
            .map(|row| format!("    {}", serde_json::to_string(row).expect("a row is plain data")))
            .collect();
        if !rows.is_empty() {
            // The empty list is the last of the envelope.
            let end = text.rfind("[]").expect("results are a list");
            text.truncate(end);
            text.push_str(&format!("[\n{}\n  ]\n}}", rows.join(",\n")));
        }
        text.push('\n');
        text
    }

    /// Reads an envelope.
    ///
    /// # Errors
    /// Text that is none, or of another version.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let report: Self = serde_json::from_str(text).map_err(|e| e.to_string())?;
        if report.schema != SCHEMA {
            return Err(format!("schema {} instead of {SCHEMA}", report.schema));
        }
        Ok(report)
    }

    /// The results as a table of at most [`WIDTH`] columns, without colours.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let head =
            ["bench", "dtype", "layout", "ranks", "tokens", "p50", "p90", "GB/s", "limit", "ok"];
        line(&mut out, &head.map(String::from));
        out.push_str(&"─".repeat(out.trim_end().chars().count()));
        out.push('\n');
        for row in &self.results {
            line(&mut out, &row.cells());
        }
        out
    }
}

/// Width and alignment (left or not) of the table's columns; with the spaces between: 79.
const COLUMNS: [(usize, bool); 10] = [
    (9, true),
    (9, true),
    (6, true),
    (5, false),
    (6, false),
    (8, false),
    (8, false),
    (6, false),
    (5, false),
    (4, true),
];

fn line(out: &mut String, cells: &[String; 10]) {
    let mut text = String::new();
    for (cell, (width, left)) in cells.iter().zip(COLUMNS) {
        let cell = cut(cell, width);
        let _ =
            if left { write!(text, "{cell:<width$} ") } else { write!(text, "{cell:>width$} ") };
    }
    out.push_str(text.trim_end());
    out.push('\n');
}

impl Row {
    fn cells(&self) -> [String; 10] {
        let layout = self.layout.strip_suffix("-major").unwrap_or(&self.layout);
        let rate =
            if self.logical_gbps > 0.0 { format!("{:.2}", self.logical_gbps) } else { "-".into() };
        [
            self.bench.clone(),
            self.dtype.clone(),
            layout.into(),
            self.ranks.to_string(),
            self.tokens.to_string(),
            micros(self.p50_us),
            micros(self.p90_us),
            rate,
            self.wire_share.map_or("-".into(), |share| format!("{:.0}%", 100.0 * share)),
            match (self.verified, self.partial()) {
                (false, _) => "NO",
                (true, true) => "yes*",
                (true, false) => "yes",
            }
            .into(),
        ]
    }

    /// Whether it was verified with fewer tokens than it was timed with.
    pub fn partial(&self) -> bool {
        let verified = self.metrics.get("verified_tokens").and_then(Value::as_u64);
        verified.is_some_and(|tokens| tokens < self.tokens as u64)
    }

    /// A short name: `dispatch bf16 4×1024`.
    pub fn title(&self) -> String {
        format!("{} {} {}×{}", self.bench, self.dtype, self.ranks, self.tokens)
    }
}

/// What the columns mean, for below the table.
pub fn legend() -> String {
    wrap(
        "Tokens are per rank. Times are those of the slowest rank. GB/s are rows of the busiest \
         rank, its own included, in 10⁹ bytes; limit is the share of a plain copy of as many \
         bytes, one thread per rank, in the same run. ok: compared bit by bit before timing, and \
         again the last timed run.",
        WIDTH,
        "",
    )
}

/// What an asterisk in the table stands for, if there is one.
pub fn footnote(report: &Report) -> Option<String> {
    let fewest = |row: &Row| row.metrics.get("verified_tokens").and_then(Value::as_u64);
    let fewest = report.results.iter().filter(|row| row.partial()).filter_map(fewest).min()?;
    let text = format!(
        "* compared with the oracle with fewer tokens than were timed (verified_tokens, at least \
         {fewest}); with all tokens, the last timed run with the first run."
    );
    Some(wrap(&text, WIDTH, ""))
}

/// What a user may want to run next, given what was run.
pub fn next_steps(report: &Report, command: &str) -> Vec<String> {
    let has = |bench: &str| report.results.iter().any(|row| row.bench == bench);
    let layouts = |name: &str| report.results.iter().any(|row| row.layout == name);
    let mut steps = Vec::new();
    let mut step = |wanted: bool, args: &str, why: &str| {
        if wanted {
            steps.push(format!("{:<44} {why}", format!("{command} {args}")));
        }
    };
    step(!has("roundtrip"), "roundtrip", "dispatch and combine together");
    step(!layouts("expert-major"), "--layout expert-major", "rows grouped for a GEMM");
    step(true, "sweep --html sweep.html", "over token counts, with plots");
    step(true, "--routing zipf:1.2", "uneven experts; or your own .npy");
    step(true, "--ranks 4 --processes", "a process per rank");
    steps
}

/// Writes `text` to `path`, making its folder if need be.
///
/// # Errors
/// What the operating system says, with the path.
pub fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
        fs::create_dir_all(folder).map_err(|e| BenchError::io(folder, e))?;
    }
    fs::write(path, text).map_err(|e| BenchError::io(path, e))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn row(bench: &str, tokens: usize) -> Row {
        Row {
            bench: bench.into(),
            transport: "host".into(),
            workload: "host".into(),
            dtype: "bf16".into(),
            layout: "rank-major".into(),
            ranks: 4,
            tokens,
            hidden: 7168,
            topk: 8,
            experts: 64,
            sms: 0,
            launch: "plain".into(),
            cached: false,
            verified: true,
            p50_us: 12_345.5,
            p90_us: 13_000.0,
            min_us: 12_000.0,
            wire_gbps: 3.25,
            logical_gbps: 4.5,
            limit_us: Some(11_000.0),
            limit_kind: Some("in-run copy".into()),
            wire_share: Some(0.891),
            metrics: BTreeMap::from([("seed".into(), Value::from(1))]),
        }
    }

    pub(crate) fn report(rows: Vec<Row>) -> Report {
        let machine = Machine {
            cpu: "A CPU".into(),
            cores: 2,
            memory_bytes: 1 << 30,
            kernel: "6.1".into(),
            arch: "x86_64".into(),
            gpus: vec![],
        };
        Report { results: rows, ..Report::new("abc".into(), machine) }
    }

    #[test]
    fn json_is_the_envelope() {
        let mut text = report(vec![row("dispatch", 1024)]).json();
        text.retain(|c| c != '\n' && c != ' ');
        assert_eq!(
            text,
            r#"{"schema":1,"commit":"abc","machine":{"cpu":"ACPU","cores":2,"#.to_owned()
                + r#""memory_bytes":1073741824,"kernel":"6.1","arch":"x86_64","gpus":[]},"#
                + r#""results":[{"bench":"dispatch","transport":"host","workload":"host","#
                + r#""dtype":"bf16","layout":"rank-major","ranks":4,"tokens":1024,"hidden":7168,"#
                + r#""topk":8,"experts":64,"sms":0,"launch":"plain","cached":false,"#
                + r#""verified":true,"p50_us":12345.5,"p90_us":13000.0,"min_us":12000.0,"#
                + r#""wire_gbps":3.25,"logical_gbps":4.5,"limit_us":11000.0,"#
                + r#""limit_kind":"in-runcopy","wire_share":0.891,"metrics":{"seed":1}}]}"#
        );
    }

    #[test]
    fn json_has_a_row_a_line() {
        let text = |rows| report(rows).json();
        let lines = |text: &str| text.lines().count();
        let empty = text(vec![]);
        assert!(empty.ends_with("\"results\": []\n}\n"), "{empty}");
        let two = text(vec![row("dispatch", 1), row("combine", 2)]);
        assert_eq!(lines(&two), lines(&empty) + 3);
        assert_eq!(two.lines().filter(|line| line.contains("\"bench\"")).count(), 2);
    }

    #[test]
    fn json_comes_back() {
        let report = report(vec![row("dispatch", 1), row("combine", 2)]);
        assert_eq!(Report::parse(&report.json()).unwrap(), report);
        let other = report.json().replace("\"schema\": 1", "\"schema\": 2");
        assert!(Report::parse(&other).unwrap_err().contains("schema 2"));
        assert!(Report::parse("{}").is_err());
    }

    #[test]
    fn the_table_fits_and_says_what_failed() {
        let mut bad = row("roundtrip-of-a-long-name", 1_000_000_000);
        bad.dtype = "fp8-ue8m0-and-more".into();
        bad.verified = false;
        bad.wire_share = None;
        let table = report(vec![row("dispatch", 1024), bad]).table();
        assert!(table.lines().all(|l| l.chars().count() <= WIDTH), "{table}");
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[2].contains("12.3 ms") && lines[2].contains("89%"), "{table}");
        assert!(lines[2].ends_with("yes") && lines[3].ends_with("NO"), "{table}");
        assert!(legend().lines().all(|l| l.chars().count() <= WIDTH));
    }

    #[test]
    fn a_partial_verification_has_an_asterisk_and_a_footnote() {
        let (mut part, mut all) = (row("combine", 1024), row("combine", 1024));
        part.metrics.insert("verified_tokens".into(), Value::from(512));
        all.metrics.insert("verified_tokens".into(), Value::from(1024));
        let mut bad = part.clone();
        bad.verified = false;
        let whole = report(vec![all.clone(), row("layout", 1)]);
        assert!(!whole.table().contains('*'));
        assert_eq!(footnote(&whole), None);
        let report = report(vec![part, all, bad]);
        let table = report.table();
        assert!(table.lines().all(|l| l.chars().count() <= WIDTH), "{table}");
        let lines: Vec<&str> = table.lines().skip(2).collect();
        assert!(lines[0].ends_with(" yes*") && lines[1].ends_with(" yes"), "{table}");
        assert!(lines[2].ends_with(" NO"), "{table}");
        let note = footnote(&report).unwrap();
        assert!(note.starts_with("* ") && note.contains("512"), "{note}");
        assert!(note.lines().all(|l| l.chars().count() <= WIDTH), "{note}");
    }

    #[test]
    fn next_steps_fit_and_follow_what_was_run() {
        let steps = next_steps(&report(vec![row("dispatch", 1)]), "cargo xtask bench");
        assert!(steps.iter().all(|s| s.chars().count() <= WIDTH), "{steps:?}");
        assert!(steps.iter().any(|s| s.contains("roundtrip")));
        let steps = next_steps(&report(vec![row("roundtrip", 1)]), "cargo xtask bench");
        assert!(!steps.iter().any(|s| s.contains("roundtrip")));
    }
}
