//! `topo`, `preflight`, `kernels` and `margin` as programs, on whatever machine the tests run.

use std::process::{Command, Output};

use serde_json::Value;

fn ep_bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ep-bench")).args(args).output().expect("ep-bench starts")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("JSON and nothing else on standard output")
}

#[test]
fn topo_prints_a_tree_or_json_and_draws() {
    let folder = std::env::temp_dir().join(format!("ep-tools-topo-{}", std::process::id()));
    let path = folder.to_str().expect("a plain path");
    let tree = ep_bench(&["topo", "--record", path]);
    assert!(tree.status.success());
    let text = String::from_utf8(tree.stdout).expect("UTF-8");
    assert!(text.starts_with("machine\n") && text.contains("GPU"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");

    let replayed = ep_bench(&["topo", "--from", path]);
    assert!(replayed.status.success());
    assert_eq!(String::from_utf8(replayed.stdout).expect("UTF-8"), text);
    let machine = json(&ep_bench(&["topo", "--from", path, "--json"]));
    assert_eq!(machine["schema"], 1);
    assert!(machine["recording"]["host"].is_object());
    std::fs::remove_dir_all(&folder).expect("own folder");
}

#[test]
fn preflight_names_every_library() {
    let output = ep_bench(&["preflight", "--json", "--no-gpu"]);
    let found = json(&output);
    let names: Vec<&str> = found["found"]["libraries"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|library| library["name"].as_str())
        .collect();
    assert_eq!(names, ["libcuda", "libnvidia-ml", "libnvrtc", "libnccl", "libibverbs"]);
    assert_eq!(output.status.success(), found["verdict"]["ready"] == true);
}

#[test]
fn wrong_options_end_with_2_and_say_why() {
    for args in [
        &["topo", "--nonsense"][..],
        &["topo", "--from", "/nowhere", "--record", "/nowhere"],
        &["margin", "--rounds", "0"],
        &["preflight", "--timeout", "never"],
        &["kernels", "extra"],
    ] {
        let output = ep_bench(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(!output.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn what_is_missing_is_an_error_with_a_remedy_and_no_panic() {
    let output = ep_bench(&["topo", "--from", "/nowhere"]);
    assert_eq!(output.status.code(), Some(1));
    let output = ep_bench(&["kernels", "--nvrtc", "/nowhere/libnvrtc.so"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && !text.contains("panicked"), "{text}");
    // An ordinal that no machine has: without a driver the message names that instead.
    let output = ep_bench(&["margin", "--gpu", "10000"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && !text.contains("panicked"), "{text}");
    assert!(["libcuda", "10000", "cuda"].iter().any(|word| text.contains(word)), "{text}");
}
