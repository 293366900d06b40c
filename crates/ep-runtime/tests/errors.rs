//! Bad input: an error each, before payload moves, the same on every rank where all are concerned,
//! and the group goes on.

mod common;

use std::time::{Duration, Instant};

use common::small::{
    EXPERTS, HIDDEN, PROMPT, TOPK, Tokens, assert_argument, builder, combine, dispatch, opts,
    round_trip, shape,
};
use common::{eps, in_one_of_some_tries, ranks};
use ep_runtime::{
    CombineOpts, Combined, DispatchOpts, Ep, EpBuilder, EpError, ErrorKind, Ids, Layout, MoeShape,
    Payload, PayloadKind, Placement, Queue, Route, Rows, RowsMut, ScaleKind,
};

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
    let on_a_lane_of_its_own = |ep: Ep| {
        let tokens = Tokens::new(ep.rank(), 2);
        ep.group().barrier().unwrap();
        let began = Instant::now();
        let e = dispatch(&ep, &tokens, &opts(ep.rank())).unwrap_err();
        assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
        assert!(!e.group_usable(), "{e}");
        if e.to_string().contains("same order") { Ok(()) } else { Err(e.to_string()) }
    };
    in_one_of_some_tries(|| eps(2, &builder, on_a_lane_of_its_own).into_iter().collect());
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

/// The last row that fits fits, and one more does not.
#[test]
fn capacity_is_exact() {
    let layout = Layout::ExpertMajor { alignment: 4 };
    for (rows, expert_rows) in [(15, 32), (14, 32), (15, 31)] {
        let tight = EpBuilder::new(shape().max_rows(rows).max_expert_rows(expert_rows));
        eps(3, &tight, |ep| {
            let mut tokens = Tokens::new(ep.rank(), 5);
            tokens.ids = [0, 1].repeat(5);
            let got = dispatch(&ep, &tokens, &DispatchOpts { layout, ..opts(0) });
            match got {
                Ok(result) => {
                    assert_eq!((rows, expert_rows), (15, 32));
                    assert_eq!(result.num_rows(), if ep.rank() == 0 { 32 } else { 0 });
                }
                Err(EpError::Capacity { rank: 0, needed, reserved, .. }) => {
                    assert_eq!(needed, reserved + 1);
                }
                Err(other) => panic!("{other}"),
            }
        });
    }
}
