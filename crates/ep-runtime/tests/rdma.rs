//! Dispatch and combine over RDMA verbs. These tests need two RDMA devices that reach each other,
//! `rxe0` and `rxe1`, and change what their link does to packets: `cargo xtask test --only rdma`
//! runs them in a virtual machine.

mod common;

use std::process::Command;
use std::time::Duration;

use common::exercise::{How, check};
use common::ground::{Ground, Grounds, Hosts};
use common::{Nodes, jobs};
use ep_bench::oracle::{Float, JobSpec, Mode};
use ep_runtime::{Ep, EpBuilder, Hierarchy, MoeShape, RdmaTransport};

/// With an emulated CPU a peer may not run for long: packets have three seconds.
fn verbs(device: usize, node: usize) -> RdmaTransport {
    let device = format!("rxe{}", device % 2);
    RdmaTransport::new().devices(&[&device]).node(node as u64).ack_timeout(17)
}

/// Each rank is a node of its own.
fn apart(builder: EpBuilder, rank: usize) -> EpBuilder {
    builder.transport(verbs(rank, rank))
}

/// Nodes of two ranks, which share memory: direct and bulk peers in one call.
fn pairs(builder: EpBuilder, rank: usize) -> EpBuilder {
    builder.transport(verbs(rank / 2, rank / 2))
}

/// Those nodes: one starts at every rank of an even number.
const PAIRS: Nodes = Nodes::Cut(0x5555_5555_5555_5555);

/// Ranks of this process over RDMA.
struct Verbs(fn(EpBuilder, usize) -> EpBuilder);

impl Grounds for Verbs {
    fn place(&self, rank: usize, _world: usize, builder: EpBuilder) -> EpBuilder {
        (self.0)(builder, rank).timeout(Duration::from_secs(60))
    }

    fn ground(&self, rank: usize, world: usize) -> Box<dyn Ground + '_> {
        Hosts.ground(rank, world)
    }
}

/// What the README shows of RDMA, compiled: a documentation test cannot depend on a feature without
/// lines that readers of the file would see.
fn readme(shape: MoeShape) -> Result<Ep, Box<dyn std::error::Error>> {
    // README
    use ep_runtime::{EpBuilder, Group, RdmaTransport, Rendezvous};

    let group = Group::from_env(&Rendezvous::from_env()?)?; // EP_RANK, EP_WORLD, EP_RENDEZVOUS
    let ep = EpBuilder::new(shape).transport(RdmaTransport::from_env()?).build(&group)?;
    // README
    Ok(ep)
}

#[test]
fn the_readme_shows_what_is_compiled() {
    let _: fn(MoeShape) -> Result<Ep, Box<dyn std::error::Error>> = readme;
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let here = include_str!("rdma.rs").split("// README\n").nth(1).expect("the lines above");
    let readme = include_str!("../../../README.md");
    assert!(words(readme).contains(&words(here)), "the README differs from: {here}");
}

/// Random jobs over nodes that `over` makes and `nodes` describes, flat and crossing nodes once.
fn random_jobs(seeds: std::ops::Range<u64>, over: fn(EpBuilder, usize) -> EpBuilder, nodes: Nodes) {
    for seed in seeds {
        let mode = [Mode::RankMajor, Mode::ExpertExact, Mode::ExpertReduced][seed as usize % 3];
        let hierarchy = [Hierarchy::Flat, Hierarchy::Node][(seed / 3) as usize % 2];
        let reducible = mode != Mode::ExpertReduced && hierarchy == Hierarchy::Node;
        let bit = |n: u64| seed >> n & 1 == 1;
        let how = How {
            mode,
            float: Float::ALL[(seed / 3) as usize % 3],
            weighted: bit(0) && mode != Mode::RankMajor,
            biases: (seed % 3) as usize,
            capacity: bit(1),
            nodes,
            hierarchy,
            node_reduced: seed % 2 == 0 && reducible,
            narrow_ids: bit(2),
        };
        check(&JobSpec::random(seed).build(), how, seed, &Verbs(over));
    }
}

#[test]
#[ignore = "needs RDMA devices"]
fn every_shape_equals_the_oracle() {
    random_jobs(0..12, apart, Nodes::Bulk);
    random_jobs(12..36, pairs, PAIRS);
}

/// Not a test of its own: what copies run.
#[test]
fn copies_of_this_binary() {
    jobs::copy(apart);
}

#[test]
#[ignore = "needs RDMA devices"]
fn processes_get_the_bits_that_threads_get() {
    jobs::get_the_bits_of_threads(2);
    jobs::get_the_bits_of_threads(4);
}

#[test]
#[ignore = "needs RDMA devices"]
fn survivors_of_a_killed_rank_name_it() {
    jobs::survivors_name_the_killed();
}

fn netem(what: Option<&str>) {
    for veth in ["veth0", "veth1"] {
        let (verb, what) = what.map_or(("del", ""), |what| ("replace", what));
        let netem = if what.is_empty() { "root" } else { "root netem" };
        let line = format!("qdisc {verb} dev {veth} {netem} {what}");
        let status = Command::new("tc").args(line.split_whitespace()).status().expect("tc");
        assert!(status.success(), "tc {line}");
    }
}

#[test]
#[ignore = "needs RDMA devices"]
fn lost_doubled_and_reordered_packets_change_no_bit() {
    netem(Some("delay 1ms loss 1% duplicate 1% reorder 5%"));
    // Packets are sent again after their time-out: a shorter one, as nothing here is far.
    let eager: fn(EpBuilder, usize) -> EpBuilder =
        |builder, rank| builder.transport(verbs(rank, rank).ack_timeout(16));
    random_jobs(36..40, eager, Nodes::Bulk);
    netem(None);
}
