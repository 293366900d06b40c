//! A transport with a mistake: its signals are puts, which it takes to arrive in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use ep_transport::{
    Deadline, ForwardLink, Group, Link, Mapping, Put, Queue, Reach, Result, Transport,
    TransportError, WindowSpec,
};

/// Flags are bytes behind the window of another transport, whose own flags it does not use.
#[derive(Clone, Debug)]
pub struct Words(pub Arc<dyn Transport>);

#[derive(Debug)]
struct WordsLink {
    inner: Arc<dyn Link>,
    spec: WindowSpec,
    group: Group,
}

impl Transport for Words {
    fn name(&self) -> &'static str {
        "words"
    }

    fn open(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Arc<dyn Link>> {
        // One byte per flag and source, and one that is always 1, to put from.
        let bytes = spec.bytes + spec.flags as usize * group.world() + 1;
        let inner = self.0.open(group, WindowSpec { bytes, flags: 1 }, deadline)?;
        let link = WordsLink { inner, spec, group: group.clone() };
        link.byte(bytes - 1).store(1, Ordering::Relaxed);
        Ok(Arc::new(link))
    }
}

impl WordsLink {
    fn byte(&self, at: usize) -> &AtomicU8 {
        let window = self.inner.window();
        assert!(at < window.bytes);
        // SAFETY: inside the mapped window, behind what the link's user knows of. The peer's copy
        // of one byte races with this access, which is part of the mistake under test.
        unsafe { AtomicU8::from_ptr(window.base.as_ptr().add(at)) }
    }

    fn flag(&self, source: usize, flag: u32) -> usize {
        self.spec.bytes + flag as usize * self.group.world() + source
    }
}

// SAFETY: mappings are those of the inner link's larger window, cut to size. The order of data and
// flags is what it gets wrong, in front of checks that are there to see it.
unsafe impl ForwardLink for WordsLink {
    fn inner(&self) -> &dyn Link {
        &*self.inner
    }

    fn window(&self) -> Mapping {
        Mapping { bytes: self.spec.bytes, ..self.inner.window() }
    }

    fn reach(&self, peer: usize) -> Reach {
        if peer == self.group.rank() { Reach::Direct(Link::window(self)) } else { Reach::Bulk }
    }

    fn signal(&self, queue: &Queue, peer: usize, flag: u32) -> Result<()> {
        let one = self.inner.window().bytes - 1;
        let to = self.flag(self.group.rank(), flag);
        self.inner.put(queue, Put { peer, from: one, to, bytes: 1 })
    }

    fn wait(
        &self,
        _queue: &Queue,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()> {
        for &peer in peers {
            let byte = self.byte(self.flag(peer, flag));
            loop {
                // A flag that is set wins over the news of a peer that has left since.
                let news = self.group.health().check_waiting(op, &[peer]);
                if byte.swap(0, Ordering::Acquire) == 1 {
                    break;
                }
                news?;
                if deadline.expired() {
                    let (peers, after) = (vec![peer], deadline.length());
                    return Err(TransportError::Timeout { op, peers, after, hint: String::new() });
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn ready(&self, peers: &[usize], flag: u32) -> bool {
        peers.iter().all(|&peer| self.byte(self.flag(peer, flag)).load(Ordering::Acquire) == 1)
    }
}
