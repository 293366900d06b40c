//! What a dispatch and a combine launch, as committed.

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

use ep_kernels::cuda::moe::{CopyPath, MoeLaunch, MovePlan};
use ep_transport::{Group, Queue};

use super::device::{Devices, Rng};
use super::effects::Ranks;
use super::rank::{Layer, queue};
use super::run::layer;
use super::turns::{Mutant, Shared};
use crate::gpu::Tuning;
use crate::{
    CombineOpts, DType, DeviceIds, DispatchOpts, Ep, IdKind, Layout, MoeShape, Payload,
    PayloadKind, Precision, Route, Rows, RowsMut, ScaleKind, combine_all, dispatch_all,
};

/// Says that the file is to be written anew.
const BLESS: &str = "EP_BLESS";
const WORLD: usize = 2;

struct Case {
    name: &'static str,
    tokens: usize,
    hidden: usize,
    topk: usize,
    experts: usize,
}

const fn case(
    name: &'static str,
    tokens: usize,
    hidden: usize,
    topk: usize,
    experts: usize,
) -> Case {
    Case { name, tokens, hidden, topk, experts }
}

const CASES: [Case; 5] = [
    case("train", 8192, 7168, 8, 256),
    case("decode", 128, 7168, 8, 288),
    case("hidden 2880", 4096, 2880, 4, 128),
    case("top-1", 4096, 4096, 1, 64),
    case("448 experts", 4096, 3584, 8, 448),
];

const FP8: PayloadKind = PayloadKind::Fp8 { scales: ScaleKind::F32 };

fn paths() -> [(&'static str, Tuning); 3] {
    let plan = |warps, path| Some(MovePlan::new(16, warps, path));
    let tma = CopyPath::Tma { stages: 3, chunk: 4096 };
    let sums = CopyPath::Tma { stages: 3, chunk: 7 * 512 };
    let (rows, sums) = (plan(8, tma), plan(16, sums));
    let (move_, sum) =
        (plan(16, CopyPath::LdSt { unroll: 4 }), plan(20, CopyPath::LdSt { unroll: 4 }));
    let tuning = |rows, sums| Tuning { dispatch: rows, expand: rows, reduce: sums, combine: sums };
    [("chosen", Tuning::default()), ("TMA", tuning(rows, sums)), ("LD/ST", tuning(move_, sum))]
}

fn with_blocks(tuning: Tuning, blocks: u32) -> Tuning {
    let on = |plan: Option<MovePlan>| plan.map(|plan| MovePlan { blocks, ..plan });
    let Tuning { dispatch, expand, reduce, combine } = tuning;
    Tuning { dispatch: on(dispatch), expand: on(expand), reduce: on(reduce), combine: on(combine) }
}

/// The ranks of a layer, and what rank 0 launches.
struct Built {
    eps: Vec<Ep>,
    log: Arc<parking_lot::Mutex<Vec<MoeLaunch>>>,
    queue: Queue,
    _shared: Arc<Shared>,
}

fn build(case: &Case, sms: u32, tuning: Tuning) -> Built {
    let shape = MoeShape::new(case.hidden, case.topk, case.experts)
        .max_tokens(case.tokens)
        .expert_major(128)
        .payload(PayloadKind::Bf16)
        .payload(FP8);
    let layer = Layer { shape, slots: 3, lanes: 1, sms, tuning, gpus: 1, ..layer(1) };
    let devices = Devices::new(Ranks::new(WORLD, 1), 1, 8, Rng::new(1));
    let shared = Arc::new(Shared::new(devices, Mutant::None, Rng::new(1)));
    let built: Vec<_> = std::thread::scope(|scope| {
        let start = |group: Group| {
            let (layer, shared) = (&layer, &shared);
            let streams = layer.streams(shared, group.rank());
            scope.spawn(move || layer.build(shared, &group, streams))
        };
        let started: Vec<_> = Group::local(WORLD).unwrap().into_iter().map(start).collect();
        started.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let queue = queue(shared.with(|devices| devices.stream(0)), 0);
    let log = built[0].1.clone();
    Built { eps: built.into_iter().map(|(ep, _)| ep).collect(), log, queue, _shared: shared }
}

/// One dispatch in capacity mode and one combine, with what each launches.
fn round(
    ranks: &Built,
    case: &Case,
    kind: PayloadKind,
    layout: Layout,
    precision: Precision,
) -> [Vec<MoeLaunch>; 2] {
    let row = kind.payload_bytes(case.hidden);
    let at = |kind: u64| kind << 44;
    // SAFETY: whatever uses the addresses is simulated.
    let rows =
        |at, bytes, dtype| unsafe { Rows::from_device(0, at, case.tokens, bytes, bytes, dtype) };
    let payload = match kind {
        FP8 => {
            let scales = rows(at(2), kind.scale_bytes(case.hidden), DType::F32);
            Payload::fp8(rows(at(1), row, DType::Fp8E4M3), scales)
        }
        _ => Payload::new(rows(at(1), row, DType::Bf16)),
    };
    let payload = payload.unwrap();
    // SAFETY: whatever uses the addresses is simulated.
    let ids = unsafe { DeviceIds::from_raw(0, at(3), case.tokens * case.topk, IdKind::I64) };
    let route = Route::Device { ids, weights: None };
    let opts = DispatchOpts { layout, capacity: true, ..DispatchOpts::default() };
    ranks.log.lock().clear();
    let calls: Vec<_> = ranks.eps.iter().map(|ep| (ep, payload, route)).collect();
    let mut results = dispatch_all(&ranks.queue, &calls, &opts).unwrap();
    let dispatched = std::mem::take(&mut *ranks.log.lock());
    let bytes = PayloadKind::Bf16.payload_bytes(case.hidden);
    for result in &mut results {
        result.rows_mut(PayloadKind::Bf16).unwrap();
    }
    // SAFETY: whatever uses the addresses is simulated.
    let out =
        || unsafe { RowsMut::from_device(0, at(4), case.tokens, bytes, bytes, DType::Bf16).into() };
    let calls = results.into_iter().map(|result| (result, out())).collect();
    let opts = CombineOpts { precision, ..CombineOpts::default() };
    combine_all(&ranks.queue, calls, &opts).unwrap();
    [dispatched, std::mem::take(&mut *ranks.log.lock())]
}

fn note(text: &mut String, what: &str, launches: &[MoeLaunch]) {
    writeln!(text, "  {what}").unwrap();
    for MoeLaunch { kernel, config } in launches {
        let (grid, block, shared) = (config.grid, config.block, config.shared_bytes);
        let flags = config.attributes.flags();
        let attributes = match flags.is_empty() {
            true => "no attributes".to_string(),
            false => format!("{flags:?}, clusters of {}", config.attributes.cluster()),
        };
        writeln!(text, "    {kernel}: {grid} x {block}, {shared} B shared, {attributes}").unwrap();
    }
}

fn all() -> String {
    let mut text = String::from(
        "What rank 0 of two launches on an H200 for a dispatch in capacity mode and a combine:\n\
         blocks x threads, dynamic shared memory, attributes. EP_BLESS=1 writes this file anew.\n",
    );
    for case in &CASES {
        for sms in [8, 16, 24] {
            for (path, tuning) in paths() {
                let ranks = build(case, sms, with_blocks(tuning, sms));
                let Case { name, tokens, hidden, topk, experts } = case;
                writeln!(
                    text,
                    "\n{name}: {tokens} tokens of {hidden}, top-{topk} of {experts}, {sms} SMs, {path}"
                )
                .unwrap();
                let expert_major = Layout::ExpertMajor { alignment: 128 };
                for (kind, payload) in [(PayloadKind::Bf16, "bf16"), (FP8, "fp8")] {
                    let rank_major = round(&ranks, case, kind, Layout::RankMajor, Precision::Exact);
                    note(&mut text, &format!("{payload} dispatch, rank-major"), &rank_major[0]);
                    note(&mut text, "combine of its rows", &rank_major[1]);
                    let exact = round(&ranks, case, kind, expert_major, Precision::Exact);
                    let reduced = round(&ranks, case, kind, expert_major, Precision::Reduced);
                    assert_eq!(exact[0], reduced[0]);
                    note(&mut text, &format!("{payload} dispatch, expert-major"), &exact[0]);
                    note(&mut text, "combine of its rows, exact", &exact[1]);
                    note(&mut text, "combine of its rows, reduced", &reduced[1]);
                }
            }
        }
    }
    text
}

#[test]
fn launches_are_as_committed() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots/launches.txt");
    let now = all();
    if std::env::var_os(BLESS).is_some() {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, &now).unwrap();
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    let differs = committed.lines().zip(now.lines()).position(|(a, b)| a != b);
    assert!(
        committed == now,
        "launches differ from {} in line {:?}; if that is meant, run this test with {BLESS}=1",
        file.display(),
        differs.map(|line| line + 1)
    );
}
