//! Comparing what was configured on each rank.

use crate::{Deadline, Group, Result, TransportError, WindowSpec};

impl Group {
    /// Compares `fields`, names and values, with those of every other rank. A collective.
    ///
    /// # Errors
    /// [`TransportError::Mismatch`], the same on every rank, for the first field in which a rank
    /// differs from rank 0; the errors of [`Group::all_gather`].
    pub fn agree(
        &self,
        op: &'static str,
        fields: &[(&str, String)],
        deadline: Deadline,
    ) -> Result<()> {
        let all = self.all_gather_within(op, &encode(fields), deadline)?;
        compare(op, &all)
    }
}

impl WindowSpec {
    /// Compares this request and the name of the transport with those of every other rank. Every
    /// transport begins with it.
    ///
    /// # Errors
    /// As [`Group::agree`].
    pub fn agree(&self, group: &Group, transport: &str, deadline: Deadline) -> Result<()> {
        let fields = [
            ("transport", transport.to_owned()),
            ("bytes", self.bytes.to_string()),
            ("flags", self.flags.to_string()),
        ];
        group.agree("open", &fields, deadline)
    }
}

/// Each string behind its length as four bytes.
fn encode(fields: &[(&str, String)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in fields.iter().flat_map(|(name, value)| [*name, value.as_str()]) {
        bytes.extend_from_slice(&(part.len() as u32).to_le_bytes());
        bytes.extend_from_slice(part.as_bytes());
    }
    bytes
}

fn decode(mut bytes: &[u8]) -> Option<Vec<(String, String)>> {
    let mut string = || {
        let (len, rest) = bytes.split_first_chunk::<4>()?;
        let (text, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        bytes = rest;
        String::from_utf8(text.to_vec()).ok().map(|text| (text, rest.is_empty()))
    };
    let mut fields = Vec::new();
    loop {
        let (name, _) = string()?;
        let (value, last) = string()?;
        fields.push((name, value));
        if last {
            return Some(fields);
        }
    }
}

fn compare(op: &'static str, all: &[Vec<u8>]) -> Result<()> {
    if all.iter().all(|theirs| *theirs == all[0]) {
        return Ok(());
    }
    let all: Vec<_> = all.iter().map(|bytes| decode(bytes).unwrap_or_default()).collect();
    let mismatch = |field: &str, value: &dyn Fn(usize) -> String| {
        let first = value(0);
        let ranks: Vec<usize> = (1..all.len()).filter(|&rank| value(rank) != first).collect();
        let rank = *ranks.first()?;
        let detail = format!("rank 0 has {first}, rank {rank} has {}", value(rank));
        Some(TransportError::Mismatch { op, field: field.into(), ranks, detail })
    };
    let names = |rank: usize| all[rank].iter().map(|f| f.0.as_str()).collect::<Vec<_>>().join(", ");
    let by_name = mismatch("fields", &names);
    let mut by_value = all[0]
        .iter()
        .enumerate()
        .filter_map(|(i, (name, _))| mismatch(name, &|r| all[r][i].1.clone()));
    match by_name.or_else(|| by_value.next()) {
        Some(error) => Err(error),
        // Differently encoded but equal: impossible from `encode`.
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(fields: &[(&str, &str)]) -> Vec<u8> {
        encode(&fields.iter().map(|(n, v)| (*n, v.to_string())).collect::<Vec<_>>())
    }

    #[test]
    fn names_the_field_and_everyone_who_differs_from_rank_0() {
        let (a, b) = (of(&[("bytes", "1"), ("flags", "2")]), of(&[("bytes", "1"), ("flags", "3")]));
        compare("open", &[a.clone(), a.clone()]).unwrap();
        let error = compare("open", &[a.clone(), b.clone(), a, b]).unwrap_err();
        let TransportError::Mismatch { field, ranks, detail, .. } = error else {
            panic!("{error}")
        };
        assert_eq!((field.as_str(), ranks), ("flags", vec![1, 3]));
        assert!(detail.contains("rank 0 has 2") && detail.contains("rank 1 has 3"), "{detail}");
    }

    #[test]
    fn other_fields_or_garbage_are_a_mismatch_too() {
        let a = of(&[("bytes", "1")]);
        for other in [of(&[("size", "1")]), of(&[("bytes", "1"), ("more", "")]), vec![9; 7], vec![]]
        {
            let error = compare("open", &[a.clone(), other]).unwrap_err();
            assert!(error.to_string().contains("fields"), "{error}");
        }
    }
}
