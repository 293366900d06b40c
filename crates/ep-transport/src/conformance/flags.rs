//! Flags: what is set, what is reset, and who waits for what.

use std::time::{Duration, Instant};

use super::Outcome;
use super::aids::{Rank, ensure};

pub(super) fn ready_agrees_with_wait(rank: Rank) -> Outcome {
    let (all, last) = (rank.all(), rank.last());
    let end = rank.open(64, 2)?;
    ensure!(end.link.ready(&[], 0), "nobody is not ready");
    end.try_wait(&[], 0, Duration::ZERO).map_err(|e| format!("waiting for nobody: {e}"))?;
    for _ in 0..20 {
        ensure!(!end.link.ready(&all, 0), "ready before anyone could signal");
        rank.barrier()?;
        if rank.rank() != last {
            end.signal_all(&all, 0)?;
        }
        rank.barrier()?;
        ensure!(!end.link.ready(&all, 0), "ready without the last rank");
        rank.barrier()?;
        if rank.rank() == last {
            end.signal_all(&all, 0)?;
        }
        let start = Instant::now();
        while !end.link.ready(&all, 0) {
            ensure!(start.elapsed() < rank.limit, "never ready");
            std::thread::yield_now();
        }
        for &peer in &all {
            ensure!(!end.link.ready(&[peer], 1), "rank {peer}'s other flag got set");
        }
        end.try_wait(&all, 0, Duration::ZERO).map_err(|e| format!("ready, but: {e}"))?;
        for &peer in &all {
            ensure!(!end.link.ready(&[peer], 0), "rank {peer}'s flag was not reset");
        }
        rank.barrier()?;
    }
    Ok(())
}

pub(super) fn flags_are_independent(rank: Rank) -> Outcome {
    const FLAGS: u32 = 5;
    let all = rank.all();
    let end = rank.open(64, FLAGS)?;
    for round in 0..FLAGS {
        for flag in 0..FLAGS {
            end.signal_all(&all, (flag * 2 + round) % FLAGS)?;
        }
        rank.barrier()?;
        // A barrier of the group does not say that signals have arrived.
        let start = Instant::now();
        while !(0..FLAGS).all(|flag| end.link.ready(&all, flag)) && start.elapsed() < rank.limit {
            std::thread::yield_now();
        }
        let mut left: Vec<(u32, usize)> =
            (0..FLAGS).flat_map(|flag| all.iter().map(move |&peer| (flag, peer))).collect();
        while !left.is_empty() {
            let pick = (left.len() * 7 + round as usize) % left.len();
            for &(flag, peer) in &left {
                ensure!(end.link.ready(&[peer], flag), "flag {flag} of rank {peer} is missing");
            }
            let (flag, peer) = left.swap_remove(pick);
            end.wait(&[peer], flag)?;
            ensure!(!end.link.ready(&[peer], flag), "flag {flag} of rank {peer} was not reset");
        }
        rank.barrier()?;
    }
    Ok(())
}

/// Flag 0 comes only after flag 1 was answered: a thread waiting for one must not keep another
/// from waiting for the other. Where operations are on streams, each thread has one of its own.
pub(super) fn threads_wait_on_different_flags(rank: Rank) -> Outcome {
    let world = rank.world();
    let (next, before) = ((rank.rank() + 1) % world, (rank.rank() + world - 1) % world);
    let end = rank.open(64, 3)?;
    let (first, second) = (end.beside()?, end.beside()?);
    rank.barrier()?;
    for _ in 0..100 {
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| first.wait(&[before], 0));
            let quick = scope.spawn(|| {
                second.wait(&[before], 1)?;
                second.signal(before, 2)
            });
            std::thread::yield_now();
            end.signal(next, 1)?;
            end.wait(&[next], 2)?;
            end.signal(next, 0)?;
            let join = |thread: std::thread::ScopedJoinHandle<'_, Outcome>| {
                thread.join().map_err(|_| "a waiting thread panicked".to_owned())?
            };
            join(quick)?;
            join(slow)
        })?;
    }
    rank.barrier()
}
