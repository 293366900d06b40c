#![allow(non_snake_case, reason = "names of cuda.h")]

use super::functions;
use crate::driver::arg::Out;
use crate::driver::code::{Code, Result};
use crate::driver::config::config;
use crate::driver::memory::{self, Place, Range};
use crate::driver::table::Handle;
use crate::driver::work::Work;
use crate::driver::{capture, context, stream};

/// `CU_MEMHOSTALLOC_` and `CU_MEMHOSTREGISTER_` flags: portable, mapped; write-combined, I/O, read-only.
const HOST_FLAGS: u32 = 0xf;
/// `CUmemorytype`.
const TYPE_HOST: u32 = 1;
const TYPE_DEVICE: u32 = 2;

fn is_device(place: Place) -> bool {
    matches!(place, Place::Device(_))
}

fn attribute(to: &Out<u64>, which: i32, range: &Range) -> Result<()> {
    let device = match range.place {
        Place::Device(device) | Place::Mapped(device) => Some(device),
        Place::Pinned | Place::Registered => None,
    };
    match which {
        1 => to.set(range.context as u64),
        2 => to.narrow().set(if device.is_some() { TYPE_DEVICE } else { TYPE_HOST }),
        8 => to.byte().set(0),
        9 => match device {
            Some(device) => to.narrow().set(device as u32),
            None => to.narrow().set(context::get(range.context)?.device() as u32),
        },
        11 => to.set(range.start as u64),
        12 => to.set(range.bytes as u64),
        13 => to.byte().set(1),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Copies in the order of a stream.
fn copy(to: usize, from: usize, bytes: usize, stream: Handle) -> Result<()> {
    context::current()?;
    memory::check(to, bytes)?;
    memory::check(from, bytes)?;
    let stream = stream::get(stream)?;
    if bytes == 0 { Ok(()) } else { stream.submit(Work::Copy { to, from, bytes }) }
}

functions! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let info = memory::info(context::current()?.device())?;
        free.set(info.0)?;
        total.set(info.1)
    }

    fn cuMemAlloc_v2(at: Out<usize>, bytes: usize) {
        let current = context::current()?;
        capture::unsafe_call()?;
        context::settle_device(current.device(), "cuMemAlloc_v2");
        at.set(memory::allocate(Place::Device(current.device()), bytes, current.owner())?)
    }

    /// Waits for all that runs on the device, as its memory may be what that uses.
    fn cuMemFree_v2(at: usize) {
        let current = context::current()?;
        capture::unsafe_call()?;
        if at == 0 {
            return Ok(());
        }
        let range = memory::range_of(at).ok_or(Code::INVALID_VALUE)?;
        match range.place {
            Place::Device(device) => context::settle_device(device, "cuMemFree_v2"),
            _ => return Err(Code::INVALID_VALUE),
        }
        memory::free(at, is_device)?;
        current.core.check()
    }

    fn cuMemHostAlloc(at: Out<usize>, bytes: usize, flags: u32) {
        let current = context::current()?;
        capture::unsafe_call()?;
        if flags & !HOST_FLAGS != 0 {
            return Err(Code::INVALID_VALUE);
        }
        context::settle_device(current.device(), "cuMemHostAlloc");
        at.set(memory::allocate(Place::Pinned, bytes, current.owner())?)
    }

    fn cuMemFreeHost(at: usize) {
        context::current()?;
        capture::unsafe_call()?;
        context::settle_all("cuMemFreeHost");
        memory::free(at, |place| place == Place::Pinned)
    }

    fn cuMemHostRegister_v2(start: usize, bytes: usize, flags: u32) {
        let current = context::current()?;
        config()?.needs("hostregister")?;
        capture::unsafe_call()?;
        if start == 0 || bytes == 0 || flags & !HOST_FLAGS != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if !memory::ranges_in(start, bytes).is_empty() {
            return Err(Code::ALREADY_REGISTERED);
        }
        let (place, context) = (Place::Registered, current.owner());
        memory::insert(Range { start, bytes, place, context, access: u32::MAX });
        Ok(())
    }

    fn cuMemHostUnregister(start: usize) {
        context::current()?;
        capture::unsafe_call()?;
        context::settle_all("cuMemHostUnregister");
        let removed = memory::remove(start, |place| place == Place::Registered);
        removed.map(drop).map_err(|_| Code::NOT_REGISTERED)
    }

    fn cuMemHostGetDevicePointer_v2(device: Out<usize>, host: usize, flags: u32) {
        context::current()?;
        let range = memory::range_of(host).filter(|_| flags == 0).ok_or(Code::INVALID_VALUE)?;
        match range.place {
            Place::Pinned | Place::Registered => device.set(host),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    fn cuPointerGetAttribute(to: Out<u64>, which: i32, address: usize) {
        config()?;
        attribute(&to, which, &memory::range_of(address).ok_or(Code::INVALID_VALUE)?)
    }

    fn cuMemcpyAsync(to: usize, from: usize, bytes: usize, stream: Handle) {
        copy(to, from, bytes, stream)
    }

    fn cuMemcpyHtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: Handle) {
        copy(to, from, bytes, stream)
    }

    fn cuMemcpyDtoHAsync_v2(to: usize, from: usize, bytes: usize, stream: Handle) {
        copy(to, from, bytes, stream)
    }

    fn cuMemcpyDtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: Handle) {
        copy(to, from, bytes, stream)
    }

    fn cuMemcpyPeerAsync(
        to: usize,
        there: Handle,
        from: usize,
        here: Handle,
        bytes: usize,
        stream: Handle,
    ) {
        context::get(there)?;
        context::get(here)?;
        copy(to, from, bytes, stream)
    }

    fn cuMemsetD8Async(to: usize, value: u8, bytes: usize, stream: Handle) {
        context::current()?;
        // Memory that the driver does not know is no place for a fill.
        memory::check(to, bytes)?.ok_or(Code::INVALID_VALUE)?;
        let stream = stream::get(stream)?;
        if bytes == 0 { Ok(()) } else { stream.submit(Work::Set { to, value, bytes }) }
    }
}
