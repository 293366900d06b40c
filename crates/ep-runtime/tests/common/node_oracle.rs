//! `Precision::NodeReduced` from its definition, for whole jobs: nothing of the library is in it.

use ep_bench::oracle::{Combine, Float, Mode, Oracle};

/// `[ranks][tokens]` rows. `node_of` is the node of every rank.
pub fn combine(oracle: &Oracle<'_>, combine: &Combine<'_>, node_of: &[usize]) -> Vec<Vec<Vec<u8>>> {
    let home = |home: usize| {
        let tokens = 0..oracle.job.inputs[home].tokens;
        tokens.map(|token| token_sum(oracle, combine, node_of, (home, token))).collect()
    };
    (0..oracle.job.ranks).map(home).collect()
}

fn token_sum(
    oracle: &Oracle<'_>,
    combine: &Combine<'_>,
    node_of: &[usize],
    (home, token): (usize, usize),
) -> Vec<u8> {
    let (dtype, hidden) = (combine.dtype, oracle.job.hidden);
    let mut nodes: Vec<Vec<u8>> = Vec::new();
    for node in 0..=node_of.iter().copied().max().unwrap_or(0) {
        let mut terms = Vec::new();
        for rank in (0..oracle.job.ranks).filter(|&rank| node_of[rank] == node) {
            terms.extend(rank_terms(oracle, combine, rank, (home, token)));
        }
        if !terms.is_empty() {
            nodes.push(fold(dtype, hidden, &terms));
        }
    }
    let mut terms: Vec<(&[u8], f32)> = nodes.iter().map(|row| (row.as_slice(), 1.0)).collect();
    // A sum of nothing is +0, to which biases are added.
    let zeros = dtype.row(&vec![0.0; hidden]);
    if terms.is_empty() {
        terms.push((&zeros, 1.0));
    }
    terms.extend(combine.biases.iter().map(|bias| (bias[home][token].as_slice(), 1.0)));
    fold(dtype, hidden, &terms)
}

/// The rows of a token at a rank, by local expert, with their weights.
fn rank_terms<'a>(
    oracle: &Oracle<'_>,
    combine: &Combine<'a>,
    rank: usize,
    (home, token): (usize, usize),
) -> Vec<(&'a [u8], f32)> {
    let held = &oracle.ranks[rank];
    let outputs: &'a [Vec<u8>] = &combine.outputs[rank];
    let is_it =
        |row: &ep_bench::oracle::RankRow<'_>| (row.source_rank, row.source_token) == (home, token);
    let Some(row) = held.rank_major.iter().position(is_it) else { return Vec::new() };
    if combine.mode == Mode::RankMajor {
        return vec![(&outputs[row], 1.0)];
    }
    // Expert-major rows are grouped by local expert.
    let experts = held.expert_major.rows.iter().enumerate();
    let mine = experts.filter(|(_, expert)| expert.row == Some(row));
    mine.map(|(i, expert)| {
        (outputs[i].as_slice(), if combine.weighted { expert.weight } else { 1.0 })
    })
    .collect()
}

/// A left fold in f32 from the first row, rounded once. A weight of 1 changes nothing.
fn fold(dtype: Float, hidden: usize, terms: &[(&[u8], f32)]) -> Vec<u8> {
    let sum = |element: usize| {
        let values = terms.iter().map(|&(row, weight)| weight * dtype.load(row, element));
        values.reduce(|sum, value| sum + value).unwrap_or(0.0)
    };
    dtype.row(&(0..hidden).map(sum).collect::<Vec<_>>())
}
