//! Counting what arrives, in whatever order.
//!
//! A source numbers its *epochs* towards a peer: what it writes between two signals. Every write
//! carries an immediate that names its epoch; the signal that ends an epoch carries how many writes
//! belong to it. So a flag is due once as many writes as announced have arrived in its epoch *and in
//! all before it*, whichever came first, the writes or the announcement. Nothing is assumed about
//! the order in which the fabric delivers; each immediate speaks for its own write alone.

pub(super) use crate::rdma_plan::{RECORD, WINDOW};

/// The immediate of a write: its epoch and whether it is the signal that ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Immediate {
    pub epoch: u16,
    pub signal: bool,
}

impl Immediate {
    const SIGNAL: u32 = 1 << 31;

    pub(super) fn new(epoch: u32, signal: bool) -> Self {
        Self { epoch: epoch as u16, signal }
    }

    pub(super) fn encode(self) -> u32 {
        u32::from(self.epoch) | if self.signal { Self::SIGNAL } else { 0 }
    }

    /// None if no sender of this version made it.
    pub(super) fn decode(word: u32) -> Option<Self> {
        let rest = word & !Self::SIGNAL;
        let epoch = u16::try_from(rest).ok()?;
        Some(Self { epoch, signal: word & Self::SIGNAL != 0 })
    }
}

/// What a signal carries besides its immediate. It is written into a place of its epoch's own in
/// the receiver's memory; all zero is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Record {
    /// The flag to raise.
    pub flag: u32,
    /// How many writes the epoch has on this NIC.
    pub writes: u32,
    /// The epoch, in full.
    pub epoch: u32,
    /// On how many NICs the signal is sent; the flag is due once all have brought their part.
    pub parts: u32,
}

const _: () = assert!(RECORD == size_of::<Record>());

/// What has arrived from one source through one NIC.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// The first epoch that is not complete.
    next: u32,
    places: [Place; WINDOW as usize],
}

#[derive(Clone, Copy, Debug, Default)]
struct Place {
    arrived: u32,
    record: Option<Record>,
}

impl Arrivals {
    pub(super) fn new() -> Self {
        Self { next: 0, places: [Place::default(); WINDOW as usize] }
    }

    /// How many epochs are complete.
    pub(super) fn complete(&self) -> u32 {
        self.next
    }

    /// A write of `epoch` is in memory.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn write(&mut self, epoch: u16) -> Result<(), String> {
        let place = self.place(epoch)?;
        place.arrived += 1;
        match place.record {
            Some(record) if record.writes < place.arrived => {
                Err(format!("epoch {epoch} has {} writes, more arrived", record.writes))
            }
            _ => Ok(()),
        }
    }

    /// The record of the signal that ends `epoch` is in memory.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn signal(&mut self, epoch: u16, record: Record) -> Result<(), String> {
        let full = self.full(epoch)?;
        let place = self.place(epoch)?;
        if record.epoch != full || place.record.is_some() || record.writes < place.arrived {
            return Err(format!("epoch {full} cannot end with {record:?} after {place:?}"));
        }
        place.record = Some(record);
        Ok(())
    }

    /// The next signal that is due.
    pub(super) fn due(&mut self) -> Option<Record> {
        let place = &mut self.places[(self.next % WINDOW) as usize];
        let record = place.record.filter(|record| record.writes == place.arrived)?;
        *place = Place::default();
        self.next = self.next.wrapping_add(1);
        Some(record)
    }

    /// The number of the epoch within the window whose low half is `epoch`.
    fn full(&self, epoch: u16) -> Result<u32, String> {
        let ahead = u32::from(epoch.wrapping_sub(self.next as u16));
        if ahead >= WINDOW {
            return Err(format!("epoch {epoch} while epoch {} is the next to end", self.next));
        }
        Ok(self.next.wrapping_add(ahead))
    }

    fn place(&mut self, epoch: u16) -> Result<&mut Place, String> {
        let full = self.full(epoch)?;
        Ok(&mut self.places[(full % WINDOW) as usize])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(epoch: u32, writes: u32) -> Record {
        Record { flag: epoch % 7, writes, epoch, parts: 1 }
    }

    #[test]
    fn immediates_come_back_and_others_are_refused() {
        for (epoch, signal) in [(0, false), (65_535, true), (65_536 + 9, false)] {
            let one = Immediate::new(epoch, signal);
            assert_eq!(Immediate::decode(one.encode()), Some(one));
        }
        assert_eq!(Immediate::decode(1 << 16), None);
        assert_eq!(Immediate::decode(u32::MAX), None);
    }

    #[test]
    fn what_cannot_be_is_an_error() {
        let mut arrivals = Arrivals::new();
        assert!(arrivals.write(WINDOW as u16).is_err(), "beyond the window");
        assert!(arrivals.write(u16::MAX).is_err(), "before it");
        arrivals.signal(0, record(0, 1)).unwrap();
        assert!(arrivals.signal(0, record(0, 1)).is_err(), "ended twice");
        assert!(arrivals.signal(1, record(2, 1)).is_err(), "another epoch's record");
        arrivals.write(0).unwrap();
        assert!(arrivals.write(0).is_err(), "one write too many");
        arrivals.write(1).unwrap();
        assert!(arrivals.signal(1, record(1, 0)).is_err(), "fewer writes than came");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// The oracle: a signal is due exactly when all writes and signals of its epoch and of all
        /// earlier ones have arrived, and signals come in the order of their epochs.
        #[test]
        fn signals_are_due_in_order_once_all_has_arrived(
            writes in prop::collection::vec(0u32..6, 1..40),
            start in prop::sample::select(vec![0u32, 65_530, u32::MAX - 3]),
            seed in any::<u64>(),
        ) {
            let mut arrivals = Arrivals::new();
            arrivals.next = start;
            let epoch_of = |i: usize| start.wrapping_add(i as u32);
            let mut events: Vec<(usize, bool)> = Vec::new();
            for (i, &n) in writes.iter().enumerate() {
                events.extend((0..n).map(|_| (i, false)));
                events.push((i, true));
            }
            // A shuffle by the seed.
            let mut state = seed | 1;
            for i in (1..events.len()).rev() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
                events.swap(i, (state >> 33) as usize % (i + 1));
            }
            let mut seen: Vec<(u32, bool)> = vec![(0, false); writes.len()];
            let mut raised = 0;
            for (i, signal) in events {
                let epoch = epoch_of(i);
                if signal {
                    arrivals.signal(epoch as u16, record(epoch, writes[i])).unwrap();
                    seen[i].1 = true;
                } else {
                    arrivals.write(epoch as u16).unwrap();
                    seen[i].0 += 1;
                }
                let whole = |j: &usize| seen[*j] == (writes[*j], true);
                let expected = (0..writes.len()).take_while(whole).count();
                while let Some(due) = arrivals.due() {
                    prop_assert_eq!(due, record(epoch_of(raised), writes[raised]));
                    raised += 1;
                }
                prop_assert_eq!(raised, expected);
                prop_assert_eq!(arrivals.complete(), epoch_of(raised));
            }
            prop_assert_eq!(raised, writes.len());
        }
    }
}
