//! The study: observe, calibrate, predict, then see whether it was so.

use std::time::{Duration, Instant};

use ep_topology::{Calibration, Launch, MarginPlan, MarginPlanner, SmMap, SmObservation};
use serde::Serialize;

use super::adversary;
use super::lab::{Held, Lab, Trial};
use crate::{BenchError, Result};

/// SMs by which a margin in practice may exceed what turns out to be enough.
pub const TOLERANCE: u32 = 2;

/// What is studied.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Blocks of launches.
    pub blocks: Vec<u32>,
    /// Cluster sizes.
    pub clusters: Vec<u32>,
    /// Blocks whose launches are not used to calibrate.
    pub held_out: Vec<u32>,
    /// Trials per margin.
    pub rounds: u32,
    /// Bound of the whole study.
    pub limit: Duration,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            blocks: vec![4, 8, 12, 16, 20, 24, 32],
            clusters: vec![1, 2, 4],
            held_out: vec![12, 20, 24],
            rounds: 5,
            limit: Duration::from_secs(230),
        }
    }
}

impl Plan {
    /// Every launch, plain and cooperative, whose cluster size the device has.
    pub fn launches(&self, map: &SmMap) -> Vec<Launch> {
        let sizes = map.cluster_sizes();
        let mut launches = Vec::new();
        for &cluster in self.clusters.iter().filter(|c| sizes.contains(c)) {
            for &blocks in self.blocks.iter().filter(|n| n.is_multiple_of(cluster)) {
                for cooperative in [false, true] {
                    launches.push(Launch::new(blocks, cluster, cooperative));
                }
            }
        }
        launches
    }
}

/// What was seen at one margin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Point {
    /// SMs free.
    pub margin: u32,
    /// Trials made.
    pub trials: u32,
    /// Trials in which the launch started.
    pub started: u32,
    /// Trials in which all its blocks were resident at once.
    pub resident: u32,
}

/// What was seen over margins, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Curve(pub Vec<Point>);

impl Curve {
    /// The smallest margin from which on the launch started in every trial.
    pub fn starts_from(&self) -> Option<u32> {
        self.from(|point| point.started == point.trials)
    }

    /// The smallest margin from which on all its blocks were resident in every trial.
    pub fn resident_from(&self) -> Option<u32> {
        self.from(|point| point.resident == point.trials)
    }

    /// The smallest margin at which the launch started at least once.
    pub fn first_start(&self) -> Option<u32> {
        self.0.iter().find(|point| point.started > 0).map(|point| point.margin)
    }

    fn from(&self, good: impl Fn(&Point) -> bool) -> Option<u32> {
        self.0.iter().rev().take_while(|point| good(point)).last().map(|point| point.margin)
    }
}

/// What is predicted, before anything of it is observed.
#[derive(Clone, Debug, Serialize)]
pub struct Predictions {
    /// The device.
    pub device: String,
    /// What margins were calibrated by.
    pub calibrations: Vec<Calibration>,
    /// Blocks of launches that were not looked at.
    pub held_out: Vec<u32>,
    /// A plan per launch.
    pub plans: Vec<MarginPlan>,
    /// What all this follows from.
    pub observation: SmObservation,
}

/// One launch: what was predicted, what was seen.
#[derive(Clone, Debug)]
pub struct Combination {
    /// The prediction.
    pub plan: MarginPlan,
    /// Whether launches of so many blocks were used to calibrate.
    pub held_out: bool,
    /// Beside plain holders.
    pub plain: Curve,
    /// Beside holders that leave the most awkward SMs free.
    pub adversary: Curve,
}

impl Combination {
    /// What contradicts the predictions; empty if nothing does.
    pub fn violations(&self) -> Vec<String> {
        let mut found = Vec::new();
        let (Some(starts), Some(all)) = (&self.plan.starts, &self.plan.all_resident) else {
            return vec!["predicted never to start, yet it was tried".into()];
        };
        let practice = starts.practice.unwrap_or(starts.worst_case);
        match self.plain.starts_from() {
            Some(seen) if seen > practice => found.push(format!(
                "starts at {practice} SMs by the margin in practice, but always only from {seen}"
            )),
            Some(seen) if practice - seen > TOLERANCE => found.push(format!(
                "the margin in practice is {practice} SMs, though {seen} are enough"
            )),
            Some(_) => {}
            None => found.push("did not start at the largest margin tried".into()),
        }
        let mut bound = |seen: Option<u32>, worst: u32, what: &str| match seen {
            Some(seen) if seen <= worst => {}
            Some(seen) => found.push(format!("{what} only from {seen} SMs, worst case {worst}")),
            None => found.push(format!("not {what} at the largest margin tried")),
        };
        bound(self.plain.starts_from(), starts.worst_case, "started");
        bound(self.plain.resident_from(), all.worst_case, "resident");
        bound(self.adversary.starts_from(), starts.worst_case, "started beside the adversary");
        bound(self.adversary.resident_from(), all.worst_case, "resident beside the adversary");
        found
    }
}

/// The whole study.
#[derive(Clone, Debug)]
pub struct Study {
    /// What was predicted.
    pub predictions: Predictions,
    /// Every launch.
    pub combinations: Vec<Combination>,
    /// Trials made.
    pub trials: u64,
    /// How long all of it took.
    pub elapsed: Duration,
}

/// Runs the study. `predicted` is called once, after calibration and before anything that is predicted is
/// observed; `progress` before each step, with what is done.
///
/// # Errors
/// The device's, an observation that contradicts itself, or the plan's time limit.
pub fn run(
    lab: &mut dyn Lab,
    plan: &Plan,
    predicted: &mut dyn FnMut(&Predictions) -> Result<()>,
    progress: &mut dyn FnMut(&str),
) -> Result<Study> {
    let mut bench =
        Bench { lab, rounds: plan.rounds, trials: 0, start: Instant::now(), limit: plan.limit };
    progress("observing SMs");
    let map = observe(&mut bench, plan)?;
    let launches = plan.launches(&map);
    let mut calibrations = Vec::new();
    for launch in launches.iter().filter(|l| !plan.held_out.contains(&l.blocks)) {
        progress(&format!("calibrating: {}", title(launch)));
        let top = top(&MarginPlanner::new(&map).plan(*launch).map_err(failed)?, &map);
        let curve = bench.scan(*launch, top, &mut |margin, _| Held::AllButSome(margin))?;
        if let Some(starts_at) = curve.starts_from() {
            calibrations.push(Calibration { launch: *launch, starts_at });
        }
    }
    let planner = MarginPlanner::new(&map).calibrated(&calibrations).map_err(failed)?;
    let plans =
        launches.iter().map(|l| planner.plan(*l).map_err(failed)).collect::<Result<Vec<_>>>()?;
    let predictions = Predictions {
        device: bench.lab.name(),
        calibrations,
        held_out: plan.held_out.clone(),
        plans: plans.clone(),
        observation: map.observation().clone(),
    };
    predicted(&predictions)?;
    let mut combinations = Vec::new();
    for plan_of in plans {
        let launch = plan_of.launch;
        if plan_of.starts.is_none() || plan_of.all_resident.is_none() {
            continue;
        }
        let top = top(&plan_of, &map);
        progress(&format!("observing: {}", title(&launch)));
        let plain = bench.scan(launch, top, &mut |margin, _| Held::AllButSome(margin))?;
        let orders: Vec<Vec<u32>> =
            (0..plan.rounds).map(|round| adversary::order(&map, launch.cluster, round)).collect();
        let awkward = &mut |margin: u32, round: u32| {
            Held::AllBut(orders[round as usize].iter().take(margin as usize).copied().collect())
        };
        let adversary = bench.scan(launch, top, awkward)?;
        let held_out = plan.held_out.contains(&launch.blocks);
        combinations.push(Combination { plan: plan_of, held_out, plain, adversary });
    }
    Ok(Study { predictions, combinations, trials: bench.trials, elapsed: bench.start.elapsed() })
}

/// A launch in a few words: `16 blocks, cluster2+cooperative`.
pub fn title(launch: &Launch) -> String {
    format!("{} blocks, {}", launch.blocks, attributes(launch))
}

/// A launch's attributes as reports name them.
pub fn attributes(launch: &Launch) -> String {
    match (launch.cluster, launch.cooperative) {
        (1, false) => "plain".into(),
        (1, true) => "cooperative".into(),
        (c, false) => format!("cluster{c}"),
        (c, true) => format!("cluster{c}+cooperative"),
    }
}

fn failed(error: ep_topology::TopologyError) -> BenchError {
    BenchError::Tool { op: "margin", detail: error.to_string() }
}

/// The map, with what plain holders leave free at every margin that will be tried.
fn observe(bench: &mut Bench<'_>, plan: &Plan) -> Result<SmMap> {
    let mut observation = bench.lab.observe()?;
    let map = SmMap::new(observation.clone()).map_err(failed)?;
    let planner = MarginPlanner::new(&map);
    let mut most = 1;
    for launch in plan.launches(&map) {
        most = most.max(top(&planner.plan(launch).map_err(failed)?, &map));
    }
    observation.left_free.clear();
    for margin in 1..=most {
        for _ in 0..plan.rounds {
            observation.left_free.push(bench.lab.left_free(margin)?);
            bench.check_time()?;
        }
    }
    SmMap::new(observation).map_err(failed)
}

/// The largest margin to try: a little above what is safe wherever the free SMs are.
fn top(plan: &MarginPlan, map: &SmMap) -> u32 {
    let worst = plan.all_resident.map_or(plan.launch.blocks, |margin| margin.worst_case);
    (worst + 2).min(map.sm_count() - 1)
}

struct Bench<'a> {
    lab: &'a mut dyn Lab,
    rounds: u32,
    trials: u64,
    start: Instant,
    limit: Duration,
}

impl Bench<'_> {
    fn check_time(&self) -> Result<()> {
        if self.start.elapsed() <= self.limit {
            return Ok(());
        }
        let detail = format!(
            "not done within {:?}, after {} trials; take fewer --rounds",
            self.limit, self.trials
        );
        Err(BenchError::Tool { op: "margin", detail })
    }

    /// Every margin from 1 to `top`, each in every round.
    fn scan(
        &mut self,
        launch: Launch,
        top: u32,
        held: &mut dyn FnMut(u32, u32) -> Held,
    ) -> Result<Curve> {
        let mut curve = Curve::default();
        for margin in 1..=top {
            let mut point = Point { margin, trials: 0, started: 0, resident: 0 };
            for round in 0..self.rounds {
                let trial: Trial = self.lab.trial(&held(margin, round), launch)?;
                point.trials += 1;
                point.started += u32::from(trial.starts());
                point.resident += u32::from(trial.resident());
                self.trials += 1;
                self.check_time()?;
            }
            curve.0.push(point);
        }
        Ok(curve)
    }
}
