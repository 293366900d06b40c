//! One thing happens at a time: a thread of a rank runs up to its next call of the machine, or a GPU
//! takes a step. A seed picks who, so every run can be repeated.

use std::cell::Cell;

use ep_transport::Group;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::device::{Devices, Op, Rng};
use super::effects::Effect;
use super::program::LANES;
use crate::notify::Phase;

thread_local!(static ACTOR: Cell<Option<usize>> = const { Cell::new(None) });

/// What a protocol with a fault does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mutant {
    #[default]
    None,
    /// Waits are submitted at once, whatever the peers on the GPU have submitted.
    Unpaced,
    /// The signal that rows were read or written goes ahead of the kernel that does it.
    EarlySignal,
    /// Nothing waits for the blocks of other ranks.
    NotSent,
    /// Nothing waits for the rows of other ranks, nor until they have read theirs.
    NotDone,
    /// No stream waits until sources of what was put are free.
    Unflushed,
    /// Nothing waits for the event after which a slot or a handle is free.
    NoOrders,
}

/// Why a thread lets others go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// It is about to do something.
    Go,
    /// It looked for something that was not there yet.
    Look,
    /// As that, but it goes on in the end.
    Hold,
}

/// Whether a flag is one of a phase.
fn is(phase: Phase, flag: u32) -> bool {
    (0..LANES).any(|lane| flag == phase.flag(lane))
}

#[derive(Clone, Debug, Default)]
struct Actor {
    alive: bool,
    /// The state of things in which it has nothing to do.
    looked: Option<u64>,
    holding: bool,
    released: bool,
}

#[derive(Debug)]
struct State {
    devices: Devices,
    actors: Vec<Actor>,
    current: Option<usize>,
    /// Changes with everything that anyone could wait for.
    version: u64,
    /// Of 100 turns that a rank could have, those that a GPU gets.
    eager: usize,
    rng: Rng,
    /// Holds that were given up, and whether nobody could go on.
    broken: usize,
    deadlock: bool,
    /// By stream: work that a mutant keeps back.
    late: Vec<(usize, Effect)>,
}

/// All that ranks, streams and GPUs share.
#[derive(Debug)]
pub struct Shared {
    pub mutant: Mutant,
    state: Mutex<State>,
    /// By actor.
    bells: [Condvar; 8],
    groups: Mutex<Vec<Group>>,
}

/// What came of a run.
#[derive(Debug)]
pub struct Outcome {
    pub faults: Vec<String>,
    pub deadlock: bool,
    pub broken: usize,
    /// Flags that are up.
    pub flags: usize,
    /// What never began.
    pub left: Vec<String>,
}

/// A rank's thread takes part while this lives.
pub struct Part<'a>(&'a Shared);

impl Drop for Part<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Shared {
    pub fn new(devices: Devices, mutant: Mutant, mut rng: Rng) -> Self {
        let eager = [2, 10, 50, 90][rng.below(4)];
        let state = State {
            devices,
            actors: Vec::new(),
            current: None,
            version: 0,
            eager,
            rng,
            broken: 0,
            deadlock: false,
            late: Vec::new(),
        };
        let (state, bells) = (Mutex::new(state), Default::default());
        Self { mutant, state, bells, groups: Mutex::default() }
    }

    pub fn join_group(&self, group: &Group) {
        self.groups.lock().push(group.clone());
    }

    pub fn with<T>(&self, f: impl FnOnce(&mut Devices) -> T) -> T {
        f(&mut self.state.lock().devices)
    }

    /// So many threads are about to [`Shared::enter`].
    pub fn expect(&self, actors: usize) {
        let mut state = self.state.lock();
        state.actors = vec![Actor { alive: true, ..Actor::default() }; actors];
        self.pass(&mut state);
    }

    /// The calling thread is actor `me` from now on.
    pub fn enter(&self, me: usize) -> Part<'_> {
        ACTOR.set(Some(me));
        self.await_turn(&mut self.state.lock(), me);
        Part(self)
    }

    fn leave(&self) {
        let Some(me) = ACTOR.take() else { return };
        let mut state = self.state.lock();
        state.actors[me].alive = false;
        state.version += 1;
        self.pass(&mut state);
    }

    fn await_turn(&self, state: &mut MutexGuard<'_, State>, me: usize) {
        while state.current != Some(me) {
            self.bells[me].wait(state);
        }
    }

    /// Lets others go on for a while. True if the thread was holding and has held long enough.
    pub fn turn(&self, how: How) -> bool {
        let Some(me) = ACTOR.get() else { return true };
        let mut state = self.state.lock();
        if how == How::Go {
            state.version += 1;
        }
        let version = state.version;
        let actor = &mut state.actors[me];
        actor.looked = (how != How::Go).then_some(version);
        actor.holding = how == How::Hold;
        self.pass(&mut state);
        self.await_turn(&mut state, me);
        std::mem::take(&mut state.actors[me].released)
    }

    /// Picks who goes on.
    fn pass(&self, state: &mut State) {
        state.current = None;
        while state.actors.iter().any(|actor| actor.alive) {
            let (version, over) = (state.version, state.deadlock);
            let ready = |a: &Actor| a.alive && (over || a.looked != Some(version));
            let ready: Vec<usize> =
                (0..state.actors.len()).filter(|&a| ready(&state.actors[a])).collect();
            let eager = ready.is_empty() || state.rng.chance(state.eager);
            if eager && !over && state.devices.step() {
                state.version += 1;
                continue;
            }
            if !ready.is_empty() {
                state.current = Some(ready[state.rng.below(ready.len())]);
                break;
            }
            self.stuck(state);
        }
        if let Some(next) = state.current {
            self.bells[next].notify_one();
        }
    }

    /// Nobody can go on: who holds gives up, else it is a deadlock.
    fn stuck(&self, state: &mut State) {
        let holding = |actor: &&mut Actor| actor.alive && actor.holding;
        if let Some(actor) = state.actors.iter_mut().find(holding) {
            (actor.released, actor.looked, actor.holding) = (true, None, false);
            state.broken += 1;
            return;
        }
        state.deadlock = true;
        for group in self.groups.lock().iter() {
            group.abort("nobody can go on");
        }
    }

    /// Something happened that others may be waiting for.
    pub fn news(&self) {
        self.state.lock().version += 1;
    }

    pub fn submit(&self, stream: usize, op: Op) {
        self.turn(How::Go);
        let mut state = self.state.lock();
        state.version += 1;
        match op {
            Op::Work(effect) if self.mutant == Mutant::EarlySignal && effect.moves() => {
                state.late.push((stream, effect));
                return;
            }
            Op::Order(_) if self.mutant == Mutant::NoOrders => return,
            Op::Wait { flag, .. } if self.mutant == Mutant::NotSent && is(Phase::Sent, flag) => {
                return;
            }
            Op::Wait { flag, .. } if self.mutant == Mutant::NotDone && is(Phase::Done, flag) => {
                return;
            }
            Op::Signal { .. } => {}
            _ => {
                let late = state.late.iter().position(|late| late.0 == stream);
                if let Some(late) = late {
                    let (stream, effect) = state.late.remove(late);
                    state.devices.submit(stream, Op::Work(effect));
                }
            }
        }
        state.devices.submit(stream, op);
    }

    /// Makes `stream` wait for what `before` has now.
    pub fn chain(&self, before: usize, stream: usize) {
        let point = self.with(Devices::point);
        self.submit(before, Op::Record(point));
        self.turn(How::Go);
        self.state.lock().devices.submit(stream, Op::Order(point));
    }

    /// Lets GPUs finish, and says what came of it all.
    pub fn outcome(&self) -> Outcome {
        let mut state = self.state.lock();
        while !state.deadlock && state.devices.step() {}
        Outcome {
            faults: state.devices.memory.faults.clone(),
            deadlock: state.deadlock,
            broken: state.broken,
            flags: state.devices.flags.len(),
            left: state.devices.left(),
        }
    }
}
