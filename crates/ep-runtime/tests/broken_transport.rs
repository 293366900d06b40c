//! What arrives is checked before it becomes an address: a transport (or a peer) that delivers
//! nonsense gives an error where it arrives, not a wild write.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::ranks;
use ep_runtime::{
    Deadline, DispatchOpts, EpBuilder, ErrorKind, Group, Ids, Layout, Link, MoeShape, Payload,
    PayloadKind, Queue, Route, Rows, ThreadTransport, Transport, TransportError, WindowSpec,
};
use ep_transport::ForwardLink;

type Result<T> = std::result::Result<T, TransportError>;

/// Shared memory in which rank 0 finds something else than rank 1 wrote, once `on`.
#[derive(Clone, Debug)]
struct Corrupting {
    on: Arc<AtomicBool>,
    /// Offset in the window, and what is there then.
    at: usize,
    value: u32,
    inner: ThreadTransport,
}

#[derive(Debug)]
struct CorruptingLink {
    of: Corrupting,
    rank: usize,
    inner: Arc<dyn Link>,
}

impl Transport for Corrupting {
    fn name(&self) -> &'static str {
        "corrupting"
    }

    fn maps_all_peers(&self) -> bool {
        true
    }

    fn open(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Arc<dyn Link>> {
        let inner = self.inner.open(group, spec, deadline)?;
        Ok(Arc::new(CorruptingLink { of: self.clone(), rank: group.rank(), inner }))
    }
}

// SAFETY: all but one word of its own window is the inner link's.
unsafe impl ForwardLink for CorruptingLink {
    fn inner(&self) -> &dyn Link {
        &*self.inner
    }

    fn wait(
        &self,
        queue: &Queue,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()> {
        self.inner.wait(queue, op, peers, flag, deadline)?;
        if self.rank == 0 && self.of.on.load(Ordering::SeqCst) {
            let window = self.inner.window();
            assert!(self.of.at + 4 <= window.bytes);
            // SAFETY: inside the window; the peer has signalled, so nobody writes it now.
            unsafe { window.base.add(self.of.at).cast::<u32>().write(self.of.value) };
        }
        Ok(())
    }
}

/// Dispatches once well and once with `value` at `offset` of rank 1's announcement to rank 0.
#[track_caller]
fn check(offset: usize, value: u32, layout: Layout, kind: ErrorKind) {
    let shape = MoeShape::new(16, 2, 4).max_tokens(4).payload(PayloadKind::F32).expert_major(1);
    let builder = EpBuilder::new(shape).timeout(Duration::from_secs(20));
    let plan = builder.plan(2).expect("a plan");
    let at = (plan.lanes + 1) * plan.message_bytes + offset;
    let on = Arc::new(AtomicBool::new(false));
    let transport = Corrupting { on: on.clone(), at, value, inner: ThreadTransport::new() };
    let builder = builder.transport(transport);
    let got = ranks(2, |group| {
        let ep = builder.build(&group).expect("build");
        let (rows, ids) = ([1.0f32; 2 * 16], [0, 2, 1, 3]);
        let go = || {
            let payload = Payload::new(Rows::new(&rows, 16)?)?;
            let route = Route::Topk { ids: Ids::I32(&ids), weights: None };
            let opts = DispatchOpts { layout, ..DispatchOpts::default() };
            ep.dispatch(&Queue::host(), payload, route, &opts).map(drop)
        };
        go().expect("nothing is corrupted yet");
        group.barrier().expect("both are here");
        on.store(true, Ordering::SeqCst);
        go().map_err(|e| e.kind())
    });
    // Rank 1 sees nothing wrong, unless rank 0 gives up.
    assert_eq!(got[0], Err(kind), "rank 0");
}

/// Offsets in an announcement: see `Header` in `src/notify.rs`.
const SLOT: usize = 4;
const SEQUENCE: usize = 8;
const COUNTS: usize = 72;
const EXPERTS: usize = 4;

#[test]
fn a_slot_that_does_not_exist() {
    check(SLOT, 99, Layout::RankMajor, ErrorKind::Aborted);
}

#[test]
fn another_sequence() {
    check(SEQUENCE, 99, Layout::RankMajor, ErrorKind::Mismatch);
}

#[test]
fn more_rows_than_there_is_room_for() {
    for count in [100, u32::MAX] {
        check(COUNTS + 4 * EXPERTS, count, Layout::RankMajor, ErrorKind::Mismatch);
        check(COUNTS, count, Layout::ExpertMajor { alignment: 1 }, ErrorKind::Mismatch);
    }
}

#[test]
fn counts_that_the_rows_do_not_bear_out() {
    check(COUNTS, 0, Layout::ExpertMajor { alignment: 1 }, ErrorKind::Aborted);
}
