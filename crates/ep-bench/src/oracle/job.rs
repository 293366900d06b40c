//! What the oracle is given: every rank's tokens, and where experts live.

use thiserror::Error;

/// What a dispatched row carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Payload {
    /// `hidden` bfloat16 numbers.
    Bf16,
    /// `hidden` binary16 numbers.
    F16,
    /// `hidden` binary32 numbers.
    F32,
    /// `hidden` e4m3 bytes with one f32 scale per 128 of them (the last block may be partial).
    Fp8F32,
    /// `hidden` e4m3 bytes with one UE8M0 byte per 128 of them (the last block may be partial).
    Fp8Ue8m0,
    /// Bytes that mean nothing here, with auxiliary bytes in the scales' place.
    Opaque {
        /// Bytes of a row.
        row_bytes: usize,
        /// Bytes beside it.
        aux_bytes: usize,
    },
}

impl Payload {
    /// Bytes of one row.
    pub fn payload_bytes(self, hidden: usize) -> usize {
        match self {
            Payload::Bf16 | Payload::F16 => 2 * hidden,
            Payload::F32 => 4 * hidden,
            Payload::Fp8F32 | Payload::Fp8Ue8m0 => hidden,
            Payload::Opaque { row_bytes, .. } => row_bytes,
        }
    }

    /// Bytes of one row's scales, or of its auxiliary part.
    pub fn scale_bytes(self, hidden: usize) -> usize {
        match self {
            Payload::Bf16 | Payload::F16 | Payload::F32 => 0,
            Payload::Fp8F32 => 4 * hidden.div_ceil(128),
            Payload::Fp8Ue8m0 => hidden.div_ceil(128),
            Payload::Opaque { aux_bytes, .. } => aux_bytes,
        }
    }
}

/// Where experts live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Experts in order, the same number on every rank; of E mod R left over, one more on each of
    /// the first ranks. Needs at least one expert per rank.
    Contiguous,
    /// Per logical expert the ranks that hold it. A token of source rank `s` with index `t` goes
    /// to replica `(s + t) mod replicas`, in the order given. A rank numbers its experts by
    /// logical id.
    Explicit(Vec<Vec<usize>>),
}

/// One rank's tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankInput {
    /// How many.
    pub tokens: usize,
    /// `[tokens * topk]` expert ids; -1 is skipped.
    pub ids: Vec<i64>,
    /// `[tokens * topk]`; 1.0 everywhere if absent.
    pub weights: Option<Vec<f32>>,
    /// One row per token.
    pub payload: Vec<Vec<u8>>,
    /// One row of scales per token, empty rows where the payload has none.
    pub scales: Vec<Vec<u8>>,
}

/// A whole job: all ranks at once.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Number of ranks.
    pub ranks: usize,
    /// Number of logical experts.
    pub experts: usize,
    /// Elements of a row.
    pub hidden: usize,
    /// Experts per token.
    pub topk: usize,
    /// What a row carries.
    pub payload: Payload,
    /// Where experts live.
    pub placement: Placement,
    /// Ids count (rank, local expert) rank by rank instead of naming logical experts.
    pub physical_ids: bool,
    /// Rows of an expert are padded to a multiple of this.
    pub alignment: usize,
    /// `[ranks]`.
    pub inputs: Vec<RankInput>,
}

/// Why a job has no result.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Verdict {
    /// Sizes that do not fit together.
    #[error("shape: {0}")]
    Shape(String),
    /// Experts that cannot be placed so.
    #[error("placement: {0}")]
    Placement(String),
    /// An id that names no expert.
    #[error("rank {rank}, token {token}, k {k}: id {id} is outside -1..{limit}")]
    OutOfRange {
        /// Source rank.
        rank: usize,
        /// Token on it.
        token: usize,
        /// Position among its ids.
        k: usize,
        /// The id.
        id: i64,
        /// One past the largest valid id.
        limit: usize,
    },
    /// An id that occurs twice in one token.
    #[error("rank {rank}, token {token}: id {id} occurs twice")]
    Duplicate {
        /// Source rank.
        rank: usize,
        /// Token on it.
        token: usize,
        /// The id.
        id: i64,
    },
    /// A rank receives more rows than allowed.
    #[error("rank {rank} receives {needed} rows, at most {max} are allowed")]
    TooManyRows {
        /// The lowest rank with the most rows.
        rank: usize,
        /// Its rows.
        needed: usize,
        /// The limit.
        max: usize,
    },
    /// A rank's expert-major layout has more rows, padding included, than allowed.
    #[error("rank {rank} needs {needed} expert rows, at most {max} are allowed")]
    TooManyExpertRows {
        /// The lowest rank with the most rows.
        rank: usize,
        /// Its rows.
        needed: usize,
        /// The limit.
        max: usize,
    },
}

/// Where an entry of `ids` goes: rank and local expert, `None` for -1.
pub(super) type Destination = Option<(usize, usize)>;

impl Job {
    /// Per rank the logical experts it holds, by local number.
    ///
    /// # Errors
    /// [`Verdict::Placement`] if experts cannot be placed so.
    pub fn local_experts(&self) -> Result<Vec<Vec<usize>>, Verdict> {
        let refuse = |why: String| Err(Verdict::Placement(why));
        match &self.placement {
            Placement::Contiguous if self.experts < self.ranks => {
                refuse(format!("{} experts for {} ranks", self.experts, self.ranks))
            }
            Placement::Contiguous => {
                let (each, more) = (self.experts / self.ranks, self.experts % self.ranks);
                let mut next = 0..self.experts;
                let held = |rank| each + usize::from(rank < more);
                Ok((0..self.ranks).map(|rank| next.by_ref().take(held(rank)).collect()).collect())
            }
            Placement::Explicit(map) => {
                if map.len() != self.experts {
                    return refuse(format!("{} entries for {} experts", map.len(), self.experts));
                }
                for (expert, ranks) in map.iter().enumerate() {
                    let mut sorted = ranks.clone();
                    sorted.sort_unstable();
                    sorted.dedup();
                    if ranks.is_empty()
                        || sorted.len() != ranks.len()
                        || sorted.last() >= Some(&self.ranks)
                    {
                        return refuse(format!(
                            "expert {expert} on ranks {ranks:?} of {}",
                            self.ranks
                        ));
                    }
                }
                let on = |rank| (0..self.experts).filter(|e| map[*e].contains(&rank)).collect();
                Ok((0..self.ranks).map(on).collect())
            }
        }
    }

    /// Sizes that fit together; a shape without a fault here may still have bad ids.
    pub(super) fn check_shape(&self) -> Result<(), Verdict> {
        let refuse = |why: String| Err(Verdict::Shape(why));
        if self.ranks == 0 || self.hidden == 0 || self.alignment == 0 {
            return refuse("ranks, hidden and alignment are at least 1".into());
        }
        if self.topk == 0 || self.topk > self.experts {
            return refuse(format!("top-{} of {} experts", self.topk, self.experts));
        }
        let (payload, scales) =
            (self.payload.payload_bytes(self.hidden), self.payload.scale_bytes(self.hidden));
        if payload == 0 || !payload.is_multiple_of(16) {
            return refuse(format!("a row of {payload} bytes is no multiple of 16"));
        }
        if self.inputs.len() != self.ranks {
            return refuse(format!("{} inputs for {} ranks", self.inputs.len(), self.ranks));
        }
        for (rank, input) in self.inputs.iter().enumerate() {
            let entries = input.tokens * self.topk;
            let fits = input.ids.len() == entries
                && input.weights.as_ref().is_none_or(|w| w.len() == entries)
                && input.payload.len() == input.tokens
                && input.payload.iter().all(|row| row.len() == payload)
                && input.scales.len() == input.tokens
                && input.scales.iter().all(|row| row.len() == scales);
            if !fits {
                return refuse(format!(
                    "rank {rank}: a length does not fit {} tokens",
                    input.tokens
                ));
            }
        }
        Ok(())
    }

    /// Per rank, where each entry of its ids goes; the first bad id by rank, token and k is the
    /// verdict.
    pub(super) fn routes(&self, local: &[Vec<usize>]) -> Result<Vec<Vec<Destination>>, Verdict> {
        let physical: Vec<(usize, usize)> = (0..self.ranks)
            .flat_map(|rank| (0..local[rank].len()).map(move |l| (rank, l)))
            .collect();
        let limit = if self.physical_ids { physical.len() } else { self.experts };
        let mut routes = Vec::new();
        for (rank, input) in self.inputs.iter().enumerate() {
            let mut entries = Vec::new();
            for (at, &id) in input.ids.iter().enumerate() {
                let (token, k) = (at / self.topk, at % self.topk);
                if id < -1 || id >= limit as i64 {
                    return Err(Verdict::OutOfRange { rank, token, k, id, limit });
                }
                if id != -1 && input.ids[at - k..at].contains(&id) {
                    return Err(Verdict::Duplicate { rank, token, id });
                }
                entries.push(match id {
                    -1 => None,
                    id if self.physical_ids => Some(physical[id as usize]),
                    id => Some(self.replica(local, id as usize, rank, token)),
                });
            }
            routes.push(entries);
        }
        Ok(routes)
    }

    fn replica(
        &self,
        local: &[Vec<usize>],
        expert: usize,
        source: usize,
        token: usize,
    ) -> (usize, usize) {
        let holds = |rank: &usize| local[*rank].contains(&expert);
        let rank = match &self.placement {
            Placement::Contiguous => (0..self.ranks).find(holds).expect("every expert is placed"),
            Placement::Explicit(map) => map[expert][(source + token) % map[expert].len()],
        };
        let number = local[rank].iter().position(|e| *e == expert).expect("the rank holds it");
        (rank, number)
    }
}
