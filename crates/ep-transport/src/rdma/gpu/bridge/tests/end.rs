//! How a bridge ends.

use super::*;

/// What streams have come to is done before a bridge ends, though it was not looked at before.
#[test]
fn what_has_come_is_done_before_the_end() {
    let (told, works, _) = works();
    let marks = Marks::default();
    let bridge = Bridge::start(works, "test".into(), Duration::from_secs(20)).unwrap();
    order(&bridge.works, &marks, 7, signal(1));
    order(&bridge.works, &marks, 7, put(1));
    let late = {
        let told = told.clone();
        let (lane, mark) = marks.lock().pop_front().unwrap();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            told.bells[lane].store(mark, SeqCst);
        })
    };
    drop(bridge);
    late.join().unwrap();
    // A put that nothing follows is not waited for.
    assert_eq!(*told.did.lock(), [Did::Signal(2, 1)]);
}

/// A stream comes to an order, and the bridge is told to end, right after the bridge has looked there: it
/// looks again.
#[test]
fn what_comes_between_the_last_look_and_the_end_is_done() {
    let (told, works, _) = works();
    let (works, marks) = (Arc::new(works), Arc::<Marks>::default());
    let come = |told: &Told, (lane, mark): (usize, u32)| told.bells[lane].store(mark, SeqCst);
    order(&works, &marks, 7, signal(1));
    come(&told, marks.lock().pop_front().unwrap());
    while works.pass().unwrap().moved {}
    // Looked at after the lane of stream 7, and nothing to wait for.
    order(&works, &marks, 8, put(1));
    let (late, of_hook, of_marks) = (works.clone(), told.clone(), marks.clone());
    *told.meanwhile.lock() = Some(Box::new(move || {
        order(&late, &of_marks, 7, signal(2));
        come(&of_hook, of_marks.lock().pop_front().unwrap());
        late.stop(Duration::from_secs(20));
    }));
    works.run();
    assert!(told.meanwhile.lock().is_none());
    assert_eq!(*told.did.lock(), [Did::Signal(2, 1), Did::Signal(2, 2)]);
}

/// Calls of the driver may not come back: whoever drops the bridge does.
#[test]
fn a_bridge_that_does_not_end_is_left_behind_with_what_it_uses() {
    let (told, works, inbox) = works();
    let bridge = Bridge::start(works, "test".into(), Duration::from_millis(50)).unwrap();
    let patience = || Deadline::after(Duration::from_secs(20));
    let until = |what: &dyn Fn() -> bool| {
        let deadline = patience();
        while !what() && !deadline.expired() {
            std::thread::sleep(Duration::from_millis(1));
        }
        what()
    };
    told.answered.store(true, SeqCst);
    let stuck = told.stuck.lock();
    inbox.came(1, 1);
    assert!(until(&|| told.did.lock().contains(&Did::See)));
    let dropped = std::thread::spawn(move || drop(bridge));
    let over = until(&|| dropped.is_finished());
    let (uses, errors) = (Arc::strong_count(&told), told.errors.lock().clone());
    drop(stuck);
    assert!(over, "it waits for the call");
    assert_eq!(uses, 2, "the thread has what it uses");
    let [TransportError::Timeout { op: "flush", hint, .. }] = &errors[..] else {
        panic!("{errors:?}")
    };
    assert!(hint.contains("driver"), "{hint}");
    // Once the call has come back everything is given up, and what had come is there.
    assert!(until(&|| Arc::strong_count(&told) == 1));
    assert_eq!(*told.did.lock(), [Did::See, Did::Raise(1, 1)]);
}

/// A stream that waits for its sources when the time of a bridge is over is let go, and all hear of it.
#[test]
fn who_waits_at_the_end_is_let_go() {
    let (told, works, _) = works();
    let marks = Marks::default();
    order(&works, &marks, 7, put(LARGE));
    order(&works, &marks, 7, Step::Flush(Duration::from_secs(1000)));
    for (lane, mark) in marks.lock().drain(..) {
        told.bells[lane].store(mark, SeqCst);
    }
    let bridge = Bridge::start(works, "test".into(), Duration::from_millis(50)).unwrap();
    drop(bridge);
    assert_eq!(told.did.lock().last(), Some(&Did::LetGo(0)));
    assert_eq!(told.errors.lock().len(), 1);
}

/// No peer is to blame where all have answered.
#[test]
fn who_is_late_is_a_peer_or_the_bridge() {
    let (told, works, _) = works();
    let e = works.unanswered(Duration::from_secs(1));
    assert_eq!(e.peer(), Some(1), "{e}");
    told.answered.store(true, SeqCst);
    let e = works.unanswered(Duration::from_secs(1));
    assert_eq!(e.peer(), None, "{e}");
    assert!(
        e.to_string().contains("flush: no answer within 1s: ") && e.to_string().contains("driver")
    );
}
