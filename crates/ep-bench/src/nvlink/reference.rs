//! The answers: the host backend on the same job.

use ep_runtime::{
    CombineOpts, DispatchOpts, EpBuilder, EpError, Group, Ids, MoeShape, Owned, Precision, Queue,
    Route, RowsMut, bf16,
};

use crate::case::{Case, Layout};
use crate::data::{Input, outputs};
use crate::host::{elements_mut, kind, payload};
use crate::plan::Traffic;
use crate::routing::Router;
use crate::verify::weighted;
use crate::{BenchError, Result};

/// One rank's input, and what the host backend makes of it.
#[derive(Debug)]
pub struct Reference {
    /// What is sent.
    pub input: Input,
    /// What is received.
    pub rows: Owned,
    /// The experts' outputs, rows back to back.
    pub outputs: Vec<u8>,
    /// What combine gives.
    pub combined: Vec<u8>,
}

/// An error of the library on `rank`.
pub fn failed(rank: usize, op: &'static str) -> impl Fn(EpError) -> BenchError {
    move |e| BenchError::Rank {
        rank,
        op,
        blames: e.peer().filter(|&p| p != rank),
        detail: e.to_string(),
    }
}

/// The layer of a case.
pub fn layer(case: &Case, traffic: &Traffic) -> MoeShape {
    let shape = &case.shape;
    let most = |list: &[usize]| list.iter().copied().max().unwrap_or(0).max(1);
    let moe = MoeShape::new(shape.hidden, shape.topk, shape.experts)
        .max_tokens(most(&traffic.tokens))
        .payload(kind(case.dtype))
        .payload(kind(case.dtype.back()));
    match case.layout {
        Layout::RankMajor => moe,
        Layout::ExpertMajor => {
            moe.expert_major(case.alignment).max_expert_rows(most(&traffic.expert_rows))
        }
    }
}

/// The layout of a case, as the library names it.
pub fn layout(case: &Case) -> ep_runtime::Layout {
    match case.layout {
        Layout::RankMajor => ep_runtime::Layout::RankMajor,
        Layout::ExpertMajor => ep_runtime::Layout::ExpertMajor { alignment: case.alignment },
    }
}

/// How a case is combined.
pub fn combine_opts(case: &Case, reduced: bool) -> CombineOpts {
    CombineOpts {
        weighted: weighted(case),
        precision: if reduced { Precision::Reduced } else { Precision::Exact },
        ..CombineOpts::default()
    }
}

/// Answers of all ranks, by threads of this process.
///
/// # Errors
/// What the library says.
pub fn references(case: &Case, traffic: &Traffic, reduced: bool) -> Result<Vec<Reference>> {
    let groups = Group::local(case.shape.ranks)
        .map_err(|e| BenchError::Tool { op: "host backend", detail: e.to_string() })?;
    let router = Router::new(case)?;
    std::thread::scope(|scope| {
        let start = |group: Group| {
            let router = &router;
            scope.spawn(move || {
                let one = reference(case, traffic, reduced, router, &group);
                one.inspect_err(|e| group.abort(&e.to_string()))
            })
        };
        let ranks: Vec<_> = groups.into_iter().map(start).collect();
        let died = || BenchError::RankDied { rank: 0, detail: "panicked".into() };
        ranks.into_iter().map(|r| r.join().unwrap_or_else(|_| Err(died()))).collect()
    })
}

fn reference(
    case: &Case,
    traffic: &Traffic,
    reduced: bool,
    router: &Router,
    group: &Group,
) -> Result<Reference> {
    let rank = group.rank();
    let input = Input::of(case, router, rank);
    let queue = Queue::host();
    let ep = EpBuilder::new(layer(case, traffic))
        .slots(1)
        .lanes(1)
        .build(group)
        .map_err(failed(rank, "host build"))?;
    let route =
        Route::Topk { ids: Ids::I64(&input.routes.ids), weights: Some(&input.routes.weights) };
    let opts = DispatchOpts { layout: layout(case), ..DispatchOpts::default() };
    let mut held = payload(case, &input)
        .and_then(|p| ep.dispatch(&queue, p, route, &opts))
        .map_err(failed(rank, "host dispatch"))?;
    let rows = held.to_host(&queue).map_err(failed(rank, "host rows"))?;
    let outputs = outputs(case, rank, held.num_rows());
    let back = case.dtype.back();
    let size = back.payload_bytes(case.shape.hidden);
    let mut to = held.rows_mut(kind(back)).map_err(failed(rank, "host rows_mut"))?;
    let mut to = to.payload();
    for (i, row) in outputs.chunks_exact(size).enumerate() {
        to.bytes_mut(i).copy_from_slice(row);
    }
    let mut combined = vec![0u8; input.routes.tokens * size];
    let hidden = case.shape.hidden;
    let out = match back {
        crate::case::Dtype::F32 => {
            elements_mut::<f32>(&mut combined).and_then(|out| RowsMut::new(out, hidden))
        }
        crate::case::Dtype::F16 => {
            elements_mut::<ep_runtime::f16>(&mut combined).and_then(|out| RowsMut::new(out, hidden))
        }
        _ => elements_mut::<bf16>(&mut combined).and_then(|out| RowsMut::new(out, hidden)),
    };
    out.and_then(|out| Ok(held.combine(&queue, out, &combine_opts(case, reduced))?))
        .map_err(failed(rank, "host combine"))?;
    Ok(Reference { input, rows, outputs, combined })
}

/// The first difference between received rows and the reference's.
pub fn compare_rows(want: &Owned, got: &Owned) -> std::result::Result<(), String> {
    let (want, got) = (want.rows(), got.rows());
    if got.len() < want.len() {
        return Err(format!("{} rows instead of {}", got.len(), want.len()));
    }
    for i in 0..want.len() {
        let same = |what: &str, same: bool| match same {
            true => Ok(()),
            false => Err(format!("row {i} of {}: its {what} differs", want.len())),
        };
        same("payload", want.payload().bytes(i) == got.payload().bytes(i))?;
        if let (Some(w), Some(g)) = (want.scales(), got.scales()) {
            same("scales", w.bytes(i) == g.bytes(i))?;
        }
        if let (Some(w), Some(g)) = (want.topk_ids(), got.topk_ids()) {
            same("ids", w.get(i) == g.get(i))?;
        }
        let bits = |w: &[f32]| w.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
        let source = (want.source(i), got.source(i));
        if source.0.is_some() {
            same("weights", bits(want.weights().get(i)) == bits(got.weights().get(i)))?;
        }
        same("source", source.0 == source.1)?;
    }
    if let Some(extra) = (want.len()..got.len()).find(|&i| got.source(i).is_some()) {
        return Err(format!("row {extra} behind the last has a source"));
    }
    Ok(())
}

/// The first difference between combined rows and the reference's.
pub fn compare_combined(want: &[u8], got: &[u8], row: usize) -> std::result::Result<(), String> {
    if want.len() != got.len() {
        return Err(format!("{} bytes instead of {}", got.len(), want.len()));
    }
    match want.iter().zip(got).position(|(w, g)| w != g) {
        None => Ok(()),
        Some(at) => Err(format!("token {} differs at byte {}", at / row, at % row)),
    }
}
