//! What the lanes of a warp do together.

/// The operations, as src/shim/cuda.hpp numbers them.
const NAMES: [&str; 15] = [
    "__syncwarp",
    "__shfl_sync",
    "__shfl_up_sync",
    "__shfl_down_sync",
    "__shfl_xor_sync",
    "__ballot_sync",
    "__any_sync",
    "__all_sync",
    "__match_any_sync",
    "__reduce_max_sync",
    "__reduce_min_sync",
    "__reduce_add_sync",
    "__reduce_and_sync",
    "__reduce_or_sync",
    "__reduce_xor_sync",
];

/// What a lane gets from one that takes no part.
const GARBAGE: u64 = 0xa5a5_a5a5_a5a5_a5a5;

/// Lanes that have come to the same operation with the same mask.
#[derive(Debug, Clone)]
pub(super) struct Group {
    pub kind: u32,
    pub mask: u32,
    pub arrived: u32,
}

/// A warp of a block.
#[derive(Debug, Clone, Default)]
pub(super) struct Warp {
    /// Lanes that have not exited.
    pub alive: u32,
    /// Lanes that can go on.
    pub ready: u32,
    pub groups: Vec<Group>,
}

impl Warp {
    /// Lane `lane` has come. Returns those that took part if it was the last.
    pub(super) fn arrive(&mut self, lane: u32, kind: u32, mask: u32) -> Option<u32> {
        let same = |group: &Group| group.kind == kind && group.mask == mask;
        let at = self.groups.iter().position(same).unwrap_or_else(|| {
            self.groups.push(Group { kind, mask, arrived: 0 });
            self.groups.len() - 1
        });
        self.groups[at].arrived |= 1 << lane;
        (self.groups[at].arrived == mask & self.alive).then(|| self.groups.swap_remove(at).arrived)
    }

    /// A group that nobody is missing from any more, after a lane has exited.
    pub(super) fn completed(&mut self) -> Option<Group> {
        let at = self.groups.iter().position(|group| group.arrived == group.mask & self.alive)?;
        Some(self.groups.swap_remove(at))
    }
}

/// The name of an operation.
pub(super) fn name(kind: u32) -> &'static str {
    NAMES.get(kind as usize).copied().unwrap_or("unknown")
}

/// What every lane gets where all get the same; `took` lanes took part, with these values.
pub(super) fn common(kind: u32, took: u32, values: &[u64]) -> Option<u64> {
    let lanes = || (0..32usize).filter(|lane| took >> lane & 1 != 0);
    let words = || lanes().map(|lane| values[lane] as u32);
    Some(match kind {
        0 => 0,
        5 => lanes().fold(0, |all, l| all | u64::from(values[l] != 0) << l),
        6 => u64::from(lanes().any(|l| values[l] != 0)),
        7 => u64::from(lanes().all(|l| values[l] != 0)),
        9 => u64::from(words().max().unwrap_or(0)),
        10 => u64::from(words().min().unwrap_or(0)),
        11 => u64::from(words().fold(0, u32::wrapping_add)),
        12 => u64::from(words().fold(u32::MAX, |all, value| all & value)),
        13 => u64::from(words().fold(0, |all, value| all | value)),
        14 => u64::from(words().fold(0, |all, value| all ^ value)),
        _ => return None,
    })
}

/// What `lane` gets where [`common`] knows nothing; `argument` is the lane's own.
pub(super) fn own(kind: u32, lane: u32, took: u32, values: &[u64], argument: u32) -> u64 {
    let lanes = || (0..32usize).filter(|lane| took >> lane & 1 != 0);
    match kind {
        1..=4 => {
            let from = source(kind, lane, argument);
            if took >> from & 1 != 0 { values[from as usize] } else { GARBAGE }
        }
        8 => {
            let mine = values[lane as usize];
            lanes().fold(0, |all, l| all | u64::from(values[l] == mine) << l)
        }
        _ => GARBAGE,
    }
}

/// The lane that a shuffle reads; `argument` is width and source or distance, 16 bits each.
fn source(kind: u32, lane: u32, argument: u32) -> u32 {
    let (width, by) = ((argument >> 16).clamp(1, 32), argument & 0xffff);
    let (first, own) = (lane & !(width - 1), lane & (width - 1));
    match kind {
        1 => first | (by & (width - 1)),
        2 if own >= by => lane - by,
        3 if own + by < width => lane + by,
        4 if own ^ by < width => first | (own ^ by),
        _ => lane,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffles_read_the_lane_they_name() {
        let w = |width: u32, by: u32| width << 16 | by;
        assert_eq!(source(1, 5, w(32, 31)), 31);
        assert_eq!(source(1, 21, w(8, 9)), 17);
        assert_eq!(source(2, 3, w(32, 4)), 3);
        assert_eq!(source(2, 9, w(32, 4)), 5);
        assert_eq!(source(3, 29, w(32, 4)), 29);
        assert_eq!(source(3, 2, w(32, 4)), 6);
        assert_eq!(source(4, 6, w(32, 1)), 7);
    }

    #[test]
    fn results_count_those_who_took_part() {
        let mut values = [0u64; 32];
        (values[1], values[2], values[9]) = (7, 9, 7);
        let took = 1 << 1 | 1 << 2 | 1 << 3;
        let common = |kind| common(kind, took, &values);
        assert_eq!([5, 6, 7].map(common), [Some(0b110), Some(1), Some(0)]);
        assert_eq!([9, 10, 11].map(common), [Some(9), Some(0), Some(16)]);
        assert_eq!([1, 8].map(common), [None, None]);
        assert_eq!(own(8, 1, took, &values, 0), 0b10);
        assert_eq!(own(1, 1, took, &values, 32 << 16 | 2), 9);
        assert_eq!(own(1, 1, took, &values, 32 << 16 | 9), GARBAGE);
    }

    #[test]
    fn the_last_of_those_alive_completes() {
        let mut warp = Warp { alive: 0b111, ready: 0, groups: Vec::new() };
        assert_eq!(warp.arrive(0, 0, u32::MAX), None);
        assert_eq!(warp.arrive(2, 0, u32::MAX), None);
        assert_eq!(warp.arrive(1, 0, u32::MAX), Some(0b111));
        assert_eq!(warp.arrive(0, 5, 0b11), None);
        warp.alive = 0b101;
        assert_eq!(warp.completed().map(|group| group.arrived), Some(1));
    }
}
