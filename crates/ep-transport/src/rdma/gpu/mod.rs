//! Windows that GPUs have: in a GPU's own memory where NICs can reach that (a dma-buf), else in
//! page-locked memory of the host that the GPUs of the node have mapped. Either way the ranks of a node map
//! each other's, and a node's windows are all of one kind.
//!
//! # Flushing
//! A NIC's writes to a GPU's memory and its report of them to the host's go to different places, so
//! that the report says nothing of when the GPU sees the bytes. Whether somebody has to ask for that,
//! and how, the GPU says of itself (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`, 118, and
//! `..._FLUSH_WRITES_OPTIONS`, 117):
//!
//! * ordered for the GPU's own consumers or for all: nobody has to, and the proxy raises flags;
//! * else by a call, `cuFlushGPUDirectRDMAWrites`. The bridge makes it before it raises flags: the proxy,
//!   which knows sooner, makes no call of CUDA's, since one that waits for a stream would hold up the flag
//!   that the stream waits for;
//! * where only streams can flush (`CU_STREAM_WAIT_VALUE_FLUSH`), the window is in the host's memory.

mod bridge;
mod link;

use std::ffi::{c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use super::areas::{DmaBuf, Refused, Source};
use super::core::Wired;
use super::device::Device;
use super::layout::{Layout, Words};
use super::nodes::Nodes;
use super::options::Options;
use super::{OP, together};
use crate::host_link::Region;
use crate::nvlink::parts::{Allocation, Buried, Gpu, Mapped, Near, Own, settle};
use crate::{Deadline, Group, Result, TransportError, WindowSpec, process};
pub(super) use link::GpuLink;

/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`, `..._WRITES_ORDERING`,
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const FLUSH_OPTIONS: c_int = 117;
const WRITES_ORDERING: c_int = 118;
const DMA_BUF_SUPPORTED: c_int = 124;
/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: for consumers on the GPU that is written to.
const ORDERED_FOR_OWNER: c_int = 100;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST`.
const FLUSH_BY_CALL: c_int = 1;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`, `..._TO_OWNER`.
const CURRENT: c_int = 0;
const TO_OWNER: c_int = 100;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF_FD: c_int = 1;

/// Makes a GPU see what NICs have reported as written. May wait for the GPU.
pub(super) type See = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// What windows on GPUs take of NICs.
pub(super) trait Nics {
    /// NICs that know memory.
    type Wired;
    type Device: Device + 'static;

    /// What a NIC can be given of a GPU's memory, and what has to be done before the GPU sees what NICs
    /// wrote there.
    fn export(
        &self,
        gpu: &Arc<Gpu>,
        memory: &Arc<Allocation>,
    ) -> Result<(Arc<DmaBuf>, Option<See>), Refused> {
        export(gpu, memory)
    }

    /// Makes memory known to the NICs, each with the offset at which it begins.
    fn register(&self, memory: &[(usize, Source)]) -> Result<Self::Wired, Refused>;

    /// Connects them with those of other nodes: each device with the cores near it. A collective of all.
    fn connect(self, wired: Self::Wired) -> Result<Vec<(Self::Device, Vec<u32>)>>;
}

/// What is to be opened.
pub(super) struct Opening<'a> {
    pub group: &'a Group,
    pub spec: WindowSpec,
    pub nodes: Nodes,
    pub options: &'a Options,
    pub ordinal: usize,
    pub deadline: Deadline,
}

/// A window that NICs know, and how the GPU sees what they wrote.
struct Placed<W> {
    own: Own,
    see: Option<See>,
    wired: W,
}

/// Opens a window on the GPU of every rank and connects them. A collective.
pub(super) fn open<N: Nics>(opening: Opening<'_>, nics: Result<N>) -> Result<Arc<GpuLink>> {
    let Opening { group, spec, nodes, options, ordinal, deadline } = opening;
    let layout = Layout::apart(spec, group.world(), options.nics)?;
    // What was dropped gives its memory back first, if that is soon.
    settle();
    let prepared = nics.and_then(|nics| {
        let gpu = Arc::new(Gpu::open(ordinal)?);
        let words = process::private_memfd(layout.bytes - layout.words())?;
        Ok((nics, gpu, words))
    });
    let uuid = |(_, gpu, _): &(_, Arc<Gpu>, _)| gpu.uuid.to_vec();
    let ((nics, gpu, words), uuids) = together(group, prepared, uuid, deadline)?;
    if let Some((one, other)) = nodes.clash(&uuids) {
        return Err(shared_gpu(one, other));
    }
    let near = nodes.near(group)?;
    let placing = Placing { group, near: &near, nodes: &nodes, gpu: &gpu, layout, spec, deadline };
    let Placed { own, see, wired } = placing.place(&nics, &words)?;
    let mut bulk = vec![false; group.world()];
    nodes.bulk().iter().for_each(|&peer| bulk[peer] = true);
    let streams = if nodes.bulk().is_empty() { 0 } else { bridge::LANES };
    let near = Near { all: group, group: &near, members: nodes.members(), streams };
    let linked = near.open(spec, Ok(own), bulk, deadline);
    let (linked, _) = together(group, linked, |_| Vec::new(), deadline)?;
    let devices = nics.connect(wired)?;
    let words = Words::behind(words, layout.words());
    // The bridge.
    let wired = Wired { group: group.clone(), layout, words, nodes, pollers: 1 };
    let started = GpuLink::start(linked, wired, devices, options, see);
    // Nobody writes before all are connected.
    Ok(together(group, started, |_| Vec::new(), deadline)?.0)
}

/// Ranks on one GPU may wait behind each other in one of its queues, which is only known of ranks of a
/// node to be in an order that ends.
fn shared_gpu(one: usize, other: usize) -> TransportError {
    let detail = format!(
        "ranks {one} and {other} are of different nodes, but on one GPU: give each a GPU of its own, or \
         the ranks one node"
    );
    TransportError::Unsupported { op: OP, detail }
}

/// What it takes to say where windows are.
struct Placing<'a> {
    group: &'a Group,
    near: &'a Group,
    nodes: &'a Nodes,
    gpu: &'a Arc<Gpu>,
    layout: Layout,
    spec: WindowSpec,
    deadline: Deadline,
}

impl Placing<'_> {
    /// Puts windows where NICs and GPUs reach them, the same way on all ranks of a node: in the memory of
    /// GPUs or, if NICs do not reach that of one of them, in the host's; any other failure is one.
    fn place<N: Nics>(&self, nics: &N, words: &Arc<dyn Region>) -> Result<Placed<N::Wired>> {
        let on_device = match self.on_device(nics, words) {
            Ok(placed) => Ok(Ok(placed)),
            Err(Refused::Unreachable(why)) => Ok(Err(why)),
            Err(Refused::Failed(error)) => Err(error),
        };
        let tell = |placed: &Result<_, String>| vec![u8::from(placed.is_err())];
        let (on_device, all) = together(self.group, on_device, tell, self.deadline)?;
        let reached = self.nodes.members().iter().all(|&member| all[member] == [0]);
        let placed = match on_device {
            Ok(placed) if reached => Ok(placed),
            other => {
                if let Err(why) = other {
                    tracing::warn!(
                        gpu = self.gpu.ordinal,
                        %why,
                        "windows are in the host's memory, which GPUs reach over their bus"
                    );
                }
                self.on_host(nics, words)
            }
        };
        Ok(together(self.group, placed, |_| Vec::new(), self.deadline)?.0)
    }

    fn words_of(&self, words: &Arc<dyn Region>) -> (usize, Source) {
        (self.layout.words(), Source::Pages { region: words.clone(), from: 0 })
    }

    /// In the GPU's own memory.
    fn on_device<N: Nics>(
        &self,
        nics: &N,
        words: &Arc<dyn Region>,
    ) -> Result<Placed<N::Wired>, Refused> {
        let (own, memory) = Own::on_device(self.gpu, self.spec.bytes)?;
        if self.nodes.bulk().is_empty() {
            // No NIC has to reach it.
            return Ok(Placed { own, see: None, wired: nics.register(&[])? });
        }
        let (buf, see) = nics.export(self.gpu, &memory)?;
        let wired = nics.register(&[(0, Source::DmaBuf(buf)), self.words_of(words)])?;
        Ok(Placed { own, see, wired })
    }

    /// In memory of the host that the ranks of the node share. Nothing has to be flushed there.
    fn on_host<N: Nics>(&self, nics: &N, words: &Arc<dyn Region>) -> Result<Placed<N::Wired>> {
        let regions = self.nodes.share_in(self.near, self.layout.words(), self.deadline)?;
        let region = regions[self.near.rank()].clone();
        let window = (0, Source::Pages { region, from: 0 });
        let wired = nics.register(&[window, self.words_of(words)])?;
        let own = Own::on_host(self.gpu, regions)?;
        Ok(Placed { own, see: None, wired })
    }
}

/// What has to be done before the GPU sees what a NIC has reported to the host as written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flush {
    Needless,
    /// `cuFlushGPUDirectRDMAWrites`.
    Call,
}

impl Flush {
    /// What a GPU with these attributes needs; none if the host cannot do it.
    fn of(ordering: c_int, options: c_int, has_call: bool) -> Option<Self> {
        match () {
            () if ordering >= ORDERED_FOR_OWNER => Some(Self::Needless),
            () if options & FLUSH_BY_CALL != 0 && has_call => Some(Self::Call),
            () => None,
        }
    }
}

/// A dma-buf of a GPU's memory.
fn export(gpu: &Arc<Gpu>, memory: &Arc<Allocation>) -> Result<(Arc<DmaBuf>, Option<See>), Refused> {
    let unable = |detail: String| Err(Refused::Unreachable(detail));
    let exports = gpu.attribute(DMA_BUF_SUPPORTED) != 0;
    let Some(function) = gpu.driver.range_handle.filter(|_| exports) else {
        return unable(format!(
            "GPU {} exports no dma-buf (driver 515 or newer with open kernel modules does)",
            gpu.ordinal
        ));
    };
    let (ordering, options) = (gpu.attribute(WRITES_ORDERING), gpu.attribute(FLUSH_OPTIONS));
    let Some(flush) = Flush::of(ordering, options, gpu.driver.flush_rdma.is_some()) else {
        return unable(format!(
            "GPU {} neither orders writes of NICs ({ordering}) nor lets the host flush them \
             ({options})",
            gpu.ordinal
        ));
    };
    // At an address of its own, for as long as NICs know it.
    let mapped = Buried::new(Mapped::new(gpu, memory)?);
    let (address, bytes) = (mapped.base, mapped.bytes);
    let _current = gpu.current(OP)?;
    let mut fd: c_int = -1;
    let to: *mut c_void = (&raw mut fd).cast();
    // SAFETY: a range that is mapped; a descriptor is an int.
    let code = unsafe { function(to, address, bytes, DMA_BUF_FD, 0) };
    gpu.check(OP, "cuMemGetHandleForAddressRange", code)?;
    // SAFETY: the driver gave a new descriptor, which nobody else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let buf = Arc::new(DmaBuf { fd, address, bytes, _memory: Box::new(mapped) });
    Ok((buf, (flush == Flush::Call).then(|| flushing(gpu.clone()))))
}

/// Makes the GPU see what has come by a call of the driver.
fn flushing(gpu: Arc<Gpu>) -> See {
    Box::new(move || {
        let Some(flush) = gpu.driver.flush_rdma else { return Ok(()) };
        let _current = gpu.current("flush")?;
        // SAFETY: takes numbers; the context is current.
        let code = unsafe { flush(CURRENT, TO_OWNER) };
        gpu.check("flush", "cuFlushGPUDirectRDMAWrites", code)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_flushes_is_what_the_gpu_says() {
        assert_eq!(Flush::of(0, 1, true), Some(Flush::Call), "by a call");
        assert_eq!(Flush::of(0, 3, true), Some(Flush::Call), "by a call, though streams could");
        assert_eq!(Flush::of(100, 1, true), Some(Flush::Needless), "ordered for the GPU itself");
        assert_eq!(Flush::of(200, 0, false), Some(Flush::Needless), "ordered for all");
        assert_eq!(Flush::of(0, 2, true), None, "only streams can");
        assert_eq!(Flush::of(0, 1, false), None, "the driver lacks the call");
        assert_eq!(Flush::of(0, 0, true), None, "nobody can");
    }

    /// Needs a GPU, but no NIC: what the driver gives for a window is a dma-buf of its size, and the flush
    /// that this GPU asks for works. Without either it says so and passes.
    #[test]
    fn windows_of_gpus_are_exported_and_flushed() {
        let gpu = match Gpu::open(0) {
            Ok(gpu) => Arc::new(gpu),
            Err(why) => return eprintln!("no GPU: {why}"),
        };
        let memory = Allocation::new(&gpu, 3 << 20, crate::NvlinkHandles::Fd).unwrap();
        match export(&gpu, &memory) {
            Ok((buf, see)) => {
                let bytes = rustix::fs::seek(&buf.fd, rustix::fs::SeekFrom::End(0)).unwrap();
                assert_eq!(bytes, buf.bytes as u64);
                assert!(buf.bytes >= 3 << 20 && buf.address != 0);
                println!("a dma-buf of {bytes} bytes, flushed by a call: {}", see.is_some());
                see.iter().for_each(|see| see().unwrap());
                // Whether this GPU asks for it or not, the call works.
                flushing(gpu.clone())().unwrap();
            }
            Err(Refused::Unreachable(why)) => println!("{why}"),
            Err(Refused::Failed(why)) => panic!("{why}"),
        }
    }
}
