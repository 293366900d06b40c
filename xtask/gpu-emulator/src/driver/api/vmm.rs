#![allow(non_snake_case, reason = "names of cuda.h")]

use super::functions;
use crate::driver::arg::{In, Out};
use crate::driver::code::{Code, Result};
use crate::driver::config::config;
use crate::driver::memory::{self, Place};
use crate::driver::table::Handle;
use crate::driver::vmm::{self, Access, Properties};
use crate::driver::{capture, context};

/// How many devices there are, where they have virtual memory.
fn devices() -> Result<usize> {
    let config = config()?;
    config.needs("vmm")?;
    Ok(config.devices)
}

functions! {
    fn cuMemGetAllocationGranularity(unit: Out<usize>, properties: In<Properties>, option: i32) {
        if !matches!(option, 0 | 1) {
            return Err(Code::INVALID_VALUE);
        }
        unit.set(vmm::granularity(&properties.get()?, devices()?)?)
    }

    fn cuMemCreate(handle: Out<Handle>, bytes: usize, properties: In<Properties>, flags: u64) {
        capture::unsafe_call()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        handle.set(vmm::create(bytes, &properties.get()?, devices()?)?)
    }

    fn cuMemRelease(handle: Handle) {
        devices()?;
        vmm::release(handle)
    }

    fn cuMemExportToShareableHandle(to: Out<i32>, handle: Handle, kind: i32, flags: u64) {
        devices()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        to.set(vmm::export(handle, kind)?)
    }

    fn cuMemImportFromShareableHandle(handle: Out<Handle>, from: usize, kind: i32) {
        handle.set(vmm::import(from as i32, kind, devices()?)?)
    }

    fn cuMemAddressReserve(at: Out<usize>, bytes: usize, align: usize, _wish: usize, flags: u64) {
        devices()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        at.set(vmm::reserve(bytes, align)?)
    }

    fn cuMemAddressFree(at: usize, bytes: usize) {
        devices()?;
        vmm::unreserve(at, bytes)
    }

    fn cuMemMap(at: usize, bytes: usize, offset: usize, handle: Handle, flags: u64) {
        devices()?;
        capture::unsafe_call()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        vmm::map(at, bytes, offset, handle)
    }

    /// Waits for whatever may use the memory.
    fn cuMemUnmap(at: usize, bytes: usize) {
        devices()?;
        capture::unsafe_call()?;
        if !memory::range_of(at).is_some_and(|range| matches!(range.place, Place::Mapped(_))) {
            return Err(Code::INVALID_VALUE);
        }
        context::settle_all("cuMemUnmap");
        vmm::unmap(at, bytes)
    }

    fn cuMemSetAccess(at: usize, bytes: usize, wanted: In<Access>, count: usize) {
        let devices = devices()?;
        let wanted = (0..count).map(|i| wanted.at(i)).collect::<Result<Vec<_>>>()?;
        vmm::set_access(at, bytes, &wanted, devices)
    }
}
