//! What a GPU tells the host of operations.

use ep_kernels::cuda::moe::{MoeHeader, MoeReport, verdict};
use ep_transport::{Deadline, TransportError};

use crate::ep::Inner;
use crate::notify::{self, Header};
use crate::{EpError, Result};

use super::Gpu;

/// How many operations of a lane the host may be late in asking for.
pub(super) const KEPT: u64 = 64;
/// Reports of a lane: those kept and one that captured operations share.
pub(super) const REPORTS: usize = KEPT as usize + 1;

/// The number of an operation among those this rank submitted to a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

impl Ticket {
    /// Every replay of a graph writes the same one.
    pub const CAPTURED: Self = Self(u64::MAX);

    pub fn new(number: u64) -> Self {
        Self(number)
    }

    pub fn number(self) -> u64 {
        self.0
    }

    /// The address of its report.
    pub fn report(self, reports: u64, bytes: usize) -> u64 {
        let index = if self == Self::CAPTURED { KEPT } else { self.0 % KEPT };
        reports + index * bytes as u64
    }
}

impl Gpu {
    /// The report of an operation, if it has been written. Of one that was overwritten by later
    /// operations nothing is known any more; it counts as good, since later ones went on.
    fn report(&self, lane: usize, ticket: Ticket) -> Option<MoeReport> {
        let at = ticket.report(self.lane(lane).reports, self.sizes.report) as *const MoeReport;
        // SAFETY: the report is in page-locked memory of this layer, aligned to 8. The GPU writes
        // the ticket last, and the fence orders the other reads after it.
        let seen = unsafe {
            let seen = (&raw const (*at).ticket).read_volatile();
            std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
            seen
        };
        if seen == ticket.number() {
            // SAFETY: page-locked memory of this layer, aligned; whole, since the ticket was seen.
            return Some(unsafe { at.read_volatile() });
        }
        let later = seen > ticket.number() && ticket != Ticket::CAPTURED;
        later.then(|| MoeReport { ticket: seen, verdict: verdict::OK, ..MoeReport::default() })
    }

    /// The verdict of an operation, if it is known.
    pub fn verdict(
        &self,
        ep: &Inner,
        op: &'static str,
        lane: usize,
        ticket: Ticket,
    ) -> Option<Result<()>> {
        let report = self.report(lane, ticket)?;
        Some(match report.verdict {
            verdict::OK => Ok(()),
            verdict::CAPACITY => Err(self.capacity(ep, op, &report)),
            verdict::DISAGREE => Err(self.disagreement(op, lane, ticket)),
            _ => Err(failed(ep, op)),
        })
    }

    /// The slot that a rank announced for an operation with a verdict, where ranks are not mapped.
    pub fn announced_slot(&self, turn: &super::Turn, rank: usize) -> usize {
        let report = turn.ticket.report(self.lane(turn.lane).reports, self.sizes.report) as usize;
        let headers = (report + size_of::<MoeReport>()) as *const MoeHeader;
        // SAFETY: behind a report there is room for the announcements of all ranks; they were written
        // before the ticket, and the lane's next operation has another report.
        unsafe { (&raw const (*headers.add(rank)).slot).read_volatile() as usize }
    }

    /// Waits, bounded, on the host for the verdict of an operation.
    pub fn await_verdict(
        &self,
        ep: &Inner,
        op: &'static str,
        lane: usize,
        ticket: Ticket,
    ) -> Result<()> {
        // The watchdog of the stream's own wait knows more of the absent; it gets to speak first.
        let timeout = ep.timeout();
        let deadline =
            Deadline::after(timeout + timeout / 4 + std::time::Duration::from_millis(500));
        let mut spins = 0;
        loop {
            if let Some(verdict) = self.verdict(ep, op, lane, ticket) {
                return verdict;
            }
            if spins % 64 == 63 {
                ep.usable(op)?;
            }
            if deadline.expired() {
                let hint = format!(" (lane {lane}, the GPU did not get there)");
                let error = TransportError::Timeout { op, peers: Vec::new(), after: timeout, hint };
                ep.group.report(&error);
                return Err(error.into());
            }
            self.machine.pause(&mut spins);
        }
    }

    fn capacity(&self, ep: &Inner, op: &'static str, report: &MoeReport) -> EpError {
        let shape = &ep.shape;
        let blocks = shape.blocks.map_or((0, 0), |b| (b.rows, b.expert_rows));
        let (what, reserved, setting) = match report.what {
            0 => ("rank-major rows", shape.max_rows, "max_rows"),
            1 => ("expert-major rows", shape.max_expert_rows, "max_expert_rows"),
            3 => ("rows to forward", shape.max_forward_rows, "max_forward_rows"),
            4 => ("rows of one rank", blocks.0, "max_block_rows"),
            5 => ("experts' rows of one rank", blocks.1, "max_block_expert_rows"),
            _ => ("rows", shape.max_rows, "max_rows"),
        };
        let (rank, needed) = (report.rank as usize, report.needed as usize);
        EpError::Capacity { op, rank, what, needed, reserved, setting }
    }

    /// The error that the announcements of all ranks amount to.
    fn disagreement(&self, op: &'static str, lane: usize, ticket: Ticket) -> EpError {
        let at = ticket.report(self.lane(lane).reports, self.sizes.report) as usize
            + size_of::<MoeReport>();
        let headers: Vec<Header> = (0..self.shape.world as usize)
            .map(|source| {
                // SAFETY: behind a report there is room for the announcements of all ranks; they
                // were written before the ticket.
                header(unsafe { (at as *const MoeHeader).add(source).read_volatile() })
            })
            .collect();
        match notify::verdict(op, &headers) {
            Err(error) => error,
            Ok(()) => {
                let slots = self.shape.slots;
                let wrong = headers.iter().position(|h| h.slot >= slots);
                let detail = format!("announcements of rank {wrong:?} are not valid");
                EpError::Corrupt { op, detail }
            }
        }
    }
}

/// Why a group's waits were released.
fn failed(ep: &Inner, op: &'static str) -> EpError {
    match ep.usable(op) {
        Err(error) => error,
        Ok(()) => {
            let why = "waits were released by a failure".to_string();
            TransportError::Aborted { op, by: ep.rank(), blames: None, why }.into()
        }
    }
}

fn header(h: MoeHeader) -> Header {
    Header {
        op: h.op,
        slot: h.slot,
        sequence: h.sequence,
        layout: h.layout,
        payload: h.payload,
        received: h.received,
        handle: h.handle,
        options: h.options,
        status: h.status,
        bad_token: h.bad_token,
        bad_id: h.bad_id,
    }
}

/// An announcement as kernels know it.
pub(super) fn moe(h: Header) -> MoeHeader {
    MoeHeader {
        op: h.op,
        slot: h.slot,
        sequence: h.sequence,
        layout: h.layout,
        payload: h.payload,
        received: h.received,
        handle: h.handle,
        options: h.options,
        status: h.status,
        bad_token: h.bad_token,
        bad_id: h.bad_id,
    }
}
