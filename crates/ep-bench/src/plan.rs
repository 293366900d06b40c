//! What a case moves, before it is run.

use crate::Result;
use crate::case::{Case, Layout};
use crate::routing::{Router, owner};

/// Rows between ranks, from the routing itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Tokens each rank sends.
    pub tokens: Vec<usize>,
    /// Rows each rank receives (one per token and rank), its own included.
    pub rows: Vec<usize>,
    /// Of those, rows that come from other ranks.
    pub remote_rows: Vec<usize>,
    /// Rows each rank sends to other ranks.
    pub sent_remote: Vec<usize>,
    /// Expert-major rows of each rank, padding included; zero for other layouts.
    pub expert_rows: Vec<usize>,
}

impl Traffic {
    /// Routes all ranks of `case` and counts.
    ///
    /// # Errors
    /// Sizes that do not fit together; an unusable routing file.
    pub fn of(case: &Case) -> Result<Self> {
        let router = Router::new(case)?;
        let (ranks, experts) = (case.shape.ranks, case.shape.experts);
        let mut traffic = Self {
            tokens: Vec::with_capacity(ranks),
            rows: vec![0; ranks],
            remote_rows: vec![0; ranks],
            sent_remote: vec![0; ranks],
            expert_rows: vec![0; ranks],
        };
        let mut loads = vec![0usize; experts];
        let mut last_seen = vec![usize::MAX; ranks];
        for source in 0..ranks {
            let routes = router.routes(source);
            traffic.tokens.push(routes.tokens);
            last_seen.fill(usize::MAX);
            for (token, ids) in routes.ids.chunks_exact(case.shape.topk).enumerate() {
                for &id in ids.iter().filter(|&&id| id >= 0) {
                    loads[id as usize] += 1;
                    let dest = owner(id as usize, experts, ranks);
                    if last_seen[dest] == token {
                        continue;
                    }
                    last_seen[dest] = token;
                    traffic.rows[dest] += 1;
                    if dest != source {
                        traffic.remote_rows[dest] += 1;
                        traffic.sent_remote[source] += 1;
                    }
                }
            }
        }
        if case.layout == Layout::ExpertMajor {
            for (expert, load) in loads.iter().enumerate() {
                let padded = load.next_multiple_of(case.alignment.max(1));
                traffic.expert_rows[owner(expert, experts, ranks)] += padded;
            }
        }
        Ok(traffic)
    }

    /// Bytes of all rows of the busiest rank: what the logical rate counts.
    pub fn logical_bytes(&self, case: &Case) -> u64 {
        let rows = self.rows.iter().max().copied().unwrap_or(0);
        (rows * case.dtype.row_bytes(case.shape.hidden)) as u64
    }

    /// Bytes between different ranks, of the rank that sends or receives most: the wire rate's.
    pub fn wire_bytes(&self, case: &Case) -> u64 {
        let rows = self.remote_rows.iter().chain(&self.sent_remote).max().copied().unwrap_or(0);
        (rows * case.dtype.row_bytes(case.shape.hidden)) as u64
    }

    /// Per rank, the size of the plain copy that reads and writes as much as the operation has to:
    /// (bytes read + bytes written) / 2.
    ///
    /// A dispatch reads every token and writes every received row, and in the expert-major layout
    /// reads those again and writes them once per expert; a combine does the reverse. A round trip
    /// is both.
    pub fn copy_bytes(&self, case: &Case) -> Vec<u64> {
        use crate::case::Operation::{Combine, Dispatch, Roundtrip};
        let row = case.dtype.row_bytes(case.shape.hidden) as u64;
        let back = case.dtype.back().payload_bytes(case.shape.hidden) as u64;
        (0..self.tokens.len())
            .map(|rank| {
                let (tokens, rows) = (self.tokens[rank] as u64, self.rows[rank] as u64);
                let moved = match case.layout {
                    Layout::RankMajor => tokens + rows,
                    Layout::ExpertMajor => tokens + 2 * rows + self.expert_rows[rank] as u64,
                };
                match case.operation {
                    Dispatch => moved * row / 2,
                    Combine => moved * back / 2,
                    Roundtrip => moved * (row + back) / 2,
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Dtype, Operation, Shape};
    use crate::routing::Routing;

    fn case(routing: Routing) -> Case {
        Case {
            operation: Operation::Dispatch,
            workload: "custom".into(),
            shape: Shape { ranks: 4, tokens: 100, hidden: 64, topk: 4, experts: 16 },
            dtype: Dtype::Bf16,
            layout: Layout::RankMajor,
            alignment: 1,
            routing,
            seed: 3,
            cached: false,
            unequal: false,
        }
    }

    #[test]
    fn one_rank_receives_every_token_once() {
        let case = case(Routing::OneRank(2));
        let traffic = Traffic::of(&case).unwrap();
        assert_eq!(traffic.rows, [0, 0, 400, 0], "four experts of one rank make one row");
        assert_eq!(traffic.remote_rows, [0, 0, 300, 0]);
        assert_eq!(traffic.sent_remote, [100, 100, 0, 100]);
        assert_eq!(traffic.wire_bytes(&case), 300 * 128);
        assert_eq!(traffic.logical_bytes(&case), 400 * 128);
        assert_eq!(traffic.copy_bytes(&case), [6400, 6400, 32_000, 6400]);
    }

    #[test]
    fn sent_and_received_agree() {
        let traffic = Traffic::of(&case(Routing::Uniform)).unwrap();
        let (sent, received): (usize, usize) =
            (traffic.sent_remote.iter().sum(), traffic.remote_rows.iter().sum());
        assert_eq!(sent, received);
        // A token of top-4 on 4 ranks meets 4 × (1 − C(12,4)/C(16,4)) = 2.91 ranks.
        let rows: usize = traffic.rows.iter().sum();
        assert!((1100..1230).contains(&rows), "{rows}");
    }

    #[test]
    fn expert_major_rows_are_padded() {
        let mut case = case(Routing::Uniform);
        case.layout = Layout::ExpertMajor;
        let traffic = Traffic::of(&case).unwrap();
        assert_eq!(traffic.expert_rows.iter().sum::<usize>(), 1600);
        case.alignment = 128;
        let padded = Traffic::of(&case).unwrap();
        assert!(padded.expert_rows.iter().all(|n| n.is_multiple_of(128) && *n >= 4 * 128));
    }
}
