//! Runs the layer on several ranks and compares it with the dense layer.

use std::error::Error;
use std::process::ExitCode;

use clap::Parser;
use ep_runtime::{EpError, Group, Layout, Rendezvous, bf16};
use moe_layer::check::{Outcome, check};
use moe_layer::host::Shape;

/// A mixture-of-experts layer on several ranks, compared with the dense layer on one.
///
/// Ranks are threads of this process, unless a launcher's variables (EP_RENDEZVOUS, or torchrun's
/// MASTER_ADDR) say that this process is one of them.
#[derive(Clone, Copy, Debug, Parser)]
struct Args {
    /// Ranks, where they are threads
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    /// Tokens of each rank
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// Elements of a token
    #[arg(long, default_value_t = 128)]
    hidden: usize,
    /// Elements between the two matrices of an expert
    #[arg(long, default_value_t = 256)]
    ffn: usize,
    /// Experts of all ranks
    #[arg(long, default_value_t = 16)]
    experts: usize,
    /// Experts per token
    #[arg(long, default_value_t = 4)]
    topk: usize,
}

/// What a rank ran, and how it went.
type Lines = Vec<(&'static str, Outcome)>;

fn rank(group: &Group, args: Args) -> Result<Lines, EpError> {
    let Args { hidden, ffn, experts, topk, tokens, .. } = args;
    let shape = Shape { hidden, ffn, experts, topk };
    let expert_major = Layout::ExpertMajor { alignment: 1 };
    Ok(vec![
        ("f32, expert-major", check::<f32>(group, shape, expert_major, tokens, tokens)?),
        ("f32, rank-major", check::<f32>(group, shape, Layout::RankMajor, tokens, tokens)?),
        ("bf16, expert-major", check::<bf16>(group, shape, expert_major, tokens, tokens)?),
        ("bf16, rank-major", check::<bf16>(group, shape, Layout::RankMajor, tokens, tokens)?),
    ])
}

fn threads(args: Args) -> Result<Vec<Lines>, EpError> {
    let groups = Group::local(args.ranks)?;
    std::thread::scope(|scope| {
        let start = |group| scope.spawn(move || rank(&group, args));
        let ranks: Vec<_> = groups.into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect()
    })
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let args = Args::parse();
    let launched = ["EP_RENDEZVOUS", "MASTER_ADDR"].iter().any(|v| std::env::var_os(v).is_some());
    let results = if launched {
        let group = Group::from_env(&Rendezvous::from_env()?)?;
        println!("rank {} of {}, a process", group.rank(), group.world());
        vec![rank(&group, args)?]
    } else {
        println!("{} ranks, threads of this process", args.ranks);
        threads(args)?
    };
    for i in 0..results[0].len() {
        let name = results[0][i].0;
        let outcomes = || results.iter().map(|lines| lines[i].1);
        let bits = if outcomes().all(|o| o.same_bits) { "same bits" } else { "BITS DIFFER" };
        let distance = outcomes().map(|o| o.distance).fold(0.0, f32::max);
        let largest = outcomes().map(|o| o.largest).fold(0.0, f32::max);
        println!("{name:<19} {bits}; off the plain dense layer by {distance:.1e} of {largest:.1}");
    }
    let failed = results.iter().flatten().any(|(_, outcome)| !outcome.same_bits);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
