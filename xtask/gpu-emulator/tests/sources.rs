//! The project's own kernels, as they are.

use ep_kernels::cuda::KernelSource;
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
