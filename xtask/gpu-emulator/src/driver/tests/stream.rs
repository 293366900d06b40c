use super::*;

/// A wait for a word to be 1.
fn await_one(stream: Handle, at: usize) {
    ok(cuStreamWaitValue32_v2(stream, at, 1, 1));
}

fn write(stream: Handle, at: usize, value: u32) {
    ok(cuStreamWriteValue32_v2(stream, at, value, 0));
}

#[test]
fn a_stream_is_in_order_and_streams_with_queues_of_their_own_are_not() {
    let _here = Here::new(0, 2);
    let (one, two, at) = (stream(), stream(), words(3));
    await_one(one, at);
    write(one, at + 4, 5);
    write(two, at + 8, 6);
    ok(cuStreamSynchronize(two));
    assert_eq!((load(at + 4), load(at + 8)), (0, 6));
    assert_eq!(cuStreamQuery(one), Code::NOT_READY);
    store(at, 1);
    ok(cuStreamSynchronize(one));
    assert_eq!(load(at + 4), 5);
    ok(cuStreamQuery(one));
}

#[test]
fn streams_that_share_a_queue_wait_for_each_other() {
    let _here = Here::new(0, 2);
    let (one, _two, three, at) = (stream(), stream(), stream(), words(2));
    await_one(one, at);
    write(three, at + 4, 5);
    a_while();
    assert_eq!((cuStreamQuery(three), load(at + 4)), (Code::NOT_READY, 0));
    store(at, 1);
    ok(cuStreamSynchronize(three));
    assert_eq!(load(at + 4), 5);
}

#[test]
fn events_order_streams_and_measure_time() {
    let _here = Here::new(0, 4);
    let (one, two, at) = (stream(), stream(), words(2));
    let (first, second) = (event(), event());
    ok(cuEventQuery(first));
    ok(cuEventRecord(first, one));
    soon("the first event", || cuEventQuery(first) == Code::SUCCESS);
    await_one(one, at);
    ok(cuEventRecord(second, one));
    ok(cuStreamWaitEvent(two, second, 0));
    write(two, at + 4, 5);
    a_while();
    assert_eq!((cuEventQuery(second), load(at + 4)), (Code::NOT_READY, 0));
    store(at, 1);
    ok(cuStreamSynchronize(two));
    assert_eq!(load(at + 4), 5);
    let millis: f32 = made(|to| cuEventElapsedTime(to, first, second));
    assert!(millis >= 30.0, "{millis}");
    // The event may go while something waits for it.
    store(at, 0);
    await_one(one, at);
    ok(cuEventRecord(second, one));
    ok(cuStreamWaitEvent(two, second, 0));
    ok(cuEventDestroy_v2(second));
    write(two, at + 4, 6);
    store(at, 1);
    ok(cuStreamSynchronize(two));
    assert_eq!((load(at + 4), cuEventQuery(second)), (6, Code::INVALID_HANDLE));
}

#[test]
fn a_stream_may_go_before_its_work_is_done() {
    let _here = Here::new(0, 1);
    let (stream, at) = (stream(), words(2));
    await_one(stream, at);
    write(stream, at + 4, 5);
    ok(cuStreamDestroy_v2(stream));
    assert_eq!(cuStreamQuery(stream), Code::INVALID_HANDLE);
    store(at, 1);
    soon("the write", || load(at + 4) == 5);
}

#[test]
fn the_end_of_a_process_waits_for_what_ends_and_not_for_what_waits() {
    let _here = Here::new(0, 2);
    let (one, two, at) = (stream(), stream(), words(100));
    await_one(one, at);
    (1..100).for_each(|i| write(two, at + 4 * i, 7));
    let start = Instant::now();
    context::drain(Duration::from_millis(200));
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!(cuStreamQuery(one), Code::NOT_READY);
    soon("the writes", || load(at + 4 * 99) == 7);
    store(at, 1);
    context::drain(Duration::from_secs(20));
    ok(cuStreamQuery(one));
}

#[test]
fn freeing_waits_for_what_runs() {
    let _here = Here::new(0, 1);
    let (stream, at) = (stream(), words(2));
    let memory: usize = made(|to| cuMemAlloc_v2(to, 4096));
    await_one(stream, at);
    ok(cuMemsetD8Async(memory, 3, 4096, stream));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            a_while();
            store(at, 1);
        });
        ok(cuMemFree_v2(memory));
        assert_eq!(load(at), 1);
        ok(cuStreamQuery(stream));
    });
}

#[test]
fn batches_write_await_and_are_checked() {
    let _here = Here::new(0, 1);
    let (stream, at) = (stream(), words(8));
    let (a, flag) = (at as u64, at as u64 + 8);
    let ops = [
        [2, a, 9, 0, 0, 0],
        [1, flag, 1, 1, 0, 0],
        [5, flag, 0, 0, 0, 0],
        [2, a + 4, 0x1_0000_0007, 0, 0, 0],
    ];
    store(at + 12, 4);
    ok(cuStreamBatchMemOp_v2(stream, 4, In::from(&ops), 0));
    soon("the first write", || load(at) == 9);
    assert_eq!(load(at + 4), 0);
    store(at + 8, 1);
    ok(cuStreamSynchronize(stream));
    assert_eq!([0, 4, 8, 12].map(|i| load(at + i)), [9, 7, 0, 0]);
    let batch = |op| cuStreamBatchMemOp_v2(stream, 1, In::from(&[op]), 0);
    assert_eq!(batch([3, a, 0, 0, 0, 0]), Code::NOT_SUPPORTED);
    assert_eq!(batch([2, a + 2, 0, 0, 0, 0]), Code::INVALID_VALUE);
    assert_eq!(batch([2, 0x1000, 0, 0, 0, 0]), Code::INVALID_VALUE);
    assert_eq!(batch([1, a, 0, 4, 0, 0]), Code::INVALID_VALUE);
    assert_eq!(cuStreamBatchMemOp_v2(stream, 257, In::null(), 0), Code::INVALID_VALUE);
}

#[test]
fn waits_compare_as_cuda_says() {
    use crate::driver::work::Until;
    let cases = [
        (0, 5, 5, true),
        (0, 4, 5, false),
        // Cyclic: a count that has wrapped is later.
        (0, 3, u32::MAX, true),
        (0, u32::MAX, 3, false),
        (1, 5, 5, true),
        (1, 6, 5, false),
        (2, 6, 1, false),
        (2, 6, 2, true),
        (3, 0xffff_fff0, 0xf, false),
        (3, 0xffff_fff0, 0x7, true),
    ];
    for (flags, seen, value, want) in cases {
        let until = Until::new(flags).unwrap();
        assert_eq!(until.holds(seen.into(), value.into(), 32), want, "{until:?} {seen} {value}");
    }
    assert!(Until::AtLeast.holds(1 << 40, 1 << 39, 64));
}

#[test]
fn the_legacy_stream_and_blocking_ones_wait_for_each_other() {
    let _here = Here::new(0, 8);
    let (at, blocking) = (words(3), made(|to| cuStreamCreate(to, 0)));
    await_one(blocking, at);
    write(0, at + 4, 5);
    a_while();
    assert_eq!(load(at + 4), 0);
    store(at, 1);
    ok(cuStreamSynchronize(0));
    assert_eq!(load(at + 4), 5);
    store(at, 0);
    await_one(0, at);
    write(blocking, at + 8, 6);
    a_while();
    assert_eq!(load(at + 8), 0);
    store(at, 1);
    ok(cuStreamSynchronize(blocking));
    assert_eq!(load(at + 8), 6);
}
