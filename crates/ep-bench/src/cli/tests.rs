use super::*;

fn args(line: &str) -> std::result::Result<Args, clap::Error> {
    Args::try_parse_from(std::iter::once("ep-bench").chain(line.split_whitespace()))
}

fn plan(line: &str) -> Result<Plan> {
    args(line).unwrap_or_else(|e| panic!("{line}: {e}")).plan(64 << 30)
}

#[test]
fn nothing_asked_is_the_standard_set() {
    let plan = plan("").unwrap();
    let ran: Vec<String> = plan.cases.iter().map(Case::title).collect();
    assert_eq!(ran, ["dispatch bf16", "dispatch fp8", "combine bf16"]);
    assert!(plan.layout_cost && !plan.processes && plan.notes.is_empty());
    assert!(plan.cases.iter().all(|case| case.workload == "host"));
    let shape = Shape { ranks: 4, tokens: 1024, hidden: 7168, topk: 8, experts: 64 };
    assert_eq!(plan.cases[0].shape, shape);
}

#[test]
fn every_option_is_understood() {
    let line = "roundtrip --transport host --ranks 8 --processes --tokens 64 --hidden 1024 \
                --topk 4 --experts 32 --dtype fp8 --layout expert-major --routing masked:0.3 \
                --workload decode --json a.json --html a.html --trace t.json --seed 7 --dry-run \
                --alignment 128 --unequal --cached --budget 2 --timeout 5";
    let parsed = args(line).unwrap();
    assert!(parsed.dry_run && parsed.json.is_some() && parsed.html.is_some());
    let plan = parsed.plan(64 << 30).unwrap();
    assert!(plan.processes && plan.trace && !plan.layout_cost);
    let case = &plan.cases[0];
    assert_eq!(case.shape, Shape { ranks: 8, tokens: 64, hidden: 1024, topk: 4, experts: 32 });
    assert_eq!((case.dtype, case.layout, case.alignment), (Dtype::Fp8, Layout::ExpertMajor, 128));
    assert_eq!((case.seed, case.cached, case.unequal), (7, true, true));
    assert_eq!(case.workload, "custom");
    assert_eq!(plan.timeout, Duration::from_secs(5));
}

#[test]
fn the_documented_lines_work() {
    let decode = &plan("--ranks 8 --workload decode").unwrap().cases[0];
    assert_eq!((decode.workload.as_str(), decode.shape.experts), ("decode", 288));
    let many = &plan("--ranks 64 --tokens 64 --hidden 1024 --experts 256").unwrap().cases[0];
    assert_eq!((many.shape.ranks, many.shape.experts), (64, 256));
    assert!(plan("--ranks 4 --processes").unwrap().processes);
    assert_eq!(plan("--ranks 100").unwrap().cases[0].shape.experts, 100);
}

#[test]
fn sweeps_cover_token_counts() {
    let plan = plan("sweep --tokens 1000 --hidden 64").unwrap();
    let tokens: Vec<usize> = plan.cases.iter().map(|case| case.shape.tokens).collect();
    assert_eq!(tokens, [16, 64, 256, 1000, 16, 64, 256, 1000]);
    assert_eq!(plan.cases[4].operation, Operation::Combine);
}

#[test]
fn wrong_options_end_with_2() {
    for line in [
        "--unknown",
        "bench",
        "--ranks 0",
        "--ranks -1",
        "--tokens x",
        "--dtype bf17",
        "--layout row",
        "--routing nowhere",
        "--workload lunch",
        "--budget 0",
        "--seed -1",
    ] {
        assert_eq!(args(line).unwrap_err().exit_code(), 2, "{line}");
    }
    for (line, says) in [
        ("combine --dtype fp8", "cannot be combined"),
        ("suite", "--transport nvlink"),
        ("launch --transport host", "--transport nvlink"),
        ("overlap --quick", "--transport nvlink"),
        ("unroll", "--transport nvlink"),
        ("--hidden 12", "multiple of 16"),
        ("--ranks 8 --experts 7", "every rank needs an expert"),
        ("--topk 65", "more than --experts 64"),
        ("dispatch --tune", "--tune is for GPUs"),
        ("dispatch --transport host --graph --sms 8", "--sms is for GPUs"),
        ("dispatch --nodes 2", "--nodes needs --dry-run or --transport"),
        ("--routing one-rank:4", "there are 4 ranks"),
        ("--routing grouped --experts 12", "multiple of 8"),
        ("--routing /nonexistent/ids.npy", "/nonexistent/ids.npy"),
        ("--tokens 100000000", "lower --tokens"),
    ] {
        let error = plan(line).unwrap_err();
        assert!(error.to_string().contains(says), "{line}: {error}");
        assert_eq!(error.exit_code(), 2);
    }
}

#[test]
fn small_machines_get_fewer_tokens_and_a_note() {
    let plan = args("").unwrap().plan(1 << 30).unwrap();
    assert!(plan.cases[0].shape.tokens < 1024);
    assert_eq!(plan.notes.len(), 3);
}

#[test]
fn help_fits() {
    use clap::CommandFactory as _;
    let help = Args::command().term_width(80).render_long_help().to_string();
    assert!(help.lines().all(|line| line.chars().count() <= 80), "{help}");
    assert!(!help.contains("rank-process"));
}

#[test]
fn plans_travel() {
    let plan = plan("sweep --routing zipf:1.1").unwrap();
    let text = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
}

#[test]
fn transports_that_a_build_lacks_name_their_feature() {
    for (transport, feature, there) in [
        ("rdma", "rdma", cfg!(feature = "rdma")),
        ("nvlink", "cuda", cfg!(feature = "cuda")),
        ("copy", "cuda", cfg!(feature = "cuda")),
        ("nccl", "nccl", cfg!(feature = "nccl")),
    ] {
        let done = args(&format!("dispatch --transport {transport}")).unwrap().check_transport();
        match done {
            Ok(()) => assert!(there, "{transport}"),
            Err(error) => {
                assert!(!there && error.exit_code() == 2, "{transport}: {error}");
                assert!(error.to_string().contains(&format!("feature `{feature}`")), "{error}");
            }
        }
    }
}

#[test]
#[cfg(feature = "nccl")]
fn options_that_a_transport_cannot_honour_are_refused() {
    for (line, says) in [
        ("--transport nvlink --processes", "leave --processes out"),
        ("sweep --transport nvlink", "GPUs run dispatch"),
        ("dispatch --transport nvlink --dry-run", "leave --transport nvlink out"),
        ("dispatch --transport nvlink --nodes 2", "--nodes needs"),
        ("dispatch --transport copy --ctas 4", "--ctas is for --transport nccl"),
        ("dispatch --transport copy --graph", "cannot be captured"),
        ("combine --transport nccl --graph", "cannot be captured"),
        ("suite --transport nccl", "--transport nccl runs dispatch, combine and roundtrip"),
        ("overlap --transport copy", "--transport copy runs dispatch, combine and roundtrip"),
        ("launch --transport nvlink --tune", "leave --tune out"),
    ] {
        let error = args(line).unwrap().check_transport().unwrap_err();
        assert_eq!(error.exit_code(), 2, "{line}");
        assert!(error.to_string().contains(says), "{line}: {error}");
    }
    for line in [
        "overlap --transport nvlink --tune=2",
        "copy --transport nvlink --tune",
        "unroll --transport nvlink --tune",
        "suite --transport nvlink --tune",
        "roundtrip --transport copy --tune --nodes 2 --capacity",
        "dispatch --transport nccl --ctas 4",
    ] {
        args(line).unwrap().check_transport().unwrap();
    }
}

#[test]
fn a_budget_is_taken_wherever_one_is_named() {
    assert_eq!(args("").unwrap().budget(170.0), Duration::from_secs(170));
    assert_eq!(args("overlap --budget 30").unwrap().budget(170.0), Duration::from_secs(30));
    assert_eq!(plan("--budget 0.5").unwrap().budget, Duration::from_millis(500));
    assert_eq!(plan("").unwrap().budget, Duration::from_secs(8));
}
