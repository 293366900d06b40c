//! One NIC of this rank: what is opened on it, and its connections to the same-numbered NIC of each
//! bulk peer.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use ibverbs_sys as ffi;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use super::OP;
use super::areas::{self, Area, Refused, Source};
use super::device::{Completion, Device, Id, Kind};
use super::events::{self, Event};
use super::options::{Chosen, Family, Options};
use super::pair::{Completions, Pair, PairSize, Write};
use super::verbs::{Context, Domain, Registered, failed};
use crate::rdma_plan::SEND_QUEUE;
use crate::{Result, TransportError};

/// Completions taken at once.
const BATCH: usize = 32;

/// What a peer needs to know of a NIC to connect to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Card {
    /// For messages.
    device: String,
    lid: u16,
    gid: Option<[u8; 16]>,
    family: Option<u8>,
    infiniband: bool,
    mtu: u32,
    areas: Vec<Area>,
    /// The queue pairs, by peer; none for those that are not reached this way.
    pairs: Vec<Vec<End>>,
}

/// A queue pair, as the one it is connected to has to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct End {
    number: u32,
    /// The number of the first packet it sends, 24 bits. It is random, so that what is still on its
    /// way from an earlier connection with the same number is no packet of this one.
    packet: u32,
}

pub(super) struct Endpoint {
    context: Arc<Context>,
    chosen: Chosen,
    port: ffi::ibv_port_attr,
    completions: Arc<Completions>,
    pairs: Vec<Vec<Pair>>,
    /// The first packets' numbers, by peer and queue pair.
    packets: Vec<Vec<u32>>,
    /// What is registered, each with what the NIC knows of it.
    memory: Vec<Registered>,
    areas: Vec<Area>,
    gid: Option<[u8; 16]>,
    remotes: Vec<Vec<Area>>,
    taken: Vec<ffi::ibv_wc>,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("chosen", &self.chosen).finish_non_exhaustive()
    }
}

impl Endpoint {
    /// Registers `memory` with a NIC that is open (each with the offset at which it begins) and makes
    /// queue pairs for the `bulk` peers of `world`.
    ///
    /// # Errors
    /// [`Refused::Unreachable`] if it is only that the NIC cannot reach a device's memory.
    pub(super) fn on(
        context: Arc<Context>,
        chosen: &Chosen,
        memory: &[(usize, Source)],
        (bulk, world): (&[usize], usize),
        options: &Options,
    ) -> Result<Self, Refused> {
        let device = context.device()?;
        // Before the look at the port: what befalls it after that, an event tells.
        events::unblock(&context)?;
        let port = context.port(chosen.port)?;
        if port.state != ffi::ibv_port_state::IBV_PORT_ACTIVE {
            // It was when it was chosen.
            let detail = format!("port {} of {} is down", chosen.port, chosen.device);
            return Err(failed("ibv_query_port", libc::ENETDOWN, detail).into());
        }
        let gid = chosen.gid.map(|(index, _)| context.gid(chosen.port, index)).transpose()?;
        let size = PairSize { send: SEND_QUEUE + 1, receive: options.depth };
        let entries = bulk.len() * options.queue_pairs * (size.send + size.receive);
        let limits = [
            ("entries of a completion queue", entries, device.max_cqe),
            ("requests of a queue pair", size.send.max(size.receive), device.max_qp_wr),
            ("queue pairs", bulk.len() * options.queue_pairs, device.max_qp),
        ];
        for (what, need, limit) in limits {
            if i64::try_from(need).unwrap_or(i64::MAX) > i64::from(limit) {
                let detail = format!(
                    "{} allows {limit} {what}, {need} are needed: ask for a smaller depth or fewer \
                     queue pairs",
                    chosen.device
                );
                return Err(TransportError::Unsupported { op: OP, detail }.into());
            }
        }
        if options.pkey_index >= port.pkey_tbl_len {
            let detail = format!(
                "port {} of {} has {} partition keys, index {} is asked for",
                chosen.port, chosen.device, port.pkey_tbl_len, options.pkey_index
            );
            return Err(TransportError::Unsupported { op: OP, detail }.into());
        }
        let completions = Completions::new(&context, entries.max(1))?;
        let domain = Domain::new(&context)?;
        let register = |(_, source): &(usize, Source)| {
            Registered::new(&domain, source.clone(), options.relaxed)
        };
        let registered = memory.iter().map(register).collect::<Result<Vec<_>, _>>()?;
        let area = |((from, source), known): (&(usize, Source), &Registered)| Area {
            from: *from,
            address: source.address(),
            key: known.remote_key(),
        };
        let areas = memory.iter().zip(&registered).map(area).collect();
        let mut pairs: Vec<Vec<Pair>> = (0..world).map(|_| Vec::new()).collect();
        let mut packets = vec![Vec::new(); world];
        for &peer in bulk {
            for _ in 0..options.queue_pairs {
                pairs[peer].push(Pair::new(&domain, &completions, size)?);
                packets[peer].push(first_packet()?);
            }
        }
        Ok(Self {
            context,
            chosen: chosen.clone(),
            port,
            completions,
            pairs,
            packets,
            memory: registered,
            areas,
            gid,
            remotes: vec![Vec::new(); world],
            taken: vec![ffi::ibv_wc::default(); BATCH],
        })
    }

    /// The largest packet this side takes, in bytes.
    fn mtu(&self, options: &Options) -> u32 {
        (128u32 << self.port.active_mtu.clamp(1, 5)).min(options.mtu.unwrap_or(4096))
    }

    pub(super) fn card(&self, options: &Options) -> Card {
        let infiniband = u32::from(self.port.link_layer) == ffi::IBV_LINK_LAYER_INFINIBAND;
        let end = |(pair, &packet): (&Pair, &u32)| End { number: pair.number(), packet };
        let ends = |(pairs, packets): (&Vec<Pair>, &Vec<u32>)| {
            pairs.iter().zip(packets).map(end).collect()
        };
        Card {
            device: self.chosen.device.clone(),
            lid: self.port.lid,
            gid: self.gid,
            family: self.chosen.gid.map(|(_, family)| family as u8),
            infiniband,
            mtu: self.mtu(options),
            areas: self.areas.clone(),
            pairs: self.pairs.iter().zip(&self.packets).map(ends).collect(),
        }
    }

    /// Connects the queue pairs with those of `peer`, of which this is rank `rank`'s card.
    pub(super) fn connect(
        &mut self,
        rank: usize,
        peer: usize,
        card: &Card,
        options: &Options,
    ) -> Result<()> {
        let theirs = card.pairs.get(rank).map_or(&[][..], Vec::as_slice);
        let mine = &self.pairs[peer];
        let unfit = |detail: String| Err(TransportError::Unsupported { op: OP, detail });
        if theirs.len() != mine.len() {
            return unfit(format!(
                "rank {peer} made {} queue pairs of {}",
                theirs.len(),
                mine.len()
            ));
        }
        let own = self.card(options);
        if (own.infiniband, own.family) != (card.infiniband, card.family) {
            return unfit(format!(
                "{} here is {}, {} of rank {peer} is {}: choose GIDs of one kind",
                own.device,
                own.kind(),
                card.device,
                card.kind()
            ));
        }
        for (index, (pair, &end)) in mine.iter().zip(theirs).enumerate() {
            self.reset_to_init(pair, options)?;
            for _ in 0..options.depth {
                pair.post_receive(Id { kind: Kind::Receive, peer, pair: index }.encode())?;
            }
            self.init_to_ready((peer, index), end, card, options)?;
        }
        self.remotes[peer] = card.areas.clone();
        Ok(())
    }

    fn reset_to_init(&self, pair: &Pair, options: &Options) -> Result<()> {
        use ffi::ibv_qp_attr_mask as Mask;
        let mut attr = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_INIT,
            pkey_index: options.pkey_index,
            port_num: self.chosen.port,
            qp_access_flags: ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0
                | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0,
            ..Default::default()
        };
        let mask = Mask::IBV_QP_STATE
            | Mask::IBV_QP_PKEY_INDEX
            | Mask::IBV_QP_PORT
            | Mask::IBV_QP_ACCESS_FLAGS;
        pair.modify(&mut attr, mask, &format!("{} to INIT", self.chosen.device))
    }

    /// To "ready to receive", then to "ready to send".
    fn init_to_ready(
        &self,
        (peer, index): (usize, usize),
        end: End,
        card: &Card,
        options: &Options,
    ) -> Result<()> {
        use ffi::ibv_qp_attr_mask as Mask;
        let pair = &self.pairs[peer][index];
        // The same on both sides, as each tells its own.
        let mtu = self.mtu(options).min(card.mtu).max(256);
        let mut attr = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_RTR,
            path_mtu: mtu.ilog2() - 7,
            dest_qp_num: end.number,
            rq_psn: end.packet,
            max_dest_rd_atomic: 1,
            min_rnr_timer: 12,
            ..Default::default()
        };
        let address = &mut attr.ah_attr;
        address.port_num = self.chosen.port;
        address.sl = options.service_level;
        address.dlid = card.lid;
        if let (Some((index, _)), Some(gid)) = (self.chosen.gid, card.gid) {
            address.is_global = 1;
            address.grh.dgid = ffi::ibv_gid { raw: gid };
            address.grh.sgid_index = index as u8;
            address.grh.hop_limit = 64;
            address.grh.traffic_class = options.traffic_class;
        }
        let mask = Mask::IBV_QP_STATE
            | Mask::IBV_QP_AV
            | Mask::IBV_QP_PATH_MTU
            | Mask::IBV_QP_DEST_QPN
            | Mask::IBV_QP_RQ_PSN
            | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | Mask::IBV_QP_MIN_RNR_TIMER;
        let to = format!("{} to {} of rank {peer}", self.chosen.device, card.device);
        pair.modify(&mut attr, mask, &format!("{to}, ready to receive"))?;
        let mut attr = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_RTS,
            timeout: options.timeout,
            sq_psn: self.packets[peer][index],
            retry_cnt: options.retries,
            // There is always room for what a peer has credit for, so that this is never needed.
            rnr_retry: options.retries,
            max_rd_atomic: 1,
            ..Default::default()
        };
        let mask = Mask::IBV_QP_STATE
            | Mask::IBV_QP_TIMEOUT
            | Mask::IBV_QP_RETRY_CNT
            | Mask::IBV_QP_RNR_RETRY
            | Mask::IBV_QP_SQ_PSN
            | Mask::IBV_QP_MAX_QP_RD_ATOMIC;
        pair.modify(&mut attr, mask, &format!("{to}, ready to send"))
    }
}

/// The number of the first packet of a connection.
fn first_packet() -> Result<u32> {
    let mut bytes = [0; 4];
    let random = rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty());
    random.map_err(|e| TransportError::os(OP, "asking for random bytes", e))?;
    Ok(u32::from_ne_bytes(bytes) & 0x00ff_ffff)
}

impl Card {
    fn kind(&self) -> &'static str {
        let families = [Family::V4, Family::V6, Family::LinkLocal, Family::Native];
        match self.family {
            _ if self.infiniband => "InfiniBand",
            Some(family) => families.get(family as usize).map_or("unknown", |f| f.name()),
            None => "without GID",
        }
    }
}

impl Device for Endpoint {
    unsafe fn write(&mut self, peer: usize, pair: usize, write: &Write) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.pairs[peer][pair].post_write(write) }
    }

    fn receive(&mut self, peer: usize, pair: usize) -> Result<()> {
        self.pairs[peer][pair].post_receive(Id { kind: Kind::Receive, peer, pair }.encode())
    }

    fn poll(&mut self, into: &mut Vec<Completion>) -> Result<bool> {
        let count = self.completions.poll(&mut self.taken)?;
        for done in &self.taken[..count] {
            let id = Id::decode(done.wr_id());
            into.push(match done.error() {
                Some((status, vendor)) => Completion::Failed {
                    id,
                    status: status as i32,
                    detail: format!(
                        "{} (status {status}, vendor's code {vendor:#x})",
                        self.context.library.status(status)
                    ),
                },
                None if id.kind == Kind::Receive => {
                    Completion::Arrived { id, immediate: done.imm_data().map(u32::from_be) }
                }
                None => Completion::Written(id),
            });
        }
        Ok(count < self.taken.len())
    }

    fn events(&mut self, into: &mut Vec<Event>) -> Result<()> {
        loop {
            let raw = match events::next(&self.context) {
                Ok(None) => return Ok(()),
                Ok(Some(raw)) => raw,
                Err(error) => {
                    into.push(Event::Dead(error));
                    return Ok(());
                }
            };
            let id = |number| {
                let of = |pairs: &Vec<Pair>| pairs.iter().position(|p| p.number() == number);
                let mut peers = self.pairs.iter().enumerate();
                peers.find_map(|(peer, pairs)| {
                    Some(Id { kind: Kind::Write, peer, pair: of(pairs)? })
                })
            };
            into.extend(events::read(&self.context, self.chosen.port, raw, id));
        }
    }

    fn sleep(&mut self, bell: BorrowedFd<'_>, bound: Duration) -> Result<bool> {
        let bound =
            Timespec { tv_sec: bound.as_secs() as i64, tv_nsec: bound.subsec_nanos().into() };
        let completions = self.completions.fd();
        let mut fds = [
            PollFd::from_borrowed_fd(bell, PollFlags::IN),
            PollFd::from_borrowed_fd(completions, PollFlags::IN),
            PollFd::from_borrowed_fd(events::fd(&self.context), PollFlags::IN),
        ];
        match poll(&mut fds, Some(&bound)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(TransportError::os("rdma", "sleeping on a NIC", e)),
        }
        if fds[1].revents().contains(PollFlags::IN) {
            self.completions.disarm();
        }
        // Not only input: that of a device that was removed is an error.
        Ok(!fds[2].revents().is_empty())
    }

    fn arm(&mut self) -> Result<()> {
        self.completions.arm()
    }

    fn number(&self, peer: usize, pair: usize) -> u32 {
        self.pairs[peer].get(pair).map_or(0, Pair::number)
    }

    fn remote(&self, peer: usize, at: usize) -> (u64, u32) {
        areas::find(&self.remotes[peer], at)
    }

    fn local(&self, at: usize) -> (u64, u32) {
        // Local and remote keys of a registration are not the same.
        let (address, _) = areas::find(&self.areas, at);
        let known = self.areas.iter().rposition(|area| area.from <= at);
        (address, known.map_or(0, |known| self.memory[known].local_key()))
    }
}

#[cfg(test)]
mod tests;
