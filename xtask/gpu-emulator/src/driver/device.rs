//! Devices, which look like an H200.

use super::code::{Code, Result};
use super::config::config;
use super::context::SMS;
use super::module::SHARED_MOST;

/// The device with this number.
pub fn check(device: i32) -> Result<usize> {
    let count = config()?.devices;
    usize::try_from(device).ok().filter(|device| *device < count).ok_or(Code::INVALID_DEVICE)
}

pub fn name(device: i32) -> Result<String> {
    check(device).map(|_| "NVIDIA H200 (emulated)".into())
}

pub fn uuid(device: i32) -> Result<[u8; 16]> {
    let device = check(device)?;
    let mut uuid = *b"ep-gpu-emulator\0";
    uuid[15] = device as u8;
    Ok(uuid)
}

pub fn can_access(device: i32, peer: i32) -> Result<bool> {
    let (device, peer) = (check(device)?, check(peer)?);
    Ok(device != peer && config()?.has("peer"))
}

/// `CUdevice_attribute`.
pub fn attribute(which: i32, device: i32) -> Result<i32> {
    let device = check(device)?;
    let has = |feature: &str| config().map(|config| i32::from(config.has(feature)));
    Ok(match which {
        // Threads per block and along each dimension of it; blocks along those of a grid.
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65_535,
        // Shared memory per block, threads per warp, registers per block.
        8 => 49_152,
        10 => 32,
        12 => 65_536,
        16 => SMS as i32,
        // Integrated; maps host memory; compute mode; concurrent kernels.
        18 => 0,
        19 | 31 => 1,
        20 => 0,
        // PCI bus, device and domain.
        33 => 0x40 + device as i32,
        34 | 50 => 0,
        // L2; threads per SM; copy engines; unified addresses.
        38 => 60 << 20,
        39 => 2048,
        40 => 3,
        41 => 1,
        75 => 9,
        76 => 0,
        // Stream priorities; shared memory and registers per SM.
        78 => 1,
        81 => 233_472,
        82 => 65_536,
        // Host pointers of registered memory are device pointers; words, as before CUDA 12.
        91 => has("hostregister")?,
        92 => has("memops")?,
        93 => has("memops")? & has("memops64")?,
        95 => has("cooperative")?,
        97 => SHARED_MOST,
        99 => has("hostregister")?,
        // Virtual memory, with descriptors.
        102 | 103 => has("vmm")?,
        106 => 32,
        // RDMA into virtual memory and at all; memory taken per block; pools.
        110 | 116 => 0,
        111 => 1024,
        115 => 0,
        120 => has("clusters")?,
        122 => has("memops")? & has("memops64")?,
        123 => has("memops")?,
        // dma-buf; domains of memory; tensor maps; fabric handles; multicast.
        124 => 0,
        126 => 4,
        127 | 128 | 132 => 0,
        _ => return Err(Code::INVALID_VALUE),
    })
}
