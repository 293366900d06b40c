//! What orders are drawn from.

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
#[derive(Debug, Clone)]
pub(super) struct Random(u64);

impl Random {
    /// The numbers of one block, or of a launch, independent of all others'.
    pub(super) fn new(seed: u64, launch: u64, part: u64) -> Random {
        let mut random = Random(seed);
        for number in [launch, part] {
            random.0 = random.next() ^ number;
        }
        random
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `end`, which is not 0.
    pub(super) fn below(&mut self, end: u32) -> u32 {
        (((self.next() >> 32) * u64::from(end)) >> 32) as u32
    }

    /// True once in `times`.
    pub(super) fn once_in(&mut self, times: u32) -> bool {
        self.below(times) == 0
    }

    /// A set bit of a mask that is not 0.
    pub(super) fn bit(&mut self, mask: u32) -> u32 {
        let turn = self.next() as u32 & 31;
        (mask.rotate_right(turn).trailing_zeros() + turn) & 31
    }

    pub(super) fn shuffle<T>(&mut self, list: &mut [T]) {
        for at in (1..list.len()).rev() {
            list.swap(at, self.below(at as u32 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_numbers_again_and_others_elsewhere() {
        let draw = |seed, launch, part| {
            let mut random = Random::new(seed, launch, part);
            [(); 4].map(|()| random.next())
        };
        assert_eq!(draw(1, 2, 3), draw(1, 2, 3));
        assert_ne!(draw(1, 2, 3), draw(1, 3, 2));
        assert_ne!(draw(1, 2, 3), draw(2, 2, 3));
    }

    #[test]
    fn a_bit_is_one_of_the_masks_and_every_one_comes() {
        let mut random = Random::new(7, 0, 0);
        let mut seen = 0u32;
        for _ in 0..1000 {
            seen |= 1 << random.bit(0x8000_4011);
        }
        assert_eq!(seen, 0x8000_4011);
    }
}
