//! What kernels read and write where blocks between ranks have a fixed size and place.

use ep_kernels::cuda::moe::{FixedArgs, FixedRows};

use super::effects::{On, Ranks};
use super::far::PARTS;
use super::memory::{Content, Memory, Place};

/// Rows between the blocks of a rank and a slot of it.
#[derive(Clone, Copy, Debug)]
pub struct FixedEffect {
    on: On,
    handle: u64,
    slot: usize,
    rows: FixedRows,
}

impl FixedEffect {
    pub fn of(rows: FixedRows, args: &FixedArgs) -> Self {
        let (on, handle) = (On::new(args.shape.rank, &args.op), args.routing.header);
        Self { on, handle, slot: args.slot as usize, rows }
    }
}

impl Ranks {
    /// Does what a kernel does.
    pub fn run_fixed(&self, memory: &mut Memory, stream: usize, effect: FixedEffect) {
        let FixedEffect { on: On { rank, lane, .. }, handle, slot, rows } = effect;
        memory.read(stream, Place::Handle { rank, at: handle });
        for other in (0..self.world).filter(|&other| self.is_far(rank, other)) {
            let from = match rows {
                FixedRows::Received => {
                    let sequence = self.sequences[rank][lane];
                    let content = Content::Received { lane, sequence };
                    memory.expect(stream, Place::Staged { rank, lane, owner: other }, content);
                    memory.write(stream, Place::Rows { rank, slot, source: other }, content);
                    continue;
                }
                FixedRows::PerRank => Place::Rows { rank, slot, source: other },
                FixedRows::PerExpert => Place::Experts { rank, slot },
            };
            let content = memory.read(stream, from);
            for part in 0..PARTS {
                memory.write(stream, Place::Packed { rank, lane, peer: other, part }, content);
            }
        }
    }
}
