//! What the driver promised is seen to work before rows depend on it.

use std::sync::Arc;
use std::time::Duration;

use super::board::Board;
use super::driver::{Gpu, MemOp, OP};
use super::link::NvlinkLink;
use super::memory::Setup;
use super::near::Near;
use super::words::{Kernel, Signals, Words};
use crate::{Deadline, ErrorKind, Link, Queue, Result, TransportError};

/// How long one step of the trial of words may take.
const STEP: Duration = Duration::from_secs(10);

/// A way to raise and await words on streams that reaches all ranks. Collective.
pub(super) fn choose(
    near: &Near<'_>,
    gpu: &Arc<Gpu>,
    board: &Board,
    signals: Signals,
    deadline: Deadline,
) -> Result<Words> {
    let all =
        |done: &Result<()>| near.together(deadline, done.as_ref().err().map(|e| e.to_string()));
    let kernel = || Kernel::load(gpu).map(Words::Kernel);
    let words = if signals == Signals::Kernel { kernel() } else { Ok(Words::Stream) };
    all(&words.as_ref().map(drop).map_err(Clone::clone))?;
    let words = words?;
    let why = match try_words(near, gpu, board, &words, deadline) {
        Ok(()) => return Ok(words),
        Err(e) if e.kind() == ErrorKind::Unsupported => e,
        Err(e) => return Err(e),
    };
    // The same verdict on all ranks: those that may change do, and all try again.
    tracing::debug!(%why, "operations of streams do not reach all ranks; a kernel signals instead");
    board.set_trial(0);
    let words = if signals == Signals::Auto { kernel() } else { Ok(words) };
    all(&words.as_ref().map(drop).map_err(Clone::clone))?;
    let words = words?;
    try_words(near, gpu, board, &words, deadline)?;
    Ok(words)
}

/// Every rank writes a word at every other, then awaits and resets those written here.
fn try_words(
    near: &Near<'_>,
    gpu: &Arc<Gpu>,
    board: &Board,
    words: &Words,
    deadline: Deadline,
) -> Result<()> {
    const WRITE: &str = "a word written by a stream";
    let members = near.members;
    let limit = || Deadline::after(STEP.min(deadline.remaining()));
    let all = |done: Result<()>| {
        // Whatever it was, another way may do better.
        near.together(deadline, done.err().map(|e| e.to_string()))
    };
    let setup = Setup::new(gpu);
    let stream = |work: &dyn Fn(&Setup) -> Result<()>| {
        let setup = setup.as_ref().map_err(Clone::clone)?;
        let _current = gpu.current(OP)?;
        work(setup)
    };
    all(stream(&|setup| {
        for &peer in members {
            words.raise(OP, gpu, setup.raw, board.their_trial(peer))?;
        }
        setup.wait(WRITE, limit())
    }))?;
    all(arrived(near, board, limit()))?;
    let awaited = stream(&|setup| {
        let ours = members.iter().map(|&source| board.our_trial(source));
        let waits = ours.clone().map(MemOp::wait);
        let clear = if gpu.writes_both() { MemOp::clear_both } else { |at| MemOp::write(at, 0) };
        let mut ops: Vec<MemOp> = waits.chain(ours.map(clear)).collect();
        for ops in ops.chunks_mut(128) {
            words.submit(OP, gpu, setup.raw, ops)?;
        }
        let done = setup.wait("waits for words that are there", limit());
        match members.iter().find(|&&source| board.tried(source)) {
            Some(source) if done.is_ok() => {
                let source = near.number(*source);
                let detail = format!("a stream did not reset the word of rank {source}");
                Err(TransportError::Unsupported { op: OP, detail })
            }
            _ => done,
        }
    });
    if awaited.is_err() {
        // A stream that has not seen them yet may see them now.
        board.set_trial(1);
    }
    all(awaited)
}

/// Waits, bounded, until the words of all ranks are here.
fn arrived(near: &Near<'_>, board: &Board, deadline: Deadline) -> Result<()> {
    loop {
        let absent = near.members.iter().find(|&&source| !board.tried(source));
        let Some(absent) = absent else { return Ok(()) };
        if deadline.expired() {
            let absent = near.number(*absent);
            let detail = format!("the word that a stream of rank {absent} wrote did not arrive");
            return Err(TransportError::Unsupported { op: OP, detail });
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

impl NvlinkLink {
    /// Zeroes the window, writes a word into everyone's and raises a flag by a stream. After each
    /// step the ranks tell each other how it went: one's problem is everyone's error.
    pub(super) fn try_out(&self, near: &Near<'_>, bytes: usize, deadline: Deadline) -> Result<()> {
        let setup = Setup::new(&self.gpu);
        let step =
            |done: Result<()>| near.together(deadline, done.as_ref().err().map(|e| e.to_string()));
        let with = |work: &dyn Fn(&Setup) -> Result<()>| match &setup {
            Ok(setup) => work(setup),
            Err(e) => Err(e.clone()),
        };
        step(with(&|setup| self.clear(setup, bytes, deadline)))?;
        step(with(&|setup| self.write_words(setup, deadline)))?;
        step(with(&|setup| self.read_words(setup, near, deadline)))?;
        let words = 8 * self.group.world().min(self.spec.bytes / 8);
        step(with(&|setup| self.clear(setup, words, deadline)))
    }

    fn clear(&self, setup: &Setup, bytes: usize, deadline: Deadline) -> Result<()> {
        setup.zero(self.own(), bytes)?;
        setup.wait("zeroing the window", deadline)
    }

    /// Writes this rank's word into everyone's window, and a flag of its own.
    fn write_words(&self, setup: &Setup, deadline: Deadline) -> Result<()> {
        let rank = self.group.rank();
        let mine = word_of(rank);
        if rank < self.spec.bytes / 8 {
            for window in self.windows.iter().flatten() {
                setup.copy(window.base() + 8 * rank as u64, &raw const mine as u64, 8, deadline)?;
            }
        }
        if self.spec.flags > 0 {
            // SAFETY: the stream lives until `setup` drops, and is waited for here.
            let queue = unsafe { Queue::from_raw(setup.raw.cast(), self.gpu.ordinal) };
            self.signal(&queue, rank, 0)?;
            self.wait(&queue, OP, &[rank], 0, deadline)?;
            setup.wait("a flag raised by a stream", deadline)?;
        }
        Ok(())
    }

    fn read_words(&self, setup: &Setup, near: &Near<'_>, deadline: Deadline) -> Result<()> {
        for &peer in near.members.iter().filter(|&&peer| peer < self.spec.bytes / 8) {
            let mut seen = 0u64;
            setup.copy(&raw mut seen as u64, self.own() + 8 * peer as u64, 8, deadline)?;
            if seen != word_of(peer) {
                let [peer, rank] = [peer, self.group.rank()].map(|rank| near.number(rank));
                let detail =
                    format!("what rank {peer} wrote into rank {rank}'s window did not arrive");
                return Err(TransportError::Unsupported { op: OP, detail });
            }
        }
        Ok(())
    }
}

/// What a rank writes into windows to try them.
fn word_of(rank: usize) -> u64 {
    0x5eed_0000_0000_0001 + rank as u64
}
