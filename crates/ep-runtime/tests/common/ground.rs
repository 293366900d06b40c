//! Where a test's ranks keep their rows.

use ep_runtime::{
    DType, Dispatched, EpBuilder, EpError, Ids, Payload, PayloadKind, Queue, Route, Rows, RowsMut,
};

use super::{Matrix, Tokens};

/// One rank's memory.
pub trait Ground {
    fn queue(&self) -> Queue;

    /// Whether results may be copied out.
    fn owns(&self) -> bool;

    fn rows<'a>(&'a self, matrix: &'a Matrix, dtype: DType) -> Rows<'a>;

    fn payload<'a>(&'a self, tokens: &'a Tokens) -> Result<Payload<'a>, EpError>;

    fn route<'a>(&'a self, tokens: &'a Tokens, narrow: bool) -> Route<'a>;

    /// Writes rows, and the weights they carry, into a result's slot.
    fn write(&self, into: &mut Dispatched, kind: PayloadKind, rows: &[Vec<u8>], weights: &[f32]);

    /// Runs `f` on memory filled with NaN, and brings back what it left there.
    fn with_outputs(
        &self,
        rows: &mut Matrix,
        dtype: DType,
        weights: &mut Matrix,
        f: &mut dyn FnMut(RowsMut<'_>, RowsMut<'_>) -> Result<(), EpError>,
    ) -> Result<(), EpError>;
}

/// All ranks' memory.
pub trait Grounds: Sync {
    /// Puts a rank of `world` where it belongs.
    fn place(&self, rank: usize, world: usize, builder: EpBuilder) -> EpBuilder;

    fn ground(&self, rank: usize, world: usize) -> Box<dyn Ground + '_>;
}

/// Ranks on the host.
pub struct Hosts;

/// A rank on the host.
#[derive(Default)]
struct Host {
    narrow: std::cell::OnceCell<Vec<i32>>,
}

impl Grounds for Hosts {
    fn place(&self, _rank: usize, _world: usize, builder: EpBuilder) -> EpBuilder {
        builder
    }

    fn ground(&self, _rank: usize, _world: usize) -> Box<dyn Ground + '_> {
        Box::<Host>::default()
    }
}

impl Ground for Host {
    fn queue(&self) -> Queue {
        Queue::host()
    }

    fn owns(&self) -> bool {
        true
    }

    fn rows<'a>(&'a self, matrix: &'a Matrix, dtype: DType) -> Rows<'a> {
        matrix.rows(dtype)
    }

    fn payload<'a>(&'a self, tokens: &'a Tokens) -> Result<Payload<'a>, EpError> {
        tokens.payload()
    }

    fn route<'a>(&'a self, tokens: &'a Tokens, narrow: bool) -> Route<'a> {
        let ids = match narrow {
            true => Ids::I32(
                self.narrow.get_or_init(|| tokens.ids.iter().map(|&id| id as i32).collect()),
            ),
            false => tokens.ids(),
        };
        Route::Topk { ids, weights: tokens.weights.as_deref() }
    }

    fn write(&self, into: &mut Dispatched, kind: PayloadKind, rows: &[Vec<u8>], weights: &[f32]) {
        let mut outputs = into.rows_mut(kind).expect("combinable");
        let per_row = weights.len() / rows.len().max(1);
        for (i, row) in rows.iter().enumerate() {
            outputs.payload().bytes_mut(i).copy_from_slice(row);
            outputs.weights(i).copy_from_slice(&weights[i * per_row..][..per_row]);
        }
    }

    fn with_outputs(
        &self,
        rows: &mut Matrix,
        dtype: DType,
        weights: &mut Matrix,
        f: &mut dyn FnMut(RowsMut<'_>, RowsMut<'_>) -> Result<(), EpError>,
    ) -> Result<(), EpError> {
        f(rows.rows_mut(dtype), weights.rows_mut(DType::F32))
    }
}
