//! What became of a lane's operations, for whoever asks and however late.
//!
//! The lane's stream writes a report of every operation into a ring in page-locked memory. The host reads
//! them in order whenever it submits to the lane or is asked, and remembers those that are not good. So
//! a report is lost only if the host submits so many operations ahead of the GPU that the ring goes round
//! before it looks again. Then nobody takes the operation for good: its verdict is not known.

use std::collections::VecDeque;
use std::fmt::Debug;

use ep_kernels::cuda::moe::{MoeHeader, MoeReport, verdict};

/// Reports in a lane's ring.
pub(super) const KEPT: u64 = 256;
/// Verdicts of a lane that are remembered because they are not good.
const REMEMBERED: usize = 256;

/// A bad verdict, with the announcements of all ranks if they are why.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    pub report: MoeReport,
    pub headers: Vec<MoeHeader>,
}

/// What is known of an operation.
#[derive(Clone, Debug)]
pub(super) enum Verdict {
    Good,
    Refused(Refusal),
    /// It was known once, or nobody looked in time.
    Forgotten,
}

/// A ring as the host finds it. Operations are numbered from 1 and report in that order.
pub(super) trait Reports {
    /// The number in the report where `number` has its own.
    fn seen(&self, number: u64) -> u64;

    /// What is there now, which may change meanwhile.
    fn copy(&self, number: u64) -> Refusal;
}

/// What the host knows of a lane's operations.
#[derive(Debug)]
pub(super) struct Verdicts {
    kept: u64,
    remembered: usize,
    /// The last that was submitted.
    submitted: u64,
    /// The last whose report has been read, or is lost.
    known: u64,
    /// Those of the known that are not good, in order; lost ones have no report.
    bad: VecDeque<(u64, Option<Refusal>)>,
    /// The last bad one that is no longer remembered.
    forgotten: u64,
}

impl Default for Verdicts {
    fn default() -> Self {
        Self::new(KEPT, REMEMBERED)
    }
}

impl Verdicts {
    fn new(kept: u64, remembered: usize) -> Self {
        let (submitted, known, forgotten, bad) = (0, 0, 0, VecDeque::new());
        Self { kept, remembered, submitted, known, bad, forgotten }
    }

    /// The number of an operation that is about to be submitted, and will report.
    pub fn next(&mut self, reports: &impl Reports) -> u64 {
        self.look(reports);
        self.submitted += 1;
        self.submitted
    }

    /// The last operation will not report: the next one has its number.
    pub fn take_back(&mut self, number: u64) {
        if number == self.submitted {
            self.submitted -= 1;
        }
    }

    /// The verdict on an operation, if there is one.
    pub fn of(&mut self, number: u64, reports: &impl Reports) -> Option<Verdict> {
        self.look(reports);
        if number > self.known {
            return None;
        }
        Some(match self.bad.binary_search_by_key(&number, |bad| bad.0) {
            Ok(found) => self.bad[found].1.clone().map_or(Verdict::Forgotten, Verdict::Refused),
            Err(_) if number <= self.forgotten => Verdict::Forgotten,
            Err(_) => Verdict::Good,
        })
    }

    /// Reads what has been reported.
    fn look(&mut self, reports: &impl Reports) {
        while self.known < self.submitted {
            let next = self.known + 1;
            let seen = reports.seen(next);
            if seen < next {
                return;
            }
            let found = if seen == next { self.read(next, reports) } else { None };
            self.known = next;
            if found.as_ref().is_none_or(|found| found.report.verdict != verdict::OK) {
                self.remember(next, found);
            }
        }
    }

    /// The report of an operation, whole, unless a later one may have begun to overwrite it. That one
    /// does so behind the report of the operation before it.
    fn read(&self, number: u64, reports: &impl Reports) -> Option<Refusal> {
        let found = reports.copy(number);
        let before = number + self.kept - 1;
        (self.submitted <= before || reports.seen(before) < before).then_some(found)
    }

    fn remember(&mut self, number: u64, found: Option<Refusal>) {
        if self.bad.len() == self.remembered
            && let Some((oldest, _)) = self.bad.pop_front()
        {
            self.forgotten = oldest;
        }
        self.bad.push_back((number, found));
    }
}

/// A lane's ring in page-locked memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ring {
    pub reports: u64,
    /// Bytes of one report.
    pub bytes: usize,
    pub world: usize,
}

impl Ring {
    fn at(&self, number: u64) -> *const MoeReport {
        (self.reports + number % KEPT * self.bytes as u64) as *const MoeReport
    }
}

impl Reports for Ring {
    fn seen(&self, number: u64) -> u64 {
        // What was copied before was read before this; what is copied later is read behind it.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        // SAFETY: the report is in page-locked memory of the layer, aligned to 8.
        let seen = unsafe { (&raw const (*self.at(number)).ticket).read_volatile() };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        seen
    }

    fn copy(&self, number: u64) -> Refusal {
        let at = self.at(number);
        // SAFETY: as above; any bytes are a report, and behind it there is room for the announcements of
        // all ranks, which a GPU writes where they differ, before the ticket.
        unsafe {
            let report = at.read_volatile();
            let headers = at.add(1).cast::<MoeHeader>();
            let count = if report.verdict == verdict::DISAGREE { self.world } else { 0 };
            Refusal {
                report,
                headers: (0..count).map(|i| headers.add(i).read_volatile()).collect(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use proptest::prelude::*;

    use super::*;

    /// A GPU that writes reports, each in two steps: what it says, then its number.
    #[derive(Debug)]
    struct Lane {
        kept: u64,
        ring: RefCell<Vec<MoeReport>>,
        /// Verdicts of what was submitted.
        due: RefCell<Vec<u32>>,
        /// Half steps that were taken.
        taken: RefCell<u64>,
        /// Half steps it takes while the host copies.
        meanwhile: u64,
    }

    impl Lane {
        fn run(&self, steps: u64) {
            let due = self.due.borrow();
            for _ in 0..steps {
                let taken = *self.taken.borrow();
                let number = taken / 2 + 1;
                let Some(&verdict) = due.get(number as usize - 1) else { return };
                let report = &mut self.ring.borrow_mut()[(number % self.kept) as usize];
                match taken.is_multiple_of(2) {
                    true => (report.verdict, report.needed) = (verdict, number),
                    false => report.ticket = number,
                }
                *self.taken.borrow_mut() += 1;
            }
        }

        fn reported(&self) -> u64 {
            *self.taken.borrow() / 2
        }
    }

    impl Reports for Lane {
        fn seen(&self, number: u64) -> u64 {
            self.ring.borrow()[(number % self.kept) as usize].ticket
        }

        fn copy(&self, number: u64) -> Refusal {
            let report = |lane: &Self| lane.ring.borrow()[(number % lane.kept) as usize];
            let mut copied = report(self);
            self.run(self.meanwhile);
            // The copy is torn where that wrote.
            copied.needed = report(self).needed;
            Refusal { report: copied, headers: Vec::new() }
        }
    }

    proptest! {
        /// Every operation gets its own verdict or none, and none is forgotten as long as the host looks in
        /// time and not too many are bad.
        #[test]
        fn each_operation_gets_its_own_verdict(
            (kept, remembered, meanwhile) in (2u64..6, 1usize..5, 0u64..16),
            steps in prop::collection::vec((0u8..5, 0u64..12, 0u32..4), 1..200),
        ) {
            let ring = RefCell::new(vec![MoeReport::default(); kept as usize]);
            let lane = Lane { kept, ring, due: RefCell::default(), taken: RefCell::default(), meanwhile };
            let mut verdicts = Verdicts::new(kept, remembered);
            // The most that the host was ever ahead.
            let (mut ahead, mut bad) = (0, 0);
            for (what, much, verdict) in steps {
                match what {
                    0 | 1 => {
                        let number = verdicts.next(&lane);
                        prop_assert_eq!(number, lane.due.borrow().len() as u64 + 1);
                        lane.due.borrow_mut().push(verdict);
                        bad += usize::from(verdict != verdict::OK);
                        ahead = ahead.max(number - lane.reported());
                    }
                    2 => {
                        let number = verdicts.next(&lane);
                        verdicts.take_back(number);
                    }
                    3 => lane.run(much),
                    _ => {
                        let count = lane.due.borrow().len() as u64;
                        let number = 1 + much % count.max(1);
                        let reported = lane.reported();
                        let told = verdicts.of(number, &lane);
                        let truth = lane.due.borrow().get(number as usize - 1).copied();
                        match told {
                            None => prop_assert!(number > reported || truth.is_none()),
                            Some(Verdict::Good) => prop_assert_eq!(truth, Some(verdict::OK)),
                            Some(Verdict::Refused(it)) => {
                                prop_assert_eq!((Some(it.report.verdict), it.report.needed), (truth, number));
                                prop_assert_ne!(it.report.verdict, verdict::OK);
                            }
                            Some(Verdict::Forgotten) => {
                                prop_assert!(ahead >= kept || bad > remembered, "{ahead} ahead, {bad} bad");
                            }
                        }
                    }
                }
            }
        }
    }
}
