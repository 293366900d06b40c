//! Scalar conversions, written for clarity from the formats' definitions (IEEE 754 binary16;
//! bfloat16 is the upper half of binary32), rounding to nearest, ties to even.

/// The types combine reduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float {
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// IEEE binary32.
    F32,
}

impl Float {
    /// All of them.
    pub const ALL: [Float; 3] = [Float::Bf16, Float::F16, Float::F32];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Float::Bf16 | Float::F16 => 2,
            Float::F32 => 4,
        }
    }

    /// Element `index` of a row of little-endian bytes; panics outside the row.
    pub fn load(self, row: &[u8], index: usize) -> f32 {
        let at = index * self.size();
        match self {
            Float::Bf16 => bf16_to_f32(u16::from_le_bytes([row[at], row[at + 1]])),
            Float::F16 => f16_to_f32(u16::from_le_bytes([row[at], row[at + 1]])),
            Float::F32 => f32::from_le_bytes([row[at], row[at + 1], row[at + 2], row[at + 3]]),
        }
    }

    /// Appends one element, rounded.
    pub fn push(self, row: &mut Vec<u8>, value: f32) {
        match self {
            Float::Bf16 => row.extend(f32_to_bf16(value).to_le_bytes()),
            Float::F16 => row.extend(f32_to_f16(value).to_le_bytes()),
            Float::F32 => row.extend(value.to_le_bytes()),
        }
    }

    /// A row of bytes from numbers, each rounded.
    pub fn row(self, values: &[f32]) -> Vec<u8> {
        let mut row = Vec::with_capacity(values.len() * self.size());
        values.iter().for_each(|value| self.push(&mut row, *value));
        row
    }
}

/// Exact.
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Round to nearest even; a NaN stays one and becomes quiet.
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let (kept, dropped) = ((bits >> 16) as u16, bits & 0xffff);
    if value.is_nan() {
        return kept | 0x40;
    }
    let up = dropped > 0x8000 || (dropped == 0x8000 && kept & 1 == 1);
    // A carry out of the mantissa raises the exponent, up to infinity: the next number either way.
    kept + u16::from(up)
}

/// Exact; a NaN becomes quiet.
pub fn f16_to_f32(bits: u16) -> f32 {
    let mantissa = f32::from(bits & 0x3ff);
    let magnitude = match (bits >> 10) & 0x1f {
        0 => mantissa * 2f32.powi(-24),
        31 if mantissa == 0.0 => f32::INFINITY,
        31 => f32::from_bits(0x7fc0_0000 | u32::from(bits & 0x3ff) << 13),
        exponent => (1.0 + mantissa / 1024.0) * 2f32.powi(i32::from(exponent) - 15),
    };
    if bits & 0x8000 == 0 { magnitude } else { -magnitude }
}

/// Round to nearest even; above the largest finite number's upper tie infinity; a NaN stays one
/// and becomes quiet.
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    if value.is_nan() {
        return sign | 0x7e00 | ((bits >> 13) & 0x3ff) as u16;
    }
    // f32 subnormals have a biased exponent of 0 and end, as all small numbers, at -14.
    let exponent = (((bits >> 23) & 0xff) as i32 - 127).max(-14);
    if exponent > 15 {
        return sign | 0x7c00;
    }
    // Count in units of the last place: f64 holds the quotient by a power of two exactly.
    let unit = 2f64.powi(exponent - 10);
    let count = (f64::from(value.abs()) / unit).round_ties_even() as u16;
    // `count` is 1024..=2048 for normal numbers, so it brings the exponent's lowest 1 along, and
    // 2048 carries into the next exponent, at the top into infinity.
    sign | ((((exponent + 14) as u16) << 10) + count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same16(ours: u16, theirs: u16, nan: bool, what: &str, bits: u32) {
        let quiet_nan =
            |b: u16, exponent: u16, quiet: u16| b & exponent == exponent && b & quiet != 0;
        let equal = match (nan, what) {
            (true, "bf16") => quiet_nan(ours, 0x7f80, 0x40) && quiet_nan(theirs, 0x7f80, 0x40),
            (true, _) => quiet_nan(ours, 0x7c00, 0x200) && quiet_nan(theirs, 0x7c00, 0x200),
            (false, _) => ours == theirs,
        };
        assert!(equal, "{what} of f32 {bits:#010x}: ours {ours:#06x}, half {theirs:#06x}");
    }

    fn narrow(bits: u32) {
        let value = f32::from_bits(bits);
        let nan = value.is_nan();
        same16(f32_to_bf16(value), half::bf16::from_f32(value).to_bits(), nan, "bf16", bits);
        same16(f32_to_f16(value), half::f16::from_f32(value).to_bits(), nan, "f16", bits);
    }

    #[test]
    fn widening_agrees_with_half_on_every_value() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (bf16_to_f32(bits), half::bf16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan());
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan());
        }
    }

    #[test]
    fn narrowing_agrees_with_half_around_every_tie() {
        // Every upper half with the lower halves where rounding can change, in both formats.
        let lows: Vec<u32> = (0..16)
            .flat_map(|bit| [(1u32 << bit) - 1, 1 << bit, (1 << bit) + 1])
            .chain([0x2fff, 0x3000, 0x3001, 0x6000, 0x9000, 0xb000, 0xd000, 0xf000, 0xffff])
            .collect();
        for high in 0..=u16::MAX {
            lows.iter().for_each(|low| narrow(u32::from(high) << 16 | low & 0xffff));
        }
    }

    #[test]
    fn narrowing_agrees_with_half_on_a_stride_through_all_values() {
        (0..u32::MAX).step_by(1021).for_each(narrow);
    }

    #[test]
    #[ignore = "takes minutes: all 2^32 values"]
    fn narrowing_agrees_with_half_on_every_value() {
        (0..=u32::MAX).for_each(narrow);
    }

    #[test]
    fn round_trips_and_edges() {
        for bits in 0..=u16::MAX {
            if !bf16_to_f32(bits).is_nan() {
                assert_eq!(f32_to_bf16(bf16_to_f32(bits)), bits);
            }
            if !f16_to_f32(bits).is_nan() {
                assert_eq!(f32_to_f16(f16_to_f32(bits)), bits);
            }
        }
        assert_eq!(f32_to_f16(65519.0), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00, "the upper tie goes to infinity");
        assert_eq!(f32_to_f16(-1e-9), 0x8000);
        assert_eq!(f32_to_f16(2f32.powi(-25)), 0, "half the smallest subnormal ties to zero");
        assert_eq!(f32_to_f16(2f32.powi(-25) * 1.01), 1);
        assert_eq!(f32_to_bf16(1.0 + 1.0 / 256.0), 0x3f80, "tie to even, down");
        assert_eq!(f32_to_bf16(1.0 + 3.0 / 256.0), 0x3f82, "tie to even, up");
        assert_eq!(f32_to_bf16(f32::MAX), 0x7f80);
        assert_eq!(Float::Bf16.row(&[1.0, -2.0]), [0x80, 0x3f, 0x00, 0xc0]);
    }
}
