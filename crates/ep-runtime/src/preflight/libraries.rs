//! Libraries that are opened at run time: found or not, where, and which version.

use std::ffi::c_int;
use std::path::{Path, PathBuf};

use ep_topology::NVML_LIBRARY;
use libloading::os::unix::Library as Opened;
use serde::{Deserialize, Serialize};

use super::{Check, Severity};

/// A library that is opened at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Library {
    /// Its name without ending, `libcuda`.
    pub name: String,
    /// The file that was opened; `None` where none could be.
    pub file: Option<PathBuf>,
    /// What it says its version is, else what its file name says.
    pub version: Option<String>,
    /// What the dynamic loader said where it was not found.
    pub problem: Option<String>,
}

/// What needs a library.
#[derive(Clone, Copy, PartialEq)]
enum Need {
    /// Every GPU.
    Gpu,
    /// Nothing by itself: an alternative.
    Choice,
    /// RDMA devices.
    Nic,
}

struct Known {
    name: &'static str,
    /// File names tried, in this order.
    files: &'static [&'static str],
    need: Need,
    remedy: &'static str,
    version: fn(&Opened) -> Option<String>,
}

const KNOWN: [Known; 5] = [
    Known {
        name: "libcuda",
        files: &["libcuda.so.1"],
        need: Need::Gpu,
        remedy: "install the NVIDIA driver, or start the container with the GPU's driver libraries",
        version: |library| call(library, "cuDriverGetVersion").map(thousands),
    },
    Known {
        name: "libnvidia-ml",
        files: &[NVML_LIBRARY],
        need: Need::Gpu,
        remedy: "install the NVIDIA driver; containers need its `utility` capability",
        // It must be initialised first; whoever has read NVML passes the version in.
        version: |_| None,
    },
    Known {
        name: "libnvrtc",
        files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
        need: Need::Gpu,
        remedy: "install CUDA's run-time compiler (the toolkit, or the Python wheel \
                 nvidia-cuda-nvrtc), or set EP_NVRTC_PATH to it",
        version: nvrtc_version,
    },
    Known {
        name: "libnccl",
        files: &["libnccl.so.2", "libnccl.so"],
        need: Need::Choice,
        remedy: "install NCCL 2 to use it as a transport",
        version: |library| call(library, "ncclGetVersion").map(nccl_version),
    },
    Known {
        name: "libibverbs",
        files: &["libibverbs.so.1"],
        need: Need::Nic,
        remedy: "install rdma-core (libibverbs1)",
        version: |_| None,
    },
];

/// Opens all that are known. `nvml` is what NVML says its version is.
pub(super) fn all(nvml: Option<String>) -> Vec<Library> {
    let open = |known: &Known| {
        let mut library = look(known);
        if known.name == "libnvidia-ml" && library.file.is_some() {
            library.version = nvml.clone().or(library.version);
        }
        library
    };
    KNOWN.iter().map(open).collect()
}

/// Fills in libraries that are in the process by now although the loader did not find them by name.
pub(super) fn locate(libraries: &mut [Library]) {
    let maps = maps();
    for library in libraries.iter_mut().filter(|library| library.file.is_none()) {
        if let Some(path) = mapped(&library.name, &maps) {
            library.version = version_in_name(&path);
            library.file = Some(path);
            library.problem = None;
        }
    }
}

fn maps() -> String {
    std::fs::read_to_string("/proc/self/maps").unwrap_or_default()
}

fn look(known: &Known) -> Library {
    let mut problem = None;
    for file in candidates(known) {
        // SAFETY: these libraries' initialisers have no preconditions.
        match unsafe { Opened::new(&file) } {
            Ok(opened) => {
                let version = (known.version)(&opened);
                let stem =
                    Path::new(&file).file_name().unwrap_or_default().to_string_lossy().into_owned();
                let path = mapped(&stem, &maps());
                // NVIDIA's libraries keep state in the process that does not survive being unloaded.
                std::mem::forget(opened);
                let version = version.or_else(|| path.as_deref().and_then(version_in_name));
                let file = path.or(Some(file));
                return Library { name: known.name.into(), file, version, problem: None };
            }
            // The first name is the canonical one: its message says most.
            Err(error) => problem = problem.or_else(|| Some(reason(&error))),
        }
    }
    Library { name: known.name.into(), file: None, version: None, problem }
}

/// What the loader said, which libloading keeps behind its own words.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// File names to try; for the compiler what `EP_NVRTC_PATH` names comes first.
fn candidates(known: &Known) -> Vec<PathBuf> {
    let mut list = Vec::new();
    if known.name == "libnvrtc"
        && let Some(path) = std::env::var_os("EP_NVRTC_PATH").filter(|p| !p.is_empty())
    {
        let path = PathBuf::from(path);
        match path.is_dir() {
            true => list.extend(known.files.iter().map(|f| path.join(f)).filter(|f| f.exists())),
            false => list.push(path),
        }
    }
    list.extend(known.files.iter().map(PathBuf::from));
    list
}

/// Calls a function that stores one integer and returns 0.
fn call(library: &Opened, symbol: &str) -> Option<c_int> {
    type One = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: the symbols asked for have this signature in every version of their libraries.
    let function = unsafe { library.get::<One>(symbol.as_bytes()) }.ok()?;
    let mut value = 0;
    // SAFETY: needs no initialisation; `value` is valid for the call.
    let code = unsafe { function(&mut value) };
    (code == 0).then_some(value)
}

fn nvrtc_version(library: &Opened) -> Option<String> {
    type Two = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    // SAFETY: the signature of nvrtc.h for this symbol.
    let function = unsafe { library.get::<Two>(b"nvrtcVersion") }.ok()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are valid for the call.
    let code = unsafe { function(&mut major, &mut minor) };
    (code == 0).then(|| format!("{major}.{minor}"))
}

fn thousands(encoded: c_int) -> String {
    format!("{}.{}", encoded / 1000, encoded % 1000 / 10)
}

/// `NCCL_VERSION_CODE`: thousands and hundreds before 2.9, tens of thousands since.
fn nccl_version(code: c_int) -> String {
    match code {
        c if c < 10_000 => format!("{}.{}.{}", c / 1000, c % 1000 / 100, c % 100),
        c => format!("{}.{}.{}", c / 10_000, c % 10_000 / 100, c % 100),
    }
}

/// The file behind the library called `name`, by the process's mappings.
fn mapped(name: &str, maps: &str) -> Option<PathBuf> {
    let stem = name.split(".so").next()?;
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let is = |path: &&str| {
        let file = path.rsplit('/').next().unwrap_or_default();
        file.strip_prefix(stem).is_some_and(|rest| rest.starts_with(".so"))
    };
    paths.into_iter().find(is).map(PathBuf::from)
}

/// `1.14.48.0` of `libibverbs.so.1.14.48.0`.
fn version_in_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let (_, version) = file.split_once(".so.")?;
    Some(version.to_owned())
}

impl Library {
    /// How serious it is to find it, or not.
    pub(super) fn check(&self, has_gpu: bool, has_nic: bool) -> Check {
        let known = KNOWN.iter().find(|known| known.name == self.name);
        let (need, remedy) = known.map_or((Need::Choice, ""), |k| (k.need, k.remedy));
        let version = self.version.as_deref().unwrap_or("version not known");
        match (&self.file, &self.problem) {
            (Some(file), _) => {
                let found = format!("{version}, {}", file.display());
                Check::new("library", self.name.clone(), Severity::Ok, found)
            }
            (None, problem) => {
                let needed = match need {
                    Need::Gpu => has_gpu,
                    Need::Nic => has_nic,
                    Need::Choice => false,
                };
                let severity = if needed { Severity::Failure } else { Severity::Note };
                let why = problem.as_deref().unwrap_or("no reason given");
                let found = format!("not found ({why})");
                Check::new("library", self.name.clone(), severity, found).remedy(remedy)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_decoded() {
        assert_eq!(thousands(13_000), "13.0");
        assert_eq!(thousands(12_080), "12.8");
        assert_eq!(nccl_version(23_004), "2.30.4");
        assert_eq!(nccl_version(2_708), "2.7.8");
        let path = Path::new("/usr/lib/libibverbs.so.1.14.48.0");
        assert_eq!(version_in_name(path).as_deref(), Some("1.14.48.0"));
        assert_eq!(version_in_name(Path::new("/usr/lib/libx.so")), None);
    }

    #[test]
    fn the_mapped_file_is_found_by_its_whole_name() {
        let maps = "7f00-7f01 r-xp 0 08:01 1 /lib/libcuda.so.580.159.04\n\
                    7f02-7f03 r-xp 0 08:01 2 /lib/libcudart.so.13\n\
                    7f04-7f05 rw-p 0 00:00 0\n";
        assert_eq!(mapped("libcuda.so.1", maps), Some("/lib/libcuda.so.580.159.04".into()));
        assert_eq!(mapped("libcudart.so.13", maps), Some("/lib/libcudart.so.13".into()));
        assert_eq!(mapped("libcud.so.1", maps), None);
    }

    #[test]
    fn a_library_that_is_there_is_opened_and_located() {
        let libc = Known {
            name: "libc",
            files: &["libc.so.6"],
            need: Need::Choice,
            remedy: "",
            version: |_| None,
        };
        let found = look(&libc);
        assert!(found.problem.is_none());
        assert!(found.file.is_some_and(|file| file.is_absolute()), "no path");
        let none = Known { name: "libnone", files: &["libnone-at-all.so.1"], ..libc };
        let found = look(&none);
        assert!(
            found.file.is_none() && found.problem.is_some_and(|p| p.contains("libnone-at-all"))
        );
    }

    #[test]
    fn what_is_in_the_process_by_now_is_located() {
        let library = |name: &str| Library {
            name: name.into(),
            file: None,
            version: None,
            problem: Some("not found".into()),
        };
        let mut list = [library("libc"), library("libnone-at-all")];
        locate(&mut list);
        assert!(list[0].file.is_some() && list[0].problem.is_none());
        assert!(list[1].file.is_none() && list[1].problem.is_some());
    }

    #[test]
    fn what_is_missing_counts_only_where_it_is_needed() {
        let missing =
            |name: &str| Library { name: name.into(), file: None, version: None, problem: None };
        let severity = |name, gpu, nic| missing(name).check(gpu, nic).severity;
        assert_eq!(severity("libcuda", false, true), Severity::Note);
        assert_eq!(severity("libcuda", true, false), Severity::Failure);
        assert_eq!(severity("libnvrtc", true, false), Severity::Failure);
        assert_eq!(severity("libnccl", true, true), Severity::Note);
        assert_eq!(severity("libibverbs", true, false), Severity::Note);
        assert_eq!(severity("libibverbs", false, true), Severity::Failure);
        for known in KNOWN {
            assert!(!missing(known.name).check(true, true).remedy.is_empty(), "{}", known.name);
        }
    }
}
