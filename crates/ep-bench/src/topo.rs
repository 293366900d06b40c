//! `topo`: the machine as a tree, as JSON, as a drawing; recorded and replayed.

use std::fs;
use std::path::PathBuf;

use ep_topology::{Machine, Options, render_svg, render_tree};

use crate::report::write;
use crate::{BenchError, Result};

/// The recording's file within its folder.
const FILE: &str = "machine.json";

/// Options of `topo`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Print the machine as JSON
    #[arg(long)]
    pub json: bool,
    /// Draw GPUs, links, NICs and SM domains
    #[arg(long, value_name = "PATH")]
    pub svg: Option<PathBuf>,
    /// Write what was observed, so that --from replays it anywhere
    #[arg(long, value_name = "DIR", conflicts_with = "from")]
    pub record: Option<PathBuf>,
    /// Show a recorded machine instead of this one
    #[arg(long, value_name = "DIR")]
    pub from: Option<PathBuf>,
    /// Probe SMs anew, past the cache
    #[arg(long, conflicts_with = "from")]
    pub fresh: bool,
    /// Probe each GPU so many times, past the cache: equal every time, and within 2 s?
    #[arg(long, value_name = "N", conflicts_with = "from", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeat: Option<u32>,
    /// Ask neither NVML nor GPUs
    #[arg(long, conflicts_with_all = ["from", "repeat"])]
    pub no_gpu: bool,
    /// Root of sysfs
    #[arg(long, value_name = "DIR", default_value = "/sys", hide = true)]
    pub sysfs: PathBuf,
}

/// Shows the machine. False if a repeated probe was too slow or gave another answer.
///
/// # Errors
/// A recording that cannot be read, files that cannot be written.
pub fn run(args: &Args) -> Result<bool> {
    let (machine, notes, good) = match &args.from {
        Some(folder) => (read(folder)?, Vec::new(), true),
        None => observe(args),
    };
    if args.json {
        println!("{}", json(&machine)?);
    } else {
        print!("{}", render_tree(&machine));
    }
    for note in notes {
        eprintln!("{}", crate::format::wrap(&note, crate::report::WIDTH, "  "));
    }
    if let Some(path) = &args.svg {
        write(path, &render_svg(&machine))?;
        eprintln!("wrote {}", path.display());
    }
    if let Some(folder) = &args.record {
        let path = folder.join(FILE);
        write(&path, &format!("{}\n", json(&machine)?))?;
        eprintln!("wrote {}", path.display());
    }
    Ok(good)
}

/// This machine with notes about what could not be looked at, and whether repeated probes were good.
fn observe(args: &Args) -> (Machine, Vec<String>, bool) {
    let mut options = Options { sysfs: args.sysfs.clone(), ..Options::default() };
    if args.no_gpu {
        options.nvml = None;
    }
    let machine = Machine::observe(&options);
    if args.no_gpu {
        return (machine, Vec::new(), true);
    }
    sms(machine, args)
}

#[cfg(feature = "cuda")]
fn sms(mut machine: Machine, args: &Args) -> (Machine, Vec<String>, bool) {
    let (notes, good) = crate::gpu::attach(&mut machine, args.fresh, args.repeat);
    (machine, notes, good)
}

#[cfg(not(feature = "cuda"))]
fn sms(machine: Machine, args: &Args) -> (Machine, Vec<String>, bool) {
    let note = "SM domains: not looked at, this build lacks the feature `cuda`";
    (machine, vec![note.into()], args.repeat.is_none())
}

fn json(machine: &Machine) -> Result<String> {
    machine.to_json().map_err(|e| BenchError::Tool { op: "topo", detail: e.to_string() })
}

fn read(folder: &std::path::Path) -> Result<Machine> {
    let path = if folder.is_dir() { folder.join(FILE) } else { folder.to_owned() };
    let text = fs::read_to_string(&path).map_err(|e| BenchError::io(&path, e))?;
    Machine::from_json(&text).map_err(|e| BenchError::io(&path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> Args {
        Args {
            json: false,
            svg: None,
            record: None,
            from: None,
            fresh: false,
            repeat: None,
            no_gpu: true,
            sysfs: "/sys".into(),
        }
    }

    #[test]
    fn what_is_recorded_comes_back() {
        let folder = std::env::temp_dir().join(format!("ep-topo-{}", std::process::id()));
        let svg = folder.join("machine.svg");
        let record = Args { record: Some(folder.clone()), svg: Some(svg.clone()), ..args() };
        assert!(run(&record).unwrap());
        let recorded = read(&folder).unwrap();
        assert_eq!(recorded, read(&folder.join(FILE)).unwrap());
        assert_eq!(Machine::from_json(&json(&recorded).unwrap()).unwrap(), recorded);
        assert!(fs::read_to_string(&svg).unwrap().starts_with("<svg"));
        assert!(run(&Args { from: Some(folder.clone()), no_gpu: false, ..args() }).unwrap());
        fs::write(folder.join(FILE), "{}").unwrap();
        let error = run(&Args { from: Some(folder.clone()), ..args() }).unwrap_err();
        assert!(error.to_string().contains(FILE), "{error}");
        fs::remove_dir_all(&folder).unwrap();
        assert!(run(&Args { from: Some(folder), ..args() }).is_err());
    }

    #[test]
    fn a_machine_without_sysfs_is_still_shown() {
        let (machine, notes, good) = observe(&Args { sysfs: "/nowhere".into(), ..args() });
        assert!(good && notes.is_empty());
        assert!(render_tree(&machine).starts_with("machine"));
    }
}
