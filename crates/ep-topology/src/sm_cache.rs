//! SM maps on disk, so that a device is probed once per driver.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{FileCache, SmMap, TopologyError};

/// A folder of SM maps by GPU UUID and driver version.
///
/// Files that are corrupt, of another version or of another device are ignored with a warning.
#[derive(Clone, Debug)]
pub struct SmCache(FileCache);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Key {
    uuid: String,
    driver: String,
}

impl Key {
    fn new(uuid: &str, driver: &str) -> Self {
        Self { uuid: uuid.to_owned(), driver: driver.to_owned() }
    }

    /// The file of a device; what UUIDs and versions never contain cannot leave the folder.
    fn file(&self) -> String {
        let plain = |text: &str| -> String {
            let keep = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
            text.chars().take(80).map(keep).collect()
        };
        format!("sm-{}-{}.json", plain(&self.uuid), plain(&self.driver))
    }
}

impl SmCache {
    /// A cache in `folder`, which is created when something is stored.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self(FileCache::new(folder, "ep-topology SM map", 2))
    }

    /// The cache of this user, beside the compiled kernels; `None` where there is no such folder.
    pub fn of_user() -> Option<Self> {
        FileCache::user_folder("sm-maps").map(Self::new)
    }

    /// The map of a device under a driver, if a sound one is stored.
    pub fn load(&self, uuid: &str, driver: &str) -> Option<SmMap> {
        let key = Key::new(uuid, driver);
        self.0.load(&key.file(), &key)
    }

    /// Stores a map; readers see the old file or the new one, never a part.
    ///
    /// # Errors
    /// [`TopologyError::Os`] if the folder or file cannot be written.
    pub fn store(&self, uuid: &str, driver: &str, map: &SmMap) -> Result<(), TopologyError> {
        let key = Key::new(uuid, driver);
        self.0.store(&key.file(), &key, map)
    }
}
