//! Checks of documents.

use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use super::{File, Input};

/// Starts a part of README.md whose figures stand in the file named.
const FROM: &str = "<!-- from ";
const END: &str = "<!-- end -->";

/// Figures in tables come from committed results: between `<!-- from PATH -->` and
/// `<!-- end -->` every number of a table stands in that file, and outside no table quotes a time
/// or a rate.
pub fn figures(input: &Input) -> Vec<String> {
    let mut found = Vec::new();
    for file in input.files.iter().filter(|f| f.path == Path::new("README.md")) {
        let mut numbers: Option<Vec<f64>> = None;
        for (i, line) in file.text.lines().enumerate() {
            if let Some(path) = line.trim().strip_prefix(FROM) {
                let path = path.trim_end_matches("-->").trim();
                match measured(input, path) {
                    Ok(known) => numbers = Some(known),
                    Err(why) => {
                        found.push(file.at(i + 1, &format!("{path}: {why}")));
                        numbers = Some(Vec::new());
                    }
                }
            } else if line.trim() == END {
                numbers = None;
            } else if line.trim_start().starts_with('|') {
                match &numbers {
                    Some(known) => found.extend(unknown(file, i + 1, line, known)),
                    None if quotes_measurement(line) => {
                        found.push(file.at(i + 1, "a figure without its results"));
                    }
                    None => {}
                }
            }
        }
    }
    found
}

/// Every number in the results file `path`.
fn measured(input: &Input, path: &str) -> Result<Vec<f64>, String> {
    if !path.starts_with("bench/results/") {
        return Err("not under bench/results".into());
    }
    let file =
        input.files.iter().find(|f| f.path == Path::new(path)).ok_or("there is no such file")?;
    let value: Value = serde_json::from_str(&file.text).map_err(|e| e.to_string())?;
    if value["schema"] != 1 || value["commit"].as_str().is_none_or(str::is_empty) {
        return Err("not a report of schema 1 that names its commit".into());
    }
    let mut numbers = Vec::new();
    collect(&value, &mut numbers);
    Ok(numbers)
}

fn collect(value: &Value, numbers: &mut Vec<f64>) {
    match value {
        Value::Number(number) => numbers.extend(number.as_f64()),
        Value::Array(values) => values.iter().for_each(|v| collect(v, numbers)),
        Value::Object(fields) => fields.values().for_each(|v| collect(v, numbers)),
        _ => {}
    }
}

/// The numbers of a table's row that are no rounding of a known one (of a hundredfold before `%`).
fn unknown(file: &File, line: usize, row: &str, known: &[f64]) -> Vec<String> {
    let shown = |value: f64, decimals: usize, token: &str| format!("{value:.decimals$}") == token;
    numbers_in(row)
        .into_iter()
        .filter(|(token, percent)| {
            let decimals = token.split_once('.').map_or(0, |(_, after)| after.len());
            !known.iter().any(|v| {
                shown(*v, decimals, token) || *percent && shown(v * 100.0, decimals, token)
            })
        })
        .map(|(token, _)| file.at(line, &format!("{token} is not in the results")))
        .collect()
}

/// The numbers of a row that are not parts of names, and whether `%` follows.
fn numbers_in(row: &str) -> Vec<(String, bool)> {
    let chars: Vec<char> = row.chars().collect();
    let mut found = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        let start = at;
        while at < chars.len() && (chars[at].is_alphanumeric() || "._-".contains(chars[at])) {
            at += 1;
        }
        let word: String = chars[start..at].iter().collect();
        let number = word.trim_end_matches('.');
        if !number.is_empty() && number.chars().all(|c| c.is_ascii_digit() || c == '.') {
            let next = chars[at..].iter().find(|c| **c != ' ');
            found.push((number.to_owned(), next == Some(&'%')));
        }
        at = at.max(start + 1);
    }
    found
}

/// Whether a row holds a number with a unit of time or rate.
fn quotes_measurement(row: &str) -> bool {
    let words: Vec<&str> = row.split([' ', '|']).filter(|w| !w.is_empty()).collect();
    words.windows(2).any(|pair| {
        let number = pair[0].trim_start_matches(['~', '<', '≤', '>', '≥']).parse::<f64>().is_ok();
        number && ["µs", "us", "ms", "s", "GB/s", "GiB/s"].contains(&pair[1])
    })
}

/// Links to files of the project lead to one.
pub fn links(input: &Input) -> Vec<String> {
    let mut found = Vec::new();
    for file in input.files.iter().filter(|f| f.path.extension().is_some_and(|e| e == "md")) {
        let mut fenced = false;
        for (i, line) in file.text.lines().enumerate() {
            fenced ^= line.trim_start().starts_with("```");
            if fenced {
                continue;
            }
            for link in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
                let path = link.split('#').next().unwrap_or("");
                if path.is_empty() || path.contains(':') {
                    continue;
                }
                let folder = file.path.parent().unwrap_or(Path::new(""));
                let target = normal(&folder.join(path));
                if !exists(input, &target) {
                    found.push(file.at(i + 1, &format!("{link} leads nowhere")));
                }
            }
        }
    }
    found
}

/// Whether the project has a file or folder of this path.
fn exists(input: &Input, path: &Path) -> bool {
    input.files.iter().any(|f| f.path.starts_with(path)) || input.root.join(path).exists()
}

/// `a/../b` as `b`.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir if out.pop() => {}
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESULTS: &str =
        r#"{"schema":1,"commit":"abc","results":[{"p50_us":411.27,"wire_share":0.853,"ranks":2}]}"#;

    fn found(readme: &str) -> Vec<String> {
        let path = "bench/results/h200x2/a.json";
        let old = "{\"schema\":1,\"results\":[]}";
        figures(&Input::of(&[
            ("README.md", readme),
            (path, RESULTS),
            ("bench/results/old.json", old),
        ]))
    }

    fn table(path: &str, row: &str) -> String {
        format!("<!-- from {path} -->\n| what | µs |\n|---|---|\n{row}\n<!-- end -->\n")
    }

    #[test]
    fn figures_stand_in_their_results() {
        let path = "bench/results/h200x2/a.json";
        for row in ["| bf16, 2 ranks | 411 |", "| H200 | 411.3 |", "| share | 85 % | 85.3% |"] {
            assert_eq!(found(&table(path, row)), Vec::<String>::new());
        }
        for row in ["| bf16 | 412 |", "| bf16 | 411.2 |", "| share | 85 |"] {
            assert_eq!(found(&table(path, row)).len(), 1, "{row}");
        }
    }

    #[test]
    fn results_have_to_be_there() {
        for path in ["bench/results/gone.json", "notes.json", "bench/results/old.json"] {
            let found = found(&table(path, "| a | b |"));
            assert_eq!(found.len(), 1, "{path}");
            assert!(found[0].starts_with("README.md:1: "), "{found:?}");
        }
    }

    #[test]
    fn measurements_need_results() {
        assert_eq!(found("| dispatch | 411 µs |").len(), 1);
        assert_eq!(found("| dispatch | 375 GB/s |").len(), 1);
        assert!(found("| ranks | 8 |\n| issue | about 3 crates |").is_empty());
        assert!(found("It took 411 µs.").is_empty(), "prose is for people to check");
    }

    #[test]
    fn links_lead_to_files() {
        let check = |text: &str| {
            links(&Input::of(&[("docs/a.md", text), ("README.md", ""), ("docs/api/x.txt", "")]))
        };
        let good = "[a](../README.md#top) [b](api) [c](https://example.org) [d](#here)\n\
                    ```text\n[e](gone.md)\n```";
        assert_eq!(check(good), Vec::<String>::new());
        assert_eq!(check("[a](gone.md)"), ["docs/a.md:1: gone.md leads nowhere"]);
    }
}
