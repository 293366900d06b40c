//! Queue pairs and the queues that tell what they have done.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as ffi;

use super::OP;
use super::verbs::{Context, Domain, check, failed, last};
use crate::{Result, TransportError};

/// A completion queue with a descriptor to sleep on.
#[derive(Debug)]
pub(super) struct Completions {
    raw: NonNull<ffi::ibv_cq>,
    channel: NonNull<ffi::ibv_comp_channel>,
    context: Arc<Context>,
}

// SAFETY: as for `Context`, of which it is part.
unsafe impl Send for Completions {}
// SAFETY: as for `Context`, of which it is part.
unsafe impl Sync for Completions {}

impl Completions {
    pub(super) fn new(context: &Arc<Context>, entries: usize) -> Result<Arc<Self>> {
        let (library, raw) = (context.library, context.raw.as_ptr());
        // SAFETY: an open context.
        let channel = NonNull::new(unsafe { (library.ibv_create_comp_channel)(raw) });
        let channel =
            channel.ok_or_else(|| last("ibv_create_comp_channel", context.name.clone()))?;
        let count = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: an open context and its channel.
        let queue = unsafe {
            (library.ibv_create_cq)(raw, count, std::ptr::null_mut(), channel.as_ptr(), 0)
        };
        let Some(queue) = NonNull::new(queue) else {
            let error = last("ibv_create_cq", format!("{entries} entries on {}", context.name));
            // SAFETY: made above, used by nothing.
            unsafe { (library.ibv_destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        let completions = Self { raw: queue, channel, context: context.clone() };
        let fd = completions.fd();
        let flags = rustix::fs::fcntl_getfl(fd).map_err(|e| TransportError::os(OP, "fcntl", e))?;
        rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)
            .map_err(|e| TransportError::os(OP, "fcntl", e))?;
        Ok(Arc::new(completions))
    }

    /// Readable when there are completions since [`Completions::arm`].
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: a live channel has an open descriptor as long as it lives.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }

    /// Takes completions, as many as there are and fit.
    pub(super) fn poll(&self, into: &mut [ffi::ibv_wc]) -> Result<usize> {
        let count = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: a live queue, whose context's table has this entry (every provider sets it).
        let taken = unsafe {
            let poll = self.context.raw.as_ref().ops.poll_cq;
            poll.expect("set by every provider")(self.raw.as_ptr(), count, into.as_mut_ptr())
        };
        usize::try_from(taken).map_err(|_| failed("ibv_poll_cq", -taken, self.context.name.clone()))
    }

    /// Asks for the descriptor to become readable at the next completion.
    pub(super) fn arm(&self) -> Result<()> {
        // SAFETY: a live queue, whose context's table has this entry (every provider sets it).
        let code = unsafe {
            let arm = self.context.raw.as_ref().ops.req_notify_cq;
            arm.expect("set by every provider")(self.raw.as_ptr(), 0)
        };
        check("ibv_req_notify_cq", code, &self.context.name)
    }

    /// Takes what made the descriptor readable.
    pub(super) fn disarm(&self) {
        let (mut queue, mut user) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a live channel that does not block; the event is acknowledged at once.
        unsafe {
            let library = self.context.library;
            while (library.ibv_get_cq_event)(self.channel.as_ptr(), &mut queue, &mut user) == 0 {
                (library.ibv_ack_cq_events)(queue, 1);
            }
        }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: made by `new`; queue pairs hold it, so are gone, and all events are acknowledged.
        unsafe {
            (self.context.library.ibv_destroy_cq)(self.raw.as_ptr());
            (self.context.library.ibv_destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}

/// The sizes of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct PairSize {
    pub send: usize,
    pub receive: usize,
}

/// A reliably connected queue pair.
#[derive(Debug)]
pub(super) struct Pair {
    raw: NonNull<ffi::ibv_qp>,
    domain: Arc<Domain>,
    inline: bool,
    _completions: Arc<Completions>,
}

// SAFETY: as for `Context`, of which it is part.
unsafe impl Send for Pair {}
// SAFETY: as for `Context`, of which it is part.
unsafe impl Sync for Pair {}

/// A write to a peer's memory with an immediate, or without one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Write {
    pub id: u64,
    pub local: u64,
    pub local_key: u32,
    pub bytes: u32,
    pub remote: u64,
    pub remote_key: u32,
    pub immediate: Option<u32>,
    pub signalled: bool,
}

/// So many bytes travel within the request where the device can do that.
pub(super) const INLINE: usize = 16;

impl Pair {
    pub(super) fn new(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        size: PairSize,
    ) -> Result<Self> {
        let create = |inline: usize| {
            // SAFETY: numbers and pointers, for which zero is a value.
            let mut init: ffi::ibv_qp_init_attr = unsafe { std::mem::zeroed() };
            init.send_cq = completions.raw.as_ptr();
            init.recv_cq = completions.raw.as_ptr();
            init.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
            init.cap = ffi::ibv_qp_cap {
                max_send_wr: size.send as u32,
                max_recv_wr: size.receive as u32,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline as u32,
            };
            // SAFETY: a live domain and queue of one context.
            let raw =
                unsafe { (domain.context.library.ibv_create_qp)(domain.raw.as_ptr(), &mut init) };
            NonNull::new(raw)
        };
        let (raw, inline) = match create(INLINE) {
            Some(raw) => (Some(raw), true),
            None => (create(0), false),
        };
        let detail = || format!("{size:?} on {}", domain.context.name);
        let raw = raw.ok_or_else(|| last("ibv_create_qp", detail()))?;
        let (domain, completions) = (domain.clone(), completions.clone());
        Ok(Self { raw, domain, inline, _completions: completions })
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: a live queue pair.
        unsafe { self.raw.as_ref() }.qp_num
    }

    pub(super) fn modify(
        &self,
        attr: &mut ffi::ibv_qp_attr,
        mask: ffi::ibv_qp_attr_mask,
        detail: &str,
    ) -> Result<()> {
        let library = self.domain.context.library;
        // SAFETY: a live queue pair; the mask names members that the caller has set.
        let code = unsafe { (library.ibv_modify_qp)(self.raw.as_ptr(), attr, mask.0 as c_int) };
        check("ibv_modify_qp", code, detail)
    }

    /// Room for one more immediate.
    pub(super) fn post_receive(&self, id: u64) -> Result<()> {
        let mut request = ffi::ibv_recv_wr {
            wr_id: id,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: a live queue pair; the request has no memory and is read before the call returns.
        let code = unsafe {
            let post = self.domain.context.raw.as_ref().ops.post_recv;
            post.expect("set by every provider")(self.raw.as_ptr(), &mut request, &mut bad)
        };
        check("ibv_post_recv", code, &self.domain.context.name)
    }

    /// Starts a write.
    ///
    /// # Safety
    /// The local bytes are registered under the local key and are not written before the write is
    /// done, or else what arrives is anything.
    pub(super) unsafe fn post_write(&self, write: &Write) -> Result<()> {
        use ffi::{ibv_send_flags as Flags, ibv_wr_opcode as Opcode};
        let mut piece =
            ffi::ibv_sge { addr: write.local, length: write.bytes, lkey: write.local_key };
        // SAFETY: numbers, pointers and unions of them, for which zero is a value.
        let mut request: ffi::ibv_send_wr = unsafe { std::mem::zeroed() };
        request.wr_id = write.id;
        request.sg_list = &mut piece;
        request.num_sge = 1;
        request.opcode = Opcode::IBV_WR_RDMA_WRITE;
        if let Some(immediate) = write.immediate {
            request.opcode = Opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
            request.__bindgen_anon_1.imm_data = immediate.to_be();
        }
        request.wr.rdma.remote_addr = write.remote;
        request.wr.rdma.rkey = write.remote_key;
        if write.signalled {
            request.send_flags |= Flags::IBV_SEND_SIGNALED.0;
        }
        if self.inline && write.bytes as usize <= INLINE {
            request.send_flags |= Flags::IBV_SEND_INLINE.0;
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: a live queue pair; request and list are read before the call returns, the memory
        // is as the caller promises.
        let code = unsafe {
            let post = self.domain.context.raw.as_ref().ops.post_send;
            post.expect("set by every provider")(self.raw.as_ptr(), &mut request, &mut bad)
        };
        check("ibv_post_send", code, &self.domain.context.name)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // SAFETY: made by `new`.
        unsafe { (self.domain.context.library.ibv_destroy_qp)(self.raw.as_ptr()) };
    }
}
