use super::*;

fn options() -> PreflightOptions {
    PreflightOptions { try_gpus: false, ..PreflightOptions::default() }
}

/// A rank with two GPUs that reach each other, and everything that is needed.
fn good() -> Preflight {
    let library = |name: &str| Library {
        name: name.into(),
        file: Some(format!("/lib/{name}.so").into()),
        version: Some("1.0".into()),
        problem: None,
    };
    let pair = |from, to| PeerTrial { from, to, failure: None };
    Preflight {
        schema: SCHEMA,
        host: "a".into(),
        driver: Some("580.1".into()),
        libraries: ["libcuda", "libnvidia-ml", "libnvrtc", "libnccl", "libibverbs"]
            .map(library)
            .into(),
        gpus: 2,
        peers: vec![pair(0, 1), pair(1, 0)],
        nics: 1,
        checks: vec![Check::new("host", "memfd", Severity::Ok, "can be made".into())],
    }
}

#[test]
fn every_library_is_named_and_a_machine_without_gpu_is_ready() {
    let found = Preflight::here(&options());
    let names: Vec<&str> = found.libraries.iter().map(|l| l.name.as_str()).collect();
    assert_eq!(names, ["libcuda", "libnvidia-ml", "libnvrtc", "libnccl", "libibverbs"]);
    for area in ["library", "driver", "host"] {
        assert!(found.checks.iter().any(|check| check.area == area), "{area}");
    }
    let back: Preflight = serde_json::from_str(&found.to_json()).expect("own JSON");
    assert_eq!(back, found);
    let gpu = found.libraries[0].file.is_some();
    assert!(
        gpu || Verdict::of(std::slice::from_ref(&found)).abilities.contains(&Ability::Host),
        "{found:?}"
    );
}

#[test]
fn missing_nvml_is_a_failure_only_beside_a_gpu() {
    let dev = std::env::temp_dir().join(format!("ep-preflight-dev-{}", std::process::id()));
    std::fs::create_dir_all(&dev).expect("temporary folder");
    let mut options = options();
    options.machine.nvml = Some("libnvidia-ml-that-is-not-there.so.1".into());
    options.machine.dev = dev.clone();
    options.machine.sysfs = dev.join("no-sysfs");
    let driver = |found: &Preflight| {
        let check = found.checks.iter().find(|check| check.area == "driver");
        check.expect("looked at").severity
    };
    assert_eq!(driver(&Preflight::here(&options)), Severity::Note);
    std::fs::write(dev.join("nvidiactl"), "").expect("temporary file");
    let found = Preflight::here(&options);
    assert_eq!(driver(&found), Severity::Failure);
    assert!(!Verdict::of(&[found]).ready);
    std::fs::remove_dir_all(&dev).expect("temporary folder");
}

#[test]
fn a_rank_that_lacks_something_takes_it_from_all() {
    use Ability::*;
    let abilities = |spoil: &dyn Fn(&mut Preflight)| {
        let mut bad = good();
        spoil(&mut bad);
        Verdict::of(&[good(), bad]).abilities
    };
    assert_eq!(abilities(&|_| {}), [Host, Gpu, GpuPeers, Nccl, Rdma]);
    assert_eq!(abilities(&|p| p.gpus = 0), [Host, Rdma]);
    assert_eq!(abilities(&|p| p.peers[1].failure = Some("no".into())), [Host, Gpu, Nccl, Rdma]);
    assert_eq!(abilities(&|p| p.peers.truncate(1)), [Host, Gpu, Nccl, Rdma]);
    assert_eq!(abilities(&|p| p.libraries[3].file = None), [Host, Gpu, GpuPeers, Rdma]);
    assert_eq!(abilities(&|p| p.nics = 0), [Host, Gpu, GpuPeers, Nccl]);
    let fabric = Check::new("fabric", "x", Severity::Failure, "pending".into());
    assert_eq!(abilities(&|p| p.checks.push(fabric.clone())), [Host, Gpu, Nccl, Rdma]);
    assert!(Verdict::of(&[]).abilities.is_empty());
}

#[test]
fn findings_name_their_ranks_and_the_worst_comes_first() {
    let note = Check::new("library", "libnccl", Severity::Note, "not found".into());
    let failure = Check::new("host", "memlock", Severity::Failure, "64 KiB".into());
    let mut ranks = vec![good(), good(), good()];
    ranks[0].checks.push(note.clone());
    ranks[2].checks.push(note);
    ranks[1].checks.push(failure);
    ranks[2].driver = Some("570.0".into());
    let verdict = Verdict::of(&ranks);
    assert!(!verdict.ready);
    let of: Vec<(&str, &[usize])> =
        verdict.findings.iter().map(|f| (f.check.name.as_str(), &f.ranks[..])).collect();
    assert_eq!(of, [("memlock", &[1][..]), ("driver", &[2]), ("libnccl", &[0, 2])]);
}

#[test]
fn all_ranks_reach_the_same_verdict() {
    let ranks = ep_transport::Group::local(3).expect("three ranks");
    let verdicts: Vec<Verdict> = std::thread::scope(|scope| {
        let handles: Vec<_> = ranks
            .into_iter()
            .map(|group| {
                scope.spawn(move || {
                    let mut found = good();
                    if group.rank() == 1 {
                        found.peers[0].failure = Some("not mapped".into());
                        let text = "not mapped".to_owned();
                        found.checks.push(Check::new("peers", "0 to 1", Severity::Failure, text));
                    }
                    found.agree(&group).expect("all three call")
                })
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().expect("no panic")).collect()
    });
    assert!(verdicts.iter().all(|verdict| *verdict == verdicts[0]));
    assert!(!verdicts[0].ready && !verdicts[0].abilities.contains(&Ability::GpuPeers));
    assert_eq!(verdicts[0].findings[0].ranks, [1]);
}

#[test]
fn a_peer_of_another_version_is_an_error_on_every_rank() {
    let ranks = ep_transport::Group::local(2).expect("two ranks");
    std::thread::scope(|scope| {
        for group in ranks {
            scope.spawn(move || {
                let mut found = good();
                found.schema += group.rank() as u32;
                let error = found.agree(&group).expect_err("rank 1 differs");
                assert!(error.to_string().contains("rank 1"), "{error}");
            });
        }
    });
}
