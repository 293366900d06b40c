//! The run-time compiler: CUDA source to a shared object, through the system's C++ compiler.
