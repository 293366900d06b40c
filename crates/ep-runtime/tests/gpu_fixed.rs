//! Ranks on GPUs that do not map each other's windows, in blocks of fixed size: the host waits for nothing
//! in capacity mode, so that all of it goes into graphs. Without a GPU each test says so and passes.
#![cfg(feature = "cuda")]

mod common;

use std::sync::atomic::AtomicUsize;
use std::time::Duration;

#[cfg(feature = "nccl")]
use common::eps_of;
use common::exercise::{Blocks, How, check_in};
use common::gpu::Gpus;
use common::gpu_apart::{ALONE, Apart, RANKS, TOGETHER, apart, random};
use common::gpu_replays::{Work, cached_dispatches_are_captured, replays_equal_eager_calls};
use common::gpu_small::{Graph, LIMIT, Rank, STOPS, capacity, gpus, plain};
use common::ground::Grounds;
use common::ranks;
use common::small::{EXPERTS, Tokens, assert_argument, builder, opts, shape};
use ep_bench::oracle::Job;
use ep_runtime::{
    CombineOpts, DispatchOpts, EpBuilder, EpError, ErrorKind, Hierarchy, Layout, NvlinkTransport,
    Place, Precision, Route, combine_all, dispatch_all,
};

const TIMEOUT: Duration = Duration::from_secs(20);

fn fixed() -> EpBuilder {
    EpBuilder::new(shape().fixed_blocks()).slots(4)
}

/// Every way that rows go and come home.
fn works() -> [Work; 3] {
    let experts = DispatchOpts { layout: Layout::ExpertMajor { alignment: 4 }, ..capacity() };
    let reduced = CombineOpts { precision: Precision::Reduced, ..plain() };
    [
        Work::plain(),
        Work { dispatch: experts, combine: plain() },
        Work { dispatch: experts, combine: reduced },
    ]
}

/// Mostly in capacity mode; where blocks have a fixed size other dispatches move what there is.
fn check(job: &Job, seed: u64, grounds: &dyn Grounds) {
    let blocks = if seed.is_multiple_of(2) { Blocks::Whole } else { Blocks::Tight };
    let how = How { capacity: !seed.is_multiple_of(5), ..How::of(seed) };
    check_in(blocks, job, how, seed, grounds);
}

#[test]
fn blocks_of_fixed_size_equal_the_oracle() {
    let Some(gpus) = Gpus::new(RANKS, 128 << 20) else { return };
    random(60, |seed, job| {
        let node = [ALONE, TOGETHER[0], TOGETHER[1], TOGETHER[2]][seed as usize % 4];
        check(job, seed, &Apart { gpus: &gpus, node });
    });
}

#[test]
fn replays_are_eager_calls_again() {
    let Some(gpus) = gpus() else { return };
    for (world, work) in [2, 2, 3].into_iter().zip(works()) {
        apart(&gpus, world, (&fixed(), TIMEOUT), |rank| {
            replays_equal_eager_calls(&rank, &work, 24);
        });
    }
}

#[test]
fn handles_are_used_in_graphs() {
    let Some(gpus) = gpus() else { return };
    for work in works() {
        apart(&gpus, 2, (&fixed(), TIMEOUT), |rank| {
            cached_dispatches_are_captured(&rank, &work, 12);
        });
    }
}

/// Sizes in exact mode are the host's to learn, whatever blocks there are.
#[test]
fn rows_of_exact_mode_are_not_captured() {
    let Some(gpus) = gpus() else { return };
    apart(&gpus, 2, (&fixed(), TIMEOUT), |rank| {
        let stream = rank.gpu.stream();
        let tokens = Tokens::new(rank.ep.rank(), 4);
        rank.load(&tokens);
        let result = rank.dispatch(4, &opts(0)).unwrap();
        let handle = result.handle().clone();
        let (mut result, mut refused) = (Some(result), None);
        let graph = Graph::capture(stream, || {
            assert_argument(rank.dispatch(4, &opts(0)), "capacity");
            let (queue, payload) = (rank.queue(), rank.payload(4));
            let cached = rank.ep.dispatch(&queue, payload, Route::Cached(&handle), &capacity());
            assert_argument(cached, "fixed size");
            // It holds the result, whose slot is no graph's.
            refused = rank.combine(result.take().unwrap(), &plain()).err();
            Work::plain().submit(&rank, rank.route(4), 4, rank.gpu.place(None, 1 << 20));
        });
        assert_argument(refused.map_or(Ok(()), Err), "fixed size");
        graph.launch(stream);
        stream.wait("a replay", LIMIT).unwrap();
        rank.check(&tokens);
        rank.round_trip();
    });
}

/// All ranks' tokens for the experts of rank 0.
fn crowd(rank: &Rank<'_>, count: usize) -> Tokens {
    let mut tokens = Tokens::new(rank.ep.rank(), count);
    tokens.ids = [0, 1].repeat(count);
    rank.load(&tokens);
    tokens
}

#[test]
fn blocks_that_are_too_small_are_refused_everywhere() {
    let Some(gpus) = gpus() else { return };
    let experts = Layout::ExpertMajor { alignment: 4 };
    for (shape, layout) in [
        (shape().fixed_blocks().max_block_rows(4), Layout::RankMajor),
        (shape().fixed_blocks().max_block_rows(4), experts),
        (shape().fixed_blocks().max_block_expert_rows(8), experts),
    ] {
        apart(&gpus, 3, (&EpBuilder::new(shape), TIMEOUT), |rank| {
            let opts_of = |capacity| DispatchOpts { layout, capacity, ..opts(0) };
            let work = Work { dispatch: opts_of(true), combine: plain() };
            for round in 0..3 {
                crowd(&rank, 5);
                let result = rank.dispatch(5, &opts_of(true)).unwrap();
                assert_eq!(result.handle().num_rows(), 0, "round {round}");
                let e = rank.combine(result, &plain()).unwrap().wait(LIMIT).unwrap_err();
                assert_eq!((e.kind(), e.group_usable()), (ErrorKind::Mismatch, true), "{e}");
                // As many as blocks hold, and in exact mode any number.
                let staging = rank.gpu.place(None, 64 << 10);
                let tokens = crowd(&rank, 4);
                let done = work.submit(&rank, rank.route(4), 4, staging);
                done.wait(LIMIT).unwrap();
                work.check(&rank, &tokens);
                let tokens = crowd(&rank, 5);
                let work = Work { dispatch: opts_of(false), ..work };
                work.submit(&rank, rank.route(5), 5, staging).wait(LIMIT).unwrap();
                work.check(&rank, &tokens);
            }
        });
    }
}

/// A graph in which nothing moves in some replays, and everything in the next.
#[test]
fn replays_that_are_refused_leave_the_others_right() {
    let Some(gpus) = gpus() else { return };
    let narrow = EpBuilder::new(shape().fixed_blocks().max_block_rows(4));
    apart(&gpus, 2, (&narrow, TIMEOUT), |rank| {
        let (stream, staging) = (rank.gpu.stream(), rank.gpu.place(None, 1 << 20));
        let submit = || Work::plain().submit(&rank, rank.route(6), 6, staging);
        let graph = Graph::capture(stream, || drop(submit()));
        for i in 0..12 {
            let mut tokens = crowd(&rank, 6);
            let good = i % 3 != 1;
            if good {
                let few = tokens.ids.chunks_exact_mut(2).skip(i % 4);
                few.for_each(|ids| ids.copy_from_slice(&[EXPERTS as i32 - 1, 1]));
                tokens.ids[10..].copy_from_slice(&[-1, 4 * (rank.ep.rank() as i32)]);
                tokens.ids[8..10].copy_from_slice(&[4 * (rank.ep.rank() as i32), -1]);
                rank.load(&tokens);
            }
            graph.launch(stream);
            stream.wait("a replay", LIMIT).unwrap();
            if good {
                rank.check(&tokens);
            }
        }
        rank.round_trip();
    });
}

#[test]
fn dropped_halves_and_cached_handles_leave_the_group_usable() {
    let Some(gpus) = gpus() else { return };
    for work in works() {
        // The rounds compare rows that come home once per rank.
        if work.dispatch.layout == Layout::RankMajor {
            apart(&gpus, 3, (&fixed().slots(3), TIMEOUT), |rank| {
                rank.drop_halves_and_use_handles(&work.dispatch, &work.combine);
            });
        }
    }
}

#[test]
fn a_rank_that_stops_is_named_and_a_new_group_works() {
    let Some(gpus) = gpus() else { return };
    for opts in [opts(0), capacity()] {
        let through = AtomicUsize::new(0);
        apart(&gpus, 3, (&fixed(), STOPS), |rank| rank.one_stops(&opts, &through));
        apart(&gpus, 3, (&fixed(), TIMEOUT), |rank| rank.round_trip());
    }
}

#[test]
fn one_thread_drives_all_ranks() {
    let Some(gpus) = gpus() else { return };
    let apart = Apart { gpus: &gpus, node: ALONE };
    let place = |rank| apart.place(rank, 2, fixed()).place(Place::Cuda(0));
    let transport = || NvlinkTransport::new(0).nodes(vec![0, 1]);
    let eps = ranks(2, |group| place(group.rank()).transport(transport()).build(&group).unwrap());
    let all: Vec<_> = eps.into_iter().map(|ep| Rank::on(gpus.rank(2 * ep.rank()), ep)).collect();
    let queue = all[0].queue();
    for round in 0..6 {
        let tokens: Vec<_> = all.iter().map(|r| Tokens::new(r.ep.rank() + round, 6)).collect();
        all.iter().zip(&tokens).for_each(|(rank, tokens)| rank.load(tokens));
        let calls: Vec<_> = all.iter().map(|r| (&r.ep, r.payload(6), r.route(6))).collect();
        let results = dispatch_all(&queue, &calls, &capacity()).unwrap();
        let calls = results.into_iter().zip(&all);
        let calls = calls.map(|(result, rank)| (result, rank.out_at(rank.out, 6).into()));
        for event in combine_all(&queue, calls.collect(), &plain()).unwrap() {
            event.wait(LIMIT).unwrap();
        }
        all.iter().zip(&tokens).for_each(|(rank, tokens)| rank.check(tokens));
    }
}

#[test]
fn what_does_not_fit_is_refused_when_it_is_built() {
    let nodes = || NvlinkTransport::new(0).nodes(vec![0, 1]);
    let on_gpu = |builder: EpBuilder| builder.place(Place::Cuda(0)).transport(nodes());
    let once = on_gpu(fixed()).hierarchy(Hierarchy::Node);
    assert_argument(once.plan(2), "Hierarchy::Flat");
    for shape in
        [shape().fixed_blocks().max_block_rows(0), shape().fixed_blocks().max_block_expert_rows(0)]
    {
        assert_argument(on_gpu(EpBuilder::new(shape)).plan(2), "at least 1");
    }
    let Some(gpus) = gpus() else { return };
    let apart = Apart { gpus: &gpus, node: ALONE };
    ranks(2, |group| {
        let builder = if group.rank() == 0 { builder() } else { fixed().slots(3) };
        let e = apart.place(group.rank(), 2, builder).build(&group).unwrap_err();
        let EpError::Disagreement { field, .. } = e else { panic!("{e}") };
        assert_eq!(field, "fixed_blocks");
    });
}

/// What is planned is what blocks take, on GPUs that do not map each other and nowhere else.
#[test]
fn plans_count_blocks() {
    let nodes = || NvlinkTransport::new(0).nodes(vec![0, 1, 2]);
    let plan = |shape, apart: bool, on_gpu: bool| {
        let builder = EpBuilder::new(shape).lanes(2);
        let builder = if apart { builder.transport(nodes()) } else { builder };
        let builder = if on_gpu { builder.place(Place::Cuda(0)) } else { builder };
        builder.plan(3).unwrap()
    };
    for on_gpu in [false, true] {
        assert_eq!(plan(shape().fixed_blocks(), false, on_gpu).block_bytes, 0);
    }
    let usual = plan(shape(), true, true);
    assert_eq!(usual.block_bytes, 0);
    assert_eq!(plan(shape().fixed_blocks(), true, false).window_bytes, usual.window_bytes);
    // Rows of 16 floats take 128 bytes, and a token has up to two experts on a rank.
    let whole = plan(shape().fixed_blocks(), true, true);
    assert_eq!(whole.block_bytes, 16 * 2 * 128);
    assert_eq!(whole.staging_bytes, 2 * 2 * 3 * 16 * 2 * 128);
    let tight = plan(shape().fixed_blocks().max_block_rows(2).max_block_expert_rows(3), true, true);
    assert_eq!(tight.block_bytes, 3 * 128);
    // Exact mode needs as much as ever.
    assert_eq!(tight.staging_bytes, usual.staging_bytes);
    assert!(whole.device_bytes > usual.device_bytes);
}

/// Ranks that are nodes, on a GPU each, by NCCL.
#[cfg(feature = "nccl")]
mod nccl {
    use common::gpu_apart::nccl::{Paired, gpus};
    use ep_bench::oracle::JobSpec;

    use super::*;

    fn paired<T: Send>(gpus: &Gpus, timeout: Duration, f: impl Fn(Rank<'_>) -> T + Sync) -> Vec<T> {
        let world = gpus.count();
        let placed = |rank| Paired(gpus).place(rank, world, fixed()).lanes(2).timeout(timeout);
        eps_of(world, &placed, |ep| f(Rank::new(gpus, ep)))
    }

    #[test]
    fn exchanged_blocks_of_fixed_size_equal_the_oracle() {
        let Some(gpus) = gpus(128 << 20) else { return };
        let world = gpus.count();
        random(24, |seed, _| {
            let tokens = [[13, 9], [0, 21], [7, 7]][seed as usize % 3];
            let tokens = (0..world).map(|rank| tokens[rank % 2]).collect();
            let spec = JobSpec { ranks: world, tokens, ..JobSpec::random(seed) };
            check(&spec.build(), seed, &Paired(&gpus));
        });
    }

    #[test]
    fn exchanges_are_captured_and_mixed_with_eager_ones() {
        let Some(gpus) = gpus(64 << 20) else { return };
        for work in works() {
            paired(&gpus, TIMEOUT, |rank| replays_equal_eager_calls(&rank, &work, 24));
            paired(&gpus, TIMEOUT, |rank| cached_dispatches_are_captured(&rank, &work, 12));
        }
    }

    /// Replays one behind the other are no single exchange that takes too long, though one of them is under
    /// way whenever anybody looks: all are submitted at once on the first rank, where each waits for that of
    /// the others for most of the time that an exchange may take.
    #[test]
    fn many_replays_take_longer_than_one_may() {
        const REPLAYS: u32 = 6;
        let Some(gpus) = gpus(64 << 20) else { return };
        let timeout = Duration::from_secs(1);
        let slow = timeout * 6 / 10;
        paired(&gpus, timeout, |rank| {
            let (stream, staging) = (rank.gpu.stream(), rank.gpu.place(None, 1 << 20));
            let tokens = Tokens::new(rank.ep.rank(), 6);
            rank.load(&tokens);
            let graph = Graph::capture(stream, || {
                drop(Work::plain().submit(&rank, rank.route(6), 6, staging));
            });
            rank.ep.group().barrier().unwrap();
            let began = std::time::Instant::now();
            for _ in 0..REPLAYS {
                if rank.ep.rank() > 0 {
                    std::thread::sleep(slow);
                }
                graph.launch(stream);
            }
            stream.wait("replays", LIMIT).unwrap();
            assert!(began.elapsed() >= slow * REPLAYS && slow * REPLAYS > 3 * timeout);
            rank.check(&tokens);
            rank.round_trip();
        });
    }

    /// A rank that has begun to exchange a block cannot take it back, so the group ends, and no rank takes
    /// the block for something else.
    #[test]
    fn a_disagreement_ends_the_group_and_a_new_one_works() {
        let Some(gpus) = gpus(64 << 20) else { return };
        let timeout = Duration::from_secs(2);
        paired(&gpus, timeout, |rank| {
            rank.round_trip();
            rank.load(&Tokens::new(rank.ep.rank(), 4));
            let began = std::time::Instant::now();
            let mine = if rank.ep.rank() == 0 { capacity() } else { opts(0) };
            // In capacity mode the host hears of it by the next call.
            let e = match rank.dispatch(4, &mine) {
                Err(e) => e,
                Ok(result) => {
                    let _ = rank.gpu.stream().wait("what ends with the group", LIMIT);
                    drop(result);
                    rank.dispatch(4, &mine).unwrap_err()
                }
            };
            assert!(!e.group_usable(), "{e}");
            assert!(began.elapsed() < timeout + Duration::from_secs(2), "{:?}", began.elapsed());
        });
        paired(&gpus, TIMEOUT, |rank| rank.round_trip());
    }

    #[test]
    fn a_rank_that_stops_is_named_in_replays_too() {
        let Some(gpus) = gpus(64 << 20) else { return };
        let timeout = Duration::from_secs(1);
        for opts in [opts(0), capacity()] {
            let through = AtomicUsize::new(0);
            paired(&gpus, STOPS, |rank| rank.one_stops(&opts, &through));
        }
        paired(&gpus, timeout, |rank| {
            let (stream, staging) = (rank.gpu.stream(), rank.gpu.place(None, 1 << 20));
            rank.load(&Tokens::new(rank.ep.rank(), 6));
            let graph = Graph::capture(stream, || {
                drop(Work::plain().submit(&rank, rank.route(6), 6, staging));
            });
            graph.launch(stream);
            stream.wait("a replay", LIMIT).unwrap();
            rank.ep.group().barrier().unwrap();
            if rank.ep.rank() == 1 {
                std::thread::sleep(timeout + Duration::from_secs(3));
                return;
            }
            let began = std::time::Instant::now();
            graph.launch(stream);
            stream.wait("a replay that ends by its time-out", LIMIT).unwrap();
            assert!(began.elapsed() < timeout + Duration::from_secs(2), "{:?}", began.elapsed());
            let e = rank.dispatch(2, &capacity()).unwrap_err();
            assert!(!e.group_usable(), "{e}");
        });
        paired(&gpus, TIMEOUT, |rank| rank.round_trip());
    }
}
