//! What the study does to a device: hold SMs, launch beside them.

use ep_topology::{Launch, SmObservation};

use crate::Result;

/// Which SMs are held while something else is launched. Held blocks are one per SM and leave no room for
/// another block on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Held {
    /// A plain launch of so many blocks fewer than there are SMs, wherever the device puts them.
    AllButSome(u32),
    /// All SMs but these: launched everywhere, leaving on these.
    AllBut(Vec<u32>),
}

/// What was seen of one launch beside held SMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trial {
    /// Blocks that started before the first held SM was given back.
    pub started: u32,
    /// Blocks launched.
    pub blocks: u32,
}

impl Trial {
    /// Whether the launch started.
    pub fn starts(&self) -> bool {
        self.started > 0
    }

    /// Whether all its blocks were resident at once.
    pub fn resident(&self) -> bool {
        self.started == self.blocks
    }
}

/// A device to study.
pub trait Lab {
    /// Its name.
    fn name(&self) -> String;

    /// SMs, clusters seen, active clusters. `left_free` may be empty.
    ///
    /// # Errors
    /// The device's.
    fn observe(&mut self) -> Result<SmObservation>;

    /// The SMs that a plain holder of `free` blocks fewer than SMs leaves free.
    ///
    /// # Errors
    /// The device's.
    fn left_free(&mut self, free: u32) -> Result<Vec<u32>>;

    /// Holds SMs, launches blocks that fill an SM each, and looks at what starts beside.
    ///
    /// # Errors
    /// The device's.
    fn trial(&mut self, held: &Held, launch: Launch) -> Result<Trial>;
}
