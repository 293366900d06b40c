//! Ranks that can find each other.

use std::sync::Arc;
use std::time::Duration;

use crate::control::Control;
use crate::health::{Fault, Health};
use crate::{Deadline, Result, TransportError};

/// How long collectives of the control plane wait unless a group is told otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// A set of ranks and this rank's place in it.
///
/// Clones are the same rank. The rank leaves the group when its last clone is dropped; peers that
/// still wait for it then get an error at once. Collectives (`barrier`, `all_gather`, `split`) are
/// called by all ranks in the same order.
#[derive(Clone, Debug)]
pub struct Group {
    member: Arc<Member>,
}

#[derive(Debug)]
struct Member {
    rank: usize,
    world: usize,
    timeout: Duration,
    control: Box<dyn Control>,
    health: Arc<Health>,
    /// The ranks' numbers where errors are told, if that is not this group.
    numbers: Option<Vec<usize>>,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.control.leave(std::thread::panicking());
    }
}

impl Group {
    pub(crate) fn from_parts(
        rank: usize,
        world: usize,
        timeout: Duration,
        control: Box<dyn Control>,
        health: Arc<Health>,
    ) -> Self {
        let member = Member { rank, world, timeout, control, health, numbers: None };
        Self { member: Arc::new(member) }
    }

    /// A part of another group, whose ranks have the numbers `numbers` there: what is said in words of
    /// ranks of this group, which nobody else knows, goes by those. Errors still have this group's numbers
    /// until they have been through [`Group::outward`]. Before the group is cloned.
    #[cfg(any(feature = "rdma", feature = "nccl", test))]
    pub(crate) fn part_of_another(mut self, numbers: &[usize]) -> Self {
        if let Some(member) = Arc::get_mut(&mut self.member) {
            member.numbers = Some(numbers.to_vec());
        }
        self
    }

    /// The number of a rank where errors are told.
    #[cfg(not(loom))]
    pub(crate) fn number(&self, rank: usize) -> usize {
        let numbers = self.member.numbers.as_ref();
        numbers.and_then(|numbers| numbers.get(rank).copied()).unwrap_or(rank)
    }

    /// An error of this group as it is told.
    pub(crate) fn outward(&self, error: TransportError) -> TransportError {
        match &self.member.numbers {
            Some(numbers) => error.renumbered(numbers),
            None => error,
        }
    }

    /// This rank's number, `0..world()`.
    pub fn rank(&self) -> usize {
        self.member.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.member.world
    }

    /// What is known of the ranks' health. Transports look at it while they wait.
    pub fn health(&self) -> &Health {
        &self.member.health
    }

    /// Gathers everyone's bytes (lengths may differ), by rank.
    ///
    /// # Errors
    /// Time-out (60 s by default), a lost peer or an abort. The group is then unusable.
    pub fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.all_gather_within("all_gather", bytes, Deadline::after(self.member.timeout))
    }

    /// [`Group::all_gather`] on behalf of `op`, with a deadline.
    pub fn all_gather_within(
        &self,
        op: &'static str,
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>> {
        self.member.health.check(op)?;
        self.member.control.all_gather(op, bytes, deadline).inspect_err(|e| self.report(e))
    }

    /// Waits until every rank has come here.
    ///
    /// # Errors
    /// As [`Group::all_gather`].
    pub fn barrier(&self) -> Result<()> {
        self.all_gather_within("barrier", &[], Deadline::after(self.member.timeout)).map(drop)
    }

    /// Makes a group of the ranks that passed the same `color`, ordered by `(key, rank)`.
    ///
    /// # Errors
    /// As [`Group::all_gather`].
    pub fn split(&self, color: u32, key: i64) -> Result<Group> {
        let mut mine = [0u8; 12];
        mine[..4].copy_from_slice(&color.to_le_bytes());
        mine[4..].copy_from_slice(&key.to_le_bytes());
        let deadline = Deadline::after(self.member.timeout);
        let all = self.all_gather_within("split", &mine, deadline)?;
        let mut members = Vec::new();
        for (rank, theirs) in all.iter().enumerate() {
            let theirs: &[u8; 12] =
                theirs.as_slice().try_into().map_err(|_| TransportError::Mismatch {
                    op: "split",
                    field: "operation".into(),
                    ranks: vec![rank],
                    detail: format!("rank {rank} is in another collective than split"),
                })?;
            if theirs[..4] == mine[..4] {
                let key = i64::from_le_bytes(theirs[4..].try_into().expect("eight bytes"));
                members.push((key, rank));
            }
        }
        members.sort_unstable();
        let members: Vec<usize> = members.into_iter().map(|(_, rank)| rank).collect();
        let rank = members.iter().position(|&m| m == self.rank()).expect("own color is present");
        let world = members.len();
        // The others know of nothing: to them the collective has succeeded.
        let split = self.member.control.split(&members, deadline).inspect_err(|e| {
            self.fail(Fault { by: self.rank(), blames: e.peer(), why: e.to_string() });
        });
        let (control, health) = split?;
        Ok(Self::from_parts(rank, world, self.member.timeout, control, health))
    }

    /// Gives up for all ranks: every pending and later operation of the group fails with `why`.
    pub fn abort(&self, why: &str) {
        self.fail(Fault { by: self.rank(), blames: None, why: why.into() });
    }

    /// Tells all ranks of a failure that leaves the group out of phase. Errors after which the
    /// group is still usable, and news that came from a peer, are not passed on.
    pub fn report(&self, error: &TransportError) {
        if error.group_usable() || matches!(error, TransportError::Aborted { .. }) {
            return;
        }
        let why = self.outward(error.clone()).to_string();
        self.fail(Fault { by: self.rank(), blames: error.peer(), why });
    }

    /// Tells all ranks that this one gives up, and whom it blames.
    pub fn fail(&self, fault: Fault) {
        if self.member.health.set(fault.clone()) {
            self.member.control.abort(&fault);
        }
    }

    /// The same group with another time-out for `barrier`, `all_gather` and `split`.
    ///
    /// # Errors
    /// When another clone of this group exists.
    pub fn with_timeout(mut self, timeout: Duration) -> Result<Self> {
        match Arc::get_mut(&mut self.member) {
            Some(member) => member.timeout = timeout,
            None => {
                return Err(TransportError::Argument {
                    op: "with_timeout",
                    detail: "set the time-out before the group is cloned".into(),
                });
            }
        }
        Ok(self)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Two ranks of which this one can do all but split.
    #[derive(Debug)]
    struct Poor(TransportError, Arc<parking_lot::Mutex<Vec<Fault>>>);

    impl Control for Poor {
        fn all_gather(&self, _: &'static str, bytes: &[u8], _: Deadline) -> Result<Vec<Vec<u8>>> {
            Ok(vec![bytes.to_vec(); 2])
        }

        fn abort(&self, fault: &Fault) {
            self.1.lock().push(fault.clone());
        }

        fn leave(&self, _panicking: bool) {}

        fn split(&self, _: &[usize], _: Deadline) -> Result<(Box<dyn Control>, Arc<Health>)> {
            Err(self.0.clone())
        }
    }

    /// Ranks of a part go by their numbers in the whole, in words at once, in numbers once told.
    #[test]
    fn errors_of_a_part_name_ranks_of_the_whole() {
        let (told, health) =
            (Arc::<parking_lot::Mutex<Vec<Fault>>>::default(), Arc::new(Health::new(2)));
        let nothing = TransportError::Argument { op: "split", detail: String::new() };
        let control = Box::new(Poor(nothing, Arc::clone(&told)));
        let group = Group::from_parts(1, 2, DEFAULT_TIMEOUT, control, health.clone());
        let group = group.part_of_another(&[4, 6]);
        assert_eq!((group.rank(), group.number(1)), (1, 6));
        let (op, after, hint) = ("open", Duration::from_secs(1), String::new());
        group.report(&TransportError::Timeout { op, peers: vec![0], after, hint });
        let fault = told.lock()[0].clone();
        assert_eq!((fault.by, fault.blames), (1, Some(0)), "as the part has it");
        assert_eq!(fault.why, "open: no answer from rank 4 within 1s");
        let error = group.outward(health.check("open").unwrap_err());
        assert!(matches!(error, TransportError::Aborted { by: 6, blames: Some(4), .. }), "{error}");
        health.lost(0, "dead");
        let error = group.outward(health.check("open").unwrap_err());
        assert_eq!(error.to_string(), "open: rank 4 is gone: dead");
    }

    #[test]
    fn a_split_that_fails_on_one_rank_is_told_to_all() {
        let os = TransportError::os("split", "sending", rustix::io::Errno::PIPE);
        let busy = TransportError::Argument { op: "split", detail: "busy".into() };
        for error in [os, busy] {
            let (told, health) = (Arc::default(), Arc::new(Health::new(2)));
            let control = Box::new(Poor(error.clone(), Arc::clone(&told)));
            let group = Group::from_parts(1, 2, DEFAULT_TIMEOUT, control, health);
            assert_eq!(group.split(0, 0).unwrap_err().to_string(), error.to_string());
            let told = told.lock();
            assert_eq!((told.len(), told[0].by), (1, 1));
            assert_eq!(told[0].why, error.to_string());
        }
    }
}
