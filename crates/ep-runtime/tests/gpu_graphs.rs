//! Graphs of dispatches and combines. Without a GPU each test says so and passes.
#![cfg(feature = "cuda")]

mod common;

use common::gpu_replays::{Work, cached_dispatches_are_captured, replays_equal_eager_calls};
use common::gpu_small::{Graph, LIMIT, gpus, small};
use common::small::{Tokens, assert_argument, builder, opts};

#[test]
fn replays_are_eager_calls_again() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 2, &builder().slots(4), |rank| {
        replays_equal_eager_calls(&rank, &Work::plain(), 100);
    });
}

#[test]
fn handles_are_used_in_graphs() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 2, &builder().slots(3), |rank| {
        cached_dispatches_are_captured(&rank, &Work::plain(), 100);
    });
}

/// The error leaves the capture as it was: what else was captured still runs.
#[test]
fn what_needs_the_host_is_refused_under_capture() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 2, &builder(), |rank| {
        let (stream, staging) = (rank.gpu.stream(), rank.gpu.place(None, 1 << 20));
        let tokens = Tokens::new(rank.ep.rank(), 4);
        rank.load(&tokens);
        let graph = Graph::capture(stream, || {
            assert_argument(rank.dispatch(4, &opts(0)), "capacity");
            Work::plain().submit(&rank, rank.route(4), 4, staging);
        });
        graph.launch(stream);
        stream.wait("a replay", LIMIT).unwrap();
        rank.check(&tokens);
        rank.round_trip();
    });
}

/// What was captured may read its rows, so no later call gets its slot, and none stumbles over it.
#[test]
fn a_result_dropped_during_a_capture_stays_with_graphs() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 2, &builder().slots(3), |rank| {
        rank.load(&Tokens::new(rank.ep.rank(), 4));
        let held = rank.dispatch(4, &opts(0)).unwrap();
        let graph = Graph::capture(rank.gpu.stream(), || drop(held));
        (0..6).for_each(|_| rank.round_trip());
        assert_eq!(rank.ep.free_slots(), 2);
        drop(graph);
    });
}
