//! Comparing how the ranks were built.

use ep_transport::{Deadline, Group, Transport};

use crate::node::{Hierarchy, Nodes};
use crate::{EpError, MoeShape, Result};

/// What has to be equal on all ranks, as text.
pub(crate) struct Config(Vec<(&'static str, String)>);

impl Config {
    /// `problem` is what keeps this rank from it.
    pub fn new(
        shape: &MoeShape,
        (slots, lanes): (usize, usize),
        (transport, nodes): (Option<&dyn Transport>, Option<&Nodes>),
        hierarchy: Hierarchy,
        (on_gpu, problem): (bool, Option<&EpError>),
    ) -> Self {
        let optional = |n: Option<usize>| n.map_or("default".into(), |n| n.to_string());
        let payloads: Vec<String> = shape.payloads.iter().map(|p| p.to_string()).collect();
        let placement = shape.placement.as_ref();
        let problem = problem.map_or("none".into(), |e| e.to_string());
        Self(vec![
            ("version", env!("CARGO_PKG_VERSION").into()),
            ("hidden", shape.hidden.to_string()),
            ("topk", shape.topk.to_string()),
            ("experts", shape.experts.to_string()),
            (
                "placement",
                placement.map_or("contiguous".into(), |p| format!("{:016x}", p.digest())),
            ),
            ("payloads", payloads.join("+")),
            ("max_tokens", shape.max_tokens.to_string()),
            ("max_rows", optional(shape.max_rows)),
            ("expert_major", optional(shape.expert_alignment)),
            ("max_expert_rows", optional(shape.max_expert_rows)),
            ("hierarchy", format!("{hierarchy:?}")),
            ("max_forward_rows", optional(shape.max_forward_rows)),
            ("fixed_blocks", shape.fixed_blocks.to_string()),
            ("max_block_rows", optional(shape.max_block_rows)),
            ("max_block_expert_rows", optional(shape.max_block_expert_rows)),
            ("place", if on_gpu { "gpu" } else { "host" }.into()),
            ("slots", slots.to_string()),
            ("lanes", lanes.to_string()),
            ("transport", transport.map_or("default", |t| t.name()).into()),
            (
                "nodes",
                nodes.map_or("unknown".into(), |n| format!("{} ({:08x})", n.count(), n.digest())),
            ),
            ("problem", problem.replace('\n', " ")),
        ])
    }

    /// Fails on every rank if any two differ, naming the first field that does.
    pub fn compare(&self, group: &Group, deadline: Deadline) -> Result<()> {
        const OP: &str = "build";
        let lines: Vec<String> = self.0.iter().map(|(k, v)| format!("{k}={v}")).collect();
        let all = group.all_gather_within(OP, lines.join("\n").as_bytes(), deadline)?;
        let all: Vec<String> =
            all.iter().map(|b| String::from_utf8_lossy(b).into_owned()).collect();
        for (field, _) in &self.0 {
            let value = |rank: usize| {
                let line = all[rank].lines().find_map(|l| l.strip_prefix(field)?.strip_prefix('='));
                line.unwrap_or("unknown")
            };
            let ranks: Vec<usize> = (1..all.len()).filter(|&r| value(r) != value(0)).collect();
            if !ranks.is_empty() {
                let others: Vec<String> =
                    ranks.iter().map(|&r| format!("rank {r} has {}", value(r))).collect();
                let detail = format!("rank 0 has {}; {}", value(0), others.join("; "));
                let field = (*field).to_string();
                return Err(EpError::Disagreement { op: OP, field, ranks, detail });
            }
        }
        Ok(())
    }
}
