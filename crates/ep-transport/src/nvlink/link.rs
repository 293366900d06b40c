//! The link of one rank.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUstream;

#[cfg(feature = "rdma")]
use super::board::Board;
use super::driver::{Gpu, MemOp};
use super::graveyard::Buried;
use super::memory::{Seen, Setup};
#[cfg(feature = "rdma")]
use super::watchdog::Others;
use super::watchdog::Watchdog;
use super::words::Words;
use crate::host_link::{check_flag, check_put, check_rank};
use crate::{
    Deadline, Group, Link, Mapping, Meeting, Memory, Pacing, Put, Queue, Reach, Result, StreamSide,
    TransportError, WindowSpec,
};

/// The driver takes at most 256 operations in a batch.
const BATCH: usize = 128;
/// How often a waiting host looks at flags that streams raise: no futex hears of them.
const POLL: Duration = Duration::from_micros(50);
/// How long a wait is held back for ranks on the same GPU.
const HOLD: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct NvlinkLink {
    pub(super) group: Group,
    pub spec: WindowSpec,
    pub gpu: Arc<Gpu>,
    /// By rank, of those that map each other.
    pub(super) windows: Buried<Vec<Option<Seen>>>,
    /// By rank, those that count as ranks of other nodes.
    pub(super) bulk: Vec<bool>,
    pub(super) watchdog: Watchdog,
    /// How streams raise and await flags.
    pub(super) words: Buried<Words>,
    /// Where other ranks are on this GPU.
    pub(super) pacing: Option<Pacing>,
    /// Makes the watchdog look at the group's health when there is news.
    pub(super) _bell: Arc<dyn Bell>,
}

/// What a link keeps alive for the group's health.
pub(super) trait Bell: Send + Sync + std::fmt::Debug {}

/// A flag, and what marks it for the watchdog where no kernel has done that.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ours {
    pub at: u64,
    pub mark: Option<u32>,
}

/// The operations that raise `theirs` and wait for `ours`, in chunks for the driver. All flags are
/// awaited before any is reset, so that the watchdog sees who is absent. The mark of a wait stands behind
/// its flag: one `wide` write resets both. Each operation takes a stream more than a microsecond.
pub(super) fn meet_ops(
    theirs: impl Iterator<Item = u64>,
    ours: impl Iterator<Item = Ours> + Clone,
    wide: bool,
    mut submit: impl FnMut(&mut [MemOp]) -> Result<()>,
) -> Result<()> {
    let all = (theirs.map(|at| MemOp::write(at, 1)))
        .chain(ours.clone().filter_map(|flag| Some(MemOp::write(flag.at + 4, flag.mark?.into()))))
        .chain(ours.clone().map(|flag| MemOp::wait(flag.at)))
        .chain(ours.flat_map(|flag| {
            let narrow = [Some(MemOp::write(flag.at + 4, 0)), Some(MemOp::write(flag.at, 0))];
            let both = [Some(MemOp::clear_both(flag.at)), None];
            (if wide { both } else { narrow }).into_iter().flatten()
        }));
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
    pub fn stream(&self, op: &'static str, queue: &Queue) -> Result<Option<CUstream>> {
        match queue.raw() {
            Some((_, ordinal)) if ordinal != self.gpu.ordinal => {
                let detail =
                    format!("a stream of GPU {ordinal}; the window is on GPU {}", self.gpu.ordinal);
                Err(TransportError::Argument { op, detail })
            }
            other => Ok(other.map(|(stream, _)| stream)),
        }
    }

    /// A window that this rank has mapped.
    fn mapping(&self, rank: usize) -> Option<Mapping> {
        let base = self.windows[rank].as_ref()?.base() as *mut u8;
        // The driver maps nothing at 0.
        let base = NonNull::new(base).unwrap_or(NonNull::dangling());
        Some(Mapping { base, bytes: self.spec.bytes })
    }

    /// Where this rank's own window is.
    pub fn own(&self) -> u64 {
        self.window().base.as_ptr() as u64
    }

    fn raise(&self, stream: Option<CUstream>, peer: usize, flag: u32) -> Result<()> {
        const OP: &str = "signal";
        let board = &self.watchdog.shared.board;
        let Some(stream) = stream else {
            board.set(peer, flag);
            return Ok(());
        };
        let _current = self.gpu.current(OP)?;
        self.words.raise(OP, &self.gpu, stream, board.theirs(peer, flag))
    }

    fn meet_on_stream(&self, stream: CUstream, meeting: &Meeting<'_>) -> Result<()> {
        let &Meeting { op, peers, flag, deadline, signal, marked } = meeting;
        let board = &self.watchdog.shared.board;
        self.watchdog.shared.waits.submit(op, flag, deadline.length());
        let _current = self.gpu.current("wait")?;
        let raised = if signal { peers } else { &[] };
        let theirs = raised.iter().map(|&peer| board.theirs(peer, flag));
        let mark = (!marked).then(|| self.watchdog.shared.waits.mark());
        let ours = peers.iter().map(|&peer| Ours { at: board.ours(peer, flag), mark });
        meet_ops(theirs, ours, self.gpu.writes_both(), |ops| {
            self.words.submit("wait", &self.gpu, stream, ops)
        })
    }

    /// The flags of this rank, to be raised for ranks that cannot.
    #[cfg(feature = "rdma")]
    pub fn board(&self) -> Board {
        self.watchdog.shared.board.clone()
    }

    /// Whether a rank raises its flags here itself.
    #[cfg(feature = "rdma")]
    pub fn is_near(&self, peer: usize) -> bool {
        self.windows.get(peer).is_some_and(Option::is_some)
    }

    /// Who knows of ranks that are not mapped here.
    #[cfg(feature = "rdma")]
    pub fn ask(&self, others: impl Others + 'static) {
        self.watchdog.shared.ask(others);
    }

    /// Tells a bridge, in the order of the stream, that it has come to an order; `mark` says which.
    /// `flush`: then the stream waits until the bridge lets it go on, or for so long.
    #[cfg(feature = "rdma")]
    pub fn tell(
        &self,
        op: &'static str,
        stream: CUstream,
        (bell, mark): (usize, u32),
        flush: Option<Duration>,
    ) -> Result<()> {
        let (board, waits) = (&self.watchdog.shared.board, &self.watchdog.shared.waits);
        let _current = self.gpu.current(op)?;
        let (doorbell, at) = (board.doorbell_word(bell), board.flushed_word(bell));
        let Some(allowed) = flush else {
            return self.words.write(op, &self.gpu, stream, (doorbell, mark));
        };
        waits.submit_flush(op, bell, allowed);
        let told = MemOp::write(doorbell, mark.into());
        let marked = MemOp::write(at + 4, waits.mark().into());
        let mut narrow =
            [marked, told, MemOp::wait(at), MemOp::write(at + 4, 0), MemOp::write(at, 0)];
        let mut wide = [marked, told, MemOp::wait(at), MemOp::clear_both(at)];
        let ops: &mut [MemOp] = if self.gpu.writes_both() { &mut wide } else { &mut narrow };
        self.words.submit(op, &self.gpu, stream, ops)
    }

    /// Whether `stream`, or the host where there is none, is being captured.
    pub fn capturing(&self, op: &'static str, stream: Option<CUstream>) -> Result<bool> {
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
        let mut looks = super::watchdog::LOOKS;
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
            if let Err(news) = self.group.health().check_waiting(op, &absent) {
                if looks == 0 || !self.watchdog.shared.settle() {
                    return Err(news);
                }
                looks -= 1;
                continue;
            }
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

/// The error of an operation on a rank that only a bridge reaches, whose link knows better.
fn far(op: &'static str, peer: usize) -> TransportError {
    TransportError::Argument { op, detail: format!("rank {peer} is not mapped here") }
}

// SAFETY: mappings are of windows that `self` holds, of the spec's size, exchanged and tried when it
// was made; flags and order are those of stream memory operations and of kernels' ends, as design
// and conformance have them.
unsafe impl Link for NvlinkLink {
    fn window(&self) -> Mapping {
        self.mapping(self.group.rank()).expect("a rank maps its own")
    }

    fn memory(&self) -> Memory {
        Memory::Cuda { ordinal: self.gpu.ordinal }
    }

    fn stream_side(&self) -> Option<StreamSide> {
        Some(self.watchdog.shared.board.side())
    }

    fn captures(&self) -> bool {
        true
    }

    fn is_beside(&self, peer: usize) -> bool {
        self.pacing.as_ref().is_some_and(|pacing| pacing.concerns(&[peer]))
    }

    fn reach(&self, peer: usize) -> Reach {
        match self.mapping(peer) {
            Some(mapping) if !self.bulk[peer] => Reach::Direct(mapping),
            _ => Reach::Bulk,
        }
    }

    fn put(&self, queue: &Queue, put: Put) -> Result<()> {
        check_put(&put, self.group.world(), self.spec)?;
        if put.bytes == 0 {
            return Ok(());
        }
        let Some(theirs) = self.mapping(put.peer) else { return Err(far("put", put.peer)) };
        let from = self.own() + put.from as u64;
        let to = theirs.base.as_ptr() as u64 + put.to as u64;
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
        if self.windows[peer].is_none() {
            return Err(far(OP, peer));
        }
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
                let (signal, marked) = (false, false);
                self.meet_on_stream(stream, &Meeting { op, peers, flag, deadline, signal, marked })
            }
        }
    }

    fn meet(&self, queue: &Queue, meeting: &Meeting<'_>) -> Result<()> {
        let &Meeting { op, peers, flag, deadline, signal, .. } = meeting;
        let paced = self.pacing.as_ref().is_some_and(|pacing| pacing.concerns(peers));
        let stream = self.stream(op, queue)?.filter(|_| !peers.is_empty());
        // Ranks on this GPU look at each other between the two.
        if signal && (paced || stream.is_none()) {
            peers.iter().try_for_each(|&peer| self.signal(queue, peer, flag))?;
            return self.meet(queue, &Meeting { signal: false, ..*meeting });
        }
        let Some(stream) = stream else { return self.wait(queue, op, peers, flag, deadline) };
        check_flag(op, flag, self.spec)?;
        peers.iter().try_for_each(|&peer| check_rank(op, peer, self.group.world()))?;
        self.pace(op, Some(stream), (peers, flag), deadline.remaining())?;
        self.meet_on_stream(stream, meeting)
    }

    fn ready(&self, peers: &[usize], flag: u32) -> bool {
        let board = &self.watchdog.shared.board;
        let known = |peer| peer < self.group.world() && flag < self.spec.flags;
        let absent = |&&peer: &&usize| !(known(peer) && board.is_set(flag, peer));
        let mut absent = peers.iter().filter(absent).peekable();
        let fails = |&peer: &usize| self.group.health().check_waiting("ready", &[peer]).is_err();
        absent.peek().is_none() || absent.any(fails)
    }

    fn absent(&self, flag: u32) -> Vec<usize> {
        if flag >= self.spec.flags {
            return Vec::new();
        }
        let absent = self.watchdog.shared.board.absent(flag);
        absent.into_iter().map(|(peer, _)| peer).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_flags_are_awaited_then_reset_with_their_marks() {
        for (count, marked, wide) in [
            (0, true, true),
            (1, false, true),
            (1, true, false),
            (2, true, true),
            (63, false, false),
            (200, true, true),
        ] {
            let mut all = Vec::new();
            let mut sizes = Vec::new();
            let mark = (!marked).then_some(6);
            let ours = (0..count).map(|i| Ours { at: 1000 + 64 * i, mark });
            meet_ops((0..count).map(|i| 64 * i), ours, wide, |ops| {
                sizes.push(ops.len());
                all.extend_from_slice(ops);
                Ok(())
            })
            .unwrap();
            assert!(sizes.iter().all(|&n| n > 0 && n <= 256));
            let mut want: Vec<MemOp> = (0..count).map(|i| MemOp::write(64 * i, 1)).collect();
            if !marked {
                want.extend((0..count).map(|i| MemOp::write(1004 + 64 * i, 6)));
            }
            want.extend((0..count).map(|i| MemOp::wait(1000 + 64 * i)));
            for at in (0..count).map(|i| 1000 + 64 * i) {
                match wide {
                    true => want.push(MemOp::clear_both(at)),
                    false => want.extend([MemOp::write(at + 4, 0), MemOp::write(at, 0)]),
                }
            }
            assert_eq!(all, want);
        }
    }
}
