//! Routes recorded from a model.

use std::fs;
use std::path::Path;

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::case::Shape;
use crate::{BenchError, Result};

/// Expert ids `[T][K]` read from a file.
#[derive(Clone, Debug)]
pub struct Replay {
    ids: Vec<i64>,
    tokens: usize,
    topk: usize,
}

/// Rows, columns, values.
pub(super) type Table = (usize, usize, Vec<i64>);

impl Replay {
    /// Reads a `.npy` or `.safetensors` file of `[T, K]` int32, int64 or uint32 ids (uint32 of all
    /// ones is -1) and checks it against `shape`.
    ///
    /// # Errors
    /// Anything wrong with the file, with its place in the file.
    pub fn read(path: &Path, tensor: Option<&str>, shape: &Shape) -> Result<Self> {
        let wrong = |detail| BenchError::RoutingFile { path: path.to_owned(), detail };
        let bytes = fs::read(path).map_err(|e| wrong(e.to_string()))?;
        let npy = path.extension().is_some_and(|e| e == "npy");
        let table = match (npy, tensor) {
            (true, Some(_)) => Err("a .npy file holds one array: leave out `#TENSOR`".into()),
            (true, None) => super::npy::read(&bytes),
            (false, _) => from_safetensors(&bytes, tensor),
        };
        let (tokens, topk, ids) = table.map_err(wrong)?;
        let replay = Self { ids, tokens, topk };
        replay.check(shape).map_err(wrong)?;
        Ok(replay)
    }

    /// The number of columns in the file at `path`.
    ///
    /// # Errors
    /// As [`Replay::read`].
    pub fn columns(path: &Path, tensor: Option<&str>) -> Result<usize> {
        let any = Shape { ranks: 1, tokens: 0, hidden: 1, topk: 0, experts: usize::MAX };
        Self::read(path, tensor, &any).map(|replay| replay.topk)
    }

    fn check(&self, shape: &Shape) -> std::result::Result<(), String> {
        if self.tokens == 0 || self.topk == 0 {
            return Err(format!("shape [{}, {}] holds no routes", self.tokens, self.topk));
        }
        if shape.topk != 0 && self.topk != shape.topk {
            return Err(format!("has {} experts per token, --topk is {}", self.topk, shape.topk));
        }
        let mut seen: Vec<i64> = Vec::with_capacity(self.topk);
        for (t, token) in self.ids.chunks_exact(self.topk).enumerate() {
            for (k, &id) in token.iter().enumerate() {
                if id < -1 {
                    return Err(format!("token {t}, entry {k}: id {id} is less than -1"));
                }
                if id >= 0 && id as usize >= shape.experts {
                    return Err(format!(
                        "token {t}, entry {k}: id {id} is out of range for --experts {}",
                        shape.experts
                    ));
                }
            }
            seen.clear();
            seen.extend(token.iter().filter(|&&id| id >= 0));
            seen.sort_unstable();
            if let Some(pair) = seen.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(format!("token {t} names expert {} twice", pair[0]));
            }
        }
        Ok(())
    }

    /// `tokens` rows from row `first` on; the file starts over where it ends.
    pub fn ids(&self, first: usize, tokens: usize) -> Vec<i64> {
        (first..first + tokens)
            .flat_map(|t| {
                let row = t % self.tokens;
                &self.ids[row * self.topk..(row + 1) * self.topk]
            })
            .copied()
            .collect()
    }

    /// How many tokens the file holds.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

pub(super) fn two_dims(shape: &[usize]) -> std::result::Result<(usize, usize), String> {
    match *shape {
        [tokens, topk] => Ok((tokens, topk)),
        _ => Err(format!("shape is {shape:?}, expected [tokens, topk]")),
    }
}

pub(super) fn from_u32(id: u32) -> i64 {
    if id == u32::MAX { -1 } else { i64::from(id) }
}

fn from_safetensors(bytes: &[u8], name: Option<&str>) -> std::result::Result<Table, String> {
    let file =
        SafeTensors::deserialize(bytes).map_err(|e| format!("not a .safetensors file: {e}"))?;
    let view = match name {
        Some(name) => file.tensor(name).map_err(|_| {
            format!("has no tensor `{name}`; it has {}", quoted(file.names().into_iter()))
        })?,
        None => only_ids(&file)?,
    };
    let (tokens, topk) = two_dims(view.shape())?;
    let data = view.data();
    let ids = match view.dtype() {
        Dtype::I32 => words(data).map(|w| i64::from(i32::from_le_bytes(w))).collect(),
        Dtype::U32 => words(data).map(|w| from_u32(u32::from_le_bytes(w))).collect(),
        Dtype::I64 => words(data).map(i64::from_le_bytes).collect(),
        other => return Err(format!("holds {other:?}, expected I32, I64 or U32")),
    };
    Ok((tokens, topk, ids))
}

/// The one tensor that could be ids.
fn only_ids<'a>(file: &SafeTensors<'a>) -> std::result::Result<TensorView<'a>, String> {
    let mut fits: Vec<(String, TensorView<'a>)> = file.tensors();
    fits.retain(|(_, view)| {
        view.shape().len() == 2 && matches!(view.dtype(), Dtype::I32 | Dtype::I64 | Dtype::U32)
    });
    fits.sort_by(|a, b| a.0.cmp(&b.0));
    match fits.len() {
        0 => Err("has no [tokens, topk] tensor of I32, I64 or U32".into()),
        1 => Ok(fits.remove(0).1),
        _ => Err(format!(
            "has several tensors that could be ids: {}; choose one by `FILE#TENSOR`",
            quoted(fits.iter().map(|(name, _)| name.as_str()))
        )),
    }
}

fn quoted<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ")
}

fn words<const N: usize>(data: &[u8]) -> impl Iterator<Item = [u8; N]> {
    data.as_chunks::<N>().0.iter().copied()
}
