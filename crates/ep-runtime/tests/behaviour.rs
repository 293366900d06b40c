//! What callers may rely on beside the numbers: errors, lanes, slots, order and dropping.

mod common;

use std::time::{Duration, Instant};

use common::{eps, ranks};
use ep_runtime::{
    CombineOpts, Combined, DispatchOpts, Dispatched, Ep, EpBuilder, EpError, ErrorKind, Group, Ids,
    Layout, MoeShape, Payload, PayloadKind, Placement, Precision, Queue, Route, Rows, RowsMut,
    ScaleKind, combine_all, dispatch_all,
};

const HIDDEN: usize = 16;
const TOPK: usize = 2;
const EXPERTS: usize = 8;

fn shape() -> MoeShape {
    MoeShape::new(HIDDEN, TOPK, EXPERTS).max_tokens(16).payload(PayloadKind::F32).expert_major(4)
}

fn builder() -> EpBuilder {
    EpBuilder::new(shape()).timeout(Duration::from_secs(5))
}

/// `tokens` rows that all differ, and ids that spread over all experts.
struct Tokens {
    rows: Vec<f32>,
    ids: Vec<i32>,
}

impl Tokens {
    fn new(rank: usize, tokens: usize) -> Self {
        let row = |i: usize| (rank * 1000 + i) as f32;
        let id = |i: usize| ((i * 3 + rank) % EXPERTS) as i32;
        Self {
            rows: (0..tokens * HIDDEN).map(row).collect(),
            ids: (0..tokens).flat_map(|t| [id(t), (id(t) + 3) % EXPERTS as i32]).collect(),
        }
    }

    fn payload(&self) -> Payload<'_> {
        Payload::new(Rows::new(&self.rows, HIDDEN).unwrap()).unwrap()
    }

    fn route(&self) -> Route<'_> {
        Route::Topk { ids: Ids::I32(&self.ids), weights: None }
    }
}

fn opts(lane: usize) -> DispatchOpts {
    DispatchOpts { lane, ..DispatchOpts::default() }
}

fn dispatch(ep: &Ep, tokens: &Tokens, opts: &DispatchOpts) -> Result<Dispatched, EpError> {
    ep.dispatch(&Queue::host(), tokens.payload(), tokens.route(), opts)
}

/// Combines rows as they came: every token comes back once per rank it went to.
fn combine(result: Dispatched, opts: &CombineOpts) -> Result<Vec<f32>, EpError> {
    let mut out = vec![f32::NAN; result.handle().tokens() * HIDDEN];
    result.combine(&Queue::host(), RowsMut::new(&mut out, HIDDEN)?, opts)?;
    Ok(out)
}

/// The group still works: a whole round trip is right.
fn round_trip(ep: &Ep) {
    let tokens = Tokens::new(ep.rank(), 3);
    let result = dispatch(ep, &tokens, &opts(0)).expect("the group is usable");
    let handle = result.handle().clone();
    let out = combine(result, &CombineOpts::default()).expect("the group is usable");
    for t in 0..3 {
        let copies = (0..ep.world()).filter(|&r| went_to(ep, &tokens, t, r)).count();
        let sum = |x: f32| (1..copies).fold(x, |acc, _| acc + x);
        for h in 0..HIDDEN {
            assert_eq!(out[t * HIDDEN + h], sum(tokens.rows[t * HIDDEN + h]), "token {t}");
        }
    }
    drop(handle);
}

fn went_to(ep: &Ep, tokens: &Tokens, token: usize, rank: usize) -> bool {
    let per_rank = EXPERTS.div_ceil(ep.world());
    let owner = |id: i32| {
        let (base, extra) = (EXPERTS / ep.world(), EXPERTS % ep.world());
        let id = id as usize;
        if id < extra * (base + 1) { id / (base + 1) } else { (id - extra) / base }
    };
    assert!(per_rank > 0);
    tokens.ids[token * TOPK..][..TOPK].iter().any(|&id| owner(id) == rank)
}

#[track_caller]
fn assert_argument<T>(result: Result<T, EpError>, needle: &str) {
    match result {
        Ok(_) => panic!("expected an error with {needle:?}"),
        Err(e) => {
            assert_eq!(e.kind(), ErrorKind::Argument, "{e}");
            assert!(e.group_usable(), "{e}");
            assert!(e.to_string().contains(needle), "{e} does not say {needle:?}");
        }
    }
}

#[test]
fn the_plan_refuses_what_cannot_be_built() {
    let plan = |shape: MoeShape, world| EpBuilder::new(shape).plan(world);
    assert_argument(plan(MoeShape::new(64, 0, 8), 2), "top-k is 0");
    assert_argument(plan(MoeShape::new(64, 9, 8), 2), "top-k is 9");
    assert_argument(plan(MoeShape::new(64, 2, 3), 4), "3");
    assert_argument(plan(MoeShape::new(7, 2, 8), 2), "multiple of 16");
    assert_argument(plan(MoeShape::new(0, 2, 8), 2), "hidden");
    assert_argument(plan(MoeShape::new(64, 2, 8), 0), "at least one rank");
    assert_argument(plan(MoeShape::new(64, 2, 8).expert_major(0), 2), "alignment");
    assert_argument(plan(MoeShape::new(64, 2, 8).max_tokens(usize::MAX / 2), 2), "i32");
    assert_argument(EpBuilder::new(shape()).slots(0).plan(2), "slots");
    assert_argument(EpBuilder::new(shape()).lanes(65).plan(2), "lanes");
    let other = Placement::contiguous(6, 2).unwrap();
    assert_argument(plan(MoeShape::new(64, 2, 8).placement(other), 2), "placement");
}

#[test]
fn the_plan_is_what_the_window_takes() {
    let plan = builder().plan(3).unwrap();
    assert_eq!(plan.max_rows, 3 * 16);
    assert_eq!(plan.slots, 3);
    assert!(plan.window_bytes >= plan.slots * plan.slot_bytes + plan.staging_bytes);
    assert_eq!(plan.staging_bytes, 0);
    let larger = EpBuilder::new(shape()).slots(4).plan(3).unwrap();
    assert_eq!(larger.window_bytes - plan.window_bytes, plan.slot_bytes);
    let bulk = builder().transport(ep_runtime::ThreadTransport::new().bulk(true)).plan(3).unwrap();
    assert_eq!(bulk.window_bytes - plan.window_bytes, bulk.staging_bytes);
    assert!(bulk.staging_bytes > 0);
}

#[test]
fn bad_arguments_are_errors_before_anything_is_sent() {
    eps(2, &builder(), |ep| {
        let queue = Queue::host();
        let tokens = Tokens::new(ep.rank(), 4);
        let go = |payload, route, opts: &DispatchOpts| ep.dispatch(&queue, payload, route, opts);
        let short = Route::Topk { ids: Ids::I32(&tokens.ids[1..]), weights: None };
        assert_argument(go(tokens.payload(), short, &opts(0)), "7 expert ids");
        let weights = Some(&[1.0f32; 7][..]);
        let route = Route::Topk { ids: Ids::I32(&tokens.ids), weights };
        assert_argument(go(tokens.payload(), route, &opts(0)), "7 weights");
        assert_argument(go(tokens.payload(), tokens.route(), &opts(2)), "no lane 2");
        let many = Tokens::new(0, 17);
        assert_argument(go(many.payload(), many.route(), &opts(0)), "17 tokens");
        let aligned = DispatchOpts { layout: Layout::ExpertMajor { alignment: 8 }, ..opts(0) };
        assert_argument(go(tokens.payload(), tokens.route(), &aligned), "alignment 8");
        let zero = DispatchOpts { layout: Layout::ExpertMajor { alignment: 0 }, ..opts(0) };
        assert_argument(go(tokens.payload(), tokens.route(), &zero), "alignment 0");
        let narrow = [ep_runtime::bf16::ONE; 4 * HIDDEN];
        let bf16 = Payload::new(Rows::new(&narrow, HIDDEN).unwrap()).unwrap();
        assert_argument(go(bf16, tokens.route(), &opts(0)), "bf16");
        let wide = Payload::new(Rows::new(&tokens.rows, 2 * HIDDEN).unwrap()).unwrap();
        let half = Route::Topk { ids: Ids::I32(&tokens.ids[..4]), weights: None };
        assert_argument(go(wide, half, &opts(0)), "rows of 128 bytes");
        assert_argument(Rows::new(&tokens.rows, 5), "whole number");
        round_trip(&ep);
    });
}

#[test]
fn combine_refuses_bad_arguments() {
    let shape = shape()
        .payload(PayloadKind::Fp8 { scales: ScaleKind::F32 })
        .payload(PayloadKind::Opaque { row_bytes: 32, aux_bytes: 4 });
    eps(2, &EpBuilder::new(shape), |ep| {
        let tokens = Tokens::new(ep.rank(), 4);
        let take = || dispatch(&ep, &tokens, &opts(0)).unwrap();
        let queue = Queue::host();
        let mut short = [0.0f32; 3 * HIDDEN];
        let out = RowsMut::new(&mut short, HIDDEN).unwrap();
        assert_argument(take().combine(&queue, out, &CombineOpts::default()), "3 rows");
        let mut out = [0.0f32; 4 * HIDDEN];
        let weighted = CombineOpts { weighted: true, ..CombineOpts::default() };
        let into = RowsMut::new(&mut out, HIDDEN).unwrap();
        assert_argument(take().combine(&queue, into, &weighted), "rank-major");
        let mut halves = [ep_runtime::f16::ZERO; 4 * HIDDEN];
        let into = RowsMut::new(&mut halves, HIDDEN).unwrap();
        assert_argument(take().combine(&queue, into, &CombineOpts::default()), "F16");
        let bias = [Rows::new(&tokens.rows[..HIDDEN], HIDDEN).unwrap()];
        let into = Combined::new(RowsMut::new(&mut out, HIDDEN).unwrap()).biases(&bias);
        assert_argument(take().combine(&queue, into, &CombineOpts::default()), "a bias");
        let mut weights = [0.0f32; 3];
        let into = Combined::new(RowsMut::new(&mut out, HIDDEN).unwrap()).weights(&mut weights);
        assert_argument(take().combine(&queue, into, &CombineOpts::default()), "8 weights");
        let fp8 = PayloadKind::Fp8 { scales: ScaleKind::F32 };
        assert_argument(take().rows_mut(fp8), "cannot be combined");
        let opaque = PayloadKind::Opaque { row_bytes: 32, aux_bytes: 4 };
        assert_argument(take().rows_mut(opaque), "cannot be combined");
        assert_argument(take().rows_mut(PayloadKind::F16), "MoeShape::payload");
        let nothing = ep.combine_slot(take().handle(), &queue).unwrap();
        assert_argument(combine(nothing, &CombineOpts::default()), "rows_mut");
        assert_eq!(ep.free_slots(), 3);
        round_trip(&ep);
    });
}

/// Rows of bytes that came as they are cannot be summed.
#[test]
fn opaque_rows_cannot_be_combined() {
    let kind = PayloadKind::Opaque { row_bytes: 32, aux_bytes: 0 };
    eps(2, &EpBuilder::new(MoeShape::new(HIDDEN, TOPK, EXPERTS).payload(kind)), |ep| {
        let (rows, ids) = (vec![7u8; 64], [0, 5, 2, 7]);
        let payload = Payload::opaque(Rows::new(&rows, 32).unwrap(), None).unwrap();
        let route = Route::Topk { ids: Ids::U32(&ids), weights: None };
        let result = ep.dispatch(&Queue::host(), payload, route, &opts(0)).unwrap();
        assert_eq!(result.rows().payload().bytes(0), &rows[..32]);
        assert_argument(combine(result, &CombineOpts::default()), "cannot be combined");
    });
}

#[test]
fn bad_ids_are_the_same_error_on_every_rank() {
    let bad = [(9, "out of range"), (-2, "out of range"), (8, "out of range")];
    for (id, needle) in bad {
        eps(3, &builder(), |ep| {
            let mut tokens = Tokens::new(ep.rank(), 4);
            if ep.rank() > 0 {
                tokens.ids[5] = id;
            }
            let e = dispatch(&ep, &tokens, &opts(0)).unwrap_err();
            assert!(e.to_string().contains(needle), "{e}");
            assert_eq!((e.kind(), e.peer()), (ErrorKind::Mismatch, Some(1)), "{e}");
            assert!(
                matches!(e, EpError::Ids { rank: 1, token: 2, id: i, .. } if i == i64::from(id))
            );
            assert!(e.group_usable());
            assert_eq!(ep.free_slots(), 3);
            round_trip(&ep);
        });
    }
    eps(3, &builder(), |ep| {
        let mut tokens = Tokens::new(ep.rank(), 4);
        if ep.rank() == 2 {
            tokens.ids[6..8].copy_from_slice(&[4, 4]);
        }
        let e = dispatch(&ep, &tokens, &opts(0)).unwrap_err();
        assert!(e.to_string().contains("rank 2, token 3: expert id 4 occurs twice"), "{e}");
        round_trip(&ep);
    });
}

#[test]
fn too_many_rows_are_the_same_error_on_every_rank() {
    let tight = EpBuilder::new(shape().max_rows(8));
    eps(3, &tight, |ep| {
        let mut tokens = Tokens::new(ep.rank(), 5);
        tokens.ids = [0, 1].repeat(5);
        let e = dispatch(&ep, &tokens, &opts(0)).unwrap_err();
        match e {
            EpError::Capacity { rank, needed, reserved, setting, .. } => {
                assert_eq!((rank, needed, reserved, setting), (0, 15, 8, "max_rows"));
            }
            other => panic!("{other}"),
        }
        round_trip(&ep);
    });
    let tight = EpBuilder::new(shape().max_expert_rows(11));
    eps(2, &tight, |ep| {
        let mut tokens = Tokens::new(ep.rank(), 3);
        tokens.ids = [4, 5].repeat(3);
        let layout = Layout::ExpertMajor { alignment: 4 };
        let e = dispatch(&ep, &tokens, &DispatchOpts { layout, ..opts(0) }).unwrap_err();
        assert!(matches!(e, EpError::Capacity { rank: 1, needed: 16, reserved: 11, .. }), "{e}");
        assert!(e.to_string().contains("max_expert_rows"), "{e}");
        round_trip(&ep);
    });
}

#[test]
fn different_operations_are_the_same_error_on_every_rank() {
    eps(3, &builder(), |ep| {
        let tokens = Tokens::new(ep.rank(), 2);
        let held = dispatch(&ep, &tokens, &opts(0)).unwrap();
        // Rank 1 dispatches where the others combine.
        let e = if ep.rank() == 1 {
            dispatch(&ep, &tokens, &opts(0)).unwrap_err()
        } else {
            combine(held, &CombineOpts::default()).unwrap_err()
        };
        assert!(matches!(e, EpError::Disagreement { .. }), "{e}");
        assert_eq!((e.peer(), e.group_usable()), (Some(1), true));
        assert!(e.to_string().contains("rank 0: combine; rank 1: dispatch"), "{e}");
        round_trip(&ep);
        // Rank 2 wants another layout.
        let alignment = if ep.rank() == 2 { 2 } else { 1 };
        let layout = Layout::ExpertMajor { alignment };
        let e = dispatch(&ep, &tokens, &DispatchOpts { layout, ..opts(0) }).unwrap_err();
        assert!(matches!(&e, EpError::Disagreement { field, .. } if field == "layout"), "{e}");
        round_trip(&ep);
        // Handles of different dispatches.
        let first = dispatch(&ep, &tokens, &opts(0)).unwrap().handle().clone();
        let second = dispatch(&ep, &tokens, &opts(0)).unwrap().handle().clone();
        let mine = if ep.rank() == 0 { &first } else { &second };
        let queue = Queue::host();
        let e = ep.dispatch(&queue, tokens.payload(), Route::Cached(mine), &opts(0)).unwrap_err();
        assert!(matches!(&e, EpError::Disagreement { field, .. } if field == "handle"), "{e}");
        round_trip(&ep);
    });
}

#[test]
fn another_order_of_lanes_is_an_error_that_says_so() {
    let builder = builder().timeout(Duration::from_millis(300));
    eps(2, &builder, |ep| {
        let tokens = Tokens::new(ep.rank(), 2);
        let began = Instant::now();
        let e = dispatch(&ep, &tokens, &opts(ep.rank())).unwrap_err();
        assert!(began.elapsed() < Duration::from_millis(1500), "{:?}", began.elapsed());
        assert!(!e.group_usable(), "{e}");
        assert!(e.to_string().contains("same order"), "{e}");
    });
}

#[test]
fn ranks_built_differently_are_named_on_every_rank() {
    let errors = ranks(3, |group| {
        let slots = if group.rank() == 2 { 4 } else { 3 };
        let hidden = if group.rank() == 1 { 32 } else { 8 };
        (
            builder().slots(slots).build(&group).unwrap_err(),
            EpBuilder::new(MoeShape::new(hidden, 2, 8)).build(&group).unwrap_err(),
        )
    });
    for (slots, hidden) in errors {
        assert!(slots.to_string().contains("`slots`: rank 0 has 3; rank 2 has 4"), "{slots}");
        assert!(hidden.to_string().contains("`hidden`: rank 0 has 8; rank 1 has 32"), "{hidden}");
        assert!(slots.group_usable() && hidden.group_usable());
    }
}

#[test]
fn handles_and_slots_of_others_are_refused() {
    ranks(2, |group| {
        let one = builder().build(&group).unwrap();
        let two = builder().build(&group).unwrap();
        let tokens = Tokens::new(group.rank(), 2);
        let handle = dispatch(&one, &tokens, &opts(0)).unwrap().handle().clone();
        let queue = Queue::host();
        let cached = Route::Cached(&handle);
        assert_argument(two.dispatch(&queue, tokens.payload(), cached, &opts(0)), "another group");
        assert_argument(two.combine_slot(&handle, &queue), "another group");
        let more = Tokens::new(group.rank(), 3);
        assert_argument(one.dispatch(&queue, more.payload(), cached, &opts(0)), "2 tokens");
        round_trip(&one);
        round_trip(&two);
    });
}

#[test]
fn three_results_and_two_pending_sends_are_alive_at_once() {
    eps(2, &builder().slots(5), |ep| {
        let tokens = Tokens::new(ep.rank(), 6);
        let held: Vec<_> = (0..3).map(|_| dispatch(&ep, &tokens, &opts(0)).unwrap()).collect();
        let queue = Queue::host();
        let send = |lane| ep.dispatch_send(&queue, tokens.payload(), tokens.route(), &opts(lane));
        let (first, second) = (send(0).unwrap(), send(1).unwrap());
        assert_eq!(ep.free_slots(), 0);
        let e = send(0).unwrap_err();
        assert!(matches!(e, EpError::LaneBusy { lane: 0, .. }) && e.group_usable(), "{e}");
        let second = second.recv(&queue).unwrap();
        let e = send(1).unwrap_err();
        assert!(matches!(e, EpError::NoFreeSlot { slots: 5, .. }) && e.group_usable(), "{e}");
        let first = first.recv(&queue).unwrap();
        let expected = held[0].rows().payload().iter::<f32>().collect::<Vec<_>>();
        for result in held.iter().chain([&first, &second]) {
            let rows = result.rows().payload();
            assert_eq!(rows.iter::<f32>().collect::<Vec<_>>(), expected);
        }
        // Combines of two lanes in flight together.
        let first = first.combine_send(&queue, &CombineOpts::default()).unwrap();
        let other = CombineOpts { lane: Some(1), ..CombineOpts::default() };
        let second = second.combine_send(&queue, &other).unwrap();
        let mut sums = [vec![0.0f32; 6 * HIDDEN], vec![0.0f32; 6 * HIDDEN]];
        let [a, b] = &mut sums;
        second.recv(&queue, RowsMut::new(b, HIDDEN).unwrap()).unwrap();
        first.recv(&queue, RowsMut::new(a, HIDDEN).unwrap()).unwrap();
        assert_eq!(sums[0], sums[1]);
        drop(held);
        assert_eq!(ep.free_slots(), 5);
        round_trip(&ep);
    });
}

#[test]
fn dropped_halves_leave_the_group_usable() {
    for bulk in [false, true] {
        let builder = builder().transport(ep_runtime::ThreadTransport::new().bulk(bulk));
        eps(3, &builder, |ep| {
            let tokens = Tokens::new(ep.rank(), 6);
            let queue = Queue::host();
            for round in 0..20 {
                let sent = ep.dispatch_send(&queue, tokens.payload(), tokens.route(), &opts(0));
                // Ranks drop different things at different times.
                if (round + ep.rank()) % 3 == 0 {
                    drop(sent.unwrap());
                } else {
                    sent.unwrap().recv(&queue).unwrap();
                }
                let result = dispatch(&ep, &tokens, &opts(0)).unwrap();
                let send = result.combine_send(&queue, &CombineOpts::default()).unwrap();
                if (round + ep.rank()) % 3 == 1 {
                    drop(send);
                } else {
                    let mut out = vec![0.0f32; 6 * HIDDEN];
                    send.recv(&queue, RowsMut::new(&mut out, HIDDEN).unwrap()).unwrap();
                }
                round_trip(&ep);
            }
            assert_eq!(ep.free_slots(), 3);
        });
    }
}

#[test]
fn results_outlive_what_they_came_from() {
    let held = ranks(2, |group| {
        let ep = builder().build(&group).unwrap();
        let tokens = Tokens::new(group.rank(), 2);
        let sent = ep.dispatch_send(&Queue::host(), tokens.payload(), tokens.route(), &opts(0));
        drop((ep, group));
        sent.unwrap().recv(&Queue::host()).unwrap()
    });
    for result in &held {
        assert!(result.rows().payload().iter::<f32>().all(|row| row[1] == row[0] + 1.0));
    }
    // Forgotten results only leak.
    held.into_iter().for_each(std::mem::forget);
}

#[test]
fn a_rank_that_stops_is_named_by_the_others() {
    let builder = builder().timeout(Duration::from_millis(200));
    let errors = eps(3, &builder, |ep| {
        let tokens = Tokens::new(ep.rank(), 2);
        if ep.rank() == 1 {
            std::thread::sleep(Duration::from_millis(600));
            return None;
        }
        let began = Instant::now();
        let e = dispatch(&ep, &tokens, &opts(0)).unwrap_err();
        assert!(began.elapsed() < Duration::from_millis(1200));
        let again = dispatch(&ep, &tokens, &opts(0)).unwrap_err();
        assert!(!again.group_usable(), "a poisoned group refuses at once: {again}");
        Some(e)
    });
    for e in errors.into_iter().flatten() {
        assert_eq!(e.peer(), Some(1), "{e}");
        assert!(!e.group_usable(), "{e}");
    }
}

#[test]
fn a_rank_that_leaves_or_aborts_is_named_at_once() {
    let began = Instant::now();
    let errors = eps(3, &builder().timeout(Duration::from_secs(60)), |ep| {
        let tokens = Tokens::new(ep.rank(), 2);
        (ep.rank() != 1).then(|| dispatch(&ep, &tokens, &opts(0)).unwrap_err())
    });
    for e in errors.into_iter().flatten() {
        assert_eq!(e.peer(), Some(1), "{e}");
    }
    let errors = eps(3, &builder().timeout(Duration::from_secs(60)), |ep| {
        let tokens = Tokens::new(ep.rank(), 2);
        if ep.rank() == 2 {
            std::thread::sleep(Duration::from_millis(50));
            ep.group().abort("out of memory in the experts");
        }
        dispatch(&ep, &tokens, &opts(0)).unwrap_err()
    });
    for e in errors {
        assert_eq!((e.kind(), e.peer()), (ErrorKind::Aborted, Some(2)), "{e}");
        assert!(e.to_string().contains("out of memory in the experts"), "{e}");
    }
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn one_thread_drives_several_ranks() {
    for bulk in [false, true] {
        let builder = builder().transport(ep_runtime::ThreadTransport::new().bulk(bulk));
        let all: Vec<Ep> = eps(4, &builder, |ep| ep);
        let tokens: Vec<Tokens> = (0..4).map(|r| Tokens::new(r, r)).collect();
        let queue = Queue::host();
        let calls: Vec<_> =
            all.iter().zip(&tokens).map(|(ep, t)| (ep, t.payload(), t.route())).collect();
        for _ in 0..3 {
            let results = dispatch_all(&queue, &calls, &opts(1)).unwrap();
            let mut outs: Vec<Vec<f32>> = (0..4).map(|r| vec![f32::NAN; r * HIDDEN]).collect();
            let into = outs.iter_mut().map(|o| Combined::new(RowsMut::new(o, HIDDEN).unwrap()));
            let combines = results.into_iter().zip(into).collect();
            combine_all(&queue, combines, &CombineOpts::default()).unwrap();
            for (rank, out) in outs.iter().enumerate() {
                for t in 0..rank {
                    let copies = (0..4).filter(|&r| went_to(&all[0], &tokens[rank], t, r)).count();
                    let x = tokens[rank].rows[t * HIDDEN];
                    assert_eq!(out[t * HIDDEN], (1..copies).fold(x, |acc, _| acc + x));
                }
            }
        }
        // A bad id of one is everyone's error, and all can go on.
        let mut bad = Tokens::new(3, 3);
        bad.ids[0] = 77;
        let mut broken = calls.clone();
        broken[3] = (&all[3], bad.payload(), bad.route());
        let e = dispatch_all(&queue, &broken, &opts(1)).unwrap_err();
        assert!(matches!(e, EpError::Ids { rank: 3, token: 0, id: 77, .. }), "{e}");
        dispatch_all(&queue, &calls, &opts(1)).unwrap();
        assert!(all.iter().all(|ep| ep.free_slots() == 3));
    }
}

#[test]
fn lanes_run_in_threads_of_one_rank() {
    eps(2, &builder().slots(4), |ep| {
        std::thread::scope(|scope| {
            for lane in 0..2 {
                let ep = &ep;
                scope.spawn(move || {
                    let tokens = Tokens::new(ep.rank(), 5);
                    let precision = Precision::Reduced;
                    let layout = Layout::ExpertMajor { alignment: 4 };
                    let mut last = None;
                    for _ in 0..200 {
                        let dispatch_opts = DispatchOpts { layout, ..opts(lane) };
                        let result = dispatch(ep, &tokens, &dispatch_opts).unwrap();
                        let opts = CombineOpts { precision, ..CombineOpts::default() };
                        let out = combine(result, &opts).unwrap();
                        assert!(last.as_ref().is_none_or(|l| l == &out));
                        last = Some(out);
                    }
                });
            }
        });
    });
}

#[test]
fn a_split_group_works_beside_its_parent() {
    ranks(4, |group: Group| {
        let half = group.split((group.rank() % 2) as u32, -(group.rank() as i64)).unwrap();
        assert_eq!(half.world(), 2);
        let whole = builder().build(&group).unwrap();
        let part = builder().build(&half).unwrap();
        for _ in 0..3 {
            round_trip(&part);
            round_trip(&whole);
        }
    });
}

/// Which slot a rank receives into is its own choice; peers learn of it from its announcement.
#[test]
fn ranks_receive_into_different_slots() {
    for bulk in [false, true] {
        let builder = builder().transport(ep_runtime::ThreadTransport::new().bulk(bulk));
        eps(3, &builder, |ep| {
            let tokens = Tokens::new(ep.rank(), 6);
            let handle = dispatch(&ep, &tokens, &opts(0)).unwrap().handle().clone();
            let taken: Vec<_> =
                (0..ep.rank()).map(|_| ep.combine_slot(&handle, &Queue::host()).unwrap()).collect();
            let layout = Layout::ExpertMajor { alignment: 4 };
            for opts in [opts(0), DispatchOpts { layout, ..opts(1) }] {
                for precision in [Precision::Exact, Precision::Reduced] {
                    let result = dispatch(&ep, &tokens, &opts).unwrap();
                    let sources: Vec<_> =
                        (0..result.num_rows()).filter_map(|i| result.rows().source(i)).collect();
                    assert!(sources.is_sorted_by_key(|s| s.rank) || opts.layout == layout);
                    let combine_opts = CombineOpts { precision, ..CombineOpts::default() };
                    let out = combine(result, &combine_opts).unwrap();
                    for t in 0..6 {
                        let copies = match opts.layout == layout {
                            true => TOPK,
                            false => (0..3).filter(|&r| went_to(&ep, &tokens, t, r)).count(),
                        };
                        let x = tokens.rows[t * HIDDEN + 1];
                        let sum = (1..copies).fold(x, |acc, _| acc + x);
                        assert_eq!(out[t * HIDDEN + 1], sum, "token {t}");
                    }
                }
            }
            drop(taken);
        });
    }
}
