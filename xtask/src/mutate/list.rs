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
        name: "deadline-never-passes",
        file: "crates/ep-transport/src/deadline.rs",
        find: "self.after.saturating_sub(self.start.elapsed())",
        replace: "self.after.saturating_sub(std::time::Duration::ZERO)",
        test: Test::Plain(&["--package", "ep-transport", "--lib", "deadline"]),
    },
    Mutation {
        name: "no-test-counts-as-success",
        file: "xtask/src/test/steps.rs",
        find: "} else if counts.ran() == 0 {",
        replace: "} else if counts.ran() == u64::MAX {",
        test: Test::Plain(&["--package", "xtask", "test::steps"]),
    },
];
