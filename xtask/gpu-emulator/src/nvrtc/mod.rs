//! The run-time compiler: CUDA source to a shared object, through the system's C++ compiler.
//!
//! `EP_EMULATOR_CXX` names that compiler (`c++` without it). What it makes is handed out as if it
//! were a cubin: both are ELF images, and only [`crate::kernel::Image`] looks inside.

mod compile;
mod exports;
mod source;

pub use compile::{CompileError, Compiled, compile, version};
