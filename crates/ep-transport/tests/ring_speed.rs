//! What a command costs. Not run by default, as the figures need two quiet cores:
//! `cargo test -p ep-transport --release --test ring_speed -- --ignored --nocapture --test-threads 1`.
#![cfg(not(loom))]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ep_transport::Deadline;
use ep_transport::ring::{Consumer, Ring, Waker};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

/// Short, so that some fit between what else the machine does; the quietest is what is judged, as
/// the aims are for quiet cores.
const RUNS: usize = 25;

/// Commands per second from `producers` threads to one consumer that polls.
fn rate(producers: u64, capacity: usize) -> f64 {
    let each = 400_000 / producers;
    let (producer, mut consumer) = Ring::new(capacity).unwrap().split(Arc::new(|| {}));
    let go = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..producers {
            let (producer, go) = (producer.clone(), &go);
            scope.spawn(move || {
                let deadline = Deadline::after(Duration::from_secs(60));
                while !go.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                for number in 0..each {
                    producer.push("speed", [number; 7], deadline, || Ok(())).unwrap();
                }
            });
        }
        thread::sleep(Duration::from_millis(1));
        let start = Instant::now();
        go.store(true, Ordering::Release);
        let mut sum = 0_u64;
        let mut left = producers * each;
        while left > 0 {
            match consumer.pop() {
                Some(command) => {
                    sum = sum.wrapping_add(command[6]);
                    left -= 1;
                }
                None => std::hint::spin_loop(),
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        assert_eq!(sum, producers * (each * (each - 1) / 2));
        (producers * each) as f64 / seconds
    })
}

#[test]
#[ignore = "measures speed"]
fn throughput() {
    for producers in [1, 2, 4] {
        let mut rates: Vec<f64> = (0..RUNS).map(|_| rate(producers, 1024) / 1e6).collect();
        rates.sort_by(f64::total_cmp);
        let (median, best) = (rates[RUNS / 2], rates[RUNS - 1]);
        println!(
            "{producers} producers: median {median:.1}, best {best:.1} M commands/s of {RUNS} runs"
        );
        assert!(producers > 1 || best >= 5.0, "{best} M commands/s with one producer");
    }
}

/// p50, p90 and p99 of the time from before a push to after its pop, one command every `gap`.
fn latency(gap: Duration, waker: Waker, mut idle: impl FnMut(&mut Consumer)) -> [Duration; 3] {
    const COUNT: usize = 4_000;
    let (producer, mut consumer) = Ring::new(1024).unwrap().split(waker);
    let epoch = Instant::now();
    let nanos = move || epoch.elapsed().as_nanos() as u64;
    thread::scope(|scope| {
        scope.spawn(move || {
            let deadline = Deadline::after(Duration::from_secs(60));
            for _ in 0..COUNT {
                let until = nanos() + gap.as_nanos() as u64;
                while nanos() < until {
                    std::hint::spin_loop();
                }
                producer.push("speed", [nanos(); 7], deadline, || Ok(())).unwrap();
            }
        });
        let mut all = Vec::with_capacity(COUNT);
        while all.len() < COUNT {
            match consumer.pop() {
                Some(command) => all.push(nanos() - command[0]),
                None => idle(&mut consumer),
            }
        }
        all.sort_unstable();
        [50, 90, 99].map(|percent| Duration::from_nanos(all[COUNT * percent / 100]))
    })
}

/// Prints the median and the quietest of several runs; the latter's p50.
fn latencies(what: &str, gap: Duration, run: impl FnMut(usize) -> [Duration; 3]) -> Duration {
    let mut runs: Vec<_> = (0..RUNS).map(run).collect();
    runs.sort_by_key(|[.., p99]| *p99);
    for (which, [p50, p90, p99]) in [("median", runs[RUNS / 2]), ("quietest", runs[0])] {
        println!("{what}, one per {gap:?}, {which} run: p50 {p50:?}, p90 {p90:?}, p99 {p99:?}");
    }
    runs[0][0]
}

#[test]
#[ignore = "measures speed"]
fn latency_of_a_consumer_that_polls() {
    let gap = Duration::from_micros(5);
    let run = |_| latency(gap, Arc::new(|| {}), |_| std::hint::spin_loop());
    let p50 = latencies("polling consumer", gap, run);
    assert!(p50 < Duration::from_micros(2), "{p50:?} from push to pop");
}

#[test]
#[ignore = "measures speed"]
fn latency_of_a_consumer_that_sleeps() {
    let fd: Arc<OwnedFd> = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
    let ring = fd.clone();
    let waker: Waker = Arc::new(move || {
        rustix::io::write(&ring, &1_u64.to_ne_bytes()).unwrap();
    });
    let gap = Duration::from_micros(50);
    let run = |_| {
        latency(gap, waker.clone(), |consumer| {
            if consumer.prepare_sleep() {
                poll(&mut [PollFd::new(&fd, PollFlags::IN)], None).unwrap();
                let _ = rustix::io::read(&fd, &mut [0_u8; 8]);
                consumer.awake();
            }
        })
    };
    latencies("sleeping consumer", gap, run);
}
