//! `preflight`: whether this machine, or every rank of a job, has what expert parallelism needs.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use ep_runtime::{
    Ability, Check, Finding, Group, Preflight, PreflightOptions, Rendezvous, Severity, Verdict,
};
use serde::Serialize;

use crate::format::wrap;
use crate::report::{WIDTH, write};
use crate::{BenchError, Result};

/// Options of `preflight`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Print everything as JSON
    #[arg(long)]
    pub json: bool,
    /// Write the JSON to a file too
    #[arg(long, value_name = "PATH")]
    pub output: Option<PathBuf>,
    /// Compare with the other ranks of this job (torchrun, Slurm, Open MPI): one verdict for all
    #[arg(long)]
    pub ranks: bool,
    /// Do not run anything on GPUs
    #[arg(long)]
    pub no_gpu: bool,
    /// Seconds until a GPU that does not answer is given up
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
}

#[derive(Serialize)]
struct Everything<'a> {
    verdict: &'a Verdict,
    found: &'a Preflight,
}

/// Looks, prints, and says whether everything needed is there.
///
/// # Errors
/// Ranks that cannot be reached, files that cannot be written.
pub fn run(args: &Args) -> Result<bool> {
    let mut options = PreflightOptions::default();
    options.try_gpus = !args.no_gpu;
    options.limit = Duration::from_secs(args.timeout);
    let found = Preflight::here(&options);
    let (rank, verdict) =
        if args.ranks { agree(&found)? } else { (0, Verdict::of(std::slice::from_ref(&found))) };
    let everything = Everything { verdict: &verdict, found: &found };
    let json = serde_json::to_string_pretty(&everything).expect("plain data");
    if args.json {
        println!("{json}");
    } else if rank == 0 {
        print!("{}", text(&found, &verdict));
    }
    if let Some(path) = &args.output {
        write(path, &format!("{json}\n"))?;
    }
    Ok(verdict.ready)
}

fn agree(found: &Preflight) -> Result<(usize, Verdict)> {
    let failed = |detail: String| BenchError::Tool { op: "preflight", detail };
    let rendezvous = Rendezvous::from_env().map_err(|e| failed(e.to_string()))?;
    let group = Group::from_env(&rendezvous).map_err(|e| failed(e.to_string()))?;
    let verdict = found.agree(&group).map_err(|e| failed(e.to_string()))?;
    Ok((group.rank(), verdict))
}

/// Everything that was looked at, then the verdict.
fn text(found: &Preflight, verdict: &Verdict) -> String {
    let mut out = format!("{}\n", found.host);
    for check in &found.checks {
        line(&mut out, check, "");
    }
    out.push('\n');
    let ranks = |finding: &Finding| {
        let list: Vec<String> = finding.ranks.iter().map(usize::to_string).collect();
        format!("rank {}: ", list.join(", "))
    };
    for finding in verdict.findings.iter().filter(|f| f.check.severity >= Severity::Warning) {
        line(&mut out, &finding.check, &ranks(finding));
    }
    let names: Vec<&str> = verdict.abilities.iter().map(|ability| name(*ability)).collect();
    let usable = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
    let word = if verdict.ready { "ready" } else { "NOT READY" };
    let _ = writeln!(out, "{}", wrap(&format!("{word}; usable: {usable}"), WIDTH, "  "));
    out
}

fn name(ability: Ability) -> &'static str {
    match ability {
        Ability::Host => "hosts",
        Ability::Gpu => "GPUs",
        Ability::GpuPeers => "GPUs with peer access",
        Ability::Nccl => "NCCL",
        Ability::Rdma => "RDMA",
        _ => "more",
    }
}

fn line(out: &mut String, check: &Check, before: &str) {
    let mark = match check.severity {
        Severity::Ok => "ok  ",
        Severity::Note => "note",
        Severity::Warning => "WARN",
        Severity::Failure => "FAIL",
    };
    let text = format!("{before}{} {}: {}", check.area, check.name, check.found);
    let _ = writeln!(out, "{mark} {}", wrap(&text, WIDTH - 5, "     "));
    if !check.remedy.is_empty() && check.severity > Severity::Ok {
        let _ = writeln!(out, "     {}", wrap(&check.remedy, WIDTH - 5, "     "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_fits_and_says_what_to_do() {
        let mut options = PreflightOptions::default();
        options.try_gpus = false;
        let mut found = Preflight::here(&options);
        found.checks.push(Check {
            area: "host".into(),
            name: "memlock".into(),
            severity: Severity::Failure,
            found: "64 KiB and a lot of further words that make the line long enough to break"
                .into(),
            remedy: "ulimit -l unlimited".into(),
        });
        let verdict = Verdict::of(std::slice::from_ref(&found));
        let text = text(&found, &verdict);
        let wide = text.lines().find(|l| l.chars().count() > WIDTH && l.trim().contains(' '));
        assert!(wide.is_none_or(|l| l.split_whitespace().any(|w| w.len() > 40)), "{text}");
        assert!(text.contains("NOT READY") && text.contains("ulimit -l unlimited"), "{text}");
        for library in ["libcuda", "libnvidia-ml", "libnvrtc", "libnccl", "libibverbs"] {
            assert!(text.contains(library), "{library}");
        }
        assert!(text.contains("FAIL rank 0: host memlock"), "{text}");
    }
}
