//! Reading a sysfs tree that may be partial, hand-made or garbled.

use std::{
    cell::RefCell,
    fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

/// Bytes read of one file, entries of one folder and warnings kept: a garbled tree costs no memory.
const MAX_BYTES: u64 = 64 << 10;
const MAX_ENTRIES: usize = 16 << 10;
const MAX_WARNINGS: usize = 200;

/// A field that could not be read or understood; what it would have said is unknown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// The file, relative to the root it was read under.
    pub path: String,
    /// Why it says nothing.
    pub detail: String,
}

/// A folder tree whose absent files are normal and whose bad files become warnings.
pub(crate) struct Tree<'a> {
    root: &'a Path,
    warnings: RefCell<Vec<Warning>>,
}

impl<'a> Tree<'a> {
    pub fn new(root: &'a Path) -> Self {
        Self { root, warnings: RefCell::default() }
    }

    pub fn into_warnings(self) -> Vec<Warning> {
        self.warnings.into_inner()
    }

    pub fn warn(&self, path: &str, detail: impl Into<String>) {
        let mut warnings = self.warnings.borrow_mut();
        if warnings.len() < MAX_WARNINGS {
            warnings.push(Warning { path: path.to_owned(), detail: detail.into() });
        }
    }

    pub fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// A file's text without surrounding white space; `None` if absent, unreadable or empty.
    pub fn text(&self, path: &str) -> Option<String> {
        let full = self.root.join(path);
        // Opening a pipe would wait for its writer.
        if !fs::metadata(&full).ok()?.is_file() {
            self.warn(path, "not a file");
            return None;
        }
        let mut bytes = Vec::new();
        let read = fs::File::open(&full).and_then(|f| f.take(MAX_BYTES).read_to_end(&mut bytes));
        if let Err(error) = read {
            self.warn(path, error.to_string());
            return None;
        }
        let text = String::from_utf8_lossy(&bytes).trim().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// A file's value; a warning where the text means nothing to `parse`.
    pub fn value<T>(&self, path: &str, parse: impl FnOnce(&str) -> Option<T>) -> Option<T> {
        let text = self.text(path)?;
        let value = parse(&text);
        if value.is_none() {
            let shown: String = text.chars().take(40).collect();
            self.warn(path, format!("{shown:?} is not understood"));
        }
        value
    }

    /// Names in a folder, sorted by number where they end in one; empty if there is no folder.
    pub fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.root.join(path)) else { return Vec::new() };
        let names = entries.take(MAX_ENTRIES).flatten().map(|e| e.file_name());
        let mut names: Vec<String> = names.filter_map(|n| n.into_string().ok()).collect();
        names.sort_by_cached_key(|name| natural(name));
        names
    }

    /// Where a symbolic link points, unresolved.
    pub fn link(&self, path: &str) -> Option<PathBuf> {
        fs::read_link(self.root.join(path)).ok()
    }
}

/// Sorting key that puts `mlx5_2` before `mlx5_10`.
fn natural(name: &str) -> (String, u64, String) {
    let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count();
    let (stem, number) = name.split_at(name.len() - digits);
    (stem.to_owned(), number.parse().unwrap_or(0), name.to_owned())
}

/// A number with the prefix that `stem` names, as in `node12`.
pub(crate) fn numbered(name: &str, stem: &str) -> Option<u32> {
    let digits = name.strip_prefix(stem)?;
    digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

/// `0x` hexadecimal as sysfs writes it.
pub(crate) fn hex_u32(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("0x")?;
    let plain = digits.bytes().all(|b| b.is_ascii_hexdigit());
    plain.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
}
