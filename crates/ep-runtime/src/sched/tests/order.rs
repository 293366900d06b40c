//! Every interleaving of a few threads: no wake-up is lost, no turn out of order, no place leaks.

use std::time::Duration;

use loom::sync::Arc;
use loom::sync::Mutex;
use loom::thread;

use crate::sched::order::{SubmitOrder, Ticket};

const LONG: Duration = Duration::from_secs(3600);

/// Redeems a ticket and notes that it was served.
fn submit(ticket: Ticket, number: u32, served: &Mutex<Vec<u32>>) {
    let turn = ticket.wait(LONG).expect("in time");
    served.lock().expect("not poisoned").push(number);
    drop(turn);
}

#[test]
fn turns_come_in_the_order_of_tickets() {
    // Three threads have more interleavings than a test has time for: all with two preemptions.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let order = SubmitOrder::new();
        let served = Arc::new(Mutex::new(Vec::new()));
        let [first, rest @ ..]: [Ticket; 3] = std::array::from_fn(|_| order.ticket());
        let mut number = 0;
        let threads = rest.map(|ticket| {
            number += 1;
            let (served, number) = (served.clone(), number);
            thread::spawn(move || submit(ticket, number, &served))
        });
        // Both may be waiting by now, and whichever is woken first may not be the one whose turn it is.
        submit(first, 0, &served);
        threads.into_iter().for_each(|t| t.join().expect("no panic"));
        assert_eq!(*served.lock().unwrap(), [0, 1, 2]);
        assert_eq!(order.pending(), 0);
    });
}

#[test]
fn a_dropped_ticket_holds_up_nobody() {
    loom::model(|| {
        let order = SubmitOrder::new();
        let served = Arc::new(Mutex::new(Vec::new()));
        let [first, second, third] = std::array::from_fn(|_| order.ticket());
        let waiting = {
            let served = served.clone();
            thread::spawn(move || submit(third, 3, &served))
        };
        let dropping = thread::spawn(move || drop(second));
        submit(first, 1, &served);
        dropping.join().expect("no panic");
        waiting.join().expect("no panic");
        assert_eq!(*served.lock().unwrap(), [1, 3]);
        assert_eq!(order.pending(), 0);
    });
}

#[test]
fn a_turn_excludes_all_others_until_it_is_dropped() {
    loom::model(|| {
        let order = SubmitOrder::new();
        let busy = Arc::new(loom::cell::UnsafeCell::new(0u32));
        let tickets: [Ticket; 2] = std::array::from_fn(|_| order.ticket());
        let threads = tickets.map(|ticket| {
            let busy = busy.clone();
            thread::spawn(move || {
                let turn = ticket.wait(LONG).expect("in time");
                // loom reports any access that another does not happen before.
                // SAFETY: loom's cell checks it.
                busy.with_mut(|value| unsafe { *value += 1 });
                drop(turn);
            })
        });
        threads.into_iter().for_each(|t| t.join().expect("no panic"));
        // SAFETY: loom's cell checks it.
        assert_eq!(busy.with(|value| unsafe { *value }), 2);
    });
}

#[test]
fn a_place_that_waits_too_long_is_given_up() {
    loom::model(|| {
        let order = SubmitOrder::new();
        let [first, second, third] = std::array::from_fn(|_| order.ticket());
        let error = second.wait(Duration::ZERO).expect_err("the first has not had its turn");
        assert!(matches!(error, crate::EpError::OutOfTurn { ahead: 1, .. }), "{error}");
        assert!(error.group_usable());
        drop(first.wait(LONG).expect("its turn"));
        drop(third.wait(LONG).expect("the second was given up"));
        assert_eq!(order.pending(), 0);
    });
}
