//! Kernels with mistakes that a GPU shows rarely, or by standing still.

use std::sync::OnceLock;

use gpu_emulator::kernel::{Image, Kernel, KernelError, Launch};
use gpu_emulator::nvrtc::compile;

const PIECES: u32 = 9;

fn kernel(name: &str) -> Kernel {
    static IMAGE: OnceLock<Image> = OnceLock::new();
    let image = IMAGE.get_or_init(|| {
        Image::load(&compile("bulk.cu", include_str!("bulk.cu"), 900).unwrap().image).unwrap()
    });
    image.kernel(name).unwrap()
}

/// Runs `copy<MISTAKE>` of bulk.cu with a seed; what it copied.
fn copy(mistake: u32, seed: u64) -> Result<bool, String> {
    let kernel = kernel(&format!("copy{mistake}"));
    let from: Vec<u128> = (0..32 * u128::from(PIECES)).map(|i| i * 0x1_0001_0001 + 7).collect();
    let mut to = vec![0u128; 64 * PIECES as usize];
    let address = |at: usize| (at as u64).to_ne_bytes().to_vec();
    let launch = Launch {
        grid: [1, 1, 1],
        block: [32, 1, 1],
        cluster: 1,
        dynamic_shared: 1024 + 16,
        params: vec![
            address(to.as_mut_ptr().expose_provenance()),
            address(from.as_ptr().expose_provenance()),
            PIECES.to_ne_bytes().to_vec(),
        ],
        sms: vec![0],
        sm_count: 132,
        seed,
        number: 0,
    };
    // SAFETY: both buffers are as large as the kernel copies.
    match unsafe { kernel.run(&launch) } {
        Ok(()) => {}
        Err(KernelError::Fault { report, .. }) => return Err(report),
        Err(error) => panic!("{error}"),
    }
    let twice = from.chunks(32).flat_map(|piece| [piece, piece].concat());
    Ok(twice.eq(to))
}

#[test]
fn bulk_copies_with_every_wait_are_right_whatever_the_order() {
    for seed in 0..200 {
        assert_eq!(copy(0, seed), Ok(true), "seed {seed}");
    }
}

#[test]
fn a_missing_wait_shows_as_wrong_data() {
    for mistake in [1, 2] {
        let wrong = (0..50).filter(|&seed| copy(mistake, seed) == Ok(false)).count();
        assert!(wrong > 25, "mistake {mistake} showed {wrong} times of 50");
    }
}

#[test]
fn a_mistake_that_is_certain_is_reported() {
    let expected = [
        (4, "no fence by thread 0"),
        (5, "no mbarrier was initialised"),
        // Or the wait for the phase that was over before the second.
        (6, "of the mbarrier at 0x800"),
        (7, "504 bytes"),
    ];
    for (mistake, text) in expected {
        let reports: Vec<_> = (0..20).filter_map(|seed| copy(mistake, seed).err()).collect();
        assert!(reports.len() > 5, "mistake {mistake} showed {} times of 20", reports.len());
        assert!(reports.iter().all(|report| report.contains(text)), "{reports:?}");
    }
}

#[test]
fn a_thread_that_leaves_its_stores_behind_is_reported() {
    let reports: Vec<_> = (0..50).filter_map(|seed| copy(3, seed).err()).collect();
    assert!(reports.len() > 10, "showed {} times of 50", reports.len());
    assert!(reports.iter().all(|report| report.contains("may still read")), "{reports:?}");
}

/// Who waits for the wrong phase either goes on too early or for ever.
#[test]
fn a_wrong_phase_shows() {
    for seed in 0..20 {
        let result = copy(8, seed);
        let stuck = matches!(&result, Err(report) if report.contains("of the mbarrier"));
        assert!(result == Ok(false) || stuck || result.is_err(), "seed {seed}: {result:?}");
    }
}

#[test]
fn a_deadlock_says_who_waits_for_what() {
    let text = "extern \"C\" __global__ void stuck(u32 *out) {\n\
                if (threadIdx.x < 8) __syncwarp(); else if (threadIdx.x < 32) __syncthreads();\n\
                else if (threadIdx.x == 40) __ballot_sync(0xffff, 1); }";
    let image = Image::load(&compile("stuck.cu", text, 900).unwrap().image).unwrap();
    let mut launch = Launch {
        grid: [2, 1, 1],
        block: [40, 1, 1],
        cluster: 1,
        dynamic_shared: 0,
        params: vec![vec![0; 8]],
        sms: vec![0],
        sm_count: 1,
        seed: 1,
        number: 1,
    };
    let kernel = image.kernel("stuck").unwrap();
    // SAFETY: the kernel uses no address.
    let error = unsafe { kernel.run(&launch) }.unwrap_err().to_string();
    assert!(error.starts_with("stuck, block "), "{error}");
    for line in [
        "threads 0 to 7: each waits at __syncwarp with mask ffffffff",
        "threads 8 to 31: each waits at __syncthreads",
        "threads 32 to 39: each exited",
    ] {
        assert!(error.contains(line), "{error}");
    }
    launch.block = [48, 1, 1];
    // SAFETY: as above.
    let error = unsafe { kernel.run(&launch) }.unwrap_err().to_string();
    assert!(error.contains("__ballot_sync") || error.contains("no thread can go on"), "{error}");
    assert!(image.kernel("missing").is_none());
}

#[test]
fn memory_that_is_not_there_is_reported_and_the_process_goes_on() {
    let text = "extern \"C\" __global__ void write(u64 to) { __syncthreads(); *(u32 *)to = 1; }\n\
                extern \"C\" __global__ void deep(u64 to) { volatile u32 far[100000]; far[to] = 1; }";
    let image = Image::load(&compile("write.cu", text, 900).unwrap().image).unwrap();
    for (name, expected) in [("write", "no memory for it at 0x10"), ("deep", "no memory for it")] {
        for seed in 0..4 {
            let launch = Launch {
                grid: [3, 1, 1],
                block: [64, 1, 1],
                cluster: 1,
                dynamic_shared: 0,
                params: vec![0x10u64.to_ne_bytes().to_vec()],
                sms: vec![0],
                sm_count: 1,
                seed,
                number: 1,
            };
            // SAFETY: nothing is mapped at the address; a stack that is too small has a guard page.
            let error = unsafe { image.kernel(name).unwrap().run(&launch) }.unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
    assert_eq!(copy(0, 7), Ok(true));
}

#[test]
fn stores_that_nobody_waits_for_are_written_by_the_end_of_the_kernel_and_fault_as_others() {
    let mut to = [u128::MAX; 8];
    let expected: Vec<u128> =
        (0..8).map(|q| (0..4).map(|w| (4 * q + w) << (32 * w)).sum()).collect();
    for seed in 0..30 {
        to.fill(u128::MAX);
        let mut launch = Launch {
            grid: [2, 1, 1],
            block: [32, 1, 1],
            cluster: 1,
            dynamic_shared: 128,
            params: vec![to.as_mut_ptr().expose_provenance().to_ne_bytes().to_vec()],
            sms: vec![0],
            sm_count: 1,
            seed,
            number: 1,
        };
        // SAFETY: `to` is as large as the kernel stores.
        unsafe { kernel("store").run(&launch) }.unwrap();
        assert_eq!(to[..], expected);
        launch.params = vec![0x20u64.to_ne_bytes().to_vec()];
        // SAFETY: nothing is mapped at the address.
        let error = unsafe { kernel("store").run(&launch) }.unwrap_err().to_string();
        assert!(
            error.contains("no memory for it at 0x2") || error.contains("no memory for it at 0x3"),
            "{error}"
        );
    }
}
