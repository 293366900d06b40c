//! What can be wrong with the arguments of a kernel.

use crate::{DType, PayloadKind};

/// A kernel or a shape refused its arguments; nothing was written unless the variant says so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A number is outside what the operation takes.
    #[error("{operation}: {what} = {value} is outside {allowed}")]
    Argument {
        /// The operation that refused.
        operation: &'static str,
        /// The argument's name.
        what: &'static str,
        /// The value given.
        value: usize,
        /// The values that would be taken.
        allowed: &'static str,
    },
    /// A payload row does not fill whole 16-byte units.
    #[error("a {kind} row of {bytes} bytes is not a positive multiple of 16 bytes")]
    RowBytes {
        /// What the row holds.
        kind: PayloadKind,
        /// Its size in bytes.
        bytes: usize,
    },
    /// A slice has another length than the shape asks for.
    #[error("{operation}: {what} has {got} elements, {expected} needed")]
    Length {
        /// The operation that refused.
        operation: &'static str,
        /// The argument's name.
        what: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// A pointer that rows would be read from or written to is null.
    #[error("{operation}: {what} is null")]
    Null {
        /// The operation that refused.
        operation: &'static str,
        /// The argument's name.
        what: &'static str,
    },
    /// A destination holds fewer rows than would be written there.
    #[error("{operation}: rank {rank} has room for {available} rows, {needed} needed")]
    Capacity {
        /// The operation that refused.
        operation: &'static str,
        /// The destination rank.
        rank: usize,
        /// Rows needed, counted from the start of the destination.
        needed: usize,
        /// Rows there are.
        available: usize,
    },
    /// The element type has no such operation.
    #[error("{operation} is not defined for {dtype}")]
    Unsupported {
        /// The operation that refused.
        operation: &'static str,
        /// The element type.
        dtype: DType,
    },
    /// Contiguous placement needs an expert for every rank.
    #[error("{experts} experts cannot be spread over {ranks} ranks: each rank needs one")]
    TooFewExperts {
        /// Experts given.
        experts: usize,
        /// Ranks given.
        ranks: usize,
    },
    /// An explicit placement is contradictory.
    #[error("placement of expert {expert}: {fault}")]
    Placement {
        /// The logical expert.
        expert: usize,
        /// What is wrong with its list of ranks.
        fault: PlacementFault,
    },
    /// More rows meet at one rank than an `i32` can number.
    #[error("the rows for {what} {index} exceed {max}", max = i32::MAX)]
    TooManyRows {
        /// What the rows were counted for: a rank or a physical expert.
        what: &'static str,
        /// Its number.
        index: usize,
    },
    /// Received rows disagree with the counts that announced them.
    #[error("{operation}: received rows disagree with their counts ({what} at {index})")]
    Inconsistent {
        /// The operation that refused.
        operation: &'static str,
        /// What disagrees.
        what: &'static str,
        /// Index of the row or of the local expert.
        index: usize,
    },
    /// The routing is not usable.
    #[error(transparent)]
    Ids(#[from] IdError),
}

/// What is wrong with the ranks listed for one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementFault {
    /// No rank holds the expert.
    #[error("no rank holds it")]
    NoRank,
    /// A rank is listed that does not exist.
    #[error("rank {rank} of {ranks} does not exist")]
    RankOutOfRange {
        /// The rank listed.
        rank: usize,
        /// Ranks there are.
        ranks: usize,
    },
    /// A rank is listed twice.
    #[error("rank {rank} is listed twice")]
    RepeatedRank {
        /// The rank listed.
        rank: usize,
    },
}

/// What is wrong with a batch of expert ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdError {
    /// An id is neither −1 nor the number of an expert.
    #[error("token {token}, choice {k}: expert id {id} is outside -1..{experts}")]
    OutOfRange {
        /// Index of the token in the batch.
        token: usize,
        /// Index of the choice in the token's top-k list.
        k: usize,
        /// The id given.
        id: i64,
        /// Experts there are.
        experts: usize,
    },
    /// A token names an expert twice.
    #[error("token {token} names expert id {id} twice")]
    Duplicate {
        /// Index of the token in the batch.
        token: usize,
        /// The id given.
        id: i64,
    },
    /// The number of ids is no multiple of top-k, or top-k is 0.
    #[error("{ids} ids do not form rows of top-k {topk}")]
    Shape {
        /// Ids given.
        ids: usize,
        /// Choices per token.
        topk: usize,
    },
    /// A rank number or a token count that does not fit.
    #[error("{what} = {value} is outside 0..{limit}")]
    Limit {
        /// The argument's name.
        what: &'static str,
        /// The value given.
        value: usize,
        /// The first value that does not fit.
        limit: usize,
    },
}
