//! Ranks as processes: the same calls, the same bits, and survivors of a killed rank.

mod common;

use common::jobs;

/// Not a test of its own: what copies run.
#[test]
fn copies_of_this_binary() {
    jobs::copy(|builder, _| builder);
}

#[test]
fn processes_get_the_bits_that_threads_get() {
    jobs::get_the_bits_of_threads(3);
}

#[test]
fn survivors_of_a_killed_rank_name_it() {
    jobs::survivors_name_the_killed();
}
