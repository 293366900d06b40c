//! Streams that share hardware queues: with one order on all ranks every operation ends, whatever
//! shares what; without it they can stop for good.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use ep_runtime::sched::SubmitOrder;
use proptest::prelude::*;

/// What a rank submits to a stream of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    /// Raises this operation's flag at all peers.
    Signal(usize),
    /// Waits for this operation's flags of all peers.
    Await(usize),
}

/// Ranks with a few hardware queues each, in which entries run strictly in order.
struct Devices {
    queues: Vec<Vec<VecDeque<Entry>>>,
    /// By rank and operation.
    raised: Vec<Vec<bool>>,
}

impl Devices {
    fn new(ranks: usize, connections: usize, operations: usize) -> Self {
        Self {
            queues: vec![vec![VecDeque::new(); connections]; ranks],
            raised: vec![vec![false; operations]; ranks],
        }
    }

    /// An operation as a whole, on a stream.
    fn submit(&mut self, rank: usize, stream: usize, operation: usize) {
        let connections = self.queues[rank].len();
        let queue = &mut self.queues[rank][stream % connections];
        queue.extend([Entry::Signal(operation), Entry::Await(operation)]);
    }

    /// Runs until nothing moves; whether all is done.
    fn run(&mut self) -> bool {
        loop {
            let mut moved = false;
            for rank in 0..self.queues.len() {
                for queue in 0..self.queues[rank].len() {
                    while let Some(&entry) = self.queues[rank][queue].front() {
                        match entry {
                            Entry::Signal(op) => self.raised[rank][op] = true,
                            Entry::Await(op) if self.raised.iter().all(|r| r[op]) => {}
                            Entry::Await(_) => break,
                        }
                        self.queues[rank][queue].pop_front();
                        moved = true;
                    }
                }
            }
            if !moved {
                return self.queues.iter().flatten().all(VecDeque::is_empty);
            }
        }
    }
}

#[test]
fn opposite_orders_on_one_queue_stop_for_good() {
    let mut devices = Devices::new(2, 1, 2);
    for (rank, order) in [[0, 1], [1, 0]].into_iter().enumerate() {
        order.into_iter().for_each(|op| devices.submit(rank, op, op));
    }
    assert!(!devices.run());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn one_order_ends_whatever_streams_share(
        ranks in 2usize..5,
        connections in 1usize..4,
        streams in prop::collection::vec(prop::collection::vec(0usize..6, 4), 1..12),
    ) {
        // Every rank spreads the same operations over streams of its own, in the same order.
        let mut devices = Devices::new(ranks, connections, streams.len());
        for rank in 0..ranks {
            for (op, stream) in streams.iter().enumerate() {
                devices.submit(rank, stream[rank], op);
            }
        }
        prop_assert!(devices.run());
    }

    /// Threads race to submit, each its own operations; tickets were taken in one order.
    #[test]
    fn tickets_make_racing_threads_submit_in_one_order(
        threads in 1usize..4,
        rounds in 1usize..5,
        connections in 1usize..3,
        late in prop::collection::vec(0usize..8, 2),
    ) {
        let operations = threads * rounds;
        let devices = Mutex::new(Devices::new(2, connections, operations));
        std::thread::scope(|scope| {
            for (rank, &late) in late.iter().enumerate() {
                let order = SubmitOrder::new();
                let mut tickets: Vec<Vec<_>> = (0..threads).map(|_| Vec::new()).collect();
                for op in 0..operations {
                    tickets[op % threads].push((op, order.ticket()));
                }
                for (thread, tickets) in tickets.into_iter().enumerate() {
                    let devices = &devices;
                    scope.spawn(move || {
                        for (op, ticket) in tickets {
                            // Threads are late by different amounts on the two ranks.
                            for _ in 0..(op * 7 + late) % 5 {
                                std::thread::yield_now();
                            }
                            let _turn = ticket.wait(Duration::from_secs(30)).expect("its turn");
                            devices.lock().unwrap().submit(rank, thread, op);
                        }
                    });
                }
            }
        });
        prop_assert!(devices.into_inner().unwrap().run());
    }
}

#[test]
fn a_thread_that_does_not_submit_is_an_error_of_those_behind_it_in_time() {
    let order = SubmitOrder::new();
    let [first, second] = [order.ticket(), order.ticket()];
    let error = second.wait(Duration::from_millis(20)).unwrap_err();
    assert!(error.to_string().contains("1 operations ahead"), "{error}");
    assert_eq!(order.pending(), 1);
    drop(first.wait(Duration::ZERO).expect("no need to wait"));
    assert_eq!(order.pending(), 0);
}

#[test]
fn a_thread_that_panics_in_its_turn_leaves_it() {
    let order = SubmitOrder::new();
    let [first, second] = [order.ticket(), order.ticket()];
    let panicked = std::thread::spawn(move || {
        let _turn = first.wait(Duration::from_secs(30)).expect("its turn");
        panic!("in its turn");
    });
    assert!(panicked.join().is_err());
    drop(second.wait(Duration::from_secs(30)).expect("the panic left the turn"));
}
