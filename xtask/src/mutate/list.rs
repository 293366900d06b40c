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
    Mutation {
        name: "flag-not-reset",
        file: "crates/ep-transport/src/flags.rs",
        find: "            word.store(0, Ordering::Relaxed);",
        replace: "            let _ = word;",
        test: Test::Plain(&["--package", "ep-transport", "--test", "thread_transport"]),
    },
    Mutation {
        name: "alignment-off-by-one",
        file: "crates/ep-kernels/src/counts.rs",
        find: "checked_next_multiple_of(alignment.max(1))",
        replace: "checked_next_multiple_of(alignment.max(1) + 1)",
        test: Test::Plain(&["--package", "ep-kernels", "--test", "layout"]),
    },
    Mutation {
        name: "another-replica",
        file: "crates/ep-kernels/src/placement.rs",
        find: "several[source_rank.wrapping_add(token) % several.len()]",
        replace: "several[source_rank.wrapping_sub(token) % several.len()]",
        test: Test::Plain(&["--package", "ep-kernels", "--test", "layout"]),
    },
    Mutation {
        name: "wrong-place",
        file: "crates/ep-runtime/src/dispatch.rs",
        find: "let first_row = handle.matrix.sent_base(rank);",
        replace: "let first_row = handle.matrix.sent_base(rank).saturating_sub(1);",
        test: Test::Plain(&["--package", "ep-runtime", "--test", "oracle", "fixed_cases"]),
    },
    Mutation {
        name: "wrong-staging",
        file: "crates/ep-runtime/src/dispatch.rs",
        find: "let before = &self.routing.get().send.rank_counts[..rank];",
        replace: "let before = &self.routing.get().send.rank_counts[..0];",
        test: Test::Plain(&["--package", "ep-runtime", "--test", "oracle", "fixed_cases"]),
    },
    Mutation {
        name: "skipped-posted",
        file: "crates/ep-runtime/src/lane.rs",
        find: "self.wait(op, &ep.peers, Phase::Posted, deadline)?;\n        let headers",
        replace: "let _ = deadline;\n        let headers",
        test: Test::Plain(&["--package", "ep-runtime", "--test", "oracle", "fixed_cases"]),
    },
    Mutation {
        name: "skipped-done",
        file: "crates/ep-runtime/src/dispatch.rs",
        find: "lane.wait(\"dispatch, rows\", ep.owing(ep.owing_rows()), Phase::Done, deadline)?;",
        replace: "lane.wait(\"dispatch, rows\", &[], Phase::Done, deadline)?;",
        test: Test::Plain(&["--package", "ep-runtime", "--test", "oracle", "fixed_cases"]),
    },
    Mutation {
        name: "wrong-forward-staging",
        file: "crates/ep-runtime/src/node/crossing.rs",
        find: "self.to[node] = self.forwards[rail];",
        replace: "self.to[node] = self.forwards[rail] * 0;",
        test: Test::Plain(&["--package", "ep-runtime", "--test", "oracle", "nodes_equal"]),
    },
    Mutation {
        name: "forwarded-before-it-came",
        file: "crates/ep-runtime/src/node/forward.rs",
        find: "lane.wait(\"dispatch, rows of other nodes\", &ep.bulk,",
        replace: "lane.wait(\"dispatch, rows of other nodes\", &[],",
        test: Test::Plain(&["--package", "ep-runtime", "--test", "oracle", "nodes_equal"]),
    },
    Mutation {
        name: "capacity-off-by-one",
        file: "crates/ep-runtime/src/notify.rs",
        find: "find(|&r| rows(r) > reserved)",
        replace: "find(|&r| rows(r) > reserved + 1)",
        test: Test::Plain(&["--package", "ep-runtime", "--test", "errors", "capacity_is_exact"]),
    },
    Mutation {
        name: "wrong-slot",
        file: "crates/ep-runtime/src/fold.rs",
        find: "let slot = header.slot as usize;",
        replace: "let slot = header.slot as usize * 0;",
        test: Test::Plain(&[
            "--package",
            "ep-runtime",
            "--test",
            "behaviour",
            "ranks_receive_into_different_slots",
        ]),
    },
    Mutation {
        name: "abandoned-flags-forgotten",
        file: "crates/ep-runtime/src/lane.rs",
        find: "self.wait(op, self.ep.owing(owing), Phase::Done, deadline)?;\n            self.flush",
        replace: "let _ = op;\n            self.flush",
        test: Test::Plain(&["--package", "ep-runtime", "--test", "behaviour", "dropped_halves"]),
    },
    Mutation {
        name: "slot-leaks",
        file: "crates/ep-runtime/src/slots.rs",
        find: "self.ep.slots.give_back(self.index);",
        replace: "let _ = self.index;",
        test: Test::Plain(&["--package", "ep-runtime", "--test", "behaviour", "three_results"]),
    },
    Mutation {
        name: "bad-verdict-does-not-close",
        file: "crates/ep-runtime/src/dispatch.rs",
        find: "lane.close(OP, lane.ep.deadline())?;",
        replace: "let _ = &lane;",
        test: Test::Plain(&["--package", "ep-runtime", "--test", "errors", "bad_ids"]),
    },
];
