//! Where every token of one rank goes, from its expert ids.

use crate::{IdError, Placement};

/// Expert ids, token-major: `topk` ids for every token. −1 (`u32::MAX`) skips a choice.
#[derive(Clone, Copy, Debug)]
pub enum Ids<'a> {
    /// Unsigned 32-bit ids; `u32::MAX` is −1.
    U32(&'a [u32]),
    /// Signed 32-bit ids.
    I32(&'a [i32]),
    /// Signed 64-bit ids.
    I64(&'a [i64]),
}

impl Ids<'_> {
    /// Number of ids.
    pub fn len(&self) -> usize {
        match self {
            Self::U32(ids) => ids.len(),
            Self::I32(ids) => ids.len(),
            Self::I64(ids) => ids.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The routing of one rank's tokens: counts and the place of every row among this rank's rows.
///
/// Reusable: buffers keep their capacity from one [`Layout::compute`] to the next. The fields are
/// public to be read.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// Tokens T.
    pub tokens: usize,
    /// Choices per token K.
    pub topk: usize,
    /// (token, choice) pairs per physical expert.
    pub expert_counts: Vec<u32>,
    /// Tokens per rank: a token is counted once however many experts of the rank it chose.
    pub rank_counts: Vec<u32>,
    /// `[T * K]`: the physical expert of every choice, or −1.
    pub physical: Vec<i32>,
    /// `[T * K]`: how many earlier tokens of this rank chose the same physical expert; 0 where the
    /// choice is skipped.
    pub expert_index: Vec<u32>,
    /// `[T + 1]`: where the destinations of every token start in [`Self::dest_rank`].
    pub dest_offsets: Vec<u32>,
    /// The destination ranks of every token, ascending inside a token.
    pub dest_rank: Vec<u32>,
    /// Beside every destination: how many earlier tokens of this rank went to that rank.
    pub dest_index: Vec<u32>,
    /// The last token, plus one, that chose a physical expert: finds duplicates without a search.
    expert_stamp: Vec<u32>,
    /// The last token, plus one, that went to a rank.
    rank_stamp: Vec<u32>,
}

impl Layout {
    /// An empty layout.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lays out the tokens of `source_rank`, in time O(T · K + ranks + physical experts).
    ///
    /// `physical_ids` says that the ids name physical experts, not logical ones.
    ///
    /// # Errors
    /// [`IdError`] if the ids do not form rows of `topk`, one is out of range, or a token names a
    /// physical expert twice. The layout is then that of zero tokens.
    pub fn compute(
        &mut self,
        ids: Ids<'_>,
        topk: usize,
        placement: &Placement,
        source_rank: usize,
        physical_ids: bool,
    ) -> Result<(), IdError> {
        self.reset(topk, placement);
        let done = check_shape(ids.len(), topk, placement, source_rank).and_then(|tokens| {
            let args = (tokens, placement, source_rank, physical_ids);
            match ids {
                Ids::U32(ids) => self.fill(|i| signed(ids[i]), args),
                Ids::I32(ids) => self.fill(|i| i64::from(ids[i]), args),
                Ids::I64(ids) => self.fill(|i| ids[i], args),
            }
        });
        if done.is_err() {
            self.reset(topk, placement);
        }
        done
    }

    /// The destinations of `token`: (rank, index of the row among this rank's rows there).
    ///
    /// # Panics
    /// If there is no such token.
    #[inline]
    pub fn destinations(&self, token: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let range = self.dest_offsets[token] as usize..self.dest_offsets[token + 1] as usize;
        let ranks = self.dest_rank[range.clone()].iter().map(|&r| r as usize);
        ranks.zip(self.dest_index[range].iter().map(|&i| i as usize))
    }

    fn reset(&mut self, topk: usize, placement: &Placement) {
        self.tokens = 0;
        self.topk = topk;
        for (list, len) in [
            (&mut self.expert_counts, placement.physical()),
            (&mut self.rank_counts, placement.ranks()),
            (&mut self.expert_stamp, placement.physical()),
            (&mut self.rank_stamp, placement.ranks()),
            (&mut self.expert_index, 0),
            (&mut self.dest_offsets, 1),
            (&mut self.dest_rank, 0),
            (&mut self.dest_index, 0),
        ] {
            list.clear();
            list.resize(len, 0);
        }
        self.physical.clear();
    }

    fn fill(
        &mut self,
        id_at: impl Fn(usize) -> i64,
        (tokens, placement, source_rank, physical_ids): (usize, &Placement, usize, bool),
    ) -> Result<(), IdError> {
        let experts = if physical_ids { placement.physical() } else { placement.experts() };
        for token in 0..tokens {
            let stamp = token as u32 + 1;
            let first = self.dest_rank.len();
            for k in 0..self.topk {
                let id = id_at(token * self.topk + k);
                if id == -1 {
                    self.physical.push(-1);
                    self.expert_index.push(0);
                    continue;
                }
                if id < 0 || id >= experts as i64 {
                    return Err(IdError::OutOfRange { token, k, id, experts });
                }
                let chosen = match physical_ids {
                    true => id as usize,
                    false => placement.resolve(id as usize, source_rank, token),
                };
                if self.expert_stamp[chosen] == stamp {
                    return Err(IdError::Duplicate { token, id });
                }
                self.expert_stamp[chosen] = stamp;
                self.physical.push(chosen as i32);
                self.expert_index.push(self.expert_counts[chosen]);
                self.expert_counts[chosen] += 1;
                let (rank, _) = placement.owner(chosen);
                if self.rank_stamp[rank] != stamp {
                    self.rank_stamp[rank] = stamp;
                    self.dest_rank.push(rank as u32);
                }
            }
            self.close_token(first);
        }
        self.tokens = tokens;
        Ok(())
    }

    /// Orders the destinations of the token that started at `first` and numbers its rows.
    fn close_token(&mut self, first: usize) {
        self.dest_rank[first..].sort_unstable();
        for &rank in &self.dest_rank[first..] {
            let count = &mut self.rank_counts[rank as usize];
            self.dest_index.push(*count);
            *count += 1;
        }
        self.dest_offsets.push(self.dest_rank.len() as u32);
    }
}

fn signed(id: u32) -> i64 {
    if id == u32::MAX { -1 } else { i64::from(id) }
}

/// The number of tokens, if everything the layout counts fits its integers.
fn check_shape(
    ids: usize,
    topk: usize,
    placement: &Placement,
    source_rank: usize,
) -> Result<usize, IdError> {
    if topk == 0 || !ids.is_multiple_of(topk) {
        return Err(IdError::Shape { ids, topk });
    }
    if source_rank >= placement.ranks() {
        let limit = placement.ranks();
        return Err(IdError::Limit { what: "source_rank", value: source_rank, limit });
    }
    let limit = i32::MAX as usize;
    if ids >= limit {
        return Err(IdError::Limit { what: "ids", value: ids, limit });
    }
    Ok(ids / topk)
}
