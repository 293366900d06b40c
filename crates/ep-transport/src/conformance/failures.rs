//! Errors: what they name and how soon they come.

use std::time::{Duration, Instant, SystemTime};

use super::Outcome;
use super::aids::{Rank, ensure, seed};
use crate::{ErrorKind, Put, TransportError, WindowSpec};

pub(super) fn bad_arguments_are_errors(rank: Rank) -> Outcome {
    const BYTES: usize = 4_096;
    let (world, last) = (rank.world(), rank.last());
    let end = rank.open(BYTES, 2)?;
    end.fill(0, BYTES, seed(0, rank.rank(), 0))?;
    let queue = end.queue();
    rank.barrier()?;
    let put = |peer, from, to, bytes| end.link.put(&queue, Put { peer, from, to, bytes });
    let ms = Duration::from_millis(1);
    let wrong = [
        ("signal to no rank", end.link.signal(&queue, world, 0)),
        ("signal of no flag", end.link.signal(&queue, last, 2)),
        ("signal of u32::MAX", end.link.signal(&queue, last, u32::MAX)),
        ("wait for no rank", end.try_wait(&[world], 0, ms)),
        ("wait for one rank too many", end.try_wait(&[0, usize::MAX], 0, ms)),
        ("wait for no flag", end.try_wait(&[last], 2, ms)),
        ("put to no rank", put(world, 0, 0, 8)),
        ("put from beyond", put(last, BYTES - 7, 0, 8)),
        ("put to beyond", put(last, 0, BYTES, 1)),
        ("put that overflows", put(last, usize::MAX, 0, 2)),
        ("put that overflows there", put(last, 0, usize::MAX - 1, 8)),
        ("put of everything", put(last, 0, 0, usize::MAX)),
    ];
    for (what, result) in wrong {
        match result {
            Ok(()) => return Err(format!("{what} is no error")),
            Err(e) => ensure!(e.kind() == ErrorKind::Argument, "{what}: {e}"),
        }
    }
    ensure!(!end.link.ready(&[world], 0) && !end.link.ready(&[last], 2), "ready out of range");
    rank.barrier()?;
    end.expect(0, BYTES, seed(0, rank.rank(), 0), "the window after refused puts")?;
    for peer in rank.all() {
        ensure!(!end.link.ready(&[peer], 0) && !end.link.ready(&[peer], 1), "a flag got set");
    }
    rank.barrier()
}

pub(super) fn deadlines_name_the_absent(rank: Rank) -> Outcome {
    const AFTER: Duration = Duration::from_millis(150);
    const TRIES: u32 = 6;
    let world = rank.world();
    let end = rank.open(64, TRIES)?;
    // Whether a time-out is punctual may depend on a busy machine: the best counts. On a stream the first
    // one is the group's end, since nobody can tell which flags the stream passed; and a stream's time
    // begins when it gets to the wait.
    let (tries, late_at_most) = match end.streams() {
        true => (1, rank.limit / 4),
        false => (TRIES, rank.limit / 20),
    };
    let mut late = Duration::MAX;
    for flag in 0..tries {
        if rank.rank() != 0 {
            // Every second rank does its part.
            if rank.rank().is_multiple_of(2) {
                end.signal(0, flag)?;
            }
            continue;
        }
        let all: Vec<usize> = (1..world).collect();
        let absent: Vec<usize> = (1..world).step_by(2).collect();
        let present: Vec<usize> = (2..world).step_by(2).collect();
        let start = Instant::now();
        while !end.link.ready(&present, flag) {
            ensure!(start.elapsed() < rank.limit, "ranks that signalled are not ready");
            std::thread::yield_now();
        }
        let start = Instant::now();
        let result = end.try_wait(&all, flag, AFTER);
        let took = start.elapsed();
        match result {
            Ok(()) => return Err("no error although ranks are absent".into()),
            Err(TransportError::Timeout { mut peers, .. }) => {
                peers.sort_unstable();
                ensure!(peers == absent, "absent are {absent:?}, named {peers:?}");
            }
            // What the watchdog of the stream told the group.
            Err(TransportError::Aborted { by: 0, why, .. }) if end.streams() => {
                let names = |ranks: &[usize]| ranks.iter().all(|rank| named(&why, *rank));
                ensure!(names(&absent), "absent are {absent:?}, told was: {why}");
                ensure!(!present.iter().any(|&r| named(&why, r)), "there are {present:?}: {why}");
            }
            Err(other) => return Err(format!("not a time-out: {other}")),
        }
        ensure!(took >= AFTER, "gave up after {took:?} of {AFTER:?}");
        late = late.min(took - AFTER);
        if late <= late_at_most {
            break;
        }
    }
    ensure!(rank.rank() != 0 || late <= late_at_most, "gave up {late:?} late");
    // Nobody leaves before rank 0 is through; what the group thinks of the time-out is open.
    let _ = rank.barrier();
    Ok(())
}

/// Whether a text has the number of a rank in it, as a word.
fn named(text: &str, rank: usize) -> bool {
    let rank = rank.to_string();
    text.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word == rank)
}

pub(super) fn lost_peers_are_named_promptly(rank: Rank) -> Outcome {
    let last = rank.last();
    let end = rank.open(64, 1)?;
    rank.barrier()?;
    if rank.rank() == last {
        std::thread::sleep(Duration::from_millis(30));
        return Ok(());
    }
    let start = Instant::now();
    match end.try_wait(&[last], 0, rank.limit) {
        Ok(()) => Err("no error although the peer has left".into()),
        Err(TransportError::PeerLost { peer, .. }) => {
            ensure!(peer == last, "rank {last} left, rank {peer} is named");
            let took = start.elapsed();
            ensure!(took < rank.limit / 2, "it took {took:?}");
            Ok(())
        }
        Err(other) => Err(format!("not a lost peer: {other}")),
    }
}

pub(super) fn aborts_reach_waiters(rank: Rank) -> Outcome {
    const TRIES: usize = 10;
    let soon = rank.limit / 100;
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let last = rank.last();
    let mut soonest = Duration::MAX;
    // The best of some groups counts, as the machine may be busy.
    for _ in 0..TRIES {
        let group = rank.group.split(0, rank.rank() as i64).map_err(|e| format!("split: {e}"))?;
        let end = rank.open_in(&group, 64, 1)?;
        rank.barrier()?;
        if rank.rank() == last {
            std::thread::sleep(Duration::from_millis(50));
            group.abort(&format!("enough/{}", now().as_nanos()));
        } else {
            match end.try_wait(&[last], 0, rank.limit) {
                Ok(()) => return Err("no error although the group was aborted".into()),
                Err(TransportError::Aborted { by, why, .. }) => {
                    ensure!(by == last, "rank {last} aborted, rank {by} is named");
                    let then = why.strip_prefix("enough/").and_then(|then| then.parse().ok());
                    let then = then.ok_or_else(|| format!("another reason: {why}"))?;
                    soonest = soonest.min(now().saturating_sub(Duration::from_nanos(then)));
                }
                Err(other) => return Err(format!("not an abort: {other}")),
            }
            ensure!(group.barrier().is_err(), "the group forgot that it was aborted");
        }
        let heard = rank.rank() == last || soonest < soon;
        let all = rank.group.all_gather_within("check", &[u8::from(heard)], rank.deadline());
        let all = all.map_err(|e| format!("who heard of it: {e}"))?;
        if all.iter().all(|heard| heard == &[1]) {
            return Ok(());
        }
    }
    ensure!(rank.rank() == last || soonest < soon, "it took {soonest:?}");
    Ok(())
}

pub(super) fn different_windows_are_a_mismatch(rank: Rank) -> Outcome {
    let last = rank.last();
    let usual = WindowSpec { bytes: 8_192, flags: 4 };
    let others = [
        ("bytes", WindowSpec { bytes: 4_096, ..usual }),
        ("flags", WindowSpec { flags: 5, ..usual }),
    ];
    for (name, other) in others {
        let spec = if rank.rank() == last { other } else { usual };
        match rank.transport.open(&rank.group, spec, rank.deadline()) {
            Ok(_) => return Err(format!("{name} differ, but windows were opened")),
            Err(TransportError::Mismatch { field, ranks, .. }) => {
                ensure!(field == name && ranks == [last], "named: {field} of ranks {ranks:?}");
            }
            Err(other) => return Err(format!("not a mismatch: {other}")),
        }
    }
    // The group is as good as before.
    let end = rank.open(usual.bytes, usual.flags)?;
    end.signal_all(&rank.all(), 3)?;
    end.wait(&rank.all(), 3)?;
    rank.barrier()
}
