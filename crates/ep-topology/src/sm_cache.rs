//! SM maps on disk, so that a device is probed once per driver.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs, io};

use serde::{Deserialize, Serialize};

use crate::{SmMap, TopologyError};

/// What a cache file begins with; another version is another format.
const FORMAT: &str = "ep-topology SM map";
const VERSION: u32 = 1;
const MAX_BYTES: u64 = 4 << 20;

/// A folder of SM maps by GPU UUID and driver version.
///
/// Files that are corrupt, of another version or of another device are ignored with a warning.
#[derive(Clone, Debug)]
pub struct SmCache {
    folder: PathBuf,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    format: String,
    version: u32,
    uuid: String,
    driver: String,
    map: SmMap,
}

/// The part that tells whether the rest can be understood.
#[derive(Deserialize)]
struct Header {
    format: String,
    version: u32,
}

impl SmCache {
    /// A cache in `folder`, which is created when something is stored.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The map of a device under a driver, if a sound one is stored.
    pub fn load(&self, uuid: &str, driver: &str) -> Option<SmMap> {
        let path = self.path(uuid, driver);
        match read(&path).and_then(|text| text.map(|t| parse(&t, uuid, driver)).transpose()) {
            Ok(map) => map,
            Err(why) => {
                tracing::warn!(path = %path.display(), why, "ignoring a cached SM map");
                None
            }
        }
    }

    /// Stores a map; readers see the old file or the new one, never a part.
    ///
    /// # Errors
    /// [`TopologyError::Os`] if the folder or file cannot be written.
    pub fn store(&self, uuid: &str, driver: &str, map: &SmMap) -> Result<(), TopologyError> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let op = "store SM map";
        let entry = Entry {
            format: FORMAT.to_owned(),
            version: VERSION,
            uuid: uuid.to_owned(),
            driver: driver.to_owned(),
            map: map.clone(),
        };
        let text = serde_json::to_string(&entry)
            .map_err(|e| TopologyError::Format { op, detail: e.to_string() })?;
        let path = self.path(uuid, driver);
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

    /// The file of a device; what UUIDs and versions never contain cannot leave the folder.
    fn path(&self, uuid: &str, driver: &str) -> PathBuf {
        let plain = |text: &str| -> String {
            let keep = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
            text.chars().take(80).map(keep).collect()
        };
        self.folder.join(format!("sm-{}-{}.json", plain(uuid), plain(driver)))
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

fn parse(text: &str, uuid: &str, driver: &str) -> Result<SmMap, String> {
    let header: Header = serde_json::from_str(text).map_err(|e| format!("corrupt: {e}"))?;
    if header.format != FORMAT || header.version != VERSION {
        return Err(format!("{:?} version {}", header.format, header.version));
    }
    let entry: Entry = serde_json::from_str(text).map_err(|e| format!("corrupt: {e}"))?;
    if entry.uuid != uuid || entry.driver != driver {
        return Err(format!("of {} under driver {}", entry.uuid, entry.driver));
    }
    Ok(entry.map)
}
