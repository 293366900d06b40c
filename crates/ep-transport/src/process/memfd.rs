//! Anonymous files as shared memory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::memfd_create;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::OP;
use crate::host_link::Region;
use crate::{Result, TransportError};

const HUGE_PAGE: usize = 2 << 20;

/// An [`TransportError::Os`] that says what can be done about it.
pub(super) fn os(what: &str, e: Errno) -> TransportError {
    let remedy = match e {
        Errno::MFILE => ": raise `ulimit -n`",
        Errno::NFILE => ": raise fs.file-max",
        Errno::NOMEM | Errno::NOSPC => {
            ": not enough memory or mappings; ask for smaller windows or fewer slots, or raise \
             the container's memory limit or vm.max_map_count"
        }
        Errno::FBIG => ": the file size limit is too low; raise `ulimit -f`",
        Errno::NOSYS | Errno::PERM | Errno::ACCESS => {
            ": the kernel or a sandbox forbids it; allow the call, or use another transport"
        }
        Errno::TOOMANYREFS => ": too many descriptors are in flight; raise `ulimit -n`",
        _ => "",
    };
    TransportError::os(OP, format!("{what}{remedy}"), e)
}

/// A rank's own memory: zeroed, real only where touched, and of a size that nobody can change.
#[derive(Debug)]
pub(super) struct Memfd {
    fd: OwnedFd,
    bytes: usize,
}

impl Memfd {
    pub(super) fn create(bytes: usize) -> Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create("ep-window", flags).map_err(|e| os("creating a memfd", e))?;
        ftruncate(&fd, bytes as u64)
            .map_err(|e| os(&format!("giving a memfd {bytes} bytes"), e))?;
        // A file that shrinks would kill whoever touches its mapping.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&fd, seals).map_err(|e| os("sealing a memfd", e))?;
        Ok(Self { fd, bytes })
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(super) fn map(&self) -> Result<Arc<dyn Region>> {
        map(self.fd(), self.bytes)
    }
}

/// Maps a peer's memory, after checking that it is what a peer sends.
pub(super) fn map_foreign(fd: BorrowedFd<'_>, bytes: usize) -> Result<Arc<dyn Region>> {
    let size = fstat(fd).map_err(|e| os("looking at a peer's window", e))?.st_size;
    let sealed = fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    if !sealed || usize::try_from(size).ok() != Some(bytes) {
        return Err(os("a peer's window is not a sealed memfd of the agreed size", Errno::INVAL));
    }
    map(fd, bytes)
}

fn map(fd: BorrowedFd<'_>, bytes: usize) -> Result<Arc<dyn Region>> {
    let failed = |e| os(&format!("mapping a window of {bytes} bytes"), e);
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists, and
    // the file is sealed at `bytes` bytes, so that every page of it exists for good.
    let base = unsafe {
        mmap(
            std::ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            fd,
            0,
        )
    };
    let base =
        NonNull::new(base.map_err(failed)?.cast::<u8>()).ok_or_else(|| failed(Errno::NOMEM))?;
    let mapped = Mapped { base, bytes };
    if bytes >= HUGE_PAGE {
        // Fewer TLB misses; where shared memory has no huge pages it is as it was.
        // SAFETY: the advice does not change the contents of the mapping just made.
        let _ = unsafe { madvise(base.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
    }
    Ok(Arc::new(mapped))
}

/// A mapping of a memfd, which lives on without the descriptor.
#[derive(Debug)]
struct Mapped {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the value is an address range that it owns; accesses are the business of its users.
unsafe impl Send for Mapped {}
// SAFETY: the value is an address range that it owns; accesses are the business of its users.
unsafe impl Sync for Mapped {}

// SAFETY: `map` maps the whole range for loads and stores, page-aligned as mmap does, and only
// `drop` unmaps it.
unsafe impl Region for Mapped {
    fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map`, and whoever used it held this value.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_sealed_and_checked() {
        let memfd = Memfd::create(8192).unwrap();
        assert!(ftruncate(memfd.fd(), 4096).is_err());
        assert!(map_foreign(memfd.fd(), 8192).is_ok());
        let e = map_foreign(memfd.fd(), 4096).unwrap_err().to_string();
        assert!(e.contains("agreed size"), "{e}");
        let open = memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&open, 8192).unwrap();
        assert!(map_foreign(open.as_fd(), 8192).is_err(), "it could shrink");
    }

    #[test]
    fn errors_say_what_to_do() {
        let text = os("x", Errno::MFILE).to_string();
        assert!(text.starts_with("open: x: raise `ulimit -n`: Too many open files"), "{text}");
        assert!(os("x", Errno::NOMEM).to_string().contains("memory limit"));
    }
}
