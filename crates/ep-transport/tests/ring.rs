//! The command ring against a queue, and under load.
#![cfg(not(loom))]

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ep_transport::ring::{self, Command, Consumer, Full, Producer, Ring, Waker};
use ep_transport::{Deadline, ErrorKind, TransportError};
use proptest::prelude::*;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

fn command(number: u64) -> Command {
    std::array::from_fn(|word| number.wrapping_mul(2 * word as u64 + 1))
}

/// Counts its wakes.
fn counting() -> (Arc<AtomicU64>, Waker) {
    let wakes = Arc::new(AtomicU64::new(0));
    let waker = wakes.clone();
    let waker = move || {
        waker.fetch_add(1, Ordering::Relaxed);
    };
    (wakes, Arc::new(waker))
}

fn ring(capacity: usize) -> (Producer, Consumer) {
    Ring::new(capacity).unwrap().split(counting().1)
}

#[derive(Clone, Debug)]
enum Step {
    Push {
        producer: usize,
        count: usize,
    },
    Pop {
        count: usize,
    },
    Sleep,
    Awake,
    /// Both sides are dropped and opened again over the same memory.
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0..3_usize, 1..12_usize).prop_map(|(producer, count)| Step::Push { producer, count }),
        8 => (1..12_usize).prop_map(|count| Step::Pop { count }),
        3 => Just(Step::Sleep),
        2 => Just(Step::Awake),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec(step, 1..80)
}

/// Memory with bytes around the ring that must stay as they are.
#[derive(Debug)]
struct Fenced(Box<[Page]>);

#[repr(C, align(4096))]
#[derive(Debug)]
struct Page([AtomicU64; 512]);

const GUARD: u64 = 0x5a5a_5a5a_5a5a_5a5a;

impl Fenced {
    fn new(pages: usize) -> Self {
        let page = |_| Page(std::array::from_fn(|_| AtomicU64::new(GUARD)));
        Self((0..pages).map(page).collect())
    }

    fn words(&self) -> impl Iterator<Item = &AtomicU64> {
        self.0.iter().flat_map(|page| &page.0)
    }
}

// SAFETY: the boxed pages do not move and are atomics that live as long as the value.
unsafe impl ep_transport::Region for Fenced {
    fn base(&self) -> std::ptr::NonNull<u8> {
        std::ptr::NonNull::from(&*self.0).cast()
    }

    fn bytes(&self) -> usize {
        self.0.len() * 4096
    }
}

/// A zeroed ring `offset` bytes into guarded memory, and a way to open it.
fn guarded(offset: usize, capacity: usize) -> Arc<Fenced> {
    let bytes = Ring::bytes(capacity).unwrap();
    let region = Fenced::new((offset + bytes).div_ceil(4096) + 1);
    for word in region.words().skip(offset / 8).take(bytes / 8) {
        word.store(0, Ordering::Relaxed);
    }
    Arc::new(region)
}

struct Tested {
    region: Arc<Fenced>,
    offset: usize,
    capacity: usize,
    wakes: Arc<AtomicU64>,
    producers: [Producer; 3],
    consumer: Consumer,
}

impl Tested {
    fn new(capacity: usize, offset: usize) -> Self {
        let region = guarded(offset, capacity);
        let (wakes, waker) = counting();
        let (producers, consumer) = Self::open(&region, offset, capacity, waker);
        Self { region, offset, capacity, wakes, producers, consumer }
    }

    fn open(
        region: &Arc<Fenced>,
        offset: usize,
        capacity: usize,
        waker: Waker,
    ) -> ([Producer; 3], Consumer) {
        let ring = Ring::over(region.clone(), offset, capacity).unwrap();
        let (producer, consumer) = ring.split(waker);
        ([producer.clone(), producer.clone(), producer], consumer)
    }

    fn reopen(&mut self) {
        let (wakes, waker) = counting();
        let wakes_so_far = self.wakes.load(Ordering::Relaxed);
        wakes.store(wakes_so_far, Ordering::Relaxed);
        let (producers, consumer) = Self::open(&self.region, self.offset, self.capacity, waker);
        (self.wakes, self.producers, self.consumer) = (wakes, producers, consumer);
    }

    fn check_guards(&self) {
        let inside = self.offset / 8..(self.offset + Ring::bytes(self.capacity).unwrap()) / 8;
        for (index, word) in self.region.words().enumerate() {
            let intact = word.load(Ordering::Relaxed) == GUARD;
            assert!(intact || inside.contains(&index), "word {index} was overwritten");
        }
    }
}

fn runs_like_a_queue(log_capacity: u32, offset: usize, steps: &[Step]) {
    let capacity = 1 << log_capacity;
    let mut tested = Tested::new(capacity, offset);
    let mut oracle = VecDeque::new();
    let (mut given, mut asleep, mut wakes) = (0, false, 0);
    for step in steps {
        match *step {
            Step::Push { producer, count } => {
                for _ in 0..count {
                    let got = tested.producers[producer].try_push(command(given));
                    if oracle.len() == capacity {
                        assert_eq!(got, Err(Full));
                        continue;
                    }
                    assert_eq!(got, Ok(given));
                    oracle.push_back(given);
                    given += 1;
                    wakes += u64::from(std::mem::take(&mut asleep));
                }
            }
            Step::Pop { count } => {
                for _ in 0..count {
                    let wanted = oracle.pop_front();
                    let wanted = wanted.map(|ticket| (ticket, command(ticket)));
                    assert_eq!(tested.consumer.pop_with_ticket(), wanted);
                }
            }
            Step::Sleep => {
                asleep = tested.consumer.prepare_sleep();
                assert_eq!(asleep, oracle.is_empty());
            }
            Step::Awake => {
                tested.consumer.awake();
                asleep = false;
            }
            Step::Reopen => tested.reopen(),
        }
        assert_eq!(tested.consumer.is_empty(), oracle.is_empty());
        assert_eq!(tested.wakes.load(Ordering::Relaxed), wakes);
    }
    tested.check_guards();
}

proptest! {
    #[test]
    fn is_a_queue(log_capacity in 0..5_u32, line in 0..40_usize, steps in steps()) {
        runs_like_a_queue(log_capacity, line * ring::ALIGNMENT, &steps);
    }
}

#[test]
fn words_are_where_the_layout_says() {
    let region = guarded(256, 4);
    let word = |at: usize| region.words().nth((256 + at) / 8).unwrap().load(Ordering::Relaxed);
    let (producer, mut consumer) = Ring::over(region.clone(), 256, 4).unwrap().split(counting().1);
    for number in 0..6 {
        producer.try_push(command(number)).unwrap();
        consumer.pop().unwrap();
    }
    producer.try_push(command(6)).unwrap();
    assert_eq!([word(ring::HEAD), word(ring::POSITION), word(ring::DOORBELL)], [7, 6, 0]);
    let cell = ring::CELLS + (6 % 4) * ring::CELL_BYTES;
    let payload: Vec<u64> = (0..7).map(|index| word(cell + 8 * index)).collect();
    assert_eq!((payload.as_slice(), word(cell + ring::TURN)), (&command(6)[..], 7));
    consumer.pop().unwrap();
    assert!(consumer.prepare_sleep());
    assert_eq!(word(ring::DOORBELL), 1);
}

#[test]
fn bad_arguments_are_refused() {
    let argument = |result: Result<Ring, TransportError>| {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::Argument);
    };
    for capacity in [0, 3, 6, usize::MAX, 1 << 63, 1 << 58, 1 << 57] {
        argument(Ring::new(capacity));
    }
    assert_eq!(Ring::bytes(1 << 58), None);
    let region = Arc::new(Fenced::new(1));
    let fits = 4096 - Ring::bytes(32).unwrap();
    Ring::over(region.clone(), fits, 32).unwrap();
    for offset in [64, 8, 1, fits + ring::ALIGNMENT, usize::MAX, usize::MAX - 127] {
        argument(Ring::over(region.clone(), offset, 32));
    }
    argument(Ring::over(region.clone(), 0, 64));
    // Within the address space, but not within any machine.
    assert_eq!(Ring::new(1 << 50).unwrap_err().kind(), ErrorKind::Os);
}

#[test]
fn a_full_ring_ends_a_push_by_timeout_or_by_stop() {
    let (producer, mut consumer) = ring(2);
    producer.try_push(command(0)).unwrap();
    producer.try_push(command(1)).unwrap();
    let start = Instant::now();
    let push = |after, stop: &mut dyn FnMut() -> ep_transport::Result<()>| {
        producer.push("post", command(9), Deadline::after(after), stop)
    };
    let (after, mut calls) = (Duration::from_millis(300), 0);
    let error = push(after, &mut || {
        calls += 1;
        Ok(())
    });
    let error = error.unwrap_err();
    assert!(start.elapsed() >= after && calls > 1, "{:?}, {calls} calls", start.elapsed());
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, None));
    assert!(error.to_string().contains("ring of 2 stays full"), "{error}");
    let why = || TransportError::Aborted { op: "post", by: 3, blames: None, why: "test".into() };
    let mut left = 5;
    let error = push(Duration::from_secs(60), &mut || {
        left -= 1;
        if left > 0 { Ok(()) } else { Err(why()) }
    });
    assert_eq!(error.unwrap_err().peer(), Some(3));
    // Nothing of what was refused was given, and a ring with room asks nobody.
    assert_eq!(consumer.pop_with_ticket(), Some((0, command(0))));
    assert_eq!(push(Duration::ZERO, &mut || Err(why())).unwrap(), 2);
    assert_eq!([consumer.pop(), consumer.pop()], [Some(command(1)), Some(command(9))]);
    assert!(consumer.pop().is_none());
}

#[test]
fn a_push_waits_until_there_is_room() {
    let (producer, mut consumer) = ring(1);
    producer.try_push(command(0)).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let deadline = Deadline::after(Duration::from_secs(20));
            producer.push("post", command(1), deadline, || Ok(()))
        });
        thread::sleep(Duration::from_millis(10));
        assert_eq!(consumer.pop(), Some(command(0)));
        assert_eq!(waiting.join().unwrap().unwrap(), 1);
    });
    assert_eq!(consumer.pop(), Some(command(1)));
}

/// An eventfd, which the waker writes, and sleeping in poll until it was written.
struct Bell(Arc<OwnedFd>);

impl Bell {
    fn new() -> Self {
        Self(Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()))
    }

    fn waker(&self) -> Waker {
        let fd = self.0.clone();
        Arc::new(move || {
            rustix::io::write(&fd, &1_u64.to_ne_bytes()).unwrap();
        })
    }

    /// Whether it was rung within `bound`; resets it.
    fn sleep(&self, bound: Duration) -> bool {
        let bound =
            Timespec { tv_sec: bound.as_secs() as i64, tv_nsec: bound.subsec_nanos().into() };
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        let rung = poll(&mut fds, Some(&bound)).unwrap() > 0;
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
        rung
    }
}

#[test]
fn four_producers_lose_and_double_nothing() {
    const PRODUCERS: u64 = 4;
    const EACH: u64 = 30_000;
    let bell = Bell::new();
    let (producer, mut consumer) = Ring::new(64).unwrap().split(bell.waker());
    let mut announced = 0_u64;
    thread::scope(|scope| {
        for from in 0..PRODUCERS {
            let producer = producer.clone();
            scope.spawn(move || {
                for number in 0..EACH {
                    let check = from ^ number.wrapping_mul(GUARD);
                    let command = [from, number, check, check, check, check, check];
                    let deadline = Deadline::after(Duration::from_secs(20));
                    producer.push("stress", command, deadline, || Ok(())).unwrap();
                    // Now and then the consumer runs dry and goes to sleep.
                    if number % 1000 == from * 7 {
                        thread::sleep(Duration::from_micros(200));
                    }
                }
            });
        }
        let mut next = [0; PRODUCERS as usize];
        let mut tickets = 0;
        while tickets < PRODUCERS * EACH {
            let Some((ticket, got)) = consumer.pop_with_ticket() else {
                if consumer.prepare_sleep() {
                    announced += 1;
                    assert!(bell.sleep(Duration::from_secs(20)), "a wake-up was lost");
                    consumer.awake();
                }
                continue;
            };
            let [from, number, payload @ ..] = got;
            assert_eq!((ticket, number), (tickets, next[from as usize]));
            assert_eq!(payload, [from ^ number.wrapping_mul(GUARD); 5]);
            next[from as usize] += 1;
            tickets += 1;
        }
        assert_eq!(next, [EACH; PRODUCERS as usize]);
    });
    assert!(announced > 0 && consumer.pop().is_none());
}
