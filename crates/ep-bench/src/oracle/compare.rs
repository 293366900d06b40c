//! Differences a person can read.

use super::dispatch::{ExpertMajor, RankRow};
use super::float::Float;
use std::fmt::{self, Debug, Display};

/// Lines kept of all differences found.
const SHOWN: usize = 8;

/// Collects differences; `finish` turns them into an error.
#[derive(Clone, Debug, Default)]
pub struct Differences {
    shown: Vec<String>,
    found: usize,
}

/// What differs: the first few places, and how many there are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Mismatch {
    /// One line each.
    pub shown: Vec<String>,
    /// How many places differ, shown or not.
    pub found: usize,
}

impl Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} differences", self.found)?;
        self.shown.iter().try_for_each(|line| writeln!(f, "  {line}"))?;
        match self.found - self.shown.len() {
            0 => Ok(()),
            more => writeln!(f, "  and {more} more"),
        }
    }
}

impl Differences {
    /// None so far.
    pub fn new() -> Differences {
        Differences::default()
    }

    fn note(&mut self, line: impl FnOnce() -> String) {
        self.found += 1;
        if self.shown.len() < SHOWN {
            self.shown.push(line());
        }
    }

    /// Two values that must be equal. `place` says where, as "rank 2 rows".
    pub fn equal<T: PartialEq + Debug + ?Sized>(
        &mut self,
        place: impl Display,
        expected: &T,
        got: &T,
    ) {
        if expected != got {
            self.note(|| format!("{place}: expected {expected:?}, got {got:?}"));
        }
    }

    /// Two slices that must be equal; reports the first difference and their number.
    pub fn slices<T: PartialEq + Debug>(&mut self, place: impl Display, expected: &[T], got: &[T]) {
        self.items(place, expected, got, |a, b| a == b, |value| format!("{value:?}"));
    }

    /// Numbers that must have the same bits.
    pub fn f32_bits(&mut self, place: impl Display, expected: &[f32], got: &[f32]) {
        let same = |a: &f32, b: &f32| a.to_bits() == b.to_bits();
        self.items(place, expected, got, same, |v| format!("{v:?} ({:#010x})", v.to_bits()));
    }

    /// Rows of numbers that must have the same bits, except that any NaN equals any other.
    pub fn floats(&mut self, place: impl Display, dtype: Float, expected: &[u8], got: &[u8]) {
        let size = dtype.size();
        if expected.len() != got.len() || !expected.len().is_multiple_of(size) {
            let (expected, got) = (expected.len(), got.len());
            return self.note(|| format!("{place}: expected {expected} bytes, got {got}"));
        }
        let elements = |row: &[u8]| (0..row.len() / size).map(|i| dtype.load(row, i)).collect();
        let (expected, got): (Vec<f32>, Vec<f32>) = (elements(expected), elements(got));
        // Widening is exact and one to one, so equal f32 bits mean equal bits before.
        let same = |a: &f32, b: &f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        let show = |value: &f32| {
            let hex: String =
                dtype.row(&[*value]).iter().rev().map(|b| format!("{b:02x}")).collect();
            format!("{value:?} (0x{hex})")
        };
        self.items(place, &expected, &got, same, show);
    }

    fn items<T>(
        &mut self,
        place: impl Display,
        expected: &[T],
        got: &[T],
        same: impl Fn(&T, &T) -> bool,
        show: impl Fn(&T) -> String,
    ) {
        if expected.len() != got.len() {
            let (expected, got) = (expected.len(), got.len());
            return self.note(|| format!("{place}: expected {expected} elements, got {got}"));
        }
        let differs = |i: &usize| !same(&expected[*i], &got[*i]);
        let Some(first) = (0..got.len()).find(differs) else { return };
        let count = (0..got.len()).filter(differs).count();
        self.note(|| {
            format!(
                "{place}: element {first} of {}: expected {}, got {} ({count} differ)",
                got.len(),
                show(&expected[first]),
                show(&got[first]),
            )
        });
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.found == 0
    }

    /// Ends the comparison.
    ///
    /// # Errors
    /// The differences, if there are any.
    pub fn finish(self) -> Result<(), Mismatch> {
        match self.found {
            0 => Ok(()),
            found => Err(Mismatch { shown: self.shown, found }),
        }
    }
}

/// Compares one rank's rank-major rows, all parts bit by bit.
///
/// # Errors
/// What differs.
pub fn compare_rank_major(
    rank: usize,
    expected: &[RankRow],
    got: &[RankRow],
) -> Result<(), Mismatch> {
    let mut found = Differences::new();
    found.equal(format_args!("rank {rank} rows"), &expected.len(), &got.len());
    for (index, (e, g)) in expected.iter().zip(got).enumerate() {
        let place = |part: &str| format!("rank {rank} row {index} {part}");
        let source = |row: &RankRow| (row.source_rank, row.source_token);
        found.equal(place("source (rank, token)"), &source(e), &source(g));
        found.slices(place("ids"), &e.ids, &g.ids);
        found.f32_bits(place("weights"), &e.weights, &g.weights);
        found.slices(place("payload"), e.payload, g.payload);
        found.slices(place("scales"), e.scales, g.scales);
    }
    found.finish()
}

/// Compares one rank's expert-major layout, all parts bit by bit.
///
/// # Errors
/// What differs.
pub fn compare_expert_major(
    rank: usize,
    expected: &ExpertMajor,
    got: &ExpertMajor,
) -> Result<(), Mismatch> {
    let mut found = Differences::new();
    found.slices(format_args!("rank {rank} offsets"), &expected.offsets, &got.offsets);
    found.slices(format_args!("rank {rank} counts"), &expected.counts, &got.counts);
    found.equal(format_args!("rank {rank} expert rows"), &expected.rows.len(), &got.rows.len());
    for (index, (e, g)) in expected.rows.iter().zip(&got.rows).enumerate() {
        let place = |part: &str| format!("rank {rank} expert row {index} {part}");
        found.equal(place("rank-major row"), &e.row, &g.row);
        found.f32_bits(place("weight"), &[e.weight], &[g.weight]);
        found.slices(place("payload"), &e.payload, &g.payload);
        found.slices(place("scales"), &e.scales, &g.scales);
    }
    found.finish()
}

/// Compares one rank's combined tokens (`[tokens]`, each a row of `dtype`) bit by bit, any NaN
/// being equal to any other.
///
/// # Errors
/// What differs.
pub fn compare_combined<R: AsRef<[u8]>>(
    rank: usize,
    dtype: Float,
    expected: &[R],
    got: &[R],
) -> Result<(), Mismatch> {
    let mut found = Differences::new();
    found.equal(format_args!("rank {rank} tokens"), &expected.len(), &got.len());
    for (token, (e, g)) in expected.iter().zip(got).enumerate() {
        found.floats(format_args!("rank {rank} token {token}"), dtype, e.as_ref(), g.as_ref());
    }
    found.finish()
}
