use super::*;
use crate::driver::vmm::{Access, Location, Properties, UNIT};

/// Tests that take memory of device 1, of which one counts.
static COUNTED: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

fn bytes_at(at: usize, count: usize) -> Vec<u8> {
    // SAFETY: memory of the test, of which nobody writes any now.
    unsafe { std::slice::from_raw_parts(at as *const u8, count) }.to_vec()
}

fn free_bytes() -> usize {
    let (mut free, mut total) = (0, 0);
    ok(cuMemGetInfo_v2(Out::to(&mut free), Out::to(&mut total)));
    assert!(free <= total);
    free
}

fn attribute(at: usize, which: i32) -> Result<u64, Code> {
    let mut value = 0;
    match cuPointerGetAttribute(Out::to(&mut value), which, at) {
        Code::SUCCESS => Ok(value),
        code => Err(code),
    }
}

#[test]
fn fresh_memory_is_ones_and_counted_until_it_is_freed() {
    let _turn = COUNTED.lock();
    let _here = Here::new(1, 1);
    let before = free_bytes();
    let at: usize = made(|to| cuMemAlloc_v2(to, 20 << 20));
    assert!(at.is_multiple_of(256));
    assert!(bytes_at(at, 20 << 20).iter().all(|byte| *byte == 0xff));
    assert_eq!(before - free_bytes(), 20 << 20);
    assert_eq!((attribute(at + 5, 2), attribute(at + 5, 9)), (Ok(2), Ok(1)));
    assert_eq!((attribute(at + 5, 11), attribute(at + 5, 12)), (Ok(at as u64), Ok(20 << 20)));
    assert_eq!(attribute(at + (20 << 20), 2), Err(Code::INVALID_VALUE));
    assert_eq!(cuMemFree_v2(at + 256), Code::INVALID_VALUE);
    ok(cuMemFree_v2(at));
    assert_eq!(free_bytes(), before);
    assert_eq!(attribute(at, 2), Err(Code::INVALID_VALUE));
    assert_eq!(cuMemFree_v2(at), Code::INVALID_VALUE);
    assert_eq!(cuMemsetD8Async(at, 0, 4, stream()), Code::INVALID_VALUE);
    let mut at = 0;
    assert_eq!(cuMemAlloc_v2(Out::to(&mut at), 1 << 40), Code::OUT_OF_MEMORY);
}

#[test]
fn fills_and_copies_stay_where_they_belong() {
    let _here = Here::new(0, 2);
    let stream = stream();
    let size = (3 << 20) + 700;
    let at: usize = made(|to| cuMemAlloc_v2(to, size));
    // A large fill by zeroes is made of pages, and of what is beside them.
    ok(cuMemsetD8Async(at + 300, 0, size - 600, stream));
    ok(cuMemsetD8Async(at + 1000, 7, 50, stream));
    let mut host = vec![1u8; size];
    ok(cuMemcpyAsync(host.as_mut_ptr() as usize, at, size, stream));
    ok(cuStreamSynchronize(stream));
    for (i, byte) in host.iter().enumerate() {
        let want = match i {
            1000..1050 => 7,
            _ if i < 300 || i >= size - 300 => 0xff,
            _ => 0,
        };
        assert_eq!(*byte, want, "byte {i}");
    }
    assert_eq!(cuMemcpyAsync(at + 8, at, size, stream), Code::INVALID_VALUE);
    assert_eq!(cuMemsetD8Async(at, 0, size + 1, stream), Code::INVALID_VALUE);
    ok(cuStreamDestroy_v2(stream));
}

#[test]
fn registered_memory_is_known_while_it_is() {
    let _here = Here::new(0, 1);
    let host = vec![0u32; 2048];
    let at = host.as_ptr() as usize;
    assert_eq!(attribute(at, 2), Err(Code::INVALID_VALUE));
    ok(cuMemHostRegister_v2(at, 8192, 3));
    assert_eq!(cuMemHostRegister_v2(at + 4096, 8192, 3), Code::ALREADY_REGISTERED);
    assert_eq!(attribute(at + 8191, 2), Ok(1));
    let device: usize = made(|to| cuMemHostGetDevicePointer_v2(to, at, 0));
    let stream = stream();
    ok(cuStreamWriteValue32_v2(stream, device + 8, 9, 0));
    ok(cuStreamSynchronize(stream));
    assert_eq!(load(at + 8), 9);
    ok(cuMemHostUnregister(at));
    assert_eq!(cuMemHostUnregister(at), Code::NOT_REGISTERED);
    assert_eq!(cuStreamWriteValue32_v2(stream, device, 9, 0), Code::INVALID_VALUE);
}

fn properties(device: i32) -> Properties {
    let location = Location { kind: 1, id: device };
    Properties { kind: 1, handle_kinds: 1, location, win32: 0, flags: [0; 8] }
}

fn access(device: i32) -> Access {
    Access { location: Location { kind: 1, id: device }, flags: 3 }
}

/// Memory of a device, mapped, and who may use it.
fn mapped(handle: Handle, devices: &[i32]) -> usize {
    let at: usize = made(|to| cuMemAddressReserve(to, UNIT, 0, 0, 0));
    ok(cuMemMap(at, UNIT, 0, handle, 0));
    assert_eq!(cuMemMap(at, UNIT, 0, handle, 0), Code::INVALID_VALUE);
    let all: Vec<Access> = devices.iter().map(|device| access(*device)).collect();
    ok(cuMemSetAccess(at, UNIT, In::from(&all), all.len()));
    at
}

#[test]
fn memory_goes_to_another_process_by_a_descriptor() {
    let _turn = COUNTED.lock();
    let _here = Here::new(0, 1);
    let unit: usize = made(|to| cuMemGetAllocationGranularity(to, In::from(&[properties(0)]), 1));
    assert_eq!(unit, UNIT);
    let create = |bytes| {
        let mut handle = 0;
        (cuMemCreate(Out::to(&mut handle), bytes, In::from(&[properties(1)]), 0), handle)
    };
    assert_eq!(create(UNIT + 1).0, Code::INVALID_VALUE);
    let (code, handle) = create(UNIT);
    ok(code);
    let fd: i32 = made(|to| cuMemExportToShareableHandle(to, handle, 1, 0));
    let imported: usize = made(|to| cuMemImportFromShareableHandle(to, fd as usize, 1));
    let (here, there) = (mapped(handle, &[0]), mapped(imported, &[0, 1]));
    // Both names may go: what is mapped stays.
    ok(cuMemRelease(handle));
    ok(cuMemRelease(imported));
    assert_eq!(bytes_at(here, 8), [0xff; 8]);
    assert_eq!(attribute(there, 9), Ok(1));
    store(here, 77);
    assert_eq!(load(there), 77);
    assert_eq!(cuMemAddressFree(here, UNIT), Code::INVALID_VALUE);
    ok(cuMemUnmap(here, UNIT));
    ok(cuMemAddressFree(here, UNIT));
    assert_eq!(load(there), 77);
    ok(cuMemUnmap(there, UNIT));
    let mut bad = 0;
    let import = cuMemImportFromShareableHandle(Out::to(&mut bad), 0, 1);
    assert_eq!(import, Code::INVALID_VALUE, "standard input is no memory of a GPU");
    let fabric = Properties { handle_kinds: 8, ..properties(0) };
    let create = cuMemCreate(Out::to(&mut bad), UNIT, In::from(&[fabric]), 0);
    assert_eq!(create, Code::NOT_PERMITTED);
}

#[test]
fn a_device_without_access_fails_for_good() {
    let _turn = COUNTED.lock();
    let _here = Here::new(0, 1);
    let handle: usize = made(|to| cuMemCreate(to, UNIT, In::from(&[properties(1)]), 0));
    let at = mapped(handle, &[1]);
    let stream = stream();
    ok(cuMemsetD8Async(at, 0, 8, stream));
    assert_eq!(cuStreamSynchronize(stream), Code::ILLEGAL_ADDRESS);
    assert_eq!(cuStreamQuery(stream), Code::ILLEGAL_ADDRESS);
    assert_eq!(cuMemsetD8Async(at, 0, 8, stream), Code::ILLEGAL_ADDRESS);
    assert_eq!(bytes_at(at, 8), [0xff; 8]);
    // Another context works.
    let _there = Here::new(1, 1);
    let other = super::stream();
    ok(cuMemsetD8Async(at, 0, 8, other));
    ok(cuStreamSynchronize(other));
    assert_eq!(bytes_at(at, 8), [0; 8]);
}
