//! Groups of ranks that already have collectives of their own.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

use serde::{Deserialize, Serialize};

use super::host::{HostId, hex, random};
use super::join::join;
use super::listen::own;
use super::{Rendezvous, bad, check_size};
use crate::tcp::{ranks_text, server};
use crate::{DEFAULT_TIMEOUT, Deadline, Group, Result, TransportError};

/// An engine's own all-gather, needed only while a group is made.
///
/// Implemented by closures.
pub trait AllGather {
    /// Gathers everyone's bytes (a few hundred, of differing lengths) by rank.
    ///
    /// # Errors
    /// Whatever the engine's collective reports; it ends the construction.
    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Box<dyn Error + Send + Sync>>;
}

impl<F> AllGather for F
where
    F: FnMut(&[u8]) -> Result<Vec<Vec<u8>>, Box<dyn Error + Send + Sync>>,
{
    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Box<dyn Error + Send + Sync>> {
        self(bytes)
    }
}

/// What each rank tells the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Card {
    version: u16,
    rank: usize,
    world: usize,
    host: HostId,
    meeting: Option<Meeting>,
    problem: Option<String>,
}

/// Where rank 0 listens.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Meeting {
    port: u16,
    /// Addresses or names, the likeliest first.
    hosts: Vec<String>,
    token: String,
}

impl Group {
    /// Makes a group of `world` ranks with the help of the caller's own all-gather, which is called
    /// once, to tell the others where rank 0 listens: on a port that the system picks, at
    /// 127.0.0.1 if all ranks share a host, else at the addresses of rank 0's interfaces, tried in
    /// turn. `EP_RENDEZVOUS_HOST` on rank 0 names the address or interface to use instead.
    ///
    /// # Errors
    /// An argument error if the all-gather fails or its result is not one part per rank, in order;
    /// else as [`Group::from_env`].
    pub fn with_allgather(rank: usize, world: usize, mut gather: impl AllGather) -> Result<Group> {
        check_size("the world size ", world)?;
        if rank >= world {
            return Err(bad(format!("rank {rank} is not below the world size {world}")));
        }
        let host = HostId::here();
        let version = crate::tcp::wire::VERSION;
        let mut card = Card { version, rank, world, host, meeting: None, problem: None };
        let mut listener = None;
        if rank == 0 {
            match meet() {
                Ok((bound, meeting)) => (listener, card.meeting) = (Some(bound), Some(meeting)),
                Err(problem) => card.problem = Some(problem),
            }
        }
        let bytes = postcard::to_stdvec(&card).expect("a value of owned parts has an encoding");
        let all = gather
            .all_gather(&bytes)
            .map_err(|e| bad(format!("rank {rank}: the caller's all-gather failed: {e}")))?;
        let cards = read(&all, rank, world)?;
        if let Some(problem) = &cards[0].problem {
            let address = "rank 0".into();
            return Err(TransportError::Rendezvous {
                address,
                peer: Some(0),
                detail: problem.clone(),
            });
        }
        let meeting = cards[0]
            .meeting
            .clone()
            .ok_or_else(|| bad("rank 0 did not say where it listens".into()))?;
        connect(&cards, rank, listener, &meeting)
    }
}

fn connect(
    cards: &[Card],
    rank: usize,
    listener: Option<TcpListener>,
    meeting: &Meeting,
) -> Result<Group> {
    let together = cards.iter().all(|card| card.host.shares(&cards[0].host));
    let hosts =
        if together { vec![Ipv4Addr::LOCALHOST.to_string()] } else { meeting.hosts.clone() };
    let name = hosts.first().cloned().unwrap_or_default();
    let at = Rendezvous::checked(rank, cards.len(), name, meeting.port)?
        .with_token(meeting.token.clone())?;
    let deadline = Deadline::after(DEFAULT_TIMEOUT);
    let addresses = match listener {
        Some(listener) => {
            let own = own(&listener).map_err(|e| at.error(Some(0), e.to_string()))?;
            server::spawn(listener, cards.len(), at.token.clone().into_bytes(), at.timeout)?;
            own
        }
        None => addresses(&hosts, meeting.port),
    };
    if addresses.is_empty() {
        return Err(at.error(
            Some(0),
            "rank 0 has no address that resolves here: set EP_RENDEZVOUS_HOST on rank 0",
        ));
    }
    join(&at, Some(addresses), deadline)
}

fn addresses(hosts: &[String], port: u16) -> Vec<SocketAddr> {
    hosts
        .iter()
        .flat_map(|host| {
            (host.as_str(), port).to_socket_addrs().map(Vec::from_iter).unwrap_or_default()
        })
        .collect()
}

/// Rank 0 listens on a port of the system's choice.
fn meet() -> Result<(TcpListener, Meeting), String> {
    let any = [IpAddr::from(Ipv6Addr::UNSPECIFIED), Ipv4Addr::UNSPECIFIED.into()];
    let any = any.map(|ip| SocketAddr::new(ip, 0));
    let listener =
        TcpListener::bind(&any[..]).map_err(|e| format!("rank 0 cannot listen ({e})"))?;
    let port = listener.local_addr().map_err(|e| e.to_string())?.port();
    let chosen = std::env::var("EP_RENDEZVOUS_HOST").ok().filter(|host| !host.is_empty());
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let usable = |i: &&if_addrs::Interface| !i.is_loopback() && !i.is_link_local();
    let hosts: Vec<String> = match chosen {
        Some(chosen) => {
            let of: Vec<String> = interfaces
                .iter()
                .filter(|i| i.name == chosen)
                .map(|i| i.ip().to_string())
                .collect();
            if of.is_empty() { vec![chosen] } else { of }
        }
        None => {
            let mut all: Vec<IpAddr> = interfaces.iter().filter(usable).map(|i| i.ip()).collect();
            all.sort_by_key(IpAddr::is_ipv6);
            all.iter().map(IpAddr::to_string).collect()
        }
    };
    Ok((listener, Meeting { port, hosts, token: hex(&random()) }))
}

/// Checks what the caller's all-gather gave.
fn read(all: &[Vec<u8>], rank: usize, world: usize) -> Result<Vec<Card>> {
    if all.len() != world {
        return Err(bad(format!(
            "the caller's all-gather gave {} parts for a world of {world}",
            all.len()
        )));
    }
    let mut cards = Vec::with_capacity(world);
    for (from, bytes) in all.iter().enumerate() {
        let card: Card = postcard::from_bytes(bytes).map_err(|_| {
            bad(format!("the caller's all-gather gave no part of this library for rank {from}"))
        })?;
        if card.rank != from {
            return Err(bad(format!(
                "the caller's all-gather gave rank {}'s part in place {from}",
                card.rank
            )));
        }
        cards.push(card);
    }
    let mine = &cards[rank];
    let other = |differs: &dyn Fn(&Card) -> bool| -> Vec<usize> {
        cards.iter().filter(|card| differs(card)).map(|card| card.rank).collect()
    };
    let sizes = other(&|card| card.world != mine.world);
    if let Some(&first) = sizes.first() {
        let theirs = cards[first].world;
        let ranks = ranks_text(&sizes);
        return Err(bad(format!("world sizes differ: rank {rank} has {world}, {ranks} {theirs}")));
    }
    let versions = other(&|card| card.version != mine.version);
    if !versions.is_empty() {
        let ranks = ranks_text(&versions);
        return Err(bad(format!("{ranks} run another version of this library than rank {rank}")));
    }
    Ok(cards)
}
