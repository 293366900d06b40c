//! What carries puts and signals to the ranks of other nodes: a ring and a proxy per NIC.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use ep_topology::Host;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use super::OP;
use super::device::Device;
use super::layout::{Layout, Words};
use super::nodes::Nodes;
use super::options::Options;
use super::proxy::{Proxy, Setup};
use super::sender::Limits;
use super::shared::{Order, Raise, Shared};
use crate::rdma_plan::{RING, SEND_QUEUE};
use crate::ring::{Producer, Ring};
use crate::{Deadline, Group, Put, Result, TransportError};

/// How long a put or signal may wait for room in the ring.
const PATIENCE: std::time::Duration = crate::DEFAULT_TIMEOUT;

/// What was made before the proxies start.
#[derive(Debug)]
pub(super) struct Wired {
    pub group: Group,
    pub layout: Layout,
    pub words: Words,
    pub nodes: Nodes,
    /// Threads of a rank that poll besides a proxy per NIC.
    pub pollers: usize,
}

/// One NIC's side of the core.
struct Nic {
    commands: Producer,
    /// Commands pushed.
    pushed: AtomicU64,
    bell: Arc<OwnedFd>,
}

/// Commands pushed to each NIC: up to where they have to be done.
pub(super) type Tickets = [u64; super::options::MOST_NICS];

pub(super) struct Core {
    group: Group,
    pub shared: Arc<Shared>,
    nics: Vec<Nic>,
    /// Which NIC gets the first part of the next large put.
    turn: AtomicUsize,
    stripe: usize,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("Core");
        out.field("shared", &self.shared).field("nics", &self.nics.len()).finish_non_exhaustive()
    }
}

impl Core {
    /// Starts a proxy on each of `devices`, bound to `cores` (by device) where they are given.
    pub(super) fn start<D: Device + 'static>(
        wired: Wired,
        flags: (u32, Raise),
        devices: Vec<(D, Vec<u32>)>,
        options: &Options,
    ) -> Result<Self> {
        let Wired { group, layout, words, nodes, pollers } = wired;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = can_spin(nodes.on_host(), devices.len() + pollers, cores);
        let shared = Shared::new(group.clone(), flags, layout, words, devices.len(), spin);
        let turn = AtomicUsize::new(group.rank());
        let (nics, threads) = (Vec::new(), Mutex::default());
        let mut core = Self { group, shared, nics, turn, stripe: options.stripe, threads };
        for (nic, (device, cores)) in devices.into_iter().enumerate() {
            core.add(nic, device, cores, &nodes, options)?;
        }
        Ok(core)
    }

    fn add<D: Device + 'static>(
        &mut self,
        nic: usize,
        device: D,
        cores: Vec<u32>,
        nodes: &Nodes,
        options: &Options,
    ) -> Result<()> {
        let os = |what: &str, e| TransportError::os(OP, what, e);
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = Arc::new(bell.map_err(|e| os("making an eventfd", e))?);
        let rung = bell.clone();
        let (commands, consumer) = Ring::new(RING)?.split(Arc::new(move || ring(&rung)));
        let setup = Setup {
            nic,
            limits: Limits {
                depth: options.depth as u32,
                send_queue: SEND_QUEUE,
                queue_pairs: options.queue_pairs,
                piece: options.piece,
                stripe: options.stripe,
            },
            in_flight: options.in_flight,
            busy: options.busy,
            drain: options.drain,
            grace: options.grace(),
        };
        let (shared, bulk) = (self.shared.clone(), nodes.bulk());
        let proxy = Proxy::new(setup, device, consumer, bell.clone(), shared, bulk);
        let name = format!("ep-rdma-{}.{nic}", self.group.rank());
        let work = move || {
            bind(&cores);
            proxy.run();
        };
        let thread = std::thread::Builder::new().name(name).spawn(work).map_err(|e| {
            let code = e.raw_os_error().unwrap_or(libc::EAGAIN);
            let detail = "starting a proxy".into();
            TransportError::Os { op: OP, peer: None, code, detail }
        })?;
        self.threads.get_mut().push(thread);
        self.nics.push(Nic { commands, pushed: AtomicU64::new(0), bell });
        Ok(())
    }

    fn push(&self, nic: usize, op: &'static str, order: Order) -> Result<()> {
        let deadline = Deadline::after(PATIENCE);
        let check = || self.shared.check().and_then(|()| self.group.health().check(op));
        let nic = &self.nics[nic];
        let ticket = nic.commands.push(op, order.encode(), deadline, check)?;
        nic.pushed.fetch_max(ticket + 1, Ordering::AcqRel);
        Ok(())
    }

    /// Divides a put among the NICs, if it is worth it.
    pub(super) fn put(&self, put: Put) -> Result<()> {
        self.shared.check()?;
        let Put { peer, from, to, bytes } = put;
        let count = self.nics.len();
        let share = bytes.div_ceil(count).next_multiple_of(4096).max(self.stripe);
        let first = match bytes <= share {
            true => of_small(to, self.stripe, self.group.rank() + peer),
            false => self.turn.fetch_add(1, Ordering::Relaxed),
        };
        let mut done = 0;
        for i in 0.. {
            let bytes = share.min(bytes - done);
            if bytes == 0 {
                break;
            }
            let order = Order::Put { peer, from: from + done, to: to + done, bytes };
            self.push((first + i) % count, "put", order)?;
            done += bytes;
        }
        Ok(())
    }

    pub(super) fn signal(&self, peer: usize, flag: u32) -> Result<()> {
        self.shared.check()?;
        let parts = self.nics.len() as u32;
        let order = Order::Signal { peer, flag, parts };
        (0..self.nics.len()).try_for_each(|nic| self.push(nic, "signal", order))
    }

    /// How much has been pushed by now.
    pub(super) fn pushed(&self) -> Tickets {
        let mut tickets = Tickets::default();
        for (ticket, nic) in tickets.iter_mut().zip(&self.nics) {
            *ticket = nic.pushed.load(Ordering::Acquire);
        }
        tickets
    }

    /// Waits until what has been pushed is done.
    pub(super) fn flush(&self, deadline: Deadline) -> Result<()> {
        let flushed = self.shared.wait_retired("flush", &self.pushed(), deadline);
        if let Err(TransportError::Aborted { .. }) = flushed {
            // This rank's NICs may know more of it than what the others have told.
            self.settle();
            self.shared.check()?;
        }
        flushed
    }

    /// Waits, bounded, until the proxies have taken whatever the NICs had to report by now.
    pub(super) fn settle(&self) {
        self.shared.settle(|| self.nics.iter().for_each(|nic| ring(&nic.bell)));
    }
}

/// Whether there are cores for threads that poll: so many of each of the host's ranks, of which each has
/// a thread that waits besides.
fn can_spin(ranks: usize, pollers: usize, cores: usize) -> bool {
    ranks * (1 + pollers) <= cores
}

/// The number, before it is reduced to those there are, of the NIC for a put to `to` that is not worth
/// dividing. Neighbours go the same way, so that a proxy makes one write of them; what is farther
/// apart, and what goes to others, may go another.
fn of_small(to: usize, stripe: usize, pair: usize) -> usize {
    (to / stripe.max(1)).wrapping_add(pair)
}

fn ring(bell: &OwnedFd) {
    // It cannot block: a full counter rings as well.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

/// Binds the calling thread to `cores`, if there are any and the system lets it.
fn bind(cores: &[u32]) {
    let mut set = rustix::thread::CpuSet::new();
    let fits = |core: &&u32| (**core as usize) < rustix::thread::CpuSet::MAX_CPU;
    cores.iter().filter(fits).for_each(|&core| set.set(core as usize));
    if set.count() > 0
        && let Err(e) = rustix::thread::sched_setaffinity(None, &set)
    {
        tracing::warn!("a proxy is not bound to the cores near its NIC: {e}");
    }
}

/// The cores near a NIC that this process may use.
pub(super) fn cores_near(host: &Host, numa_node: Option<u32>) -> Vec<u32> {
    numa_node.map_or(Vec::new(), |node| {
        let allowed = rustix::thread::sched_getaffinity(None).ok();
        let may = |core: &u32| allowed.as_ref().is_some_and(|set| set.is_set(*core as usize));
        host.node_cpus(node).iter().filter(may).collect()
    })
}

impl Drop for Core {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.nics.iter().for_each(|nic| ring(&nic.bell));
        for thread in self.threads.get_mut().drain(..) {
            // A proxy that panicked has left its rank's flags as they were; there is nobody to tell.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::sender::{Limits, Peer, What};
    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        /// Of adjacent small puts each NIC makes one write per stretch that is its own, and together
        /// they write every byte once.
        #[test]
        fn adjacent_blocks_merge_on_every_nic(
            blocks in prop::collection::vec(1usize..3_000, 1..200),
            nics in 1usize..5,
            pair in 0usize..100,
            start in 0usize..100_000,
        ) {
            const STRIPE: usize = 16_384;
            let limits = Limits {
                depth: 4096,
                send_queue: 4096,
                queue_pairs: 1,
                piece: 1 << 20,
                stripe: STRIPE,
            };
            let mut peers: Vec<Peer> = (0..nics).map(|_| Peer::new(limits)).collect();
            let mut to = start;
            for (ticket, &bytes) in blocks.iter().enumerate() {
                let nic = of_small(to, STRIPE, pair) % nics;
                peers[nic].push_put(to + 7, to, bytes, ticket as u64);
                to += bytes;
            }
            let mut writes: Vec<(usize, usize)> = Vec::new();
            for peer in &mut peers {
                while let Some((post, ..)) = peer.next(usize::MAX) {
                    let What::Bytes { from, to, bytes } = post.what else { unreachable!() };
                    prop_assert_eq!(from, to + 7);
                    writes.push((to, bytes));
                }
            }
            writes.sort_unstable();
            prop_assert!(writes.windows(2).all(|two| two[0].0 + two[0].1 == two[1].0));
            prop_assert_eq!(writes[0].0, start);
            prop_assert_eq!(writes.iter().map(|write| write.1).sum::<usize>(), to - start);
            // Where there is more than one NIC, a write for each stripe that a block starts in.
            let most = if nics == 1 { 1 } else { to / STRIPE - start / STRIPE + 1 };
            prop_assert!(writes.len() <= most, "{} writes of {} blocks", writes.len(), blocks.len());
        }
    }

    #[test]
    fn threads_poll_where_each_has_a_core() {
        // A rank that waits, a proxy per NIC, and a bridge where there is one.
        assert!(can_spin(1, 1, 2) && !can_spin(1, 2, 2) && can_spin(1, 2, 3));
        assert!(can_spin(4, 3, 16) && !can_spin(4, 3, 15));
    }

    #[test]
    fn small_puts_go_to_all_nics() {
        let of = |to, pair| of_small(to, 4096, pair) % 2;
        assert_eq!([of(0, 3), of(4095, 3), of(4096, 3), of(0, 4)], [1, 1, 0, 0]);
    }
}
