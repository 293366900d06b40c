//! Named workloads, and shapes that fit the machine at hand.

use serde::{Deserialize, Serialize};

use crate::case::{Case, Dtype, Operation, Shape};
use crate::plan::Traffic;
use crate::{BenchError, Result};

/// A named shape; tokens are per rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Workload {
    /// Training: 8192 tokens of 7168, top-8 of 256.
    Train,
    /// Prefill: 4096 tokens of 7168, top-8 of 256.
    Prefill,
    /// Decode: 128 tokens of 7168, top-8 of 288.
    Decode,
    /// Host: 1024 tokens of 7168, top-8 of 64; what a laptop does in about a minute.
    Host,
}

impl Workload {
    /// The name used in reports and options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Host => "host",
        }
    }

    /// The sizes, for a number of ranks.
    pub fn shape(self, ranks: usize) -> Shape {
        let (tokens, experts) = match self {
            Self::Train => (8192, 256),
            Self::Prefill => (4096, 256),
            Self::Decode => (128, 288),
            Self::Host => (1024, 64),
        };
        Shape { ranks, tokens, hidden: 7168, topk: 8, experts }
    }
}

/// Bytes a run of `case` touches on this host, all ranks together: inputs, one result slot per
/// rank, outputs, and the two buffers of the copy it is compared with.
pub fn memory_bytes(case: &Case, traffic: &Traffic) -> u64 {
    let hidden = case.shape.hidden;
    let row = case.dtype.row_bytes(hidden) as u64;
    let back = case.dtype.back().payload_bytes(hidden) as u64;
    let sent: u64 = traffic.tokens.iter().map(|&n| n as u64).sum();
    let received: u64 = traffic.rows.iter().map(|&n| n as u64).sum();
    let experts: u64 = traffic.expert_rows.iter().map(|&n| n as u64).sum();
    // Routing and the matrix of counts are small beside the rows; 64 bytes of metadata per row.
    let slot = received * (row.max(back) + 64) + experts * (row.max(back) + 64);
    let combine = if case.operation == Operation::Dispatch { 0 } else { received * back };
    sent * (row + back) + slot + combine + copy_buffers(case, traffic)
}

fn copy_buffers(case: &Case, traffic: &Traffic) -> u64 {
    let per_rank = traffic.copy_bytes(case).into_iter();
    per_rank.map(|bytes| 2 * bytes.min(crate::copy::MOST_BYTES as u64)).sum()
}

/// Bytes verification holds at most: the inputs and outputs of all ranks, and the oracle's.
pub fn verify_bytes(case: &Case, traffic: &Traffic) -> u64 {
    let row = case.dtype.row_bytes(case.shape.hidden) as u64;
    let back = case.dtype.back().payload_bytes(case.shape.hidden) as u64;
    let sent: u64 = traffic.tokens.iter().map(|&n| n as u64).sum();
    let received: u64 = traffic.rows.iter().map(|&n| n as u64).sum();
    let experts: u64 = traffic.expert_rows.iter().map(|&n| n as u64).sum();
    2 * (sent * (row + back) + (received + experts) * row.max(back))
}

/// Halves the tokens of `case` until it fits into half of `free` bytes, verification included.
/// Gives back what was changed, in words.
///
/// # Errors
/// When the number of tokens was the user's (`fixed`) and does not fit, or nothing fits.
pub fn fit(case: &mut Case, free: u64, processes: bool, fixed: bool) -> Result<Option<String>> {
    let asked = case.shape.tokens;
    loop {
        // Routing hopelessly many tokens only to count them would itself take the memory.
        let mut need = input_bytes(case);
        if need <= free / 2 {
            need = total_bytes(case, &Traffic::of(case)?, processes);
        }
        if need <= free / 2 {
            let fewer = (case.shape.tokens != asked).then(|| {
                format!(
                    "{}: {asked} tokens per rank do not fit into half of the free memory \
                     ({}); {} are used",
                    case.title(),
                    crate::format::bytes(free as f64),
                    case.shape.tokens
                )
            });
            return Ok(fewer);
        }
        if fixed || case.shape.tokens <= 1 {
            return Err(BenchError::Usage(format!(
                "{}: {} ranks of {} tokens need about {} and half of the free memory is {}: \
                 lower --tokens, --hidden or --ranks",
                case.title(),
                case.shape.ranks,
                case.shape.tokens,
                crate::format::bytes(need as f64),
                crate::format::bytes(free as f64 / 2.0)
            )));
        }
        case.shape.tokens /= 2;
    }
}

/// What the tokens of all ranks take before anything is sent.
fn input_bytes(case: &Case) -> u64 {
    let shape = case.shape;
    let row = case.dtype.row_bytes(shape.hidden) + case.dtype.back().payload_bytes(shape.hidden);
    let token = row.saturating_add(12 * shape.topk);
    shape.ranks.saturating_mul(shape.tokens).saturating_mul(token) as u64
}

/// What running and verifying `case` takes. Every process verifies by itself.
pub fn total_bytes(case: &Case, traffic: &Traffic, processes: bool) -> u64 {
    let copies = if processes { case.shape.ranks as u64 } else { 1 };
    memory_bytes(case, traffic) + copies * verify_bytes(case, traffic)
}

/// What `bench` without an operation runs: dispatch in bf16 and fp8, combine in bf16.
pub const STANDARD: [(Operation, Dtype); 3] = [
    (Operation::Dispatch, Dtype::Bf16),
    (Operation::Dispatch, Dtype::Fp8),
    (Operation::Combine, Dtype::Bf16),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Layout;
    use crate::routing::Routing;

    fn case(workload: Workload, ranks: usize) -> Case {
        Case {
            operation: Operation::Dispatch,
            workload: workload.name().into(),
            shape: workload.shape(ranks),
            dtype: Dtype::Bf16,
            layout: Layout::RankMajor,
            alignment: 1,
            routing: Routing::Uniform,
            seed: 1,
            cached: false,
            unequal: false,
        }
    }

    #[test]
    fn workloads_are_the_documented_ones() {
        let train = Shape { ranks: 2, tokens: 8192, hidden: 7168, topk: 8, experts: 256 };
        assert_eq!(Workload::Train.shape(2), train);
        assert_eq!(Workload::Prefill.shape(2), Shape { tokens: 4096, ..train });
        assert_eq!(Workload::Decode.shape(2), Shape { tokens: 128, experts: 288, ..train });
    }

    #[test]
    fn tokens_shrink_until_they_fit() {
        let mut small = case(Workload::Host, 4);
        assert_eq!(fit(&mut small, 64 << 30, false, false).unwrap(), None);
        assert_eq!(small.shape.tokens, 1024);

        let mut shrunk = case(Workload::Host, 4);
        let note = fit(&mut shrunk, 1 << 30, false, false).unwrap().unwrap();
        assert!(shrunk.shape.tokens < 1024 && note.contains("1024"), "{note}");
        let traffic = Traffic::of(&shrunk).unwrap();
        assert!(total_bytes(&shrunk, &traffic, false) <= 1 << 29);

        let mut fixed = case(Workload::Host, 4);
        let error = fit(&mut fixed, 1 << 30, false, true).unwrap_err();
        assert!(error.to_string().contains("lower --tokens"), "{error}");
        assert_eq!(error.exit_code(), 2);
    }
}
