//! Options, and the cases they ask for.

mod gpu;
mod transport;

pub use gpu::GpuArgs;
pub use transport::Transport;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::case::{Case, Dtype, Layout, Operation, Shape};
use crate::routing::{Replay, Router, Routing};
use crate::workload::{STANDARD, Workload, fit};
use crate::{BenchError, Result};

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Bench {
    /// Tokens to the ranks that own their experts.
    Dispatch,
    /// Expert outputs back home, reduced per token.
    Combine,
    /// Dispatch, then combine.
    Roundtrip,
    /// Dispatch and combine over token counts.
    Sweep,
    /// The cost of layout and counts at 64, 256 and 1024 ranks, simulated.
    Layout,
    /// GPUs: everything this transport must show.
    Suite,
    /// GPUs: ways through an SM, warps, numbers of SMs.
    Copy,
    /// GPUs: launch attributes, alone and beside a kernel that holds SMs.
    Launch,
    /// GPUs: communication beside compute, and compute beside it.
    Overlap,
    /// GPUs: ways through an SM, alone and beside compute.
    Unroll,
}

/// Measures dispatch and combine between ranks; verifies before it times.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "ep-bench",
    version,
    max_term_width = 80,
    args_override_self = true,
    after_help = "\
Without BENCH: dispatch in bf16 and fp8, combine in bf16, and the layout's cost.
ROUTING is uniform, zipf[:S], grouped, masked:SHARE, one-rank[:RANK], or a file of
[tokens, topk] ids: FILE.npy, FILE.safetensors[#TENSOR].
Other commands, each with --help: topo, preflight, kernels, margin."
)]
pub struct Args {
    /// What to measure
    #[arg(value_enum)]
    pub bench: Option<Bench>,
    /// How bytes reach a peer
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: Transport,
    /// Ranks [default: 4]
    #[arg(long, value_name = "N", value_parser = count)]
    pub ranks: Option<usize>,
    /// A process per rank instead of a thread
    #[arg(long)]
    pub processes: bool,
    /// Tokens per rank
    #[arg(long, value_name = "N", value_parser = count)]
    pub tokens: Option<usize>,
    /// Elements of a row
    #[arg(long, value_name = "N", value_parser = count)]
    pub hidden: Option<usize>,
    /// Experts per token
    #[arg(long, value_name = "K", value_parser = count)]
    pub topk: Option<usize>,
    /// Experts of the whole job
    #[arg(long, value_name = "N", value_parser = count)]
    pub experts: Option<usize>,
    /// Type of the rows [default: bf16]
    #[arg(long, value_enum, alias = "payload")]
    pub dtype: Option<Dtype>,
    /// Arrangement of the received rows
    #[arg(long, value_enum, default_value = "rank-major")]
    pub layout: Layout,
    /// Pad an expert's rows to a multiple of this (expert-major)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count)]
    pub alignment: usize,
    /// Which experts tokens go to
    #[arg(long, value_name = "ROUTING", default_value = "uniform")]
    pub routing: Routing,
    /// A named shape; other options override its sizes [default: host]
    #[arg(long, value_enum)]
    pub workload: Option<Workload>,
    /// Ranks send different numbers of tokens, from none to --tokens
    #[arg(long)]
    pub unequal: bool,
    /// Use the routing of an earlier dispatch again
    #[arg(long)]
    pub cached: bool,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Seconds for timing one case on hosts [default: 8]; of copy, launch, overlap and unroll: no further
    /// part is begun after so long [default: 170]
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub budget: Option<f64>,
    /// Seconds until a rank that does not answer is given up
    #[arg(long, value_name = "S", default_value_t = 60.0, value_parser = seconds)]
    pub timeout: f64,
    /// Write the results as JSON
    #[arg(long, value_name = "PATH")]
    pub json: Option<PathBuf>,
    /// Write a report to look at
    #[arg(long, value_name = "PATH")]
    pub html: Option<PathBuf>,
    /// Write the phases of every rank for Perfetto or chrome://tracing
    #[arg(long, value_name = "PATH")]
    pub trace: Option<PathBuf>,
    /// The commit that is measured [default: what git says]
    #[arg(long, value_name = "HASH")]
    pub commit: Option<String>,
    /// What only GPUs have
    #[command(flatten, next_help_heading = "With --transport nvlink, copy or nccl")]
    pub gpu: GpuArgs,
    /// Only say what would be run: rows and bytes
    #[arg(long)]
    pub dry_run: bool,
    /// Nodes of equally many ranks, which only --transport rdma, copy or nccl connects [default: a
    /// node per rank]; with --dry-run: also what crosses between them, flat and once per node
    #[arg(long, value_name = "N", value_parser = count)]
    pub nodes: Option<usize>,
    /// Run as one rank of a job: the plan comes by standard input
    #[arg(long, hide = true)]
    pub rank_process: bool,
}

fn count(text: &str) -> std::result::Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=1_000_000_000) => Ok(n),
        _ => Err("expected a whole number from 1 to 1000000000".into()),
    }
}

fn seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s > 0.0 && s <= 86_400.0 => Ok(s),
        _ => Err("expected seconds, more than 0 and at most 86400".into()),
    }
}

/// Seconds for timing one case, where nothing else is said.
const CASE: f64 = 8.0;

/// All that is to be run, decided once; ranks in processes get it from their parent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// What is measured, in order.
    pub cases: Vec<Case>,
    /// Whether the layout's cost is measured too.
    pub layout_cost: bool,
    /// A process per rank.
    pub processes: bool,
    /// How bytes reach a peer,
    pub transport: Transport,
    /// and between how many nodes, where it is not one: as many as there are ranks by default.
    pub nodes: Option<usize>,
    /// Time for one case's runs.
    pub budget: Duration,
    /// Bound of every wait for a peer.
    pub timeout: Duration,
    /// Whether phases are recorded.
    pub trace: bool,
    /// What was decided for the user, in words.
    pub notes: Vec<String>,
}

impl Args {
    /// Decides what to run with `free` bytes of memory.
    ///
    /// # Errors
    /// Options that do not fit together, or not into memory; an unusable routing file.
    pub fn plan(&self, free: u64) -> Result<Plan> {
        self.check_transport()?;
        let mut plan = Plan {
            cases: Vec::new(),
            layout_cost: matches!(self.bench, None | Some(Bench::Layout)),
            processes: self.processes,
            transport: self.transport,
            nodes: self.nodes.filter(|_| self.transport.has_nodes()),
            budget: self.budget(CASE),
            timeout: Duration::from_secs_f64(self.timeout),
            trace: self.trace.is_some(),
            notes: Vec::new(),
        };
        for (operation, dtype) in self.operations()? {
            for tokens in self.token_counts()? {
                let mut case = self.case(operation, dtype, tokens)?;
                Router::new(&case)?;
                let fixed = self.tokens.is_some() && self.bench != Some(Bench::Sweep);
                plan.notes.extend(fit(&mut case, free, self.processes, fixed)?);
                if self.transport.has_nodes() {
                    self.nodes_of(case.shape.ranks)?;
                }
                // A sweep that reaches the memory's end stops there instead of repeating itself.
                if !plan.cases.contains(&case) {
                    plan.cases.push(case);
                }
            }
        }
        Ok(plan)
    }

    /// The time that was given, or so many seconds.
    pub(crate) fn budget(&self, default: f64) -> Duration {
        Duration::from_secs_f64(self.budget.unwrap_or(default))
    }

    fn operations(&self) -> Result<Vec<(Operation, Dtype)>> {
        let dtype = self.dtype.unwrap_or(Dtype::Bf16);
        let combinable = || match dtype.reducible() {
            true => Ok(()),
            false => Err(BenchError::Usage(format!(
                "rows in {} cannot be combined: use bf16, f16 or f32, or `roundtrip`, which \
                 answers in bf16",
                dtype.name()
            ))),
        };
        Ok(match (self.bench, self.dtype) {
            // Those of GPUs were refused before.
            (
                Some(
                    Bench::Layout
                    | Bench::Suite
                    | Bench::Copy
                    | Bench::Launch
                    | Bench::Overlap
                    | Bench::Unroll,
                ),
                _,
            ) => Vec::new(),
            (None, None) => STANDARD.to_vec(),
            (None | Some(Bench::Sweep), _) => {
                let mut both = vec![(Operation::Dispatch, dtype)];
                if dtype.reducible() {
                    both.push((Operation::Combine, dtype));
                }
                both
            }
            (Some(Bench::Dispatch), _) => vec![(Operation::Dispatch, dtype)],
            (Some(Bench::Roundtrip), _) => vec![(Operation::Roundtrip, dtype)],
            (Some(Bench::Combine), _) => {
                combinable()?;
                vec![(Operation::Combine, dtype)]
            }
        })
    }

    /// A dispatch of the most tokens asked for, whatever the memory of this machine.
    pub(crate) fn largest_case(&self) -> Result<Case> {
        let tokens = self.tokens.unwrap_or(self.base().tokens);
        self.case(Operation::Dispatch, self.dtype.unwrap_or(Dtype::Bf16), tokens)
    }

    fn token_counts(&self) -> Result<Vec<usize>> {
        let most = self.tokens.unwrap_or(self.base().tokens);
        if self.bench != Some(Bench::Sweep) {
            return Ok(vec![most]);
        }
        let mut counts: Vec<usize> =
            std::iter::successors(Some(16), |n| Some(n * 4)).take_while(|&n| n < most).collect();
        counts.push(most);
        Ok(counts)
    }

    fn base(&self) -> Shape {
        self.workload.unwrap_or(Workload::Host).shape(self.ranks.unwrap_or(4))
    }

    fn case(&self, operation: Operation, dtype: Dtype, tokens: usize) -> Result<Case> {
        let base = self.base();
        let topk = match (self.topk, &self.routing) {
            (Some(k), _) => k,
            (None, Routing::File(path, name)) => Replay::columns(path, name.as_deref())?,
            _ => base.topk,
        };
        // More ranks than the named shape has experts: still one for each.
        let experts = self.experts.unwrap_or(base.experts.next_multiple_of(base.ranks));
        let shape =
            Shape { tokens, hidden: self.hidden.unwrap_or(base.hidden), topk, experts, ..base };
        let row = dtype.payload_bytes(shape.hidden);
        if !row.is_multiple_of(16) {
            return Err(BenchError::Usage(format!(
                "--hidden {} in {} makes rows of {row} bytes; rows must be a multiple of 16 bytes",
                shape.hidden,
                dtype.name()
            )));
        }
        let named = self.tokens.is_none() && self.bench != Some(Bench::Sweep) && shape == base;
        let workload = match (self.workload, named) {
            (w, true) => w.unwrap_or(Workload::Host).name(),
            (Some(w), false) if self.bench == Some(Bench::Sweep) => w.name(),
            _ => "custom",
        };
        Ok(Case {
            operation,
            workload: workload.into(),
            shape,
            dtype,
            layout: self.layout,
            alignment: self.alignment,
            routing: self.routing.clone(),
            seed: self.seed,
            cached: self.cached && operation != Operation::Combine,
            unequal: self.unequal,
        })
    }
}

#[cfg(test)]
mod tests;
