//! What befalls a NIC besides completions: a port that goes down, a queue pair or the whole device
//! that fails.

use std::ffi::CStr;
use std::os::fd::BorrowedFd;

use ibverbs_sys as ffi;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::OP;
use super::device::Id;
use super::verbs::{Context, failed};
use crate::{Result, TransportError};

const CALL: &str = "ibv_get_async_event";

/// `IBV_WC_LOC_QP_OP_ERR`, `IBV_WC_REM_INV_REQ_ERR`, `IBV_WC_REM_ACCESS_ERR`: what completions would
/// say of the same.
const BROKEN: i32 = 2;
const INVALID: i32 = 9;
const DENIED: i32 = 10;

/// Something that a proxy has to act on.
#[derive(Clone, Debug)]
pub(super) enum Event {
    /// A queue pair is of no more use, for the reason that `status` (`ibv_wc_status`) is one of.
    Pair {
        id: Id,
        status: i32,
        detail: String,
    },
    /// Nothing goes through the port until it is up again.
    PortDown {
        port: String,
    },
    PortUp,
    /// Nothing works any more.
    Dead(TransportError),
}

/// An event as the library tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Raw {
    kind: ffi::ibv_event_type,
    subject: Subject,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    Device,
    /// The queue pair with this number.
    Pair(u32),
    Port(i32),
}

/// Readable when something has happened.
pub(super) fn fd(context: &Context) -> BorrowedFd<'_> {
    // SAFETY: an open context has an open descriptor as long as it lives.
    unsafe { BorrowedFd::borrow_raw(context.raw.as_ref().async_fd) }
}

/// Makes [`next`] come back where nothing has happened.
pub(super) fn unblock(context: &Context) -> Result<()> {
    let flags = fcntl_getfl(fd(context)).map_err(|e| TransportError::os(OP, "fcntl", e))?;
    let set = fcntl_setfl(fd(context), flags | OFlags::NONBLOCK);
    set.map_err(|e| TransportError::os(OP, "fcntl", e))
}

/// Takes what has happened next, if something has. A device that was removed is an error.
pub(super) fn next(context: &Context) -> Result<Option<Raw>> {
    let mut event = ffi::ibv_async_event {
        element: ffi::ibv_async_event__bindgen_ty_1 { port_num: 0 },
        event_type: ffi::IBV_EVENT_CQ_ERR,
    };
    // SAFETY: an open context; `event` is written.
    if unsafe { (context.library.ibv_get_async_event)(context.raw.as_ptr(), &mut event) } != 0 {
        let error = std::io::Error::last_os_error();
        let code = error.raw_os_error().unwrap_or(libc::EIO);
        return match code {
            libc::EAGAIN | libc::EINTR => Ok(None),
            // What uverbs answers once the device's driver is gone.
            libc::EIO | libc::ENODEV => {
                Err(failed(CALL, code, format!("{} has been removed", context.name)))
            }
            _ => Err(failed(CALL, code, context.name.clone())),
        };
    }
    let kind = event.event_type;
    let subject = match kind {
        ffi::IBV_EVENT_QP_FATAL | ffi::IBV_EVENT_QP_REQ_ERR | ffi::IBV_EVENT_QP_ACCESS_ERR => {
            // SAFETY: this kind of event is about a queue pair, which lives at least until the event
            // is acknowledged.
            Subject::Pair(unsafe { (*event.element.qp).qp_num })
        }
        ffi::IBV_EVENT_PORT_ACTIVE | ffi::IBV_EVENT_PORT_ERR => {
            // SAFETY: this kind of event is about a port.
            Subject::Port(unsafe { event.element.port_num })
        }
        _ => Subject::Device,
    };
    // Objects with events that are not acknowledged cannot be destroyed.
    // SAFETY: taken above, and acknowledged once.
    unsafe { (context.library.ibv_ack_async_event)(&mut event) };
    Ok(Some(Raw { kind, subject }))
}

/// What a proxy that works on `port` has to make of an event; nothing of most. `id` knows which
/// connection has the queue pair with some number.
pub(super) fn read(
    context: &Context,
    port: u8,
    raw: Raw,
    id: impl Fn(u32) -> Option<Id>,
) -> Option<Event> {
    let said = said(context, raw.kind);
    let name = &context.name;
    let dead = || Some(Event::Dead(failed(CALL, libc::EIO, format!("{name}: {said}"))));
    match (raw.kind, raw.subject) {
        (kind, Subject::Pair(number)) => {
            let status = match kind {
                ffi::IBV_EVENT_QP_REQ_ERR => INVALID,
                ffi::IBV_EVENT_QP_ACCESS_ERR => DENIED,
                _ => BROKEN,
            };
            let detail = format!("{said} (port {port} of {name})");
            id(number).map(|id| Event::Pair { id, status, detail })
        }
        // The device's other ports are not in use here.
        (_, Subject::Port(number)) if number != i32::from(port) => None,
        (ffi::IBV_EVENT_PORT_ACTIVE, _) => Some(Event::PortUp),
        (ffi::IBV_EVENT_PORT_ERR, _) => {
            Some(Event::PortDown { port: format!("port {port} of {name}") })
        }
        (ffi::IBV_EVENT_DEVICE_FATAL | ffi::IBV_EVENT_CQ_ERR, _) => dead(),
        _ => {
            tracing::debug!(device = %name, event = %said, "nothing to do about an event");
            None
        }
    }
}

fn said(context: &Context, kind: ffi::ibv_event_type) -> String {
    // SAFETY: takes any number and returns a static string.
    let text = unsafe { (context.library.ibv_event_type_str)(kind) };
    if text.is_null() {
        return format!("event {kind}");
    }
    // SAFETY: a string of the library's, which lives as long as the library.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::VecDeque;
    use std::ffi::{c_char, c_int};
    use std::sync::Arc;

    use super::super::device::Kind;
    use super::super::verbs::Library;
    use super::super::verbs::mock::context;
    use super::*;

    thread_local! {
        /// What the mock tells next: a kind and a port, or an errno.
        static COMING: RefCell<VecDeque<Result<(u32, c_int), i32>>> = RefCell::default();
        /// Events told that are not acknowledged.
        static OPEN: RefCell<i32> = const { RefCell::new(0) };
        /// The queue pair that events are about.
        static PAIR: RefCell<ffi::ibv_qp> =
            RefCell::new(ffi::ibv_qp { qp_num: 77, ..Default::default() });
    }

    unsafe extern "C" fn get(_: *mut ffi::ibv_context, into: *mut ffi::ibv_async_event) -> c_int {
        let next = COMING.with_borrow_mut(|coming| coming.pop_front());
        match next.unwrap_or(Err(libc::EAGAIN)) {
            Ok((event_type, port_num)) => {
                let element = if (1..=3).contains(&event_type) {
                    let qp = PAIR.with(RefCell::as_ptr);
                    ffi::ibv_async_event__bindgen_ty_1 { qp }
                } else {
                    ffi::ibv_async_event__bindgen_ty_1 { port_num }
                };
                // SAFETY: the caller gives a place for one event.
                unsafe { into.write(ffi::ibv_async_event { element, event_type }) };
                OPEN.with_borrow_mut(|open| *open += 1);
                0
            }
            Err(errno) => {
                // SAFETY: the calling thread's own variable.
                unsafe { *libc::__errno_location() = errno };
                -1
            }
        }
    }

    unsafe extern "C" fn ack(_: *mut ffi::ibv_async_event) {
        OPEN.with_borrow_mut(|open| *open -= 1);
    }

    unsafe extern "C" fn name(_: ffi::ibv_event_type) -> *const c_char {
        c"something has happened".as_ptr()
    }

    fn mock() -> Arc<Context> {
        let mut library = Library::unused();
        library.ibv_get_async_event = get;
        library.ibv_ack_async_event = ack;
        library.ibv_event_type_str = name;
        context(library, "mlx5_7")
    }

    fn event(kind: u32, port: c_int) -> Option<Event> {
        let context = mock();
        COMING.with_borrow_mut(|coming| coming.push_back(Ok((kind, port))));
        let raw = next(&context).unwrap().expect("an event");
        let id = Id { kind: Kind::Write, peer: 3, pair: 1 };
        read(&context, 2, raw, |number| (number == 77).then_some(id))
    }

    #[test]
    fn events_name_device_port_and_queue_pair() {
        let id = Id { kind: Kind::Write, peer: 3, pair: 1 };
        for (kind, status) in [(1, BROKEN), (2, INVALID), (3, DENIED)] {
            let Some(Event::Pair { id: of, status: is, detail }) = event(kind, 0) else {
                panic!("{kind}")
            };
            assert_eq!((of, is), (id, status));
            assert_eq!(detail, "something has happened (port 2 of mlx5_7)");
        }
        let Some(Event::PortDown { port }) = event(ffi::IBV_EVENT_PORT_ERR, 2) else { panic!() };
        assert_eq!(port, "port 2 of mlx5_7");
        assert!(matches!(event(ffi::IBV_EVENT_PORT_ACTIVE, 2), Some(Event::PortUp)));
        assert!(event(ffi::IBV_EVENT_PORT_ERR, 1).is_none(), "another port");
        for kind in [ffi::IBV_EVENT_DEVICE_FATAL, ffi::IBV_EVENT_CQ_ERR] {
            let Some(Event::Dead(error)) = event(kind, 0) else { panic!("{kind}") };
            let text = error.to_string();
            assert!(text.contains("mlx5_7: something has happened"), "{text}");
        }
        assert!(event(ffi::IBV_EVENT_GID_CHANGE, 2).is_none());
        assert_eq!(OPEN.with_borrow(|open| *open), 0, "every event is acknowledged");
    }

    #[test]
    fn a_removed_device_is_an_error_and_silence_is_none() {
        let context = mock();
        assert_eq!(next(&context).unwrap(), None);
        COMING.with_borrow_mut(|coming| coming.push_back(Err(libc::EIO)));
        let text = next(&context).unwrap_err().to_string();
        assert!(text.contains("mlx5_7 has been removed"), "{text}");
    }
}
