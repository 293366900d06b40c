//! One thing to measure: an operation, its shape, its routing.

use serde::{Deserialize, Serialize};

use crate::routing::Routing;

/// Which operation is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// Tokens to the ranks that own their experts.
    Dispatch,
    /// Expert outputs back home, reduced per token.
    Combine,
    /// Dispatch, then combine of the rows as they came.
    Roundtrip,
}

impl Operation {
    /// The name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
            Self::Roundtrip => "roundtrip",
        }
    }
}

/// What a token's row is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// fp8 e4m3 with one f32 scale per 128 elements.
    Fp8,
    /// fp8 e4m3 with one power-of-two (UE8M0) scale per 128 elements.
    Fp8Ue8m0,
}

/// Elements of a row that share one fp8 scale.
pub const SCALE_BLOCK: usize = 128;

impl Dtype {
    /// The name used in reports and options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::Fp8 => "fp8",
            Self::Fp8Ue8m0 => "fp8-ue8m0",
        }
    }

    /// Bytes of one row's elements.
    pub fn payload_bytes(self, hidden: usize) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2 * hidden,
            Self::F32 => 4 * hidden,
            Self::Fp8 | Self::Fp8Ue8m0 => hidden,
        }
    }

    /// Bytes of one row's scales.
    pub fn scale_bytes(self, hidden: usize) -> usize {
        match self {
            Self::Fp8 => 4 * hidden.div_ceil(SCALE_BLOCK),
            Self::Fp8Ue8m0 => hidden.div_ceil(SCALE_BLOCK),
            _ => 0,
        }
    }

    /// Bytes of one row on its way: elements and scales.
    pub fn row_bytes(self, hidden: usize) -> usize {
        self.payload_bytes(hidden) + self.scale_bytes(hidden)
    }

    /// Whether rows of this type can be combined.
    pub fn reducible(self) -> bool {
        matches!(self, Self::Bf16 | Self::F16 | Self::F32)
    }

    /// The type in which the answer of a dispatch in this type comes back.
    pub fn back(self) -> Dtype {
        if self.reducible() { self } else { Self::Bf16 }
    }
}

/// How received rows are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// One row per (token, rank), by source rank, then token.
    RankMajor,
    /// Rows grouped by local expert, padded.
    ExpertMajor,
}

impl Layout {
    /// The name used in reports and options.
    pub fn name(self) -> &'static str {
        match self {
            Self::RankMajor => "rank-major",
            Self::ExpertMajor => "expert-major",
        }
    }
}

/// Sizes of a job. Tokens are per rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Ranks.
    pub ranks: usize,
    /// Tokens each rank sends (the most, where ranks differ).
    pub tokens: usize,
    /// Elements of a row.
    pub hidden: usize,
    /// Experts per token.
    pub topk: usize,
    /// Experts of the whole job.
    pub experts: usize,
}

/// One row of a report before it is measured. The same value on every rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// What is timed.
    pub operation: Operation,
    /// The workload's name: `train`, `decode`, … or `custom`.
    pub workload: String,
    /// Sizes.
    pub shape: Shape,
    /// Type of the dispatched rows; of the combined rows for a combine.
    pub dtype: Dtype,
    /// Arrangement of the received rows.
    pub layout: Layout,
    /// Rows per expert are padded to a multiple of this (expert-major).
    pub alignment: usize,
    /// Which experts tokens go to.
    pub routing: Routing,
    /// Seed of everything random.
    pub seed: u64,
    /// Whether the routing of an earlier dispatch is used again.
    pub cached: bool,
    /// Whether ranks send different numbers of tokens.
    pub unequal: bool,
}

impl Case {
    /// A short name for messages: `dispatch bf16`.
    pub fn title(&self) -> String {
        format!("{} {}", self.operation.name(), self.dtype.name())
    }
}
