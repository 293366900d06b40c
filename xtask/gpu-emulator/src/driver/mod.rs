//! The driver: devices, memory, streams, graphs.
