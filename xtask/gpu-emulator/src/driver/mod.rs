//! The driver: devices, memory, streams, graphs, libraries.
//!
//! Its functions are those that the project calls, and no others: what is not emulated does not exist,
//! so that whoever looks it up is told.

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
