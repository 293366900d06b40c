//! Random numbers that every rank can reproduce.
//!
//! One ChaCha8 key per seed and one of its 2⁶⁴ streams per (purpose, rank): no rank has to draw
//! another's numbers to know its own, and the values never depend on the platform.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng};

/// What the numbers are for; different purposes never share a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    Tokens = 1,
    Ids = 2,
    Weights = 3,
    Payload = 4,
    Scales = 5,
    Outputs = 6,
    Popularity = 7,
}

/// A reproducible generator.
pub(crate) struct Rng(ChaCha8Rng);

impl Rng {
    pub(crate) fn new(seed: u64, purpose: Purpose, rank: usize) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(((purpose as u64) << 48) | rank as u64);
        Self(rng)
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        self.0.fill_bytes(bytes);
    }

    /// Uniform in `0..n`, `n > 0`, by the widening multiplication (the bias is below n / 2⁶⁴).
    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.0.next_u64()) * n as u128) >> 64) as usize
    }

    /// Uniform in (0, 1), never an end.
    pub(crate) fn open01(&mut self) -> f64 {
        ((self.0.next_u64() >> 12) as f64 + 0.5) * (1.0 / (1u64 << 52) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_reproducible_and_differ() {
        let draw = |seed, purpose, rank| {
            let mut rng = Rng::new(seed, purpose, rank);
            (0..8).map(|_| rng.below(1 << 30)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1, Purpose::Ids, 3), draw(1, Purpose::Ids, 3));
        assert_ne!(draw(1, Purpose::Ids, 3), draw(1, Purpose::Ids, 4));
        assert_ne!(draw(1, Purpose::Ids, 3), draw(1, Purpose::Weights, 3));
        assert_ne!(draw(1, Purpose::Ids, 3), draw(2, Purpose::Ids, 3));
    }

    #[test]
    fn below_covers_its_range_evenly() {
        let mut rng = Rng::new(7, Purpose::Ids, 0);
        let mut seen = [0u32; 10];
        for _ in 0..100_000 {
            seen[rng.below(10)] += 1;
        }
        assert!(seen.iter().all(|&n| (9_500..10_500).contains(&n)), "{seen:?}");
    }

    #[test]
    fn open01_stays_inside() {
        let mut rng = Rng::new(7, Purpose::Ids, 0);
        assert!((0..100_000).map(|_| rng.open01()).all(|x| x > 0.0 && x < 1.0));
    }
}
