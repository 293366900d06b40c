//! What was found out once, on disk: small JSON files that say what they are.

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs, io};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::TopologyError;

const MAX_BYTES: u64 = 4 << 20;

/// A folder of findings of one kind. Any number of threads and processes may use one at once: readers see
/// a whole file or none. Files that are corrupt, of another format, version or key are ignored with a
/// warning.
#[derive(Clone, Debug)]
pub struct FileCache {
    folder: PathBuf,
    format: &'static str,
    version: u32,
}

#[derive(Serialize, Deserialize)]
struct Entry<K, V> {
    format: String,
    version: u32,
    key: K,
    found: V,
}

/// The part that tells whether the rest can be understood.
#[derive(Deserialize)]
struct Header {
    format: String,
    version: u32,
}

impl FileCache {
    /// A cache in `folder`, which is created when something is stored. `format` is what its files begin
    /// with; another `version` is another format.
    pub fn new(folder: impl Into<PathBuf>, format: &'static str, version: u32) -> Self {
        Self { folder: folder.into(), format, version }
    }

    /// The folder `name` of this project in the user's cache folder (`XDG_CACHE_HOME`, else
    /// `HOME/.cache`). `None` where there is no such folder.
    pub fn user_folder(name: &str) -> Option<PathBuf> {
        let absolute = |variable: &str| {
            std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
        };
        let root = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
        Some(root.join("ep-runtime").join(name))
    }

    /// Where the files are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What `file` holds, if that was found for `key`.
    pub fn load<K, V>(&self, file: &str, key: &K) -> Option<V>
    where
        K: DeserializeOwned + PartialEq + Debug,
        V: DeserializeOwned,
    {
        let path = self.folder.join(file);
        let found = read(&path).and_then(|text| text.map(|t| self.parse(&t, key)).transpose());
        found.unwrap_or_else(|why| {
            tracing::warn!(path = %path.display(), why, "ignoring a cached {}", self.format);
            None
        })
    }

    /// Writes what was found for `key` to `file`.
    ///
    /// # Errors
    /// When folder or file cannot be written, or the values not as JSON.
    pub fn store<K: Serialize, V: Serialize>(
        &self,
        file: &str,
        key: &K,
        found: &V,
    ) -> Result<(), TopologyError> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let op = "store in a cache";
        let entry = Entry { format: self.format.to_owned(), version: self.version, key, found };
        let text = serde_json::to_string(&entry)
            .map_err(|e| TopologyError::Format { op, detail: e.to_string() })?;
        let path = self.folder.join(file);
        // A name of its own per writer: concurrent writers must not share a half-written file.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_extension(format!("{}-{number}.tmp", std::process::id()));
        let write = || -> io::Result<()> {
            fs::create_dir_all(&self.folder)?;
            fs::write(&temporary, text)?;
            fs::rename(&temporary, &path)
        };
        write().map_err(|error| {
            // Best effort: what is left behind is ignored anyway.
            let _ = fs::remove_file(&temporary);
            TopologyError::os(op, &path, &error)
        })
    }

    fn parse<K, V>(&self, text: &str, key: &K) -> Result<V, String>
    where
        K: DeserializeOwned + PartialEq + Debug,
        V: DeserializeOwned,
    {
        let header: Header = serde_json::from_str(text).map_err(|e| format!("corrupt: {e}"))?;
        if header.format != self.format || header.version != self.version {
            return Err(format!("{:?} version {}", header.format, header.version));
        }
        let entry: Entry<K, V> = serde_json::from_str(text).map_err(|e| format!("corrupt: {e}"))?;
        if entry.key != *key {
            return Err(format!("of another case: {:?}", entry.key));
        }
        Ok(entry.found)
    }
}

/// The file's text; `None` if there is no file.
fn read(path: &Path) -> Result<Option<String>, String> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
        Ok(data) if !data.is_file() || data.len() > MAX_BYTES => {
            return Err("not a file of sensible size".to_owned());
        }
        Ok(_) => {}
    }
    fs::read_to_string(path).map(Some).map_err(|e| e.to_string())
}
