//! Trials: dispatches and combines of made-up tokens on the layer itself, under one plan after another.

use std::time::{Duration, Instant};

use ep_kernels::cuda::moe::MovePlan;
use ep_kernels::{DType, PayloadKind, ScaleKind};
use ep_transport::Queue;

use super::agree::{Peers, all_agree, slowest};
use crate::gpu::{Found, Gpu, Moving, PlanOrigin};
use crate::sched::tune::{Best, Limits, Sample, search};
use crate::{
    CombineOpts, DeviceIds, DispatchOpts, Dispatched, Ep, EpError, Handle, IdKind, Layout, Payload,
    Precision, Result, Route, Rows, RowsMut,
};

pub(super) const OP: &str = "tune";
/// Operations that are timed together, after one that lets the ranks come together.
pub(crate) const RUNS: u32 = 5;
/// How long an operation may take before anything is known of it, at the least.
const FIRST: Duration = Duration::from_millis(2);
/// How many times as long as expected compute is to run beside a trial at the most.
const PATIENCE: u32 = 64;
/// Bytes per microsecond that one SM moves at the least.
const SLOW: u64 = 10_000;

/// What writes a result's rows.
type Experts = Box<dyn Fn(&Dispatched)>;

/// What trials work on.
pub(crate) struct Scene {
    /// The caller's stream.
    pub queue: Queue,
    /// Addresses of dense rows, aligned to 16.
    pub payload: u64,
    pub scales: u64,
    pub ids: u64,
    pub out: u64,
    /// Writes a result's rows as experts would, where that matters: to simulated memory.
    pub experts: Option<Experts>,
}

/// What is tried.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub moving: Moving,
    pub plan: MovePlan,
    /// How long one operation may be expected to take.
    pub expected: Duration,
}

/// A stream with a clock.
pub(crate) trait Bench {
    fn scene(&self) -> &Scene;

    /// Whether what is found here is worth keeping for later layers.
    fn is_lasting(&self) -> bool {
        true
    }

    /// Submits `once` a first time and [`RUNS`] times more, and times the latter; one's share of it, or
    /// `None` where the time says nothing. What can fail on this rank alone comes first: then `agreed`
    /// is told whether it went well, and nothing is submitted unless it says so.
    fn run(
        &mut self,
        ep: &Ep,
        candidate: &Candidate,
        agreed: &mut dyn FnMut(bool) -> Result<bool>,
        once: &mut dyn FnMut(&Scene) -> Result<()>,
    ) -> Result<Option<Duration>>;
}

/// What travels in trials: the first type of the layer, and the first that can be summed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kinds {
    pub dispatched: PayloadKind,
    pub combined: Option<PayloadKind>,
}

impl Kinds {
    pub fn of(ep: &Ep) -> Self {
        let payloads = &ep.inner.shape.payloads;
        let combined = payloads.iter().copied().find(|kind| kind.reducible());
        Self { dispatched: payloads[0], combined }
    }

    /// Bytes of the rows that a kernel moves; `None` where the layer has no such kernel.
    pub fn row_bytes(&self, moving: Moving, ep: &Ep) -> Option<u32> {
        let shape = &ep.inner.shape;
        let experts = matches!(moving, Moving::Expand | Moving::Reduce);
        if experts && shape.expert_alignment.is_none() {
            return None;
        }
        let kind = if moving.copies() { Some(self.dispatched) } else { self.combined };
        u32::try_from(kind?.payload_bytes(shape.hidden)).ok()
    }
}

/// What came of a search.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    pub plan: MovePlan,
    pub time: Duration,
    /// How many plans were measured.
    pub measured: usize,
    pub spent: Duration,
    /// Whether it came to its end, so that a longer one would find no other.
    pub whole: bool,
}

/// The trials of one layer.
pub(super) struct Trials<'a> {
    pub ep: &'a Ep,
    pub peers: &'a dyn Peers,
    pub kinds: Kinds,
    /// What is left of the time.
    pub left: Duration,
}

impl Trials<'_> {
    fn gpu(&self) -> &Gpu {
        self.ep.inner.gpu.as_ref().expect("only layers on a GPU are tuned")
    }

    /// Finds a plan for each kernel that has candidates. The error is the group's end.
    pub fn run(
        &mut self,
        bench: &mut dyn Bench,
        candidates: &[Vec<MovePlan>; 4],
    ) -> Result<[Option<Outcome>; 4]> {
        let mut found = [None; 4];
        let alignment = self.ep.inner.shape.expert_alignment.unwrap_or(1);
        let layouts = [
            (Layout::RankMajor, [Moving::Dispatch, Moving::Combine]),
            (Layout::ExpertMajor { alignment }, [Moving::Expand, Moving::Reduce]),
        ];
        let mut open = candidates.iter().filter(|list| !list.is_empty()).count() as u32;
        for (layout, kernels) in layouts {
            let wanted = |moving: &Moving| !candidates[*moving as usize].is_empty();
            let mut kernels = kernels.into_iter().filter(wanted).peekable();
            if kernels.peek().is_none() {
                continue;
            }
            // One handle at a time: the layer may have no more.
            let Some(handle) = self.route(bench.scene(), layout)? else { continue };
            for moving in kernels {
                let share = self.left / open.max(1);
                open -= 1;
                let best =
                    self.search(bench, (moving, &handle), &candidates[moving as usize], share)?;
                let spent = best.map_or(share, |best| best.spent);
                self.left = self.left.saturating_sub(spent);
                found[moving as usize] = best;
            }
        }
        Ok(found)
    }

    /// A routing of as many tokens as fit; `None` if none do.
    fn route(&self, scene: &Scene, layout: Layout) -> Result<Option<Handle>> {
        let opts = DispatchOpts { layout, ..DispatchOpts::default() };
        let mut tokens = self.ep.inner.shape.max_tokens;
        while tokens > 0 {
            let (ordinal, choices) = (self.gpu().ordinal, tokens * self.ep.inner.shape.topk);
            // SAFETY: the scene has room for the ids of all tokens, which nobody writes any more.
            let ids = unsafe { DeviceIds::from_raw(ordinal, scene.ids, choices, IdKind::I32) };
            let route = Route::Device { ids, weights: None };
            let payload = self.payload(scene, tokens)?;
            match self.ep.dispatch(&scene.queue, payload, route, &opts) {
                Ok(result) => {
                    let handle = result.handle().clone();
                    result.release(&scene.queue);
                    return Ok(Some(handle));
                }
                // Everybody's verdict.
                Err(EpError::Capacity { .. }) => tokens /= 2,
                Err(error) => return Err(self.fail(error)),
            }
        }
        tracing::warn!(?layout, "not even one token of each rank fits; nothing is searched for");
        Ok(None)
    }

    /// The fastest of some plans of one kernel, all else being equal; the first where no other is faster.
    /// None of them is in force afterwards.
    fn search(
        &mut self,
        bench: &mut dyn Bench,
        (moving, handle): (Moving, &Handle),
        plans: &[MovePlan],
        limit: Duration,
    ) -> Result<Option<Outcome>> {
        let mut failed = None;
        let mut expected = self.estimate(moving, handle).max(FIRST);
        // What has said something before, as what is launched anyway should, is not given up because compute
        // ended first: something kept a rank away, or, if that comes again, compute goes faster than it did
        // when it was timed.
        let mut known: Vec<MovePlan> = plans.iter().take(1).copied().collect();
        let mut needed = [1; 2];
        let mut measure = |plan: &MovePlan| {
            let mut patience = needed[0].min(needed[1]);
            while failed.is_none() {
                let candidate = Candidate { moving, plan: *plan, expected: expected * patience };
                match self.trial(bench, &candidate, handle) {
                    Err(error) => failed = Some(error),
                    Ok(None) if patience >= PATIENCE || !known.contains(plan) => break,
                    Ok(None) => patience *= 4,
                    Ok(Some(sample)) => {
                        known.push(*plan);
                        needed = [needed[1], patience];
                        // All ranks see the same samples, so expect the same.
                        expected = expected.min(sample.time.max(Duration::from_micros(10)) * 2);
                        return Some(sample);
                    }
                }
            }
            None
        };
        // The first run of all finds things cold, so does not count.
        let first = plans.first().and_then(|plan| measure(plan).and_then(|_| measure(plan)));
        let spend = limit.saturating_sub(first.map_or(Duration::ZERO, |first| 2 * first.spent));
        let limits = Limits { spend, ..Limits::default() };
        let best = match spend.is_zero() {
            true => None,
            false => search(plans.len(), limits, |i| measure(&plans[i])),
        };
        self.gpu().set_found(moving, None);
        if let Some(error) = failed {
            return Err(error);
        }
        let outcome = |best: Best| {
            let better = first.is_none_or(|first| best.time < first.time);
            let plan = plans[if better { best.candidate } else { 0 }];
            let spent = best.spent + (limit - spend);
            let Best { time, measured, .. } = best;
            Outcome { plan, time, measured, spent, whole: best.spent < spend }
        };
        Ok(best.map(outcome))
    }

    /// What an operation may take at the most.
    fn estimate(&self, moving: Moving, handle: &Handle) -> Duration {
        let shape = &self.ep.inner.shape;
        let copies = match handle.layout() {
            Layout::RankMajor => shape.topk.min(shape.world),
            Layout::ExpertMajor { .. } => shape.topk,
        };
        let row_bytes = u64::from(self.kinds.row_bytes(moving, self.ep).unwrap_or(0));
        let bytes = row_bytes * (handle.tokens() * copies) as u64;
        Duration::from_micros(bytes / (SLOW * u64::from(self.gpu().sms.max(1))))
    }

    /// One measurement, the slowest rank's. `None` on all ranks where one of them has none.
    fn trial(
        &self,
        bench: &mut dyn Bench,
        candidate: &Candidate,
        handle: &Handle,
    ) -> Result<Option<Sample>> {
        let begun = Instant::now();
        let gpu = self.gpu();
        let Candidate { moving, plan, .. } = *candidate;
        let fits = moving.check(&plan, gpu.columns(), gpu.machine.properties()).is_ok();
        if fits {
            let row_bytes = self.kinds.row_bytes(moving, self.ep).unwrap_or(0);
            let origin = PlanOrigin::Searched;
            gpu.set_found(moving, Some(Found { row_bytes, plan, origin }));
        }
        let mut begin = false;
        let mut agreed = |ready: bool| {
            begin = all_agree(self.peers, fits && ready)?;
            Ok(begin)
        };
        let mut once = |scene: &Scene| self.once(scene, moving, handle);
        let time = bench.run(self.ep, candidate, &mut agreed, &mut once);
        let time = time.map_err(|e| self.fail(e))?;
        if !begin {
            return Ok(None);
        }
        let mine = time.map(|time| Sample { time, spent: begun.elapsed() });
        let sample = slowest(self.peers, mine)?;
        tracing::trace!(kernel = moving.name(), ?plan, ?sample, "tried");
        Ok(sample)
    }

    /// Submits one operation of which the kernel is part.
    fn once(&self, scene: &Scene, moving: Moving, handle: &Handle) -> Result<()> {
        let (queue, tokens) = (&scene.queue, handle.tokens());
        if moving.copies() {
            let opts = DispatchOpts { layout: handle.layout(), ..DispatchOpts::default() };
            let payload = self.payload(scene, tokens)?;
            self.ep.dispatch(queue, payload, Route::Cached(handle), &opts)?.release(queue);
            return Ok(());
        }
        let mut slot = self.ep.combine_slot(handle, queue)?;
        let kind = self.kinds.combined.unwrap_or(PayloadKind::Bf16);
        slot.rows_mut(kind)?;
        if let Some(write) = &scene.experts {
            write(&slot);
        }
        let bytes = kind.payload_bytes(self.ep.inner.shape.hidden);
        let (ordinal, stride) = (self.gpu().ordinal, bytes.next_multiple_of(16));
        // SAFETY: the scene has room for the sums of all tokens, which nobody reads.
        let out = unsafe {
            RowsMut::from_device(ordinal, scene.out, tokens, bytes, stride, kind.dtype())
        };
        let precision = match moving {
            Moving::Reduce => Precision::Reduced,
            _ => Precision::Exact,
        };
        let opts = CombineOpts { precision, ..CombineOpts::default() };
        slot.combine(queue, out, &opts).map(drop).map_err(EpError::from)
    }

    fn payload(&self, scene: &Scene, tokens: usize) -> Result<Payload<'static>> {
        let (kind, hidden) = (self.kinds.dispatched, self.ep.inner.shape.hidden);
        let rows = |at, bytes: usize, dtype| {
            let (ordinal, stride) = (self.gpu().ordinal, bytes.next_multiple_of(16));
            // SAFETY: the scene has room for the rows of all tokens, which nobody writes any more.
            unsafe { Rows::from_device(ordinal, at, tokens, bytes, stride, dtype) }
        };
        let payload = |dtype| rows(scene.payload, kind.payload_bytes(hidden), dtype);
        let scales = |dtype| rows(scene.scales, kind.scale_bytes(hidden), dtype);
        match kind {
            PayloadKind::Fp8 { scales: ScaleKind::F32 } => {
                Payload::fp8(payload(DType::Fp8E4M3), scales(DType::F32))
            }
            PayloadKind::Fp8 { scales: ScaleKind::Ue8m0 } => {
                Payload::fp8(payload(DType::Fp8E4M3), scales(DType::Bytes))
            }
            PayloadKind::Opaque { aux_bytes, .. } => {
                let aux = (aux_bytes > 0).then(|| scales(DType::Bytes));
                Payload::opaque(payload(DType::Bytes), aux)
            }
            kind => Payload::new(payload(kind.dtype())),
        }
    }

    /// Ends the group: peers count on what this rank cannot do.
    fn fail(&self, error: EpError) -> EpError {
        if let EpError::Transport(e) = &error {
            self.ep.inner.group.report(e);
        }
        self.ep.inner.give_up(OP, error)
    }
}

/// Made-up choices of `tokens` tokens, `topk` different experts each, spread evenly by a hash
/// (splitmix64) of rank and token.
pub(super) fn choices(rank: usize, tokens: usize, topk: usize, experts: usize) -> Vec<i32> {
    let mut ids = Vec::with_capacity(tokens * topk);
    for token in 0..tokens {
        let mut z = ((rank as u64) << 40 | token as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        let first = z as usize % experts;
        // Steps that share no factor with the number of experts never come back too early.
        let mut step = 1 + (z >> 32) as usize % experts;
        while common(step, experts) != 1 {
            step += 1;
        }
        ids.extend((0..topk).map(|k| ((first + k * step) % experts) as i32));
    }
    ids
}

/// The greatest common divisor.
fn common(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common(b, a % b) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn choices_are_different_experts_that_exist(
            rank in 0usize..64,
            tokens in 0usize..50,
            experts in 1usize..300,
            share in 0usize..300,
        ) {
            let topk = 1 + share % experts;
            let ids = choices(rank, tokens, topk, experts);
            prop_assert_eq!(ids.len(), tokens * topk);
            for token in ids.chunks(topk) {
                let set: std::collections::HashSet<_> = token.iter().collect();
                prop_assert_eq!(set.len(), topk);
                prop_assert!(token.iter().all(|&id| (0..experts as i32).contains(&id)));
            }
        }
    }

    #[test]
    fn choices_are_spread_evenly() {
        let mut counts = [0usize; 64];
        choices(1, 4096, 8, 64).iter().for_each(|&id| counts[id as usize] += 1);
        assert!(counts.iter().all(|&n| (350..700).contains(&n)), "{counts:?}");
    }
}
