//! What crosses between nodes, from the routing alone: bytes per rank, before anything is built.
//!
//! ```
//! use ep_runtime::{Ids, PayloadKind, Placement, wire};
//!
//! // Two nodes of two ranks with one expert each; one token of rank 0 for experts 2 and 3.
//! let (placement, node_of) = (Placement::contiguous(4, 4)?, [0, 0, 1, 1]);
//! let ids: [&[i32]; 4] = [&[2, 3], &[], &[], &[]];
//! let routes = (0..4).map(|rank| wire::Routes::new(Ids::I32(ids[rank]), 2, &placement, rank));
//! let routes = routes.collect::<Result<Vec<_>, _>>()?;
//! let row = wire::row_bytes(PayloadKind::Bf16, 64, 2)? as u64;
//! assert_eq!(wire::flat(&routes, &node_of, row)?[0].sent, 2 * row);
//! let once = wire::hierarchical(&routes, &node_of, row)?;
//! assert_eq!((once[0].sent, once[2].received), (row, row));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use ep_kernels::{Ids, Layout, PayloadKind, Placement, RecordFormat};

use crate::node::Nodes;
use crate::notify;
use crate::shape::OutFormat;
use crate::{EpError, Result};

const OP: &str = "wire";

/// What rows one rank puts to ranks of other nodes in a dispatch, and what is put to it. Bytes.
///
/// Announcements are not in it: [`announcement_bytes`] to every rank of other nodes. A combine of
/// rank-major rows moves as many rows the other way: [`flat`]'s with
/// [`Precision::Exact`](crate::Precision::Exact) in rows as they were received,
/// [`hierarchical`]'s with [`Precision::NodeReduced`](crate::Precision::NodeReduced) in rows of
/// [`reduced_row_bytes`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Wire {
    /// Put by this rank.
    pub sent: u64,
    /// Put to this rank.
    pub received: u64,
}

/// Where the tokens of one rank go.
#[derive(Clone, Debug)]
pub struct Routes(Layout);

impl Routes {
    /// Those of `rank` by logical expert ids, `topk` for each token, −1 for none.
    ///
    /// # Errors
    /// [`EpError::Argument`] for ids that cannot be dispatched.
    pub fn new(ids: Ids<'_>, topk: usize, placement: &Placement, rank: usize) -> Result<Self> {
        let mut layout = Layout::new();
        layout
            .compute(ids, topk, placement, rank, false)
            .map_err(|e| EpError::argument(OP, format!("rank {rank}: {e}")))?;
        Ok(Self(layout))
    }
}

/// Rows where each token crosses once for each rank it goes to, as with
/// [`Hierarchy::Flat`](crate::Hierarchy::Flat). `routes` and `node_of` have one entry per rank; ranks
/// of equal `node_of` are of one node.
///
/// # Errors
/// [`EpError::Argument`] if the lengths do not fit.
pub fn flat(routes: &[Routes], node_of: &[usize], row_bytes: u64) -> Result<Vec<Wire>> {
    check(routes, node_of)?;
    let mut wire = vec![Wire::default(); routes.len()];
    for (source, routes) in routes.iter().enumerate() {
        for (rank, &rows) in routes.0.rank_counts.iter().enumerate() {
            if node_of[rank] != node_of[source] {
                wire[source].sent += u64::from(rows) * row_bytes;
                wire[rank].received += u64::from(rows) * row_bytes;
            }
        }
    }
    Ok(wire)
}

/// As [`flat`], where each token crosses once for each node it goes to, to the rank that passes it on
/// there, as with [`Hierarchy::Node`](crate::Hierarchy::Node).
///
/// # Errors
/// As [`flat`].
pub fn hierarchical(routes: &[Routes], node_of: &[usize], row_bytes: u64) -> Result<Vec<Wire>> {
    check(routes, node_of)?;
    let nodes = Nodes::new(node_of);
    let mut wire = vec![Wire::default(); routes.len()];
    for (source, Routes(layout)) in routes.iter().enumerate() {
        let mut last = vec![0; nodes.count()];
        for token in 0..layout.tokens {
            for (rank, _) in layout.destinations(token) {
                let node = nodes.of(rank);
                let counted = std::mem::replace(&mut last[node], token + 1) == token + 1;
                if !counted && node != nodes.of(source) {
                    wire[source].sent += row_bytes;
                    wire[nodes.rail(source, node)].received += row_bytes;
                }
            }
        }
    }
    Ok(wire)
}

/// Bytes of a dispatched row: payload, scales, ids, weights and source, padded.
///
/// # Errors
/// [`EpError::Argument`] for rows that cannot be sent.
pub fn row_bytes(kind: PayloadKind, hidden: usize, topk: usize) -> Result<usize> {
    let format = RecordFormat::new(kind, hidden, topk);
    Ok(format.map_err(|e| EpError::argument(OP, format!("payload {kind}: {e}")))?.stride)
}

/// Bytes of a row that comes home from a node with
/// [`Precision::NodeReduced`](crate::Precision::NodeReduced): payload and weights, padded.
pub fn reduced_row_bytes(kind: PayloadKind, hidden: usize, topk: usize) -> usize {
    OutFormat::rank_major(None, kind, hidden, topk).stride
}

/// Bytes of one rank's announcement of a dispatch to one other rank. `nodes` is how many there are
/// with [`Hierarchy::Node`](crate::Hierarchy::Node), else 0. Announcements of cached dispatches and
/// of combines have no counts: theirs is of this size without experts, ranks and nodes.
pub fn announcement_bytes(experts: usize, ranks: usize, nodes: usize) -> usize {
    notify::bytes(experts + ranks + nodes)
}

fn check(routes: &[Routes], node_of: &[usize]) -> Result<()> {
    let ranks = routes.len();
    if node_of.len() == ranks && routes.iter().all(|r| r.0.rank_counts.len() == ranks) {
        return Ok(());
    }
    let detail = format!("{ranks} ranks' routes for {} ranks' nodes", node_of.len());
    Err(EpError::argument(OP, detail))
}
