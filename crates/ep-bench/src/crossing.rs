//! What a dispatch sends between nodes, flat and with each token crossing once, and what it takes of
//! memory: for `--dry-run --nodes N`.

use ep_runtime::wire::{self, Routes, Wire};
use ep_runtime::{EpBuilder, Hierarchy, Ids, MoeShape, Placement, Plan, ThreadTransport};

use crate::case::{Case, Layout, Shape};
use crate::host::kind;
use crate::routing::Router;
use crate::{BenchError, Result};

/// One case's traffic between nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct Crossing {
    /// How many nodes, of equal size.
    pub nodes: usize,
    /// Bytes that each rank puts to other nodes: a token once for each rank it goes to.
    pub flat: Vec<u64>,
    /// The same where a token crosses once for each node.
    pub once: Vec<u64>,
    /// What uniform routing lets expect of both, per rank of as many tokens.
    pub expected: (f64, f64),
    /// Bytes of a rank's window, flat and crossing once.
    pub windows: (usize, usize),
}

impl Crossing {
    /// Routes all ranks of `case`, whose ranks are in `nodes` nodes of equal size.
    ///
    /// # Errors
    /// Sizes that do not fit together; an unusable routing file.
    pub fn of(case: &Case, nodes: usize) -> Result<Self> {
        let shape = case.shape;
        if nodes == 0 || !shape.ranks.is_multiple_of(nodes) {
            let text = format!("--nodes {nodes} does not divide {} ranks", shape.ranks);
            return Err(BenchError::Usage(text));
        }
        let (router, per_node) = (Router::new(case)?, shape.ranks / nodes);
        let placement =
            Placement::contiguous(shape.experts, shape.ranks).map_err(|e| failed(&e))?;
        let routes = |rank| {
            let ids = router.routes(rank).ids;
            Routes::new(Ids::I64(&ids), shape.topk, &placement, rank).map_err(|e| failed(&e))
        };
        let routes = (0..shape.ranks).map(routes).collect::<Result<Vec<_>>>()?;
        let node_of: Vec<usize> = (0..shape.ranks).map(|rank| rank / per_node).collect();
        let row = row_bytes(case)?;
        let sent = |all: Vec<Wire>| all.into_iter().map(|wire| wire.sent).collect();
        let flat = wire::flat(&routes, &node_of, row).map_err(|e| failed(&e))?;
        let once = wire::hierarchical(&routes, &node_of, row).map_err(|e| failed(&e))?;
        let plan = |hierarchy| layer_plan(case, per_node, hierarchy, None);
        let window = |hierarchy| plan(hierarchy).map(|plan| plan.window_bytes);
        Ok(Self {
            nodes,
            flat: sent(flat),
            once: sent(once),
            expected: wire_expected(case, nodes)?,
            windows: (window(Hierarchy::Flat)?, window(Hierarchy::Node)?),
        })
    }

    /// The most that a rank sends, flat and crossing once.
    pub fn busiest(&self) -> (u64, u64) {
        let most = |all: &[u64]| all.iter().max().copied().unwrap_or(0);
        (most(&self.flat), most(&self.once))
    }
}

pub(crate) fn failed(e: &dyn std::fmt::Display) -> BenchError {
    BenchError::Usage(e.to_string())
}

/// Bytes of a row between nodes, with all that goes with it.
fn row_bytes(case: &Case) -> Result<u64> {
    let row = wire::row_bytes(kind(case.dtype), case.shape.hidden, case.shape.topk);
    Ok(row.map_err(|e| failed(&e))? as u64)
}

/// The sizes of a layer for `case` in nodes of `per_node` ranks, with room for so many received rows or
/// for all that can come.
pub(crate) fn layer_plan(
    case: &Case,
    per_node: usize,
    hierarchy: Hierarchy,
    rows: Option<usize>,
) -> Result<Plan> {
    let shape = case.shape;
    let mut moe = MoeShape::new(shape.hidden, shape.topk, shape.experts)
        .max_tokens(shape.tokens)
        .payload(kind(case.dtype));
    if let Some(rows) = rows {
        moe = moe.max_rows(rows);
    }
    if case.layout == Layout::ExpertMajor {
        moe = moe.expert_major(case.alignment);
    }
    let sizes = vec![per_node; shape.ranks / per_node];
    let transport = ThreadTransport::new().nodes(&sizes);
    let builder = EpBuilder::new(moe).transport(transport).hierarchy(hierarchy);
    builder.plan(shape.ranks).map_err(|e| failed(&e))
}

/// The probability that none of K different experts of E, uniformly chosen, is among so many given ones:
/// C(E−n, K) / C(E, K).
fn missed(shape: &Shape, given: usize) -> f64 {
    let factor = |i: usize| {
        let free = shape.experts.saturating_sub(given + i) as f64;
        free / (shape.experts - i) as f64
    };
    (0..shape.topk.min(shape.experts)).map(factor).product()
}

/// Rows that uniform routing lets a rank expect, of all ranks' tokens.
pub(crate) fn expected_rows(case: &Case) -> f64 {
    let shape = case.shape;
    let per_rank = shape.experts / shape.ranks;
    (shape.ranks * shape.tokens) as f64 * (1.0 - missed(&shape, per_rank))
}

/// Bytes that uniform routing lets a rank expect to send to other nodes: flat, and with each token
/// crossing once.
pub(crate) fn wire_expected(case: &Case, nodes: usize) -> Result<(f64, f64)> {
    let (shape, row) = (case.shape, row_bytes(case)?);
    let (away, per_node) = (shape.ranks - shape.ranks / nodes, shape.ranks / nodes);
    // Experts per rank, where they divide; else about so many.
    let per_rank = shape.experts / shape.ranks;
    let tokens = shape.tokens as f64 * row as f64;
    let flat = tokens * away as f64 * (1.0 - missed(&shape, per_rank));
    let once = tokens * (nodes - 1) as f64 * (1.0 - missed(&shape, per_rank * per_node));
    Ok((flat, once))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::Args;

    fn case(line: &str) -> Case {
        let args = Args::try_parse_from(["ep-bench"].into_iter().chain(line.split(' '))).unwrap();
        args.plan(u64::MAX).unwrap().cases.remove(0)
    }

    #[test]
    fn uniform_routing_crosses_as_often_as_expected() {
        for (ranks, nodes) in [(16, 2), (32, 4), (64, 8)] {
            let line = format!("dispatch --workload train --tokens 512 --ranks {ranks}");
            let crossing = Crossing::of(&case(&line), nodes).unwrap();
            let mean = |all: &[u64]| all.iter().sum::<u64>() as f64 / all.len() as f64;
            let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 0.01;
            let (flat, once) = crossing.expected;
            assert!(near(mean(&crossing.flat), flat), "{ranks} ranks: {flat} expected");
            assert!(near(mean(&crossing.once), once), "{ranks} ranks: {once} expected");
            assert!(once < flat && crossing.windows.1 > crossing.windows.0);
        }
    }

    #[test]
    fn one_node_sends_nothing_and_nodes_must_divide_ranks() {
        let case = case("dispatch --workload decode --ranks 6");
        let crossing = Crossing::of(&case, 1).unwrap();
        assert_eq!((crossing.busiest(), crossing.expected), ((0, 0), (0.0, 0.0)));
        let error = Crossing::of(&case, 4).unwrap_err().to_string();
        assert!(error.contains("--nodes 4 does not divide 6 ranks"), "{error}");
    }

    #[test]
    fn windows_of_large_groups_are_planned() {
        let crossing = Crossing::of(&case("dispatch --workload decode --ranks 256"), 32).unwrap();
        assert!(crossing.windows.0 > 0 && crossing.windows.1 >= crossing.windows.0);
    }
}
