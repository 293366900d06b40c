//! What cargo says about the workspace.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::Result;

/// The workspace: its root, where builds go, and `cargo metadata`.
pub struct Workspace {
    pub root: PathBuf,
    pub target: PathBuf,
    pub metadata: Value,
}

/// One member of the workspace.
#[derive(Debug)]
pub struct Member<'a> {
    pub name: &'a str,
    /// Relative to the root, for example `crates/ep-runtime`.
    pub dir: PathBuf,
    /// The package as `cargo metadata` gives it.
    pub package: &'a Value,
}

impl Workspace {
    /// Asks cargo; with the whole dependency graph where `resolved`.
    pub fn load(resolved: bool) -> Result<Self> {
        let root = root();
        let mut command = cargo(&root);
        command.args(["metadata", "--format-version", "1", "--quiet"]);
        if !resolved {
            command.arg("--no-deps");
        }
        let out = command.output().map_err(|e| format!("cargo metadata: {e}"))?;
        if !out.status.success() {
            return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&out.stderr)));
        }
        let metadata: Value =
            serde_json::from_slice(&out.stdout).map_err(|e| format!("cargo metadata: {e}"))?;
        let target = metadata["target_directory"].as_str().ok_or("cargo metadata: no target")?;
        Ok(Self { root, target: target.into(), metadata })
    }

    /// The members, ordered by directory.
    pub fn members(&self) -> Vec<Member<'_>> {
        members(&self.metadata, &self.root)
    }

    /// Names of the members under `dir`.
    pub fn names_under(&self, dir: &str) -> Vec<&str> {
        self.members().iter().filter(|m| m.dir.starts_with(dir)).map(|m| m.name).collect()
    }
}

impl Member<'_> {
    fn has_target(&self, kind: &str) -> bool {
        let targets = self.package["targets"].as_array().into_iter().flatten();
        targets
            .filter_map(|t| t["kind"].as_array())
            .any(|kinds| kinds.iter().any(|k| k.as_str() == Some(kind)))
    }

    /// Whether it has this cargo feature.
    pub fn has_feature(&self, name: &str) -> bool {
        self.package["features"].get(name).is_some()
    }

    /// Whether others build on it: a member under `crates` with a library and no program.
    pub fn is_library(&self) -> bool {
        self.dir.starts_with("crates") && self.has_target("lib") && !self.has_target("bin")
    }
}

/// The members in `metadata` of the workspace at `root`.
pub fn members<'a>(metadata: &'a Value, root: &Path) -> Vec<Member<'a>> {
    let ids: Vec<&str> = metadata["workspace_members"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let mut found: Vec<Member> = packages
        .filter(|p| p["id"].as_str().is_some_and(|id| ids.contains(&id)))
        .filter_map(|package| {
            let manifest = Path::new(package["manifest_path"].as_str()?);
            let dir = manifest.parent()?;
            let dir = dir.strip_prefix(root).unwrap_or(dir).to_owned();
            Some(Member { name: package["name"].as_str()?, dir, package })
        })
        .collect();
    found.sort_by(|a, b| a.dir.cmp(&b.dir));
    found
}

/// The root of the workspace this program was built from.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// The cargo that started this program, in `dir`.
pub fn cargo(dir: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(dir).stdin(Stdio::null());
    command
}

/// Whether this is a run of continuous integration, where nothing but GPU tests may be skipped.
pub fn in_ci() -> bool {
    std::env::var("CI").is_ok_and(|v| !v.is_empty() && v != "false" && v != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_names_its_members() {
        let workspace = Workspace::load(false).unwrap();
        assert!(workspace.root.join("Cargo.toml").is_file());
        let members = workspace.members();
        let libraries: Vec<_> = members.iter().filter(|m| m.is_library()).map(|m| m.name).collect();
        assert!(libraries.contains(&"ep-runtime"), "{libraries:?}");
        assert!(!libraries.contains(&"xtask"), "{libraries:?}");
        assert_eq!(workspace.names_under("xtask")[0], "xtask");
        assert!(workspace.names_under("examples").contains(&"moe_layer"));
    }
}
