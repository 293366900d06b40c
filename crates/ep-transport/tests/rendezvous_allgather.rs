//! Groups made with a caller's own all-gather.
#![cfg(not(loom))]

use std::error::Error;
use std::sync::{Arc, Barrier, Mutex};

use ep_transport::{ErrorKind, Group, Result, TransportError};

type Parts = Vec<Vec<u8>>;
type Outcome = Result<Parts, Box<dyn Error + Send + Sync>>;

/// Runs `with_allgather` on a thread per rank over an all-gather whose result `change` may spoil.
fn make(world: usize, change: impl Fn(usize, Parts) -> Outcome + Sync) -> Vec<Result<Group>> {
    let parts = Arc::new(Mutex::new(vec![Vec::new(); world]));
    let barrier = Barrier::new(world);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let (parts, barrier, change) = (parts.clone(), &barrier, &change);
                let gather = move |mine: &[u8]| -> Outcome {
                    parts.lock().unwrap()[rank] = mine.to_vec();
                    barrier.wait();
                    let all = parts.lock().unwrap().clone();
                    change(rank, all)
                };
                scope.spawn(move || Group::with_allgather(rank, world, gather))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn argument_errors(results: Vec<Result<Group>>) -> Vec<String> {
    let text = |e: TransportError| {
        assert_eq!(e.kind(), ErrorKind::Argument, "{e}");
        e.to_string()
    };
    results.into_iter().map(|result| text(result.unwrap_err())).collect()
}

#[test]
fn groups_form_over_any_all_gather() {
    for world in [1, 4] {
        let groups: Vec<Group> =
            make(world, |_, all| Ok(all)).into_iter().map(Result::unwrap).collect();
        std::thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || {
                    let all = group.all_gather(&[group.rank() as u8]).unwrap();
                    assert_eq!(all, (0..world).map(|r| vec![r as u8]).collect::<Vec<_>>());
                });
            }
        });
    }
}

#[test]
fn wrong_results_are_errors() {
    let short = |_: usize, mut all: Parts| {
        all.pop();
        Ok(all)
    };
    assert!(argument_errors(make(2, short)).iter().all(|e| e.contains("1 parts for a world of 2")));
    let reversed = |_: usize, mut all: Parts| {
        all.reverse();
        Ok(all)
    };
    assert!(argument_errors(make(2, reversed))[0].contains("rank 1's part in place 0"));
    let foreign = |_: usize, all: Parts| Ok(vec![vec![0xff; 3]; all.len()]);
    assert!(argument_errors(make(2, foreign))[1].contains("no part of this library"));
}

#[test]
fn the_callers_failure_is_passed_on() {
    let failing = |rank: usize, _: Parts| Err(format!("link of rank {rank} is down").into());
    assert!(argument_errors(make(2, failing))[1].contains("link of rank 1 is down"));
}

#[test]
fn bad_ranks_are_refused_before_anything_happens() {
    let never = |_: &[u8]| -> Outcome { panic!("nothing is gathered") };
    let e = Group::with_allgather(2, 2, never).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Argument);
}
