//! Tokens that cross nodes once: what callers may rely on beside the numbers, which the oracle tests.

mod common;

use std::time::Instant;

use common::small::{
    HIDDEN, PROMPT, Tokens, assert_argument, builder, combine, dispatch, opts, round_trip, shape,
    went_to,
};
use common::{eps, ranks};
use ep_runtime::{
    CombineOpts, Combined, DispatchOpts, Ep, EpBuilder, EpError, ErrorKind, Hierarchy, Layout,
    Precision, ProcessTransport, Queue, RowsMut, ThreadTransport, combine_all, dispatch_all,
};

const SIZES: [&[usize]; 5] = [&[2, 2], &[1, 3], &[3, 1], &[1, 2, 1], &[4]];

/// A small layer on four ranks in these nodes.
fn across(sizes: &[usize]) -> EpBuilder {
    on(builder(), sizes)
}

fn on(builder: EpBuilder, sizes: &[usize]) -> EpBuilder {
    builder.transport(ThreadTransport::new().nodes(sizes)).hierarchy(Hierarchy::Node)
}

fn node_reduced() -> CombineOpts {
    CombineOpts { precision: Precision::NodeReduced, ..CombineOpts::default() }
}

#[test]
fn dropped_halves_leave_the_group_usable() {
    for sizes in SIZES {
        eps(4, &across(sizes), |ep| {
            let tokens = Tokens::new(ep.rank(), 6);
            let queue = Queue::host();
            for round in 0..20 {
                let sent = ep.dispatch_send(&queue, tokens.payload(), tokens.route(), &opts(0));
                // Ranks drop different things at different times; what they forward is not lost.
                if (round + ep.rank()) % 3 == 0 {
                    drop(sent.unwrap());
                } else {
                    let sent = sent.unwrap();
                    let began = Instant::now();
                    // Rows arrive whatever the peers do with their second halves.
                    while !sent.ready() {
                        assert!(began.elapsed() < PROMPT);
                        std::thread::yield_now();
                    }
                    sent.recv(&queue).unwrap();
                }
                let result = dispatch(&ep, &tokens, &opts(0)).unwrap();
                let send = result.combine_send(&queue, &node_reduced()).unwrap();
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
fn one_thread_drives_several_ranks() {
    for sizes in SIZES {
        let all: Vec<Ep> = eps(4, &across(sizes), |ep| ep);
        let tokens: Vec<Tokens> = (0..4).map(|r| Tokens::new(r, r)).collect();
        let queue = Queue::host();
        let calls: Vec<_> =
            all.iter().zip(&tokens).map(|(ep, t)| (ep, t.payload(), t.route())).collect();
        for combine_opts in [node_reduced(), CombineOpts::default()] {
            let results = dispatch_all(&queue, &calls, &opts(1)).unwrap();
            let mut outs: Vec<Vec<f32>> = (0..4).map(|r| vec![f32::NAN; r * HIDDEN]).collect();
            let into = outs.iter_mut().map(|o| Combined::new(RowsMut::new(o, HIDDEN).unwrap()));
            let combines = results.into_iter().zip(into).collect();
            combine_all(&queue, combines, &combine_opts).unwrap();
            for (rank, out) in outs.iter().enumerate() {
                for t in 0..rank {
                    let copies = (0..4).filter(|&r| went_to(&all[0], &tokens[rank], t, r)).count();
                    let x = tokens[rank].rows[t * HIDDEN];
                    // Small whole numbers: the order of a sum does not matter.
                    assert_eq!(out[t * HIDDEN], x * copies as f32, "{sizes:?}");
                }
            }
        }
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
    eps(4, &across(&[2, 2]).slots(4), |ep| {
        std::thread::scope(|scope| {
            for lane in 0..2 {
                let ep = &ep;
                scope.spawn(move || {
                    let tokens = Tokens::new(ep.rank(), 5);
                    let layout = Layout::ExpertMajor { alignment: 4 };
                    let mut last = None;
                    for _ in 0..50 {
                        let dispatch_opts = DispatchOpts { layout, ..opts(lane) };
                        let result = dispatch(ep, &tokens, &dispatch_opts).unwrap();
                        let out = combine(result, &node_reduced()).unwrap();
                        assert!(last.as_ref().is_none_or(|l| l == &out));
                        last = Some(out);
                    }
                });
            }
        });
    });
}

/// A handle of one lane is combined on another, beside a dispatch on its own.
#[test]
fn a_handle_is_good_on_every_lane() {
    eps(4, &across(&[1, 3]), |ep| {
        let tokens = Tokens::new(ep.rank(), 7);
        let queue = Queue::host();
        let expected = combine(dispatch(&ep, &tokens, &opts(0)).unwrap(), &node_reduced()).unwrap();
        for _ in 0..10 {
            let result = dispatch(&ep, &tokens, &opts(0)).unwrap();
            let other = ep.dispatch_send(&queue, tokens.payload(), tokens.route(), &opts(0));
            let elsewhere = CombineOpts { lane: Some(1), ..node_reduced() };
            assert_eq!(combine(result, &elsewhere).unwrap(), expected);
            let other = other.unwrap().recv(&queue).unwrap();
            assert_eq!(combine(other, &node_reduced()).unwrap(), expected);
        }
    });
}

#[test]
fn bad_ids_are_the_same_error_on_every_rank() {
    eps(4, &across(&[1, 3]), |ep| {
        let mut tokens = Tokens::new(ep.rank(), 4);
        if ep.rank() == 2 {
            tokens.ids[5] = 9;
        }
        let e = dispatch(&ep, &tokens, &opts(0)).unwrap_err();
        assert!(matches!(e, EpError::Ids { rank: 2, token: 2, id: 9, .. }), "{e}");
        assert_eq!(ep.free_slots(), 3);
        round_trip(&ep);
    });
}

/// The last row that a rail can forward fits, and one more does not, on any rank.
#[test]
fn forward_capacity_is_exact() {
    // Rank 0 is the rail of all others' tokens for experts 0 and 1: 15 of them.
    for reserved in [15, 14] {
        let tight = on(EpBuilder::new(shape().max_forward_rows(reserved)), &[1, 3]);
        eps(4, &tight, |ep| {
            let mut tokens = Tokens::new(ep.rank(), 5);
            tokens.ids = [0, 1].repeat(5);
            match dispatch(&ep, &tokens, &opts(0)) {
                Ok(result) => {
                    assert_eq!(reserved, 15);
                    assert_eq!(result.num_rows(), if ep.rank() == 0 { 20 } else { 0 });
                }
                Err(EpError::Capacity { rank, needed, reserved, setting, .. }) => {
                    assert_eq!((rank, needed, reserved, setting), (0, 15, 14, "max_forward_rows"));
                }
                Err(other) => panic!("{other}"),
            }
            let few = Tokens::new(ep.rank(), 2);
            combine(dispatch(&ep, &few, &opts(0)).unwrap(), &node_reduced()).unwrap();
        });
    }
}

#[test]
fn the_plan_is_what_the_window_takes() {
    let flat = |sizes: &[usize]| builder().transport(ThreadTransport::new().nodes(sizes));
    for (sizes, sources) in [(&[2, 2][..], 1), (&[1, 3], 3), (&[1, 2, 1], 3), (&[4], 0)] {
        let (flat, plan) = (flat(sizes).plan(4).unwrap(), across(sizes).plan(4).unwrap());
        assert_eq!(plan.max_forward_rows, sources * 16, "{sizes:?}");
        assert_eq!((flat.max_forward_rows, flat.forward_bytes), (0, 0));
        let messages = plan.lanes * 5 * (plan.message_bytes - flat.message_bytes);
        let slots_at = |plan: &ep_runtime::Plan| {
            plan.window_bytes
                - plan.slots * plan.slot_bytes
                - plan.staging_bytes
                - plan.forward_bytes
        };
        let more = slots_at(&plan) - slots_at(&flat);
        assert!(more <= messages.next_multiple_of(4096), "{sizes:?}");
        assert_eq!(plan.forward_bytes > 0, sources > 0);
        assert_eq!(plan.staging_bytes, flat.staging_bytes);
    }
    // All ranks are of one host where no transport is named.
    assert_eq!(builder().hierarchy(Hierarchy::Node).plan(4).unwrap().max_forward_rows, 0);
    let limited = on(EpBuilder::new(shape().max_forward_rows(5)), &[1, 3]).plan(4).unwrap();
    assert_eq!(limited.max_forward_rows, 5);
}

#[test]
fn what_was_not_built_for_nodes_is_refused() {
    eps(4, &builder().transport(ThreadTransport::new().nodes(&[2, 2])), |ep| {
        let tokens = Tokens::new(ep.rank(), 3);
        let result = dispatch(&ep, &tokens, &opts(0)).unwrap();
        let e = result.combine_send(&Queue::host(), &node_reduced()).unwrap_err();
        assert!(e.to_string().contains("Hierarchy::Node"), "{e}");
        let result = e.into_result().expect("nothing was announced");
        combine(result, &CombineOpts::default()).unwrap();
        assert_argument(
            combine(dispatch(&ep, &tokens, &opts(0)).unwrap(), &node_reduced()),
            "Hierarchy::Node",
        );
        round_trip(&ep);
    });
    let errors = ranks(4, |group| {
        let builder = if group.rank() == 3 { builder() } else { across(&[4]) };
        builder.transport(ThreadTransport::new()).build(&group).unwrap_err()
    });
    for e in errors {
        assert_eq!(e.kind(), ErrorKind::Mismatch);
        assert!(e.to_string().contains("`hierarchy`"), "{e}");
    }
    let errors = ranks(3, |group| across(&[2, 2]).build(&group).unwrap_err());
    for e in errors {
        assert!(e.to_string().contains("the nodes have 4 ranks, the group 3"), "{e}");
    }
}

/// In one node the second rounding finds nothing to round.
#[test]
fn in_one_node_sums_per_node_are_exact() {
    eps(4, &builder().hierarchy(Hierarchy::Node), |ep| {
        let tokens = Tokens::new(ep.rank(), 9);
        for layout in [Layout::RankMajor, Layout::ExpertMajor { alignment: 4 }] {
            let opts = DispatchOpts { layout, ..opts(0) };
            let exact = combine(dispatch(&ep, &tokens, &opts).unwrap(), &CombineOpts::default());
            let reduced = combine(dispatch(&ep, &tokens, &opts).unwrap(), &node_reduced());
            assert_eq!(exact.unwrap(), reduced.unwrap());
        }
    });
}

/// Windows that are shared as those of processes are.
#[test]
fn memory_files_have_nodes_too() {
    let transport = ProcessTransport::new().nodes(&[3, 1]);
    eps(4, &builder().transport(transport).hierarchy(Hierarchy::Node), |ep| {
        round_trip(&ep);
        let tokens = Tokens::new(ep.rank(), 5);
        let out = combine(dispatch(&ep, &tokens, &opts(1)).unwrap(), &node_reduced()).unwrap();
        for t in 0..5 {
            let copies = (0..4).filter(|&r| went_to(&ep, &tokens, t, r)).count();
            assert_eq!(out[t * HIDDEN], tokens.rows[t * HIDDEN] * copies as f32);
        }
    });
}

/// Without a GPU too: it is known before one is looked for.
#[cfg(feature = "cuda")]
#[test]
fn a_plan_for_gpus_counts_what_nodes_take() {
    let gpu = || builder().place(ep_runtime::Place::Cuda(0));
    let nodes = |of: &[usize]| ep_runtime::NvlinkTransport::new(0).nodes(of.to_vec());
    let plan = |of: &[usize], hierarchy| {
        gpu().transport(nodes(of)).hierarchy(hierarchy).plan(of.len()).unwrap()
    };
    let (node, flat) = (plan(&[0, 0, 1, 1], Hierarchy::Node), plan(&[0, 0, 1, 1], Hierarchy::Flat));
    assert!(node.device_bytes > flat.device_bytes && node.pinned_bytes > flat.pinned_bytes);
    assert!(node.forward_bytes > 0 && flat.forward_bytes == 0);
    // Nothing crosses where all are one node.
    let (node, flat) = (plan(&[0, 0], Hierarchy::Node), plan(&[0, 0], Hierarchy::Flat));
    assert_eq!((node.device_bytes, node.forward_bytes), (flat.device_bytes, 0));
}
