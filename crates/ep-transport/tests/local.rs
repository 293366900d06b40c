//! Groups of threads: collectives, their errors, and subgroups.

use std::thread;
use std::time::{Duration, Instant};

use ep_transport::{ErrorKind, Group, TransportError};

/// Runs `body` on a thread per rank; the results by rank.
fn on_ranks<T: Send>(world: usize, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let groups = Group::local(world).unwrap();
    thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = groups.into_iter().map(|g| scope.spawn(move || body(g))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_group_of_nobody_is_an_argument_error() {
    assert_eq!(Group::local(0).unwrap_err().kind(), ErrorKind::Argument);
}

#[test]
fn gathers_are_by_rank_in_any_number_and_length() {
    for world in [1, 2, 5, 64] {
        on_ranks(world, |group| {
            for round in 0..200usize {
                let mine = vec![group.rank() as u8; (group.rank() + round) % 7];
                let all = group.all_gather(&mine).unwrap();
                assert_eq!(all.len(), world);
                for (rank, theirs) in all.iter().enumerate() {
                    assert_eq!(*theirs, vec![rank as u8; (rank + round) % 7]);
                }
            }
        });
    }
}

#[test]
fn different_operations_are_the_same_error_everywhere_and_harm_nothing() {
    on_ranks(4, |group| {
        let result =
            if group.rank() == 2 { group.barrier() } else { group.all_gather(b"x").map(drop) };
        match result.unwrap_err() {
            TransportError::Mismatch { ranks, detail, .. } => {
                assert_eq!(ranks, [2]);
                assert!(detail.contains("barrier") && detail.contains("all_gather"), "{detail}");
            }
            other => panic!("{other}"),
        }
        group.barrier().unwrap();
    });
}

#[test]
fn a_rank_that_leaves_or_panics_is_named_at_once() {
    for panics in [false, true] {
        let mut groups = Group::local(3).unwrap();
        let leaver = groups.pop().unwrap();
        let start = Instant::now();
        let waiting: Vec<_> =
            groups.into_iter().map(|group| thread::spawn(move || group.barrier())).collect();
        let gone = thread::spawn(move || {
            let _leaver = leaver;
            thread::sleep(Duration::from_millis(50));
            if panics {
                std::panic::resume_unwind(Box::new("on purpose"));
            }
        });
        assert_eq!(gone.join().is_err(), panics);
        for rank in waiting {
            let error = rank.join().unwrap().unwrap_err();
            assert_eq!(error.peer(), Some(2), "{error}");
            assert!(!error.group_usable());
            assert_eq!(error.to_string().contains("panicked"), panics, "{error}");
        }
        assert!(start.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn an_abort_ends_collectives_and_says_why() {
    on_ranks(3, |group| {
        if group.rank() == 1 {
            thread::sleep(Duration::from_millis(30));
            group.abort("out of patience");
        }
        let error = group.barrier().unwrap_err();
        assert!(error.to_string().contains("rank 1 gave up: out of patience"), "{error}");
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Aborted, Some(1)));
        assert!(group.all_gather(b"").is_err(), "it stays aborted");
    });
}

#[test]
fn a_late_rank_is_named_within_the_time_out() {
    let limit = Duration::from_secs(1);
    let mut groups = Group::local(3).unwrap();
    // The first of all who are late: on a busy machine the other two may be as well.
    let late = groups.remove(0);
    let ranks: Vec<_> = groups
        .into_iter()
        .map(|group| {
            thread::spawn(move || {
                group.barrier().unwrap();
                let group = group.with_timeout(limit).unwrap();
                let start = Instant::now();
                let error = group.barrier().unwrap_err();
                (error, start.elapsed())
            })
        })
        .collect();
    late.barrier().unwrap();
    let mut longest = Duration::ZERO;
    for rank in ranks {
        let (error, took) = rank.join().unwrap();
        assert_eq!(error.peer(), Some(0), "{error}");
        longest = longest.max(took);
    }
    // Whose time is over first tells the other, who has not waited as long if it came later.
    assert!(longest >= limit && longest < limit * 20, "{longest:?}");
}

#[test]
fn subgroups_are_ordered_by_key_and_independent() {
    on_ranks(6, |group| {
        let rank = group.rank();
        for _ in 0..20 {
            let part = group.split((rank % 2) as u32, -(rank as i64)).unwrap();
            assert_eq!((part.world(), part.rank()), (3, (5 - rank) / 2));
            let all = part.all_gather(&[rank as u8]).unwrap();
            let expected: Vec<Vec<u8>> =
                (0..3).map(|i| vec![(4 + rank % 2 - 2 * i) as u8]).collect();
            assert_eq!(all, expected);
            let single = part.split(part.rank() as u32, 0).unwrap();
            assert_eq!(single.world(), 1);
            single.barrier().unwrap();
            if rank % 2 == 0 {
                part.abort("only the even ones");
                assert!(part.barrier().is_err());
            }
        }
        group.barrier().unwrap();
    });
}

#[test]
fn threads_of_one_rank_take_turns() {
    on_ranks(3, |group| {
        thread::scope(|scope| {
            for _ in 0..4 {
                let group = group.clone();
                scope.spawn(move || {
                    for _ in 0..100 {
                        group.barrier().unwrap();
                    }
                });
            }
        });
    });
}

#[test]
fn configurations_are_compared() {
    use ep_transport::Deadline;
    on_ranks(3, |group| {
        let hidden = if group.rank() == 1 { "4096" } else { "7168" };
        let fields = [("experts", "64".to_owned()), ("hidden", hidden.to_owned())];
        let deadline = Deadline::after(Duration::from_secs(20));
        let error = group.agree("build", &fields, deadline).unwrap_err();
        assert!(error.to_string().contains("`hidden`"), "{error}");
        assert_eq!(error.peer(), Some(1));
        assert!(error.group_usable());
        group.agree("build", &fields[..1], deadline).unwrap();
    });
}
