use super::*;
use crate::driver::green::Resource;

#[test]
fn codes_have_names() {
    let name = |code: i32| {
        let mut text = std::ptr::null();
        let status = cuGetErrorName(Code(code), Out::to(&mut text));
        // SAFETY: not null, hence a string.
        (status, (!text.is_null()).then(|| unsafe { std::ffi::CStr::from_ptr(text) }))
    };
    assert_eq!(name(0), (Code::SUCCESS, Some(c"CUDA_SUCCESS")));
    assert_eq!(name(719), (Code::SUCCESS, Some(c"CUDA_ERROR_LAUNCH_FAILED")));
    assert_eq!(name(123_456), (Code::INVALID_VALUE, None));
}

#[test]
fn devices_are_told_apart() {
    ok(cuInit(0));
    let count: i32 = made(|to| cuDeviceGetCount(to));
    assert!(count >= 2);
    let uuids = [0, 1].map(|device| made::<[u8; 16]>(|to| cuDeviceGetUuid_v2(to, device)));
    assert_ne!(uuids[0], uuids[1]);
    assert_eq!(made::<i32>(|to| cuDeviceCanAccessPeer(to, 0, 1)), 1);
    assert_eq!(made::<i32>(|to| cuDeviceCanAccessPeer(to, 0, 0)), 0);
    let mut device = 0;
    assert_eq!(cuDeviceGet(Out::to(&mut device), count), Code::INVALID_DEVICE);
    assert_eq!(made::<i32>(|to| cuDeviceGetAttribute(to, 16, 1)), 132);
    let mut name = [1u8; 8];
    ok(cuDeviceGetName(Out::to(&mut name[0]), 8, 0));
    assert_eq!(&name, b"NVIDIA \0");
}

#[test]
fn each_thread_has_contexts_of_its_own() {
    let here = Here::new(0, 1);
    let there = Here::new(1, 1);
    assert_eq!(made::<usize>(|to| cuCtxGetCurrent(to)), there.0);
    assert_eq!(made::<i32>(|to| cuCtxGetDevice(to)), 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(made::<usize>(|to| cuCtxGetCurrent(to)), 0);
            assert_eq!(cuCtxPopCurrent_v2(Out::null()), Code::INVALID_CONTEXT);
            assert_eq!(cuCtxSynchronize(), Code::INVALID_CONTEXT);
            ok(cuCtxSetCurrent(here.0));
            assert_eq!(made::<i32>(|to| cuCtxGetDevice(to)), 0);
            ok(cuCtxSetCurrent(0));
            assert_eq!(made::<usize>(|to| cuCtxGetCurrent(to)), 0);
        });
    });
    drop(there);
    assert_eq!(made::<usize>(|to| cuCtxGetCurrent(to)), here.0);
    let stale = here.0;
    drop(here);
    assert_eq!(cuCtxPushCurrent_v2(stale), Code::INVALID_CONTEXT);
}

/// The only test that uses a primary context.
#[test]
fn primary_contexts_are_counted_and_partitions_share_them() {
    ok(cuInit(0));
    let primary: usize = made(|to| cuDevicePrimaryCtxRetain(to, 1));
    assert_eq!(made::<usize>(|to| cuDevicePrimaryCtxRetain(to, 1)), primary);
    ok(cuDevicePrimaryCtxRelease_v2(1));
    ok(cuCtxPushCurrent_v2(primary));
    let nothing = Resource::nothing();
    let (mut all, mut parts, mut rest) = (nothing, [nothing; 3], nothing);
    ok(cuDeviceGetDevResource(1, Out::to(&mut all), 1));
    assert_eq!(all.count, 132);
    let mut split = |groups: &mut u32, flags, least| {
        let (parts, groups) = (Out::to(&mut parts[0]), Out::to(groups));
        cuDevSmResourceSplitByCount(
            parts,
            groups,
            In::from(&[all]),
            Out::to(&mut rest),
            flags,
            least,
        )
    };
    let mut groups = 3;
    ok(split(&mut groups, 0, 13));
    assert_eq!(groups, 3);
    let mut too_many = 2;
    assert_eq!(split(&mut too_many, 0, 140), Code::INVALID_RESOURCE_CONFIGURATION);
    groups = 1;
    ok(split(&mut groups, 0, 13));
    assert_eq!((groups, parts[0].count, rest.count), (1, 16, 116));
    let description: usize = made(|to| cuDevResourceGenerateDesc(to, In::from(&parts), 1));
    let green: usize = made(|to| cuGreenCtxCreate(to, description, 1, 1));
    let stream: usize = made(|to| cuGreenCtxStreamCreate(to, green, 1, -5));
    let (mut context, mut of) = (0, 0);
    ok(cuStreamGetCtx_v2(stream, Out::to(&mut context), Out::to(&mut of)));
    assert_eq!((context, of), (primary, green));
    let part: usize = made(|to| cuCtxFromGreenCtx(to, green));
    assert_eq!(made::<usize>(|to| cuStreamGetCtx(stream, to)), part);
    let at = words(1);
    ok(cuStreamWriteValue32_v2(stream, at, 4, 0));
    ok(cuStreamSynchronize(stream));
    assert_eq!(load(at), 4);
    ok(cuStreamDestroy_v2(stream));
    ok(cuGreenCtxDestroy(green));
    assert_eq!(cuCtxPushCurrent_v2(part), Code::INVALID_CONTEXT);
    // With its last owner goes its memory.
    ok(cuDevicePrimaryCtxRelease_v2(1));
    assert_eq!(cuCtxSynchronize(), Code::CONTEXT_IS_DESTROYED);
    assert!(crate::driver::memory::range_of(at).is_none());
    ok(cuCtxPopCurrent_v2(Out::null()));
    assert_eq!(cuDevicePrimaryCtxRelease_v2(1), Code::INVALID_CONTEXT);
}
