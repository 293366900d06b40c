//! The plans that are worth a try.

use ep_kernels::cuda::moe::{CopyPath, SUM_SHAPES};

/// For kernels that copy rows of `row_bytes`: warps per block, and the way through an SM. Among them are
/// some that no device has room for; [`MovePlan::check_rows`] knows which.
///
/// Pieces are whole rows or equal parts of them; warps go up to what shared memory (bulk copies) or
/// registers (loads and stores) allow.
///
/// [`MovePlan::check_rows`]: crate::MovePlan::check_rows
pub fn rows_plans(row_bytes: u32) -> Vec<(u32, CopyPath)> {
    let mut plans = Vec::new();
    let row_bytes = row_bytes.max(16);
    for stages in [2, 3, 4] {
        for (divisor, warps) in [(1, [2, 4, 5, 7]), (2, [4, 8, 10, 14]), (4, [8, 12, 14, 16])] {
            let chunk = (row_bytes / divisor).next_multiple_of(16);
            plans.extend(warps.map(|warps| (warps, CopyPath::Tma { stages, chunk })));
        }
    }
    for unroll in [2, 4, 7, 14] {
        plans.extend([8, 12, 16, 24, 32].map(|warps| (warps, CopyPath::LdSt { unroll })));
    }
    let mut seen = std::collections::HashSet::new();
    plans.retain(|plan| seen.insert(*plan));
    plans
}

/// As [`rows_plans`], for kernels that sum rows.
pub fn sums_plans() -> Vec<(u32, CopyPath)> {
    let mut plans = Vec::new();
    for (vectors, stages) in SUM_SHAPES {
        let chunk = 512 * vectors;
        plans.extend(
            [4, 6, 8, 10, 12, 14, 16].map(|warps| (warps, CopyPath::Tma { stages, chunk })),
        );
    }
    for (unroll, warps) in [(2, [16, 24, 32]), (4, [12, 16, 20]), (7, [8, 10, 12])] {
        plans.extend(warps.map(|warps| (warps, CopyPath::LdSt { unroll })));
    }
    plans
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use ep_kernels::cuda::DeviceProperties;
    use ep_kernels::cuda::moe::MovePlan;

    use super::*;

    #[test]
    fn plans_are_all_different_and_many_fit() {
        let device = DeviceProperties::h200();
        for row_bytes in [1, 16, 128, 2880, 7168, 14336, 28672] {
            for (rows, plans) in [(true, rows_plans(row_bytes)), (false, sums_plans())] {
                let set: HashSet<_> = plans.iter().collect();
                assert_eq!(set.len(), plans.len(), "{row_bytes}");
                let fits = |&&(warps, path): &&(u32, CopyPath)| {
                    let plan = MovePlan::new(16, warps, path);
                    match rows {
                        true => plan.check_rows(8, &device).is_ok(),
                        false => plan.check_sums(8, &device).is_ok(),
                    }
                };
                assert!(plans.iter().filter(fits).count() >= 12, "{row_bytes}");
            }
        }
    }
}
