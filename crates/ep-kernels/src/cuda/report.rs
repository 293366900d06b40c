use super::compile::{Arch, Compiler};
use super::error::CudaError;
use super::source::KernelSource;

/// What a kernel takes on an architecture, as ptxas says when it compiles.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelReport {
    /// File name of the source.
    pub source: String,
    /// The kernel.
    pub kernel: String,
    /// The architecture.
    pub arch: Arch,
    /// Registers per thread.
    pub registers: u32,
    /// Static shared memory per block, bytes.
    pub shared_bytes: u32,
    /// Stack per thread, bytes.
    pub stack_bytes: u32,
    /// Registers stored to local memory per thread, bytes.
    pub spill_store_bytes: u32,
    /// Registers loaded back per thread, bytes.
    pub spill_load_bytes: u32,
    /// Size of the source's whole cubin, bytes.
    pub cubin_bytes: usize,
}

impl KernelReport {
    /// Whether registers are spilled to local memory.
    pub fn spills(&self) -> bool {
        self.spill_store_bytes > 0 || self.spill_load_bytes > 0
    }
}

/// Compiles every kernel of this crate for `archs`, past the cache, and says what each takes.
///
/// # Errors
/// A source that does not compile, or messages that lack a kernel or a figure: no report is better
/// than one that shows nothing spilled because nothing was read.
pub fn compile_report(compiler: &Compiler, archs: &[Arch]) -> Result<Vec<KernelReport>, CudaError> {
    let mut reports = Vec::new();
    for source in KernelSource::all() {
        let text = source.assemble();
        for &arch in archs {
            let (cubin, log) = compiler.compile(source.name, &text, arch)?;
            for &kernel in source.kernels {
                let usage = parse(&log, kernel).ok_or_else(|| CudaError::Inconsistent {
                    operation: "compile_report",
                    reason: format!(
                        "the messages for {kernel} on {arch} are not understood: {log}"
                    ),
                })?;
                reports.push(KernelReport {
                    source: source.name.into(),
                    kernel: kernel.into(),
                    arch,
                    registers: usage.registers,
                    shared_bytes: usage.shared,
                    stack_bytes: usage.stack,
                    spill_store_bytes: usage.spill_stores,
                    spill_load_bytes: usage.spill_loads,
                    cubin_bytes: cubin.len(),
                });
            }
        }
    }
    Ok(reports)
}

#[derive(Debug, PartialEq, Eq)]
struct Usage {
    registers: u32,
    shared: u32,
    stack: u32,
    spill_stores: u32,
    spill_loads: u32,
}

/// Reads `ptxas -v`'s paragraph about one kernel.
fn parse(log: &str, kernel: &str) -> Option<Usage> {
    const ENTRY: &str = "Compiling entry function '";
    let opening = format!("{ENTRY}{kernel}'");
    let from = log.find(&opening)? + opening.len();
    let paragraph = log[from..].split(ENTRY).next()?;
    let used = paragraph.lines().find(|line| line.contains("Used "))?;
    Some(Usage {
        registers: number_before(used, " registers")?,
        // Named only where there is some.
        shared: number_before(used, " bytes smem").unwrap_or(0),
        stack: number_before(paragraph, " bytes stack frame")?,
        spill_stores: number_before(paragraph, " bytes spill stores")?,
        spill_loads: number_before(paragraph, " bytes spill loads")?,
    })
}

fn number_before(text: &str, unit: &str) -> Option<u32> {
    let before = &text[..text.find(unit)?];
    let digits = before.rfind(|c: char| !c.is_ascii_digit()).map_or(before, |at| &before[at + 1..]);
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As NVRTC 13.0 prints it; the spills of `other` are made up.
    const LOG: &str = "\
ptxas info    : 16 bytes gmem, 32 bytes cmem[4]
ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas info    : Function properties for other
ptxas         .     800 bytes stack frame, 24 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 800 bytes cumulative stack size, 4096 bytes smem, 364 bytes cmem[0]
ptxas info    : Compile time = 3.609 ms
ptxas info    : Compiling entry function 'holder' for 'sm_80'
ptxas info    : Function properties for holder
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 15 registers, used 0 barriers, 520 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 5.064 ms";

    #[test]
    fn reads_each_kernels_own_paragraph() {
        let other =
            Usage { registers: 255, shared: 4096, stack: 800, spill_stores: 24, spill_loads: 28 };
        assert_eq!(parse(LOG, "other"), Some(other));
        let holder = Usage { registers: 15, shared: 0, stack: 0, spill_stores: 0, spill_loads: 0 };
        assert_eq!(parse(LOG, "holder"), Some(holder));
    }

    #[test]
    fn what_is_not_understood_is_no_report() {
        assert_eq!(parse(LOG, "hold"), None);
        assert_eq!(parse("", "holder"), None);
        let cut = LOG.split("Used 15").next().unwrap();
        assert_eq!(parse(cut, "holder"), None);
    }
}
