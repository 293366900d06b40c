//! Tuning on simulated GPUs: real dispatches and combines, timed by clocks that the tests make up.

use std::cell::Cell;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ep_kernels::cuda::moe::{CopyPath, MovePlan};
use parking_lot::Mutex;

use super::device::{Op, Rng};
use super::effects::Effect;
use super::rank::{Layer, handle, queue};
use super::run::{Rank, Setting, build, layer};
use super::turns::{How, Mutant, Outcome, Shared};
use crate::gpu::tune::{Bench, Candidate, Peers, RUNS, Scene, TuneSettings, tune};
use crate::gpu::{Moving, PlanOrigin, Tuning};
use crate::sched::tune::{Tune, TuneCache};
use crate::{Dispatched, Ep, EpError, Layout, PayloadKind, PlanInForce, Result};

/// What a trial comes to on a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trial {
    Takes(Duration),
    /// The rank finds out before it submits anything.
    CannotBegin,
    /// Something else ran meanwhile.
    SaysNothing,
    /// The rank fails between two operations.
    Breaks,
}

/// Whether a rank can try plans.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Able {
    Wholly,
    /// Not as compute would have it.
    Somehow,
    Not,
}

type Clock<'a> = &'a (dyn Fn(usize, &Candidate) -> Trial + Sync);

/// What ranks tell each other, by round and rank.
#[derive(Default)]
struct Board(Mutex<Vec<Vec<Option<Vec<u8>>>>>);

struct SimPeers<'a> {
    ep: &'a Ep,
    shared: &'a Shared,
    board: &'a Board,
    round: Cell<usize>,
}

impl Peers for SimPeers<'_> {
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let round = self.round.replace(self.round.get() + 1);
        {
            let mut rounds = self.board.0.lock();
            let rows = rounds.len().max(round + 1);
            rounds.resize(rows, vec![None; self.ep.world()]);
            rounds[round][self.ep.rank()] = Some(bytes.to_vec());
        }
        self.shared.news();
        loop {
            let all: Option<Vec<_>> = self.board.0.lock()[round].iter().cloned().collect();
            if let Some(all) = all {
                return Ok(all);
            }
            self.ep.inner.usable("gather")?;
            self.shared.turn(How::Look);
        }
    }
}

struct SimBench<'a> {
    scene: Scene,
    shared: Arc<Shared>,
    stream: usize,
    clock: Clock<'a>,
    lasting: bool,
}

impl<'a> SimBench<'a> {
    fn new(
        ep: &Ep,
        shared: &Arc<Shared>,
        (stream, ordinal): (usize, usize),
        clock: Clock<'a>,
    ) -> Self {
        let at = |kind: u64| (ep.rank() as u64 + 1) << 50 | kind << 44;
        for place in [1, 2] {
            shared.submit(stream, Op::Work(Effect::Fill { at: at(place) }));
        }
        let (rank, results, on) = (ep.rank(), AtomicU64::new(1), shared.clone());
        let experts = move |held: &Dispatched| {
            let (slot, number) = (held.slot.index(), results.fetch_add(1, Ordering::Relaxed));
            let experts = held.handle().layout() != Layout::RankMajor;
            let number = Some(number);
            let effect = Effect::Experts { rank, slot, experts, received: false, number };
            on.submit(stream, Op::Work(effect));
        };
        let scene = Scene {
            queue: queue(stream, ordinal),
            payload: at(1),
            scales: 0,
            ids: at(2),
            out: at(3),
            experts: Some(Box::new(experts)),
        };
        Self { scene, shared: shared.clone(), stream, clock, lasting: true }
    }
}

impl Bench for SimBench<'_> {
    fn scene(&self) -> &Scene {
        &self.scene
    }

    fn is_lasting(&self) -> bool {
        self.lasting
    }

    fn run(
        &mut self,
        ep: &Ep,
        candidate: &Candidate,
        agreed: &mut dyn FnMut(bool) -> Result<bool>,
        once: &mut dyn FnMut(&Scene) -> Result<()>,
    ) -> Result<Option<Duration>> {
        let trial = (self.clock)(ep.rank(), candidate);
        if !agreed(trial != Trial::CannotBegin)? {
            return Ok(None);
        }
        for run in 0..=RUNS {
            if run == 2 && trial == Trial::Breaks {
                return Err(EpError::argument("tune", "broken"));
            }
            once(&self.scene)?;
        }
        let gpu = ep.inner.gpu.as_ref().expect("simulated");
        // SAFETY: the handle is of a simulated stream, which only the simulation looks at.
        let end = unsafe { gpu.machine.record(handle(self.stream))? };
        while !end.is_done()? {
            ep.inner.usable("tune")?;
            self.shared.turn(How::Look);
        }
        match trial {
            Trial::Takes(time) => Ok(Some(time)),
            _ => Ok(None),
        }
    }
}

/// A time that depends on rank and plan.
fn time(rank: usize, candidate: &Candidate) -> Duration {
    let MovePlan { warps, path, .. } = candidate.plan;
    let (a, b) = match path {
        CopyPath::Tma { stages, chunk } => (stages, chunk),
        CopyPath::LdSt { unroll } => (unroll, 7),
        _ => unreachable!("no other path is tried"),
    };
    let seed = [warps, a, b, candidate.moving as u32, rank as u32];
    let seed = seed
        .iter()
        .fold(0u64, |seed, &part| seed.wrapping_mul(0x1_0003).wrapping_add(u64::from(part)));
    Duration::from_nanos(20_000 + Rng::new(seed).below(80_000) as u64)
}

fn plain(rank: usize, candidate: &Candidate) -> Trial {
    Trial::Takes(time(rank, candidate))
}

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = format!("ep-sim-tune-{}-{name}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        let _ = std::fs::remove_dir_all(&folder);
        Self(folder)
    }

    fn settings(&self, mode: Tune) -> TuneSettings {
        TuneSettings::new(mode, Some(TuneCache::new(&self.0)))
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.0).into_iter().flatten();
        entries.map(|entry| entry.expect("an entry").path()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Every plan is measured, however slow this machine is.
const PATIENT: Tune = Tune::Search { limit: Duration::from_secs(1000) };

type Tuned = (Result<()>, Vec<PlanInForce>);

/// Tunes ranks of a layer on GPUs of their own, each with its settings. Then every rank makes one more
/// round trip, if it can.
fn tuned(
    seed: u64,
    layer: &Layer,
    settings: &[TuneSettings],
    clock: Clock<'_>,
    able: &(dyn Fn(usize) -> Able + Sync),
) -> (Vec<Tuned>, Outcome) {
    let world = settings.len();
    let far = Default::default();
    let setting = Setting { world, gpus: world, queues: 2, mutant: Mutant::None, seed, far };
    let (shared, ranks) = build(&setting, &Layer { gpus: world, ..layer.clone() });
    let board = Board::default();
    shared.expect(world);
    let one = |rank: &Rank| {
        let ep = &rank.ep;
        let _part = shared.enter(ep.rank());
        let peers = SimPeers { ep, shared: &shared, board: &board, round: Cell::new(0) };
        let stream = shared.with(|devices| devices.stream(ep.rank()));
        let bench = || -> Result<Box<dyn Bench + '_>> {
            let able = able(ep.rank());
            if able == Able::Not {
                return Err(EpError::argument("tune", "no memory"));
            }
            let bench = SimBench::new(ep, &shared, (stream, ep.rank()), clock);
            Ok(Box::new(SimBench { lasting: able == Able::Wholly, ..bench }))
        };
        let done = tune(ep, &settings[ep.rank()], &peers, false, &bench);
        (done, ep.plans_in_force(PayloadKind::Bf16, PayloadKind::Bf16))
    };
    let results: Vec<Tuned> = std::thread::scope(|scope| {
        let one = &one;
        let started: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || one(rank))).collect();
        started.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    });
    let free = ranks.iter().all(|rank| rank.ep.free_slots() == layer.slots);
    let mut outcome = shared.outcome();
    if !free {
        outcome.faults.push("not all slots are free again".into());
    }
    (results, outcome)
}

#[track_caller]
fn is_clean(outcome: &Outcome) {
    let Outcome { faults, deadlock, broken, flags, left } = outcome;
    let clean = faults.is_empty() && !deadlock && *broken == 0 && *flags == 0 && left.is_empty();
    assert!(clean, "{outcome:#?}");
}

/// The plans of all ranks, which are the same and all of this origin.
#[track_caller]
fn common(results: &[Tuned], origin: PlanOrigin) -> Vec<MovePlan> {
    for (done, plans) in results {
        done.as_ref().expect("tuned");
        assert_eq!(plans, &results[0].1);
        assert!(plans.iter().all(|plan| plan.origin == origin), "{plans:?}");
    }
    results[0].1.iter().map(|plan| plan.plan).collect()
}

fn all_able(_: usize) -> Able {
    Able::Wholly
}

fn same(folder: &Folder, mode: Tune, world: usize) -> Vec<TuneSettings> {
    vec![folder.settings(mode); world]
}

#[test]
fn compute_that_ends_too_early_runs_longer() {
    let folder = Folder::new("early");
    // On one rank compute goes twelve times as fast as was thought.
    let clock = |rank: usize, candidate: &Candidate| match time(rank, candidate) {
        time if rank == 1 && candidate.expected < 12 * time => Trial::SaysNothing,
        time => Trial::Takes(time),
    };
    let settings = same(&folder, PATIENT, 2);
    let (results, outcome) = tuned(5, &layer(2), &settings, &clock, &all_able);
    is_clean(&outcome);
    common(&results, PlanOrigin::Searched);
}

#[test]
fn ranks_with_clocks_of_their_own_take_the_plan_whose_slowest_rank_is_fastest() {
    for (seed, world) in [(1, 2), (2, 3)] {
        let folder = Folder::new(&format!("clocks{seed}"));
        let seen = Mutex::new(Vec::<(Moving, MovePlan)>::new());
        let clock = |rank: usize, candidate: &Candidate| {
            seen.lock().push((candidate.moving, candidate.plan));
            plain(rank, candidate)
        };
        let settings = same(&folder, PATIENT, world);
        let (results, outcome) = tuned(seed, &layer(world), &settings, &clock, &all_able);
        is_clean(&outcome);
        let plans = common(&results, PlanOrigin::Searched);
        let seen: HashSet<_> = seen.into_inner().into_iter().collect();
        for moving in Moving::ALL {
            let slowest = |plan: MovePlan| {
                let candidate = Candidate { moving, plan, expected: Duration::ZERO };
                (0..world).map(|rank| time(rank, &candidate)).max()
            };
            let tried = seen.iter().filter(|(kernel, _)| *kernel == moving).map(|(_, plan)| *plan);
            let tried: Vec<MovePlan> = tried.collect();
            assert!(tried.len() > 20, "{moving:?}: {}", tried.len());
            let best = tried.iter().copied().min_by_key(|&plan| slowest(plan));
            assert_eq!(Some(plans[moving as usize]), best, "{moving:?}");
        }
        // What one rank found, each finds again for its own GPU, without a search.
        assert_eq!(folder.files().len(), 4 * world);
        let never = |_: usize| panic!("nothing is missing, so nothing is searched for");
        let (again, _) = tuned(seed, &layer(world), &settings, &clock_never, &never);
        assert_eq!(common(&again, PlanOrigin::Cached), plans);
    }
}

fn clock_never(_: usize, _: &Candidate) -> Trial {
    unreachable!("no trials")
}

#[test]
fn a_damaged_or_missing_cache_is_no_error() {
    let folder = Folder::new("damaged");
    let settings = same(&folder, PATIENT, 2);
    let (results, _) = tuned(3, &layer(2), &settings, &plain, &all_able);
    let plans = common(&results, PlanOrigin::Searched);
    let files = folder.files();
    let texts: Vec<String> =
        files.iter().map(|file| std::fs::read_to_string(file).expect("text")).collect();
    let of_rank_0 = |text: &str| text.contains("GPU-00000000-0000-0000-0000-000000000000");
    // Of rank 0 nothing is left, of rank 1 all: its plans are taken by both.
    for (file, text) in files.iter().zip(&texts).filter(|(_, text)| of_rank_0(text)) {
        std::fs::write(file, &text[..text.len() / 2]).expect("writable");
    }
    let cached = same(&folder, Tune::Cached, 2);
    let (results, _) = tuned(4, &layer(2), &cached, &clock_never, &all_able);
    assert_eq!(common(&results, PlanOrigin::Cached), plans);
    // Sound files with plans that nothing can launch; then files that are another GPU's.
    type Spoil = fn(&str) -> String;
    let spoils: [Spoil; 3] = [
        |text| text.replace("\"warps\":", "\"warps\":100"),
        |text| text.replace("GPU-00000000", "GPU-90000000"),
        |_| String::new(),
    ];
    for spoil in spoils {
        for (file, text) in files.iter().zip(&texts) {
            assert_ne!(*text, spoil(text));
            std::fs::write(file, spoil(text)).expect("writable");
        }
        let (results, outcome) = tuned(5, &layer(2), &cached, &clock_never, &all_able);
        common(&results, PlanOrigin::Shipped);
        is_clean(&outcome);
    }
    // A search puts them right again.
    let (results, _) = tuned(6, &layer(2), &settings, &plain, &all_able);
    assert_eq!(common(&results, PlanOrigin::Searched), plans);
    let (results, _) = tuned(7, &layer(2), &cached, &clock_never, &all_able);
    assert_eq!(common(&results, PlanOrigin::Cached), plans);
}

#[test]
fn what_was_found_otherwise_than_beside_compute_is_not_kept() {
    let folder = Folder::new("somehow");
    let able = |rank| if rank == 1 { Able::Somehow } else { Able::Wholly };
    let (results, _) = tuned(17, &layer(2), &same(&folder, PATIENT, 2), &plain, &able);
    let found = common(&results, PlanOrigin::Searched);
    assert!(!found.is_empty());
    let of_rank_1 = |file: &PathBuf| {
        let text = std::fs::read_to_string(file).expect("text");
        text.contains("GPU-00000000-0000-0000-0000-000000000001")
    };
    let files = folder.files();
    assert!(!files.is_empty() && !files.iter().any(of_rank_1), "{files:?}");
}

#[test]
fn a_cache_that_refuses_to_be_written_is_no_error() {
    let settings = TuneSettings::new(PATIENT, Some(TuneCache::new("/proc/no-such-folder")));
    let (results, outcome) = tuned(8, &layer(2), &vec![settings; 2], &plain, &all_able);
    common(&results, PlanOrigin::Searched);
    is_clean(&outcome);
    let (results, _) =
        tuned(8, &layer(2), &vec![TuneSettings::new(PATIENT, None); 2], &plain, &all_able);
    common(&results, PlanOrigin::Searched);
}

#[test]
fn without_tuning_or_where_not_all_ask_for_it_what_ships_is_launched() {
    let folder = Folder::new("off");
    for modes in [[Tune::Off; 2], [Tune::Off, PATIENT], [PATIENT, Tune::Cached]] {
        let settings = modes.map(|mode| folder.settings(mode));
        let (results, outcome) = tuned(9, &layer(2), &settings, &clock_never, &all_able);
        common(&results, PlanOrigin::Shipped);
        is_clean(&outcome);
    }
    // Even where the cache has something, `Off` does not look.
    let (results, _) = tuned(9, &layer(2), &same(&folder, PATIENT, 2), &plain, &all_able);
    common(&results, PlanOrigin::Searched);
    let modes = [Tune::Off, Tune::Cached].map(|mode| folder.settings(mode));
    let (results, _) = tuned(9, &layer(2), &modes, &clock_never, &all_able);
    let origins: Vec<_> = results.iter().map(|(_, plans)| plans[0].origin).collect();
    assert_eq!(origins, [PlanOrigin::Shipped, PlanOrigin::Cached]);
}

#[test]
fn a_given_plan_is_launched_and_nothing_is_searched_for_in_its_place() {
    let given = MovePlan::new(16, 8, CopyPath::LdSt { unroll: 1 });
    let tuning = Tuning { dispatch: Some(given), ..Tuning::default() };
    let clock = |rank: usize, candidate: &Candidate| {
        assert_ne!(candidate.moving, Moving::Dispatch);
        plain(rank, candidate)
    };
    let layer = Layer { tuning, ..layer(2) };
    let settings = vec![TuneSettings::new(PATIENT, None); 2];
    let (results, outcome) = tuned(10, &layer, &settings, &clock, &all_able);
    is_clean(&outcome);
    for (done, plans) in &results {
        done.as_ref().expect("tuned");
        assert_eq!((plans[0].plan, plans[0].origin), (given, PlanOrigin::Given));
        assert!(plans[1..].iter().all(|plan| plan.origin == PlanOrigin::Searched));
    }
}

/// Some plans cannot begin on one rank, or cannot be timed on another: nobody waits for them.
#[test]
fn a_plan_that_fails_on_one_rank_is_out_on_all() {
    let out = |plan: &MovePlan| plan.warps.is_multiple_of(4);
    let clock = |rank: usize, candidate: &Candidate| match (out(&candidate.plan), rank) {
        (true, 1) if candidate.plan.warps == 8 => Trial::CannotBegin,
        (true, 0) => Trial::SaysNothing,
        _ => plain(rank, candidate),
    };
    for seed in 11..14 {
        let settings = vec![TuneSettings::new(PATIENT, None); 3];
        let (results, outcome) = tuned(seed, &layer(3), &settings, &clock, &all_able);
        is_clean(&outcome);
        let plans = common(&results, PlanOrigin::Searched);
        assert!(plans.iter().all(|plan| !out(plan)), "{plans:?}");
    }
}

#[test]
fn nothing_is_searched_for_where_one_rank_cannot() {
    let settings = vec![TuneSettings::new(PATIENT, None); 3];
    let able = |rank| if rank == 1 { Able::Not } else { Able::Wholly };
    let (results, outcome) = tuned(14, &layer(3), &settings, &clock_never, &able);
    common(&results, PlanOrigin::Shipped);
    is_clean(&outcome);
    // Nor where no plan can be timed.
    let clock = |_: usize, _: &Candidate| Trial::SaysNothing;
    let (results, outcome) = tuned(14, &layer(3), &settings, &clock, &all_able);
    common(&results, PlanOrigin::Shipped);
    is_clean(&outcome);
}

#[test]
fn a_rank_that_breaks_is_everyones_error() {
    let clock = |rank: usize, candidate: &Candidate| match (rank, candidate.moving) {
        (1, Moving::Combine) => Trial::Breaks,
        _ => plain(rank, candidate),
    };
    let settings = vec![TuneSettings::new(PATIENT, None); 3];
    let (results, outcome) = tuned(15, &layer(3), &settings, &clock, &all_able);
    assert!(!outcome.deadlock, "{outcome:#?}");
    for (rank, (done, _)) in results.iter().enumerate() {
        let error = done.as_ref().expect_err("the group is gone");
        assert!(!error.group_usable(), "rank {rank}: {error}");
        assert!(error.to_string().contains("broken"), "rank {rank}: {error}");
    }
}

#[test]
fn a_search_without_time_changes_nothing() {
    let folder = Folder::new("hasty");
    let hasty = Tune::Search { limit: Duration::from_nanos(1) };
    let (results, outcome) = tuned(16, &layer(2), &same(&folder, hasty, 2), &plain, &all_able);
    common(&results, PlanOrigin::Shipped);
    is_clean(&outcome);
    assert!(folder.files().is_empty());
}
