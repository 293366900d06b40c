//! The breakages: each is one line that a test has to notice.

/// One breakage.
pub struct Mutation {
    /// What is broken, in a few words that make a name.
    pub name: &'static str,
    pub file: &'static str,
    /// Text that occurs exactly once in the file.
    pub find: &'static str,
    pub replace: &'static str,
    /// The test that has to fail.
    pub test: Test,
}

/// A `cargo test` with these arguments.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Test {
    /// In the profile of `cargo xtask test`.
    Plain(&'static [&'static str]),
    /// Under the model checker.
    Loom(&'static [&'static str]),
}

/// In the order they run; those with one test stand together.
pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "flag-set-relaxed",
        file: "crates/ep-transport/src/flags.rs",
        find: "self.publish(flag, source, Ordering::Release, Ordering::Release);",
        replace: "self.publish(flag, source, Ordering::Relaxed, Ordering::Release);",
        test: Test::Loom(&["--package", "ep-transport", "--test", "loom_flags"]),
    },
    Mutation {
        name: "one-expert-too-many",
        file: "crates/ep-kernels/src/placement.rs",
        find: "usize::from(r < more)",
        replace: "usize::from(r <= more)",
        test: Test::Plain(&["--package", "ep-kernels", "--test", "layout", "contiguous"]),
    },
    Mutation {
        name: "no-test-counts-as-success",
        file: "xtask/src/test/steps.rs",
        find: "} else if counts.ran() == 0 {",
        replace: "} else if counts.ran() == u64::MAX {",
        test: Test::Plain(&["--package", "xtask", "test::steps"]),
    },
];
