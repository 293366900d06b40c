//! `cargo xtask emulate`: a program that finds an emulated GPU, that of `xtask/gpu-emulator`.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::workspace::{self, Workspace};
use crate::{Result, process};

/// The longest that building the emulator may take.
const BUILD: Duration = Duration::from_secs(15 * 60);
/// What it stands for. Whoever opens two of them gets one library.
const NAMES: [&str; 3] = ["libcuda.so.1", "libcuda.so", "libnvrtc.so.13"];
const LIBRARY: &str = "libgpu_emulator.so";

/// Builds the emulator, then becomes the command, which finds it; without one, says which variables
/// make programs find it. Gives back only an error, or nothing to run.
pub fn run(args: &[OsString]) -> Result<()> {
    let emulator = Emulator::build(&Workspace::load(false)?, true)?;
    let Some((program, rest)) = args.split_first() else {
        for (name, value) in emulator.variables() {
            println!("export {name}='{}'", value.to_string_lossy().replace('\'', r"'\''"));
        }
        return Ok(());
    };
    let mut command = Command::new(program);
    let why = emulator.show_to(command.args(rest)).exec();
    Err(format!("{}: {why}", program.display()))
}

/// The emulator, built, in a folder with the names of what it stands for.
pub struct Emulator {
    folder: PathBuf,
}

impl Emulator {
    /// In the tests' profile, which shares most of what it is built from.
    pub fn build(workspace: &Workspace, echo: bool) -> Result<Self> {
        let mut command = workspace::cargo(&workspace.root);
        command.args(["build", "--package", "gpu-emulator", "--lib", "--profile", "checked"]);
        let done = process::run(command, BUILD, echo)?;
        if !done.success() {
            return Err(format!("the emulator does not build: {}; {}", done.why(), done.tail(20)));
        }
        let folder = workspace.target.join("emulator");
        place(&workspace.target.join("checked").join(LIBRARY), &folder)
            .map_err(|e| format!("{}: {e}", folder.display()))?;
        Ok(Self { folder })
    }

    /// What programs find it by. Kernels are kept apart from those of real GPUs.
    fn variables(&self) -> [(&'static str, OsString); 3] {
        const PATH: &str = "LD_LIBRARY_PATH";
        let before = std::env::var_os(PATH).filter(|path| !path.is_empty());
        let mut path = self.folder.clone().into_os_string();
        for before in before.iter() {
            path.push(":");
            path.push(before);
        }
        [
            (PATH, path),
            ("EP_NVRTC_PATH", self.folder.clone().into()),
            ("EP_KERNEL_CACHE", self.folder.join("kernels").into()),
        ]
    }

    #[cfg(test)]
    pub fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The library itself.
    pub fn library(&self) -> PathBuf {
        self.folder.join(NAMES[0])
    }

    /// Where what is made for it is kept.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Lets a program find it.
    pub fn show_to<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.envs(self.variables())
    }
}

/// Makes links to the library by all its names in a folder.
fn place(library: &Path, folder: &Path) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    for name in NAMES {
        let link = folder.join(name);
        if fs::read_link(&link).is_ok_and(|to| to == library) {
            continue;
        }
        match fs::remove_file(&link) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
            _ => symlink(library, &link)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_made_once_and_made_again_where_they_lead_elsewhere() {
        let folder = std::env::temp_dir().join(format!("xtask-emulate-{}", std::process::id()));
        for library in ["/one/lib.so", "/one/lib.so", "/two/lib.so"] {
            place(Path::new(library), &folder).unwrap();
            for name in NAMES {
                assert_eq!(fs::read_link(folder.join(name)).unwrap(), Path::new(library));
            }
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn programs_find_it_first() {
        let emulator = Emulator { folder: "/there".into() };
        let mut command = Command::new("x");
        emulator.show_to(&mut command);
        let all: Vec<_> = command.get_envs().collect();
        let path = all.iter().find(|(name, _)| *name == "LD_LIBRARY_PATH").unwrap().1.unwrap();
        assert!(path.to_string_lossy().split(':').next() == Some("/there"));
        assert!(all.iter().any(|(name, _)| *name == "EP_KERNEL_CACHE"));
    }
}
