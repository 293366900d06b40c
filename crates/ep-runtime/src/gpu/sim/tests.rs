//! Properties of the protocol, and that the simulation finds what breaks them.

use std::time::Duration;

use ep_transport::Queue;

use super::device::Rng;
use super::program::calls;
use super::rank::queue;
use super::run::{Far, Setting, as_threads, build, layer, phase_by_phase};
use super::turns::{Mutant, Outcome};

fn setting(seed: u64, mutant: Mutant) -> Setting {
    let mut rng = Rng::new(seed.wrapping_add(77));
    let world = 2 + rng.below(4);
    let gpus = 1 + rng.below(2.min(world - 1));
    Setting { world, gpus, queues: [1, 1, 2, 3, 8][rng.below(5)], mutant, seed, far: Far::None }
}

fn run(setting: &Setting) -> Outcome {
    as_threads(setting, &calls(&mut Rng::new(setting.seed), 30, false))
}

#[track_caller]
fn is_clean(setting: &Setting, outcome: &Outcome) {
    let Outcome { faults, deadlock, broken, flags, left } = outcome;
    assert!(
        faults.is_empty() && !deadlock && *broken == 0 && *flags == 0 && left.is_empty(),
        "{setting:?}: {outcome:#?}"
    );
}

/// How many seeds a property is tried with; `EP_SIM_SEEDS` says otherwise.
fn seeds(count: u64) -> std::ops::Range<u64> {
    let asked = std::env::var("EP_SIM_SEEDS").ok().and_then(|n| n.parse().ok());
    0..asked.unwrap_or(count)
}

#[test]
fn ranks_as_threads_come_to_an_end_and_touch_nothing_too_early() {
    for seed in seeds(200) {
        let setting = setting(seed, Mutant::None);
        is_clean(&setting, &run(&setting));
    }
}

/// Ranks of several nodes, of which those that exchange rows have GPUs of their own.
fn apart(seed: u64, mutant: Mutant) -> Setting {
    let (nodes, in_parts) = (2 + seed as usize % 2, (seed / 2).is_multiple_of(2));
    let (once, setting) = (seed / 12 % 2 == 1, setting(seed, mutant));
    match seed / 4 % 3 {
        0 => {
            let far = Far::Paired { nodes, in_parts, once };
            Setting { gpus: setting.world, far, ..setting }
        }
        _ => Setting { far: Far::Bulk { nodes, in_parts, once }, ..setting },
    }
}

#[test]
fn ranks_that_are_not_mapped_come_to_an_end_and_touch_nothing_too_early() {
    for seed in seeds(120) {
        let setting = apart(seed, Mutant::None);
        is_clean(&setting, &run(&setting));
    }
}

#[test]
fn one_thread_drives_ranks_that_are_not_mapped() {
    for seed in seeds(40) {
        let setting = Setting { gpus: 1, ..apart(seed, Mutant::None) };
        // Ranks that exchange have GPUs of their own, which takes a stream of each.
        if matches!(setting.far, Far::Paired { .. }) {
            continue;
        }
        let calls = calls(&mut Rng::new(setting.seed), 20, true);
        is_clean(&setting, &phase_by_phase(&setting, &calls));
    }
}

#[test]
fn rows_that_are_sent_while_they_are_packed_are_found() {
    let early = |outcome: &Outcome| {
        outcome.faults.iter().any(|f| f.contains("Packed") && f.contains("beside"))
    };
    let on = |seed: u64| Setting { queues: 8, ..apart(4 * (3 * seed + 1), Mutant::NoOrders) };
    assert!((0..40).any(|seed| early(&run(&on(seed)))));
}

/// Where rows go in parts, another stream puts them.
#[test]
fn rows_that_are_packed_while_they_are_sent_still_are_found() {
    let early = |outcome: &Outcome| {
        outcome.faults.iter().any(|f| f.contains("Packed") && f.contains("while"))
    };
    let at = |seed: u64| 24 * (seed / 4) + 4 * (1 + seed % 2) + seed / 2 % 2;
    let on = |seed| Setting { queues: 8, ..apart(at(seed), Mutant::Unflushed) };
    assert!((0..40).any(|seed| early(&run(&on(seed)))));
}

/// Settings in which tokens cross nodes once.
fn once(seed: u64, mutant: Mutant) -> Setting {
    Setting { queues: 8, ..apart(24 * (seed / 12) + 12 + seed % 12, mutant) }
}

#[test]
fn rows_that_are_forwarded_behind_their_signal_are_found() {
    let early = |outcome: &Outcome| {
        let late = |fault: &String| fault.contains("Rows") && fault.contains("Received");
        outcome.faults.iter().any(late)
    };
    // In one node dispatch itself would be what is late.
    let found = |seed| {
        let setting = once(seed, Mutant::EarlySignal);
        setting.forwards() && early(&run(&setting))
    };
    assert!((0..40).any(found));
    assert!((0..12).all(|seed| !early(&run(&once(seed, Mutant::None)))));
}

#[test]
fn blocks_that_are_not_waited_for_are_found() {
    let early = |outcome: &Outcome| outcome.faults.iter().any(|f| f.contains("Block {"));
    assert!((0..40).any(|seed| early(&run(&once(seed, Mutant::NotSent)))));
}

/// Ranks of several nodes whose blocks have a fixed size.
fn fixed(seed: u64, mutant: Mutant) -> Setting {
    let (nodes, paired) = (2 + seed as usize % 3, seed % 4 == 3);
    let setting = setting(seed, mutant);
    // Ranks that exchange rows have GPUs of their own.
    let gpus = if paired { setting.world } else { setting.gpus };
    Setting { gpus, far: Far::Fixed { nodes, paired }, ..setting }
}

#[test]
fn blocks_of_fixed_size_come_to_an_end_and_touch_nothing_too_early() {
    for seed in seeds(120) {
        let setting = fixed(seed, Mutant::None);
        is_clean(&setting, &run(&setting));
    }
}

#[test]
fn one_thread_drives_ranks_whose_blocks_have_a_fixed_size() {
    for seed in seeds(40).filter(|seed| seed % 4 != 3) {
        let setting = Setting { gpus: 1, ..fixed(seed, Mutant::None) };
        let calls = calls(&mut Rng::new(setting.seed), 20, true);
        is_clean(&setting, &phase_by_phase(&setting, &calls));
    }
}

#[test]
fn blocks_of_fixed_size_that_are_not_waited_for_are_found() {
    for mutant in [Mutant::NotDone, Mutant::NotSent] {
        let early = |outcome: &Outcome| {
            outcome.faults.iter().any(|f| f.contains("Staged") && f.contains("beside"))
        };
        let on = |seed: u64| Setting { queues: 8, ..fixed(4 * seed, mutant) };
        assert!((0..40).any(|seed| early(&run(&on(seed)))), "{mutant:?}");
    }
}

#[test]
fn one_thread_goes_phase_by_phase_on_any_number_of_queues() {
    for seed in seeds(60) {
        let setting = Setting { gpus: 1, ..setting(seed, Mutant::None) };
        let calls = calls(&mut Rng::new(seed), 30, true);
        is_clean(&setting, &phase_by_phase(&setting, &calls));
    }
}

#[test]
fn a_run_can_be_repeated() {
    for seed in [3, 4] {
        let setting = setting(seed, Mutant::Unpaced);
        let (first, second) = (run(&setting), run(&setting));
        assert_eq!(format!("{first:?}"), format!("{second:?}"));
    }
}

/// How many of 40 runs on one hardware queue per GPU go wrong, as `wrong` sees it.
fn found(mutant: Mutant, queues: usize, wrong: impl Fn(&Outcome) -> bool) -> usize {
    let on = |seed| Setting { gpus: 1, queues, ..setting(seed, mutant) };
    (0..40).filter(|&seed| wrong(&run(&on(seed)))).count()
}

#[test]
fn without_pacing_a_shared_queue_is_a_deadlock() {
    let deadlock = |outcome: &Outcome| outcome.deadlock;
    assert!(found(Mutant::Unpaced, 1, deadlock) > 0);
    assert_eq!(found(Mutant::None, 1, deadlock), 0);
}

#[test]
fn a_signal_ahead_of_its_kernel_is_early_reuse() {
    let early = |outcome: &Outcome| {
        outcome.faults.iter().any(|f| f.contains("beside") || f.contains("while"))
    };
    assert!(found(Mutant::EarlySignal, 8, early) > 0);
}

#[test]
fn a_slot_that_is_not_waited_for_is_early_reuse() {
    let early = |outcome: &Outcome| outcome.faults.iter().any(|f| f.contains("while"));
    assert!(found(Mutant::NoOrders, 8, early) > 0);
}

/// The slot may still be in use, so it stays away as well.
#[test]
fn a_release_that_nothing_tells_of_is_an_error() {
    let (shared, ranks) =
        build(&Setting { world: 2, gpus: 2, ..setting(1, Mutant::None) }, &layer(2));
    let inner = &ranks[0].ep.inner;
    let gpu = inner.gpu.as_ref().unwrap();
    let released = |queue: &Queue| gpu.released(inner, queue);
    let live = queue(shared.with(|devices| devices.stream(0)), 0);
    assert!(!released(&live).ready());
    for (gone, why) in [(queue(1 << 20, 0), "no such stream"), (Queue::host(), "pass a stream")] {
        let event = released(&gone);
        assert!(event.ready());
        for told in [event.wait(Duration::ZERO), event.order(&live), event.order(&Queue::host())] {
            let e = told.unwrap_err();
            assert!(e.to_string().contains(why), "{e}");
        }
    }
}
