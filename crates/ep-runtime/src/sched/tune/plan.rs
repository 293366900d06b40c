//! Launch plans as they are written down.

use ep_kernels::cuda::moe::{CopyPath, MovePlan};
use serde::{Deserialize, Serialize};

/// A [`MovePlan`] in a [`TuneCache`](super::TuneCache). Attributes of the launch are not kept: a search
/// tries none, since none is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredPlan {
    blocks: u32,
    warps: u32,
    path: StoredPath,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoredPath {
    Tma { stages: u32, chunk: u32 },
    LdSt { unroll: u32 },
}

impl StoredPlan {
    /// `None` for a path that has no written form.
    pub fn new(plan: &MovePlan) -> Option<Self> {
        let path = match plan.path {
            CopyPath::Tma { stages, chunk } => StoredPath::Tma { stages, chunk },
            CopyPath::LdSt { unroll } => StoredPath::LdSt { unroll },
            _ => return None,
        };
        Some(Self { blocks: plan.blocks, warps: plan.warps, path })
    }

    /// The plan. What a file says is not believed: `Ep::retune` checks it as any other.
    pub fn plan(&self) -> MovePlan {
        let path = match self.path {
            StoredPath::Tma { stages, chunk } => CopyPath::Tma { stages, chunk },
            StoredPath::LdSt { unroll } => CopyPath::LdSt { unroll },
        };
        MovePlan::new(self.blocks, self.warps, path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_reads_as_it_was_written() {
        for path in [CopyPath::Tma { stages: 2, chunk: 14336 }, CopyPath::LdSt { unroll: 4 }] {
            let plan = MovePlan::new(16, 12, path);
            let text = serde_json::to_string(&StoredPlan::new(&plan)).unwrap();
            let read: StoredPlan = serde_json::from_str(&text).unwrap();
            assert_eq!(read.plan(), plan, "{text}");
        }
    }
}
