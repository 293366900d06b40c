//! SM maps on disk.

use std::fs;

use crate::common::{h200, map, synthetic};
use crate::tree::TreeDir;
use ep_topology::{SmCache, SmMap};

const UUID: &str = "GPU-7f2b";
const DRIVER: &str = "580.159";

/// The single file in the cache's folder.
fn only_file(dir: &TreeDir) -> std::path::PathBuf {
    let mut files = fs::read_dir(dir.path("cache")).expect("the folder").flatten();
    let file = files.next().expect("one file").path();
    assert!(files.next().is_none(), "nothing is left behind");
    file
}

#[test]
fn stored_maps_come_back_for_the_same_device_and_driver_only() {
    let dir = TreeDir::new();
    let cache = SmCache::new(dir.path("cache"));
    assert_eq!(cache.load(UUID, DRIVER), None);
    let stored = map(h200());
    cache.store(UUID, DRIVER, &stored).expect("writable");
    assert_eq!(cache.load(UUID, DRIVER), Some(stored));
    assert_eq!(cache.load(UUID, "581.0"), None);
    assert_eq!(cache.load("GPU-0000", DRIVER), None);
    let newer = map(synthetic(&[4, 4], &[1, 2, 4]));
    cache.store(UUID, DRIVER, &newer).expect("writable");
    assert_eq!(cache.load(UUID, DRIVER), Some(newer));
    only_file(&dir);
}

#[test]
fn corrupt_and_foreign_files_are_ignored() {
    let dir = TreeDir::new();
    let cache = SmCache::new(dir.path("cache"));
    cache.store(UUID, DRIVER, &map(h200())).expect("writable");
    let file = only_file(&dir);
    let good = fs::read_to_string(&file).expect("text");
    let half = &good[..good.len() / 2];
    for bad in [
        "",
        "null",
        half,
        &good.replace("\"version\":2", "\"version\":3"),
        &good.replace("ep-topology SM map", "something else"),
        &good.replace(UUID, "GPU-other"),
        &good.replace(DRIVER, "1.2"),
        // Sound JSON, but the SMs contradict the count.
        &good.replace("\"sm_count\":132", "\"sm_count\":7"),
    ] {
        assert_ne!(bad, good);
        fs::write(&file, bad).expect("writable");
        assert_eq!(cache.load(UUID, DRIVER), None, "{bad:.60}");
    }
    fs::write(&file, [0xff, 0xfe, 0x00]).expect("writable");
    assert_eq!(cache.load(UUID, DRIVER), None);
    fs::remove_file(&file).expect("removable");
    fs::create_dir(&file).expect("a folder in its place");
    assert_eq!(cache.load(UUID, DRIVER), None);
    assert!(cache.store(UUID, DRIVER, &map(h200())).is_err(), "a folder is in the way");
}

#[test]
fn names_cannot_leave_the_folder() {
    let dir = TreeDir::new();
    let cache = SmCache::new(dir.path("cache"));
    let stored = map(h200());
    cache.store("../../escape", "/etc/x", &stored).expect("writable");
    assert_eq!(cache.load("../../escape", "/etc/x"), Some(stored));
    assert!(only_file(&dir).starts_with(dir.path("cache")));
}

#[test]
fn concurrent_writers_leave_a_whole_file() {
    let dir = TreeDir::new();
    let cache = SmCache::new(dir.path("cache"));
    let maps: Vec<SmMap> = (1..5).map(|n| map(synthetic(&[n * 4; 8], &[1, 2, 4]))).collect();
    cache.store(UUID, DRIVER, &maps[0]).expect("writable");
    std::thread::scope(|scope| {
        for map in &maps {
            let cache = &cache;
            scope.spawn(move || {
                for _ in 0..50 {
                    cache.store(UUID, DRIVER, map).expect("writable");
                }
            });
        }
        for _ in 0..200 {
            let seen = cache.load(UUID, DRIVER).expect("always whole");
            assert!(maps.contains(&seen));
        }
    });
    only_file(&dir);
}
