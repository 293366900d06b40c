//! Two-dimensional integer arrays in NumPy's `.npy` format, versions 1 to 3.
//!
//! The format: magic, version, length of the header, a Python dict as text, data
//! (<https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>). The crates that read
//! it bring a parser generator and a C compiler along for that dict, which has three known keys.

use super::replay::{Table, from_u32, two_dims};

const MAGIC: &[u8] = b"\x93NUMPY";

#[derive(Debug, Default, PartialEq)]
struct Header {
    descr: Option<String>,
    fortran: Option<bool>,
    shape: Option<Vec<usize>>,
}

pub(super) fn read(bytes: &[u8]) -> Result<Table, String> {
    let (text, data) = split(bytes).ok_or("not a .npy file, or its header is cut off")?;
    let header = Header::parse(text).ok_or(format!("cannot understand the header {text:?}"))?;
    let (Some(descr), Some(fortran), Some(shape)) = (header.descr, header.fortran, header.shape)
    else {
        return Err(format!("descr, fortran_order or shape is missing in the header {text:?}"));
    };
    let (tokens, topk) = two_dims(&shape)?;
    let little = match descr.as_bytes().first() {
        Some(b'<') => true,
        Some(b'>') => false,
        _ => return Err(format!("holds `{descr}`, expected int32, int64 or uint32")),
    };
    let values: Vec<i64> = match &descr[1..] {
        "i4" => words(data, little).map(|w| i64::from(i32::from_le_bytes(w))).collect(),
        "u4" => words(data, little).map(|w| from_u32(u32::from_le_bytes(w))).collect(),
        "i8" => words(data, little).map(i64::from_le_bytes).collect(),
        _ => return Err(format!("holds `{descr}`, expected int32, int64 or uint32")),
    };
    let size = if descr.ends_with('8') { 8 } else { 4 };
    if tokens.checked_mul(topk).and_then(|n| n.checked_mul(size)) != Some(data.len()) {
        return Err(format!("shape {shape:?} of `{descr}` does not fit {} bytes", data.len()));
    }
    if !fortran {
        return Ok((tokens, topk, values));
    }
    let by_rows = (0..values.len()).map(|i| values[(i % topk) * tokens + i / topk]).collect();
    Ok((tokens, topk, by_rows))
}

/// The header's text and the data.
fn split(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let rest = bytes.strip_prefix(MAGIC)?;
    let (version, rest) = rest.split_first_chunk::<2>()?;
    let (length, rest) = match version[0] {
        1 => {
            let (length, rest) = rest.split_first_chunk::<2>()?;
            (usize::from(u16::from_le_bytes(*length)), rest)
        }
        2 | 3 => {
            let (length, rest) = rest.split_first_chunk::<4>()?;
            (u32::from_le_bytes(*length) as usize, rest)
        }
        _ => return None,
    };
    let (text, data) = rest.split_at_checked(length)?;
    Some((std::str::from_utf8(text).ok()?.trim(), data))
}

impl Header {
    /// `{'descr': '<i4', 'fortran_order': False, 'shape': (3, 2), }`, keys in any order.
    fn parse(text: &str) -> Option<Header> {
        let mut header = Header::default();
        let mut rest = text.strip_prefix('{')?.strip_suffix('}')?.trim();
        while !rest.is_empty() {
            let (key, after) = string(rest)?;
            let value = after.trim_start().strip_prefix(':')?.trim_start();
            rest = match key {
                "descr" => {
                    let (descr, after) = string(value)?;
                    header.descr = Some(descr.to_owned());
                    after
                }
                "fortran_order" => {
                    let fortran = value.starts_with("True");
                    header.fortran = Some(fortran);
                    value.strip_prefix(if fortran { "True" } else { "False" })?
                }
                "shape" => {
                    let (shape, after) = tuple(value)?;
                    header.shape = Some(shape);
                    after
                }
                _ => return None,
            };
            rest = rest.trim_start();
            rest = match rest.strip_prefix(',') {
                Some(more) => more.trim_start(),
                None if rest.is_empty() => rest,
                None => return None,
            };
        }
        Some(header)
    }
}

fn string(text: &str) -> Option<(&str, &str)> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    text[1..].split_once(quote)
}

fn tuple(text: &str) -> Option<(Vec<usize>, &str)> {
    let (inside, after) = text.strip_prefix('(')?.split_once(')')?;
    let parts: Vec<&str> = inside.split(',').map(str::trim).collect();
    // `(3,)` has an empty last part.
    let parts = parts.strip_suffix(&[""]).unwrap_or(&parts);
    let numbers: Option<Vec<usize>> = parts.iter().map(|part| part.parse().ok()).collect();
    Some((numbers?, after))
}

fn words<const N: usize>(data: &[u8], little: bool) -> impl Iterator<Item = [u8; N]> {
    data.as_chunks::<N>().0.iter().map(move |word| {
        let mut word = *word;
        if !little {
            word.reverse();
        }
        word
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers() {
        let header =
            Header::parse("{'shape': (3, 2), \"descr\":'<i4','fortran_order': True}").unwrap();
        assert_eq!(header.shape, Some(vec![3, 2]));
        assert_eq!((header.descr.as_deref(), header.fortran), (Some("<i4"), Some(true)));
        assert_eq!(Header::parse("{'shape': (3,), }").unwrap().shape, Some(vec![3]));
        assert_eq!(Header::parse("{'shape': ()}").unwrap().shape, Some(vec![]));
        for bad in [
            "",
            "{",
            "{'shape'}",
            "{'shape': (a,)}",
            "{'shape': (-1, 2)}",
            "{'shape': (1, 2}",
            "{'fortran_order': 1}",
            "{'descr': [('a', '<i4')]}",
            "{'x': 1}",
            "{é",
            "{'descr': '<i4' 1}",
        ] {
            assert_eq!(Header::parse(bad), None, "{bad}");
        }
    }
}
