//! The counts of all ranks: every row's final place before any payload moves.

use crate::{KernelError, Placement};

/// How many rows every rank sends to every expert and rank, with the prefix sums that turn counts
/// into places.
///
/// [`CountMatrix::reset`], fill [`Self::expert`] and [`Self::rank`] (or [`CountMatrix::set`]), then
/// [`CountMatrix::finish`]; the other methods answer for what the last `finish` saw. Reusable.
///
/// # Panics
/// Methods that take a rank or a physical expert panic if there is none of that number.
#[derive(Clone, Debug, Default)]
pub struct CountMatrix {
    /// Ranks R.
    pub ranks: usize,
    /// Physical experts P.
    pub physical: usize,
    /// `[R * P]`, source-major: (token, choice) pairs of a source per physical expert.
    pub expert: Vec<u32>,
    /// `[R * R]`, source-major: rows of a source per destination rank.
    pub rank: Vec<u32>,
    base: Vec<u32>,
    /// `[R + 1][R]`: rows of earlier sources per destination; the last line has the totals.
    row_base: Vec<u32>,
    /// `[R + 1][P]`, likewise per physical expert.
    expert_base: Vec<u32>,
}

impl CountMatrix {
    /// An empty matrix.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the sizes of `placement` and sets all counts to zero.
    pub fn reset(&mut self, placement: &Placement) {
        self.ranks = placement.ranks();
        self.physical = placement.physical();
        self.base.clear();
        self.base.extend((0..self.ranks).map(|r| placement.physical_base(r) as u32));
        self.base.push(self.physical as u32);
        for (list, len) in [
            (&mut self.expert, self.ranks * self.physical),
            (&mut self.rank, self.ranks * self.ranks),
            (&mut self.row_base, (self.ranks + 1) * self.ranks),
            (&mut self.expert_base, (self.ranks + 1) * self.physical),
        ] {
            list.clear();
            list.resize(len, 0);
        }
    }

    /// Records the counts of one source, in the order of [`crate::Layout`]'s.
    ///
    /// # Errors
    /// [`KernelError::Length`] or [`KernelError::Argument`] if they do not fit the matrix.
    pub fn set(&mut self, source: usize, expert: &[u32], rank: &[u32]) -> Result<(), KernelError> {
        const OPERATION: &str = "count matrix";
        if source >= self.ranks {
            return Err(KernelError::Argument {
                operation: OPERATION,
                what: "source",
                value: source,
                allowed: "the ranks of the placement",
            });
        }
        for (what, got, expected) in
            [("expert", expert.len(), self.physical), ("rank", rank.len(), self.ranks)]
        {
            if got != expected {
                return Err(KernelError::Length { operation: OPERATION, what, expected, got });
            }
        }
        self.expert[source * self.physical..][..self.physical].copy_from_slice(expert);
        self.rank[source * self.ranks..][..self.ranks].copy_from_slice(rank);
        Ok(())
    }

    /// Computes the prefix sums, in time O(R · (R + P)).
    ///
    /// # Errors
    /// [`KernelError::TooManyRows`] if a rank or an expert would get more rows than an `i32`
    /// numbers; [`KernelError::Length`] if the public lists were resized.
    pub fn finish(&mut self) -> Result<(), KernelError> {
        prefix("expert", &self.expert, self.ranks, self.physical, &mut self.expert_base)?;
        prefix("rank", &self.rank, self.ranks, self.ranks, &mut self.row_base)
    }

    /// Rows that `dest` receives, one per (token, rank).
    pub fn rows_at(&self, dest: usize) -> usize {
        self.row_base(self.ranks, dest)
    }

    /// Rows that sources before `source` send to `dest`: where `source`'s rows start there.
    #[inline]
    pub fn row_base(&self, source: usize, dest: usize) -> usize {
        assert!(dest < self.ranks, "rank {dest} of {}", self.ranks);
        self.row_base[source * self.ranks + dest] as usize
    }

    /// Rows that sources before `source` send to a physical expert.
    #[inline]
    pub fn expert_base(&self, source: usize, physical: usize) -> usize {
        assert!(physical < self.physical, "physical expert {physical} of {}", self.physical);
        self.expert_base[source * self.physical + physical] as usize
    }

    /// Expert-major rows of `dest`, each expert's padded to a multiple of `alignment` (0 counts as
    /// 1).
    pub fn expert_rows(&self, dest: usize, alignment: usize) -> usize {
        let rows = self.totals(dest).iter().map(|&n| padded(n, alignment));
        rows.fold(0, usize::saturating_add)
    }

    /// `[local experts + 1]`: where the rows of each local expert of `dest` start, padded as in
    /// [`CountMatrix::expert_rows`], then the end. Numbers beyond `i32::MAX` become `i32::MAX`:
    /// compare [`CountMatrix::expert_rows`] with the capacity first.
    pub fn expert_offsets(&self, dest: usize, alignment: usize, out: &mut Vec<i32>) {
        out.clear();
        out.push(0);
        let mut end = 0;
        out.extend(self.totals(dest).iter().map(|&n| {
            end = usize::saturating_add(end, padded(n, alignment));
            i32::try_from(end).unwrap_or(i32::MAX)
        }));
    }

    /// `[local experts]`: rows of each local expert of `dest` without padding.
    pub fn counts(&self, dest: usize, out: &mut Vec<i32>) {
        out.clear();
        out.extend(self.totals(dest).iter().map(|&n| n as i32));
    }

    fn totals(&self, dest: usize) -> &[u32] {
        let [from, to] = [self.base[dest] as usize, self.base[dest + 1] as usize];
        &self.expert_base[self.ranks * self.physical..][from..to]
    }
}

fn padded(n: u32, alignment: usize) -> usize {
    (n as usize).checked_next_multiple_of(alignment.max(1)).unwrap_or(usize::MAX)
}

/// Running sums down the columns of `counts`, `[rows][columns]`, into `[rows + 1][columns]`.
fn prefix(
    what: &'static str,
    counts: &[u32],
    rows: usize,
    columns: usize,
    sums: &mut [u32],
) -> Result<(), KernelError> {
    if counts.len() != rows * columns {
        let (operation, expected, got) = ("count matrix", rows * columns, counts.len());
        return Err(KernelError::Length { operation, what, expected, got });
    }
    for row in 0..rows {
        let (above, below) = sums[row * columns..][..2 * columns].split_at_mut(columns);
        let line = &counts[row * columns..][..columns];
        for ((below, above), count) in below.iter_mut().zip(above).zip(line) {
            // Saturation never comes back below the limit, so one look at the totals suffices.
            *below = above.saturating_add(*count);
        }
    }
    match sums[rows * columns..].iter().position(|&total| total > i32::MAX as u32) {
        Some(index) => Err(KernelError::TooManyRows { what, index }),
        None => Ok(()),
    }
}
