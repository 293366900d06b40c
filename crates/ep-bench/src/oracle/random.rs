//! Odd jobs from a seed.

use super::float::Float;
use super::job::{Job, Payload, Placement, RankInput, Verdict};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// How a job places its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementSpec {
    /// In order; the job gets at least one expert per rank.
    Contiguous,
    /// Each expert on 1 to `replicas` random ranks; a rank may have none.
    Explicit {
        /// At least 1.
        replicas: usize,
    },
}

/// Which experts a job's tokens go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// All alike.
    Uniform,
    /// Mostly the first ones.
    Skewed,
    /// Those of this rank (modulo ranks), the rest of the k being -1.
    OneRank(usize),
}

/// A job in a few numbers: small to print and to shrink, and the same job every time. Any numbers
/// make a valid job: [`JobSpec::build`] raises or lowers what does not fit.
#[derive(Clone, Debug, PartialEq)]
pub struct JobSpec {
    /// At least 1.
    pub ranks: usize,
    /// Logical experts.
    pub experts: usize,
    /// At most the number of experts.
    pub topk: usize,
    /// Hidden size in units of 8 elements, 16 for fp8, so that a row of any float type is a
    /// multiple of 16 bytes; an opaque row has 16 bytes per unit.
    pub units: usize,
    /// What a row carries; for [`Payload::Opaque`] the row's bytes come from `units`.
    pub payload: Payload,
    /// Where experts live.
    pub placement: PlacementSpec,
    /// See [`Job::physical_ids`].
    pub physical_ids: bool,
    /// See [`Job::alignment`].
    pub alignment: usize,
    /// Tokens per rank; ranks beyond its end have none.
    pub tokens: Vec<usize>,
    /// Share of ids replaced by -1.
    pub masked_percent: u64,
    /// Which experts.
    pub routing: Routing,
    /// Whether tokens have weights.
    pub weights: bool,
    /// Of ids, weights and payload.
    pub seed: u64,
}

impl JobSpec {
    /// The odd job number `seed`: 1 to 9 ranks with unequal and zero tokens, few or no experts on a
    /// rank, replicas, any k, any payload, masked ids.
    pub fn random(seed: u64) -> JobSpec {
        let mut rng = Dice::new(seed);
        let ranks = rng.between(1, 9);
        let experts = rng.between(1, 24);
        let topk =
            if rng.one_in(4) { rng.between(1, experts) } else { rng.between(1, experts.min(8)) };
        let tokens = match rng.below(4) {
            0 => vec![rng.below(12); ranks],
            1 => (0..ranks).map(|_| if rng.one_in(2) { 0 } else { rng.below(20) }).collect(),
            _ => (0..ranks).map(|_| rng.below(12)).collect(),
        };
        JobSpec {
            ranks,
            experts,
            topk,
            units: rng.between(1, 20),
            payload: match rng.below(6) {
                0 => Payload::Bf16,
                1 => Payload::F16,
                2 => Payload::F32,
                3 => Payload::Fp8F32,
                4 => Payload::Fp8Ue8m0,
                _ => Payload::Opaque { row_bytes: 0, aux_bytes: rng.below(40) },
            },
            placement: match rng.below(2) {
                0 => PlacementSpec::Contiguous,
                _ => PlacementSpec::Explicit { replicas: rng.between(1, 4) },
            },
            physical_ids: rng.one_in(3),
            alignment: [1, 1, 2, 3, 8, 64, 128][rng.below(7)],
            tokens,
            masked_percent: [0, 0, 10, 50, 95, 100][rng.below(6)],
            routing: match rng.below(4) {
                0 => Routing::Skewed,
                1 => Routing::OneRank(rng.below(ranks)),
                _ => Routing::Uniform,
            },
            weights: !rng.one_in(3),
            seed: rng.next(),
        }
    }

    /// The job.
    pub fn build(&self) -> Job {
        let mut rng = Dice::new(self.seed);
        let ranks = self.ranks.max(1);
        let mut experts = self.experts.max(1);
        let placement = match self.placement {
            PlacementSpec::Contiguous => {
                experts = experts.max(ranks);
                Placement::Contiguous
            }
            PlacementSpec::Explicit { replicas } => Placement::Explicit(
                (0..experts)
                    .map(|_| {
                        let count = rng.between(1, replicas.clamp(1, ranks));
                        rng.distinct((0..ranks).collect(), count)
                    })
                    .collect(),
            ),
        };
        let units = self.units.max(1);
        let payload = match self.payload {
            Payload::Opaque { aux_bytes, .. } => {
                Payload::Opaque { row_bytes: 16 * units, aux_bytes }
            }
            other => other,
        };
        let mut job = Job {
            ranks,
            experts,
            hidden: match payload {
                Payload::Fp8F32 | Payload::Fp8Ue8m0 => 16 * units,
                _ => 8 * units,
            },
            topk: self.topk.clamp(1, experts),
            payload,
            placement,
            physical_ids: self.physical_ids,
            alignment: self.alignment.max(1),
            inputs: Vec::new(),
        };
        let pool = self.pool(&job);
        job.inputs = (0..ranks)
            .map(|rank| {
                let tokens = self.tokens.get(rank).copied().unwrap_or(0);
                self.input(&job, &pool, tokens, &mut rng)
            })
            .collect();
        job
    }

    /// The ids tokens choose from.
    fn pool(&self, job: &Job) -> Vec<i64> {
        let local = job.local_experts().expect("the placement was made to fit");
        let ids: Vec<(usize, i64)> = if job.physical_ids {
            let ranks = (0..job.ranks).flat_map(|rank| vec![rank; local[rank].len()]);
            ranks.zip(0..).collect()
        } else {
            let logical = (0..job.ranks).flat_map(|r| local[r].iter().map(move |e| (r, *e as i64)));
            logical.collect()
        };
        let keep = |rank: usize| match self.routing {
            Routing::OneRank(only) => rank == only % job.ranks,
            Routing::Uniform | Routing::Skewed => true,
        };
        let mut pool: Vec<i64> =
            ids.into_iter().filter(|(rank, _)| keep(*rank)).map(|(_, id)| id).collect();
        pool.sort_unstable();
        pool.dedup();
        pool
    }

    fn input(&self, job: &Job, pool: &[i64], tokens: usize, rng: &mut Dice) -> RankInput {
        let entries = tokens * job.topk;
        let ids = (0..tokens).flat_map(|_| self.token_ids(job, pool, rng)).collect();
        RankInput {
            tokens,
            ids,
            weights: self.weights.then(|| (0..entries).map(|_| rng.weight()).collect()),
            payload: (0..tokens).map(|_| random_payload(job, rng)).collect(),
            scales: (0..tokens).map(|_| rng.bytes(job.payload.scale_bytes(job.hidden))).collect(),
        }
    }

    fn token_ids(&self, job: &Job, pool: &[i64], rng: &mut Dice) -> Vec<i64> {
        let mut ids = match self.routing {
            // The first few experts, with now and then one of the others.
            Routing::Skewed => {
                let head = pool[..pool.len().min(job.topk + 1)].to_vec();
                let mut head = rng.distinct(head, job.topk);
                let other = pool[rng.below(pool.len())];
                if rng.one_in(4) && !head.contains(&other) {
                    head[0] = other;
                }
                head
            }
            Routing::Uniform | Routing::OneRank(_) => rng.distinct(pool.to_vec(), job.topk),
        };
        ids.resize(job.topk, -1);
        // Shuffled, so that skipped entries are anywhere.
        (rng.distinct(ids, job.topk).into_iter())
            .map(|id| if (rng.below(100) as u64) < self.masked_percent { -1 } else { id })
            .collect()
    }
}

fn random_payload(job: &Job, rng: &mut Dice) -> Vec<u8> {
    match job.payload {
        Payload::Bf16 => rng.row(job.hidden, Float::Bf16),
        Payload::F16 => rng.row(job.hidden, Float::F16),
        Payload::F32 => rng.row(job.hidden, Float::F32),
        other => rng.bytes(other.payload_bytes(job.hidden)),
    }
}

/// `rows` rows of `hidden` numbers: ordinary ones of mixed sizes and signs, with zeros of both
/// signs, subnormals, the largest numbers, infinities and NaN here and there.
pub fn random_rows(seed: u64, rows: usize, hidden: usize, dtype: Float) -> Vec<Vec<u8>> {
    let mut rng = Dice::new(seed);
    (0..rows).map(|_| rng.row(hidden, dtype)).collect()
}

/// A fault in one id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spoil {
    /// At least the number of experts.
    TooLarge,
    /// Below -1.
    TooSmall,
    /// The same id twice in a token.
    Duplicate,
}

/// Puts one fault into `job` and returns its verdict; `None`, and no change, where there is no
/// place for it: no tokens, or a duplicate with k = 1.
pub fn spoil(job: &mut Job, fault: Spoil, seed: u64) -> Option<Verdict> {
    let local = job.local_experts().ok()?;
    let physical = local.iter().map(Vec::len).sum();
    let limit = if job.physical_ids { physical } else { job.experts };
    let mut rng = Dice::new(seed);
    let busy: Vec<usize> = (0..job.ranks).filter(|rank| job.inputs[*rank].tokens > 0).collect();
    if busy.is_empty() || (fault == Spoil::Duplicate && job.topk == 1) {
        return None;
    }
    let rank = busy[rng.below(busy.len())];
    let input = &mut job.inputs[rank];
    let (token, k) = (rng.below(input.tokens), rng.below(job.topk));
    let ids = &mut input.ids[token * job.topk..(token + 1) * job.topk];
    let id = match fault {
        Spoil::TooLarge => {
            limit as i64 + [0, 1, 1000, i64::from(i32::MAX) - limit as i64][rng.below(4)]
        }
        Spoil::TooSmall => [-2, -3, i64::from(i32::MIN)][rng.below(3)],
        Spoil::Duplicate => {
            let id = ids.iter().copied().find(|id| *id != -1).unwrap_or(0);
            let from = ids.iter().position(|other| *other == id).unwrap_or(0);
            ids[from] = id;
            ids[(from + 1 + rng.below(ids.len() - 1)) % ids.len()] = id;
            return Some(Verdict::Duplicate { rank, token, id });
        }
    };
    ids[k] = id;
    Some(Verdict::OutOfRange { rank, token, k, id, limit })
}

/// The generator with the few draws used here; their slight bias is of no concern.
struct Dice(ChaCha8Rng);

impl Dice {
    fn new(seed: u64) -> Dice {
        Dice(ChaCha8Rng::seed_from_u64(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn between(&mut self, first: usize, last: usize) -> usize {
        first + self.below(last + 1 - first)
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Up to `count` of `from`, in random order.
    fn distinct<T>(&mut self, mut from: Vec<T>, count: usize) -> Vec<T> {
        let count = count.min(from.len());
        for at in 0..count {
            let pick = self.between(at, from.len() - 1);
            from.swap(at, pick);
        }
        from.truncate(count);
        from
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.0.fill_bytes(&mut bytes);
        bytes
    }

    /// In 0..1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    fn weight(&mut self) -> f32 {
        match self.below(32) {
            0 => [0.0, -0.0, -1.5, 1e-40, 3e38][self.below(5)],
            _ => self.unit(),
        }
    }

    fn row(&mut self, hidden: usize, dtype: Float) -> Vec<u8> {
        let mut row = Vec::with_capacity(hidden * dtype.size());
        for _ in 0..hidden {
            // One draw per element: rows are long.
            let draw = self.next();
            let special = (draw >> 7) as usize;
            let value = match draw % 128 {
                0 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX][special % 4],
                1 => [0.0, -0.0, 1e-40, -3e-6, 6e4, -65504.0, 1e-38, 3e38][special % 8],
                // 24 random bits in -1..1, then 2^-8 to 2^7.
                _ => {
                    let fraction = ((draw >> 40) as i32 - (1 << 23)) as f32 / (1 << 23) as f32;
                    fraction * f32::from_bits((119 + (draw >> 7) as u32 % 16) << 23)
                }
            };
            dtype.push(&mut row, value);
        }
        row
    }
}
