//! Launches of kernels.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::arg::In;
use super::code::{Code, Result};
use super::config::config;
use super::context::{Context, Core, SMS};
use super::module::{Body, Entry};
use super::words;
use super::work::Work;
use crate::kernel::Launch;

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Config {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub stream: usize,
    pub attributes: usize,
    pub count: u32,
}
const _: () = assert!(size_of::<Config>() == 56);

/// `CUlaunchAttribute`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Attribute {
    id: u32,
    pad: u32,
    value: [u32; 16],
}
const _: () = assert!(size_of::<Attribute>() == 72);

/// What a launch asks for beside grid and block.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked {
    pub cooperative: bool,
    /// Blocks per cluster, if it says so.
    pub cluster: Option<[u32; 3]>,
}

impl Asked {
    pub fn read(attributes: &[Attribute]) -> Result<Self> {
        let mut asked = Self::default();
        for Attribute { id, value, .. } in attributes {
            match id {
                2 => asked.cooperative = value[0] != 0,
                4 => asked.cluster = Some([value[0], value[1], value[2]]),
                // Nothing; how clusters are placed; an early start, which may be late; a priority; a
                // domain of memory.
                0 | 5 | 6 | 8 | 10 => {}
                _ => return Err(Code::NOT_SUPPORTED),
            }
        }
        let features = [("cooperative", asked.cooperative), ("clusters", asked.cluster.is_some())];
        features
            .iter()
            .filter(|(_, asked)| *asked)
            .try_for_each(|(name, _)| config()?.needs(name))?;
        Ok(asked)
    }

    /// Blocks per cluster.
    pub fn cluster(&self) -> u32 {
        self.cluster.map_or(1, |dims| dims.iter().product())
    }
}

/// A launch as it was submitted.
pub struct Launched {
    entry: Arc<Entry>,
    launch: Launch,
}

/// What a launch does when its stream gets there.
pub fn prepare(
    context: &Context,
    entry: &Arc<Entry>,
    launch: &Config,
    asked: &Asked,
    params: &In<usize>,
) -> Result<Work> {
    check(context, entry, launch, asked)?;
    let sizes = entry.body.params().iter().enumerate();
    let params = sizes
        .map(|(i, size)| params.pointer_at::<u8>(i)?.bytes(*size))
        .collect::<Result<Vec<_>>>()?;
    if let Body::Words = entry.body {
        return Ok(Work::Words(words::ops(&params[0])?));
    }
    let launch = Launch {
        grid: launch.grid,
        block: launch.block,
        cluster: asked.cluster(),
        dynamic_shared: launch.shared,
        params,
        sms: context.sms.clone(),
        sm_count: SMS,
        seed: config()?.seed,
        number: 0,
    };
    Ok(Work::Kernel(Arc::new(Launched { entry: entry.clone(), launch })))
}

fn check(context: &Context, entry: &Entry, launch: &Config, asked: &Asked) -> Result<()> {
    let blocks: u64 = launch.grid.iter().map(|n| u64::from(*n)).product();
    let threads: u64 = launch.block.iter().map(|n| u64::from(*n)).product();
    let wide = launch.grid[0] > i32::MAX as u32 || launch.grid[1..].iter().any(|n| *n > 65_535);
    if blocks == 0 || threads == 0 || threads > 1024 || launch.block[2] > 64 || wide {
        return Err(Code::INVALID_VALUE);
    }
    if threads > entry.body.most_threads().into() {
        return Err(Code::OUT_OF_RESOURCES);
    }
    if launch.shared as i32 > entry.most_dynamic() {
        return Err(Code::INVALID_VALUE);
    }
    let (threads, sms) = (threads as u32, context.sms.len() as u32);
    if let Some(dims) = asked.cluster {
        if dims.contains(&0) || (0..3).any(|i| !launch.grid[i].is_multiple_of(dims[i])) {
            return Err(Code::INVALID_VALUE);
        }
        if entry.clusters(asked.cluster(), (threads, launch.shared), sms)? == 0 {
            return Err(Code::INVALID_CLUSTER_SIZE);
        }
    }
    let resident = u64::from(entry.blocks_per_sm(threads, launch.shared) * sms);
    if asked.cooperative && blocks > resident {
        return Err(Code::COOPERATIVE_TOO_LARGE);
    }
    Ok(())
}

impl Launched {
    pub fn name(&self) -> &str {
        &self.entry.name
    }

    /// Runs it to its end. What it does wrong fails the context.
    pub fn run(&self, core: &Core) {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        if self.entry.unloaded.load(Ordering::Acquire) {
            let why = format!("{} runs after its library was unloaded", self.name());
            return core.fail(Code::LAUNCH_FAILED, &why);
        }
        let Body::Emulated(kernel) = &self.entry.body else { return };
        let mut launch = self.launch.clone();
        launch.number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: whoever launched it promised that its parameters' addresses are good for it.
        if let Err(why) = unsafe { kernel.run(&launch) } {
            core.fail(Code::LAUNCH_FAILED, &why.to_string());
        }
    }
}
