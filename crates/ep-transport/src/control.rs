//! What a group needs from whatever connects its ranks.

use std::fmt::Debug;
use std::sync::Arc;

use crate::health::{Fault, Health};
use crate::{Deadline, Result};

/// The control plane of one group, seen from one rank: small, rare messages.
pub(crate) trait Control: Debug + Send + Sync {
    /// Gathers everyone's bytes by rank. Called by all ranks in the same order; concurrent calls
    /// of one rank are serialised by the implementation.
    fn all_gather(
        &self,
        op: &'static str,
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>>;

    /// Makes every other rank's [`Health`] show `fault` as soon as possible. Must not block long.
    fn abort(&self, fault: &Fault);

    /// This rank leaves; after a panic it counts as lost. Never blocks long.
    fn leave(&self, panicking: bool);

    /// The control plane of the subgroup of `members` (ranks of this group, in the new order; this
    /// rank is among them). Called by all ranks of this group at the same point.
    fn split(
        &self,
        members: &[usize],
        deadline: Deadline,
    ) -> Result<(Box<dyn Control>, Arc<Health>)>;
}
