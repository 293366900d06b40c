//! What is tried, and in which order.

use std::fmt;

use ep_runtime::SmPolicy;

use super::choose;
use crate::case::Operation;
use crate::rng::{Purpose, Rng};

/// SMs that communication asks for.
pub const SMS: [u32; 6] = [4, 8, 12, 16, 24, 32];
/// Those of a quick run.
const QUICK_SMS: [u32; 2] = [8, 16];
/// Both directions.
pub const OPERATIONS: [Operation; 2] = [Operation::Dispatch, Operation::Combine];

/// How communication gets its SMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Policy {
    /// A partition of its own.
    Partition,
    /// SMs that compute leaves.
    Margin,
    /// None; only priority.
    Shared,
}

impl Policy {
    /// As the library takes it.
    pub fn of(self, sms: u32) -> SmPolicy {
        match self {
            Self::Partition => SmPolicy::Partition { sms },
            Self::Margin => SmPolicy::Margin { sms },
            Self::Shared => SmPolicy::Shared,
        }
    }

    /// The name used in reports and for `--only`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Partition => "partition",
            Self::Margin => "margin",
            Self::Shared => "shared",
        }
    }
}

/// What runs beside communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Beside {
    /// A kernel that holds its SMs and touches no memory.
    Holder,
    /// This project's persistent GEMM.
    Gemm,
    /// cuBLASLt's GEMM.
    CublasLt,
}

impl Beside {
    /// The name used in reports and for `--only`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Holder => "holder",
            Self::Gemm => "gemm",
            Self::CublasLt => "cublaslt",
        }
    }
}

/// One layer: what is decided when it is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Config {
    /// How it gets its SMs.
    pub policy: Policy,
    /// How many it asks for: blocks of its kernels.
    pub sms: u32,
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.policy.name(), self.sms)
    }
}

/// One measurement with a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// The layer.
    pub config: Config,
    /// What is timed.
    pub operation: Operation,
    /// Beside what.
    pub beside: Beside,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, operation, beside } = self;
        write!(f, "{config} {} {}", operation.name(), beside.name())
    }
}

/// How much is tried.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// Few SMs and runs.
    pub quick: bool,
    /// Only what has this in its name.
    pub only: Option<String>,
}

impl Scope {
    /// Whether something of this name is wanted.
    pub fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }

    /// Rounds of a point; each repeats all of its parts in a new order.
    pub fn rounds(&self) -> usize {
        if self.quick { 1 } else { 2 }
    }

    /// Runs of an operation per part and round.
    pub fn runs(&self) -> usize {
        8
    }

    /// Launches over which compute's speed is measured, per part and round.
    pub fn launches(&self) -> usize {
        if self.quick { 6 } else { 10 }
    }

    /// Tries of a launch that must never block.
    pub fn tries(&self) -> usize {
        if self.quick { 200 } else { 1000 }
    }

    fn sms(&self) -> &'static [u32] {
        if self.quick { &QUICK_SMS } else { &SMS }
    }
}

/// All layers in an order of the seed, each with its points in such an order.
pub fn configs(scope: &Scope, seed: u64) -> Vec<(Config, Vec<Point>)> {
    let mut all = Vec::new();
    for policy in [Policy::Partition, Policy::Margin, Policy::Shared] {
        for &sms in scope.sms() {
            let config = Config { policy, sms };
            let mut points = Vec::new();
            for operation in OPERATIONS {
                for beside in [Beside::Holder, Beside::Gemm, Beside::CublasLt] {
                    points.push(Point { config, operation, beside });
                }
            }
            // A holder on all SMs leaves none: that is blocked without being tried.
            let pointless =
                |p: &Point| p.beside == Beside::Holder && p.config.policy == Policy::Shared;
            points.retain(|p| !pointless(p) && scope.wants(&p.to_string()));
            shuffle(&mut points, seed, 1 + all.len());
            if !points.is_empty() || !choose::wanted(&config, scope).is_empty() {
                all.push((config, points));
            }
        }
    }
    shuffle(&mut all, seed, 0);
    all
}

/// An order of the seed; `number` makes different ones.
pub fn shuffle<T>(list: &mut [T], seed: u64, number: usize) {
    let mut rng = Rng::new(seed, Purpose::Outputs, usize::MAX - number);
    for i in (1..list.len()).rev() {
        list.swap(i, rng.below(i + 1));
    }
}
