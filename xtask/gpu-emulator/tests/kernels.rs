//! CUDA sources through the emulator's compiler, and run: what CUDA promises holds, mistakes show.

use std::sync::OnceLock;

use gpu_emulator::kernel::{Image, Kernel, KernelError, Launch};
use gpu_emulator::nvrtc::{CompileError, compile};

/// A kernel of a source of this folder, which is compiled once.
fn kernel(name: &str) -> Kernel {
    static IMAGE: OnceLock<Image> = OnceLock::new();
    let image = IMAGE.get_or_init(|| {
        let text = include_str!("kernels.cu");
        Image::load(&compile("kernels.cu", text, 900).unwrap().image).unwrap()
    });
    image.kernel(name).unwrap_or_else(|| panic!("no kernel {name}"))
}

fn launch(blocks: u32, threads: u32, seed: u64, params: &[&[u8]]) -> Launch {
    Launch {
        grid: [blocks, 1, 1],
        block: [threads, 1, 1],
        cluster: 1,
        dynamic_shared: 0,
        params: params.iter().map(|bytes| bytes.to_vec()).collect(),
        sms: (0..132).collect(),
        sm_count: 132,
        seed,
        number: 3,
    }
}

fn address<T>(list: &mut [T]) -> [u8; 8] {
    (list.as_mut_ptr().expose_provenance() as u64).to_ne_bytes()
}

fn run(kernel: &Kernel, launch: &Launch) -> Result<(), KernelError> {
    // SAFETY: the parameters of these tests are addresses of live buffers as large as the kernels use.
    unsafe { kernel.run(launch) }
}

/// The report of a launch that has to fail.
fn fault(kernel: &Kernel, launch: &Launch) -> String {
    match run(kernel, launch) {
        Err(KernelError::Fault { report, .. }) => report,
        other => panic!("{} should be faulted: {other:?}", kernel.name()),
    }
}

#[test]
fn parameters_of_all_kinds_arrive() {
    let take = kernel("take");
    assert_eq!(take.param_sizes(), [4, 8, 4, 24, 1]);
    assert_eq!(take.max_threads(), 1024);
    let mut out = [0u64; 5];
    let mut several = [0u8; 24];
    several[..4].copy_from_slice(&9u32.to_ne_bytes());
    several[8..16].copy_from_slice(&(1u64 << 60).to_ne_bytes());
    several[16..20].copy_from_slice(&2.5f32.to_ne_bytes());
    let to = address(&mut out);
    let params: [&[u8]; 5] = [&7u32.to_ne_bytes(), &to, &1.5f32.to_ne_bytes(), &several, &[200]];
    run(&take, &launch(1, 33, 0, &params)).unwrap();
    assert_eq!(out, [7, 9, 1 << 60, 200, 1]);
}

#[test]
fn a_launch_that_does_not_fit_is_an_error_before_anything_happens() {
    let neighbours = kernel("neighbours");
    assert_eq!(neighbours.max_threads(), 512);
    assert!(neighbours.static_shared() >= 2048);
    let to = [0u8; 8];
    let good = launch(1, 32, 0, &[&to]);
    let bad = [
        Launch { params: vec![vec![0; 4]], ..good.clone() },
        Launch { block: [513, 1, 1], ..good.clone() },
        Launch { block: [0, 1, 1], ..good.clone() },
        Launch { grid: [0, 1, 1], ..good.clone() },
        Launch { sms: Vec::new(), ..good.clone() },
        Launch { dynamic_shared: 1 << 20, ..good.clone() },
    ];
    for launch in bad {
        assert!(matches!(run(&neighbours, &launch), Err(KernelError::Launch { .. })), "{launch:?}");
    }
}

#[test]
fn a_barrier_orders_writes_and_without_it_they_are_seen_out_of_order() {
    let expected: Vec<u32> =
        (0..3).flat_map(|b| (0..200).map(move |t| b * 1000 + (t + 199) % 200)).collect();
    let mut wrong = 0;
    for seed in 0..10 {
        let mut out = vec![0u32; 600];
        let to = address(&mut out);
        run(&kernel("neighbours"), &launch(3, 200, seed, &[&to])).unwrap();
        assert_eq!(out, expected);
        run(&kernel("neighbours_unsynchronised"), &launch(3, 200, seed, &[&to])).unwrap();
        wrong += u32::from(out != expected);
    }
    assert_eq!(wrong, 10, "the missing barrier went unnoticed");
}

#[test]
fn a_blocks_votes_count_every_thread() {
    let mut out = vec![0u32; 75];
    let to = address(&mut out);
    run(&kernel("votes"), &launch(1, 75, 1, &[&to])).unwrap();
    assert_eq!(out, [1 | 1 << 2 | 25 << 8; 75]);
}

#[test]
fn lanes_exchange_what_they_say() {
    for seed in 0..5 {
        let mut out = vec![0u64; 12 * 64];
        let to = address(&mut out);
        run(&kernel("lanes"), &launch(1, 64, seed, &[&to])).unwrap();
        for (lane, mine) in (0..64u64).map(|t| t % 32).zip(out.chunks(12)) {
            let ballot = (0..32).filter(|l| l % 5 == 0).fold(0u64, |all, l| all | 1 << l);
            let first_bit =
                lane.checked_ilog2().map_or(0, |_| u64::from(lane.trailing_zeros()) + 1);
            let bits = u64::from(lane.count_ones())
                | first_bit << 8
                | u64::from((lane as u32).leading_zeros()) << 16;
            let expected = [
                5 << 40,
                if lane < 3 { lane } else { lane - 3 },
                if lane > 28 { lane } else { lane + 3 },
                lane ^ 16,
                ballot,
                1,
                1,
                0xff << (lane / 8 * 8),
                31 | 496 << 32,
                bits,
                lane / 2 * 2,
            ];
            assert_eq!(mine[..11], expected, "lane {lane}");
        }
    }
}

#[test]
fn parts_of_a_warp_go_their_own_ways() {
    for seed in 0..20 {
        let mut out = vec![0u32; 32];
        let to = address(&mut out);
        run(&kernel("halves"), &launch(1, 32, seed, &[&to])).unwrap();
        let expected: Vec<u32> = (0..32).map(|l| if l < 16 { 120 } else { 3 * 0xaaaa }).collect();
        assert_eq!(out, expected);
    }
}

#[test]
fn threads_that_have_left_are_not_waited_for() {
    for seed in 0..20 {
        let mut out = vec![0u32; 80];
        let to = address(&mut out);
        run(&kernel("leavers"), &launch(1, 80, seed, &[&to])).unwrap();
        let ballot = |t: u32| if t < 64 { 0x0101_0101 } else { 0x0101 };
        let expected: Vec<u32> =
            (0..80).map(|t| if t % 8 == 0 { ballot(t) + 10 } else { 0 }).collect();
        assert_eq!(out, expected);
    }
}

#[test]
fn dynamic_shared_memory_is_garbage_first_and_every_blocks_own() {
    let mut out = vec![0u32; 12];
    let words = 25_000u32;
    let to = address(&mut out);
    let launch =
        Launch { dynamic_shared: 4 * words, ..launch(4, 32, 5, &[&to, &words.to_ne_bytes()]) };
    run(&kernel("dynamic"), &launch).unwrap();
    assert_eq!(out, [words, (0..words).sum::<u32>(), 7].repeat(4));
}

#[test]
fn a_write_behind_shared_memory_is_noticed() {
    let launch = Launch { dynamic_shared: 100, ..launch(1, 1, 0, &[&25u32.to_ne_bytes()]) };
    let report = fault(&kernel("beyond"), &launch);
    assert!(report.contains("behind the end of its shared memory"), "{report}");
}

#[test]
fn atomics_lose_nothing_and_what_is_not_atomic_does() {
    let mut lost = 0;
    for seed in 0..10 {
        let (mut out, mut wide) = ([0u32; 6], [0, u64::MAX]);
        let to = [address(&mut out), address(&mut wide)];
        run(&kernel("atomics"), &launch(8, 64, seed, &[&to[0], &to[1]])).unwrap();
        assert_eq!((out[0], out[1], out[2], out[3]), (512, u32::MAX, 1, 1));
        assert_eq!((out[5], wide), (1, [511 << 32, 5]));
        assert!((1..=512).contains(&out[4]));
        let mut count = [0u32];
        let to = address(&mut count);
        run(&kernel("counted_wrongly"), &launch(4, 32, seed, &[&to])).unwrap();
        lost += u32::from(count[0] != 128);
    }
    assert_eq!(lost, 10);
}

#[test]
fn blocks_are_where_the_launch_says() {
    let mut out = vec![0u32; 5 * 6];
    let to = address(&mut out);
    let launch = Launch { cluster: 2, sms: vec![8, 9, 40, 41], ..launch(6, 32, 1, &[&to]) };
    run(&kernel("where"), &launch).unwrap();
    for (block, mine) in (0..).zip(out.chunks(5)) {
        let sm = [8, 9, 40, 41][block as usize % 4];
        assert_eq!(mine, [sm, 132, block / 2, 2, block % 2]);
    }
}

#[test]
fn blocks_that_stay_are_there_at_once() {
    let mut out = vec![0u64; 2 * 132];
    let to = address(&mut out);
    let stay = 200_000_000u64;
    run(&kernel("stay"), &launch(132, 32, 4, &[&to, &stay.to_ne_bytes()])).unwrap();
    let (starts, ends): (Vec<u64>, Vec<u64>) = out.chunks(2).map(|two| (two[0], two[1])).unzip();
    assert!(starts.iter().max() < ends.iter().min(), "they did not overlap");
    assert!(out.chunks(2).all(|two| two[1] - two[0] >= stay));
}

#[test]
fn a_launch_repeats_by_its_seed_and_number() {
    let order = |seed, number| {
        let mut out = [0u32; 6];
        let mut wide = [0u64; 2];
        let to = [address(&mut out), address(&mut wide)];
        let launch = Launch { number, ..launch(8, 64, seed, &[&to[0], &to[1]]) };
        run(&kernel("atomics"), &launch).unwrap();
        // Which thread came first.
        out[4]
    };
    let first: Vec<u32> = (0..8).map(|seed| order(seed, 0)).collect();
    assert_eq!(first, (0..8).map(|seed| order(seed, 0)).collect::<Vec<_>>());
    assert_ne!(first, (0..8).map(|seed| order(seed, 1)).collect::<Vec<_>>());
}

/// Against the `half` crate's idea of the same conversions.
#[test]
fn halves_are_rounded_as_a_gpu_does() {
    let edges = [
        0u32,
        0x8000_0000,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0001,
        0xff80_0001,
        0x477f_efff,
        0x477f_f000,
        0x3300_0000,
        0x3300_0001,
        0x3380_0000,
        0x387f_ffff,
        0x3f80_8000,
        0x3f81_8000,
        0x7f7f_ffff,
        1,
        0x0001_0001,
        0x3c00_0400,
        0x7bff_7c00,
        0xfbff_fc01,
        0x0000_03ff,
    ];
    let mut random = 1u32;
    let mut input: Vec<u32> = edges.to_vec();
    input.resize_with(64 * 256, || {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        random.rotate_left(11)
    });
    let mut out = vec![0u32; 4 * input.len()];
    let to = [address(&mut input), address(&mut out)];
    run(&kernel("halves_of_floats"), &launch(64, 256, 0, &[&to[0], &to[1]])).unwrap();
    for (&x, got) in input.iter().zip(out.chunks(4)) {
        let float = f32::from_bits(x);
        let bf16 = if float.is_nan() { 0x7fff } else { half::bf16::from_f32(float).to_bits() };
        let f16 = if float.is_nan() { 0x7fff } else { half::f16::from_f32(float).to_bits() };
        assert_eq!(got[0], u32::from(bf16) << 16 | 0x3f80, "{x:08x}");
        assert_eq!(got[1], 0x3c00_0000 | u32::from(f16), "{x:08x}");
        let widened = half::f16::from_bits(x as u16).to_f32();
        let back = f32::from_bits(got[2]);
        assert!(
            back.to_bits() == widened.to_bits() || back.is_nan() && widened.is_nan(),
            "{x:08x}"
        );
        for (sum, a, b) in [(got[3] >> 16, x >> 16, 0x3c00), (got[3] & 0xffff, x & 0xffff, 1)] {
            let wide = |bits: u32| half::f16::from_bits(bits as u16).to_f64();
            let exact = wide(a) + wide(b);
            let expected =
                if exact.is_nan() { 0x7fff } else { half::f16::from_f64(exact).to_bits() };
            assert_eq!(sum, u32::from(expected), "{a:04x} + {b:04x}");
        }
    }
}

#[test]
fn errors_of_a_source_name_file_and_line() {
    let error = compile("broken.cu", "\n\nint f( { }", 900).unwrap_err();
    let CompileError::Source(log) = error else { panic!("{error}") };
    assert!(log.contains("broken.cu(3): error"), "{log}");
    let asm = "#line 7 \"gemm.cu\"\n__device__ void f() { asm volatile(\"wgmma.fence;\"); }";
    let error = compile("x.cu", asm, 900).unwrap_err().to_string();
    assert!(error.contains("gemm.cu(7): error: inline PTX"), "{error}");
}

#[test]
fn what_is_no_image_is_an_error() {
    for bytes in [&b""[..], b"\x7fELF and no more", &[0; 4096]] {
        assert!(matches!(Image::load(bytes), Err(KernelError::Image(_))));
    }
}
