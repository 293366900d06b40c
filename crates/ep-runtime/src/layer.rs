//! What a built layer tells and gives beside its operations.

use ep_kernels::Placement;
use ep_transport::{Group, Queue};

use crate::ep::Ep;
use crate::result::Dispatched;
use crate::{EpError, Handle, Result};

impl Ep {
    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.inner.rank()
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.inner.shape.world
    }

    /// The group it was built over.
    pub fn group(&self) -> &Group {
        &self.inner.group
    }

    /// Which ranks hold which expert, and by which local number.
    pub fn placement(&self) -> &Placement {
        &self.inner.shape.placement
    }

    /// The number of experts of `rank`.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn local_experts(&self, rank: usize) -> usize {
        self.inner.shape.placement.local_experts(rank)
    }

    /// Launches kernels differently from the next operation on: for finding out what is best. It
    /// never changes results; without a meaning on the host.
    ///
    /// # Errors
    /// A plan that cannot be launched; nothing changes then.
    #[cfg(feature = "cuda")]
    pub fn retune(&self, tuning: crate::Tuning) -> Result<()> {
        match &self.inner.gpu {
            Some(gpu) => {
                if let Some(sms) = &self.inner.sms.reservation {
                    sms.check(&tuning.launches(gpu.blocks()))?;
                }
                gpu.retune(tuning)
            }
            None => Ok(()),
        }
    }

    /// Result slots nobody owns at the moment.
    pub fn free_slots(&self) -> usize {
        self.inner.slots.free()
    }

    /// A free slot shaped by an earlier dispatch, with nothing dispatched into it: for rows that
    /// are to be combined but did not come by a dispatch, such as the gradients of a dispatch's
    /// rows. Write them with [`Dispatched::rows_mut`].
    ///
    /// # Errors
    /// [`EpError::NoFreeSlot`], or a handle of another [`Ep`].
    pub fn combine_slot(&self, handle: &Handle, queue: &Queue) -> Result<Dispatched> {
        const OP: &str = "combine_slot";
        self.inner.usable(OP)?;
        self.own(OP, handle)?;
        let slot = self.inner.free_slot(OP, handle.routing.lane, queue)?;
        let lane = handle.routing.lane;
        Ok(Dispatched::new(self.inner.clone(), slot, handle.clone(), None, false, lane))
    }

    pub(crate) fn own(&self, op: &'static str, handle: &Handle) -> Result<()> {
        if handle.routing.ep == self.inner.id {
            return Ok(());
        }
        Err(EpError::argument(op, "the handle belongs to another group, shape or rank"))
    }
}
