//! Verbs that are a table of functions: what is asked of a NIC is recorded, and nothing is sent.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as ffi;
use parking_lot::Mutex;

use super::verbs::{Context, Library, mock::context};
use crate::host_link::Region;

/// What was asked for.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// Entries of completion queues.
    pub completions: Vec<i32>,
    /// Sends and receives of queue pairs.
    pub pairs: Vec<(u32, u32)>,
    /// Registered bytes.
    pub registered: Vec<usize>,
    /// dma-bufs: offset, bytes, address, access.
    pub dma_bufs: Vec<(u64, usize, u64, c_int)>,
    /// Numbers of a queue pair's first packets: its own number, what it expects, what it sends.
    pub packets: Vec<(u32, Option<u32>, Option<u32>)>,
    pub receives: usize,
    /// The `errno` of registrations of dma-bufs; none if they are taken.
    pub refusal: Option<i32>,
    /// The port is down.
    pub down: bool,
}

/// What was asked of whom, by the context's address: libibverbs' functions know no more.
static ASKED: Mutex<Vec<(usize, Asked)>> = Mutex::new(Vec::new());

fn of<T>(context: *const ffi::ibv_context, f: impl FnOnce(&mut Asked) -> T) -> T {
    let mut all = ASKED.lock();
    let at = all.iter().position(|(raw, _)| *raw == context as usize);
    let at = at.unwrap_or_else(|| {
        all.push((context as usize, Asked::default()));
        all.len() - 1
    });
    f(&mut all[at].1)
}

/// A device that does nothing.
#[derive(Debug)]
pub(super) struct Nic {
    pub context: Arc<Context>,
    _events: OwnedFd,
}

impl Nic {
    pub(super) fn new(name: &str) -> Self {
        Self::of(library(), name)
    }

    /// With a library that has no function for dma-bufs.
    #[cfg(feature = "cuda")]
    pub(super) fn without_dma_bufs(name: &str) -> Self {
        let mut library = library();
        library.ibv_reg_dmabuf_mr = None;
        Self::of(library, name)
    }

    fn of(library: Library, name: &str) -> Self {
        let mut context = context(library, name);
        let events = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let raw = Arc::get_mut(&mut context).unwrap().raw.as_ptr();
        // SAFETY: a context that nobody else has yet.
        unsafe {
            (*raw).async_fd = events.as_raw_fd();
            (*raw).ops.post_recv = Some(post_receive);
        }
        of(raw, |asked| *asked = Asked::default());
        Self { context, _events: events }
    }

    pub(super) fn asked<T>(&self, f: impl FnOnce(&mut Asked) -> T) -> T {
        of(self.context.raw.as_ptr(), f)
    }
}

unsafe extern "C" fn device(_: *mut ffi::ibv_context, into: *mut ffi::ibv_device_attr) -> c_int {
    // SAFETY: the caller gives a place for one.
    unsafe { ((*into).max_qp, (*into).max_qp_wr, (*into).max_cqe) = (1 << 20, 1 << 20, 1 << 30) };
    0
}

unsafe extern "C" fn port(
    context: *mut ffi::ibv_context,
    _: u8,
    into: *mut ffi::ibv_port_attr,
) -> c_int {
    use ffi::ibv_port_state as Port;
    // SAFETY: the caller gives a place for one.
    unsafe { ((*into).active_mtu, (*into).pkey_tbl_len) = (5, 1) };
    let state =
        if of(context, |asked| asked.down) { Port::IBV_PORT_DOWN } else { Port::IBV_PORT_ACTIVE };
    // SAFETY: the same place.
    unsafe { (*into).state = state };
    0
}

unsafe extern "C" fn pd(context: *mut ffi::ibv_context) -> *mut ffi::ibv_pd {
    Box::leak(Box::new(ffi::ibv_pd { context, ..Default::default() }))
}

unsafe extern "C" fn drop_pd(pd: *mut ffi::ibv_pd) -> c_int {
    // SAFETY: made by `pd`, destroyed once.
    drop(unsafe { Box::from_raw(pd) });
    0
}

fn mr(context: *mut ffi::ibv_context, length: usize) -> *mut ffi::ibv_mr {
    let key = of(context, |asked| asked.registered.len() + 10 * asked.dma_bufs.len()) as u32;
    Box::leak(Box::new(ffi::ibv_mr {
        context,
        length,
        lkey: key,
        rkey: 1000 + key,
        ..Default::default()
    }))
}

unsafe extern "C" fn reg_mr(
    pd: *mut ffi::ibv_pd,
    _: *mut c_void,
    bytes: usize,
    _: c_int,
) -> *mut ffi::ibv_mr {
    // SAFETY: a live domain.
    let context = unsafe { (*pd).context };
    of(context, |asked| asked.registered.push(bytes));
    mr(context, bytes)
}

unsafe extern "C" fn reg_dma_buf(
    pd: *mut ffi::ibv_pd,
    offset: u64,
    bytes: usize,
    address: u64,
    fd: c_int,
    access: c_int,
) -> *mut ffi::ibv_mr {
    assert!(fd >= 0);
    // SAFETY: a live domain.
    let context = unsafe { (*pd).context };
    if let Some(errno) = of(context, |asked| asked.refusal) {
        // SAFETY: the calling thread's own variable.
        unsafe { *libc::__errno_location() = errno };
        return std::ptr::null_mut();
    }
    of(context, |asked| asked.dma_bufs.push((offset, bytes, address, access)));
    mr(context, bytes)
}

unsafe extern "C" fn drop_mr(mr: *mut ffi::ibv_mr) -> c_int {
    // SAFETY: made by `mr`, destroyed once.
    drop(unsafe { Box::from_raw(mr) });
    0
}

unsafe extern "C" fn channel(context: *mut ffi::ibv_context) -> *mut ffi::ibv_comp_channel {
    // SAFETY: an open context with a descriptor.
    let fd = unsafe { (*context).async_fd };
    Box::leak(Box::new(ffi::ibv_comp_channel { context, fd, ..Default::default() }))
}

unsafe extern "C" fn drop_channel(channel: *mut ffi::ibv_comp_channel) -> c_int {
    // SAFETY: made by `channel`, destroyed once.
    drop(unsafe { Box::from_raw(channel) });
    0
}

unsafe extern "C" fn cq(
    context: *mut ffi::ibv_context,
    entries: c_int,
    _: *mut c_void,
    _: *mut ffi::ibv_comp_channel,
    _: c_int,
) -> *mut ffi::ibv_cq {
    of(context, |asked| asked.completions.push(entries));
    // SAFETY: numbers and pointers, for which zero is a value.
    Box::leak(Box::new(ffi::ibv_cq { context, ..unsafe { std::mem::zeroed() } }))
}

unsafe extern "C" fn drop_cq(cq: *mut ffi::ibv_cq) -> c_int {
    // SAFETY: made by `cq`, destroyed once.
    drop(unsafe { Box::from_raw(cq) });
    0
}

unsafe extern "C" fn qp(
    pd: *mut ffi::ibv_pd,
    init: *mut ffi::ibv_qp_init_attr,
) -> *mut ffi::ibv_qp {
    // SAFETY: a live domain and the caller's attributes.
    let (context, cap) = unsafe { ((*pd).context, (*init).cap) };
    let number = of(context, |asked| {
        asked.pairs.push((cap.max_send_wr, cap.max_recv_wr));
        100 + asked.pairs.len() as u32
    });
    // SAFETY: numbers and pointers, for which zero is a value.
    let qp = ffi::ibv_qp { context, qp_num: number, ..unsafe { std::mem::zeroed() } };
    Box::leak(Box::new(qp))
}

unsafe extern "C" fn drop_qp(qp: *mut ffi::ibv_qp) -> c_int {
    // SAFETY: made by `qp`, destroyed once.
    drop(unsafe { Box::from_raw(qp) });
    0
}

unsafe extern "C" fn modify(
    qp: *mut ffi::ibv_qp,
    attr: *mut ffi::ibv_qp_attr,
    mask: c_int,
) -> c_int {
    use ffi::ibv_qp_attr_mask as Mask;
    // SAFETY: a live queue pair and the caller's attributes.
    let (qp, attr) = unsafe { (&*qp, &*attr) };
    let asks = |bit: Mask| mask as u32 & bit.0 != 0;
    let expects = asks(Mask::IBV_QP_RQ_PSN).then_some(attr.rq_psn);
    let sends = asks(Mask::IBV_QP_SQ_PSN).then_some(attr.sq_psn);
    of(qp.context, |asked| asked.packets.push((qp.qp_num, expects, sends)));
    0
}

unsafe extern "C" fn post_receive(
    qp: *mut ffi::ibv_qp,
    _: *mut ffi::ibv_recv_wr,
    _: *mut *mut ffi::ibv_recv_wr,
) -> c_int {
    // SAFETY: a live queue pair.
    of(unsafe { (*qp).context }, |asked| asked.receives += 1);
    0
}

fn library() -> Library {
    let mut library = Library::unused();
    (library.ibv_query_device, library.ibv_query_port) = (device, port);
    (library.ibv_alloc_pd, library.ibv_dealloc_pd) = (pd, drop_pd);
    (library.ibv_reg_mr, library.ibv_dereg_mr) = (reg_mr, drop_mr);
    library.ibv_reg_dmabuf_mr = Some(reg_dma_buf);
    library.ibv_create_comp_channel = channel;
    library.ibv_destroy_comp_channel = drop_channel;
    (library.ibv_create_cq, library.ibv_destroy_cq) = (cq, drop_cq);
    (library.ibv_create_qp, library.ibv_destroy_qp) = (qp, drop_qp);
    library.ibv_modify_qp = modify;
    library
}

/// Zeroed pages of this process.
pub(super) fn pages(bytes: usize) -> Arc<dyn Region> {
    #[derive(Debug)]
    struct Pages(NonNull<u8>, usize);
    // SAFETY: an address of memory that is never given back.
    unsafe impl Send for Pages {}
    // SAFETY: an address of memory that is never given back.
    unsafe impl Sync for Pages {}
    // SAFETY: allocated, aligned to a page, and never given back.
    unsafe impl Region for Pages {
        fn base(&self) -> NonNull<u8> {
            self.0
        }

        fn bytes(&self) -> usize {
            self.1
        }
    }
    let layout = std::alloc::Layout::from_size_align(bytes, 4096).unwrap();
    // SAFETY: the size is not 0.
    let base = unsafe { std::alloc::alloc_zeroed(layout) };
    Arc::new(Pages(NonNull::new(base).unwrap(), bytes))
}
