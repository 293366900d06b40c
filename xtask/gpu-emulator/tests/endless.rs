//! A kernel that never ends. Alone in its program, since the limit is the process's.

use gpu_emulator::kernel::{Image, Launch};
use gpu_emulator::nvrtc::compile;

#[test]
fn a_loop_without_end_is_reported() {
    // SAFETY: the only test of this program; no other thread reads the environment.
    unsafe { std::env::set_var("EP_EMULATOR_LIMIT_S", "1") };
    let text = "extern \"C\" __global__ void spin(const volatile u32 *p) { while (*p == 0) {} }\n\
                extern \"C\" __global__ void turn(const volatile u32 *p) { while (*p == 0) __syncwarp(); }";
    let image = Image::load(&compile("spin.cu", text, 900).unwrap().image).unwrap();
    let zero = 0u32;
    let launch = Launch {
        grid: [2, 1, 1],
        block: [64, 1, 1],
        cluster: 1,
        dynamic_shared: 0,
        params: vec![(&raw const zero).expose_provenance().to_ne_bytes().to_vec()],
        sms: vec![0],
        sm_count: 1,
        seed: 1,
        number: 1,
    };
    for name in ["spin", "turn"] {
        // SAFETY: the kernels read `zero` alone.
        let error = unsafe { image.kernel(name).unwrap().run(&launch) }.unwrap_err().to_string();
        assert!(error.contains("still runs, though the launch's time is over"), "{error}");
    }
}
