//! Links around other links.

use std::fmt::Debug;

#[cfg(feature = "cuda")]
use crate::StreamSide;
use crate::{Deadline, Link, Mapping, Memory, Put, Queue, Reach, Receive, Result};

/// A [`Link`] that wraps another: every call goes to [`ForwardLink::inner`], unless the
/// implementation says otherwise. Whatever implements this is a [`Link`].
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use ep_transport::{ForwardLink, Link, Put, Queue, Result};
///
/// /// Counts the bytes that leave a rank by [`Link::put`].
/// #[derive(Debug)]
/// struct Counting {
///     inner: Arc<dyn Link>,
///     bytes: AtomicU64,
/// }
///
/// // SAFETY: all answers are the inner link's.
/// unsafe impl ForwardLink for Counting {
///     fn inner(&self) -> &dyn Link {
///         &*self.inner
///     }
///
///     fn put(&self, queue: &Queue, put: Put) -> Result<()> {
///         self.bytes.fetch_add(put.bytes as u64, Ordering::Relaxed);
///         self.inner.put(queue, put)
///     }
/// }
///
/// let link = |inner| -> Arc<dyn Link> { Arc::new(Counting { inner, bytes: AtomicU64::new(0) }) };
/// # let _: fn(Arc<dyn Link>) -> Arc<dyn Link> = link;
/// ```
///
/// # Safety
/// `inner` is the same link every time, and with what the implementation does itself the promises
/// of [`Link`] hold.
pub unsafe trait ForwardLink: Debug + Send + Sync {
    /// The link that is wrapped.
    fn inner(&self) -> &dyn Link;

    /// [`Link::window`].
    fn window(&self) -> Mapping {
        self.inner().window()
    }

    /// [`Link::memory`].
    fn memory(&self) -> Memory {
        self.inner().memory()
    }

    /// [`Link::stream_side`].
    #[cfg(feature = "cuda")]
    fn stream_side(&self) -> Option<StreamSide> {
        self.inner().stream_side()
    }

    /// [`Link::is_beside`].
    fn is_beside(&self, peer: usize) -> bool {
        self.inner().is_beside(peer)
    }

    /// [`Link::reach`].
    fn reach(&self, peer: usize) -> Reach {
        self.inner().reach(peer)
    }

    /// [`Link::put`].
    fn put(&self, queue: &Queue, put: Put) -> Result<()> {
        self.inner().put(queue, put)
    }

    /// [`Link::exchange`].
    fn exchange(
        &self,
        queue: &Queue,
        op: &'static str,
        number: u32,
        blocks: (&[Put], &[Receive]),
        deadline: Deadline,
    ) -> Result<()> {
        self.inner().exchange(queue, op, number, blocks, deadline)
    }

    /// [`Link::flush`].
    fn flush(&self, queue: &Queue, deadline: Deadline) -> Result<()> {
        self.inner().flush(queue, deadline)
    }

    /// [`Link::signal`].
    fn signal(&self, queue: &Queue, peer: usize, flag: u32) -> Result<()> {
        self.inner().signal(queue, peer, flag)
    }

    /// [`Link::wait`].
    fn wait(
        &self,
        queue: &Queue,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()> {
        self.inner().wait(queue, op, peers, flag, deadline)
    }

    /// [`Link::ready`].
    fn ready(&self, peers: &[usize], flag: u32) -> bool {
        self.inner().ready(peers, flag)
    }

    /// [`Link::absent`].
    #[cfg(feature = "cuda")]
    fn absent(&self, flag: u32) -> Vec<usize> {
        self.inner().absent(flag)
    }
}

// SAFETY: what `ForwardLink` asks of its implementations.
unsafe impl<F: ForwardLink> Link for F {
    fn window(&self) -> Mapping {
        ForwardLink::window(self)
    }

    fn memory(&self) -> Memory {
        ForwardLink::memory(self)
    }

    #[cfg(feature = "cuda")]
    fn stream_side(&self) -> Option<StreamSide> {
        ForwardLink::stream_side(self)
    }

    fn is_beside(&self, peer: usize) -> bool {
        ForwardLink::is_beside(self, peer)
    }

    fn reach(&self, peer: usize) -> Reach {
        ForwardLink::reach(self, peer)
    }

    fn put(&self, queue: &Queue, put: Put) -> Result<()> {
        ForwardLink::put(self, queue, put)
    }

    fn exchange(
        &self,
        queue: &Queue,
        op: &'static str,
        number: u32,
        blocks: (&[Put], &[Receive]),
        deadline: Deadline,
    ) -> Result<()> {
        ForwardLink::exchange(self, queue, op, number, blocks, deadline)
    }

    fn flush(&self, queue: &Queue, deadline: Deadline) -> Result<()> {
        ForwardLink::flush(self, queue, deadline)
    }

    fn signal(&self, queue: &Queue, peer: usize, flag: u32) -> Result<()> {
        ForwardLink::signal(self, queue, peer, flag)
    }

    fn wait(
        &self,
        queue: &Queue,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()> {
        ForwardLink::wait(self, queue, op, peers, flag, deadline)
    }

    fn ready(&self, peers: &[usize], flag: u32) -> bool {
        ForwardLink::ready(self, peers, flag)
    }

    #[cfg(feature = "cuda")]
    fn absent(&self, flag: u32) -> Vec<usize> {
        ForwardLink::absent(self, flag)
    }
}
