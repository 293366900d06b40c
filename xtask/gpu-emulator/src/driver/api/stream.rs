#![allow(non_snake_case, reason = "names of cuda.h")]

use super::functions;
use crate::driver::arg::{In, Out};
use crate::driver::capture::{self, Mode};
use crate::driver::code::{Code, Result};
use crate::driver::config::config;
use crate::driver::table::Handle;
use crate::driver::work::{Until, WordOp, Work};
use crate::driver::{context, event, graph, green, memory, stream};

/// `CUstreamBatchMemOpParams`: six words, of which the last says nothing.
type BatchOp = [u64; 6];
/// The most operations of a batch.
const BATCH: u32 = 256;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// Whoever asks in a loop leaves the processor to those that it waits for.
fn ready(ready: bool) -> Result<()> {
    if ready {
        return Ok(());
    }
    std::thread::yield_now();
    Err(Code::NOT_READY)
}

/// Whether such words exist here, and where they are.
fn check(op: &WordOp) -> Result<()> {
    config()?.needs("memops")?;
    let (at, bytes) = op.word();
    if bytes == 8 {
        config()?.needs("memops64")?;
    }
    if !at.is_multiple_of(bytes) {
        return Err(Code::INVALID_VALUE);
    }
    memory::check(at, bytes)?.ok_or(Code::INVALID_VALUE)?;
    Ok(())
}

fn submit(stream: Handle, op: WordOp) -> Result<()> {
    context::current()?;
    check(&op)?;
    stream::get(stream)?.submit(Work::Words(vec![op]))
}

fn write(flags: u32, op: WordOp) -> Result<WordOp> {
    // Without a barrier before it (flag 1) a write may come earlier. It does not here.
    if flags & !1 == 0 { Ok(op) } else { Err(Code::INVALID_VALUE) }
}

fn decode(op: BatchOp) -> Result<WordOp> {
    let [kind, at, value, flags, ..] = op;
    let (at, narrow, flags) = (at as usize, value as u32, flags as u32);
    match kind as u32 {
        1 => Ok(WordOp::Wait { at, value: narrow, until: Until::new(flags)? }),
        2 => write(flags, WordOp::Write { at, value: narrow }),
        4 => Ok(WordOp::Wait64 { at, value, until: Until::new(flags)? }),
        5 => write(flags, WordOp::Write64 { at, value }),
        _ => Err(Code::NOT_SUPPORTED),
    }
}

functions! {
    fn cuStreamCreate(stream: Out<Handle>, flags: u32) {
        stream.set(stream::create(context::current()?, flags)?)
    }

    fn cuStreamCreateWithPriority(stream: Out<Handle>, flags: u32, _priority: i32) {
        stream.set(stream::create(context::current()?, flags)?)
    }

    fn cuGreenCtxStreamCreate(stream: Out<Handle>, green: Handle, flags: u32, _priority: i32) {
        if flags != NON_BLOCKING {
            return Err(Code::INVALID_VALUE);
        }
        stream.set(stream::create(green::get(green)?.context.clone(), flags)?)
    }

    fn cuStreamDestroy_v2(stream: Handle) {
        stream::destroy(stream)
    }

    fn cuStreamQuery(stream: Handle) {
        ready(stream::get(stream)?.is_idle()?)
    }

    fn cuStreamSynchronize(stream: Handle) {
        stream::get(stream)?.wait()
    }

    fn cuStreamGetCtx(stream: Handle, context: Out<Handle>) {
        context.set(stream::get(stream)?.context.handle)
    }

    /// Of a green context's stream the primary context.
    fn cuStreamGetCtx_v2(stream: Handle, context: Out<Handle>, green: Out<Handle>) {
        let stream = stream::get(stream)?;
        green.set(stream.context.green.unwrap_or(0))?;
        context.set(stream.context.owner())
    }

    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: u32) {
        context::current()?;
        event::get(event)?.order(&stream::get(stream)?, flags)
    }

    fn cuStreamWriteValue32_v2(stream: Handle, at: usize, value: u32, flags: u32) {
        submit(stream, write(flags, WordOp::Write { at, value })?)
    }

    fn cuStreamWriteValue64_v2(stream: Handle, at: usize, value: u64, flags: u32) {
        submit(stream, write(flags, WordOp::Write64 { at, value })?)
    }

    fn cuStreamWaitValue32_v2(stream: Handle, at: usize, value: u32, flags: u32) {
        submit(stream, WordOp::Wait { at, value, until: Until::new(flags)? })
    }

    fn cuStreamBatchMemOp_v2(stream: Handle, count: u32, ops: In<BatchOp>, flags: u32) {
        context::current()?;
        if count > BATCH || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let all = (0..count as usize).map(|i| decode(ops.at(i)?)).collect::<Result<Vec<_>>>()?;
        all.iter().try_for_each(check)?;
        stream::get(stream)?.submit(Work::Words(all))
    }

    fn cuEventCreate(event: Out<Handle>, flags: u32) {
        event.set(event::create(flags)?)
    }

    fn cuEventDestroy_v2(event: Handle) {
        event::destroy(event)
    }

    fn cuEventRecord(event: Handle, stream: Handle) {
        context::current()?;
        event::get(event)?.record(&*stream::get(stream)?)
    }

    fn cuEventQuery(event: Handle) {
        ready(event::get(event)?.is_done()?)
    }

    fn cuEventSynchronize(event: Handle) {
        event::get(event)?.wait()
    }

    fn cuEventElapsedTime(millis: Out<f32>, start: Handle, end: Handle) {
        millis.set(event::get(end)?.since(&*event::get(start)?)?)
    }

    fn cuEventElapsedTime_v2(millis: Out<f32>, start: Handle, end: Handle) {
        millis.set(event::get(end)?.since(&*event::get(start)?)?)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Out<i32>) {
        let before = capture::exchange(Mode::new(mode.get()?)?);
        mode.set(before as i32)
    }

    fn cuStreamBeginCapture_v2(stream: Handle, mode: i32) {
        context::current()?;
        // The legacy stream cannot be captured.
        if stream <= 1 {
            return Err(Code::CAPTURE_UNSUPPORTED);
        }
        capture::begin(&stream::get(stream)?, Mode::new(mode)?)
    }

    fn cuStreamEndCapture(stream: Handle, graph: Out<Handle>) {
        context::current()?;
        graph.set(0)?;
        graph.set(capture::end(&stream::get(stream)?)?)
    }

    fn cuStreamIsCapturing(stream: Handle, status: Out<i32>) {
        status.set(capture::status(&*stream::get(stream)?).0 as i32)
    }

    fn cuGraphGetNodes(graph: Handle, nodes: Out<Handle>, count: Out<usize>) {
        if !nodes.is_null() {
            return Err(Code::NOT_SUPPORTED);
        }
        count.set(graph::nodes(graph)?)
    }

    fn cuGraphInstantiateWithFlags(exec: Out<Handle>, graph: Handle, flags: u64) {
        if flags != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        exec.set(graph::instantiate(graph)?)
    }

    fn cuGraphLaunch(exec: Handle, stream: Handle) {
        context::current()?;
        graph::launch(exec, &*stream::get(stream)?)
    }

    fn cuGraphDestroy(graph: Handle) {
        graph::destroy(graph)
    }

    fn cuGraphExecDestroy(exec: Handle) {
        graph::destroy_exec(exec)
    }
}
