//! What follows on a rank once its rows have come.

use ep_kernels::PayloadKind;
use ep_kernels::cuda::moe::{
    ExpandArgs, ExpandPlaces, MoeExpertFormat, MoeRowFormat, MoeWork, TailArgs,
};

use crate::ep::Inner;
use crate::{Layout, Result};

use super::memory::HandleMemory;
use super::plans::Moving;
use super::{Gpu, Turn};

impl Gpu {
    pub(super) fn row_format(&self, ep: &Inner, kind: PayloadKind) -> MoeRowFormat {
        // Sizes were checked when the layer was built.
        MoeRowFormat::new(&ep.shape.formats(kind).0).unwrap_or_default()
    }

    fn expert_format(&self, ep: &Inner, kind: PayloadKind) -> MoeExpertFormat {
        MoeExpertFormat::new(&ep.shape.formats(kind).1).unwrap_or_default()
    }

    pub(super) fn expand(
        &self,
        ep: &Inner,
        turn: &Turn,
        memory: &HandleMemory,
        kind: PayloadKind,
        cached: bool,
    ) -> Result<()> {
        let (shape, routing, op) = (self.shape, memory.routing, self.op(ep, turn, false));
        let row = self.row_format(ep, kind);
        if !cached {
            let scratch = self.lane(turn.lane).scratch;
            let places =
                ExpandPlaces { shape, routing, op, format: row, scratch, blocks: self.sms };
            // SAFETY: all addresses are of this layer's memory.
            unsafe { self.submit(turn, &MoeWork::Places(&places))? };
        }
        let args = ExpandArgs { shape, routing, op, row, expert: self.expert_format(ep, kind) };
        let plan = self.plan(Moving::Expand, row.payload_bytes);
        // SAFETY: all addresses are of this layer's memory.
        unsafe { self.submit(turn, &MoeWork::Expand(&plan, &args)) }
    }

    pub(super) fn mark_tail(
        &self,
        ep: &Inner,
        turn: &Turn,
        memory: &HandleMemory,
        kind: PayloadKind,
        layout: Layout,
    ) -> Result<()> {
        let args = TailArgs {
            shape: self.shape,
            routing: memory.routing,
            op: self.op(ep, turn, false),
            expert_major: layout != Layout::RankMajor,
            row: self.row_format(ep, kind),
            expert: self.expert_format(ep, kind),
            blocks: self.sms,
        };
        // SAFETY: all addresses are of this layer's memory.
        unsafe { self.submit(turn, &MoeWork::Tail(&args)) }
    }
}
