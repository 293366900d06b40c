//! The command ring's code, as it is in production, under every interleaving and memory order that
//! loom explores: `RUSTFLAGS="--cfg loom" cargo test -p ep-transport --release --test loom_ring`.
#![cfg(loom)]

use std::sync::Arc;
use std::time::Duration;

use ep_transport::Deadline;
use ep_transport::ring::{Command, Consumer, Full, Producer, Ring, Waker};
use loom::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release, SeqCst};
use loom::sync::{Condvar, Mutex};
use loom::thread;

fn model(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}

/// A ring whose consumer never sleeps.
fn ring(capacity: usize) -> (Producer, Consumer) {
    Ring::new(capacity).unwrap().split(Arc::new(|| panic!("nobody sleeps")))
}

/// A command that shows if it was torn.
fn command(from: u64, number: u64) -> Command {
    [from, number, 3, 4, 5, from, number]
}

fn push(producer: &Producer, from: u64, number: u64) -> u64 {
    let deadline = Deadline::after(Duration::from_secs(3600));
    producer.push("model", command(from, number), deadline, || Ok(())).unwrap()
}

/// Pops what `counts` says each producer pushes: in order per producer, tickets dense from 0.
fn pop_all(consumer: &mut Consumer, counts: &[u64], mut idle: impl FnMut(&mut Consumer)) {
    let mut next = vec![0; counts.len()];
    let mut tickets = 0;
    while next != counts {
        let Some((ticket, got)) = consumer.pop_with_ticket() else {
            idle(consumer);
            continue;
        };
        let from = got[0] as usize;
        assert_eq!((ticket, got), (tickets, command(got[0], next[from])));
        next[from] += 1;
        tickets += 1;
    }
    assert!(consumer.is_empty() && consumer.pop().is_none());
}

#[test]
fn two_producers_wrap_around() {
    model(2, || {
        let (producer, mut consumer) = ring(2);
        let producers = [2, 1].into_iter().enumerate().map(|(from, count)| {
            let producer = producer.clone();
            thread::spawn(move || {
                let tickets = (0..count).map(|number| push(&producer, from as u64, number));
                assert!(tickets.collect::<Vec<_>>().is_sorted());
            })
        });
        let producers: Vec<_> = producers.collect();
        pop_all(&mut consumer, &[2, 1], |_| thread::yield_now());
        for producer in producers {
            producer.join().unwrap();
        }
    });
}

/// Whoever learns of the position need not be the one who gets the cell.
#[test]
fn threads_that_share_a_producer_hand_on_the_position() {
    model(3, || {
        let (producer, mut consumer) = ring(1);
        producer.try_push(command(0, 0)).unwrap();
        let producer = Arc::new(producer);
        let producers = [1, 2].map(|from| {
            let producer = producer.clone();
            thread::spawn(move || producer.try_push(command(from, 0)))
        });
        assert_eq!(consumer.pop(), Some(command(0, 0)));
        let [one, two] = producers.map(|producer| producer.join().unwrap());
        let last = match (one, two) {
            (Ok(1), Err(Full)) => Some((1, command(1, 0))),
            (Err(Full), Ok(1)) => Some((1, command(2, 0))),
            (Err(Full), Err(Full)) => None,
            both => panic!("{both:?}"),
        };
        assert_eq!(consumer.pop_with_ticket(), last);
    });
}

#[test]
fn a_full_ring_claims_nothing() {
    model(3, || {
        let (producer, mut consumer) = ring(1);
        let rival = {
            let producer = producer.clone();
            thread::spawn(move || producer.try_push(command(1, 0)))
        };
        let own = producer.try_push(command(0, 0));
        let others = rival.join().unwrap();
        let winner = match (own, others) {
            (Ok(0), Err(Full)) => 0,
            (Err(Full), Ok(0)) => 1,
            both => panic!("{both:?}"),
        };
        assert_eq!(consumer.pop_with_ticket(), Some((0, command(winner, 0))));
        assert_eq!(producer.try_push(command(0, 1)), Ok(1));
        assert_eq!(consumer.pop(), Some(command(0, 1)));
    });
}

/// A ring of one: the second command has its cell only once the first was read.
fn a_cell_is_used_again(publish: Ordering, take: Ordering, free: Ordering) {
    model(3, move || {
        let (producer, mut consumer) = ring(1);
        let thread = thread::spawn(move || {
            producer.try_push_with(command(0, 0), publish, SeqCst).unwrap();
            producer.try_push_with(command(0, 1), publish, SeqCst)
        });
        let first = consumer.pop_with(take, free);
        assert!(first.is_none_or(|first| first == command(0, 0)));
        let second = thread.join().unwrap();
        assert!(second == Err(Full) || (second == Ok(1) && first.is_some()));
    });
}

#[test]
fn payload_is_read_after_it_was_written_and_before_it_is_overwritten() {
    a_cell_is_used_again(Release, Acquire, Release);
}

/// Only the doorbell's fence orders anything then, and that comes after the publication.
#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_publication_loses_payload() {
    a_cell_is_used_again(Relaxed, Acquire, Release);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_pop_loses_payload() {
    a_cell_is_used_again(Release, Relaxed, Release);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_position_lets_a_producer_overwrite_what_is_being_read() {
    a_cell_is_used_again(Release, Acquire, Relaxed);
}

/// What an eventfd does: remembers wakes until the sleeper has read them.
#[derive(Default)]
struct Bed {
    /// Wakes not yet read, and all there were.
    wakes: Mutex<(u32, u32)>,
    woken: Condvar,
}

impl Bed {
    fn waker(self: &Arc<Self>) -> Waker {
        let bed = self.clone();
        Arc::new(move || {
            let mut wakes = bed.wakes.lock().unwrap();
            *wakes = (wakes.0 + 1, wakes.1 + 1);
            bed.woken.notify_one();
        })
    }

    fn sleep(&self) {
        let mut wakes = self.wakes.lock().unwrap();
        while wakes.0 == 0 {
            wakes = self.woken.wait(wakes).unwrap();
        }
        wakes.0 = 0;
    }
}

/// Producers whose first commands go to a consumer that sleeps whenever it has nothing to do.
fn no_wake_up_is_lost(counts: &'static [u64], produce: Ordering, consume: Ordering) {
    model(3, move || {
        let bed = Arc::new(Bed::default());
        let (producer, mut consumer) = Ring::new(4).unwrap().split(bed.waker());
        let producers: Vec<_> = (0..counts.len())
            .map(|from| {
                let producer = producer.clone();
                thread::spawn(move || {
                    for number in 0..counts[from] {
                        let command = command(from as u64, number);
                        producer.try_push_with(command, Release, produce).unwrap();
                    }
                })
            })
            .collect();
        let mut announced = 0;
        pop_all(&mut consumer, counts, |consumer| {
            announced += 1;
            if consumer.prepare_sleep_with(consume) {
                bed.sleep();
                consumer.awake();
            }
        });
        for producer in producers {
            producer.join().unwrap();
        }
        assert!(bed.wakes.lock().unwrap().1 <= announced, "one wake per announcement");
    });
}

#[test]
fn a_consumer_is_always_woken() {
    no_wake_up_is_lost(&[2], SeqCst, SeqCst);
}

#[test]
fn a_consumer_is_always_woken_by_either_of_two_producers() {
    no_wake_up_is_lost(&[1, 1], SeqCst, SeqCst);
}

/// The consumer wakes by itself, as after a timeout of poll, and goes to sleep again.
#[test]
fn a_consumer_that_woke_by_itself_is_woken_the_next_time() {
    model(3, || {
        let bed = Arc::new(Bed::default());
        let (producer, mut consumer) = Ring::new(2).unwrap().split(bed.waker());
        let thread = thread::spawn(move || push(&producer, 0, 0));
        if consumer.prepare_sleep() {
            consumer.awake();
        }
        while consumer.is_empty() {
            if consumer.prepare_sleep() {
                bed.sleep();
                consumer.awake();
            }
        }
        assert_eq!(consumer.pop(), Some(command(0, 0)));
        thread.join().unwrap();
    });
}

/// Loom's report of a deadlock ends the process, so these get processes of their own.
fn deadlocks(name: &str) {
    let inner = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&inner.stderr);
    assert!(!inner.status.success() && text.contains("deadlock"), "{text}");
}

#[test]
fn a_weak_fence_of_a_producer_lets_the_consumer_sleep_forever() {
    deadlocks("model_of_a_weak_producer");
}

#[test]
fn a_weak_fence_of_the_consumer_lets_it_sleep_forever() {
    deadlocks("model_of_a_weak_consumer");
}

#[test]
#[ignore = "runs in a process of its own: it must fail there"]
fn model_of_a_weak_producer() {
    no_wake_up_is_lost(&[2], AcqRel, SeqCst);
}

#[test]
#[ignore = "runs in a process of its own: it must fail there"]
fn model_of_a_weak_consumer() {
    no_wake_up_is_lost(&[2], SeqCst, AcqRel);
}
