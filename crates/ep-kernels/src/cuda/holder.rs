//! Keeps SMs busy, so that what starts beside it can be observed.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cudarc::driver::sys::CUstream;

use super::error::{CudaError, invalid};
use super::launch::{LaunchAttributes, LaunchConfig};
use super::memory::{Lease, Plain};
use super::module::{Kernel, KernelParams};
use super::probe::{SmTools, whole_sm};
use super::source::{KernelSource, layout};
use super::stream::{Stream, poll};

pub(crate) static HOLDER: KernelSource = KernelSource {
    name: "holder.cu",
    kernels: &["holder"],
    shared: &[],
    text: include_str!("../../kernels/holder.cu"),
    layouts: &[
        layout!(SmSet {}),
        layout!(HoldRecord { start_ns, end_ns, smid, state }),
        layout!(HoldParams {
            records,
            hold_ns,
            deadline_ns,
            settle_ns,
            record_count,
            reserved,
            chosen
        }),
    ],
};

/// A set of SM ids below [`SmSet::CAPACITY`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SmSet {
    words: [u32; 32],
}

impl SmSet {
    /// Ids are below this. The largest GPU of today has 192 SMs.
    pub const CAPACITY: u32 = 1024;

    /// Every id.
    pub const fn all() -> Self {
        SmSet { words: [u32::MAX; 32] }
    }

    /// No id.
    pub const fn none() -> Self {
        SmSet { words: [0; 32] }
    }

    /// These ids.
    ///
    /// # Errors
    /// An id of [`SmSet::CAPACITY`] or more.
    pub fn of(ids: impl IntoIterator<Item = u32>) -> Result<Self, CudaError> {
        let mut set = SmSet::none();
        for id in ids {
            match set.words.get_mut((id / 32) as usize) {
                Some(word) => *word |= 1 << (id % 32),
                None => {
                    return invalid("SmSet", format!("SM {id}; ids are below {}", Self::CAPACITY));
                }
            }
        }
        Ok(set)
    }

    /// Every id but these.
    ///
    /// # Errors
    /// As [`SmSet::of`].
    pub fn all_but(ids: impl IntoIterator<Item = u32>) -> Result<Self, CudaError> {
        Ok(SmSet { words: SmSet::of(ids)?.words.map(|word| !word) })
    }

    /// Whether it holds this id.
    pub fn contains(&self, id: u32) -> bool {
        self.words.get((id / 32) as usize).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct HoldRecord {
    start_ns: u64,
    end_ns: u64,
    smid: u32,
    state: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct HoldParams {
    records: u64,
    hold_ns: u64,
    deadline_ns: u64,
    settle_ns: u64,
    record_count: u32,
    reserved: u32,
    chosen: SmSet,
}

// SAFETY: repr(C), integers only, no padding (8 + 8 + 4 + 4).
unsafe impl Plain for HoldRecord {}
// SAFETY: repr(C), integers only, no padding (4 * 8 + 2 * 4 + 128).
unsafe impl Plain for HoldParams {}
// SAFETY: the struct of kernels/holder.cu, whose layout checks are compiled against this one's.
unsafe impl KernelParams for HoldParams {}

const _: () = assert!(size_of::<SmSet>() == 128);
const _: () = assert!(size_of::<HoldRecord>() == 24 && size_of::<HoldParams>() == 168);
const _: () = assert!(std::mem::offset_of!(HoldRecord, state) == 20);
const _: () = assert!(std::mem::offset_of!(HoldParams, chosen) == 40);

// States of a block, as in holder.cu; 0 until it starts.
const PASSING: u32 = 1;
const HOLDING: u32 = 2;
const ENDED: u32 = 3;
const PASSED: u32 = 4;

/// Longest that SMs may be held: other users of the GPU wait that long too.
const LONGEST_HOLD: Duration = Duration::from_secs(10);

/// What to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoldSpec {
    /// Blocks to launch. As many as the device has SMs, to choose among all of them.
    pub blocks: u32,
    /// On which SMs blocks stay. On others they leave once settled.
    pub sms: SmSet,
    /// How long they stay after their start; at most ten seconds.
    pub hold: Duration,
    /// How long blocks on other SMs stay: long enough that all blocks are placed before one leaves.
    pub settle: Duration,
    /// No block stays past this instant of the GPU's global timer, nanoseconds. `u64::MAX`: no such
    /// instant.
    pub deadline_ns: u64,
    /// Dynamic shared memory per block, bytes. `None`: all there is, so that nothing that uses
    /// shared memory runs beside it.
    pub shared_bytes: Option<u32>,
}

impl HoldSpec {
    /// `blocks` blocks wherever they land, one per SM.
    pub fn anywhere(blocks: u32, hold: Duration) -> Self {
        HoldSpec {
            blocks,
            sms: SmSet::all(),
            hold,
            settle: Duration::from_micros(200),
            deadline_ns: u64::MAX,
            shared_bytes: None,
        }
    }

    /// These SMs of a device with `device_sms` of them, by launching everywhere and leaving the
    /// others.
    pub fn chosen(device_sms: u32, sms: SmSet, hold: Duration) -> Self {
        HoldSpec { sms, ..Self::anywhere(device_sms, hold) }
    }
}

/// SMs being held. Dropping it waits until they are free, at most as long as they can be held.
#[derive(Debug)]
pub struct Holder<'s> {
    // Absent where it is not this crate's.
    stream: Option<&'s Stream>,
    records: Option<Lease<HoldRecord>>,
    // Its code must stay loaded while it runs.
    kernel: Option<Kernel>,
    longest: Duration,
}

/// What was held.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HoldReport {
    /// The SMs held, ascending; one appears twice if two blocks ran there.
    pub held: Vec<u32>,
    /// When the last block started, by the GPU's global timer, nanoseconds.
    pub last_start_ns: u64,
    /// When the first of the blocks that stayed left. Something that started before this started
    /// beside them.
    pub first_end_ns: u64,
    /// When the last of them left.
    pub last_end_ns: u64,
}

impl SmTools {
    /// Launches the holder and returns at once.
    ///
    /// # Errors
    /// More blocks than SMs (the rest would start only when others end), a hold or settle time of
    /// more than ten seconds, or the driver's.
    pub fn hold<'s>(&self, stream: &'s Stream, spec: &HoldSpec) -> Result<Holder<'s>, CudaError> {
        // SAFETY: the stream outlives the holder, which keeps a reference to it.
        let mut holder = unsafe { self.hold_raw(stream.raw(), spec) }?;
        holder.stream = Some(stream);
        Ok(holder)
    }

    /// As [`SmTools::hold`], on any stream. That a block never ran is then noticed only by the limit of
    /// a wait. Launched again and again, it takes memory only where more are alive at once than before.
    ///
    /// # Safety
    /// `stream` is a live stream of the device that these are loaded on, and is not destroyed before the
    /// holder.
    ///
    /// # Errors
    /// As [`SmTools::hold`].
    pub unsafe fn hold_raw<'s>(
        &self,
        stream: CUstream,
        spec: &HoldSpec,
    ) -> Result<Holder<'s>, CudaError> {
        const OP: &str = "hold";
        let properties = self.device.properties();
        if spec.blocks == 0 || spec.blocks > properties.sms {
            return invalid(
                OP,
                format!("{} blocks; 1 to {} are possible", spec.blocks, properties.sms),
            );
        }
        if spec.hold > LONGEST_HOLD || spec.settle > LONGEST_HOLD {
            return invalid(OP, format!("at most {LONGEST_HOLD:?} are possible"));
        }
        let config = LaunchConfig {
            grid: spec.blocks,
            block: 32,
            shared_bytes: spec.shared_bytes.unwrap_or(whole_sm(properties, &self.holder)),
            attributes: LaunchAttributes::plain(),
        };
        config.validate(properties)?;
        let records = self.hold_records.take(spec.blocks as usize)?;
        let params = HoldParams {
            records: records.device_address(),
            hold_ns: spec.hold.as_nanos() as u64,
            deadline_ns: spec.deadline_ns,
            settle_ns: spec.settle.as_nanos() as u64,
            record_count: spec.blocks,
            reserved: 0,
            chosen: spec.sms,
        };
        // SAFETY: the stream by this function's contract; `records` holds `record_count` records and is
        // freed only after every block has ended (or never); the kernel writes nothing else.
        unsafe { self.holder.launch(stream, &config, &params) }?;
        Ok(Holder {
            stream: None,
            records: Some(records),
            kernel: Some(self.holder.clone()),
            longest: spec.hold.max(spec.settle),
        })
    }
}

impl Holder<'_> {
    /// Waits until every block has started and those on other SMs have left. Returns the SMs held,
    /// ascending.
    ///
    /// # Errors
    /// Not so within `limit`, or a failure on the device.
    pub fn wait_holding(&self, limit: Duration) -> Result<Vec<u32>, CudaError> {
        self.wait_for("holder's start", limit, |state| matches!(state, HOLDING | ENDED | PASSED))?;
        Ok(self.report().held)
    }

    /// Whether none of the blocks that stay has left yet.
    pub fn is_holding(&self) -> bool {
        self.states().all(|state| matches!(state, HOLDING | PASSING | PASSED))
    }

    /// Waits until all have left.
    ///
    /// # Errors
    /// Not so within `limit`, or a failure on the device.
    pub fn finish(mut self, limit: Duration) -> Result<HoldReport, CudaError> {
        self.wait_for("holder's end", limit, |state| matches!(state, ENDED | PASSED))?;
        let report = self.report();
        self.records = None;
        Ok(report)
    }

    fn wait_for(
        &self,
        operation: &'static str,
        limit: Duration,
        reached: impl Fn(u32) -> bool,
    ) -> Result<(), CudaError> {
        poll(operation, limit, || {
            // Before the states, so that a stream found idle cannot hide a late write; also reports
            // failures.
            let idle = self.stream.map_or(Ok(false), Stream::is_idle)?;
            if self.states().all(&reached) {
                return Ok(Some(()));
            }
            if idle {
                let reason = "the stream is idle, but a block never ran".into();
                return Err(CudaError::Inconsistent { operation, reason });
            }
            Ok(None)
        })
    }

    fn states(&self) -> impl Iterator<Item = u32> {
        let records = self.records.as_ref();
        (0..records.map_or(0, Lease::len)).filter_map(move |block| {
            let record = records?.pointer(block)?;
            // SAFETY: in bounds, aligned, and alive as long as `self`. Acquire pairs with the
            // kernel's st.release.sys: what a block wrote before its state is visible after this
            // load.
            Some(unsafe { AtomicU32::from_ptr(&raw mut (*record).state) }.load(Ordering::Acquire))
        })
    }

    fn report(&self) -> HoldReport {
        let records = self.records.as_ref();
        let list = (0..records.map_or(0, Lease::len)).filter_map(|block| records?.read(block));
        summarise(list)
    }
}

impl Drop for Holder<'_> {
    fn drop(&mut self) {
        let limit = self.longest + Duration::from_secs(1);
        let ended = self.wait_for("holder's end", limit, |state| matches!(state, ENDED | PASSED));
        if ended.is_err()
            && let Some(records) = self.records.take()
        {
            // Neither the pool nor the driver may have back what the GPU may still use.
            std::mem::forget((records, self.kernel.take()));
        }
    }
}

fn summarise(records: impl Iterator<Item = HoldRecord>) -> HoldReport {
    let mut report =
        HoldReport { held: Vec::new(), last_start_ns: 0, first_end_ns: u64::MAX, last_end_ns: 0 };
    for record in records {
        report.last_start_ns = report.last_start_ns.max(record.start_ns);
        if matches!(record.state, HOLDING | ENDED) {
            report.held.push(record.smid);
        }
        if record.state == ENDED {
            report.first_end_ns = report.first_end_ns.min(record.end_ns);
            report.last_end_ns = report.last_end_ns.max(record.end_ns);
        }
    }
    report.held.sort_unstable();
    report
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn states_are_those_of_the_kernel() {
        for (name, value) in
            [("PASSING", PASSING), ("HOLDING", HOLDING), ("ENDED", ENDED), ("PASSED", PASSED)]
        {
            let line = format!("constexpr u32 HOLD_{name} = {value};");
            assert!(HOLDER.text.contains(&line), "{line}");
        }
    }

    #[test]
    fn only_blocks_that_stayed_count_as_held() {
        let record = |smid, state, end_ns| HoldRecord {
            start_ns: 10 + u64::from(smid),
            end_ns,
            smid,
            state,
        };
        let records = [
            record(5, ENDED, 900),
            record(2, ENDED, 800),
            record(9, PASSED, 100),
            record(7, HOLDING, 0),
            record(8, PASSING, 0),
        ];
        let report = summarise(records.into_iter());
        assert_eq!(report.held, [2, 5, 7]);
        assert_eq!((report.last_start_ns, report.first_end_ns, report.last_end_ns), (19, 800, 900));
    }

    proptest! {
        #[test]
        fn a_set_holds_what_it_was_given(
            ids in proptest::collection::btree_set(0u32..SmSet::CAPACITY, 0..200),
        ) {
            let set = SmSet::of(ids.iter().copied()).unwrap();
            let rest = SmSet::all_but(ids.iter().copied()).unwrap();
            for id in 0..SmSet::CAPACITY {
                prop_assert_eq!(set.contains(id), ids.contains(&id));
                prop_assert_eq!(rest.contains(id), !ids.contains(&id));
            }
            prop_assert!(!set.contains(SmSet::CAPACITY) && !rest.contains(u32::MAX));
        }
    }

    #[test]
    fn ids_out_of_range_are_refused() {
        assert!(SmSet::of([1024]).unwrap_err().to_string().contains("1024"));
    }
}
