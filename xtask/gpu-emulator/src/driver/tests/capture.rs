use super::*;

const THREAD_LOCAL: i32 = 1;

fn write(stream: Handle, at: usize, value: u32) {
    ok(cuStreamWriteValue32_v2(stream, at, value, 0));
}

fn begin(stream: Handle) {
    ok(cuStreamBeginCapture_v2(stream, THREAD_LOCAL));
}

fn end(stream: Handle) -> Result<Handle, Code> {
    let mut graph = 0;
    match cuStreamEndCapture(stream, Out::to(&mut graph)) {
        Code::SUCCESS => Ok(graph),
        code => {
            assert_eq!(graph, 0);
            Err(code)
        }
    }
}

/// Ends a capture: its graph, ready to launch, with so many nodes.
fn instantiate(stream: Handle, nodes: usize) -> Handle {
    let graph = end(stream).unwrap();
    assert_eq!(made::<usize>(|to| cuGraphGetNodes(graph, Out::null(), to)), nodes);
    let exec = made(|to| cuGraphInstantiateWithFlags(to, graph, 0));
    ok(cuGraphDestroy(graph));
    exec
}

fn fork(from: Handle, to: Handle) {
    let event = event();
    ok(cuEventRecord(event, from));
    ok(cuStreamWaitEvent(to, event, 0));
    ok(cuEventDestroy_v2(event));
}

#[test]
fn a_graph_does_what_was_captured_whenever_it_is_launched() {
    let _here = Here::new(0, 2);
    let (stream, at) = (stream(), words(2));
    begin(stream);
    write(stream, at, 5);
    ok(cuMemcpyAsync(at + 4, at, 4, stream));
    assert_eq!(made::<i32>(|to| cuStreamIsCapturing(stream, to)), 1);
    let exec = instantiate(stream, 2);
    assert_eq!(made::<i32>(|to| cuStreamIsCapturing(stream, to)), 0);
    assert_eq!(load(at), 0);
    for _ in 0..3 {
        store(at + 4, 0);
        ok(cuGraphLaunch(exec, stream));
        ok(cuStreamSynchronize(stream));
        assert_eq!((load(at), load(at + 4)), (5, 5));
    }
    ok(cuGraphLaunch(exec, stream));
    ok(cuGraphExecDestroy(exec));
    assert_eq!(cuGraphLaunch(exec, stream), Code::INVALID_HANDLE);
    ok(cuStreamSynchronize(stream));
}

#[test]
fn branches_of_a_graph_run_beside_each_other() {
    let _here = Here::new(0, 4);
    let (one, two, at) = (stream(), stream(), words(4));
    begin(one);
    write(one, at, 1);
    fork(one, two);
    // Each branch waits for the other.
    ok(cuStreamWaitValue32_v2(one, at + 4, 7, 1));
    write(two, at + 4, 7);
    write(one, at + 8, 7);
    ok(cuStreamWaitValue32_v2(two, at + 8, 7, 1));
    fork(two, one);
    write(one, at + 12, 3);
    let exec = instantiate(one, 6);
    for _ in 0..50 {
        (0..4).for_each(|i| store(at + 4 * i, 0));
        ok(cuGraphLaunch(exec, two));
        ok(cuStreamSynchronize(two));
        assert_eq!([0, 4, 8, 12].map(|i| load(at + i)), [1, 7, 7, 3]);
    }
}

#[test]
fn launches_of_one_graph_come_one_after_the_other() {
    let _here = Here::new(0, 4);
    let (one, two, at) = (stream(), stream(), words(1));
    begin(one);
    ok(cuStreamWaitValue32_v2(one, at, 1, 1));
    write(one, at, 0);
    let exec = instantiate(one, 2);
    ok(cuGraphLaunch(exec, one));
    ok(cuGraphLaunch(exec, two));
    store(at, 1);
    ok(cuStreamSynchronize(one));
    a_while();
    assert_eq!(cuStreamQuery(two), Code::NOT_READY);
    store(at, 1);
    ok(cuStreamSynchronize(two));
}

#[test]
fn a_branch_that_does_not_come_back_is_an_error() {
    let _here = Here::new(0, 4);
    let (one, two, at) = (stream(), stream(), words(1));
    begin(one);
    fork(one, two);
    write(two, at, 1);
    assert_eq!(end(two), Err(Code::CAPTURE_UNMATCHED));
    assert_eq!(end(one), Err(Code::CAPTURE_UNJOINED));
    assert_eq!(end(one), Err(Code::INVALID_VALUE));
    // Both streams are free again.
    write(two, at, 2);
    ok(cuStreamSynchronize(two));
    assert_eq!(load(at), 2);
}

#[test]
fn what_a_capture_forbids_invalidates_it() {
    let _here = Here::new(0, 4);
    let (one, two, at, before) = (stream(), stream(), words(1), event());
    ok(cuEventRecord(before, two));
    ok(cuStreamSynchronize(two));
    let mut address = 0;
    let wrongs: [(&dyn Fn() -> Code, Code); 5] = [
        (&|| cuStreamQuery(one), Code::CAPTURE_UNSUPPORTED),
        (&|| cuStreamSynchronize(two), Code::CAPTURE_UNSUPPORTED),
        (&|| cuEventQuery(before), Code::CAPTURE_UNSUPPORTED),
        (&|| cuStreamWaitEvent(one, before, 0), Code::CAPTURE_ISOLATION),
        (&|| cuMemFree_v2(0), Code::CAPTURE_UNSUPPORTED),
    ];
    for (i, (wrong, code)) in wrongs.into_iter().enumerate() {
        begin(one);
        write(one, at, 1);
        assert_eq!(wrong(), code, "{i}");
        assert_eq!(made::<i32>(|to| cuStreamIsCapturing(one, to)), 2);
        assert_eq!(cuStreamWriteValue32_v2(one, at, 1, 0), Code::CAPTURE_INVALIDATED);
        assert_eq!(end(one), Err(Code::CAPTURE_INVALIDATED), "{i}");
    }
    // Whoever says that it knows what it does may ask.
    begin(one);
    let mut mode = 2;
    ok(cuThreadExchangeStreamCaptureMode(Out::to(&mut mode)));
    ok(cuEventQuery(before));
    ok(cuMemAlloc_v2(Out::to(&mut address), 64));
    ok(cuThreadExchangeStreamCaptureMode(Out::to(&mut mode)));
    assert_eq!(mode, 2);
    assert!(end(one).is_ok());
    // Other threads are no business of a capture of this thread.
    begin(one);
    std::thread::scope(|scope| scope.spawn(|| ok(cuEventQuery(before))).join().unwrap());
    assert!(end(one).is_ok());
}

#[test]
fn events_of_a_capture_are_for_it_alone() {
    let _here = Here::new(0, 4);
    let (one, two, inside) = (stream(), stream(), event());
    begin(one);
    ok(cuEventRecord(inside, one));
    assert_eq!(cuEventQuery(inside), Code::CAPTURE_UNSUPPORTED);
    assert_eq!(end(one), Err(Code::CAPTURE_INVALIDATED));
    assert_eq!(cuEventQuery(inside), Code::CAPTURED_EVENT);
    assert_eq!(cuStreamWaitEvent(two, inside, 0), Code::CAPTURED_EVENT);
    ok(cuEventRecord(inside, two));
    ok(cuEventSynchronize(inside));
}

#[test]
fn captures_end_in_the_thread_that_began_them_and_never_merge() {
    let _here = Here::new(0, 4);
    let (one, two, of_two) = (stream(), stream(), event());
    begin(one);
    let here = context::top().unwrap().handle;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            ok(cuCtxPushCurrent_v2(here));
            assert_eq!(end(one), Err(Code::CAPTURE_WRONG_THREAD));
        });
        other.join().unwrap();
    });
    assert_eq!(cuStreamBeginCapture_v2(0, THREAD_LOCAL), Code::CAPTURE_UNSUPPORTED);
    assert_eq!(cuStreamBeginCapture_v2(one, THREAD_LOCAL), Code::INVALID_VALUE);
    begin(two);
    ok(cuEventRecord(of_two, two));
    assert_eq!(cuStreamWaitEvent(one, of_two, 0), Code::CAPTURE_MERGE);
    assert_eq!(end(one), Err(Code::CAPTURE_INVALIDATED));
    assert_eq!(end(two), Err(Code::CAPTURE_INVALIDATED));
}
