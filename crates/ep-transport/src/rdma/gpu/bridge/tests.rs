//! The bridge's order, with words that a test writes instead of streams.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use proptest::prelude::*;

use super::*;

mod end;

/// What the bridge did at its ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Did {
    Put(Put),
    Signal(usize, u32),
    LetGo(usize),
    See,
    Raise(u32, usize),
}

/// Words of a test, and proxies that are done when it says so.
struct Told {
    bells: [AtomicU32; LANES],
    let_go: [AtomicBool; LANES],
    pushed: AtomicU64,
    retired: AtomicU64,
    did: Mutex<Vec<Did>>,
    errors: Mutex<Vec<TransportError>>,
    fails: AtomicBool,
    /// No peer owes anything.
    answered: AtomicBool,
    /// Held by a test while the ring is full.
    full: Mutex<()>,
    /// Held by a test while the driver does not come back.
    stuck: Mutex<()>,
    /// What happens next after a doorbell was looked at.
    meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Default for Told {
    fn default() -> Self {
        Self {
            bells: std::array::from_fn(|_| AtomicU32::new(0)),
            let_go: std::array::from_fn(|_| AtomicBool::new(false)),
            pushed: AtomicU64::new(0),
            retired: AtomicU64::new(0),
            did: Mutex::default(),
            errors: Mutex::default(),
            fails: AtomicBool::new(false),
            answered: AtomicBool::new(false),
            full: Mutex::default(),
            stuck: Mutex::default(),
            meanwhile: Mutex::default(),
        }
    }
}

impl Told {
    fn push(&self, did: Did) -> Result<()> {
        if self.fails.load(SeqCst) {
            let detail = "the ring is gone".into();
            return Err(TransportError::PeerLost { op: "put", peer: 3, detail });
        }
        let _room = self.full.lock();
        self.pushed.fetch_add(1, SeqCst);
        self.did.lock().push(did);
        Ok(())
    }
}

impl Ends for Arc<Told> {
    fn put(&self, put: Put) -> Result<()> {
        self.push(Did::Put(put))
    }

    fn signal(&self, peer: usize, flag: u32) -> Result<()> {
        self.push(Did::Signal(peer, flag))
    }

    fn pushed(&self) -> Tickets {
        let mut tickets = Tickets::default();
        tickets[0] = self.pushed.load(SeqCst);
        tickets
    }

    fn are_retired(&self, tickets: &Tickets) -> bool {
        self.retired.load(SeqCst) >= tickets[0]
    }

    fn unanswered(&self, after: Duration) -> TransportError {
        let peers = if self.answered.load(SeqCst) { Vec::new() } else { vec![1] };
        TransportError::Timeout { op: "flush", peers, after, hint: String::new() }
    }

    fn bell(&self, lane: usize) -> u32 {
        let bell = self.bells[lane].load(SeqCst);
        let next = self.meanwhile.lock().take();
        next.into_iter().for_each(|next| next());
        bell
    }

    fn let_go(&self, lane: usize) {
        self.let_go[lane].store(true, SeqCst);
        self.did.lock().push(Did::LetGo(lane));
    }

    fn is_let_go(&self, lane: usize) -> bool {
        self.let_go[lane].load(SeqCst)
    }

    fn see(&self) -> Result<()> {
        self.did.lock().push(Did::See);
        drop(self.stuck.lock());
        Ok(())
    }

    fn raise(&self, flag: u32, source: usize) {
        self.did.lock().push(Did::Raise(flag, source));
    }

    fn fail(&self, error: &TransportError) {
        self.errors.lock().push(error.clone());
    }

    fn failed(&self) -> bool {
        !self.errors.lock().is_empty()
    }

    fn spins(&self) -> bool {
        false
    }
}

/// A bridge without its thread, so that a test says when it looks.
fn works() -> (Arc<Told>, Works<Arc<Told>>, Arc<Inbox>) {
    let (told, inbox) = (Arc::<Told>::default(), Inbox::new(8));
    (told.clone(), Works::new(told, inbox.clone()), inbox)
}

fn put(bytes: usize) -> Step {
    Step::Put(Put { peer: 1, from: 0, to: 64, bytes })
}

fn signal(flag: u32) -> Step {
    Step::Signal { peer: 2, flag }
}

/// The marks that a stream has yet to write, by lane.
type Marks = Mutex<VecDeque<(usize, u32)>>;

fn order(works: &Works<Arc<Told>>, marks: &Marks, stream: usize, step: Step) {
    let tell = |lane, mark| {
        marks.lock().push_back((lane, mark));
        Ok(())
    };
    works.order(stream, step, tell).unwrap();
}

#[test]
fn marks_say_how_far_a_stream_has_come() {
    assert_eq!(reached(0, 0), 0, "nothing was written");
    for number in [1, 2, MARKS - 1, MARKS, MARKS + 1, 5 * MARKS + 77] {
        assert!(mark(number) >= FIRST as u32);
        for before in [0, 1, 2, 1000].map(|back| number.saturating_sub(back)) {
            assert_eq!(reached(before, mark(number)), number, "{number} after {before}");
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A stream orders something of so many bytes, 0 a signal, 1 a flush.
    Order(usize, usize),
    /// A stream comes to its next mark, if it does not wait.
    Come(usize),
    /// Proxies are done with all but so many.
    Retire(u64),
    Flag(u32, usize),
    Look,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0usize..3, prop_oneof![Just(0), Just(1), Just(100), Just(LARGE)])
            .prop_map(|(stream, bytes)| Event::Order(stream, bytes)),
        (0usize..3).prop_map(Event::Come),
        (0u64..3).prop_map(Event::Retire),
        (0u32..2, 0usize..4).prop_map(|(flag, source)| Event::Flag(flag, source)),
        Just(Event::Look),
    ]
}

/// Streams of a test: what each has ordered and what of it may happen.
#[derive(Default)]
struct Model {
    ordered: Vec<Step>,
    marks: VecDeque<(usize, u32, usize, bool)>,
    /// So many orders have been come to.
    come: usize,
    /// So many were seen to happen.
    happened: usize,
    /// It waits in a flush.
    waits: Option<usize>,
    /// Orders of the proxies when that began.
    unsettled: bool,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Orders of a stream happen in their order, none before the stream has come to it and each once the
    /// bridge looks; a stream in a flush goes on exactly when what it put before is done; flags are
    /// raised in the order they came, after what makes them seen.
    #[test]
    fn orders_happen_when_streams_have_come_to_them(
        events in prop::collection::vec(event(), 1..120),
    ) {
        let (told, works, inbox) = works();
        let mut streams: [Model; 3] = std::array::from_fn(|_| Model::default());
        let (mut came, mut raised) = (Vec::new(), 0);
        let mut number = 0;
        for event in events.into_iter().chain([Event::Look]) {
            match event {
                Event::Order(stream, bytes) => {
                    let model = &mut streams[stream];
                    number += 1;
                    let step = match bytes {
                        0 => Step::Signal { peer: stream, flag: number },
                        1 => Step::Flush(Duration::from_secs(1000)),
                        _ => Step::Put(Put { peer: stream, from: number as usize, to: 0, bytes }),
                    };
                    let mut told_at = None;
                    works.order(stream + 1, step, |lane, mark| {
                        told_at = Some((lane, mark));
                        Ok(())
                    }).unwrap();
                    let flush = matches!(step, Step::Flush(_));
                    if !flush || told_at.is_some() {
                        model.ordered.push(step);
                    }
                    if let Some((lane, mark)) = told_at {
                        model.marks.push_back((lane, mark, model.ordered.len(), flush));
                    } else {
                        // Small puts wait for the next mark; a flush of nothing needs none.
                        prop_assert!(flush || bytes < LARGE && bytes > 1);
                    }
                }
                Event::Come(stream) => {
                    let model = &mut streams[stream];
                    if let Some(lane) = model.waits {
                        if !told.let_go[lane].swap(false, SeqCst) {
                            continue;
                        }
                        prop_assert!(!model.unsettled, "a flush ended early");
                        model.waits = None;
                    }
                    if let Some((lane, mark, count, flush)) = model.marks.pop_front() {
                        told.bells[lane].store(mark, SeqCst);
                        model.come = count;
                        model.waits = flush.then_some(lane);
                        model.unsettled = flush;
                    }
                }
                Event::Retire(but) => {
                    let pushed = told.pushed.load(SeqCst);
                    told.retired.fetch_max(pushed.saturating_sub(but), SeqCst);
                }
                Event::Flag(flag, source) => {
                    came.push((flag, source));
                    inbox.came(flag, source);
                }
                Event::Look => {
                    while works.pass().unwrap().moved {}
                    let retired = told.retired.load(SeqCst) == told.pushed.load(SeqCst);
                    let did = std::mem::take(&mut *told.did.lock());
                    let mut seen = false;
                    for did in did {
                        let (stream, step) = match did {
                            Did::Put(put) => (put.peer, Step::Put(put)),
                            Did::Signal(peer, flag) => (peer, Step::Signal { peer, flag }),
                            Did::See => {
                                seen = true;
                                continue;
                            }
                            Did::Raise(flag, source) => {
                                prop_assert!(seen);
                                prop_assert_eq!((flag, source), came[raised]);
                                raised += 1;
                                continue;
                            }
                            Did::LetGo(lane) => {
                                let waits = |model: &&mut Model| model.waits == Some(lane);
                                let model = streams.iter_mut().find(waits);
                                model.expect("a stream that waits").unsettled = false;
                                continue;
                            }
                        };
                        let model = &mut streams[stream];
                        while let Some(Step::Flush(_)) = model.ordered.get(model.happened) {
                            model.happened += 1;
                        }
                        prop_assert!(model.happened < model.come);
                        prop_assert_eq!(model.ordered[model.happened], step);
                        model.happened += 1;
                    }
                    for model in &streams {
                        let left = &model.ordered[model.happened.min(model.come)..model.come];
                        prop_assert!(left.iter().all(|step| matches!(step, Step::Flush(_))));
                        // What is all done lets everyone go on.
                        prop_assert!(!(retired && model.unsettled));
                    }
                    prop_assert_eq!(raised, came.len());
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_told_is_not_done_and_leaves_the_rest_in_order() {
    let (told, works, _) = works();
    let marks = Marks::default();
    order(&works, &marks, 7, put(100));
    let refused = works.order(7, signal(1), |_, _| {
        Err(TransportError::Argument { op: "signal", detail: "no".into() })
    });
    assert!(refused.is_err());
    order(&works, &marks, 7, signal(2));
    let (lane, mark) = marks.lock().pop_back().unwrap();
    told.bells[lane].store(mark, SeqCst);
    while works.pass().unwrap().moved {}
    let Step::Put(first) = put(100) else { unreachable!() };
    assert_eq!(*told.did.lock(), [Did::Put(first), Did::Signal(2, 2)]);
}

#[test]
fn a_flush_that_does_not_end_in_time_names_who_does_not_answer() {
    let (told, works, _) = works();
    let marks = Marks::default();
    order(&works, &marks, 7, put(LARGE));
    order(&works, &marks, 7, Step::Flush(Duration::from_millis(20)));
    for (lane, mark) in marks.lock().drain(..) {
        told.bells[lane].store(mark, SeqCst);
    }
    let bridge = Bridge::start(works, "test".into(), Duration::from_secs(20)).unwrap();
    let deadline = Deadline::after(Duration::from_secs(20));
    while told.errors.lock().is_empty() {
        assert!(!deadline.expired());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(told.errors.lock()[0].peer(), Some(1), "{:?}", told.errors);
    // The thread is there still, and ends at once though nothing was answered.
    drop(bridge);
    assert!(!deadline.expired());
}

#[test]
fn an_error_ends_all_orders_and_nobody_waits() {
    let (told, works, _) = works();
    let marks = Marks::default();
    told.fails.store(true, SeqCst);
    order(&works, &marks, 7, put(LARGE));
    order(&works, &marks, 7, Step::Flush(Duration::from_secs(1000)));
    order(&works, &marks, 8, signal(1));
    for (lane, mark) in marks.lock().drain(..) {
        told.bells[lane].store(mark, SeqCst);
    }
    for _ in 0..5 {
        works.guarded();
    }
    assert_eq!(told.errors.lock().len(), 1);
    assert_eq!(told.errors.lock()[0].peer(), Some(3));
    assert_eq!(*told.did.lock(), [Did::LetGo(0)]);
}

#[test]
fn streams_that_are_done_make_room_for_others_and_too_many_are_an_error() {
    let (told, works, _) = works();
    let marks = Marks::default();
    (1..=LANES).for_each(|stream| order(&works, &marks, stream, signal(1)));
    let tell = |_, _| panic!("nothing to tell");
    let e = works.order(LANES + 1, signal(1), tell).unwrap_err();
    assert!(e.group_usable() && e.to_string().contains("64 streams"), "{e}");
    works.order(LANES + 1, Step::Flush(Duration::ZERO), tell).unwrap();
    let (lane, mark) = marks.lock().remove(5).unwrap();
    told.bells[lane].store(mark, SeqCst);
    while works.pass().unwrap().moved {}
    order(&works, &marks, LANES + 1, signal(2));
    assert_eq!(marks.lock().back().map(|&(lane, _)| lane), Some(lane));
    let last = marks.lock().pop_back().unwrap();
    told.bells[last.0].store(last.1, SeqCst);
    while works.pass().unwrap().moved {}
    assert_eq!(told.did.lock().last(), Some(&Did::Signal(2, 2)));
    // The stream that had the lane before gets another.
    marks.lock().clear();
    order(&works, &marks, lane + 1, signal(3));
    assert_eq!(marks.lock().len(), 1);
}

/// Between the queue and the ring a put is in neither.
#[test]
fn a_flush_waits_for_a_put_that_is_being_passed_on() {
    let (told, works, _) = works();
    let marks = Marks::default();
    let bridge = Bridge::start(works, "test".into(), Duration::from_secs(20)).unwrap();
    let full = told.full.lock();
    order(&bridge.works, &marks, 7, put(LARGE));
    let (lane, mark) = marks.lock().pop_front().unwrap();
    told.bells[lane].store(mark, SeqCst);
    let deadline = Deadline::after(Duration::from_secs(20));
    while !bridge.works.lanes[lane].orders.lock().queue.is_empty() {
        assert!(!deadline.expired());
        bridge.works.inbox.wake();
        std::thread::sleep(Duration::from_millis(1));
    }
    order(&bridge.works, &marks, 7, Step::Flush(Duration::from_secs(1000)));
    let (lane, mark) = marks.lock().pop_front().expect("the stream waits");
    drop(full);
    told.retired.store(1, SeqCst);
    told.bells[lane].store(mark, SeqCst);
    drop(bridge);
    assert_eq!(told.did.lock().last(), Some(&Did::LetGo(lane)));
}

/// Its lane may be another's, and what it put before may be on its way still.
#[test]
fn a_stream_without_a_lane_waits_for_what_proxies_have() {
    let (told, works, _) = works();
    let marks = Marks::default();
    told.pushed.store(1, SeqCst);
    order(&works, &marks, 7, Step::Flush(Duration::from_secs(1000)));
    assert_eq!(marks.lock().len(), 1);
}

#[test]
fn a_flush_that_could_not_be_told_is_asked_for_again() {
    let (_, works, _) = works();
    let marks = Marks::default();
    order(&works, &marks, 7, put(LARGE));
    let flush = Step::Flush(Duration::from_secs(1000));
    let no = |_, _| Err(TransportError::Argument { op: "flush", detail: "no".into() });
    works.order(7, flush, no).unwrap_err();
    order(&works, &marks, 7, flush);
    assert_eq!(marks.lock().len(), 2);
}
