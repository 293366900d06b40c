//! Comparing how the ranks were built.

use ep_transport::{Deadline, Group, Transport};

use crate::shape::Resolved;
use crate::{EpError, Result};

/// What has to be equal on all ranks, as text.
pub(crate) struct Config(Vec<(&'static str, String)>);

impl Config {
    pub fn new(shape: &Resolved, transport: Option<&dyn Transport>) -> Self {
        let payloads: Vec<String> = shape.payloads.iter().map(|p| p.to_string()).collect();
        let alignment = shape.expert_alignment.map_or("none".into(), |a| a.to_string());
        Self(vec![
            ("version", env!("CARGO_PKG_VERSION").into()),
            ("hidden", shape.hidden.to_string()),
            ("topk", shape.topk.to_string()),
            ("experts", shape.placement.experts().to_string()),
            ("placement", format!("{:016x}", shape.placement.digest())),
            ("payloads", payloads.join("+")),
            ("max_tokens", shape.max_tokens.to_string()),
            ("max_rows", shape.max_rows.to_string()),
            ("expert_major", alignment),
            ("max_expert_rows", shape.max_expert_rows.to_string()),
            ("slots", shape.slots.to_string()),
            ("lanes", shape.lanes.to_string()),
            ("transport", transport.map_or("default", |t| t.name()).into()),
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
