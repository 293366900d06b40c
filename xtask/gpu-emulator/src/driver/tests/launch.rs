use super::*;
use crate::driver::launch::Config;
use crate::driver::words::PARAMS;

/// The transport's kernel.
fn kernel() -> (Handle, Handle) {
    let load = |to| cuLibraryLoadData(to, In::from(PTX.as_bytes()), 0, 0, 0, 0, 0, 0);
    let library = made(load);
    (library, made(|to| cuLibraryGetKernel(to, library, Text::from(c"ep_words"))))
}

fn params(ops: &[(usize, u32)]) -> [u8; PARAMS] {
    let mut params = [0; PARAMS];
    for (i, (at, kind)) in ops.iter().enumerate() {
        params[8 * i..][..8].copy_from_slice(&at.to_le_bytes());
        params[192 + 4 * i..][..4].copy_from_slice(&kind.to_le_bytes());
    }
    params[288] = ops.len() as u8;
    params
}

fn config(grid: u32, block: u32, shared: u32, attributes: &[[u32; 18]]) -> Config {
    let (grid, block) = ([grid, 1, 1], [block, 1, 1]);
    let (at, count) = (attributes.as_ptr() as usize, attributes.len() as u32);
    Config { grid, block, shared, stream: 0, attributes: at, count }
}

fn attribute(id: u32, value: [u32; 3]) -> [u32; 18] {
    let mut attribute = [0; 18];
    attribute[0] = id;
    attribute[2..5].copy_from_slice(&value);
    attribute
}

#[test]
fn the_transports_kernel_writes_and_awaits() {
    let _here = Here::new(0, 1);
    let ((library, kernel), stream, at) = (kernel(), stream(), words(6));
    store(at + 8, 3);
    store(at + 12, 3);
    let params = params(&[(at, 9), (at + 4, 2), (at + 8, 3), (at + 16, 1)]);
    let pointers = [params.as_ptr() as usize];
    let launch = || cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, In::from(&pointers), 0);
    ok(launch());
    soon("the first write", || load(at) == 9);
    assert_eq!((load(at + 8), load(at + 16)), (3, 0));
    store(at + 4, 1);
    ok(cuStreamSynchronize(stream));
    assert_eq!([8, 12, 16].map(|i| load(at + i)), [0, 0, 1]);
    ok(cuLibraryUnload(library));
    assert_eq!(launch(), Code::INVALID_HANDLE);
}

#[test]
fn libraries_that_cannot_be_are_refused() {
    let _here = Here::new(0, 1);
    let mut library = 0;
    let mut load =
        |text: &[u8]| cuLibraryLoadData(Out::to(&mut library), In::from(text), 0, 0, 0, 0, 0, 0);
    assert_eq!(load(b".version 8.0\n.visible .entry other()\n\0"), Code::INVALID_IMAGE);
    let mut header =
        *b"\x7fELF\x02\x01\x01\0aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    header[32..].fill(0);
    assert_eq!(load(&header), Code::INVALID_IMAGE);
    let (library, _) = kernel();
    let mut kernel = 0;
    let get = cuLibraryGetKernel(Out::to(&mut kernel), library, Text::from(c"none"));
    assert_eq!(get, Code::NOT_FOUND);
}

#[test]
fn functions_are_loaded_by_context() {
    let _here = Here::new(0, 1);
    let (_, kernel) = kernel();
    let function: usize = made(|to| cuKernelGetFunction(to, kernel));
    assert_eq!(made::<i32>(|to| cuFuncIsLoaded(to, function)), 0);
    ok(cuFuncLoad(function));
    assert_eq!(made::<i32>(|to| cuFuncIsLoaded(to, function)), 1);
    let _there = Here::new(0, 1);
    let there: usize = made(|to| cuKernelGetFunction(to, kernel));
    assert_eq!(made::<i32>(|to| cuFuncIsLoaded(to, there)), 0);
}

#[test]
fn launches_that_do_not_fit_are_refused() {
    let _here = Here::new(0, 1);
    let ((_, kernel), params) = (kernel(), params(&[]));
    let pointers = [params.as_ptr() as usize];
    let launch = |config| cuLaunchKernelEx(In::from(&[config]), kernel, In::from(&pointers), 0);
    ok(launch(config(1, 1, 0, &[])));
    assert_eq!(launch(config(0, 1, 0, &[])), Code::INVALID_VALUE);
    assert_eq!(launch(config(1, 1025, 0, &[])), Code::INVALID_VALUE);
    // More shared memory only where it was asked for before.
    assert_eq!(launch(config(1, 32, 60_000, &[])), Code::INVALID_VALUE);
    ok(cuKernelSetAttribute(8, 232_448, kernel, 0));
    assert_eq!(cuKernelSetAttribute(8, 232_449, kernel, 0), Code::INVALID_VALUE);
    ok(launch(config(1, 32, 232_448, &[])));
    let together = [attribute(2, [1, 0, 0])];
    ok(launch(config(132, 32, 200_000, &together)));
    assert_eq!(launch(config(133, 32, 200_000, &together)), Code::COOPERATIVE_TOO_LARGE);
    let clusters = |size| [attribute(4, [size, 1, 1])];
    ok(launch(config(16, 32, 0, &clusters(8))));
    assert_eq!(launch(config(17, 32, 0, &clusters(8))), Code::INVALID_VALUE);
    assert_eq!(launch(config(32, 32, 0, &clusters(16))), Code::INVALID_CLUSTER_SIZE);
    ok(cuKernelSetAttribute(14, 1, kernel, 0));
    ok(launch(config(32, 32, 0, &clusters(16))));
    assert_eq!(launch(config(1, 1, 0, &[attribute(3, [1, 0, 0])])), Code::NOT_SUPPORTED);
    ok(launch(config(1, 1, 0, &[attribute(6, [1, 0, 0]), attribute(8, [0; 3])])));
}

#[test]
fn what_fits_an_sm_is_told() {
    let _here = Here::new(0, 1);
    let (_, kernel) = kernel();
    ok(cuKernelSetAttribute(8, 232_448, kernel, 0));
    ok(cuKernelSetAttribute(14, 1, kernel, 0));
    let blocks = |threads, shared| {
        made::<i32>(|to| cuOccupancyMaxActiveBlocksPerMultiprocessor(to, kernel, threads, shared))
    };
    assert_eq!([blocks(1024, 0), blocks(32, 0), blocks(32, 232_448)], [1, 32, 1]);
    assert_eq!([blocks(33, 100_000), blocks(512, 0)], [2, 2]);
    let clusters = |size| {
        let attributes = [attribute(4, [size, 1, 1])];
        let config = config(size, 32, 232_448, &attributes);
        made::<i32>(|to| cuOccupancyMaxActiveClusters(to, kernel, In::from(&[config])))
    };
    assert_eq!([1, 2, 4, 8, 16].map(clusters), [132, 66, 30, 15, 7]);
    let config = config(16, 32, 232_448, &[]);
    let most = |to| cuOccupancyMaxPotentialClusterSize(to, kernel, In::from(&[config]));
    assert_eq!(made::<i32>(most), 16);
}
