//! The counts of all ranks: every row's final place before any payload moves.

use crate::{KernelError, Placement};

/// What one rank has to know of how many rows every rank sends to every expert and rank: the places
/// of its own rows everywhere, of everyone's rows here, and the sizes of all ranks' results.
///
/// [`CountMatrix::reset`], [`CountMatrix::add`] for every source in order, then
/// [`CountMatrix::finish`]. Reusable. The counts themselves, R · (R + P) of them, are read once and
/// not kept: a large job's do not fit into a cache.
///
/// # Panics
/// Methods that take a rank or a physical expert panic if there is none of that number.
#[derive(Clone, Debug, Default)]
pub struct CountMatrix {
    ranks: usize,
    physical: usize,
    rank: usize,
    /// `[R + 1]`: first physical expert of each rank.
    base: Vec<u32>,
    /// `[R]` and `[P]`: rows per destination and per expert, of the sources added so far.
    rank_total: Vec<u32>,
    expert_total: Vec<u32>,
    /// `[R]` and `[P]`: those of sources before this rank.
    rank_before: Vec<u32>,
    expert_before: Vec<u32>,
    /// Per source added.
    sources: Vec<FromSource>,
}

/// What a rank knows of one source.
#[derive(Clone, Copy, Debug)]
struct FromSource {
    /// Rows to this rank, and those of earlier sources.
    received: u32,
    received_before: u32,
    /// Rows to ranks before this one, and choices of experts of such ranks.
    rows_elsewhere: u32,
    choices_elsewhere: u32,
}

impl CountMatrix {
    /// An empty matrix.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the sizes of `placement` and forgets all sources. `rank` is the rank that wants to
    /// know.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn reset(&mut self, placement: &Placement, rank: usize) {
        assert!(rank < placement.ranks(), "rank {rank} of {}", placement.ranks());
        (self.ranks, self.physical) = (placement.ranks(), placement.physical());
        self.rank = rank;
        self.base.clear();
        self.base.extend((0..self.ranks).map(|r| placement.physical_base(r) as u32));
        self.base.push(self.physical as u32);
        for (list, len) in
            [(&mut self.rank_total, self.ranks), (&mut self.expert_total, self.physical)]
        {
            list.clear();
            list.resize(len, 0);
        }
        self.sources.clear();
    }

    /// Adds the counts of the next source, in the order of [`crate::Layout`]'s, in time O(R + P).
    ///
    /// # Errors
    /// [`KernelError::Length`] if they do not fit the placement, or all sources were added.
    pub fn add(&mut self, expert: &[u32], rank: &[u32]) -> Result<(), KernelError> {
        let operation = "count matrix";
        for (what, got, expected) in
            [("expert", expert.len(), self.physical), ("rank", rank.len(), self.ranks)]
        {
            if got != expected {
                return Err(KernelError::Length { operation, what, expected, got });
            }
        }
        if self.sources.len() == self.ranks {
            let (expected, got) = (self.ranks, self.ranks + 1);
            return Err(KernelError::Length { operation, what: "sources", expected, got });
        }
        if self.sources.len() == self.rank {
            self.rank_before.clone_from(&self.rank_total);
            self.expert_before.clone_from(&self.expert_total);
        }
        self.sources.push(FromSource {
            received: rank[self.rank],
            received_before: self.rank_total[self.rank],
            rows_elsewhere: sum(&rank[..self.rank]),
            choices_elsewhere: sum(&expert[..self.base[self.rank] as usize]),
        });
        accumulate(&mut self.rank_total, rank);
        accumulate(&mut self.expert_total, expert);
        Ok(())
    }

    /// Checks the whole.
    ///
    /// # Errors
    /// [`KernelError::TooManyRows`] if a rank or an expert would get more rows than an `i32`
    /// numbers; [`KernelError::Length`] if a source was not added.
    pub fn finish(&self) -> Result<(), KernelError> {
        let (expected, got) = (self.ranks, self.sources.len());
        if got != expected {
            let operation = "count matrix";
            return Err(KernelError::Length { operation, what: "sources", expected, got });
        }
        for (what, totals) in [("expert", &self.expert_total), ("rank", &self.rank_total)] {
            if let Some(index) = totals.iter().position(|&total| total > i32::MAX as u32) {
                return Err(KernelError::TooManyRows { what, index });
            }
        }
        Ok(())
    }

    /// Ranks R.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Rows that `dest` receives, one per (token, rank).
    pub fn rows_at(&self, dest: usize) -> usize {
        self.rank_total[dest] as usize
    }

    /// Where this rank's rows start at `dest`: the rows that earlier sources send there.
    #[inline]
    pub fn sent_base(&self, dest: usize) -> usize {
        self.rank_before[dest] as usize
    }

    /// Where this rank's rows start among those of a physical expert.
    #[inline]
    pub fn expert_base(&self, physical: usize) -> usize {
        self.expert_before[physical] as usize
    }

    /// Rows that `source` sends to this rank.
    pub fn received(&self, source: usize) -> usize {
        self.sources[source].received as usize
    }

    /// Where the rows of `source` start at this rank.
    pub fn received_base(&self, source: usize) -> usize {
        self.sources[source].received_before as usize
    }

    /// Rows that `source` sends to ranks before this one.
    pub fn rows_elsewhere(&self, source: usize) -> usize {
        self.sources[source].rows_elsewhere as usize
    }

    /// (Token, choice) pairs of `source` for experts of ranks before this one.
    pub fn choices_elsewhere(&self, source: usize) -> usize {
        self.sources[source].choices_elsewhere as usize
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

/// Sums that never come back below the limit, so that one look at the end suffices.
fn accumulate(sums: &mut [u32], counts: &[u32]) {
    sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum = sum.saturating_add(*count));
}

fn sum(counts: &[u32]) -> u32 {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}
