//! What every rank holds after combine.

use super::dispatch::Oracle;
use super::float::Float;
use super::job::Verdict;

/// Which rows are combined, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// One row per (token, rank).
    RankMajor,
    /// One row per (token, expert), one rounding.
    ExpertExact,
    /// One row per (token, expert); each rank reduces its own to one, rounded, and the token's
    /// home reduces those.
    ExpertReduced,
}

/// A combine of the whole job.
#[derive(Clone, Copy, Debug)]
pub struct Combine<'a> {
    /// Which rows, and how.
    pub mode: Mode,
    /// Of outputs, biases and results.
    pub dtype: Float,
    /// Multiply each row by the token's weight for its expert; not for [`Mode::RankMajor`].
    pub weighted: bool,
    /// `[ranks][rows of the mode's layout, padding included]`, each `hidden` elements.
    pub outputs: &'a [Vec<Vec<u8>>],
    /// `[0..=2][ranks][tokens]`, each `hidden` elements.
    pub biases: &'a [Vec<Vec<Vec<u8>>>],
}

/// Numbers that rows carry home, one per (token, k).
#[derive(Clone, Copy, Debug)]
pub enum WeightRows<'a> {
    /// `[ranks][rank-major rows * topk]`.
    RankMajor(&'a [Vec<f32>]),
    /// `[ranks][expert-major rows]`, padding included.
    ExpertMajor(&'a [Vec<f32>]),
}

impl Oracle<'_> {
    /// Combines `combine.outputs`: `[ranks][tokens]`, each `hidden` elements.
    ///
    /// One f32 left fold over (rank, local expert) from the first row, multiply and add rounded
    /// separately; no rows give +0; then the biases; then one rounding to nearest even.
    ///
    /// # Errors
    /// [`Verdict::Shape`] if a length does not fit.
    pub fn combine(&self, combine: &Combine) -> Result<Vec<Vec<Vec<u8>>>, Verdict> {
        self.check(combine)?;
        let home = |(rank, tokens): (usize, usize)| {
            (0..tokens).map(|token| self.combine_token(combine, rank, token)).collect()
        };
        Ok(self.job.inputs.iter().map(|input| input.tokens).enumerate().map(home).collect())
    }

    fn combine_token(&self, combine: &Combine, home: usize, token: usize) -> Vec<u8> {
        let (dtype, hidden) = (combine.dtype, self.job.hidden);
        let mut terms: Vec<(&[u8], Option<f32>)> = Vec::new();
        let mut partial: Vec<Vec<u8>> = Vec::new();
        for (rank, held) in self.ranks.iter().enumerate() {
            let Some(&row) = held.row_of.get(&(home, token)) else { continue };
            if combine.mode == Mode::RankMajor {
                terms.push((&combine.outputs[rank][row], None));
                continue;
            }
            let record = &held.rank_major[row];
            let ids = record.ids.iter().enumerate().filter(|(_, id)| **id != -1);
            let mut experts: Vec<(usize, usize)> = ids.map(|(k, id)| (*id as usize, k)).collect();
            experts.sort_unstable();
            let mine = experts.iter().map(|&(local, k)| {
                let position = held.position_of[&(row, local)];
                let weight = combine.weighted.then_some(record.weights[k]);
                (combine.outputs[rank][position].as_slice(), weight)
            });
            match combine.mode {
                Mode::ExpertReduced => {
                    partial.push(fold(dtype, hidden, &mine.collect::<Vec<_>>(), &[]));
                }
                _ => terms.extend(mine),
            }
        }
        terms.extend(partial.iter().map(|row| (row.as_slice(), None)));
        let biases: Vec<&[u8]> =
            combine.biases.iter().map(|bias| bias[home][token].as_slice()).collect();
        fold(dtype, hidden, &terms, &biases)
    }

    fn check(&self, combine: &Combine) -> Result<(), Verdict> {
        let refuse = |why: &str| Err(Verdict::Shape(why.into()));
        let bytes = self.job.hidden * combine.dtype.size();
        let fits = |rows: &Vec<Vec<u8>>, count: usize| {
            rows.len() == count && rows.iter().all(|row| row.len() == bytes)
        };
        if combine.weighted && combine.mode == Mode::RankMajor {
            return refuse("a rank-major row has several weights");
        }
        let rows = self.ranks.iter().map(|rank| match combine.mode {
            Mode::RankMajor => rank.rank_major.len(),
            Mode::ExpertExact | Mode::ExpertReduced => rank.expert_major.rows.len(),
        });
        if combine.outputs.len() != self.job.ranks
            || !combine.outputs.iter().zip(rows).all(|(output, rows)| fits(output, rows))
        {
            return refuse("the outputs do not fit the rows dispatched");
        }
        let inputs = &self.job.inputs;
        let bias_fits = |bias: &Vec<Vec<Vec<u8>>>| {
            bias.len() == inputs.len()
                && bias.iter().zip(inputs).all(|(rows, input)| fits(rows, input.tokens))
        };
        if combine.biases.len() > 2 || !combine.biases.iter().all(bias_fits) {
            return refuse("the biases do not fit the tokens");
        }
        Ok(())
    }

    /// Brings one number per (token, k) home: `[ranks][tokens * topk]`, 0 where no row has it.
    ///
    /// # Errors
    /// [`Verdict::Shape`] if a length does not fit.
    pub fn combine_weights(&self, rows: WeightRows) -> Result<Vec<Vec<f32>>, Verdict> {
        let topk = self.job.topk;
        let (WeightRows::RankMajor(values) | WeightRows::ExpertMajor(values)) = rows;
        let needed = self.ranks.iter().map(|rank| match rows {
            WeightRows::RankMajor(_) => rank.rank_major.len() * topk,
            WeightRows::ExpertMajor(_) => rank.expert_major.rows.len(),
        });
        if !values.iter().map(Vec::len).eq(needed) {
            return Err(Verdict::Shape("the weights do not fit the rows dispatched".into()));
        }
        let mut home: Vec<Vec<f32>> =
            self.job.inputs.iter().map(|input| vec![0.0; input.tokens * topk]).collect();
        for (held, values) in self.ranks.iter().zip(values) {
            for (index, row) in held.rank_major.iter().enumerate() {
                for (k, id) in row.ids.iter().enumerate().filter(|(_, id)| **id != -1) {
                    let from = match rows {
                        WeightRows::RankMajor(_) => index * topk + k,
                        WeightRows::ExpertMajor(_) => held.position_of[&(index, *id as usize)],
                    };
                    home[row.source_rank][row.source_token * topk + k] = values[from];
                }
            }
        }
        Ok(home)
    }
}

/// One f32 left fold from the first row, biases last, one rounding.
fn fold(dtype: Float, hidden: usize, terms: &[(&[u8], Option<f32>)], biases: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::with_capacity(hidden * dtype.size());
    for element in 0..hidden {
        let value = |&(row, weight): &(&[u8], Option<f32>)| {
            let value = dtype.load(row, element);
            weight.map_or(value, |weight| weight * value)
        };
        let sum = terms.iter().map(value).reduce(|sum, term| sum + term).unwrap_or(0.0);
        let sum = biases.iter().fold(sum, |sum, bias| sum + dtype.load(bias, element));
        dtype.push(&mut out, sum);
    }
    out
}
