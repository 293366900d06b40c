//! libibverbs, opened at run time, and its objects with an owner each.
//!
//! Types come from `ibverbs-sys`; no function of it is used, so that nothing links the library.
//! Objects hold what they were made of, hence are destroyed in the order that the library asks for.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use ibverbs_sys as ffi;

use super::OP;
use super::areas::{Refused, Source};
use crate::{Result, TransportError};

/// What to install where the library is missing.
const PACKAGES: &str = "install rdma-core (Debian and Ubuntu: libibverbs1 and ibverbs-providers)";

macro_rules! library {
    ($($name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)* ? $($(#[$attr:meta])* $optional:ident: fn($($oarg:ty),*) $(-> $oret:ty)?;)*) => {
        /// The functions used, by name.
        #[derive(Debug)]
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            $($(#[$attr])* pub(super) $optional: Option<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>,)*
            /// None where functions are a test's own.
            _library: Option<libloading::Library>,
        }

        impl Library {
            fn open(name: &str) -> Result<Self, String> {
                // SAFETY: the library's initialisers register fork handlers and read configuration
                // files; they ask nothing of the caller.
                let library = unsafe { libloading::Library::new(name) };
                let library = library.map_err(|e| format!("{e}: {PACKAGES}"))?;
                // SAFETY: the types are those of the functions' declarations in verbs.h, and the
                // addresses are used only while `_library` keeps them loaded.
                unsafe {
                    Ok(Self {
                        $($name: *library
                            .get(concat!(stringify!($name), "\0").as_bytes())
                            .map_err(|e| format!("{name} is too old: {e}"))?,)*
                        $($optional: library
                            .get(concat!(stringify!($optional), "\0").as_bytes())
                            .ok()
                            .map(|symbol| *symbol),)*
                        _library: Some(library),
                    })
                }
            }

            /// Functions that nobody may call, for tests to replace.
            #[cfg(test)]
            pub(super) fn unused() -> Self {
                Self {
                    $($name: {
                        unsafe extern "C" fn $name($(_: $arg),*) $(-> $ret)? {
                            panic!("a test has no {}", stringify!($name));
                        }
                        $name
                    },)*
                    $($optional: None,)*
                    _library: None,
                }
            }
        }
    };
}

library! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut ffi::ibv_device;
    ibv_free_device_list: fn(*mut *mut ffi::ibv_device);
    ibv_get_device_name: fn(*mut ffi::ibv_device) -> *const c_char;
    ibv_open_device: fn(*mut ffi::ibv_device) -> *mut ffi::ibv_context;
    ibv_close_device: fn(*mut ffi::ibv_context) -> c_int;
    ibv_query_device: fn(*mut ffi::ibv_context, *mut ffi::ibv_device_attr) -> c_int;
    ibv_query_port: fn(*mut ffi::ibv_context, u8, *mut ffi::ibv_port_attr) -> c_int;
    ibv_query_gid: fn(*mut ffi::ibv_context, u8, c_int, *mut ffi::ibv_gid) -> c_int;
    ibv_alloc_pd: fn(*mut ffi::ibv_context) -> *mut ffi::ibv_pd;
    ibv_dealloc_pd: fn(*mut ffi::ibv_pd) -> c_int;
    ibv_reg_mr: fn(*mut ffi::ibv_pd, *mut c_void, usize, c_int) -> *mut ffi::ibv_mr;
    ibv_dereg_mr: fn(*mut ffi::ibv_mr) -> c_int;
    ibv_create_comp_channel: fn(*mut ffi::ibv_context) -> *mut ffi::ibv_comp_channel;
    ibv_destroy_comp_channel: fn(*mut ffi::ibv_comp_channel) -> c_int;
    ibv_create_cq: fn(*mut ffi::ibv_context, c_int, *mut c_void, *mut ffi::ibv_comp_channel, c_int) -> *mut ffi::ibv_cq;
    ibv_destroy_cq: fn(*mut ffi::ibv_cq) -> c_int;
    ibv_get_cq_event: fn(*mut ffi::ibv_comp_channel, *mut *mut ffi::ibv_cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: fn(*mut ffi::ibv_cq, c_uint);
    ibv_create_qp: fn(*mut ffi::ibv_pd, *mut ffi::ibv_qp_init_attr) -> *mut ffi::ibv_qp;
    ibv_destroy_qp: fn(*mut ffi::ibv_qp) -> c_int;
    ibv_modify_qp: fn(*mut ffi::ibv_qp, *mut ffi::ibv_qp_attr, c_int) -> c_int;
    ibv_wc_status_str: fn(ffi::ibv_wc_status::Type) -> *const c_char;
    ibv_get_async_event: fn(*mut ffi::ibv_context, *mut ffi::ibv_async_event) -> c_int;
    ibv_ack_async_event: fn(*mut ffi::ibv_async_event);
    ibv_event_type_str: fn(ffi::ibv_event_type) -> *const c_char;
    ?
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only devices have dma-bufs"))]
    ibv_reg_dmabuf_mr: fn(*mut ffi::ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ffi::ibv_mr;
    ibv_reg_mr_iova2: fn(*mut ffi::ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ffi::ibv_mr;
}

impl Library {
    /// The library of this process.
    ///
    /// # Errors
    /// [`TransportError::Unsupported`] where it is not there, with what to install.
    pub(super) fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        let library = LIBRARY.get_or_init(|| Self::open("libibverbs.so.1"));
        library.as_ref().map_err(|detail| TransportError::Unsupported {
            op: OP,
            detail: format!("libibverbs.so.1 cannot be opened: {detail}"),
        })
    }

    /// What a completion's status means.
    pub(super) fn status(&self, status: ffi::ibv_wc_status::Type) -> String {
        // SAFETY: takes any number and returns a static string.
        let text = unsafe { (self.ibv_wc_status_str)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: a string of the library's, which lives as long as the library.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// The error of a call that sets `errno`.
pub(super) fn last(call: &'static str, detail: impl Into<String>) -> TransportError {
    let code = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    failed(call, code, detail)
}

pub(super) fn failed(call: &'static str, code: i32, detail: impl Into<String>) -> TransportError {
    let detail = detail.into();
    let text = std::io::Error::from_raw_os_error(code);
    let detail = if detail.is_empty() { text.to_string() } else { format!("{text}; {detail}") };
    TransportError::Device { op: OP, call, code, detail }
}

/// The outcome of a call that returns an `errno`.
pub(super) fn check(call: &'static str, code: c_int, detail: &str) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(failed(call, code.abs(), detail)) }
}

/// An open device.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) raw: NonNull<ffi::ibv_context>,
    pub(super) library: &'static Library,
    pub(super) name: String,
}

// SAFETY: libibverbs allows all calls on one context from any thread.
unsafe impl Send for Context {}
// SAFETY: libibverbs allows calls on one context from several threads at the same time.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the device of that name.
    pub(super) fn open(name: &str) -> Result<Arc<Self>> {
        let library = Library::get()?;
        let mut count = 0;
        // SAFETY: `count` is written; the list is freed below.
        let list = unsafe { (library.ibv_get_device_list)(&mut count) };
        if list.is_null() {
            return Err(last("ibv_get_device_list", "is the kernel's ib_uverbs module loaded?"));
        }
        let devices = (0..usize::try_from(count).unwrap_or(0)).map(|i| {
            // SAFETY: the list has `count` entries.
            unsafe { *list.add(i) }
        });
        let named = |device: &*mut ffi::ibv_device| {
            // SAFETY: an entry of the list, which is alive; the name lives in it.
            let theirs = unsafe { CStr::from_ptr((library.ibv_get_device_name)(*device)) };
            theirs.to_bytes() == name.as_bytes()
        };
        let mut found = devices;
        let raw = found.find(named).map(|device| {
            // SAFETY: an entry of the list, which is alive; an open context does not need it any more.
            let raw = NonNull::new(unsafe { (library.ibv_open_device)(device) });
            raw.ok_or_else(|| {
                last(
                    "ibv_open_device",
                    format!("{name}: may this user open its /dev/infiniband node?"),
                )
            })
        });
        // SAFETY: made above and not used any more.
        unsafe { (library.ibv_free_device_list)(list) };
        let missing = || TransportError::Unsupported {
            op: OP,
            detail: format!(
                "libibverbs knows no device {name}: its provider may be missing ({PACKAGES}), or \
                 its /dev/infiniband node"
            ),
        };
        let raw = raw.ok_or_else(missing)??;
        Ok(Arc::new(Self { raw, library, name: name.into() }))
    }

    pub(super) fn device(&self) -> Result<ffi::ibv_device_attr> {
        // SAFETY: plain numbers and arrays of them, for which zero is a value.
        let mut attr: ffi::ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: an open context; `attr` has the size that the function fills.
        let code = unsafe { (self.library.ibv_query_device)(self.raw.as_ptr(), &mut attr) };
        check("ibv_query_device", code, &self.name)?;
        Ok(attr)
    }

    pub(super) fn port(&self, port: u8) -> Result<ffi::ibv_port_attr> {
        // SAFETY: plain numbers, for which zero is a value.
        let mut attr: ffi::ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: an open context; the exported function fills an older, shorter form of the
        // structure, which is its beginning.
        let code = unsafe { (self.library.ibv_query_port)(self.raw.as_ptr(), port, &mut attr) };
        check("ibv_query_port", code, &format!("port {port} of {}", self.name))?;
        Ok(attr)
    }

    pub(super) fn gid(&self, port: u8, index: u32) -> Result<[u8; 16]> {
        let mut gid = ffi::ibv_gid { raw: [0; 16] };
        // SAFETY: an open context; `gid` is written.
        let code = unsafe {
            (self.library.ibv_query_gid)(self.raw.as_ptr(), port, index as c_int, &mut gid)
        };
        if code != 0 {
            return Err(last("ibv_query_gid", format!("GID {index} of {}", self.name)));
        }
        // SAFETY: every member of the union is 16 bytes of anything.
        Ok(unsafe { gid.raw })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened by `open`; what was made of it held it, so is gone.
        unsafe { (self.library.ibv_close_device)(self.raw.as_ptr()) };
    }
}

/// A protection domain.
#[derive(Debug)]
pub(super) struct Domain {
    pub(super) raw: NonNull<ffi::ibv_pd>,
    pub(super) context: Arc<Context>,
}

// SAFETY: as for `Context`, of which it is part.
unsafe impl Send for Domain {}
// SAFETY: as for `Context`, of which it is part.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        // SAFETY: an open context.
        let raw = NonNull::new(unsafe { (context.library.ibv_alloc_pd)(context.raw.as_ptr()) });
        let raw = raw.ok_or_else(|| last("ibv_alloc_pd", context.name.clone()))?;
        Ok(Arc::new(Self { raw, context: context.clone() }))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: made by `new`; what was made in it held it, so is gone.
        unsafe { (self.context.library.ibv_dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Memory that a device may read and that peers may write.
#[derive(Debug)]
pub(super) struct Registered {
    raw: NonNull<ffi::ibv_mr>,
    domain: Arc<Domain>,
    /// What is registered stays mapped.
    _memory: Source,
}

// SAFETY: as for `Context`, of which it is part.
unsafe impl Send for Registered {}
// SAFETY: as for `Context`, of which it is part.
unsafe impl Sync for Registered {}

impl Registered {
    /// `relaxed`: writes of different messages may reach memory in any order.
    ///
    /// # Errors
    /// [`Refused::Unreachable`] where a dma-buf cannot be registered at all.
    pub(super) fn new(
        domain: &Arc<Domain>,
        memory: Source,
        relaxed: bool,
    ) -> Result<Self, Refused> {
        let relaxed =
            if relaxed { ffi::ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0 } else { 0 };
        let access = ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0
            | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        let raw = match &memory {
            Source::Pages { .. } => pages(domain, &memory, access, relaxed),
            #[cfg(feature = "cuda")]
            Source::DmaBuf(buf) => dma_buf(domain, buf, access | relaxed)?,
        };
        let Some(raw) = NonNull::new(raw) else { return Err(refused(domain, &memory)) };
        Ok(Self { raw, domain: domain.clone(), _memory: memory })
    }

    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: a live registration.
        unsafe { self.raw.as_ref() }.lkey
    }

    pub(super) fn remote_key(&self) -> u32 {
        // SAFETY: a live registration.
        unsafe { self.raw.as_ref() }.rkey
    }
}

/// Registers pages of this process; null and `errno` where that fails.
fn pages(domain: &Domain, memory: &Source, access: u32, relaxed: u32) -> *mut ffi::ibv_mr {
    let library = domain.context.library;
    let (base, bytes) = (memory.address(), memory.bytes());
    let at = base as *mut c_void;
    // SAFETY: the pages are mapped as long as `memory` is held, which is until after they are
    // deregistered. Who writes what in them is the link's business.
    unsafe {
        match library.ibv_reg_mr_iova2.filter(|_| relaxed != 0) {
            Some(register) => register(domain.raw.as_ptr(), at, bytes, base, access | relaxed),
            None => (library.ibv_reg_mr)(domain.raw.as_ptr(), at, bytes, access as c_int),
        }
    }
}

/// Registers a device's memory; null and `errno` where that fails.
#[cfg(feature = "cuda")]
fn dma_buf(
    domain: &Domain,
    buf: &super::areas::DmaBuf,
    access: u32,
) -> Result<*mut ffi::ibv_mr, Refused> {
    use std::os::fd::AsRawFd;
    let Some(register) = domain.context.library.ibv_reg_dmabuf_mr else {
        let detail = format!("libibverbs has no ibv_reg_dmabuf_mr: version 34 does ({PACKAGES})");
        return Err(Refused::Unreachable(detail));
    };
    let (fd, pd) = (buf.fd.as_raw_fd(), domain.raw.as_ptr());
    // Peers name bytes by the device's own addresses, as they do those of hosts.
    // SAFETY: an open dma-buf of `bytes` bytes, which the registration keeps.
    Ok(unsafe { register(pd, 0, buf.bytes, buf.address, fd, access as c_int) })
}

/// The error of a registration that has just failed.
fn refused(domain: &Domain, memory: &Source) -> Refused {
    let code = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    let (bytes, name) = (memory.bytes(), &domain.context.name);
    #[cfg(feature = "cuda")]
    if let Source::DmaBuf(_) = memory {
        let what = format!("{name} takes no dma-buf of {bytes} bytes");
        // What libraries, drivers and kernels without dma-buf answer; anything else is a failure.
        return match code {
            libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT => {
                Refused::Unreachable(format!("{what}: {}", std::io::Error::from_raw_os_error(code)))
            }
            _ => failed("ibv_reg_dmabuf_mr", code, what).into(),
        };
    }
    let remedy = match code {
        libc::ENOMEM | libc::EPERM | libc::EAGAIN => {
            ": raise the limit on locked memory (`ulimit -l unlimited`; LimitMEMLOCK for services; \
             --ulimit memlock=-1 for containers)"
        }
        _ => "",
    };
    failed("ibv_reg_mr", code, format!("{bytes} bytes on {name}{remedy}")).into()
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: made by `new`; queue pairs that could use it are the owner's to end first.
        unsafe { (self.domain.context.library.ibv_dereg_mr)(self.raw.as_ptr()) };
    }
}

/// Objects made of a test's own functions.
#[cfg(test)]
pub(super) mod mock {
    use super::*;

    unsafe extern "C" fn close(context: *mut ffi::ibv_context) -> c_int {
        // SAFETY: made by `context`, and closed once.
        drop(unsafe { Box::from_raw(context) });
        0
    }

    /// A device of that name.
    pub(in super::super) fn context(mut library: Library, name: &str) -> Arc<Context> {
        library.ibv_close_device = close;
        // SAFETY: numbers, pointers and optional functions, for which zero is a value.
        let raw: ffi::ibv_context = unsafe { std::mem::zeroed() };
        let raw = NonNull::from(Box::leak(Box::new(raw)));
        Arc::new(Context { raw, library: Box::leak(Box::new(library)), name: name.into() })
    }
}
