//! The same protocol with rows in the memory of GPUs.
//!
//! Everything a host rank does in a call is submitted to a stream here: what is announced, awaited
//! and moved are kernels and stream operations on the *comm stream* of the lane, which waits for the
//! caller's queue and which the caller's queue waits for. The host learns counts and verdicts from
//! reports in page-locked memory, and only waits for them where the caller needs them: in exact
//! mode, or when it asks.
//!
//! The steps are those of [`crate::dispatch`] and [`crate::fold`]; kernels never touch flags.

mod build;
mod check;
mod combine;
mod copies;
mod dispatch;
mod expand;
mod far;
mod fixed;
mod machine;
mod memory;
mod nodes;
mod plans;
mod report;
#[cfg(test)]
mod sim;
mod slots;
mod tune;
mod verdicts;

use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use ep_kernels::cuda::moe::{AnnounceArgs, MoeOp, MoeShape, MoeWork, MovePlan};
use ep_kernels::cuda::{CudaError, Device, DeviceProperties, LaunchFlags};
use ep_transport::{Meeting, Queue, StreamSide, TransportError};
use parking_lot::Mutex;

pub(crate) use build::{Prepared, Sizes, SmChoice};
pub(crate) use combine::{Folding, combine_all};
pub(crate) use dispatch::{Sending, dispatch_all};
pub(crate) use machine::{Machine, Point};
pub(crate) use memory::{HandleMemory, Handles, Told};
pub use plans::PlanOrigin;
pub(crate) use plans::{Found, Moving, Plans};
use report::moe;
pub(crate) use report::{CAPTURED, Ticket};
pub use tune::PlanInForce;
pub(crate) use tune::{TuneSettings, tune_built};

use crate::ep::Inner;
use crate::notify::{Header, Phase};
use crate::{EpError, Result};
use verdicts::Verdicts;

/// How the kernels of a layer are launched. What is not said is what tuning found (see
/// [`Tune`](crate::sched::tune::Tune)), else what ships for the device.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Tuning {
    /// Moves tokens to their ranks.
    pub dispatch: Option<MovePlan>,
    /// Copies received rows to their experts.
    pub expand: Option<MovePlan>,
    /// Sums a rank's experts for `Precision::Reduced`.
    pub reduce: Option<MovePlan>,
    /// Sums the rows of each token at home.
    pub combine: Option<MovePlan>,
}

impl Tuning {
    /// What a layer launches whose kernels have up to `blocks` blocks where this does not say more.
    pub(crate) fn launches(&self, blocks: u32) -> Vec<ep_topology::Launch> {
        let tuned = [self.dispatch, self.expand, self.reduce, self.combine];
        let plain = ep_topology::Launch::new(blocks, 1, false);
        let launch = |plan: MovePlan| {
            let cooperative = plan.attributes.flags().contains(LaunchFlags::COOPERATIVE);
            ep_topology::Launch::new(plan.blocks, plan.attributes.cluster(), cooperative)
        };
        std::iter::once(plain).chain(tuned.into_iter().flatten().map(launch)).collect()
    }

    /// Whether all of it can be launched: nothing may be refused once peers count on this rank.
    fn check(&self, world: usize, device: &DeviceProperties) -> Result<()> {
        let said = |moving: &Moving| self.of(*moving).map(|plan| (*moving, plan));
        let mut all = Moving::ALL.iter().filter_map(said);
        all.try_for_each(|(moving, plan)| moving.check(&plan, world, device))
    }

    fn of(&self, moving: Moving) -> Option<MovePlan> {
        match moving {
            Moving::Dispatch => self.dispatch,
            Moving::Expand => self.expand,
            Moving::Reduce => self.reduce,
            Moving::Combine => self.combine,
        }
    }
}

/// A layer's communication on one GPU.
#[derive(Debug)]
pub(crate) struct Gpu {
    // Dropped first: it waits for the work on it to end.
    machine: Box<dyn Machine>,
    pub ordinal: usize,
    shape: MoeShape,
    plans: Mutex<Plans>,
    sms: u32,
    /// Whether compute is meant to run at the same time.
    beside_compute: bool,
    lanes: Vec<GpuLane>,
    handles: Handles,
    slots: Mutex<SlotStates>,
    side: StreamSide,
    sizes: Sizes,
    /// Payloads of so many bytes go to ranks that are not mapped in parts.
    in_parts_from: usize,
    /// Where tokens cross nodes once.
    crossings: Option<nodes::Crossings>,
    /// Where blocks for ranks that are not mapped have a fixed size.
    fixed: Option<fixed::Fixed>,
}

/// A lane's stream and its memory.
#[derive(Debug)]
struct GpuLane {
    /// Its stream, which the machine keeps.
    queue: Queue,
    /// The stream on which parts go to ranks that are not mapped, if there are such ranks.
    carrier: Option<Queue>,
    blocks: Mutex<far::Blocks>,
    state: u64,
    scratch: u64,
    reports: u64,
    verdicts: Mutex<Verdicts>,
}

impl GpuLane {
    fn stream(&self) -> CUstream {
        let (stream, _) = self.queue.raw().expect("lanes have streams");
        stream
    }
}

/// What is known of slots beyond who owns them.
#[derive(Debug, Default)]
struct SlotStates {
    /// When peers may have the slot again.
    free_at: Vec<Option<Arc<dyn Point>>>,
    /// Slots that graphs use: never given to calls outside of captures.
    captured: u64,
    /// Those of them that no result owns.
    captured_free: u64,
}

/// An operation that has been given its place on a lane's stream.
#[derive(Debug)]
pub(crate) struct Turn {
    lane: usize,
    pub capturing: bool,
    /// As if captured where it reports nothing.
    pub ticket: Ticket,
}

/// What one of this module's own calls of the driver says.
fn cuda<T>(result: std::result::Result<T, CudaError>) -> Result<T> {
    Ok(result?)
}

impl Gpu {
    /// Other launches from now on.
    pub fn retune(&self, tuning: Tuning) -> Result<()> {
        tuning.check(self.columns(), self.machine.properties())?;
        self.plans.lock().given = tuning;
        Ok(())
    }

    /// The plan for rows of `row_bytes`, and where it comes from.
    pub fn plan_in_force(&self, moving: Moving, row_bytes: u32) -> (MovePlan, PlanOrigin) {
        let shipped = self.shipped(moving, row_bytes);
        self.plans.lock().of(moving, row_bytes, shipped)
    }

    /// What ships for a layer like this.
    pub fn shipped(&self, moving: Moving, row_bytes: u32) -> MovePlan {
        let (tokens, device) = (self.sizes.tokens, self.machine.properties());
        let plan = match (moving.copies(), self.beside_compute) {
            (true, false) => MovePlan::rows(row_bytes, tokens, self.sms, device),
            (true, true) => MovePlan::rows_beside_compute(row_bytes, tokens, self.sms, device),
            (false, _) => MovePlan::sums(row_bytes, self.sms, device),
        };
        plan.fitted(self.columns(), device)
    }

    /// What the caller said, and what was found.
    pub fn plans(&self) -> Plans {
        *self.plans.lock()
    }

    /// Takes what was found, or has it forgotten.
    pub fn set_found(&self, moving: Moving, found: Option<Found>) {
        self.plans.lock().found[moving as usize] = found;
    }

    /// The most blocks of a kernel that is not tuned otherwise.
    pub fn blocks(&self) -> u32 {
        self.sms
    }

    /// The comm stream of a lane.
    pub fn lane_stream(&self, index: usize) -> CUstream {
        self.lane(index).stream()
    }

    /// The GPU itself, for what is not part of the protocol.
    pub fn device(&self, op: &'static str) -> Result<&Device> {
        let unsupported =
            || TransportError::Unsupported { op, detail: "the GPU is simulated".into() };
        Ok(self.machine.device().ok_or_else(unsupported)?)
    }

    fn lane(&self, index: usize) -> &GpuLane {
        &self.lanes[index]
    }

    /// As [`Gpu::enter`], for an operation of a lane that the caller holds.
    fn begin(&self, op: &'static str, lane: usize, queue: &Queue) -> Result<Turn> {
        let turn = self.enter(op, lane, queue)?;
        Ok(Turn { ticket: self.ticket(lane, turn.capturing), ..turn })
    }

    /// Checks the caller's queue and lets the lane's stream wait for it.
    fn enter(&self, op: &'static str, lane: usize, queue: &Queue) -> Result<Turn> {
        let (raw, ordinal) = self.raw(op, queue)?;
        if ordinal != self.ordinal {
            let detail = format!(
                "the queue is a stream of GPU {ordinal}, the layer works on GPU {}",
                self.ordinal
            );
            return Err(EpError::argument(op, detail));
        }
        // SAFETY: by the contract of the queue, its stream is live.
        let capturing = unsafe {
            self.machine.check_stream(op, raw)?;
            self.machine.is_capturing(raw)?
        };
        if capturing {
            self.check_capture(op)?;
        }
        // SAFETY: both streams are live and of this device.
        unsafe { self.machine.chain(raw, self.lane(lane).stream())? };
        Ok(Turn { lane, capturing, ticket: Ticket::CAPTURED })
    }

    fn raw(&self, op: &'static str, queue: &Queue) -> Result<(CUstream, usize)> {
        queue.raw().ok_or_else(|| {
            let detail = "the layer works on a GPU: pass a stream as the queue";
            EpError::argument(op, detail)
        })
    }

    /// Lets work submitted to the lane's stream from now on wait for what `queue` has now.
    fn follow(&self, op: &'static str, turn: &Turn, queue: &Queue) -> Result<()> {
        let (raw, _) = self.raw(op, queue)?;
        // SAFETY: both streams are live and of this device.
        cuda(unsafe {
            self.machine
                .check_stream(op, raw)
                .and_then(|()| self.machine.chain(raw, self.lane(turn.lane).stream()))
        })
    }

    /// Lets `queue` wait for everything on the lane's stream so far.
    fn finish(&self, op: &'static str, turn: &Turn, queue: &Queue) -> Result<Arc<dyn Point>> {
        let (raw, _) = self.raw(op, queue)?;
        // SAFETY: both streams are live and of this device.
        let point = unsafe {
            let point = self.machine.record(self.lane(turn.lane).stream())?;
            point.order(raw)?;
            point
        };
        Ok(point)
    }

    /// After an error before anything was submitted: a capture that [`Gpu::begin`] spread to the
    /// lane's stream comes back to `queue`, so that the caller can end it.
    fn leave(&self, op: &'static str, turn: &Turn, queue: &Queue, error: EpError) -> EpError {
        self.void(turn);
        if turn.capturing {
            // The error at hand says more than that the capture is lost.
            let _ = self.finish(op, turn, queue);
        }
        error
    }

    /// The struct every kernel of an operation takes.
    /// `marks`: the wait follows at once, so that the kernel tells the watchdog of it.
    fn op(&self, ep: &Inner, turn: &Turn, marks: bool) -> MoeOp {
        let lane = self.lane(turn.lane);
        // Kernels know the phases of a lane by what lies between their first words.
        let awaited = match marks {
            true => self.side.awaited(Phase::Posted.flag(turn.lane), ep.group.world(), 0),
            false => 0,
        };
        MoeOp {
            lane: lane.state,
            mailboxes: ep.local(ep.window.mailbox(turn.lane, 0)) as u64,
            report: turn.ticket.report(lane.reports, self.sizes.report),
            ticket: turn.ticket.number(),
            awaited,
            lane_index: turn.lane as u64,
            send: ep.local(ep.window.send_staging(turn.lane)) as u64,
            receive: ep.local(ep.window.receive_staging(turn.lane)) as u64,
            block: 0,
        }
    }

    /// Announces an operation whose counts are known to all.
    fn announce(
        &self,
        ep: &Inner,
        turn: &Turn,
        header: Header,
        handle: u64,
        marks: bool,
    ) -> Result<()> {
        let op = self.op(ep, turn, marks);
        let args = AnnounceArgs { shape: self.shape, op, header: moe(header), handle };
        // SAFETY: the stream is live; addresses are those of this layer's memory, which outlives
        // its streams' work.
        unsafe { self.submit(turn, &MoeWork::Announce(&args)) }
    }

    /// Launches work on the lane's stream.
    ///
    /// # Safety
    /// Its addresses are valid for what is done with them, until it has ended.
    unsafe fn submit(&self, turn: &Turn, work: &MoeWork<'_>) -> Result<()> {
        // SAFETY: by this function's contract; the lane's stream is live.
        cuda(unsafe { self.machine.submit(self.lane(turn.lane).stream(), work) })
    }

    fn signal(&self, ep: &Inner, turn: &Turn, phase: Phase, peers: &[usize]) -> Result<()> {
        let flag = phase.flag(turn.lane);
        peers.iter().try_for_each(|&peer| {
            let signalled = ep.link.signal(&self.lane(turn.lane).queue, peer, flag);
            ep.check("signal", signalled)
        })
    }

    /// Waits for a phase of `peers`. `joined`: raises it before, in the same step if possible, and a
    /// kernel of the operation has told the watchdog; never where ranks are not mapped.
    fn meet(
        &self,
        ep: &Inner,
        turn: &Turn,
        (op, phase): (&'static str, Phase),
        peers: &[usize],
        joined: bool,
    ) -> Result<()> {
        let (queue, flag) = (&self.lane(turn.lane).queue, phase.flag(turn.lane));
        let (deadline, signal, marked) = (ep.deadline(), joined, joined);
        let meeting = Meeting { op, peers, flag, deadline, signal, marked };
        ep.check(op, ep.link.meet(queue, &meeting))
    }

    /// As [`Gpu::meet`] where no kernel of the operation has told the watchdog.
    fn wait(
        &self,
        ep: &Inner,
        turn: &Turn,
        (op, phase): (&'static str, Phase),
        peers: &[usize],
    ) -> Result<()> {
        let (queue, flag) = (&self.lane(turn.lane).queue, phase.flag(turn.lane));
        ep.check(op, ep.link.wait(queue, op, peers, flag, ep.deadline()))
    }

    /// The plan of a kernel that moves rows of `row_bytes`.
    fn plan(&self, moving: Moving, row_bytes: u32) -> MovePlan {
        self.plan_in_force(moving, row_bytes).0
    }
}
