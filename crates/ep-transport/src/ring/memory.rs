//! The words of a ring.
//!
//! Under `--cfg loom` they are loom's, and payload is a cell whose every unordered access fails the
//! model.

#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicU64, fence};

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU64, fence};

pub(super) use imp::{Memory, pause};

#[cfg(not(loom))]
mod imp {
    use std::mem::{offset_of, size_of};
    use std::ptr::NonNull;
    use std::sync::Arc;
    use std::time::Duration;

    use super::super::{ALIGNMENT, CELL_BYTES, CELLS, Command, DOORBELL, HEAD, POSITION, TURN};
    use super::AtomicU64;
    use crate::sync::Ordering;
    use crate::{Region, Result, TransportError};

    /// How often a full ring is tried again by yielding before the producer sleeps in between.
    const YIELDS: u32 = 64;
    /// Long beside what a proxy needs per command, short beside what a caller notices.
    const NAP: Duration = Duration::from_micros(50);

    #[repr(C, align(128))]
    struct Line(AtomicU64);

    #[repr(C)]
    struct Header {
        head: Line,
        position: Line,
        doorbell: Line,
    }

    #[repr(C, align(64))]
    struct Cell {
        payload: [AtomicU64; 7],
        turn: AtomicU64,
    }

    const _: () = {
        assert!(size_of::<Header>() == CELLS && align_of::<Header>() == ALIGNMENT);
        assert!(offset_of!(Header, head) == HEAD && offset_of!(Header, position) == POSITION);
        assert!(offset_of!(Header, doorbell) == DOORBELL);
        assert!(size_of::<Cell>() == CELL_BYTES && offset_of!(Cell, turn) == TURN);
        assert!(CELLS.is_multiple_of(align_of::<Cell>()));
    };

    /// A ring inside a region.
    #[derive(Clone, Debug)]
    pub(crate) struct Memory {
        header: NonNull<Header>,
        cells: NonNull<Cell>,
        capacity: usize,
        /// Keeps the words mapped.
        _region: Arc<dyn Region>,
    }

    // SAFETY: the pointers lead into the region, which is itself Send and Sync and held here, and
    // everything there is only used as atomics.
    unsafe impl Send for Memory {}
    // SAFETY: the pointers lead into the region, which is itself Send and Sync and held here, and
    // everything there is only used as atomics.
    unsafe impl Sync for Memory {}

    impl Memory {
        /// In pages of its own.
        pub(crate) fn alloc(bytes: usize, capacity: usize) -> Result<Self> {
            let memory = Self::new(Pages::new(bytes)?, 0, bytes, capacity);
            Ok(memory.expect("pages that were made for it"))
        }

        /// The ring of `bytes` bytes that starts `offset` bytes into `region`; none if it does not
        /// fit there or is not aligned. `capacity` is a power of two that `bytes` belongs to.
        pub(crate) fn new(
            region: Arc<dyn Region>,
            offset: usize,
            bytes: usize,
            capacity: usize,
        ) -> Option<Self> {
            let end = offset.checked_add(bytes)?;
            let address = (region.base().as_ptr() as usize).checked_add(offset)?;
            if end > region.bytes() || !address.is_multiple_of(ALIGNMENT) {
                return None;
            }
            // SAFETY: `offset + bytes`, and `CELLS` within `bytes`, lie inside the region.
            let (header, cells) = unsafe {
                let header = region.base().add(offset);
                (header.cast(), header.add(CELLS).cast())
            };
            Some(Self { header, cells, capacity, _region: region })
        }

        pub(crate) fn capacity(&self) -> usize {
            self.capacity
        }

        #[cfg(all(test, feature = "rdma"))]
        pub(crate) fn region_bytes(&self) -> usize {
            self._region.bytes()
        }

        pub(crate) fn head(&self) -> &AtomicU64 {
            &self.header().head.0
        }

        pub(crate) fn position(&self) -> &AtomicU64 {
            &self.header().position.0
        }

        pub(crate) fn doorbell(&self) -> &AtomicU64 {
            &self.header().doorbell.0
        }

        pub(crate) fn turn(&self, ticket: u64) -> &AtomicU64 {
            &self.cell(ticket).turn
        }

        pub(crate) fn write(&self, ticket: u64, command: &Command) {
            for (word, &value) in self.cell(ticket).payload.iter().zip(command) {
                word.store(value, Ordering::Relaxed);
            }
        }

        pub(crate) fn read(&self, ticket: u64) -> Command {
            let payload = &self.cell(ticket).payload;
            std::array::from_fn(|word| payload[word].load(Ordering::Relaxed))
        }

        fn header(&self) -> &Header {
            // SAFETY: `new` checked that an aligned header lies inside the region, which stays
            // mapped while `self` holds it; it consists of atomics.
            unsafe { self.header.as_ref() }
        }

        fn cell(&self, ticket: u64) -> &Cell {
            let index = ticket as usize & (self.capacity - 1);
            // SAFETY: the capacity is a power of two, so `index` is below it, and `new` checked
            // that this many aligned cells lie inside the region, which stays mapped while `self`
            // holds it; they consist of atomics.
            unsafe { self.cells.add(index).as_ref() }
        }
    }

    const PAGE: usize = 4096;

    #[repr(C, align(4096))]
    struct Page([AtomicU64; PAGE / 8]);

    /// Zeroed memory of this process.
    struct Pages(Box<[Page]>);

    impl std::fmt::Debug for Pages {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "Pages({})", self.0.len())
        }
    }

    impl Pages {
        fn new(bytes: usize) -> Result<Arc<Self>> {
            let count = bytes.div_ceil(PAGE);
            let mut pages = Vec::new();
            pages.try_reserve_exact(count).map_err(|_| {
                let detail = format!("cannot allocate {bytes} bytes");
                TransportError::os("ring", detail, rustix::io::Errno::NOMEM)
            })?;
            let zero = || Page(std::array::from_fn(|_| AtomicU64::new(0)));
            pages.extend(std::iter::repeat_with(zero).take(count));
            Ok(Arc::new(Self(pages.into_boxed_slice())))
        }
    }

    // SAFETY: the boxed pages do not move, are aligned to a page, live as long as the value, and
    // are atomics, which may be written through shared references.
    unsafe impl Region for Pages {
        fn base(&self) -> NonNull<u8> {
            NonNull::from(&*self.0).cast()
        }

        fn bytes(&self) -> usize {
            self.0.len() * PAGE
        }
    }

    /// Lets the consumer run before the next attempt.
    pub(crate) fn pause(attempt: u32, bound: Duration) {
        if attempt < YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(NAP.min(bound));
        }
    }
}

#[cfg(loom)]
mod imp {
    use std::sync::Arc;
    use std::time::Duration;

    use loom::cell::UnsafeCell;

    use super::super::Command;
    use super::AtomicU64;
    use crate::Result;

    #[derive(Clone, Debug)]
    pub(crate) struct Memory(Arc<Shared>);

    #[derive(Debug)]
    struct Shared {
        head: AtomicU64,
        position: AtomicU64,
        doorbell: AtomicU64,
        cells: Vec<Cell>,
    }

    #[derive(Debug)]
    struct Cell {
        payload: UnsafeCell<Command>,
        turn: AtomicU64,
    }

    // SAFETY: loom checks every access of the payload against every other.
    unsafe impl Send for Shared {}
    // SAFETY: loom checks every access of the payload against every other.
    unsafe impl Sync for Shared {}

    impl Memory {
        pub(crate) fn alloc(_bytes: usize, capacity: usize) -> Result<Self> {
            let word = || AtomicU64::new(0);
            let cell = |_| Cell { payload: UnsafeCell::new([0; 7]), turn: word() };
            let cells = (0..capacity).map(cell).collect();
            let shared = Shared { head: word(), position: word(), doorbell: word(), cells };
            Ok(Self(Arc::new(shared)))
        }

        pub(crate) fn capacity(&self) -> usize {
            self.0.cells.len()
        }

        pub(crate) fn head(&self) -> &AtomicU64 {
            &self.0.head
        }

        pub(crate) fn position(&self) -> &AtomicU64 {
            &self.0.position
        }

        pub(crate) fn doorbell(&self) -> &AtomicU64 {
            &self.0.doorbell
        }

        pub(crate) fn turn(&self, ticket: u64) -> &AtomicU64 {
            &self.cell(ticket).turn
        }

        pub(crate) fn write(&self, ticket: u64, command: &Command) {
            // SAFETY: loom fails the model if another access is concurrent.
            self.cell(ticket).payload.with_mut(|payload| unsafe { *payload = *command });
        }

        pub(crate) fn read(&self, ticket: u64) -> Command {
            // SAFETY: loom fails the model if another access is concurrent.
            self.cell(ticket).payload.with(|payload| unsafe { *payload })
        }

        fn cell(&self, ticket: u64) -> &Cell {
            &self.0.cells[ticket as usize & (self.capacity() - 1)]
        }
    }

    /// Lets another thread of the model run.
    pub(crate) fn pause(_attempt: u32, _bound: Duration) {
        loom::thread::yield_now();
    }
}
