//! What can be set about RDMA, and the choice of devices, ports and addresses.

use std::time::Duration;

use ep_topology::{Gid, LinkLayer, Nic, NicPort, PortState};

use super::OP;
use crate::{Memory, Result, TransportError};

/// The largest value of `retry_cnt` used: 7 is for ever with some providers.
const MAX_RETRIES: u8 = 6;
/// The most NICs of a rank.
pub(super) const MOST_NICS: usize = 8;

/// Everything that can be set; see the methods of [`RdmaTransport`](super::RdmaTransport).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Options {
    pub devices: Vec<String>,
    pub nics: usize,
    pub port: Option<u32>,
    pub gid_index: Option<u32>,
    pub queue_pairs: usize,
    pub service_level: u8,
    pub traffic_class: u8,
    pub pkey_index: u16,
    pub mtu: Option<u32>,
    /// Exponent of the time a packet's answer may take: 4.096 µs × 2^n.
    pub timeout: u8,
    pub retries: u8,
    pub depth: usize,
    pub piece: usize,
    pub stripe: usize,
    pub in_flight: usize,
    pub relaxed: bool,
    pub pin: bool,
    pub busy: bool,
    pub node: Option<u64>,
    pub memory: Memory,
    pub drain: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            nics: 1,
            port: None,
            gid_index: None,
            queue_pairs: 1,
            service_level: 0,
            traffic_class: 0,
            pkey_index: 0,
            mtu: None,
            timeout: 14,
            retries: MAX_RETRIES,
            depth: 128,
            piece: 1 << 20,
            stripe: 64 << 10,
            in_flight: 16 << 20,
            relaxed: true,
            pin: true,
            busy: false,
            node: None,
            memory: Memory::Host,
            drain: Duration::from_secs(5),
        }
    }
}

impl Options {
    /// # Errors
    /// An argument error naming the option that is out of range.
    pub(super) fn check(&self) -> Result<()> {
        let wrong = |detail: String| Err(TransportError::Argument { op: OP, detail });
        let mtus = [256, 512, 1024, 2048, 4096];
        match self {
            o if !(1..=MOST_NICS).contains(&o.nics) => {
                wrong(format!("{} NICs; 1 to {MOST_NICS}", o.nics))
            }
            o if !(1..=16).contains(&o.queue_pairs) => {
                wrong(format!("{} queue pairs per peer; 1 to 16", o.queue_pairs))
            }
            o if o.service_level > 15 => {
                wrong(format!("service level {}; 0 to 15", o.service_level))
            }
            o if o.timeout == 0 || o.timeout > 31 => {
                wrong(format!("time-out exponent {}; 1 to 31 (0 would be for ever)", o.timeout))
            }
            o if o.retries > MAX_RETRIES => {
                wrong(format!("{} retries; 0 to {MAX_RETRIES} (7 is for ever)", o.retries))
            }
            o if o.mtu.is_some_and(|mtu| !mtus.contains(&mtu)) => {
                wrong(format!("an MTU of {:?} bytes; one of {mtus:?}", o.mtu))
            }
            o if !(8..=4096).contains(&o.depth) => {
                wrong(format!("{} immediates in flight; 8 to 4096", o.depth))
            }
            o if !(4096..=1 << 30).contains(&o.piece) => {
                wrong(format!("writes of up to {} bytes; 4096 to 2^30", o.piece))
            }
            o if o.in_flight < o.piece => wrong(format!(
                "{} bytes in flight, less than one write of {}",
                o.in_flight, o.piece
            )),
            o if o.port.is_some_and(|port| port == 0 || port > 255) => {
                wrong("ports are numbered from 1 to 255".into())
            }
            o if o.gid_index.is_some_and(|index| index > 255) => {
                wrong("GIDs are numbered from 0 to 255".into())
            }
            o if !o.devices.is_empty() && o.devices.len() < o.nics => {
                wrong(format!("{} NICs of only {} named", o.nics, o.devices.len()))
            }
            _ => Ok(()),
        }
    }

    /// How long a port may be down: as long as a packet is sent again, which a peer that is spoken to
    /// would survive. No less for being long: operations have time-outs of their own.
    pub(super) fn grace(&self) -> Duration {
        let answer = Duration::from_nanos(4096 << self.timeout.min(31));
        answer * (u32::from(self.retries) + 1)
    }

    /// What all ranks have to have in common.
    pub(super) fn shared(&self) -> [(&'static str, String); 6] {
        [
            ("nics", self.nics.to_string()),
            ("queue_pairs", self.queue_pairs.to_string()),
            ("depth", self.depth.to_string()),
            ("service_level", self.service_level.to_string()),
            ("pkey_index", self.pkey_index.to_string()),
            // Streams raise and await other flags than hosts, so that is for all ranks or for none.
            ("windows on GPUs", (self.memory != Memory::Host).to_string()),
        ]
    }

    /// Takes what the environment sets, read by `var`.
    ///
    /// # Errors
    /// An argument error naming the variable that cannot be read.
    pub(super) fn read(&mut self, var: impl Fn(&str) -> Option<String>) -> Result<()> {
        fn set<T: std::str::FromStr>(
            text: Option<String>,
            name: &str,
            put: impl FnOnce(T),
        ) -> Result<()> {
            let Some(text) = text else { return Ok(()) };
            let value = text.trim().parse().map_err(|_| TransportError::Argument {
                op: OP,
                detail: format!("{name}={text} is not a number in range"),
            })?;
            put(value);
            Ok(())
        }
        if let Some(names) = var("EP_RDMA_DEVICES") {
            self.devices = names.split(',').map(|name| name.trim().to_owned()).collect();
            self.devices.retain(|name| !name.is_empty());
        }
        let get = |name: &str| var(name);
        set(get("EP_RDMA_NICS"), "EP_RDMA_NICS", |n| self.nics = n)?;
        set(get("EP_RDMA_PORT"), "EP_RDMA_PORT", |n| self.port = Some(n))?;
        set(get("EP_RDMA_GID_INDEX"), "EP_RDMA_GID_INDEX", |n| self.gid_index = Some(n))?;
        set(get("EP_RDMA_QUEUE_PAIRS"), "EP_RDMA_QUEUE_PAIRS", |n| self.queue_pairs = n)?;
        set(get("EP_RDMA_SERVICE_LEVEL"), "EP_RDMA_SERVICE_LEVEL", |n| self.service_level = n)?;
        set(get("EP_RDMA_TRAFFIC_CLASS"), "EP_RDMA_TRAFFIC_CLASS", |n| self.traffic_class = n)?;
        set(get("EP_RDMA_PKEY_INDEX"), "EP_RDMA_PKEY_INDEX", |n| self.pkey_index = n)?;
        set(get("EP_RDMA_MTU"), "EP_RDMA_MTU", |n| self.mtu = Some(n))?;
        set(get("EP_RDMA_TIMEOUT"), "EP_RDMA_TIMEOUT", |n| self.timeout = n)?;
        set(get("EP_RDMA_RETRIES"), "EP_RDMA_RETRIES", |n| self.retries = n)?;
        set(get("EP_RDMA_NODE"), "EP_RDMA_NODE", |n| self.node = Some(n))
    }
}

/// What kind of address a GID is; the lower the better liked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Family {
    /// RoCE v2 over IPv4: `::ffff:a.b.c.d`.
    V4,
    /// RoCE v2 over routable IPv6.
    V6,
    /// RoCE v2 over link-local IPv6: not beyond a subnet.
    LinkLocal,
    /// InfiniBand, or RoCE v1: not beyond a subnet.
    Native,
}

impl Family {
    fn of(gid: &Gid) -> Self {
        let v2 = gid.kind.as_deref().is_some_and(|kind| kind.contains("v2"));
        match &gid.gid {
            _ if !v2 => Self::Native,
            text if text.starts_with("0000:0000:0000:0000:0000:ffff:") => Self::V4,
            text if text.starts_with("fe80:") => Self::LinkLocal,
            _ => Self::V6,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::V4 => "RoCE v2 over IPv4",
            Self::V6 => "RoCE v2 over IPv6",
            Self::LinkLocal => "RoCE v2 over link-local IPv6",
            Self::Native => "InfiniBand or RoCE v1",
        }
    }
}

/// A device, its port and the address to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chosen {
    pub device: String,
    pub port: u8,
    /// None where local identifiers do (InfiniBand within a subnet).
    pub gid: Option<(u32, Family)>,
    pub numa_node: Option<u32>,
}

/// Picks the NICs of the rank that is the `local`-th of its host.
///
/// # Errors
/// [`TransportError::Unsupported`] saying what is missing: no such device, node, active port, GID.
pub(super) fn choose(nics: &[Nic], options: &Options, local: usize) -> Result<Vec<Chosen>> {
    if nics.is_empty() {
        return missing(
            "this machine has no RDMA device (/sys/class/infiniband is empty): load the NIC's \
             driver, or use another transport"
                .into(),
        );
    }
    if options.devices.is_empty() {
        let mut usable: Vec<&Nic> = nics.iter().filter(|nic| nic.usable()).collect();
        if let Some(port) = options.port {
            usable.retain(|nic| {
                nic.ports.iter().any(|p| p.number == port && p.state == PortState::Active)
            });
        }
        if usable.is_empty() {
            let all: Vec<String> = nics.iter().map(describe).collect();
            return missing(format!("no RDMA device is usable: {}", all.join("; ")));
        }
        // Ranks of a host take turns, so that each has a rail of its own where there are enough.
        let turn = |i: usize| usable[(local * options.nics + i) % usable.len()];
        if usable.len() < options.nics {
            return missing(format!("{} NICs of {} usable", options.nics, usable.len()));
        }
        return (0..options.nics).map(|i| on(turn(i), options)).collect();
    }
    options.devices[..options.nics]
        .iter()
        .map(|name| match nics.iter().find(|nic| nic.name == *name) {
            Some(nic) => on(nic, options),
            None => {
                let known: Vec<&str> = nics.iter().map(|nic| nic.name.as_str()).collect();
                missing(format!("there is no RDMA device {name}; known: {}", known.join(", ")))
            }
        })
        .collect()
}

fn describe(nic: &Nic) -> String {
    let ports: Vec<String> =
        nic.ports.iter().map(|port| format!("port {} {:?}", port.number, port.state)).collect();
    let node = if nic.accessible { "" } else { ", its /dev/infiniband node is missing" };
    format!("{} ({}{node})", nic.name, ports.join(", "))
}

fn missing<T>(detail: String) -> Result<T> {
    Err(TransportError::Unsupported { op: OP, detail })
}

fn on(nic: &Nic, options: &Options) -> Result<Chosen> {
    let active = |port: &&NicPort| port.state == PortState::Active;
    let port = match options.port {
        None => nic.ports.iter().find(active),
        Some(number) => nic.ports.iter().find(|p| p.number == number).filter(active),
    };
    let Some(port) = port.filter(|_| nic.accessible) else {
        let asked =
            options.port.map_or(String::new(), |port| format!("; port {port} is asked for"));
        return missing(format!("{} has no active port to use{asked}", describe(nic)));
    };
    let gid = match options.gid_index {
        Some(index) => match port.gids.iter().find(|gid| gid.index == index) {
            Some(gid) => Some((index, Family::of(gid))),
            None => return missing(format!("{} has no GID {index}; {}", nic.name, listed(port))),
        },
        None if port.link_layer == LinkLayer::InfiniBand => None,
        None => {
            let best = port.gids.iter().map(|gid| (Family::of(gid), gid.index)).min();
            let Some((family, index)) = best else {
                return missing(format!(
                    "{} has no GID on port {}: give its network interface an address",
                    nic.name, port.number
                ));
            };
            Some((index, family))
        }
    };
    let port = port.number as u8;
    Ok(Chosen { device: nic.name.clone(), port, gid, numa_node: nic.numa_node })
}

fn listed(port: &NicPort) -> String {
    let gids: Vec<String> = port
        .gids
        .iter()
        .map(|gid| format!("{} is {} ({})", gid.index, gid.gid, Family::of(gid).name()))
        .collect();
    if gids.is_empty() { "there is none".into() } else { gids.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u32, gid: &str, kind: &str) -> Gid {
        Gid { index, gid: gid.into(), kind: Some(kind.into()), interface: None }
    }

    fn nic(name: &str, state: PortState, link_layer: LinkLayer, gids: Vec<Gid>) -> Nic {
        let port = NicPort { number: 1, state, physical: None, rate_mbps: None, link_layer, gids };
        Nic {
            name: name.into(),
            pci: None,
            numa_node: Some(1),
            firmware: None,
            guid: None,
            verbs: Some("uverbs0".into()),
            accessible: true,
            ports: vec![port],
        }
    }

    fn roce(name: &str) -> Nic {
        let gids = vec![
            gid(0, "fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1"),
            gid(1, "fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2"),
            gid(2, "0000:0000:0000:0000:0000:ffff:0a63:0001", "IB/RoCE v1"),
            gid(3, "0000:0000:0000:0000:0000:ffff:0a63:0001", "RoCE v2"),
        ];
        nic(name, PortState::Active, LinkLayer::Ethernet, gids)
    }

    fn check(nics: &[Nic], options: Options, local: usize) -> Vec<(String, Option<(u32, Family)>)> {
        let chosen = choose(nics, &options, local).unwrap();
        chosen.into_iter().map(|one| (one.device, one.gid)).collect()
    }

    fn refused(nics: &[Nic], options: Options) -> String {
        let error = choose(nics, &options, 0).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Unsupported);
        error.to_string()
    }

    #[test]
    fn the_address_liked_best_is_taken_and_another_can_be_asked_for() {
        let nics = [roce("a"), nic("b", PortState::Active, LinkLayer::InfiniBand, vec![])];
        assert_eq!(check(&nics, Options::default(), 0), [("a".into(), Some((3, Family::V4)))]);
        assert_eq!(check(&nics, Options::default(), 1), [("b".into(), None)]);
        let options = Options { gid_index: Some(1), ..Options::default() };
        assert_eq!(check(&nics, options, 0), [("a".into(), Some((1, Family::LinkLocal)))]);
        let options =
            Options { devices: vec!["b".into(), "a".into()], nics: 2, ..Options::default() };
        let names: Vec<_> = check(&nics, options, 5).into_iter().map(|one| one.0).collect();
        assert_eq!(names, ["b", "a"]);
    }

    #[test]
    fn ranks_of_a_node_have_rails_of_their_own() {
        let nics = ["a", "b", "c", "d"].map(roce);
        let names = |local| -> Vec<String> {
            let options = Options { nics: 2, ..Options::default() };
            check(&nics, options, local).into_iter().map(|one| one.0).collect()
        };
        assert_eq!(
            (names(0), names(1)),
            (vec!["a".into(), "b".into()], vec!["c".into(), "d".into()])
        );
        assert_eq!(names(2), names(0));
    }

    #[test]
    fn what_is_missing_is_said() {
        let named = |name: &str| Options { devices: vec![name.into()], ..Options::default() };
        assert!(refused(&[], Options::default()).contains("no RDMA device"));
        assert!(refused(&[roce("a")], named("z")).contains("no RDMA device z; known: a"));
        let down = nic("d", PortState::Down, LinkLayer::Ethernet, vec![]);
        assert!(refused(std::slice::from_ref(&down), Options::default()).contains("port 1 Down"));
        assert!(refused(&[down], named("d")).contains("no active port"));
        let hidden = Nic { accessible: false, ..roce("h") };
        assert!(refused(&[hidden], Options::default()).contains("/dev/infiniband"));
        let bare = nic("n", PortState::Active, LinkLayer::Ethernet, vec![]);
        assert!(refused(&[bare], Options::default()).contains("no GID on port 1"));
        let options = Options { gid_index: Some(9), ..Options::default() };
        let text = refused(&[roce("a")], options);
        assert!(text.contains("no GID 9") && text.contains("3 is 0000:"), "{text}");
        let options = Options { port: Some(2), ..Options::default() };
        assert!(refused(&[roce("a")], options).contains("usable"));
    }

    #[test]
    fn options_out_of_range_are_argument_errors() {
        let wrong = [
            Options { retries: 7, ..Options::default() },
            Options { timeout: 0, ..Options::default() },
            Options { queue_pairs: 0, ..Options::default() },
            Options { nics: 9, ..Options::default() },
            Options { mtu: Some(1500), ..Options::default() },
            Options { service_level: 16, ..Options::default() },
            Options { depth: 4, ..Options::default() },
            Options { piece: 1, ..Options::default() },
            Options { in_flight: 4096, ..Options::default() },
            Options { port: Some(0), ..Options::default() },
            Options { devices: vec!["a".into()], nics: 2, ..Options::default() },
        ];
        for options in wrong {
            let error = options.check().unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::Argument, "{error}");
        }
        Options::default().check().unwrap();
    }

    /// A port may be down as long as packets are sent again, however long that is.
    #[test]
    fn the_grace_of_a_port_is_the_time_of_all_retries() {
        let grace = |timeout, retries| Options { timeout, retries, ..Options::default() }.grace();
        assert_eq!(Options::default().grace(), Duration::from_nanos(7 * (4096 << 14)));
        assert_eq!(grace(14, 0), Duration::from_nanos(4096 << 14));
        assert_eq!(grace(20, 6), Duration::from_nanos(7 * (4096 << 20)), "30 s");
        assert_eq!(grace(31, 6), Duration::from_nanos(7 * (4096 << 31)), "hours");
    }

    #[test]
    fn the_environment_is_read_and_what_cannot_be_is_named() {
        let mut options = Options::default();
        let set = |name: &str| match name {
            "EP_RDMA_DEVICES" => Some("x, y".to_owned()),
            "EP_RDMA_TIMEOUT" => Some("17".to_owned()),
            "EP_RDMA_NODE" => Some("3".to_owned()),
            _ => None,
        };
        options.read(set).unwrap();
        assert_eq!((options.devices.len(), options.timeout, options.node), (2, 17, Some(3)));
        let error = options.read(|name| (name == "EP_RDMA_MTU").then(|| "big".into())).unwrap_err();
        assert!(error.to_string().contains("EP_RDMA_MTU=big"), "{error}");
    }
}
