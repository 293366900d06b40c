//! Unix sockets that carry descriptors, one packet each way.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind,
    connect, listen, recvmsg, sendmsg, socket_with,
};
use serde::{Deserialize, Serialize};

use super::memfd::os;
use crate::Result;
use crate::rendezvous::host::{hex, random};

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// A token and a rank.
pub(super) const PACKET: usize = 20;

/// Where a rank can be called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Name {
    /// Nowhere: it has a problem.
    None,
    /// In the abstract namespace, which leaves nothing behind.
    Abstract(Vec<u8>),
    /// A file, where the abstract namespace is forbidden.
    Path(PathBuf),
}

impl Name {
    fn address(&self) -> rustix::io::Result<SocketAddrUnix> {
        match self {
            Self::None => Err(Errno::CONNREFUSED),
            Self::Abstract(name) => SocketAddrUnix::new_abstract_name(name),
            Self::Path(path) => SocketAddrUnix::new(path.as_path()),
        }
    }
}

/// A socket under a random name.
#[derive(Debug)]
pub(super) struct Listener {
    fd: OwnedFd,
    name: Name,
}

impl Listener {
    pub(super) fn bind() -> Result<Self> {
        let random = format!("ep-{}", hex(&random()));
        Self::at(Name::Abstract(random.clone().into_bytes())).or_else(|first| {
            let directory = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
            let directory = directory.filter(|path| path.is_absolute());
            let directory = directory.as_deref().unwrap_or(Path::new("/tmp"));
            Self::at(Name::Path(directory.join(random))).map_err(|_| first)
        })
    }

    pub(super) fn at(name: Name) -> Result<Self> {
        let failed = |e| os("listening on a Unix socket", e);
        let fd = new_socket().map_err(failed)?;
        bind(&fd, &name.address().map_err(failed)?).map_err(failed)?;
        // From here on dropping it removes a file.
        let listener = Self { fd, name };
        listen(&listener.fd, 4096).map_err(failed)?;
        Ok(listener)
    }

    pub(super) fn name(&self) -> &Name {
        &self.name
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Who calls, if someone does.
    pub(super) fn accept(&self) -> Result<Option<OwnedFd>> {
        match accept_with(&self.fd, FLAGS) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(e) => Err(os("accepting a peer", e)),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Name::Path(path) = &self.name {
            // A file that somebody else removed is gone too.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn new_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
}

/// Calls a peer; none if it is too busy right now.
pub(super) fn call(name: &Name) -> rustix::io::Result<Option<OwnedFd>> {
    let fd = new_socket()?;
    match connect(&fd, &name.address()?) {
        Ok(()) => Ok(Some(fd)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(e) => Err(e),
    }
}

/// The user at the other end of a connection.
pub(super) fn user(fd: BorrowedFd<'_>) -> Option<u32> {
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `who`, which has that many and for which
    // any bytes are valid; both outlive the call.
    let status = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut who).cast(),
            &raw mut len,
        )
    };
    (status == 0 && len as usize == size_of::<libc::ucred>()).then_some(who.uid)
}

/// Sends one packet with a descriptor. The first packet always fits.
pub(super) fn send(
    to: &OwnedFd,
    packet: &[u8; PACKET],
    fd: BorrowedFd<'_>,
) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(Errno::NOBUFS);
    }
    loop {
        match sendmsg(to, &[IoSlice::new(packet)], &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// Receives one packet with a descriptor; none if it has not come yet.
pub(super) fn receive(from: &OwnedFd) -> rustix::io::Result<Option<([u8; PACKET], OwnedFd)>> {
    let mut packet = [0; PACKET];
    // Room for more than one, so that a second is seen (and closed) rather than lost.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut packet)];
    let got = match recvmsg(from, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
        Ok(got) => got,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(e) => return Err(e),
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.bytes == 0 && fds.is_empty() {
        return Err(Errno::CONNRESET);
    }
    match (fds.pop(), fds.is_empty()) {
        (Some(fd), true) if got.bytes == PACKET => Ok(Some((packet, fd))),
        // Out of descriptors, the kernel delivers the bytes alone.
        (None, _) if got.bytes == PACKET => Err(Errno::MFILE),
        _ => Err(Errno::BADMSG),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_file_is_removed() {
        let path = std::env::temp_dir().join(format!("ep-test-{}", hex(&random())));
        let listener = Listener::at(Name::Path(path.clone())).unwrap();
        assert!(path.exists());
        let caller = call(listener.name()).unwrap().unwrap();
        assert_eq!(user(caller.as_fd()), Some(rustix::process::geteuid().as_raw()));
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_descriptor_travels() {
        let listener = Listener::bind().unwrap();
        let caller = call(listener.name()).unwrap().unwrap();
        let guest = listener.accept().unwrap().unwrap();
        assert!(receive(&guest).unwrap().is_none());
        send(&caller, &[7; PACKET], listener.fd()).unwrap();
        let (packet, _fd) = receive(&guest).unwrap().unwrap();
        assert_eq!(packet, [7; PACKET]);
        drop(caller);
        assert_eq!(receive(&guest).unwrap_err(), Errno::CONNRESET);
    }
}
