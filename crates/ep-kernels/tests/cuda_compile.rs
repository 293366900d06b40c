//! What needs the run-time compiler but no GPU. Without NVRTC these tests say so and pass, unless
//! `EP_REQUIRE_NVRTC` is set: then its absence fails them.

use ep_kernels::cuda::{
    Arch, CacheChoice, Compiler, CompilerOptions, CudaError, KernelCache, KernelSource,
    compile_report,
};

fn compiler(cache: CacheChoice) -> Option<Compiler> {
    match Compiler::open(&CompilerOptions::default().with_cache(cache)) {
        Ok(compiler) => Some(compiler),
        Err(error @ CudaError::LibraryMissing { .. }) => {
            let required = std::env::var_os("EP_REQUIRE_NVRTC").is_some();
            assert!(!required, "EP_REQUIRE_NVRTC is set, but {error}");
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("NVRTC is there but does not work: {error}"),
    }
}

#[test]
fn every_kernel_compiles_for_every_architecture_without_spills() {
    let Some(compiler) = compiler(CacheChoice::Off) else { return };
    let reports = compile_report(&compiler, &Arch::TESTED).unwrap();
    let kernels: usize = KernelSource::all().iter().map(|source| source.kernels.len()).sum();
    assert_eq!(reports.len(), kernels * Arch::TESTED.len());
    for report in reports {
        assert!(!report.spills() && report.stack_bytes == 0, "{report:?}");
        assert!((1..=255).contains(&report.registers), "{report:?}");
    }
}

#[test]
fn the_second_compilation_comes_from_the_cache_and_damage_is_repaired() {
    let folder = std::env::temp_dir().join(format!("ep-cuda-compile-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let cache = CacheChoice::At(KernelCache::at(&folder));
    let Some(first) = compiler(cache.clone()) else { return };
    let source = KernelSource::all()[0];
    let fresh = first.cubin(source, Arch::SM_90A).unwrap();
    assert!(!fresh.from_cache());

    // A second compiler stands for a second process.
    let second = compiler(cache).unwrap();
    let cached = second.cubin(source, Arch::SM_90A).unwrap();
    assert!(cached.from_cache());
    assert_eq!(fresh.bytes(), cached.bytes());
    assert!(!second.cubin(source, Arch::SM_80).unwrap().from_cache(), "another architecture");

    for file in std::fs::read_dir(&folder).unwrap().flatten() {
        std::fs::write(file.path(), b"damaged").unwrap();
    }
    assert!(!second.cubin(source, Arch::SM_90A).unwrap().from_cache());
    assert!(second.cubin(source, Arch::SM_90A).unwrap().from_cache());
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn errors_in_a_source_name_file_line_and_architecture() {
    let Some(compiler) = compiler(CacheChoice::Off) else { return };
    let error = compiler.compile("broken.cu", "\n\nint f( { }", Arch::SM_90A).unwrap_err();
    assert!(matches!(error, CudaError::Compile { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("broken.cu(3)") && text.contains("sm_90a"), "{text}");
    let error = compiler.compile("nul.cu", "int x\0;", Arch::SM_90A).unwrap_err();
    assert!(matches!(error, CudaError::InvalidArgument { .. }), "{error}");
}

/// The point of the layout checks: a struct that differs from the host's does not compile.
#[test]
fn a_struct_that_differs_from_the_hosts_does_not_compile() {
    let Some(compiler) = compiler(CacheChoice::Off) else { return };
    let breakages = [
        // A field of another width: caught by the size.
        (
            "    u32 record_count;\n    u32 reserved;\n};",
            "    u64 record_count;\n    u32 reserved;\n};",
        ),
        // Two fields swapped: same size, caught by the offsets.
        (
            "    u32 record_count;\n    u32 reserved;\n};",
            "    u32 reserved;\n    u32 record_count;\n};",
        ),
    ];
    for source in KernelSource::all() {
        let text = source.assemble();
        let breakages: [(String, String); 2] = match source.name {
            "sm_probe.cu" => breakages.map(|(good, bad)| (good.into(), bad.into())),
            // There the set of chosen SMs follows.
            "holder.cu" => breakages.map(|(good, bad)| {
                (good.replace("};", "    SmSet"), bad.replace("};", "    SmSet"))
            }),
            "gemm.cu" => [
                ("    u64 a, b, d;".into(), "    u64 a, b, d, more;".into()),
                ("    GemmMap a_map, b_map;".into(), "    GemmMap b_map, a_map;".into()),
            ],
            // A field more, and two of one size swapped.
            _ => [
                ("    u64 lane, mailboxes,".into(), "    u64 more, lane, mailboxes,".into()),
                ("    u64 lane, mailboxes,".into(), "    u64 mailboxes, lane,".into()),
            ],
        };
        for (good, bad) in breakages {
            assert!(text.contains(&good), "{}: {good}", source.name);
            let error = compiler.compile(source.name, &text.replacen(&good, &bad, 1), Arch::SM_90A);
            let message = error.expect_err("a wrong layout compiled").to_string();
            assert!(message.contains("differs from the host's"), "{message}");
        }
    }
}
