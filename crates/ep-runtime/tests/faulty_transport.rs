//! Dispatch and combine over a transport that delays, reorders and fails: the bits stay the same,
//! and every failure is an error on every rank in time.

mod common;

use std::time::{Duration, Instant};

use common::eps;
use common::small::{PROMPT, Tokens, combine, shape};
use ep_runtime::{
    CombineOpts, DispatchOpts, Ep, EpBuilder, EpError, ErrorKind, Layout, Queue, ThreadTransport,
};
use ep_transport::{Failure, FaultyTransport};

const WORLD: usize = 3;

fn faulty(seed: u64) -> FaultyTransport<ThreadTransport> {
    FaultyTransport::new(ThreadTransport::new().bulk(true), seed)
}

/// Steps in both layouts with two operations in flight; the bytes of all that came.
fn work(ep: &Ep, steps: usize) -> Result<Vec<u8>, EpError> {
    let queue = Queue::host();
    let mut all = Vec::new();
    for step in 0..steps {
        let layout = match step % 2 {
            0 => Layout::RankMajor,
            _ => Layout::ExpertMajor { alignment: 4 },
        };
        let send = |lane: usize, tokens: &Tokens| {
            let opts = DispatchOpts { lane, layout, ..DispatchOpts::default() };
            ep.dispatch_send(&queue, tokens.payload(), tokens.route(), &opts)
        };
        let many = Tokens::new(ep.rank() + step, (step * 5 + ep.rank() * 3) % 17);
        let few = Tokens::new(ep.rank() * 7 + step, ep.rank() % 2);
        let (first, second) = (send(0, &many)?, send(1, &few)?);
        let (second, first) = (second.recv(&queue)?, first.recv(&queue)?);
        for result in [first, second] {
            for row in 0..result.num_rows() {
                all.extend_from_slice(result.rows().payload().bytes(row));
            }
            let out = combine(result, &CombineOpts::default())?;
            all.extend(out.iter().flat_map(|x| x.to_le_bytes()));
        }
    }
    Ok(all)
}

#[test]
fn the_bits_are_those_of_a_transport_in_order() {
    const STEPS: usize = 12;
    let run = |builder: EpBuilder| eps(WORLD, &builder, |ep| work(&ep, STEPS).expect("no error"));
    let expected = run(EpBuilder::new(shape()));
    assert!(expected.iter().all(|bytes| !bytes.is_empty()));
    for seed in 0..6 {
        // The odd seeds delay few operations, but those for long.
        let (share, longest) = if seed % 2 == 0 { (0.5, 1) } else { (0.03, 20) };
        let transport = faulty(seed).delays(share, Duration::from_millis(longest));
        let found = run(EpBuilder::new(shape()).transport(transport));
        assert!(found == expected, "seed {seed} gives other bytes");
    }
}

/// Works until `failure` befalls rank 1; every rank's error, which none of them waits long for.
#[track_caller]
fn errors(timeout: Duration, failure: Failure, share: f64, after: u64) -> Vec<EpError> {
    let transport = faulty(after).delays(share, Duration::from_millis(1)).fail(1, after, failure);
    let builder = EpBuilder::new(shape()).timeout(timeout).transport(transport);
    eps(WORLD, &builder, |ep| {
        ep.group().barrier().expect("all are built");
        let began = Instant::now();
        let error = work(&ep, 1000).expect_err("there is a failure");
        let took = began.elapsed();
        assert!(took < PROMPT, "{failure:?}: {error} after {took:?}");
        assert!(!error.group_usable(), "{failure:?}: {error}");
        // The group stays failed, and says so at once.
        let began = Instant::now();
        work(&ep, 1).expect_err("the group has failed");
        assert!(began.elapsed() < PROMPT, "{failure:?}: the second error is late");
        error
    })
}

#[test]
fn failures_with_an_error_reach_every_rank() {
    for failure in [Failure::PutError, Failure::SignalError, Failure::LinkDown] {
        // At once, or found by whoever carries out what is late; early and in the middle.
        for (share, after) in [(0.0, 0), (1.0, 0), (0.0, 37), (0.5, 38)] {
            let errors = errors(Duration::from_secs(60), failure, share, after);
            let told = errors.iter().all(|error| error.to_string().contains("injected after"));
            assert!(told, "{failure:?}, {share}, {after}: {errors:?}");
        }
    }
}

#[test]
fn losses_without_an_error_are_time_outs() {
    for failure in [Failure::PutLost, Failure::SignalLost] {
        for (share, after) in [(0.0, 0), (0.5, 41)] {
            let errors = errors(Duration::from_secs(1), failure, share, after);
            let late = errors.iter().any(|error| error.kind() == ErrorKind::Timeout);
            assert!(late, "{failure:?}, {share}, {after}: {errors:?}");
            assert!(errors.iter().all(|error| error.peer().is_some()), "{errors:?}");
        }
    }
}
