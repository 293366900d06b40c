//! One compilation: preprocess, rewrite, compile, link.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use super::source::{globals, origin, rewrite, without_ptx, words};
use crate::kernel::{STACK_BYTES, STACK_COLOURS, STACK_SPAN};

const SHIM: [(&str, &str); 2] = [
    ("emulator/cuda.hpp", include_str!("../shim/cuda.hpp")),
    ("emulator/ptx.hpp", include_str!("../shim/ptx.hpp")),
];

/// Products and sums stay separate, as the project's own compiler options ask, and what is not
/// initialised holds a pattern, so that a read of it shows. Large frames touch every page, so that none
/// steps over a guard page.
const FLAGS: [&str; 16] = [
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-w",
    "-pipe",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-stack-protector",
    "-fstack-clash-protection",
    "-fno-asynchronous-unwind-tables",
    "-fvisibility=hidden",
    "-ftrivial-auto-var-init=pattern",
    "-fmax-errors=20",
];

/// A compiled source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// The shared object, for [`crate::kernel::Image::load`].
    pub image: Vec<u8>,
    /// The compiler's messages.
    pub log: String,
}

/// Why a source did not compile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// The compiler's messages.
    #[error("{0}")]
    Source(String),
    /// There is no compiler, or it could not be run.
    #[error("{compiler}: {reason}; install a C++20 compiler, or set EP_EMULATOR_CXX to one")]
    Compiler {
        /// Its name.
        compiler: String,
        /// What went wrong.
        reason: String,
    },
}

/// Compiles a source for an architecture, `900` for compute capability 9.0.
///
/// # Errors
/// [`CompileError`]; messages name file and line as `file(line)`.
pub fn compile(name: &str, text: &str, arch: u32) -> Result<Compiled, CompileError> {
    let define = format!("-D__CUDA_ARCH__={arch}");
    let text = format!("#line 1 \"{name}\"\n{}\n", without_ptx(text));
    let plain = run(&["-E", "-w", "-x", "c++", "-std=c++20", &define, "-"], &text)?;
    let plain = String::from_utf8_lossy(&plain.0).into_owned();
    if let Some(at) = words(&plain, "asm").next() {
        let place = origin(&plain, at);
        return Err(CompileError::Source(format!(
            "{place}: error: inline PTX; the emulator knows the functions of ptx.cuh alone"
        )));
    }
    let folder = Folder::new()?;
    let image = folder.0.join("image.so");
    let path = image.to_string_lossy().into_owned();
    let mut arguments = FLAGS.to_vec();
    arguments.extend([define.as_str(), "-x", "c++", "-shared", "-Wl,-z,now", "-o", &path, "-"]);
    let (_, log) = run(&arguments, &translation(&plain))?;
    let image = std::fs::read(&image).map_err(|error| failed(&error))?;
    Ok(Compiled { image, log })
}

/// What the C++ compiler gets: the shim, the source, an entry per kernel.
fn translation(plain: &str) -> String {
    let mut text = format!(
        "#define EP_STACK_BYTES {STACK_BYTES}ull\n#define EP_STACK_COLOURS {STACK_COLOURS}ull\n\
         #define EP_STACK_SPAN {STACK_SPAN}ull\n"
    );
    for (name, part) in SHIM {
        let _ = writeln!(text, "#line 1 \"{name}\"\n{part}");
    }
    text.push_str(&rewrite(plain));
    text.push_str("\n#line 1 \"entries\"\n");
    for kernel in globals(plain) {
        let (name, threads) = (kernel.name, kernel.max_threads.as_deref().unwrap_or("1024"));
        let _ = writeln!(
            text,
            "extern \"C\" __attribute__((visibility(\"default\"))) void ep_entry_{name}(void *const \
             *p) {{ ep_call({name}, p); }}\n\
             extern \"C\" __attribute__((visibility(\"default\"))) void ep_info_{name}(EpKernelInfo \
             *to) {{ *to = ep_info({name}, {threads}); }}"
        );
    }
    text
}

/// The emulator's version: no two that make different images have the same one.
pub fn version() -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION.get_or_init(|| {
        let mut hash = Sha256::new();
        for part in [SHIM[0].1, SHIM[1].1, &FLAGS.join(" "), include_str!("source.rs")] {
            hash.update(part);
        }
        hash.update(include_str!("compile.rs"));
        hash.update([STACK_BYTES, STACK_COLOURS, STACK_SPAN].map(usize::to_le_bytes).concat());
        hash.update(run(&["--version"], "").map(|out| out.0).unwrap_or_default());
        let hex: String = hash.finalize()[..6].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("emulated-{hex}")
    })
}

fn compiler() -> String {
    std::env::var("EP_EMULATOR_CXX").ok().filter(|name| !name.is_empty()).unwrap_or("c++".into())
}

fn failed(reason: &dyn std::fmt::Display) -> CompileError {
    CompileError::Compiler { compiler: compiler(), reason: reason.to_string() }
}

/// Runs the compiler with `input` on its standard input; what it prints, and its messages.
fn run(arguments: &[&str], input: &str) -> Result<(Vec<u8>, String), CompileError> {
    let mut child = Command::new(compiler())
        .args(arguments)
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed(&error))?;
    let stdin = child.stdin.take();
    let output = std::thread::scope(|scope| {
        // A compiler that gives up early leaves the rest unread; its messages say why.
        scope.spawn(|| stdin.map(|mut stdin| stdin.write_all(input.as_bytes())));
        child.wait_with_output()
    })
    .map_err(|error| failed(&error))?;
    let log = messages(&String::from_utf8_lossy(&output.stderr));
    match output.status.success() {
        true => Ok((output.stdout, log)),
        false => Err(CompileError::Source(log)),
    }
}

/// `file:3:8: error: ...` as NVRTC says it: `file(3): error: ...`.
fn messages(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let mut parts = line.splitn(4, ':');
        let place = (parts.next(), parts.next(), parts.next(), parts.next());
        match place {
            (Some(file), Some(row), Some(column), Some(rest))
                if row.parse::<u32>().is_ok() && column.parse::<u32>().is_ok() =>
            {
                let _ = writeln!(out, "{file}({row}):{rest}");
            }
            _ => {
                let _ = writeln!(out, "{line}");
            }
        }
    }
    out
}

/// A folder of its own for one compilation.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Folder, CompileError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ep-emulator-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).map_err(|error| failed(&error))?;
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let path: &Path = &self.0;
        let _ = std::fs::remove_dir_all(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_worded_as_nvrtcs() {
        let text = "broken.cu:3:8: error: expected\n  3 | int f( {\n<stdin>: In function 'x':\n";
        let expected = "broken.cu(3): error: expected\n  3 | int f( {\n<stdin>: In function 'x':\n";
        assert_eq!(messages(text), expected);
    }
}
