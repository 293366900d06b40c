//! What a row holds and where: the formats of rows in rank-major and expert-major regions.

use std::fmt;

use crate::{DType, KernelError, ScaleKind};

/// `n` rounded up to a multiple of 16, the unit of every part of a row.
pub const fn align16(n: usize) -> usize {
    n.next_multiple_of(16)
}

/// `n` rounded up to a whole line: rows start at multiples of it, since what crosses a link or comes
/// from memory does so by lines, and a row that begins inside one takes an extra request per line.
pub const fn align_row(n: usize) -> usize {
    n.next_multiple_of(128)
}

/// Bounds that keep every size far from overflow.
const MAX_HIDDEN: usize = 1 << 24;
const MAX_TOPK: usize = 1 << 16;
const MAX_OPAQUE: u32 = 1 << 28;

/// What one token's row carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(C)]
pub enum PayloadKind {
    /// bfloat16 elements.
    Bf16,
    /// IEEE binary16 elements.
    F16,
    /// IEEE binary32 elements.
    F32,
    /// fp8 e4m3 elements and one scale per [`crate::SCALE_BLOCK`] of them.
    Fp8 {
        /// How scales are stored.
        scales: ScaleKind,
    },
    /// Bytes that are moved and never looked at.
    Opaque {
        /// Bytes of a row.
        row_bytes: u32,
        /// Bytes that travel beside a row as scales do.
        aux_bytes: u32,
    },
}

impl PayloadKind {
    /// Bytes of a row of `hidden` elements (opaque rows have their own size).
    pub const fn payload_bytes(self, hidden: usize) -> usize {
        match self {
            Self::Opaque { row_bytes, .. } => row_bytes as usize,
            _ => hidden.saturating_mul(self.dtype().size()),
        }
    }

    /// Bytes of a row's scales, or of the auxiliary bytes of an opaque row, without padding.
    pub const fn scale_bytes(self, hidden: usize) -> usize {
        match self {
            Self::Fp8 { scales } => scales.row_bytes(hidden),
            Self::Opaque { aux_bytes, .. } => aux_bytes as usize,
            _ => 0,
        }
    }

    /// The type of the elements.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::Bf16,
            Self::F16 => DType::F16,
            Self::F32 => DType::F32,
            Self::Fp8 { .. } => DType::Fp8E4M3,
            Self::Opaque { .. } => DType::Bytes,
        }
    }

    /// Whether combine can add rows of this kind.
    pub const fn reducible(self) -> bool {
        self.dtype().is_float_reducible()
    }

    /// A number that stays the same between builds and differs between any two kinds that
    /// [`RecordFormat::new`] accepts; ranks compare it.
    pub const fn code(self) -> u64 {
        match self {
            Self::Bf16 => 1,
            Self::F16 => 2,
            Self::F32 => 3,
            Self::Fp8 { scales: ScaleKind::F32 } => 4,
            Self::Fp8 { scales: ScaleKind::Ue8m0 } => 5,
            // A row is a multiple of 16 bytes and auxiliary bytes are below 2^28.
            Self::Opaque { row_bytes, aux_bytes } => {
                6 | ((row_bytes as u64) >> 4) << 8 | (aux_bytes as u64) << 36
            }
        }
    }

    /// Checks a row's shape and returns its payload and scale bytes.
    fn row(self, hidden: usize) -> Result<(usize, usize), KernelError> {
        const OPERATION: &str = "row format";
        if hidden == 0 || hidden > MAX_HIDDEN {
            return Err(KernelError::Argument {
                operation: OPERATION,
                what: "hidden",
                value: hidden,
                allowed: "1..=16777216",
            });
        }
        if let Self::Opaque { aux_bytes, .. } = self
            && aux_bytes >= MAX_OPAQUE
        {
            return Err(KernelError::Argument {
                operation: OPERATION,
                what: "aux_bytes",
                value: aux_bytes as usize,
                allowed: "0..268435456",
            });
        }
        let bytes = self.payload_bytes(hidden);
        if bytes == 0 || !bytes.is_multiple_of(16) {
            return Err(KernelError::RowBytes { kind: self, bytes });
        }
        Ok((bytes, self.scale_bytes(hidden)))
    }
}

impl fmt::Display for PayloadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bf16 => f.pad("bf16"),
            Self::F16 => f.pad("f16"),
            Self::F32 => f.pad("f32"),
            Self::Fp8 { scales: ScaleKind::F32 } => f.pad("fp8"),
            Self::Fp8 { scales: ScaleKind::Ue8m0 } => f.pad("fp8-ue8m0"),
            Self::Opaque { row_bytes, aux_bytes } => write!(f, "opaque-{row_bytes}+{aux_bytes}"),
        }
    }
}

/// Where the parts of a row record lie: payload, scales, ids, weights, source index.
///
/// Offsets and strides are bytes from the start of the record; every part is padded to 16 bytes,
/// padding is zero. Numbers are native-endian.
///
/// - ids: `topk` × `i32`, the *local* expert on the destination rank, or −1 where the choice went
///   elsewhere or nowhere;
/// - weights: `topk` × `f32`, 0 where the id is −1;
/// - source: `i32` token index in the source rank, then `i32` source rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct RecordFormat {
    /// What the payload is.
    pub kind: PayloadKind,
    /// Elements of a payload row.
    pub hidden: usize,
    /// Choices per token.
    pub topk: usize,
    /// Bytes of the payload, which starts the record; a multiple of 16.
    pub payload_bytes: usize,
    /// Offset of the scales.
    pub scales_at: usize,
    /// Bytes of the scales without padding.
    pub scale_bytes: usize,
    /// Offset of the ids.
    pub ids_at: usize,
    /// Offset of the weights.
    pub weights_at: usize,
    /// Offset of the source token index; the source rank follows 4 bytes later.
    pub source_at: usize,
    /// Bytes from one record to the next.
    pub stride: usize,
}

impl RecordFormat {
    /// The format of rows of `hidden` elements of `kind` with `topk` choices.
    ///
    /// # Errors
    /// [`KernelError::RowBytes`] if a payload row is no positive multiple of 16 bytes;
    /// [`KernelError::Argument`] if `hidden` or `topk` is 0 or absurdly large.
    pub fn new(kind: PayloadKind, hidden: usize, topk: usize) -> Result<Self, KernelError> {
        let (payload_bytes, scale_bytes) = kind.row(hidden)?;
        if topk == 0 || topk > MAX_TOPK {
            return Err(KernelError::Argument {
                operation: "row format",
                what: "topk",
                value: topk,
                allowed: "1..=65536",
            });
        }
        let scales_at = payload_bytes;
        let ids_at = scales_at + align16(scale_bytes);
        let weights_at = ids_at + align16(4 * topk);
        let source_at = weights_at + align16(4 * topk);
        Ok(Self {
            kind,
            hidden,
            topk,
            payload_bytes,
            scales_at,
            scale_bytes,
            ids_at,
            weights_at,
            source_at,
            stride: align_row(source_at + 16),
        })
    }
}

/// Where the parts of an expert-major row lie: payload, scales, weight and origin.
///
/// One row is one (token, expert) pair. Offsets and strides are bytes; padding is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct ExpertFormat {
    /// Bytes of the payload, which starts the row; a multiple of 16.
    pub payload_bytes: usize,
    /// Offset of the scales.
    pub scales_at: usize,
    /// Bytes of the scales without padding.
    pub scale_bytes: usize,
    /// Offset of the `f32` weight of this (token, expert) pair; 0 in rows that only pad.
    pub weight_at: usize,
    /// Offset of the `i32` index of the rank-major row this row came from; −1 in rows that only
    /// pad.
    pub row_at: usize,
    /// Bytes from one row to the next.
    pub stride: usize,
}

impl ExpertFormat {
    /// The format of expert-major rows of `hidden` elements of `kind`.
    ///
    /// # Errors
    /// As [`RecordFormat::new`].
    pub fn new(kind: PayloadKind, hidden: usize) -> Result<Self, KernelError> {
        let (payload_bytes, scale_bytes) = kind.row(hidden)?;
        let scales_at = payload_bytes;
        let weight_at = scales_at + align16(scale_bytes);
        Ok(Self {
            payload_bytes,
            scales_at,
            scale_bytes,
            weight_at,
            row_at: weight_at + 4,
            stride: align_row(weight_at + 16),
        })
    }
}
