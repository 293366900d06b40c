//! How the kernels that move rows are launched.

use crate::cuda::device::DeviceProperties;
use crate::cuda::error::{CudaError, invalid};
use crate::cuda::launch::LaunchAttributes;

/// The way bytes take through an SM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CopyPath {
    /// Bulk copies through shared memory (compute capability 9.0 and later): per warp a ring of
    /// `stages` pieces of at most `chunk` bytes.
    Tma {
        /// Pieces in flight per warp.
        stages: u32,
        /// Bytes of a piece.
        chunk: u32,
    },
    /// Loads and stores of 16 bytes, `unroll` of them in flight per thread.
    LdSt {
        /// Vectors in flight.
        unroll: u32,
    },
}

/// A launch of a kernel that moves rows. It never changes results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MovePlan {
    /// Blocks; of more than one per SM only as many run as fit.
    pub blocks: u32,
    /// Warps per block.
    pub warps: u32,
    /// The way bytes take.
    pub path: CopyPath,
    /// Attributes of the launch. None is needed.
    pub attributes: LaunchAttributes,
}

/// The unrolls there are kernels for.
pub const UNROLLS: [u32; 5] = [1, 2, 4, 7, 14];
/// The (vectors, stages) of 512-byte vectors per lane there are summing kernels for.
pub const SUM_SHAPES: [(u32, u32); 7] = [(2, 4), (4, 6), (7, 3), (7, 4), (7, 6), (14, 2), (14, 3)];
pub(super) const ROW_STAGES: [u32; 3] = [2, 3, 4];
/// Threads that a summing kernel with so many vectors in flight may have.
const SUM_THREADS: [u32; 5] = [1024, 1024, 640, 384, 256];

/// What a kernel does with rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mover {
    /// One read, several writes.
    Rows,
    /// Several reads, one write.
    Sums,
}

impl MovePlan {
    /// A plain launch.
    pub const fn new(blocks: u32, warps: u32, path: CopyPath) -> Self {
        Self { blocks, warps, path, attributes: LaunchAttributes::plain() }
    }

    /// One read, several writes, for up to `tokens` rows of `row_bytes` on `sms` SMs: what was best on an
    /// H200 with two ranks. Bulk copies need the fewest SMs and suit small rows; where SMs saturate the
    /// link and rows are large, loads and stores are a little faster, and more blocks only crowd the
    /// link: 24 took 17 % longer than 16
    /// (`bench/results/h200x2/copy-bf16.json`). Few rows are cut, so that all warps have some.
    pub fn rows(row_bytes: u32, tokens: usize, sms: u32, device: &DeviceProperties) -> Self {
        let old = device.capability < (9, 0);
        let few = tokens < 32 * sms as usize;
        if old || (sms >= 16 && row_bytes > 8 * 1024 && !few) {
            return Self::new(if old { sms } else { 16 }, 16, CopyPath::LdSt { unroll: 4 });
        }
        let most = if few { 3584 } else { 8 * 1024 };
        let chunk = row_bytes.div_ceil(row_bytes.div_ceil(most).max(1));
        let chunk = chunk.next_multiple_of(16).max(16);
        let stages = if sms >= 16 && !few { 2 } else { 3 };
        let warps = match chunk {
            _ if few => 16,
            4096.. if row_bytes <= 8 * 1024 => 7,
            4096.. => 10,
            _ => 16,
        };
        let room = device.shared_per_block.saturating_sub(12 * 1024);
        Self::new(sms, warps.min((room / (stages * chunk)).max(1)), CopyPath::Tma { stages, chunk })
    }

    /// As [`MovePlan::rows`], for SMs beside which others compute.
    ///
    /// There it takes more bytes in flight to fill the link: beside a GEMM, with which they share the clock
    /// and the memory, bulk copies of whole rows of 14336 bytes by 18 blocks took 371 us, the loads and
    /// stores that are best alone 418; 24 blocks of either were no faster
    /// (`bench/results/h200x2/unroll.json`). With 13 to 17 SMs nothing was measured.
    pub fn rows_beside_compute(
        row_bytes: u32,
        tokens: usize,
        sms: u32,
        device: &DeviceProperties,
    ) -> Self {
        let alone = Self::rows(row_bytes, tokens, sms, device);
        if !matches!(alone.path, CopyPath::LdSt { .. }) || device.capability < (9, 0) {
            return alone;
        }
        let (stages, most) = (3, 14 * 1024);
        let chunk = row_bytes.div_ceil(row_bytes.div_ceil(most)).next_multiple_of(16);
        let room = device.shared_per_block.saturating_sub(12 * 1024);
        let warps = (room / (stages * chunk)).clamp(1, 4);
        Self::new(sms.min(18), warps, CopyPath::Tma { stages, chunk })
    }

    /// Several reads, one write, as [`MovePlan::rows`].
    pub fn sums(row_bytes: u32, sms: u32, device: &DeviceProperties) -> Self {
        if device.capability < (9, 0) {
            return Self::new(sms, 20, CopyPath::LdSt { unroll: 4 });
        }
        let (vectors, stages, warps) = match row_bytes {
            ..=1024 => (2, 4, 16),
            // Few SMs are limited by what they have in flight, and by what that costs in bookkeeping.
            _ if sms < 12 => (7, 4, 14),
            _ => (7, 4, 16),
        };
        Self::new(sms, warps, CopyPath::Tma { stages, chunk: 512 * vectors })
    }

    /// With fewer warps where the table of `ranks` addresses leaves no room in a block of `device` for all.
    pub fn fitted(mut self, ranks: usize, device: &DeviceProperties) -> Self {
        while self.warps > 1 && self.shared_bytes(ranks) > device.shared_per_block as usize {
            self.warps -= 1;
        }
        self
    }

    /// Bytes of dynamic shared memory, with a table of `ranks` addresses.
    pub fn shared_bytes(&self, ranks: usize) -> usize {
        // Addresses, first experts and numbers of experts.
        let table = 16 * ranks.max(2);
        match self.path {
            CopyPath::Tma { stages, chunk } => {
                // Behind pieces and barriers, what a sum knows of the tokens ahead.
                let ahead = 32 * self.warps as usize;
                (self.warps * stages) as usize * (chunk as usize + 8) + table + ahead
            }
            CopyPath::LdSt { .. } => table,
        }
    }

    /// Whether it can move rows, from one place to several, on `device` in a group of `ranks`.
    ///
    /// # Errors
    /// What does not fit.
    pub fn check_rows(&self, ranks: usize, device: &DeviceProperties) -> Result<(), CudaError> {
        self.validate(Mover::Rows, ranks, device)
    }

    /// Whether it can sum rows on `device` in a group of `ranks`.
    ///
    /// # Errors
    /// What does not fit.
    pub fn check_sums(&self, ranks: usize, device: &DeviceProperties) -> Result<(), CudaError> {
        self.validate(Mover::Sums, ranks, device)
    }

    pub(super) fn validate(
        &self,
        mover: Mover,
        ranks: usize,
        device: &DeviceProperties,
    ) -> Result<(), CudaError> {
        const OP: &str = "move plan";
        if self.blocks == 0 || self.warps == 0 || self.warps > 32 {
            let text =
                format!("{} blocks of {} warps; at least one of 1 to 32", self.blocks, self.warps);
            return invalid(OP, text);
        }
        match (self.path, mover) {
            (CopyPath::Tma { .. }, _) if device.capability < (9, 0) => invalid(
                OP,
                format!("bulk copies need compute capability 9.0, {} has less", device.name),
            ),
            (CopyPath::Tma { stages, chunk }, Mover::Rows)
                if !ROW_STAGES.contains(&stages) || chunk == 0 || !chunk.is_multiple_of(16) =>
            {
                invalid(
                    OP,
                    format!("{stages} stages of {chunk} bytes; {ROW_STAGES:?} of a multiple of 16"),
                )
            }
            (CopyPath::Tma { stages, chunk }, Mover::Sums)
                if !SUM_SHAPES.contains(&(chunk / 512, stages)) || !chunk.is_multiple_of(512) =>
            {
                invalid(
                    OP,
                    format!(
                        "{stages} stages of {chunk} bytes; there are (chunk / 512, stages) of {SUM_SHAPES:?}"
                    ),
                )
            }
            (CopyPath::Tma { .. }, _) if self.warps > 16 => invalid(
                OP,
                format!("{} warps; a block that copies in bulk has up to 16", self.warps),
            ),
            (CopyPath::Tma { stages, chunk }, Mover::Sums)
                if self.warps > sum_warps(chunk, stages) =>
            {
                let most = sum_warps(chunk, stages);
                invalid(
                    OP,
                    format!(
                        "{} warps; with {stages} stages of {chunk} bytes up to {most}",
                        self.warps
                    ),
                )
            }
            (CopyPath::LdSt { unroll }, _) if !UNROLLS.contains(&unroll) => {
                invalid(OP, format!("unroll {unroll}; there are {UNROLLS:?}"))
            }
            (CopyPath::LdSt { unroll: 7.. }, Mover::Rows) if self.warps > 16 => {
                invalid(OP, format!("{} warps; with unroll 7 or more up to 16", self.warps))
            }
            (CopyPath::LdSt { unroll }, Mover::Sums) if 32 * self.warps > most(unroll) => invalid(
                OP,
                format!("{} warps; with unroll {unroll} up to {}", self.warps, most(unroll) / 32),
            ),
            _ => {
                let (need, have) = (self.shared_bytes(ranks), device.shared_per_block as usize);
                match need <= have {
                    true => Ok(()),
                    false => {
                        invalid(OP, format!("{need} bytes of shared memory, a block has {have}"))
                    }
                }
            }
        }
    }
}

/// Warps that the summing kernel of a shape may have.
fn sum_warps(chunk: u32, stages: u32) -> u32 {
    match (chunk / 512, stages) {
        (14, _) => 8,
        (7, 6) => 10,
        _ => 16,
    }
}

fn most(unroll: u32) -> u32 {
    UNROLLS.iter().position(|&u| u == unroll).map_or(0, |at| SUM_THREADS[at])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn a100() -> DeviceProperties {
        DeviceProperties {
            capability: (8, 0),
            sms: 108,
            shared_per_block: 163 << 10,
            ..DeviceProperties::h200()
        }
    }

    proptest! {
        /// Whatever the rows, tokens and SMs: it can be launched, on no more SMs than it was given.
        #[test]
        fn what_ships_can_be_launched(
            quads in 1..4_000u32,
            tokens in 0..30_000usize,
            sms in 1..=132u32,
            ranks in 1..2000usize,
        ) {
            let row_bytes = 16 * quads;
            for device in [DeviceProperties::h200(), a100()] {
                let sums = MovePlan::sums(row_bytes, sms, &device).fitted(ranks, &device);
                prop_assert_eq!(sums.check_sums(ranks, &device), Ok(()));
                prop_assert_eq!(sums.blocks, sms);
                for rows in [
                    MovePlan::rows(row_bytes, tokens, sms, &device),
                    MovePlan::rows_beside_compute(row_bytes, tokens, sms, &device),
                ] {
                    let rows = rows.fitted(ranks, &device);
                    prop_assert_eq!(rows.check_rows(ranks, &device), Ok(()));
                    prop_assert!((1..=sms).contains(&rows.blocks));
                }
            }
        }
    }

    /// The best points of the committed sweeps, for the rows that they were measured with.
    #[test]
    fn what_ships_for_an_h200_is_what_was_measured() {
        let device = DeviceProperties::h200();
        let tma = |stages, chunk| CopyPath::Tma { stages, chunk };
        let alone = |sms| MovePlan::rows(14336, 8192, sms, &device);
        assert_eq!(alone(8), MovePlan::new(8, 10, tma(3, 7168)));
        assert_eq!(alone(24), MovePlan::new(16, 16, CopyPath::LdSt { unroll: 4 }));
        let beside = |sms| MovePlan::rows_beside_compute(14336, 8192, sms, &device);
        assert_eq!(beside(12), alone(12));
        assert_eq!(beside(24), MovePlan::new(18, 4, tma(3, 14336)));
    }
}
