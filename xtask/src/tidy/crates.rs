//! Checks of crates and manifests.

use std::path::Path;

use serde_json::Value;

use super::Input;
use super::source::{line_of, words};
use crate::workspace::members;

/// Where the sources of the libraries lie.
pub const LIBRARIES: [&str; 4] = [
    "crates/ep-topology/src",
    "crates/ep-transport/src",
    "crates/ep-kernels/src",
    "crates/ep-runtime/src",
];

/// Which of our crates a crate may build on. What only tests use is not looked at.
const MAY_USE: [(&str, &[&str]); 6] = [
    ("ep-topology", &[]),
    ("ep-transport", &["ep-topology"]),
    ("ep-kernels", &[]),
    ("ep-runtime", &["ep-topology", "ep-transport", "ep-kernels"]),
    // Micro-benchmarks look below the runtime; everything else goes through it.
    ("ep-bench", &["ep-runtime", "ep-kernels", "ep-topology"]),
    // It stands where CUDA's libraries do, and knows the project by its calls alone.
    ("gpu-emulator", &[]),
];

/// Native libraries that are opened at run time or not at all, as `links` keys spell them.
const NATIVE: [&str; 8] =
    ["cuda", "cudart", "nvml", "nvidia-ml", "nccl", "nvrtc", "ibverbs", "rdmacm"];

/// All that may be asked of cudarc: it then opens the driver at run time, and builds beside other
/// users of it.
const CUDARC: [&str; 3] =
    ["fallback-dynamic-loading", "cuda-version-from-build-system", "fallback-latest"];

fn array<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().into_iter().flatten()
}

pub fn graph(input: &Input) -> Vec<String> {
    let members = members(&input.metadata, &input.root);
    let ours: Vec<&str> = members.iter().map(|m| m.name).collect();
    let mut found = Vec::new();
    for member in &members {
        let may_use: &[&str] = match MAY_USE.iter().find(|(name, _)| *name == member.name) {
            Some((_, may_use)) => may_use,
            None if member.dir.starts_with("examples") => &["ep-runtime"],
            None if member.name == "xtask" => continue,
            None => {
                found.push(format!("{}: the checks know no crate of this name", member.name));
                continue;
            }
        };
        let shipped = array(member.package, "dependencies").filter(|d| d["kind"] != "dev");
        for name in shipped.filter_map(|d| d["name"].as_str()) {
            if ours.contains(&name) && !may_use.contains(&name) {
                found.push(format!("{} must not depend on {name}", member.name));
            }
        }
    }
    if ours.is_empty() {
        found.push("cargo metadata names no member".into());
    }
    found
}

pub fn linking(input: &Input) -> Vec<String> {
    let mut found = Vec::new();
    for member in members(&input.metadata, &input.root) {
        if let Some(links) = member.package["links"].as_str() {
            found.push(format!("{} links {links}", member.name));
        }
    }
    for package in array(&input.metadata, "packages") {
        if let (Some(name), Some(links)) = (package["name"].as_str(), package["links"].as_str())
            && NATIVE.contains(&links)
        {
            found.push(format!("the dependency {name} links {links}"));
        }
    }
    for (file, source) in input.rust("") {
        for word in ["#[link(", "#[link ("] {
            for at in words(&source.code, word) {
                found.push(file.at(line_of(&source.code, at), word));
            }
        }
        let build = file.path.file_name().is_some_and(|name| name == "build.rs");
        for word in ["rustc-link-lib", "rustc-link-search", "rustc-link-arg"] {
            for (at, _) in file.text.match_indices(word).filter(|_| build) {
                found.push(file.at(line_of(&file.text, at), word));
            }
        }
    }
    for file in input.files.iter().filter(|f| f.path == Path::new(".cargo/config.toml")) {
        for (i, line) in file.text.lines().enumerate() {
            if line.contains("-l") && line.contains("rustflags") {
                found.push(file.at(i + 1, "flags that link"));
            }
        }
    }
    found
}

pub fn cudarc(input: &Input) -> Vec<String> {
    let mut found = Vec::new();
    for member in members(&input.metadata, &input.root) {
        for uses in array(member.package, "dependencies").filter(|d| d["name"] == "cudarc") {
            if uses["uses_default_features"] != false {
                found.push(format!("{}: cudarc with its default features", member.name));
            }
            for feature in array(uses, "features").filter_map(Value::as_str) {
                if !CUDARC.contains(&feature) && !is_binding(feature) {
                    found.push(format!("{}: cudarc's feature {feature}", member.name));
                }
            }
        }
    }
    found
}

/// Features of cudarc that only add declarations.
fn is_binding(feature: &str) -> bool {
    ["driver", "nvrtc", "nccl", "std"].contains(&feature)
}

pub fn manifests(input: &Input) -> Vec<String> {
    let mut found = Vec::new();
    for file in &input.files {
        let member = file.path.components().count() > 1;
        if !(member && file.path.file_name().is_some_and(|name| name == "Cargo.toml")) {
            continue;
        }
        if !file.text.contains("[lints]\nworkspace = true") {
            found.push(file.at(1, "the workspace's lints are not taken"));
        }
        let mut section = "";
        for (i, line) in file.text.lines().map(str::trim).enumerate() {
            if line.starts_with('[') {
                section = line;
            } else if section.ends_with("dependencies]")
                && line.contains('=')
                && !line.starts_with('#')
                && !line.replace(' ', "").contains("workspace=true")
            {
                found.push(file.at(i + 1, "a version that does not come from the root"));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A workspace of one crate with one dependency.
    fn workspace(name: &str, links: Value, dependency: Value) -> Input {
        let package = |name: &str, links: Value, uses: Vec<Value>| {
            let manifest = format!("/nowhere/crates/{name}/Cargo.toml");
            json!({"id": name, "name": name, "manifest_path": manifest, "links": links,
                   "dependencies": uses})
        };
        let runtime = package("ep-runtime", Value::Null, vec![]);
        let mut input = Input::of(&[]);
        input.metadata = json!({
            "workspace_members": [name, "ep-runtime"],
            "packages": [package(name, links, vec![dependency]), runtime],
        });
        input
    }

    #[test]
    fn crates_depend_one_way() {
        let on = |name: &str, kind: Value| {
            graph(&workspace(name, Value::Null, json!({"name": "ep-runtime", "kind": kind})))
        };
        assert_eq!(on("ep-bench", Value::Null), Vec::<String>::new());
        assert_eq!(on("ep-kernels", json!("dev")), Vec::<String>::new());
        assert_eq!(on("ep-kernels", Value::Null), ["ep-kernels must not depend on ep-runtime"]);
        assert_eq!(on("ep-kernels", json!("build")).len(), 1);
        assert_eq!(on("ep-unheard-of", Value::Null).len(), 1);
        assert_eq!(graph(&Input::of(&[])).len(), 1);
    }

    #[test]
    fn links_are_found() {
        let none = json!({"name": "half"});
        assert!(linking(&workspace("ep-bench", Value::Null, none.clone())).is_empty());
        assert!(!linking(&workspace("ep-bench", json!("z"), none)).is_empty());
        let bad = "fn main() { println!(\"cargo:rustc-link-lib=cuda\"); }";
        assert_eq!(linking(&Input::of(&[("crates/a/build.rs", bad)])).len(), 1);
        assert_eq!(linking(&Input::of(&[("a/src/lib.rs", "#[link(name = \"cuda\")]")])).len(), 1);
        assert!(linking(&Input::of(&[("a/src/lib.rs", "// #[link(name)]")])).is_empty());
        let flags = "rustflags = [\"-lcuda\"]";
        assert_eq!(linking(&Input::of(&[(".cargo/config.toml", flags)])).len(), 1);
    }

    #[test]
    fn cudarc_is_opened_at_run_time() {
        let uses = |default: bool, feature: &str| json!({"name": "cudarc", "uses_default_features": default, "features": [feature]});
        let found = |d, f| cudarc(&workspace("ep-kernels", Value::Null, uses(d, f)));
        assert!(found(false, "fallback-dynamic-loading").is_empty());
        assert!(found(false, "driver").is_empty());
        assert_eq!(found(false, "dynamic-linking").len(), 1);
        assert_eq!(found(false, "cuda-12080").len(), 1);
        assert_eq!(found(true, "fallback-latest").len(), 1);
    }

    #[test]
    fn manifests_take_lints_and_versions_from_the_root() {
        let found = |text: &str| manifests(&Input::of(&[("crates/a/Cargo.toml", text)]));
        let lints = "[lints]\nworkspace = true\n\n[dependencies]\n";
        assert!(found(&format!("{lints}half.workspace = true\n")).is_empty());
        assert!(found(&format!("{lints}half = {{ workspace = true }}\n")).is_empty());
        assert_eq!(found(&format!("{lints}half = \"2\"\n")).len(), 1);
        assert_eq!(found("[dependencies]\n").len(), 1);
    }
}
