//! Nothing is left behind: no descriptor, thread or socket file. A binary of its own, since it
//! counts what the whole process has open.
#![cfg(not(loom))]

use std::net::TcpListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ep_transport::{Deadline, Group, ProcessTransport, Rendezvous, Transport, WindowSpec};

const LIMIT: Duration = Duration::from_secs(20);

fn count(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count()
}

fn windows() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().matches("ep-window").count()
}

fn socket_files() -> Vec<PathBuf> {
    let ours = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("ep-"))
            && path.extension().is_none()
            && std::fs::symlink_metadata(path)
                .is_ok_and(|meta| std::os::unix::fs::FileTypeExt::is_socket(&meta.file_type()))
    };
    let entries = std::fs::read_dir(std::env::temp_dir()).unwrap();
    entries.map(|entry| entry.unwrap().path()).filter(ours).collect()
}

fn until_back_to(what: &str, before: usize) {
    let start = Instant::now();
    while count(what) > before {
        assert!(start.elapsed() < LIMIT, "{} {what} before, {} now", before, count(what));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn nothing_is_left_behind() {
    let world = 3;
    let (descriptors, tasks) = (count("fd"), count("task"));
    let open_windows = |group: &Group| {
        let spec = WindowSpec { bytes: 1 << 20, flags: 2 };
        ProcessTransport::new().open(group, spec, Deadline::after(LIMIT)).unwrap()
    };
    for _ in 0..3 {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = format!("127.0.0.1:{port}");
        std::thread::scope(|scope| {
            for rank in 0..world {
                let address = &address;
                scope.spawn(move || {
                    let at = Rendezvous::new(rank, world, address).unwrap().with_timeout(LIMIT);
                    let group = Group::from_env(&at).unwrap();
                    // One rank counts, between barriers: counting takes a descriptor too.
                    group.barrier().unwrap();
                    let before = (rank == 0).then(|| count("fd"));
                    group.barrier().unwrap();
                    let link = open_windows(&group);
                    group.barrier().unwrap();
                    if let Some(before) = before {
                        assert_eq!(count("fd"), before, "an open window keeps no descriptor");
                        assert_eq!(windows(), world * world);
                    }
                    group.barrier().unwrap();
                    drop(link);
                    drop(group);
                });
            }
        });
        until_back_to("fd", descriptors);
        until_back_to("task", tasks);
        assert_eq!(windows(), 0);
        assert_eq!(socket_files(), Vec::<PathBuf>::new());
    }
}
