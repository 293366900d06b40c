//! Windows shared by the processes of one host.

mod exchange;
mod memfd;
mod socket;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::host_link::{Apart, HostLink, Region};
use crate::rendezvous::host::{HostId, random};
use crate::tcp::ranks_text;
use crate::{Deadline, Group, Link, Result, Transport, TransportError, WindowSpec};
use exchange::Exchange;
pub(crate) use exchange::Shared;
use memfd::Memfd;
use socket::{Listener, Name};

const OP: &str = "open";

/// The transport for ranks that are processes of one host (or threads of several groups).
///
/// Each rank's window is a memfd, sealed against shrinking, whose descriptor its peers get over
/// Unix sockets; once mapped, no descriptor is kept. It needs no ptrace rights and no space in
/// `/dev/shm`. Ranks must share the user, the kernel and the network namespace.
#[derive(Clone, Debug, Default)]
pub struct ProcessTransport {
    apart: Apart,
}

impl ProcessTransport {
    /// Every rank can load from and store to every window.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether to show peers as reachable only by [`Link::put`], to exercise that path.
    #[must_use]
    pub fn bulk(mut self, bulk: bool) -> Self {
        self.apart = Apart::all(bulk);
        self
    }

    /// Shows consecutive ranks as nodes of these many: ranks map those of their own node and reach
    /// others only by [`Link::put`], as if each node were a host. Replaces [`Self::bulk`].
    #[must_use]
    pub fn nodes(mut self, sizes: &[usize]) -> Self {
        self.apart = Apart::sizes(sizes);
        self
    }
}

/// What each rank tells the others before descriptors change hands.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Card {
    host: HostId,
    user: u32,
    name: Name,
    /// Shows that whoever calls belongs to the group.
    token: [u8; 16],
    /// Why this rank has no window, and the `errno`.
    problem: Option<(i32, String)>,
}

impl Transport for ProcessTransport {
    fn name(&self) -> &'static str {
        "process"
    }

    fn maps_all_peers(&self) -> bool {
        self.apart == Apart::None
    }

    fn nodes(&self, world: usize) -> Option<Vec<usize>> {
        self.apart.nodes(world)
    }

    fn open(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Arc<dyn Link>> {
        Ok(self.open_host(group, spec, deadline)?)
    }
}

impl ProcessTransport {
    /// As `open`, for who needs more of it than a link.
    pub(crate) fn open_host(
        &self,
        group: &Group,
        spec: WindowSpec,
        deadline: Deadline,
    ) -> Result<Arc<HostLink>> {
        spec.agree(group, self.name(), deadline)?;
        self.apart.check(group.world())?;
        let bytes = HostLink::region_bytes(spec, group.world())?;
        let regions = share_memfd(group, bytes, deadline)?;
        Ok(Arc::new(HostLink::new(group, spec, regions)?.apart(self.apart.clone())))
    }
}

/// Memory like that of windows which nobody shares.
#[cfg(all(feature = "rdma", feature = "cuda"))]
pub(crate) fn private_memfd(bytes: usize) -> Result<Arc<dyn Region>> {
    Memfd::create(bytes)?.map()
}

/// Makes this rank's memory and maps everyone's.
pub(crate) fn share_memfd(
    group: &Group,
    bytes: usize,
    deadline: Deadline,
) -> Result<Vec<Arc<dyn Region>>> {
    share(group, Memfd::create(bytes), deadline)
}

/// Exchanges memory with all ranks, which are processes of this host. A rank that has none (an
/// error) is everyone's error.
pub(crate) fn share<S: Shared>(
    group: &Group,
    own: Result<S>,
    deadline: Deadline,
) -> Result<Vec<S::Mapped>> {
    let prepared = own.and_then(|own| Ok((own, Listener::bind()?)));
    let problem = prepared.as_ref().err().map(problem);
    let name = prepared.as_ref().map_or(Name::None, |(_, listener)| listener.name().clone());
    let user = rustix::process::geteuid().as_raw();
    let card = Card { host: HostId::here(), user, name, token: random(), problem };
    let number = |rank| group.number(rank);
    let own_number = number(group.rank());
    let bytes_of_card = postcard::to_stdvec(&card).map_err(|_| unreadable(own_number))?;
    let all = group.all_gather_within(OP, &bytes_of_card, deadline)?;
    // From here on every rank reaches the same verdict about the cards.
    let cards = read(&all, number)?;
    let (own, listener) = prepared?;
    let mut exchange = Exchange::new(group, &cards, own, listener, deadline);
    let regions = exchange.run().inspect_err(|error| group.report(error))?;
    drop(exchange);
    // Nobody uses a window before all are mapped everywhere.
    group.all_gather_within(OP, &[], deadline)?;
    Ok(regions)
}

/// What the others need to make the same error of it.
fn problem(error: &TransportError) -> (i32, String) {
    match error {
        TransportError::Os { code, detail, .. } => (*code, detail.clone()),
        other => (libc::EIO, other.to_string()),
    }
}

fn unreadable(rank: usize) -> TransportError {
    let detail = format!("rank {rank} sent no card of this library");
    TransportError::Unsupported { op: OP, detail }
}

/// Reads everyone's cards; fails, the same on every rank, where one cannot take part. `number` is what a
/// rank is called.
fn read(all: &[Vec<u8>], number: impl Fn(usize) -> usize) -> Result<Vec<Card>> {
    let mut cards: Vec<Card> = Vec::with_capacity(all.len());
    for (rank, bytes) in all.iter().enumerate() {
        cards.push(postcard::from_bytes(bytes).map_err(|_| unreadable(number(rank)))?);
    }
    let differing = |same: &dyn Fn(&Card) -> bool| -> Vec<usize> {
        (0..cards.len()).filter(|&rank| !same(&cards[rank])).collect()
    };
    let unsupported = |ranks: Vec<usize>, what: &str| {
        let ranks: Vec<usize> = ranks.into_iter().map(&number).collect();
        let detail = format!(
            "{} {}",
            ranks_text(&ranks),
            what.replace("rank 0", &format!("rank {}", number(0)))
        );
        Err(TransportError::Unsupported { op: OP, detail })
    };
    let first = &cards[0];
    let elsewhere =
        differing(&|c| c.host.boot == first.host.boot && c.host.network == first.host.network);
    if !elsewhere.is_empty() {
        return unsupported(
            elsewhere,
            "not on rank 0's host (or in another network namespace), where memory cannot be \
             shared: split the group by host, or use a transport that crosses hosts, such as rdma",
        );
    }
    let others = differing(&|c| c.user == first.user);
    if !others.is_empty() {
        return unsupported(others, "run as another user than rank 0: start all ranks as one user");
    }
    for (rank, card) in cards.iter().enumerate() {
        if let Some((code, detail)) = &card.problem {
            let (code, detail) = (*code, format!("rank {}: {detail}", number(rank)));
            return Err(TransportError::Os { op: OP, peer: Some(rank), code, detail });
        }
    }
    Ok(cards)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card() -> Card {
        let host = HostId { boot: "b".into(), name: "n".into(), network: "net:[1]".into() };
        Card { host, user: 7, name: Name::None, token: [0; 16], problem: None }
    }

    fn verdict(cards: &[Card]) -> Result<Vec<Card>> {
        let all: Vec<_> = cards.iter().map(|card| postcard::to_stdvec(card).unwrap()).collect();
        read(&all, |rank| rank)
    }

    #[test]
    fn ranks_that_cannot_share_memory_are_named() {
        assert_eq!(verdict(&[card(), card()]).unwrap().len(), 2);
        let mut away = card();
        away.host.boot = "other".into();
        let e = verdict(&[card(), away.clone(), card(), away]).unwrap_err();
        assert_eq!(e.kind(), crate::ErrorKind::Unsupported);
        assert!(e.to_string().contains("ranks 1, 3") && e.to_string().contains("rdma"), "{e}");
        let mut user = card();
        user.user = 8;
        let e = verdict(&[card(), card(), user]).unwrap_err().to_string();
        assert!(e.contains("rank 2") && e.contains("user"), "{e}");
    }

    #[test]
    fn ranks_of_a_part_are_called_by_their_numbers_in_the_whole() {
        let cards = |last: Card| [card(), last].map(|card| postcard::to_stdvec(&card).unwrap());
        let mut away = card();
        away.host.boot = "other".into();
        let e = read(&cards(away), |rank| [4, 6][rank]).unwrap_err().to_string();
        assert!(e.contains("rank 6 not on rank 4's host"), "{e}");
        let mut poor = card();
        poor.problem = Some((libc::EMFILE, "no socket".into()));
        let e = read(&cards(poor), |rank| [4, 6][rank]).unwrap_err();
        assert_eq!(e.peer(), Some(1), "until it is told");
        assert!(e.to_string().starts_with("open: rank 6: no socket"), "{e}");
    }

    #[test]
    fn a_rank_without_window_is_everyones_error() {
        let mut poor = card();
        let failed = memfd::os("listening on a Unix socket", rustix::io::Errno::MFILE);
        poor.problem = Some(problem(&failed));
        let e = verdict(&[card(), poor]).unwrap_err();
        assert_eq!((e.peer(), e.code()), (Some(1), Some(libc::EMFILE)));
        let text = e.to_string();
        assert!(text.starts_with("open: rank 1: listening on a Unix socket: raise "), "{text}");
        for once in ["open: ", "Too many open files", "ulimit -n"] {
            assert_eq!(text.matches(once).count(), 1, "{text}");
        }
    }

    #[test]
    fn garbage_is_no_card() {
        let good = postcard::to_stdvec(&card()).unwrap();
        let e = read(&[good, vec![1, 2, 3]], |rank| rank + 4).unwrap_err().to_string();
        assert!(e.contains("rank 5"), "{e}");
    }
}
