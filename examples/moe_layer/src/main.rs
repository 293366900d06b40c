//! A mixture-of-experts layer on ep-runtime.
fn main() {}
