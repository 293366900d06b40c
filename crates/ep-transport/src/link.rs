//! The seam between the runtime and whatever carries its bytes.

use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::{Deadline, Group, Queue, Result, TransportError};

/// What every rank of a group asks of a transport. It must be the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSpec {
    /// Bytes of the symmetric window each rank provides.
    pub bytes: usize,
    /// Binary flags each rank has *per source rank*, numbered `0..flags`.
    pub flags: u32,
}

/// A piece of memory this rank can load from and store to.
///
/// It stays valid as long as the [`Link`] it came from.
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    /// Its first byte, aligned to a page.
    pub base: NonNull<u8>,
    /// Its length in bytes.
    pub bytes: usize,
}

// SAFETY: a Mapping is an address and a length; whoever dereferences it answers for the access.
unsafe impl Send for Mapping {}
// SAFETY: a Mapping is an address and a length; whoever dereferences it answers for the access.
unsafe impl Sync for Mapping {}

/// Where memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Memory {
    /// On the host: threads of this process load from it and store to it.
    #[default]
    Host,
    /// On the GPU with this ordinal among those the process sees: only for kernels and copies.
    Cuda {
        /// The ordinal.
        ordinal: usize,
    },
}

/// What kernels on streams need of a link beyond its windows. Addresses are those of page-locked
/// host memory, as the GPU sees it.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamSide {
    /// A `u32`: 0, then 1 for ever once waits were released because the group failed. Whoever comes
    /// after a wait looks here before it believes what it waited for.
    pub poisoned: u64,
    /// `u32`, [`AWAITED_STRIDE`](Self::AWAITED_STRIDE) bytes apart, by flag, then source: not 0 while
    /// the stream waits for that flag, as the watchdog then sees. A kernel that marks a wait which
    /// follows it ([`Meeting::marked`]) writes a number there that changes with every operation; the
    /// end of the wait clears it.
    pub awaited: u64,
}

#[cfg(feature = "cuda")]
impl StreamSide {
    /// Bytes from one word of [`StreamSide::awaited`] to the next.
    pub const AWAITED_STRIDE: u64 = 64;

    /// The word for `source` of `flag` in a group of `world` ranks.
    pub fn awaited(&self, flag: u32, world: usize, source: usize) -> u64 {
        self.awaited + (u64::from(flag) * world as u64 + source as u64) * Self::AWAITED_STRIDE
    }
}

/// A flag that is raised and awaited among the same ranks, on a stream.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
pub struct Meeting<'a> {
    /// What waits, for errors.
    pub op: &'static str,
    /// With whom.
    pub peers: &'a [usize],
    /// The flag.
    pub flag: u32,
    /// As in [`Link::wait`].
    pub deadline: Deadline,
    /// Whether the flag is raised at the peers first, as by [`Link::signal`].
    pub signal: bool,
    /// Whether an earlier kernel on the stream has marked [`StreamSide::awaited`] for each of them.
    pub marked: bool,
}

/// How a peer's window is reached.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Reach {
    /// It is mapped here: plain loads and stores.
    Direct(Mapping),
    /// Only by [`Link::put`].
    Bulk,
    /// Only by [`Link::exchange`], in which both sides take part. It orders everything between the
    /// two ranks by itself: puts and flags are not for such a peer.
    Paired,
}

/// One one-sided write into a bulk peer's window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Put {
    /// The peer.
    pub peer: usize,
    /// Where the bytes start in this rank's own window.
    pub from: usize,
    /// Where they go in the peer's window.
    pub to: usize,
    /// How many.
    pub bytes: usize,
}

/// Bytes that a peer sends to this rank in an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receive {
    /// The peer.
    pub peer: usize,
    /// Where the bytes go in this rank's own window.
    pub to: usize,
    /// How many.
    pub bytes: usize,
}

/// A way for ranks to reach each other's memory.
///
/// `open` is collective over the group. Implementations are free in how they do it; what the
/// runtime relies on is written at [`Link`] and tested by [`conformance`](crate::conformance).
pub trait Transport: Debug + Send + Sync {
    /// A short name for reports, such as `host` or `tcp`. The runtime never branches on it.
    fn name(&self) -> &'static str;

    /// Whether [`Link::reach`] is [`Reach::Direct`] for every peer on every machine this transport
    /// opens at all. If not, windows carry staging for blocks of rows.
    fn maps_all_peers(&self) -> bool {
        false
    }

    /// The node of each of `world` ranks, where that is known before anything is opened: ranks of
    /// equal numbers map each other, others do not. It sizes what crosses nodes; where it is not
    /// known, the worst case is reserved.
    fn nodes(&self, world: usize) -> Option<Vec<usize>> {
        self.maps_all_peers().then(|| vec![0; world])
    }

    /// Opens a window of `spec` on every rank of `group` and connects them. Windows start zeroed
    /// and all flags are 0 when it returns.
    ///
    /// # Errors
    /// [`Unsupported`](crate::TransportError::Unsupported) where this transport cannot connect the
    /// group's ranks (say which and what to use instead), the errors of the group otherwise.
    fn open(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Arc<dyn Link>>;
}

/// An open window with its peers. Shared by threads of one rank.
///
/// # Flags
/// A flag is binary. `signal` sets it on the peer, `wait` waits for it and resets it. The caller
/// never signals a flag that may still be set (the protocol's flags close in pairs), so nothing is
/// lost.
///
/// # Order
/// What a rank stored into a peer's direct window, or put, *before* it signalled that peer on the
/// same queue is visible to the peer after its `wait` for that flag. What a rank read from a direct
/// window before signalling is not overwritten by stores the peer makes after that `wait`.
///
/// Nothing else is ordered: neither puts among themselves, nor signals of different flags, nor
/// either with the group's collectives, after which a signal may still be on its way.
///
/// # Waiting
/// `put` and `signal` have no deadline: they do not wait for the peer, but queue what they cannot
/// hand over. A queued put is an offset, since its source stays as it is until `flush`. Dropping a
/// link still delivers what was signalled, within a bound of the implementation's choice.
///
/// # Safety
/// Callers dereference what [`Link::window`] and [`Link::reach`] say: every [`Mapping`] is
/// initialised memory, aligned to a page, readable and writable for its length, not less than the
/// spec's, as long as the link lives; a peer's mapping is the peer's window. Both answer the same
/// every time, and of two ranks either both are mapped by the other or none is. Flags and order
/// hold as described above.
pub unsafe trait Link: Debug + Send + Sync {
    /// This rank's own window.
    fn window(&self) -> Mapping;

    /// Where the windows are, this rank's and those it maps. If not on the host, their mappings are
    /// addresses for the device.
    fn memory(&self) -> Memory {
        Memory::Host
    }

    /// What kernels need, if [`Link::signal`] and [`Link::wait`] take streams as queues.
    ///
    /// On a stream both return at once. The deadline of a wait then says how long it may take from
    /// when the stream gets there; a wait that takes longer, or cannot end because the group has
    /// failed, is released: the failure is told to the group and [`StreamSide::poisoned`] is set.
    /// Both can be captured into graphs, whose replays are watched over in the same way.
    #[cfg(feature = "cuda")]
    fn stream_side(&self) -> Option<StreamSide> {
        None
    }

    /// Whether [`Link::put`] and [`Link::exchange`] on a stream that is being captured become part of the
    /// graph, each replay of which then puts or exchanges the same places. Where this is not so, they are
    /// refused.
    fn captures(&self) -> bool {
        false
    }

    /// Whether a wait of `peer` on a stream may hold up what this rank submits after it, since both
    /// share hardware: whoever tells several peers of the same tells such ones last, so that none of
    /// them waits ahead of what the others are told.
    fn is_beside(&self, peer: usize) -> bool {
        let _ = peer;
        false
    }

    /// How `peer`'s window is reached; for this rank itself, its own window.
    fn reach(&self, peer: usize) -> Reach;

    /// Writes from this rank's window into a bulk peer's. The source may be written again after
    /// [`Link::flush`]. For a direct peer it is a copy.
    fn put(&self, queue: &Queue, put: Put) -> Result<()>;

    /// This rank's side of an exchange with paired peers: sends what `sends` says and receives what
    /// the peers send it. Both sides list the same blocks of each pair in the same order, none of them
    /// empty; where a block goes is the receiver's to say, so [`Put::to`] counts only for peers that are
    /// reached otherwise. Exchanges have numbers below [`WindowSpec::flags`], and every rank makes those
    /// of all its pairs in the same order. What is behind the exchange on the queue sees what was
    /// received, and may write to what was sent.
    ///
    /// A link without paired peers need not implement this: what comes from others is not received,
    /// but put by them.
    ///
    /// # Errors
    /// An argument that does not fit. On a host queue also those of [`Link::wait`]; on a stream an
    /// exchange that takes longer than `deadline` allows is ended, and its failure is told as that of
    /// a wait.
    fn exchange(
        &self,
        queue: &Queue,
        op: &'static str,
        number: u32,
        (sends, receives): (&[Put], &[Receive]),
        deadline: Deadline,
    ) -> Result<()> {
        let _ = (number, deadline);
        if let Some(Receive { peer, .. }) =
            receives.iter().find(|one| matches!(self.reach(one.peer), Reach::Paired))
        {
            let detail = format!("rank {peer} is paired, and this link does not exchange");
            return Err(TransportError::Unsupported { op, detail });
        }
        sends.iter().try_for_each(|put| self.put(queue, *put))
    }

    /// Waits until the sources of all earlier puts on this queue may be reused. A peer that has left
    /// in good order since is no error.
    ///
    /// On a stream it returns at once, and the stream waits: what is behind it on that stream may write to
    /// the sources. Other streams are not held up; what they do has to be ordered behind that. If the
    /// sources are not free within the deadline, from when the stream gets there, the stream is released
    /// as from [`Link::wait`].
    fn flush(&self, queue: &Queue, deadline: Deadline) -> Result<()>;

    /// Sets flag `flag` of source *this rank* on `peer`, after everything this rank has stored,
    /// put or read on the queue before.
    fn signal(&self, queue: &Queue, peer: usize, flag: u32) -> Result<()>;

    /// Waits until flag `flag` of every source in `peers` is set, and resets each.
    ///
    /// # Errors
    /// [`Timeout`](crate::TransportError::Timeout) naming every absent peer,
    /// [`PeerLost`](crate::TransportError::PeerLost) and
    /// [`Aborted`](crate::TransportError::Aborted) as soon as the group knows. A flag that is set
    /// wins over a peer that has left since.
    fn wait(
        &self,
        queue: &Queue,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()>;

    /// [`Link::signal`] to each of some peers, if so asked, then [`Link::wait`] for the same flag of all
    /// of them: in one step where the link has one, since every step takes the stream a microsecond
    /// or more.
    ///
    /// # Errors
    /// As both.
    #[cfg(feature = "cuda")]
    fn meet(&self, queue: &Queue, meeting: &Meeting<'_>) -> Result<()> {
        let &Meeting { op, peers, flag, deadline, signal, .. } = meeting;
        if signal {
            peers.iter().try_for_each(|&peer| self.signal(queue, peer, flag))?;
        }
        self.wait(queue, op, peers, flag, deadline)
    }

    /// Whether `wait` would return at once, be it with an error because the group has failed.
    fn ready(&self, peers: &[usize], flag: u32) -> bool;

    /// The peers for whose flag `flag` a stream is waiting now, as far as this link can tell: for errors
    /// of those who wait for the stream.
    #[cfg(feature = "cuda")]
    fn absent(&self, flag: u32) -> Vec<usize> {
        let _ = flag;
        Vec::new()
    }
}
