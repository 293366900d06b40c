//! The driver: devices, memory, streams, graphs, libraries.
//!
//! Its functions are those that the project calls, and no others: what is not emulated does not exist,
//! so that whoever looks it up is told. Variables say what the devices are like:
//!
//! | variable | default | meaning |
//! |---|---|---|
//! | `EP_EMULATOR_DEVICES` | 2 | how many there are, 16 at most |
//! | `EP_EMULATOR_BYTES` | 4 GiB | memory of each |
//! | `EP_EMULATOR_NO` | | what they lack, by comma: `peer`, `memops`, `memops64`, `green`, `vmm`, `hostregister`, `clusters`, `cooperative` |
//! | `EP_EMULATOR_SEED` | 0 | what delays and orders are drawn from |
//! | `EP_EMULATOR_DELAY_US` | 30 | the longest delay between operations of a stream; 0: none |
//! | `CUDA_DEVICE_MAX_CONNECTIONS` | 8 | hardware queues of a context |
//!
//! Where CUDA promises nothing it is strict. Streams take hardware queues in turn, and whatever is
//! submitted to one queue happens in that order, one after the other, whichever streams it is of. Fresh
//! memory is ones (of memory that is mapped, the first 8 MiB), and freed addresses are never used again:
//! whoever touches them faults. What takes or frees memory waits for all that runs on the device.

mod api;
mod arg;
mod capture;
mod channel;
mod code;
mod config;
mod context;
mod device;
mod event;
mod graph;
mod green;
mod launch;
mod memory;
mod module;
mod point;
mod stream;
mod table;
#[cfg(test)]
mod tests;
mod vmm;
mod words;
mod work;
