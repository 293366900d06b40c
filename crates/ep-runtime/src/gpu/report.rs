//! What a GPU tells the host of operations.

use std::time::Duration;

use ep_kernels::cuda::moe::{MoeHeader, MoeReport, verdict};
use ep_transport::{Deadline, TransportError};

use crate::ep::Inner;
use crate::notify::{self, Header, Phase};
use crate::{EpError, Result};

use super::verdicts::{KEPT, Refusal, Ring, Verdict};
use super::{Gpu, GpuLane, Turn};

/// What a captured operation's event and handle say when they are asked for its verdict.
pub(crate) const CAPTURED: &str =
    "the operation was captured into a graph: wait for the graph's launch";

/// Reports of a lane: those kept and one that captured operations share.
pub(super) const REPORTS: usize = KEPT as usize + 1;

/// The number of an operation among those this rank submitted to a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

impl Ticket {
    /// Every replay of a graph writes the same one.
    pub const CAPTURED: Self = Self(u64::MAX);

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
    fn ring(&self, lane: &GpuLane) -> Ring {
        let (reports, bytes) = (lane.reports, self.sizes.report);
        Ring { reports, bytes, world: self.shape.world as usize }
    }

    /// The ticket of an operation that is about to be submitted to a lane, which its caller holds.
    pub(super) fn ticket(&self, lane: usize, capturing: bool) -> Ticket {
        let lane = self.lane(lane);
        match capturing {
            true => Ticket::CAPTURED,
            false => Ticket(lane.verdicts.lock().next(&self.ring(lane))),
        }
    }

    /// The operation of a turn, the last one of its lane, writes no report.
    pub(super) fn void(&self, turn: &Turn) {
        if !turn.capturing {
            self.lane(turn.lane).verdicts.lock().take_back(turn.ticket.0);
        }
    }

    /// The verdict of an operation, if it is known: its own, however late it is asked for.
    pub fn verdict(
        &self,
        ep: &Inner,
        op: &'static str,
        lane: usize,
        ticket: Ticket,
    ) -> Option<Result<()>> {
        if ticket == Ticket::CAPTURED {
            return Some(Err(EpError::argument(op, CAPTURED)));
        }
        let of = self.lane(lane);
        let known = of.verdicts.lock().of(ticket.0, &self.ring(of))?;
        let Refusal { report, headers } = match known {
            Verdict::Good => return Some(Ok(())),
            Verdict::Refused(why) => why,
            Verdict::Forgotten => return Some(Err(EpError::Forgotten { op, lane, kept: KEPT })),
        };
        Some(Err(match report.verdict {
            verdict::CAPACITY => self.capacity(ep, op, &report),
            verdict::DISAGREE => self.disagreement(op, headers),
            _ => failed(ep, op),
        }))
    }

    /// The slot that a rank announced for an operation with a verdict, where ranks are not mapped.
    pub fn announced_slot(&self, turn: &Turn, rank: usize) -> usize {
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
        // The watchdog knows more of the absent, and its time begins when the stream comes to the wait: it
        // gets to speak first.
        let timeout = ep.timeout();
        let deadline = Deadline::after(2 * timeout + Duration::from_secs(2));
        let mut spins = 0;
        loop {
            if let Some(verdict) = self.verdict(ep, op, lane, ticket) {
                return verdict;
            }
            if spins % 64 == 63 {
                ep.usable(op)?;
            }
            if deadline.expired() {
                let (peers, after) = (self.absent(ep, lane), deadline.length());
                let hint = format!(" (lane {lane}, the GPU did not get there)");
                let error = TransportError::Timeout { op, peers, after, hint };
                ep.group.report(&error);
                return Err(error.into());
            }
            self.machine.pause(&mut spins);
        }
    }

    /// Whom a lane's stream waits for now.
    pub(super) fn absent(&self, ep: &Inner, lane: usize) -> Vec<usize> {
        let phases = [Phase::Posted, Phase::Done, Phase::Sent];
        let mut peers: Vec<usize> =
            phases.iter().flat_map(|phase| ep.link.absent(phase.flag(lane))).collect();
        peers.sort_unstable();
        peers.dedup();
        peers
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
    fn disagreement(&self, op: &'static str, headers: Vec<MoeHeader>) -> EpError {
        let headers: Vec<Header> = headers.into_iter().map(header).collect();
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
