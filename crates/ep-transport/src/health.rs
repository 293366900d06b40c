//! What a rank knows about the others.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::{Result, TransportError};

/// A rank gave up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rank that says so.
    pub by: usize,
    /// The rank it blames, if any.
    pub blames: Option<usize>,
    /// Its reason.
    pub why: String,
}

/// The health of a group's ranks, as far as this rank has heard.
pub struct Health {
    /// Anything at all was recorded; lets waits look at one word.
    any: AtomicBool,
    state: Mutex<State>,
    /// Called after news was recorded, so that sleeping waits look at it.
    bells: Mutex<Vec<Weak<dyn Fn() + Send + Sync>>>,
}

impl std::fmt::Debug for Health {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Health").field("state", &self.state).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct State {
    fault: Option<Fault>,
    /// Why each rank is gone, if it is.
    gone: Vec<Option<Gone>>,
}

#[derive(Clone, Debug)]
struct Gone {
    /// It left in good order, after finishing what it had promised.
    left: bool,
    detail: String,
}

impl Health {
    /// All of `world` ranks are well.
    pub fn new(world: usize) -> Self {
        let state = State { fault: None, gone: vec![None; world] };
        let bells = Mutex::new(Vec::new());
        Self { any: AtomicBool::new(false), state: Mutex::new(state), bells }
    }

    /// Calls `bell` whenever there is news, as long as it lives: what makes a sleeping wait look
    /// here at once. It must not block and not call back into this value.
    pub fn watch(&self, bell: Weak<dyn Fn() + Send + Sync>) {
        let mut bells = self.bells.lock();
        bells.retain(|bell| bell.strong_count() > 0);
        bells.push(bell);
    }

    /// Tells that `state` has news. The lock is not held, so that whoever looks finds it free.
    fn publish(&self) {
        self.any.store(true, Ordering::Release);
        for bell in self.bells.lock().iter() {
            if let Some(bell) = bell.upgrade() {
                bell();
            }
        }
    }

    /// Records the group's first fault; later ones are consequences. True if this was the first.
    pub fn set(&self, fault: Fault) -> bool {
        let mut state = self.state.lock();
        let first = state.fault.is_none();
        if first {
            state.fault = Some(fault);
        }
        drop(state);
        self.publish();
        first
    }

    /// Records that `rank` left in good order.
    pub fn left(&self, rank: usize) {
        self.gone(rank, Gone { left: true, detail: "it has left the group".into() });
    }

    /// Records that `rank` died.
    pub fn lost(&self, rank: usize, detail: &str) {
        self.gone(rank, Gone { left: false, detail: detail.into() });
    }

    fn gone(&self, rank: usize, gone: Gone) {
        let mut state = self.state.lock();
        state.gone[rank].get_or_insert(gone);
        drop(state);
        self.publish();
    }

    /// Whether `rank` left in good order.
    #[cfg(feature = "rdma")]
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.is_gone(rank, |gone| gone.left)
    }

    /// Whether `rank` died.
    #[cfg(feature = "rdma")]
    pub(crate) fn is_lost(&self, rank: usize) -> bool {
        self.is_gone(rank, |gone| !gone.left)
    }

    #[cfg(feature = "rdma")]
    fn is_gone(&self, rank: usize, how: impl Fn(&Gone) -> bool) -> bool {
        self.any.load(Ordering::Acquire)
            && self.state.lock().gone.get(rank).is_some_and(|gone| gone.as_ref().is_some_and(how))
    }

    /// The fault, if a rank gave up.
    pub fn fault(&self) -> Option<Fault> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        self.state.lock().fault.clone()
    }

    /// Fails if a rank gave up or died. One that left in good order is no reason.
    ///
    /// # Errors
    /// [`TransportError::Aborted`], [`TransportError::PeerLost`].
    pub fn check(&self, op: &'static str) -> Result<()> {
        if !self.any.load(Ordering::Acquire) {
            return Ok(());
        }
        let state = self.state.lock();
        if let Some(lost) = state.gone.iter().position(|g| g.as_ref().is_some_and(|g| !g.left)) {
            let detail = state.gone[lost].as_ref().expect("just found").detail.clone();
            return Err(TransportError::PeerLost { op, peer: lost, detail });
        }
        match state.fault.clone() {
            Some(Fault { by, blames, why }) => Err(TransportError::Aborted { op, by, blames, why }),
            None => Ok(()),
        }
    }

    /// [`Health::check`] for a wait on `absent` peers: one of them having left is a reason too.
    ///
    /// # Errors
    /// As [`Health::check`].
    pub fn check_waiting(&self, op: &'static str, absent: &[usize]) -> Result<()> {
        self.check_waiting_on(op, absent.iter().copied())
    }

    pub(crate) fn check_waiting_on(
        &self,
        op: &'static str,
        absent: impl Iterator<Item = usize>,
    ) -> Result<()> {
        if !self.any.load(Ordering::Acquire) {
            return Ok(());
        }
        self.check(op)?;
        let state = self.state.lock();
        for peer in absent {
            if let Some(gone) = &state.gone[peer] {
                return Err(TransportError::PeerLost { op, peer, detail: gone.detail.clone() });
            }
        }
        Ok(())
    }
}
