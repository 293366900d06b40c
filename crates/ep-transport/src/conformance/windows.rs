//! Memory: sizes, contents, and the order of data and flags.

use super::Outcome;
use super::aids::{End, Rank, ensure, seed};
use crate::Reach;

const DATA: u32 = 0;
const READY: u32 = 1;

pub(super) fn windows_are_zeroed_disjoint_and_sized(rank: Rank) -> Outcome {
    // Not a multiple of a page; twice, since memory may be recycled dirty.
    for bytes in [100_008, 100_008, 8] {
        let end = rank.open(bytes, 3)?;
        let own = end.link.window();
        ensure!(own.bytes == bytes, "the window has {} of {bytes} bytes", own.bytes);
        ensure!((own.base.as_ptr() as usize).is_multiple_of(4096), "not aligned to a page");
        let first = end.read(&own, 0, bytes)?;
        let dirty = first.iter().position(|&byte| byte != 0);
        ensure!(dirty.is_none(), "byte {dirty:?} starts as something else than 0");
        for peer in rank.all() {
            for flag in 0..3 {
                ensure!(!end.link.ready(&[peer], flag), "flag {flag} of rank {peer} starts set");
            }
        }
        rank.barrier()?;
        end.fill(0, bytes, seed(bytes, rank.rank(), 0))?;
        // On a stream it is there once the own window has been looked at.
        end.expect(0, bytes, seed(bytes, rank.rank(), 0), "the own window")?;
        rank.barrier()?;
        for peer in rank.all() {
            match end.link.reach(peer) {
                Reach::Direct(theirs) => {
                    ensure!(theirs.bytes == bytes, "rank {peer}'s has {} bytes", theirs.bytes);
                    end.expect_at(&theirs, 0, bytes, seed(bytes, peer, 0), "a peer's window")?;
                }
                Reach::Bulk | Reach::Paired => {
                    ensure!(peer != rank.rank(), "the own window is not direct")
                }
            }
        }
        rank.barrier()?;
    }
    Ok(())
}

/// One round of everyone sending to everyone: wait for free space, send, signal, wait, look.
/// The window is a sending area and a receiving area of `piece` bytes per rank each.
fn exchange(rank: &Rank, end: &End, round: usize, piece: usize) -> Outcome {
    let (me, all) = (rank.rank(), rank.all());
    let size =
        |source: usize, target: usize| (round * 7919 + source * 613 + target * 389) % (piece + 1);
    end.signal_all(&all, READY)?;
    for &peer in &all {
        let bytes = size(me, peer);
        end.fill(peer * piece, bytes, seed(round, me, peer))?;
        end.order(&[peer], READY)?;
        end.send(peer, peer * piece, (all.len() + me) * piece, bytes)?;
        end.signal(peer, DATA)?;
    }
    end.flush()?;
    end.order(&all, DATA)?;
    for &peer in &all {
        let what = format!("round {round}, from rank {peer}");
        end.expect((all.len() + peer) * piece, size(peer, me), seed(round, peer, me), &what)?;
    }
    Ok(())
}

/// Exchanges in `rounds` rounds, or as many as fit the time where a transport is slow.
fn rounds(rank: &Rank, rounds: usize, piece: usize) -> Outcome {
    let end = rank.open(2 * rank.world() * piece, 2)?;
    rank.paced(rounds, |round| exchange(rank, &end, round, piece))?;
    rank.barrier()
}

pub(super) fn data_before_signal_is_visible(rank: Rank) -> Outcome {
    rounds(&rank, 30, 20_000)
}

pub(super) fn reuse_over_many_rounds(rank: Rank) -> Outcome {
    // Smaller groups meet more often in the same time.
    rounds(&rank, if rank.world() == 2 { 10_000 } else { 2_000 }, 200)
}

/// The other direction: the owner writes its own window, peers read it and say so, and the owner
/// overwrites it at once. Bulk peers cannot read; they only follow the protocol.
pub(super) fn reads_before_signal_are_not_overwritten(rank: Rank) -> Outcome {
    const BYTES: usize = 2_000;
    let (me, all) = (rank.rank(), rank.all());
    let end = rank.open(BYTES, 2)?;
    rank.paced(500, |round| {
        end.fill(0, BYTES, seed(round, me, 0))?;
        end.signal_all(&all, DATA)?;
        for &peer in &all {
            end.order(&[peer], DATA)?;
            if let Reach::Direct(theirs) = end.link.reach(peer) {
                let what = format!("round {round}, read from rank {peer}");
                end.expect_at(&theirs, 0, BYTES, seed(round, peer, 0), &what)?;
            }
            end.signal(peer, READY)?;
        }
        end.order(&all, READY)
    })?;
    rank.barrier()
}

pub(super) fn sources_may_change_after_flush(rank: Rank) -> Outcome {
    const BYTES: usize = 4_096;
    let (me, all) = (rank.rank(), rank.all());
    let end = rank.open((1 + all.len()) * BYTES, 2)?;
    rank.paced(50, |round| {
        end.signal_all(&all, READY)?;
        end.order(&all, READY)?;
        for &peer in &all {
            end.fill(0, BYTES, seed(round, me, peer))?;
            end.put(peer, 0, (1 + me) * BYTES, BYTES)?;
            end.flush()?;
        }
        end.fill(0, BYTES, 0)?;
        end.signal_all(&all, DATA)?;
        end.order(&all, DATA)?;
        for &peer in &all {
            let what = format!("round {round}, put by rank {peer}");
            end.expect((1 + peer) * BYTES, BYTES, seed(round, peer, me), &what)?;
        }
        Ok(())
    })?;
    rank.barrier()
}

pub(super) fn zero_length_puts(rank: Rank) -> Outcome {
    const BYTES: usize = 64;
    let end = rank.open(BYTES, 1)?;
    end.fill(0, BYTES, seed(0, rank.rank(), 0))?;
    rank.barrier()?;
    for peer in rank.all() {
        for (from, to) in [(0, 0), (BYTES, 0), (0, BYTES), (BYTES, BYTES)] {
            end.put(peer, from, to, 0)?;
        }
        end.signal(peer, 0)?;
    }
    end.flush()?;
    end.wait(&rank.all(), 0)?;
    end.expect(0, BYTES, seed(0, rank.rank(), 0), "the window after empty puts")?;
    rank.barrier()
}
