//! Bulk copies and the mbarriers that loads report to.
//!
//! A load may be done at once or when somebody waits for it; a store reads shared memory at once or
//! when its thread waits for that, and writes at once, when its thread waits for that or at the end
//! of the kernel. Which of them happens is drawn, so that a missing wait shows as wrong data.

use std::collections::VecDeque;

use super::block::{Block, Step, Wait};

/// Where shared memory starts among shared addresses; `EP_SHARED_AT` of src/shim/cuda.hpp.
const SHARED_AT: u32 = 1024;
/// The upper half of an mbarrier's eight bytes; the lower is its number here.
const MAGIC: u64 = 0x6d62_6172 << 32;
/// Copied bytes a block keeps to write them late; more is written at once.
const MOST_KEPT: usize = 1 << 20;

/// A load that has not been done.
#[derive(Debug)]
struct Load {
    to: u32,
    from: u64,
    bytes: u32,
}

/// An mbarrier for one arrival per phase.
#[derive(Debug)]
struct Mbarrier {
    address: u32,
    /// Parity of the phase that goes on.
    phase: u32,
    /// Its one arrival has come; the phase ends with the load.
    load: Option<Load>,
    /// Whose fence makes it visible to bulk copies, until then.
    unfenced: Option<u32>,
    waiting: Vec<u32>,
}

/// A store that has not been written.
#[derive(Debug)]
struct Store {
    to: u64,
    from: u32,
    bytes: u32,
    /// What it has read of shared memory.
    read: Option<Vec<u8>>,
}

/// A thread's stores: those not committed, and groups.
#[derive(Debug, Default)]
struct Stores {
    open: Vec<Store>,
    groups: VecDeque<Vec<Store>>,
}

/// Bytes that are still to be written when the kernel ends.
#[derive(Debug)]
pub(super) struct Late {
    /// Whose they are.
    pub block: u32,
    to: u64,
    bytes: Vec<u8>,
}

impl Late {
    /// Writes them.
    ///
    /// # Safety
    /// The address is valid for the write: the kernel's promise.
    pub(super) unsafe fn write(&self) {
        let to = std::ptr::with_exposed_provenance_mut::<u8>(self.to as usize);
        // SAFETY: the caller's promise.
        unsafe { to.copy_from_nonoverlapping(self.bytes.as_ptr(), self.bytes.len()) };
    }
}

/// Bulk copies of a block.
#[derive(Debug)]
pub(super) struct Bulk {
    barriers: Vec<Mbarrier>,
    stores: Vec<Stores>,
    kept: usize,
}

impl Bulk {
    pub(super) fn new(threads: usize) -> Bulk {
        let stores = (0..threads).map(|_| Stores::default()).collect();
        Bulk { barriers: Vec::new(), stores, kept: 0 }
    }
}

impl Block {
    /// `bytes` of shared memory at a shared address, aligned to `align`.
    fn shared_at(&self, address: u32, bytes: u32, align: u32) -> Result<*mut u8, String> {
        let at = address.wrapping_sub(SHARED_AT);
        if u64::from(at) + u64::from(bytes) > u64::from(self.shared.bytes()) {
            let most = self.shared.bytes();
            return Err(format!(
                "{bytes} bytes at {address:#x} are beyond its {most} of shared memory"
            ));
        }
        if !at.is_multiple_of(align) {
            return Err(format!("shared address {address:#x} is not a multiple of {align}"));
        }
        // SAFETY: inside the shared memory, by the comparison.
        Ok(unsafe { self.shared.at().add(at as usize) })
    }

    /// The number of the mbarrier at an address.
    fn mbarrier(&self, me: u32, address: u32) -> Result<usize, String> {
        let word = self.shared_at(address, 8, 8)?.cast::<u64>();
        // SAFETY: eight aligned bytes of shared memory.
        let word = unsafe { word.read() };
        let number = (word & 0xffff_ffff) as usize;
        match self.bulk.barriers.get(number) {
            Some(found) if word & !0xffff_ffff == MAGIC && found.address == address => Ok(number),
            _ => Err(format!("thread {me} uses {address:#x}, where no mbarrier was initialised")),
        }
    }

    pub(super) fn barrier_init(&mut self, me: u32, address: u32) -> Step {
        let word = match self.shared_at(address, 8, 8) {
            Ok(word) => word.cast::<u64>(),
            Err(fault) => return Step::Fault(fault),
        };
        if self.mbarrier(me, address).is_ok() {
            return Step::Fault(format!(
                "thread {me} initialises the mbarrier at {address:#x} again"
            ));
        }
        let number = self.bulk.barriers.len() as u64;
        // SAFETY: eight aligned bytes of shared memory.
        unsafe { word.write(MAGIC | number) };
        let unfenced = Some(me);
        let waiting = Vec::new();
        self.bulk.barriers.push(Mbarrier { address, phase: 0, load: None, unfenced, waiting });
        Step::Go(0)
    }

    /// The fence after initialising.
    pub(super) fn barriers_ready(&mut self, me: u32) -> Step {
        for barrier in &mut self.bulk.barriers {
            barrier.unfenced = barrier.unfenced.filter(|by| *by != me);
        }
        Step::Go(0)
    }

    pub(super) fn bulk_load(
        &mut self,
        me: u32,
        to: u32,
        from: u64,
        bytes: u32,
        address: u32,
    ) -> Step {
        match self.try_bulk_load(me, to, from, bytes, address) {
            Ok(()) => Step::Go(0),
            Err(fault) => Step::Fault(format!("bulk load by thread {me}: {fault}")),
        }
    }

    fn try_bulk_load(
        &mut self,
        me: u32,
        to: u32,
        from: u64,
        bytes: u32,
        address: u32,
    ) -> Result<(), String> {
        copyable(from, bytes)?;
        self.shared_at(to, bytes, 16)?;
        let number = self.mbarrier(me, address)?;
        let barrier = &mut self.bulk.barriers[number];
        if let Some(by) = barrier.unfenced {
            return Err(format!(
                "no fence by thread {by} has made the mbarrier at {address:#x} visible"
            ));
        }
        if barrier.load.is_some() {
            return Err(format!("a second arrival in one phase of the mbarrier at {address:#x}"));
        }
        barrier.load = Some(Load { to, from, bytes });
        for waiting in std::mem::take(&mut barrier.waiting) {
            self.wake(waiting, 0);
        }
        if self.random.once_in(2) { self.finish_load(number) } else { Ok(()) }
    }

    /// Copies what a barrier's load has to, which ends the phase.
    fn finish_load(&mut self, number: usize) -> Result<(), String> {
        let Some(load) = self.bulk.barriers[number].load.take() else { return Ok(()) };
        let to = self.shared_at(load.to, load.bytes, 16)?;
        let from = std::ptr::with_exposed_provenance::<u8>(load.from as usize);
        // SAFETY: the target was checked; that the source can be read is the kernel's promise.
        unsafe { to.copy_from(from, load.bytes as usize) };
        self.bulk.barriers[number].phase ^= 1;
        Ok(())
    }

    pub(super) fn barrier_wait(&mut self, me: u32, address: u32, parity: u32) -> Step {
        let number = match self.mbarrier(me, address) {
            Ok(number) => number,
            Err(fault) => return Step::Fault(fault),
        };
        let barrier = &mut self.bulk.barriers[number];
        if barrier.phase != parity & 1 {
            return Step::Go(0);
        }
        if barrier.load.is_none() {
            barrier.waiting.push(me);
            return Step::Again(Wait::Phase { address, parity });
        }
        // Others may go on before it is there.
        if self.random.once_in(3) {
            return Step::Again(Wait::Nothing);
        }
        match self.finish_load(number) {
            Ok(()) => Step::Go(0),
            Err(fault) => Step::Fault(fault),
        }
    }

    pub(super) fn bulk_store(&mut self, me: u32, to: u64, from: u32, bytes: u32) -> Step {
        let checked = copyable(to, bytes).and_then(|()| self.shared_at(from, bytes, 16));
        if let Err(fault) = checked {
            return Step::Fault(format!("bulk store by thread {me}: {fault}"));
        }
        let mut store = Store { to, from, bytes, read: None };
        match self.random.below(4) {
            0 => self.write(&mut store),
            1 => self.read(&mut store),
            _ => {}
        }
        if store.bytes > 0 {
            self.bulk.stores[me as usize].open.push(store);
        }
        Step::Go(0)
    }

    pub(super) fn bulk_commit(&mut self, me: u32) -> Step {
        let stores = &mut self.bulk.stores[me as usize];
        let group = std::mem::take(&mut stores.open);
        stores.groups.push_back(group);
        Step::Go(0)
    }

    /// Waits until all but the `newest` groups have read shared memory or, where `written`, are done.
    pub(super) fn bulk_wait(&mut self, me: u32, newest: u32, written: bool) -> Step {
        let mut groups = std::mem::take(&mut self.bulk.stores[me as usize].groups);
        let older = groups.len().saturating_sub(newest as usize);
        for group in groups.iter_mut().take(older) {
            for store in group.iter_mut() {
                if written || self.random.once_in(2) { self.write(store) } else { self.read(store) }
            }
            group.retain(|store| store.bytes > 0);
        }
        // What is left in front has been read and has no group to be waited for by.
        while groups.len() > newest as usize && groups.front().is_some_and(Vec::is_empty) {
            groups.pop_front();
        }
        self.bulk.stores[me as usize].groups = groups;
        Step::Go(0)
    }

    /// A store reads shared memory, if it has not.
    fn read(&mut self, store: &mut Store) {
        if store.read.is_some() || store.bytes == 0 {
            return;
        }
        if self.bulk.kept > MOST_KEPT {
            return self.write(store);
        }
        let Ok(from) = self.shared_at(store.from, store.bytes, 16) else { return };
        self.bulk.kept += store.bytes as usize;
        // SAFETY: inside shared memory, which only this block's fibers use, none of which runs.
        let bytes = unsafe { std::slice::from_raw_parts(from, store.bytes as usize) };
        store.read = Some(bytes.to_vec());
    }

    /// A store is done: nothing is left of it.
    fn write(&mut self, store: &mut Store) {
        let bytes = std::mem::take(&mut store.bytes) as usize;
        let Ok(shared) = self.shared_at(store.from, bytes as u32, 16) else { return };
        let from = store.read.as_ref().map_or(shared.cast_const(), |read| read.as_ptr());
        let to = std::ptr::with_exposed_provenance_mut::<u8>(store.to as usize);
        // SAFETY: `from` has as many bytes; that the target can be written is the kernel's promise.
        unsafe { to.copy_from(from, bytes) };
        if store.read.take().is_some() {
            self.bulk.kept -= bytes;
        }
    }

    /// When all threads have exited: what is still to be written. A copy that still needs the block's
    /// shared memory is an error.
    pub(super) fn bulk_end(&mut self) -> Result<Vec<Late>, String> {
        if let Some(barrier) = self.bulk.barriers.iter().find(|barrier| barrier.load.is_some()) {
            return Err(format!(
                "the block ends while a bulk load may still write its shared memory: nobody waited \
                 for the mbarrier at {:#x}",
                barrier.address
            ));
        }
        let mut late = Vec::new();
        for (thread, stores) in self.bulk.stores.iter_mut().enumerate() {
            let groups = std::mem::take(&mut stores.groups).into_iter().flatten();
            for store in groups.chain(std::mem::take(&mut stores.open)) {
                let Some(bytes) = store.read else {
                    return Err(format!(
                        "the block ends while bulk stores of thread {thread} may still read its \
                         shared memory: it did not wait for them"
                    ));
                };
                late.push(Late { block: self.index, to: store.to, bytes });
            }
        }
        Ok(late)
    }
}

/// Whether a bulk copy can be of these bytes at this address of global memory.
fn copyable(address: u64, bytes: u32) -> Result<(), String> {
    if bytes == 0 || !bytes.is_multiple_of(16) || !address.is_multiple_of(16) {
        return Err(format!("{bytes} bytes at {address:#x}: both are multiples of 16, not 0"));
    }
    Ok(())
}
