use super::*;
use crate::case::{Dtype, Layout};
use clap::Parser as _;
use ep_runtime::{PlanInForce, PlanOrigin};

fn args(line: &str) -> Args {
    Args::parse_from(std::iter::once("ep-bench").chain(line.split_whitespace()))
}

#[test]
fn options_make_the_cases_they_say() {
    let list = cases(&args("dispatch --transport nvlink")).unwrap();
    assert_eq!(list.len(), 1);
    assert_eq!((list[0].workload.as_str(), list[0].shape.ranks), ("train", 2));
    assert!(list[0].cached);
    let line = "roundtrip --transport nvlink --ranks 5 --tokens 77 --payload fp8 --uncached \
                --layout expert-major --workload decode";
    let case = &cases(&args(line)).unwrap()[0];
    assert_eq!((case.shape.ranks, case.shape.tokens, case.shape.experts), (5, 77, 290));
    assert_eq!((case.dtype, case.layout, case.cached), (Dtype::Fp8, Layout::ExpertMajor, false));
    assert_eq!(case.workload, "custom");
    let both = cases(&args("--transport nvlink --workload decode")).unwrap();
    assert_eq!(both.len(), 2);
    assert!(cases(&args("dispatch --transport nvlink --hidden 12")).is_err());
}

#[test]
fn what_ranks_as_threads_cannot_do_is_refused() {
    for line in ["--transport nvlink --processes", "sweep --transport nvlink"] {
        assert_eq!(run(&args(line)).unwrap_err().exit_code(), 2, "{line}");
    }
}

#[test]
fn without_gpus_the_error_says_so() {
    if Driver::get().is_ok() {
        return;
    }
    for transport in ["nvlink", "copy", "nccl"] {
        let error = run(&args(&format!("dispatch --transport {transport}"))).unwrap_err();
        assert!(error.to_string().contains("libcuda") && error.exit_code() == 1, "{error}");
        assert!(error.to_string().starts_with(transport), "{error}");
    }
}

#[test]
fn rows_name_their_transport_and_the_type_they_move() {
    let case = standard(Operation::Dispatch, Workload::Train, 2, Dtype::Fp8, Layout::RankMajor);
    let case =
        Case { shape: Shape { ranks: 2, tokens: 9, hidden: 128, topk: 2, experts: 6 }, ..case };
    let mut job = job(case, false, &[]).unwrap();
    job.way = Way::Nccl { nodes: vec![0, 1], ctas: 8 };
    let limits = rows::Limits::default();
    let of = |operation| rows::row(&job, (operation, vec![20.0; 3]), 16, Call::default(), &limits);
    let [dispatch, combine, both] =
        [Operation::Dispatch, Operation::Combine, Operation::Roundtrip].map(of);
    assert_eq!([&dispatch.dtype, &combine.dtype, &both.dtype], ["fp8", "bf16", "fp8"]);
    assert_eq!(dispatch.transport, "nccl");
    assert_eq!(
        (&dispatch.metrics["nodes"], &dispatch.metrics["nccl_ctas"]),
        (&2.into(), &8.into())
    );
}

#[test]
fn trainings_dispatch_is_judged_by_nccls_own_exchange() {
    let judged = |transport: &str, dtype: &str, p50_us: f64| {
        let mut row = crate::report::tests::row("dispatch", 8192);
        (row.transport, row.workload) = (transport.into(), "train".into());
        (row.dtype, row.p50_us) = (dtype.into(), p50_us);
        row.metrics.insert("nccl_us".into(), 100.0.into());
        rows::judge_nccl(&mut row);
        row.metrics.get("verdict").cloned()
    };
    for (us, verdict) in [(114.9, "goal"), (134.9, "must"), (135.1, "missed")] {
        assert_eq!(judged("nccl", "bf16", us), Some(verdict.into()));
    }
    assert_eq!(judged("nccl", "fp8", 90.0), None);
    assert_eq!(judged("nvlink", "bf16", 90.0), None);
}

#[test]
fn every_run_counts_its_slowest_rank() {
    assert_eq!(slowest(&[vec![1.0, 5.0], vec![2.0, 3.0, 9.0]]), [2.0, 5.0]);
    assert!(slowest(&[]).is_empty());
}

#[test]
fn verdicts_are_inclusive() {
    assert_eq!(suite::verdict(360.0, 415.0, 360.0), "goal");
    assert_eq!(suite::verdict(415.0, 415.0, 360.0), "must");
    assert_eq!(suite::verdict(415.1, 415.0, 360.0), "missed");
}

#[test]
fn plans_are_tuned_only_where_that_is_asked_for() {
    let tuned = |line: &str| tuning_mode(&args(line));
    assert_eq!([tuned("dispatch"), tuned("dispatch --no-tune")], [Tune::Off; 2]);
    let limit = std::time::Duration::from_millis(1500);
    assert_eq!(tuned("dispatch --tune=1.5"), Tune::Search { limit });
    assert_eq!(tuned("dispatch --tune"), Tune::search());
    let both = Args::try_parse_from(["ep-bench", "--tune", "--no-tune"]);
    assert!(both.unwrap_err().to_string().contains("cannot be used with"));
}

#[test]
fn rows_say_which_plan_was_in_force() {
    let case = standard(Operation::Combine, Workload::Decode, 2, Dtype::Bf16, Layout::RankMajor);
    let job = job(case, false, &[]).unwrap();
    let limits = rows::Limits::default();
    let timed = (Operation::Combine, vec![20.0; 3]);
    let mut row = rows::row(&job, timed, 16, Call::default(), &limits);
    rows::note_plan(&mut row, &[]);
    assert!(!row.metrics.contains_key("plan"));
    let plan = ep_runtime::MovePlan::new(16, 20, ep_runtime::CopyPath::LdSt { unroll: 4 });
    let found = PlanInForce { kernel: "combine", plan, origin: PlanOrigin::Searched };
    let other = PlanInForce { kernel: "dispatch", origin: PlanOrigin::Shipped, ..found };
    rows::note_plan(&mut row, &[other, found]);
    assert_eq!(row.metrics["plan"], "ldst u4 w20");
    assert_eq!(row.metrics["plan_origin"], "searched");
    let mut report = Report::new("abc".into(), Machine::default());
    report.results.push(row);
    assert!(rows::table(&report).contains("rank tuned"));
}

/// The host backend agrees with itself, and a changed byte shows.
#[test]
fn references_notice_a_difference() {
    for (layout, reduced) in
        [(Layout::RankMajor, false), (Layout::ExpertMajor, false), (Layout::ExpertMajor, true)]
    {
        let mut case = standard(Operation::Roundtrip, Workload::Decode, 2, Dtype::Bf16, layout);
        case.shape = Shape { ranks: 2, tokens: 9, hidden: 64, topk: 2, experts: 6 };
        let traffic = Traffic::of(&case).unwrap();
        let one = reference::references(&case, &traffic, reduced).unwrap();
        let two = reference::references(&case, &traffic, reduced).unwrap();
        for (a, b) in one.iter().zip(&two) {
            reference::compare_rows(&a.rows, &b.rows).unwrap();
            reference::compare_combined(&a.combined, &b.combined, 128).unwrap();
            let mut changed = b.combined.clone();
            changed[200] ^= 1;
            let error = reference::compare_combined(&a.combined, &changed, 128).unwrap_err();
            assert!(error.contains("token 1 ") && error.contains("byte 72"), "{error}");
        }
        assert!(reference::compare_rows(&one[0].rows, &one[1].rows).is_err());
    }
}

#[test]
fn rows_have_rates_and_the_table_fits() {
    let mut case =
        standard(Operation::Dispatch, Workload::Decode, 2, Dtype::Bf16, Layout::RankMajor);
    case.shape.tokens = 16;
    let job = job(case, false, &[]).unwrap();
    let time = crate::stats::Summary { p50_us: 10.0, p90_us: 11.0, min_us: 9.0, runs: 30 };
    let bytes = rows::wire_bytes(&job, Operation::Dispatch);
    let limits = rows::Limits {
        bytes,
        copy: Some((time, 2)),
        nccl: Some((time, 23004)),
        nccl_within: None,
        notes: vec![],
    };
    let mut row =
        rows::row(&job, (Operation::Dispatch, vec![20.0; 3]), 16, Call::default(), &limits);
    assert_eq!((row.limit_us, row.wire_share), (Some(10.0), Some(0.5)));
    assert_eq!(row.metrics["nccl_ratio"], 2.0);
    assert_eq!(row.wire_gbps, bytes as f64 / 20.0 / 1e3);
    row.metrics.insert("must_us".into(), 30.0.into());
    row.metrics.insert("goal_us".into(), 15.0.into());
    row.metrics.insert("verdict".into(), "must".into());
    let mut report = Report::new("abc".into(), Machine::default());
    report.results.push(row);
    let table = rows::table(&report);
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    assert!(table.contains("must 30, goal 15: must") && table.contains("50%"), "{table}");
}

#[test]
fn the_floor_of_expert_major_rows_is_wire_or_sms() {
    let case = standard(Operation::Dispatch, Workload::Decode, 2, Dtype::Bf16, Layout::ExpertMajor);
    let job = job(case, true, &[]).unwrap();
    let floor = |sms, rate| rows::expert_major_floor(&job, Operation::Dispatch, sms, rate);
    // A slow wire decides, whatever the SMs; a fast one leaves it to them.
    assert_eq!(floor(1000, 1.0), rows::wire_bytes(&job, Operation::Dispatch) as f64);
    assert!((floor(8, 1e12) / floor(16, 1e12) - 2.0).abs() < 1e-9);
}
