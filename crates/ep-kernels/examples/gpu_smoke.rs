//! Exercises everything of `ep_kernels::cuda` on every GPU, prints one JSON object and exits
//! non-zero if any check failed. Usage: `gpu_smoke [ORDINAL...]`; without arguments all visible
//! GPUs.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ep_kernels::cuda::{
    Arch, CacheChoice, ClusterScheduling, Compiler, CompilerOptions, CudaError, Device, Driver,
    GreenContext, HoldSpec, KernelCache, LaunchAttributes, MemSyncDomain, ObserveOptions,
    ProbeRecord, ProbeSpec, SmObservations, SmSet, SmTools, SplitFlags, Stream, compile_report,
};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(5);

/// Checks of one GPU: what was found, and which did not hold.
struct Checks {
    ordinal: usize,
    failures: Vec<String>,
}

impl Checks {
    fn that(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            let what = what();
            eprintln!("GPU {}: FAILED: {what}", self.ordinal);
            self.failures.push(what);
        }
    }
}

fn main() -> ExitCode {
    let ordinals: Result<Vec<usize>, _> = std::env::args().skip(1).map(|arg| arg.parse()).collect();
    let Ok(ordinals) = ordinals else {
        eprintln!("usage: gpu_smoke [ORDINAL...]");
        return ExitCode::from(2);
    };
    match run(ordinals) {
        Ok((report, passed)) => {
            println!("{report:#}");
            if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("{error}");
            println!("{:#}", json!({ "passed": false, "error": error.to_string() }));
            ExitCode::FAILURE
        }
    }
}

fn run(mut ordinals: Vec<usize>) -> Result<(Value, bool), CudaError> {
    let driver = Driver::get()?;
    if ordinals.is_empty() {
        ordinals = (0..driver.device_count()?).collect();
    }
    let folder = std::env::temp_dir().join(format!("ep-gpu-smoke-{}", std::process::id()));
    let cache = CacheChoice::At(KernelCache::at(&folder));
    let compiler = Compiler::open(&CompilerOptions::default().with_cache(cache))?;
    let mut gpus = Vec::new();
    let mut passed = !ordinals.is_empty();
    for ordinal in ordinals {
        let mut checks = Checks { ordinal, failures: Vec::new() };
        let found = gpu(ordinal, &compiler, &mut checks)?;
        passed &= checks.failures.is_empty();
        gpus.push(json!({ "found": found, "failures": checks.failures }));
    }
    let _ = std::fs::remove_dir_all(&folder);
    let report = json!({
        "passed": passed,
        "driver_cuda": driver.version().to_string(),
        "nvrtc": compiler.version(),
        "gpus": gpus,
    });
    Ok((report, passed))
}

fn gpu(ordinal: usize, compiler: &Compiler, checks: &mut Checks) -> Result<Value, CudaError> {
    let device = Device::open(ordinal)?;
    let p = device.properties().clone();
    checks
        .that(Device::open(10_000).is_err_and(|error| error.to_string().contains("10000")), || {
            "an ordinal out of range is not refused".into()
        });
    let (tools, loading) = loading(&device, compiler, checks)?;
    let (seen, observation) = observation(&tools, checks)?;
    Ok(json!({
        "ordinal": ordinal,
        "name": p.name,
        "uuid": p.uuid.iter().map(|byte| format!("{byte:02x}")).collect::<String>(),
        "pci": format!("{:04x}:{:02x}:{:02x}", p.pci.0, p.pci.1, p.pci.2),
        "capability": [p.capability.0, p.capability.1],
        "sms": p.sms,
        "shared_per_block": p.shared_per_block,
        "shared_per_sm": p.shared_per_sm,
        "shared_reserved": p.shared_reserved,
        "l2_bytes": p.l2_bytes,
        "clusters": p.clusters,
        "cooperative": p.cooperative,
        "loading": loading,
        "observation": observation,
        "attributes": attributes(&tools, checks)?,
        "occupancy": occupancy(&tools, checks)?,
        "holder": holder(&tools, &seen, checks)?,
        "green": green(&tools, checks)?,
    }))
}

fn loading(
    device: &Device,
    compiler: &Compiler,
    checks: &mut Checks,
) -> Result<(SmTools, Value), CudaError> {
    let start = Instant::now();
    let first = SmTools::load(device, compiler)?;
    let cold = start.elapsed();
    let start = Instant::now();
    let tools = SmTools::load(device, compiler)?;
    let warm = start.elapsed();
    drop(first);
    let arch = Arch::of(device.properties())?;
    let reports = compile_report(compiler, &[arch])?;
    for report in &reports {
        let kernel =
            if report.kernel == "holder" { tools.holder_kernel() } else { tools.probe_kernel() };
        let loaded = kernel.resources();
        checks.that(
            (loaded.registers, loaded.shared_bytes, loaded.local_bytes)
                == (report.registers, report.shared_bytes, report.stack_bytes),
            || format!("{}: the driver says {loaded:?}, the compiler {report:?}", report.kernel),
        );
        checks.that(!report.spills(), || format!("{} spills", report.kernel));
    }
    let value = json!({
        "arch": arch.to_string(),
        "cold_ms": cold.as_secs_f64() * 1e3,
        "warm_ms": warm.as_secs_f64() * 1e3,
        "registers": reports.iter().map(|r| json!([r.kernel, r.registers])).collect::<Vec<_>>(),
    });
    Ok((tools, value))
}

fn observation(tools: &SmTools, checks: &mut Checks) -> Result<(SmObservations, Value), CudaError> {
    let mut runs = Vec::new();
    for _ in 0..3 {
        runs.push(tools.observe(&ObserveOptions::default())?);
    }
    let first = &runs[0];
    let expected = domains(first);
    for run in &runs {
        checks.that(run.sm_ids.len() as u32 == tools.device().properties().sms, || {
            format!("saw {} SMs of {}", run.sm_ids.len(), tools.device().properties().sms)
        });
        checks.that(run.elapsed < Duration::from_secs(2), || format!("took {:?}", run.elapsed));
        checks.that(run.disturbed == 0, || format!("{} launches ran in waves", run.disturbed));
        let margins = run.left_free.iter().map(Vec::len);
        checks.that(margins.eq(1..=64.min(tools.device().properties().sms as usize - 1)), || {
            "a launch of one block per SM left other than its margin free".into()
        });
        checks.that(domains(run) == expected, || "domains differ between runs".into());
        let active = |run: &SmObservations| {
            run.sizes.iter().map(|s| (s.size, s.max_active)).collect::<Vec<_>>()
        };
        checks.that(active(run) == active(first), || "active clusters differ between runs".into());
    }
    let value = json!({
        "max_active_clusters": first.sizes.iter().map(|s| json!([s.size, s.max_active])).collect::<Vec<_>>(),
        "distinct_clusters": first.sizes.iter().map(|s| json!([s.size, s.clusters.len()])).collect::<Vec<_>>(),
        "domains": expected,
        "left_free": first.left_free.iter().step_by(8).collect::<Vec<_>>(),
        "launches": first.launches,
        "ms": runs.iter().map(|run| run.elapsed.as_secs_f64() * 1e3).collect::<Vec<_>>(),
    });
    Ok((runs.swap_remove(0), value))
}

/// SMs linked by any chain of shared clusters, largest set first.
fn domains(seen: &SmObservations) -> Vec<Vec<u32>> {
    let mut sets: Vec<BTreeSet<u32>> = Vec::new();
    for cluster in seen.sizes.iter().flat_map(|size| &size.clusters) {
        let mut merged: BTreeSet<u32> = cluster.iter().copied().collect();
        sets.retain(|set| {
            let joined = !set.is_disjoint(&merged);
            if joined {
                merged.extend(set);
            }
            !joined
        });
        sets.push(merged);
    }
    let mut sets: Vec<Vec<u32>> = sets.into_iter().map(|set| set.into_iter().collect()).collect();
    sets.sort_by_key(|set| (std::cmp::Reverse(set.len()), set.clone()));
    sets
}

fn attributes(tools: &SmTools, checks: &mut Checks) -> Result<Value, CudaError> {
    let (least, greatest) = tools.device().priorities()?;
    let stream = tools.device().stream(greatest)?;
    let plain = LaunchAttributes::plain();
    let mut cases = vec![
        ("plain", plain),
        ("cooperative", plain.with_cooperative()),
        ("priority", plain.with_priority(least)),
    ];
    if tools.device().properties().clusters {
        cases.extend([
            ("cluster2", plain.with_cluster(2)),
            ("cluster4 cooperative", plain.with_cluster(4).with_cooperative()),
            ("cluster16", plain.with_cluster(16)),
            (
                "cluster2 spread",
                plain.with_cluster(2).with_cluster_scheduling(ClusterScheduling::Spread),
            ),
            (
                "cluster2 balanced",
                plain.with_cluster(2).with_cluster_scheduling(ClusterScheduling::LoadBalancing),
            ),
            ("programmatic", plain.with_programmatic_serialization()),
            ("remote domain", plain.with_mem_sync_domain(MemSyncDomain::Remote)),
        ]);
    }
    let mut all = plain.with_cooperative().with_priority(greatest);
    if tools.device().properties().clusters {
        all = all.with_cluster(2).with_mem_sync_domain(MemSyncDomain::Remote);
    }
    cases.push(("all", all));
    let mut passed = Vec::new();
    for (name, attributes) in cases {
        let result = tools
            .start_probe(&stream, &ProbeSpec::one_per_sm(16, attributes))
            .and_then(|run| run.finish(LIMIT));
        match result {
            Ok(records) => {
                let cluster = attributes.cluster();
                checks.that(records.iter().all(|r| r.cluster_size == cluster), || {
                    format!("{name}: blocks ran in clusters of another size than {cluster}")
                });
                passed.push(name);
            }
            Err(error) => checks.that(false, || format!("{name}: {error}")),
        }
    }
    let refused = tools.start_probe(&stream, &ProbeSpec::one_per_sm(15, plain.with_cluster(2)));
    checks.that(refused.is_err(), || "15 blocks in clusters of 2 are not refused".into());
    Ok(json!({ "priorities": [least, greatest], "ran": passed }))
}

fn occupancy(tools: &SmTools, checks: &mut Checks) -> Result<Value, CudaError> {
    let p = tools.device().properties();
    let kernel = tools.probe_kernel();
    let (alone, small) =
        (kernel.blocks_per_sm(32, p.shared_per_block)?, kernel.blocks_per_sm(32, 0)?);
    checks.that(alone == 1, || format!("{alone} blocks with all shared memory on one SM"));
    checks.that(small > 1, || format!("{small} blocks without shared memory on one SM"));
    if !p.clusters {
        return Ok(json!({ "blocks_per_sm": [alone, small] }));
    }
    let pairs = ProbeSpec::one_per_sm(2, LaunchAttributes::plain().with_cluster(2));
    let plain = kernel.max_active_clusters(&tools.probe_config(&pairs), None)?;
    let cooperative = ProbeSpec { attributes: pairs.attributes.with_cooperative(), ..pairs };
    let cooperative = kernel.max_active_clusters(&tools.probe_config(&cooperative), None)?;
    checks.that(plain >= 1 && plain <= p.sms / 2, || format!("{plain} pairs on {} SMs", p.sms));
    Ok(json!({ "blocks_per_sm": [alone, small], "pairs": plain, "pairs_cooperative": cooperative }))
}

fn holder(tools: &SmTools, seen: &SmObservations, checks: &mut Checks) -> Result<Value, CudaError> {
    let device = tools.device();
    let (least, greatest) = device.priorities()?;
    let (holding, beside) = (device.stream(least)?, device.stream(greatest)?);
    let sms = device.properties().sms;
    // Every eighth SM stays free.
    let free: Vec<u32> = seen.sm_ids.iter().copied().step_by(8).collect();
    let chosen = SmSet::all_but(free.iter().copied())?;
    let hold = Duration::from_millis(20);
    let holder = tools.hold(&holding, &HoldSpec::chosen(sms, chosen, hold))?;
    let held = holder.wait_holding(LIMIT)?;
    let expected: Vec<u32> =
        seen.sm_ids.iter().copied().filter(|id| chosen.contains(*id)).collect();
    checks.that(held == expected, || format!("held {held:?} instead of {expected:?}"));

    let spec = ProbeSpec::one_per_sm(free.len() as u32, LaunchAttributes::plain());
    let records = tools.start_probe(&beside, &spec)?.finish(LIMIT)?;
    let still = holder.is_holding();
    let report = holder.finish(LIMIT)?;
    let used: BTreeSet<u32> = records.iter().map(|record| record.smid).collect();
    checks.that(still, || "a probe on the free SMs ended after the holder".into());
    checks.that(used == free.iter().copied().collect(), || {
        format!("free {free:?}, but used {used:?}")
    });
    let first = records.iter().map(|record| record.start_ns).min().unwrap_or(0);
    checks.that(first < report.first_end_ns, || "the probe started after the holder".into());
    let held_ns = report.first_end_ns.saturating_sub(report.last_start_ns);
    checks.that((10_000_000..40_000_000).contains(&held_ns), || format!("held for {held_ns} ns"));

    let blocked = blocked(tools, &holding, &beside, checks)?;
    Ok(
        json!({ "held": held.len(), "free": free.len(), "held_together_ns": held_ns, "blocked": blocked }),
    )
}

/// With one SM fewer free than blocks, the last block waits for the holder.
fn blocked(
    tools: &SmTools,
    holding: &Stream,
    beside: &Stream,
    checks: &mut Checks,
) -> Result<Value, CudaError> {
    let sms = tools.device().properties().sms;
    let holder = tools.hold(holding, &HoldSpec::anywhere(sms - 8, Duration::from_millis(20)))?;
    holder.wait_holding(LIMIT)?;
    let spec = ProbeSpec {
        hold: Duration::from_millis(30),
        ..ProbeSpec::one_per_sm(9, LaunchAttributes::plain())
    };
    let records = tools.start_probe(beside, &spec)?.finish(LIMIT)?;
    let report = holder.finish(LIMIT)?;
    let early = records.iter().filter(|record| record.start_ns < report.first_end_ns).count();
    checks.that(early == 8, || {
        format!("{early} of 9 blocks started beside a holder that leaves 8 SMs")
    });
    Ok(json!({ "blocks": 9, "started_beside": early }))
}

fn green(tools: &SmTools, checks: &mut Checks) -> Result<Value, CudaError> {
    let device = tools.device();
    let whole = match device.sm_resource() {
        Err(error @ CudaError::Unsupported { .. }) => {
            return Ok(json!({ "unsupported": error.to_string() }));
        }
        other => other?,
    };
    checks.that(whole.sms() == device.properties().sms, || format!("{whole:?}"));
    let mut granted = Vec::new();
    for sms in [1, 8, 12, 16, 20] {
        let (parts, rest) = whole.split(1, sms, SplitFlags::empty())?;
        let left = rest.map_or(0, |rest| rest.sms());
        checks.that(parts[0].sms() >= sms && parts[0].sms() + left <= whole.sms(), || {
            format!("asked for {sms} SMs, got {} and {left} left", parts[0].sms())
        });
        granted.push(json!([sms, parts[0].sms(), left]));
    }
    checks.that(whole.split(1, whole.sms() + 1, SplitFlags::empty()).is_err(), || {
        "more SMs than there are were split off".into()
    });

    let (parts, rest) = whole.split(1, 16, SplitFlags::empty())?;
    let small = GreenContext::new(&parts[0])?;
    let small_ids = sms_of(tools, &small)?;
    checks.that(small_ids.len() as u32 == small.sms(), || {
        format!("{} SMs seen in a partition of {}", small_ids.len(), small.sms())
    });
    let mut rest_sms = 0;
    if let Some(rest) = rest {
        let rest = GreenContext::new(&rest)?;
        rest_sms = rest.sms();
        let rest_ids = sms_of(tools, &rest)?;
        checks.that(rest_ids.is_disjoint(&small_ids), || "the partitions share SMs".into());
        checks.that(rest_ids.len() as u32 == rest_sms, || {
            format!("{} SMs seen in a partition of {rest_sms}", rest_ids.len())
        });
    }
    let mut pairs = None;
    if device.properties().clusters {
        let spec = ProbeSpec::one_per_sm(2, LaunchAttributes::plain().with_cluster(2));
        let stream = small.stream(0)?;
        let count =
            tools.probe_kernel().max_active_clusters(&tools.probe_config(&spec), Some(&stream))?;
        checks.that(count <= small.sms() / 2, || format!("{count} pairs in {} SMs", small.sms()));
        pairs = Some(count);
    }
    Ok(json!({
        "min_partition": whole.min_partition(),
        "alignment": whole.alignment(),
        "asked_granted_left": granted,
        "partitions": [small.sms(), rest_sms],
        "small_ids": small_ids,
        "pairs_in_small": pairs,
    }))
}

/// The SMs a partition's blocks run on: the stream outlives its last handle of the green context.
fn sms_of(tools: &SmTools, green: &GreenContext) -> Result<BTreeSet<u32>, CudaError> {
    let stream = green.clone().stream(0)?;
    tools.probe_kernel().prepare(&stream)?;
    let spec = ProbeSpec::one_per_sm(green.sms(), LaunchAttributes::plain());
    let records = tools.start_probe(&stream, &spec)?.finish(LIMIT)?;
    Ok(records.iter().map(|record: &ProbeRecord| record.smid).collect())
}
