//! Options, and the cases they ask for.

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

/// Options of `--transport nvlink`.
#[derive(Clone, Debug, clap::Args)]
pub struct GpuArgs {
    /// GPUs; rank r runs on GPU r mod N [default: up to 2]
    #[arg(long, value_name = "N", value_parser = count)]
    pub gpus: Option<usize>,
    /// SMs for communication
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sms: u32,
    /// Replay a graph
    #[arg(long)]
    pub graph: bool,
    /// Lay the routing out every time
    #[arg(long)]
    pub uncached: bool,
    /// Without telling the host how many rows come; lays out every time
    #[arg(long)]
    pub capacity: bool,
    /// Sum experts' rows before they travel (expert-major)
    #[arg(long)]
    pub reduced: bool,
    /// Search for launch plans first, for at most so many seconds, or take what was found earlier
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "4", value_parser = tuning_seconds, conflicts_with = "no_tune")]
    pub tune: Option<f64>,
    /// Launch by the plans that ship (the default)
    #[arg(long)]
    pub no_tune: bool,
    /// Write results of suite, overlap and unroll into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Overlap and unroll: fewer SMs and runs
    #[arg(long)]
    pub quick: bool,
    /// Overlap and unroll: only what has this in its name, as `partition 16`
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
}

/// How bytes reach a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Shared memory of this host, which runs anywhere.
    Auto,
    /// Shared memory of this host.
    Host,
    /// NVLink between GPUs.
    Nvlink,
    /// RDMA between hosts.
    Rdma,
    /// NCCL.
    Nccl,
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
    /// Seconds for timing one case
    #[arg(long, value_name = "S", default_value_t = 8.0, value_parser = seconds)]
    pub budget: f64,
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
    #[command(flatten, next_help_heading = "With --transport nvlink")]
    pub gpu: GpuArgs,
    /// Only say what would be run: rows and bytes
    #[arg(long)]
    pub dry_run: bool,
    /// With --dry-run: also what crosses between N nodes of equally many ranks, flat and once per node
    #[arg(long, value_name = "N", value_parser = count, requires = "dry_run")]
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

fn tuning_seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s > 0.0 && s <= 600.0 => Ok(s),
        _ => Err("expected seconds, more than 0 and at most 600".into()),
    }
}

/// All that is to be run, decided once; ranks in processes get it from their parent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// What is measured, in order.
    pub cases: Vec<Case>,
    /// Whether the layout's cost is measured too.
    pub layout_cost: bool,
    /// A process per rank.
    pub processes: bool,
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
            budget: Duration::from_secs_f64(self.budget),
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
                // A sweep that reaches the memory's end stops there instead of repeating itself.
                if !plan.cases.contains(&case) {
                    plan.cases.push(case);
                }
            }
        }
        Ok(plan)
    }

    fn check_transport(&self) -> Result<()> {
        let name = match self.transport {
            Transport::Auto | Transport::Host => return Ok(()),
            Transport::Nvlink => "nvlink",
            Transport::Rdma => "rdma",
            Transport::Nccl => "nccl",
        };
        Err(BenchError::Usage(format!(
            "--transport {name} is not in this build; it has `host`, which works on every machine"
        )))
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
            (Some(Bench::Layout), _) => Vec::new(),
            (
                Some(Bench::Suite | Bench::Copy | Bench::Launch | Bench::Overlap | Bench::Unroll),
                _,
            ) => {
                let text = "suite, copy, launch, overlap and unroll measure GPUs: add \
                            --transport nvlink";
                return Err(BenchError::Usage(text.into()));
            }
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
mod tests {
    use super::*;

    fn args(line: &str) -> std::result::Result<Args, clap::Error> {
        Args::try_parse_from(std::iter::once("ep-bench").chain(line.split_whitespace()))
    }

    fn plan(line: &str) -> Result<Plan> {
        args(line).unwrap_or_else(|e| panic!("{line}: {e}")).plan(64 << 30)
    }

    #[test]
    fn nothing_asked_is_the_standard_set() {
        let plan = plan("").unwrap();
        let ran: Vec<String> = plan.cases.iter().map(Case::title).collect();
        assert_eq!(ran, ["dispatch bf16", "dispatch fp8", "combine bf16"]);
        assert!(plan.layout_cost && !plan.processes && plan.notes.is_empty());
        assert!(plan.cases.iter().all(|case| case.workload == "host"));
        let shape = Shape { ranks: 4, tokens: 1024, hidden: 7168, topk: 8, experts: 64 };
        assert_eq!(plan.cases[0].shape, shape);
    }

    #[test]
    fn every_option_is_understood() {
        let line = "roundtrip --transport host --ranks 8 --processes --tokens 64 --hidden 1024 \
                    --topk 4 --experts 32 --dtype fp8 --layout expert-major --routing masked:0.3 \
                    --workload decode --json a.json --html a.html --trace t.json --seed 7 --dry-run \
                    --alignment 128 --unequal --cached --budget 2 --timeout 5";
        let parsed = args(line).unwrap();
        assert!(parsed.dry_run && parsed.json.is_some() && parsed.html.is_some());
        let plan = parsed.plan(64 << 30).unwrap();
        assert!(plan.processes && plan.trace && !plan.layout_cost);
        let case = &plan.cases[0];
        assert_eq!(case.shape, Shape { ranks: 8, tokens: 64, hidden: 1024, topk: 4, experts: 32 });
        assert_eq!(
            (case.dtype, case.layout, case.alignment),
            (Dtype::Fp8, Layout::ExpertMajor, 128)
        );
        assert_eq!((case.seed, case.cached, case.unequal), (7, true, true));
        assert_eq!(case.workload, "custom");
        assert_eq!(plan.timeout, Duration::from_secs(5));
    }

    #[test]
    fn the_documented_lines_work() {
        let decode = &plan("--ranks 8 --workload decode").unwrap().cases[0];
        assert_eq!((decode.workload.as_str(), decode.shape.experts), ("decode", 288));
        let many = &plan("--ranks 64 --tokens 64 --hidden 1024 --experts 256").unwrap().cases[0];
        assert_eq!((many.shape.ranks, many.shape.experts), (64, 256));
        assert!(plan("--ranks 4 --processes").unwrap().processes);
        assert_eq!(plan("--ranks 100").unwrap().cases[0].shape.experts, 100);
    }

    #[test]
    fn sweeps_cover_token_counts() {
        let plan = plan("sweep --tokens 1000 --hidden 64").unwrap();
        let tokens: Vec<usize> = plan.cases.iter().map(|case| case.shape.tokens).collect();
        assert_eq!(tokens, [16, 64, 256, 1000, 16, 64, 256, 1000]);
        assert_eq!(plan.cases[4].operation, Operation::Combine);
    }

    #[test]
    fn wrong_options_end_with_2() {
        for line in [
            "--unknown",
            "bench",
            "--ranks 0",
            "--ranks -1",
            "--tokens x",
            "--dtype bf17",
            "--layout row",
            "--routing nowhere",
            "--workload lunch",
            "--budget 0",
            "--seed -1",
        ] {
            assert_eq!(args(line).unwrap_err().exit_code(), 2, "{line}");
        }
        for (line, says) in [
            ("combine --dtype fp8", "cannot be combined"),
            ("suite", "--transport nvlink"),
            ("launch --transport host", "--transport nvlink"),
            ("overlap --quick", "--transport nvlink"),
            ("unroll", "--transport nvlink"),
            ("--hidden 12", "multiple of 16"),
            ("--ranks 8 --experts 7", "every rank needs an expert"),
            ("--topk 65", "more than --experts 64"),
            ("--transport nvlink", "not in this build"),
            ("--routing one-rank:4", "there are 4 ranks"),
            ("--routing grouped --experts 12", "multiple of 8"),
            ("--routing /nonexistent/ids.npy", "/nonexistent/ids.npy"),
            ("--tokens 100000000", "lower --tokens"),
        ] {
            let error = plan(line).unwrap_err();
            assert!(error.to_string().contains(says), "{line}: {error}");
            assert_eq!(error.exit_code(), 2);
        }
    }

    #[test]
    fn small_machines_get_fewer_tokens_and_a_note() {
        let plan = args("").unwrap().plan(1 << 30).unwrap();
        assert!(plan.cases[0].shape.tokens < 1024);
        assert_eq!(plan.notes.len(), 3);
    }

    #[test]
    fn help_fits() {
        use clap::CommandFactory as _;
        let help = Args::command().term_width(80).render_long_help().to_string();
        assert!(help.lines().all(|line| line.chars().count() <= 80), "{help}");
        assert!(!help.contains("rank-process"));
    }

    #[test]
    fn plans_travel() {
        let plan = plan("sweep --routing zipf:1.1").unwrap();
        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
    }
}
