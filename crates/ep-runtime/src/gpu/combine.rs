//! Combine on streams. The steps are those of [`crate::fold`].

use std::sync::Arc;

use ep_kernels::PayloadKind;
use ep_kernels::cuda::moe::{CombineArgs, MAX_BIASES, MoeOutFormat, MoeWork, ReduceArgs};
use ep_transport::Queue;

use crate::combine::{CombineOpts, Combined, FIXED, NODE_REDUCED, OP, REDUCED, WEIGHTED};
use crate::ep::Inner;
use crate::event::Judged;
use crate::lane::LaneGuard;
use crate::notify::{self, Header, Phase};
use crate::result::Dispatched;
use crate::shape::OutFormat;
use crate::slots::Slot;
use crate::{EpError, Event, Handle, Layout, Memory, Precision, Result};

use super::machine::Point;
use super::memory::HandleMemory;
use super::nodes::Homeward;
use super::plans::Moving;
use super::{Gpu, Turn};

/// A combine that was submitted up to its announcement.
#[derive(Debug)]
pub(crate) struct Folding {
    lane: LaneGuard,
    /// Absent once the operation has been brought to its end.
    slot: Option<Slot>,
    pub handle: Handle,
    pub kind: PayloadKind,
    format: OutFormat,
    per_rank: bool,
    weighted: bool,
    /// Nodes are summed first.
    per_node: bool,
    /// Both halves come at once: flags are raised only where they are awaited, in one step with that.
    whole: bool,
    /// Whether the stream waits for the announcements already.
    gathered: bool,
    turn: Turn,
    /// The caller's, for when sums are given up.
    queue: Queue,
    /// The bad verdict, where the host has to know it.
    refused: Option<EpError>,
    /// The dispatch whose rows are combined.
    dispatch: Option<Judged>,
}

impl Folding {
    fn gpu(&self) -> &Gpu {
        gpu(&self.lane.ep)
    }

    pub fn lane(&self) -> &LaneGuard {
        &self.lane
    }

    pub fn ep(&self) -> &Inner {
        &self.lane.ep
    }

    /// Everything that can fail before peers are told; then tells them. A refusal gives the result
    /// back. `whole`: the second half follows at once, and tells them.
    pub fn post(
        result: Dispatched,
        queue: &Queue,
        opts: &CombineOpts,
        kind: PayloadKind,
        whole: bool,
    ) -> Result<Self, (EpError, Option<Box<Dispatched>>)> {
        match prepare(&result, queue, opts, kind) {
            Ok((lane, turn)) => {
                let ep = lane.ep.clone();
                Self::announce(result, (lane, turn, queue), opts, kind, whole)
                    .map_err(|e| (ep.give_up(OP, e), None))
            }
            Err(error) => Err((error, Some(Box::new(result)))),
        }
    }

    fn announce(
        result: Dispatched,
        (lane, turn, queue): (LaneGuard, Turn, &Queue),
        opts: &CombineOpts,
        kind: PayloadKind,
        whole: bool,
    ) -> Result<Self> {
        let ep = lane.ep.clone();
        let gpu = gpu(&ep);
        let format = result.output_format(OP, kind)?;
        let routing = &result.handle.routing;
        let memory = routing.gpu.as_ref().expect("handles of a layer on a GPU have device memory");
        if turn.capturing {
            memory.capture();
            gpu.capture_slot(result.slot.index());
        }
        gpu.after_filling(memory, &turn)?;
        let expert_major = matches!(routing.layout, Layout::ExpertMajor { .. });
        let reduced = expert_major && opts.precision == Precision::Reduced;
        let per_node = opts.precision == Precision::NodeReduced;
        let travelling = if reduced {
            let to = OutFormat::rank_major(None, kind, ep.shape.hidden, ep.shape.topk);
            let args = ReduceArgs {
                shape: gpu.shape,
                routing: memory.routing,
                slot: result.slot.index() as u32,
                dtype: kind.dtype(),
                hidden: ep.shape.hidden as u32,
                from: out_format(&format),
                to: out_format(&to),
                weighted: opts.weighted,
            };
            let plan = gpu.plan(Moving::Reduce, args.hidden * args.dtype.size() as u32);
            // SAFETY: the slot is this rank's, its regions are apart; addresses are of this layer.
            unsafe { gpu.submit(&turn, &MoeWork::Reduce(&plan, &args))? };
            to
        } else {
            format
        };
        let header = Header {
            op: notify::OP_COMBINE,
            slot: result.slot.index() as u32,
            layout: routing.layout.code(),
            payload: kind.code(),
            received: result.received.map_or(0, |k| k.code() + 1),
            options: u64::from(reduced) * REDUCED
                + u64::from(opts.weighted) * WEIGHTED
                + u64::from(per_node) * NODE_REDUCED
                + u64::from(memory.fixed) * FIXED,
            ..Header::default()
        };
        // Where ranks are not mapped, steps come between the flags.
        let whole = whole && !gpu.is_far();
        gpu.announce(&ep, &turn, header, memory.header(), whole)?;
        if !whole {
            gpu.tell(&ep, &turn)?;
            gpu.signal(&ep, &turn, Phase::Posted, &ep.flagged)?;
        }
        let dispatch = result.judged();
        let Dispatched { slot, handle, .. } = result;
        let (per_rank, weighted) = (reduced || !expert_major, opts.weighted && !reduced);
        let (slot, queue, format) = (Some(slot), queue.clone(), travelling);
        let (gathered, refused) = (false, None);
        Ok(Self {
            lane,
            slot,
            handle,
            kind,
            format,
            per_rank,
            weighted,
            per_node,
            whole,
            gathered,
            turn,
            queue,
            refused,
            dispatch,
        })
    }

    /// The second half: sums once all rows are ready; `queue` waits until all have read.
    pub fn recv(mut self, queue: &Queue, out: &mut Combined<'_>) -> Result<Event> {
        let args = self.gather(queue, out)?;
        self.push()?;
        self.sum(&args)?;
        self.finish(queue)
    }

    /// Waits, on the stream, for all announcements.
    fn gather(&mut self, queue: &Queue, out: &mut Combined<'_>) -> Result<CombineArgs> {
        let args = self.arguments(out)?;
        let followed = self.gpu().follow(OP, &self.turn, queue);
        let gathered = followed.and_then(|()| self.submit_gather());
        gathered.map_err(|e| self.lane.ep.give_up(OP, e))?;
        Ok(args)
    }

    /// Waits, on the stream, for all announcements.
    fn submit_gather(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.gathered, true) {
            return Ok(());
        }
        let (ep, gpu) = (&self.lane.ep, self.gpu());
        gpu.gather(ep, &self.turn, "combine, announcements", self.whole)?;
        gpu.judge(ep, &self.turn)
    }

    /// Where ranks are not mapped, waits on the host until it is known that all combine the same, and
    /// sends them their rows. Blocks of fixed size go whatever is known.
    fn push(&mut self) -> Result<()> {
        if !self.gpu().is_far() {
            return Ok(());
        }
        let ep = self.lane.ep.clone();
        if self.memory().fixed {
            let pushed = self.send_fixed().and_then(|()| gpu(&ep).tell_sent(&ep, &self.turn));
            return pushed.map_err(|e| ep.give_up(OP, e));
        }
        let pushed = match gpu(&ep).await_verdict(&ep, OP, self.turn.lane, self.turn.ticket) {
            Ok(()) => self.send_home(),
            Err(error) if error.group_usable() && !gpu(&ep).ends(&ep, &error) => {
                self.refused = Some(error);
                Ok(())
            }
            Err(error) => Err(error),
        };
        let pushed = pushed.and_then(|()| gpu(&ep).tell_sent(&ep, &self.turn));
        pushed.map_err(|e| ep.give_up(OP, e))
    }

    fn memory(&self) -> &HandleMemory {
        self.handle.routing.gpu.as_ref().expect("on a GPU")
    }

    fn send_fixed(&self) -> Result<()> {
        let slot = self.slot.as_ref().expect("held to the end").index();
        let rows = (slot, self.format.stride, self.per_rank);
        self.gpu().send_fixed_home(&self.lane.ep, &self.turn, self.memory(), rows)
    }

    fn send_home(&self) -> Result<()> {
        let (ep, slot) = (&self.lane.ep, self.slot.as_ref().expect("held to the end").index());
        let memory = self.memory();
        if self.per_node {
            return self.gpu().send_sums(ep, &self.turn, &self.homeward(&self.any_arguments()));
        }
        let rows = (slot, self.format.stride, self.per_rank);
        self.gpu().send_home(ep, &self.turn, memory.told()?, rows)
    }

    fn homeward<'a>(&'a self, args: &'a CombineArgs) -> Homeward<'a> {
        let shape = &self.lane.ep.shape;
        let crossing = OutFormat::rank_major(None, self.kind, shape.hidden, shape.topk);
        let memory = self.memory();
        Homeward { args, crossing: out_format(&crossing), memory }
    }

    /// Sums once the rows of ranks that are not mapped have come home.
    fn sum(&self, args: &CombineArgs) -> Result<()> {
        self.submit_sum(args).map_err(|e| self.lane.ep.give_up(OP, e))
    }

    fn submit_sum(&self, args: &CombineArgs) -> Result<()> {
        let (ep, gpu) = (&self.lane.ep, self.gpu());
        let per_node = self.per_node && gpu.is_far();
        if per_node && self.refused.is_none() {
            gpu.sum_own(ep, &self.turn, &self.homeward(args))?;
        }
        gpu.await_sent(ep, &self.turn, "combine, blocks")?;
        if self.refused.is_some() {
            return gpu.signal(ep, &self.turn, Phase::Done, &ep.flagged);
        }
        if per_node {
            gpu.sum_nodes(ep, &self.turn, &self.homeward(args))?;
            return gpu.signal(ep, &self.turn, Phase::Done, &ep.flagged);
        }
        let plan = gpu.plan(Moving::Combine, args.hidden * args.dtype.size() as u32);
        // SAFETY: `out` and biases are rows of this many tokens on this GPU (checked); rows are in
        // slots whose owners announced them for this operation and keep them until Done, or in this
        // lane's staging, where they were sent.
        unsafe { gpu.submit(&self.turn, &MoeWork::Combine(&plan, args))? };
        if self.whole { Ok(()) } else { gpu.signal(ep, &self.turn, Phase::Done, &ep.flagged) }
    }

    fn finish(mut self, queue: &Queue) -> Result<Event> {
        let ep = self.lane.ep.clone();
        let gpu = gpu(&ep);
        let ended = (|| {
            let read = ("combine, read by all", Phase::Done);
            gpu.meet(&ep, &self.turn, read, &ep.flagged, self.whole)?;
            gpu.flush(&ep, &self.turn)?;
            gpu.finish(OP, &self.turn, queue)
        })();
        let point = ended.map_err(|e| ep.give_up(OP, e))?;
        self.release(&point);
        if let Some(refused) = self.refused.take() {
            return Err(refused);
        }
        let combine = Some((OP, self.turn.lane, self.turn.ticket));
        let verdicts = [self.dispatch, combine];
        Ok(Event::on_stream(ep.clone(), point, verdicts, self.turn.capturing))
    }

    fn release(&mut self, point: &Arc<dyn Point>) {
        let ep = self.lane.ep.clone();
        if let Some(mut slot) = self.slot.take() {
            gpu(&ep).free_after(&mut slot, point, &self.turn);
        }
        if let Some(memory) = &self.handle.routing.gpu {
            memory.used_until(point, &self.turn);
        }
    }

    /// Checks where `out` and what belongs to it is, and says it to the kernel.
    fn arguments(&self, out: &mut Combined<'_>) -> Result<CombineArgs> {
        let (ep, gpu) = (&self.lane.ep, self.gpu());
        if self.per_node && !gpu.is_far() && !out.biases.is_empty() {
            let detail = "Precision::NodeReduced with biases on one node of GPUs; use Exact";
            return Err(EpError::argument(OP, detail));
        }
        if out.biases.len() > MAX_BIASES {
            let detail = format!("{} biases; a GPU adds up to {MAX_BIASES}", out.biases.len());
            return Err(EpError::argument(OP, detail));
        }
        let place = |what: &str, at: Memory| match at == ep.place {
            true => Ok(()),
            false => {
                let detail = format!("{what} is in {at:?}, the layer works in {:?}", ep.place);
                Err(EpError::argument(OP, detail))
            }
        };
        place("the output", out.rows.place())?;
        let tokens = out.rows.len();
        let address = out.rows.as_mut_ptr() as u64;
        gpu.check_rows(OP, "the output's rows", (address, out.rows.stride(), tokens), 16)?;
        let mut biases = [(0, 0); MAX_BIASES];
        for (bias, to) in out.biases.iter().zip(&mut biases) {
            place("a bias", bias.place())?;
            *to = (bias.as_ptr() as u64, bias.stride() as u64);
            gpu.check_rows(OP, "a bias", (to.0, bias.stride(), tokens), 16)?;
        }
        let weights_home = match &mut out.weights {
            Some(weights) if !weights.is_empty() => {
                place("the weights", weights.place())?;
                let at = weights.as_mut_ptr() as u64;
                gpu.check_address(OP, "the weights", at, 4)?;
                at
            }
            _ => 0,
        };
        Ok(CombineArgs {
            out: address,
            out_stride: out.rows.stride() as u64,
            biases,
            bias_count: out.biases.len() as u32,
            weights_home,
            ..self.any_arguments()
        })
    }

    /// What does not depend on where sums go.
    fn any_arguments(&self) -> CombineArgs {
        let (ep, gpu) = (&self.lane.ep, self.gpu());
        CombineArgs {
            shape: gpu.shape,
            routing: self.memory().routing,
            op: gpu.op_with(ep, &self.turn, self.memory(), self.whole),
            dtype: self.kind.dtype(),
            hidden: ep.shape.hidden as u32,
            format: out_format(&self.format),
            per_rank: self.per_rank,
            weighted: self.weighted,
            out: 0,
            out_stride: 0,
            biases: [(0, 0); MAX_BIASES],
            bias_count: 0,
            weights_home: 0,
            carried_at: 0,
            // Else the verdict has been given, to the host or to the kernel.
            check: !gpu.is_far(),
        }
    }

    /// Everything peers wait for, without sums.
    fn give_up(&mut self) -> Result<()> {
        let ep = self.lane.ep.clone();
        let gpu = gpu(&ep);
        self.submit_gather()?;
        self.push()?;
        gpu.await_sent(&ep, &self.turn, "combine, blocks")?;
        gpu.signal(&ep, &self.turn, Phase::Done, &ep.flagged)?;
        gpu.wait(&ep, &self.turn, ("combine, read by all", Phase::Done), &ep.flagged)?;
        gpu.flush(&ep, &self.turn)?;
        let point = gpu.finish(OP, &self.turn, &self.queue)?;
        if !gpu.is_far() {
            // Sums would have told the verdict.
            gpu.void(&self.turn);
        }
        self.release(&point);
        Ok(())
    }
}

impl Drop for Folding {
    fn drop(&mut self) {
        if self.slot.is_none() {
            return;
        }
        if let Err(e) = self.give_up() {
            let e = self.lane.ep.give_up(OP, e);
            tracing::warn!("a dropped combine could not be brought to its end: {e}");
        }
    }
}

fn gpu(ep: &Inner) -> &Gpu {
    ep.gpu.as_ref().expect("a combine on a GPU comes from a layer on a GPU")
}

fn out_format(f: &OutFormat) -> MoeOutFormat {
    // Sizes were checked when the layer was built.
    MoeOutFormat {
        payload_bytes: f.payload_bytes as u32,
        weights_at: f.weights_at as u32,
        weights: f.weights as u32,
        stride: f.stride as u32,
    }
}

/// Everything that can fail before peers are told.
fn prepare(
    result: &Dispatched,
    queue: &Queue,
    opts: &CombineOpts,
    kind: PayloadKind,
) -> Result<(LaneGuard, Turn)> {
    let ep = &result.ep;
    ep.usable(OP)?;
    result.output_format(OP, kind)?;
    if opts.weighted && result.handle.layout() == Layout::RankMajor {
        return Err(crate::combine::weighted_rank_major());
    }
    let index = opts.lane.unwrap_or(result.lane);
    let lane = LaneGuard::take(ep, OP, index, ep.deadline())?;
    let turn = gpu(ep).begin(OP, index, queue)?;
    if let Some(memory) = result.handle.routing.gpu.as_ref().filter(|_| turn.capturing) {
        let checked = gpu(ep).check_captured_handle(OP, memory);
        checked.map_err(|e| gpu(ep).leave(OP, &turn, queue, e))?;
    }
    Ok((lane, turn))
}

/// [`Dispatched::combine`] for several ranks driven by one thread, phase by phase. `started` were
/// posted in order, each on its queue.
pub(crate) fn combine_all(
    mut started: Vec<(Folding, Combined<'_>)>,
    queues: &[&Queue],
) -> Result<Vec<Event>> {
    let queue = |i: usize| queues[i % queues.len()];
    let mut all = Vec::with_capacity(started.len());
    for (i, (folding, out)) in started.iter_mut().enumerate() {
        all.push(folding.gather(queue(i), out)?);
    }
    started.iter_mut().try_for_each(|(folding, _)| folding.push())?;
    started.iter().zip(&all).try_for_each(|((folding, _), args)| folding.sum(args))?;
    started.into_iter().enumerate().map(|(i, (folding, _))| folding.finish(queue(i))).collect()
}
