//! What every transport has to pass.
//!
//! A transport whose ranks can be threads instantiates the whole suite as tests:
//!
//! ```
//! use ep_transport::{Group, ThreadTransport, Transport, conformance::Member};
//!
//! fn members(world: usize) -> Vec<Member> {
//!     let groups = Group::local(world).unwrap().into_iter();
//!     groups.map(|group| (group, Box::new(ThreadTransport::new()) as Box<dyn Transport>)).collect()
//! }
//!
//! ep_transport::conformance_suite!(members);
//! # ep_transport::conformance::run("zero_length_puts", members).unwrap();
//! ```
//!
//! One whose ranks are processes starts [`Check::worlds`] processes for each of [`CHECKS`], in
//! each of which [`rank_main`] does one rank's part.

mod access;
mod aids;
mod failures;
mod flags;
mod lifetime;
mod windows;

use std::time::Duration;

use crate::{Group, Transport};
use aids::Rank;

/// A rank's group and transport.
pub type Member = (Group, Box<dyn Transport>);

/// How long the suite waits for what must happen.
pub const LIMIT: Duration = Duration::from_secs(20);

/// Where the operations of a check take their turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Queues {
    /// On the host queue.
    #[default]
    Host,
    /// On streams of the GPU that has the windows: for links with a `Link::stream_side`. Stores
    /// and loads are copies in the order of the stream.
    Streams,
}

/// One property, checked by all ranks of a group together.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// Its name.
    pub name: &'static str,
    /// The group sizes to run it with.
    pub worlds: &'static [usize],
    /// One rank's part.
    part: fn(Rank) -> Outcome,
}

/// Nothing, or what was wrong.
type Outcome = std::result::Result<(), String>;

const ALL: &[usize] = &[1, 2, 3, 5, 8];
const PEERS: &[usize] = &[2, 3, 5];

macro_rules! checks {
    ($($module:ident :: $name:ident in $worlds:ident;)*) => {
        /// All checks.
        pub const CHECKS: &[Check] = &[
            $(Check { name: stringify!($name), worlds: $worlds, part: $module::$name }),*
        ];
    };
}

checks! {
    windows::windows_are_zeroed_disjoint_and_sized in ALL;
    windows::data_before_signal_is_visible in ALL;
    windows::reuse_over_many_rounds in PEERS;
    windows::reads_before_signal_are_not_overwritten in PEERS;
    windows::sources_may_change_after_flush in ALL;
    windows::zero_length_puts in ALL;
    flags::ready_agrees_with_wait in ALL;
    flags::flags_are_independent in ALL;
    flags::threads_wait_on_different_flags in PEERS;
    failures::bad_arguments_are_errors in ALL;
    failures::deadlines_name_the_absent in PEERS;
    failures::lost_peers_are_named_promptly in PEERS;
    failures::aborts_reach_waiters in PEERS;
    failures::different_windows_are_a_mismatch in PEERS;
    lifetime::links_of_one_group_are_independent in ALL;
    lifetime::drops_in_any_order in ALL;
    lifetime::signals_outlive_their_source in PEERS;
}

/// Instantiates every check as a `#[test]`. The argument makes the members of a group of a given
/// size: `Fn(usize) -> Vec<Member>`.
#[macro_export]
macro_rules! conformance_suite {
    ($make:expr) => {
        $crate::conformance_suite! { @tests $make;
            windows_are_zeroed_disjoint_and_sized
            data_before_signal_is_visible
            reuse_over_many_rounds
            reads_before_signal_are_not_overwritten
            sources_may_change_after_flush
            zero_length_puts
            ready_agrees_with_wait
            flags_are_independent
            threads_wait_on_different_flags
            bad_arguments_are_errors
            deadlines_name_the_absent
            lost_peers_are_named_promptly
            aborts_reach_waiters
            different_windows_are_a_mismatch
            links_of_one_group_are_independent
            drops_in_any_order
            signals_outlive_their_source
        }
    };
    (@tests $make:expr; $($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                $crate::conformance::run(stringify!($name), $make).unwrap();
            }
        )*

        #[test]
        fn no_check_is_missing() {
            let names: Vec<_> = $crate::conformance::CHECKS.iter().map(|c| c.name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}

/// Runs the check `name` in all its worlds, with a thread per rank.
///
/// # Errors
/// What was wrong, by rank; or that there is no such check.
pub fn run(name: &str, make: impl Fn(usize) -> Vec<Member>) -> Result<(), String> {
    for &world in find(name)?.worlds {
        run_members(name, make(world), LIMIT).map_err(|e| format!("{name}, {world} ranks: {e}"))?;
    }
    Ok(())
}

/// Runs the check `name` once, with a thread per member, waiting no longer than `limit` for
/// anything that must happen.
///
/// # Errors
/// As [`run`].
pub fn run_members(name: &str, members: Vec<Member>, limit: Duration) -> Result<(), String> {
    run_members_on(name, members, limit, Queues::Host)
}

/// [`run_members`] with operations on queues of a kind.
///
/// # Errors
/// As [`run`].
pub fn run_members_on(
    name: &str,
    members: Vec<Member>,
    limit: Duration,
    queues: Queues,
) -> Result<(), String> {
    let parts = std::thread::scope(|scope| {
        let ranks: Vec<_> = members
            .into_iter()
            .map(|(group, transport)| {
                scope.spawn(move || rank_main_on(name, group, &*transport, limit, queues))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join()).collect::<Vec<_>>()
    });
    let mut wrong = Vec::new();
    for (rank, part) in parts.into_iter().enumerate() {
        match part {
            Ok(Ok(())) => {}
            Ok(Err(text)) => wrong.push(format!("rank {rank}: {text}")),
            Err(_) => wrong.push(format!("rank {rank} panicked")),
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) }
}

/// One rank's part of the check `name`, for ranks that are processes. `group` must be its only
/// clone: checks let ranks leave.
///
/// # Errors
/// As [`run`].
pub fn rank_main(
    name: &str,
    group: Group,
    transport: &dyn Transport,
    limit: Duration,
) -> Result<(), String> {
    rank_main_on(name, group, transport, limit, Queues::Host)
}

/// [`rank_main`] with operations on queues of a kind.
///
/// # Errors
/// As [`run`].
pub fn rank_main_on(
    name: &str,
    group: Group,
    transport: &dyn Transport,
    limit: Duration,
    queues: Queues,
) -> Result<(), String> {
    (find(name)?.part)(Rank { group, transport, limit, queues })
}

fn find(name: &str) -> Result<&'static Check, String> {
    let check = CHECKS.iter().find(|check| check.name == name);
    check.ok_or_else(|| format!("there is no check {name}"))
}
