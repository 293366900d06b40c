//! Once warm, a call allocates nothing, and nothing grows. Its own binary: it counts every
//! allocation of the process.

mod common;

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};

use common::{Nodes, eps};
use ep_runtime::{
    CombineOpts, Combined, DispatchOpts, EpBuilder, Hierarchy, Ids, Layout, MoeShape, Payload,
    PayloadKind, Precision, Queue, Route, Rows, RowsMut,
};

struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicIsize = AtomicIsize::new(0);

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, memory: Memory) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::SeqCst);
        BYTES.fetch_add(memory.size() as isize, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(memory) }
    }

    unsafe fn dealloc(&self, at: *mut u8, memory: Memory) {
        BYTES.fetch_sub(memory.size() as isize, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, memory) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const HIDDEN: usize = 32;
const TOPK: usize = 4;
const EXPERTS: usize = 12;
const MOST: usize = 24;

/// One dropped dispatch, one dispatch, cached dispatch and combine each way, of a shape that depends on `i`.
fn step(
    ep: &ep_runtime::Ep,
    (i, per_node): (usize, bool),
    out: &mut [f32],
    rows: &[f32],
    ids: &[i64],
    home: &mut [f32],
) {
    let queue = Queue::host();
    let tokens = (i * 7 + ep.rank() * 5) % (MOST + 1);
    let payload = Payload::new(Rows::new(&rows[..tokens * HIDDEN], HIDDEN).unwrap()).unwrap();
    let ids = Ids::I64(&ids[i % 5 * MOST * TOPK..][..tokens * TOPK]);
    let layout = match i % 3 {
        0 => Layout::RankMajor,
        _ => Layout::ExpertMajor { alignment: 4 },
    };
    let precision = match i % 6 {
        2 | 5 => Precision::Reduced,
        0 | 1 if per_node => Precision::NodeReduced,
        _ => Precision::Exact,
    };
    let opts =
        DispatchOpts { lane: i % 2, layout, capacity: i.is_multiple_of(4), ..Default::default() };
    let route = Route::Topk { ids, weights: None };
    drop(ep.dispatch_send(&queue, payload, route, &opts).unwrap());
    let first = ep.dispatch(&queue, payload, route, &opts).unwrap();
    let handle = first.handle().clone();
    let send = ep.dispatch_send(&queue, payload, Route::Cached(&handle), &opts).unwrap();
    let again = send.recv(&queue).unwrap();
    let bias = [Rows::new(&rows[..tokens * HIDDEN], HIDDEN).unwrap()];
    let out = RowsMut::new(&mut out[..tokens * HIDDEN], HIDDEN).unwrap();
    let into = Combined::new(out).biases(&bias).weights(&mut home[..tokens * TOPK]);
    first.release(&queue);
    again.combine(&queue, into, &CombineOpts { precision, ..Default::default() }).unwrap();
}

#[test]
fn warm_calls_allocate_nothing() {
    for nodes in [Nodes::Mapped, Nodes::Bulk, Nodes::Sizes(&[1, 2])] {
        let hierarchy = match nodes {
            Nodes::Sizes(_) => Hierarchy::Node,
            _ => Hierarchy::Flat,
        };
        let shape = MoeShape::new(HIDDEN, TOPK, EXPERTS).max_tokens(MOST).expert_major(4);
        let builder = EpBuilder::new(shape.payload(PayloadKind::F32))
            .transport(nodes.transport(3).unwrap_or_default())
            .hierarchy(hierarchy);
        eps(3, &builder, |ep| {
            let rows = vec![1.5f32; MOST * HIDDEN];
            let mut ids = Vec::new();
            for i in 0..5 * MOST {
                ids.extend((0..TOPK).map(|k| ((i * 5 + k * 3 + ep.rank()) % EXPERTS) as i64));
            }
            let (mut out, mut home) = (vec![0.0; MOST * HIDDEN], vec![0.0; MOST * TOPK]);
            let mut go = |from: usize, to: usize| {
                (from..to).for_each(|i| {
                    step(&ep, (i, hierarchy == Hierarchy::Node), &mut out, &rows, &ids, &mut home)
                });
            };
            // All shapes on all of the pool's handles: shapes repeat after 300 steps.
            go(0, 1800);
            together(&ep);
            let (calls, bytes) = (CALLS.load(Ordering::SeqCst), BYTES.load(Ordering::SeqCst));
            go(1800, 2400);
            let now = (CALLS.load(Ordering::SeqCst), BYTES.load(Ordering::SeqCst));
            // No rank goes on to what may allocate before all have read.
            together(&ep);
            assert_eq!(now.0 - calls, 0, "allocations in 600 warm steps ({nodes:?})");
            assert_eq!(now.1 - bytes, 0, "bytes");
            go(2400, 10_000);
            assert!(BYTES.load(Ordering::SeqCst) - bytes < 64 << 10, "growth over 10,000 steps");
        });
    }
}

/// Keeps the ranks together, by an operation that allocates nothing itself.
fn together(ep: &ep_runtime::Ep) {
    let none = Payload::new(Rows::new::<f32>(&[], HIDDEN).unwrap()).unwrap();
    let route = Route::Topk { ids: Ids::I32(&[]), weights: None };
    ep.dispatch(&Queue::host(), none, route, &DispatchOpts::default()).unwrap();
}
