//! The transport's kernel of one thread, `ep_words`: the driver gets it as PTX, so it is written here
//! again.

use super::code::{Code, Result};
use super::work::{Until, WordOp};

/// Bytes of its one parameter: addresses, kinds, their number.
pub const PARAMS: usize = 296;
const MOST: u64 = 24;

/// What a launch with this parameter does.
pub fn ops(params: &[u8]) -> Result<Vec<WordOp>> {
    let number = |at: usize, bytes: usize| {
        let part = &params[at..at + bytes];
        part.iter().rev().fold(0u64, |all, byte| all << 8 | u64::from(*byte))
    };
    let count = number(288, 4);
    if count > MOST {
        return Err(Code::INVALID_VALUE);
    }
    let one = |i: usize| {
        let at = number(8 * i, 8) as usize;
        match number(192 + 4 * i, 4) as u32 {
            2 => WordOp::Wait { at, value: 1, until: Until::Equal },
            3 => WordOp::Write64 { at, value: 0 },
            value => WordOp::Write { at, value },
        }
    };
    Ok((0..count as usize).map(one).collect())
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn a_parameter_becomes_operations() {
        let mut params = [0u8; PARAMS];
        for (i, (at, kind)) in
            [(0x1000u64, 1u32), (0x2000, 2), (0x3000, 3), (0x4000, 0)].into_iter().enumerate()
        {
            params[8 * i..][..8].copy_from_slice(&at.to_le_bytes());
            params[192 + 4 * i..][..4].copy_from_slice(&kind.to_le_bytes());
        }
        params[288] = 4;
        let want = [
            WordOp::Write { at: 0x1000, value: 1 },
            WordOp::Wait { at: 0x2000, value: 1, until: Until::Equal },
            WordOp::Write64 { at: 0x3000, value: 0 },
            WordOp::Write { at: 0x4000, value: 0 },
        ];
        assert_eq!(ops(&params).unwrap(), want);
        params[288] = 25;
        assert_eq!(ops(&params), Err(Code::INVALID_VALUE));
    }

    /// What is written here again is what was written there when this was checked last.
    #[test]
    fn the_ptx_is_the_one_that_was_read() {
        let text = include_str!("../../../../crates/ep-transport/src/nvlink/words.ptx");
        let code: Vec<&str> =
            text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with("//")).collect();
        let digest = Sha256::digest(code.join("\n").as_bytes());
        let start: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(start, "f76c7a89a6aa5bc1", "read words.ptx, then change `ops` and this");
    }
}
