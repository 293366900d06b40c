//! Which ranks hold which experts.

use crate::error::{KernelError, PlacementFault};

/// A map from logical experts to one or more *physical* ones, each a (rank, local number) pair.
///
/// Physical ids number those pairs rank by rank: the base of the rank plus the local number. On a
/// rank, experts are numbered locally in the order of their logical ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    ranks: usize,
    /// Physical ids of expert `e`: `replicas[replica_offsets[e]..replica_offsets[e + 1]]`, in the
    /// order in which its ranks were given.
    replica_offsets: Vec<u32>,
    replicas: Vec<u32>,
    /// First physical id of every rank, and the total.
    base: Vec<u32>,
    /// Rank of every physical id.
    rank_of: Vec<u32>,
    /// Logical expert of every physical id.
    logical_of: Vec<u32>,
}

/// Physical ids travel as `i32`.
const MAX_PHYSICAL: usize = i32::MAX as usize;

impl Placement {
    /// Consecutive experts on consecutive ranks; the first `experts % ranks` ranks hold one more.
    ///
    /// # Errors
    /// [`KernelError::TooFewExperts`] if `experts < ranks`, [`KernelError::Argument`] if `ranks`
    /// is 0 or `experts` does not fit an `i32`.
    pub fn contiguous(experts: usize, ranks: usize) -> Result<Self, KernelError> {
        check_size(ranks, experts)?;
        if experts < ranks {
            return Err(KernelError::TooFewExperts { experts, ranks });
        }
        let (share, more) = (experts / ranks, experts % ranks);
        let held = (0..ranks).flat_map(|r| std::iter::repeat_n(r, share + usize::from(r < more)));
        let pairs: Vec<(usize, usize)> = held.enumerate().collect();
        Ok(Self::build(ranks, experts, &pairs))
    }

    /// Every logical expert on the ranks listed for it.
    ///
    /// # Errors
    /// [`KernelError::Placement`] if a list is empty, repeats a rank or names one that does not
    /// exist; [`KernelError::Argument`] if there is no rank or no expert, or too many.
    pub fn explicit(ranks: usize, holders: &[Vec<usize>]) -> Result<Self, KernelError> {
        let total = holders.iter().fold(0_usize, |n, list| n.saturating_add(list.len()));
        check_size(ranks, total.max(holders.len()))?;
        let mut last_seen = vec![usize::MAX; ranks];
        let mut pairs = Vec::with_capacity(total);
        for (expert, list) in holders.iter().enumerate() {
            let fail = |fault| Err(KernelError::Placement { expert, fault });
            if list.is_empty() {
                return fail(PlacementFault::NoRank);
            }
            for &rank in list {
                if rank >= ranks {
                    return fail(PlacementFault::RankOutOfRange { rank, ranks });
                }
                if last_seen[rank] == expert {
                    return fail(PlacementFault::RepeatedRank { rank });
                }
                last_seen[rank] = expert;
                pairs.push((expert, rank));
            }
        }
        Ok(Self::build(ranks, holders.len(), &pairs))
    }

    /// `pairs` are (logical expert, rank), experts ascending.
    fn build(ranks: usize, experts: usize, pairs: &[(usize, usize)]) -> Self {
        let mut base = vec![0_u32; ranks + 1];
        let mut replica_offsets = vec![0_u32; experts + 1];
        for &(expert, rank) in pairs {
            base[rank + 1] += 1;
            replica_offsets[expert + 1] += 1;
        }
        for i in 0..ranks {
            base[i + 1] += base[i];
        }
        for i in 0..experts {
            replica_offsets[i + 1] += replica_offsets[i];
        }
        let mut next = base.clone();
        let mut replicas = Vec::with_capacity(pairs.len());
        let mut rank_of = vec![0; pairs.len()];
        let mut logical_of = vec![0; pairs.len()];
        for &(expert, rank) in pairs {
            let physical = next[rank];
            next[rank] += 1;
            replicas.push(physical);
            rank_of[physical as usize] = rank as u32;
            logical_of[physical as usize] = expert as u32;
        }
        Self { ranks, replica_offsets, replicas, base, rank_of, logical_of }
    }

    /// Logical experts.
    pub fn experts(&self) -> usize {
        self.replica_offsets.len() - 1
    }

    /// Physical experts: the logical ones, each counted once per rank that holds it.
    pub fn physical(&self) -> usize {
        self.replicas.len()
    }

    /// Ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Experts that `rank` holds.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn local_experts(&self, rank: usize) -> usize {
        (self.base[rank + 1] - self.base[rank]) as usize
    }

    /// The physical id of the first expert of `rank`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn physical_base(&self, rank: usize) -> usize {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        self.base[rank] as usize
    }

    /// The rank that holds a physical expert and the expert's local number there.
    ///
    /// # Panics
    /// If there is no such physical expert.
    #[inline]
    pub fn owner(&self, physical: usize) -> (usize, usize) {
        let rank = self.rank_of[physical] as usize;
        (rank, physical - self.base[rank] as usize)
    }

    /// The logical expert that a physical one is a copy of.
    ///
    /// # Panics
    /// If there is no such physical expert.
    pub fn logical(&self, physical: usize) -> usize {
        self.logical_of[physical] as usize
    }

    /// The physical ids of a logical expert, in the order in which its ranks were given.
    ///
    /// # Panics
    /// If there is no such expert.
    #[inline]
    pub fn replicas(&self, logical: usize) -> &[u32] {
        let [from, to] = [self.replica_offsets[logical], self.replica_offsets[logical + 1]];
        &self.replicas[from as usize..to as usize]
    }

    /// The physical expert that serves `logical` for token number `token` of `source_rank`:
    /// replica number (source rank + token) mod replicas.
    ///
    /// # Panics
    /// If there is no such expert.
    #[inline]
    pub fn resolve(&self, logical: usize, source_rank: usize, token: usize) -> usize {
        match self.replicas(logical) {
            [only] => *only as usize,
            several => several[source_rank.wrapping_add(token) % several.len()] as usize,
        }
    }

    /// A number that is equal for equal placements and, but for hash collisions, only for those.
    /// It stays the same between builds; ranks compare it.
    pub fn digest(&self) -> u64 {
        // The ranks and the replica lists determine the rest. FNV-1a over 32-bit words, finished
        // as in MurmurHash3.
        let sizes = [self.ranks as u32, self.experts() as u32];
        let words = sizes.iter().chain(&self.base).chain(&self.replica_offsets);
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for &word in words.chain(&self.replicas) {
            hash = (hash ^ u64::from(word)).wrapping_mul(0x0000_0100_0000_01b3);
            hash ^= hash >> 29;
        }
        hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^ (hash >> 33)
    }
}

fn check_size(ranks: usize, experts: usize) -> Result<(), KernelError> {
    for (what, value) in [("ranks", ranks), ("experts", experts)] {
        if value == 0 || value > MAX_PHYSICAL {
            return Err(KernelError::Argument {
                operation: "placement",
                what,
                value,
                allowed: "1..=2147483647",
            });
        }
    }
    Ok(())
}
