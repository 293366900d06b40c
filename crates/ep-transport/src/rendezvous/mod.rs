//! How the ranks of a job find each other.

mod allgather;
mod env;
pub(crate) mod host;
mod join;
mod listen;

pub use allgather::AllGather;

use std::time::Duration;

use crate::{DEFAULT_TIMEOUT, Group, Result, TransportError};

/// Where the ranks of a job meet, and which of them this one is.
///
/// Rank 0 listens at the address, the others connect to it; they may start in any order within the
/// time-out. A *rank* is a process's number in the job and says nothing about which device it uses:
/// see [`Rendezvous::local_rank`] for a usual choice.
///
/// The job token keeps jobs apart that meet at the same address by mistake. It is sent in the
/// clear: it protects from accidents, not from attackers on the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    rank: usize,
    world: usize,
    host: String,
    port: u16,
    token: String,
    timeout: Duration,
    local_rank: Option<usize>,
}

impl Rendezvous {
    /// The most ranks a job may have: beyond any machine, so that a wrong number is an error rather
    /// than memory for as many ranks.
    pub const MAX_WORLD: usize = 65_536;

    /// Rank `rank` of `world` meets the others at `address`, `host:port` (`[v6]:port`).
    ///
    /// # Errors
    /// An argument error if the rank is not below the world size, the world is larger than
    /// [`Rendezvous::MAX_WORLD`], or the address cannot be read.
    pub fn new(rank: usize, world: usize, address: &str) -> Result<Self> {
        let (host, port) = env::split_address("the rendezvous address", address)?;
        Self::checked(rank, world, host, port)
    }

    fn checked(rank: usize, world: usize, host: String, port: u16) -> Result<Self> {
        check_size("the world size ", world)?;
        if rank >= world {
            return Err(bad(format!("rank {rank} is not below the world size {world}")));
        }
        let (token, timeout) = (String::new(), DEFAULT_TIMEOUT);
        Ok(Self { rank, world, host, port, token, timeout, local_rank: None })
    }

    /// The same with a token that all ranks of the job share and others do not.
    ///
    /// # Errors
    /// An argument error if it is longer than 1024 bytes.
    pub fn with_token(mut self, token: impl Into<String>) -> Result<Self> {
        self.token = token.into();
        if self.token.len() > 1024 {
            return Err(bad(format!("a job token of {} bytes is too long", self.token.len())));
        }
        Ok(self)
    }

    /// The same with another bound for connecting, 60 s by default. Also the time-out of the
    /// group's collectives.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// This process's number, `0..world()`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks meet.
    pub fn world(&self) -> usize {
        self.world
    }

    /// This process's number among those of its host, if the launcher says so: the usual device
    /// ordinal where every process sees all devices, and not where each sees only its own.
    pub fn local_rank(&self) -> Option<usize> {
        self.local_rank
    }

    /// The address, `host:port`.
    pub fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    fn error(&self, peer: Option<usize>, detail: impl Into<String>) -> TransportError {
        TransportError::Rendezvous { address: self.address(), peer, detail: detail.into() }
    }
}

impl Group {
    /// Meets the other ranks as `rendezvous` says; returns once all are there.
    ///
    /// The hub of the group's control plane runs in rank 0's process: when that process ends, the
    /// others can make no further collective calls.
    ///
    /// # Errors
    /// [`TransportError::Rendezvous`], on every rank that can be told: the port is in use, a rank
    /// was started twice or not at all, world sizes or job tokens differ, the address cannot be
    /// resolved or reached.
    pub fn from_env(rendezvous: &Rendezvous) -> Result<Group> {
        let joined = join::from_env(rendezvous);
        if joined.is_err() && rendezvous.rank() == 0 {
            // The hub is a thread of this process, which may end on the error before the others,
            // some of them still connecting, have been told.
            std::thread::sleep(TELLING);
        }
        joined
    }
}

/// How long rank 0 keeps a failed meeting to itself, so that all others hear of it.
const TELLING: Duration = Duration::from_millis(200);

/// `named` is what comes before the number in the error.
fn check_size(named: &str, world: usize) -> Result<()> {
    let most = Rendezvous::MAX_WORLD;
    if world > most {
        return Err(bad(format!("{named}{world} is more than the {most} ranks a job may have")));
    }
    Ok(())
}

pub(crate) fn bad(detail: String) -> TransportError {
    TransportError::Argument { op: "rendezvous", detail }
}
