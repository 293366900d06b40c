//! Groups over TCP: how they form, what they do, and who cannot disturb them.
#![cfg(not(loom))]

mod meeting;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread::spawn;
use std::time::{Duration, Instant};

use ep_transport::{Deadline, ErrorKind, Group, Rendezvous, TransportError};
use meeting::{
    LIMIT, address, at, connected, each, errors, expect, groups, groups_at, in_one_of_some_tries,
    join, sockets, works,
};
use proptest::prelude::*;

#[test]
fn gathers_are_complete_and_by_rank() {
    for world in [1, 2, 5] {
        each(groups(world), |group| {
            for round in 0..50u32 {
                let mine = [group.rank() as u32, round].map(u32::to_le_bytes).concat();
                let all = group.all_gather(&mine).unwrap();
                for (rank, theirs) in all.iter().enumerate() {
                    assert_eq!(*theirs, [rank as u32, round].map(u32::to_le_bytes).concat());
                }
                group.barrier().unwrap();
            }
        });
    }
}

#[test]
fn large_parts_arrive() {
    each(groups(3), |group| {
        let all = group.all_gather(&vec![group.rank() as u8; 3 << 20]).unwrap();
        for (rank, theirs) in all.iter().enumerate() {
            assert_eq!(theirs.len(), 3 << 20);
            assert!(theirs.iter().all(|&b| b == rank as u8));
        }
        // Together more than a frame may carry: the same verdict for all, and no harm done.
        let e = group.all_gather(&vec![0; 30 << 20]).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Argument);
        group.barrier().unwrap();
    });
}

#[test]
fn rank_0_may_be_last() {
    let address = address();
    let early: Vec<_> = (1..3).map(|rank| join(at(rank, 3, &address))).collect();
    std::thread::sleep(Duration::from_millis(300));
    let last = Group::from_env(&at(0, 3, &address)).unwrap();
    let others = early.into_iter().map(|rank| rank.join().unwrap().unwrap());
    works(std::iter::once(last).chain(others).collect());
}

#[test]
fn different_collectives_are_a_mismatch_for_all() {
    each(groups(4), |group| {
        let result =
            if group.rank() == 2 { group.barrier() } else { group.all_gather(&[1]).map(drop) };
        let e = result.unwrap_err();
        assert_eq!((e.kind(), e.peer()), (ErrorKind::Mismatch, Some(2)), "{e}");
        let text = e.to_string();
        assert!(text.contains("barrier on rank 2") && text.contains("ranks 0, 1, 3"), "{text}");
        group.barrier().unwrap();
    });
}

#[test]
fn the_absent_are_named() {
    in_one_of_some_tries(|| each(groups(4), absent).into_iter().collect());
}

/// Ranks 2 and 3 are absent, and the others say so.
fn absent(group: Group) -> Result<(), String> {
    group.barrier().unwrap();
    let start = Instant::now();
    if group.rank() > 1 {
        while group.health().fault().is_none() {
            assert!(start.elapsed() < LIMIT);
            std::thread::sleep(Duration::from_millis(5));
        }
        return Ok(());
    }
    let deadline = Deadline::after(Duration::from_millis(400));
    let e = group.all_gather_within("gather", &[], deadline).unwrap_err();
    assert!(start.elapsed() < LIMIT / 2);
    assert!(group.barrier().is_err(), "the group is out of phase");
    let named = match &e {
        TransportError::Timeout { peers, .. } => *peers == [2, 3],
        TransportError::Aborted { blames, .. } => *blames == Some(2),
        other => panic!("{other}"),
    };
    expect(named, e.to_string())
}

#[test]
fn an_abort_reaches_those_who_wait() {
    let slowest = each(groups(4), |group| {
        group.barrier().unwrap();
        if group.rank() == 3 {
            std::thread::sleep(Duration::from_millis(200));
            group.abort("bad weights");
            return Instant::now();
        }
        let e = group.barrier().unwrap_err();
        let now = Instant::now();
        assert!(
            matches!(&e, TransportError::Aborted { by: 3, why, .. } if why == "bad weights"),
            "{e}"
        );
        now
    });
    let told = slowest[3];
    let slow = slowest.iter().map(|heard| heard.saturating_duration_since(told)).max().unwrap();
    // The barrier has twice as long.
    assert!(slow < LIMIT / 2, "{slow:?}");
}

#[test]
fn whoever_leaves_is_named_and_whoever_waits_is_told() {
    each(groups(3), |group| {
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(100));
            return;
        }
        let start = Instant::now();
        let e = group.barrier().unwrap_err();
        assert_eq!(e.peer(), Some(1), "{e}");
        assert!(start.elapsed() < LIMIT / 2);
    });
}

#[test]
fn a_panic_counts_as_death() {
    each(groups(2), |group| {
        if group.rank() == 0 {
            let dies = spawn(move || {
                let _group = group;
                panic!("on purpose");
            });
            assert!(dies.join().is_err());
            return;
        }
        let start = Instant::now();
        while group.health().check("test").is_ok() {
            assert!(start.elapsed() < LIMIT);
            std::thread::sleep(Duration::from_millis(5));
        }
        let e = group.health().check("test").unwrap_err();
        assert!(matches!(&e, TransportError::PeerLost { peer: 0, .. }), "{e}");
        assert!(e.to_string().contains("panicked"), "{e}");
    });
}

#[test]
fn groups_split_and_split_again() {
    each(groups(6), |world| {
        let (rank, color) = (world.rank(), world.rank() as u32 % 2);
        // Reversed order within the subgroup.
        let half = world.split(color, -(rank as i64)).unwrap();
        let members: Vec<usize> = (0..6).rev().filter(|r| r % 2 == rank % 2).collect();
        assert_eq!((half.world(), members[half.rank()]), (3, rank));
        let all = half.all_gather(&[rank as u8]).unwrap();
        assert_eq!(all, members.iter().map(|&r| vec![r as u8]).collect::<Vec<_>>());
        let nested = half.split(u32::from(half.rank() == 0), 0).unwrap();
        assert_eq!(nested.world(), if half.rank() == 0 { 1 } else { 2 });
        nested.barrier().unwrap();
        // Groups do not disturb each other.
        if color == 0 && half.rank() == 0 {
            half.abort("only this half");
        }
        if color == 1 {
            half.barrier().unwrap();
        } else {
            assert!(half.barrier().is_err());
        }
        world.barrier().unwrap();
    });
}

#[test]
fn rank_0_may_drop_its_group_first() {
    each(groups(4), |world| {
        let pair = world.split(world.rank() as u32 / 2, 0).unwrap();
        if world.rank() == 0 {
            drop(pair);
            let start = Instant::now();
            drop(world);
            assert!(start.elapsed() < LIMIT / 2);
            return;
        }
        if world.rank() == 1 {
            assert_eq!(pair.barrier().unwrap_err().peer(), Some(0));
            return;
        }
        drop(world);
        std::thread::sleep(Duration::from_millis(200));
        for _ in 0..10 {
            pair.barrier().unwrap();
        }
    });
}

#[test]
fn one_address_serves_one_group_after_another() {
    let address = address();
    let mut alive = Vec::new();
    for _ in 0..3 {
        let start = Instant::now();
        // The group before frees it once it is complete.
        while let Err(e) = TcpListener::bind(&address) {
            assert!(start.elapsed() < LIMIT, "{e}");
            std::thread::sleep(Duration::from_millis(5));
        }
        let groups = groups_at(3, &address);
        alive.push(groups.clone());
        works(groups);
    }
    alive.into_iter().for_each(works);
}

#[test]
fn jobs_do_not_mix() {
    let jobs: Vec<_> = (0..3).map(|_| spawn(|| works(groups(3)))).collect();
    jobs.into_iter().for_each(|job| job.join().unwrap());
}

#[test]
fn a_port_in_use_is_named() {
    let address = address();
    let _other = TcpListener::bind(&address).unwrap();
    let e = Group::from_env(&at(0, 2, &address)).unwrap_err().to_string();
    assert!(e.contains(&address) && e.contains("in use") && e.contains("EP_RENDEZVOUS"), "{e}");
}

#[test]
fn a_rank_started_twice_is_everyones_error() {
    let address = address();
    let ranks = [0, 1, 1].map(|rank| join(at(rank, 3, &address)));
    let start = Instant::now();
    for e in errors(ranks.into()) {
        assert!(e.to_string().contains("rank 1 was started twice"), "{e}");
        assert_eq!(e.peer(), Some(1));
    }
    assert!(start.elapsed() < LIMIT / 2);
}

#[test]
fn different_world_sizes_are_everyones_error() {
    let address = address();
    for e in errors([(0, 3), (1, 3), (2, 4)].map(|(r, world)| join(at(r, world, &address))).into())
    {
        let text = e.to_string();
        // Whose size is odd depends on who has come by then: never rank 0's, who opens the meeting.
        let said =
            ["rank 2 has 4, rank 0 3", "rank 2 has 4, rank 1 3", "rank 2 has 4, ranks 0, 1 3"];
        assert!(said.iter().any(|said| text.contains(said)), "{text}");
        assert_eq!(e.peer(), Some(2));
    }
}

#[test]
fn missing_ranks_are_named_to_those_who_came() {
    in_one_of_some_tries(|| {
        let address = address();
        let short = |rank| at(rank, 5, &address).with_timeout(Duration::from_millis(700));
        let start = Instant::now();
        let texts = errors([0, 2, 3].map(|rank| join(short(rank))).into());
        let texts: Vec<String> = texts.iter().map(ToString::to_string).collect();
        assert!(start.elapsed() < LIMIT, "{texts:?}");
        let all = texts.iter().all(|text| text.contains("ranks 1, 4 of 5 missing"));
        expect(all && start.elapsed() < Duration::from_millis(1700), format!("{texts:?}"))
    });
}

#[test]
fn without_rank_0_the_error_says_so() {
    let lonely = at(1, 2, &address()).with_timeout(Duration::from_millis(300));
    let e = Group::from_env(&lonely).unwrap_err();
    assert_eq!((e.kind(), e.peer()), (ErrorKind::Os, Some(0)), "{e}");
    assert!(e.to_string().contains("check that rank 0 was started"), "{e}");
}

#[test]
fn another_jobs_rank_is_told_and_disturbs_nobody() {
    let address = address();
    let with = |rank, token: &str| join(at(rank, 2, &address).with_token(token).unwrap());
    let first = with(0, "job a");
    std::thread::sleep(Duration::from_millis(100));
    let e = with(1, "job b").join().unwrap().unwrap_err();
    assert!(e.to_string().contains("another job's rendezvous"), "{e}");
    let second = with(1, "job a");
    works(vec![first.join().unwrap().unwrap(), second.join().unwrap().unwrap()]);
}

#[test]
fn rank_0_says_that_it_refused_another_jobs_rank() {
    let address = address();
    let with = |rank, token: &str, wait| {
        join(at(rank, 3, &address).with_token(token).unwrap().with_timeout(wait))
    };
    let first = with(0, "job a", LIMIT);
    assert!(with(1, "job b", LIMIT).join().unwrap().is_err());
    // All wait only as long as the one who waits the least.
    assert!(with(1, "job a", Duration::from_millis(700)).join().unwrap().is_err());
    let e = first.join().unwrap().unwrap_err().to_string();
    assert!(e.contains("of 3 missing") && e.contains("1 process with another job"), "{e}");
}

#[test]
fn the_largest_world_can_be_waited_for() {
    in_one_of_some_tries(|| {
        let lonely = at(0, Rendezvous::MAX_WORLD, &address());
        let lonely = lonely.with_timeout(Duration::from_millis(300));
        let e = Group::from_env(&lonely).unwrap_err().to_string();
        expect(e.contains("of 65536 missing"), e)
    });
}

/// Not a test of its own: rank 0 of 24, with too few descriptors.
#[test]
fn a_poor_rank_0() {
    let Ok(address) = std::env::var("EP_TEST_POOR") else { return };
    let e = Group::from_env(&at(0, 24, &address)).unwrap_err();
    println!("\nsays: {e}");
}

#[test]
fn descriptors_that_run_out_are_everyones_error() {
    // A rank that comes when the others have given up hears nothing of why.
    in_one_of_some_tries(descriptors_run_out);
}

fn descriptors_run_out() -> Result<(), String> {
    let address = address();
    let mut poor = std::process::Command::new("sh")
        .args(["-c", "ulimit -n 16 && exec \"$0\" --exact a_poor_rank_0 --nocapture"])
        .arg(std::env::current_exe().unwrap())
        .env("EP_TEST_POOR", &address)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    // Rank 0 has its own place before the others take all there are: it listens, and has both ends of
    // its connection.
    while sockets(poor.id()).difference(&sockets(std::process::id())).count() < 3 {
        assert!(start.elapsed() < LIMIT && poor.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    let start = Instant::now();
    let others = (1..24).map(|rank| join(at(rank, 24, &address))).collect();
    let mut texts: Vec<String> = errors(others).iter().map(ToString::to_string).collect();
    let out = poor.wait_with_output().unwrap();
    let out = String::from_utf8_lossy(&out.stdout).into_owned();
    texts.push(out.lines().find(|line| line.starts_with("says: ")).expect(&out).into());
    for text in texts {
        for word in ["cannot accept more ranks", "ulimit -n", "of 24 ranks"] {
            expect(text.contains(word), &text)?;
        }
        expect(text.matches("Too many open files").count() == 1, &text)?;
    }
    expect(start.elapsed() < LIMIT / 2, format!("{:?}", start.elapsed()))
}

#[test]
fn a_name_that_does_not_resolve_is_an_error() {
    let lost = at(1, 2, "no-such-host.invalid:29501").with_timeout(Duration::from_millis(500));
    let e = Group::from_env(&lost).unwrap_err().to_string();
    assert!(e.contains("cannot be resolved") && e.contains("no-such-host.invalid"), "{e}");
}

#[test]
fn something_else_at_the_address_is_an_error() {
    let address = address();
    let listener = TcpListener::bind(&address).unwrap();
    let web = spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        let _ = stream.read(&mut [0; 64]);
    });
    let e = Group::from_env(&at(1, 2, &address)).unwrap_err().to_string();
    assert!(e.contains("no rendezvous of this library"), "{e}");
    web.join().unwrap();
}

/// What strangers send, one connection each, while a group forms; the group must not notice.
fn undisturbed_by(strangers: &[&[u8]]) {
    let address = address();
    let first = join(at(0, 3, &address));
    let second = join(at(1, 3, &address));
    let mut open = Vec::new();
    for bytes in strangers {
        let mut stream = connected(&address);
        // The hub may have closed it already.
        let _ = stream.write_all(bytes);
        open.push(stream);
    }
    let last = join(at(2, 3, &address));
    works([first, second, last].map(|rank| rank.join().unwrap().unwrap()).into());
}

#[test]
fn strangers_are_turned_away() {
    let mut other_version = b"EPCP\x09\0\0\0".to_vec();
    other_version.extend([0; 8]);
    let mut oversized = b"EPCP\x01\0\0\0".to_vec();
    oversized.extend([0xff; 8]);
    undisturbed_by(&[
        b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n",
        b"",
        b"E",
        b"EPCP\x01\0",
        &other_version,
        &oversized,
        &vec![0x16; 100_000],
    ]);
}

#[test]
fn a_stranger_hears_why() {
    let address = address();
    let rank = join(at(0, 2, &address));
    let mut stream = connected(&address);
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(b"EPCP\x07\0\0\0\0\0\0\0\0\0\0\0").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains("version 7"), "{answer}");
    works([rank, join(at(1, 2, &address))].map(|rank| rank.join().unwrap().unwrap()).into());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    #[test]
    fn garbage_disturbs_nobody(
        garbage in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..400), 1..6),
        polite in any::<bool>(),
    ) {
        let garbage: Vec<Vec<u8>> = garbage
            .into_iter()
            .map(|bytes| if polite { [b"EPCP\x01\0\0\0".as_slice(), &bytes].concat() } else { bytes })
            .collect();
        let garbage: Vec<&[u8]> = garbage.iter().map(Vec::as_slice).collect();
        undisturbed_by(&garbage);
    }
}
