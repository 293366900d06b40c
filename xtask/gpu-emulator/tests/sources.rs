//! The project's own kernels, as they are.

use ep_kernels::cuda::{Arch, CacheChoice, Compiler, CompilerOptions, CudaError, KernelSource};
use ep_kernels::{Fp8E4M3, ScaleKind, host};
use gpu_emulator::kernel::{Image, Launch};
use gpu_emulator::nvrtc::compile;

#[test]
fn every_source_compiles_but_the_one_with_matrix_instructions() {
    for source in KernelSource::all() {
        let compiled = compile(source.name, &source.assemble(), 900);
        if source.name == "gemm.cu" {
            let error = compiled.unwrap_err().to_string();
            assert!(error.contains("error: inline PTX"), "{error}");
            continue;
        }
        let image = Image::load(&compiled.unwrap().image).unwrap();
        for name in source.kernels {
            let kernel = image.kernel(name).unwrap_or_else(|| panic!("{name} is missing"));
            assert_eq!(kernel.param_sizes().len(), 1, "{name}");
            assert!(kernel.max_threads() >= 32, "{name}");
        }
    }
}

#[test]
fn a_struct_that_differs_from_the_hosts_does_not_compile() {
    let source = KernelSource::all().iter().find(|source| source.name == "holder.cu").unwrap();
    let swapped = source.assemble().replacen(
        "    u32 record_count;\n    u32 reserved;\n",
        "    u32 reserved;\n    u32 record_count;\n",
        1,
    );
    let error = compile(source.name, &swapped, 900).unwrap_err().to_string();
    assert!(error.contains("HoldParams::record_count differs from the host's"), "{error}");
}

/// The emulator as the project finds it: a library that is opened at run time.
#[test]
fn the_projects_compiler_takes_the_emulator_for_nvrtc() {
    let programs = std::env::current_exe().unwrap();
    let library = programs.with_file_name("libgpu_emulator.so");
    let options = CompilerOptions::default().with_nvrtc(&library).with_cache(CacheChoice::Off);
    let compiler = Compiler::open(&options).unwrap();
    assert!(compiler.version().starts_with("13.0 Vemulated-"), "{}", compiler.version());
    let source = KernelSource::all().iter().find(|source| source.name == "holder.cu").unwrap();
    let cubin = compiler.cubin(source, Arch::SM_90A).unwrap();
    assert!(Image::load(cubin.bytes()).unwrap().kernel("holder").is_some());
    let error = compiler.compile("broken.cu", "\n\nint f( { }", Arch::SM_80).unwrap_err();
    assert!(matches!(error, CudaError::Compile { .. }), "{error}");
    assert!(error.to_string().contains("broken.cu(3)"), "{error}");
}

/// One of the project's kernels from end to end, without a driver: its result is the host's.
#[test]
fn a_kernel_of_the_project_does_what_its_twin_does() {
    let source = KernelSource::all().iter().find(|source| source.name == "cast.cu").unwrap();
    let image = Image::load(&compile(source.name, &source.assemble(), 900).unwrap().image).unwrap();
    let (rows, hidden, kind) = (37, 300, ScaleKind::F32);
    let number = |i: usize| ((i * 7919 % 4001) as f32 - 2000.0) * 1.5f32.powi(i as i32 % 61 - 30);
    let mut src: Vec<f32> = (0..rows * hidden).map(number).collect();
    (src[5], src[400], src[900]) = (f32::NAN, f32::INFINITY, -0.0);
    let mut expected = vec![Fp8E4M3(0); src.len()];
    let mut expected_scales = vec![0u8; rows * kind.row_bytes(hidden)];
    host::quantize_fp8(&src, hidden, kind, &mut expected, &mut expected_scales).unwrap();

    let (mut out, mut scales) = (vec![Fp8E4M3(1); src.len()], vec![1u8; expected_scales.len()]);
    let address = |at: *mut u8| at.expose_provenance() as u64;
    // As `MoeCastParams` of cast.cu has them.
    let words = [
        address(src.as_mut_ptr().cast()),
        address(out.as_mut_ptr().cast()),
        address(scales.as_mut_ptr().cast()),
        4 * hidden as u64,
        hidden as u64,
        kind.row_bytes(hidden) as u64,
        rows as u64,
    ];
    let f32_narrow = [hidden as u32, 2, 0, 0];
    let params = words.iter().flat_map(|word| word.to_ne_bytes());
    let params = params.chain(f32_narrow.iter().flat_map(|word| word.to_ne_bytes())).collect();
    let launch = Launch {
        grid: [3, 1, 1],
        block: [256, 1, 1],
        cluster: 1,
        dynamic_shared: 0,
        params: vec![params],
        sms: vec![0],
        sm_count: 1,
        seed: 1,
        number: 1,
    };
    // SAFETY: the parameters are live buffers of these rows.
    unsafe { image.kernel("moe_quantize").unwrap().run(&launch) }.unwrap();
    assert_eq!(Fp8E4M3::as_bytes(&out), Fp8E4M3::as_bytes(&expected));
    assert_eq!(scales, expected_scales);
}
