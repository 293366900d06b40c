//! Tuning a layer when it is built: what is in the cache, what is searched for, what comes of it.

mod agree;
mod bench;
mod load;
mod trial;

use std::path::PathBuf;
use std::time::Duration;

use ep_kernels::PayloadKind;
use ep_kernels::cuda::DeviceProperties;
use ep_kernels::cuda::moe::MovePlan;

pub(crate) use agree::{GroupPeers, Peers};
#[cfg(test)]
pub(crate) use trial::{Bench, Candidate, RUNS, Scene};

use super::{Found, Gpu, Moving, PlanOrigin};
use crate::sched::tune::{StoredPlan, Tune, TuneCache, TuneKey, rows_plans, sums_plans};
use crate::{Ep, EpBuilder, Result};
use agree::{Decision, Want, Wish, all_agree, decide, exchange};
use bench::GpuBench;
use trial::{Kinds, Outcome, Trials};

/// How a layer is tuned.
#[derive(Clone, Debug, Default)]
pub(crate) struct TuneSettings {
    mode: Tune,
    cache: Option<TuneCache>,
}

impl TuneSettings {
    #[cfg(test)]
    pub fn new(mode: Tune, cache: Option<TuneCache>) -> Self {
        Self { mode, cache }
    }

    /// These, with what the environment says.
    pub fn resolve(&self) -> Result<Self> {
        let mode = Tune::from_env()?.unwrap_or(self.mode);
        Ok(Self { mode, cache: self.cache.clone().or_else(TuneCache::from_env) })
    }
}

/// Launch plans.
impl EpBuilder {
    /// Whether plans are looked for when the layer is built, for kernels that [`EpBuilder::tuning`] gives
    /// none; what is in the cache by default. Without a meaning on the host. The environment variable
    /// [`EP_TUNE`](crate::sched::tune::TUNE_VARIABLE) overrides it.
    pub fn tune(mut self, tune: Tune) -> Self {
        self.tune.mode = tune;
        self
    }

    /// Keeps what tuning finds in this folder, in place of the one that
    /// [`EP_TUNE_CACHE`](crate::sched::tune::TUNE_CACHE_VARIABLE) or the user's cache folder is.
    pub fn tune_cache(mut self, folder: impl Into<PathBuf>) -> Self {
        self.tune.cache = Some(TuneCache::new(folder));
        self
    }
}

/// How one of a layer's kernels is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanInForce {
    /// `dispatch`, `expand`, `reduce` or `combine`.
    pub kernel: &'static str,
    /// The plan.
    pub plan: MovePlan,
    /// Where it comes from.
    pub origin: PlanOrigin,
}

impl Ep {
    /// How the kernels that move rows are launched now, for rows that are dispatched as `dispatched` and
    /// combined as `combined`: dispatch, expand, reduce and combine. Empty on the host.
    pub fn plans_in_force(
        &self,
        dispatched: PayloadKind,
        combined: PayloadKind,
    ) -> Vec<PlanInForce> {
        let Some(gpu) = &self.inner.gpu else { return Vec::new() };
        let kinds = Kinds { dispatched, combined: Some(combined) };
        let in_force = |moving: Moving| {
            let kind = if moving.copies() { kinds.dispatched } else { combined };
            let bytes = kind.payload_bytes(self.inner.shape.hidden);
            let (plan, origin) = gpu.plan_in_force(moving, u32::try_from(bytes).unwrap_or(0));
            PlanInForce { kernel: moving.name(), plan, origin }
        };
        Moving::ALL.map(in_force).to_vec()
    }
}

/// Tunes a layer that was just built. All ranks of a group on GPUs call it, whatever their settings.
///
/// What is wrong with the cache, or keeps this rank from searching, is a warning.
///
/// # Errors
/// The group's end.
pub(crate) fn tune_built(ep: &Ep, settings: &TuneSettings, patience: Duration) -> Result<()> {
    if ep.inner.gpu.is_none() {
        return Ok(());
    }
    let peers = GroupPeers(ep.group(), patience);
    tune(ep, settings, &peers, bench::beside(ep), &|| Ok(Box::new(GpuBench::new(ep)?)))
}

/// As [`tune_built`], wherever trials run.
pub(crate) fn tune<'a>(
    ep: &Ep,
    settings: &TuneSettings,
    peers: &dyn Peers,
    beside: bool,
    bench: &dyn Fn() -> Result<Box<dyn trial::Bench + 'a>>,
) -> Result<()> {
    let layer = Layer { ep, settings, kinds: Kinds::of(ep), beside };
    let wish = layer.wish();
    let decision = decide(&exchange(peers, &wish)?);
    for moving in Moving::ALL.into_iter().filter(|m| wish.wants[*m as usize].open) {
        if let Some(stored) = decision.cached[moving as usize] {
            layer.take(moving, stored.plan(), PlanOrigin::Cached);
        }
    }
    if let Some(why) = decision.refused {
        tracing::warn!(why, "launch plans are not searched for");
    }
    match decision.search.contains(&true) {
        true => layer.search(peers, &decision, bench),
        false => Ok(()),
    }
}

/// The plans of the layer that are tuned.
struct Layer<'a> {
    ep: &'a Ep,
    settings: &'a TuneSettings,
    kinds: Kinds,
    beside: bool,
}

impl Layer<'_> {
    fn gpu(&self) -> &Gpu {
        self.ep.inner.gpu.as_ref().expect("only layers on a GPU are tuned")
    }

    fn properties(&self) -> &DeviceProperties {
        self.gpu().machine.properties()
    }

    /// What this rank wants.
    fn wish(&self) -> Wish {
        let given = self.gpu().plans().given;
        let cache = self.settings.cache.as_ref();
        let want = |moving: Moving| {
            let row_bytes = self.kinds.row_bytes(moving, self.ep);
            let row_bytes = row_bytes.filter(|_| given.of(moving).is_none());
            match (row_bytes, self.settings.mode) {
                (None, _) | (_, Tune::Off) => Want::default(),
                (Some(row_bytes), _) => {
                    let key = self.key(moving, row_bytes);
                    let cached = cache.and_then(|cache| cache.load::<StoredPlan>(&key));
                    let fits = |stored: &StoredPlan| self.fits(moving, &stored.plan());
                    Want { open: true, cached: cached.filter(fits) }
                }
            }
        };
        let search = match self.settings.mode {
            Tune::Search { limit } => Some(limit),
            Tune::Off | Tune::Cached => None,
        };
        let device = self.properties().uuid_text();
        Wish { device, search, wants: Moving::ALL.map(want) }
    }

    /// Whether a plan, on as many SMs as this layer has, can be launched. What a file says is not
    /// believed.
    fn fits(&self, moving: Moving, plan: &MovePlan) -> bool {
        let checked = moving.check(&self.sized(*plan), self.gpu().columns(), self.properties());
        if let Err(error) = &checked {
            tracing::warn!(kernel = moving.name(), "ignoring a cached plan: {error}");
        }
        checked.is_ok()
    }

    fn sized(&self, plan: MovePlan) -> MovePlan {
        MovePlan { blocks: plan.blocks.min(self.gpu().blocks()), ..plan }
    }

    /// Launches by a plan from now on, where that is possible.
    fn take(&self, moving: Moving, plan: MovePlan, origin: PlanOrigin) {
        let Some(row_bytes) = self.kinds.row_bytes(moving, self.ep) else { return };
        if self.fits(moving, &plan) {
            let plan = self.sized(plan);
            self.gpu().set_found(moving, Some(Found { row_bytes, plan, origin }));
        }
    }

    fn key(&self, moving: Moving, row_bytes: u32) -> TuneKey {
        let (device, shape) = (self.properties(), &self.ep.inner.shape);
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        TuneKey {
            device: device.uuid_text(),
            name: device.name.clone(),
            driver: format!("cuda-{}", device.driver),
            operation: moving.name().into(),
            row_bytes: u64::from(row_bytes),
            ranks: number(shape.world),
            topk: number(shape.topk),
            tokens: TuneKey::tokens_class(shape.max_tokens),
            sms: self.gpu().blocks(),
            beside: self.beside,
            kernels: ep_kernels::cuda::moe::fingerprint().into(),
        }
    }

    fn search<'a>(
        &self,
        peers: &dyn Peers,
        decision: &Decision,
        bench: &dyn Fn() -> Result<Box<dyn trial::Bench + 'a>>,
    ) -> Result<()> {
        let bench = bench();
        if let Err(error) = &bench {
            tracing::warn!("launch plans cannot be searched for: {error}");
        }
        if !all_agree(peers, bench.is_ok())? {
            tracing::warn!("launch plans are not searched for: some rank cannot");
            return Ok(());
        }
        let mut bench = bench?;
        let candidates = self.candidates(peers, decision)?;
        let (ep, kinds, left) = (self.ep, self.kinds, decision.limit);
        let mut trials = Trials { ep, peers, kinds, left };
        let found = trials.run(&mut *bench, &candidates)?;
        let lasting = bench.is_lasting();
        // Memory is given back before any rank goes on: the driver waits for all streams of the process,
        // and the next operation of one rank would wait for what this thread does after it.
        drop(bench);
        all_agree(peers, true)?;
        for (moving, found) in Moving::ALL.into_iter().zip(found) {
            let Some(Outcome { plan, time, measured, whole, .. }) = found else { continue };
            self.take(moving, plan, PlanOrigin::Searched);
            let kernel = moving.name();
            tracing::info!(kernel, ?plan, ?time, measured, whole, "found a launch plan");
            if whole && lasting {
                self.keep(moving, &plan);
            }
        }
        Ok(())
    }

    /// What is tried, the same on all ranks but for the number of SMs: what could fit rank 0.
    fn candidates(&self, peers: &dyn Peers, decision: &Decision) -> Result<[Vec<MovePlan>; 4]> {
        let mine = Moving::ALL.map(|moving| match decision.search[moving as usize] {
            true => self.enumerate(moving),
            false => Vec::new(),
        });
        let first = exchange(peers, &mine)?.into_iter().next().flatten().unwrap_or(mine);
        Ok(first.map(|list| list.iter().map(|stored| self.sized(stored.plan())).collect()))
    }

    fn enumerate(&self, moving: Moving) -> Vec<StoredPlan> {
        let Some(row_bytes) = self.kinds.row_bytes(moving, self.ep) else { return Vec::new() };
        let (blocks, device) = (self.gpu().blocks(), self.properties());
        let tried = if moving.copies() { rows_plans(row_bytes) } else { sums_plans() };
        let tried = tried.into_iter().map(|(warps, path)| MovePlan::new(blocks, warps, path));
        // First: what is launched where nothing else is faster.
        let shipped = self.gpu().shipped(moving, row_bytes);
        let all = std::iter::once(shipped).chain(tried.filter(|plan| *plan != shipped));
        all.filter(|plan| moving.check(plan, self.gpu().columns(), device).is_ok())
            .filter_map(|plan| StoredPlan::new(&plan))
            .collect()
    }

    fn keep(&self, moving: Moving, plan: &MovePlan) {
        let (Some(row_bytes), Some(cache), Some(stored)) = (
            self.kinds.row_bytes(moving, self.ep),
            &self.settings.cache,
            StoredPlan::new(&self.sized(*plan)),
        ) else {
            return;
        };
        if let Err(error) = cache.store(&self.key(moving, row_bytes), &stored) {
            tracing::warn!("a launch plan is not kept: {error}");
        }
    }
}
