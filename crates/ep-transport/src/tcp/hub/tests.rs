//! The hub under random interleavings of well-behaved ranks, faulty ones and strangers.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::tcp::wire::{Decoder, Failure, MAX_HELLO};

const TOKEN: &[u8] = b"job";
const WAIT: Duration = Duration::from_secs(10);
const GATHER_MS: u64 = 3000;

/// What a connection's other end knows.
#[derive(Debug, Default)]
struct Client {
    rank: u32,
    /// It said a hello that is right in itself.
    joined: bool,
    heard: bool,
    welcome: bool,
    refused: Option<String>,
    seq: u64,
    waiting: Option<u64>,
    left: bool,
    /// The hub closed it, or it closed itself.
    closed: bool,
    lost: Vec<u32>,
    results: Vec<Vec<Vec<u8>>>,
    failures: Vec<Failure>,
    faults: Vec<u32>,
    parted: bool,
}

struct World {
    hub: Hub,
    now: Instant,
    clients: BTreeMap<ConnId, Client>,
}

impl World {
    fn new(world: usize) -> Self {
        let now = Instant::now();
        let hub = Hub::new(world, TOKEN.to_vec(), now, WAIT);
        Self { hub, now, clients: BTreeMap::new() }
    }

    fn event(&mut self, conn: ConnId, event: Event) {
        let actions = self.hub.handle(self.now, conn, event);
        self.apply(actions);
    }

    fn send(&mut self, conn: ConnId, message: Message, body: &[u8]) {
        self.event(conn, Event::Frame(Frame { message, body: body.to_vec() }));
    }

    fn accept(&mut self, conn: ConnId) {
        self.clients.insert(conn, Client::default());
        self.event(conn, Event::Accepted);
    }

    fn hello(&mut self, conn: ConnId, rank: u32, world: u32, token: &[u8]) {
        let client = self.clients.get_mut(&conn).unwrap();
        (client.rank, client.joined) = (rank, token == TOKEN);
        let wait_ms = WAIT.as_millis() as u64;
        self.send(conn, Message::Hello { rank, world, wait_ms }, token);
    }

    fn gather(&mut self, conn: ConnId, op: &str) {
        let client = self.clients.get_mut(&conn).unwrap();
        let (seq, body) = (client.seq, part(client.rank, client.seq));
        client.seq += 1;
        client.waiting = Some(seq);
        let (group, op) = (GroupId::new(), op.to_owned());
        self.send(conn, Message::Gather { group, seq, wait_ms: GATHER_MS, op }, &body);
    }

    fn close(&mut self, conn: ConnId, event: Event) {
        self.event(conn, event);
        self.clients.get_mut(&conn).unwrap().closed = true;
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        let actions = self.hub.tick(self.now);
        self.apply(actions);
        assert!(self.hub.next_deadline().is_none_or(|next| next > self.now), "nothing stays due");
    }

    fn apply(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Close(conn) => self.clients.get_mut(&conn).unwrap().closed = true,
                Action::Send(conn, bytes) => {
                    let mut decoder = Decoder::new(MAX_HELLO);
                    decoder.trust();
                    decoder.read(&mut &bytes[..], bytes.len()).unwrap();
                    let frame = decoder.next().unwrap().expect("a whole frame");
                    let client = self.clients.get_mut(&conn).unwrap();
                    assert!(!client.closed, "nothing is sent after a close");
                    client.hear(frame);
                }
            }
        }
    }

    /// Members of the group that are still there.
    fn ranks(&self) -> Vec<ConnId> {
        let there = |client: &Client| client.welcome && !client.closed;
        self.clients.iter().filter(|(_, c)| there(c)).map(|(conn, _)| *conn).collect()
    }
}

fn part(rank: u32, seq: u64) -> Vec<u8> {
    vec![rank as u8; seq as usize % 7 + rank as usize]
}

impl Client {
    fn hear(&mut self, frame: Frame) {
        match frame.message {
            Message::Heard => self.heard = true,
            Message::Welcome => {
                assert!(self.heard && !self.welcome && self.refused.is_none());
                self.welcome = true;
            }
            Message::Refused { detail, .. } => self.refused = Some(detail),
            Message::Gathered { seq, lens, .. } => {
                let mut rest = &frame.body[..];
                let mut parts = Vec::new();
                for (rank, len) in lens.into_iter().enumerate() {
                    let (part_of, after) = rest.split_at(len as usize);
                    assert_eq!(part_of, part(rank as u32, seq), "parts are by rank");
                    parts.push(part_of.to_vec());
                    rest = after;
                }
                if self.waiting == Some(seq) {
                    self.waiting = None;
                    self.results.push(parts);
                }
            }
            Message::Failed { seq, failure, .. } => {
                assert_eq!(self.waiting.take(), Some(seq), "one answer to one question");
                self.failures.push(failure);
            }
            Message::Fault { by, .. } => self.faults.push(by),
            Message::Lost { rank, .. } => self.lost.push(rank),
            Message::Left { .. } | Message::Farewell => {}
            Message::ByeAck => self.parted = true,
            other => panic!("the hub sent {other:?}"),
        }
    }
}

fn started(world: usize) -> World {
    let mut all = World::new(world);
    for rank in 0..world as u32 {
        all.accept(rank.into());
        all.hello(rank.into(), rank, world as u32, TOKEN);
    }
    assert_eq!(all.ranks().len(), world);
    all
}

/// One thing that happens to one of a few connections.
#[derive(Clone, Debug)]
enum Step {
    Hello { rank: u32, world: u32, right_token: bool },
    Gather { op: bool },
    Rude,
    Abort,
    Leave,
    Bye,
    Close,
    Garbage,
    Pass(u64),
}

fn steps(world: u32, odd: u32) -> impl Strategy<Value = (u64, Step)> {
    let hello = (0..world, 0u32..20, 0u32..20).prop_map(move |(rank, size, token)| Step::Hello {
        rank: if size == 1 && odd > 0 { rank + world } else { rank },
        world: if size == 0 && odd > 0 { world + 1 } else { world },
        right_token: token > 0,
    });
    let step = prop_oneof![
        8 => hello,
        10 => (0u32..12).prop_map(|op| Step::Gather { op: op > 0 }),
        odd => Just(Step::Rude),
        1 => Just(Step::Abort),
        1 => Just(Step::Leave),
        1 => Just(Step::Bye),
        odd => Just(Step::Close),
        odd => Just(Step::Garbage),
        2 => (0u64..2500).prop_map(Step::Pass),
    ];
    (0..u64::from(world) + 3, step)
}

fn take(all: &mut World, conn: ConnId, step: Step, world: u32) {
    if !all.clients.contains_key(&conn) {
        all.accept(conn);
    }
    let client = &all.clients[&conn];
    let (open, fresh) = (!client.closed, !client.joined && client.refused.is_none());
    let serves = open && client.welcome && !client.left;
    let group = GroupId::new();
    match step {
        Step::Pass(ms) => all.pass(Duration::from_millis(ms)),
        Step::Hello { rank, world, right_token } if open && fresh => {
            all.hello(conn, rank, world, if right_token { TOKEN } else { b"other" });
        }
        Step::Gather { op } if serves && client.waiting.is_none() => {
            all.gather(conn, if op { "gather" } else { "barrier" });
        }
        Step::Rude if open => {
            let message = Message::Open { group: vec![0, 9], members: vec![world, 0, 0] };
            all.send(conn, message, &[]);
        }
        Step::Abort if serves => {
            all.send(conn, Message::Abort { group, blames: None, why: "test".into() }, &[]);
        }
        Step::Leave if serves && client.waiting.is_none() => {
            all.clients.get_mut(&conn).unwrap().left = true;
            all.send(conn, Message::Leave { group, panicked: false }, &[]);
        }
        Step::Bye if open && client.welcome && client.waiting.is_none() => {
            all.send(conn, Message::Bye, &[]);
            assert!(all.clients[&conn].parted);
        }
        Step::Close if open => all.close(conn, Event::Closed("gone".into())),
        Step::Garbage if open => all.event(conn, Event::Malformed("garbage".into())),
        _ => {}
    }
}

proptest! {
    #[test]
    fn everyone_gets_an_answer_in_time(
        (world, steps) in (1u32..5, 0u32..3).prop_flat_map(|(world, odd)| {
            (Just(world), prop::collection::vec(steps(world, odd), 1..120))
        }),
    ) {
        let mut all = World::new(world as usize);
        for (conn, step) in steps {
            take(&mut all, conn, step, world);
        }
        // After the longest wait nobody is left without an answer.
        all.pass(WAIT);
        for (conn, client) in &all.clients {
            if client.heard && !client.closed {
                prop_assert!(client.welcome || client.refused.is_some(), "{conn}: {client:?}");
            }
            prop_assert!(client.closed || client.waiting.is_none(), "{conn}: {client:?}");
            prop_assert!(client.closed || client.joined, "strangers are gone: {conn}");
        }
        // Once all connections are closed the hub is done.
        for conn in all.clients.keys().copied().collect::<Vec<_>>() {
            all.close(conn, Event::Closed("end".into()));
        }
        prop_assert!(all.hub.done());
        prop_assert!(all.hub.rooms.is_empty());
    }

    #[test]
    fn well_behaved_ranks_get_every_result(
        world in 1usize..6,
        order in prop::collection::vec(any::<prop::sample::Index>(), 20..200),
    ) {
        let mut all = started(world);
        for index in order {
            let free: Vec<ConnId> = (0..world as ConnId)
                .filter(|conn| all.clients[conn].waiting.is_none())
                .collect();
            all.gather(*index.get(&free), "gather");
        }
        let rounds = all.clients.values().map(|c| c.results.len()).min().unwrap();
        for client in all.clients.values() {
            prop_assert_eq!(client.results.len(), rounds);
            prop_assert!(client.seq as usize <= rounds + 1);
            prop_assert!(client.failures.is_empty() && client.lost.is_empty());
        }
    }
}

#[test]
fn the_dead_are_announced_and_waiters_released() {
    let mut all = started(3);
    all.gather(0, "gather");
    all.gather(2, "gather");
    all.close(1, Event::Closed("reset".into()));
    for conn in [0, 2] {
        let client = &all.clients[&conn];
        assert_eq!((client.lost.as_slice(), client.waiting), ([1].as_slice(), None));
    }
}

#[test]
fn whoever_comes_after_a_departure_is_told_at_once() {
    let mut all = started(3);
    all.send(1, Message::Bye, &[]);
    all.gather(0, "gather");
    assert_eq!(all.clients[&0].failures, [Failure::Left(1)]);
    assert!(all.clients[&0].lost.is_empty(), "it left in good order");
}

#[test]
fn the_absent_are_named_at_the_deadline() {
    let mut all = started(4);
    all.gather(1, "gather");
    all.pass(Duration::from_millis(GATHER_MS - 1));
    assert!(all.clients[&1].failures.is_empty());
    all.pass(Duration::from_millis(1));
    assert_eq!(all.clients[&1].failures, [Failure::Absent(vec![0, 2, 3])]);
}

#[test]
fn the_first_fault_is_heard_once_by_all_others() {
    let mut all = started(3);
    for conn in [2, 1] {
        let group = GroupId::new();
        all.send(conn, Message::Abort { group, blames: Some(0), why: "x".into() }, &[]);
    }
    let heard: Vec<_> = all.clients.values().map(|client| client.faults.clone()).collect();
    assert_eq!(heard, [vec![2], vec![2], vec![]]);
}

#[test]
fn late_members_of_a_subgroup_hear_what_they_missed() {
    let mut all = started(3);
    let group: GroupId = vec![0, 1];
    let open = |group: &GroupId| Message::Open { group: group.clone(), members: vec![1, 2] };
    all.send(1, open(&group), &[]);
    all.send(1, Message::Abort { group: group.clone(), blames: None, why: "x".into() }, &[]);
    assert!(all.clients[&2].faults.is_empty());
    all.send(2, open(&group), &[]);
    assert_eq!(all.clients[&2].faults, [0], "in the subgroup's numbers");
}

#[test]
fn silent_strangers_are_closed_and_floods_bounded() {
    let mut all = World::new(2);
    for conn in 0..(STRANGERS as ConnId + 10) {
        all.accept(conn);
    }
    let closed = all.clients.values().filter(|client| client.closed).count();
    assert_eq!(closed, 8, "the oldest make room");
    all.pass(HELLO_TIME);
    assert!(all.clients.values().all(|client| client.closed));
    assert!(all.hub.listening(), "the group still forms");
}

#[test]
fn refused_tokens_are_part_of_who_is_missing() {
    for (strangers, text) in [(1, "1 process with another job token was"), (2, "2 processes")] {
        let mut all = World::new(2);
        for conn in 0..=strangers {
            all.accept(conn);
            let token = if conn == 0 { TOKEN } else { b"other" };
            all.hello(conn, (conn as u32).min(1), 2, token);
        }
        all.pass(WAIT);
        let refused = all.clients[&0].refused.clone().unwrap();
        assert!(refused.contains("rank 1 of 2 missing") && refused.contains(text), "{refused}");
    }
}

#[test]
fn a_shortage_that_passes_harms_nobody_and_one_that_lasts_is_the_verdict() {
    let mut all = World::new(3);
    all.accept(0);
    all.hello(0, 0, 3, TOKEN);
    all.event(9, Event::Unaccepted("no descriptors".into()));
    all.pass(SHORTAGE / 2);
    all.accept(1);
    all.hello(1, 1, 3, TOKEN);
    all.pass(SHORTAGE);
    all.event(9, Event::Unaccepted("no descriptors".into()));
    all.pass(SHORTAGE / 2);
    all.event(9, Event::Unaccepted("no descriptors".into()));
    assert!(all.clients[&0].refused.is_none());
    all.pass(SHORTAGE / 2);
    let verdict = Some("no descriptors; 2 of 3 ranks had been accepted");
    assert_eq!(all.clients[&1].refused.as_deref(), verdict);
    // Whoever could not be let in before hears it too.
    assert!(all.hub.listening() && !all.hub.done());
    all.accept(2);
    assert_eq!(all.clients[&2].refused.as_deref(), verdict);
    assert!(all.clients[&0].refused.is_none(), "its process may end with it");
    all.pass(TELLING);
    assert_eq!(all.clients[&0].refused.as_deref(), verdict);
    assert!(!all.hub.listening() && all.hub.done());
}

/// Whoever comes after ranks were found to disagree hears why, rank 0 too, whose process the hub is in.
#[test]
fn a_disagreement_is_told_to_those_who_come_later() {
    let twice = Some("rank 1 was started twice: give every process its own rank");
    for first in [false, true] {
        let mut all = World::new(4);
        if first {
            all.accept(0);
            all.hello(0, 0, 4, TOKEN);
        }
        for conn in [1, 2] {
            all.accept(conn);
            all.hello(conn, 1, 4, TOKEN);
        }
        assert_eq!(all.clients[&2].refused.as_deref(), twice);
        assert_eq!(all.clients[&1].refused.as_deref(), twice);
        all.pass(TELLING / 2);
        for conn in if first { vec![3] } else { vec![0, 3] } {
            assert!(all.hub.listening() && !all.hub.done());
            all.accept(conn);
            assert_eq!(all.clients[&conn].refused.as_deref(), twice, "connection {conn}");
        }
        all.pass(HELLO_TIME);
        assert_eq!(all.clients[&0].refused.as_deref(), twice);
        assert!(!all.hub.listening() && all.hub.done());
    }
}

#[test]
fn a_time_out_during_a_shortage_names_the_shortage() {
    let mut all = World::new(2);
    all.accept(0);
    all.send(0, Message::Hello { rank: 0, world: 2, wait_ms: 100 }, TOKEN);
    all.event(9, Event::Unaccepted("no descriptors".into()));
    all.pass(Duration::from_millis(100));
    all.pass(TELLING);
    assert!(all.clients[&0].refused.as_ref().unwrap().contains("no descriptors"));
}

#[test]
fn the_shortest_wait_decides() {
    let mut all = World::new(2);
    all.accept(0);
    all.send(0, Message::Hello { rank: 0, world: 2, wait_ms: 100 }, TOKEN);
    all.pass(Duration::from_millis(100));
    let refused = all.clients[&0].refused.clone().unwrap();
    assert!(refused.contains("rank 1 of 2 missing"), "{refused}");
    assert!(all.hub.done());
}
