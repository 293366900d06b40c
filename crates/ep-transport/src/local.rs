//! Ranks that are threads of one process.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::control::Control;
use crate::health::{Fault, Health};
use crate::{DEFAULT_TIMEOUT, Deadline, Group, Result, TransportError};

impl Group {
    /// A group of `world` ranks within this process, by rank: give each to a thread of its own.
    ///
    /// # Errors
    /// An argument error if `world` is 0.
    pub fn local(world: usize) -> Result<Vec<Group>> {
        if world == 0 {
            let detail = "a group has at least one rank".into();
            return Err(TransportError::Argument { op: "local", detail });
        }
        let hub = Hub::new(world);
        let group = |rank| {
            let (control, health) = hub.member(rank);
            Group::from_parts(rank, world, DEFAULT_TIMEOUT, control, health)
        };
        Ok((0..world).map(group).collect())
    }
}

/// What the ranks share.
#[derive(Debug)]
struct Hub {
    healths: Vec<Arc<Health>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// How many gathers have completed.
    completed: u64,
    /// Who takes part in the next one, with which operation and bytes.
    parts: Vec<Option<(&'static str, Vec<u8>)>>,
    arrived: usize,
    /// The outcome of the last one. The next cannot complete before everyone has fetched it, since
    /// a rank takes part in one gather at a time.
    outcome: Outcome,
    /// Subgroups being made, by the gather that preceded them and their first member, with the
    /// number of members that have yet to join.
    splits: HashMap<(u64, usize), (Arc<Hub>, usize)>,
}

/// Everyone's bytes, or what each rank was doing instead of the same thing.
type Outcome = Arc<Result<Vec<Vec<u8>>, Vec<&'static str>>>;

impl Hub {
    fn new(world: usize) -> Arc<Self> {
        let state = State {
            completed: 0,
            parts: vec![None; world],
            arrived: 0,
            outcome: Arc::new(Ok(Vec::new())),
            splits: HashMap::new(),
        };
        Arc::new(Self {
            healths: (0..world).map(|_| Arc::new(Health::new(world))).collect(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    fn member(self: &Arc<Self>, rank: usize) -> (Box<dyn Control>, Arc<Health>) {
        let health = self.healths[rank].clone();
        (Box::new(LocalControl { hub: self.clone(), rank, turn: Mutex::new(0) }), health)
    }

    /// Tells the others something and wakes those who wait in a gather.
    fn tell(&self, rank: usize, news: impl Fn(&Health)) {
        for (other, health) in self.healths.iter().enumerate() {
            if other != rank {
                news(health);
            }
        }
        // Taking the lock orders this after a waiter's look at its health and before its sleep, or
        // before that look.
        drop(self.state.lock());
        self.changed.notify_all();
    }
}

impl State {
    fn complete(&mut self) {
        let ops: Vec<&'static str> = self.parts.iter().flatten().map(|(op, _)| *op).collect();
        let bytes = self.parts.iter_mut().filter_map(Option::take).map(|(_, bytes)| bytes);
        let bytes: Vec<Vec<u8>> = bytes.collect();
        let same = ops.iter().all(|op| *op == ops[0]);
        self.outcome = Arc::new(if same { Ok(bytes) } else { Err(ops) });
        self.arrived = 0;
        self.completed += 1;
    }

    fn absent(&self) -> Vec<usize> {
        (0..self.parts.len()).filter(|&rank| self.parts[rank].is_none()).collect()
    }
}

/// One rank's end of the hub.
#[derive(Debug)]
struct LocalControl {
    hub: Arc<Hub>,
    rank: usize,
    /// Held during a gather: threads of one rank take turns. The number of the last gather.
    turn: Mutex<u64>,
}

impl Control for LocalControl {
    fn all_gather(
        &self,
        op: &'static str,
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>> {
        let busy = || TransportError::Timeout {
            op,
            peers: vec![self.rank],
            after: deadline.length(),
            hint: ": another thread of this rank is in a collective".into(),
        };
        let mut turn = self.turn.try_lock_for(deadline.remaining()).ok_or_else(busy)?;
        let outcome = self.gather(op, bytes, deadline, &mut turn)?;
        match &*outcome {
            Ok(bytes) => Ok(bytes.clone()),
            Err(ops) => Err(mismatch(op, ops)),
        }
    }

    fn abort(&self, fault: &Fault) {
        self.hub.tell(self.rank, |health| {
            health.set(fault.clone());
        });
    }

    fn leave(&self, panicking: bool) {
        // Whoever told this rank of it may not have told the others yet, and they must not take its
        // leaving for one in good order.
        let fault = self.hub.healths[self.rank].fault();
        self.hub.tell(self.rank, |health| {
            if let Some(fault) = &fault {
                health.set(fault.clone());
            }
            if panicking {
                health.lost(self.rank, "its thread panicked");
            } else {
                health.left(self.rank);
            }
        });
    }

    fn split(
        &self,
        members: &[usize],
        deadline: Deadline,
    ) -> Result<(Box<dyn Control>, Arc<Health>)> {
        let unfit = |detail: &str| TransportError::Argument { op: "split", detail: detail.into() };
        let rank = members.iter().position(|&rank| rank == self.rank);
        let rank = rank.ok_or_else(|| unfit("this rank is not a member"))?;
        let turn = self.turn.try_lock_for(deadline.remaining());
        let key = (*turn.ok_or_else(|| unfit("another thread is in a collective"))?, members[0]);
        let mut state = self.hub.state.lock();
        let (hub, missing) =
            state.splits.entry(key).or_insert_with(|| (Hub::new(members.len()), members.len()));
        let hub = hub.clone();
        *missing -= 1;
        if *missing == 0 {
            state.splits.remove(&key);
        }
        Ok(hub.member(rank))
    }
}

impl LocalControl {
    fn gather(
        &self,
        op: &'static str,
        bytes: &[u8],
        deadline: Deadline,
        turn: &mut u64,
    ) -> Result<Outcome> {
        let mut state = self.hub.state.lock();
        let number = state.completed + 1;
        *turn = number;
        state.parts[self.rank] = Some((op, bytes.to_vec()));
        state.arrived += 1;
        if state.arrived == state.parts.len() {
            state.complete();
            self.hub.changed.notify_all();
            return Ok(state.outcome.clone());
        }
        let health = &self.hub.healths[self.rank];
        loop {
            if state.completed >= number {
                return Ok(state.outcome.clone());
            }
            let absent = state.absent();
            let mut verdict = health.check_waiting(op, &absent);
            if verdict.is_ok() && deadline.expired() {
                let (peers, after) = (absent, deadline.length());
                verdict = Err(TransportError::Timeout { op, peers, after, hint: String::new() });
            }
            if let Err(error) = verdict {
                state.parts[self.rank] = None;
                state.arrived -= 1;
                return Err(error);
            }
            self.hub.changed.wait_for(&mut state, deadline.remaining());
        }
    }
}

fn mismatch(op: &'static str, ops: &[&'static str]) -> TransportError {
    let ranks: Vec<usize> = (1..ops.len()).filter(|&rank| ops[rank] != ops[0]).collect();
    let first = ranks.first().copied().unwrap_or_default();
    TransportError::Mismatch {
        op,
        field: "operation".into(),
        ranks,
        detail: format!("rank 0 is in {}, rank {first} in {}", ops[0], ops[first]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fault for which a rank leaves is known wherever its leaving is.
    #[test]
    fn nobody_hears_of_a_leaving_before_the_fault_it_is_for() {
        let hub = Hub::new(3);
        let ends: Vec<_> = (0..3).map(|rank| hub.member(rank)).collect();
        // Rank 0 has told rank 1 and no other yet.
        let fault = Fault { by: 0, blames: Some(2), why: "told half".into() };
        ends[1].1.set(fault.clone());
        ends[1].0.leave(false);
        assert!(ends[2].1.check_waiting("wait", &[1]).is_err());
        assert_eq!(ends[2].1.fault(), Some(fault));
    }
}
