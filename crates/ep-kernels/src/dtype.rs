//! Element types.

use std::fmt;

pub use half::{bf16, f16};

use crate::Fp8E4M3;

/// The type of a payload's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// bfloat16: 8 exponent bits, 7 mantissa bits.
    Bf16,
    /// IEEE 754 binary16.
    F16,
    /// IEEE 754 binary32.
    F32,
    /// OCP 8-bit float e4m3fn, see [`Fp8E4M3`].
    Fp8E4M3,
    /// Bytes without a meaning to us.
    Bytes,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
            Self::Fp8E4M3 | Self::Bytes => 1,
        }
    }

    /// Whether combine can add rows of this type.
    pub const fn is_float_reducible(self) -> bool {
        matches!(self, Self::Bf16 | Self::F16 | Self::F32)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::Fp8E4M3 => "fp8e4m3",
            Self::Bytes => "bytes",
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that payload elements can have. Sealed: the list is that of [`DType`].
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The type as a value.
    const DTYPE: DType;
}

/// An [`Element`] that arithmetic is defined on, through `f32`.
pub trait Real: Element {
    /// The value as `f32`, exactly.
    fn to_f32(self) -> f32;
    /// The nearest value to `x`, ties to even, infinite beyond the range; NaN stays NaN.
    fn from_f32(x: f32) -> Self;
    /// [`Real::to_f32`] of every element; both slices have one length.
    fn widen(src: &[Self], out: &mut [f32]);
    /// [`Real::from_f32`] of every element; both slices have one length.
    fn narrow(src: &[f32], out: &mut [Self]);
}

macro_rules! element {
    ($($t:ty => $d:ident),*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
        }
    )*};
}
element!(bf16 => Bf16, f16 => F16, f32 => F32, Fp8E4M3 => Fp8E4M3, u8 => Bytes);

macro_rules! half_real {
    ($($t:ty),*) => {$(
        impl Real for $t {
            #[inline]
            fn to_f32(self) -> f32 {
                <$t>::to_f32(self)
            }
            #[inline]
            fn from_f32(x: f32) -> Self {
                <$t>::from_f32(x)
            }
            #[inline]
            fn widen(src: &[Self], out: &mut [f32]) {
                half::slice::HalfFloatSliceExt::convert_to_f32_slice(src, out);
            }
            #[inline]
            fn narrow(src: &[f32], out: &mut [Self]) {
                half::slice::HalfFloatSliceExt::convert_from_f32_slice(out, src);
            }
        }
    )*};
}
half_real!(bf16, f16);

impl Real for f32 {
    #[inline]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline]
    fn from_f32(x: f32) -> Self {
        x
    }
    #[inline]
    fn widen(src: &[Self], out: &mut [f32]) {
        out.copy_from_slice(src);
    }
    #[inline]
    fn narrow(src: &[f32], out: &mut [Self]) {
        out.copy_from_slice(src);
    }
}
