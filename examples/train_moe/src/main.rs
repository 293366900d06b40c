//! A small mixture-of-experts classifier trained with ep-runtime.
fn main() {}
