//! What a layer sends and takes as its group grows to 1024 ranks: for `sweep --dry-run`.

use ep_runtime::{Hierarchy, RdmaPlan, WindowSpec};

use crate::Result;
use crate::case::{Case, Shape};
use crate::crossing::{Crossing, expected_rows, failed, layer_plan, wire_expected};
use crate::format::bytes;

/// Ranks of a node.
pub const PER_NODE: usize = 8;
/// Nodes. Up to the third, all tokens are routed.
pub const NODES: [usize; 7] = [2, 4, 8, 16, 32, 64, 128];
/// The most ranks whose tokens are routed: what crosses between more is what uniform routing lets
/// expect.
const ROUTED: usize = 64;
/// Room for rows where not all that can come is planned for, as a multiple of what uniform routing lets
/// expect.
const ROOM: f64 = 1.25;
/// NICs per rank, queue pairs per peer and NIC, writes under way: what `RdmaTransport` has by default.
const RDMA: (usize, usize, usize) = (1, 1, 128);

/// A group of one size.
#[derive(Clone, Debug, PartialEq)]
pub struct Scale {
    /// Nodes of [`PER_NODE`] ranks.
    pub nodes: usize,
    /// Experts: at least one per rank.
    pub experts: usize,
    /// Bytes that the busiest rank sends to other nodes, flat and with each token crossing once; by what
    /// uniform routing lets expect where tokens are not routed.
    pub sent: (f64, f64),
    /// Whether tokens were routed.
    pub routed: bool,
    /// Rows a rank receives: as uniform routing lets expect, and at the most.
    pub rows: (usize, usize),
    /// Bytes of a rank's window, flat and crossing once, with room for the most rows.
    pub windows: (usize, usize),
    /// The same with room for 1.25 times the rows of uniform routing.
    pub bounded: (usize, usize),
    /// What RDMA takes on a rank beside the window.
    pub rdma: RdmaPlan,
}

impl Scale {
    /// `case` on so many nodes of [`PER_NODE`] ranks.
    ///
    /// # Errors
    /// Sizes that do not fit together.
    pub fn of(case: &Case, nodes: usize) -> Result<Self> {
        let ranks = nodes * PER_NODE;
        let shape =
            Shape { ranks, experts: case.shape.experts.next_multiple_of(ranks), ..case.shape };
        let case = Case { shape, ..case.clone() };
        let routed = ranks <= ROUTED;
        let sent = match routed {
            true => {
                let (flat, once) = Crossing::of(&case, nodes)?.busiest();
                (flat as f64, once as f64)
            }
            false => wire_expected(&case, nodes)?,
        };
        let rows = expected_rows(&case).ceil() as usize;
        let room = (ROOM * rows as f64).ceil() as usize;
        let plan = |hierarchy, rows| layer_plan(&case, PER_NODE, hierarchy, rows);
        let (flat, once) = (plan(Hierarchy::Flat, None)?, plan(Hierarchy::Node, None)?);
        let bounded = |hierarchy| plan(hierarchy, Some(room)).map(|plan| plan.window_bytes);
        let spec = WindowSpec { bytes: flat.window_bytes, flags: flat.flags };
        let rdma = RdmaPlan::new(spec, ranks, ranks - PER_NODE, RDMA).map_err(|e| failed(&e))?;
        Ok(Self {
            nodes,
            experts: shape.experts,
            sent,
            routed,
            rows: (rows, flat.max_rows),
            windows: (flat.window_bytes, once.window_bytes),
            bounded: (bounded(Hierarchy::Flat)?, bounded(Hierarchy::Node)?),
            rdma,
        })
    }

    /// Line by line.
    pub fn lines(&self) -> Vec<String> {
        let Self { nodes, experts, sent, routed, rows, windows, bounded, rdma } = self;
        let size = |n: usize| bytes(n as f64);
        let how = if *routed { "busiest rank" } else { "uniform routing" };
        vec![
            format!("{} ranks in {nodes} nodes of {PER_NODE}, {experts} experts", nodes * PER_NODE),
            format!(
                "  sent to other nodes    {} flat, {} once per node ({how})",
                bytes(sent.0),
                bytes(sent.1)
            ),
            format!("  rows received per rank {} if uniform, at most {}", rows.0, rows.1),
            format!(
                "  window for the most    {} flat, {} once per node",
                size(windows.0),
                size(windows.1)
            ),
            format!(
                "  for {ROOM} × uniform     {} flat, {} once per node",
                size(bounded.0),
                size(bounded.1)
            ),
            format!(
                "  RDMA queue pairs       {}, with {} sends and receives",
                rdma.queue_pairs,
                rdma.sends + rdma.receives
            ),
            format!(
                "  beside the window      rings {}, mailboxes and flags {}",
                size(rdma.rings),
                size(rdma.mailboxes + rdma.flags)
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::Args;

    fn scales(line: &str) -> Vec<Scale> {
        let args = Args::parse_from(std::iter::once("ep-bench").chain(line.split(' ')));
        let case = args.largest_case().unwrap();
        NODES.into_iter().map(|nodes| Scale::of(&case, nodes).unwrap()).collect()
    }

    #[test]
    fn memory_of_up_to_1024_ranks_is_known() {
        let all = scales("sweep --workload decode --dry-run");
        let last = all.last().unwrap();
        assert_eq!((last.nodes * PER_NODE, last.experts), (1024, 1024));
        assert_eq!(last.rows.1, 1024 * 128, "any token may come");
        // Of 8 experts on as many ranks of 1024, a rank has one of a token with 8 in 1024.
        assert_eq!(last.rows.0, 1024);
        assert!(last.bounded.0 < last.windows.0 / 10);
        assert_eq!(last.rdma.queue_pairs, 1016);
        for pair in all.windows(2) {
            assert!(pair[0].windows.0 < pair[1].windows.0);
            assert!(pair[0].rdma.mailboxes < pair[1].rdma.mailboxes);
            assert_eq!(pair[0].rdma.rings, pair[1].rdma.rings);
        }
        let text: Vec<String> = all.iter().flat_map(Scale::lines).collect();
        assert!(text.iter().all(|line| line.chars().count() <= 80), "{text:#?}");
    }

    #[test]
    fn routed_tokens_cross_as_often_as_uniform_routing_lets_expect() {
        for scale in scales("sweep --workload train --tokens 512 --dry-run").iter().take(3) {
            assert!(scale.routed && scale.sent.1 < scale.sent.0);
            let args = Args::parse_from("x --workload train --tokens 512".split(' '));
            let mut case = args.largest_case().unwrap();
            case.shape.ranks = scale.nodes * PER_NODE;
            let (flat, once) = wire_expected(&case, scale.nodes).unwrap();
            let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 0.05;
            assert!(near(scale.sent.0, flat) && near(scale.sent.1, once), "{scale:?}");
        }
    }
}
