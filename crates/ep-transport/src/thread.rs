//! Windows shared by the threads of one process.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::host_link::{Apart, HostLink, Region};
use crate::{Deadline, Group, Link, Result, Transport, TransportError, WindowSpec};

/// The transport for ranks that are threads of one process: windows are anonymous memory.
#[derive(Clone, Debug, Default)]
pub struct ThreadTransport {
    apart: Apart,
}

impl ThreadTransport {
    /// Every rank can load from and store to every window.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether to show peers as reachable only by [`Link::put`], to exercise that path.
    pub fn bulk(mut self, bulk: bool) -> Self {
        self.apart = Apart::all(bulk);
        self
    }

    /// Shows consecutive ranks as nodes of these many: ranks map those of their own node and reach
    /// others only by [`Link::put`], as if each node were a host. Replaces [`Self::bulk`].
    pub fn nodes(mut self, sizes: &[usize]) -> Self {
        self.apart = Apart::sizes(sizes);
        self
    }
}

/// Regions whose ranks are about to fetch each other's, by key.
static OFFERED: LazyLock<Mutex<HashMap<u64, Arc<dyn Region>>>> = LazyLock::new(Mutex::default);
static NEXT_KEY: AtomicU64 = AtomicU64::new(0);

/// Takes the region back from [`OFFERED`], however `open` ends.
struct Offer(u64);

impl Offer {
    fn new(region: Arc<dyn Region>) -> Self {
        let key = NEXT_KEY.fetch_add(1, Ordering::Relaxed);
        OFFERED.lock().insert(key, region);
        Self(key)
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        OFFERED.lock().remove(&self.0);
    }
}

impl Transport for ThreadTransport {
    fn name(&self) -> &'static str {
        "host"
    }

    fn maps_all_peers(&self) -> bool {
        self.apart == Apart::None
    }

    fn nodes(&self, world: usize) -> Option<Vec<usize>> {
        self.apart.nodes(world)
    }

    fn open(&self, group: &Group, spec: WindowSpec, deadline: Deadline) -> Result<Arc<dyn Link>> {
        Ok(self.open_with(group, spec, deadline, Anonymous::map)?)
    }
}

impl ThreadTransport {
    /// As `open`, for who needs more of it than a link.
    #[cfg(feature = "cuda")]
    pub(crate) fn open_host(
        &self,
        group: &Group,
        spec: WindowSpec,
        deadline: Deadline,
    ) -> Result<Arc<HostLink>> {
        self.open_with(group, spec, deadline, Anonymous::map)
    }

    fn open_with(
        &self,
        group: &Group,
        spec: WindowSpec,
        deadline: Deadline,
        map: impl FnOnce(usize) -> Result<Arc<dyn Region>>,
    ) -> Result<Arc<HostLink>> {
        spec.agree(group, self.name(), deadline)?;
        self.apart.check(group.world())?;
        let bytes = HostLink::region_bytes(spec, group.world())?;
        // A failure travels in place of the key: it is everyone's error at once.
        let own = map(bytes);
        let offer = own.as_ref().ok().map(|region| Offer::new(region.clone()));
        let all = group.all_gather_within("open", &encode(&own, offer.as_ref()), deadline)?;
        own?;
        let keys = decode(&all)?;
        let fetch = |(rank, key): (usize, &u64)| {
            OFFERED.lock().get(key).cloned().ok_or_else(|| TransportError::PeerLost {
                op: "open",
                peer: rank,
                detail: "it gave up while windows were exchanged".into(),
            })
        };
        let regions = keys.iter().enumerate().map(fetch).collect::<Result<Vec<_>>>();
        let regions = regions.inspect_err(|error| group.report(error))?;
        // Nobody takes an offer back before everyone has fetched it.
        group.all_gather_within("open", &[], deadline)?;
        drop(offer);
        Ok(Arc::new(HostLink::new(group, spec, regions)?.apart(self.apart.clone())))
    }
}

/// What a rank tells the others: its process and either the key of its offer or an errno.
fn encode(own: &Result<Arc<dyn Region>>, offer: Option<&Offer>) -> Vec<u8> {
    // Zero says that all is well, so an error without a number gets one.
    let number = |e: &TransportError| e.code().filter(|&code| code != 0).unwrap_or(libc::EIO);
    let code = own.as_ref().err().map_or(0, number);
    let mut bytes = Vec::with_capacity(36);
    bytes.extend_from_slice(&process().to_le_bytes());
    bytes.extend_from_slice(&offer.map_or(0, |offer| offer.0).to_le_bytes());
    bytes.extend_from_slice(&code.to_le_bytes());
    bytes
}

fn decode(all: &[Vec<u8>]) -> Result<Vec<u64>> {
    let part = |rank: usize| -> Option<(u128, u64, i32)> {
        let (process, rest) = all[rank].split_first_chunk::<16>()?;
        let (key, rest) = rest.split_first_chunk::<8>()?;
        let code = rest.try_into().ok()?;
        Some((u128::from_le_bytes(*process), u64::from_le_bytes(*key), i32::from_le_bytes(code)))
    };
    let mut keys = Vec::with_capacity(all.len());
    let first = part(0).map(|part| part.0);
    for rank in 0..all.len() {
        let Some((_, key, code)) = part(rank).filter(|part| Some(part.0) == first) else {
            return Err(TransportError::Unsupported {
                op: "open",
                detail: format!(
                    "rank {rank} is not a thread of rank 0's process, which this transport needs; \
                     use ProcessTransport for processes of one host"
                ),
            });
        };
        if code != 0 {
            let detail = format!("rank {rank} could not map its window");
            return Err(TransportError::Os { op: "open", peer: Some(rank), code, detail });
        }
        keys.push(key);
    }
    Ok(keys)
}

/// Differs between processes, on whatever hosts.
pub(crate) fn process() -> u128 {
    static RANDOM: LazyLock<u128> = LazyLock::new(|| {
        // Keyed by the system's random numbers; a fresh state twice gives different keys.
        let half = |i: u32| u128::from(RandomState::new().hash_one(i));
        half(0) << 64 | half(1)
    });
    // The number of the process tells apart what a fork has copied.
    *RANDOM ^ u128::from(std::process::id())
}

/// Private anonymous memory: zeroed, and real only where touched.
#[derive(Debug)]
struct Anonymous {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the value is an address range that it owns; accesses are the business of its users.
unsafe impl Send for Anonymous {}
// SAFETY: the value is an address range that it owns; accesses are the business of its users.
unsafe impl Sync for Anonymous {}

// SAFETY: `map` maps the whole range for loads and stores, page-aligned as mmap does, and only
// `drop` unmaps it.
unsafe impl Region for Anonymous {
    fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

const HUGE_PAGE: usize = 2 << 20;

impl Anonymous {
    fn map(bytes: usize) -> Result<Arc<dyn Region>> {
        let failed =
            |e| TransportError::os("open", format!("cannot map a window of {bytes} bytes"), e);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let base = NonNull::new(base.map_err(failed)?.cast::<u8>());
        let region = Self { base: base.ok_or_else(|| failed(rustix::io::Errno::NOMEM))?, bytes };
        if bytes >= HUGE_PAGE {
            // Fewer TLB misses; where the kernel has no huge pages it is as it was.
            // SAFETY: the advice does not change the contents of the mapping just made.
            let _ = unsafe { madvise(region.base.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
        }
        Ok(Arc::new(region))
    }
}

impl Drop for Anonymous {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map`, and whoever used it held this value.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(process: u128, key: u64, code: i32) -> Vec<u8> {
        [&process.to_le_bytes()[..], &key.to_le_bytes(), &code.to_le_bytes()].concat()
    }

    #[test]
    fn another_process_is_unsupported_and_named() {
        let error = decode(&[told(1, 5, 0), told(1, 6, 0), told(2, 5, 0)]).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, TransportError::Unsupported { .. }), "{text}");
        assert!(text.contains("rank 2") && text.contains("ProcessTransport"), "{text}");
        assert_eq!(decode(&[told(1, 5, 0), told(1, 6, 0)]).unwrap(), [5, 6]);
    }

    #[test]
    fn a_rank_that_cannot_map_is_named_to_all() {
        let error = decode(&[told(1, 5, 0), told(1, 0, 12)]).unwrap_err();
        assert_eq!((error.peer(), error.code()), (Some(1), Some(12)));
    }

    #[test]
    fn one_rank_that_cannot_map_is_everyones_prompt_error() {
        let limit = std::time::Duration::from_secs(20);
        let unnumbered = TransportError::Unsupported { op: "open", detail: "no memory".into() };
        let nomem = TransportError::os("open", "no memory", rustix::io::Errno::NOMEM);
        for (failure, code) in [(nomem, libc::ENOMEM), (unnumbered, libc::EIO)] {
            let start = std::time::Instant::now();
            std::thread::scope(|scope| {
                for group in Group::local(3).unwrap() {
                    let failure = failure.clone();
                    scope.spawn(move || {
                        let (poor, spec) =
                            (group.rank() == 1, WindowSpec { bytes: 4096, flags: 1 });
                        let map = |bytes| if poor { Err(failure) } else { Anonymous::map(bytes) };
                        let opened = ThreadTransport::new().open_with(
                            &group,
                            spec,
                            Deadline::after(limit),
                            map,
                        );
                        let error = opened.unwrap_err();
                        if poor {
                            assert!(error.to_string().contains("no memory"), "{error}");
                        } else {
                            assert_eq!((error.peer(), error.code()), (Some(1), Some(code)));
                        }
                        // All are still at the same place.
                        group.barrier().unwrap();
                    });
                }
            });
            assert!(start.elapsed() < limit / 2);
        }
    }

    #[test]
    fn windows_beyond_the_address_space_are_an_argument_error() {
        let group = Group::local(1).unwrap().remove(0);
        let deadline = Deadline::after(std::time::Duration::from_secs(5));
        for spec in [
            WindowSpec { bytes: usize::MAX, flags: 1 },
            WindowSpec { bytes: isize::MAX as usize, flags: 1 },
        ] {
            let error = ThreadTransport::new().open(&group, spec, deadline).unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::Argument, "{error}");
        }
        // Addressable, but more than there is.
        let spec = WindowSpec { bytes: 1 << 60, flags: 1 };
        let error = ThreadTransport::new().open(&group, spec, deadline).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Os, "{error}");
    }
}
