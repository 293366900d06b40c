//! Tokens that cross nodes once on GPUs: bit for bit what the oracle has, and what a flat layer gives. Two
//! GPUs, or ranks that share one, stand for nodes. Without a GPU each test says so and passes.
#![cfg(feature = "cuda")]

mod common;

use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use common::exercise::{How, check};
use common::gpu::Gpus;
use common::gpu_small::{LIMIT, Rank, STOPS, capacity, gpus, plain};
use common::ground::{Ground, Grounds};
use common::small::{Tokens, assert_argument, builder, opts, shape};
use common::{Nodes, eps_of};
use ep_bench::oracle::{JobSpec, Mode, PlacementSpec, Routing};
use ep_runtime::{
    CombineOpts, DispatchOpts, EpBuilder, EpError, Hierarchy, Layout, NvlinkTransport, Precision,
};

/// As many as an arrangement has at most.
const RANKS: usize = 8;

/// Ranks in nodes: consecutive ones, or dealt round.
struct Across<'a> {
    gpus: &'a Gpus,
    of: &'a [usize],
}

impl Grounds for Across<'_> {
    fn place(&self, rank: usize, world: usize, builder: EpBuilder) -> EpBuilder {
        let transport = NvlinkTransport::new(rank % self.gpus.count()).nodes(self.of.to_vec());
        self.gpus.place(rank, world, builder).transport(transport)
    }

    fn ground(&self, rank: usize, world: usize) -> Box<dyn Ground + '_> {
        self.gpus.ground(rank, world)
    }
}

const HIERARCHIES: [Hierarchy; 2] = [Hierarchy::Node, Hierarchy::Flat];

/// Way `seed` of running a job over nodes; both hierarchies are compared with the same oracle.
fn how(seed: u64, nodes: &'static [usize], hierarchy: Hierarchy) -> How {
    let how = How::of(seed);
    let reducible = how.mode != Mode::ExpertReduced && hierarchy == Hierarchy::Node;
    let node_reduced = reducible && (seed / 2).is_multiple_of(2);
    How { nodes: Nodes::Sizes(nodes), hierarchy, node_reduced, ..how }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

/// Node sizes, and how many random jobs: as they are in clusters, and uneven ones.
const ARRANGEMENTS: [(&[usize], u64); 6] =
    [(&[2, 2], 18), (&[4, 4], 9), (&[2, 2, 2], 6), (&[1, 3], 12), (&[3, 1], 6), (&[1, 1], 6)];

/// Random shapes by seed, as many of each arrangement as `EP_GPU_CASES` says from `EP_GPU_FIRST` on.
#[test]
fn tokens_that_cross_once_equal_the_oracle() {
    let Some(gpus) = Gpus::new(RANKS, 64 << 20) else { return };
    let first = number("EP_GPU_FIRST", 0);
    for (sizes, cases) in ARRANGEMENTS {
        let of = Nodes::Sizes(sizes).of(sizes.iter().sum());
        for seed in first..first + number("EP_GPU_CASES", cases) {
            let job = JobSpec { ranks: of.len(), ..JobSpec::random(seed) }.build();
            for hierarchy in HIERARCHIES {
                let how = how(seed, sizes, hierarchy);
                println!("case {seed} on {sizes:?}: {how:?}");
                check(&job, how, seed, &Across { gpus: &gpus, of: &of });
            }
        }
    }
}

/// Many tokens, of which some ranks have none, with more choices than registers hold.
#[test]
fn many_tokens_and_choices_equal_the_oracle() {
    let Some(gpus) = Gpus::new(4, 128 << 20) else { return };
    for (seed, topk) in [(1, 10), (2, 3), (3, 10), (6, 3)] {
        let job = JobSpec {
            ranks: 4,
            experts: 21,
            topk,
            units: 12,
            placement: PlacementSpec::Contiguous,
            alignment: 8,
            tokens: vec![613, 0, 130, 257],
            masked_percent: 10,
            routing: [Routing::Uniform, Routing::Skewed][seed as usize % 2],
            weights: true,
            ..JobSpec::random(seed)
        };
        let sizes: &[usize] = [&[2, 2][..], &[1, 3]][seed as usize % 2];
        let of = Nodes::Sizes(sizes).of(4);
        let how = how(seed, sizes, Hierarchy::Node);
        check(&job.build(), how, seed, &Across { gpus: &gpus, of: &of });
    }
}

/// Runs `f` on ranks of the small layer in these nodes.
fn across<T: Send>(
    gpus: &Gpus,
    of: &[usize],
    timeout: Duration,
    builder: &EpBuilder,
    f: impl Fn(Rank<'_>) -> T + Sync,
) -> Vec<T> {
    let across = Across { gpus, of };
    let placed = |rank| {
        let builder = builder.clone().hierarchy(Hierarchy::Node);
        across.place(rank, of.len(), builder).lanes(2).timeout(timeout)
    };
    eps_of(of.len(), &placed, |ep| f(Rank::new(gpus, ep)))
}

const TIMEOUT: Duration = Duration::from_secs(20);

fn node_reduced() -> CombineOpts {
    CombineOpts { precision: Precision::NodeReduced, ..plain() }
}

/// Ranks of a node that are not neighbours, also as a lone one among others.
#[test]
fn dropped_halves_and_cached_handles_leave_the_group_usable() {
    let Some(gpus) = gpus() else { return };
    for of in [&[0, 1, 0, 1][..], &[1, 0, 0]] {
        across(&gpus, of, TIMEOUT, &builder(), |rank| {
            rank.drop_halves_and_use_handles(&opts(0), &node_reduced());
        });
    }
}

#[test]
fn bad_ids_and_rows_that_do_not_fit_are_the_same_error_everywhere() {
    let Some(gpus) = gpus() else { return };
    across(&gpus, &[0, 0, 1], TIMEOUT, &builder(), |rank| {
        rank.bad_ids_are_refused(&[opts(0), capacity()]);
    });
    // Rank 2 forwards what ranks 0 and 1 send to its node.
    let narrow = EpBuilder::new(shape().max_forward_rows(3));
    across(&gpus, &[0, 0, 1], TIMEOUT, &narrow, |rank| {
        rank.load(&Tokens::new(rank.ep.rank(), 8));
        let e = rank.dispatch(8, &opts(0)).unwrap_err();
        let EpError::Capacity { setting, reserved, needed, .. } = e else { panic!("{e}") };
        assert_eq!((setting, reserved), ("max_forward_rows", 3));
        assert!(needed > 3);
        rank.load(&Tokens::new(rank.ep.rank(), 1));
        let result = rank.dispatch(1, &opts(0)).unwrap();
        rank.combine(result, &node_reduced()).unwrap().wait(LIMIT).unwrap();
        rank.check(&Tokens::new(rank.ep.rank(), 1));
    });
}

/// Where all ranks are one node nothing crosses, and nodes' sums are the sums.
#[test]
fn one_node_is_a_flat_layer() {
    let Some(gpus) = gpus() else { return };
    across(&gpus, &[0, 0], TIMEOUT, &builder(), |rank| {
        let tokens = Tokens::new(rank.ep.rank(), 5);
        rank.load(&tokens);
        let layout = Layout::ExpertMajor { alignment: 4 };
        let result = rank.dispatch(5, &DispatchOpts { layout, ..opts(0) }).unwrap();
        drop(result);
        let result = rank.dispatch(5, &opts(0)).unwrap();
        rank.combine(result, &node_reduced()).unwrap().wait(LIMIT).unwrap();
        rank.check(&tokens);
    });
    let apart = Across { gpus: &gpus, of: &[0, 1] };
    let placed = |rank| apart.place(rank, 2, builder());
    eps_of(2, &placed, |ep| {
        let rank = Rank::new(&gpus, ep);
        rank.load(&Tokens::new(rank.ep.rank(), 2));
        let result = rank.dispatch(2, &opts(0)).unwrap();
        let refused = rank.combine(result, &node_reduced());
        assert_argument(refused.map_err(EpError::from), "Hierarchy::Node");
    });
}

#[test]
fn a_rank_that_stops_is_named_and_a_new_group_works() {
    let Some(gpus) = gpus() else { return };
    let through = AtomicUsize::new(0);
    across(&gpus, &[0, 0, 1], STOPS, &builder(), |rank| rank.one_stops(&opts(0), &through));
    across(&gpus, &[0, 0, 1], TIMEOUT, &builder(), |rank| rank.round_trip());
}
