//! Tests of the public interface, on recorded and hand-made machines.

mod cache;
mod common;
mod fuzz;
mod gpus;
mod machines;
mod margin;
mod render;
mod sm_map;
mod tree;
