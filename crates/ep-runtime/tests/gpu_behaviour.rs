//! What callers may rely on beside the numbers, on GPUs: lanes, slots, bad input, dropping
//! and lost ranks. Without a GPU each test says so and passes.
#![cfg(feature = "cuda")]

mod common;

use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use common::gpu::Gpus;
use common::gpu_small::{LIMIT, Rank, STOPS, capacity, free_bytes, gpus, ok, plain, small};
use common::ground::Grounds;
use common::small::{HIDDEN, PROMPT, TOPK, Tokens, assert_argument, builder, opts, shape};
use common::{eps_of, exercise, ranks};
use cudarc::driver::sys;
use ep_bench::oracle::{Float, JobSpec, Mode, Payload as Kind, PlacementSpec, Routing};
use ep_runtime::{
    CombineOpts, Combined, DispatchOpts, EpBuilder, EpError, ErrorKind, Group, Layout,
    NvlinkTransport, Place, Precision, Queue, Route, combine_all, dispatch_all,
};

#[test]
fn bad_memory_and_queues_are_refused() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 2, &builder(), |rank| {
        let (here, queue) = (rank.gpu.ordinal(), rank.queue());
        let on_host = Tokens::new(rank.ep.rank(), 4);
        rank.load(&on_host);
        let go = |payload| rank.ep.dispatch(&queue, payload, rank.route(4), &opts(0));
        let host = vec![0.0f32; 4 * HIDDEN];
        assert_argument(go(rank.rows_at(here, host.as_ptr() as u64, 4)), "Host memory");
        let there = here + 1;
        assert_argument(go(rank.rows_at(there, rank.rows, 4)), "works in");
        assert_argument(go(rank.rows_at(here, rank.rows + 4, 4)), "multiple of 16");
        assert_argument(go(on_host.payload()), "works in");
        if let Ok(other) = ep_kernels::cuda::Device::open(1 - here.min(1)) {
            let stream = other.stream(0).unwrap();
            let memory = ep_kernels::cuda::DeviceMemory::zeroed(&stream, 4096, LIMIT).unwrap();
            assert_argument(go(rank.rows_at(here, memory.address(), 4)), "Device(");
            // SAFETY: the stream outlives the call, which refuses it.
            let queue = unsafe { Queue::from_raw(stream.raw().cast(), 1 - here.min(1)) };
            let e = rank.ep.dispatch(&queue, rank.payload(4), rank.route(4), &opts(0));
            assert_argument(e, "a stream of GPU");
        }
        let e = rank.ep.dispatch(&Queue::host(), rank.payload(4), rank.route(4), &opts(0));
        assert_argument(e, "pass a stream");
        foreign_stream(here, |queue| {
            let e = rank.ep.dispatch(queue, rank.payload(4), rank.route(4), &opts(0));
            assert_argument(e, "another context");
        });
        // Memory of the other rank's GPU is given back, which waits for whatever runs there.
        rank.ep.group().barrier().unwrap();
        // A combine's output is refused by one rank alone; its next try counts.
        let result = rank.dispatch(4, &opts(0)).unwrap();
        let into = rank.out_at(host.as_ptr() as u64, 4);
        let e = result.combine(&queue, into, &plain()).unwrap_err();
        assert_eq!((e.kind(), e.group_usable()), (ErrorKind::Argument, true), "{e}");
        rank.round_trip();
    });
}

type Create = unsafe extern "C" fn(*mut sys::CUcontext, u32, i32) -> sys::CUresult;

fn foreign_stream(ordinal: usize, f: impl FnOnce(&Queue)) {
    let (mut device, mut context, mut stream) = (0, std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the outputs are valid for the calls; what is made is destroyed once.
    unsafe {
        ok(sys::cuDeviceGet(&mut device, ordinal as i32));
        // Which version of it cudarc knows depends on the build.
        let library = libloading::Library::new("libcuda.so.1").unwrap();
        let create: libloading::Symbol<'_, Create> = library.get(b"cuCtxCreate_v2\0").unwrap();
        ok(create(&mut context, 0, device));
        ok(sys::cuStreamCreate(&mut stream, 1));
        ok(sys::cuCtxPopCurrent_v2(&mut std::ptr::null_mut()));
        f(&Queue::from_raw(stream.cast(), ordinal));
        ok(sys::cuStreamDestroy_v2(stream));
        ok(sys::cuCtxDestroy_v2(context));
    }
}

#[test]
fn bad_ids_are_the_same_error_on_every_rank() {
    let Some(gpus) = gpus() else { return };
    for (ids, needle) in [([1, 9], "out of range"), ([4, 4], "occurs twice")] {
        small(&gpus, 3, &builder(), |rank| {
            let mut tokens = Tokens::new(rank.ep.rank(), 4);
            if rank.ep.rank() == 1 {
                tokens.ids[4..6].copy_from_slice(&ids);
            }
            rank.load(&tokens);
            let e = rank.dispatch(4, &opts(0)).unwrap_err();
            assert!(matches!(e, EpError::Ids { rank: 1, token: 2, .. }), "{e}");
            assert!(e.to_string().contains(needle) && e.group_usable(), "{e}");
            rank.round_trip();
            // In capacity mode the host learns of it later.
            rank.load(&tokens);
            let result = rank.dispatch(4, &capacity()).unwrap();
            assert_eq!(result.handle().num_rows(), 0);
            let e = rank.combine(result, &plain()).unwrap().wait(LIMIT).unwrap_err();
            assert!(e.group_usable(), "{e}");
            assert_eq!(e.kind(), ErrorKind::Mismatch, "{e}");
            rank.round_trip();
        });
    }
}

#[test]
fn too_many_rows_are_the_same_error_on_every_rank() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 3, &EpBuilder::new(shape().max_rows(8)), |rank| {
        let mut tokens = Tokens::new(rank.ep.rank(), 5);
        tokens.ids = [0, 1].repeat(5);
        rank.load(&tokens);
        match rank.dispatch(5, &opts(0)).unwrap_err() {
            EpError::Capacity { rank, needed, reserved, setting, .. } => {
                assert_eq!((rank, needed, reserved, setting), (0, 15, 8, "max_rows"));
            }
            other => panic!("{other}"),
        }
        rank.round_trip();
    });
}

#[test]
fn what_is_in_use_is_refused() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 2, &builder().slots(3), |rank| {
        rank.load(&Tokens::new(rank.ep.rank(), 4));
        let queue = rank.queue();
        let handle = rank.dispatch(4, &opts(0)).unwrap().handle().clone();
        let sent = rank
            .ep
            .dispatch_send(&queue, rank.payload(4), Route::Cached(&handle), &opts(1))
            .unwrap();
        let e = rank.dispatch(4, &opts(1)).unwrap_err();
        assert!(matches!(e, EpError::LaneBusy { lane: 1, .. }) && e.group_usable(), "{e}");
        let _first = sent.recv(&queue).unwrap();
        let _held = [(); 2].map(|()| rank.ep.combine_slot(&handle, &queue).unwrap());
        let e = rank.dispatch(4, &opts(0)).unwrap_err();
        assert!(matches!(e, EpError::NoFreeSlot { slots: 3, .. }) && e.group_usable(), "{e}");
        drop(_held);
        let mut handles = vec![handle];
        let e = loop {
            match rank.dispatch(4, &opts(0)) {
                Ok(result) => handles.push(result.handle().clone()),
                Err(e) => break e,
            }
        };
        assert!(matches!(e, EpError::NoFreeHandle { handles: 4, .. }) && e.group_usable(), "{e}");
        drop(handles);
        rank.round_trip();
    });
    small(&gpus, 2, &builder(), |one| {
        one.load(&Tokens::new(one.ep.rank(), 4));
        let handle = one.dispatch(4, &opts(0)).unwrap().handle().clone();
        // Not by `gpus.place`, which takes the memory that this rank holds.
        let two = builder().place(Place::Cuda(one.gpu.ordinal())).handles(4);
        let two = two.build(one.ep.group()).unwrap();
        let cached = Route::Cached(&handle);
        let e = two.dispatch(&one.queue(), one.payload(4), cached, &opts(0));
        assert_argument(e, "another group");
        one.round_trip();
    });
}

#[test]
fn layers_that_do_not_fit_are_refused() {
    let Some(gpus) = gpus() else { return };
    ranks(2, |group| {
        let place = |builder| gpus.place(group.rank(), 2, builder);
        let none = place(builder()).comm_sms(0).build(&group).unwrap_err();
        assert!(none.to_string().contains("SMs") && none.group_usable(), "{none}");
        let huge = shape().max_tokens(1 << 20).max_rows(1 << 30);
        let e = place(EpBuilder::new(huge)).build(&group).unwrap_err();
        println!("out of memory: {e}");
        assert!(e.group_usable(), "{e}");
        let ep = place(builder()).build(&group).unwrap();
        Rank::new(&gpus, ep).round_trip();
    });
}

#[test]
fn a_rank_that_stops_is_named_and_a_new_group_works() {
    let Some(gpus) = gpus() else { return };
    for opts in [opts(0), capacity()] {
        let through = AtomicUsize::new(0);
        let builder = |rank| gpus.place(rank, 3, builder()).timeout(STOPS);
        eps_of(3, &builder, |ep| Rank::new(&gpus, ep).one_stops(&opts, &through));
        let began = Instant::now();
        small(&gpus, 3, &common::small::builder(), |rank| rank.round_trip());
        println!("a new group took {:?}", began.elapsed());
    }
}

#[test]
fn dropped_halves_leave_the_group_usable() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 3, &builder(), |rank| {
        let (queue, me) = (rank.queue(), rank.ep.rank());
        for round in 0..20 {
            rank.load(&Tokens::new(me, 6));
            let sent = rank.ep.dispatch_send(&queue, rank.payload(6), rank.route(6), &opts(0));
            match (round + me) % 3 {
                0 => drop(sent.unwrap()),
                _ => drop(sent.unwrap().recv(&queue).unwrap()),
            }
            let result = rank.dispatch(6, &opts(0)).unwrap();
            let send = result.combine_send(&queue, &plain()).unwrap();
            if (round + me) % 3 == 1 {
                drop(send);
            } else {
                send.recv(&queue, rank.out_at(rank.out, 6)).unwrap();
            }
            let result = rank.dispatch(6, &opts(0)).unwrap();
            match round % 2 {
                0 => drop(result.release(&queue)),
                _ => drop(result.into_owned(&queue).unwrap()),
            }
            rank.round_trip();
        }
        assert_eq!(rank.ep.free_slots(), 3);
    });
}

#[test]
fn dropping_a_layer_waits_for_no_other_layers_stream() {
    let Some(gpus) = gpus() else { return };
    let dropped = std::sync::Barrier::new(2);
    let placed = |rank| gpus.place(rank, 2, builder()).timeout(3 * PROMPT);
    eps_of(2, &placed, |ep| {
        let rank = Rank::new(&gpus, ep);
        let alone = Group::local(1).unwrap().remove(0);
        let here = rank.gpu.ordinal();
        let other = builder().place(Place::Cuda(here)).transport(NvlinkTransport::new(here));
        let other = other.build(&alone).unwrap();
        let (queue, me) = (rank.queue(), rank.ep.rank());
        rank.load(&Tokens::new(me, 6));
        rank.ep.group().barrier().unwrap();
        if me == 1 {
            dropped.wait();
        }
        // An exact one would wait on the host.
        let sent = rank.ep.dispatch_send(&queue, rank.payload(6), rank.route(6), &capacity());
        if me == 0 {
            // This rank's stream waits for the other rank, and that one for this thread.
            let began = Instant::now();
            drop(other);
            let took = began.elapsed();
            dropped.wait();
            assert!(took < PROMPT, "{took:?}");
        }
        drop(sent.unwrap().recv(&queue).unwrap());
        rank.round_trip();
    });
}

#[test]
fn lanes_are_in_flight_on_two_streams_and_results_are_kept() {
    let Some(gpus) = gpus() else { return };
    small(&gpus, 2, &builder().slots(5), |rank| {
        let (me, queue) = (rank.ep.rank(), rank.queue());
        let tokens = Tokens::new(me, 6);
        rank.load(&tokens);
        let stream = rank.gpu.stream().device().stream(0).unwrap();
        // SAFETY: waited for before it goes.
        let other = unsafe { Queue::from_raw(stream.raw().cast(), rank.gpu.ordinal()) };
        let kept = rank.dispatch(6, &opts(0)).unwrap();
        let image = |result: &ep_runtime::Dispatched, queue: &Queue| {
            let rows = result.to_host(queue).unwrap();
            (0..result.num_rows()).flat_map(|i| rows.rows().payload().bytes(i).to_vec()).collect()
        };
        let expected: Vec<u8> = image(&kept, &queue);
        let second_out = rank.gpu.place(None, 6 * HIDDEN * 4);
        for _ in 0..20 {
            let send = |queue: &Queue, lane| {
                let (payload, route) = (rank.payload(6), rank.route(6));
                rank.ep.dispatch_send(queue, payload, route, &opts(lane)).unwrap()
            };
            let (a, b) = (send(&queue, 0), send(&other, 1));
            let (b, a) = (b.recv(&other).unwrap(), a.recv(&queue).unwrap());
            let lane = CombineOpts { lane: Some(1), ..plain() };
            let (a, b) =
                (a.combine_send(&queue, &plain()).unwrap(), b.combine_send(&other, &lane).unwrap());
            let b = b.recv(&other, rank.out_at(second_out, 6)).unwrap();
            a.recv(&queue, rank.out_at(rank.out, 6)).unwrap().wait(LIMIT).unwrap();
            b.wait(LIMIT).unwrap();
            rank.check(&tokens);
            let (mut one, mut two) = ([0u8; 6 * HIDDEN * 4], [0u8; 6 * HIDDEN * 4]);
            rank.gpu.fetch(rank.out, &mut one);
            rank.gpu.fetch(second_out, &mut two);
            assert_eq!(one, two);
        }
        let now: Vec<u8> = image(&kept, &queue);
        assert_eq!(now, expected);
        stream.wait("the second stream", LIMIT).unwrap();
    });
}

/// In a process of its own, whose streams on a GPU share one hardware queue.
#[test]
fn one_thread_drives_all_ranks_through_one_hardware_queue() {
    const NAME: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    const TEST: &str = "one_thread_drives_all_ranks_through_one_hardware_queue";
    if std::env::var(NAME).as_deref() != Ok("1") {
        let this = std::env::current_exe().unwrap();
        let mut child = std::process::Command::new(this);
        let status = child.args(["--exact", TEST, "--nocapture"]).env(NAME, "1").status().unwrap();
        assert!(status.success());
        return;
    }
    let Some(gpus) = gpus() else { return };
    for world in [2, 4] {
        // One queue serves ranks of one GPU.
        let placed = |_| gpus.place(0, world, builder());
        let all = eps_of(world, &placed, |ep| ep);
        let gpu = Rank::new(&gpus, all[0].clone());
        let queue = gpu.queue();
        let places: Vec<[u64; 3]> = (0..world)
            .map(|_| [HIDDEN * 4, TOPK * 4, HIDDEN * 4].map(|b| gpu.gpu.place(None, 16 * b)))
            .collect();
        let gpu = gpu.gpu;
        let mut rank = Rank { ep: all[0].clone(), gpu, rows: 0, ids: 0, out: 0 };
        for round in 0..10 {
            let count = |r: usize| (round * 3 + r) % 8;
            let tokens: Vec<Tokens> = (0..world).map(|r| Tokens::new(r, count(r))).collect();
            for (at, tokens) in places.iter().zip(&tokens) {
                [rank.rows, rank.ids, rank.out] = *at;
                rank.load(tokens);
            }
            let calls: Vec<_> = (0..world)
                .map(|r| {
                    let [rows, ids, _] = places[r];
                    let payload = rank.rows_at(0, rows, count(r));
                    // SAFETY: in the arena.
                    let ids = unsafe {
                        let kind = ep_runtime::IdKind::I32;
                        ep_runtime::DeviceIds::from_raw(0, ids, count(r) * TOPK, kind)
                    };
                    (&all[r], payload, Route::Device { ids, weights: None })
                })
                .collect();
            let options = if round % 2 == 0 { opts(0) } else { capacity() };
            let results = dispatch_all(&queue, &calls, &options).unwrap();
            let outs = (0..world).map(|r| Combined::new(rank.out_at(places[r][2], count(r))));
            let events =
                combine_all(&queue, results.into_iter().zip(outs).collect(), &plain()).unwrap();
            events.iter().for_each(|e| e.wait(LIMIT).unwrap());
            for r in 0..world {
                rank.ep = all[r].clone();
                [rank.rows, rank.ids, rank.out] = places[r];
                rank.check(&tokens[r]);
            }
        }
    }
}

/// `EP_GPU_ITERATIONS` iterations of changing shapes, 3,000 otherwise.
#[test]
fn many_shapes_take_no_more_memory() {
    let Some(gpus) = gpus() else { return };
    let asked = std::env::var("EP_GPU_ITERATIONS").ok().and_then(|n| n.parse().ok());
    let iterations: usize = asked.unwrap_or(3_000).max(12);
    small(&gpus, 2, &builder(), |rank| {
        let me = rank.ep.rank();
        let layouts = [Layout::RankMajor, Layout::ExpertMajor { alignment: 4 }];
        let mut free = None;
        for i in 0..iterations {
            let tokens = Tokens::new(me + i, (i * 7 + me * 5) % 17);
            let count = tokens.ids.len() / TOPK;
            rank.load(&tokens);
            let layout = layouts[i % 2];
            let result = rank.dispatch(
                count,
                &DispatchOpts { layout, capacity: i % 3 == 0, lane: i % 2, ..opts(0) },
            );
            let precision = if i % 4 == 1 { Precision::Reduced } else { Precision::Exact };
            let combine = CombineOpts { precision, ..plain() };
            rank.combine(result.unwrap(), &combine).unwrap().wait(LIMIT).unwrap();
            if i % 2 == 0 {
                rank.check(&tokens);
            }
            if i % (iterations / 6) == iterations / 6 - 1 {
                rank.ep.group().barrier().unwrap();
                let now = free_bytes(rank.gpu.stream());
                assert_eq!(*free.get_or_insert(now), now, "iteration {i}");
                rank.ep.group().barrier().unwrap();
            }
        }
    });
}

#[test]
fn shapes_of_training_with_biases_and_weights_home() {
    let Some(gpus) = Gpus::new(2, 256 << 20) else { return };
    for (seed, hidden, tokens, topk, experts) in
        [(0, 7168, [33, 18], 8, 256), (1, 2880, [41, 0], 4, 128), (2, 7168, [0, 57], 8, 2)]
    {
        let spec = JobSpec {
            ranks: 2,
            experts,
            topk: topk.min(experts),
            units: hidden / 8,
            payload: Kind::Bf16,
            placement: PlacementSpec::Contiguous,
            alignment: 128,
            masked_percent: 0,
            routing: if seed == 2 { Routing::OneRank(1) } else { Routing::Uniform },
            physical_ids: false,
            tokens: tokens.to_vec(),
            weights: true,
            ..JobSpec::random(seed)
        };
        let mode = [Mode::RankMajor, Mode::ExpertExact, Mode::ExpertReduced];
        for (biases, mode) in (0..3).zip(mode) {
            let how = exercise::How {
                mode,
                float: Float::Bf16,
                weighted: mode != Mode::RankMajor,
                biases,
                capacity: biases == 1,
                nodes: common::Nodes::Mapped,
                hierarchy: ep_runtime::Hierarchy::Flat,
                node_reduced: false,
                narrow_ids: biases == 2,
            };
            exercise::check(&spec.build(), how, seed, &gpus);
        }
    }
}
