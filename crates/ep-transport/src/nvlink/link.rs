//! The link of one rank.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUstream;

use super::driver::{Gpu, MemOp};
use super::memory::{Mapped, Setup};
use super::watchdog::Watchdog;
use crate::host_link::{check_flag, check_put, check_rank};
use crate::{
    Deadline, Group, Link, Mapping, Memory, Pacing, Put, Queue, Reach, Result, StreamSide,
    TransportError, WindowSpec,
};

/// `CU_STREAM_MEM_OP_WAIT_VALUE_32`, `CU_STREAM_MEM_OP_WRITE_VALUE_32`; `CU_STREAM_WAIT_VALUE_EQ`.
const WAIT: u64 = 1;
const WRITE: u64 = 2;
const EQUAL: u64 = 1;
/// The driver takes at most 256 operations in a batch.
const BATCH: usize = 128;
/// How often a waiting host looks at flags that streams raise: no futex hears of them.
const POLL: Duration = Duration::from_micros(50);
/// How long a wait is held back for ranks on the same GPU.
const HOLD: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct NvlinkLink {
    pub group: Group,
    pub spec: WindowSpec,
    pub gpu: Arc<Gpu>,
    /// By rank.
    pub windows: Vec<Mapped>,
    /// By rank, those that count as ranks of other nodes.
    pub bulk: Vec<bool>,
    pub watchdog: Watchdog,
    /// Where other ranks are on this GPU.
    pub pacing: Option<Pacing>,
    /// Makes the watchdog look at the group's health when there is news.
    pub _bell: Arc<dyn Bell>,
}

/// What a link keeps alive for the group's health.
pub(super) trait Bell: Send + Sync + std::fmt::Debug {}

/// The operations of a wait for `flag` of all `sources`, in chunks for the driver: the watchdog is
/// told before and behind them. All flags are awaited before any is reset, so that the watchdog sees
/// who is absent.
pub(super) fn wait_ops(
    waiting: u64,
    flags: impl Iterator<Item = u64> + Clone,
    mut submit: impl FnMut(&mut [MemOp]) -> Result<()>,
) -> Result<()> {
    let write = |address, value| MemOp { operation: WRITE, address, value, ..MemOp::default() };
    let wait =
        |address| MemOp { operation: WAIT, address, value: 1, flags: EQUAL, ..MemOp::default() };
    let all = [write(waiting, 1)]
        .into_iter()
        .chain(flags.clone().map(wait))
        .chain(flags.map(|at| write(at, 0)))
        .chain([write(waiting, 0)]);
    let mut chunk = [MemOp::default(); BATCH];
    let mut count = 0;
    for op in all {
        chunk[count] = op;
        count += 1;
        if count == BATCH {
            submit(&mut chunk)?;
            count = 0;
        }
    }
    if count > 0 { submit(&mut chunk[..count]) } else { Ok(()) }
}

impl NvlinkLink {
    /// The stream of a queue, which has to be one of this rank's GPU.
    fn stream(&self, op: &'static str, queue: &Queue) -> Result<Option<CUstream>> {
        match queue.raw() {
            Some((_, ordinal)) if ordinal != self.gpu.ordinal => {
                let detail =
                    format!("a stream of GPU {ordinal}; the window is on GPU {}", self.gpu.ordinal);
                Err(TransportError::Argument { op, detail })
            }
            other => Ok(other.map(|(stream, _)| stream)),
        }
    }

    fn mapping(&self, rank: usize) -> Mapping {
        let base = self.windows[rank].base as *mut u8;
        // The driver maps nothing at 0.
        Mapping { base: NonNull::new(base).unwrap_or(NonNull::dangling()), bytes: self.spec.bytes }
    }

    fn raise(&self, stream: Option<CUstream>, peer: usize, flag: u32) -> Result<()> {
        const OP: &str = "signal";
        let board = &self.watchdog.shared.board;
        let Some(stream) = stream else {
            board.set(peer, flag);
            return Ok(());
        };
        let _current = self.gpu.current(OP)?;
        // SAFETY: the word is page-locked while this link lives. Without a flag the write comes
        // after a fence for everything before it on the stream.
        let code = unsafe { (self.gpu.driver.write_value)(stream, board.theirs(peer, flag), 1, 0) };
        self.gpu.check(OP, "cuStreamWriteValue32", code)
    }

    fn wait_on_stream(&self, stream: CUstream, peers: &[usize], flag: u32) -> Result<()> {
        const OP: &str = "wait";
        let board = &self.watchdog.shared.board;
        let _current = self.gpu.current(OP)?;
        let flags = peers.iter().map(|&peer| board.ours(peer, flag));
        wait_ops(board.waiting_word(flag), flags, |ops| {
            // SAFETY: the words are page-locked while this link lives, and the queue's stream is
            // live; the driver copies the operations.
            let code =
                unsafe { (self.gpu.driver.batch)(stream, ops.len() as u32, ops.as_mut_ptr(), 0) };
            self.gpu.check(OP, "cuStreamBatchMemOp", code)
        })
    }

    /// Whether `stream`, or the host where there is none, is being captured.
    fn capturing(&self, op: &'static str, stream: Option<CUstream>) -> Result<bool> {
        let Some(stream) = stream else { return Ok(false) };
        let mut status = 0;
        // SAFETY: the queue's stream is live; `status` is valid for the call.
        let code = unsafe { (self.gpu.driver.stream_capturing)(stream, &mut status) };
        self.gpu.check(op, "cuStreamIsCapturing", code)?;
        Ok(status != 0)
    }

    /// Keeps a wait that is about to be submitted behind the signals of ranks on this GPU, and
    /// counts it.
    fn pace(
        &self,
        op: &'static str,
        stream: Option<CUstream>,
        (peers, flag): (&[usize], u32),
        limit: Duration,
    ) -> Result<()> {
        let Some(pacing) = self.pacing.as_ref().filter(|p| p.concerns(peers)) else {
            return Ok(());
        };
        let captured = self.capturing(op, stream)?;
        let failed = || self.group.health().check_waiting(op, peers).is_err();
        // A wait on the host holds up no stream.
        if stream.is_some() && !captured && !pacing.hold(peers, flag, limit.min(HOLD), failed) {
            let late: Vec<usize> = pacing.owing(peers, flag).collect();
            tracing::warn!(
                op,
                flag,
                ?late,
                "ranks on this GPU are late; should their streams share a hardware queue with this \
                 wait, it ends only by its time-out"
            );
        }
        pacing.awaited(peers, flag, captured);
        Ok(())
    }

    /// Blocks the calling thread. Streams raise flags by plain stores, so it has to look.
    fn wait_on_host(
        &self,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()> {
        let board = &self.watchdog.shared.board;
        loop {
            let absent: Vec<usize> =
                peers.iter().copied().filter(|&peer| !board.is_set(flag, peer)).collect();
            if absent.is_empty() {
                // Flags that were raised to release streams say nothing of peers.
                if board.is_poisoned() {
                    self.group.health().check_waiting(op, peers)?;
                    let (by, why) = (self.group.rank(), "waits were released".to_string());
                    return Err(TransportError::Aborted { op, by, blames: None, why });
                }
                peers.iter().for_each(|&peer| board.reset(flag, peer));
                return Ok(());
            }
            self.group.health().check_waiting(op, &absent)?;
            if deadline.expired() {
                let after = deadline.length();
                return Err(TransportError::Timeout {
                    op,
                    peers: absent,
                    after,
                    hint: String::new(),
                });
            }
            std::thread::sleep(POLL);
        }
    }
}

// SAFETY: mappings are of windows that `self` holds, of the spec's size, exchanged and tried when it
// was made; flags and order are those of stream memory operations and of kernels' ends, as design
// and conformance have them.
unsafe impl Link for NvlinkLink {
    fn window(&self) -> Mapping {
        self.mapping(self.group.rank())
    }

    fn memory(&self) -> Memory {
        Memory::Cuda { ordinal: self.gpu.ordinal }
    }

    fn stream_side(&self) -> Option<StreamSide> {
        Some(self.watchdog.shared.board.side())
    }

    fn reach(&self, peer: usize) -> Reach {
        match self.bulk[peer] {
            true => Reach::Bulk,
            false => Reach::Direct(self.mapping(peer)),
        }
    }

    fn put(&self, queue: &Queue, put: Put) -> Result<()> {
        check_put(&put, self.group.world(), self.spec)?;
        if put.bytes == 0 {
            return Ok(());
        }
        let from = self.windows[self.group.rank()].base + put.from as u64;
        let to = self.windows[put.peer].base + put.to as u64;
        let Some(stream) = self.stream("put", queue)? else {
            let limit = Deadline::after(Duration::from_secs(30));
            return Setup::new(&self.gpu)?.copy(to, from, put.bytes, limit);
        };
        let _current = self.gpu.current("put")?;
        // SAFETY: both ranges were just checked to lie in windows that stay mapped while `self`
        // lives.
        let code = unsafe { (self.gpu.driver.copy)(to, from, put.bytes, stream) };
        self.gpu.check("put", "cuMemcpyAsync", code)
    }

    /// Puts read their sources in the order of their queue, so there is nothing to wait for.
    fn flush(&self, _queue: &Queue, _deadline: Deadline) -> Result<()> {
        Ok(())
    }

    fn signal(&self, queue: &Queue, peer: usize, flag: u32) -> Result<()> {
        const OP: &str = "signal";
        check_rank(OP, peer, self.group.world())?;
        check_flag(OP, flag, self.spec)?;
        let stream = self.stream(OP, queue)?;
        self.raise(stream, peer, flag)?;
        if let Some(pacing) = self.pacing.as_ref().filter(|p| p.concerns(&[peer])) {
            pacing.signalled(peer, flag, self.capturing(OP, stream)?);
        }
        Ok(())
    }

    fn wait(
        &self,
        queue: &Queue,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()> {
        check_flag(op, flag, self.spec)?;
        peers.iter().try_for_each(|&peer| check_rank(op, peer, self.group.world()))?;
        let stream = self.stream(op, queue)?;
        self.pace(op, stream, (peers, flag), deadline.remaining())?;
        match stream {
            None => self.wait_on_host(op, peers, flag, deadline),
            Some(_) if peers.is_empty() => Ok(()),
            Some(stream) => {
                self.watchdog.shared.waits.submit(op, flag, peers, deadline.length());
                self.wait_on_stream(stream, peers, flag)
            }
        }
    }

    fn ready(&self, peers: &[usize], flag: u32) -> bool {
        let board = &self.watchdog.shared.board;
        let known = |peer| peer < self.group.world() && flag < self.spec.flags;
        let absent = |&&peer: &&usize| !(known(peer) && board.is_set(flag, peer));
        let mut absent = peers.iter().filter(absent).peekable();
        let fails = |&peer: &usize| self.group.health().check_waiting("ready", &[peer]).is_err();
        absent.peek().is_none() || absent.any(fails)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_flags_are_awaited_then_reset_inside_the_watched_span() {
        for count in [0, 1, 2, 63, 64, 200] {
            let mut all = Vec::new();
            let mut sizes = Vec::new();
            wait_ops(7, (0..count).map(|i| 1000 + 64 * i), |ops| {
                sizes.push(ops.len());
                all.extend_from_slice(ops);
                Ok(())
            })
            .unwrap();
            assert!(sizes.iter().all(|&n| n > 0 && n <= 256));
            let (first, last) = (all[0], all[all.len() - 1]);
            assert_eq!((first.operation, first.address, first.value), (WRITE, 7, 1));
            assert_eq!((last.operation, last.address, last.value), (WRITE, 7, 0));
            let inner = &all[1..all.len() - 1];
            assert_eq!(inner.len() as u64, 2 * count);
            let (waits, resets) = inner.split_at(count as usize);
            for (i, (wait, reset)) in waits.iter().zip(resets).enumerate() {
                let at = 1000 + 64 * i as u64;
                assert_eq!((wait.operation, wait.address, wait.value), (WAIT, at, 1));
                assert_eq!((reset.operation, reset.address, reset.value), (WRITE, at, 0));
            }
        }
    }
}
