//! Which experts each token goes to.
//!
//! Routes are a function of (routing, seed, rank) alone, so any rank can compute any other's.

mod generate;
mod npy;
mod replay;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::rng::{Purpose, Rng};
use crate::{BenchError, Result};

pub use replay::Replay;

/// Groups of experts in [`Routing::Grouped`], as in DeepSeek-V3 (arXiv 2412.19437, §4.2).
pub const GROUPS: usize = 8;
/// How many of them a token may use.
pub const GROUPS_KEPT: usize = 4;

/// How tokens choose experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Routing {
    /// k distinct experts, all equally likely.
    Uniform,
    /// k distinct experts drawn without replacement with odds 1 / nˢ; which expert is the n-th
    /// most popular is the same on all ranks and depends on the seed.
    Zipf(f64),
    /// As DeepSeek-V3 limits it: experts form [`GROUPS`] groups, the [`GROUPS_KEPT`] groups with
    /// the largest sum of their two best scores are kept, the k best experts of those are taken.
    Grouped,
    /// As uniform, and then this share of the entries is -1.
    Masked(f64),
    /// All tokens to experts of one rank (entries beyond the rank's experts are -1).
    OneRank(usize),
    /// Ids from a `.npy` or `.safetensors` file, and the tensor's name where there are several.
    File(PathBuf, Option<String>),
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Zipf(s) => write!(f, "zipf:{s}"),
            Self::Grouped => f.write_str("grouped"),
            Self::Masked(share) => write!(f, "masked:{share}"),
            Self::OneRank(rank) => write!(f, "one-rank:{rank}"),
            Self::File(path, None) => write!(f, "{}", path.display()),
            Self::File(path, Some(name)) => write!(f, "{}#{name}", path.display()),
        }
    }
}

impl FromStr for Routing {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (name, value) = match text.split_once(':') {
            Some((name, value)) => (name, Some(value)),
            None => (text, None),
        };
        let number = |default: Option<f64>, low: f64, high: f64| match value {
            None => default.ok_or(format!("`{name}` needs a number, as in `{name}:0.3`")),
            Some(v) => match v.parse::<f64>() {
                Ok(x) if (low..=high).contains(&x) => Ok(x),
                _ => Err(format!("`{v}` in `{text}` is not a number from {low} to {high}")),
            },
        };
        match name {
            "uniform" | "grouped" if value.is_some() => Err(format!("`{name}` takes no value")),
            "uniform" => Ok(Self::Uniform),
            "grouped" => Ok(Self::Grouped),
            "zipf" => number(Some(1.0), 0.0, 10.0).map(Self::Zipf),
            "masked" => number(None, 0.0, 1.0).map(Self::Masked),
            "one-rank" => match value.unwrap_or("0").parse() {
                Ok(rank) => Ok(Self::OneRank(rank)),
                Err(_) => Err(format!("`{text}`: the rank is not a number")),
            },
            _ => parse_file(text),
        }
    }
}

fn parse_file(text: &str) -> std::result::Result<Routing, String> {
    let (path, name) = match text.rsplit_once('#') {
        Some((path, name)) if !name.is_empty() => (path, Some(name.to_owned())),
        _ => (text, None),
    };
    if path.ends_with(".npy") || path.ends_with(".safetensors") {
        return Ok(Routing::File(path.into(), name));
    }
    Err(format!(
        "`{text}` is none of uniform, zipf[:s], grouped, masked:SHARE, one-rank[:r], FILE.npy, \
         FILE.safetensors[#TENSOR]"
    ))
}

/// One rank's tokens and the experts they go to.
#[derive(Clone, Debug, PartialEq)]
pub struct Routes {
    /// How many tokens.
    pub tokens: usize,
    /// Logical expert or -1, `[tokens][topk]`; the entries of a token are distinct.
    pub ids: Vec<i64>,
    /// Positive and summing to 1 per token; 0 where the id is -1. `[tokens][topk]`.
    pub weights: Vec<f32>,
}

/// Makes the routes of a case's ranks; reads a routing file once.
#[derive(Clone, Debug)]
pub struct Router {
    case: Case,
    popularity: Vec<f64>,
    replay: Option<Replay>,
}

impl Router {
    /// Checks that `case` can be routed and prepares what all ranks share.
    ///
    /// # Errors
    /// Sizes that do not fit together; an unusable routing file.
    pub fn new(case: &Case) -> Result<Self> {
        let (shape, usage) = (&case.shape, |why: String| Err(BenchError::Usage(why)));
        if shape.ranks == 0 || shape.topk == 0 || shape.hidden == 0 {
            return usage("--ranks, --topk and --hidden must be at least 1".into());
        }
        if shape.experts < shape.ranks {
            return usage(format!(
                "--experts {} is less than --ranks {}: every rank needs an expert",
                shape.experts, shape.ranks
            ));
        }
        if shape.topk > shape.experts {
            return usage(format!(
                "--topk {} is more than --experts {}",
                shape.topk, shape.experts
            ));
        }
        let mut replay = None;
        match &case.routing {
            Routing::Grouped => generate::check_grouped(shape)?,
            Routing::OneRank(rank) if *rank >= shape.ranks => {
                return usage(format!(
                    "--routing one-rank:{rank}: there are {} ranks",
                    shape.ranks
                ));
            }
            Routing::File(path, name) => {
                replay = Some(Replay::read(path, name.as_deref(), shape)?);
            }
            _ => {}
        }
        Ok(Self { popularity: generate::popularity(case), case: case.clone(), replay })
    }

    /// How many tokens `rank` sends: all of them, or with unequal ranks a number from 0 to all.
    pub fn tokens(&self, rank: usize) -> usize {
        let most = self.case.shape.tokens;
        if !self.case.unequal {
            return most;
        }
        Rng::new(self.case.seed, Purpose::Tokens, rank).below(most + 1)
    }

    /// The routes of `rank`.
    pub fn routes(&self, rank: usize) -> Routes {
        let (tokens, topk) = (self.tokens(rank), self.case.shape.topk);
        let ids = match &self.replay {
            Some(replay) => replay.ids(rank * self.case.shape.tokens, tokens),
            None => generate::ids(&self.case, &self.popularity, rank, tokens),
        };
        let mut rng = Rng::new(self.case.seed, Purpose::Weights, rank);
        let mut weights = Vec::with_capacity(tokens * topk);
        for token in ids.chunks_exact(topk) {
            let from = weights.len();
            weights.extend(token.iter().map(|&id| match id {
                -1 => 0.0,
                _ => 0.05 + rng.open01() as f32,
            }));
            let sum: f32 = weights[from..].iter().sum();
            weights[from..].iter_mut().filter(|w| **w > 0.0).for_each(|w| *w /= sum);
        }
        Routes { tokens, ids, weights }
    }
}

/// The owner of `expert` when experts are spread contiguously: the first `experts % ranks` ranks
/// hold one more.
pub fn owner(expert: usize, experts: usize, ranks: usize) -> usize {
    let (base, more) = (experts / ranks, experts % ranks);
    let first = more * (base + 1);
    if expert < first { expert / (base + 1) } else { more + (expert - first) / base }
}

#[cfg(test)]
mod tests;
