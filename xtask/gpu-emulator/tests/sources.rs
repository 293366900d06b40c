//! The project's own kernels, as they are.

use ep_kernels::cuda::{Arch, CacheChoice, Compiler, CompilerOptions, CudaError, KernelSource};
use gpu_emulator::kernel::Image;
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
