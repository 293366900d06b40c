//! `kernels`: what the GPU kernels take on every architecture they are compiled for.

use std::path::PathBuf;

use crate::{BenchError, Result};

/// Options of `kernels`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// libnvrtc, or the folder that holds it [default: EP_NVRTC_PATH, else wherever one is]
    #[arg(long, value_name = "PATH")]
    pub nvrtc: Option<PathBuf>,
    /// Print the figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// Compiles every kernel for every tested architecture, without a GPU. False if one spills.
///
/// # Errors
/// No compiler, or a kernel that does not compile.
#[cfg(feature = "cuda")]
pub fn run(args: &Args) -> Result<bool> {
    use ep_kernels::cuda::{Arch, CacheChoice, Compiler, CompilerOptions, compile_report};

    let failed =
        |e: ep_kernels::cuda::CudaError| BenchError::Tool { op: "kernels", detail: e.to_string() };
    let mut options = CompilerOptions::default().with_cache(CacheChoice::Off);
    if let Some(path) = &args.nvrtc {
        options = options.with_nvrtc(path);
    }
    let compiler = Compiler::open(&options).map_err(failed)?;
    let reports = compile_report(&compiler, &Arch::TESTED).map_err(failed)?;
    let rows: Vec<Row> = reports
        .iter()
        .map(|r| Row {
            kernel: r.kernel.clone(),
            arch: r.arch.to_string(),
            registers: r.registers,
            shared_bytes: r.shared_bytes,
            stack_bytes: r.stack_bytes,
            spill_bytes: r.spill_store_bytes + r.spill_load_bytes,
        })
        .collect();
    if args.json {
        let value = serde_json::json!({ "nvrtc": compiler.version(), "kernels": rows });
        println!("{value:#}");
    } else {
        println!("NVRTC {}", compiler.version());
        print!("{}", table(&rows));
    }
    let spilling: Vec<String> = rows
        .iter()
        .filter(|row| row.spill_bytes > 0)
        .map(|row| format!("{} on {}", row.kernel, row.arch))
        .collect();
    if !spilling.is_empty() {
        eprintln!("error: registers are spilled: {}", spilling.join(", "));
    }
    Ok(spilling.is_empty())
}

/// Without GPU support there are no kernels.
///
/// # Errors
/// Always.
#[cfg(not(feature = "cuda"))]
pub fn run(_: &Args) -> Result<bool> {
    Err(BenchError::Usage("this build has no GPU kernels: build with the feature `cuda`".into()))
}

/// One kernel on one architecture.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug, serde::Serialize)]
struct Row {
    kernel: String,
    arch: String,
    registers: u32,
    shared_bytes: u32,
    stack_bytes: u32,
    spill_bytes: u32,
}

#[cfg(feature = "cuda")]
fn table(rows: &[Row]) -> String {
    use std::fmt::Write as _;

    let mut out = format!(
        "{:<28}{:<9}{:>9}{:>11}{:>8}{:>8}\n",
        "kernel", "arch", "registers", "shared B", "stack B", "spill B"
    );
    for row in rows {
        let _ = writeln!(
            out,
            "{:<28}{:<9}{:>9}{:>11}{:>8}{:>8}",
            crate::format::cut(&row.kernel, 27),
            row.arch,
            row.registers,
            row.shared_bytes,
            row.stack_bytes,
            row.spill_bytes
        );
    }
    out
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_that_is_not_there_is_an_error_with_a_remedy() {
        let args = Args { nvrtc: Some("/nowhere/libnvrtc.so.13".into()), json: false };
        let text = run(&args).unwrap_err().to_string();
        assert!(text.contains("libnvrtc") && text.contains("EP_NVRTC_PATH"), "{text}");
    }

    #[test]
    fn the_table_fits() {
        let row = Row {
            kernel: "a_kernel_with_a_name_that_is_rather_long".into(),
            arch: "sm_100a".into(),
            registers: 255,
            shared_bytes: 232_448,
            stack_bytes: 1024,
            spill_bytes: 16,
        };
        let table = table(&[row]);
        assert_eq!(table.lines().count(), 2);
        assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    }
}
