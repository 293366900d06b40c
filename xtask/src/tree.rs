//! The project's files.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::Result;

/// Folders that hold no sources of the project.
const SKIPPED: [&str; 3] = ["target", ".git", ".tools"];

/// Every file under `root`, relative to it and sorted; build output and git's own aside.
pub fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let path = root.join(&folder);
        let failed = |e: std::io::Error| format!("{}: {e}", path.display());
        for entry in fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let kind = entry.file_type().map_err(failed)?;
            let name = entry.file_name();
            if kind.is_dir() && !SKIPPED.iter().any(|s| name == OsStr::new(s)) {
                folders.push(folder.join(name));
            } else if kind.is_file() {
                found.push(folder.join(name));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The files a person writes, with their text.
pub fn texts(root: &Path) -> Result<Vec<(PathBuf, String)>> {
    const WRITTEN: [&str; 9] = ["rs", "md", "toml", "txt", "cu", "cuh", "sh", "json", "yml"];
    let mut found = Vec::new();
    for path in files(root)? {
        let extension = path.extension().and_then(OsStr::to_str).unwrap_or("");
        if WRITTEN.contains(&extension) || path == Path::new(".ci/run") {
            let text = fs::read_to_string(root.join(&path))
                .map_err(|e| format!("{}: {e}", path.display()))?;
            found.push((path, text));
        }
    }
    Ok(found)
}

/// Makes `to` hold the same files as `from`, touching only those that differ so that cargo
/// rebuilds only what changed.
pub fn mirror(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).map_err(|e| format!("{}: {e}", to.display()))?;
    let wanted = files(from)?;
    for path in files(to)? {
        if wanted.binary_search(&path).is_err() {
            fs::remove_file(to.join(&path)).map_err(|e| format!("{}: {e}", path.display()))?;
        }
    }
    for path in wanted {
        let (source, copy) = (from.join(&path), to.join(&path));
        let failed = |e: std::io::Error| format!("{}: {e}", path.display());
        let bytes = fs::read(&source).map_err(failed)?;
        if fs::read(&copy).is_ok_and(|old| old == bytes) {
            continue;
        }
        if let Some(folder) = copy.parent() {
            fs::create_dir_all(folder).map_err(failed)?;
        }
        fs::copy(&source, &copy).map_err(failed)?;
    }
    Ok(())
}

/// A folder of one test, removed with the value.
#[cfg(test)]
pub struct Scratch(pub PathBuf);

#[cfg(test)]
impl Scratch {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("xtask-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

#[cfg(test)]
impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_output_is_not_listed() {
        let tree = Scratch::new("files");
        tree.write("a/b.rs", "");
        tree.write("target/x.rs", "");
        tree.write(".git/config", "");
        tree.write(".ci/run", "");
        assert_eq!(files(&tree.0).unwrap(), [Path::new(".ci/run"), Path::new("a/b.rs")]);
        assert_eq!(texts(&tree.0).unwrap().len(), 2);
    }

    #[test]
    fn a_mirror_follows_and_leaves_equal_files_alone() {
        let (from, to) = (Scratch::new("from"), Scratch::new("to"));
        from.write("same.rs", "1");
        from.write("x/changed.rs", "1");
        from.write("gone.rs", "1");
        mirror(&from.0, &to.0).unwrap();
        let before = fs::metadata(to.0.join("same.rs")).unwrap().modified().unwrap();
        from.write("x/changed.rs", "2");
        fs::remove_file(from.0.join("gone.rs")).unwrap();
        mirror(&from.0, &to.0).unwrap();
        assert_eq!(files(&to.0).unwrap(), files(&from.0).unwrap());
        assert_eq!(fs::read_to_string(to.0.join("x/changed.rs")).unwrap(), "2");
        let after = fs::metadata(to.0.join("same.rs")).unwrap().modified().unwrap();
        assert_eq!(before, after);
    }
}
