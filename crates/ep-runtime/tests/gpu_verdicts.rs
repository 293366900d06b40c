//! Verdicts on GPUs that the host learns later than the operation: none is lost, and none is another's.
//! Without a GPU each test says so and passes.
#![cfg(feature = "cuda")]

mod common;

use std::time::Duration;

use common::gpu_small::{LIMIT, Rank, capacity, gpus, plain, small};
use common::small::{EXPERTS, Tokens, builder, opts, shape};
use ep_runtime::{CombineOpts, DispatchOpts, EpBuilder, EpError, Event, Handle, Layout, Route};

/// Rank-major rows that a rank has room for.
const ROOM: usize = 8;

fn narrow() -> EpBuilder {
    EpBuilder::new(shape().max_rows(ROOM)).timeout(Duration::from_secs(20))
}

/// A dispatch of `count` tokens per rank, all to rank 0, and its combine.
fn crowd(rank: &Rank<'_>, count: usize, opts: &DispatchOpts) -> (Handle, Event) {
    let mut tokens = Tokens::new(rank.ep.rank(), count);
    tokens.ids = [0, 1].repeat(count);
    rank.load(&tokens);
    let result = rank.dispatch(count, opts).unwrap();
    let handle = result.handle().clone();
    let event = rank.combine(result, &plain()).unwrap();
    // What was loaded may be written again.
    rank.gpu.stream().wait("a dispatch", LIMIT).unwrap();
    (handle, event)
}

#[track_caller]
fn assert_crowded(result: Result<(), EpError>, count: usize) {
    match result.unwrap_err() {
        EpError::Capacity { op: "dispatch", rank: 0, needed, reserved: ROOM, .. } => {
            assert_eq!(needed, 2 * count);
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_refusal_is_told_however_late() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 2, &narrow(), |rank| {
        let good = crowd(&rank, 3, &capacity());
        let refused: Vec<_> = (5..7).map(|n| (n, crowd(&rank, n, &capacity()))).collect();
        let (_, later) = crowd(&rank, 4, &capacity());
        // More operations than the lane has reports.
        (0..150).for_each(|_| rank.round_trip());
        good.1.wait(LIMIT).unwrap();
        later.wait(LIMIT).unwrap();
        let rows = if rank.ep.rank() == 0 { 6 } else { 0 };
        assert_eq!(good.0.num_rows(), rows);
        for (count, (handle, event)) in &refused {
            assert_crowded(event.wait(LIMIT), *count);
            assert_crowded(handle.verdict(), *count);
            assert_eq!((handle.num_rows(), handle.rows_from(1)), (0, 0));
            assert_eq!(handle.offsets(), vec![0; EXPERTS / 2 + 1]);
        }
        good.0.verdict().unwrap();
    });
}

#[test]
fn rows_that_were_refused_are_not_copied() {
    let Some(gpus) = gpus() else { return };
    for layout in [Layout::RankMajor, Layout::ExpertMajor { alignment: 4 }] {
        small(&gpus, 2, &narrow(), |rank| {
            let (queue, opts) = (rank.queue(), DispatchOpts { layout, ..capacity() });
            rank.load(&Tokens::new(rank.ep.rank(), 3));
            let result = rank.dispatch(3, &opts).unwrap();
            result.verdict().unwrap();
            assert_eq!(result.to_host(&queue).unwrap().rows().len(), result.rows().len());
            let handle = result.handle().clone();
            drop(result.into_owned(&queue).unwrap());
            let mut tokens = Tokens::new(rank.ep.rank(), 5);
            tokens.ids = [0, 1].repeat(5);
            rank.load(&tokens);
            let result = rank.dispatch(5, &opts).unwrap();
            assert_crowded(result.to_host(&queue).map(drop), 5);
            assert_crowded(result.verdict(), 5);
            let bad = result.handle().clone();
            assert_crowded(result.into_owned(&queue).map(drop), 5);
            // What follows from a refused dispatch says so as well.
            let again =
                rank.ep.dispatch(&queue, rank.payload(5), Route::Cached(&bad), &opts).unwrap();
            let e = again.to_host(&queue).unwrap_err();
            assert!(e.to_string().contains("handle was refused"), "{e}");
            let e = rank.combine(again, &plain()).unwrap().wait(LIMIT).unwrap_err();
            assert!(e.to_string().contains("handle was refused"), "{e}");
            let again = rank.ep.dispatch(&queue, rank.payload(3), Route::Cached(&handle), &opts);
            again.unwrap().to_host(&queue).unwrap();
            rank.round_trip();
        });
    }
}

/// The combine that follows would be good by itself.
#[test]
fn a_combine_tells_that_its_dispatch_was_refused() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 2, &builder().slots(3), |rank| {
        let (queue, me) = (rank.queue(), rank.ep.rank());
        rank.load(&Tokens::new(me, 4));
        let handle = rank.dispatch(4, &opts(0)).unwrap().handle().clone();
        for lane in [None, Some(1)] {
            let opts = DispatchOpts { capacity: me == 0, ..opts(0) };
            let cached = Route::Cached(&handle);
            let result = rank.ep.dispatch(&queue, rank.payload(4), cached, &opts).unwrap();
            let home = CombineOpts { lane, ..plain() };
            let event = rank.combine(result, &home).unwrap();
            for _ in 0..2 {
                let e = event.wait(LIMIT).unwrap_err();
                assert!(matches!(e, EpError::Disagreement { op: "dispatch", .. }), "{e}");
            }
            rank.round_trip();
        }
    });
}

/// Halves that are dropped report nothing.
#[test]
fn dropped_combines_hide_no_verdict() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 2, &narrow(), |rank| {
        let queue = rank.queue();
        let refused = crowd(&rank, 5, &capacity());
        for _ in 0..40 {
            rank.load(&Tokens::new(rank.ep.rank(), 3));
            let result = rank.dispatch(3, &capacity()).unwrap();
            drop(result.combine_send(&queue, &plain()).unwrap());
            // No slot for them: nothing is submitted.
            let held = [(); 2].map(|()| rank.ep.combine_slot(&refused.0, &queue));
            drop(held);
        }
        let good = crowd(&rank, 3, &capacity());
        (0..300).for_each(|_| drop(crowd(&rank, 1, &capacity())));
        assert_crowded(refused.1.wait(LIMIT), 5);
        good.1.wait(LIMIT).unwrap();
        good.0.verdict().unwrap();
    });
}

/// Rank 1 comes only once rank 0 has looked at the rows and did not find it.
#[test]
fn rows_of_capacity_mode_wait_for_nobody_and_the_late_are_named() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 2, &narrow(), |rank| {
        let (me, queue) = (rank.ep.rank(), rank.queue());
        let tokens = Tokens::new(me, 4);
        rank.load(&tokens);
        if me == 1 {
            rank.ep.group().barrier().unwrap();
        }
        let send = rank.ep.dispatch_send(&queue, rank.payload(4), rank.route(4), &capacity());
        let result = send.unwrap().recv(&queue).unwrap();
        assert_eq!(result.rows().len(), ROOM);
        if me == 0 {
            let release = result.release(&queue);
            let e = release.wait(Duration::from_millis(300)).unwrap_err();
            assert_eq!(e.peer(), Some(1), "{e}");
            rank.ep.group().barrier().unwrap();
            release.wait(LIMIT).unwrap();
        } else {
            result.release(&queue).wait(LIMIT).unwrap();
        }
        rank.round_trip();
    });
}
