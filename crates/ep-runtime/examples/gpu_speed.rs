//! Dispatch and combine on the GPUs of this machine, one rank each, whole protocol included: a quick
//! table for trying launch plans. `ep-bench` is what results are measured with.
//!
//! `gpu_speed [train|decode] [bf16|fp8]`

use std::time::Duration;

use ep_kernels::cuda::{Device, DeviceMemory, Driver, Event, EventPool, Stream};
use ep_runtime::{
    CombineOpts, Combined, CopyPath, DType, DeviceIds, DispatchOpts, Ep, EpBuilder, EpError, Group,
    IdKind, MoeShape, MovePlan, Payload, PayloadKind, Place, Queue, Route, Rows, RowsMut,
    ScaleKind, Tuning,
};

const HIDDEN: usize = 7168;
const TOPK: usize = 8;
const LIMIT: Duration = Duration::from_secs(20);

#[derive(Clone, Copy)]
struct Case {
    tokens: usize,
    experts: usize,
    fp8: bool,
}

/// What is timed.
#[derive(Clone, Copy, PartialEq, Debug)]
enum What {
    Dispatch,
    Uncached,
    Combine,
}

fn main() -> Result<(), EpError> {
    let gpus = match Driver::get().and_then(|d| d.device_count()) {
        Ok(gpus) if gpus > 0 => gpus,
        other => {
            println!("no GPU: {other:?}");
            return Ok(());
        }
    };
    let args: Vec<String> = std::env::args().collect();
    let has = |name: &str| args.iter().any(|a| a == name);
    let case = match has("decode") {
        true => Case { tokens: 128, experts: 288, fp8: has("fp8") },
        false => Case { tokens: 8192, experts: 256, fp8: has("fp8") },
    };
    let row = if case.fp8 { HIDDEN } else { 2 * HIDDEN } as u32;
    for sms in [8u32, 12, 16, 24] {
        for (stages, chunk, warps) in [
            (3, row, 5),
            (2, row, 7),
            (3, row / 2, 10),
            (2, row / 2, 12),
            (3, row / 2, 16),
            (2, row / 2, 15),
        ] {
            let plan = MovePlan::new(sms, warps, CopyPath::Tma { stages, chunk });
            let mut tuning = Tuning::default();
            tuning.dispatch = Some(plan);
            report(gpus, case, sms, tuning, What::Dispatch, &format!("{stages}x{chunk}x{warps}w"));
        }
        for (unroll, warps) in [(4, 16), (7, 12)] {
            let mut tuning = Tuning::default();
            tuning.dispatch = Some(MovePlan::new(sms, warps, CopyPath::LdSt { unroll }));
            report(gpus, case, sms, tuning, What::Dispatch, &format!("ld{unroll}x{warps}w"));
        }
        report(gpus, case, sms, Tuning::default(), What::Uncached, "default");
        for (vectors, stages, warps) in
            [(7, 3, 16), (7, 4, 12), (7, 4, 14), (14, 2, 8), (14, 3, 8), (2, 4, 16)]
        {
            let path = CopyPath::Tma { stages, chunk: 512 * vectors };
            let mut tuning = Tuning::default();
            tuning.combine = Some(MovePlan::new(sms, warps, path));
            report(
                gpus,
                case,
                sms,
                tuning,
                What::Combine,
                &format!("{vectors}v{stages}sx{warps}w"),
            );
        }
        for (unroll, warps) in [(2, 32), (4, 20), (7, 12)] {
            let mut tuning = Tuning::default();
            tuning.combine = Some(MovePlan::new(sms, warps, CopyPath::LdSt { unroll }));
            report(gpus, case, sms, tuning, What::Combine, &format!("ld{unroll}x{warps}w"));
        }
    }
    Ok(())
}

fn report(gpus: usize, case: Case, sms: u32, tuning: Tuning, what: What, name: &str) {
    let groups = Group::local(gpus).expect("a group");
    let times = std::thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(move || rank(group, case, sms, tuning, what)))
            .collect();
        ranks.into_iter().map(|r| r.join().expect("no panic")).collect::<Result<Vec<_>, _>>()
    });
    match times {
        Ok(times) => {
            let slowest = times.iter().copied().fold(0.0, f64::max);
            println!("{what:?} {sms} SMs {name}: {slowest:.1} us");
        }
        Err(error) => println!("{what:?} {sms} SMs {name}: {error}"),
    }
}

struct Rank {
    ep: Ep,
    stream: Stream,
    queue: Queue,
    ordinal: usize,
    memory: DeviceMemory,
    case: Case,
}

fn rank(group: Group, case: Case, sms: u32, tuning: Tuning, what: What) -> Result<f64, EpError> {
    let ordinal = group.rank();
    let device = Device::open(ordinal)?;
    let stream = device.stream(0)?;
    let kind = PayloadKind::Fp8 { scales: ScaleKind::F32 };
    let mut shape = MoeShape::new(HIDDEN, TOPK, case.experts).max_tokens(case.tokens);
    shape = shape.payload(PayloadKind::Bf16);
    if case.fp8 {
        shape = shape.payload(kind);
    }
    let builder = EpBuilder::new(shape).place(Place::Cuda(ordinal)).slots(3);
    let ep = builder.comm_sms(sms).tuning(tuning).build(&group)?;
    let t = case.tokens;
    let memory = DeviceMemory::zeroed(&stream, t * (2 * HIDDEN * 2 + 1024), LIMIT)?;
    let mut seed = 88172645463325252u64 + ordinal as u64;
    let mut ids = vec![0i32; t * TOPK];
    for token in ids.chunks_mut(TOPK) {
        for k in 0..TOPK {
            token[k] = loop {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                let id = (seed % case.experts as u64) as i32;
                if !token[..k].contains(&id) {
                    break id;
                }
            };
        }
    }
    let ids_at = t * HIDDEN * 4;
    memory.upload(&stream, ids_at, &ids, LIMIT)?;
    // SAFETY: the stream outlives the queue's use.
    let queue = unsafe { Queue::from_raw(stream.raw().cast(), ordinal) };
    let rank = Rank { ep, stream, queue, ordinal, memory, case };
    let time = rank.time(&group, what, ids_at as u64)?;
    group.barrier()?;
    Ok(time)
}

impl Rank {
    fn rows(&self, at: usize, row_bytes: usize, dtype: DType) -> Rows<'_> {
        let at = self.memory.address() + at as u64;
        // SAFETY: inside the rank's memory.
        unsafe {
            Rows::from_device(self.ordinal, at, self.case.tokens, row_bytes, row_bytes, dtype)
        }
    }

    fn payload(&self) -> Result<Payload<'_>, EpError> {
        if self.case.fp8 {
            let scales = self.rows(self.case.tokens * HIDDEN * 4 + 512 * 1024, 224, DType::F32);
            return Payload::fp8(self.rows(0, HIDDEN, DType::Fp8E4M3), scales);
        }
        Payload::new(self.rows(0, 2 * HIDDEN, DType::Bf16))
    }

    fn time(&self, group: &Group, what: What, ids_at: u64) -> Result<f64, EpError> {
        let (t, queue) = (self.case.tokens, &self.queue);
        let at = self.memory.address() + ids_at;
        // SAFETY: inside the rank's memory.
        let ids = unsafe { DeviceIds::from_raw(self.ordinal, at, t * TOPK, IdKind::I32) };
        let fresh = Route::Device { ids, weights: None };
        let opts = DispatchOpts::default();
        let handle = self.ep.dispatch(queue, self.payload()?, fresh, &opts)?.handle().clone();
        let capacity = DispatchOpts { capacity: true, ..opts };
        let once = || -> Result<(), EpError> {
            match what {
                What::Dispatch => {
                    let route = Route::Cached(&handle);
                    self.ep.dispatch(queue, self.payload()?, route, &opts)?.release(queue);
                }
                What::Uncached => {
                    self.ep.dispatch(queue, self.payload()?, fresh, &capacity)?.release(queue);
                }
                What::Combine => {
                    let mut slot = self.ep.combine_slot(&handle, queue)?;
                    slot.rows_mut(PayloadKind::Bf16)?;
                    let out = self.memory.address() + (t * HIDDEN * 2) as u64;
                    // SAFETY: inside the rank's memory, used by nothing else.
                    let out = unsafe {
                        RowsMut::from_device(
                            self.ordinal,
                            out,
                            t,
                            2 * HIDDEN,
                            2 * HIDDEN,
                            DType::Bf16,
                        )
                    };
                    slot.combine(queue, Combined::new(out), &CombineOpts::default())?;
                }
            }
            Ok(())
        };
        for _ in 0..3 {
            once()?;
        }
        self.stream.wait("warm-up", LIMIT)?;
        group.barrier()?;
        let events = EventPool::new(self.stream.device(), 2, true)?;
        const TIMES: usize = 16;
        // SAFETY: the stream is live.
        let mark =
            || -> Result<Event, EpError> { Ok(unsafe { events.record(self.stream.raw())? }) };
        let start = mark()?;
        for _ in 0..TIMES {
            once()?;
        }
        let end = mark()?;
        self.stream.wait("the runs", LIMIT)?;
        Ok(end.micros_since(&start)? / TIMES as f64)
    }
}
