//! Links beside each other and at their end.

use std::time::{Duration, Instant};

use super::Outcome;
use super::aids::{Rank, ensure, seed};
use crate::TransportError;

pub(super) fn links_of_one_group_are_independent(rank: Rank) -> Outcome {
    let (me, all) = (rank.rank(), rank.all());
    let small = rank.open(256, 1)?;
    let large = rank.open(70_000, 3)?;
    small.fill(0, 256, seed(1, me, 0))?;
    large.fill(0, 70_000, seed(2, me, 0))?;
    small.signal_all(&all, 0)?;
    rank.barrier()?;
    for &peer in &all {
        ensure!(!large.link.ready(&[peer], 0), "a signal reached the other link");
    }
    rank.barrier()?;
    large.signal_all(&all, 0)?;
    small.wait(&all, 0)?;
    large.wait(&all, 0)?;
    small.expect(0, 256, seed(1, me, 0), "the small window")?;
    drop(small);
    large.expect(0, 70_000, seed(2, me, 0), "the large window")?;
    large.signal_all(&all, 2)?;
    large.wait(&all, 2)?;
    rank.barrier()
}

/// Ranks close links, groups and windows in different orders, while others still use theirs.
pub(super) fn drops_in_any_order(rank: Rank) -> Outcome {
    let (me, all) = (rank.rank(), rank.all());
    let first = rank.open(4_096, 2)?;
    let second = rank.open(4_096, 2)?;
    second.fill(0, 2_048, seed(0, me, 0))?;
    if me % 2 == 0 {
        drop(first);
        drop(rank);
    } else {
        drop(rank);
        drop(first);
    }
    // So that the others wait while it closes its first link.
    if me == all.len() - 1 {
        std::thread::sleep(Duration::from_millis(50));
    }
    for &peer in &all {
        second.send(peer, 0, 2_048, if me == all.len() - 1 { 2_048 } else { 0 })?;
        second.signal(peer, 0)?;
    }
    second.flush()?;
    second.wait(&all, 0)?;
    second.expect(2_048, 2_048, seed(0, all.len() - 1, 0), "data after the group was dropped")
}

/// A rank's last words count: what it stored and signalled before it left is there, and only what
/// it has not done fails.
pub(super) fn signals_outlive_their_source(rank: Rank) -> Outcome {
    const BYTES: usize = 2_000;
    let last = rank.last();
    let end = rank.open(2 * BYTES, 2)?;
    rank.barrier()?;
    if rank.rank() == last {
        end.fill(0, BYTES, seed(0, last, 0))?;
        for peer in 0..last {
            end.send(peer, 0, BYTES, BYTES)?;
            end.signal(peer, 0)?;
        }
        return end.flush();
    }
    // Late enough that the news of its leaving is here too.
    let start = Instant::now();
    while rank.group.health().check_waiting("check", &[last]).is_ok() {
        ensure!(start.elapsed() < rank.limit, "no news of rank {last}, which has left");
        std::thread::sleep(Duration::from_millis(1));
    }
    end.wait(&[last], 0)?;
    end.expect(BYTES, BYTES, seed(0, last, 0), "last words")?;
    let start = Instant::now();
    match end.try_wait(&[last], 1, rank.limit) {
        Ok(()) => Err("a flag that nobody set".into()),
        Err(TransportError::PeerLost { peer, .. }) => {
            ensure!(peer == last, "rank {peer} is named instead of rank {last}");
            ensure!(start.elapsed() < rank.limit / 2, "it took {:?}", start.elapsed());
            Ok(())
        }
        Err(other) => Err(format!("not a lost peer: {other}")),
    }
}
