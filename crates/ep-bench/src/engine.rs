//! What the measurement needs of an implementation of dispatch and combine.
//!
//! The runner, the verification and their tests see only these two traits; [`host`](crate::host)
//! implements them with ep-runtime.

use std::borrow::Cow;

use crate::Result;
use crate::case::Case;
use crate::data::Input;
use crate::oracle::RankRow;

/// What has to fit on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Tokens sent.
    pub tokens: usize,
    /// Rank-major rows received.
    pub rows: usize,
    /// Expert-major rows received, padding included.
    pub expert_rows: usize,
}

/// One rank's place in a job.
pub trait Seat {
    /// This rank.
    fn rank(&self) -> usize;
    /// How many there are.
    fn ranks(&self) -> usize;
    /// Gathers everyone's bytes, by rank.
    ///
    /// # Errors
    /// A rank that does not answer.
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;
    /// Waits for all ranks.
    ///
    /// # Errors
    /// As [`Seat::all_gather`].
    fn barrier(&self) -> Result<()>;
    /// Tells all ranks to give up.
    fn abort(&self, why: &str);
    /// Builds what `case` needs; all ranks call it.
    ///
    /// # Errors
    /// What the library says.
    fn engine(&self, case: &Case, capacity: Capacity) -> Result<Box<dyn Engine>>;
}

/// Dispatch and combine of one rank. It holds at most one result at a time.
pub trait Engine {
    /// Dispatches `input`, or its payload along the routes of the last dispatch if `cached`.
    ///
    /// # Errors
    /// What the library says.
    fn dispatch(&mut self, input: &Input, cached: bool) -> Result<()>;
    /// Takes room for rows to be combined along the routes of the last dispatch.
    ///
    /// # Errors
    /// What the library says.
    fn reserve(&mut self) -> Result<()>;
    /// The rows held, as received.
    ///
    /// # Errors
    /// What the library says.
    fn held(&self) -> Result<Held<'_>>;
    /// How many rows are held, padding included.
    fn rows(&self) -> usize;
    /// Copies the received payload into memory of the caller's.
    ///
    /// # Errors
    /// What the library says.
    fn copy_out(&mut self) -> Result<()>;
    /// Writes expert outputs, rows back to back, to where combine takes them from.
    ///
    /// # Errors
    /// What the library says.
    fn fill(&mut self, outputs: &[u8]) -> Result<()>;
    /// Combines what is held for `tokens` tokens of this rank.
    ///
    /// # Errors
    /// What the library says.
    fn combine(&mut self, tokens: usize) -> Result<()>;
    /// The combined rows, back to back.
    fn combined(&self) -> &[u8];
    /// Overwrites the rows held and the combined rows, so that nothing an earlier run left there
    /// passes for the result of a later one.
    ///
    /// # Errors
    /// What the library says.
    fn scrub(&mut self) -> Result<()>;
    /// Gives back what is held.
    ///
    /// # Errors
    /// What the library says.
    fn release(&mut self) -> Result<()>;
}

/// Received rows.
#[derive(Clone, Debug, PartialEq)]
pub enum Held<'a> {
    /// Rank-major.
    Rank(Vec<RankRow<'a>>),
    /// Expert-major.
    Expert {
        /// `[local experts + 1]`.
        offsets: Vec<i32>,
        /// `[local experts]`.
        counts: Vec<u32>,
        /// In order, padding included.
        rows: Vec<HeldRow<'a>>,
    },
}

/// One expert-major row.
#[derive(Clone, Debug, PartialEq)]
pub struct HeldRow<'a> {
    /// As received.
    pub payload: Cow<'a, [u8]>,
    /// As received.
    pub scales: Cow<'a, [u8]>,
    /// The token's weight for the expert.
    pub weight: f32,
    /// Rank and token it is from; `None` for padding.
    pub source: Option<(usize, usize)>,
}
