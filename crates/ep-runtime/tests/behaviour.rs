//! What callers may rely on beside the numbers: lanes, slots, order, dropping and lost ranks.

mod common;

use std::time::{Duration, Instant};

use common::small::{
    HIDDEN, PROMPT, TOPK, Tokens, builder, combine, dispatch, opts, round_trip, shape, went_to,
};
use common::{eps, ranks, stay_until_it_fails};
use ep_runtime::{
    CombineOpts, Combined, DispatchOpts, Ep, EpBuilder, EpError, ErrorKind, Group, Layout,
    Precision, Queue, RowsMut, combine_all, dispatch_all,
};

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

/// Rows of bytes that came as they are cannot be summed.
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
        // Rank 0, which is the first of all who are late.
        if ep.rank() == 0 {
            stay_until_it_fails(ep.group());
            return None;
        }
        let began = Instant::now();
        let e = dispatch(&ep, &tokens, &opts(0)).unwrap_err();
        assert!(began.elapsed() < PROMPT);
        let again = dispatch(&ep, &tokens, &opts(0)).unwrap_err();
        assert!(!again.group_usable(), "a poisoned group refuses at once: {again}");
        Some(e)
    });
    for e in errors.into_iter().flatten() {
        assert_eq!(e.peer(), Some(0), "{e}");
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
    assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
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
