//! Pipelines of micro-batches: results bit by bit those of one after the other, real overlap, and one
//! end on all ranks whatever goes wrong on one.

mod common;

use std::time::{Duration, Instant};

use common::small::{HIDDEN, PROMPT, TOPK, Tokens, assert_argument, builder, opts, round_trip};
use common::{eps, ranks, stay_until_it_fails};
use ep_runtime::sched::{Stage, Timeline};
use ep_runtime::{
    CombineOpts, DispatchOpts, Dispatched, Ep, EpBuilder, EpError, ErrorKind, Ids, Layout,
    MicroBatch, PayloadKind, Pipeline, PipelineError, Queue, Route, RowsMut,
};
use proptest::prelude::*;

/// How a test's layer is used.
#[derive(Clone, Copy, Debug)]
struct How {
    layout: Layout,
    capacity: bool,
    bulk: bool,
}

impl How {
    const PLAIN: Self = Self { layout: Layout::RankMajor, capacity: false, bulk: false };

    fn builder(self) -> EpBuilder {
        let builder = builder();
        match self.bulk {
            true => builder.transport(ep_runtime::ThreadTransport::new().bulk(true)),
            false => builder,
        }
    }

    fn dispatch(self) -> DispatchOpts {
        DispatchOpts { layout: self.layout, capacity: self.capacity, ..opts(0) }
    }

    fn pipeline(self, ep: &Ep) -> Pipeline {
        Pipeline::new(ep).unwrap().dispatch_opts(self.dispatch())
    }
}

/// Experts whose sums depend on the micro-batch, the expert and the row.
fn experts(batch: usize, rows: &mut Dispatched) -> Result<(), EpError> {
    let offsets = rows.offsets().to_vec();
    let expert_major = rows.rows().topk_ids().is_none();
    let mut outputs = rows.rows_mut(PayloadKind::F32)?;
    let mut payload = outputs.payload();
    for i in 0..payload.len() {
        let group = offsets.iter().filter(|&&first| first as usize <= i).count();
        let gate = if expert_major { group as f32 } else { 0.5 };
        payload.row_mut::<f32>(i).iter_mut().for_each(|x| *x = *x * 1.37 + gate + batch as f32);
    }
    Ok(())
}

/// The tokens of all micro-batches of one rank, and room for their sums.
struct Job {
    tokens: Vec<Tokens>,
    sums: Vec<Vec<f32>>,
}

impl Job {
    fn new(rank: usize, sizes: &[usize]) -> Self {
        let tokens = (0..).zip(sizes).map(|(i, &n)| Tokens::new(rank + 3 * i, n)).collect();
        Self { tokens, sums: sizes.iter().map(|n| vec![f32::NAN; n * HIDDEN]).collect() }
    }

    fn batches(&mut self) -> Vec<MicroBatch<'_>> {
        let Self { tokens, sums } = self;
        tokens
            .iter()
            .zip(sums)
            .map(|(tokens, sums)| {
                let out = RowsMut::new(sums, HIDDEN).unwrap();
                MicroBatch::new(tokens.payload(), tokens.route(), out)
            })
            .collect()
    }

    fn bits(&self) -> Vec<Vec<u32>> {
        self.sums.iter().map(|sums| sums.iter().map(|x| x.to_bits()).collect()).collect()
    }
}

/// One micro-batch after the other.
fn sequentially(ep: &Ep, how: How, sizes: &[usize]) -> Vec<Vec<u32>> {
    let mut job = Job::new(ep.rank(), sizes);
    let queue = Queue::host();
    for (i, batch) in job.batches().into_iter().enumerate() {
        let MicroBatch { payload, route, out, .. } = batch;
        let mut rows = ep.dispatch(&queue, payload, route, &how.dispatch()).unwrap();
        experts(i, &mut rows).unwrap();
        rows.combine(&queue, out, &CombineOpts::default()).unwrap();
    }
    job.bits()
}

fn pause(seed: usize) {
    match seed % 4 {
        0 => {}
        1 => std::thread::yield_now(),
        n => std::thread::sleep(Duration::from_micros(n as u64 * 40)),
    }
}

/// Whether a layer is as it was: all slots free, both lanes idle, the group usable.
fn as_before(ep: &Ep) {
    assert_eq!(ep.free_slots(), 3);
    round_trip(ep);
    assert_eq!(ep.free_slots(), 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn results_are_those_of_one_after_the_other(
        world in 1usize..5,
        sizes in prop::collection::vec(prop::collection::vec(0usize..7, 4), 0..7),
        delays in prop::collection::vec(0usize..64, 4),
        expert_major in any::<bool>(),
        capacity in any::<bool>(),
        bulk in any::<bool>(),
    ) {
        let layout = match expert_major {
            true => Layout::ExpertMajor { alignment: 4 },
            false => Layout::RankMajor,
        };
        let how = How { layout, capacity, bulk };
        eps(world, &how.builder(), |ep| {
            let rank = ep.rank();
            let sizes: Vec<usize> = sizes.iter().map(|of_ranks| of_ranks[rank]).collect();
            let expected = sequentially(&ep, how, &sizes);
            let pipeline = how.pipeline(&ep);
            for round in 0..2 {
                let mut job = Job::new(rank, &sizes);
                let mut next = 0;
                let run = pipeline.run(&Queue::host(), job.batches(), |batch, rows| {
                    assert_eq!(batch, next, "in order");
                    next += 1;
                    pause(delays[rank] + batch * (round + 1));
                    experts(batch, rows)
                });
                assert!(run.expect("no errors").ready());
                assert_eq!(next, sizes.len());
                assert_eq!(job.bits(), expected, "rank {rank}");
            }
            as_before(&ep);
        });
    }
}

/// The experts of a micro-batch do not return before what overlaps them has been seen to end.
#[test]
fn dispatch_and_combine_really_run_beside_the_experts() {
    let timeline = Timeline::new();
    eps(2, &builder(), |ep| {
        let rank = ep.rank();
        let ended = |stage, batch| {
            let seen =
                |s: &ep_runtime::sched::Span| (s.rank, s.stage, s.batch) == (rank, stage, batch);
            timeline.spans().iter().any(seen)
        };
        let limit = Instant::now() + Duration::from_secs(20);
        let wait_for = |stage, batch| {
            while !ended(stage, batch) {
                assert!(Instant::now() < limit, "{stage} {batch} does not overlap the experts");
                std::thread::sleep(Duration::from_micros(100));
            }
        };
        let mut job = Job::new(rank, &[3; 5]);
        let pipeline = Pipeline::new(&ep).unwrap().timeline(&timeline);
        let run = pipeline.run(&Queue::host(), job.batches(), |batch, rows| {
            if batch + 1 < 5 {
                wait_for(Stage::Dispatch, batch + 1);
            }
            if batch > 0 {
                wait_for(Stage::Combine, batch - 1);
            }
            experts(batch, rows)
        });
        run.expect("no errors");
        as_before(&ep);
    });
    let spans = timeline.spans();
    assert_eq!(spans.len(), 2 * 3 * 5);
    assert!(spans.iter().all(|s| s.start <= s.end && !s.on_device));
    for rank in 0..2 {
        let of = |stage, batch| {
            let span =
                |s: &&ep_runtime::sched::Span| (s.rank, s.stage, s.batch) == (rank, stage, batch);
            *spans.iter().find(span).expect("every stage of every micro-batch is recorded")
        };
        for batch in 0..5 {
            assert!(of(Stage::Dispatch, batch).end <= of(Stage::Experts, batch).start);
            assert!(of(Stage::Experts, batch).end <= of(Stage::Combine, batch).start);
        }
    }
    let trace = timeline.chrome_trace();
    for name in ["rank 1", "dispatch 4", "experts 0", "combine 2", "traceEvents"] {
        assert!(trace.contains(name), "{trace}");
    }
}

/// Lanes of their own are all that two pipelines over one layer need.
#[test]
fn two_pipelines_of_one_layer_run_at_once() {
    eps(2, &builder().slots(6).lanes(4), |ep| {
        let sizes = [3, 0, 5, 1, 2, 4];
        let expected = sequentially(&ep, How::PLAIN, &sizes);
        std::thread::scope(|threads| {
            for lane in [0, 2] {
                let (ep, expected) = (&ep, &expected);
                threads.spawn(move || {
                    let combine = CombineOpts { lane: Some(lane + 1), ..CombineOpts::default() };
                    let pipeline = Pipeline::new(ep).unwrap();
                    let pipeline = pipeline.dispatch_opts(opts(lane)).combine_opts(combine);
                    for round in 0..10 {
                        let mut job = Job::new(ep.rank(), &sizes);
                        let run = pipeline.run(&Queue::host(), job.batches(), |batch, rows| {
                            pause(batch + lane + round + ep.rank());
                            experts(batch, rows)
                        });
                        run.expect("no errors");
                        assert_eq!(&job.bits(), expected);
                    }
                });
            }
        });
        assert_eq!(ep.free_slots(), 6);
        round_trip(&ep);
    });
}

/// Every rank's error of a run in which `fail` says what goes wrong where.
fn errors_of(
    world: usize,
    count: usize,
    fail: impl Fn(usize, usize) -> Result<(), String> + Sync,
) -> Vec<PipelineError<String>> {
    let start = Instant::now();
    let errors = eps(world, &builder(), |ep| {
        let mut job = Job::new(ep.rank(), &vec![3; count]);
        let pipeline = Pipeline::new(&ep).unwrap();
        let run = pipeline.run(&Queue::host(), job.batches(), |batch, rows| {
            fail(ep.rank(), batch)?;
            experts(batch, rows).map_err(|e| e.to_string())
        });
        assert_eq!(ep.free_slots(), 3, "rank {}", ep.rank());
        run.expect_err("an error everywhere")
    });
    // Nobody waited for the layer's time-out.
    assert!(start.elapsed() < PROMPT, "{:?}", start.elapsed());
    errors
}

#[test]
fn an_error_of_the_experts_of_one_rank_ends_all_at_once() {
    for (count, bad) in [(1, 0), (2, 0), (2, 1), (5, 0), (5, 2), (5, 4)] {
        let fail = |rank, batch| match (rank, batch) == (1, bad) {
            true => Err("out of experts".to_owned()),
            false => Ok(()),
        };
        let errors = errors_of(3, count, fail);
        for (rank, error) in errors.iter().enumerate() {
            assert!(!error.group_usable());
            match error {
                PipelineError::Experts { batch, error } if rank == 1 => {
                    assert_eq!((*batch, error.as_str()), (bad, "out of experts"));
                }
                PipelineError::Communication { error, .. } if rank != 1 => {
                    assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
                    assert_eq!(error.peer(), Some(1), "{error}");
                    let text = error.to_string();
                    assert!(text.contains(&format!("micro-batch {bad}: out of experts")), "{text}");
                }
                other => panic!("rank {rank}: {other}"),
            }
        }
    }
}

#[test]
fn a_panic_of_the_experts_is_passed_on_and_ends_the_others() {
    let outcomes = ranks(2, |group| {
        let ep = builder().build(&group).unwrap();
        let mut job = Job::new(ep.rank(), &[3; 4]);
        let pipeline = Pipeline::new(&ep).unwrap();
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pipeline.run(&Queue::host(), job.batches(), |batch, rows| {
                assert!((group.rank(), batch) != (0, 2), "as the test wants");
                experts(batch, rows)
            })
        }));
        assert_eq!(ep.free_slots(), 3);
        run.map_err(drop)
    });
    let [panicked, other] = outcomes.try_into().expect("two ranks");
    assert!(panicked.is_err());
    match other.expect("no panic here") {
        Err(PipelineError::Communication { error, .. }) => {
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Aborted, Some(0)), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_verdict_ends_all_ranks_alike_and_leaves_the_group_usable() {
    for bad in 0..4 {
        eps(3, &builder(), |ep| {
            let mut job = Job::new(ep.rank(), &[3; 4]);
            if ep.rank() == 2 {
                job.tokens[bad].ids[TOPK] = 99;
            }
            let run = Pipeline::new(&ep).unwrap().run(&Queue::host(), job.batches(), experts);
            match run.expect_err("bad ids") {
                PipelineError::Communication { stage: Stage::Dispatch, batch, error } => {
                    let EpError::Ids { rank, token, id, .. } = error else { panic!("{error}") };
                    assert_eq!((batch, rank, token, id), (bad, 2, 1, 99));
                }
                other => panic!("{other}"),
            }
            as_before(&ep);
            // Whether a micro-batch was combined is the same on all ranks: two before the bad one were
            // received, and what was combined is whole.
            let whole = |sums: &Vec<f32>| sums.iter().all(|x| !x.is_nan());
            let combined = job.sums.iter().take_while(|sums| whole(sums)).count();
            assert_eq!(combined, bad.saturating_sub(2), "micro-batch {bad}");
        });
    }
}

#[test]
fn bad_arguments_are_errors_before_anything_is_sent() {
    eps(2, &builder().slots(4), |ep| {
        let queue = Queue::host();
        let pipeline = Pipeline::new(&ep).unwrap();
        let start = |run: Result<_, PipelineError<EpError>>| match run {
            Err(PipelineError::Start(error)) => Err(error),
            Err(other) => panic!("{other}"),
            Ok(finished) => Ok::<ep_runtime::sched::Finished, EpError>(finished),
        };
        let mut job = Job::new(ep.rank(), &[2, 2, 17]);
        assert_argument(start(pipeline.run(&queue, job.batches(), experts)), "17 tokens");
        let mut job = Job::new(ep.rank(), &[2, 2, 3]);
        job.sums[2].truncate(2 * HIDDEN);
        let run = start(pipeline.run(&queue, job.batches(), experts));
        assert_argument(run, "micro-batch 2 has 3 tokens and room for 2 sums");
        let mut job = Job::new(ep.rank(), &[2, 2]);
        let mut batches = job.batches();
        batches[1].route = Route::Topk { ids: Ids::I32(&[1]), weights: None };
        assert_argument(start(pipeline.run(&queue, batches, experts)), "1 expert ids");
        let same = Pipeline::new(&ep).unwrap();
        let same = same.combine_opts(CombineOpts { lane: Some(0), ..CombineOpts::default() });
        assert_argument(start(same.run(&queue, job.batches(), experts)), "both on lane 0");
        let absent = Pipeline::new(&ep).unwrap().dispatch_opts(opts(7));
        assert_argument(start(absent.run(&queue, job.batches(), experts)), "no lane 7");
        // Two results are held elsewhere: two slots are free, three are needed for three.
        let hold = |lane| common::small::dispatch(&ep, &Tokens::new(ep.rank(), 2), &opts(lane));
        let held = [hold(0).unwrap(), hold(1).unwrap()];
        let mut three = Job::new(ep.rank(), &[2, 2, 2]);
        let error = start(pipeline.run(&queue, three.batches(), experts)).unwrap_err();
        assert!(matches!(error, EpError::NoFreeSlot { slots: 4, .. }), "{error}");
        pipeline.run(&queue, job.batches(), experts).expect("two fit");
        drop(held);
        let send =
            ep.dispatch_send(&queue, three.tokens[0].payload(), three.tokens[0].route(), &opts(1));
        let error = start(pipeline.run(&queue, three.batches(), experts)).unwrap_err();
        assert!(matches!(error, EpError::LaneBusy { lane: 1, .. }), "{error}");
        drop(send.unwrap().recv(&queue).unwrap());
        pipeline.run(&queue, three.batches(), experts).expect("as good as new");
        pipeline.run(&queue, Vec::new(), experts).expect("nothing is easy");
        round_trip(&ep);
        assert_eq!(ep.free_slots(), 4);
    });
    eps(1, &builder().slots(2), |ep| assert_argument(Pipeline::new(&ep), "3 slots"));
    eps(1, &builder().lanes(1), |ep| assert_argument(Pipeline::new(&ep), "2 lanes"));
}

/// An error of a rank's own in the middle: rows of a type that has no room.
#[test]
fn an_error_of_one_ranks_own_ends_the_others_naming_it() {
    let errors = eps(2, &builder(), |ep| {
        let mut job = Job::new(ep.rank(), &[3; 4]);
        let run = Pipeline::new(&ep).unwrap().run(&Queue::host(), job.batches(), |batch, rows| {
            // Combine wants rows of another type than this layer was built for.
            if (ep.rank(), batch) == (1, 1) {
                rows.rows_mut(PayloadKind::Bf16)?;
            }
            experts(batch, rows)
        });
        assert_eq!(ep.free_slots(), 3);
        run.expect_err("an error everywhere")
    });
    assert!(matches!(errors[1], PipelineError::Experts { batch: 1, .. }), "{}", errors[1]);
    match &errors[0] {
        PipelineError::Communication { error, .. } => assert_eq!(error.peer(), Some(1)),
        other => panic!("{other}"),
    }
}

#[test]
fn a_rank_that_never_comes_is_named_in_time() {
    let builder = builder().timeout(Duration::from_millis(300));
    let errors = eps(2, &builder, |ep| {
        if ep.rank() == 1 {
            stay_until_it_fails(ep.group());
            return None;
        }
        let mut job = Job::new(0, &[3; 4]);
        let run = Pipeline::new(&ep).unwrap().run(&Queue::host(), job.batches(), experts);
        assert_eq!(ep.free_slots(), 3);
        Some(run.expect_err("nobody else is there"))
    });
    match errors[0].as_ref().expect("rank 0 ran") {
        PipelineError::Communication { stage: Stage::Dispatch, batch: 0, error } => {
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(1)), "{error}");
        }
        other => panic!("{other}"),
    }
}
