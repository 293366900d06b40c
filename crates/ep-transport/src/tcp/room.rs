//! One group as the hub sees it: who is in it, and its all-gather in progress.

use std::time::Instant;

use super::wire::{Failure, GroupId, MAX_BODY, Message, encode, encode_parts};
use super::{Bytes, hub::Out};

/// What a rank of the group contributed.
#[derive(Debug)]
struct Part {
    seq: u64,
    op: String,
    bytes: Vec<u8>,
    /// When its rank wants to hear who is absent; none once it has heard.
    until: Option<Instant>,
}

/// A group. Ranks are numbers within it, `members` maps them to the world's.
#[derive(Debug)]
pub(super) struct Room {
    id: GroupId,
    members: Vec<usize>,
    opened: Vec<bool>,
    /// The ranks that will take no further part, and whether they panicked.
    left: Vec<Option<bool>>,
    fault: Option<Bytes>,
    parts: Vec<Option<Part>>,
}

impl Room {
    pub(super) fn new(id: GroupId, members: Vec<usize>) -> Self {
        let world = members.len();
        let parts = (0..world).map(|_| None).collect();
        let (opened, left) = (vec![false; world], vec![None; world]);
        Self { id, members, opened, left, fault: None, parts }
    }

    pub(super) fn members(&self) -> &[usize] {
        &self.members
    }

    /// The number within the group of a rank of the world that has opened it and not left.
    pub(super) fn seat(&self, rank: usize) -> Option<usize> {
        let seat = self.members.iter().position(|&m| m == rank)?;
        (self.opened[seat] && self.left[seat].is_none()).then_some(seat)
    }

    /// Whether nobody is left.
    pub(super) fn empty(&self) -> bool {
        self.left.iter().all(Option::is_some)
    }

    /// `rank` is here; it hears what it has missed. False if that cannot be.
    pub(super) fn open(&mut self, rank: usize, out: &mut Out) -> bool {
        let Some(seat) = self.members.iter().position(|&m| m == rank) else { return false };
        if self.opened[seat] || self.left[seat].is_some() {
            return false;
        }
        self.opened[seat] = true;
        // First what others may have left for.
        if let Some(fault) = &self.fault {
            out.send(rank, fault.clone());
        }
        for (other, left) in self.left.iter().enumerate() {
            if let Some(panicked) = *left {
                out.send(rank, self.left_message(other, panicked));
            }
        }
        true
    }

    /// A rank contributes to the all-gather in progress. False if it already has.
    pub(super) fn gather(
        &mut self,
        seat: usize,
        (seq, op, bytes): (u64, String, Vec<u8>),
        until: Instant,
        out: &mut Out,
    ) -> bool {
        if self.parts[seat].is_some() {
            return false;
        }
        if let Some(gone) = self.first_absent_for_good() {
            out.send(self.members[seat], self.failed(seq, Failure::Left(gone)));
            return true;
        }
        self.parts[seat] = Some(Part { seq, op, bytes, until: Some(until) });
        if self.parts.iter().all(Option::is_some) {
            self.finish(out);
        }
        true
    }

    /// The first rank that has left without contributing.
    fn first_absent_for_good(&self) -> Option<u32> {
        let gone = |seat: &usize| self.left[*seat].is_some() && self.parts[*seat].is_none();
        (0..self.members.len()).find(gone).map(|seat| seat as u32)
    }

    fn finish(&mut self, out: &mut Out) {
        let parts: Vec<Part> =
            self.parts.iter_mut().map(|part| part.take().expect("all are here")).collect();
        // Whoever was told that others are absent has given up.
        let waiting = parts.iter().zip(self.members.iter().copied());
        let waiting = waiting.filter(|(part, _)| part.until.is_some());
        let total: u64 = parts.iter().map(|part| part.bytes.len() as u64).sum();
        let failure = if parts.iter().any(|part| part.op != parts[0].op) {
            Failure::Operations(parts.iter().map(|part| part.op.clone()).collect())
        } else if parts.iter().any(|part| part.seq != parts[0].seq) {
            Failure::Sequences(parts.iter().map(|part| part.seq).collect())
        } else if total > MAX_BODY as u64 {
            Failure::TooLarge(total)
        } else {
            let lens = parts.iter().map(|part| part.bytes.len() as u32).collect();
            let message = Message::Gathered { group: self.id.clone(), seq: parts[0].seq, lens };
            let bytes: Vec<&[u8]> = parts.iter().map(|part| part.bytes.as_slice()).collect();
            let frame = encode_parts(&message, &bytes);
            return waiting.for_each(|(_, rank)| out.send(rank, frame.clone()));
        };
        for (part, rank) in waiting {
            out.send(rank, self.failed(part.seq, failure.clone()));
        }
    }

    /// A rank gives up; the first one is heard by all others.
    pub(super) fn fail(&mut self, seat: usize, blames: Option<u32>, why: String, out: &mut Out) {
        if self.fault.is_some() {
            return;
        }
        let message = Message::Fault { group: self.id.clone(), by: seat as u32, blames, why };
        let frame = encode(&message, &[]);
        self.tell_others(seat, &frame, out);
        self.fault = Some(frame);
    }

    /// A rank leaves. With `tell`, the others hear it.
    pub(super) fn leave(&mut self, rank: usize, panicked: bool, tell: bool, out: &mut Out) {
        let Some(seat) = self.members.iter().position(|&m| m == rank) else { return };
        if self.left[seat].is_some() {
            return;
        }
        self.left[seat] = Some(panicked);
        if tell {
            self.tell_others(seat, &self.left_message(seat, panicked), out);
        }
        if self.parts[seat].is_none() {
            for other in 0..self.members.len() {
                if let Some(part) = self.parts[other].take_if(|part| part.until.is_some()) {
                    let failure = Failure::Left(seat as u32);
                    out.send(self.members[other], self.failed(part.seq, failure));
                }
            }
        }
    }

    /// Tells those whose deadline has passed who is absent.
    pub(super) fn tick(&mut self, now: Instant, out: &mut Out) {
        if !self.parts.iter().flatten().any(|part| part.until.is_some_and(|until| until <= now)) {
            return;
        }
        let absent: Vec<u32> = (0..self.members.len())
            .filter(|&s| self.parts[s].is_none())
            .map(|s| s as u32)
            .collect();
        for seat in 0..self.members.len() {
            let Some(part) = &mut self.parts[seat] else { continue };
            if part.until.is_some_and(|until| until <= now) {
                part.until = None;
                let seq = part.seq;
                out.send(self.members[seat], self.failed(seq, Failure::Absent(absent.clone())));
            }
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.parts.iter().flatten().filter_map(|part| part.until).min()
    }

    fn tell_others(&self, seat: usize, frame: &Bytes, out: &mut Out) {
        for (other, &rank) in self.members.iter().enumerate() {
            if other != seat && self.opened[other] && self.left[other].is_none() {
                out.send(rank, frame.clone());
            }
        }
    }

    fn failed(&self, seq: u64, failure: Failure) -> Bytes {
        encode(&Message::Failed { group: self.id.clone(), seq, failure }, &[])
    }

    fn left_message(&self, seat: usize, panicked: bool) -> Bytes {
        let (group, rank) = (self.id.clone(), seat as u32);
        encode(&Message::Left { group, rank, panicked }, &[])
    }
}
