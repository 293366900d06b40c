#![allow(non_snake_case, reason = "names of cuda.h")]

use std::ffi::{CStr, c_char};

use super::functions;
use crate::driver::arg::{In, Out};
use crate::driver::code::{Code, Result};
use crate::driver::config::{self, config};
use crate::driver::green::Resource;
use crate::driver::stream::PRIORITIES;
use crate::driver::table::Handle;
use crate::driver::{capture, context, device, green};

/// CUDA 13.0.
const VERSION: i32 = 13_000;

fn text(to: &Out<*const c_char>, text: Option<&'static CStr>) -> Result<()> {
    to.set(text.map_or(std::ptr::null(), CStr::as_ptr))?;
    if text.is_some() { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

functions! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        config::init();
        context::drain_at_exit();
        if config()?.devices == 0 { Err(Code::NO_DEVICE) } else { Ok(()) }
    }

    fn cuDriverGetVersion(version: Out<i32>) {
        version.set(VERSION)
    }

    fn cuGetErrorName(code: Code, name: Out<*const c_char>) {
        text(&name, code.name())
    }

    fn cuGetErrorString(code: Code, string: Out<*const c_char>) {
        text(&string, code.text())
    }

    fn cuDeviceGetCount(count: Out<i32>) {
        count.set(config()?.devices as i32)
    }

    fn cuDeviceGet(device: Out<i32>, ordinal: i32) {
        device.set(device::check(ordinal)? as i32)
    }

    fn cuDeviceGetName(to: Out<u8>, bytes: i32, device: i32) {
        let name = device::name(device)?;
        let last = usize::try_from(bytes - 1).map_err(|_| Code::INVALID_VALUE)?;
        let all = name.bytes().take(last).chain([0]);
        all.enumerate().try_for_each(|(i, byte)| to.set_at(i, byte))
    }

    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: i32) {
        uuid.set(device::uuid(device)?)
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: i32) {
        uuid.set(device::uuid(device)?)
    }

    fn cuDeviceGetAttribute(value: Out<i32>, attribute: i32, device: i32) {
        value.set(device::attribute(attribute, device)?)
    }

    fn cuDeviceCanAccessPeer(can: Out<i32>, device: i32, peer: i32) {
        can.set(device::can_access(device, peer)?.into())
    }

    fn cuDevicePrimaryCtxRetain(context: Out<Handle>, device: i32) {
        context.set(context::retain(device::check(device)?)?)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        context::release(device::check(device)?)
    }

    fn cuCtxCreate_v2(context: Out<Handle>, _flags: u32, device: i32) {
        context.set(context::create(device::check(device)?, config::connections())?)
    }

    fn cuCtxDestroy_v2(context: Handle) {
        context::destroy(context)
    }

    fn cuCtxGetCurrent(context: Out<Handle>) {
        config()?;
        context.set(context::top().map_or(0, |context| context.handle))
    }

    fn cuCtxSetCurrent(context: Handle) {
        config()?;
        context::set(context)
    }

    fn cuCtxPushCurrent_v2(context: Handle) {
        config()?;
        context::push(context)
    }

    fn cuCtxPopCurrent_v2(popped: Out<Handle>) {
        config()?;
        popped.set_if(context::pop()?.handle);
        Ok(())
    }

    fn cuCtxGetDevice(device: Out<i32>) {
        device.set(context::current()?.device() as i32)
    }

    fn cuCtxSynchronize() {
        let current = context::current()?;
        capture::unsafe_call()?;
        current.core.settle("cuCtxSynchronize");
        current.core.check()
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        context::current()?;
        least.set_if(PRIORITIES.0);
        greatest.set_if(PRIORITIES.1);
        Ok(())
    }

    fn cuCtxEnablePeerAccess(peer: Handle, flags: u32) {
        let (current, peer) = (context::current()?, context::get(peer)?);
        if flags != 0 || current.device() == peer.device() {
            return Err(Code::INVALID_VALUE);
        }
        if !config()?.has("peer") {
            return Err(Code::PEER_ACCESS_UNSUPPORTED);
        }
        match current.core.enable_peer(peer.device()) {
            true => Ok(()),
            false => Err(Code::PEER_ACCESS_ALREADY_ENABLED),
        }
    }

    fn cuDeviceGetDevResource(device: i32, resource: Out<Resource>, kind: u32) {
        config()?.needs("green")?;
        resource.set(green::of_device(device::check(device)?, kind)?)
    }

    fn cuDevSmResourceSplitByCount(
        parts: Out<Resource>,
        groups: Out<u32>,
        from: In<Resource>,
        rest: Out<Resource>,
        flags: u32,
        least: u32,
    ) {
        config()?.needs("green")?;
        let wanted = if parts.is_null() { u32::MAX } else { groups.get()? };
        let (made, left) = green::split(&from.get()?, wanted, flags, least)?;
        groups.set(made.len() as u32)?;
        if !parts.is_null() {
            made.iter().enumerate().try_for_each(|(i, part)| parts.set_at(i, *part))?;
        }
        rest.set_if(left.unwrap_or_else(Resource::nothing));
        Ok(())
    }

    fn cuDevResourceGenerateDesc(description: Out<Handle>, resources: In<Resource>, count: u32) {
        config()?.needs("green")?;
        let all = (0..count as usize).map(|i| resources.at(i)).collect::<Result<Vec<_>>>()?;
        description.set(green::describe(&all)?)
    }

    fn cuGreenCtxCreate(context: Out<Handle>, description: Handle, device: i32, flags: u32) {
        config()?.needs("green")?;
        context.set(green::create(description, device::check(device)?, flags)?)
    }

    fn cuGreenCtxDestroy(context: Handle) {
        green::destroy(context)
    }

    fn cuGreenCtxGetDevResource(context: Handle, resource: Out<Resource>, kind: u32) {
        resource.set(green::get(context)?.resource(kind)?)
    }

    fn cuCtxFromGreenCtx(context: Out<Handle>, green: Handle) {
        context.set(green::get(green)?.context.handle)
    }
}
