//! Layers whose tokens cross nodes once, on links that are watched, late, no partition, or end.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::small::{PROMPT, Tokens, builder, combine, dispatch, opts, round_trip};
use common::{eps, ranks};
use ep_bench::oracle::JobSpec;
use ep_runtime::{
    CombineOpts, Deadline, Ep, EpBuilder, ErrorKind, Group, Hierarchy, Ids, Link, MoeShape,
    Payload, PayloadKind, Precision, Put, Queue, Reach, Route, Rows, RowsMut, ThreadTransport,
    Transport, TransportError, WindowSpec, wire,
};
use ep_transport::{FaultyTransport, ForwardLink};

type Result<T> = std::result::Result<T, TransportError>;

/// What a link does beside its work.
#[derive(Clone, Debug)]
enum Twist {
    /// Counts the bytes each rank puts.
    Count(Arc<Vec<AtomicU64>>),
    /// Ranks map their neighbours only.
    Chain,
    /// Rank 1 ends at its so manieth call, after this time.
    Die(Arc<AtomicI64>, Duration),
}

#[derive(Clone, Debug)]
struct Twisted {
    inner: ThreadTransport,
    twist: Twist,
}

#[derive(Debug)]
struct TwistedLink {
    inner: Arc<dyn Link>,
    twist: Twist,
    rank: usize,
}

impl Transport for Twisted {
    fn name(&self) -> &'static str {
        "twisted"
    }

    fn open(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Arc<dyn Link>> {
        let inner = self.inner.open(group, spec, deadline)?;
        Ok(Arc::new(TwistedLink { inner, twist: self.twist.clone(), rank: group.rank() }))
    }
}

impl TwistedLink {
    fn call(&self) {
        if let Twist::Die(calls, after) = &self.twist
            && self.rank == 1
            && calls.fetch_sub(1, Ordering::SeqCst) == 0
        {
            std::thread::sleep(*after);
            resume_unwind(Box::new("the end of rank 1"));
        }
    }
}

// SAFETY: memory and flags are the inner link's. A chain is no partition of nodes, but windows that
// it does not show are not used.
unsafe impl ForwardLink for TwistedLink {
    fn inner(&self) -> &dyn Link {
        &*self.inner
    }

    fn reach(&self, peer: usize) -> Reach {
        match self.twist {
            Twist::Chain if self.rank.abs_diff(peer) > 1 => Reach::Bulk,
            _ => self.inner.reach(peer),
        }
    }

    fn put(&self, queue: &Queue, put: Put) -> Result<()> {
        self.call();
        if let Twist::Count(bytes) = &self.twist {
            bytes[self.rank].fetch_add(put.bytes as u64, Ordering::SeqCst);
        }
        self.inner.put(queue, put)
    }

    fn signal(&self, queue: &Queue, peer: usize, flag: u32) -> Result<()> {
        self.call();
        self.inner.signal(queue, peer, flag)
    }

    fn wait(
        &self,
        queue: &Queue,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()> {
        self.call();
        self.inner.wait(queue, op, peers, flag, deadline)
    }
}

fn node_reduced() -> CombineOpts {
    CombineOpts { precision: Precision::NodeReduced, ..CombineOpts::default() }
}

#[test]
fn ranks_that_form_no_nodes_are_refused_on_every_rank() {
    let chain = Twisted { inner: ThreadTransport::new(), twist: Twist::Chain };
    for e in ranks(4, |group| builder().transport(chain.clone()).build(&group).unwrap_err()) {
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
        let text = e.to_string();
        assert!(text.contains("ranks 0 and 1 map each other, but only one"), "{text}");
    }
}

/// A transport that does not know its nodes beforehand, and is late and out of order.
#[test]
fn late_links_change_nothing() {
    for (seed, sizes) in [(1, &[2, 2][..]), (2, &[1, 3]), (3, &[1, 1, 2])] {
        let inner = ThreadTransport::new().nodes(sizes);
        let faulty = FaultyTransport::new(inner, seed).delays(0.5, Duration::from_millis(2));
        eps(4, &builder().transport(faulty).hierarchy(Hierarchy::Node), |ep| {
            let tokens = Tokens::new(ep.rank(), 9);
            let expected = combine(dispatch(&ep, &tokens, &opts(0)).unwrap(), &node_reduced());
            let expected = expected.unwrap();
            for lane in [0, 1, 0, 1] {
                round_trip(&ep);
                let got = combine(dispatch(&ep, &tokens, &opts(lane)).unwrap(), &node_reduced());
                assert_eq!(got.unwrap(), expected);
            }
        });
    }
}

/// Runs a round trip in which rank 1 ends at its `at`th call, and returns whether it did; after another
/// one, which has to be in time, if `proven`.
fn die(at: i64, proven: bool, after: Duration, timeout: Duration) -> bool {
    let calls = Arc::new(AtomicI64::new(i64::MAX));
    let inner = ThreadTransport::new().nodes(&[2, 2]);
    let transport = Twisted { inner, twist: Twist::Die(calls.clone(), after) };
    let builder = builder().timeout(timeout).transport(transport).hierarchy(Hierarchy::Node);
    let died = ranks(4, |group| {
        let ep = builder.build(&group).unwrap();
        if proven {
            round_trip(&ep);
        }
        group.barrier().unwrap();
        if ep.rank() == 1 {
            calls.store(at, Ordering::SeqCst);
        }
        let tokens = Tokens::new(ep.rank(), 5);
        let go = || {
            let first = dispatch(&ep, &tokens, &opts(0))?;
            combine(first, &node_reduced())
        };
        let began = Instant::now();
        if ep.rank() == 1 {
            let ended = catch_unwind(AssertUnwindSafe(|| drop(go()))).is_err();
            calls.store(i64::MAX, Ordering::SeqCst);
            return ended;
        }
        // What was sent may have arrived, but rank 1 sends no more.
        let last = go().and_then(|_| combine(dispatch(&ep, &tokens, &opts(0))?, &node_reduced()));
        assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
        let e = last.expect_err("rank 1 is not there");
        assert!(!e.group_usable(), "{e}");
        assert!(!dispatch(&ep, &tokens, &opts(1)).unwrap_err().group_usable());
        false
    });
    died[1]
}

#[test]
fn a_rank_that_ends_in_any_phase_is_everyones_error() {
    let mut at = 0;
    while die(at, true, Duration::ZERO, Duration::from_secs(60)) {
        at += 1;
    }
    // An announcement, a block and their flags each way are more than this.
    assert!(at > 15, "only {at} calls");
}

#[test]
fn a_rank_that_stops_in_any_phase_is_everyones_error_in_time() {
    let timeout = Duration::from_millis(300);
    for at in [0, 5, 8, 11, 14, 17, 20] {
        die(at, false, 2 * timeout, timeout);
    }
}

/// The bytes that are really put are those that `wire` derives from the routing.
#[test]
fn bytes_on_the_wire_are_those_of_the_routing() {
    const HIDDEN: usize = 64;
    for (seed, sizes) in [(0, &[2, 2][..]), (1, &[4, 4]), (2, &[1, 3]), (3, &[1, 2, 3])] {
        let world: usize = sizes.iter().sum();
        let node_of = common::Nodes::Sizes(Box::leak(sizes.into())).of(world);
        let spec = JobSpec { ranks: world, tokens: vec![11; world], ..JobSpec::random(seed) };
        let job = JobSpec { experts: 24, topk: 5, masked_percent: 10, physical_ids: false, ..spec };
        let job = JobSpec { placement: ep_bench::oracle::PlacementSpec::Contiguous, ..job }.build();
        let placement = ep_runtime::Placement::contiguous(job.experts, world).unwrap();
        let routes = |rank: usize| {
            let ids = Ids::I64(&job.inputs[rank].ids);
            wire::Routes::new(ids, job.topk, &placement, rank).unwrap()
        };
        let routes: Vec<_> = (0..world).map(routes).collect();
        let row = wire::row_bytes(PayloadKind::Bf16, HIDDEN, job.topk).unwrap() as u64;
        let reduced = wire::reduced_row_bytes(PayloadKind::Bf16, HIDDEN, job.topk) as u64;
        for (hierarchy, precision) in [
            (Hierarchy::Flat, Precision::Exact),
            (Hierarchy::Node, Precision::Exact),
            (Hierarchy::Node, Precision::NodeReduced),
        ] {
            let bytes: Arc<Vec<AtomicU64>> = Arc::new((0..world).map(|_| 0.into()).collect());
            let inner = ThreadTransport::new().nodes(sizes);
            let transport = Twisted { inner, twist: Twist::Count(bytes.clone()) };
            let shape = MoeShape::new(HIDDEN, job.topk, job.experts).max_tokens(11);
            let layer = EpBuilder::new(shape).transport(transport).hierarchy(hierarchy);
            let got = eps(world, &layer, |ep| {
                count(&ep, &job.inputs[ep.rank()].ids, precision, &bytes[ep.rank()])
            });
            let flat = wire::flat(&routes, &node_of, row).unwrap();
            let (nodes, out) = match hierarchy {
                Hierarchy::Flat => (0, flat.clone()),
                _ => (sizes.len(), wire::hierarchical(&routes, &node_of, row).unwrap()),
            };
            let home = match precision {
                Precision::NodeReduced => wire::hierarchical(&routes, &node_of, reduced).unwrap(),
                _ => flat,
            };
            for (rank, &(dispatched, combined)) in got.iter().enumerate() {
                let far = node_of.iter().filter(|&&node| node != node_of[rank]).count() as u64;
                let counted = wire::announcement_bytes(job.experts, world, nodes) as u64;
                let plain = wire::announcement_bytes(0, 0, 0) as u64;
                assert_eq!(dispatched, out[rank].sent + far * counted, "{sizes:?} rank {rank}");
                assert_eq!(combined, home[rank].received + far * plain, "{sizes:?} rank {rank}");
            }
        }
    }
}

/// The bytes a rank puts in a dispatch and in the combine after it.
fn count(ep: &Ep, ids: &[i64], precision: Precision, bytes: &AtomicU64) -> (u64, u64) {
    const HIDDEN: usize = 64;
    let queue = Queue::host();
    let tokens = vec![ep_runtime::bf16::ONE; 11 * HIDDEN];
    let payload = Payload::new(Rows::new(&tokens, HIDDEN).unwrap()).unwrap();
    let route = Route::Topk { ids: Ids::I64(ids), weights: None };
    let result = ep.dispatch(&queue, payload, route, &opts(0)).unwrap();
    let dispatched = bytes.load(Ordering::SeqCst);
    let mut out = vec![ep_runtime::bf16::ZERO; 11 * HIDDEN];
    let out = RowsMut::new(&mut out, HIDDEN).unwrap();
    result.combine(&queue, out, &CombineOpts { precision, ..CombineOpts::default() }).unwrap();
    (dispatched, bytes.load(Ordering::SeqCst) - dispatched)
}
