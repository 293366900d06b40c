//! The suite must notice transports that break their promises: each way of breaking one fails the
//! checks listed for it, and every check fails for at least one.
#![cfg(not(loom))]

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ep_transport::conformance::{CHECKS, Member, run_members};
use ep_transport::{
    Deadline, ForwardLink, Group, Link, Put, Queue, Result, ThreadTransport, Transport,
    TransportError, WindowSpec,
};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Broken {
    /// Every third signal is lost.
    DropsSignals,
    /// Puts are carried out after the signal that should follow them.
    SignalsBeforeData,
    /// A wait does not reset its flags.
    ForgetsReset,
    /// All flags of a source are one.
    OneFlag,
    /// Windows start dirty.
    Dirty,
    /// Flags and windows out of range are quietly accepted.
    Unchecked,
    /// A put of no bytes is refused.
    RefusesEmptyPuts,
    /// Waits name only one absent peer.
    Vague,
    /// Waits give up late.
    Late,
    /// Waits do not listen to news of the group.
    Deaf,
    /// News of a peer count more than its flags.
    NewsFirst,
    /// Only one thread of a rank can wait.
    OneWaiter,
    /// What the ranks ask for is not compared.
    Trusting,
    /// A second window is the first.
    Reuses,
    /// Closing a link aborts the group.
    SlamsDoors,
}

use Broken::*;

/// What must fail for whom.
const CAUGHT: &[(Broken, &[&str])] = &[
    (DropsSignals, &["data_before_signal_is_visible", "reads_before_signal_are_not_overwritten"]),
    (
        SignalsBeforeData,
        &[
            "data_before_signal_is_visible",
            "reuse_over_many_rounds",
            "sources_may_change_after_flush",
        ],
    ),
    (ForgetsReset, &["ready_agrees_with_wait", "reads_before_signal_are_not_overwritten"]),
    (OneFlag, &["flags_are_independent", "ready_agrees_with_wait"]),
    (Dirty, &["windows_are_zeroed_disjoint_and_sized"]),
    (Unchecked, &["bad_arguments_are_errors"]),
    (RefusesEmptyPuts, &["zero_length_puts"]),
    (Vague, &["deadlines_name_the_absent"]),
    (Late, &["deadlines_name_the_absent"]),
    (Deaf, &["lost_peers_are_named_promptly", "aborts_reach_waiters"]),
    (NewsFirst, &["signals_outlive_their_source"]),
    (OneWaiter, &["threads_wait_on_different_flags"]),
    (Trusting, &["different_windows_are_a_mismatch"]),
    (Reuses, &["links_of_one_group_are_independent"]),
    (SlamsDoors, &["drops_in_any_order"]),
];

#[derive(Debug)]
struct BrokenTransport {
    how: Broken,
    bulk: bool,
    first: Mutex<Option<Arc<dyn Link>>>,
}

impl Transport for BrokenTransport {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn open(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Arc<dyn Link>> {
        let mut first = self.first.lock().unwrap();
        if let (Reuses, Some(link)) = (self.how, &*first) {
            return Ok(link.clone());
        }
        let asked = match self.how {
            Trusting => WindowSpec { bytes: 16_384, flags: 8 },
            Reuses => WindowSpec { bytes: 100_000, flags: 8 },
            _ => spec,
        };
        let inner = ThreadTransport::new().bulk(self.bulk).open(group, asked, deadline)?;
        if self.how == Dirty {
            // SAFETY: the first byte of the own window, which nobody else uses yet.
            unsafe { inner.window().base.as_ptr().write(1) };
        }
        let link: Arc<dyn Link> = Arc::new(BrokenLink {
            how: self.how,
            spec: asked,
            group: group.clone(),
            inner,
            state: Mutex::default(),
            turn: Mutex::new(()),
        });
        if self.how == Reuses {
            *first = Some(link.clone());
        }
        Ok(link)
    }
}

#[derive(Debug, Default)]
struct State {
    signals: u32,
    late: Vec<Put>,
}

#[derive(Debug)]
struct BrokenLink {
    how: Broken,
    spec: WindowSpec,
    group: Group,
    inner: Arc<dyn Link>,
    state: Mutex<State>,
    turn: Mutex<()>,
}

impl BrokenLink {
    fn flag(&self, flag: u32) -> u32 {
        if self.how == OneFlag && flag < self.spec.flags { 0 } else { flag }
    }

    /// Waits by looking, without the help of the transport.
    fn look(&self, op: &'static str, peers: &[usize], flag: u32, deadline: Deadline) -> Result<()> {
        // `ready` tells of failures too, which one that is deaf does not hear.
        let deaf = || self.how == Deaf && self.group.health().check_waiting(op, peers).is_err();
        while !self.inner.ready(peers, flag) || deaf() {
            if deadline.expired() {
                let (peers, after) = (peers.to_vec(), deadline.length());
                return Err(TransportError::Timeout { op, peers, after, hint: String::new() });
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

impl Drop for BrokenLink {
    fn drop(&mut self) {
        if self.how == SlamsDoors {
            self.group.abort("the door is shut");
        }
    }
}

// SAFETY: what it breaks are flags and order, which the checks it is given to are there to see;
// nothing that it maps is dereferenced beyond the inner link's windows.
unsafe impl ForwardLink for BrokenLink {
    fn inner(&self) -> &dyn Link {
        &*self.inner
    }

    fn put(&self, queue: &Queue, put: Put) -> Result<()> {
        match self.how {
            SignalsBeforeData => {
                self.state.lock().unwrap().late.push(put);
                Ok(())
            }
            RefusesEmptyPuts if put.bytes == 0 => {
                let detail = "nothing to put".into();
                Err(TransportError::Argument { op: "put", detail })
            }
            Unchecked => self.inner.put(queue, put).or(Ok(())),
            _ => self.inner.put(queue, put),
        }
    }

    fn signal(&self, queue: &Queue, peer: usize, flag: u32) -> Result<()> {
        let mut state = self.state.lock().unwrap();
        state.signals += 1;
        if self.how == DropsSignals && state.signals.is_multiple_of(3) {
            return Ok(());
        }
        let signalled = self.inner.signal(queue, peer, self.flag(flag));
        if !state.late.is_empty() {
            std::thread::sleep(Duration::from_millis(2));
        }
        state.late.drain(..).try_for_each(|put| self.inner.put(queue, put))?;
        if self.how == Unchecked { Ok(()) } else { signalled }
    }

    fn wait(
        &self,
        queue: &Queue,
        op: &'static str,
        peers: &[usize],
        flag: u32,
        deadline: Deadline,
    ) -> Result<()> {
        let flag = self.flag(flag);
        match self.how {
            ForgetsReset => return self.look(op, peers, flag, deadline),
            Deaf => self.look(op, peers, flag, deadline)?,
            NewsFirst => self.group.health().check_waiting(op, peers)?,
            _ => {}
        }
        let _turn = (self.how == OneWaiter).then(|| self.turn.lock().unwrap());
        let waited = self.inner.wait(queue, op, peers, flag, deadline);
        match waited {
            Err(TransportError::Timeout { op, after, hint, .. }) if self.how == Vague => {
                Err(TransportError::Timeout { op, peers: vec![peers[0]], after, hint })
            }
            Err(late @ TransportError::Timeout { .. }) if self.how == Late => {
                std::thread::sleep(LIMIT / 4);
                Err(late)
            }
            Err(_) if self.how == Unchecked => Ok(()),
            waited => waited,
        }
    }

    fn ready(&self, peers: &[usize], flag: u32) -> bool {
        self.inner.ready(peers, self.flag(flag))
    }
}

fn members(how: Broken, bulk: bool, world: usize) -> Vec<Member> {
    let transport = || BrokenTransport { how, bulk, first: Mutex::new(None) };
    let groups = Group::local(world).unwrap().into_iter();
    groups.map(|group| (group, Box::new(transport()) as Box<dyn Transport>)).collect()
}

#[test]
fn every_broken_promise_is_noticed() {
    std::thread::scope(|scope| {
        for &(how, checks) in CAUGHT {
            // Late data are only possible where the link moves them.
            let bulk = how == SignalsBeforeData;
            // Of fewer only one would be absent.
            let world = if how == Vague { 5 } else { 3 };
            scope.spawn(move || {
                for check in checks {
                    let verdict = run_members(check, members(how, bulk, world), LIMIT);
                    assert!(verdict.is_err(), "{check} does not notice {how:?}");
                }
            });
        }
    });
}

/// How long the checks wait here for what a sound transport would do.
const LIMIT: Duration = Duration::from_millis(700);

#[test]
fn every_check_can_fail() {
    let caught: BTreeSet<_> =
        CAUGHT.iter().flat_map(|(_, checks)| checks.iter().copied()).collect();
    let checks: BTreeSet<_> = CHECKS.iter().map(|check| check.name).collect();
    assert_eq!(caught, checks);
}

#[test]
fn an_unknown_check_is_an_error() {
    assert!(run_members("no_such_check", members(Dirty, false, 1), LIMIT).is_err());
}
