//! What a dispatch sends and where to.

use ep_kernels::{DType, Ids, PayloadKind, ScaleKind};

use crate::ep::Inner;
use crate::{EpError, Handle, Layout, Memory, Result, Rows};

/// The rows of a dispatch, `[T, hidden]`, with what belongs to each.
#[derive(Clone, Copy, Debug)]
pub struct Payload<'a> {
    pub(crate) rows: Rows<'a>,
    pub(crate) scales: Option<Rows<'a>>,
    pub(crate) kind: PayloadKind,
}

impl<'a> Payload<'a> {
    /// Rows of bf16, f16 or f32.
    ///
    /// # Errors
    /// When the rows are of another type.
    pub fn new(rows: Rows<'a>) -> Result<Self> {
        let kind = match rows.dtype() {
            DType::Bf16 => PayloadKind::Bf16,
            DType::F16 => PayloadKind::F16,
            DType::F32 => PayloadKind::F32,
            other => {
                let detail = format!("{other:?} rows need Payload::fp8 or Payload::opaque");
                return Err(EpError::argument("Payload::new", detail));
            }
        };
        Ok(Self { rows, scales: None, kind })
    }

    /// Rows of fp8 e4m3 and one scale per block of 128 elements, `[T, ceil(hidden / 128)]`: f32, or
    /// bytes that are UE8M0 exponents.
    ///
    /// # Errors
    /// When the types are others or the numbers of rows differ.
    pub fn fp8(rows: Rows<'a>, scales: Rows<'a>) -> Result<Self> {
        const OP: &str = "Payload::fp8";
        let scale = match scales.dtype() {
            DType::F32 => ScaleKind::F32,
            DType::Bytes => ScaleKind::Ue8m0,
            other => return Err(EpError::argument(OP, format!("scales are {other:?}"))),
        };
        if rows.dtype() != DType::Fp8E4M3 {
            return Err(EpError::argument(OP, format!("rows are {:?}", rows.dtype())));
        }
        if rows.len() != scales.len() {
            let detail = format!("{} rows with {} rows of scales", rows.len(), scales.len());
            return Err(EpError::argument(OP, detail));
        }
        Ok(Self { rows, scales: Some(scales), kind: PayloadKind::Fp8 { scales: scale } })
    }

    /// Rows of bytes nobody looks into, with auxiliary bytes per row. They cannot be combined.
    ///
    /// # Errors
    /// When the rows are not bytes or the numbers of rows differ.
    pub fn opaque(rows: Rows<'a>, aux: Option<Rows<'a>>) -> Result<Self> {
        const OP: &str = "Payload::opaque";
        let bytes = |r: &Rows<'_>| r.dtype() == DType::Bytes;
        if !bytes(&rows) || !aux.as_ref().is_none_or(bytes) {
            return Err(EpError::argument(OP, "rows and auxiliary rows have to be bytes"));
        }
        if aux.is_some_and(|a| a.len() != rows.len()) {
            return Err(EpError::argument(OP, "as many auxiliary rows as rows are needed"));
        }
        let row_bytes = size(OP, rows.row_bytes())?;
        let aux_bytes = size(OP, aux.map_or(0, |a| a.row_bytes()))?;
        Ok(Self { rows, scales: aux, kind: PayloadKind::Opaque { row_bytes, aux_bytes } })
    }

    /// The type of payload.
    pub fn kind(&self) -> PayloadKind {
        self.kind
    }
}

fn size(op: &'static str, bytes: usize) -> Result<u32> {
    u32::try_from(bytes).map_err(|_| EpError::argument(op, format!("rows of {bytes} bytes")))
}

/// Where the tokens of a dispatch go.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Route<'a> {
    /// To the experts the gate chose.
    Topk {
        /// Expert ids `[T, K]`; -1 (in u32: `u32::MAX`) for none.
        ids: Ids<'a>,
        /// Gate weights `[T, K]`; 1.0 where not given.
        weights: Option<&'a [f32]>,
    },
    /// As [`Route::Topk`], with ids and weights in the memory of the GPU.
    #[cfg(feature = "cuda")]
    Device {
        /// Expert ids `[T, K]`.
        ids: DeviceIds<'a>,
        /// Gate weights `[T, K]`, dense f32; 1.0 where not given.
        weights: Option<Rows<'a>>,
    },
    /// Where an earlier dispatch sent them.
    Cached(&'a Handle),
}

/// Expert ids `[T, K]` in the memory of a GPU, dense.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
pub struct DeviceIds<'a> {
    pub(crate) address: u64,
    pub(crate) len: usize,
    pub(crate) kind: IdKind,
    pub(crate) ordinal: usize,
    memory: std::marker::PhantomData<&'a [u8]>,
}

/// The type of expert ids.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IdKind {
    /// `u32`; `u32::MAX` for none.
    U32,
    /// `i32`; -1 for none.
    I32,
    /// `i64`; -1 for none.
    I64,
}

#[cfg(feature = "cuda")]
impl DeviceIds<'_> {
    /// `len` = T * K ids at `address` in the memory of the GPU `ordinal`.
    ///
    /// # Safety
    /// They are readable for the view's life and written by nobody in the order of the queue they
    /// are passed with.
    pub unsafe fn from_raw(ordinal: usize, address: u64, len: usize, kind: IdKind) -> Self {
        Self { address, len, kind, ordinal, memory: std::marker::PhantomData }
    }
}

/// How a dispatch is done. Equal on every rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct DispatchOpts {
    /// The lane; operations in flight together use different ones.
    pub lane: usize,
    /// The layout of the received rows. A cached dispatch has that of its handle.
    pub layout: Layout,
    /// Show the whole capacity of the slot instead of the rows there are; the rows behind them have
    /// no source. For engines whose shapes must not change. On GPUs the host then waits for no counts;
    /// where ranks are not mapped, only in a layer with [`MoeShape::fixed_blocks`](crate::MoeShape).
    pub capacity: bool,
    /// The ids name physical experts (rank by rank, then local number), not logical ones.
    pub physical_ids: bool,
}

/// Checks a dispatch's arguments against the layer.
pub(crate) fn check(
    op: &'static str,
    ep: &Inner,
    payload: &Payload<'_>,
    route: &Route<'_>,
    opts: &DispatchOpts,
) -> Result<()> {
    let bad = |detail: String| Err(EpError::argument(op, detail));
    let shape = &ep.shape;
    let tokens = payload.rows.len();
    if tokens > shape.max_tokens {
        return bad(format!("{tokens} tokens; the layer was built for {}", shape.max_tokens));
    }
    check_payload(op, ep, payload)?;
    check_place(op, ep, payload, route)?;
    match route {
        Route::Cached(handle) if handle.routing.ep != ep.id => {
            bad("the handle belongs to another group, shape or rank".into())
        }
        Route::Cached(handle) if handle.tokens() != tokens => {
            bad(format!("{tokens} rows; the handle routes {} tokens", handle.tokens()))
        }
        Route::Cached(_) => Ok(()),
        #[cfg(feature = "cuda")]
        Route::Device { ids, weights } => {
            let need = tokens * shape.topk;
            if ids.len != need {
                let (k, n) = (shape.topk, ids.len);
                return bad(format!("{n} expert ids; {tokens} tokens of top-{k} need {need}"));
            }
            if let Some(w) = weights {
                let dense = w.stride() == w.row_bytes() || w.len() < 2;
                if w.dtype() != DType::F32 || !dense || w.len() * w.row_bytes() != need * 4 {
                    return bad(format!("weights are not {need} dense f32"));
                }
            }
            check_layout(op, ep, opts.layout)
        }
        Route::Topk { ids, weights } => {
            let need = tokens * shape.topk;
            if ids.len() != need {
                let (k, n) = (shape.topk, ids.len());
                return bad(format!("{n} expert ids; {tokens} tokens of top-{k} need {need}"));
            }
            if let Some(n) = weights.map(<[f32]>::len).filter(|&n| n != need) {
                return bad(format!("{n} weights; {tokens} tokens need {need}"));
            }
            check_layout(op, ep, opts.layout)
        }
    }
}

/// Rows, ids and weights have to be where the layer works.
fn check_place(
    op: &'static str,
    ep: &Inner,
    payload: &Payload<'_>,
    route: &Route<'_>,
) -> Result<()> {
    let place = |what: &str, at: Memory| match at == ep.place {
        true => Ok(()),
        false => Err(EpError::argument(
            op,
            format!("{what} are in {at:?}, the layer works in {:?}", ep.place),
        )),
    };
    place("rows", payload.rows.place())?;
    if let Some(scales) = &payload.scales {
        place("scales", scales.place())?;
    }
    match route {
        Route::Topk { .. } => place("ids", Memory::Host),
        #[cfg(feature = "cuda")]
        Route::Device { ids, weights } => {
            place("ids", Memory::Cuda { ordinal: ids.ordinal })?;
            weights.as_ref().map_or(Ok(()), |w| place("weights", w.place()))
        }
        Route::Cached(_) => Ok(()),
    }
}

fn check_payload(op: &'static str, ep: &Inner, payload: &Payload<'_>) -> Result<()> {
    let bad = |detail: String| Err(EpError::argument(op, detail));
    let Payload { rows, scales, kind } = payload;
    if !ep.shape.payloads.contains(kind) {
        let built: Vec<String> = ep.shape.payloads.iter().map(|p| p.to_string()).collect();
        return bad(format!("payload {kind}; the layer was built for {}", built.join(", ")));
    }
    let hidden = ep.shape.hidden;
    if rows.row_bytes() != kind.payload_bytes(hidden) {
        let need = kind.payload_bytes(hidden);
        return bad(format!("rows of {} bytes; {kind} of {hidden} has {need}", rows.row_bytes()));
    }
    let scale_bytes = scales.map_or(0, |s| s.row_bytes());
    if scale_bytes != kind.scale_bytes(hidden) {
        let need = kind.scale_bytes(hidden);
        return bad(format!("scales of {scale_bytes} bytes per row; {kind} has {need}"));
    }
    Ok(())
}

pub(crate) fn check_layout(op: &'static str, ep: &Inner, layout: Layout) -> Result<()> {
    let Layout::ExpertMajor { alignment } = layout else { return Ok(()) };
    let reserved = ep.shape.expert_alignment.unwrap_or(0);
    if alignment == 0 || alignment > reserved {
        let detail = match reserved {
            0 => "the layer was built without MoeShape::expert_major".into(),
            _ => format!("alignment {alignment}; the layer was built for 1 to {reserved}"),
        };
        return Err(EpError::argument(op, detail));
    }
    Ok(())
}
