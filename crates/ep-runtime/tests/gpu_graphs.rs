//! Graphs of dispatches and combines. Without a GPU each test says so and passes.
#![cfg(feature = "cuda")]

mod common;

use common::gpu_small::{Graph, LIMIT, capacity, gpus, plain, small, work};
use common::small::{Tokens, assert_argument, builder, opts};
use ep_runtime::Route;

#[test]
fn replays_equal_eager_calls() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 2, &builder().slots(4), |rank| {
        let (me, stream, staging) =
            (rank.ep.rank(), rank.gpu.stream(), rank.gpu.place(None, 1 << 20));
        let first = Tokens::new(me, 7 + me);
        let count = 7 + me;
        rank.load(&first);
        work(&rank, rank.route(count), count, staging).wait(LIMIT).unwrap();
        rank.check(&first);
        let mut events = Vec::new();
        let one = Graph::capture(stream, || {
            events.push(work(&rank, rank.route(count), count, staging));
        });
        let two = Graph::capture(stream, || {
            events.push(work(&rank, rank.route(count), count, staging));
            events.push(work(&rank, rank.route(count), count, staging));
        });
        for event in &events {
            assert!(!event.ready());
            assert_argument(event.wait(LIMIT), "captured");
        }
        for i in 0..100 {
            let tokens = Tokens::new(me + i * 7, count);
            rank.load(&tokens);
            // Two operations each, in other graphs or eager on each rank.
            match (i + me) % 3 {
                0 => two.launch(stream),
                1 => {
                    one.launch(stream);
                    one.launch(stream);
                }
                _ => {
                    work(&rank, rank.route(count), count, staging).wait(LIMIT).unwrap();
                    one.launch(stream);
                }
            }
            stream.wait("a replay", LIMIT).unwrap();
            rank.check(&tokens);
        }
        rank.round_trip();
    });
}

#[test]
fn cached_dispatches_are_captured() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 2, &builder().slots(3), |rank| {
        let (me, stream, staging) =
            (rank.ep.rank(), rank.gpu.stream(), rank.gpu.place(None, 1 << 20));
        let mut tokens = Tokens::new(me, 9);
        rank.load(&tokens);
        let result = rank.dispatch(9, &capacity()).unwrap();
        let handle = result.handle().clone();
        rank.combine(result, &plain()).unwrap().wait(LIMIT).unwrap();
        let graph =
            Graph::capture(stream, || drop(work(&rank, Route::Cached(&handle), 9, staging)));
        for i in 0..100 {
            tokens.rows.iter_mut().for_each(|x| *x += i as f32);
            rank.load(&tokens);
            graph.launch(stream);
            stream.wait("a replay", LIMIT).unwrap();
            rank.check(&tokens);
        }
        rank.round_trip();
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
            work(&rank, rank.route(4), 4, staging);
        });
        graph.launch(stream);
        stream.wait("a replay", LIMIT).unwrap();
        rank.check(&tokens);
        rank.round_trip();
    });
}
