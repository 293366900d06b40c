//! Random routes.

use super::{GROUPS, GROUPS_KEPT, Routing, owner};
use crate::case::{Case, Shape};
use crate::rng::{Purpose, Rng};
use crate::{BenchError, Result};

pub(super) fn check_grouped(shape: &Shape) -> Result<()> {
    let Shape { experts, topk, .. } = *shape;
    if !experts.is_multiple_of(GROUPS) || experts / GROUPS < 2 {
        return Err(BenchError::Usage(format!(
            "--routing grouped needs a multiple of {GROUPS} experts, at least {}; got {experts}",
            2 * GROUPS
        )));
    }
    let reach = GROUPS_KEPT * (experts / GROUPS);
    if topk > reach {
        return Err(BenchError::Usage(format!(
            "--routing grouped: --topk {topk} is more than the {reach} experts of {GROUPS_KEPT} \
             of {GROUPS} groups"
        )));
    }
    Ok(())
}

/// The odds of each expert, which all ranks share.
pub(super) fn popularity(case: &Case) -> Vec<f64> {
    let Routing::Zipf(s) = case.routing else { return Vec::new() };
    let mut odds: Vec<f64> = (1..=case.shape.experts).map(|n| (n as f64).powf(-s)).collect();
    let mut rng = Rng::new(case.seed, Purpose::Popularity, 0);
    for i in (1..odds.len()).rev() {
        odds.swap(i, rng.below(i + 1));
    }
    odds
}

/// The ids of one rank's tokens, `[tokens][topk]`.
pub(super) fn ids(case: &Case, popularity: &[f64], rank: usize, tokens: usize) -> Vec<i64> {
    let Shape { ranks, topk, experts, .. } = case.shape;
    let mut rng = Rng::new(case.seed, Purpose::Ids, rank);
    let mut ids = Vec::with_capacity(tokens * topk);
    let all: Vec<i64> = (0..experts as i64).collect();
    match &case.routing {
        Routing::Uniform => distinct(&mut rng, all, topk, tokens, &mut ids),
        Routing::Masked(share) => {
            distinct(&mut rng, all, topk, tokens, &mut ids);
            ids.iter_mut().filter(|_| rng.open01() < *share).for_each(|id| *id = -1);
        }
        Routing::OneRank(target) => {
            let mine = all
                .into_iter()
                .filter(|&e| owner(e as usize, experts, ranks) == *target)
                .collect::<Vec<_>>();
            distinct(&mut rng, mine, topk, tokens, &mut ids);
        }
        Routing::Zipf(_) => {
            let mut keys = Vec::with_capacity(experts);
            for _ in 0..tokens {
                // Exponential clocks: the k that ring first are a weighted sample without
                // replacement (Efraimidis and Spirakis, 2006).
                keys.clear();
                keys.extend(
                    popularity.iter().zip(0i64..).map(|(odds, e)| (-rng.open01().ln() / odds, e)),
                );
                smallest(&mut keys, topk, &mut ids);
            }
        }
        Routing::Grouped => {
            let mut scores = vec![0.0; experts];
            let mut keys = Vec::with_capacity(experts);
            for _ in 0..tokens {
                scores.iter_mut().for_each(|s| *s = rng.open01());
                keys.clear();
                for group in best_groups(&scores) {
                    let size = experts / GROUPS;
                    keys.extend((group * size..(group + 1) * size).map(|e| (-scores[e], e as i64)));
                }
                smallest(&mut keys, topk, &mut ids);
            }
        }
        Routing::File(..) => unreachable!("files are replayed, not generated"),
    }
    ids
}

/// `topk` distinct members of `from` per token, in random order; -1 where there are too few.
fn distinct(rng: &mut Rng, mut from: Vec<i64>, topk: usize, tokens: usize, ids: &mut Vec<i64>) {
    let take = topk.min(from.len());
    for _ in 0..tokens {
        for i in 0..take {
            let other = i + rng.below(from.len() - i);
            from.swap(i, other);
        }
        ids.extend_from_slice(&from[..take]);
        ids.extend(std::iter::repeat_n(-1, topk - take));
    }
}

/// Appends the ids of the `topk` smallest keys, smallest first.
fn smallest(keys: &mut [(f64, i64)], topk: usize, ids: &mut Vec<i64>) {
    let order = |a: &(f64, i64), b: &(f64, i64)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
    if topk < keys.len() {
        keys.select_nth_unstable_by(topk - 1, order);
    }
    keys[..topk].sort_unstable_by(order);
    ids.extend(keys[..topk].iter().map(|k| k.1));
}

/// The groups that are kept: by the sum of their two best scores.
pub(super) fn best_groups(scores: &[f64]) -> [usize; GROUPS_KEPT] {
    let mut groups: Vec<(f64, usize)> = scores
        .chunks_exact(scores.len() / GROUPS)
        .map(|group| {
            let (mut first, mut second) = (f64::MIN, f64::MIN);
            for &s in group {
                if s > first {
                    (first, second) = (s, first);
                } else if s > second {
                    second = s;
                }
            }
            first + second
        })
        .zip(0..)
        .collect();
    groups.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    std::array::from_fn(|i| groups[i].1)
}
