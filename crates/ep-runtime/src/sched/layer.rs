//! The SMs of one layer.

#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::sync::OnceLock;

use super::lease::SmBudget;
use super::order::SubmitOrder;
use super::policy::{SmPolicy, SmReport};
use crate::{Ep, EpBuilder};

/// What a layer is to have.
#[derive(Clone, Debug, Default)]
pub(crate) struct SmSettings {
    pub policy: SmPolicy,
    /// Blocks of kernels, where they are not those of the policy.
    comm_sms: Option<u32>,
    /// A layer whose SMs are used instead.
    shared: Option<Ep>,
}

/// Blocks of kernels where nothing says how many.
#[cfg(feature = "cuda")]
const BLOCKS: u32 = 16;

#[cfg(feature = "cuda")]
impl SmSettings {
    /// The most blocks of a kernel.
    pub fn blocks(&self) -> u32 {
        let policy = self.shared.as_ref().map_or(self.policy, |ep| ep.sm_report().asked);
        self.comm_sms.unwrap_or(match policy.sms() {
            0 => BLOCKS,
            sms => sms,
        })
    }

    /// The same for a GPU, on behalf of `holder`.
    pub fn choice<'a>(&'a self, holder: &'a str) -> crate::gpu::SmChoice<'a> {
        let (blocks, policy) = (self.blocks(), self.policy);
        crate::gpu::SmChoice { blocks, policy, holder, shared: self.shared.as_ref() }
    }
}

/// SMs.
impl EpBuilder {
    /// The most SMs that communication on a GPU takes: kernels have at most so many blocks, unless
    /// `EpBuilder::tuning` says otherwise. By default those of the [`SmPolicy`], 16 where it sets none
    /// aside. Without a meaning on the host.
    pub fn comm_sms(mut self, sms: u32) -> Self {
        self.sms.comm_sms = Some(sms);
        self
    }

    /// How communication gets its SMs; shared with compute by default. Without a meaning on the host.
    /// What came of it is [`Ep::sm_report`].
    pub fn sm_policy(mut self, policy: SmPolicy) -> Self {
        self.sms.policy = policy;
        self
    }

    /// Uses the SMs that another layer on the same GPU has set aside, in place of a policy.
    pub fn share_sms(mut self, layer: &Ep) -> Self {
        self.sms.shared = Some(layer.clone());
        self
    }
}

/// What a layer knows of its SMs.
#[derive(Debug)]
pub(crate) struct Sms {
    asked: SmPolicy,
    /// The order where there is no device.
    order: OnceLock<SubmitOrder>,
    #[cfg(feature = "cuda")]
    pub reservation: Option<Arc<super::cuda::CudaReservation>>,
}

impl Sms {
    pub fn new(asked: SmPolicy) -> Self {
        Self {
            asked,
            order: OnceLock::new(),
            #[cfg(feature = "cuda")]
            reservation: None,
        }
    }

    fn report(&self) -> SmReport {
        #[cfg(feature = "cuda")]
        if let Some(reservation) = &self.reservation {
            return reservation.report();
        }
        let why = "the layer works on the host".to_owned();
        SmReport {
            asked: self.asked,
            in_force: SmPolicy::Shared,
            device: None,
            device_sms: 0,
            blocks: 0,
            reserved: 0,
            compute_sms: 0,
            why: (self.asked != SmPolicy::Shared).then_some(why),
        }
    }

    fn budget(&self) -> Option<SmBudget> {
        #[cfg(feature = "cuda")]
        if let Some(reservation) = &self.reservation {
            return Some(reservation.carver.budget.clone());
        }
        None
    }
}

/// SMs.
impl Ep {
    /// How communication gets its SMs: what was asked for, what is in force, and why.
    pub fn sm_report(&self) -> SmReport {
        self.inner.sms.report()
    }

    /// SMs that nothing in this process has set aside of the layer's GPU, now: how many blocks that
    /// stay compute may launch under [`SmPolicy::Margin`]. 0 on the host.
    pub fn compute_sms(&self) -> u32 {
        self.sm_report().compute_sms
    }

    /// SMs that are set aside for this layer, or that its kernels take at most where none are. 0 on
    /// the host.
    pub fn sms_used(&self) -> u32 {
        let report = self.sm_report();
        report.reserved.max(report.blocks)
    }

    /// The account of the layer's GPU; `None` on the host.
    pub fn sm_budget(&self) -> Option<SmBudget> {
        self.inner.sms.budget()
    }

    /// The order in which threads of this rank submit operations: one for all that work on a GPU, on
    /// the host one per layer. See the [module](crate::sched).
    ///
    /// Where several ranks of this process share a GPU, each takes a [`SubmitOrder::new`] of its own
    /// instead: an exact dispatch waits for the announcements of other ranks, which must not stand
    /// behind it.
    pub fn submit_order(&self) -> SubmitOrder {
        match self.sm_budget() {
            Some(budget) => budget.order().clone(),
            None => self.inner.sms.order.get_or_init(SubmitOrder::new).clone(),
        }
    }
}
