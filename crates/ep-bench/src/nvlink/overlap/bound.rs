//! How long micro-batches take at the least.

/// What stages of a micro-batch take, microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stages {
    /// A dispatch, while nothing else runs.
    pub dispatch: f64,
    /// The experts, alone on compute's SMs.
    pub experts: f64,
    /// A combine, while nothing else runs.
    pub combine: f64,
    /// A dispatch and a combine, where many of both run at the same time and nothing else does: the time
    /// of all of them by the number of either.
    pub pair: f64,
}

impl Stages {
    /// The larger of each.
    pub fn each_larger(&self, other: &Self) -> Self {
        Self {
            dispatch: self.dispatch.max(other.dispatch),
            experts: self.experts.max(other.experts),
            combine: self.combine.max(other.combine),
            pair: self.pair.max(other.pair),
        }
    }
}

/// What no schedule of `batches` micro-batches can be shorter than: the busier of two resources.
///
/// *Compute's SMs* run one micro-batch's experts after the other, the first not before a dispatch is
/// done, and a combine follows the last: `dispatch + batches · experts + combine`.
///
/// *Communication's SMs* run all dispatches and combines. Nothing of the kind can run beside the first
/// dispatch, nor beside the last combine. The others overlap at best as they do when nothing but them
/// runs: `dispatch + (batches − 1) · pair + combine`. Where doing both at once is slower than one after
/// the other, a schedule does the latter, so `pair` counts at most as `dispatch + combine`.
///
/// That stages are slowed down by each other is no part of it: that is what a run is compared for.
pub fn lower_bound(batches: usize, stages: &Stages) -> f64 {
    let Stages { dispatch, experts, combine, pair } = *stages;
    let Some(others) = batches.checked_sub(1) else { return 0.0 };
    let ends = dispatch + combine;
    let compute = ends + batches as f64 * experts;
    let communication = ends + others as f64 * pair.min(ends);
    compute.max(communication)
}

/// How long `batches` micro-batches take whose stages each run without a pause where what they need is
/// there: dispatches follow each other, so do experts and combines; experts need their dispatch, a
/// combine its experts. With times of stages that are kept busy by each other this is no bound: in a run
/// they are not always.
pub fn line(batches: usize, (dispatch, experts, combine): (f64, f64, f64)) -> f64 {
    let (mut dispatched, mut computed, mut combined) = (0.0f64, 0.0f64, 0.0f64);
    for _ in 0..batches {
        dispatched += dispatch;
        computed = computed.max(dispatched) + experts;
        combined = combined.max(computed) + combine;
    }
    combined
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stages(dispatch: f64, experts: f64, combine: f64, pair: f64) -> Stages {
        Stages { dispatch, experts, combine, pair }
    }

    #[test]
    fn the_busier_resource_counts() {
        // Compute: 1 + 3 · 10 + 2.
        assert_eq!(lower_bound(3, &stages(1.0, 10.0, 2.0, 3.0)), 33.0);
        // Communication, which overlaps nothing, and then half: 10 + 2 · 12 + 2, 10 + 2 · 10 + 2.
        assert_eq!(lower_bound(3, &stages(10.0, 1.0, 2.0, 12.0)), 36.0);
        assert_eq!(lower_bound(3, &stages(10.0, 1.0, 2.0, 10.0)), 32.0);
        // Both at once are slower than one after the other.
        assert_eq!(lower_bound(3, &stages(10.0, 1.0, 2.0, 50.0)), 36.0);
        assert_eq!(lower_bound(1, &stages(1.0, 2.0, 4.0, 5.0)), 7.0);
        assert_eq!(lower_bound(0, &stages(1.0, 2.0, 4.0, 5.0)), 0.0);
    }

    #[test]
    fn a_line_is_as_long_as_its_longest_stage() {
        // Three of the longest, and one of each other to fill and drain.
        assert_eq!(line(3, (1.0, 10.0, 2.0)), 33.0);
        assert_eq!(line(3, (10.0, 1.0, 2.0)), 33.0);
        assert_eq!(line(3, (1.0, 2.0, 10.0)), 33.0);
        assert_eq!(line(1, (1.0, 2.0, 4.0)), 7.0);
        assert_eq!(line(0, (1.0, 2.0, 4.0)), 0.0);
    }

    /// The shortest of all schedules in which communication does one thing at a time. So far: dispatches
    /// and combines done, when communication is free, when each experts' work ends.
    fn shortest(batches: usize, s: &Stages, done: (usize, usize), free: f64, ends: &[f64]) -> f64 {
        let (dispatched, combined) = done;
        if combined == batches {
            return free;
        }
        let mut best = f64::INFINITY;
        if dispatched < batches {
            let there = free + s.dispatch;
            let before = ends.last().copied().unwrap_or(0.0);
            let ends = [ends, &[before.max(there) + s.experts]].concat();
            best = shortest(batches, s, (dispatched + 1, combined), there, &ends);
        }
        if combined < dispatched {
            let home = free.max(ends[combined]) + s.combine;
            best = best.min(shortest(batches, s, (dispatched, combined + 1), home, ends));
        }
        best
    }

    fn one_at_a_time(batches: usize, s: &Stages) -> f64 {
        shortest(batches, s, (0, 0), 0.0, &[])
    }

    proptest! {
        #[test]
        fn no_schedule_of_one_thing_at_a_time_is_shorter(
            batches in 0usize..6, d in 0.0f64..9.0, e in 0.0f64..9.0, c in 0.0f64..9.0,
            slower in 0.0f64..5.0,
        ) {
            // Two things at once take as long as one after the other, or longer.
            let stages = stages(d, e, c, d + c + slower);
            prop_assert!(one_at_a_time(batches, &stages) >= lower_bound(batches, &stages) - 1e-9);
        }

        #[test]
        fn no_schedule_of_both_at_once_is_shorter(
            batches in 0usize..20, d in 0.0f64..9.0, e in 0.0f64..9.0, c in 0.0f64..9.0,
        ) {
            // Dispatches and combines do not slow each other down.
            let stages = stages(d, e, c, d.max(c));
            prop_assert!(line(batches, (d, e, c)) >= lower_bound(batches, &stages) - 1e-9);
        }

        #[test]
        fn where_experts_take_longer_than_both_the_bound_is_reached(
            batches in 1usize..6, d in 0.0f64..9.0, c in 0.0f64..9.0, more in 0.0f64..9.0,
        ) {
            let stages = stages(d, d + c + more, c, d + c);
            let bound = lower_bound(batches, &stages);
            prop_assert!((one_at_a_time(batches, &stages) - bound).abs() < 1e-9);
        }

        #[test]
        fn a_line_is_the_sum_and_the_longest_for_all_others(
            batches in 1usize..20, d in 0.0f64..9.0, e in 0.0f64..9.0, c in 0.0f64..9.0,
        ) {
            let rest = (batches - 1) as f64;
            let sum = d + e + c + rest * d.max(e).max(c);
            prop_assert!((line(batches, (d, e, c)) - sum).abs() < 1e-9);
        }
    }
}
