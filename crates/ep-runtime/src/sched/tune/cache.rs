//! What was found, on disk.

use std::path::PathBuf;

use ep_topology::FileCache;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{EpError, Result};

const FORMAT: &str = "ep-runtime tuning";
const VERSION: u32 = 2;

/// Environment variable with the folder of the cache; empty: no cache.
pub const TUNE_CACHE_VARIABLE: &str = "EP_TUNE_CACHE";

/// For what something was found: anything that differs is another case.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TuneKey {
    /// The device's UUID.
    pub device: String,
    /// Its product name.
    pub name: String,
    /// The driver's version.
    pub driver: String,
    /// What is tuned: `dispatch`, `combine`, …
    pub operation: String,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Ranks of the group.
    pub ranks: u32,
    /// Experts of a token.
    pub topk: u32,
    /// Tokens of a rank, as the power of two that is not less: see [`TuneKey::tokens_class`].
    pub tokens: u32,
    /// SMs it may take.
    pub sms: u32,
    /// Whether compute ran beside it.
    pub beside: bool,
    /// The kernels' fingerprint: plans for other kernels say nothing.
    pub kernels: String,
}

impl TuneKey {
    /// The class of shapes that `tokens` tokens per rank are in.
    pub fn tokens_class(tokens: usize) -> u32 {
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        tokens.max(1).checked_next_power_of_two().unwrap_or(1 << 31)
    }

    /// FNV-1a (Fowler, Noll, Vo), 64 bits: names the file. The key in it is what is believed.
    fn hash(&self) -> u64 {
        let Self { device, name, driver, operation, row_bytes, ranks, topk, tokens, .. } = self;
        let Self { sms, beside, kernels, .. } = self;
        let text = format!(
            "{device}\0{name}\0{driver}\0{operation}\0{row_bytes}\0{ranks}\0{topk}\0{tokens}\0{sms}\0{beside}\0{kernels}"
        );
        text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    fn file(&self) -> String {
        format!("tune-{:016x}.json", self.hash())
    }
}

/// A folder of findings. Files that are corrupt, of another version or of another case are ignored with
/// a warning.
#[derive(Clone, Debug)]
pub struct TuneCache(FileCache);

impl TuneCache {
    /// A cache in `folder`, which is created when something is stored.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self(FileCache::new(folder, FORMAT, VERSION))
    }

    /// The folder that [`TUNE_CACHE_VARIABLE`] names, else one in the user's cache folder. `None` where
    /// the variable is empty or there is no such folder.
    pub fn from_env() -> Option<Self> {
        match std::env::var_os(TUNE_CACHE_VARIABLE) {
            Some(folder) => (!folder.is_empty()).then(|| Self::new(folder)),
            None => FileCache::user_folder("tuning").map(Self::new),
        }
    }

    /// What is known for a case.
    pub fn load<P: DeserializeOwned>(&self, key: &TuneKey) -> Option<P> {
        self.0.load(&key.file(), key)
    }

    /// Stores what was found; readers see the old file or the new one, never a part.
    ///
    /// # Errors
    /// When the folder or file cannot be written, or `found` not as JSON.
    pub fn store<P: Serialize>(&self, key: &TuneKey, found: &P) -> Result<()> {
        let stored = self.0.store(&key.file(), key, found);
        stored.map_err(|e| EpError::argument("store tuning", e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
    struct Plan {
        warps: u32,
        unroll: u32,
    }

    const PLAN: Plan = Plan { warps: 16, unroll: 4 };

    fn key() -> TuneKey {
        TuneKey {
            device: "GPU-1".into(),
            name: "H200".into(),
            driver: "580".into(),
            operation: "dispatch".into(),
            row_bytes: 14336,
            ranks: 2,
            topk: 8,
            tokens: TuneKey::tokens_class(8000),
            sms: 16,
            beside: false,
            kernels: "0123".into(),
        }
    }

    /// A folder that goes with the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = format!("ep-tune-{}-{name}", std::process::id());
            let folder = std::env::temp_dir().join(folder);
            let _ = fs::remove_dir_all(&folder);
            Self(folder)
        }

        fn cache(&self) -> TuneCache {
            TuneCache::new(self.0.join("below"))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_was_stored_is_found_for_its_own_case_only() {
        let folder = Folder::new("own");
        let cache = folder.cache();
        assert_eq!(cache.load::<Plan>(&key()), None);
        cache.store(&key(), &PLAN).unwrap();
        assert_eq!(cache.load(&key()), Some(PLAN));
        let others = [
            TuneKey { device: "GPU-2".into(), ..key() },
            TuneKey { driver: "581".into(), ..key() },
            TuneKey { operation: "combine".into(), ..key() },
            TuneKey { row_bytes: 7168, ..key() },
            TuneKey { ranks: 8, ..key() },
            TuneKey { topk: 4, ..key() },
            TuneKey { tokens: TuneKey::tokens_class(128), ..key() },
            TuneKey { sms: 8, ..key() },
            TuneKey { beside: true, ..key() },
            TuneKey { kernels: "4567".into(), ..key() },
        ];
        for other in &others {
            assert_eq!(cache.load::<Plan>(other), None, "{other:?}");
        }
        let newer = Plan { warps: 8, ..PLAN };
        cache.store(&key(), &newer).unwrap();
        assert_eq!(cache.load(&key()), Some(newer));
        assert_eq!(fs::read_dir(cache.0.folder()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn corrupt_and_foreign_files_are_ignored() {
        let folder = Folder::new("corrupt");
        let cache = folder.cache();
        cache.store(&key(), &PLAN).unwrap();
        let path = cache.0.folder().join(key().file());
        let good = fs::read_to_string(&path).unwrap();
        let foreign = good.replace("GPU-1", "GPU-9");
        let huge = " ".repeat((4 << 20) + 1);
        let bad = [
            "",
            "{",
            "null",
            &good[..good.len() / 2],
            &good.replace("\"version\":2", "\"version\":3"),
            &good.replace(FORMAT, "something else"),
            &good.replace("\"warps\":16", "\"warps\":-1"),
            &foreign,
            &huge,
        ];
        for text in bad {
            fs::write(&path, text).unwrap();
            assert_eq!(cache.load::<Plan>(&key()), None, "{:.80}", text);
        }
        fs::write(&path, [0xff, 0xfe, 0x00]).unwrap();
        assert_eq!(cache.load::<Plan>(&key()), None);
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(cache.load::<Plan>(&key()), None);
        assert!(cache.store(&key(), &PLAN).is_err(), "a folder is in the way");
        fs::remove_dir(&path).unwrap();
        cache.store(&key(), &PLAN).unwrap();
        assert_eq!(cache.load(&key()), Some(PLAN));
    }

    #[test]
    fn writers_at_once_leave_a_whole_file() {
        let folder = Folder::new("writers");
        let cache = folder.cache();
        std::thread::scope(|threads| {
            for warps in 1..5 {
                let cache = &cache;
                threads.spawn(move || {
                    for _ in 0..50 {
                        cache.store(&key(), &Plan { warps, ..PLAN }).unwrap();
                        assert!(cache.load::<Plan>(&key()).is_some());
                    }
                });
            }
        });
        assert!((1..5).contains(&cache.load::<Plan>(&key()).unwrap().warps));
    }

    #[test]
    fn token_classes_are_powers_of_two() {
        let class = TuneKey::tokens_class;
        assert_eq!([class(0), class(1), class(128), class(129)], [1, 1, 128, 256]);
        assert_eq!(class(usize::MAX), 1 << 31);
    }
}
