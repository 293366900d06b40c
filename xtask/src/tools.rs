//! Tools that checks need and that come from a package registry: fetched once into `target/tools`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::process;
use crate::workspace::Workspace;

/// NVRTC, CUDA's run-time compiler, from its PyPI wheel: compiles kernels without a GPU or a toolkit.
const NAME: &str = "nvidia-cuda-nvrtc";
const VERSION: &str = "13.0.88";
const LIBRARY: &str = "libnvrtc.so.13";
/// SHA-256 of the wheels for 64-bit x86 and Arm; pip refuses any other file.
const HASHES: [&str; 2] = [
    "ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575",
    "d27f20a0ca67a4bb34268a5e951033496c5b74870b868bacd046b1b8e0c3267b",
];
const LIMIT: Duration = Duration::from_secs(600);

/// The folder that holds NVRTC, fetched by pip if it is not there yet. The error says what is missing.
pub fn nvrtc(workspace: &Workspace, echo: bool) -> Result<PathBuf, String> {
    let folder = workspace.target.join("tools").join(format!("{NAME}-{VERSION}"));
    if let Some(found) = folder_of(&folder, LIBRARY) {
        return Ok(found);
    }
    let pip = Command::new("python3").args(["-m", "pip", "--version"]).output();
    if !pip.is_ok_and(|out| out.status.success()) {
        return Err("python3 with pip is not installed, which fetches NVRTC".into());
    }
    // In a folder of its own until it is complete: what is half there must not be taken for whole.
    let partial = folder.with_extension(format!("{}.partial", std::process::id()));
    let fetched = fetch(&partial, echo).and_then(|()| {
        // Another run may have been faster; then its folder serves as well.
        let _ = fs::rename(&partial, &folder);
        folder_of(&folder, LIBRARY).ok_or_else(|| format!("the wheel of {NAME} holds no {LIBRARY}"))
    });
    let _ = fs::remove_dir_all(&partial);
    fetched
}

fn fetch(into: &Path, echo: bool) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("{}: {e}", into.display());
    fs::create_dir_all(into).map_err(failed)?;
    let requirements = into.join("requirements.txt");
    fs::write(&requirements, pinned()).map_err(failed)?;
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]);
    pip.args(["--no-compile", "--only-binary=:all:", "--require-hashes", "--target"]);
    pip.arg(into).arg("-r").arg(&requirements);
    let done = process::run(pip, LIMIT, echo)?;
    if done.success() {
        return Ok(());
    }
    Err(format!("pip could not fetch {NAME}: {}; {}", done.why(), done.tail(3)))
}

/// The requirement with its hashes, as pip reads it.
fn pinned() -> String {
    let hashes: String = HASHES.iter().map(|hash| format!(" --hash=sha256:{hash}")).collect();
    format!("{NAME}=={VERSION}{hashes}\n")
}

/// The folder below `root` that holds `name`.
fn folder_of(root: &Path, name: &str) -> Option<PathBuf> {
    let entries: Vec<PathBuf> = fs::read_dir(root).ok()?.flatten().map(|e| e.path()).collect();
    if entries.iter().any(|path| path.file_name().is_some_and(|file| file == name)) {
        return Some(root.to_owned());
    }
    entries.iter().filter(|path| path.is_dir()).find_map(|folder| folder_of(folder, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requirement_is_pinned_by_version_and_hash() {
        let text = pinned();
        assert!(text.starts_with("nvidia-cuda-nvrtc==13.0.88 --hash=sha256:"), "{text}");
        assert!(HASHES.iter().all(|hash| hash.len() == 64 && text.contains(hash)));
    }

    #[test]
    fn a_file_is_found_below_a_folder() {
        let root = std::env::temp_dir().join(format!("ep-tools-{}", std::process::id()));
        let folder = root.join("nvidia/cu13/lib");
        fs::create_dir_all(&folder).unwrap();
        assert_eq!(folder_of(&root, "libx.so"), None);
        fs::write(folder.join("libx.so"), "").unwrap();
        assert_eq!(folder_of(&root, "libx.so"), Some(folder));
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(folder_of(&root, "libx.so"), None);
    }
}
