//! Ranks on GPUs that do not map each other's windows. Two GPUs, or ranks that share one, stand for nodes.

use std::time::Duration;

use ep_bench::oracle::JobSpec;
use ep_runtime::{EpBuilder, NvlinkTransport};

use super::eps_of;
use super::exercise::How;
use super::gpu::Gpus;
use super::gpu_small::Rank;
use super::ground::{Ground, Grounds};

/// As many as a random shape has at most.
pub const RANKS: usize = 16;

/// Emulated GPUs take seconds for rows that go in parts.
pub const PATIENT: Duration = Duration::from_secs(60);

/// Ranks of several nodes.
pub struct Apart<'a> {
    pub gpus: &'a Gpus,
    /// The node of a rank of so many.
    pub node: fn(usize, usize) -> usize,
}

impl Apart<'_> {
    fn transport(&self, rank: usize, world: usize) -> NvlinkTransport {
        let nodes = (0..world).map(|rank| (self.node)(rank, world)).collect();
        NvlinkTransport::new(rank % self.gpus.count()).nodes(nodes)
    }
}

impl Grounds for Apart<'_> {
    fn place(&self, rank: usize, world: usize, builder: EpBuilder) -> EpBuilder {
        let builder = self.gpus.place(rank, world, builder).timeout(PATIENT);
        builder.transport(self.transport(rank, world))
    }

    fn ground(&self, rank: usize, world: usize) -> Box<dyn Ground + '_> {
        self.gpus.ground(rank, world)
    }
}

pub const ALONE: fn(usize, usize) -> usize = |rank, _| rank;
/// Neighbours, ranks that share a GPU, and one beside all others.
pub const TOGETHER: [fn(usize, usize) -> usize; 3] =
    [|rank, world| 2 * rank / world, |rank, _| rank % 2, |rank, _| rank.min(1)];

pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

/// Random shapes by seed, as many as `EP_GPU_CASES` says from `EP_GPU_FIRST` on.
pub fn random(cases: u64, mut each: impl FnMut(u64, &ep_bench::oracle::Job)) {
    let first = number("EP_GPU_FIRST", 0);
    for seed in first..first + number("EP_GPU_CASES", cases) {
        let job = JobSpec::random(seed).build();
        println!("case {seed}: {} ranks, {:?}", job.ranks, How::of(seed));
        each(seed, &job);
    }
}

/// Runs `f` on ranks of the layer that `builder` says, each a node.
pub fn apart<T: Send>(
    gpus: &Gpus,
    world: usize,
    (builder, timeout): (&EpBuilder, Duration),
    f: impl Fn(Rank<'_>) -> T + Sync,
) -> Vec<T> {
    let apart = Apart { gpus, node: ALONE };
    let placed = |rank| apart.place(rank, world, builder.clone()).lanes(2).timeout(timeout);
    eps_of(world, &placed, |ep| f(Rank::new(gpus, ep)))
}

/// Ranks that are nodes, on a GPU each, by NCCL.
#[cfg(feature = "nccl")]
pub mod nccl {
    use ep_runtime::NcclTransport;

    use super::*;

    pub struct Paired<'a>(pub &'a Gpus);

    impl Grounds for Paired<'_> {
        fn place(&self, rank: usize, world: usize, builder: EpBuilder) -> EpBuilder {
            let transport = NcclTransport::new(rank).nodes((0..world).collect()).max_ctas(8);
            self.0.place(rank, world, builder).transport(transport)
        }

        fn ground(&self, rank: usize, world: usize) -> Box<dyn Ground + '_> {
            self.0.ground(rank, world)
        }
    }

    /// GPUs for several ranks, and NCCL.
    pub fn gpus(bytes: usize) -> Option<Gpus> {
        // Multicast is not for this project's machines.
        // SAFETY: tests of this file run one at a time, and NCCL is not open yet.
        unsafe { std::env::set_var("NCCL_NVLS_ENABLE", "0") };
        let gpus = Gpus::new(RANKS, bytes)?;
        let probe = std::env::var_os("EP_NCCL_PATH").map(std::path::PathBuf::from);
        let name = match probe {
            Some(path) if path.is_dir() => path.join("libnccl.so.2"),
            Some(path) => path,
            None => "libnccl.so.2".into(),
        };
        // SAFETY: NVIDIA's library, whose initialisers have no preconditions.
        let found = unsafe { libloading::Library::new(&name) };
        match found {
            Ok(_) if gpus.count() > 1 => return Some(gpus),
            Ok(_) => eprintln!("skipped: NCCL allows one rank per GPU, and there is one GPU"),
            Err(e) => eprintln!("skipped: {}: {e}", name.display()),
        }
        None
    }
}
