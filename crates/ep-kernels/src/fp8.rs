//! The 8-bit float of fp8 payloads and its scales.

/// Elements of a row that share one fp8 scale. The last block of a row may be shorter.
pub const SCALE_BLOCK: usize = 128;

/// How the scale of a block of [`SCALE_BLOCK`] elements is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub enum ScaleKind {
    /// An `f32`.
    F32,
    /// A power of two in one byte `b`: 2^(b − 127), with 255 = NaN (OCP Microscaling Formats 1.0,
    /// E8M0).
    Ue8m0,
}

impl ScaleKind {
    /// Bytes of one scale.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Ue8m0 => 1,
        }
    }

    /// Bytes of the scales of a row of `hidden` elements, without padding.
    pub const fn row_bytes(self, hidden: usize) -> usize {
        hidden.div_ceil(SCALE_BLOCK) * self.size()
    }
}

/// OCP 8-bit float e4m3fn: sign, 4 exponent bits (bias 7), 3 mantissa bits.
///
/// No infinities; the largest magnitude is 448, the smallest normal 2⁻⁶, the smallest subnormal
/// 2⁻⁹; NaN is `0x7f` or `0xff` (OCP 8-bit Floating Point Specification 1.0, table 2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Fp8E4M3(pub u8);

impl Fp8E4M3 {
    /// The largest finite value, 448.
    pub const MAX: Self = Self(0x7e);
    /// The NaN that conversions give.
    pub const NAN: Self = Self(0x7f);

    /// The nearest value, ties to even; magnitudes above 448, infinity too, become ±448.
    #[inline(always)]
    pub fn from_f32(x: f32) -> Self {
        // Without branches, so that loops over it vectorise.
        let sign = ((x.to_bits() >> 24) & 0x80) as u8;
        let magnitude = x.abs().min(448.0);
        let bits = magnitude.to_bits();
        // Normal: round at mantissa bit 20, then exchange the bias of 127 for 7.
        let rounded = bits + 0x7_ffff + ((bits >> 20) & 1);
        let normal = (rounded >> 20).wrapping_sub((127 - 7) << 3);
        // Subnormal: one ulp of 2^14 is 2^-9, so this addition rounds to whole subnormal steps.
        let step = 16384.0_f32;
        let subnormal = (magnitude + step).to_bits() - step.to_bits();
        let code = if magnitude < 0.015625 { subnormal } else { normal };
        if x.is_nan() { Self::NAN } else { Self(sign | code as u8) }
    }

    /// The value, exactly.
    #[inline]
    pub fn to_f32(self) -> f32 {
        VALUES[usize::from(self.0)]
    }

    /// Bytes seen as elements.
    pub fn from_bytes(bytes: &[u8]) -> &[Self] {
        // SAFETY: the type is transparent over u8, every bit pattern is valid.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) }
    }

    /// Elements seen as bytes.
    pub fn as_bytes(elements: &[Self]) -> &[u8] {
        // SAFETY: the type is transparent over u8.
        unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), elements.len()) }
    }
}

const VALUES: [f32; 256] = {
    let mut table = [0.0_f32; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = decode(code as u32);
        code += 1;
    }
    table
};

const fn decode(code: u32) -> f32 {
    let (exponent, mantissa) = ((code >> 3) & 15, code & 7);
    let sign = (code >> 7) << 31;
    if exponent == 15 && mantissa == 7 {
        return f32::from_bits(sign | 0x7fc0_0000);
    }
    let magnitude = if exponent == 0 {
        mantissa as f32 * 0.001953125 // 2^-9
    } else {
        f32::from_bits(((exponent + 120) << 23) | (mantissa << 20))
    };
    f32::from_bits(sign | magnitude.to_bits())
}

/// The scale stored as UE8M0 byte `b`.
#[inline]
pub(crate) fn ue8m0_value(b: u8) -> f32 {
    match b {
        255 => f32::NAN,
        0 => f32::from_bits(1 << 22), // 2^-127 is subnormal in f32
        _ => f32::from_bits(u32::from(b) << 23),
    }
}

/// The UE8M0 byte of the smallest power of two ≥ `scale`, a positive normal number; 255 for
/// infinity.
#[inline]
pub(crate) fn ue8m0_above(scale: f32) -> u8 {
    let bits = scale.to_bits();
    let up = u32::from(bits & 0x7f_ffff != 0);
    ((bits >> 23) + up).min(255) as u8
}
