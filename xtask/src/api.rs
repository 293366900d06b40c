//! `cargo xtask api`: the public API of the libraries, as committed in docs/api.

use std::fs;
use std::path::Path;
use std::time::Duration;

use clap::Args;
use public_api::Builder;

use crate::Result;
use crate::process;
use crate::workspace::{Workspace, cargo};

/// The rustdoc JSON format that the pinned `public-api` reads: the one of Rust 1.95.
const FORMAT: u64 = 57;

/// Features that add to an API and need nothing to build.
const FEATURES: [&str; 2] = ["cuda", "nccl"];

/// Options of `cargo xtask api`.
#[derive(Args)]
pub struct Options {
    /// Write docs/api anew instead of comparing with it
    #[arg(long)]
    bless: bool,
}

/// What a comparison found.
pub enum Verdict {
    /// So many libraries are as committed.
    Same(usize),
    /// The differences, and what to do.
    Changed(String),
    /// This toolchain's rustdoc writes a format that cannot be read.
    Unreadable(String),
}

/// The command.
pub fn run(options: &Options) -> Result<()> {
    let workspace = Workspace::load(false)?;
    if options.bless {
        for (name, api) in read(&workspace, true)?? {
            let path = Path::new("docs/api").join(format!("{name}.txt"));
            let full = workspace.root.join(&path);
            let failed = |e: std::io::Error| format!("{}: {e}", path.display());
            fs::create_dir_all(workspace.root.join("docs/api")).map_err(failed)?;
            fs::write(&full, api).map_err(failed)?;
            println!("wrote {}", path.display());
        }
        return Ok(());
    }
    match compare(&workspace, true)? {
        Verdict::Same(crates) => println!("{crates} libraries are as committed"),
        Verdict::Changed(text) => {
            println!("{text}");
            return Err("the public API changed".into());
        }
        Verdict::Unreadable(why) => return Err(why),
    }
    Ok(())
}

/// Compares every library with its snapshot.
pub fn compare(workspace: &Workspace, echo: bool) -> Result<Verdict> {
    let apis = match read(workspace, echo)? {
        Ok(apis) => apis,
        Err(why) => return Ok(Verdict::Unreadable(why)),
    };
    let mut changes = String::new();
    for (name, api) in &apis {
        let path = workspace.root.join("docs/api").join(format!("{name}.txt"));
        match fs::read_to_string(&path) {
            Ok(old) => {
                for line in difference(&old, api) {
                    changes.push_str(&format!("{name}: {line}\n"));
                }
            }
            Err(e) => changes.push_str(&format!("{name}: docs/api/{name}.txt: {e}\n")),
        }
    }
    if changes.is_empty() {
        return Ok(Verdict::Same(apis.len()));
    }
    changes.push_str("if that is meant: cargo xtask api --bless, and say so in CHANGELOG.md");
    Ok(Verdict::Changed(changes))
}

type Apis = Vec<(String, String)>;

/// The public API of every library, one item a line; the inner error says that this toolchain's
/// format is another.
fn read(workspace: &Workspace, echo: bool) -> Result<Result<Apis>> {
    // RUSTC_BOOTSTRAP is seen by build scripts, so it must not touch the builds of the others.
    let target = workspace.target.join("api");
    let mut apis = Vec::new();
    for library in workspace.members().iter().filter(|member| member.is_library()) {
        let name = library.name;
        let features = FEATURES.into_iter().filter(|feature| library.has_feature(feature));
        let features = features.collect::<Vec<_>>().join(",");
        let mut command = cargo(&workspace.root);
        command.args(["rustdoc", "--lib", "--package", name, "--features", &features]);
        command.args(["--", "-Z", "unstable-options"]);
        command.args(["--output-format", "json"]);
        command.env("RUSTC_BOOTSTRAP", "1").env("CARGO_TARGET_DIR", &target);
        let done = process::run(command, Duration::from_secs(600), echo)?;
        if !done.success() {
            return Err(format!("rustdoc of {name}: {}\n{}", done.why(), done.tail(30)));
        }
        let json = target.join("doc").join(format!("{}.json", name.replace('-', "_")));
        match items(&json).map_err(|why| format!("public API of {name}: {why}"))? {
            Ok(api) if api.is_empty() => return Err(format!("{name} has no public API")),
            Ok(api) => apis.push((name.to_owned(), api)),
            Err(why) => return Ok(Err(why)),
        }
    }
    Ok(Ok(apis))
}

/// The items in a rustdoc JSON file, one a line; the inner error says that it is of another format.
fn items(json: &Path) -> Result<Result<String>> {
    let found = format_of(json)?;
    if found != FORMAT {
        let why =
            format!("this rustdoc writes JSON format {found}; docs/api is made with {FORMAT}");
        return Ok(Err(why));
    }
    let api = Builder::from_rustdoc_json(json)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .omit_auto_derived_impls(true)
        .build()
        .map_err(|e| e.to_string())?;
    let lines: Vec<String> = api.items().map(|item| format!("{item}\n")).collect();
    Ok(Ok(lines.concat()))
}

/// The format number in a rustdoc JSON file.
fn format_of(path: &Path) -> Result<u64> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let value: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    value["format_version"].as_u64().ok_or_else(|| format!("{}: no format", path.display()))
}

/// Lines only in `old` behind `-`, lines only in `new` behind `+`. Both are sorted by item, so
/// there is no order to compare; a line may occur several times.
fn difference(old: &str, new: &str) -> Vec<String> {
    let mut left: Vec<&str> = new.lines().collect();
    let mut changes = Vec::new();
    for line in old.lines() {
        match left.iter().position(|other| *other == line) {
            Some(found) => {
                left.remove(found);
            }
            None => changes.push(format!("- {line}")),
        }
    }
    changes.extend(left.iter().map(|line| format!("+ {line}")));
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_do_not_differ() {
        assert!(difference("a\nb\n", "a\nb\n").is_empty());
        assert!(difference("", "").is_empty());
    }

    #[test]
    fn added_and_removed_items_are_named() {
        assert_eq!(difference("a\nb\n", "a\nc\n"), ["- b", "+ c"]);
        assert_eq!(difference("a\na\n", "a\n"), ["- a"]);
        assert_eq!(difference("a\n", "a\na\n"), ["+ a"]);
    }

    #[test]
    fn the_format_is_read() {
        let folder = crate::tree::Scratch::new("format");
        folder.write("x.json", r#"{"root":1,"format_version":57}"#);
        assert_eq!(format_of(&folder.0.join("x.json")), Ok(FORMAT));
        folder.write("y.json", "[]");
        assert!(format_of(&folder.0.join("y.json")).is_err());
    }

    #[test]
    fn the_items_of_a_crate_are_listed() {
        let folder = crate::tree::Scratch::new("items");
        folder.write("lib.rs", "pub fn seen(n: u32) -> bool { n > 1 }\nfn hidden() {}");
        let mut rustdoc =
            std::process::Command::new(std::env::var_os("RUSTDOC").unwrap_or("rustdoc".into()));
        rustdoc.current_dir(&folder.0).env("RUSTC_BOOTSTRAP", "1");
        rustdoc.args(["lib.rs", "--crate-name", "small", "--edition", "2024", "-o", "."]);
        rustdoc.args(["-Z", "unstable-options", "--output-format", "json"]);
        let done = process::run(rustdoc, Duration::from_secs(60), false).unwrap();
        assert!(done.success(), "{}", done.output);
        match items(&folder.0.join("small.json")).unwrap() {
            Ok(api) => assert_eq!(api, "pub mod small\npub fn small::seen(u32) -> bool\n"),
            // Another toolchain: the reason has to say so.
            Err(why) => assert!(why.contains("format"), "{why}"),
        }
    }
}
