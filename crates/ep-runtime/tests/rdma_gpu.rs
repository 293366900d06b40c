//! Layers on GPUs over RDMA verbs: ranks of a node map each other, ranks of others go by the NICs. These
//! tests need the devices `rxe0` and `rxe1`, as those of `tests/rdma.rs` do, and GPUs, for which the
//! project's emulated ones will do: `cargo xtask test --only rdma` runs them in a virtual machine that has
//! both. Soft-RoCE takes no dma-buf, so the windows are in page-locked memory of the host there. Without
//! libcuda each says so and passes.

mod common;

use std::process::Command;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use common::exercise::{How, check};
use common::gpu::Gpus;
use common::gpu_small::{Graph, LIMIT, Rank, STOPS, capacity, plain};
use common::ground::{Ground, Grounds};
use common::jobs::{PROMPT, TASK, TIMEOUT, VICTIM, dies, said, start};
use common::small::{Tokens, assert_argument, builder, opts};
use common::{Nodes, eps_of};
use ep_bench::oracle::{JobSpec, Mode};
use ep_runtime::{
    CombineOpts, DispatchOpts, EpBuilder, EpError, Group, Hierarchy, NvlinkTransport, Precision,
    RdmaTransport, Rendezvous, Tuning,
};

/// The ranks of a test, each on a GPU of its own or with those of its node.
const RANKS: usize = 4;
/// Rows of a rank.
const BYTES: usize = 32 << 20;
/// SMs for communication: an emulated GPU of an emulated machine takes its time for each.
const SMS: u32 = 2;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

/// GPUs for so many nodes.
fn gpus(nodes: usize) -> Option<Gpus> {
    let gpus = Gpus::new(RANKS, BYTES)?.tuned(Tuning::default(), SMS);
    if gpus.count() < nodes {
        eprintln!("skipped: {} GPUs, this needs {nodes}", gpus.count());
        return None;
    }
    Some(gpus)
}

/// Ranks in nodes, `of` by rank.
struct Over<'a> {
    gpus: &'a Gpus,
    of: &'a [usize],
}

fn transport(node: usize, ordinal: usize) -> RdmaTransport {
    let device = format!("rxe{}", node % 2);
    // With an emulated CPU a peer may not run for long: packets have three seconds.
    RdmaTransport::new().devices(&[&device]).node(node as u64).cuda(ordinal).ack_timeout(17)
}

impl Grounds for Over<'_> {
    fn place(&self, rank: usize, world: usize, builder: EpBuilder) -> EpBuilder {
        let builder = self.gpus.place(rank, world, builder).timeout(LIMIT);
        builder.transport(transport(self.of[rank], rank % self.gpus.count()))
    }

    fn ground(&self, rank: usize, world: usize) -> Box<dyn Ground + '_> {
        self.gpus.ground(rank, world)
    }
}

/// Random jobs over nodes of these sizes, by seed: as many as `EP_TEST_CASES` says from `EP_TEST_FIRST`
/// on, or `cases` from `first` on.
fn random_jobs((first, cases): (u64, u64), sizes: &'static [usize], hierarchies: &[Hierarchy]) {
    let Some(gpus) = gpus(RANKS) else { return };
    let of = Nodes::Sizes(sizes).of(sizes.iter().sum());
    let first = number("EP_TEST_FIRST", first);
    for seed in first..first + number("EP_TEST_CASES", cases) {
        let job = JobSpec { ranks: of.len(), ..JobSpec::random(seed) }.build();
        for &hierarchy in hierarchies {
            let how = How::of(seed);
            let reducible = how.mode != Mode::ExpertReduced && hierarchy == Hierarchy::Node;
            let node_reduced = reducible && (seed / 2).is_multiple_of(2);
            let how = How { nodes: Nodes::Sizes(sizes), hierarchy, node_reduced, ..how };
            let start = Instant::now();
            check(&job, how, seed, &Over { gpus: &gpus, of: &of });
            println!("case {seed} on {sizes:?}, {:?}: {how:?}", start.elapsed());
        }
    }
}

#[test]
#[ignore = "needs RDMA devices and GPUs"]
fn ranks_that_are_nodes_equal_the_oracle() {
    random_jobs((1, 1), &[1, 1, 1], &[Hierarchy::Flat]);
}

#[test]
#[ignore = "needs RDMA devices and GPUs"]
fn nodes_of_two_equal_the_oracle() {
    random_jobs((4, 1), &[2, 2], &[Hierarchy::Node]);
    random_jobs((6, 1), &[1, 2], &[Hierarchy::Flat]);
}

/// Runs `f` on ranks of the small layer in these nodes.
fn across<T: Send>(
    gpus: &Gpus,
    of: &[usize],
    timeout: Duration,
    hierarchy: Hierarchy,
    f: impl Fn(Rank<'_>) -> T + Sync,
) -> Vec<T> {
    let over = Over { gpus, of };
    let placed = |rank| {
        let builder = builder().hierarchy(hierarchy);
        over.place(rank, of.len(), builder).lanes(2).timeout(timeout)
    };
    eps_of(of.len(), &placed, |ep| f(Rank::new(gpus, ep)))
}

fn node_reduced() -> CombineOpts {
    CombineOpts { precision: Precision::NodeReduced, ..plain() }
}

/// Ranks of a node that are not neighbours, and a lone one.
#[test]
#[ignore = "needs RDMA devices and GPUs"]
fn dropped_halves_and_cached_handles_leave_the_group_usable() {
    let Some(gpus) = gpus(2) else { return };
    across(&gpus, &[0, 1, 0], LIMIT, Hierarchy::Node, |rank| {
        rank.drop_halves_and_use_handles(&opts(0), &node_reduced());
    });
}

#[test]
#[ignore = "needs RDMA devices and GPUs"]
fn bad_ids_are_the_same_error_everywhere_and_captures_are_refused() {
    let Some(gpus) = gpus(2) else { return };
    across(&gpus, &[0, 1], LIMIT, Hierarchy::Flat, |rank| {
        rank.round_trip();
        rank.bad_ids_are_refused(&[opts(0), capacity()]);
        let graph = Graph::capture(rank.gpu.stream(), || {
            assert_argument(rank.dispatch(4, &capacity()), "cannot be captured");
        });
        drop(graph);
        rank.round_trip();
    });
}

/// It stays in the group, so that nobody hears of it but by its absence.
#[test]
#[ignore = "needs RDMA devices and GPUs"]
fn a_rank_that_stops_is_named_and_a_new_group_works() {
    let Some(gpus) = gpus(2) else { return };
    let of = [0, 1, 0];
    let through = AtomicUsize::new(0);
    across(&gpus, &of, STOPS, Hierarchy::Flat, |rank| rank.one_stops(&opts(0), &through));
    across(&gpus, &of, LIMIT, Hierarchy::Flat, |rank| rank.round_trip());
}

/// Not a test of its own: what copies run.
#[test]
fn copies_of_this_binary() {
    let Ok(phase) = std::env::var(TASK) else { return };
    let rendezvous = Rendezvous::from_env().expect("the parent's environment");
    let rank = rendezvous.rank();
    let gpus = Gpus::of(rank..rank + 1, BYTES).expect("a GPU").tuned(Tuning::default(), SMS);
    let group = Group::from_env(&rendezvous).expect("a group").with_timeout(TIMEOUT).unwrap();
    let builder = gpus.place(rank, group.world(), builder()).timeout(TIMEOUT);
    let ep =
        builder.transport(transport(rank % 2, rank % gpus.count())).build(&group).expect("build");
    let rank = Rank::new(&gpus, ep);
    rank.round_trip();
    group.barrier().unwrap();
    let began = Instant::now();
    let e = until_killed(&rank, &phase).expect_err("a rank was killed");
    let took = began.elapsed().as_millis();
    println!("error peer={:?} usable={} after {took} ms: {e}", e.peer(), e.group_usable());
}

fn until_killed(rank: &Rank<'_>, phase: &str) -> Result<(), EpError> {
    let (me, queue) = (rank.ep.rank(), rank.queue());
    rank.load(&Tokens::new(me, 6));
    let sent = rank.ep.dispatch_send(&queue, rank.payload(6), rank.route(6), &opts(0))?;
    dies(phase, me, "after dispatch_send");
    let result = sent.recv(&queue)?;
    rank.combine(result, &plain())?.wait(LIMIT)?;
    // Whoever was killed at last may have done its part before.
    let result = rank.dispatch(6, &DispatchOpts::default())?;
    rank.combine(result, &plain())?.wait(LIMIT)
}

/// Ranks are processes: two of a node, and the one that is killed of another.
#[test]
#[ignore = "needs RDMA devices and GPUs"]
fn survivors_of_a_killed_rank_name_it() {
    if gpus(2).is_none() {
        return;
    }
    let phase = "after dispatch_send";
    let mut ranks = start(3, phase);
    said(&mut ranks.0[VICTIM], TIMEOUT * 2);
    for (rank, child) in ranks.0.iter_mut().enumerate().filter(|(rank, _)| *rank != VICTIM) {
        let line = said(child, TIMEOUT * 2);
        let name = format!("rank {rank}, victim killed {phase}: {line}");
        println!("{name}");
        assert!(line.contains("error peer=Some(1) usable=false"), "{name}");
        let ms = line.split("after ").nth(1).and_then(|text| text.split(' ').next());
        let took = Duration::from_millis(ms.and_then(|ms| ms.parse().ok()).expect("a number"));
        assert!(took < PROMPT, "{name}: too late");
    }
}

fn netem(what: Option<&str>) {
    for veth in ["veth0", "veth1"] {
        let line = match what {
            Some(what) => format!("qdisc replace dev {veth} root netem {what}"),
            None => format!("qdisc del dev {veth} root"),
        };
        let status = Command::new("tc").args(line.split_whitespace()).status().expect("tc");
        assert!(status.success(), "tc {line}");
    }
}

#[test]
#[ignore = "needs RDMA devices and GPUs"]
fn lost_doubled_and_reordered_packets_change_no_bit() {
    netem(Some("delay 1ms loss 1% duplicate 1% reorder 5%"));
    random_jobs((8, 1), &[1, 1], &[Hierarchy::Flat]);
    netem(None);
}

/// Not over RDMA: all that the tests above have kernels compiled for, where there is a compiler.
#[test]
fn ranks_of_one_host_compile_the_same_kernels() {
    let Some(gpus) = gpus(2) else { return };
    let placed = |rank| {
        let nvlink = NvlinkTransport::new(rank % gpus.count()).nodes(vec![0, 1]);
        let builder = builder().hierarchy(Hierarchy::Node).transport(nvlink);
        gpus.place(rank, 2, builder).lanes(2).timeout(LIMIT)
    };
    eps_of(2, &placed, |ep| Rank::new(&gpus, ep).round_trip());
}
