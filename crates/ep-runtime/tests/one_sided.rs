//! What only one rank does wrong, or only one rank suffers, and what the others see of it.

mod common;

use std::sync::Arc;
use std::time::Instant;

use common::small::{
    HIDDEN, PROMPT, TOPK, Tokens, builder, combine, dispatch, opts, round_trip, shape,
};
use common::{eps, ranks};
use ep_runtime::{
    CombineOpts, Deadline, DispatchOpts, EpBuilder, EpError, ErrorKind, Group, Layout, Link,
    Mapping, PayloadKind, Queue, Reach, RowsMut, ScaleKind, ThreadTransport, Transport,
    TransportError, WindowSpec, dispatch_all,
};
use ep_transport::ForwardLink;

#[test]
fn a_refused_combine_gives_the_result_back() {
    eps(2, &builder(), |ep| {
        let queue = Queue::host();
        let tokens = Tokens::new(ep.rank(), 3);
        let result = dispatch(&ep, &tokens, &opts(0)).unwrap();
        let result = if ep.rank() == 1 {
            // Three mistakes that the other rank does not make.
            let mut short = vec![0.0f32; HIDDEN];
            let out = RowsMut::new(&mut short, HIDDEN).unwrap();
            let e = result.combine(&queue, out, &CombineOpts::default()).unwrap_err();
            assert_eq!((e.kind(), e.group_usable()), (ErrorKind::Argument, true));
            let weighted = CombineOpts { weighted: true, ..CombineOpts::default() };
            let e = e.into_result().expect("not announced").combine_send(&queue, &weighted);
            let e = e.unwrap_err();
            let nowhere = CombineOpts { lane: Some(9), ..CombineOpts::default() };
            let e = e.into_result().expect("not announced").combine_send(&queue, &nowhere);
            e.unwrap_err().into_result().expect("not announced")
        } else {
            result
        };
        combine(result, &CombineOpts::default()).expect("the right call still counts");
        round_trip(&ep);
    });
}

#[test]
fn a_rank_that_cannot_be_built_is_named_at_once() {
    let began = Instant::now();
    let errors = ranks(3, |group| {
        let lanes = if group.rank() == 2 { 65 } else { 2 };
        let max_tokens = if group.rank() == 1 { usize::MAX } else { 16 };
        let tokens = EpBuilder::new(shape().max_tokens(max_tokens));
        (builder().lanes(lanes).build(&group).unwrap_err(), tokens.build(&group).unwrap_err())
    });
    assert!(began.elapsed() < PROMPT);
    for (lanes, tokens) in errors {
        assert!(lanes.to_string().contains("`lanes`: rank 0 has 2; rank 2 has 65"), "{lanes}");
        assert!(tokens.to_string().contains("`max_tokens`: rank 0 has 16; rank 1"), "{tokens}");
    }
}

#[test]
fn ready_tells_of_a_failure_too() {
    eps(2, &builder(), |ep| {
        let tokens = Tokens::new(ep.rank(), 3);
        let queue = Queue::host();
        let sent = ep.dispatch_send(&queue, tokens.payload(), tokens.route(), &opts(0)).unwrap();
        let sent = sent.recv(&queue).unwrap().combine_send(&queue, &CombineOpts::default());
        let sent = sent.unwrap();
        ep.group().barrier().unwrap();
        if ep.rank() == 1 {
            ep.group().abort("enough");
            std::mem::forget(sent);
            return;
        }
        let in_time = |at: Instant| at.elapsed() < PROMPT;
        let began = Instant::now();
        while !sent.ready() && in_time(began) {}
        let mut out = vec![0.0f32; 3 * HIDDEN];
        let e = loop {
            // Rows were announced before the abort; the news may come during the wait.
            match ep.group().health().fault() {
                None if in_time(began) => std::thread::yield_now(),
                _ => break dispatch(&ep, &tokens, &opts(1)).unwrap_err(),
            }
        };
        assert!(!e.group_usable(), "{e}");
        let _ = sent.recv(&queue, RowsMut::new(&mut out, HIDDEN).unwrap());
    });
}

#[test]
fn one_thread_that_cannot_start_all_ranks_starts_none() {
    let all: Vec<_> = eps(3, &builder(), |ep| ep);
    let tokens: Vec<Tokens> = (0..3).map(|r| Tokens::new(r, 2)).collect();
    let queue = Queue::host();
    let calls: Vec<_> =
        all.iter().zip(&tokens).map(|(ep, t)| (ep, t.payload(), t.route())).collect();
    let handle = dispatch_all(&queue, &calls, &opts(0)).unwrap()[2].handle().clone();
    let held: Vec<_> = (0..3).map(|_| all[2].combine_slot(&handle, &queue).unwrap()).collect();
    let e = dispatch_all(&queue, &calls, &opts(0)).unwrap_err();
    assert!(matches!(e, EpError::NoFreeSlot { .. }), "{e}");
    drop(held);
    dispatch_all(&queue, &calls, &opts(0)).expect("nobody had announced anything");
}

#[test]
fn slots_of_dropped_dispatches_come_back_on_any_lane() {
    eps(2, &builder().slots(1), |ep| {
        let tokens = Tokens::new(ep.rank(), 3);
        let queue = Queue::host();
        for _ in 0..50 {
            let sent = ep.dispatch_send(&queue, tokens.payload(), tokens.route(), &opts(0));
            drop(sent.unwrap());
            // All rows have been written once both ranks are here.
            ep.group().barrier().unwrap();
            combine(dispatch(&ep, &tokens, &opts(1)).unwrap(), &CombineOpts::default()).unwrap();
        }
    });
}

/// Rows behind the last have no ids in memory either, whatever was in the slot before.
#[test]
fn capacity_marks_the_rows_behind_the_last() {
    let fp8 = PayloadKind::Fp8 { scales: ScaleKind::F32 };
    eps(2, &EpBuilder::new(shape().payload(fp8)).slots(1), |ep| {
        for (i, count) in [16, 3, 9, 0, 5, 16, 1].into_iter().enumerate() {
            let tokens = Tokens::new(ep.rank(), count);
            let layout = match i % 3 {
                2 => Layout::ExpertMajor { alignment: 4 },
                _ => Layout::RankMajor,
            };
            let opts = DispatchOpts { layout, capacity: true, ..DispatchOpts::default() };
            let mut result = dispatch(&ep, &tokens, &opts).unwrap();
            let rows = result.rows();
            assert!(rows.len() > result.num_rows());
            for row in result.num_rows()..rows.len() {
                assert_eq!(rows.source(row), None);
                assert!(rows.weights().get(row).iter().all(|&w| w == 0.0), "row {row}");
                if let Some(ids) = rows.topk_ids() {
                    assert_eq!(ids.get(row), [-1; TOPK], "row {row}");
                }
            }
            let rows = result.num_rows();
            let mut outputs = result.rows_mut(PayloadKind::F32).unwrap();
            assert_eq!(outputs.payload().len(), rows);
            (0..rows).for_each(|row| outputs.weights(row).fill(f32::NAN));
        }
    });
}

/// A transport that does not keep its word about windows.
#[derive(Clone, Debug)]
struct Liar {
    inner: ThreadTransport,
    lie: Lie,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    AllAreMapped,
    SmallWindow,
    OneSided,
}

#[derive(Debug)]
struct LiarLink {
    inner: Arc<dyn Link>,
    lie: Lie,
    rank: usize,
}

impl Transport for Liar {
    fn name(&self) -> &'static str {
        "liar"
    }

    fn maps_all_peers(&self) -> bool {
        self.lie != Lie::OneSided
    }

    fn open(
        &self,
        group: &Group,
        spec: WindowSpec,
        deadline: Deadline,
    ) -> Result<Arc<dyn Link>, TransportError> {
        let inner = self.inner.open(group, spec, deadline)?;
        Ok(Arc::new(LiarLink { inner, lie: self.lie, rank: group.rank() }))
    }
}

// SAFETY: it is not what it must be, which is what the test wants to be noticed before it matters.
unsafe impl ForwardLink for LiarLink {
    fn inner(&self) -> &dyn Link {
        &*self.inner
    }

    fn window(&self) -> Mapping {
        let Mapping { base, bytes } = self.inner.window();
        Mapping { base, bytes: if self.lie == Lie::SmallWindow { bytes / 2 } else { bytes } }
    }

    fn reach(&self, peer: usize) -> Reach {
        match self.lie {
            Lie::OneSided if self.rank == 0 && peer == 1 => Reach::Bulk,
            _ => self.inner.reach(peer),
        }
    }
}

#[test]
fn transports_that_contradict_themselves_are_refused_on_every_rank() {
    for (lie, bulk, needle) in [
        (Lie::AllAreMapped, true, "not mapped"),
        (Lie::SmallWindow, false, "bytes of"),
        (Lie::OneSided, false, "only one maps the other"),
    ] {
        let liar = Liar { inner: ThreadTransport::new().bulk(bulk), lie };
        for e in ranks(3, |group| builder().transport(liar.clone()).build(&group).unwrap_err()) {
            assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
            assert!(e.to_string().contains(needle), "{lie:?}: {e}");
        }
    }
}
