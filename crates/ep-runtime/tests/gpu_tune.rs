//! Layers that tune themselves on two GPUs: the same bits, and what was found is found again. Without
//! two GPUs each test says so and passes.
#![cfg(feature = "cuda")]

mod common;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::exercise::{How, check};
use common::gpu::Gpus;
use common::ground::{Ground, Grounds};
use common::{Nodes, eps_of};
use ep_bench::oracle::{Float, Job, JobSpec, Mode, Payload, PlacementSpec, Routing};
use ep_kernels::cuda::Driver;
use ep_runtime::{
    EpBuilder, Hierarchy, MoeShape, PayloadKind, PlanInForce, PlanOrigin, SmPolicy, Tune,
};

const SEARCH: Tune = Tune::Search { limit: Duration::from_secs(6) };

/// Two GPUs whose layers are tuned, with a cache of their own.
struct Tuned {
    gpus: Gpus,
    folder: PathBuf,
    mode: Tune,
    policy: SmPolicy,
}

impl Tuned {
    fn new(name: &str) -> Option<Self> {
        let there = Driver::get().and_then(|driver| driver.device_count()).unwrap_or(0);
        if there < 2 {
            eprintln!("skipped: {there} GPUs; two are needed");
            return None;
        }
        let gpus = Gpus::new(2, 128 << 20)?;
        let folder = format!("ep-gpu-tune-{}-{name}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        let _ = std::fs::remove_dir_all(&folder);
        Some(Self { gpus, folder, mode: SEARCH, policy: SmPolicy::Shared })
    }

    /// Builds a layer on both GPUs: how long that took, and its plans.
    fn build(&self, builder: &EpBuilder) -> (Duration, Vec<PlanInForce>) {
        let start = Instant::now();
        let placed = |rank| self.place(rank, 2, builder.clone());
        let kind = PayloadKind::Bf16;
        let plans = eps_of(2, &placed, |ep| (start.elapsed(), ep.plans_in_force(kind, kind)));
        println!("{:?} {:?}: built in {:?}", self.mode, self.policy, plans[0].0);
        for plan in &plans[0].1 {
            println!("  {plan:?}");
        }
        assert_eq!(plans[0].1, plans[1].1, "the ranks launch differently");
        plans.into_iter().next().expect("two ranks")
    }
}

impl Drop for Tuned {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Grounds for Tuned {
    fn place(&self, rank: usize, world: usize, builder: EpBuilder) -> EpBuilder {
        let builder = self.gpus.place(rank, world, builder).sm_policy(self.policy);
        builder.tune(self.mode).tune_cache(&self.folder)
    }

    fn ground(&self, rank: usize, world: usize) -> Box<dyn Ground + '_> {
        self.gpus.ground(rank, world)
    }
}

fn how(mode: Mode) -> How {
    How {
        mode,
        float: Float::Bf16,
        weighted: false,
        biases: 1,
        capacity: false,
        nodes: Nodes::Mapped,
        hierarchy: Hierarchy::Flat,
        node_reduced: false,
        narrow_ids: false,
    }
}

/// Rows as large as those of training.
fn large() -> Job {
    JobSpec {
        ranks: 2,
        experts: 64,
        topk: 8,
        units: 896,
        payload: Payload::Bf16,
        placement: PlacementSpec::Contiguous,
        physical_ids: false,
        alignment: 16,
        tokens: vec![150, 120],
        masked_percent: 10,
        routing: Routing::Uniform,
        weights: true,
        seed: 7,
    }
    .build()
}

#[test]
fn a_tuned_layer_equals_the_oracle() {
    let Some(mut tuned) = Tuned::new("oracle") else { return };
    for mode in [Mode::RankMajor, Mode::ExpertExact, Mode::ExpertReduced] {
        check(&large(), how(mode), 1, &tuned);
    }
    let jobs = (0..200).map(|seed| (seed, JobSpec::random(seed).build()));
    let (of_two, start) = (jobs.filter(|(_, job)| job.ranks == 2), Instant::now());
    for (seed, job) in of_two.take(6) {
        println!("case {seed}, {:?}", start.elapsed());
        tuned.mode = Tune::Search { limit: Duration::from_millis(500) };
        check(&job, how(Mode::ExpertReduced), seed, &tuned);
    }
}

#[test]
fn a_second_layer_takes_what_the_first_one_found() {
    let Some(mut tuned) = Tuned::new("cache") else { return };
    let shape = MoeShape::new(7168, 8, 256).max_tokens(1024).expert_major(16);
    let builder = EpBuilder::new(shape.payload(PayloadKind::Bf16));
    tuned.mode = Tune::Cached;
    let (without, shipped) = tuned.build(&builder);
    let all = |plans: &[PlanInForce], origin| plans.iter().all(|plan| plan.origin == origin);
    assert!(all(&shipped, PlanOrigin::Shipped));
    let beside = [SmPolicy::Partition { sms: 16 }, SmPolicy::Margin { sms: 24 }];
    // Plans for as many blocks beside compute are the same ones, however SMs are set aside.
    let origins = [PlanOrigin::Searched, PlanOrigin::Searched, PlanOrigin::Cached];
    for (policy, origin) in std::iter::once(SmPolicy::Shared).chain(beside).zip(origins) {
        (tuned.policy, tuned.mode) = (policy, SEARCH);
        let (searching, found) = tuned.build(&builder);
        assert!(all(&found, origin), "{policy}: {found:?}");
        assert!(searching < without + Duration::from_secs(8), "{policy}: {searching:?}");
        let (cached, again) = tuned.build(&builder);
        assert!(all(&again, PlanOrigin::Cached), "{policy}: {again:?}");
        assert!(cached < without + Duration::from_millis(500), "{policy}: {cached:?}, {without:?}");
        let plans = |list: &[PlanInForce]| list.iter().map(|p| p.plan).collect::<Vec<_>>();
        assert_eq!(plans(&found), plans(&again));
    }
    // Of damaged files nothing is believed.
    for file in std::fs::read_dir(&tuned.folder).expect("a cache") {
        let file = file.expect("an entry").path();
        std::fs::write(file, "{\"format\":\"ep-runtime tuning\"").expect("writable");
    }
    tuned.mode = Tune::Cached;
    assert!(all(&tuned.build(&builder).1, PlanOrigin::Shipped));
}
