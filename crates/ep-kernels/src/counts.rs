//! The counts of all ranks: every row's final place before any payload moves.

use crate::{KernelError, Placement};

/// How many rows every rank sends to every expert and rank, with the sums that turn counts into
/// places.
///
/// [`CountMatrix::reset`], fill [`Self::expert`] and [`Self::rank`] for every source (or
/// [`CountMatrix::set`] each), then [`CountMatrix::finish`]; the other methods answer for what the
/// last `finish` saw. Reusable. Only the sums one rank needs are kept, so that a large job's matrix
/// is read once and not written again.
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
    /// `[R]` and `[P]`: all rows per destination and expert.
    rank_total: Vec<u32>,
    expert_total: Vec<u32>,
    /// `[R]` and `[P]`: those of sources before the rank that finished.
    rank_before: Vec<u32>,
    expert_before: Vec<u32>,
    /// `[R]`: rows of earlier sources to the rank that finished, per source.
    received_before: Vec<u32>,
}

impl CountMatrix {
    /// An empty matrix.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the sizes of `placement`. The counts hold anything until they are set.
    pub fn reset(&mut self, placement: &Placement) {
        self.ranks = placement.ranks();
        self.physical = placement.physical();
        self.base.clear();
        self.base.extend((0..self.ranks).map(|r| placement.physical_base(r) as u32));
        self.base.push(self.physical as u32);
        self.expert.resize(self.ranks * self.physical, 0);
        self.rank.resize(self.ranks * self.ranks, 0);
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

    /// Computes what `rank` needs to know, in time O(R · (R + P)).
    ///
    /// # Errors
    /// [`KernelError::TooManyRows`] if a rank or an expert would get more rows than an `i32`
    /// numbers; [`KernelError::Length`] if the public lists were resized;
    /// [`KernelError::Argument`] if there is no such rank.
    pub fn finish(&mut self, rank: usize) -> Result<(), KernelError> {
        if rank >= self.ranks {
            return Err(KernelError::Argument {
                operation: "count matrix",
                what: "rank",
                value: rank,
                allowed: "the ranks of the placement",
            });
        }
        let (ranks, physical) = (self.ranks, self.physical);
        let expert = Columns::new("expert", &self.expert, ranks, physical)?;
        expert.sum(rank, &mut self.expert_before, &mut self.expert_total, |_, _| {})?;
        let columns = Columns::new("rank", &self.rank, ranks, ranks)?;
        let received = &mut self.received_before;
        received.clear();
        let keep = |_: usize, sums: &[u32]| received.push(sums[rank]);
        columns.sum(rank, &mut self.rank_before, &mut self.rank_total, keep)
    }

    /// Rows that `dest` receives, one per (token, rank).
    pub fn rows_at(&self, dest: usize) -> usize {
        self.rank_total[dest] as usize
    }

    /// Where the finishing rank's rows start at `dest`: the rows that earlier sources send there.
    #[inline]
    pub fn sent_base(&self, dest: usize) -> usize {
        self.rank_before[dest] as usize
    }

    /// Where the rows of `source` start at the finishing rank.
    #[inline]
    pub fn received_base(&self, source: usize) -> usize {
        self.received_before[source] as usize
    }

    /// Where the finishing rank's rows start among those of a physical expert.
    #[inline]
    pub fn expert_base(&self, physical: usize) -> usize {
        self.expert_before[physical] as usize
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
        &self.expert_total[from..to]
    }
}

fn padded(n: u32, alignment: usize) -> usize {
    (n as usize).checked_next_multiple_of(alignment.max(1)).unwrap_or(usize::MAX)
}

/// Counts whose columns are summed, `[rows][columns]`.
struct Columns<'a> {
    what: &'static str,
    counts: &'a [u32],
    columns: usize,
}

impl<'a> Columns<'a> {
    fn new(
        what: &'static str,
        counts: &'a [u32],
        rows: usize,
        columns: usize,
    ) -> Result<Self, KernelError> {
        if counts.len() != rows * columns {
            let (operation, expected, got) = ("count matrix", rows * columns, counts.len());
            return Err(KernelError::Length { operation, what, expected, got });
        }
        Ok(Self { what, counts, columns })
    }

    /// All sums, and those of the rows before `row`; `each` sees the sums before every row.
    fn sum(
        &self,
        row: usize,
        before: &mut Vec<u32>,
        total: &mut Vec<u32>,
        mut each: impl FnMut(usize, &[u32]),
    ) -> Result<(), KernelError> {
        total.clear();
        total.resize(self.columns, 0);
        for (at, line) in self.counts.chunks_exact(self.columns.max(1)).enumerate() {
            if at == row {
                before.clear();
                before.extend_from_slice(total);
            }
            each(at, total);
            for (sum, count) in total.iter_mut().zip(line) {
                // Saturation never comes back below the limit, so one look at the end suffices.
                *sum = sum.saturating_add(*count);
            }
        }
        match total.iter().position(|&sum| sum > i32::MAX as u32) {
            Some(index) => Err(KernelError::TooManyRows { what: self.what, index }),
            None => Ok(()),
        }
    }
}
