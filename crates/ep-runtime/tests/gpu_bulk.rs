//! Ranks on GPUs that do not map each other's windows: rows go by puts, bit for bit as the oracle has
//! them. Two GPUs, or ranks that share one, stand for nodes. Without a GPU each test says so and passes.
#![cfg(feature = "cuda")]

mod common;

use std::time::{Duration, Instant};

use common::eps_of;
use common::exercise::{How, check};
use common::gpu::Gpus;
use common::gpu_small::{Graph, Rank, capacity, gpus, plain};
use common::ground::{Ground, Grounds};
use common::small::{Tokens, assert_argument, builder, opts};
use ep_bench::oracle::{JobSpec, Payload as Kind, PlacementSpec, Routing};
use ep_runtime::{EpBuilder, EpError, NvlinkTransport};

/// As many as a random shape has at most.
const RANKS: usize = 16;

/// Emulated GPUs take seconds for rows that go in parts.
const PATIENT: Duration = Duration::from_secs(60);

/// Ranks of several nodes.
struct Apart<'a> {
    gpus: &'a Gpus,
    /// The node of a rank of so many.
    node: fn(usize, usize) -> usize,
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

const ALONE: fn(usize, usize) -> usize = |rank, _| rank;
/// Neighbours, ranks that share a GPU, and one beside all others.
const TOGETHER: [fn(usize, usize) -> usize; 3] =
    [|rank, world| 2 * rank / world, |rank, _| rank % 2, |rank, _| rank.min(1)];

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

/// Random shapes by seed, as many as `EP_GPU_CASES` says from `EP_GPU_FIRST` on.
fn random(cases: u64, mut each: impl FnMut(u64, &ep_bench::oracle::Job)) {
    let first = number("EP_GPU_FIRST", 0);
    for seed in first..first + number("EP_GPU_CASES", cases) {
        let job = JobSpec::random(seed).build();
        println!("case {seed}: {} ranks, {:?}", job.ranks, How::of(seed));
        each(seed, &job);
    }
}

#[test]
fn ranks_that_are_put_to_equal_the_oracle() {
    let Some(gpus) = Gpus::new(RANKS, 128 << 20) else { return };
    random(60, |seed, job| check(job, How::of(seed), seed, &Apart { gpus: &gpus, node: ALONE }));
}

#[test]
fn mapped_ranks_and_others_in_one_call_equal_the_oracle() {
    let Some(gpus) = Gpus::new(RANKS, 128 << 20) else { return };
    random(60, |seed, job| {
        let node = TOGETHER[seed as usize % TOGETHER.len()];
        check(job, How::of(seed), seed, &Apart { gpus: &gpus, node });
    });
}

/// So many tokens that their rows go in parts while others are packed.
fn large(ranks: usize, seed: u64) -> JobSpec {
    let tokens = [1100, 1400, 700, 31];
    JobSpec {
        ranks,
        experts: 12,
        topk: 3,
        units: 512,
        payload: [Kind::Bf16, Kind::F32, Kind::Fp8F32][seed as usize % 3],
        placement: PlacementSpec::Contiguous,
        physical_ids: false,
        alignment: 16,
        tokens: tokens[..ranks].to_vec(),
        masked_percent: 5,
        routing: [Routing::Uniform, Routing::Skewed][seed as usize % 2],
        weights: true,
        seed,
    }
}

#[test]
fn rows_that_go_in_parts_equal_the_oracle() {
    let Some(gpus) = Gpus::new(4, 512 << 20) else { return };
    for (seed, (ranks, node)) in (0u64..).zip([(2, ALONE), (3, ALONE), (4, TOGETHER[1])]) {
        let job = large(ranks, seed).build();
        check(&job, How::of(3 * seed + seed), seed, &Apart { gpus: &gpus, node });
    }
}

/// Runs `f` on ranks of the small layer, each a node.
fn apart<T: Send>(
    gpus: &Gpus,
    world: usize,
    timeout: Duration,
    f: impl Fn(Rank<'_>) -> T + Sync,
) -> Vec<T> {
    let apart = Apart { gpus, node: ALONE };
    let placed = |rank| apart.place(rank, world, builder()).lanes(2).timeout(timeout);
    eps_of(world, &placed, |ep| f(Rank::new(gpus, ep)))
}

const TIMEOUT: Duration = Duration::from_secs(5);

#[test]
fn bad_ids_are_the_same_error_everywhere_and_captures_are_refused() {
    let Some(gpus) = gpus() else { return };
    apart(&gpus, 2, TIMEOUT, |rank| {
        rank.round_trip();
        let mut tokens = Tokens::new(rank.ep.rank(), 4);
        if rank.ep.rank() == 1 {
            tokens.ids[5] = 99;
        }
        rank.load(&tokens);
        for opts in [opts(0), capacity()] {
            let e = rank.dispatch(4, &opts).unwrap_err();
            assert!(matches!(e, EpError::Ids { rank: 1, token: 2, id: 99, .. }), "{e}");
        }
        rank.round_trip();
        let graph = Graph::capture(rank.gpu.stream(), || {
            assert_argument(rank.dispatch(4, &capacity()), "cannot be captured");
        });
        drop(graph);
        rank.round_trip();
    });
}

#[test]
fn dropped_halves_and_cached_handles_leave_the_group_usable() {
    let Some(gpus) = gpus() else { return };
    apart(&gpus, 2, TIMEOUT, |rank| rank.drop_halves_and_use_handles(&plain()));
}

#[test]
fn a_rank_that_stops_is_named_and_a_new_group_works() {
    let Some(gpus) = gpus() else { return };
    let timeout = Duration::from_secs(1);
    apart(&gpus, 3, timeout, |rank| {
        rank.round_trip();
        rank.load(&Tokens::new(rank.ep.rank(), 2));
        rank.ep.group().barrier().unwrap();
        if rank.ep.rank() == 1 {
            std::thread::sleep(timeout + Duration::from_secs(2));
            return;
        }
        let began = Instant::now();
        let e = rank.dispatch(2, &opts(0)).unwrap_err();
        assert!(began.elapsed() < timeout + Duration::from_secs(2), "{:?}", began.elapsed());
        assert_eq!((e.peer(), e.group_usable()), (Some(1), false), "{e}");
    });
    apart(&gpus, 3, TIMEOUT, |rank| rank.round_trip());
}

/// Ranks that are nodes, on a GPU each, by NCCL.
#[cfg(feature = "nccl")]
mod nccl {
    use ep_runtime::{EpBuilder, NcclTransport};

    use super::*;

    struct Paired<'a>(&'a Gpus);

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
    fn gpus(bytes: usize) -> Option<Gpus> {
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

    #[test]
    fn ranks_that_exchange_equal_the_oracle() {
        let Some(gpus) = gpus(512 << 20) else { return };
        let world = gpus.count();
        random(24, |seed, _| {
            let tokens = [[13, 9], [0, 21], [7, 7]][seed as usize % 3];
            let tokens = (0..world).map(|rank| tokens[rank % 2]).collect();
            let spec = JobSpec { ranks: world, tokens, ..JobSpec::random(seed) };
            check(&spec.build(), How::of(seed), seed, &Paired(&gpus));
        });
        for seed in 0..3 {
            let job = large(world.min(4), seed).build();
            if job.ranks == world {
                check(&job, How::of(4 * seed), seed, &Paired(&gpus));
            }
        }
    }

    #[test]
    fn errors_are_everyones_and_a_rank_that_stops_is_named() {
        let Some(gpus) = gpus(64 << 20) else { return };
        let timeout = Duration::from_secs(1);
        let placed = |rank| {
            let paired = Paired(&gpus);
            paired.place(rank, gpus.count(), builder()).lanes(2).timeout(timeout)
        };
        eps_of(gpus.count(), &placed, |ep| {
            let rank = Rank::new(&gpus, ep);
            rank.round_trip();
            let mut tokens = Tokens::new(rank.ep.rank(), 4);
            if rank.ep.rank() == 1 {
                tokens.ids[5] = 99;
            }
            rank.load(&tokens);
            let e = rank.dispatch(4, &opts(0)).unwrap_err();
            assert!(matches!(e, EpError::Ids { rank: 1, token: 2, id: 99, .. }), "{e}");
            rank.round_trip();
            rank.load(&Tokens::new(rank.ep.rank(), 2));
            rank.ep.group().barrier().unwrap();
            if rank.ep.rank() == 1 {
                std::thread::sleep(timeout + Duration::from_secs(3));
                return;
            }
            let began = Instant::now();
            let e = rank.dispatch(2, &opts(0)).unwrap_err();
            println!("rank {} after {:?}: {e}", rank.ep.rank(), began.elapsed());
            assert!(began.elapsed() < timeout + Duration::from_secs(2), "{:?}", began.elapsed());
            assert!(!e.group_usable(), "{e}");
        });
        eps_of(gpus.count(), &placed, |ep| Rank::new(&gpus, ep).round_trip());
    }
}
