//! Compiled kernels on disk.
//!
//! One file per key. Writers put a complete file beside it and rename it into place, so a reader
//! sees an old file, a new file or none; what it reads is checked against key and checksum, and
//! anything else counts as absent.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

/// Environment variable with the folder of the cache; empty: no cache.
pub const CACHE_VARIABLE: &str = "EP_KERNEL_CACHE";

const MAGIC: [u8; 8] = *b"EPCUBIN1";
/// Magic, key, length, checksum of everything else.
const HEADER: usize = 8 + 32 + 8 + 32;
/// Larger than any cubin; a length beyond it is garbage.
const LARGEST: u64 = 256 << 20;
/// What a writer that was killed left behind is removed after this long.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

/// What a cached cubin depends on: every part of it, so that a change of any is a different file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheKey([u8; 32]);

impl CacheKey {
    /// The key of `source` compiled with `options` for `arch` by the compiler of version
    /// `compiler`.
    pub fn new(source: &str, options: &[String], arch: &str, compiler: &str) -> Self {
        let mut hash = Sha256::new();
        let mut part = |text: &str| {
            // Lengths first: parts must not run into each other.
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        };
        part(source);
        part(arch);
        part(compiler);
        part(&options.len().to_string());
        options.iter().for_each(|option| part(option));
        CacheKey(hash.finalize().into())
    }

    fn hex(&self) -> String {
        self.0.iter().fold(String::with_capacity(64), |mut text, byte| {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

/// A folder of compiled kernels. Any number of threads and processes may use one at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelCache {
    folder: PathBuf,
}

impl KernelCache {
    /// A cache in this folder, which is created by the first [`KernelCache::store`].
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        KernelCache { folder: folder.into() }
    }

    /// The folder that [`CACHE_VARIABLE`] names, else one in the user's cache folder. `None` where
    /// the variable is empty or there is no such folder.
    pub fn from_env() -> Option<Self> {
        if let Some(folder) = std::env::var_os(CACHE_VARIABLE) {
            return (!folder.is_empty()).then(|| Self::at(folder));
        }
        let absolute = |name: &str| {
            std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute())
        };
        let root = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
        Some(Self::at(root.join("ep-runtime/kernels")))
    }

    /// Where the files are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The cubin of this key, if a whole and intact one is stored.
    pub fn load(&self, key: &CacheKey) -> Option<Vec<u8>> {
        let path = self.path(key);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "cached kernel is unreadable");
                return None;
            }
        };
        let payload = decode(key, &bytes);
        if payload.is_none() {
            tracing::warn!(path = %path.display(), "cached kernel is damaged and will be replaced");
        }
        payload.map(<[u8]>::to_vec)
    }

    /// Stores a cubin.
    ///
    /// # Errors
    /// The file system's. Nothing half-written is ever visible under the key.
    pub fn store(&self, key: &CacheKey, cubin: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let (mut file, temporary) = self.temporary(key)?;
        let written = file
            .write_all(&header(key, cubin))
            .and_then(|()| file.write_all(cubin))
            // Renaming may reach the disk before the data does; the checksum catches what a crash
            // leaves.
            .and_then(|()| fs::rename(&temporary, self.path(key)));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        self.remove_abandoned();
        written
    }

    fn path(&self, key: &CacheKey) -> PathBuf {
        self.folder.join(format!("{}.cubin", key.hex()))
    }

    /// A file of this writer alone: by process, and by a number inside it. Processes of two
    /// containers may share folder and process id, hence `create_new` and another try.
    fn temporary(&self, key: &CacheKey) -> io::Result<(File, PathBuf)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut last = io::Error::from(io::ErrorKind::AlreadyExists);
        for _ in 0..64 {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path =
                self.folder.join(format!("{}.{}.{number}.tmp", key.hex(), std::process::id()));
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => return Ok((file, path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => last = error,
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }

    fn remove_abandoned(&self) {
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        for entry in entries.flatten() {
            let path = entry.path();
            let age = entry
                .metadata()
                .and_then(|data| data.modified())
                .map(|at| SystemTime::now().duration_since(at).unwrap_or_default());
            if path.extension().is_some_and(|ext| ext == "tmp")
                && age.is_ok_and(|age| age > ABANDONED_AFTER)
            {
                let _ = fs::remove_file(path);
            }
        }
    }
}

fn header(key: &CacheKey, payload: &[u8]) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..40].copy_from_slice(&key.0);
    bytes[40..48].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    let checksum: [u8; 32] =
        Sha256::new().chain_update(&bytes[..48]).chain_update(payload).finalize().into();
    bytes[48..].copy_from_slice(&checksum);
    bytes
}

fn decode<'a>(key: &CacheKey, bytes: &'a [u8]) -> Option<&'a [u8]> {
    let (found, payload) = bytes.split_at_checked(HEADER)?;
    let plausible = !payload.is_empty() && payload.len() as u64 <= LARGEST;
    (plausible && found == header(key, payload)).then_some(payload)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("ep-kernel-cache-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn key(source: &str) -> CacheKey {
        CacheKey::new(source, &["--std=c++17".into()], "sm_90a", "13.0")
    }

    #[test]
    fn keys_differ_by_every_part() {
        let options = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        let keys = [
            CacheKey::new("a", &options(&["x", "y"]), "sm_80", "13.0"),
            CacheKey::new("b", &options(&["x", "y"]), "sm_80", "13.0"),
            CacheKey::new("a", &options(&["xy"]), "sm_80", "13.0"),
            CacheKey::new("a", &options(&["y", "x"]), "sm_80", "13.0"),
            CacheKey::new("a", &options(&["x"]), "sm_80", "13.0"),
            CacheKey::new("a", &options(&["x", "y"]), "sm_90a", "13.0"),
            CacheKey::new("a", &options(&["x", "y"]), "sm_80", "13.1"),
            CacheKey::new("as", &options(&["x", "y"]), "m_80", "13.0"),
        ];
        for (at, key) in keys.iter().enumerate() {
            assert!(!keys[..at].contains(key), "key {at} repeats");
        }
        assert_eq!(keys[0], CacheKey::new("a", &options(&["x", "y"]), "sm_80", "13.0"));
    }

    #[test]
    fn what_is_stored_is_found_and_nothing_else() {
        let folder = Folder::new("roundtrip");
        let cache = KernelCache::at(&folder.0);
        assert_eq!(cache.load(&key("a")), None);
        cache.store(&key("a"), b"cubin").unwrap();
        assert_eq!(cache.load(&key("a")).as_deref(), Some(&b"cubin"[..]));
        assert_eq!(cache.load(&key("b")), None);
        // The right file under the wrong name: another version's key, or a collision made by hand.
        fs::rename(cache.path(&key("a")), cache.path(&key("b"))).unwrap();
        assert_eq!(cache.load(&key("b")), None);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_an_error_and_reads_as_empty() {
        let cache = KernelCache::at("/proc/no-such-folder");
        assert!(cache.store(&key("a"), b"cubin").is_err());
        assert_eq!(cache.load(&key("a")), None);
    }

    #[test]
    fn only_abandoned_temporary_files_are_removed() {
        let folder = Folder::new("abandoned");
        let cache = KernelCache::at(&folder.0);
        fs::create_dir_all(&folder.0).unwrap();
        let (old, young) = (folder.0.join("old.tmp"), folder.0.join("young.tmp"));
        fs::write(&young, b"half").unwrap();
        let file = File::create(&old).unwrap();
        file.set_modified(SystemTime::now() - ABANDONED_AFTER - Duration::from_secs(60)).unwrap();
        cache.store(&key("a"), b"cubin").unwrap();
        assert!(!old.exists() && young.exists());
        assert_eq!(cache.load(&key("a")).as_deref(), Some(&b"cubin"[..]));
    }

    /// Writers and readers race on one key while a vandal overwrites, truncates and deletes the
    /// file in place: a reader gets a whole payload of some writer, or nothing.
    #[test]
    fn concurrent_writers_readers_and_damage() {
        let folder = Folder::new("race");
        let cache = KernelCache::at(&folder.0);
        let payload = |writer: u8| vec![writer; 20_000 + writer as usize];
        let found = AtomicU64::new(0);
        cache.store(&key("a"), &payload(1)).unwrap();
        std::thread::scope(|scope| {
            for writer in 1..=3u8 {
                let (cache, payload) = (&cache, &payload);
                scope.spawn(move || {
                    for _ in 0..60 {
                        cache.store(&key("a"), &payload(writer)).unwrap();
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..150 {
                        if let Some(bytes) = cache.load(&key("a")) {
                            assert_eq!(bytes, payload(bytes[0]));
                            found.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
            scope.spawn(|| {
                let path = cache.path(&key("a"));
                for round in 0..30 {
                    if let Ok(file) = OpenOptions::new().write(true).open(&path) {
                        let _ = match round % 3 {
                            0 => file.set_len(5_000),
                            1 => (&file).write_all(&[0xee; 3_000]),
                            _ => fs::remove_file(&path),
                        };
                    }
                    std::thread::yield_now();
                }
            });
        });
        cache.store(&key("a"), &payload(7)).unwrap();
        assert_eq!(cache.load(&key("a")), Some(payload(7)));
        assert!(found.load(Ordering::Relaxed) > 0, "no reader ever found a payload");
        let left = fs::read_dir(&folder.0).unwrap().count();
        assert_eq!(left, 1, "temporary files were left behind");
    }

    proptest! {
        #[test]
        fn any_damage_is_noticed(
            payload in proptest::collection::vec(any::<u8>(), 1..300),
            at in any::<prop::sample::Index>(),
            flip in 1u8..,
        ) {
            let key = key("a");
            let mut bytes = header(&key, &payload).to_vec();
            bytes.extend(&payload);
            prop_assert_eq!(decode(&key, &bytes), Some(&payload[..]));
            let at = at.index(bytes.len());
            prop_assert_eq!(decode(&key, &bytes[..at]), None);
            bytes[at] ^= flip;
            prop_assert_eq!(decode(&key, &bytes), None);
        }

        #[test]
        fn garbage_is_never_a_cubin(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            prop_assert_eq!(decode(&key("a"), &bytes), None);
        }
    }
}
